"""The site is built with every link checked, and it fetches nothing."""

import re
import shutil

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from support.pages import PAGES, ROOT

SOURCES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff"),
    *("mkdocs.yml", "docs", "benchmarks/results", "examples"),
)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """The files of the site, in a new folder."""
    folder = tmp_path_factory.mktemp("project")
    for source in SOURCES:
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        (folder / source).parent.mkdir(exist_ok=True)
        copy(ROOT / source, folder / source)
    return folder


def build_site(copied, folder, monkeypatch):
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build(load_config(str(copied / "mkdocs.yml"), site_dir=str(folder)))


def test_every_page_is_in_the_navigation_and_fetches_nothing(copied, tmp_path, monkeypatch):
    build_site(copied, tmp_path, monkeypatch)
    first = (tmp_path / "index.html").read_text()
    for page in PAGES:
        name = page.removeprefix("docs/").replace("README", "index").replace(".md", ".html")
        html = (tmp_path / name).read_text()
        assert f'href="{name}"' in first
        fetched = r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"'
        assert re.findall(fetched, html) == []
        for picture in re.findall(r'<img[^>]* src="([^"]*)"', html):
            assert (tmp_path / picture).stat().st_size < 200_000
    reference = (tmp_path / "configuration.html").read_text()
    assert 'id="adaptive_batch.AdaptiveStep.find_bound"' in reference
    assert re.findall(r":(?:class|func|meth|attr|data):", reference) == []
