"""The search for the largest batch that a model can train on: trials of the worst rows through the code that training runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch._util import format_bytes
from adaptive_batch.errors import MEMORY_REMEDIES, DoesNotFitError, RankLostError
from adaptive_batch.memory import (
    DeviceMemory,
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

log = logging.getLogger("adaptive_batch")


@dataclass(frozen=True)
class WorstRows:
    """The rows of trials: the longest that training may meet.

    Attributes:
        first: returns that many of them, longest first.
        length: tokens of the longest.
        name: what an error calls a single one.
    """

    first: Callable[[int], list[Any]]
    length: int
    name: str


class EarlierSearches(Protocol):
    """What earlier searches have found, kept between runs."""

    def known_result(self) -> ProbeResult | None:
        """Return a result that depends on the same things; None where there is none."""

    def known_curve(self) -> MemoryCurve | None:
        """Return the expected peak as a function of the rows; None where it is not known."""

    def keep(self, result: ProbeResult) -> None:
        """Keep what a search has found."""


class NoEarlierSearches:
    """There were none, and none is kept."""

    def known_result(self) -> None:
        """Return None."""

    def known_curve(self) -> None:
        """Return None."""

    def keep(self, result: ProbeResult) -> None:
        """Keep nothing."""


class MaxBatchSearch:
    """Finds how many rows fit, in training or in evaluation; training is left as it was, bit for bit.

    Args:
        model: that trains.
        optimizer: of its parameters, or the optimizers in backward.
        runner: runs its micro-batches.
        memory: of its device.
        device_memory: what a trial may use: a size, a share, or None for what is available.
        headroom: share of that which is left free, in [0, 1).
        search: ``predict``, ``binary`` or ``halve``.
        keeps_gradients: unsharded gradients are there between the micro-batches of a step.
        key: the name that errors give to `device_memory`.
        remedies: the end of the sentence that says that one row does not fit.
        time_limit: gives a context that ends all ranks where one does not come to the end of a trial in time.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerInBackward,
        runner: MicroBatchRunner,
        *,
        memory: DeviceMemory,
        device_memory: int | float | str | None = None,
        headroom: float = 0.05,
        search: str = "predict",
        keeps_gradients: bool = False,
        key: str = "device_memory",
        remedies: str = MEMORY_REMEDIES,
        time_limit: Callable[[str], AbstractContextManager[object]] = lambda doing: nullcontext(),
    ) -> None:
        self._model, self._optimizer, self._runner = model, optimizer, runner
        self._memory, self._device_memory, self._headroom, self._key = memory, device_memory, headroom, key
        self._search = search
        self._keeps_gradients = keeps_gradients
        self._remedies = remedies
        self._time_limit = time_limit

    def budget_bytes(self) -> int:
        """Return what a trial on this rank may use, in bytes.

        Raises:
            SettingError: more is asked for than the device has.
        """
        optimizers = (
            self._optimizer.optimizers.values()
            if isinstance(self._optimizer, OptimizerInBackward)
            else [self._optimizer]
        )
        resident = [*self._model.parameters(), *self._model.buffers(), *optimizer_state_tensors(optimizers)]
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
        earlier: Callable[[int], EarlierSearches] = lambda budget: NoEarlierSearches(),
        choose: Callable[..., Search] | None = None,
    ) -> ProbeResult:
        """Search for the most rows that fit on all ranks.

        Args:
            rows: of the trials.
            maximum: no more are tried.
            accumulates: some step has two micro-batches or more, so gradients are there when a forward begins.
            round_to_power_of_two: also try the power of two at or below the bound, which is the result's `batch_size`.
            evaluate: evaluates rows without gradients, where that is tried in place of training.
            trained: the rows that training steps, where `rows` are those of an evaluation.
            earlier: gives what earlier searches have found, for a budget in bytes.
            choose: builds the search from a budget, a maximum, the resident bytes and the expected curve; None takes the
                one that was configured.

        Raises:
            DoesNotFitError: one row does not fit.
            RankLostError: a rank ran out of memory where the others cannot be told.
        """
        random_state = RandomState(self._memory.device)  # reading a row of some datasets draws from it
        try:
            return self._find(
                rows,
                trained or rows,
                maximum=distributed.minimum(maximum),
                accumulates=accumulates,
                round_to_power_of_two=round_to_power_of_two,
                evaluate=evaluate,
                earlier=earlier,
                choose=choose or self._choose,
            )
        finally:
            random_state.restore()
            if is_compiled(self._model):
                torch.compiler.reset()  # the sizes of trials must not use up the compiler's limit of variants

    def _find(
        self,
        rows: WorstRows,
        trained: WorstRows,
        *,
        maximum: int,
        accumulates: bool,
        round_to_power_of_two: bool,
        evaluate: Callable[[list[Any]], object] | None,
        earlier: Callable[[int], EarlierSearches],
        choose: Callable[..., Search],
    ) -> ProbeResult:
        memory, runner = self._memory, self._runner
        budget = self.budget_bytes()
        budgets = distributed.all_gather(budget)
        dry_run = DryRun(
            model=self._model,
            optimizer=self._optimizer,
            forward_backward=lambda size: runner.rehearse(trained.first(size)),
            step=self._step,
            accumulates=accumulates,
            memory=memory,
            budget_bytes=budget,
            row=trained.name,
            sharding=runner.sharding,
            keep_gradients=(lambda: runner.keep_gradients(trained.first(1))) if self._keeps_gradients else None,
            remedies=self._remedies,
        )
        what = "evaluating rows" if evaluate else "rows"
        log.info(
            "probing %s of %d tokens on %s, up to %d rows in %s",
            what,
            rows.length,
            memory.describe(),
            maximum,
            format_bytes(budget),
        )

        def run_trial(size: int) -> Trial:
            tried = rows.first(size)  # read before anything is measured
            with self._time_limit(f"a trial of {size} rows of {rows.length} tokens"):
                if evaluate is None:
                    return dry_run(size)
                try:
                    return dry_run.evaluation(lambda _: evaluate(tried), size)
                except RankLostError as lost:
                    lost.facts["trial_rows_val"] = size
                    raise

        found = earlier(min(budgets))
        known = distributed.from_rank_zero(found.known_result)
        with ExitStack() as stack:
            with self._time_limit("the first step of the probe"):
                stack.enter_context(dry_run)
            resident_bytes = distributed.maximum(dry_run.resident_bytes)
            if evaluate and not runner.sharding.knows(evaluates=True):
                run_trial(1)  # from which a rank that fails knows what the others wait for
            result = known and try_again(known, run_trial)
            if result is None:
                search = choose(
                    budget_bytes=min(budgets),
                    maximum=maximum,
                    resident_bytes=resident_bytes,
                    expected=found.known_curve(),
                )
                result = run_search(
                    run_trial,
                    search=search,
                    round_to_power_of_two=round_to_power_of_two,
                    sequence_length=rows.length,
                )
            result = replace(
                result,
                resident_bytes=resident_bytes,
                budget_bytes=min(budgets),
                budgets_of_ranks=tuple(budgets) if len(budgets) > 1 else (),
            )
        if not result.max_batch_size:
            raise DoesNotFitError(f"{rows.name} does not fit in {format_bytes(result.budget_bytes)}; {self._remedies}")
        if not result.from_cache:
            found.keep(result)
        return result

    def _choose(self, *, budget_bytes: int, maximum: int, resident_bytes: int, expected: MemoryCurve | None) -> Search:
        match self._search:
            case "binary":
                return BinarySearch(maximum=maximum)
            case "halve":
                return Halving(start=maximum)
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


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model, or a part of it, is compiled."""
    return any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in model.modules())
