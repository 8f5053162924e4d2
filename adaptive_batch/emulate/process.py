"""Emulation in one process of a program: `import torch` loads the emulated CUDA first.

The environment stays as it is. Libraries that torch needs are found by the sonames of those that
are loaded already, so nothing is copied and no driver is opened.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from .build import EmulationError, cuda_build_folder, stub_folder, torch_version


def install() -> None:
    """Prepare this process; torch is not imported."""
    if any(type(finder).__name__ == TorchFinder.__name__ for finder in sys.meta_path):
        return  # by a .pth file, under another name of this module
    sys.meta_path.insert(0, TorchFinder())
    if os.environ.get("EMULATE_SCRATCH"):
        sys.addaudithook(_replace_link_to_database)


def _replace_link_to_database(event: str, arguments: tuple[Any, ...]) -> None:
    """Replace a link before SQLite, which opens the file that it leads to."""
    if event == "sqlite3.connect" and os.path.islink(arguments[0]):
        with suppress(OSError), open(arguments[0], "ab"):
            pass  # csrc/scratch.c replaces the link


class TorchFinder(MetaPathFinder):
    """Finds torch and loads the emulated CUDA before it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        try:
            file = find_cuda_build()
            if file is None:
                return None
            loader = TorchLoader(file, stub_folder(file.parent))
        except EmulationError as error:
            sys.exit(f"adaptive-batch emulate: {error}")
        return importlib.util.spec_from_file_location(name, file, loader=loader)


class TorchLoader(SourceFileLoader):
    """Loads torch between the emulated CUDA and what this package adds to torch.

    Args:
        file: torch's.
        stubs: the folder of the emulated libraries.
    """

    def __init__(self, file: Path, stubs: Path) -> None:
        super().__init__("torch", str(file))
        self.stubs = stubs

    def exec_module(self, module: ModuleType) -> None:
        for library in self.stubs.glob("lib*.so*"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        os.environ["TRITON_LIBCUDA_PATH"] = str(self.stubs)
        sys.path.insert(0, f"{self.stubs}/wheels")
        super().exec_module(module)
        sys.path.remove(f"{self.stubs}/wheels")
        if os.environ.get("EMULATE_VALUES") == "1":
            from . import values

            values.install()
        if os.environ.get("EMULATE_RECORDS"):
            from . import recorder

            recorder.install(Path(os.environ["EMULATE_RECORDS"]))


def find_cuda_build() -> Path | None:
    """Return torch's file: the environment's own, or the CUDA build that replaces a CPU build."""
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    version, cuda = torch_version(file.parent)
    if cuda is not None:
        return file
    folder = cuda_build_folder(version)
    if not folder.is_dir():
        raise EmulationError(
            f"torch {version} is a CPU build: run `adaptive-batch emulate --install` once, which"
            " downloads the CUDA build of this version and leaves the environment as it is"
        )
    sys.path.insert(0, str(folder))
    return folder / "torch/__init__.py"
