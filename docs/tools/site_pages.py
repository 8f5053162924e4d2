"""What the site has beside docs/: README.md is its first page, and files that pages link to lie
where they do in the repository.

Links are written from a file's own place, so that they work where a repository is read. Here they
are turned to where the files lie on the site, and so mkdocs checks every one of them.
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
# Of Markdown, to a file, inline or by a name: no scheme, not only an anchor.
LINK = re.compile(r"(\]\(|^\[\w+\]: )([^)#\s:]+)((?:#[^)\s]*)?(?:\)|$))", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the files outside docs/ that a page links to.

    Args:
        files: of docs/.
        config: of the site.

    Returns:
        The same and the added ones.
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
    """Turn the links of a page.

    Args:
        markdown: of the page.
        page: whose place says where its links begin.
        config: of the site.
        files: of the site.
    """
    return LINK.sub(
        lambda link: link[1] + place_on_site(folder_of(page.file), link[2]) + link[3], markdown
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave the name alone of what a docstring refers to.

    Args:
        html: of the page.
        page: that is built.
        config: of the site.
        files: of the site.
    """
    return ROLE.sub(r"\1", html)


def folder_of(file: File) -> PurePosixPath:
    """Where a page lies in the repository."""
    return PurePosixPath() if file.src_uri in PAGES.values() else PurePosixPath("docs")


def place_on_site(folder: PurePosixPath, target: str) -> str:
    """Where the target of a link lies on the site, seen from its upper folder, in which every
    page lies.

    Args:
        folder: of the page, from the repository's root.
        target: of the link, from there.
    """
    parts: list[str] = []
    for part in (folder / target).parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    path = "/".join(parts)
    return PAGES.get(path, path.removeprefix("docs/"))
