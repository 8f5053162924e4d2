"""The search for the largest batch that a model can train on: trials of the worst rows through the code that training runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch._util import count, format_bytes
from adaptive_batch.data import MicroBatchLimit, micro_batches
from adaptive_batch.errors import DoesNotFitError, RankLostError
from adaptive_batch.memory import (
    MemoryCurve,
    OptimizerInBackward,
    RandomState,
    budget_bytes,
    optimizer_state_tensors,
    storage_bytes,
)
from adaptive_batch.probe import (
    BinarySearch,
    DryRun,
    Halving,
    Predictive,
    ProbeResult,
    Search,
    Trial,
    run_search,
    try_again,
)

from .micro_batch_runner import MicroBatchRunner
from .model_checks import is_compiled
from .throughput_search import Choices, ThroughputSearch, WorstRows

log = logging.getLogger("adaptive_batch")

_DRAWN_STEPS = 12  # of training's own lengths in a trial


class MaxBatchSearch:
    """Finds how many rows fit, in training or in evaluation; training is left as it was, bit for bit.

    Args:
        runner: runs the micro-batches of training.
        optimizer: of its model's parameters, or the optimizers in backward.
        device_memory: what a trial may use: a size, a share, or None for what is available.
        headroom: share of that which is left free, in [0, 1).
        search: ``predict``, ``binary`` or ``halve``, or what builds another :class:`Search`.
        keeps_gradients: unsharded gradients are there between the micro-batches of a step.
        key: the name that errors give to `device_memory`.
        time_limit: gives a context that ends all ranks where one does not come to the end of a trial in time.
    """

    def __init__(
        self,
        runner: MicroBatchRunner,
        optimizer: Optimizer | OptimizerInBackward,
        *,
        device_memory: int | float | str | None = None,
        headroom: float = 0.05,
        search: str | Callable[..., Search] = "predict",
        keeps_gradients: bool = False,
        key: str = "device_memory",
        time_limit: Callable[[str], AbstractContextManager[object]] = lambda doing: nullcontext(),
    ) -> None:
        self._runner, self._optimizer, self._memory = runner, optimizer, runner.retry.memory
        self._device_memory, self._headroom, self._key = device_memory, headroom, key
        self._build_search = search if callable(search) else getattr(self, f"_{search}")
        self._keeps_gradients = keeps_gradients
        self._time_limit = time_limit

    def budget_bytes(self) -> int:
        """Return what a trial on this rank may use, in bytes.

        Raises:
            SettingError: more is asked for than the device has.
        """
        model, one = self._runner.model, self._optimizer
        optimizers = one.optimizers.values() if isinstance(one, OptimizerInBackward) else [one]
        resident = [*model.parameters(), *model.buffers(), *optimizer_state_tensors(optimizers)]
        available = self._memory.available_bytes(resident)
        if self._memory.device.type == "cpu":  # the probe's own copies lie in the same memory
            available = max(1, available - storage_bytes(resident))
        return budget_bytes(
            self._device_memory,
            headroom=self._headroom,
            total_bytes=self._memory.total_bytes(),
            available_bytes=available,
            key=self._key,
        )

    def find(
        self,
        rows: WorstRows,
        *,
        maximum: int,
        accumulates: bool,
        round_to_power_of_two: bool = False,
        evaluate: Callable[[list[Any]], object] | None = None,
        trained: WorstRows | None = None,
        known: Callable[[int], ProbeResult | None] = lambda budget_bytes: None,
        expected: Callable[[], MemoryCurve | None] = lambda: None,
        choices: Choices | None = None,
    ) -> ProbeResult:
        """Search for the most rows that fit on all ranks.

        Args:
            rows: of the trials.
            maximum: no more are tried.
            accumulates: some step has two micro-batches or more, so gradients are there when a forward begins.
            round_to_power_of_two: also try the power of two at or below the bound, which is the result's `batch_size`.
            evaluate: evaluates rows without gradients, where that is tried in place of training.
            trained: the rows that training steps, where `rows` are those of an evaluation.
            known: returns what an earlier search found within a budget; called on rank zero, and tried once more.
            expected: returns the peak that is expected as a function of the rows; called where a search is needed.
            choices: also find what trains most tokens a second, in the order of training, within what fits.

        Raises:
            DoesNotFitError: one row does not fit.
            RankLostError: a rank ran out of memory where the others cannot be told.
        """
        runner, memory, start = self._runner, self._memory, time.perf_counter()
        random_state = RandomState(memory.device)  # reading a row of some datasets draws from it
        maximum, stepped = distributed.minimum(maximum), trained or rows
        budget = self.budget_bytes()
        budgets = distributed.all_gather(budget)
        dry_run = DryRun(
            model=runner.model,
            optimizer=self._optimizer,
            forward_backward=lambda size: runner.try_rows(stepped.first(size)),
            step=self._step,
            accumulates=accumulates,
            memory=memory,
            budget_bytes=budget,
            row=stepped.name,
            sharding=runner.sharding,
            keep_gradients=(lambda: runner.keep_gradients(stepped.first(1))) if self._keeps_gradients else None,
            remedies=runner.retry.remedies,
            steps=partial(self._steps, rows, accumulates=accumulates) if self._fragments(rows) else None,
        )
        what, where = "evaluating rows" if evaluate else "rows", memory.describe()
        log.info(
            "probing %s of %s on %s, up to %s in %s",
            what,
            count(rows.length, "token"),
            where,
            count(maximum, "row"),
            format_bytes(budget),
        )

        def run_trial(size: int) -> Trial:
            tried = rows.first(size)  # read before anything is measured
            with self._time_limit(f"a trial of {count(size, 'row')} of {count(rows.length, 'token')}"):
                if evaluate is None:
                    return dry_run(size)
                try:
                    return dry_run.evaluation(lambda _: evaluate(tried), size)
                except RankLostError as lost:
                    lost.facts["trial_rows_val"] = size
                    raise

        try:
            result = distributed.from_rank_zero(lambda: known(min(budgets)))
            with ExitStack() as stack:
                with self._time_limit("the first step of the probe"):
                    stack.enter_context(dry_run)
                resident_bytes = distributed.maximum(dry_run.resident_bytes)
                if evaluate and not runner.sharding.knows(evaluates=True):
                    run_trial(1)  # from which a rank that fails knows what the others wait for
                result = result and try_again(result, run_trial)
                if result is None:
                    search = self._build_search(
                        budget_bytes=min(budgets),
                        maximum=maximum,
                        resident_bytes=resident_bytes,
                        expected=expected(),
                    )
                    result = run_search(
                        run_trial,
                        search=search,
                        round_to_power_of_two=round_to_power_of_two,
                        sequence_length=rows.length,
                    )
                    if self._fragments(rows) and result.max_batch_size != result.trials[-1].batch_size:
                        run_trial(result.max_batch_size)  # whose cache training goes on with
                if choices and result.max_batch_size and result.throughput is None:
                    by_memory = time.perf_counter() - start
                    most = distributed.maximum(int(1e6 * by_memory)) * 2e-6
                    search_fastest = ThroughputSearch(runner, dry_run, self._step, choices, rows)
                    fastest = search_fastest(result.max_batch_size, seconds=most)
                    seconds = time.perf_counter() - start - by_memory
                    result = replace(result, throughput=fastest and replace(fastest, seconds=seconds))
        finally:
            random_state.restore()
            if is_compiled(runner.model):
                torch.compiler.reset()  # the sizes of trials must not use up the compiler's limit of variants
        if not result.max_batch_size:
            raise DoesNotFitError(f"{rows.name} does not fit in {format_bytes(min(budgets))}; {runner.retry.remedies}")
        if memory.granularity_bytes > 1 and result.max_batch_size_with_retries is None:
            result = replace(result, max_batch_size_with_retries=0)
        return replace(
            result,
            resident_bytes=resident_bytes,
            budget_bytes=min(budgets),
            budgets_of_ranks=tuple(budgets) if len(budgets) > 1 else (),
        )

    def _fragments(self, rows: WorstRows) -> bool:
        """Whether trials are whole steps of varying lengths: the device's allocator has a cache, which these fragment."""
        return rows.in_order is not None and self._memory.granularity_bytes > 1 and distributed.world_size() == 1

    def _steps(self, rows: WorstRows, size: int, *, accumulates: bool) -> Iterator[list[Callable[[], object]]]:
        """Yield the micro-batches of steps: the longest, what comes first in training, and the longest again."""
        runner, layout, in_order = self._runner, self._runner.sizer.layout, rows.in_order
        assert in_order is not None
        longest, several = rows.first(size), 2 if accumulates else 1
        yield [partial(runner.try_rows, longest)] * several
        unit = runner.sizer.limit(size).unit
        limit = MicroBatchLimit(layout.padded_tokens([rows.length] * size) if unit == "tokens" else size, unit)
        for step in range(_DRAWN_STEPS):
            drawn = in_order(step * several * size, several * size)
            pieces = micro_batches([min(rows.length, runner.loss.row_length(row)) for row in drawn], limit, layout)
            yield [partial(runner.try_rows, [drawn[i] for i in piece.rows]) for piece in pieces]
        yield [partial(runner.try_rows, longest)] * several

    def _binary(self, *, maximum: int, **facts: Any) -> Search:
        return BinarySearch(maximum=maximum)

    def _halve(self, *, maximum: int, **facts: Any) -> Search:
        return Halving(start=maximum)

    def _predict(self, *, budget_bytes: int, maximum: int, resident_bytes: int, expected: MemoryCurve | None) -> Search:
        if expected is not None:
            rows = expected.max_rows(budget_bytes)
            most = maximum if rows is None else min(rows, maximum)
            log.info("about %d rows are expected to fit; each size that counts is tried", most)
        return Predictive(
            budget_bytes=budget_bytes,
            maximum=maximum,
            resident_bytes=resident_bytes,
            granularity_bytes=self._memory.granularity_bytes,
            expected=expected,
        )

    def _step(self) -> None:
        self._runner.clip()
        assert isinstance(self._optimizer, Optimizer)
        self._optimizer.step()
