"""A folder in which a program runs and writes, while its own folder stays as it is.

The scratch folder has the folders of the program's own, with a link for each file. Before a file
is written, its link is removed, so the original is never opened for writing.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

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


def protect_inputs(scratch: Path) -> None:
    """Replace links of the scratch folder before this process writes through them."""
    sys.addaudithook(lambda event, args: _before_event(scratch, event, args))


def protect_from_native_writers() -> None:
    """Do the same for PyTorch's and safetensors' writers, which Python's audit does not see."""
    scratch = Path(os.environ["EMULATE_SCRATCH"])
    torch = sys.modules["torch"]
    _wrap(torch, "save", 1, scratch)
    try:
        safetensors = import_module("safetensors")
    except ModuleNotFoundError:
        return
    _wrap(safetensors, "serialize_file", 1, scratch)


def _wrap(module: Any, name: str, place: int, scratch: Path) -> None:
    write = getattr(module, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        target = args[place] if len(args) > place else kwargs.get("f", kwargs.get("filename"))
        if isinstance(target, str | os.PathLike):
            _detach(scratch, target, keep_content=False)
        return write(*args, **kwargs)

    setattr(module, name, wrapped)


def _before_event(scratch: Path, event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        path, mode, flags = args
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if writes and isinstance(path, str | bytes | os.PathLike):
            is_truncated = flags & os.O_TRUNC or (mode or "").startswith("w")
            _detach(scratch, os.fsdecode(path), keep_content=not is_truncated)
    elif event == "sqlite3.connect" and isinstance(args[0], str | bytes | os.PathLike):
        _detach(scratch, os.fsdecode(args[0]), keep_content=True)


def _detach(scratch: Path, path: str | os.PathLike[str], *, keep_content: bool) -> None:
    link = os.path.abspath(path)
    if not os.path.islink(link) or not link.startswith(f"{scratch}{os.sep}"):
        return
    original = os.path.realpath(link)
    os.unlink(link)
    if keep_content and os.path.isfile(original):
        shutil.copyfile(original, link)
