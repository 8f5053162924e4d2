"""Children that save resume points until they are killed or may not write any more: what
unit/checkpoint/test_manager.py starts.

    python tests/support/saving_process.py kills OUTPUT_DIR sync|async NUMBER
    python tests/support/saving_process.py limits OUTPUT_DIR

Importing torch takes seconds, so each child is forked off a process that has imported it and runs
one thread.
"""

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from adaptive_batch.checkpoint import CheckpointManager, checkpoints_in, newest_complete
from adaptive_batch.errors import CheckpointError


def tree(step: int) -> dict:
    """A state whose every value tells its step."""
    tensors = {f"layer{n}": torch.full((64, 1024), step, dtype=torch.int64) for n in range(8)}
    return {"model": tensors, "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}}}


def save_for_ever(output_dir: Path, mode: str, step: int, vouched: int) -> None:
    """Save one step after another; the number of each that is vouched for goes into a pipe."""
    points = CheckpointManager(output_dir, keep_last=2, asynchronous=mode == "async")
    while True:
        tensors = tree(step)
        points.save(step, tensors, {"step": step, "seen": torch.full((100,), step)})
        if mode == "async":
            for tensor in tensors["model"].values():
                tensor.fill_(-1)  # training goes on in the tensors that are being saved
            points.wait()
        os.write(vouched, f"{step} ".encode())
        step += 1


def kills(output_dir: Path, mode: str, number: int) -> None:
    """Kill so many savers, each at a random moment; after each a line, and on from the step that is
    answered.
    """
    moments, first = random.Random(mode), 1
    for _ in range(number):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            save_for_ever(output_dir, mode, first, writing)
        os.close(writing)
        time.sleep(moments.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reading) as pipe:
            vouched = pipe.read().split()
        print(
            json.dumps({"killed": os.WTERMSIG(status) == signal.SIGKILL, "vouched": vouched}),
            flush=True,
        )
        first = int(sys.stdin.readline()) + 1


def limited(output_dir: Path, mode: str, limit_bytes: int | None) -> dict:
    """Save a small point, fail to save a larger one, say what is there, and save again when there
    is room.
    """
    points = CheckpointManager(output_dir, keep_last=1, asynchronous=mode == "async")
    points.save(1, {"weight": torch.ones(10)}, {"step": 1})
    points.wait()
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    told = []
    try:
        points.save(2, {"weight": torch.ones(2_000_000)}, {"small": torch.ones(50_000)})
        points.wait()
    except CheckpointError as error:
        told.append(str(error))
    point, _ = newest_complete(*checkpoints_in(output_dir))
    names = sorted(path.name for path in output_dir.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    points.save(3, {"weight": torch.ones(10)}, {"step": 3})
    points.close()
    return {
        "whole": point.step,
        "names": names,
        "told": told,
        "later": newest_complete(*checkpoints_in(output_dir))[0].step,
    }


def limits(output_dir: Path) -> None:
    """Each line of the input is a case: folder, mode, limit in bytes or null; each is answered with
    a line.
    """
    for line in sys.stdin:
        name, mode, limit_bytes = json.loads(line)
        child = os.fork()
        if child == 0:
            print(json.dumps(limited(output_dir / name, mode, limit_bytes)), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"failed": status}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, folder, *rest = sys.argv[1:]
    kills(Path(folder), rest[0], int(rest[1])) if what == "kills" else limits(Path(folder))
