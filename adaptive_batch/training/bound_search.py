"""The search for the largest batch that fits in a whole training step."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch._util import (
    check_bool,
    check_headroom,
    check_options,
    check_whole,
    count,
    format_bytes,
    is_emulated,
    one_of,
    option,
)
from adaptive_batch.data import (
    MicroBatchLimit,
    largest_rows,
    longest_rows,
    micro_batches,
)
from adaptive_batch.errors import DoesNotFitError, RankLostError, SettingError
from adaptive_batch.memory import (
    ALLOCATOR_VARIABLES,
    OptimizerInBackward,
    RandomState,
    auto_headroom,
    budget_bytes,
    check_device_memory,
    expand_segments_in_script,
    optimizer_list,
    optimizer_state_tensors,
    segments_expand,
    storage_bytes,
)
from adaptive_batch.probe import (
    BinarySearch,
    DryRun,
    Halving,
    Predictive,
    ProbeResult,
    Search,
    Store,
    Trial,
    TrialStep,
    run_search,
    try_again,
)

from .gradients import SavedGradients
from .model_checks import check_parameters, fewest_rows, gradients_must_come, is_compiled
from .parts import BatchSource, arrays_in
from .recipe_step import REFERENCE
from .sizing import MicroBatchSizer
from .splitters import RowSplitter
from .step import Step
from .throughput import ThroughputSearch

log = logging.getLogger("adaptive_batch")

SEARCHES = ("predict", "binary", "halve")
OBJECTIVES = ("throughput", "largest")

# Steps of a trial with training's own lengths, which fragment the allocator's cache.
_DRAWN_STEPS = 12


class MeasuredRows(Protocol):
    """Rows by number, measured as :class:`.DatasetAdapter` does."""

    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def other_bytes(self) -> torch.Tensor: ...

    def __getitem__(self, number: int) -> Any: ...


@dataclass(frozen=True)
class LongestRows:
    """Rows of trials: the largest rows of training.

    Attributes:
        first: ``first(size)`` returns `size` rows, the largest first, as an argument of
            :attr:`TriedStep.try_rows`.
        length: tokens of the longest row; 0 if unknown.
        name: name of a single row in errors.
        in_order: ``in_order(begin, size)`` returns rows in the order of training; None without an
            order.
        padded_to_longest: the same rows after the row with the most tokens, and padded to it; None
            if the largest row has the most tokens.
    """

    first: Callable[[int], Any]
    length: int
    name: str
    in_order: Callable[[int, int], list[Any]] | None = None
    padded_to_longest: LongestRows | None = None

    @classmethod
    def of_sample(
        cls, sample: Callable[[int], Any], split: Callable[[Any], BatchSource], device: torch.device
    ) -> LongestRows:
        """Build the rows of a sample function; each trial makes its own batch.

        Args:
            sample: ``sample(size)`` makes a batch of `size` rows.
            split: function that returns a batch as a :class:`.BatchSource`.
            device: device whose random numbers are restored.
        """
        length = length_in_sample(sample, split, device)
        counted = counted_sample(sample, split)
        return cls(lambda size: partial(counted, size), length, _name(length))

    @classmethod
    def of_dataset(
        cls,
        rows: MeasuredRows,
        *,
        length: int | None = None,
        are_alike: bool = False,
        prepare: Callable[[Any], Any] = lambda row: row,
        order: Callable[[], torch.Tensor] | None = None,
    ) -> LongestRows:
        """Build the rows of a dataset. The largest row has the most bytes in its tensors.

        Args:
            rows: the dataset.
            length: tokens that `prepare` cuts or extends each row to; None if it keeps the length.
            are_alike: whether all rows have one length, which errors do not name.
            prepare: function that prepares a row for trials.
            order: function that returns the numbers of rows in the order of training; None if
                trials need no order.
        """
        lengths = rows.lengths
        numbers = largest_rows(lengths, rows.other_bytes)
        prepared: list[Any] = []

        def first(size: int) -> list[Any]:
            # A small dataset is repeated.
            for place in range(len(prepared), size):
                prepared.append(prepare(rows[numbers[place % len(numbers)]]))
            return prepared[:size]

        def in_order(begin: int, size: int) -> list[Any]:
            assert order is not None
            numbers_in_order = order()
            if not len(numbers_in_order):
                return first(size)
            places = torch.arange(begin, begin + size) % len(numbers_in_order)
            return [rows[number] for number in numbers_in_order[places].tolist()]

        largest_length = int(lengths[numbers[0]]) if length is None else length
        name = "one row" if are_alike else _name(largest_length)
        largest = cls(first, largest_length, name, None if order is None else in_order)
        (longest,) = longest_rows(lengths, 1)
        longest_length = int(lengths[longest])
        if length is not None or longest_length == largest_length:
            # All rows get one length, or the row with the most bytes also has the most tokens.
            return largest

        @cache
        def longest_row() -> Any:
            return prepare(rows[longest])

        padded_to_longest = replace(
            largest,
            first=lambda size: [longest_row(), *first(size - 1)],
            length=longest_length,
            name=_name(longest_length),
        )
        return replace(largest, padded_to_longest=padded_to_longest)


def length_in_sample(
    sample: Callable[[int], Any], split: Callable[[Any], BatchSource], device: torch.device
) -> int:
    """Return the number of tokens of a sample of one row, of all documents if it is packed; 0 if
    unknown. Random numbers are restored.
    """
    with RandomState(device):
        try:
            rows = split(sample(1))
        except SettingError:
            # A batch without a tensor can be tried, but not split.
            return 0
        if not rows.lengths:
            return 0
        return sum(rows.lengths) if rows.is_packed else max(rows.lengths)


def counted_sample(
    sample: Callable[[int], Any], split: Callable[[Any], BatchSource]
) -> Callable[[int], Any]:
    """Return a sample function that raises for a batch with fewer rows than requested.

    The number of rows of some batches is unknown. The function raises only if an earlier batch had
    the requested number of rows, or if the batch is not larger than one of fewer requested rows.
    """
    has_had_requested_rows = False
    # Requested rows and entries of the first batch.
    first_request: int | None = None
    first_size = 0

    def make_and_count(num_rows: int) -> Any:
        nonlocal has_had_requested_rows, first_request, first_size
        batch = sample(num_rows)
        try:
            rows = split(batch)
        except SettingError:
            # A batch without a tensor can be tried, but not split.
            return batch
        if rows.is_packed:
            return batch
        counted = rows.num_rows
        has_had_requested_rows |= counted == num_rows
        size = sum(each.numel() for each in arrays_in(batch) if isinstance(each, torch.Tensor))
        if first_request is None:
            first_request, first_size = num_rows, size
        has_not_grown = num_rows > first_request and size == first_size
        is_too_few_for_sure = has_had_requested_rows or counted == 0 or has_not_grown
        if counted < num_rows and is_too_few_for_sure:
            remedy = "return the requested number of rows; repeat the longest ones if necessary"
            raise SettingError("sample", f"sample({num_rows}) of {count(counted, 'row')}", remedy)
        return batch

    return make_and_count


def _name(length: int) -> str:
    """Return the name of a row of this length in errors."""
    return f"one row of {count(length, 'token')}" if length else "one row"


@dataclass(frozen=True)
class TriedStep:
    """Step of training that trials run with the code of training.

    Attributes:
        engine: runs its micro-batches.
        optimizer: optimizer of the model's parameters, or the optimizers in backward.
        try_rows: function that runs forward and backward of the result of
            :attr:`LongestRows.first` at once; ``is_last=False`` does not reduce gradients.
        clip: function that clips the gradients before the optimizer's step.
        row_length: function that returns the tokens of a row.
        keep_gradients: function that leaves the gradients within a step, which are unsharded; None
            if they are sharded.
        frozen_modules: frozen modules that the step runs besides the model.
    """

    engine: Step
    optimizer: Optimizer | OptimizerInBackward
    try_rows: Callable[..., None]
    clip: Callable[[], object] = lambda: None
    row_length: Callable[[Any], int] = lambda row: 1
    keep_gradients: Callable[[Any], object] | None = None
    frozen_modules: Sequence[nn.Module] = ()

    def step(self) -> None:
        """Clip the gradients, and step the optimizer."""
        self.clip()
        assert isinstance(self.optimizer, Optimizer)
        self.optimizer.step()


@dataclass(frozen=True)
class ProbeOptions:
    """Options of a search.

    Attributes:
        search: search strategy. `predict`: predict sizes that should fit from the peaks of earlier
            trials. `binary`: bisect from 1 to `maximum`. `halve`: start at `maximum` and halve
            until a size fits.
        objective: criterion by which `auto` chooses micro-batches within the maximum batch size.
            `throughput`: the most real tokens per second in timed trials. `largest`: the largest
            micro-batches.
        device_memory: memory that training may use: a size such as `12GiB`, or a fraction of the
            device such as `0.9`. None: the free memory plus the memory that this process already
            uses.
        headroom: fraction of this memory that stays free: at least 0 and less than 1. `auto`: 0.01
            on one GPU with expandable segments if trials are whole steps, otherwise 0.05.
        maximum: maximum number of rows to try.
        round_to_power_of_two: whether to train with the largest power of two that does not exceed
            the maximum batch size. This size is tried too. The batch size then stays the same if
            the maximum differs slightly between runs.
        trial_seconds: maximum duration of a trial in seconds. A size that would take longer is not
            tried. None: no limit.
        memory_key: name of `device_memory` in errors.

    Raises:
        SettingError: a value cannot be used.
    """

    device_memory: int | float | str | None = option(None, check_device_memory)
    headroom: float | str = option("auto", check_headroom)
    maximum: int = option(4096, check_whole)
    search: str = option("predict", one_of(*SEARCHES))
    round_to_power_of_two: bool = option(False)
    objective: str = option("throughput", one_of(*OBJECTIVES))
    trial_seconds: float | None = None
    memory_key: str = "device_memory"

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def times_micro_batches(self) -> bool:
        """True if `auto` times micro-batches; under `adaptive-batch emulate` it never does."""
        return self.objective == "throughput" and not is_emulated()


@dataclass(frozen=True)
class SearchScope:
    """Target of a search, and its rows.

    Attributes:
        rows: rows of the trials.
        accumulates: whether a forward may begin with gradients in memory.
        whole_step_rows: rows of a step on one device. If they do not fit at once, the search is
            repeated with gradients in memory. None if all steps fit at once.
        reference: function that runs rows in the pass of the frozen reference model before each
            step, to try instead of training; None for training.
        layouts: kinds of layouts for the search for the fastest micro-batches within the bound;
            none for no such search.
        timed_rows: rows of a timed step on one device; 0 for the bound.
    """

    rows: LongestRows
    accumulates: bool = False
    whole_step_rows: int | None = None
    reference: Callable[[Any], object] | None = None
    layouts: Sequence[str] = ()
    timed_rows: int = 0


class BoundSearch:
    """Finds the most rows that fit in training or in the pass of its reference model, and restores
    the training state bit for bit.

    Args:
        tried: step that trials run.
        scope: target of the search.
        options: options of the search.
        store: results of earlier searches; None without a store.
    """

    def __init__(
        self,
        tried: TriedStep,
        scope: SearchScope,
        options: ProbeOptions,
        *,
        store: Store | None = None,
    ) -> None:
        self._tried = tried
        self._scope = scope
        self._options = options
        self._store = store
        self._memory = tried.engine.memory
        self._maximum = distributed.minimum(options.maximum)
        self._min_rows = fewest_rows(tried.engine.model)
        self._budget = self.budget_bytes()
        # budget_bytes() has emptied the allocator's cache.
        tried.engine.largest_size = 0
        rows = scope.rows
        min_rows = self._min_rows
        keep_gradients = None
        if tried.keep_gradients:
            keep_gradients = partial(tried.keep_gradients, rows.first(min_rows))
        self._dry_run = DryRun(
            model=tried.engine.model,
            optimizer=tried.optimizer,
            forward_backward=lambda size: tried.try_rows(self._rows_to_try(size)),
            step=tried.step,
            accumulates=scope.accumulates,
            memory=self._memory,
            budget_bytes=self._budget,
            min_rows=min_rows,
            row=rows.name if min_rows == 1 else f"{min_rows} rows, which BatchNorm needs,",
            sharding=tried.engine.sharding,
            keep_gradients=keep_gradients,
            remedies=tried.engine.attempts.remedies,
            varying_steps=self._varying_steps if self._fragments else None,
            frozen_modules=tried.frozen_modules,
            leaves_cache=self._leaves_cache,
        )

    def budget_bytes(self) -> int:
        """Return the bytes that a trial on this rank may use.

        Raises:
            SettingError: `device_memory` is more than the device has.
        """
        model = self._tried.engine.model
        states = optimizer_state_tensors(optimizer_list(self._tried.optimizer))
        copied = [*model.parameters(), *model.buffers(), *states]
        frozen = [
            tensor
            for module in self._tried.frozen_modules
            for tensor in (*module.parameters(), *module.buffers())
        ]
        available = self._memory.available_bytes([*copied, *frozen])
        if self._memory.device.type == "cpu":
            # On a CPU, the dry run copies these tensors within the memory that trials use.
            available = max(1, available - storage_bytes(copied))
        return budget_bytes(
            self._options.device_memory,
            headroom=self.headroom,
            total_bytes=self._memory.total_bytes(),
            available_bytes=available,
            key=self._options.memory_key,
        )

    @property
    def headroom(self) -> float:
        """Share of memory that stays free."""
        if not isinstance(self._options.headroom, str):
            return self._options.headroom
        return auto_headroom(expands=self._fragments and segments_expand())

    @property
    def _fragments(self) -> bool:
        """True if trials are whole steps of varying lengths, which fragment the cache."""
        return self._leaves_cache and self._scope.rows.in_order is not None

    @property
    def _leaves_cache(self) -> bool:
        """True if training starts with the allocator's cache of the last trial."""
        # Peaks on a CPU, which has no cache, are known to the byte.
        has_cache = self._memory.granularity_bytes > 1 and distributed.world_size() == 1
        return has_cache and self._scope.reference is None

    def run(self) -> ProbeResult:
        """Search for the most rows that fit on all ranks.

        Raises:
            DoesNotFitError: one row does not fit.
            RankLostError: a rank ran out of memory and cannot notify the others.
        """
        engine = self._tried.engine
        compiles = is_compiled(engine.model)
        # The result must fit on all ranks.
        budget = distributed.minimum(self._budget)
        log.info(
            "searching on %s: up to %s in %s, with %.4g%% of the memory left free",
            self._memory.describe(),
            count(self._maximum, "row"),
            format_bytes(self._budget),
            100 * self.headroom,
        )
        # Trials also add to gradients outside of the model: set these aside, and put them back.
        gradients = SavedGradients((), lambda: None, engine.own_leaves)
        try:
            # Reading a row of some datasets draws random numbers.
            with RandomState(self._memory.device), ExitStack() as stack:
                stack.callback(gradients.put_back)
                stack.enter_context(gradients.watch_backward())
                stack.enter_context(self._dry_run)
                resident_bytes = distributed.maximum(self._dry_run.resident_bytes)
                result = self._search(budget, resident_bytes)
                if self._scope.layouts and result.max_batch_size and result.throughput is None:
                    if compiles:
                        # Timed micro-batches have more shapes than torch compiles by default.
                        config: Any = torch.compiler.config
                        variants = {"recompile_limit": 2**20, "accumulated_recompile_limit": 2**20}
                        stack.enter_context(config.patch(variants))
                    search = ThroughputSearch(
                        self._tried, self._dry_run, self._scope, result.max_batch_size
                    )
                    result = replace(result, throughput=search.run())
        finally:
            if compiles:
                # Training must not share the compiler's limit of variants with trials.
                torch.compiler.reset()
        if self._leaves_cache:
            # The allocator's cache already has room for this micro-batch.
            engine.largest_size = result.max_batch_size * (self._scope.rows.length or 1)
        if not result.max_batch_size:
            raise DoesNotFitError(
                f"{self._scope.rows.name} does not fit in {format_bytes(budget)};"
                f" {engine.attempts.remedies}"
            )
        result = replace(result, resident_bytes=resident_bytes, budget_bytes=budget)
        if self._store is not None and not result.from_cache and distributed.is_rank_zero():
            self._store.put(self._name(self._store, budget), result)
        return result

    def _name(self, store: Store, budget: int) -> str:
        """Return the fingerprint of this search."""
        return store.name(
            [self._options.maximum, self._options.trial_seconds],
            [self._options.round_to_power_of_two, self._scope.accumulates],
            [self._scope.rows.length, self._scope.layouts, self._scope.timed_rows],
            [self._memory.describe(), *map(os.environ.get, ALLOCATOR_VARIABLES)],
            # The available memory differs a little from run to run. Round it to steps of 1%, so
            # that these runs find the result.
            round(math.log(max(1, budget), 1.01)),
        )

    def _search(self, budget: int, resident_bytes: int) -> ProbeResult:
        """Try the result of an earlier search; search if there is none or it no longer fits."""
        earlier = None
        store = self._store
        if store is not None:
            name = self._name(store, budget)
            earlier = distributed.from_rank_zero(lambda: store.known(name))
        sharding = self._tried.engine.sharding
        if self._scope.reference and not sharding.has_recorded(evaluates=REFERENCE):
            # Record the collectives, so that a rank can finish them after an OOM.
            self._run_trial(1)
        if earlier is not None:
            result = try_again(earlier, self._run_trial)
            if result is not None:
                return result
        result = run_search(
            self._run_trial,
            search=self._strategy(budget, resident_bytes),
            min_rows=self._min_rows,
            trial_seconds=self._options.trial_seconds,
            min_rows_seconds=self._dry_run.min_rows_seconds,
            round_to_power_of_two=self._options.round_to_power_of_two,
            sequence_length=self._scope.rows.length,
        )
        max_batch_size = result.max_batch_size
        if self._leaves_cache and max_batch_size and max_batch_size != result.trials[-1].batch_size:
            # Training starts with the allocator's cache of the last trial.
            self._run_trial(max_batch_size)
        return result

    def _run_trial(self, size: int) -> Trial:
        """Run a trial of training, or of the reference if the scope has one."""
        rows = self._scope.rows
        # Read the rows before the trial, which would measure the time and memory of reading.
        rows.first(size)
        reference = self._scope.reference
        if reference is None:
            return self._dry_run(size)
        try:
            return self._dry_run.evaluation(lambda num_rows: reference(rows.first(num_rows)), size)
        except RankLostError as lost:
            # A restart then tries fewer rows.
            lost.facts["trial_rows_reference"] = size
            raise

    def _rows_to_try(self, size: int) -> Any:
        """Return `size` rows for a trial of training."""
        rows = self._scope.rows
        if self._tried.engine.sizer.layout.pads:
            return rows.first(size)
        # Packed rows are not padded to the longest, so shorter ones would not fill the limit.
        return rows.first(1) * size

    def _varying_steps(self, size: int) -> Iterator[TrialStep]:
        """Yield the steps of a trial whose micro-batches hold `size` rows: the longest rows, the
        first rows of training, and the longest rows again.
        """
        tried = self._tried
        rows = self._scope.rows
        assert rows.in_order is not None
        layout = tried.engine.sizer.layout
        unit = tried.engine.sizer.limit().unit
        limit = MicroBatchLimit(layout.amount(size, rows.length, unit=unit), unit)
        num_micro_batches = 2 if self._scope.accumulates else 1
        longest = partial(tried.try_rows, self._rows_to_try(size))
        yield [longest] * num_micro_batches
        step_rows = num_micro_batches * size
        for step in range(_DRAWN_STEPS):
            drawn = rows.in_order(step * step_rows, step_rows)
            lengths = [min(rows.length, tried.row_length(row)) for row in drawn]
            yield [
                partial(tried.try_rows, [drawn[number] for number in micro_batch.rows])
                for micro_batch in micro_batches(lengths, limit, layout)
            ]
        yield [longest] * num_micro_batches

    def _strategy(self, budget: int, resident_bytes: int) -> Search:
        if self._options.search == "binary":
            return BinarySearch(maximum=self._maximum)
        if self._options.search == "halve":
            return Halving(start=self._maximum)
        return Predictive(
            budget_bytes=budget,
            maximum=self._maximum,
            min_rows=self._min_rows,
            resident_bytes=resident_bytes,
            granularity_bytes=self._memory.granularity_bytes,
        )


def find_limit(
    tried: TriedStep,
    scope: SearchScope,
    options: ProbeOptions,
    *,
    store: Store | None = None,
) -> list[ProbeResult]:
    """Find the most rows that fit. All searches use this function.

    If a step does not fit as one micro-batch, the search is repeated with the gradients of an
    earlier micro-batch in memory. If another row has more tokens than the largest row, the search
    is repeated with rows padded to it.

    Args:
        tried: step that trials run.
        scope: target of the search.
        options: options of the search.
        store: results of earlier searches, which are tried once; None for no store.

    Returns:
        The result of each search; the last one counts.

    Raises:
        DoesNotFitError: one row does not fit.
    """
    results: list[ProbeResult] = []
    while True:
        result = BoundSearch(tried, scope, options, store=store).run()
        results.append(result)
        if not scope.accumulates and (scope.whole_step_rows or 0) > result.max_batch_size:
            scope = replace(scope, accumulates=True)
        elif scope.rows.padded_to_longest is not None:
            scope = replace(scope, rows=scope.rows.padded_to_longest)
            options = replace(options, maximum=result.max_batch_size)
        else:
            return results


def find_max_batch_size(
    model: nn.Module,
    optimizer: Optimizer,
    forward_backward: Callable[[Any], object],
    sample: Callable[[int], Any],
    *,
    device_memory: int | float | str | None = None,
    headroom: float | str = "auto",
    maximum: int = 4096,
    search: str = "predict",
    accumulates: bool = False,
) -> ProbeResult:
    """Find the largest batch whose whole training step fits in memory.

    Trials run forward and backward of the longest rows with the optimizer state in memory, and the
    function returns only a size that was tried. Weights, optimizer, gradients, buffers and RNG
    state are restored bit for bit. On several ranks, shard the model with `fully_shard`. All ranks
    call this function, and it returns the smallest bound of all ranks.

    Args:
        model: model on its device.
        optimizer: optimizer of its parameters.
        forward_backward: function that runs forward and backward of a batch as in training, with
            autocast and scaling.
        sample: function ``sample(n)`` that returns a collated batch of the `n` longest rows that
            training may have.
        device_memory: see :class:`ProbeOptions`.
        headroom: fraction of `device_memory` that stays free.
        maximum: maximum number of rows to try.
        search: ``predict``, ``binary`` or ``halve``.
        accumulates: whether a forward begins with gradients in memory, as in scripts that
            accumulate gradients.

    Returns:
        The result, with `max_batch_size`, the trials, and a ``table()`` of the trials.

    Raises:
        DoesNotFitError: one row does not fit.
        SettingError: an argument cannot be used.
    """
    options = ProbeOptions(device_memory, headroom, maximum, search)
    check_parameters(model, optimizer)
    for key, function in (("forward_backward", forward_backward), ("sample", sample)):
        if not callable(function):
            raise SettingError(key, function, "give a function")
    check_bool("accumulates", accumulates)
    expand_segments_in_script(next(model.parameters()).device)
    engine = Step(model, MicroBatchSizer())

    def try_sample(make_batch: Callable[[], Any], *, is_last: bool = True) -> None:
        # Before the reduction, FSDP's parameters have no gradients to check.
        must_come = gradients_must_come(model, forward_backward) if is_last else nullcontext()
        with must_come, engine.trial(is_last=is_last):
            forward_backward(make_batch())

    tried = TriedStep(engine, optimizer, try_sample)
    split = RowSplitter(trims=True).split_sample
    rows = LongestRows.of_sample(sample, split, engine.memory.device)
    (result,) = find_limit(tried, SearchScope(rows, accumulates=accumulates), options)
    return result
