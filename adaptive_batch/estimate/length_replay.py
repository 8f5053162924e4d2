"""What a caching allocator does in training's first steps, whose rows have real lengths.

Micro-batches of many shapes leave free blocks of many sizes, and a block that is too small for the
next micro-batch is reserved and not used. How much that is follows from the order of the shapes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from itertools import chain, combinations, repeat
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from adaptive_batch._util import count
from adaptive_batch.data import MicroBatch, MicroBatchLimit
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import AllocatorCache

from .allocator import AllocatorSettings, CachingAllocator
from .fake_step import FEW, MORE, FakeDevice, FakeStep
from .result import Fit, LengthReplay, ReplayedMemory, Target
from .simulated_memory import SimulatedMemory
from .step_log import LogWriter, Phase
from .trial_replay import TrialLog, TrialReplay, TrialSteps

# Steps that are replayed: by then the states are there, and most shapes were met.
REPLAYED_STEPS = 50
# Shapes up to which each is traced: where a trace runs few layers, and where it runs many. With 8B
# parameters the former takes a fifth of a second, the latter 2.5.
MOST_TRACED = 256
MOST_TRACED_WHOLE = 6
# Of more shapes only the steps before are replayed, where they are so many.
FEWEST_STEPS = 10
# Lengths that more shapes are traced at: the shortest, the longest, and between them.
_NUM_LENGTHS = 3


class Shape(NamedTuple):
    """What a micro-batch runs, which decides what it allocates.

    Attributes:
        rows: how many rows it has.
        length: tokens that each is padded to; of packed rows the tokens of all.
    """

    rows: int
    length: int


@dataclass(frozen=True)
class PlannedSteps:
    """Steps of rows of real lengths, divided as the step divides them.

    Attributes:
        batch_size: rows of a step; of the first one where they differ.
        limit: what a micro-batch may hold.
        steps: shapes of the micro-batches of each step, in the order in which they run.
        largest: most tokens of a micro-batch of each step.
        checks: shapes that a check of the split evaluates before each step, none before most.
        is_packed: whether the rows of a micro-batch lie one after the other.
    """

    batch_size: int
    limit: MicroBatchLimit
    steps: tuple[tuple[Shape, ...], ...]
    largest: tuple[int, ...]
    checks: tuple[tuple[Shape, ...], ...]
    is_packed: bool = False

    @classmethod
    def of(
        cls,
        batches: Iterable[Sequence[int]],
        limit: MicroBatchLimit,
        divide: Callable[[Sequence[int]], Sequence[MicroBatch]],
        check: Callable[[Sequence[int], Sequence[MicroBatch]], Iterable[Shape]] = lambda *_: (),
    ) -> PlannedSteps:
        """Plan steps.

        Args:
            batches: lengths of the rows of each step, in tokens; or what else `divide` takes of
                each row.
            limit: what a micro-batch may hold.
            divide: function that returns the micro-batches of rows of these lengths.
            check: function that returns the shapes that are evaluated before the step of these
                lengths and micro-batches.
        """
        batch_size = 0
        is_packed = False
        steps = []
        largest = []
        checks = []
        for lengths in batches:
            batch_size = batch_size or len(lengths)
            shapes = []
            sizes = [0]
            pieces = divide(lengths)
            for piece in pieces:
                is_packed |= bool(piece.own_lengths)
                length = sum(piece.own_lengths) or piece.length
                shapes.append(Shape(len(piece.rows), length))
                sizes.append(piece.run_tokens)
            steps.append(tuple(shapes))
            largest.append(max(sizes))
            checks.append(tuple(check(lengths, pieces)))
        return cls(batch_size, limit, tuple(steps), tuple(largest), tuple(checks), is_packed)

    def first(self, num_steps: int) -> PlannedSteps:
        """Return the first steps of these."""
        return replace(
            self,
            steps=self.steps[:num_steps],
            largest=self.largest[:num_steps],
            checks=self.checks[:num_steps],
        )


@dataclass(frozen=True)
class LengthPlan:
    """How rows of real lengths are trained.

    Attributes:
        steps: function that returns the steps where so many rows fit.
        forward_backward: ``forward_backward(device, rows, length)`` runs one micro-batch; see
            :class:`Shape`.
        evaluate: the same of a forward pass that checks a split; None where none is checked. Where
            it raises an error, no checks are replayed.
        trial: function that returns the trial of so many rows that a search ends with, where one
            comes before and trials have the block that training makes; None elsewhere.
    """

    steps: Callable[[Fit], PlannedSteps]
    forward_backward: Callable[[FakeDevice, int, int], object]
    evaluate: Callable[[FakeDevice, int, int], object] | None = None
    trial: TrialSteps | None = None

    def replay(
        self,
        step: FakeStep,
        device: FakeDevice,
        targets: Sequence[Target],
        fits: Sequence[Fit],
        settings: AllocatorSettings,
        *,
        accumulating: Callable[[], FakeStep],
    ) -> list[LengthReplay | None]:
        """Replay the steps on each target; None where no row fits.

        Args:
            step: the step.
            device: where it runs.
            targets: devices of its kind.
            fits: what fits on each of them.
            settings: of their allocator.
            accumulating: function that returns the step beside the gradients of earlier
                micro-batches, called where some step has several and `step` has none of them.
        """
        plans = [self.steps(fit) if fit.max_batch_size else None for fit in fits]
        fitting = [planned for planned in plans if planned is not None]
        all_steps = list(chain.from_iterable(planned.steps for planned in fitting))
        if not any(all_steps):
            return [None] * len(targets)
        trial_steps = self.trial
        if any(len(shapes) > 1 for shapes in all_steps) and not step.accumulates:
            step = accumulating()
            # Its trials were those of the other step.
            trial_steps = None
        num_steps = num_replayed(fitting, _most_traced(step))
        fitting = [planned.first(num_steps) for planned in fitting]
        checks, check_error = self._traced_checks(step, device, fitting)
        shapes = TracedShapes(
            step,
            partial(self.forward_backward, device),
            chain.from_iterable(chain.from_iterable(planned.steps) for planned in fitting),
            checks=checks,
            is_packed=any(planned.is_packed for planned in fitting),
        )

        @cache
        def trial_of(rows: int) -> TrialLog | None:
            return TrialLog.of(step, trial_steps(rows)) if trial_steps else None

        replays: list[LengthReplay | None] = []
        for fit, target in zip(fits, targets, strict=True):
            replay = None
            if fit.max_batch_size:
                replay = replay_lengths(
                    fitting.pop(0),
                    step,
                    shapes,
                    budget_bytes=target.budget_bytes,
                    settings=settings,
                    trial=trial_of(fit.max_batch_size),
                    check_error=check_error,
                )
            replays.append(replay)
        return replays

    def _traced_checks(
        self, step: FakeStep, device: FakeDevice, plans: Sequence[PlannedSteps]
    ) -> tuple[dict[Shape, Phase], str]:
        """Return the logs of all checks of splits, or none and the error of one."""
        checks: dict[Shape, Phase] = {}
        if self.evaluate is None or not step.runs_few_layers:
            return checks, ""
        of_steps = chain.from_iterable(planned.checks for planned in plans)
        try:
            for shape in dict.fromkeys(chain.from_iterable(of_steps)):
                checks[shape] = step.evaluated(partial(self.evaluate, device, *shape))
        except Exception as error:
            # Any error of the script's code, which ran without a check before.
            reason = str(error).partition("\n")[0]
            return {}, f"{type(error).__name__}: {reason}"
        return checks, ""


def _most_traced(step: FakeStep) -> int:
    """Return up to how many shapes of a step are traced each."""
    return MOST_TRACED if step.runs_few_layers else MOST_TRACED_WHOLE


def num_replayed(plans: Sequence[PlannedSteps], most_shapes: int) -> int:
    """Return how many steps are replayed: those before there are more shapes than are traced each;
    all where these are few, or leave out the largest micro-batch.
    """
    shapes: set[Shape] = set()
    all_steps = list(zip(*(planned.steps for planned in plans), strict=True))
    for num_steps, of_plans in enumerate(all_steps):
        shapes.update(chain.from_iterable(of_plans))
        if len(shapes) > most_shapes:
            has_largest = all(
                max(planned.largest) in planned.largest[:num_steps] for planned in plans
            )
            if has_largest and num_steps >= FEWEST_STEPS:
                return num_steps
            break
    return len(all_steps)


def batches_in_order(
    lengths: Sequence[int], batch_size: int, *, num_steps: int = REPLAYED_STEPS
) -> Iterator[list[int]]:
    """Yield the lengths of the rows of each step: in their order, and from the start again."""
    for step in range(num_steps):
        numbers = range(step * batch_size, (step + 1) * batch_size)
        yield [lengths[number % len(lengths)] for number in numbers]


def checked_lengths(lengths: Any, *, longest: int, owner: str) -> list[int]:
    """Return lengths as a list of whole numbers.

    Args:
        lengths: tokens of each row: a sequence of whole numbers, or a tensor or an array of one
            dimension.
        longest: the most tokens that a row may have.
        owner: whose row has so many, for the message.

    Raises:
        SettingError: they are something else, none, or longer.
    """
    remedy = "give the tokens of each row of the dataset, whole numbers from 0 on"
    # A tensor of any device, and an array of numpy's.
    if hasattr(lengths, "tolist"):
        lengths = lengths.tolist()
    if isinstance(lengths, str) or not isinstance(lengths, Sequence) or not lengths:
        raise SettingError("lengths", lengths, remedy)
    for number, length in enumerate(lengths):
        is_whole = isinstance(length, int) and not isinstance(length, bool)
        if not is_whole or length < 0:
            raise SettingError("lengths", length, f"that is row {number}; {remedy}")
        if length > longest:
            limit = f"{owner} has {count(longest, 'token')}"
            raise SettingError(
                "lengths",
                length,
                f"that is row {number}, and {limit}; cut the lengths to it, or give longer rows",
            )
    return list(lengths)


def lengths_of_quantiles(quantiles: Mapping[Any, Any], num_rows: int) -> list[int]:
    """Return lengths of rows that have these quantiles, in a random order that is always the same.

    Args:
        quantiles: tokens by the share of rows that have no more, such as ``{0: 12, 0.5: 180, 0.9:
            700, 1: 2048}``; on a straight line between two shares.
        num_rows: how many rows, 2 or more for the longest to be among them.

    Raises:
        SettingError: they are no quantiles.
    """
    remedy = (
        "give tokens by the share of rows that have no more, from 0 (the shortest) to 1 (the"
        " longest), such as {0: 12, 0.5: 180, 0.9: 700, 1: 2048}"
    )
    for key, value in quantiles.items():
        # NumPy's numbers too; nan is in no range.
        if isinstance(key, bool) or not isinstance(key, Real) or not 0 <= float(key) <= 1:
            raise SettingError("lengths", quantiles, f"{key!r} is no share; {remedy}")
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
            raise SettingError("lengths", quantiles, f"{value!r} is no count of tokens; {remedy}")
    shares = sorted(quantiles)
    tokens = [int(quantiles[share]) for share in shares]
    if not shares or (shares[0], shares[-1]) != (0, 1) or tokens != sorted(tokens):
        raise SettingError("lengths", quantiles, remedy)
    places = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    lengths = []
    for place in places.tolist():
        share = place / max(1, num_rows - 1)
        above = bisect_left(shares, share, lo=1, hi=len(shares) - 1)
        begin, end = shares[above - 1 : above + 1]
        fewest, most = tokens[above - 1 : above + 1]
        lengths.append(round(fewest + (most - fewest) * (share - begin) / (end - begin)))
    return lengths


def packed_row_lengths(num_rows: int, num_tokens: int) -> list[int]:
    """Return lengths, as alike as can be, of rows that have so many tokens in all."""
    fewer, num_longer = divmod(num_tokens, num_rows)
    return [fewer + 1] * num_longer + [fewer] * (num_rows - num_longer)


class TracedShapes:
    """The logs of micro-batches of many shapes, from traces of a few.

    Up to `most_traced` shapes are traced each, and their logs are exact. Of more, two numbers of
    rows are traced at each of three lengths: the shortest, the median and the longest. The sizes of
    any other shape lie on a straight line between these, first in the rows and then in the length.
    That is exact for what grows with rows, length or tokens. It is not exact for a mask of length x
    length, or where a kernel changes with the size. A shape between lengths that run other
    operations, none of them alike, is traced itself.

    The first micro-batch of a step, which finds no gradients, is traced at one shape of all that
    run the same operations. Its log at the others is that of a later micro-batch with other frees,
    where both allocate the same.

    Packed rows are traced alike, of so many tokens in all. What they need grows with tokens and
    with rows, whatever the length of each.

    Args:
        step: the step, which accumulates if some step has several micro-batches.
        run: ``run(rows, length)`` runs forward and backward of a micro-batch.
        shapes: all that will be asked for.
        most_traced: shapes up to which each is traced; None for as many as the step's traces are
            short enough for.
        checks: logs of the forward passes that check splits; none where these are not replayed.
        is_packed: whether they are of packed rows.
    """

    def __init__(
        self,
        step: FakeStep,
        run: Callable[[int, int], object],
        shapes: Iterable[Shape],
        *,
        most_traced: int | None = None,
        checks: Mapping[Shape, Phase] | None = None,
        is_packed: bool = False,
    ) -> None:
        self._step = step
        self._checks = checks or {}
        self._is_packed = is_packed
        self._run = run
        self._traced: dict[tuple[Shape, bool], Phase] = {}
        self._phases: dict[tuple[Shape, bool], Phase] = {}
        self._pairs: dict[tuple[int, bool], tuple[int, int]] = {}
        self._firsts_and_laters: list[tuple[Phase, Phase]] = []
        distinct = sorted(set(shapes), key=lambda shape: (shape.length, shape.rows))
        self.num_shapes = len(distinct)
        if most_traced is None:
            most_traced = _most_traced(step)
        self.is_exact = self.num_shapes <= most_traced
        lengths = sorted(shape.length for shape in distinct)
        places = [place * (len(lengths) - 1) // (_NUM_LENGTHS - 1) for place in range(_NUM_LENGTHS)]
        self._lengths = sorted({lengths[place] for place in places})
        # The most rows of a micro-batch whose length is nearest to a traced one.
        self._most_rows = dict.fromkeys(self._lengths, 1)
        for shape in distinct:
            nearest = min(self._lengths, key=lambda length: abs(length - shape.length))
            self._most_rows[nearest] = max(self._most_rows[nearest], shape.rows)

    def phase(self, shape: Shape, *, is_first: bool) -> Phase:
        """Return the log of a micro-batch.

        Args:
            shape: rows, and tokens that they are padded to.
            is_first: whether no earlier micro-batch has left gradients.

        Raises:
            SettingError: no two numbers of rows ran the same operations.
        """
        # Without gradients of earlier ones each micro-batch is a first one.
        is_first = is_first and self._step.accumulates
        key = (shape, is_first)
        if key in self._phases:
            return self._phases[key]
        phase = None
        if is_first:
            phase = self._first_like_later(shape)
        if phase is None:
            phase = self._trace(*key) if self.is_exact else self._between(*key)
        self._phases[key] = phase
        return phase

    def evaluated(self, shapes: Iterable[Shape]) -> list[Phase]:
        """Return the logs of forward passes that check a split; none where none is replayed."""
        return [self._checks[shape] for shape in shapes if shape in self._checks]

    def _first_like_later(self, shape: Shape) -> Phase | None:
        """Return the log of a step's first micro-batch by that of a later one of its shape; None
        where it does not follow.

        As a rule the two allocate the same, and a gradient stays where it is added to an earlier
        one. So one shape is traced as the first for all that run the same operations.
        """
        later = self.phase(shape, is_first=False)
        alike = (pair for pair in self._firsts_and_laters if pair[1].is_like(later))
        pair = next(alike, None)
        if pair is None:
            pair = (self._trace(shape, True), self._trace(shape, False))
            self._firsts_and_laters.append(pair)
        first, own_later = pair
        if not first.allocates_like(own_later):
            return None
        return first.sized(own_later, later)

    def _between(self, shape: Shape, is_first: bool) -> Phase:
        """Return the log on the line through the nearest two lengths that run the same operations;
        where there are none, that of a trace.
        """
        if shape.length in self._lengths:
            return self._at_length(shape.rows, shape.length, is_first)
        nearest = sorted(self._lengths, key=lambda length: abs(length - shape.length))
        for near_length, far_length in combinations(nearest, 2):
            near = self._at_length(shape.rows, near_length, is_first)
            far = self._at_length(shape.rows, far_length, is_first)
            if near.is_like(far):
                share = Fraction(shape.length - near_length, far_length - near_length)
                return near.between(far, share)
        return self._trace(shape, is_first)

    def _at_length(self, rows: int, length: int, is_first: bool) -> Phase:
        """Return the log of any number of rows of a length that is traced."""
        few_rows, more_rows = self._pair(length, is_first)
        few = self._trace(Shape(few_rows, length), is_first)
        more = self._trace(Shape(more_rows, length), is_first)
        return few.between(more, Fraction(rows - few_rows, more_rows - few_rows))

    def _pair(self, length: int, is_first: bool) -> tuple[int, int]:
        """Return two numbers of rows of a length that run the same operations."""
        key = (length, is_first)
        if key in self._pairs:
            return self._pairs[key]
        for few, more in self._pairs_to_try(length):
            few_phase = self._trace(Shape(few, length), is_first)
            if few_phase.is_like(self._trace(Shape(more, length), is_first)):
                self._pairs[key] = (few, more)
                return self._pairs[key]
        remedy = (
            "each number of rows runs other operations, so none follows from another; leave lengths"
            " out"
        )
        raise SettingError("model", type(self._step.model).__name__, remedy)

    def _pairs_to_try(self, length: int) -> Iterator[tuple[int, int]]:
        most_rows = self._most_rows[length]
        pairs = [(most_rows // 2, most_rows), (most_rows, most_rows + 1)]
        if self._is_packed:
            # Fewer rows of so many tokens could be longer than any row may be.
            pairs = [(most_rows, 2 * most_rows), (most_rows, most_rows + 1), (length // 2, length)]
        for few, more in pairs:
            if few >= 1 and not (self._is_packed and more > length):
                yield few, more
        yield FEW, MORE

    def _trace(self, shape: Shape, is_first: bool) -> Phase:
        key = (shape, is_first)
        if key not in self._traced:
            run = partial(self._run, shape.rows, shape.length)
            self._traced[key] = self._step.phase(run, is_first=is_first)
        return self._traced[key]


class StepLog(NamedTuple):
    """What is allocated and freed before a step, by the check of its split, by its micro-batches,
    and then by the optimizer's step.
    """

    before: Sequence[int]
    check: Sequence[int]
    micro_batches: Sequence[int]
    optimizer: Sequence[int]


def step_logs(
    step: FakeStep,
    shapes: TracedShapes,
    steps: Iterable[Sequence[Shape]],
    checks: Iterable[Sequence[Shape]] = repeat(()),
    *,
    after: TrialLog | None = None,
) -> Iterator[StepLog]:
    """Yield what each step allocates and frees (:mod:`.step_log`), the first after loading.

    Args:
        step: the step, for loading and the optimizer.
        shapes: logs of micro-batches.
        steps: shapes of the micro-batches of each step.
        checks: shapes that are evaluated before each step.
        after: trial that a search has ended with, whose states of the optimizer stay until its
            first step begins; None where none came before.
    """
    before = array("q")
    if after is None:
        writer = LogWriter()
        before = writer.add(step.loading, is_first=True)
    else:
        writer = deepcopy(after.writer)
    for number, (micro_batches, checked) in enumerate(zip(steps, checks, strict=False)):
        is_first_step = number == 0 and after is None
        check = array("q")
        # What the check of the first step has allocated once is there for its micro-batches.
        num_once = 0
        for phase in shapes.evaluated(checked):
            check.extend(writer.add(phase, is_first=is_first_step and num_once == 0))
            num_once = len(phase.once)
        log = array("q")
        for place, shape in enumerate(micro_batches):
            is_first = place == 0
            phase = shapes.phase(shape, is_first=is_first)
            phase = replace(phase, once=phase.once[num_once:])
            log.extend(writer.add(phase, is_first=is_first and is_first_step))
        optimizer = array("q")
        optimizer_step = step.optimizer_step(number)
        if number == 0 and after is not None:
            optimizer.extend(writer.drop(optimizer_step))
        optimizer.extend(writer.add(optimizer_step, is_first=False))
        yield StepLog(before, check, log, optimizer)
        before = array("q")


class StepMemory(NamedTuple):
    """What the allocator shows of one step, in bytes: its peak, and what is reserved after it."""

    allocated_bytes: int
    reserved_bytes: int


class StepReplay:
    """The steps of a log on a simulated device.

    Args:
        logs: of each step, the first after loading.
        budget_bytes: what the allocator may take of the device.
        settings: of the allocator.
        largest: tokens of the largest micro-batch of each step, by which the cache is kept from
            fragmenting as in training (:class:`~adaptive_batch.memory.AllocatorCache`); None for an
            allocator that is left to itself.
        after: trial that a search has ended with, whose allocator and cache the steps have; None
            for new ones.

    Attributes:
        steps: what each step has shown, up to the one that ran out of memory.
        failed_step: number of that step, from 1 on; None where all ran.
    """

    def __init__(
        self,
        logs: Sequence[StepLog],
        *,
        budget_bytes: int,
        settings: AllocatorSettings,
        largest: Sequence[int] | None = None,
        after: TrialReplay | None = None,
    ) -> None:
        if after is None:
            self._allocator = CachingAllocator(budget_bytes, settings)
            is_kept_whole = largest is not None and not settings.expandable_segments
            self._cache = AllocatorCache(
                SimulatedMemory(self._allocator, divides_large_blocks=is_kept_whole)
            )
        else:
            self._allocator = after.allocator
            # The trial's peak is none of training.
            self._allocator.reset_peaks()
            self._cache = after.cache
            self._cache.look_again()
        self._earlier_retries = self._allocator.num_retries
        self.steps: list[StepMemory] = []
        self.failed_step: int | None = None
        sizes = largest or [0] * len(logs)
        for number, (log, size) in enumerate(zip(logs, sizes, strict=True), start=1):
            try:
                self._run_step(log, size)
            except torch.OutOfMemoryError:
                self.failed_step = number
                break

    @property
    def memory(self) -> ReplayedMemory:
        """Peaks over all steps."""
        return ReplayedMemory(
            allocated_bytes=max((step.allocated_bytes for step in self.steps), default=0),
            reserved_bytes=self._allocator.peak_reserved_bytes,
            num_retries=self._allocator.num_retries - self._earlier_retries,
            failed_step=self.failed_step,
        )

    def _run_step(self, log: StepLog, size: int) -> None:
        allocator = self._allocator
        allocator.replay(log.before)
        if log.check:
            peak_reserved_bytes = allocator.peak_reserved_bytes
            with self._cache.apart():
                allocator.replay_apart(log.check)
            # What the check reserved counts as far as it stays for training.
            allocator.peak_reserved_bytes = max(peak_reserved_bytes, allocator.reserved_bytes)
        self._cache.begin_step([size])
        peak = allocator.peak_within(log.micro_batches)
        # Training's cache sees the peak of all until then, and not of the optimizer's step to come.
        self._cache.end_step()
        peak = max(peak, allocator.peak_within(log.optimizer))
        self.steps.append(StepMemory(peak, allocator.reserved_bytes))


def replay_lengths(
    planned: PlannedSteps,
    step: FakeStep,
    shapes: TracedShapes,
    *,
    budget_bytes: int,
    settings: AllocatorSettings,
    trial: TrialLog | None = None,
    check_error: str = "",
) -> LengthReplay:
    """Return what the allocator of a device does in the steps, after the trial of a search if one
    is given, and with expandable segments.
    """
    last_trial = None
    if trial is not None:
        last_trial = TrialReplay(trial, budget_bytes=budget_bytes)
        assert last_trial.fits, "its rows are the bound, which has fit"
    logs_of_steps = partial(step_logs, step, shapes, planned.steps, planned.checks)
    replay = StepReplay(
        list(logs_of_steps(after=trial)),
        budget_bytes=budget_bytes,
        settings=settings,
        largest=planned.largest,
        after=last_trial,
    )
    expandable = None
    if not settings.expandable_segments:
        expandable = StepReplay(
            list(logs_of_steps()),
            budget_bytes=budget_bytes,
            settings=AllocatorSettings(expandable_segments=True),
        ).memory
    return LengthReplay(
        num_steps=len(planned.steps),
        batch_size=planned.batch_size,
        limit=str(planned.limit),
        num_shapes=shapes.num_shapes,
        is_exact=shapes.is_exact,
        memory=replay.memory,
        expandable=expandable,
        check_error=check_error,
    )
