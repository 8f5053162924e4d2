"""Runs the notebooks of examples/notebooks and writes their output into them: `make notebooks`.

Warnings and progress bars of libraries are left out.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
SECONDS_PER_CELL = 300


def main() -> None:
    """Run each notebook and write it with its outputs, unless a cell fails."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(path), path)
        print(path.relative_to(Path.cwd()))


def executed(path: Path) -> NotebookNode:
    """Return a notebook as a new run of it leaves it, in an empty folder and without the hub.

    Args:
        path: notebook to run.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # Keep IPython's history out of the user's folder.
        environment = {**os.environ, "IPYTHONDIR": folder, "HF_HUB_OFFLINE": "1"}
        client = NotebookClient(
            notebook,
            timeout=SECONDS_PER_CELL,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute(env=environment)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    # The version of Python in it would change with each machine.
    notebook.metadata.pop("language_info", None)
    return notebook


if __name__ == "__main__":
    main()
