"""Builds the CUDA without a device beside this file into the PyTorch of the Python that runs it:
python build.py

What PyTorch's libraries import of CUDA is listed; each function that no file here has gets a
default, which returns 0 and counts its calls. All are one library, libcudastub.so, in torch/lib,
where PyTorch looks for CUDA's libraries once no nvidia wheel brings them; each of these is an empty
library that leads to it.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from importlib.metadata import requires
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = Path(sysconfig.get_path("purelib"))
LIBRARIES = PACKAGES / "torch/lib"
# What torch.compile makes kernels with, whose driver is compiled against CUDA's where it runs.
TRITON = PACKAGES / "triton/backends/nvidia"

NAMES = (
    "cuda|__cuda|cu[A-Z]|cublas|cudnn|cusolver|cusparse|curand|cufft|nccl|nvml|nvrtc|nvtx|cupti"
    "|nvshmem|nvJitLink"
)
FUNCTION = re.compile(rf"(?:{NAMES})\w*")
SONAME = re.compile(r"lib(?:cu(?!dastub)|nv|nccl)\w*\.so[.\d]*")
# Looked for at run time by their names. CUDA's runtime leads to both, so that they are there by
# then.
DRIVER, MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"


def main() -> None:
    libraries = [
        path
        for path in sorted(LIBRARIES.glob("*.so"))
        if not SONAME.match(path.name) and path.name != "libcudastub.so"
    ]
    imported, sonames = set[str](), set[str]()
    for library in libraries:
        imported |= {name for name in undefined(library) if FUNCTION.fullmatch(name)}
        sonames |= {name for name in needed(library) if SONAME.fullmatch(name)}
    looked_up = re.findall(
        rb"\0((?:cu[A-Z]|nvml)\w{3,60})(?=\0)", (LIBRARIES / "libc10_cuda.so").read_bytes()
    )
    imported |= {name.decode() for name in looked_up}
    for source in TRITON.glob("driver.*"):
        imported |= set(re.findall(r"\b(cu[A-Z]\w+)\(", source.read_text()))

    build = LIBRARIES / "cudastub"
    build.mkdir(exist_ok=True)
    objects = []
    for source in ("memory", "runtime", "libraries", "nccl"):
        objects.append(build / f"{source}.o")
        gcc(
            "-c",
            HERE / f"{source}.c",
            "-o",
            objects[-1],
            *versions(),
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fvisibility=hidden",
        )
    defined = {
        name
        for one in objects
        for name in run("nm", "--defined-only", "--format=just-symbols", one).split()
    }
    defaults = sorted(imported - defined)
    (build / "defaults.c").write_text(source_of_defaults(defaults))
    gcc(
        "-shared",
        "-o",
        LIBRARIES / "libcudastub.so",
        *objects,
        build / "defaults.c",
        "-w",
        "-lpthread",
        "-ldl",
        "-lrt",
        "-Wl,-soname,libcudastub.so",
    )

    (build / "empty.c").write_text("")
    for soname in sorted({DRIVER, MANAGEMENT}) + sorted(sonames - {DRIVER, MANAGEMENT}):
        leads_to = [
            "-lcudastub",
            *([f"-l:{DRIVER}", f"-l:{MANAGEMENT}"] if soname.startswith("libcudart.") else []),
        ]
        gcc(
            "-shared",
            "-o",
            LIBRARIES / soname,
            build / "empty.c",
            f"-Wl,-soname,{soname}",
            "-Wl,--no-as-needed",
            f"-L{LIBRARIES}",
            *leads_to,
            "-Wl,-rpath,$ORIGIN",
        )
    setting = f"os.environ.setdefault('TRITON_LIBCUDA_PATH', {str(LIBRARIES)!r})"
    (PACKAGES / "cuda_stack.pth").write_text(f"import os; {setting}\n")
    print(
        f"{LIBRARIES}/libcudastub.so: {len(imported & defined)} functions of CUDA, {len(defaults)}"
        f" that do nothing, for {len(sonames)} libraries"
    )


def versions() -> list[str]:
    """What PyTorch was built for, as CUDA's libraries have to tell it."""
    wheels = " ".join(requires("torch") or ())

    def number(library: str, *places: int) -> int:
        found = re.search(rf"nvidia-{library}(?:-cu\d+)? ?\(?==(\d+)\.(\d+)(?:\.(\d+))?", wheels)
        assert found, f"torch does not say which {library} it needs: is it a CUDA build?\n{wheels}"
        return sum(
            int(part or 0) * place for part, place in zip(found.groups(), places, strict=True)
        )

    cuda = re.search(
        r"^cuda.*= '(\d+)\.(\d+)'", (LIBRARIES.parent / "version.py").read_text(), re.MULTILINE
    )
    assert cuda, "this torch is not a CUDA build"
    return [
        f"-DCUDA_VERSION={int(cuda[1]) * 1000 + int(cuda[2]) * 10}",
        f"-DCUDNN_VERSION={number('cudnn', 10000, 100, 1)}",
        f"-DNCCL_VERSION={number('nccl', 10000, 100, 1)}",
    ]


def source_of_defaults(names: list[str]) -> str:
    lines = ["const char *const default_names[] = {", *(f'  "{name}",' for name in names), "  0};"]
    lines += [f"unsigned long default_calls[{len(names) + 1}];"]
    lines += [
        f"long {name}(void) {{ default_calls[{i}]++; return 0; }}" for i, name in enumerate(names)
    ]
    return "\n".join(lines)


def undefined(library: Path) -> set[str]:
    return {
        line.split()[-1].split("@")[0]
        for line in run("nm", "-D", "--undefined-only", library).splitlines()
    }


def needed(library: Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", library))


def gcc(*words: str | Path) -> None:
    run("gcc", "-std=gnu11", "-O1", "-g", "-fPIC", *words)


def run(*words: str | Path) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
