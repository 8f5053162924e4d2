"""Emulation in one process of a program: `import torch` loads the emulated CUDA first.

The environment is not changed. The loader resolves torch's libraries by the sonames of the loaded
stubs, so nothing is copied and no driver is opened.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from .build import (
    DRIVER,
    MANAGEMENT,
    STUB,
    EmulationError,
    cuda_build_folder,
    extension_library,
    stub_folder,
    torch_version,
)


def install() -> None:
    """Prepare this process without importing torch."""
    if any(type(finder).__name__ == TorchFinder.__name__ for finder in sys.meta_path):
        return  # a .pth file has imported this module under another name
    sys.meta_path.insert(0, TorchFinder())
    if os.environ.get("EMULATE_SCRATCH"):
        sys.addaudithook(_replace_link_to_database)


def _replace_link_to_database(event: str, arguments: tuple[Any, ...]) -> None:
    """Replace a link before SQLite opens its target."""
    if event == "sqlite3.connect" and os.path.islink(arguments[0]):
        with suppress(OSError), open(arguments[0], "ab"):
            pass  # csrc/scratch.c replaces the link


class TorchFinder(MetaPathFinder):
    """Finds torch once and loads the emulated CUDA before it."""

    def __init__(self) -> None:
        self.is_searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch" or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = find_cuda_build()
        except EmulationError as error:
            sys.exit(f"adaptive-batch emulate: {error}")
        finally:
            self.is_searching = False
        if spec is None or spec.loader is None or spec.origin is None:
            return spec
        package = Path(spec.origin).parent
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            try:
                stubs = load_stubs(package)
            except EmulationError as error:
                sys.exit(f"adaptive-batch emulate: {error}")
            sys.path.insert(0, f"{stubs}/wheels")
            execute(module)
            sys.path.remove(f"{stubs}/wheels")
            if os.environ.get("EMULATE_VALUES") == "1":
                from . import values

                values.install()
            if os.environ.get("EMULATE_RECORDS"):
                from . import recorder

                recorder.install(Path(os.environ["EMULATE_RECORDS"]))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def find_cuda_build() -> ModuleSpec | None:
    """Return the spec of torch: that of the environment, or the CUDA build that replaces a CPU
    build.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return spec
    version, cuda = torch_version(Path(spec.origin).parent)
    if cuda is not None:
        return spec
    folder = cuda_build_folder(version)
    if not folder.is_dir():
        raise EmulationError(
            f"torch {version} is a CPU build: run `adaptive-batch emulate --install` once, which"
            " downloads the CUDA build of this version and leaves the environment as it is"
        )
    sys.path.insert(0, str(folder))
    return importlib.util.find_spec("torch")


def load_stubs(package: Path) -> Path:
    """Load the emulated CUDA for the torch in a folder and return its folder."""
    stubs = stub_folder(package)
    sonames = [STUB, DRIVER, MANAGEMENT]
    sonames += [path.name for path in sorted(stubs.glob("lib*.so.*")) if path.name not in sonames]
    libraries = [stubs / name for name in sonames]
    extensions = extension_library(stubs)
    if extensions is not None:
        libraries.append(extensions)
    for library in libraries:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(stubs)
    return stubs
