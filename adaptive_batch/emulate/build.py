"""The emulated CUDA libraries: compiled from csrc/ on first use, and kept for each torch.

libcudastub.so has every function that PyTorch and other packages import from CUDA's libraries. A
function that csrc/ does not define returns 0 and counts its calls. Each of CUDA's libraries is an
empty one that leads to libcudastub.so.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

SOURCES = Path(__file__).with_name("csrc")
OLDEST, NEWEST = (2, 11), (2, 15)

STUB = "libcudastub.so"
PRELOADED = "scratch.c"
# PyTorch opens these two by name.
DRIVER, MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"
_FUNCTION = (
    r"(?:cuda|__cuda|cu[A-Z]|cublas|cudnn|cusolver|cusparse|curand|cufft|nccl|nvml|nvrtc|nvtx"
    r"|cupti|nvshmem|nvJitLink)\w*"
)
_SONAME = r"lib(?:cu(?!dastub)|nv|nccl)\w*\.so[.\d]*"
# Functions that return the size of what they need.
_SIZE = re.compile(r"buffer_?size|(?<!Set)workspace|reservespace", re.IGNORECASE)
STRICT = ("-Wall", "-Wextra", "-Werror", "-fvisibility=hidden")


class EmulationError(Exception):
    """The emulation cannot run here; the message says what is missing."""


def cache_folder() -> Path:
    """Return the folder of everything that the emulation keeps between runs."""
    launched = os.environ.get("EMULATE_CACHE")
    if launched:
        return Path(launched)
    own = os.environ.get("ADAPTIVE_BATCH_CACHE")
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(own) if own else Path(user, "adaptive_batch")) / "emulate"


def cuda_build_folder(version: str) -> Path:
    """Return where the CUDA build that replaces a CPU build of this version is installed."""
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return cache_folder() / f"cuda-build-{version.partition('+')[0]}-{python}"


def torch_version(package: Path) -> tuple[str, str | None]:
    """Return the version of the torch in a folder and the CUDA that it was built for."""
    names = runpy.run_path(str(package / "version.py"))
    return names["__version__"], names["cuda"]


def stub_folder(package: Path) -> Path:
    """Return the folder with the libraries for a CUDA build of torch, which are built if needed.

    Args:
        package: the folder of the torch that a process is about to import.

    Raises:
        EmulationError: torch is outside the tested versions or no compiler is installed.
    """
    version, cuda = torch_version(package)
    release = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        raise EmulationError(
            f"torch {version} is outside the tested versions,"
            f" {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        )
    assert cuda is not None, f"torch {version} is not a CUDA build"
    others = [Path(path) for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    listing = "".join(name for folder in others for name in sorted(os.listdir(folder)))
    sources = [Path(__file__), *sorted(SOURCES.iterdir())]
    return _built_once(
        f"torch-{version}",
        [listing.encode(), *(source.read_bytes() for source in sources)],
        lambda folder: _build(package, cuda, others, folder),
    )


def preloaded_library() -> Path:
    """Return the library that protects the program's own files, which is built if needed.

    Raises:
        EmulationError: no compiler is installed.
    """
    source = SOURCES / PRELOADED
    library = ("-shared", *STRICT, source, "-ldl", "-o")
    folder = _built_once(
        "scratch", [source.read_bytes()], lambda new: _gcc(*library, new / "scratch.so")
    )
    return folder / "scratch.so"


def _built_once(name: str, content: Iterable[bytes], build: Callable[[Path], None]) -> Path:
    """Return a folder of the cache for this content, which `build` fills if it is new."""
    digest = hashlib.sha256(b"".join(content)).hexdigest()[:16]
    folder = cache_folder() / f"{name}-{digest}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks start together
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as made:
                new = Path(made, "new")
                new.mkdir()
                build(new)
                new.rename(folder)
    return folder


def _build(package: Path, cuda: str, others: Iterable[Path], folder: Path) -> None:
    """Build the libraries of a torch in a folder.

    Args:
        package: torch's folder.
        cuda: the version of CUDA that it was built for.
        others: folders of other packages, such as bitsandbytes, which may import more of CUDA.
        folder: an empty one.
    """
    imported, sonames = set[str](), {DRIVER, MANAGEMENT}
    for library in (package / "lib").glob("*.so"):
        imported |= _imported_functions(library)
        sonames |= set(re.findall(rf"NEEDED.*\[({_SONAME})\]", _run("readelf", "-d", library)))
    for library in _extensions(others):
        imported |= _imported_functions(library)
    looked_up = re.findall(
        rb"\0((?:cu[A-Z]|nvml)\w{3,60})(?=\0)", (package / "lib/libc10_cuda.so").read_bytes()
    )
    imported |= {name.decode() for name in looked_up}
    # Triton compiles its driver where it runs.
    for source in package.parent.glob("triton/backends/nvidia/driver.*"):
        imported |= set(re.findall(r"\b(cu[A-Z]\w+)\(", source.read_text()))

    major, minor = cuda.split(".")[:2]
    versions = [
        f"-DCUDA_VERSION={int(major) * 1000 + int(minor) * 10}",
        f"-DCUDNN_VERSION={_required_version('cudnn')}",
        f"-DNCCL_VERSION={_required_version('nccl')}",
    ]
    sources = [path for path in SOURCES.glob("*.c") if path.name not in ("layouts.c", PRELOADED)]
    defaults, empty = folder / "defaults.c", folder / "empty.c"
    defaults.write_text("\n".join(_default_functions(sorted(imported))))
    empty.write_text("")
    libraries = ("-lpthread", "-ldl", "-lrt", f"-Wl,-soname,{STUB}")
    _gcc("-shared", *versions, *STRICT, *sources, defaults, *libraries, "-o", folder / STUB)
    leads_to = (f"-L{folder}", "-Wl,--no-as-needed", "-lcudastub", "-Wl,-rpath,$ORIGIN")
    for name in sonames:
        _gcc("-shared", "-o", folder / name, empty, f"-Wl,-soname,{name}", *leads_to)
    # torch preloads CUDA's libraries from such a folder on sys.path.
    preloaded = folder / f"wheels/nvidia/cu{major}"
    preloaded.mkdir(parents=True)
    (preloaded / "lib").symlink_to("../../..")


def _default_functions(names: Sequence[str]) -> Iterator[str]:
    """Yield C code for functions that return 0 and count their calls, where csrc/ has no others.
    Those that are asked for a size are reported.
    """
    yield "void unknown_workspace(const char *);"
    yield "const char *const default_names[] = {"
    yield from (f'  "{name}",' for name in names)
    yield "  0};"
    yield f"unsigned long default_calls[{len(names) + 1}];"
    exported = '__attribute__((weak, visibility("default")))'
    for place, name in enumerate(names):
        reported = f'unknown_workspace("{name}"); ' if _SIZE.search(name) else ""
        body = f"{{ default_calls[{place}]++; {reported}return 0; }}"
        yield f"{exported} long {name}(void) {body}"


def _required_version(library: str) -> int:
    """Return the version of cuDNN or NCCL that torch's wheel asks for, as the library gives it."""
    wheels = " ".join(metadata.requires("torch") or ())
    found = re.search(rf"nvidia-{library}(?:-cu\d+)? ?\(?==(\d+)\.(\d+)(?:\.(\d+))?", wheels)
    if found is None:
        raise EmulationError(f"torch's metadata does not name the {library} that it needs")
    major, minor, patch = (int(part or 0) for part in found.groups())
    return major * 10000 + minor * 100 + patch


def _extensions(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the shared libraries of other packages that need CUDA's runtime or math libraries."""
    for folder in folders:
        for package in sorted(folder.iterdir()):
            if package.name not in ("torch", "nvidia", "triton") and package.is_dir():
                for library in package.rglob("*.so"):
                    content = library.read_bytes()
                    if any(name in content for name in (b"libcudart.so", b"libcublas", b"libcusp")):
                        yield library


def _imported_functions(library: Path) -> set[str]:
    symbols = _run("nm", "-D", "--undefined-only", "--format=just-symbols", library)
    return set(re.findall(rf"(?m)^({_FUNCTION})(?=@|$)", symbols))


def _gcc(*words: str | Path) -> None:
    _run("gcc", "-std=gnu11", "-O1", "-g", "-fPIC", *words)


def _run(*words: str | Path) -> str:
    if shutil.which(str(words[0])) is None:
        raise EmulationError(
            f"{words[0]} is not installed: the first run compiles C sources; install gcc"
        )
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
