"""What steps of varying lengths reserve over what they allocate, on PyTorch's CUDA stack without a
device.

    make cuda-stack; .venv-cuda-stack/bin/python benchmarks/fragmentation.py [--quick]
        [--output DIR]

Twenty distributions of lengths, each with a model of real width and two layers, drawn by a seed.
500 steps run as micro-batches of a written number of tokens, on the default allocator: in a random
order (as sampled), and by `AdaptiveStep`. Reported: the 99th percentile over the steps of what is
reserved at the end of one, over the peak of what was allocated until then; the first two steps, in
which the optimizer's state is made, are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import records
import torch
from torch import nn

from adaptive_batch import AdaptiveStep
from adaptive_batch.data import MicroBatchLimit, micro_batches

SEED = 32
STEPS = 500
ROWS = 24
LONGEST = 4096
WAYS = ("as sampled", "AdaptiveStep")
KINDS = ("equal", "lognormal", "bimodal", "one long row in 500")


@dataclass(frozen=True)
class Case:
    """A model, the lengths of its rows, and what a micro-batch holds.

    Attributes:
        model: name of a builder here.
        kind: distribution of lengths.
        mean: of the logarithm of lengths, as tokens.
        spread: standard deviation of that logarithm.
        tokens: padded tokens of a micro-batch.
        seed: of the lengths.
    """

    model: str
    kind: str
    mean: int
    spread: float
    tokens: int
    seed: int

    def lengths(self) -> Iterator[list[int]]:
        """Yield the lengths of each step's rows."""
        draw = random.Random(self.seed)
        while True:
            yield [max(16, min(LONGEST, round(self._length(draw)))) for _ in range(ROWS)]

    def _length(self, draw: random.Random) -> float:
        length = math.exp(draw.gauss(math.log(self.mean), self.spread))
        if self.kind == "equal":
            return self.mean
        if self.kind == "bimodal" and draw.random() < 0.2:
            return 6 * length
        if self.kind == "one long row in 500" and draw.random() < 1 / 500:
            return 10 * self.mean
        return length


def sample(number: int) -> list[Case]:
    draw = random.Random(SEED)
    cases = []
    for place in range(number):
        kind = KINDS[place % len(KINDS)]
        spread = {"lognormal": draw.choice([0.5, 0.8, 1.2])}.get(kind, 0.15)
        mean = draw.randint(150, 600)
        cases.append(
            Case(
                draw.choice(list(MODELS)),
                kind,
                mean,
                spread,
                draw.choice([4096, 8192, 12288]),
                place,
            )
        )
    return cases


def llama3_2_1b() -> nn.Module:
    from torchtune.models.llama3_2 import llama3_2

    return llama3_2(
        vocab_size=128256,
        num_layers=2,
        num_heads=32,
        num_kv_heads=8,
        embed_dim=2048,
        max_seq_len=LONGEST,
        intermediate_dim=8192,
    )


def llama3_2_3b() -> nn.Module:
    from torchtune.models.llama3_2 import llama3_2

    return llama3_2(
        vocab_size=128256,
        num_layers=2,
        num_heads=24,
        num_kv_heads=8,
        embed_dim=3072,
        max_seq_len=LONGEST,
        intermediate_dim=8192,
    )


def llama3_1_8b() -> nn.Module:
    from torchtune.models.llama3_1 import llama3_1

    return llama3_1(
        vocab_size=128256,
        num_layers=2,
        num_heads=32,
        num_kv_heads=8,
        embed_dim=4096,
        max_seq_len=LONGEST,
        intermediate_dim=14336,
    )


def qwen2_5_0_5b() -> nn.Module:
    from torchtune.models.qwen2 import qwen2

    return qwen2(
        vocab_size=151936,
        num_layers=2,
        num_heads=14,
        num_kv_heads=2,
        embed_dim=896,
        max_seq_len=LONGEST,
        intermediate_dim=4864,
        tie_word_embeddings=True,
    )


def mistral_7b() -> nn.Module:
    from torchtune.models.mistral import mistral

    return mistral(
        vocab_size=32000,
        num_layers=2,
        num_heads=32,
        num_kv_heads=8,
        embed_dim=4096,
        max_seq_len=LONGEST,
        intermediate_dim=14336,
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    build.__name__: build
    for build in (llama3_2_1b, llama3_2_3b, llama3_1_8b, qwen2_5_0_5b, mistral_7b)
}


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    labels = torch.full_like(tokens, -100)
    for row, length in enumerate(lengths):
        labels[row, :length] = 1
    return {"tokens": tokens, "labels": labels}


def run_case(case: Case, way: str, steps: int) -> dict[str, float]:
    """Train so many steps in this process; return ratios and sizes, in GiB."""
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = MODELS[case.model]()
    model.set_num_output_chunks(8)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss_of = CEWithChunkedOutputLoss()

    def forward_backward(batch: dict[str, torch.Tensor], share: float) -> None:
        loss = loss_of(model(batch["tokens"].to("cuda")), batch["labels"].to("cuda"))
        (loss * share).backward()

    step = AdaptiveStep(
        model,
        lambda part: forward_backward(part.batch, part.share),
        micro_batch_tokens=case.tokens,
    )
    draw = random.Random(case.seed)

    def run_as_sampled(lengths: list[int]) -> None:
        pieces = micro_batches(lengths, MicroBatchLimit(case.tokens, "tokens"))
        draw.shuffle(pieces)
        for piece in pieces:
            forward_backward(batch_of([lengths[row] for row in piece.rows]), 1 / len(pieces))

    ratios = []
    peak = 0
    for _, lengths in zip(range(steps), case.lengths(), strict=False):
        if way == "as sampled":
            run_as_sampled(lengths)
        else:
            step(batch_of(lengths))
        optimizer.step()
        optimizer.zero_grad()
        peak = max(peak, torch.cuda.max_memory_allocated())
        ratios.append(torch.cuda.memory_reserved() / peak)
    later = sorted(ratios[2:])
    return {
        "p99": later[math.ceil(0.99 * len(later)) - 1],
        "end": ratios[-1],
        "peak_gib": peak / 2**30,
    }


def measure(case: Case, way: str, steps: int) -> dict[str, float]:
    """Run a case in a process of its own, whose allocator is new."""
    request = json.dumps({"case": asdict(case), "way": way, "steps": steps})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--run", request],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="four cases of 60 steps")
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("run it by the Python of `make cuda-stack`")
    if arguments.run:
        request = json.loads(arguments.run)
        print(json.dumps(run_case(Case(**request["case"]), request["way"], request["steps"])))
        return
    steps = 60 if arguments.quick else STEPS
    table: list[dict[str, Any]] = []
    for case in sample(4 if arguments.quick else 20):
        ways = {way: measure(case, way, steps) for way in WAYS}
        table.append({**asdict(case), **ways})
        figures = "  ".join(f"{way} {ways[way]['p99']:.3f}" for way in WAYS)
        print(
            f"{case.model:<14} {case.kind:<20} {case.mean:>4} {case.spread} {case.tokens:>6}"
            f"  {figures}",
            flush=True,
        )
    for way in WAYS:
        ratios = [row[way]["p99"] for row in table]
        print(f"{way}: median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}")
    records.write("fragmentation", arguments.output, steps=steps, cases=table)


if __name__ == "__main__":
    main()
