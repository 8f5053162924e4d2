"""Saves resume points again and again until it is killed: what test_resume.py kills.

    python small_saves.py OUTPUT_DIR FIRST_STEP sync|async

Each point is checked by arithmetic: every value of step N is N. Steps that save() or wait() has vouched for are printed.
"""

import sys
from pathlib import Path

import torch

from adaptive_batch.resume import ResumePoints


def tree(step: int) -> dict:
    tensors = {f"layer{n}": torch.full((64, 1024), step, dtype=torch.int64) for n in range(8)}
    return {"model": tensors, "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}}}


def main() -> None:
    output_dir, step, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    points = ResumePoints(output_dir, keep_last=2, asynchronous=mode == "async")
    tensors = tree(step)
    print("ready", flush=True)
    while True:
        points.save(step, tensors, {"step": step, "seen": torch.full((100,), step)})
        if mode == "async":
            for tensor in tensors["model"].values():
                tensor.fill_(-1)  # training goes on in the tensors that are being saved
            points.wait()
        print(step, flush=True)
        step += 1
        tensors = tree(step)


if __name__ == "__main__":
    main()
