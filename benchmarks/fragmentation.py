"""What steps of varying lengths reserve over what they allocate, on PyTorch's CUDA stack without a
device.

    make cuda-stack; .venv-cuda-stack/bin/python benchmarks/fragmentation.py [--quick]
        [--ranks N] [--cases N] [--steps N] [--way WAY]... [--output DIR]

Twenty distributions of lengths, each with a model of real width and two layers, drawn by a seed.
500 steps run as micro-batches of a written number of tokens: in a random order (as sampled) on
default segments, and by `AdaptiveStep` on default and on expandable ones. Reported: the 99th
percentile over the steps of what is reserved at the end of one, over the peak of what was allocated
until then; the first two steps, in which the optimizer's state is made, are left out. ``--steps``
runs another number of them, and ``--way`` some ways alone.

With ``--ranks N`` the first case of 8 billion parameters' width whose lengths are lognormal runs
60 steps on so many ranks that FSDP2 divides its model over, each with rows of its own, and the
same with equal lengths 10 steps. Reported are the highest figures of any rank; splits are not
checked. No free block serves two streams, and with FSDP2 a step allocates for three. So the sum of
what each stream needs at its own peak is a floor of what is reserved, and above the peak of all
together. Reported are the floor over that peak, and what is reserved over the floor too.

A case that is finished is kept in `.measure/`, and a measurement that was stopped resumes with the
next one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import records
import torch
from records import Finished
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from adaptive_batch import AdaptiveStep, Part
from adaptive_batch.data import MicroBatchLimit, micro_batches
from adaptive_batch.distributed import maximum
from adaptive_batch.training.split_check import SplitCheck

SEED = 32
STEPS = 500
STEPS_ON_RANKS = 60
STEPS_OF_EQUAL_LENGTHS = 10
ROWS = 24
LONGEST = 4096
# Settings of the allocator of each way.
WAYS = {
    "as sampled": "",
    "AdaptiveStep": "",
    "AdaptiveStep, expandable": "expandable_segments:True",
}
KINDS = ("equal", "lognormal", "bimodal", "one long row in 500")


class StepMemory(NamedTuple):
    """The peak until the end of a step, and what is reserved after it, in bytes."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class Case:
    """A model, the lengths of its rows, and what a micro-batch holds.

    Attributes:
        model: name in `MODELS`.
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
        model, tokens = draw.choice(list(MODELS)), draw.choice([4096, 8192, 12288])
        cases.append(Case(model, kind, mean, spread, tokens, place))
    return cases


# Builder of torchtune, vocabulary, heads, heads of keys, width, width of the MLP.
MODELS = {
    "llama3_2_1b": ("llama3_2.llama3_2", 128256, 32, 8, 2048, 8192),
    "llama3_2_3b": ("llama3_2.llama3_2", 128256, 24, 8, 3072, 8192),
    "llama3_1_8b": ("llama3_1.llama3_1", 128256, 32, 8, 4096, 14336),
    "qwen2_5_0_5b": ("qwen2.qwen2", 151936, 14, 2, 896, 4864),
    "mistral_7b": ("mistral.mistral", 32000, 32, 8, 4096, 14336),
}


def build_model(name: str) -> nn.Module:
    """Build a model of two layers."""
    builder, vocabulary, heads, kv_heads, width, mlp_width = MODELS[name]
    module, function = builder.split(".")
    build = getattr(import_module(f"torchtune.models.{module}"), function)
    return build(
        vocab_size=vocabulary,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        embed_dim=width,
        max_seq_len=LONGEST,
        intermediate_dim=mlp_width,
        **({"tie_word_embeddings": True} if module == "qwen2" else {}),
    )


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    labels = torch.full_like(tokens, -100)
    for row, length in enumerate(lengths):
        labels[row, :length] = 1
    return {"tokens": tokens, "labels": labels}


def built(case: Case) -> tuple[AdaptiveStep, torch.optim.Optimizer]:
    """Return the step of a case, and the optimizer of its model."""
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    torch.set_default_dtype(torch.bfloat16)
    # Nothing is made but what stays, as where a model is moved to a device.
    with torch.device("meta"):
        model = build_model(case.model)
    if distributed.is_initialized():
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)
    for module in model.modules():
        if getattr(module, "is_cache_built", True):
            module.to_empty(device="cuda", recurse=False)
        else:
            with torch.device("cpu"):
                module.rope_init()  # type: ignore[operator]
            module.to("cuda")
    model.set_num_output_chunks(8)  # type: ignore[operator]
    loss_of = CEWithChunkedOutputLoss()

    def forward_backward(part: Part) -> None:
        device = next(model.parameters()).device
        logits = model(part.batch["tokens"].to(device))
        (loss_of(logits, part.batch["labels"].to(device)) * part.share).backward()

    step = AdaptiveStep(
        model,
        forward_backward,
        micro_batch_tokens=case.tokens,
        num_labels=lambda batch: (batch["labels"] != -100).sum(),
    )
    return step, torch.optim.AdamW(model.parameters(), fused=True)


class StreamPeaks:
    """What was allocated at most for each stream, by the allocator's own history, which begins
    here.
    """

    def __init__(self) -> None:
        self._allocated: Counter[int] = Counter()
        self._peaks: Counter[int] = Counter()
        self._begin()

    def _begin(self) -> None:
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=10**6)

    def floor_bytes(self) -> int:
        """Return the sum of the peaks of the streams."""
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        for event in events:
            stream = event["stream"]
            if event["action"] == "alloc":
                self._allocated[stream] += event["size"]
                self._peaks[stream] = max(self._peaks[stream], self._allocated[stream])
            elif event["action"] == "free_completed":
                self._allocated[stream] -= event["size"]
        # Otherwise the history keeps what has been read.
        torch.cuda.memory._record_memory_history(None)
        self._begin()
        return self._peaks.total()


def step_memory() -> StepMemory:
    return StepMemory(torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())


def run_case(
    case: Case, way: str, steps: int, *, observe: Callable[[], Any] = step_memory
) -> list[Any]:
    """Train so many steps in this process; return what was allocated at most by the end of each,
    and what is reserved after it; or what else `observe` returns.
    """
    step, optimizer = built(case)
    draw = random.Random(case.seed)

    def run_as_sampled(lengths: list[int]) -> None:
        pieces = micro_batches(lengths, MicroBatchLimit(case.tokens, "tokens"))
        draw.shuffle(pieces)
        # A rank that has fewer runs its last one again.
        pieces += pieces[-1:] * (maximum(len(pieces)) - len(pieces))
        for number, piece in enumerate(pieces, start=1):
            if distributed.is_initialized():
                step.model.set_requires_gradient_sync(number == len(pieces))  # type: ignore[operator]
            batch = batch_of([lengths[row] for row in piece.rows])
            step.engine.run_alone(Part(batch, len(piece.rows), share=1 / len(pieces)))

    memory = []
    for _, lengths in zip(range(steps), case.lengths(), strict=False):
        if way == "as sampled":
            run_as_sampled(lengths)
        else:
            step(batch_of(lengths))
        optimizer.step()
        optimizer.zero_grad()
        memory.append(observe())
    return memory


def summarised(memory: Sequence[StepMemory]) -> dict[str, float]:
    """Return what is reserved over the peak until then, and that peak, in GiB."""
    ratios = []
    peak = 0
    for step in memory:
        peak = max(peak, step.allocated_bytes)
        ratios.append(step.reserved_bytes / peak)
    later = sorted(ratios[2:])
    return {
        "p99": later[math.ceil(0.99 * len(later)) - 1],
        "end": ratios[-1],
        "peak_gib": peak / 2**30,
    }


def in_process(way: str, case: Case, steps: int) -> Any:
    """Run a way of a case in a process of its own, whose allocator is new; return its answer."""
    request = json.dumps({"case": asdict(case), "way": way, "steps": steps})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--answer", request],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTORCH_ALLOC_CONF": WAYS[way]},
    )
    return json.loads(done.stdout.splitlines()[-1])


def on_ranks(case: Case, way: str, steps: int, num_ranks: int) -> list[dict[str, float]]:
    """Run a way of a case on several ranks; return the figures of each."""
    request = {"case": asdict(case), "way": way, "steps": steps}
    # Small messages have to arrive.
    stub = {"EMULATE_DEVICE_COUNT": str(num_ranks), "EMULATE_COPIED_BYTES": "65536"}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run"),
                *("--standalone", "--nproc-per-node", str(num_ranks), __file__),
                *("--answer", json.dumps({**request, "folder": folder})),
            ],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **stub, "PYTORCH_ALLOC_CONF": WAYS[way]},
        )
        memories = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    assert len(memories) == num_ranks
    figures = []
    for memory in memories:
        of_peak = summarised([StepMemory(peak, reserved) for peak, reserved, _ in memory])
        of_floor = summarised([StepMemory(floor, reserved) for _, reserved, floor in memory])
        of_peak["p99_over_floor"] = of_floor["p99"]
        of_peak["end_over_floor"] = of_floor["end"]
        of_peak["floor_gib"] = of_floor["peak_gib"]
        figures.append(of_peak)
    return figures


def answer_on_rank(request: Mapping[str, Any]) -> None:
    """Leave what a rank that :func:`on_ranks` has started was asked for in a file of its own."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl")
    # Losses are what memory happens to hold where small messages arrive.
    SplitCheck.check = lambda *_, **__: None  # type: ignore[method-assign]
    case = Case(**request["case"])
    case = replace(case, seed=case.seed + 1000 * rank)
    peaks = StreamPeaks()
    memory = run_case(
        case,
        request["way"],
        request["steps"],
        observe=lambda: (*step_memory(), peaks.floor_bytes()),
    )
    (Path(request["folder"]) / f"{rank}.json").write_text(json.dumps(memory))
    distributed.destroy_process_group()


def answer(request: Mapping[str, Any]) -> None:
    """Print what a process that :func:`in_process` has started was asked for."""
    if "folder" in request:
        answer_on_rank(request)
        return
    case = Case(**request["case"])
    print(json.dumps(run_case(case, request["way"], request["steps"])))


def measure_fragmentation(
    cases: Sequence[Case], steps: int, finished: Finished, *, ways: Sequence[str]
) -> list[dict[str, Any]]:
    def ratios_of(case: Case) -> dict[str, Any]:
        ratios = {}
        for way in ways:
            ratios[way] = summarised([StepMemory(*step) for step in in_process(way, case, steps)])
        return ratios

    table = []
    for case in cases:
        key = {**asdict(case), "steps": steps, "ways": list(ways)}
        entry = finished.entry(key, partial(ratios_of, case))
        table.append(entry)
        figures = entry.get("failed")
        if figures is None:
            figures = "  ".join(f"{way} {entry[way]['p99']:.3f}" for way in ways)
        print(f"{described(case)}  {figures}", flush=True)
    done = [entry for entry in table if "failed" not in entry]
    for way in ways if done else ():
        ratios = [entry[way]["p99"] for entry in done]
        low = sum(ratio <= 1.05 for ratio in ratios)
        print(
            f"{way}: median {statistics.median(ratios):.3f}, worst {max(ratios):.3f},"
            f" {low} of {len(ratios)} at most 1.05"
        )
    return table


def measure_ranks(
    cases: Sequence[Case], steps: int, finished: Finished, *, num_ranks: int
) -> list[dict[str, Any]]:
    def ratios_of(case: Case, steps: int) -> dict[str, Any]:
        return {way: on_ranks(case, way, steps, num_ranks) for way in WAYS}

    varying = next(
        case for case in cases if (case.model, case.kind) == ("llama3_1_8b", "lognormal")
    )
    equal = replace(varying, kind="equal", spread=0)
    table = []
    print(f"{'':<83} over peak  floor over peak  over floor")
    for case, num_steps in ((varying, steps), (equal, STEPS_OF_EQUAL_LENGTHS)):
        key = {**asdict(case), "ranks": num_ranks, "steps": num_steps}
        entry = finished.entry(key, partial(ratios_of, case, num_steps))
        table.append(entry)
        for way in WAYS if "failed" not in entry else ():
            ranks = entry[way]
            over_peak = max(rank["p99"] for rank in ranks)
            floor = max(rank["floor_gib"] / rank["peak_gib"] for rank in ranks)
            over_floor = max(rank["p99_over_floor"] for rank in ranks)
            print(
                f"{described(case)}  {num_ranks} ranks  {way:<24}"
                f" {over_peak:>9.3f} {floor:>16.3f} {over_floor:>11.3f}",
                flush=True,
            )
    return table


def described(case: Case) -> str:
    return f"{case.model:<14} {case.kind:<20} {case.mean:>4} {case.spread:<4} {case.tokens:>5}"


def main() -> None:
    parser = records.parser(__doc__, quick="four cases of few steps")
    parser.add_argument("--ranks", type=int, metavar="N", help="one case on so many ranks")
    parser.add_argument("--cases", type=int, default=20, metavar="N", help="the first N of 20")
    parser.add_argument("--steps", type=int, metavar="N", help="of each case, rather than its own")
    parser.add_argument(
        "--way", choices=list(WAYS), action="append", help="without --ranks; repeat it for more"
    )
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("run it by the Python of `make cuda-stack`")
    if arguments.answer:
        answer(json.loads(arguments.answer))
        return
    cases = sample(20)[: 4 if arguments.quick else arguments.cases]
    name = "fragmentation"
    ways = arguments.way or list(WAYS)
    measure: Callable[..., list[dict[str, Any]]] = partial(measure_fragmentation, ways=ways)
    steps = 60 if arguments.quick else STEPS
    if arguments.ranks:
        cases = sample(20)
        name = f"fragmentation_{arguments.ranks}_ranks"
        measure = partial(measure_ranks, num_ranks=arguments.ranks)
        steps = 20 if arguments.quick else STEPS_ON_RANKS
    steps = arguments.steps or steps
    finished = Finished(name)
    table = measure(cases, steps, finished)
    records.write(name, arguments.output, steps=steps, cases=table)
    finished.forget()


if __name__ == "__main__":
    main()
