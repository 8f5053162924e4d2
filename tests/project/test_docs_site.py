"""The site is built with every link checked, and it fetches nothing."""

import re
import shutil

from mkdocs.commands.build import build
from mkdocs.config import load_config
from support.pages import PAGES, ROOT

SOURCES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff"),
    *("mkdocs.yml", "docs", "benchmarks/results", "examples"),
)


def test_every_page_is_in_the_navigation_and_fetches_nothing(tmp_path, monkeypatch):
    project, site = tmp_path / "project", tmp_path / "site"
    for source in SOURCES:
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        (project / source).parent.mkdir(exist_ok=True)
        copy(ROOT / source, project / source)
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build(load_config(str(project / "mkdocs.yml"), site_dir=str(site)))
    first = (site / "index.html").read_text()
    for page in PAGES:
        name = page.removeprefix("docs/").replace("README", "index").replace(".md", ".html")
        html = (site / name).read_text()
        assert f'href="{name}"' in first
        fetched = r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"'
        assert re.findall(fetched, html) == []
        for picture in re.findall(r'<img[^>]* src="([^"]*)"', html):
            assert (site / picture).stat().st_size < 200_000
    reference = (site / "configuration.html").read_text()
    assert 'id="adaptive_batch.AdaptiveStep.find_bound"' in reference
    assert re.findall(r":(?:class|func|meth|attr|data):", reference) == []
