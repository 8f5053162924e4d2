"""Draws the README's figure from a run of the demo: `make demo`, then `python
docs/tools/readme_figure.py`.

It has two parts of the picture that `adaptive-batch report` draws.
"""

from __future__ import annotations

import sys
from pathlib import Path

from adaptive_batch.report import read_records
from adaptive_batch.report.page import RunData, draw_picture, last_search, run_panels, search_panels
from adaptive_batch.report.run_log import last_run

PICTURE = Path(__file__).resolve().parents[1] / "images" / "demo.png"


def main(output_dir: str = "adaptive_batch_demo/tuned", picture: str | Path = PICTURE) -> None:
    """Draw the last run of a folder.

    Args:
        output_dir: output folder of a run of the demo.
        picture: path of the PNG.
    """
    record = Path(output_dir) / "adaptive_batch"
    run, _ = last_run(read_records(record / "run.jsonl"))
    panels = run_panels(RunData.from_entries(run.entries))
    rows = [panel for panel in panels if panel.title == "Rows per step"]
    search = last_search(run.entries, record / "probe.json")
    assert search is not None, "the run has searched"
    trials = search_panels(search)
    sheet = draw_picture([*trials, *rows], heading="make demo")
    Path(picture).write_bytes(sheet)


if __name__ == "__main__":
    main(*sys.argv[1:])
