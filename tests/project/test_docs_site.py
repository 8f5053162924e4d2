"""The site is built from the pages, every link and anchor of it is checked, and it
fetches nothing.
"""

import logging
import re
import shutil

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from support.pages import PAGES, ROOT

SOURCES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CITATION.cff",
    "mkdocs.yml",
    "docs",
    "benchmarks/results",
    "examples",
)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """What the site is made of, in a folder of its own."""
    folder = tmp_path_factory.mktemp("project")
    for source in SOURCES:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, folder / source)
        elif (ROOT / source).is_file():
            shutil.copy(ROOT / source, folder / source)
    return folder


def built(copied, folder, texts):
    """Build the site after some text was added to pages; return False where a link is wrong."""
    before = {page: (copied / page).read_text() for page in texts}
    for page, text in texts.items():
        (copied / page).write_text(f"{before[page]}\n{text}\n")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NO_MKDOCS_2_WARNING", "1")
            build(load_config(str(copied / "mkdocs.yml"), site_dir=str(folder)))
    except Abort:
        return False
    finally:
        for page, text in before.items():
            (copied / page).write_text(text)
    return True


# Between the README and pages, in both directions.
RIGHT_LINKS = {
    "README.md": "[x](docs/configuration.md#the-plan) [z](CHANGELOG.md#unreleased)",
    "docs/many_gpus.md": "[x](../README.md#install) [y](../CHANGELOG.md) [z](../mkdocs.yml)",
}


@pytest.fixture(scope="module")
def site(copied, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    assert built(copied, folder, RIGHT_LINKS), "mkdocs build --strict says which link is wrong"
    return folder


def test_every_page_is_on_the_site_in_its_navigation_and_fetches_nothing(site):
    names = {
        path.removeprefix("docs/").replace("README", "index").replace(".md", ".html")
        for path in PAGES
    }
    first = (site / "index.html").read_text()
    for name in names:
        html = (site / name).read_text()
        assert f'href="{name}"' in first
        assert (
            re.findall(
                r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"', html
            )
            == []
        )
        for picture in re.findall(r'<img[^>]* src="([^"]*)"', html):
            assert (site / picture).is_file()
    assert not (site / "tools").exists()


def test_the_reference_is_drawn_from_the_docstrings(site):
    html = (site / "configuration.html").read_text()
    for name in ("AdaptiveStep.find_bound", "StepResult.loss", "SettingError"):
        assert 'id="adaptive_batch.' in html
        assert f'{name}"' in html
    assert re.findall(r":(?:class|func|meth|attr|data):", html) == []


WRONG_LINKS = {
    "README.md": {
        "[x](docs/nowhere.md)": "nowhere.md",
        "[x](docs/configuration.md#no-anchor-of-a-page)": "no-anchor-of-a-page",
    },
    "CONTRIBUTING.md": {"[x](tests/nowhere.py)": "nowhere.py"},
    "CHANGELOG.md": {"[x](#no-anchor-here)": "no-anchor-here"},
    "docs/many_gpus.md": {
        "![x](../benchmarks/results/nowhere.png)": "nowhere.png",
        "[x](configuration.md#no-anchor-beside)": "no-anchor-beside",
        "[x](../README.md#no-anchor-above)": "no-anchor-above",
    },
}


def test_each_link_that_leads_nowhere_is_named_and_fails_the_build(copied, tmp_path, caplog):
    texts = {page: "\n\n".join(links) for page, links in WRONG_LINKS.items()}
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        assert not built(copied, tmp_path, texts)
    warnings = [record.getMessage() for record in caplog.records]
    for page, links in WRONG_LINKS.items():
        for link, said in links.items():
            assert [text for text in warnings if said in text], (page, link)


def test_the_readmes_figure_is_small_and_a_picture():
    (name,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    picture = (ROOT / name).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000
