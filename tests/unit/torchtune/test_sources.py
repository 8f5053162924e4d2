"""What a dataset is made of names its cached lengths: another code or content is another name."""

import importlib
import sys
from functools import partial

import pytest

from adaptive_batch._util import fingerprint
from adaptive_batch.torchtune.sources import sources_of

MODULES = {
    "own_rows": (
        "import own_cutting\nclass Rows:\n    def __init__(self, cut):\n        self.cut = cut\ndef"
        " build():\n    return Rows(own_cutting.cut)\n"
    ),
    "own_cutting": (
        "from own_words import WORDS, number\ndef cut(text):\n    return [number(word) for word in"
        " text.split()][:8]\n"
    ),
    "own_words": "WORDS = 3\ndef number(word):\n    return len(word)\n",
    "own_beside": "UNUSED = 1\n",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def named(*roots):
    return fingerprint(sources_of(*roots))


def dataset():
    importlib.invalidate_caches()
    return importlib.import_module("own_rows").build()


@pytest.mark.parametrize(
    ("changed", "differs"), [*zip(MODULES, (True, True, True, False), strict=True)]
)
def test_the_code_of_a_dataset_and_all_that_it_uses_counts(modules, changed, differs):
    before = named(dataset())
    assert named(dataset()) == before
    with (modules / f"{changed}.py").open("a") as file:
        file.write("# another\n")
    assert (named(dataset()) != before) == differs


def test_what_attributes_name_counts(modules, tmp_path):
    rows, file = dataset(), tmp_path / "rows.txt"
    file.write_text("a")
    rows.source = {"files": [str(file)]}
    before = named(rows)
    file.write_text("b")
    assert named(rows) != before


@pytest.mark.parametrize(
    "wrap",
    [lambda cut: partial(cut), lambda cut: lambda text: cut(text), lambda cut: [{"by": cut}]],
)
def test_functions_are_found_in_what_holds_them(modules, wrap):
    rows = dataset()
    rows.cut = wrap(rows.cut)
    before = named(rows)
    (modules / "own_words.py").write_text("WORDS = 4\n")
    assert named(rows) != before


def test_a_name_in_the_configuration_counts(modules):
    dataset()
    before = named({"_component_": "own_rows.build"})
    (modules / "own_rows.py").write_text("\n")
    assert named({"_component_": "own_rows.build"}) != before


def test_what_is_around_a_dataset_in_circles_has_an_end(modules):
    rows = dataset()
    rows.itself, rows.many = rows, [{"tokens": [number]} for number in range(100_000)]
    assert named(rows) == named(rows)
