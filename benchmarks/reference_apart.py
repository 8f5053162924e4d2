"""What DPO gains where its reference runs for all pairs of a step before they are trained, in
micro-batches of its own.

    python benchmarks/reference_apart.py [--rounds N] [--output DIR]
    python benchmarks/reference_apart.py --ranks [--rounds N] [--output DIR]

Adapters on a model of the demo's size, without files, on one thread. For each budget: the most of
the longest pairs that fit in training with the reference within its micro-batches, the most without
it, and the most in the reference alone, all by counted bytes. Steps of 32 pairs of skewed lengths
are then trained with these, the two ways in turns, and the medians of the time of a step compared:
CPU time, as other programs may run beside, and wall time. Largest differences of losses, metrics
and gradients are in the record too.

With ``--ranks`` two ranks of gloo, which divide a model by FSDP2, train one pair at a time, the two
ways in turns, each round a run of its own: medians of the tokens a second of its steps but for the
first.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import records
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.cli import make_setup
from support.launch import launch
from support.model_families import Combination
from support.preferences import LORA, OURS, write_pairs
from support.wired_jobs import Wired, largest_difference

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.report import read_records
from adaptive_batch.torchtune import builder_of

# The demo's model.
DIMENSIONS = {
    "vocab_size": 2048,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 128,
    "intermediate_dim": 384,
    "max_seq_len": 512,
}
ADAPTERS = {
    "_component_": "torchtune.models.qwen2.lora_qwen2",
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 8,
    "lora_alpha": 16,
}
PAIRS = 32
LONGEST = 384
# Pairs of the longest that fit with the reference within training's micro-batches.
BUDGETS = (1, 2, 4)


def skewed_pairs(seed: int) -> list[dict[str, list[int]]]:
    """Pairs of answers of log-normal lengths, of which one is the longest."""
    drawn = random.Random(seed)
    rows = []
    for number in range(PAIRS):
        row = {}
        for name in ("chosen", "rejected"):
            length = int(min(LONGEST, max(16, drawn.lognormvariate(4.0, 0.9))))
            if number == 0:
                length = LONGEST
            tokens = [drawn.randrange(1, 2000) for _ in range(length)]
            row[f"{name}_input_ids"] = tokens
            row[f"{name}_labels"] = [-100] * 8 + tokens[8:]
        rows.append(row)
    return rows


def job(rows: Any, *, pairs_at_once: int, reference: MicroBatchLimit | None) -> Wired:
    """A job of adapters on the rows."""
    cfg = Combination("qwen2", LONGEST).config()
    cfg.loss = {"_component_": "torchtune.rlhf.loss.DPOLoss"}
    cfg.model = {**ADAPTERS, **DIMENSIONS}
    return Wired(
        cfg,
        rows,
        builder=builder_of(cfg),
        limit=MicroBatchLimit(pairs_at_once),
        reference_limit=reference,
    )


def peak_bytes(wired: Wired, row: Any, pairs_at_once: int, *, of_reference: bool = False) -> int:
    """Bytes at the peak of that many pairs like one, in training or in the reference alone."""
    runner = wired.trainer.runner
    wired.model.zero_grad(set_to_none=True)
    resident = iter([*wired.model.parameters()])
    with runner.memory.measure(resident, budget_bytes=2**50) as usage:
        if of_reference:
            assert runner.reference is not None
            runner.reference.try_rows([row] * pairs_at_once)
        else:
            for _ in range(2):
                runner.try_rows([row] * pairs_at_once)
    assert usage.peak_bytes is not None
    return usage.peak_bytes


def most_pairs(wired: Wired, row: Any, budget: int, **how: Any) -> int:
    """The most pairs like one whose peak is within a budget."""
    fitting = 1
    while fitting < PAIRS and peak_bytes(wired, row, fitting + 1, **how) <= budget:
        fitting += 1
    return fitting


def on_ranks(rounds: int) -> dict[str, Any]:
    """Tokens a second of a rank, the reference within training's micro-batches and apart."""
    own = ("epochs=4", "batch_size=8", "micro_batch_size=1", "optimizer.fused=False")
    sides = {"within": (), "apart": ("reference_micro_batch_size=8",)}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        setup = make_setup(Path(folder))
        pairs = write_pairs(setup)
        for _ in range(rounds):
            for name, keys in sides.items():
                (attempt,) = launch(setup, 2, *LORA, *pairs, *own, *keys, recipe=OURS, timeout=400)
                assert attempt.exit_statuses == [0, 0], attempt.output[-3000:]
                logged = read_records(attempt.output_dir / "adaptive_batch" / "run.jsonl")
                steps = [record for record in logged if record["kind"] == "step"]
                rates[name] += [step["tokens_per_second_per_gpu"] for step in steps[1:]]
                print(f"{name}: {statistics.median(rates[name]):.0f} tokens/s a rank", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {"rates": rates, "medians": medians, "gain": medians["apart"] / medians["within"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--ranks", action="store_true", help="two ranks in place of one device")
    parser.add_argument("--output", type=Path, default=records.RESULTS)
    arguments = parser.parse_args()
    if arguments.ranks:
        measured = on_ranks(arguments.rounds)
        print(f"x{measured['gain']:.2f}")
        records.write("reference_apart_on_ranks", arguments.output, **measured)
        return
    torch.set_num_threads(1)
    rows = skewed_pairs(0)
    real_tokens = sum(len(tokens) for row in rows for key, tokens in row.items() if "ids" in key)
    everything = MicroBatchLimit(PAIRS)
    within = job(rows, pairs_at_once=1, reference=None)
    apart = job(rows, pairs_at_once=1, reference=everything)
    cases = []
    for pairs_within in BUDGETS:
        budget = peak_bytes(within, rows[0], pairs_within)
        pairs_apart = most_pairs(apart, rows[0], budget)
        in_reference = most_pairs(apart, rows[0], budget, of_reference=True)
        tokens = MicroBatchLimit(in_reference * 2 * LONGEST, "tokens")
        sides = {
            "within": job(rows, pairs_at_once=pairs_within, reference=None),
            "apart, as many in training": job(rows, pairs_at_once=pairs_within, reference=tokens),
            "apart": job(rows, pairs_at_once=pairs_apart, reference=tokens),
        }
        cpu_seconds: dict[str, list[float]] = {name: [] for name in sides}
        wall_seconds: dict[str, list[float]] = {name: [] for name in sides}
        # The first turn of each is not counted.
        for turn in range(1 + arguments.rounds):
            for name, side in sides.items():
                cpu_start = time.process_time()
                start = time.perf_counter()
                side.run(rows)
                if turn:
                    cpu_seconds[name].append(time.process_time() - cpu_start)
                    wall_seconds[name].append(time.perf_counter() - start)
        alike = sides["apart, as many in training"]
        of_within = sides["within"].run(rows)
        gradients = sides["within"].gradients()
        result = alike.run(rows)
        rates = {
            name: {
                "tokens_per_cpu_second": real_tokens / statistics.median(cpu_seconds[name]),
                "tokens_per_second": real_tokens / statistics.median(wall_seconds[name]),
            }
            for name in sides
        }
        case = {
            "budget_bytes": budget,
            "pairs_within": pairs_within,
            "pairs_apart": pairs_apart,
            "pairs_in_reference": in_reference,
            "rates": rates,
            "gain": rates["apart"]["tokens_per_cpu_second"]
            / rates["within"]["tokens_per_cpu_second"],
            "largest_difference_of_metrics": max(
                abs(result.metrics[name] - value) for name, value in of_within.metrics.items()
            ),
            "difference_of_losses": abs(float(result.loss) - float(of_within.loss)),
            "largest_difference_of_gradients": largest_difference(gradients, alike.gradients()),
        }
        cases.append(case)
        print(
            f"{budget / 2**20:6.1f} MiB: {pairs_within} pairs within, {pairs_apart} apart and"
            f" {in_reference} in the reference: "
            + ", ".join(
                f"{name} {rate['tokens_per_cpu_second']:.0f} ({rate['tokens_per_second']:.0f})"
                for name, rate in rates.items()
            )
            + f" tokens per CPU second (second); x{case['gain']:.2f}",
            flush=True,
        )
    records.write("reference_apart", arguments.output, real_tokens=real_tokens, cases=cases)


if __name__ == "__main__":
    main()
