"""Start a program on an emulated device and report what it needed."""

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
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from adaptive_batch.injection import environment_with

from .build import EmulationError, cache_folder, cuda_build_folder, preloaded_library
from .report import report_lines
from .scratch import mirror, written_files

# Trackers and hubs get no made-up values. The program's own environment goes first.
OFFLINE = {
    "WANDB_MODE": "offline",
    "HF_HUB_OFFLINE": "1",
    "COMET_MODE": "offline",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "offline",
}
SECONDS_TO_END = 20


@dataclass(frozen=True)
class Device:
    """A CUDA device.

    Attributes:
        capability: major and minor compute capability as one number, such as 90.
        total_bytes: memory as CUDA gives it.
        context_bytes: memory of it that the CUDA context takes.
    """

    name: str
    capability: int
    multiprocessors: int
    total_bytes: int
    context_bytes: int

    @property
    def setting(self) -> str:
        """The device as the emulated CUDA reads it."""
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
    """Run a program on an emulated device, and print a report to the error stream.

    Args:
        command: the program with its arguments.
        device: what each emulated device is.
        max_steps: steps of an optimizer after which the program ends.
        max_minutes: time after which the program is interrupted.
        json_file: where the report is written as JSON too.
        output: the folder that the program runs in and writes to; None for one that is deleted.

    Returns:
        The exit status of the program; 0 if a limit ended it.

    Raises:
        EmulationError: the system is not supported or the program cannot be started.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise EmulationError(
            f"{platform.system()} {platform.machine()} is not supported: use Linux x86_64"
        )
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="emulate-") as temporary:
        scratch = (output or Path(temporary, "scratch")).resolve()
        records = Path(temporary, "records")
        records.mkdir()
        mirror(Path.cwd(), scratch)
        environment = _environment(device, num_devices, max_steps, records, scratch)
        # A folder of the user's may have a space, which ends a path in LD_PRELOAD.
        preloaded = Path(temporary, "scratch.so")
        preloaded.symlink_to(preloaded_library())
        environment["LD_PRELOAD"] = f"{preloaded} {os.environ.get('LD_PRELOAD', '')}".strip()
        try:
            status, was_ended = _run(command, scratch, environment, max_minutes)
        except OSError as error:
            raise EmulationError(f"{command[0]} cannot be started: {error.strerror}") from None
        report = {
            "device": device.setting.split(",")[0],
            "total_bytes": device.total_bytes,
            "context_bytes": device.context_bytes,
            "command": list(command),
            "exit_status": status,
            "ended_by_time_limit": was_ended,
            "seconds": round(time.time() - started, 1),
            "processes": _read_records(records),
            "files": written_files(scratch, started),
            "folder": str(scratch) if output else None,
            "values_are_real": False,
        }
    print("\n".join(report_lines(report)), file=sys.stderr)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1))
    return status


def _environment(
    device: Device, num_devices: int, max_steps: int | None, records: Path, scratch: Path
) -> dict[str, str]:
    cache = cache_folder()
    environment = {
        **OFFLINE,
        "EMULATE_COPIED_BYTES": "65536",
        "EMULATE_VALUES": "1",
        **environment_with(Path(__file__).with_name("process.py")),
        "EMULATE_CACHE": str(cache),
        "EMULATE_DEVICE": device.setting,
        "EMULATE_DEVICE_COUNT": str(num_devices),
        "EMULATE_CONTEXT_BYTES": str(device.context_bytes),
        "EMULATE_RECORDS": str(records),
        "EMULATE_SCRATCH": str(scratch),
        "EMULATE_STEPS": str(max_steps or 0),
        # What is compiled or measured here is not for a real device.
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
    """Return the exit status of a program, and whether the time limit ended it."""
    program = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    seconds = max_minutes and max_minutes * 60
    was_ended = False
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            program.wait(timeout=seconds)
            break
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
            was_ended |= isinstance(reason, subprocess.TimeoutExpired)
            os.killpg(program.pid, sent)
            seconds = SECONDS_TO_END
    code = program.wait()
    if was_ended:
        return 0, True
    return (code if code >= 0 else 128 - code), False


def _read_records(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return [record for record in records if record["devices"] or record["out_of_memory"]]


def install_cuda_build() -> int:
    """Install the CUDA build of this environment's torch in the cache folder, with pip, which
    prints the size of the download. Return pip's exit status.
    """
    version = metadata.version("torch")
    folder = cuda_build_folder(version)
    if folder.is_dir():
        print(f"the CUDA build of torch {version} is in {folder}")
        return 0
    release = version.partition("+")[0]
    new = folder.with_name(f".{folder.name}")
    shutil.rmtree(new, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(new)]
    # Not ==, which a CPU build of an extra index would match: 2.13.0+cpu.
    status = subprocess.run([*pip, f"torch==={release}"]).returncode
    if not status:
        installed = next(new.glob("torch-*.dist-info/METADATA")).read_text()
        compilers = re.findall(r"(?m)^Requires-Dist: (triton==[\d.]+)", installed)
        if compilers:
            status = subprocess.run([*pip, *compilers]).returncode
    if not status:
        new.rename(folder)
        print(f"installed in {folder}; the environment is as it was")
    return status
