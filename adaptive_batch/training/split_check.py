"""Compares the gradient of a few rows with the sum of their parts' gradients before a batch is
split, so that a loss which does not decompose is refused.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import MicroBatch
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState, is_out_of_memory

from .batch_statistics import BatchStatistics
from .gradient_passes import GradientPasses, Pass
from .model_checks import gradient_hooks, some_names
from .options import Terms
from .parts import LabelCounter, Part, Splittable, arrays_in, has_shifted_labels
from .step_runner import StepRunner

log = logging.getLogger("adaptive_batch")

# Differences that rounding may cause, as shares of the norm of the gradient. In 1,257 correct
# records float32 differed by at most 2.4e-5, and bfloat16 weights by more than 1.5% once.
_FLOORS = {torch.float16: 1e-2, torch.bfloat16: 1.5e-2}
_FLOOR = 1e-3
_FLOOR_TF32 = 1e-2
# Of parts of one row in less than float32, where losses near 0 differed by up to 15%.
_FLOOR_OF_ROWS = 0.25
# Difference between two runs of the same rows above which a comparison shows nothing.
_MOST_NOISE = 0.05
# Difference between fitted shares and those that a kind of loss would have.
_SAME_SHARE = 0.05
# Share of the second run: it rounds backward otherwise.
_OTHER_SHARE = 0.7
# Comparisons after which the likelier way to count labels is taken, if each way fits all of them.
_MOST_CHECKS = 6
# Splits that are checked, and every 256th after them: rows of one batch may be alike by chance.
_CHECKED = frozenset({1, 2, 4, 8, 16, 32, 64})
_CHECKED_EVERY = 256
# Rows of a batch among which those with fewest and with most labels are sought.
_CANDIDATES = 64

# Rows of a batch in two parts, ascending.
Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Comparison:
    """Inner products of the gradients of some rows as a whole and in two parts, summed over ranks.

    Attributes:
        products: float64 `[3, 3]`, of the gradient of the whole and of each part.
        shares: of the two parts on this rank.
        draws: whether a part drew random numbers that the whole did not.
    """

    products: torch.Tensor
    shares: tuple[float, ...]
    draws: bool

    @property
    def norm(self) -> float:
        """Return the norm of the gradient of the whole, or of a part if that is larger; NaN if the
        whole's is not finite.
        """
        whole, *parts = self.products.diagonal().sqrt().tolist()
        norm: float = max([whole, *filter(math.isfinite, parts)])
        return norm

    @property
    def difference(self) -> float:
        """Return the norm of whole - sum of parts, as a share of `norm`; infinite if a part's
        gradient is not finite.
        """
        signs = torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
        square = float(signs @ self.products @ signs)
        return math.sqrt(max(0.0, square)) / self.norm if math.isfinite(square) else math.inf

    def fitted_shares(self) -> tuple[list[float], float]:
        """Return the shares with which the parts fit the whole best, by least squares, and what is
        left of the difference, as a share of `norm`.
        """
        parts = self.products[1:, 1:].nan_to_num()
        target = self.products[1:, 0].nan_to_num()
        weights = torch.linalg.pinv(parts, rtol=1e-9, hermitian=True) @ target
        left = (self.products[0, 0] - weights @ target).clamp(min=0).sqrt() / self.norm
        return (weights * torch.tensor(self.shares)).tolist(), float(left)


class SplitCheck:
    """Compares the gradient of a few rows with the sum of their parts' gradients.

    All ranks call it alike, and decide alike.

    Args:
        runner: runs the parts of a batch.
        forward_backward: function that runs a part, see :class:`.AdaptiveStep`.
        labels: counts the labels of a part, perhaps in several ways.
        statistics: statistics of a batch.
        terms: names of the caller's API.
        name: name of the function.

    Attributes:
        way: way in which labels are counted, as far as batches have shown it.
        keeps_columns: whether parts keep all columns, since the gradient depends on padding.
    """

    def __init__(
        self,
        runner: StepRunner,
        forward_backward: Callable[[Part], object],
        labels: LabelCounter,
        statistics: BatchStatistics,
        *,
        terms: Terms,
        name: str,
    ) -> None:
        self._runner = runner
        self._labels = labels
        self._terms = terms
        self._name = name
        self._passes = GradientPasses(runner, forward_backward, statistics, terms=terms)
        self.way = 0
        self.keeps_columns = False
        self._num_checks = 0
        self._is_decided = False
        # Whether rows of the last check had no gradient, or none that is finite.
        self._is_open = False
        self._num_splits = 0
        self._warned: set[str] = set()

    def begin_split(self, counts: Sequence[Sequence[float]]) -> bool:
        """Count a split; return whether to check it before its parts run. A collective.

        Args:
            counts: labels of each part, counted in each way; none on a rank without rows.
        """
        self._num_splits += 1
        is_due = self._num_splits in _CHECKED or self._num_splits % _CHECKED_EVERY == 0
        is_due |= self._is_open and self._num_splits < max(_CHECKED)
        if is_due or self._is_decided:
            return is_due
        num_ways = len(counts[0]) if counts else 1
        differs = len({_shares(counts, way) for way in range(num_ways)}) > 1
        return distributed.any_of_ranks(differs)

    def check(self, rows: Splittable, pieces: Sequence[MicroBatch]) -> None:
        """Compare a few rows with their parts; random numbers are as before afterwards.

        Args:
            rows: rows of the batch.
            pieces: parts that the batch is split into.

        Raises:
            SettingError: the gradient is another one when rows are split, or a part fails.
        """
        self._is_open = False
        with RandomState(self._runner.memory.device):
            collated = rows.to_check()
            try:
                # A script's own split= compares all of its rows with the batch.
                collated.part(range(collated.num_rows))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            for pair in self._pairs(collated, pieces):
                self._compare(rows, collated, pair)
        self._warn_of_side_effects()
        self._runner.retry.disregard_allocator_retries()

    def _pairs(self, rows: Splittable, pieces: Sequence[MicroBatch]) -> Iterator[Pair]:
        """Yield the rows with fewest and with most labels, and those that differ in another value.

        A part has two rows if a micro-batch has four, so that a check needs no more memory.
        """
        num_rows = rows.num_rows
        # Among equal rows, the order decides.
        order = random.Random(self._num_splits).sample(range(num_rows), num_rows)[:_CANDIDATES]
        values = {row: self._values(rows, row) for row in order}
        largest = max((piece.size for piece in pieces), default=0)
        length = max((piece.length for piece in pieces), default=0) or 1
        size = 2 if 4 * length <= largest and num_rows >= 4 else 1
        # Other values at the splits 1, 2, 4 and so on.
        turn = 2 * self._num_splits.bit_length()
        choices = [(0, size)]
        if distributed.maximum(num_rows) > 2:
            choices.append((1 - turn, size))
            if self._limit(1) == _FLOOR:
                choices.append((-turn, 1))
        for first, of_part in choices:
            by_value = sorted(order, key=lambda row: _rotated(values[row], first))
            yield sorted(by_value[:of_part]), sorted(by_value[of_part:][-of_part:])

    def _values(self, rows: Splittable, row: int) -> list[float]:
        """Return the labels of a row, its single integers, the sums of its tensors, its floats."""
        batch = rows.part([row])
        tensors = [
            each.detach()
            for each in arrays_in(batch)
            if isinstance(each, torch.Tensor)
            and each.layout == torch.strided
            and not each.is_nested
        ]
        # Classes first, and single floats last, such as the weight of a row.
        tensors.sort(
            key=lambda each: (
                each.is_floating_point(),
                (each.numel() > 1) ^ each.is_floating_point(),
            )
        )
        labels = self._labels.count(batch, 1, way=self.way)
        return [labels, *(float(each.sum(dtype=torch.float64)) for each in tensors)]

    def _compare(self, rows: Splittable, collated: Splittable, pair: Pair) -> None:
        """Compare rows as a whole with two parts.

        Raises:
            SettingError: their gradients differ.
        """
        found = self._measure(rows, collated, pair)
        if found is None:
            pair = (pair[0][:1], pair[1][-1:])
            found = self._measure(rows, collated, pair)
        if found is None:
            self._warn("two rows do not fit in memory at once, so the split is not checked")
            return
        if not 0 < found.norm < math.inf:
            self._is_open = True
            self._warn("rows have no finite gradient, so the split is not checked yet")
            return
        limit = self._limit(len(pair[0]))
        noise = 0.0
        cut = None
        by_row = found.draws
        if found.difference > limit:
            if by_row:
                found = self._measure(rows, collated, pair, by_row=True) or found
            noise = self._noise(rows, collated, pair, by_row=by_row)
            limit = max(limit, 2 * noise)
        if found.difference > limit and not self._is_decided and self._num_ways(rows) > 1:
            other = self._measure(rows, collated, pair, way=1 - self.way, by_row=by_row)
            if other is not None and other.difference <= limit:
                found = other
                self.way = 1 - self.way
        if found.difference > limit and distributed.any_of_ranks(collated.cuts):
            cut = found.difference
            found = self._measure(rows, collated.uncut(), pair, by_row=by_row) or found
        coefficient = _auxiliary_coefficient(self._runner.model)
        if found.difference <= limit and (cut is None or distributed.any_of_ranks(rows.cuts)):
            if cut is not None:
                self.keeps_columns = True
                self._warn(
                    f"the gradient depends on padding (it differs by {_percent(cut)} without), so"
                    " parts of a batch keep all columns"
                )
            self._learn_way(rows, collated, pair, limit)
        elif found.draws or noise > _MOST_NOISE:
            self._warn(
                "a batch and its parts cannot be compared, since the loss draws random numbers or"
                f" is not deterministic (the same rows differ by {_percent(noise)})"
            )
        elif found.difference <= 2 * coefficient:
            self._warn(
                f"gradients of a batch and of its parts differ by {_percent(found.difference)},"
                " since each part has an auxiliary loss of its own, with coefficient"
                f" {coefficient:g}"
            )
        else:
            raise self._refusal(pair, found, noise=noise, limit=limit, cut=cut)

    def _num_ways(self, rows: Splittable) -> int:
        """Return how many ways there are to count labels, on any rank."""
        return distributed.maximum(len(self._labels.counts(rows.dummy(), 1)))

    def _shares_of(self, rows: Splittable, pair: Pair, way: int) -> tuple[float, ...]:
        """Return the share of each part, 0 of one without labels."""
        counts = [
            self._labels.count(rows.part(part), len(part), way=way) if part else 0.0
            for part in pair
        ]
        total = sum(counts)
        return tuple(count / total if total else 0.0 for count in counts)

    def _measure(
        self,
        rows: Splittable,
        collated: Splittable,
        pair: Pair,
        *,
        way: int | None = None,
        by_row: bool = False,
    ) -> Comparison | None:
        """Run rows as a whole and in two parts; return None if a rank ran out of memory.

        A part without labels has no mean, so a dummy with weight 0 runs in its place.
        """
        shares = self._shares_of(collated, pair, self.way if way is None else way)
        whole = Pass(collated.uncut(), sorted([*pair[0], *pair[1]]), sum(shares), rows.dummy)
        parts = [
            Pass(collated, part, share, rows.dummy)
            for part, share in zip(pair, shares, strict=True)
        ]
        gradients = self._passes.run([whole, *parts], by_row=by_row)
        if gradients is None:
            return None
        draws = distributed.any_of_ranks(self._passes.has_other_draws)
        return Comparison(_products(gradients), shares, draws)

    def _noise(self, rows: Splittable, collated: Splittable, pair: Pair, *, by_row: bool) -> float:
        """Return how far the same rows differ when they run again, as a share of their gradient; 0
        if memory runs out.
        """
        total = sum(self._shares_of(collated, pair, self.way))
        # In the same order: among equal losses a top-k may choose other rows.
        numbers = sorted([*pair[0], *pair[1]])
        passes = [
            Pass(collated.uncut(), numbers, share * total, rows.dummy)
            for share in (1.0, _OTHER_SHARE)
        ]
        gradients = self._passes.run(passes, by_row=by_row)
        if gradients is None:
            return 0.0
        products = _products(gradients)
        # The sine of the angle between both, as a function may ignore the share.
        cosine = products[0, 1] / (products[0, 0] * products[1, 1]).sqrt()
        return math.sqrt(max(0.0, 1 - float(cosine.nan_to_num()) ** 2))

    def _limit(self, rows_of_part: int) -> float:
        """Return the difference that rounding may cause, on any rank."""
        types = {parameter.dtype for parameter in self._runner.model.parameters()}
        if self._passes.keeps_autocast:
            types.add(torch.bfloat16)
        limit = max(_FLOORS.get(dtype, _FLOOR) for dtype in types)
        if self._runner.memory.device.type == "cuda" and _has_tf32(self._runner.model):
            limit = max(limit, _FLOOR_TF32)
        if limit > _FLOOR and rows_of_part <= 1:
            limit = _FLOOR_OF_ROWS
        return max(distributed.all_gather(limit))

    def _warn(self, message: str) -> None:
        """Log a message of a kind once."""
        kind = message.partition("(")[0]
        if kind not in self._warned and distributed.is_rank_zero():
            log.warning("%s: %s", self._name, message)
        self._warned.add(kind)

    def _warn_of_side_effects(self) -> None:
        """Name the buffers that a forward pass writes, and the hooks of gradients."""
        written = self._passes.written_buffers
        if written:
            self._warn(
                f"each part of a split batch writes the buffers {', '.join(written)}, which a"
                " whole batch writes once"
            )
        hooked = gradient_hooks(self._runner.model)
        if hooked:
            self._warn(
                f"each part of a split batch calls the gradient hooks of {some_names(hooked)},"
                " which a whole batch calls once"
            )

    def _learn_way(self, rows: Splittable, collated: Splittable, pair: Pair, limit: float) -> None:
        """Decide how labels are counted if the other way would have given other shares, or after
        enough comparisons.
        """
        if self._is_decided:
            return
        self._num_checks += 1
        ways = range(self._num_ways(rows))
        shares = [self._shares_of(collated, pair, way)[0] for way in ways]
        is_only = distributed.any_of_ranks(max(shares) - min(shares) > 2 * limit)
        self._is_decided = is_only or self._num_checks == _MOST_CHECKS
        if is_only and self.way == 0:
            self._refuse_labels_shifted_twice(collated)
        if self._is_decided and self.way > 0 and distributed.is_rank_zero():
            log.info(
                "labels are shifted already where they reach the model, so the first of each row"
                " counts too"
            )

    def _refuse_labels_shifted_twice(self, rows: Splittable) -> None:
        """Refuse labels that collate has shifted where the loss leaves the first of each row out,
        which is to shift them again.
        """
        has_shifted = bool(rows.num_rows) and has_shifted_labels(rows.part(range(rows.num_rows)))
        if distributed.any_of_ranks(has_shifted):
            remedy = (
                "each is the token after its own already, and the loss shifts them again, so that"
                f" it predicts the token after the next; shift them in one of the two, or give"
                f" {self._terms.num_labels} where that is meant"
            )
            raise SettingError("labels", "shifted twice", remedy)

    def _refusal(
        self, pair: Pair, found: Comparison, *, noise: float, limit: float, cut: float | None
    ) -> SettingError:
        """Build the error of a loss that does not decompose: what was measured, and its remedy."""
        terms = self._terms
        measured = (
            f"the gradients of {count(sum(map(len, pair)), 'row')} as a whole and in two parts"
            f" differ by {_percent(found.difference)}"
        )
        if cut is not None:
            measured += f" ({_percent(cut)} if the parts leave padding out)"
        measured += f", and those of two runs of the whole by {_percent(noise)}"
        shares, rest = found.fitted_shares()
        given = " and ".join(f"{share:.3g}" for share in found.shares)
        fitted = " and ".join(f"{share:.3g}" for share in shares)
        if found.difference <= limit:
            remedy = (
                "the model sees padding, of which a part has less; mask it, or pad all rows to one"
                " length"
            )
        elif rest > limit:
            remedy = (
                "a loss that compares rows, such as a contrastive one, must stay whole: set"
                ' on_out_of_memory="raise", without micro_batch_size and micro_batch_tokens; if'
                f" rows belong together, give {terms.split}"
            )
        elif all(abs(share - 1) < _SAME_SHARE for share in shares):
            remedy = f"the loss is a sum over rows, not a mean: {terms.sum}"
        else:
            remedy = (
                f"the loss weights the parts by {fitted}, and their labels by {given};"
                f" {terms.share}; give {terms.num_labels} if the mean is over something else, such"
                " as the sum of class weights"
            )
        value = f"{measured}, so a split would train something else; {remedy}"
        return SettingError(terms.function, self._name, value)


def _shares(counts: Sequence[Sequence[float]], way: int) -> tuple[float, ...]:
    """Return the share of each part, labels counted in one way; zeros if there are none."""
    total = sum(count[way] for count in counts)
    return tuple(count[way] / total if total else 0.0 for count in counts)


def _rotated(values: list[float], first: int) -> list[float]:
    """Return the values from one of them on, and then the others."""
    first %= len(values)
    return values[first:] + values[:first]


def _products(vectors: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Return the inner products of vectors: float64 `[vectors, vectors]`, summed over ranks."""
    stacked = torch.stack(list(vectors))
    gathered = distributed.all_gather((stacked @ stacked.T).tolist())
    return torch.tensor(gathered, dtype=torch.float64).sum(dim=0)


def _auxiliary_coefficient(model: nn.Module) -> float:
    """Return the coefficient of a mixture of experts' auxiliary loss; 0 without one."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    values = [
        value
        for config in configs
        if hasattr(config, "__dict__")
        for name, value in vars(config).items()
        if "aux_loss" in name and isinstance(value, float)
    ]
    return max(values, default=0.0)


def _has_tf32(model: nn.Module) -> bool:
    """Return whether matrix products or convolutions of a model on CUDA round to TF32."""
    cudnn: Any = torch.backends.cudnn
    has_convolution = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    return torch.backends.cuda.matmul.fp32_precision == "tf32" or (
        has_convolution and cudnn.conv.fp32_precision == "tf32"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if math.isfinite(share) else "more than can be measured"
