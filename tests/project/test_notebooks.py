"""The notebooks run, and print their committed output."""

import runpy

import nbformat
import pytest
from support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def printed_by(notebook):
    """Return source and outputs of each code cell."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [(cell.source, [output.text for output in cell.outputs]) for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_outputs_and_no_paths_of_a_machine(path):
    notebook = nbformat.read(path, as_version=4)
    outputs = "".join(text for _, texts in printed_by(notebook) for text in texts)
    assert 100 < len(outputs) < 4000
    assert "/" not in outputs.replace("tokens/s", "")
    assert set(notebook.metadata) == {"kernelspec"}
    assert {cell.execution_count for cell in notebook.cells if cell.cell_type == "code"} == set(
        range(1, len(printed_by(notebook)) + 1)
    )


@pytest.mark.readme
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_its_committed_output(path):
    tool = runpy.run_path(str(ROOT / "docs" / "tools" / "notebooks.py"))
    committed = printed_by(nbformat.read(path, as_version=4))
    assert printed_by(tool["executed"](path)) == committed
