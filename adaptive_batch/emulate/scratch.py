"""A folder in which a program runs and writes, while its own folder stays as it is.

The scratch folder has the folders of the program's own, with a link for each file. csrc/scratch.c
replaces a link before its file is written, so the original is never opened for writing.
"""

from __future__ import annotations

import os
from pathlib import Path

# Folders beyond this many entries, such as data sets of small files, are linked as they are.
MAX_ENTRIES = 20_000


def mirror(folder: Path, scratch: Path) -> None:
    """Fill `scratch` with the folders of `folder` and with links to its files."""
    left = MAX_ENTRIES
    pending = [(folder, scratch)]
    seen = set[str]()
    while pending:
        source, target = pending.pop(0)
        target.mkdir(parents=True, exist_ok=True)
        for entry in os.scandir(source):
            left -= 1
            new = target / entry.name
            is_own = Path(entry.path) == scratch or scratch.is_relative_to(entry.path)
            if is_own or new.exists() or new.is_symlink():
                continue
            is_tool = entry.name.startswith(".") or Path(entry.path, "pyvenv.cfg").exists()
            real = os.path.realpath(entry.path)
            if entry.is_dir() and not is_tool and left > 0 and real not in seen:
                seen.add(real)
                pending.append((Path(entry.path), new))
            else:
                new.symlink_to(entry.path)


def written_files(scratch: Path, since: float) -> list[tuple[str, int]]:
    """Return the files, with their sizes, that a program wrote in its scratch folder."""
    files = []
    for folder, _, names in os.walk(scratch):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink() and "__pycache__" not in folder:
                status = path.stat()
                if status.st_mtime >= since:
                    files.append((str(path.relative_to(scratch)), status.st_size))
    return sorted(files)
