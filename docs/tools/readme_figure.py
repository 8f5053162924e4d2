"""Draws the README's figure from a run of the demo: `make demo`, then `python
docs/tools/readme_figure.py`.

It has two parts of the picture that `adaptive-batch report` draws.
"""

from __future__ import annotations

import sys
from pathlib import Path

from adaptive_batch.report import read_records
from adaptive_batch.report.page import draw_picture, run_panels, search_panel
from adaptive_batch.report.run_log import RECORD, last_run

PICTURE = Path(__file__).resolve().parents[1] / "images" / "demo.png"


def main(output_dir: str = "adaptive_batch_demo/tuned", picture: str | Path = PICTURE) -> None:
    """Draw the last run of a folder.

    Args:
        output_dir: output folder of a run of the demo.
        picture: path of the PNG.
    """
    run, _ = last_run(read_records(Path(output_dir) / RECORD))
    trials = search_panel(run)
    assert trials, "the run has searched"
    rows = run_panels(run)["Rows per step"]
    sheet = draw_picture({**trials, "Rows per step": rows}, heading="make demo")
    Path(picture).write_bytes(sheet)


if __name__ == "__main__":
    main(*sys.argv[1:])
