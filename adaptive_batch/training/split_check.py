"""Refuses a loss that does not decompose: before a batch is split, compares the gradient of a few
rows with the sum of the gradients of their parts.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch._util import count, is_emulated
from adaptive_batch.data import MicroBatch
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState, is_out_of_memory

from .gradient_passes import (
    Comparison,
    GradientPasses,
    Parts,
    Sample,
    without_auxiliary_loss,
)
from .model_checks import gradient_hooks, has_batch_norm, some_names
from .parts import BatchSource, LabelCounter, arrays_in, has_shifted_labels, shares_of

if TYPE_CHECKING:
    from .adaptive_step import PartStep

log = logging.getLogger("adaptive_batch")

# Differences that rounding may cause, as shares of the norm of the gradient. In 1,257 correct
# records float32 differed by at most 2.4e-5, and bfloat16 weights by more than 1.5% once.
_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 1.5e-2}
_TOLERANCE_FLOAT32 = 1e-3
# Allowed difference summed over all parts, since a loss term without `share` adds once per part.
_TOLERANCE_ALL_PARTS = 1e-2
_MIN_TOLERANCE = 1e-4
_TOLERANCE_TF32 = 1e-2
# For parts of one row in less than float32: losses near 0 differed by up to 15%.
_TOLERANCE_ONE_ROW = 0.25
# If two runs of the same rows differ by more than this, a comparison shows nothing.
_MAX_NOISE = 0.05
# Difference up to which fitted shares count as those of a sum or of a weighted mean.
_SAME_SHARE = 0.05
# Maximum number of checks that run only to decide whether first labels count.
_MAX_LABEL_CHECKS = 6
# Numbers of the splits that are checked, and every 256th: rows of one batch may be alike by chance.
_CHECKED = frozenset({1, 2, 4, 8, 16, 32, 64})
_CHECKED_EVERY = 256
# Maximum number of rows of a batch from which those of a check are chosen.
_CANDIDATES = 64


class SplitCheck:
    """Compares the gradient of a few rows with the sum of the gradients of their parts.

    All ranks make the same calls and decisions.

    Args:
        step: runs the parts of a batch.

    Attributes:
        counts_first_label: whether the first label of each row counts, according to the batches so
            far; see :class:`.LabelCounter`.
        shares_cancel: whether gradients do not depend on the shares of parts, as in a loss that is
            divided by the labels of the batch.
        keeps_columns: whether parts keep all columns, since the gradient depends on padding.
    """

    def __init__(self, step: PartStep) -> None:
        self._step = step
        self._passes = GradientPasses(step)
        # Found by checks.
        self.counts_first_label = False
        self.shares_cancel = False
        self.keeps_columns = False
        # True once a check could tell if first labels count.
        self._knows_first_label = False
        self._num_splits = 0
        self._num_label_checks = 0
        # Whether parts have fewer columns than the batch, and whether the batch is packed: of each
        # form, the first batch is checked.
        self._checked_forms: set[tuple[int, ...]] = set()
        self._num_parts = 0
        # True if the rows of the last check had no finite gradient.
        self._lacks_gradient = False
        self._warned: set[str] = set()

    def count(self, without: float, including: float) -> float:
        """Return the number of labels of a part, given those without and with the first label of
        each row.
        """
        if self.counts_first_label or (self.shares_cancel and not without):
            # If shares cancel out, a part whose rows have only first labels must not be left out.
            return including
        return without

    def _begin_split(self, counts: Sequence[tuple[float, float]], rows: BatchSource) -> bool:
        """Count a split; return whether to check it.

        Args:
            counts: see :meth:`check`.
            rows: rows of the batch.
        """
        self._num_splits += 1
        is_due = self._num_splits in _CHECKED or self._num_splits % _CHECKED_EVERY == 0
        # Repeat a check that measured nothing at the next split.
        is_due |= self._lacks_gradient and self._num_splits < max(_CHECKED)
        form = tuple(distributed.all_reduce_max([int(rows.cuts), int(rows.is_packed)]))
        is_due |= form not in self._checked_forms
        self._checked_forms.add(form)
        if is_due or self._knows_first_label:
            return is_due
        # Check a batch whose shares depend on first labels, which shows whether they count.
        shares_without = shares_of([without for without, _ in counts])
        shares_including = shares_of([including for _, including in counts])
        depends_on_first = distributed.any_of_ranks(shares_without != shares_including)
        self._num_label_checks += depends_on_first
        return depends_on_first and self._num_label_checks <= _MAX_LABEL_CHECKS

    def check(
        self,
        rows: BatchSource,
        pieces: Sequence[MicroBatch],
        counts: Sequence[tuple[float, float]],
        *,
        num_parts: int,
    ) -> None:
        """Count a split; if it is due for a check, compare the gradients of a few rows with those
        of their parts. Random numbers are restored.

        Args:
            rows: rows of the batch.
            pieces: parts that the batch is split into.
            counts: labels of each part without and with the first of each row; none on a rank
                without rows.
            num_parts: parts of the batch on the rank that has the most.

        Raises:
            SettingError: splitting changes the gradient, or a part fails.
        """
        if not self._num_splits and has_batch_norm(self._step.model):
            log.warning(
                "the model has BatchNorm, whose statistics are those of a micro-batch: a split"
                " changes results"
            )
        if self._begin_split(counts, rows):
            self._check_batch(rows, pieces, num_parts)
        # Without a check that could tell, such as one for which memory is too small.
        has_first_only = any(
            including and not self.count(without, including) for without, including in counts
        )
        if has_first_only and not self._knows_first_label:
            self.warn(
                "first labels",
                "a part is left out, since its only labels are the first ones of its rows, and no"
                f" check has shown yet whether they count; give {self._step.terms.num_labels}",
                on_each_rank=True,
            )

    def _check_batch(self, rows: BatchSource, pieces: Sequence[MicroBatch], num_parts: int) -> None:
        """Compare the gradients of a few rows of a batch with those of their parts."""
        self._num_parts = num_parts
        self._lacks_gradient = False
        with RandomState(self._step.memory.device):
            batch = rows.to_check()
            if batch.num_rows:
                try:
                    # A CustomSplit raises here if the part of all rows lacks some.
                    batch.part(range(batch.num_rows))
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
            # Collating each row by itself may take long.
            divided = batch.uncut() if rows.collates_parts else batch
            candidates = _Candidates(divided, pieces, self._step.labels, number=self._num_splits)
            for parts in self._choose_parts(candidates):
                sample = Sample(batch, parts, rows.dummy)
                self._check_sample(sample, can_keep_columns=not rows.collates_parts)
        self._check_side_effects()

    def _choose_parts(self, candidates: _Candidates) -> Iterator[Parts]:
        if not self._knows_first_label:
            yield from candidates.by_first_labels()
        yield from candidates.by_values(
            counts_first=self.counts_first_label,
            is_precise=self._tolerance(rows_per_part=2) <= _TOLERANCE_FLOAT32,
        )

    def _check_sample(self, sample: Sample, *, can_keep_columns: bool) -> None:
        """Compare a sample with its parts.

        Raises:
            SettingError: their gradients differ.
        """
        tolerance = self._tolerance(len(sample.parts[0]))
        result = self._measure(sample, tolerance)
        if result is None:
            # Out of memory: retry with one row per part.
            one_row_each = sample.parts[0][:1], sample.parts[1][-1:]
            sample = replace(sample, parts=one_row_each)
            tolerance = self._tolerance(1)
            result = self._measure(sample, tolerance)
        if result is None:
            self.warn("memory", "two rows do not fit in memory at once, so the split is unchecked")
        elif is_emulated():
            self.warn("emulated", "gradients are not real here, so the split is unchecked")
        elif not result.is_measured:
            self._lacks_gradient = True
            self.warn("gradient", "rows have no finite gradient, so the split is not checked yet")
        elif result.difference <= tolerance:
            self._learn_first_label(sample, tolerance)
        else:
            self._explain(sample, result, tolerance, can_keep_columns=can_keep_columns)

    def _measure(
        self, sample: Sample, tolerance: float, *, by_row: bool = False
    ) -> Comparison | None:
        """Return the comparison of a sample with its parts; None if a rank ran out of memory.

        Until it is known whether the first label of each row counts, try both ways. Switch only if
        the other way is clearly better: if it halves the difference. If both ways fit with the same
        gradients of parts, their shares cancel out.
        """
        labels = sample.labels(self._step.labels)
        shares = shares_of([self.count(*each) for each in labels])
        result = self._passes.compare(sample, shares, by_row=by_row)
        if result is None or self._knows_first_label:
            return result
        other_shares = shares_of([each[not self.counts_first_label] for each in labels])
        if not distributed.any_of_ranks(other_shares != shares):
            # Both ways give the same shares on all ranks.
            return result
        other = self._passes.compare(sample, other_shares, by_row=by_row)
        if other is None or not other.is_measured:
            return result
        if result.is_measured:
            both_fit = max(result.difference, other.difference) <= tolerance
            self.shares_cancel = both_fit and _shares_cancel(result, other)
            is_better = not self.shares_cancel and other.difference < result.difference / 2
        else:
            is_better = other.difference <= tolerance
        if not is_better:
            return result
        self.counts_first_label = not self.counts_first_label
        return other

    def _explain(
        self, sample: Sample, result: Comparison, tolerance: float, *, can_keep_columns: bool
    ) -> None:
        """Log what explains a difference: random numbers, noise, an auxiliary loss or padding.

        Args:
            sample: rows that were compared.
            result: their comparison.
            tolerance: difference that rounding may cause.
            can_keep_columns: whether parts can keep padding; False if each is collated by itself.

        Raises:
            SettingError: none of these explains it, or padding does and parts cannot keep it.
        """
        by_row = result.has_other_draws
        if by_row:
            # Random numbers explain the difference if it vanishes with the row's own seeds.
            result = self._measure(sample, tolerance, by_row=True) or result
        noise = self._passes.noise(sample, has_labels=any(result.shares), by_row=by_row)
        if noise > _MAX_NOISE:
            self._warn_incomparable(f"two runs of the same rows differ by {noise:.2%}")
            return
        tolerance = max(tolerance, 2 * noise)
        if result.difference <= tolerance:
            self._learn_first_label(sample, tolerance)
            return
        # An auxiliary loss explains the difference if it vanishes without it.
        with without_auxiliary_loss(self._step.model) as coefficient:
            other = self._measure(sample, tolerance, by_row=by_row) if coefficient else None
        if other is not None and other.difference <= tolerance:
            self.warn(
                "auxiliary loss",
                f"gradients of a batch and of its parts differ by {result.difference:.2%}, since"
                f" each part has an auxiliary loss of its own, with coefficient {coefficient:g}",
            )
            self._learn_first_label(sample, tolerance)
            return
        if not can_keep_columns:
            # `collate` may draw numbers from a generator of its own that change few parts.
            again = self._measure(sample, tolerance, by_row=by_row) or result
            if abs(again.difference - result.difference) > tolerance:
                self._warn_incomparable("two collations of the same rows differ")
                return
        if distributed.any_of_ranks(sample.batch.cuts):
            # Padding explains the difference if it vanishes when parts keep all columns.
            difference_if_cut = result.difference
            sample = replace(sample, batch=sample.batch.uncut())
            result = self._measure(sample, tolerance, by_row=by_row) or result
            if result.difference <= tolerance:
                if not can_keep_columns:
                    remedy = (
                        "the model sees padding, of which a part has less, or collate mixes values"
                        " of several rows; mask padding, pad all rows to one length, or let collate"
                        " keep rows apart"
                    )
                    raise self._refusal(sample, difference_if_cut, noise, remedy)
                self.keeps_columns = True
                self.warn(
                    "columns",
                    f"the gradient depends on padding (it differs by {difference_if_cut:.2%}"
                    " without), so parts of a batch keep all columns",
                )
                self._learn_first_label(sample, tolerance)
                return
        if result.has_other_draws:
            self._warn_incomparable("the loss draws random numbers that belong to no row")
            return
        remedy = self._remedy(sample, result, tolerance, by_row=by_row)
        raise self._refusal(sample, result.difference, noise, remedy)

    def _warn_incomparable(self, reason: str) -> None:
        self.warn("noise", f"a batch and its parts cannot be compared, since {reason}")

    def _refusal(
        self, sample: Sample, difference: float, noise: float, remedy: str
    ) -> SettingError:
        """Build the error of a loss that a split would change."""
        rows = count(len(sample.rows), sample.batch.noun)
        problem = (
            f"gradients of {rows} and of their two parts differ by {difference:.2%} (noise"
            f" {noise:.2%}), so a split would train something else; {remedy}"
        )
        return SettingError(self._step.terms.function, self._step.name, problem)

    def _remedy(self, sample: Sample, result: Comparison, tolerance: float, *, by_row: bool) -> str:
        """Return the fix for a loss that does not decompose, as its gradients show.

        Args:
            sample: rows that were compared.
            result: their comparison.
            tolerance: difference that rounding may cause.
            by_row: see :meth:`GradientPasses.compare`.
        """
        terms = self._step.terms
        separate = self._passes.compare(sample, result.shares, by_row=by_row, accumulates=False)
        if separate is not None and separate.difference <= tolerance:
            return (
                "it changes gradients that earlier parts left, by zero_grad, clipping or an"
                " assignment; do that once, outside of it"
            )
        factors, residual = result.fitted_factors()
        # Ranks without labels have no shares, so all ranks name those of the first that has some.
        given_shares = next(filter(any, distributed.all_gather(result.shares)), result.shares)
        shares = [factor * share for factor, share in zip(factors, given_shares, strict=True)]
        given = " and ".join(f"{share:.3g}" for share in given_shares)
        fitted = " and ".join(f"{share:.3g}" for share in shares)
        if residual > tolerance or fitted == given:
            # No shares make the parts add up to the whole.
            return self._remedy_of_whole(sample.batch)
        if all(abs(share - 1) < _SAME_SHARE for share in shares):
            return f"the loss is a sum over rows, not a mean: {terms.sum}"
        remedy = terms.share
        if abs(sum(shares) - 1) < _SAME_SHARE:
            # The loss is a mean with other weights.
            remedy = (
                f"give {terms.num_labels}, a function that returns what the mean of a batch is"
                " over, such as the sum of its class weights"
            )
        return f"the parts have the shares {given}, but {fitted} would fit;{terms.totals} {remedy}"

    def _remedy_of_whole(self, batch: BatchSource) -> str:
        """Return the fix for a loss that no shares divide."""
        terms = self._step.terms
        treatment = f" ({batch.treatment})" if batch.treatment else ""
        return (
            f"a loss that compares {batch.noun}s, such as a contrastive one, or attention across"
            ' documents must stay whole: set on_out_of_memory="raise", without micro_batch_size'
            " and micro_batch_tokens; if the model attends to padding, mask it; if"
            f" {batch.noun}s without labels add to the loss, give {terms.num_labels}, a function"
            f" that counts them;{terms.totals} if"
            f" {batch.noun}s{treatment} are not those of the batch, {terms.split}"
        )

    def _tolerance(self, rows_per_part: int) -> float:
        """Return the largest difference on any rank that rounding may cause. A collective."""
        types = {parameter.dtype for parameter in self._step.model.parameters()}
        if self._passes.keeps_autocast:
            types.add(torch.bfloat16)
        # A wrong term of the loss adds once per part.
        per_part = max(_MIN_TOLERANCE, _TOLERANCE_ALL_PARTS / self._num_parts)
        of_float32 = min(_TOLERANCE_FLOAT32, per_part)
        tolerance = max(_TOLERANCES.get(dtype, of_float32) for dtype in types)
        if self._step.memory.device.type == "cuda" and _has_tf32(self._step.model):
            tolerance = max(tolerance, _TOLERANCE_TF32)
        is_low_precision = tolerance > _TOLERANCE_FLOAT32
        if is_low_precision and rows_per_part == 1:
            # The loss of a single row may be near 0, where rounding is large.
            tolerance = _TOLERANCE_ONE_ROW
        return max(distributed.all_gather(tolerance))

    def warn(self, kind: str, message: str, *, on_each_rank: bool = False) -> None:
        """Log the first message of a kind, on rank zero or on each rank that it concerns."""
        is_told = on_each_rank or distributed.is_rank_zero()
        if kind not in self._warned and is_told:
            log.warning("%s: %s", self._step.name, message)
        self._warned.add(kind)

    def _check_side_effects(self) -> None:
        """Log the buffers that a forward pass writes, and the hooks of gradients.

        Raises:
            SettingError: a forward pass writes frozen parameters.
        """
        written = sorted(self._passes.written)
        own = {name for name, _ in self._step.model.named_parameters() if name in written}
        # A rank without rows may not have run the forward.
        frozen = sorted(set().union(*distributed.all_gather(own)))
        if frozen:
            problem = (
                f"it writes {some_names(frozen)}, once for each part of a split batch; write frozen"
                " parameters, such as an average of the trained ones, after the batch"
            )
            raise SettingError(self._step.terms.function, self._step.name, problem)
        if written:
            self.warn(
                "buffers",
                f"each part of a split batch writes {some_names(written, 'tensor')}, which a"
                " whole batch writes once",
            )
        hooked = gradient_hooks(self._step.model)
        if hooked:
            self.warn(
                "hooks",
                f"each part of a split batch calls the gradient hooks of {some_names(hooked)},"
                " which a whole batch calls once",
            )

    def _learn_first_label(self, sample: Sample, tolerance: float) -> None:
        """Record whether first labels count if this sample can distinguish the two cases."""
        if self._knows_first_label:
            return
        # The share of the first part under both ways to count.
        without, including = (
            shares_of(of_parts) for of_parts in zip(*sample.labels(self._step.labels), strict=True)
        )
        # If no label is left without the first ones, nothing was compared.
        differs = any(without) and abs(without[0] - including[0]) > 2 * tolerance
        self._knows_first_label = distributed.any_of_ranks(differs)
        if not self._knows_first_label:
            return
        if self.counts_first_label:
            if distributed.is_rank_zero():
                log.info(
                    "labels are shifted before they reach the model, so the first label of each row"
                    " counts"
                )
            return
        batch = sample.batch
        rows = range(batch.num_rows)
        if distributed.any_of_ranks(bool(rows) and has_shifted_labels(batch.part(rows))):
            remedy = (
                "each label is the next token already, and the loss shifts labels again, so that it"
                " predicts the token after the next; shift them only once, or give"
                f" {self._step.terms.num_labels} if this is intended"
            )
            raise SettingError("labels", "shifted twice", remedy)


class _Candidates:
    """Chooses the rows of a batch that would show a wrong split most.

    A part has two rows if a micro-batch has four, so that a check needs no more memory; otherwise
    one row.

    Args:
        batch: the batch.
        pieces: parts that it is split into.
        labels: counts the labels of a row.
        number: number of the split; it changes the values and the order by which rows are chosen.
    """

    def __init__(
        self,
        batch: BatchSource,
        pieces: Sequence[MicroBatch],
        labels: LabelCounter,
        *,
        number: int,
    ) -> None:
        num_rows = batch.num_rows
        largest = max((piece.size for piece in pieces), default=0)
        length = max((piece.length for piece in pieces), default=0) or 1
        self._batch = batch
        self._number = number
        # In 16 bits, parts of one document would not show attention to other documents.
        has_room = batch.is_packed or 4 * length <= largest
        self._rows_per_part = 2 if has_room and num_rows >= 4 else 1
        # Sorting is stable, so this order decides among rows of equal values.
        order = random.Random(number).sample(range(num_rows), num_rows)[:_CANDIDATES]
        # Labels of each row without and with its first one, and the sums of its tensors.
        self._counts: dict[int, tuple[float, float]] = {}
        self._sums: dict[int, list[float]] = {}
        for row in order:
            part = batch.part([row])
            self._counts[row] = labels.candidates(part, 1)
            self._sums[row] = _sums(part)

    def by_first_labels(self) -> Iterator[Parts]:
        """Yield the parts whose shares differ most with and without first labels; none if no
        shares differ.
        """
        # The shares differ most between rows that lose a large and a small part of their labels
        # with the first one. Among equal ratios, prefer rows with more labels.
        ratios = {
            row: (without / including, -including)
            for row, (without, including) in self._counts.items()
            if including
        }
        distinct_ratios = {ratio for ratio, _ in ratios.values()}
        if distributed.any_of_ranks(len(distinct_ratios) > 1):
            yield self._extremes(ratios)

    def by_values(self, *, counts_first: bool, is_precise: bool) -> Iterator[Parts]:
        """Yield parts with the fewest and the most labels; parts that differ most in another value;
        and parts with similar values, since a loss may decompose only if values differ.

        Args:
            counts_first: whether the first label of each row counts.
            is_precise: whether parts of one row show a difference beyond rounding.
        """
        # The number of labels of each row, and then the sums of its tensors.
        values: dict[int, list[float]] = {}
        for row, (without, including) in self._counts.items():
            num_labels = including if counts_first else without
            values[row] = [num_labels, *self._sums[row]]
        yield self._extremes(values)
        if distributed.maximum(self._batch.num_rows) <= 2:
            return
        # Rotate the values of each row, so that later splits compare other values first.
        rotated: dict[int, list[float]] = {}
        for row, of_row in values.items():
            num_rotated = self._number.bit_length() % len(of_row)
            start = len(of_row) - num_rotated
            rotated[row] = of_row[start:] + of_row[:start]
        lowest, highest = self._extremes(rotated)
        yield lowest, highest
        if is_precise:
            # Two rows with similar values. Rows with labels come first: padding between documents
            # has none.
            rows = sorted(rotated, key=lambda row: (values[row][0] == 0, rotated[row]))
            yield rows[:1], rows[1:2]
        else:
            # Parts of one row show little, so mix the rows of both parts.
            yield (
                sorted([*lowest[::2], *highest[1::2]]),
                sorted([*lowest[1::2], *highest[::2]]),
            )

    def _extremes(self, values: Mapping[int, Any]) -> Parts:
        """Return the rows with the lowest values, and other rows with the highest values."""
        rows = sorted(values, key=values.__getitem__)
        lowest, others = rows[: self._rows_per_part], rows[self._rows_per_part :]
        return sorted(lowest), sorted(others[-self._rows_per_part :])


def _sums(row: Any) -> list[float]:
    """Return the sum of each tensor of a row: first tensors, then single numbers, and of both the
    floating-point ones first.
    """
    tensors = [
        each.detach()
        for each in arrays_in(row)
        if isinstance(each, torch.Tensor) and each.layout == torch.strided and not each.is_nested
    ]
    # False sorts before True.
    tensors.sort(key=lambda each: (each.numel() <= 1, not each.is_floating_point()))
    return [float(each.sum(dtype=torch.float64)) for each in tensors]


def _shares_cancel(result: Comparison, other: Comparison) -> bool:
    """Return whether parts have the same gradients under different shares, as if the loss is
    divided by the labels of the batch. A collective.
    """
    norms, other_norms = (each.products.diagonal().sqrt()[1:] for each in (result, other))
    part = int(norms.argmax())
    change_of_gradient = float((other_norms[part] / norms[part]).log().abs())
    share, other_share = result.shares[part], other.shares[part]
    # The rank may have no rows.
    change_of_share = abs(math.log(other_share / share)) if share and other_share else 0.0
    return change_of_gradient < max(distributed.all_gather(change_of_share)) / 2


def _has_tf32(model: nn.Module) -> bool:
    """Return whether matrix products or convolutions of a model on CUDA round to TF32."""
    cudnn: Any = torch.backends.cudnn
    has_convolution = any(hasattr(module, "padding_mode") for module in model.modules())
    return torch.backends.cuda.matmul.fp32_precision == "tf32" or (
        has_convolution and cudnn.conv.fp32_precision == "tf32"
    )
