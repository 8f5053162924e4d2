"""The code of the package stays as easy to read as it was made; CONTRIBUTING says what each figure
is.
"""

import pytest
from support.paths import ROOT
from support.readability import Figures, class_lines, figures_of

# Per 1,000 lines; seven codebases of the field have at most 0.1, 7.1, 1.3 and 1.3.
HIGHEST = {
    "pronouns": 2,
    "conditional_expressions": 12,
    "parallel_assignments": 3,
    "walruses": 2,
}
# A longer class has a second object in it.
LONGEST_CLASS = 300


@pytest.fixture(scope="module")
def figures():
    return figures_of(ROOT / "adaptive_batch", ROOT / "recipes")


@pytest.mark.parametrize(("name", "highest"), HIGHEST.items())
def test_lines_hold_one_decision_and_locals_are_nouns(figures, name, highest):
    assert figures.per_thousand_lines(name) <= highest


def test_blocks_say_why(figures):
    assert figures.per_thousand_lines("comments") >= 20


def test_a_class_has_no_second_object_in_it():
    lines = class_lines(ROOT / "adaptive_batch", ROOT / "recipes")
    too_long = {name: num for name, num in lines.items() if num > LONGEST_CLASS}
    assert too_long == {}


def test_each_figure_counts_what_its_name_says():
    figures = Figures()
    figures.add('"""Doc."""\n# why\nfound = a if b else c\nx, y = 1, 2\nprint(z := 3)  # z\n')
    assert figures == Figures(
        lines=5,
        statements=3,
        pronouns=1,
        conditional_expressions=1,
        parallel_assignments=1,
        walruses=1,
        comments=1,
    )
