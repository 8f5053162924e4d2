"""Adds the pages outside docs/ to the site, and the files that pages link to.

README.md comes first.
Links in the sources work in the repository. Here they are rewritten for the site, so that mkdocs
checks all of them.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
}
# A role of Sphinx before a name, in docstrings that editors show as they are.
ROLE = re.compile(r":(?:func|class|meth|attr|data|mod):(<code>)~?(?:adaptive_batch\.[a-z_.]+\.)?")
# A Markdown link to a file, inline or by a name, without a scheme.
LINK = re.compile(r"(\]\(|^\[\w+\]: )([^)#\s:]+)((?:#[^)\s]*)?(?:\)|$))", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the files outside docs/ that a page links to.

    Args:
        files: files of docs/.
        config: configuration of the site.

    Returns:
        The same files and the added ones.
    """
    for path, name in PAGES.items():
        files.append(
            File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8"))
        )
    for file in list(files.documentation_pages()):
        for link in LINK.finditer(file.content_string):
            place = place_on_site(folder_of(file), link[2])
            if files.get_file_from_path(place) is None and (ROOT / place).is_file():
                files.append(File.generated(config, place, abs_src_path=str(ROOT / place)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page."""
    return LINK.sub(
        lambda link: link[1] + place_on_site(folder_of(page.file), link[2]) + link[3], markdown
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Reduce each Sphinx role in a docstring to the name that it refers to."""
    return ROLE.sub(r"\1", html)


def folder_of(file: File) -> PurePosixPath:
    """Return the folder of a page in the repository."""
    return PurePosixPath() if file.src_uri in PAGES.values() else PurePosixPath("docs")


def place_on_site(folder: PurePosixPath, target: str) -> str:
    """Return the place of a link's target on the site, relative to its root.

    Args:
        folder: folder of the page in the repository.
        target: target of the link, relative to that folder.
    """
    parts: list[str] = []
    for part in (folder / target).parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    path = "/".join(parts)
    return PAGES.get(path, path.removeprefix("docs/"))
