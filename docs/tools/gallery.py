"""Makes what docs/gallery.md shows: `make gallery`, after `make demo`.

Each command of the page is run in a folder that has the demo's. What it prints replaces the block
below it, and pictures that it draws are copied to docs/images.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gallery.md"
DEMO = "adaptive_batch_demo"
# What the commands draw, and the picture of the page.
PICTURES = {
    f"{DEMO}/tuned/adaptive_batch/report.png": "gallery_report.png",
    "estimated/adaptive_batch/estimate.png": "gallery_estimate.png",
}
SHOWN = re.compile(r"```bash\n([^\n]+)\n```\n\n```text\n(.*?)```", re.DOTALL)
# The seconds of a run, which differ each time.
LEFT_OUT = re.compile(r"written to ")


def main() -> None:
    """Run the commands of the page; write its blocks and its pictures."""
    if not (ROOT / DEMO / "tuned").is_dir():
        sys.exit(f"there is no run of the demo in {DEMO}: make demo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / DEMO).symlink_to(ROOT / DEMO)
        page = with_outputs(PAGE.read_text(encoding="utf-8"), folder)
        pictures = {shown: smaller(folder / drawn) for drawn, shown in PICTURES.items()}
    for shown, picture in pictures.items():
        (ROOT / "docs" / "images" / shown).write_bytes(picture)
    PAGE.write_text(page, encoding="utf-8")


def with_outputs(page: str, folder: Path) -> str:
    """Return a page whose blocks below commands have what the commands print.

    Args:
        page: Markdown, in which a block of one command is followed by one of its output.
        folder: working directory of the commands; searches are cached there alone.

    Raises:
        subprocess.CalledProcessError: a command fails.
    """
    scripts = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "ADAPTIVE_BATCH_CACHE": str(folder / "cache"),
    }

    def shown(block: re.Match[str]) -> str:
        command = block[1]
        done = subprocess.run(
            shlex.split(command),
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        lines = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
        text = "\n".join(line for line in lines if not LEFT_OUT.match(line))
        return f"```bash\n{command}\n```\n\n```text\n{text}\n```"

    return SHOWN.sub(shown, page)


def smaller(path: Path) -> bytes:
    """Return a picture as a PNG of 128 colours, which takes a third of the bytes."""
    drawn = io.BytesIO()
    # Other methods drop a colour that few pixels have, such as that of a point.
    picture = (
        Image.open(path)
        .convert("RGB")
        .quantize(128, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    picture.save(drawn, format="png", optimize=True)
    return drawn.getvalue()


if __name__ == "__main__":
    main()
