"""The examples train the same as without adaptive_batch, with a few more statements.

tests/project/test_commands_of_pages.py runs their page.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes import hosted_store, run, run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# test_one_file.py tests the example that does not import the package.
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {ROOT / "examples" / "one_file.py"})
SNIPPETS = sorted((ROOT / "examples" / "snippets").glob("*.py"))
RANKS = {"fsdp2": 2}
MOST_STATEMENTS = 10


def glue(text: str) -> list[str]:
    """Return the first lines of the statements between the two marks of each part."""
    lines = text.splitlines()
    marks = [number for number, line in enumerate(lines) if line.lstrip().startswith("# ---")]
    parts = list(zip(marks[::2], marks[1::2], strict=True))
    statements = {
        node.lineno - 1 for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)
    }
    return [
        lines[number]
        for number in sorted(statements)
        if any(begin < number < end for begin, end in parts)
    ]


def numbers(output: str, name: str) -> list[float]:
    return [
        float(number) for number in re.search(rf"^{name}: (.*)$", output, re.MULTILINE)[1].split()
    ]


def printed_by(example: Path, *arguments: object) -> str:
    """Run an example in this process; return its output."""
    sys.argv = [str(example), *map(str, arguments)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(example), run_name="__main__")
    return printed.getvalue()


def commanded_sizes(example: Path) -> list[str]:
    """Return the batch sizes in the second command of the example's docstring."""
    return re.search(r"--plain ([\d ]+\d)", example.read_text())[1].split()


def both_outputs(example: Path, other_port: int) -> tuple[str, str]:
    """Return the outputs of the example with adaptive_batch and without, at equal batch sizes."""
    warnings.simplefilter("ignore")
    adaptive = printed_by(example)
    printed = re.search(r"^batch sizes: (.*)$", adaptive, re.MULTILINE)
    os.environ["MASTER_PORT"] = str(other_port)
    sizes = printed[1].split() if printed else commanded_sizes(example)
    return adaptive, printed_by(example, "--plain", *sizes)


@pytest.fixture(scope="module", params=EXAMPLES, ids=lambda path: path.stem)
def outputs(request) -> SimpleNamespace:
    example, store = request.param, hosted_store()
    ended = run(
        *(both_outputs, example, store.port),
        ranks=RANKS.get(example.stem),
        environment=lambda rank: {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
        timeout=300,
    )
    assert [one.exit_status for one in ended] == [0] * len(ended), ended[0].output[-4000:]
    adaptive, plain = ended[0].result
    return SimpleNamespace(example=example, adaptive=adaptive, plain=plain)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_few_statements_of_adaptive_batch(path):
    """No other line names the package or its loop, except to print results."""
    text = path.read_text()
    assert 4 < len(glue(text)) <= MOST_STATEMENTS
    code = re.sub(
        r'""".*?"""|^ *# --- adaptive_batch\n.*?^ *# ---$', "", text, flags=re.DOTALL | re.MULTILINE
    )
    rest = code.splitlines()
    outside = [
        line
        for line in rest
        if re.search(r"adaptive_batch|AdaptiveLoop|\bloop\.(?!batch_size)", line)
    ]
    assert outside == []


def test_an_example_finds_its_bound_and_grows(outputs):
    sizes = numbers(outputs.adaptive, "batch sizes")
    (bound,) = numbers(outputs.adaptive, "max_batch_size")
    assert bound >= 8
    assert sizes == sorted(set(sizes))
    assert len(sizes) == 3
    if outputs.example.stem == "lightning_module":
        assert sizes[-1] == bound  # the bound cuts the growth
    else:
        assert sizes[-1] > bound
        assert sizes == [float(size) for size in commanded_sizes(outputs.example)]
    if "most micro-batches" in outputs.adaptive:
        assert numbers(outputs.adaptive, "most micro-batches of a step") == [-(-sizes[-1] // bound)]


def test_an_example_ends_with_the_loss_of_the_same_training_without_adaptive_batch(outputs):
    (adaptive,), (plain,) = (
        numbers(outputs.adaptive, "final loss"),
        numbers(outputs.plain, "final loss"),
    )
    assert 1.0 < plain < 4.0  # the initial loss is log(256) = 5.5
    assert adaptive == pytest.approx(plain, rel=2e-6)
    if "optimizer steps" in outputs.plain:
        assert numbers(outputs.adaptive, "optimizer steps") == numbers(
            outputs.plain, "optimizer steps"
        )


@pytest.mark.parametrize("path", SNIPPETS, ids=lambda path: path.stem)
def test_a_snippet_runs(path):
    run_python("-W", "ignore", path)
