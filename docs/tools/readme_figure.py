"""Draws the README's figure from a run of the demo: `make demo`, then `python
docs/tools/readme_figure.py`.

It has two of the figures that `adaptive-batch report` draws, on a white ground so that it
can be read on a dark page too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from adaptive_batch.report import read_records
from adaptive_batch.report.drawing import marks_of, to_png
from adaptive_batch.report.page import read_probe
from adaptive_batch.report.run_figures import figures_of
from adaptive_batch.report.run_history import Timeline

NAMES = ("probe", "batch_size")
PICTURE = Path(__file__).resolve().parents[1] / "images" / "demo.png"


def main(output_dir: str = "adaptive_batch_demo/tuned", picture: str | Path = PICTURE) -> None:
    """Draw the last run of a folder.

    Args:
        output_dir: of a run of the demo.
        picture: the PNG that is written.
    """
    record = Path(output_dir) / "adaptive_batch"
    timeline = Timeline.of(read_records(record / "run.jsonl"))
    drawn = {
        figure.name: figure for figure in figures_of(timeline, read_probe(record / "probe.json"))[0]
    }
    figures = [drawn[name] for name in NAMES]
    sheet = to_png(
        figures, heading="make demo", lines=[drawn["probe"].description], events=marks_of(timeline)
    )
    Path(picture).write_bytes(sheet)


if __name__ == "__main__":
    main(*sys.argv[1:])
