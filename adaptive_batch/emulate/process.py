"""The emulated CUDA libraries in a process of a program, built at first use.

`import torch` loads these libraries first. The environment is not changed: the loader resolves
torch's libraries by the sonames of the loaded stubs, so nothing is copied and no driver is opened.

libcudastub.so has every function that PyTorch and other packages import from CUDA's libraries. A
function that csrc/ does not define returns 0 and counts its calls. Each CUDA library is an empty
one linked to libcudastub.so. They are compiled from csrc/ and cached for each torch and set of
installed packages.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCES = Path(__file__).with_name("csrc")
OLDEST, NEWEST = (2, 11), (2, 15)

STUB = "libcudastub.so"
PRELOADED = "scratch.c"
_WARNINGS = ("-Wall", "-Wextra", "-Werror", "-fvisibility=hidden")
# PyTorch opens these two by name. The stub of CUDA's runtime is linked to both.
DRIVER, MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"
_FUNCTION = re.compile(
    r"(?:cuda|__cuda|cu[A-Z]|cublas|cudnn|cusolver|cusparse|curand|cufft|nccl|nvml|nvrtc|nvtx"
    r"|cupti|nvshmem|nvJitLink)\w*"
)
_SONAME = re.compile(r"lib(?:cu(?!dastub)|nv|nccl)\w*\.so[.\d]*")


class EmulationError(Exception):
    """The emulation cannot run; the message names the cause."""


def install() -> None:
    """Prepare this process without importing torch."""
    if any(type(finder).__name__ == TorchFinder.__name__ for finder in sys.meta_path):
        return  # a .pth file has imported this module under another name
    sys.meta_path.insert(0, TorchFinder())


class TorchFinder(MetaPathFinder):
    """Finds torch once and loads the emulated CUDA before it."""

    def __init__(self) -> None:
        self.is_searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch" or self.is_searching:
            return None
        # The search below asks all finders, this one too.
        self.is_searching = True
        try:
            spec = find_cuda_build()
            if spec is None or spec.loader is None or spec.origin is None:
                return spec
            stubs = load_stubs(Path(spec.origin).parent)
        except EmulationError as error:
            sys.exit(f"adaptive-batch emulate: {error}")
        finally:
            self.is_searching = False
        import_torch = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            """Import torch with the emulated CUDA, then install the values and the record."""
            sys.meta_path.remove(self)
            # torch preloads CUDA's libraries from a folder on sys.path.
            sys.path.insert(0, f"{stubs}/wheels")
            import_torch(module)
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
    """Load the emulated CUDA for the torch in a folder, and return the folder of its libraries."""
    stubs = stub_folder(package)
    # All others are linked to the first, and CUDA's runtime to the second and the third.
    sonames = [STUB, DRIVER, MANAGEMENT]
    sonames += [path.name for path in sorted(stubs.glob("lib*.so.*")) if path.name not in sonames]
    for name in sonames:
        ctypes.CDLL(str(stubs / name), mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(stubs)
    return stubs


# --- building


def cache_folder() -> Path:
    """Return the cache folder of the emulation."""
    launched = os.environ.get("EMULATE_CACHE")
    if launched:
        return Path(launched)
    own = os.environ.get("ADAPTIVE_BATCH_CACHE")
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(own) if own else Path(user, "adaptive_batch")) / "emulate"


def cuda_build_folder(version: str) -> Path:
    """Return the folder of the CUDA build that replaces a CPU build of this version."""
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return cache_folder() / f"cuda-build-{version.partition('+')[0]}-{python}"


def torch_version(package: Path) -> tuple[str, str | None]:
    """Return the version of the torch in a folder and its CUDA version (None for a CPU build)."""
    text = (package / "version.py").read_text()
    version = re.search(r"^__version__.*'(.+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda.*'(.+)'", text, re.MULTILINE)
    assert version is not None, f"{package} has no version"
    return version[1], cuda and cuda[1]


def stub_folder(package: Path) -> Path:
    """Return the folder of the emulated libraries for a CUDA build of torch; build them if needed,
    and again if other packages were installed, which may import further functions.

    Args:
        package: folder of the torch that a process is about to import.

    Raises:
        EmulationError: torch is outside the tested versions, or gcc is not installed.
    """
    version, cuda = torch_version(package)
    release = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        raise EmulationError(
            f"torch {version} is outside the tested versions,"
            f" {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        )
    assert cuda is not None, f"torch {version} is not a CUDA build"
    # The libraries depend on this module, the C sources and the names of the installed packages.
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    folders = filter(os.path.isdir, sys.path)
    installed = [
        Path(path) for path in folders if path.endswith(("site-packages", "dist-packages"))
    ]
    for folder in installed:
        digest.update("".join(sorted(os.listdir(folder))).encode())
    stubs = cache_folder() / f"torch-{version}-{digest.hexdigest()[:16]}"
    stubs.parent.mkdir(parents=True, exist_ok=True)
    with open(stubs.with_name(f".{stubs.name}.lock"), "w") as lock:
        # Ranks start together: the first one builds while the others wait here.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stubs.exists():
            with tempfile.TemporaryDirectory(dir=stubs.parent) as made:
                new = Path(made, "new")
                new.mkdir()
                _build(package, cuda, _extensions(installed), new)
                # The libraries are complete or absent.
                new.rename(stubs)
    return stubs


def compile_preloaded_library(file: Path) -> None:
    """Compile the library that protects the program's own files.

    Raises:
        EmulationError: gcc is not installed, or the library cannot be preloaded from `file`.
    """
    _gcc("-shared", *_WARNINGS, "-o", file, SOURCES / PRELOADED, "-ldl")
    # If the loader cannot preload the library, it only prints a warning: the program would run and
    # overwrite the files. So run another program first.
    environment = {**os.environ, "LD_PRELOAD": str(file)}
    warning = subprocess.run(["true"], env=environment, stderr=subprocess.PIPE, text=True).stderr
    if warning:
        raise EmulationError(
            f"your files cannot be protected: {warning.splitlines()[0]} Set TMPDIR to a folder that"
            " is not mounted with noexec and whose path has no space or colon"
        )


def _build(package: Path, cuda: str, extensions: Iterable[Path], folder: Path) -> None:
    """Build the emulated libraries.

    Args:
        package: folder of a CUDA build of torch.
        cuda: version of CUDA.
        extensions: shared libraries of other packages that use CUDA.
        folder: folder for the libraries.
    """
    # Functions that anything imports from CUDA's libraries, and the names of these libraries.
    imported, sonames = set[str](), set[str]()
    for library in extensions:
        imported |= _imported_functions(library)
    for library in sorted((package / "lib").glob("*.so")):
        if library.name != STUB:
            imported |= _imported_functions(library)
            needed = re.findall(r"NEEDED.*\[(.*)\]", _run("readelf", "-d", library))
            sonames |= set(filter(_SONAME.fullmatch, needed))
    # PyTorch looks up functions of the driver and of NVML by name.
    looked_up = re.findall(
        rb"\0((?:cu[A-Z]|nvml)\w{3,60})(?=\0)", (package / "lib/libc10_cuda.so").read_bytes()
    )
    imported |= {name.decode() for name in looked_up}
    # Triton compiles its driver at run time.
    for source in package.parent.glob("triton/backends/nvidia/driver.*"):
        imported |= set(re.findall(r"\b(cu[A-Z]\w+)\(", source.read_text()))

    major, minor = cuda.split(".")[:2]
    flags = [
        f"-DCUDA_VERSION={int(major) * 1000 + int(minor) * 10}",
        f"-DCUDNN_VERSION={_required_version('cudnn')}",
        f"-DNCCL_VERSION={_required_version('nccl')}",
        *_WARNINGS,
    ]
    objects: list[Path] = []
    for path in sorted(SOURCES.glob("*.c")):
        if path.name not in ("layouts.c", PRELOADED):
            objects.append(folder / f"{path.stem}.o")
            _gcc("-c", path, "-o", objects[-1], *flags)
    defined = set(_run("nm", "--defined-only", "--format=just-symbols", *objects).split())
    # Each function that csrc/ does not define returns 0 and counts its calls.
    names = sorted(imported - defined)
    lines = ["const char *const default_names[] = {", *(f'  "{name}",' for name in names), "  0};"]
    lines += [f"unsigned long default_calls[{len(names) + 1}];"]
    lines += [
        f"long {name}(void) {{ default_calls[{i}]++; return 0; }}" for i, name in enumerate(names)
    ]
    defaults, empty = folder / "defaults.c", folder / "empty.c"
    defaults.write_text("\n".join(lines))
    empty.write_text("")
    soname = f"-Wl,-soname,{STUB}"
    libraries = ("-lpthread", "-ldl", "-lrt")
    _gcc("-shared", "-w", "-o", folder / STUB, *objects, defaults, *libraries, soname)
    # Each of CUDA's libraries is an empty one that is linked to the stub.
    for name in (DRIVER, MANAGEMENT, *sorted(sonames - {DRIVER, MANAGEMENT})):
        linked = ["-lcudastub", "-Wl,-rpath,$ORIGIN"]
        if name.startswith("libcudart."):
            linked += [f"-l:{DRIVER}", f"-l:{MANAGEMENT}"]
        # Without this flag, the linker drops libraries whose functions an empty library never uses.
        keeps_linked = "-Wl,--no-as-needed"
        own: list[str | Path] = ["-o", folder / name, empty, f"-Wl,-soname,{name}"]
        _gcc("-shared", *own, keeps_linked, f"-L{folder}", *linked)
    # torch preloads CUDA's libraries from such a folder on sys.path.
    preloaded = folder / f"wheels/nvidia/cu{major}"
    preloaded.mkdir(parents=True)
    (preloaded / "lib").symlink_to("../../..")


def _required_version(library: str) -> int:
    """Return the version of cuDNN or NCCL that torch's wheel requires, as one number in the
    library's format, such as 92001 for 9.20.1.
    """
    wheels = " ".join(metadata.requires("torch") or ())
    found = re.search(rf"nvidia-{library}(?:-cu\d+)? ?\(?==(\d+)\.(\d+)(?:\.(\d+))?", wheels)
    if found is None:
        raise EmulationError(f"torch's metadata does not require {library}")
    major, minor, patch = (int(part or 0) for part in found.groups())
    return major * 10000 + minor * 100 + patch


def _extensions(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the shared libraries of other packages (bitsandbytes) that need CUDA's runtime or math
    libraries.
    """
    for folder in folders:
        for package in sorted(folder.iterdir()):
            if package.name not in ("torch", "nvidia", "triton") and package.is_dir():
                for library in package.rglob("*.so"):
                    content = library.read_bytes()
                    if any(name in content for name in (b"libcudart.so", b"libcublas", b"libcusp")):
                        yield library


def _imported_functions(library: Path) -> set[str]:
    lines = _run("nm", "-D", "--undefined-only", library).splitlines()
    return set(filter(_FUNCTION.fullmatch, (line.split()[-1].split("@")[0] for line in lines)))


def _gcc(*words: str | Path) -> None:
    _run("gcc", "-std=gnu11", "-O1", "-g", "-fPIC", *words)


def _run(*words: str | Path) -> str:
    if shutil.which(str(words[0])) is None:
        raise EmulationError(
            f"{words[0]} is not installed: emulate compiles C sources; install gcc"
        )
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
