"""How long a resume point keeps training waiting: 50M parameters with AdamW, saved synchronously
and asynchronously.

    python benchmarks/resume.py [--saves N] [--layers N] [--folder DIR] [--device cuda]
        [--threads N] [--output DIR]

Trains a stack of linear layers and saves it again and again, in turns: what slows the machine slows
both. Steps are timed while an asynchronous save is being written and while none is. A plain copy of
as many bytes to the same disk is timed beside them. The points lie in a temporary folder (in DIR
where given: the disk is what is measured) and are removed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import records
import torch
from torch import nn

from adaptive_batch.checkpoint import Checkpoint, CheckpointManager, checkpoints_in, newest_complete

WIDTH = 1024  # a layer of 1024 x 1024 has 1.05M parameters
STEPS_BETWEEN = 5
MIB = 2**20


class Training:
    """A stack of linear layers in training; a step is timed until the device has done it."""

    def __init__(self, layers: int, *, rows: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(rows, WIDTH, device=device)
        self.steps = 0

    def step(self) -> float:
        """Seconds of one optimizer step."""
        start = time.perf_counter()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.batch.is_cuda:
            torch.cuda.synchronize()
        self.steps += 1
        return time.perf_counter() - start

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def bytes_of(point: Checkpoint) -> int:
    return sum(file.bytes for file in point.files.values())


def seconds_to_write(folder: Path, num_bytes: int) -> float:
    """Of a plain file with as many bytes, flushed to the disk: no save of any kind can be
    faster.
    """
    content = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8).numpy()
    start = time.perf_counter()
    with (folder / "plain").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    (folder / "plain").unlink()
    return seconds


def measure(training: Training, folder: Path, *, saves: int) -> dict[str, list[float]]:
    """Seconds, of each kind."""
    seconds: dict[str, list[float]] = {
        name: []
        for name in (
            "plain write",
            "synchronous save",
            "asynchronous save, standing still",
            "asynchronous save, until whole",
            "find and verify",
            "load",
            "step alone",
            "step beside a save",
        )
    }
    for _ in range(STEPS_BETWEEN):
        training.step()
    small = {"rng": torch.get_rng_state()}
    with (
        CheckpointManager(folder / "synchronous", keep_last=1) as synchronous,
        CheckpointManager(folder / "asynchronous", keep_last=1, asynchronous=True) as asynchronous,
    ):
        asynchronous.save(
            training.steps, training.state(), small
        )  # the first makes the copies' memory
        asynchronous.wait()
        for _ in range(saves):
            seconds["step alone"] += [training.step() for _ in range(STEPS_BETWEEN)]
            seconds["synchronous save"].append(
                synchronous.save(training.steps, training.state(), small)
            )
            training.step()
            start = time.perf_counter()
            stood_still = asynchronous.save(training.steps, training.state(), small)
            seconds["asynchronous save, standing still"].append(stood_still)
            while asynchronous.is_saving:
                seconds["step beside a save"].append(training.step())
            asynchronous.wait()
            seconds["asynchronous save, until whole"].append(time.perf_counter() - start)
            start = time.perf_counter()
            point, _ = newest_complete(*checkpoints_in(folder / "asynchronous"))
            assert point is not None
            found = time.perf_counter()
            point.load()
            seconds["find and verify"].append(found - start)
            seconds["load"].append(time.perf_counter() - found)
            seconds["plain write"].append(seconds_to_write(folder, bytes_of(point)))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--saves", type=int, default=7, help="of each kind")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rows", type=int, default=64, help="of a step")
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads of PyTorch"
    )
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    training = Training(
        arguments.layers, rows=arguments.rows, device=torch.device(arguments.device)
    )
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        seconds = measure(training, Path(folder), saves=arguments.saves)
        point, _ = newest_complete(*checkpoints_in(Path(folder) / "asynchronous"))
        assert point is not None
        num_bytes = bytes_of(point)
    print(
        f"{parameters / 1e6:.1f}M parameters with AdamW, {num_bytes / MIB:.0f} MiB a point,"
        f" {training.steps} steps\n"
    )
    print(f"{'':<36}{'median':>9}{'least':>9}{'most':>9}{'of':>6}")
    for name, values in seconds.items():
        print(
            f"{name:<36}{statistics.median(values):>8.3f}s{min(values):>8.3f}s{max(values):>8.3f}s{len(values):>6}"
        )
    beside, alone = (
        statistics.median(seconds[name]) for name in ("step beside a save", "step alone")
    )
    print(f"\na step beside a save takes {beside / alone:.2f} of the time of one alone")
    records.write(
        "resume",
        arguments.output,
        parameters=parameters,
        bytes=num_bytes,
        medians={name: statistics.median(values) for name, values in seconds.items()},
        step_beside_over_alone=beside / alone,
        seconds=seconds,
    )


if __name__ == "__main__":
    main()
