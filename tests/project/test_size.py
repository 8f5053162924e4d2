"""The code may shrink. It grows only with a reason in size.csv."""

import pytest
from support.paths import ROOT
from support.size import count_code, measure, read_limits, too_large


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
