"""How many rows of a script's samples fit: trials of the step that will run them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch.optim import Optimizer

from adaptive_batch._util import check_bool, check_whole
from adaptive_batch.errors import SettingError
from adaptive_batch.probe import ProbeResult

from .bound_search import BoundSearch, ProbeOptions, SearchScope
from .label_shares import LENGTHS_REMEDY
from .model_checks import check_parameters, gradients_must_come
from .part_step import PartStep
from .parts import BatchSource
from .trials import TriedStep, WorstRows

log = logging.getLogger("adaptive_batch")


class SampleSearch:
    """Searches for the most rows of a sample whose whole training step fits, and knows what its
    trials have left out.

    Args:
        step: runs the parts of a batch.
        split_batch: function that makes a batch ready to be split.
    """

    def __init__(
        self,
        step: PartStep,
        split_batch: Callable[[Any], BatchSource],
    ) -> None:
        self._step = step
        self._split_batch = split_batch
        # Whether trials ran one part alone, without the gradients beside which a second part runs.
        self._tried_one_part = False

    def find(
        self,
        optimizer: Optimizer,
        sample: Callable[[int], Any],
        options: ProbeOptions,
        *,
        batch_size: int | None,
        accumulates: bool,
    ) -> ProbeResult:
        """Find the most rows, and let the sizer take them; see :meth:`.AdaptiveStep.find_bound`."""
        check_parameters(self._step.model, optimizer)
        if not callable(sample):
            raise SettingError("sample", sample, "give a function of a number of rows")
        if batch_size is not None:
            check_whole("batch_size", batch_size)
        check_bool("accumulates", accumulates)
        worst = WorstRows.of_sample(sample, self._split_batch, self._step.memory.device)
        if self._step.sizer.limit_of_step.unit == "tokens" and not worst.length:
            raise SettingError("micro_batch_tokens", "auto", LENGTHS_REMEDY)
        tried = TriedStep(
            self._step, optimizer, partial(self._try_sample, beside_gradients=accumulates)
        )
        scope = SearchScope(
            worst,
            accumulates=accumulates or self._step.sizer.may_split,
            whole_step_rows=batch_size,
        )
        result = BoundSearch(tried, scope, options).run()
        if scope.splits_step(result):
            scope = replace(scope, accumulates=True)
            result = BoundSearch(tried, scope, options).run()
        self._step.sizer.set_bound(result)
        self._tried_one_part = not scope.accumulates
        return result

    def see_split(self, num_pieces: int) -> None:
        """Warn once where a batch ran in several parts, and trials in one alone."""
        if self._tried_one_part and num_pieces > 1:
            self._tried_one_part = False
            log.warning(
                "a batch is split, and what fits was tried without the gradients of other"
                " parts: give find_bound batch_size="
            )

    def _try_sample(
        self, make_batch: Callable[[], Any], *, beside_gradients: bool, is_last: bool = True
    ) -> None:
        """Run forward and backward of a batch at once, as a trial.

        Args:
            make_batch: function that makes the batch.
            beside_gradients: whether the gradients of earlier batches are there.
            is_last: whether gradients are reduced.
        """

        def whole() -> tuple[Any, int]:
            rows = self._split_batch(make_batch())
            return rows.part(range(rows.num_rows)), rows.num_rows

        def run() -> None:
            comes = gradients_must_come(self._step.model, self._step.forward_backward)
            # Gradients that are not reduced are not the parameters' yet.
            with comes if is_last else nullcontext():
                self._step.try_part(whole, is_last=is_last)

        if not beside_gradients:
            run()
            return
        gradients = self._step.save_gradients()
        if self._step.sizer.may_split:
            # From its second part on a batch has gradients of its own beside the earlier ones.
            gradients.fill_new()
        run()
        gradients.add_up()
