"""What grows with the number of ranks: dealing, planning and agreement of 8 to 4,096 ranks,
simulated by the functions that training calls.

    python benchmarks/scale.py [--quick] [--only PART ...] [--output DIR]

No rank but those of part `sync` exists: one process does what one rank of so many would do. The
parts:

    steps     what each rank does on its host between two steps, and how evenly the step is dealt
    epochs    what each rank does once an epoch
    exchange  what our own collectives send in a step; computed
    store     the connections of `Watchdog`, and how busy its requests keep the store
    objects   what ranks tell each other when they begin and when they save
    sync      two real ranks on gloo: gradients reduced after each micro-batch, or after the last
    memory    what forward and backward of Llama 3 take on rank 0 of 8, on tensors without content

Rows have lognormal lengths of mean 385. Each table says what it assumes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import resource
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import records
import torch
import torch.distributed as dist

from adaptive_batch.config_files import config_path
from adaptive_batch.data import (
    MicroBatchLimit,
    RowReader,
    balance_by_rows,
    balance_by_tokens,
    micro_batches,
    plan_batches,
    row_order,
)
from adaptive_batch.distributed import Watchdog
from adaptive_batch.estimate.tracker import AttributedTracker
from adaptive_batch.memory import RandomState
from adaptive_batch.report import RunLog

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.ranks import run_on_ranks

RANKS = (8, 64, 512, 4_096)
ROWS = 16  # of one rank in a step
CAPACITY = MicroBatchLimit(4_096, "tokens")  # such rows are two micro-batches
STEPS = 4
TARGET_MILLISECONDS = 100
EPOCH_ROWS = 1_000_000
MIB, GIB = 2**20, 2**30

# agree_on: eight whole numbers of 8 bytes; the counts of a step: five more; its loss: one
# number of 4 bytes.
COLLECTIVES = {"agree_on": 64, "counts": 40, "loss": 4}
HOP_MICROSECONDS = 10  # assumed of one message between two machines; a machine's own are faster

MICRO_BATCHES = 8  # of part `sync`

SHAPES = (
    ("8B", 2, 512),
    ("8B", 16, 1_024),
    ("8B", 32, 1_024),
    ("70B", 1, 512),
    ("70B", 2, 1_024),
    ("70B", 8, 1_024),
)


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows without content: what reading and tokenizing takes does not depend on the ranks."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"row": row}


def lognormal(num_rows: int) -> torch.Tensor:
    """Lengths of mean 385 tokens, 8 to 2048; 16 random rows waste 72.3% as padding."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    return (5.53 + 0.97 * normal).exp().clamp(8, 2048).round().to(torch.int64)


def seconds_of(call: Callable[[], object], *, times: int) -> float:
    """Of the processor, the least of several times: others may use the machine."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return min(taken)


def peak_bytes_of(call: Callable[[], object]) -> int:
    """The most that a call's Python objects take at once; tensors are not among them."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


# --- steps


def deal(
    lengths: torch.Tensor, numbers: Sequence[int], ranks: int, by: str
) -> Sequence[Sequence[int]]:
    """Which rows are whose, as `StepPlanner.deal` finds it on each rank."""
    if by == "rows":
        return balance_by_rows(len(numbers), ranks)
    return balance_by_tokens(lengths[torch.as_tensor(numbers, dtype=torch.int64)], ranks, CAPACITY)


def measure_steps(ranks: int, by: str, *, steps: int, folder: Path) -> dict[str, Any]:
    """What one rank does between two steps, and how evenly all would run them."""
    rows = ranks * ROWS
    lengths = lognormal(rows * steps)
    reader = RowReader(Rows(len(lengths)))
    reader.begin()
    order = row_order(len(lengths), shuffle=True)
    capacity = MicroBatchLimit(ROWS) if by == "rows" else CAPACITY
    path = folder / "adaptive_batch" / "run.jsonl"
    record = RunLog(folder)
    dealing, taking, cutting, recording = [], [], [], []
    imbalance, counts = [], []
    padded = waited_for = 0
    for step in range(steps):
        start = time.process_time()
        numbers = order[step * rows : (step + 1) * rows].tolist()
        dealt = deal(lengths, numbers, ranks, by)
        dealing.append(time.process_time() - start)

        start = time.process_time()
        reader.read([numbers[position] for position in dealt[ranks // 2]])
        taking.append(time.process_time() - start)

        of_step = lengths[numbers].tolist()
        mine = [of_step[row] for row in dealt[ranks // 2]]
        start = time.process_time()
        micro_batches(mine, capacity)
        cutting.append(time.process_time() - start)

        start = time.process_time()
        record.step(step=1, rows=numbers)
        recording.append(time.process_time() - start)

        assert sorted(row for positions in dealt for row in positions) == list(range(rows))
        pieces = [
            micro_batches([of_step[row] for row in positions], capacity) for positions in dealt
        ]
        tokens = [[piece.run_tokens for piece in of_rank] for of_rank in pieces]
        totals = list(map(sum, tokens))
        imbalance.append(max(totals) * ranks / sum(totals) - 1)
        counts.append(max(map(len, tokens)))
        padded += sum(totals)
        waited_for += ranks * sum(map(max, zip_longest(*tokens, fillvalue=0)))
    record.close()
    recorded = path.stat().st_size // steps
    path.unlink()
    numbers = order[:rows].tolist()
    fastest = [1e3 * min(times) for times in (dealing, taking, cutting, recording)]
    return {
        "ranks": ranks,
        "rows": rows,
        "dealt_by": by,
        "deal_ms": fastest[0],
        "take_ms": fastest[1],
        "cut_ms": fastest[2],
        "record_ms_of_rank_zero": fastest[3],
        "host_ms": sum(fastest[:3]),
        "peak_mib": peak_bytes_of(lambda: deal(lengths, numbers, ranks, by)) / MIB,
        "recorded_bytes": recorded,
        "micro_batches": statistics.mean(counts),
        "imbalance": statistics.mean(imbalance),
        "waiting": 1 - padded / waited_for,
    }


def part_steps(*, ranks: Sequence[int], quick: bool) -> list[dict[str, Any]]:
    print(
        f"\nsteps: {ROWS} rows of a rank; dealt by rows, all {ROWS} are one micro-batch, and by"
        f" tokens one has {CAPACITY} at most. \n'host' is what each rank does before it begins to"
        " run a step: deal, take its rows out of the loader, cut them. The device \nwaits for it."
        " 'record' is the line in run.jsonl, on rank zero alone. The processor's time, least of"
        " several steps; 'waiting' is the share of all \nranks' time that some wait for others,"
        " where time is padded tokens."
    )
    print(
        f"{'ranks':>6} {'rows':>7} {'dealt by':<9} {'deal ms':>8} {'take':>6} {'cut':>6}"
        f" {'host ms':>8} {'peak MiB':>9} {'record ms':>10} {'bytes':>8} {'micro-batches':>14}"
        f" {'imbalance':>10} {'waiting':>8}"
    )
    measured = []
    for by in ("rows", "tokens"):
        for number in ranks:
            with TemporaryDirectory() as folder:
                row = measure_steps(number, by, steps=2 if quick else STEPS, folder=Path(folder))
            measured.append(row)
            print(
                f"{row['ranks']:>6,} {row['rows']:>7,} {by:<9} {row['deal_ms']:>8.2f}"
                f" {row['take_ms']:>6.2f} {row['cut_ms']:>6.2f} {row['host_ms']:>8.2f}"
                f" {row['peak_mib']:>9.2f} {row['record_ms_of_rank_zero']:>10.2f}"
                f" {row['recorded_bytes']:>8,} {row['micro_batches']:>14.2f}"
                f" {row['imbalance']:>10.1%} {row['waiting']:>8.1%}",
                flush=True,
            )
    most = max(measured, key=lambda row: float(row["host_ms"]))
    over = "above" if most["host_ms"] > TARGET_MILLISECONDS else "within"
    print(
        f"the most is {most['host_ms']:.1f} ms at {most['ranks']:,} ranks: {over}"
        f" {TARGET_MILLISECONDS} ms a step"
    )
    return measured


# --- epochs


def part_epochs(*, ranks: Sequence[int], quick: bool) -> list[dict[str, Any]]:
    rows = 50_000 if quick else EPOCH_ROWS
    lengths = lognormal(rows)
    order = row_order(rows, shuffle=True)[:]
    in_order = seconds_of(lambda: row_order(rows, shuffle=True)[:], times=2)
    print(
        f"\nepochs: {rows:,} rows. Every rank puts all of them in order, {in_order:.2f} s; what it"
        f" keeps is {8 * rows / MIB:.1f} MiB\nfor the order and as much for lengths. This grows"
        " with rows, not with ranks. With batch_tokens every rank also plans all steps:"
    )
    print(f"{'ranks':>6} {'steps':>9} {'rows of a step':>15} {'seconds':>8}")
    measured = []
    for number in ranks:
        tokens = CAPACITY.amount * number
        start = time.process_time()
        plan = plan_batches(lengths, tokens, order=order, last_rows=number)
        seconds = time.process_time() - start
        measured.append(
            {"ranks": number, "rows": rows, "steps": len(plan), "plan_seconds": seconds}
        )
        print(
            f"{number:>6,} {len(plan):>9,} {rows / len(plan):>15,.0f} {seconds:>8.2f}", flush=True
        )
    return [{"rows": rows, "order_seconds": in_order}, *measured]


# --- exchange


def part_exchange(*, ranks: Sequence[int]) -> list[dict[str, Any]]:
    each = ", ".join(f"{name} {size} bytes" for name, size in COLLECTIVES.items())
    print(
        f"\nexchange: our own collectives of a step, however many micro-batches it has ({each});"
        " computed, not measured.\nOf n bytes over W ranks a ring sends 2 (W - 1) / W n from each"
        " rank in 2 (W - 1) messages one after another, a tree in\n2 log2 W; a message is assumed"
        f" to take {HOP_MICROSECONDS} microseconds. NCCL takes trees for messages as small as"
        " these; torchtune's own\nrecipe has two such collectives a step."
    )
    print(
        f"{'ranks':>6} {'bytes of a rank':>16} {'tree: messages':>15} {'ms':>7}"
        f" {'ring: messages':>15} {'ms':>7}"
    )
    computed = []
    for number in ranks:
        size = sum(COLLECTIVES.values())
        sent = 2 * (number - 1) / number * size
        tree, ring = 2 * math.ceil(math.log2(number)), 2 * (number - 1)
        row = {
            "ranks": number,
            "bytes_of_a_rank": sent,
            "tree_messages": tree * len(COLLECTIVES),
            "tree_ms": tree * len(COLLECTIVES) * HOP_MICROSECONDS / 1e3,
            "ring_messages": ring * len(COLLECTIVES),
            "ring_ms": ring * len(COLLECTIVES) * HOP_MICROSECONDS / 1e3,
        }
        computed.append(row)
        print(
            f"{number:>6,} {sent:>16.0f} {row['tree_messages']:>15,} {row['tree_ms']:>7.2f}"
            f" {row['ring_messages']:>15,} {row['ring_ms']:>7.2f}"
        )
    return computed


# --- store


PER_SECOND = 4  # a watchdog polls the store every 0.25 s
REQUESTS = 2000


def connections_to(port: int) -> int:
    """Established connections whose server is this port."""
    count = 0
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            local, _, state = line.split()[1:4]
            count += int(local.rsplit(":", 1)[1], 16) == port and state == "01"
    return count


@contextmanager
def environment(**values: str) -> Any:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def part_store(*, ranks: Sequence[int], quick: bool) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    before = connections_to(port)
    named = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with environment(**named, TORCHELASTIC_USE_AGENT_STORE="True"):
        watch = Watchdog()
        of_watch = connections_to(port) - before
        watch.start()
        watch.stop()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    start = time.perf_counter()
    for _ in range(REQUESTS):
        store.check(["end"])
    seconds = (time.perf_counter() - start) / REQUESTS
    print(
        f"\nstore: a rank's Watchdog holds {of_watch} connection and its process group 1. The"
        " machine that holds the store (torchrun's agent of the first\nnode) has a file open for"
        f" each: `ulimit -n` there is to be above 2 a rank, and a few. It is {limit:,} here. Each"
        f" rank asks {PER_SECOND} times a second\nwhether the run ends; 'busy' is the share of a"
        " second that answering them took here, on one machine."
    )
    print(f"{'ranks':>6} {'connections':>12} {'requests/s':>11} {'busy':>7}")
    rows = []
    for number in ranks:
        row = {
            "ranks": number,
            "connections": (of_watch + 1) * number,
            "requests_per_second": PER_SECOND * number,
            "busy": PER_SECOND * number * seconds,
        }
        rows.append(row)
        print(
            f"{number:>6,} {row['connections']:>12,} {row['requests_per_second']:>11,}"
            f" {row['busy']:>7.1%}"
        )
    return {"connections_of_watch": of_watch, "open_files": limit, "ranks": rows}


# --- objects


def part_objects(*, ranks: Sequence[int]) -> list[dict[str, Any]]:
    from omegaconf import OmegaConf

    path = config_path("llama3_1_8B")
    assert path is not None
    plain = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    assert isinstance(plain, dict)
    configured = {
        str(key): json.dumps(value, sort_keys=True, default=str) for key, value in plain.items()
    }
    random_state = RandomState(torch.device("cpu")).state_dict()
    sizes = {
        "configuration": len(pickle.dumps(configured)),
        "random state": len(pickle.dumps(random_state)),
    }
    print(
        "\nobjects: what each rank tells all others. The configuration once, when they begin, and"
        " compared on each; the state of the\nrandom numbers with each save, which rank zero"
        " reads. Sizes and the processor's time to read them are measured; on a GPU there are a"
        f" few bytes more of random\nstate. A configuration is {sizes['configuration']:,} bytes, a"
        f" random state {sizes['random state']:,}."
    )
    print(
        f"{'ranks':>6} {'configurations MiB':>19} {'read, s':>8} {'random states MiB':>18}"
        f" {'read, s':>8}"
    )
    rows = []
    for number in ranks:
        row: dict[str, Any] = {"ranks": number}
        for name, value in (("configuration", configured), ("random state", random_state)):
            packed = pickle.dumps(value)
            row[f"{name}_mib"] = number * len(packed) / MIB
            row[f"{name}_seconds"] = seconds_of(
                lambda packed=packed, n=number: [pickle.loads(packed) for _ in range(n)], times=1
            )
        rows.append(row)
        print(
            f"{number:>6,} {row['configuration_mib']:>19.2f} {row['configuration_seconds']:>8.3f} "
            f"{row['random state_mib']:>18.2f} {row['random state_seconds']:>8.3f}"
        )
    return rows


# --- sync


def train_two_ways(pairs: int) -> dict[str, Any]:
    """On each of two ranks: steps of the demo's model, in turns with gradients reduced after each
    micro-batch and after the last.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import demo
    from support.runners import build_runner
    from torchtune import training
    from torchtune.models.qwen2 import qwen2

    from adaptive_batch.distributed import Sharding
    from adaptive_batch.training import MicroBatchRunner

    def runner(*, every: bool) -> MicroBatchRunner:
        torch.manual_seed(0)
        model = qwen2(**demo.MODEL)
        training.shard_model(
            model=model, shard_conditions=[training.get_shard_conditions], cpu_offload=False
        )

        def mean_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            logits = model(batch["tokens"])
            return torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
            )

        def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
            return {key: torch.tensor([row[key] for row in rows]) for key in ("tokens", "labels")}

        return build_runner(
            model,
            MicroBatchLimit(1),
            collate=collate,
            mean_loss=mean_loss,
            sharding=Sharding(model, syncs_every_micro_batch=every),
        )

    row = {"tokens": list(range(64)), "labels": list(range(64))}
    ways = {every: runner(every=every) for every in (True, False)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    processor: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs + 2):
        for every in (True, False) if pair % 2 else (False, True):
            dist.barrier()
            start, start_processor = time.perf_counter(), time.process_time()
            ways[every].run([row] * MICRO_BATCHES)
            if pair >= 2:  # the first take longer
                seconds[every].append(time.perf_counter() - start)
                processor[every].append(time.process_time() - start_processor)
            ways[every].drop_gradients()
    parameters = sum(parameter.numel() for parameter in ways[True].model.parameters())
    sent = {}
    for every, way in ways.items():
        calls = {  # of a micro-batch, as it was run first
            kind: sum(
                abs(sizes[0] - sizes[1]) * zeros.keywords["dtype"].itemsize
                for _, sizes, zeros in (call.args for call in calls)
            )
            for kind, calls in way.sharding._known.items()
        }
        others = calls["training" if every else "training, gradients kept"]
        sent[every] = (MICRO_BATCHES - 1) * others + calls["training"]
    connections = connections_to(int(os.environ["MASTER_PORT"])) // dist.get_world_size()
    return {
        "parameters": parameters,
        "seconds": seconds,
        "processor": processor,
        "sent": sent,
        "connections": connections,
    }


def part_sync(*, quick: bool) -> dict[str, Any]:
    pairs = 3 if quick else 20
    found = run_on_ranks(partial(train_two_ways, pairs), 2, timeout=500.0)[0]
    sent, parameters = found["sent"], found["parameters"]
    kept = parameters * 4 // 2
    ratios = {
        clock: sorted(
            last / every
            for every, last in zip(found[clock][True], found[clock][False], strict=True)
        )
        for clock in ("seconds", "processor")
    }
    said = {
        clock: f"median {statistics.median(of_pairs):.3f} ({of_pairs[0]:.3f} to {of_pairs[-1]:.3f})"
        for clock, of_pairs in ratios.items()
    }
    print(
        f"\nsync: 2 ranks on gloo, the demo's model of {parameters:,} parameters in fp32, steps of"
        f" {MICRO_BATCHES} micro-batches of one row of 64 tokens. FSDP's collectives\nsend from"
        f" each rank in a step {sent[True]:,} bytes with gradients reduced after each micro-batch,"
        f" {sent[False]:,} after the last alone ({sent[False] / sent[True]:.3f}).\nThat keeps"
        f" {kept:,} bytes more, parameters x 4 x (1 - 1/2). A step takes, over one with each"
        f" reduced, in {pairs} pairs in turns: {said['seconds']}\nof its time on the clock, which"
        f" others share, and {said['processor']} of the processor's. The process group of a rank"
        f" has {found['connections']} connection to its store."
    )
    return {
        "ranks": 2,
        "parameters": parameters,
        "micro_batches": MICRO_BATCHES,
        "pairs": pairs,
        "sent_bytes": {"every micro-batch": sent[True], "last": sent[False]},
        "kept_bytes": kept,
        "ratios": ratios,
        "connections_of_a_group": found["connections"],
    }


# --- memory


def bytes_of_a_micro_batch(name: str, *, ranks: int, rows: int, tokens: int) -> tuple[int, int]:
    """On rank 0: what parameters and gradients take, and the most that a forward and backward takes
    beside them.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtune import modules, training
    from torchtune.models import llama3
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        with training.set_default_dtype(torch.bfloat16), torch.device("meta"):
            model = {"8B": llama3.llama3_8b, "70B": llama3.llama3_70b}[name]()
        training.set_activation_checkpointing(
            model, auto_wrap_policy={modules.TransformerSelfAttentionLayer}
        )
        apart = partial(training.get_shard_conditions, names_to_match=["tok_embeddings", "output"])
        training.shard_model(model=model, shard_conditions=[apart], cpu_offload=False, dp_mesh=mesh)
        loss = CEWithChunkedOutputLoss()
        model.set_num_output_chunks(loss.num_output_chunks)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            counting = AttributedTracker()
            counting.add(
                [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
            )
            stays = counting.live_bytes
            counting.add(model.buffers())
            batch, labels = (torch.zeros(rows, tokens, dtype=torch.int64) for _ in range(2))
            with counting:
                loss(model(batch), labels).backward()
        return stays, counting.peak_bytes - stays
    finally:
        dist.destroy_process_group()


def part_memory(*, quick: bool) -> list[dict[str, Any]]:
    print(
        "\nmemory: Llama 3 in bf16, activations checkpointed, embeddings and output sharded apart,"
        " gradients of an earlier micro-batch there; FSDP2 on rank 0\nof 8, on fake tensors and a"
        " fake process group: no device has run this, and its allocator would take somewhat more."
    )
    print(
        f"{'model':<6} {'ranks':>6} {'rows':>5} {'tokens':>7} {'weights, gradients GiB':>23}"
        f" {'beside them GiB':>16}"
    )
    measured = []
    for name, rows, tokens in SHAPES[:1] if quick else SHAPES:
        stays, beside = bytes_of_a_micro_batch(name, ranks=8, rows=rows, tokens=tokens)
        row = {"model": name, "ranks": 8, "rows": rows, "tokens": tokens}
        measured.append({**row, "stays_gib": stays / GIB, "beside_gib": beside / GIB})
        print(
            f"{name:<6} {8:>6} {rows:>5} {tokens:>7,} {stays / GIB:>23.2f} {beside / GIB:>16.2f}",
            flush=True,
        )
    return measured


PARTS = ("steps", "epochs", "exchange", "store", "objects", "sync", "memory")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="up to 64 ranks, and each thing fewer times"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    chosen = parser.parse_args(arguments)
    ranks = RANKS[:2] if chosen.quick else RANKS
    chosen.output.mkdir(parents=True, exist_ok=True)
    run: dict[str, Callable[[], Any]] = {
        "steps": lambda: part_steps(ranks=ranks, quick=chosen.quick),
        "epochs": lambda: part_epochs(ranks=ranks, quick=chosen.quick),
        "exchange": lambda: part_exchange(ranks=ranks),
        "store": lambda: part_store(ranks=ranks, quick=chosen.quick),
        "objects": lambda: part_objects(ranks=ranks),
        "sync": lambda: part_sync(quick=chosen.quick),
        "memory": lambda: part_memory(quick=chosen.quick),
    }
    records.write(
        "scale", chosen.output, **{part: run[part]() for part in PARTS if part in chosen.only}
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
