"""Lines of the program, by which the report names what holds memory and what was made up."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

_PYTHON = sysconfig.get_path("stdlib")
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)


def running_line() -> str:
    """Name the line of the program that is running."""
    frames = traceback.walk_stack(None)
    return name_line((frame.f_code.co_filename, number) for frame, number in frames)


def name_line(frames: Iterable[tuple[str, int]]) -> str:
    """Name the program's own line, after the library's line that it called.

    Args:
        frames: files and line numbers, the innermost first.
    """
    lines, prefix = list[str](), ""
    for file, number in frames:
        is_library = "site-packages" in file
        if f"{_TORCH}/optim/" in file:
            prefix = "optimizer: "
        is_python = file.startswith(_PYTHON) and not is_library
        if not is_python and not file.startswith((_TORCH, _OWN, "<")):
            lines.append(f"{os.path.basename(file)}:{number}")
            if not is_library:
                break
    if not lines:
        return prefix + "backward"
    return prefix + ", from ".join(dict.fromkeys([lines[0], lines[-1]]))
