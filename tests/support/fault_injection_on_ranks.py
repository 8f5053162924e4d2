"""Two ranks in training, one of which, or both, run out of memory at a chosen operation: how each
place ends.

Shared by tests/distributed/test_running_out_of_memory.py (a short form) and
benchmarks/faults_on_ranks.py.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.ranks import end_of_ranks
from support.runners import SmallRunner
from support.sharded_model import (
    Decoder,
    Row,
    collate,
    divided,
    make_rows,
    plain,
    runner_of,
    token_losses,
    training_state,
)
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_batch import distributed
from adaptive_batch._util import replaced
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.distributed import Watchdog
from adaptive_batch.memory import (
    RandomState,
    TensorSnapshot,
    device_memory,
    optimizer_state_tensors,
)
from adaptive_batch.probe import DryRun
from adaptive_batch.training import RankReport

RANKS = 2
START = MicroBatchLimit(2)
LENGTHS = (
    (9, 7, 9, 4),
    (6, 9, 8, 5),
)  # of each rank's rows: two micro-batches, single rows after a failure
PHASES = ("forward", "backward", "between", "collective", "counting", "clipping")
PATIENCE_SECONDS = 60.0  # at one place without a word, and it counts as hung
AT_ONCE = 40  # places that one pair of processes runs


@dataclass(frozen=True)
class Place:
    """Operations at which memory runs out.

    Attributes:
        operations: of the step or trial, counted from 1, for each rank; 0 for never.
        again: so many operations later once more on the same ranks; 0 for once.
        first_step: in the first step ever, and not the second.
    """

    operations: tuple[int, int]
    again: int = 0
    first_step: bool = False


@dataclass(frozen=True)
class Way:
    """A way of running steps or trials on the ranks.

    Attributes:
        syncs_every_micro_batch: reduce gradients after each micro-batch.
        trials: those of a probe, and not steps of training.
        measures_noise: in each step.
    """

    syncs_every_micro_batch: bool
    trials: bool = False
    measures_noise: bool = False

    def __str__(self) -> str:
        what = (
            "trials" if self.trials else "steps, noise measured" if self.measures_noise else "steps"
        )
        return (
            f"{what}, gradients reduced"
            f" {'each time' if self.syncs_every_micro_batch else 'at the end'}"
        )


@dataclass
class Outcome:
    """The end of the ranks at one place.

    Attributes:
        place: where memory ran out.
        phases: what each rank that ran out was doing.
        ended: ``replayed`` (or not fitting, of a trial), ``unharmed`` where no rank reached the
            operation, ``lost`` where a rank raised `RankLostError` and all ended, ``one row too
            large`` where a replay by single rows ran out again, or ``hung or broken``.
        differing: names of what differs from ranks that never ran out.
        error: what the rank that was lost said.
        seconds: until all processes had ended, of a place that was lost.
    """

    place: Place
    phases: list[str] = field(default_factory=list)
    ended: str = ""
    differing: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float | None = None


class RunsOut(TorchDispatchMode):
    """Out of memory at an operation, and perhaps once more so many later; operations of a DTensor's
    parts are counted.

    Attributes:
        seen: the phase of each operation, and whether the others could be told.
        phases: in which it ran out.
    """

    def __init__(self, operation: int, again: int, training: Training, note: Any) -> None:
        super().__init__()
        self._left, self._again, self._training, self._note = operation, again, training, note
        self.seen: list[tuple[str, bool]] = []
        self.phases: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        phase = "recovery" if self.phases else self._training.phase
        self.seen.append((phase, self._training.can_be_told))
        self._left -= 1
        if self._left == 0:
            self._left, self._again = self._again, 0
            self.phases.append(phase)
            self._note(self.phases)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


class _Runner(SmallRunner):
    """Notes the phase of a step around its micro-batches."""

    doing = "before"

    def run_step(self, weighting: Any, report: RankReport) -> Any:
        end = weighting.end

        def noted_end() -> Any:
            self.doing = "counting"
            return end()

        with replaced(weighting, end=noted_end):
            return super().run_step(weighting, report)

    def _run_plan(self, weighting: Any, plan: Any) -> Any:
        self.doing = "between"
        try:
            return super()._run_plan(weighting, plan)
        finally:
            self.doing = "before"

    def clip(self) -> torch.Tensor | None:
        before, self.doing = self.doing, "clipping"
        try:
            return super().clip()
        finally:
            self.doing = before


class Training:
    """One rank: a model that draws random numbers, its optimizer, and the step that it begins with,
    which can be begun again.
    """

    def __init__(self, way: Way, *, warm: bool = True) -> None:
        torch.manual_seed(distributed.rank())
        random.seed(distributed.rank())
        np.random.seed(distributed.rank())
        self.way = way
        self.model = divided(Decoder(draws=True, checkpointing=True, dtype=torch.float32, width=8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.rows_run: list[list[int]] = []
        self._in_forward = self._in_trial = False
        self.engine = runner_of(
            self.model,
            START,
            kind=_Runner,
            syncs_every_micro_batch=way.syncs_every_micro_batch,
            mean_loss=self._mean_loss,
            collate=self._collate,
            max_grad_norm=0.5,
            measures_noise=way.measures_noise,
            on_change=lambda change: self.rows_run.append([]),
        )
        self.sharding = self.engine.sharding
        self._is_fresh = not warm  # the optimizer has no state yet
        if warm:
            self.step(0)
        buffers = dict(self.model.named_buffers())
        self._saved = TensorSnapshot(
            [*self.model.parameters(), *optimizer_state_tensors([self.optimizer])]
        )
        self._buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        self._random = RandomState(torch.device("cpu"))

    @property
    def phase(self) -> str:
        """The phase that runs now."""
        if self.sharding._is_in_collective:
            return "collective"
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "forward" if self._in_forward else self.engine.doing

    @property
    def can_be_told(self) -> bool:
        """A failure here is expected to be replayed."""
        return self.sharding.can_finish and (
            self._in_trial if self.way.trials else self.engine.doing == "between"
        )

    def restore(self) -> None:
        """Go back to where :meth:`begin` starts from."""
        self._saved.restore()
        if self._is_fresh:
            self.optimizer.state.clear()
        for name, buffer in self._buffers.items():
            setattr(self.model, name, buffer.clone())
        self._random.restore()
        self.engine.sizer.current = START

    def step(self, number: int, fault: RunsOut | None = None) -> tuple[Any, ...]:
        """One step of the optimizer."""
        self.rows_run = [[]]
        rows = make_rows(LENGTHS[distributed.rank()], seed=10 * number + distributed.rank())
        if fault is None:
            result = self.engine.run(rows)
        else:
            with fault:
                result = self.engine.run(rows)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return plain(result), sorted(self.rows_run[-1])

    def two_steps(self, fault: RunsOut | None, capacity: MicroBatchLimit = START) -> dict[str, Any]:
        """From the start: a step that may fail and one more; all that they leave."""
        self.restore()
        self.engine.sizer.current = capacity
        steps = [self.step(1, fault), self.step(2)]
        state = training_state(self.model, self.optimizer)
        return {**state, "steps": steps}

    def trial(self, rows: int) -> None:
        """Run forward and backward of a trial."""
        self._in_trial = True
        try:
            self.engine.try_rows(make_rows(LENGTHS[0][:rows]))
        finally:
            self._in_trial = False

    def rehearsal(self) -> DryRun:
        """Return trials of this training."""
        return DryRun(
            model=self.model,
            optimizer=self.optimizer,
            forward_backward=self.trial,
            step=lambda: (self.engine.clip(), self.optimizer.step()),
            accumulates=True,
            memory=device_memory(torch.device("cpu")),
            budget_bytes=2**40,
            sharding=self.sharding,
            keep_gradients=(
                None
                if self.way.syncs_every_micro_batch
                else lambda: self.engine.try_rows(make_rows(LENGTHS[0][:1]), is_last=False)
            ),
        )

    def _mean_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        self._in_forward = True
        try:
            return token_losses(self.model, batch, "mean")
        finally:
            self._in_forward = False

    def _collate(self, rows: Sequence[Row]) -> dict[str, Any]:
        if self.rows_run:
            self.rows_run[-1].extend(row["row"] for row in rows)
        return collate(rows)


class _Notes:
    """Notes of a rank for the process that started it, which outlives the rank."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"rank{distributed.rank()}").open("a")

    def write(self, **facts: Any) -> None:
        self._file.write(json.dumps({**facts, "at": time.monotonic()}) + "\n")
        self._file.flush()


def run_places(way: Way, places: Sequence[Place], folder: str) -> None:
    """Run each place; a rank that cannot go on ends all, as the recipe has it."""
    watch = Watchdog()
    notes = _Notes(Path(folder))
    gc.collect()
    # a release collects garbage, and what is imported need not be looked through every time
    gc.freeze()
    try:
        run = _run_trials if way.trials else _run_steps
        run(way, places, notes)
    except BaseException as error:
        notes.write(error=f"{type(error).__name__}: {error}")
        watch.fail(error)
    dist.barrier()


@contextmanager
def _time_limit() -> Iterator[None]:
    """Context manager that ends a rank that hangs, with its stack."""
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def _run_steps(way: Way, places: Sequence[Place], notes: _Notes) -> None:
    training = Training(way, warm=not any(place.first_step for place in places))
    undisturbed: dict[int, Any] = {}
    for number, place in enumerate(places):
        notes.write(begins=number)
        fault = RunsOut(
            place.operations[distributed.rank()],
            place.again,
            training,
            lambda phases: notes.write(phases=phases),
        )
        with _time_limit():
            found = training.two_steps(fault)
        capacity = training.engine.sizer.limit()
        if not any(place.operations):
            notes.write(seen=fault.seen)
        if capacity.amount not in undisturbed:
            undisturbed[capacity.amount] = training.two_steps(None, capacity)
        expected = undisturbed[capacity.amount]
        differing = [name for name, value in found.items() if value != expected[name]]
        if any(sorted(rows) != list(range(len(LENGTHS[0]))) for _, rows in found["steps"]):
            differing.append("rows")
        notes.write(ends=number, replayed=capacity != START, differing=differing)


def _run_trials(way: Way, places: Sequence[Place], notes: _Notes) -> None:
    training = Training(way)
    before = training_state(training.model, training.optimizer)
    with training.rehearsal() as trial:
        peaks = {rows: _peak(trial, rows) for rows in (2, 3)}
        for number, place in enumerate(places):
            notes.write(begins=number)
            fault = RunsOut(
                place.operations[distributed.rank()],
                place.again,
                training,
                lambda phases: notes.write(phases=phases),
            )
            with _time_limit(), fault:
                failed = not trial(3).fits
            if not any(place.operations):
                notes.write(seen=fault.seen)
            # Alone and after a failure alike, to the byte; each rank for itself.
            differing = [
                f"peak of {rows} rows" for rows, peak in peaks.items() if _peak(trial, rows) != peak
            ]
            notes.write(ends=number, replayed=failed, differing=differing)
    after = training_state(training.model, training.optimizer)
    differing = [name for name, value in before.items() if value != after[name]]
    notes.write(after_all=differing)


def _peak(trial: DryRun, rows: int) -> int:
    """To the byte: a thread of gloo's may hold a buffer a little longer than its
    collective takes.
    """
    return min(trial(rows).peak_bytes or 0 for _ in range(4))


def sweep(way: Way, places: Sequence[Place]) -> Iterator[Outcome]:
    """Run places on two ranks, on two new ones whenever a place has ended them; the watch ends
    ranks that hang.

    Args:
        way: of running.
        places: in order.
    """
    left = list(places)
    while left:
        some = [place for place in left[:AT_ONCE] if place.first_step == left[0].first_step]
        with tempfile.TemporaryDirectory() as folder:
            begin = time.monotonic()
            ended = end_of_ranks(
                run_places, RANKS, way, some, folder, timeout=3 * PATIENCE_SECONDS + 10 * len(some)
            )
            logs = [_read(Path(folder) / f"rank{rank}") for rank in range(RANKS)]
        outcomes = _outcomes(some, logs)
        if len(outcomes) < len(some):
            outcomes.append(
                _last(some[len(outcomes)], logs, [begin + one.seconds for one in ended])
            )
        elif any(one.exit_status != 0 for one in ended):
            raise RuntimeError(
                f"ranks ended with {[one.exit_status for one in ended]} after the last place:"
                f" {logs}"
            )
        yield from outcomes
        left = left[len(outcomes) :]


def survey(way: Way, *, first_step: bool = False) -> list[tuple[str, bool]]:
    """The phase of each operation of a step or trial of rank zero, and whether a failure there can
    be told.
    """
    with tempfile.TemporaryDirectory() as folder:
        ended = end_of_ranks(run_places, RANKS, way, [Place((0, 0), first_step=first_step)], folder)
        log = _read(Path(folder) / "rank0")
        assert any("ends" in note for note in log), ended
        for rank, one in enumerate(ended):
            if one.exit_status != 0:  # gloo's threads, as the interpreter ends
                print(f"rank {rank} had done all, and ended with {one.exit_status}")
    return [tuple(one) for note in log if "seen" in note for one in note["seen"]]


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _outcomes(places: Sequence[Place], logs: Sequence[Sequence[dict[str, Any]]]) -> list[Outcome]:
    """Return the outcomes of the places that all ranks have passed."""
    done = min(sum("ends" in note for note in log) for log in logs)
    outcomes = [Outcome(place) for place in places[:done]]
    for rank, log in enumerate(logs):
        number = -1
        for note in log:
            number = note.get("begins", number)
            if not 0 <= number < done:
                continue
            outcomes[number].phases += (
                note["phases"] if "phases" in note and len(note["phases"]) == 1 else []
            )
            if "ends" in note:
                outcomes[number].ended = (
                    "replayed" if note["replayed"] else outcomes[number].ended or "unharmed"
                )
                outcomes[number].differing += [
                    f"{name} of rank {rank}" for name in note["differing"]
                ]
            if "after_all" in note and done == len(places):
                outcomes[-1].differing += [
                    f"{name} of rank {rank} at the end" for name in note["after_all"]
                ]
    return outcomes


def _last(place: Place, logs: Sequence[Sequence[dict[str, Any]]], ends: Sequence[float]) -> Outcome:
    """Return the outcome of the place at which the ranks ended."""
    phases: list[str] = []
    errors: list[str] = []
    failed_at: list[float] = []
    for log in logs:
        begun = max((n for n, note in enumerate(log) if "begins" in note), default=0)
        for note in log[begun:]:
            if "phases" in note and len(note["phases"]) == 1:
                phases += note["phases"]
            if "phases" in note:
                failed_at.append(note["at"])
            if "error" in note:
                errors.append(note["error"])
    lost = any("RankLostError" in error for error in errors)
    too_large = bool(place.again and errors) and all("DoesNotFitError" in error for error in errors)
    seconds = round(max(ends) - min(failed_at), 2) if failed_at else None
    return Outcome(
        place,
        phases,
        "lost" if lost else "one row too large" if too_large else "hung or broken",
        [],
        "; ".join(errors)[:300],
        seconds,
    )


def chosen(
    seen: Sequence[tuple[str, bool]], *, every: int, lost_of_each_phase: int
) -> tuple[list[Place], list[Place]]:
    """Places of a survey: those expected to be replayed, every so many-th, and some of the others
    from each phase.

    Ranks take turns: the first, the second, both at once, both at places of their own.
    """
    told = [n for n, (_, can) in enumerate(seen, 1) if can][::every]
    replayed = []
    for turn, n in enumerate(told):
        other = told[turn * 7 % len(told)]
        replayed.append(Place(((n, 0), (0, n), (n, n), (n, other))[turn % 4]))
    lost = []
    for phase in PHASES:
        those = [n for n, (at, can) in enumerate(seen, 1) if at == phase and not can]
        count = min(lost_of_each_phase, len(those))
        for turn in range(count):
            n = those[turn * (len(those) - 1) // max(1, count - 1)]
            lost.append(Place(((n, 0), (0, n), (n, n))[turn % 3]))
    return replayed, lost


def once_more(replayed: Sequence[Place], *, after: Sequence[int]) -> list[Place]:
    """Places whose rank runs out again, so many operations later, most of them while it recovers or
    stands in.
    """
    middle = next(place for place in replayed[len(replayed) // 2 :] if 0 in place.operations)
    return [replace(middle, again=again) for again in after]


def at_first(replayed: Sequence[Place], number: int) -> list[Place]:
    """Some places in the first step ever, before the collectives of a micro-batch are known."""
    return [
        replace(place, first_step=True)
        for place in replayed[:: max(1, len(replayed) // number)][:number]
    ]


def record(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain values."""
    return asdict(outcome)
