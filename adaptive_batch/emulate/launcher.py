"""The launcher of a program on an emulated device.

The program runs in a scratch folder that mirrors its own folder and links each file.
csrc/scratch.c redirects paths in the program's folder to the scratch folder and replaces a link
before its file is written, so originals are never opened for writing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from adaptive_batch.inject.sitecustomize import environment_with

from .process import EmulationError, cache_folder, compile_preloaded_library, cuda_build_folder

# Keep made-up values from trackers and hubs. Variables of the program take precedence.
OFFLINE = {
    "WANDB_MODE": "offline",
    "HF_HUB_OFFLINE": "1",
    "COMET_MODE": "offline",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "offline",
}
SECONDS_TO_END = 20
MAX_LINES = 8
GIB = 2**30
# Beyond this number of entries, folders are linked as a whole, such as data sets of small files.
MAX_ENTRIES = 20_000


@dataclass(frozen=True)
class Device:
    """A CUDA device.

    Attributes:
        name: name without the manufacturer.
        capability: major and minor compute capability as one number, such as 90.
        multiprocessors: number of multiprocessors.
        total_bytes: total memory reported by CUDA.
        context_bytes: memory of the CUDA context.
    """

    name: str
    capability: int
    multiprocessors: int
    total_bytes: int
    context_bytes: int

    @property
    def setting(self) -> str:
        """The device in the format of the emulated CUDA."""
        return f"NVIDIA {self.name},{self.capability},{self.multiprocessors},{self.total_bytes}"


def emulate(
    command: Sequence[str],
    device: Device,
    *,
    num_devices: int = 1,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    json_file: Path | None = None,
    output: Path | None = None,
) -> int:
    """Run a program on an emulated device and print a report to stderr.

    Args:
        command: the program with its arguments.
        device: the emulated device.
        num_devices: number of devices.
        max_steps: limit of the optimizer steps.
        max_minutes: time limit.
        json_file: file for the report as JSON.
        output: new or empty folder to run in; None for a temporary one.

    Returns:
        The exit status of the program; 0 if a limit ended it.

    Raises:
        EmulationError: the system is not supported, or the program cannot be started.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise EmulationError(
            f"{platform.system()} {platform.machine()} is not supported: use Linux x86_64"
        )
    if Path.cwd() == Path("/"):
        raise EmulationError("/ cannot be mirrored: change to the folder of the program")
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="emulate-") as temporary:
        scratch = (output or Path(temporary, "scratch")).resolve()
        records = Path(temporary, "records")
        records.mkdir()
        mirrors = mirror(Path.cwd(), scratch)
        environment = _environment(device, num_devices, max_steps, records, scratch, mirrors)
        preloaded = Path(temporary, "scratch.so")
        compile_preloaded_library(preloaded)
        environment["LD_PRELOAD"] = f"{preloaded} {os.environ.get('LD_PRELOAD', '')}".strip()
        try:
            status, was_ended = _run(command, scratch, environment, max_minutes)
        except OSError as error:
            raise EmulationError(f"{command[0]} cannot be started: {error.strerror}") from None
        processes = [json.loads(file.read_text()) for file in sorted(records.glob("*.json"))]
        report = {
            "device": device.setting.split(",")[0],
            "total_bytes": device.total_bytes,
            "context_bytes": device.context_bytes,
            "command": list(command),
            "exit_status": status,
            "ended_by_time_limit": was_ended,
            "seconds": round(time.time() - started, 1),
            "processes": [one for one in processes if one["devices"] or one["out_of_memory"]],
            "files": written_files(scratch),
            "folder": str(scratch) if output else None,
            "values_are_real": False,
        }
    print("\n".join(report_lines(report)), file=sys.stderr)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1))
    return status


def _environment(
    device: Device,
    num_devices: int,
    max_steps: int | None,
    records: Path,
    scratch: Path,
    mirrors: dict[str, str],
) -> dict[str, str]:
    """Return the environment of the program: variables of this process replace those above them,
    and are replaced by those below.
    """
    cache = cache_folder()
    environment = {
        **OFFLINE,
        "EMULATE_COPIED_BYTES": "65536",
        "EMULATE_VALUES": "1",
        # This process's variables, with the hook for each Python process of the program.
        **environment_with(Path(__file__).with_name("process.py")),
        "EMULATE_CACHE": str(cache),
        "EMULATE_DEVICE": device.setting,
        "EMULATE_DEVICE_COUNT": str(num_devices),
        "EMULATE_CONTEXT_BYTES": str(device.context_bytes),
        "EMULATE_RECORDS": str(records),
        "EMULATE_SCRATCH": str(scratch),
        "EMULATE_FOLDERS": "".join(f"{one}\x1f{mirrors[one]}\x1f" for one in mirrors),
        "EMULATE_STEPS": str(max_steps or 0),
        # Compiled code and measurements are not valid for a real device.
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "ADAPTIVE_BATCH_CACHE": str(records / "adaptive_batch"),
        "ADAPTIVE_BATCH_EMULATED": "1",
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment


def _run(
    command: Sequence[str], folder: Path, environment: dict[str, str], max_minutes: float | None
) -> tuple[int, bool]:
    """Run a program and return its exit status and whether the time limit ended it."""
    program = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    try:
        program.wait(timeout=max_minutes and max_minutes * 60)
    except subprocess.TimeoutExpired:
        _end(program)
        return 0, True
    except KeyboardInterrupt:
        # Ctrl-C reaches this process only, since the program has a session of its own.
        _end(program)
    code = program.returncode
    return (code if code >= 0 else 128 - code), False


def _end(program: subprocess.Popen[bytes]) -> None:
    """Interrupt a program and its children. If the program does not end, terminate and then kill
    it; each further Ctrl-C shortens the wait.
    """
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if program.poll() is None:
            os.killpg(program.pid, sent)
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                program.wait(timeout=SECONDS_TO_END)
    program.wait()


def install_cuda_build() -> int:
    """Install the CUDA build of this environment's torch in the cache folder; return pip's exit
    status.
    """
    version = metadata.version("torch")
    folder = cuda_build_folder(version)
    if folder.is_dir():
        print(f"the CUDA build of torch {version} is in {folder}")
        return 0
    release = version.partition("+")[0]
    # Renamed to `folder` at the end, so that `folder` is complete or absent.
    new = folder.with_name(f".{folder.name}")
    shutil.rmtree(new, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(new)]
    # == would also match a CPU build of an extra index, such as 2.13.0+cpu.
    status = subprocess.run([*pip, f"torch==={release}"]).returncode
    if not status:
        requirements = next(new.glob("torch-*.dist-info/METADATA")).read_text()
        # torch.compile needs Triton, and a CPU build has not installed it.
        triton = re.findall(r"(?m)^Requires-Dist: (triton==[\d.]+)", requirements)
        if triton:
            status = subprocess.run([*pip, *triton]).returncode
    if not status:
        new.rename(folder)
        print(f"installed in {folder}; the environment was not changed")
    return status


def mirror(folder: Path, scratch: Path) -> dict[str, str]:
    """Create the folders of `folder` in a new folder, with links to its files.

    Args:
        folder: folder of the program. Folders elsewhere that links lead to are mirrored too.
        scratch: new folder.

    Returns:
        Each mirrored folder with its mirror.
    """
    mirrors = {str(folder): str(scratch)}
    entries_left = MAX_ENTRIES
    pending = [(folder, scratch)]
    while pending:
        source, target = pending.pop(0)
        target.mkdir(parents=True, exist_ok=True)
        for entry in os.scandir(source):
            entries_left -= 1
            original, new = Path(entry.path), target / entry.name
            if original == scratch:
                continue  # --output in the program's folder
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.is_symlink():
                real = Path(os.path.realpath(original))
                # A parent folder, which is not mirrored: its mirror would contain itself.
                has_program = folder.is_relative_to(real) or scratch.is_relative_to(real)
                roots = [root for root in mirrors if real.is_relative_to(root)]
                if roots:
                    # The link leads into a mirrored folder, so the new link leads into its mirror.
                    original = Path(mirrors[roots[0]], real.relative_to(roots[0]))
                elif os.path.isdir(real) and not has_program:
                    # The link leads to a folder elsewhere, which is mirrored in its place.
                    is_folder, original = True, real
                    mirrors[str(real)] = str(new)
            elif str(original) in mirrors:
                # A link to this folder was found before, so it has a mirror.
                is_folder, original = False, Path(mirrors[str(original)])
            # Folders of tools (.git, virtual environments) are linked as a whole, which is fast.
            is_tool = entry.name.startswith(".") or os.path.exists(original / "pyvenv.cfg")
            is_readable = os.access(original, os.R_OK | os.X_OK)
            # After MAX_ENTRIES entries, folders are linked as a whole too.
            if is_folder and is_readable and not is_tool and entries_left > 0:
                pending.append((original, new))
            else:
                new.symlink_to(original)
    return mirrors


def written_files(scratch: Path) -> list[tuple[str, int]]:
    """Return the files that a program has written in its scratch folder, with their sizes."""
    files = []
    for folder, _, names in os.walk(scratch):
        for name in names:
            path = Path(folder, name)
            # A link is a file of the original folder that was not written.
            if not path.is_symlink() and "__pycache__" not in folder:
                files.append((str(path.relative_to(scratch)), path.stat().st_size))
    return sorted(files)


# The report at the end of a program.


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a report: the memory of each process, and its inexact parts."""
    total, context = report["total_bytes"], report["context_bytes"]
    yield ""
    yield (
        f"adaptive-batch emulate: {report['device']}, {_size(total)} with {_size(context)} for the"
        f" CUDA context; {report['seconds']} s"
    )
    yield (
        "Values and times are not real: do not use losses, metrics, speeds or checkpoints of this"
        " run. `auto` of adaptive_batch takes the largest size that fits."
    )
    processes = report["processes"]
    if not processes:
        yield "No process used CUDA."
    else:
        yield from _table(processes, total - context)
        highest = max(processes, key=lambda process: process["living"].get("bytes", 0))
        yield from _living(highest["living"])
        for process in processes:
            if process["out_of_memory"]:
                yield from _out_of_memory(process)
        yield from _made_up(processes)
        functions = sorted({name for process in processes for name in process["not_counted"]})
        if functions:
            yield (
                "Not counted, since their sizes are not published: workspaces of"
                f" {', '.join(functions)}."
            )
    yield from _files(report)
    if report["ended_by_time_limit"]:
        yield "The time limit ended the program."


def _table(processes: list[dict[str, Any]], usable: int) -> Iterator[str]:
    """Yield a line for each device of each process. A device has `usable` bytes without its CUDA
    context.
    """
    rows = [("process", "device", "steps", "peak allocated", "peak reserved", "free", "retries")]
    for process in processes:
        rank = f" (rank {process['rank']})" if process["rank"] else ""
        # `python -c` has no name.
        name = process["program"][0].rpartition("/")[2] or "python"
        for device in process["devices"]:
            rows.append(
                (
                    f"{name}{rank}",
                    str(device["index"]),
                    str(process["steps"]),
                    _size(device["allocated"]),
                    _size(device["reserved"]),
                    _size(max(0, usable - device["reserved"])),
                    str(device["retries"]),
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells])


def _living(living: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of code with most live bytes at the peak."""
    if not living:
        return
    yield (
        f"Live at the peak of device {living['device']}, {_size(living['bytes'])} without the"
        " allocator's rounding:"
    )
    lines = living["lines"]
    for line, num_bytes in lines[:MAX_LINES]:
        yield f"  {_size(num_bytes):>11}  {line}"
    rest = sum(num_bytes for _, num_bytes in lines[MAX_LINES:])
    if rest:
        yield f"  {_size(rest):>11}  {len(lines) - MAX_LINES} other lines"


def _out_of_memory(process: dict[str, Any]) -> Iterator[str]:
    last = process["out_of_memory"]
    yield (
        f"Out of memory (number of times: {process['times_out_of_memory']}), last at"
        f" {last['line']}: {_size(last['asked'])} requested, {_size(last['free'])} free."
    )
    yield (
        f"  {_size(last['allocated'])} were allocated, {_size(last['reserved'])} reserved. If much"
        " is reserved but unused, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. If the"
        " optimizer holds most, train adapters (LoRA), use an 8-bit optimizer, or shard the model"
        " (FSDP). Otherwise lower the batch size, let adaptive_batch find the largest one"
        " (AdaptiveTrainer, find_max_batch_size), or use activation checkpointing."
    )


def _made_up(processes: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each kind of made-up values, with the lines that depend on them."""
    for kind, sentence in (
        ("shape", "Shapes that depend on values that were not computed; their peak is a guess"),
        ("value", "Values that the program read although they were not computed"),
    ):
        # The operators that were not computed, by line.
        origins: dict[str, set[str]] = {}
        for process in processes:
            for kind_of_entry, origin, line, _ in process["made_up"]:
                if kind_of_entry == kind:
                    origins.setdefault(line, set()).add(origin)
        if origins:
            shown = [f"{line} ({', '.join(sorted(names))})" for line, names in origins.items()]
            more = f" and {len(shown) - MAX_LINES} more" if len(shown) > MAX_LINES else ""
            yield f"{sentence}: {'; '.join(shown[:MAX_LINES])}{more}."


def _files(report: dict[str, Any]) -> Iterator[str]:
    files = report["files"]
    if files:
        place = report["folder"] or "a scratch folder that is deleted (keep it with --output)"
        largest = sorted(files, key=lambda file: -file[1])[:MAX_LINES]
        shown = ", ".join(f"{name} {_size(size)}" for name, size in largest)
        more = f" and {len(files) - MAX_LINES} more" if len(files) > MAX_LINES else ""
        yield f"Files written to {place}: {shown}{more}."


def _size(num_bytes: int) -> str:
    if num_bytes >= GIB / 10:
        return f"{num_bytes / GIB:.3f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"
