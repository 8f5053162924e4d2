"""Compares gradients of some rows with those of their parts, and restores everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_batch import distributed
from adaptive_batch._util import around_autocast, count, one_thread, replaced, replaced_for_thread
from adaptive_batch.data import MicroBatch
from adaptive_batch.distributed import local_part
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.memory import RandomState, is_out_of_memory

from .model_checks import is_batch_norm
from .parts import BatchSource, LabelCounter, Part

if TYPE_CHECKING:
    from .adaptive_step import PartStep

_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
# Size of the projected gradient of a parameter, and about the most entries that are projected.
_NUMBERS = 256
_MOST_ENTRIES = 2**15
# Weight of the loss in the second run of the same rows, so that backward rounds differently.
_SECOND_RUN_SHARE = 0.7
# Rows of a batch in two parts, ascending.
Parts = tuple[list[int], list[int]]


def _identity(input: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return input


@contextmanager
def exact_forward(model: nn.Module) -> Iterator[None]:
    """Context manager: disable dropout and compiled kernels, and let batch norms use their running
    statistics.

    The model stays in training mode, since some models compute another loss in evaluation mode.
    Functions are replaced, since activation checkpointing runs them again in backward, where a
    TorchFunctionMode is off.
    """

    def attention_without_dropout(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        return attention(query, key, value, attn_mask, 0.0, *rest, **options)

    with ExitStack() as stack:
        stack.enter_context(one_thread)
        attention = functional.scaled_dot_product_attention
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            # Rates such as attention_dropout, layerdrop, drop_prob, and the dropout of an LSTM.
            replacements: dict[str, Any] = {
                name: 0.0
                for name, value in vars(module).items()
                if "drop" in name and type(value) is float
            }
            if is_batch_norm(module):
                # Without running statistics, those of the batch are the only ones.
                replacements["training"] = module.training and module.running_mean is None
            if replacements:
                stack.enter_context(replaced(module, **replacements))
        stack.enter_context(
            replaced_for_thread(
                functional,
                scaled_dot_product_attention=attention_without_dropout,
                **dict.fromkeys(_DROPOUTS, _identity),
            )
        )
        stack.enter_context(replaced_for_thread(torch, dropout=_identity))
        yield


@contextmanager
def without_auxiliary_loss(model: nn.Module) -> Iterator[float]:
    """Context manager: set the coefficients of a mixture of experts' auxiliary loss to 0. Yield the
    largest of them; 0 without one.
    """
    largest = 0.0
    with ExitStack() as stack:
        for module in model.modules():
            # Models of transformers have the coefficient, and their config may have it too.
            for owner in (module, getattr(module, "config", None)):
                coefficients = {
                    name: value
                    for name, value in getattr(owner, "__dict__", {}).items()
                    if "aux_loss" in name and type(value) is float
                }
                if coefficients:
                    largest = max(largest, *coefficients.values())
                    stack.enter_context(replaced(owner, **dict.fromkeys(coefficients, 0.0)))
        yield largest


@contextmanager
def without_autocast(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Context manager: disable autocast, also if a function inside enables it. Yield a function
    that returns whether autocast would have been on.
    """
    was_on = torch.is_autocast_enabled(device.type)

    @contextmanager
    def turn_off_again(autocast: Any) -> Iterator[None]:
        nonlocal was_on
        # The function's own `with torch.autocast(...)` turns autocast on here.
        yield
        was_on = was_on or torch.is_autocast_enabled(autocast.device)
        torch.set_autocast_enabled(autocast.device, False)

    with around_autocast(turn_off_again), torch.autocast(device.type, enabled=False):
        yield lambda: was_on


@dataclass(frozen=True)
class Sample:
    """Rows whose gradient is compared with the sum of the gradients of two parts of them.

    Attributes:
        batch: batch of these rows.
        parts: numbers of the rows of each part, ascending; empty on a rank without rows.
        dummy: function that makes a batch of one row, which runs with weight 0.
    """

    batch: BatchSource
    parts: Parts
    dummy: Callable[[], Any]

    @property
    def rows(self) -> list[int]:
        """Return the rows of both parts, ascending."""
        return sorted(chain(*self.parts))

    def labels(self, counter: LabelCounter) -> list[tuple[float, float]]:
        """Return the number of labels of each part without and with the first label of each row."""
        # A rank without rows has empty parts.
        return [
            counter.candidates(self.batch.part(part), len(part)) if part else (0, 0)
            for part in self.parts
        ]


@dataclass(frozen=True)
class Comparison:
    """Inner products of the gradients of a sample as a whole and in two parts, summed over ranks.

    Attributes:
        products: float64 `[3, 3]`: inner products of the gradients of the whole and of each part.
        shares: shares of the two parts on this rank.
        has_other_draws: whether the passes drew random numbers; if each row had its own seed,
            whether they drew random numbers that belong to no row.
    """

    products: torch.Tensor
    shares: tuple[float, ...]
    has_other_draws: bool

    @property
    def norm(self) -> float:
        """Return the largest finite norm of the three gradients; if the norm of the whole is not
        finite, return that.
        """
        whole, *parts = self.products.diagonal().sqrt().tolist()
        return float(max([whole, *filter(math.isfinite, parts)]))

    @property
    def is_measured(self) -> bool:
        """True if a gradient is finite and not zero, so that differences mean something."""
        return 0 < self.norm < math.inf

    @property
    def difference(self) -> float:
        """Norm of whole - sum of parts, as a share of `norm`; infinite if the gradient of a part
        is not finite.
        """
        # With signs s, s @ products @ s is the squared norm of whole - first - second.
        signs = torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
        square = float(signs @ self.products @ signs)
        if not math.isfinite(square):
            return math.inf
        # Rounding may make it slightly negative. Without gradients, 0 is divided by 1.
        return math.sqrt(max(0.0, square)) / (self.norm or 1.0)

    def fitted_factors(self) -> tuple[list[float], float]:
        """Return the factors of the shares with which the parts fit the whole best, by least
        squares, and the remaining difference as a share of `norm`.
        """
        # Solve the normal equations. The parts already have their shares.
        parts_by_parts = self.products[1:, 1:].nan_to_num()
        parts_by_whole = self.products[1:, 0].nan_to_num()
        factors = torch.linalg.pinv(parts_by_parts, rtol=1e-9, hermitian=True) @ parts_by_whole
        squared_residual = self.products[0, 0] - factors @ parts_by_whole
        residual = squared_residual.clamp(min=0).sqrt() / self.norm
        return factors.tolist(), float(residual)


@dataclass(frozen=True)
class Pass:
    """Rows of a batch that run at once.

    Attributes:
        batch: the batch.
        rows: numbers of its rows that run, ascending.
        share: weight of their mean loss; 0 if no row has labels, and a dummy runs instead.
        dummy: function that makes the dummy.
    """

    batch: BatchSource
    rows: Sequence[int]
    share: float
    dummy: Callable[[], Any]

    def part(self) -> Part:
        """Return the argument of the function."""
        if not self.share:
            return Part(self.dummy(), 1, share=0.0, is_trial=True)
        return Part(self.batch.part(self.rows), len(self.rows), share=self.share, is_trial=True)


class GradientPasses:
    """Runs passes and compares their gradients. All ranks run the same number of passes.

    Args:
        step: runs the parts of a batch.

    Attributes:
        keeps_autocast: whether the function fails without autocast, so that it stays on.
        written: names of the buffers and frozen parameters that passes wrote.
    """

    def __init__(self, step: PartStep) -> None:
        self._step = step
        self.keeps_autocast = False
        self.written: set[str] = set()

    def compare(
        self,
        sample: Sample,
        shares: tuple[float, ...],
        *,
        by_row: bool = False,
        accumulates: bool = True,
    ) -> Comparison | None:
        """Compare a sample as a whole with its two parts.

        A part without labels has no mean, so a dummy with weight 0 runs in its place.

        Args:
            sample: rows and their parts.
            shares: share of each part in the labels; they sum to 1, or to 0 without labels.
            by_row: whether each row draws its random numbers with its own seed.
            accumulates: whether the second part adds to the gradients of the first, as in training.

        Returns:
            The comparison; None if a rank ran out of memory.

        Raises:
            SettingError: the function failed.
        """
        whole = Pass(sample.batch.uncut(), sample.rows, sum(shares), sample.dummy)
        parts = [
            Pass(sample.batch, part, share, sample.dummy)
            for part, share in zip(sample.parts, shares, strict=True)
        ]
        measured = self._gradients([whole, *parts], by_row=by_row, accumulates=accumulates)
        if measured is None:
            return None
        gradients, has_other_draws = measured
        return Comparison(_products(gradients), shares, distributed.any_of_ranks(has_other_draws))

    def noise(self, sample: Sample, *, has_labels: bool, by_row: bool) -> float:
        """Return the difference between the gradients of two runs of a sample, as a share of their
        norm; 0 if memory runs out.

        Args:
            sample: rows and their parts.
            has_labels: whether the sample has labels on this rank.
            by_row: see :meth:`compare`.
        """
        # Both runs have the rows in the same order: among equal losses, a top-k depends on it.
        passes = [
            Pass(sample.batch.uncut(), sample.rows, share * has_labels, sample.dummy)
            for share in (1.0, _SECOND_RUN_SHARE)
        ]
        measured = self._gradients(passes, by_row=by_row, accumulates=False)
        if measured is None:
            return 0.0
        gradients, _ = measured
        products = _products(gradients)
        # Return the sine of the angle between both gradients: their lengths differ by the share,
        # unless the function ignores it.
        cosine = products[0, 1] / (products[0, 0] * products[1, 1]).sqrt()
        return math.sqrt(max(0.0, 1 - float(cosine.nan_to_num()) ** 2))

    def _gradients(
        self, passes: Sequence[Pass], *, by_row: bool, accumulates: bool
    ) -> tuple[torch.Tensor, bool] | None:
        """Return the projected gradient of each pass, float64 `[passes, numbers]`, and whether the
        passes have other draws, see :class:`Comparison`; None if a rank ran out of memory.

        Args:
            passes: the whole and its two parts, or two runs of the whole.
            by_row: see :meth:`compare`.
            accumulates: see :meth:`compare`.
        """
        with exact_forward(self._step.model):
            if not self.keeps_autocast:
                with without_autocast(self._step.memory.device) as was_on:
                    try:
                        return self._run(passes, by_row, accumulates)
                    except SettingError:
                        if not was_on():
                            raise
                # The function fails without autocast: some kernels exist only for 16-bit types.
                self.keeps_autocast = True
            return self._run(passes, by_row, accumulates)

    def _run(
        self, passes: Sequence[Pass], by_row: bool, accumulates: bool
    ) -> tuple[torch.Tensor, bool] | None:
        """Run passes and undo them; see :meth:`_gradients`."""
        step = self._step
        statistics: list[Mapping[str, Any]] = [{} for _ in passes]
        # Projected gradient of each leaf by its id, for each pass.
        gradients: list[dict[int, torch.Tensor]] = []
        sizes_of_draws: list[list[int | None]] = []
        generators: set[str] = set()

        def run_pass(number: int) -> None:
            current = passes[number]
            random_state = RandomState(step.memory.device)
            versions = self._versions()
            # The second part adds to the gradients of the first, as in training.
            adds = accumulates and number == 2
            if not adds:
                step.saved_gradients.drop_new()
            if not current.share and not step.sharding.needs_dummy(is_last=False):
                gradients.append(gradients[-1] if adds else {})
                return
            draws = RowDraws(current.rows or [0])
            with draws if by_row else nullcontext():
                part = current.part()._replace(
                    is_first=not adds,
                    is_last=not (accumulates and number == 1),
                    statistics=statistics[number],
                )
                step.forward_backward(part)
            sizes_of_draws.append(draws.sizes)
            generators.update(random_state.changed())
            # A parameter that the function froze is not written.
            self.written.update(
                name
                for name, version in self._versions().items()
                if versions.get(name, version) != version
            )
            gradients.append(self._projected_gradients())

        if step.statistics is not None:
            of_part = step.statistics.of_part

            def measure(number: int) -> None:
                statistics[number] = of_part(passes[number].part())

            if not self._run_and_undo(passes, measure, step.statistics.KIND):
                return None
            # Each part has the sums over all parts.
            statistics[1:] = [step.statistics.sum_of(statistics[1:])] * (len(passes) - 1)
        if not self._run_and_undo(passes, run_pass):
            return None
        has_other_draws = bool(generators)
        if by_row:
            has_other_draws = not _belong_to_rows(sizes_of_draws)
            # RowDraws does not seed these generators.
            has_other_draws |= bool(generators & {"python", "numpy"})
        vectors = _as_vectors(gradients)
        if accumulates:
            # The gradients of the second part contain those of the first.
            vectors[2] -= vectors[1]
        return vectors, has_other_draws

    def _projected_gradients(self) -> dict[int, torch.Tensor]:
        """Return the projected gradients of the model and of parameters outside of it, by id."""
        gradients = self._step.gradients()
        for leaf, _ in self._step.saved_gradients.external():
            if isinstance(leaf, nn.Parameter) and leaf.grad is not None:
                gradients[leaf] = leaf.grad
        return {id(leaf): _projected(gradient) for leaf, gradient in gradients.items()}

    def _run_and_undo(
        self,
        passes: Sequence[Pass],
        run_number: Callable[[int], None],
        evaluates: bool | str = False,
    ) -> bool:
        """Run passes by number and undo each; return whether all of them fit on all ranks."""
        whole = passes[0]

        def run(number: int) -> None:
            try:
                run_number(number)
            except Exception as error:
                if isinstance(error, AdaptiveBatchError) or is_out_of_memory(error):
                    raise
                raise self._failure(whole, error) from error

        return self._step.run_trials(
            [partial(run, number) for number in range(len(passes))],
            # Errors name these rows, without their length; row 0 on a rank without rows.
            MicroBatch(list(whole.rows) or [0], 0),
            evaluates=evaluates,
            doing="in the check of a split",
        )

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Return id and version of each buffer and frozen parameter by name, except those of
        BatchNorms. A write changes one of them.
        """
        return {
            f"{path}.{name}".lstrip("."): (id(tensor), tensor._version)
            for path, module in self._step.model.named_modules()
            if not is_batch_norm(module)
            for name, tensor in chain(
                module.named_buffers(recurse=False), module.named_parameters(recurse=False)
            )
            if not tensor.requires_grad
        }

    def _failure(self, whole: Pass, error: Exception) -> SettingError:
        """Build the error of a function that failed on rows of a batch."""
        rows = count(len(whole.rows), whole.batch.noun)
        treatment = whole.batch.treatment
        if treatment:
            rows = f"{rows} of a batch ({treatment})"
        problem = (
            f"it raised {type(error).__name__} on {rows}, or on a part of them: {error}; if the"
            f" {whole.batch.noun}s are not those of the batch, {self._step.terms.split}"
        )
        return SettingError(self._step.terms.function, self._step.name, problem)


class RowDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draw the random numbers of each row with the row's own seed.

    Each operator takes one number of the global generator as the base of its seeds. Activation
    checkpointing restores that generator, so a recomputed forward pass draws the same numbers.

    Args:
        rows: numbers of the rows of the part that runs.

    Attributes:
        sizes: entries of the first dimension that each operator drew per row; 0 for a scalar, None
            for a tensor without a dimension of rows.
    """

    # Otherwise flex_attention refuses to run.
    supports_higher_order_operators = True

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows
        self.sizes: list[int | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # A higher-order operator, such as flex_attention, has no tags.
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        # Operators of attention have this tag for their dropout, which is off here.
        if not draws or "attention" in func.name():
            return func(*args, **kwargs)
        if "generator" in kwargs:
            # Draw from the global generator, so that the script's own generator does not change.
            kwargs["generator"] = None
        seed = int(torch.empty((), dtype=torch.int64).random_())
        # _draw() seeds the global generator for each row.
        state = torch.get_rng_state()
        try:
            return self._draw(func, args, kwargs, seed)
        finally:
            torch.set_rng_state(state)

    def _draw(self, func: Any, args: Any, kwargs: Any, seed: int) -> Any:
        """Run an operator once for each row, with its slice of the first dimension; run it once if
        that dimension cannot be divided by rows.
        """
        num_rows = len(self._rows)
        # The shape to draw: that of a tensor argument, or the size that torch.rand() is given.
        shapes = [
            tuple(getattr(arg, "shape", arg))
            for arg in args
            if isinstance(arg, torch.Tensor | list | tuple)
        ]
        shape = next((each for each in shapes if each), ())
        if not shape or shape[0] == 0 or shape[0] % num_rows != 0:
            self.sizes.append(None if shape else 0)
            torch.manual_seed(seed)
            return func(*args, **kwargs)
        size = shape[0] // num_rows
        self.sizes.append(size)

        def of_row(number: int, arg: Any) -> Any:
            if isinstance(arg, torch.Tensor) and arg.shape[:1] == shape[:1]:
                return arg[number * size : (number + 1) * size]
            if isinstance(arg, list | tuple) and tuple(arg) == shape:
                return [size, *shape[1:]]
            return arg

        drawn = []
        for number, row in enumerate(self._rows):
            # The seed depends on the row's number in the batch, not on the part that has it.
            torch.manual_seed((seed + 7919 * row) % 2**63)
            drawn.append(func(*[of_row(number, arg) for arg in args], **kwargs))
        is_in_place = str(func.overloadpacket).endswith("_")
        # An operator in place has drawn into views of its first argument.
        return args[0] if is_in_place else torch.cat(drawn)


def _belong_to_rows(sizes_of_draws: Sequence[Sequence[int | None]]) -> bool:
    """Return whether all random numbers of passes belong to rows.

    Args:
        sizes_of_draws: entries per row that each operator of a pass drew, see :class:`RowDraws`;
            empty on a rank that ran no pass.
    """
    # Passes that ran different operators drew different numbers for the same row.
    if any(sizes != sizes_of_draws[0] for sizes in sizes_of_draws):
        return False
    # Several entries per row may be ordered by view, and not by row.
    return all(size in (0, 1) for sizes in sizes_of_draws for size in sizes)


def _as_vectors(gradients: Sequence[dict[int, torch.Tensor]]) -> torch.Tensor:
    """Return one vector for each pass, with zeros for a gradient that only other passes have."""
    zeros = {key: torch.zeros_like(value) for each in gradients for key, value in each.items()}
    # torch.cat() needs a tensor even if there is no gradient.
    start = torch.zeros(1, dtype=torch.float64)
    filled = [zeros | each for each in gradients]
    return torch.stack([torch.cat([start, *each.values()]) for each in filled])


def _products(gradients: torch.Tensor) -> torch.Tensor:
    """Return the inner products of gradients: float64 `[passes, passes]`, summed over ranks."""
    gathered = distributed.all_gather((gradients @ gradients.T).tolist())
    return torch.tensor(gathered, dtype=torch.float64).sum(dim=0)


def _projected(gradient: torch.Tensor) -> torch.Tensor:
    """Return a random projection of a gradient, which keeps norms and inner products to about 6%.

    The entries get random signs and are summed in 256 groups. A large gradient is sampled.
    """
    entries = local_part(gradient.detach())
    if entries.is_sparse:
        entries = entries.to_dense()
    stride = entries.numel() // _MOST_ENTRIES
    # Matrices have an even number of columns, so an even stride would miss some of them.
    if stride % 2 == 0:
        stride += 1
    # Copy, since a later part adds to the gradient.
    sampled = entries.reshape(-1)[::stride].to("cpu", torch.float64, copy=True)
    if sampled.numel() <= _NUMBERS:
        return sampled
    signed = sampled * _signs(sampled.numel())
    padding = -sampled.numel() % _NUMBERS
    return nn.functional.pad(signed, (0, padding)).view(-1, _NUMBERS).sum(dim=0)


@lru_cache(maxsize=128)
def _signs(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 2, (number,), dtype=torch.int8, generator=generator) * 2 - 1
