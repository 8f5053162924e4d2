"""Train a small model that runs out of memory at chosen operations, on one device or on two ranks,
and compare its state with a training that does not. benchmarks/faults.py and faults_on_ranks.py run
all operations.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import Ended, run
from support.runners import SmallRunner, set_limit
from support.same_state import bits, differences, seed_all
from support.sharded_model import Decoder, Row, divided, make_rows, runner_of
from support.training_cases import CPU, PLENTY, Case
from support.training_cases import Training as AnyTraining
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_batch import distributed
from adaptive_batch._util import replaced
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.distributed import Watchdog
from adaptive_batch.memory import RandomState, TensorSnapshot, optimizer_state_tensors
from adaptive_batch.probe import DryRun
from adaptive_batch.training import LimitChange, RankReport
from adaptive_batch.training.step import Attempts

RANKS = 2
# Lengths of each rank's rows, by the number of ranks. A limit makes two micro-batches of them; an
# OOM halves these.
LENGTHS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((9, 7, 9, 9, 6, 9, 8, 9),),
    RANKS: ((9, 7, 9, 4), (6, 9, 8, 5)),
}
LIMITS = {
    1: {"rows": MicroBatchLimit(4), "tokens": MicroBatchLimit(36, "tokens")},
    RANKS: {"rows": MicroBatchLimit(2)},
}
PHASES = ("forward", "backward", "between", "collective", "counting", "clipping")
PATIENCE_SECONDS = 60.0  # maximum time of one place; after it the ranks count as hung
AT_ONCE = 40  # places that one pair of processes runs


@dataclass(frozen=True)
class Way:
    """Configuration of the steps or trials."""

    unit: str = "rows"  # unit of the limit
    checkpointing: bool = True
    nested: bool = False  # whether the replay runs out of memory too; on one device
    adapters: str = ""  # kind of adapters; none if empty
    task: str = ""  # DPO or distillation; next-token prediction if empty
    syncs_every_micro_batch: bool = True
    trials: bool = False
    measures_noise: bool = False

    def __str__(self) -> str:
        marks = (
            "trials" if self.trials else f"steps by {self.unit}",
            "checkpointing" * self.checkpointing,
            "twice" * self.nested,
            self.adapters,
            self.task,
            "noise measured" * self.measures_noise,
            "gradients reduced at the end" * (not self.syncs_every_micro_batch),
        )
        return ", ".join(filter(None, marks))


class OutOfMemoryMode(TorchDispatchMode):
    """Raises an OOM at operation number `left` from now; never if it is 0."""

    def __init__(self, left: int = 0) -> None:
        super().__init__()
        self.left = left

    def on_out_of_memory(self) -> None:
        """Record the OOM."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            self.on_out_of_memory()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


@contextmanager
def in_attempts(mode: TorchDispatchMode) -> Iterator[None]:
    """Context manager: run a mode inside the attempts of steps, not around them."""
    whole = Attempts.attempt

    @contextmanager
    def attempt(attempts: Attempts, doing: str) -> Iterator[None]:
        with whole(attempts, doing), mode:
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attempts, "attempt", attempt)
        yield


class RunsOut(OutOfMemoryMode):
    """Raises an OOM at an operation on local tensors, and again some operations later.

    Attributes:
        seen: phase of each operation, and whether this rank can notify the other rank there.
        phases: phases of the OOMs.
    """

    def __init__(self, training: Training, operation: int, *, again: int = 0) -> None:
        super().__init__(operation)
        self._training, self._again = training, again
        self.seen: list[tuple[str, bool]] = []
        self.phases: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        is_recovery = self.phases and distributed.world_size() > 1
        phase = "recovery" if is_recovery else self._training.phase_of_operation
        self.seen.append((phase, self._training.can_be_told))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def on_out_of_memory(self) -> None:
        self.left, self._again = self._again, 0
        self.phases.append(self.seen[-1][0])
        if distributed.world_size() > 1:
            note(phases=self.phases)


class _Runner(SmallRunner):
    """Records the phase of a step outside of its micro-batches."""

    doing = "before"

    def run_step(self, weighting: Any, report: RankReport) -> Any:
        end = weighting.end

        def noted_end() -> Any:
            self.doing = "counting"
            return end()

        with replaced(weighting, end=noted_end):
            return super().run_step(weighting, report)

    def _run_attempt(self, weighting: Any) -> Any:
        with replaced(self, doing="between"):
            return super()._run_attempt(weighting)

    def clip(self) -> torch.Tensor | None:
        with replaced(self, doing="clipping"):
            return super().clip()


class Training(AnyTraining):
    """Model, optimizer and steps of one rank, which can return to their initial state."""

    def __init__(self, way: Way, *, warm: bool = True) -> None:
        case = Case("AdamW", checkpointing=way.checkpointing, adapters=way.adapters, task=way.task)
        super().__init__(case, has_gradients=False)
        seed_all(distributed.rank())
        self.way = way
        ranks = distributed.world_size()
        self._lengths = LENGTHS[ranks][distributed.rank()]
        self.start = LIMITS[ranks][way.unit]
        self.changes: list[LimitChange] = []
        self._rows_run: list[int] = []
        self._undisturbed: dict[MicroBatchLimit, dict[str, Any]] = {}
        self._in_forward = self._in_trial = False
        self.engine = runner_of(
            self.model,
            self.start,
            kind=_Runner,
            syncs_every_micro_batch=way.syncs_every_micro_batch,
            mean_loss=self._mean_loss,
            collate=self._collate,
            max_grad_norm=0.5,
            measures_noise=way.measures_noise,
            on_change=self._on_change,
        )
        if self.learned is not None:
            self.engine.loss = self.learned.of_rows(self.engine.loss, self._collate)
        self.sharding = self.engine.sharding
        self._is_fresh = not warm  # whether the optimizer has no state
        if warm:
            self.run_step(0)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._saved = TensorSnapshot([*trained, *optimizer_state_tensors(self.optimizers)])
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self._random = RandomState(CPU)

    def _decoder(self, *, checkpointing: bool) -> Decoder:
        return divided(super()._decoder(checkpointing=checkpointing))

    @property
    def phase_of_operation(self) -> str:
        """Current phase."""
        if self.sharding._is_in_collective:
            return "collective"
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "forward" if self._in_forward else self.engine.doing

    @property
    def can_be_told(self) -> bool:
        """True if this rank can notify the other rank, which repeats the step."""
        return self.sharding.can_finish and (
            self._in_trial if self.way.trials else self.engine.doing == "between"
        )

    def restore(self) -> None:
        """Restore the state after the constructor."""
        self._saved.restore()
        if self._is_fresh:
            self.optimizer.state.clear()
        for name, buffer in self._buffers.items():
            setattr(self.model, name, buffer.clone())
        self._random.restore()
        set_limit(self.engine.sizer, self.start)
        self.changes.clear()

    def run_step(self, number: int, fault: RunsOut | None = None) -> tuple[Any, ...]:
        """Run an optimizer step; return its result and the rows of its last attempt."""
        self._rows_run = []
        rows = make_rows(self._lengths, seed=10 * number + distributed.rank())
        context: Any = fault or nullcontext()
        if fault and distributed.world_size() == 1:
            # An OOM before or after the attempts is not repeated.
            context = in_attempts(fault)
        with context:
            result = self.engine.run(rows)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return bits(result), sorted(self._rows_run)

    def two_steps(self, fault: RunsOut | None, limit: MicroBatchLimit) -> dict[str, Any]:
        """Run two steps from the initial state, the first with a fault; return the final state."""
        self.restore()
        set_limit(self.engine.sizer, limit)
        steps = [self.run_step(1, fault), self.run_step(2)]
        return {**self.everything(), "steps": steps}

    def check_steps(self, fault: RunsOut) -> tuple[bool, list[str]]:
        """Run two steps with a fault. Return whether a step was replayed, and the names of values
        that differ from a run with the smaller limit.
        """
        found = self.two_steps(fault, self.start)
        limit, changes = self.engine.sizer.limit(), [change.grows for change in self.changes]
        if limit not in self._undisturbed:
            self._undisturbed[limit] = self.two_steps(None, limit)
        differing = differences(self._undisturbed[limit], found)
        if any(rows != list(range(len(self._lengths))) for _, rows in found["steps"]):
            differing.append("rows")
        if distributed.world_size() == 1 and changes != [False] * len(fault.phases):
            differing.append("changes")
        return limit != self.start, differing

    @contextmanager
    def trials(self) -> Iterator[Callable[[RunsOut], tuple[bool, list[str]]]]:
        """Yield a function that runs a trial with a fault. It returns whether the trial did not
        fit, and the peaks of later trials that differ.
        """

        def peak(rows: int) -> int:
            # A gloo thread may keep a buffer for a moment after its collective.
            return min(trial(rows).peak_bytes or 0 for _ in range(8))

        def check(fault: RunsOut) -> tuple[bool, list[str]]:
            with fault:
                failed = not trial(3).fits
            # Peaks after a fault equal those before it, to the byte.
            return failed, [f"peak of {rows} rows" for rows in peaks if peak(rows) != peaks[rows]]

        before = self.everything()
        with self.dry_run() as trial:
            peaks = {rows: peak(rows) for rows in (2, 3)}
            yield check
        note(after_all=differences(before, self.everything()))

    def _try(self, rows: int) -> None:
        with replaced(self, _in_trial=True):
            self.engine.try_rows(self.rows_of_trial(rows))

    def rows_of_trial(self, number: int) -> list[Row]:
        return make_rows(LENGTHS[RANKS][0][:number])

    def dry_run(self, budget_bytes: int = PLENTY) -> DryRun:
        """Return trials of this training."""

        def keep_gradients() -> None:
            self.engine.try_rows(self.rows_of_trial(1), is_last=False)

        return self.rehearsal(
            budget_bytes=budget_bytes,
            accumulates=True,
            forward_backward=self._try,
            step=lambda: (self.engine.clip(), self.optimizer.step()),
            sharding=self.sharding,
            keep_gradients=None if self.way.syncs_every_micro_batch else keep_gradients,
        )

    def _mean_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        with replaced(self, _in_forward=True):
            return self.mean_loss(batch)

    def _collate(self, rows: Sequence[Row]) -> dict[str, Any]:
        self._rows_run.extend(row["row"] for row in rows)
        return self.collate(rows)

    def _on_change(self, change: LimitChange) -> None:
        self.changes.append(change)
        self._rows_run = []  # the step is repeated


# --- one device


def sweep(way: Way, *, every: int = 1) -> Iterator[tuple[str, list[str]]]:
    """Run a step again for each of its operations, or one in `every`, that runs out of memory; the
    first step of the optimizer and a later one.

    Yields:
        Phase of the first OOM, and names of values that differ from a training without an OOM.
    """
    for warm in (False, True):
        training, operation = Training(way, warm=warm), 1
        while True:
            again = (1 + operation * 7 % 400) * way.nested
            fault = RunsOut(training, operation, again=again)
            _, differing = training.check_steps(fault)
            if not fault.phases:
                break
            if way.nested and len(fault.phases) != 2:
                differing.append("did not run out twice")
            yield fault.phases[0], differing
            operation += every


# --- ranks


@dataclass(frozen=True)
class Place:
    """Operations at which ranks run out of memory."""

    operations: tuple[int, int]  # number of the operation on each rank, from 1; 0 for never
    again: int = 0  # operations until the same ranks run out again; 0 for never
    first_step: bool = False  # whether this is in the first step, not in the second


@dataclass
class Outcome:
    """Outcome of the ranks at one place.

    Attributes:
        place: operations at which memory ran out.
        phases: phase of each rank that ran out of memory.
        ended: ``replayed`` (a trial: does not fit); ``unharmed`` if no rank reached the operation;
            ``lost`` if a rank raised `RankLostError` and all ranks ended; ``one row too large`` if
            the replay with single rows ran out of memory again; or ``hung or broken``.
        differing: names of values that differ from ranks without an OOM.
        error: messages of the ranks.
        seconds: seconds until all processes had ended, if the place was lost.
    """

    place: Place
    phases: list[str] = field(default_factory=list)
    ended: str = ""
    differing: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float | None = None


def note(**facts: Any) -> None:
    """Print facts as JSON for the process that started this rank."""
    print(json.dumps({**facts, "at": time.monotonic()}), flush=True)


def run_places(way: Way, places: Sequence[Place]) -> None:
    """Run each place. A rank that cannot continue ends all ranks, as in the recipe."""
    watch = Watchdog()
    gc.collect()
    # Each recovery collects garbage; frozen imported objects are not traversed.
    gc.freeze()
    try:
        training = Training(way, warm=not any(place.first_step for place in places))
        with training.trials() if way.trials else nullcontext(training.check_steps) as check:
            for number, place in enumerate(places):
                note(begins=number)
                operation = place.operations[distributed.rank()]
                fault = RunsOut(training, operation, again=place.again)
                # Print the stack of a rank that hangs, and end it.
                faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
                replayed, differing = check(fault)
                faulthandler.cancel_dump_traceback_later()
                if not any(place.operations):
                    note(seen=fault.seen)
                note(ends=number, replayed=replayed, differing=differing)
    except BaseException as error:
        note(error=f"{type(error).__name__}: {error}")
        watch.fail(error)
    dist.barrier()


def sweep_on_ranks(way: Way, places: Sequence[Place]) -> Iterator[Outcome]:
    """Run places on two ranks, and start new ranks after a place that ended them.

    Args:
        way: configuration of the steps or trials.
        places: places, in order.
    """
    left = list(places)
    while left:
        some = [place for place in left[:AT_ONCE] if place.first_step == left[0].first_step]
        begin = time.monotonic()
        timeout = 3 * PATIENCE_SECONDS + 10 * len(some)
        ended = run(run_places, way, some, ranks=RANKS, timeout=timeout, joins_group=True)
        outcomes = list(_outcomes(some, ended, begin))
        if outcomes[-1].ended in ("replayed", "unharmed") and any(one.exit_status for one in ended):
            raise RuntimeError(f"ranks ended after the last place: {ended}")
        yield from outcomes
        left = left[len(outcomes) :]


def survey(way: Way) -> list[tuple[str, bool]]:
    """Return the phase of each operation of a step or trial on rank 0, and whether rank 0 can
    notify the other rank there.
    """
    first, _ = run(run_places, way, [Place((0, 0))], ranks=RANKS, joins_group=True)
    (seen,) = (one["seen"] for one in _notes(first) if "seen" in one)
    return [tuple(one) for one in seen]


def _notes(ended: Ended) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ended.output.splitlines() if line.startswith('{"')]


def _of_place(log: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return the facts that a rank printed at one place."""
    begins = [at for at, one in enumerate(log) if "begins" in one]
    return log[slice(*[*begins, len(log)][number : number + 2])] if number < len(begins) else []


def _outcomes(places: Sequence[Place], ended: Sequence[Ended], begin: float) -> Iterator[Outcome]:
    """Yield the outcome of each place, up to the one that ended the ranks."""
    logs = [_notes(one) for one in ended]
    for number, place in enumerate(places):
        outcome, errors, failed_at, num_done = Outcome(place), [], [], 0
        for rank, log in enumerate(logs):
            for one in _of_place(log, number):
                if "phases" in one:
                    failed_at.append(one["at"])
                    outcome.phases += one["phases"] if len(one["phases"]) == 1 else []
                if "error" in one:
                    errors.append(one["error"])
                if "ends" in one:
                    num_done += 1
                    if one["replayed"] or not outcome.ended:
                        outcome.ended = "replayed" if one["replayed"] else "unharmed"
                for name in (*one.get("differing", ()), *one.get("after_all", ())):
                    outcome.differing.append(f"{name} of rank {rank}")
        if num_done < RANKS:
            outcome.ended, outcome.differing = "hung or broken", []
            hung = any("Timeout (" in one.output for one in ended)
            if not hung and any("RankLostError" in error for error in errors):
                outcome.ended = "lost"
            elif place.again and errors and all("DoesNotFitError" in error for error in errors):
                outcome.ended = "one row too large"
            outcome.error = "; ".join(errors)[:300]
            if failed_at:
                last = begin + max(one.seconds for one in ended)
                outcome.seconds = round(last - min(failed_at), 2)
            yield outcome
            return
        yield outcome


def chosen(
    seen: Sequence[tuple[str, bool]], *, every: int, lost_of_each_phase: int
) -> tuple[list[Place], dict[str, list[Place]]]:
    """Choose places of a survey: of the operations that can be replayed, one in `every`; of the
    others, `lost_of_each_phase` in each phase, by phase.

    In turn, the OOM is on rank 0, on rank 1, on both at the same operation, or at different ones.
    """
    told = [n for n, (_, can) in enumerate(seen, 1) if can][::every]
    replayed = []
    for turn, n in enumerate(told):
        other = told[turn * 7 % len(told)]
        replayed.append(Place(((n, 0), (0, n), (n, n), (n, other))[turn % 4]))
    lost: dict[str, list[Place]] = {}
    for phase in PHASES:
        those = [n for n, (at, can) in enumerate(seen, 1) if at == phase and not can]
        count = min(lost_of_each_phase, len(those))
        lost[phase] = []
        for turn in range(count):
            n = those[turn * (len(those) - 1) // max(1, count - 1)]
            lost[phase].append(Place(((n, 0), (0, n), (n, n))[turn % 3]))
    return replayed, lost


def once_more(replayed: Sequence[Place], *, after: Sequence[int]) -> list[Place]:
    """Return places whose rank runs out of memory again after some operations, most of them during
    the recovery or dummy collectives.
    """
    of_one_rank = [place for place in replayed if 0 in place.operations]
    middle = of_one_rank[len(of_one_rank) // 2]
    return [replace(middle, again=again) for again in after]


def at_first(replayed: Sequence[Place], number: int) -> list[Place]:
    """Return places in the first step, before the collectives of a micro-batch are recorded."""
    some = replayed[:: max(1, len(replayed) // number)][:number]
    return [replace(place, first_step=True) for place in some]
