"""The code may shrink. It grows only with a reason in size.csv."""

import shutil

import pytest
from support.paths import ROOT
from support.size import TABLE, count_code, measure, read_limits, too_large, write_limits


def test_no_package_grows():
    problems = too_large(measure(ROOT), read_limits())
    assert not problems, (
        f"{'; '.join(problems)}. Delete as much elsewhere in it, or raise its limit in"
        " tests/project/size.csv and write the reason into the row"
    )


@pytest.mark.parametrize(
    ("text", "statements", "tokens"),
    [
        ('"""Doc."""\n# why\nx = 1\n', 1, 3),
        ('def f(a):\n    """Doc."""\n    return a  # why\n', 2, 8),
        ('def f():\n    """Doc."""\n', 1, 6),
        ("a = (\n    b,\n    c,\n)\n", 1, 7),
        ("a = (b, c)\n", 1, 7),
        ("x = 1; y = 2\n", 2, 6),
    ],
)
def test_docstrings_comments_and_folds_do_not_count(text, statements, tokens):
    assert count_code(text) == {"statements": statements, "tokens": tokens, "modules": 1}


@pytest.fixture
def checkout(tmp_path):
    for name in ("adaptive_batch/data", "recipes", "tests", "benchmarks"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "adaptive_batch/__init__.py").write_text("a = 1\n")
    (tmp_path / "adaptive_batch/data/__init__.py").write_text("")
    (tmp_path / "adaptive_batch/data/order.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "tests/test_a.py").write_text("# why\n\na = 1\n")
    return tmp_path


def test_each_package_and_the_sum_are_counted(checkout):
    assert measure(checkout) == {
        "data": {"statements": 2, "tokens": 6, "modules": 2},
        "top-level files": {"statements": 1, "tokens": 3, "modules": 1},
        "recipes": {"statements": 0, "tokens": 0, "modules": 0},
        "sum": {"statements": 3, "tokens": 9, "modules": 3},
        "tests": {"lines": 3},
        "benchmarks": {"lines": 0},
    }


def test_growth_and_a_new_package_are_named(checkout):
    counts = measure(checkout)
    limits = {part: {unit: str(n) for unit, n in row.items()} for part, row in counts.items()}
    assert too_large(counts, limits) == []
    (checkout / "adaptive_batch/data/order.py").write_text("a = 1\nb = 2\nc = 3\n")
    (checkout / "adaptive_batch/new").mkdir()
    (checkout / "adaptive_batch/new/__init__.py").write_text("")
    assert too_large(measure(checkout), limits) == [
        "data grew from 2 to 3 statements",
        "data grew from 6 to 9 tokens",
        "new has 0 statements and no row",
        "new has 0 tokens and no row",
        "new has 1 modules and no row",
        "sum grew from 3 to 4 statements",
        "sum grew from 9 to 12 tokens",
        "sum grew from 3 to 4 modules",
    ]


def test_limits_are_lowered_and_never_raised(tmp_path):
    table = tmp_path / "size.csv"
    shutil.copy(TABLE, table)
    before = read_limits(table)
    counts = {
        "data": {"statements": 1, "tokens": 10**9, "modules": 1},
        "tests": {"lines": 10**9},
    }
    write_limits(counts, table)
    assert read_limits(table) == {
        "data": {**before["data"], "statements": "1", "modules": "1"},
        "tests": before["tests"],
    }
