"""A run's records, made up: everything that a report can show, and text that would break a page
that does not escape it.
"""

import json
import math
from pathlib import Path

from adaptive_batch.probe import ProbeResult, Trial

NASTY = "<script>alert(\"x\")</script> & <b>bold</b> 'quoted'"
SEARCH = ProbeResult(
    max_batch_size=24,
    batch_size=16,
    trials=(
        Trial(1, True, 2 * 2**30, 2**30),
        Trial(32, False),
        Trial(24, True, 13 * 2**30, 2**30),
        Trial(16, True, 9 * 2**30, 2**30),
    ),
    seconds=(0.1, 0.2, 0.3, 0.2),
    sequence_length=512,
    resident_bytes=2**30,
    budget_bytes=14 * 2**30,
)
PROBE = {"format": 1, "fingerprint": "0", **SEARCH.record(), "earlier": []}


class Records:
    """The lines of a ``run.jsonl`` whose clock goes half a second with each of them."""

    def __init__(self):
        self.lines = []
        self.time = 1_790_000_000.0
        self.samples = {0: 0}

    def add(self, kind, **values):
        self.time += 0.5
        self.lines.append(json.dumps({"kind": kind, "time": self.time, **values}))

    def start(self, *, after=0, resumed=False):
        self.add(
            "start",
            message="going on" if resumed else "starting",
            resumed=resumed,
            rows=4096,
            progress={"epoch": 0, "steps": after},
        )

    def step(self, number, *, rows=16, **values):
        self.samples[number] = self.samples[number - 1] + rows
        shared = {
            "loss": 2 + 5 * math.exp(-number / 200) + 0.3 * math.sin(number * 1.7),
            "lr": 1e-3,
            "tokens_per_second_per_gpu": 5000 + 800 * math.sin(number),
            "batch_size": rows,
            "micro_batches": 1,
            "padding_fraction": 0.3 + 0.1 * math.sin(number * 2.3),
            "samples_seen": self.samples[number],
            "tokens_seen": 90 * self.samples[number],
            "oom_count": 0,
        }
        self.add(
            "step", step=number, epoch=0, position=self.samples[number], **{**shared, **values}
        )

    def write(self, output_dir: Path, *, probe=None) -> Path:
        folder = output_dir / "adaptive_batch"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.jsonl").write_text("".join(line + "\n" for line in self.lines))
        if probe is not None:
            (folder / "probe.json").write_text(json.dumps(probe))
        return output_dir


def full_records(num_steps: int = 600) -> Records:
    """Growth, an out-of-memory error, validation, saving, pre-emption and a restart that takes a
    tenth of the run back.
    """
    records, grow, fail, stop = Records(), num_steps // 3, num_steps // 2, 4 * num_steps // 5
    again = stop - num_steps // 10
    records.start()
    records.add(
        "bound", message="probe of the largest batch:\n rows  fits\n   24   yes", max_batch_size=24
    )
    records.add("no_effect", message=f"a key has no effect: {NASTY}")

    def run(first, last):
        for number in range(first, last + 1):
            rows, micro_batches = (
                (16, 1) if number <= grow else (64, 4) if number <= fail else (64, 8)
            )
            if number == grow + 1:
                records.add("batch_size", message="batch_size 16 -> 64", before=16, after=64)
            if number == fail + 1:
                records.add(
                    "limit",
                    message="out of memory with 16 rows of 512 tokens at once",
                    before=16,
                    after=8,
                    out_of_memory=True,
                )
            noise = {"gradient_noise_scale": 8 + number / 10} if number > 20 else {}
            full = (
                {"loss_per_full_batch": 2 + 5 * math.exp(-number / 200)} if number % 4 == 0 else {}
            )
            memory = {"peak_memory_active": 11.0 + rows / 64, "peak_memory_alloc": 11.2 + rows / 64}
            records.step(
                number,
                rows=rows,
                micro_batches=micro_batches,
                oom_count=int(number > fail),
                lr=1e-3 * min(1, number / 50) * (1 - number / num_steps / 2),
                peak_memory_reserved=13.5,
                **memory,
                **noise,
                **full,
            )
            if number % (num_steps // 6) == 0:
                records.add(
                    "validation",
                    message=f"step {number}: val_loss",
                    steps=number,
                    val_loss=2.4 + 40 / number,
                )
            if number == again:
                records.add("resume_point", message=f"step {number} saved", step=number)

    run(1, stop)
    records.add("preempted", message="asked to stop")
    records.time += 36_000
    records.start(after=again, resumed=True)
    run(again + 1, num_steps)
    records.add("checkpoint", message="epoch 0 saved", epoch=0, steps=num_steps)
    return records
