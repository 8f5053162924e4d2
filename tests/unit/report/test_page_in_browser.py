"""The page of a report, opened in a real Chromium; `pytest -m browser`."""

import shutil
import subprocess

import pytest
from PIL import Image
from support.run_records import NASTY, PROBE, full_records

from adaptive_batch.report import write_report

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_shows_the_picture_and_the_text_of_the_run(tmp_path, width):
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    assert chromium, "no chromium on PATH: apt-get install chromium"
    page, picture = write_report(full_records().write(tmp_path / "run", probe=PROBE))
    shot = tmp_path / "shot.png"
    command = [chromium, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
    size = f"--window-size={width},1600"
    subprocess.run([*command, size, f"--screenshot={shot}", page.as_uri()], check=True, timeout=120)
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], check=True, timeout=120, capture_output=True
    )
    shown = Image.open(shot).convert("RGB")
    assert shown.size[0] == width
    drawn = {
        colour
        for count, colour in Image.open(picture).convert("RGB").getcolors(1 << 24)
        if count > 500
    }
    # The blue of curves, and several others, are seen on the page.
    assert len(drawn & {colour for _, colour in shown.getcolors(1 << 24)}) > 3
    text = done.stdout.decode()
    assert NASTY.replace("<", "&lt;").replace(">", "&gt;").replace("&b", "&amp;b")[:14] in text
    assert "<script" not in text
