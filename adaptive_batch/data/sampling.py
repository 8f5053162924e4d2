"""Options of the rows of steps; and the order of the rows of an epoch, computed, or drawn from a
script's sampler.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from adaptive_batch._util import check_options, check_whole, one_of, option
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import ReferenceBatch, Schedule, Seesaw

ORDERS = ("dataloader", "random", "seqlen")
LONG_ROWS = ("error", "drop", "alone")


def _seed(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise SettingError(key, value, "give a whole number")


@dataclass(frozen=True)
class Sampling:
    """Order of rows, and steps that hold tokens.

    Attributes:
        shuffle: whether `dataloader` shuffles the rows in each epoch.
        seed: seed of the order.
        sample_order: order of the rows. `dataloader`: torchtune's order. `random`: shuffled in
            each epoch. `seqlen`: from the shortest row to the longest.
        sample_window: number of shuffled rows that `seqlen` sorts at a time; None: all rows of the
            dataset.
        batch_tokens: number of real tokens (without padding) in a step on one device. Replaces
            `batch_size`. By default, `micro_batch_tokens: auto` then limits the micro-batches.
        min_rows_per_batch: minimum number of rows in a step with `batch_tokens`, even if these rows
            have more than `batch_tokens` tokens. The last step of an epoch may have fewer rows.
        max_rows_per_batch: maximum number of rows in a step with `batch_tokens`.
        long_rows: handling of a row with more than `batch_tokens` tokens. `error`: end the run.
            `drop`: leave the row out and log it; not with `batch_size_schedule`. `alone`: train
            the row in a separate step.
        grow_beyond_maximum: whether a growing batch may exceed the maximum batch size. `True`: a
            larger batch runs as several micro-batches. `False`: the batch is limited to the
            maximum, and a line is logged.

    Raises:
        SettingError: a value cannot be used.
    """

    shuffle: bool = option(True)
    seed: int = option(0, _seed)
    sample_order: str = option("dataloader", one_of(*ORDERS), resume="epoch")
    sample_window: int | None = option(
        None, check_whole, resume="epoch", needs=("sample_order=seqlen",)
    )
    batch_tokens: int | None = option(None, check_whole, resume="epoch")
    min_rows_per_batch: int = option(1, check_whole, resume="epoch", needs=("batch_tokens",))
    max_rows_per_batch: int | None = option(
        None, check_whole, resume="epoch", needs=("batch_tokens",)
    )
    long_rows: str = option("error", one_of(*LONG_ROWS), resume="epoch", needs=("batch_tokens",))
    grow_beyond_maximum: bool = option(
        False, resume="report", needs=("batch_increase_function", "batch_size_schedule")
    )

    def __post_init__(self) -> None:
        check_options(self)
        self.check_together()

    def check_together(self) -> None:
        """Raise SettingError for options that contradict each other."""
        least = self.min_rows_per_batch
        if self.long_rows == "alone" and least > 1:
            remedy = (
                f"a row alone is fewer than min_rows_per_batch={least}; set error or drop, or"
                " remove min_rows_per_batch"
            )
            raise SettingError("long_rows", self.long_rows, remedy)
        if self.max_rows_per_batch is not None and least > self.max_rows_per_batch:
            remedy = f"must not be above max_rows_per_batch={self.max_rows_per_batch}"
            raise SettingError("min_rows_per_batch", least, remedy)


@dataclass(frozen=True, kw_only=True)
class Batching(Sampling):
    """Size of a step, order of rows and end of an epoch; the attributes of :class:`Sampling`, and:

    Attributes:
        batch_size: configured rows on one device, before a search or a rule changes them.
        gradient_accumulation_steps: factor of `batch_size` that gives the rows of a step.
        batch_increase_function: function `f(epoch, batch_size) -> int`: rows to add to
            `batch_size` at the start of each epoch.
        batch_size_schedule: function `rule(progress) -> int`: rows of a step on one device, or
            real tokens with `batch_tokens`.
        drop_last: whether the last, short step of an epoch is dropped.
        max_steps_per_epoch: most optimizer steps of an epoch; None for no limit.
        epochs: number of epochs; None for no limit.
    """

    batch_size: int = option(read=check_whole)
    gradient_accumulation_steps: int = 1
    batch_increase_function: Callable[[int, int], int] | None = None
    batch_size_schedule: Schedule | None = None
    drop_last: bool = False
    max_steps_per_epoch: int | None = option(None, check_whole)
    epochs: int | None = None

    def check_together(self) -> None:
        """Raise SettingError for options that contradict each other."""
        super().check_together()
        if None not in (self.batch_size_schedule, self.batch_increase_function):
            remedy = (
                "batch_increase_function is set too, and both set how the batch grows; remove one"
            )
            raise SettingError("batch_size_schedule", self.batch_size_schedule, remedy)
        if self.long_rows == "drop" and self.batch_size_schedule is not None:
            remedy = (
                "with batch_size_schedule a row may be too long for some steps only; give error or"
                " alone, or filter long rows out of the dataset"
            )
            raise SettingError("long_rows", "drop", remedy)

    @property
    def step_rows(self) -> int:
        """Rows of a step on one device before a search or a rule changes `batch_size`."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def depends_on_lengths(self) -> bool:
        """Return whether the lengths of the rows decide which rows a step has."""
        return bool(self.batch_tokens) or self.sample_order == "seqlen"

    @property
    def schedules_rows(self) -> bool:
        """Return whether a schedule decides how many rows a step has, and not how many tokens."""
        return self.batch_size_schedule is not None and not self.batch_tokens

    @property
    def ends(self) -> dict[str, Any]:
        """Arguments of :class:`EpochPlan` for the end of an epoch."""
        return {"drop_last": self.drop_last, "max_steps": self.max_steps_per_epoch}

    def global_batch(self, ranks: int) -> ReferenceBatch:
        """Return the configured batch of a number of ranks, which the rate was chosen for."""
        if isinstance(self.batch_size_schedule, Seesaw) and self.batch_tokens:
            return ReferenceBatch(self.batch_tokens * ranks, "tokens")
        return ReferenceBatch(self.step_rows * ranks, "rows")


# --- the order of rows


def row_order(
    num_rows: int,
    *,
    order: str = "dataloader",
    shuffle: bool = False,
    lengths: torch.Tensor | None = None,
    window: int | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> torch.Tensor:
    """Order the rows of an epoch; the same arguments give the same order on every rank and machine.

    Sorting by length needs the least padding but gives the least random batches: each has rows of
    one length, and the lengths rise through the epoch. Windows limit the sorting to neighbours, and
    each epoch differs.

    Args:
        num_rows: rows of the epoch.
        order: ``dataloader`` keeps the order of the dataset, or with `shuffle` takes the
            permutation of torch's ``DistributedSampler``; ``random`` draws a permutation for each
            epoch; ``seqlen`` sorts from short to long, and rows of equal length in an order drawn
            for each epoch.
        shuffle: whether ``dataloader`` draws a permutation for each epoch.
        lengths: int tensor ``[rows]``, tokens of each row; needed by ``seqlen``.
        window: with ``seqlen``, rows are shuffled and sorted only within windows of this many rows;
            None sorts the whole epoch.
        seed: seed of permutations.
        epoch: number from 0; each epoch has another permutation.

    Returns:
        Row numbers, each once: int64 ``[rows]``.
    """
    if order == "dataloader":
        if not shuffle:
            return torch.arange(num_rows)
        # The seed of DistributedSampler, whose permutation torchtune's recipes take.
        epoch_seed = seed + epoch
    else:
        # With seed + epoch, epoch 1 of one seed would equal epoch 0 of the next seed; so hash both.
        digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
        epoch_seed = int.from_bytes(digest[:8], "little", signed=True)
    generator = torch.Generator().manual_seed(epoch_seed)
    shuffled = torch.randperm(num_rows, generator=generator)
    if order != "seqlen":
        return shuffled
    assert lengths is not None, "rows are ordered by the length of each"
    assert len(lengths) == num_rows, f"{len(lengths)} lengths of {num_rows} rows"
    sort_keys = lengths.to(torch.int64)[shuffled]
    if window is not None and window < num_rows:
        window_numbers = torch.arange(num_rows).div_(window, rounding_mode="floor")
        # Each key of a window is above all keys of the window before, so windows keep their order.
        sort_keys += window_numbers.mul_(int(sort_keys.max()) + 1)
    # Stable: rows of equal length stay as they were shuffled.
    return shuffled[torch.sort(sort_keys, stable=True).indices]


# Remedy of a sampler whose items are batches.
YIELDS_BATCHES = "it yields batches, which are made here; give its sampler"


class SamplerOrder:
    """The order of a script's own sampler, drawn when the rows or tokens of an epoch are needed.

    A run that resumes within an epoch repeats the sampler's draws from torch's random numbers or
    from its own generator.

    Args:
        sampler: yields row numbers, and has a length; its ``set_epoch`` is called.
        num_rows: rows of the dataset.
    """

    def __init__(self, sampler: Any, num_rows: int) -> None:
        self._sampler = sampler
        self._length = len(sampler)
        self._epoch = -1
        # Before the first draw, any rows stand in for those that are drawn.
        self._numbers = torch.arange(self._length) % num_rows
        # Random state at the start of the epoch's draws, to repeat them.
        self._random_state: dict[str, torch.Tensor] = {}

    @property
    def _generator(self) -> torch.Generator | None:
        """The sampler's own generator."""
        generator = getattr(self._sampler, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def __len__(self) -> int:
        return self._length

    def __call__(self, epoch: int) -> torch.Tensor:
        """Return the order of an epoch, and draw it unless it was drawn last.

        Raises:
            SettingError: the sampler yields batches, or more or fewer rows than its first length.
        """
        if epoch != self._epoch:
            random_state = {"torch": torch.get_rng_state()}
            if self._generator is not None:
                random_state["generator"] = self._generator.get_state()
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            # One row too many shows that there are more.
            numbers = list(islice(self._sampler, self._length + 1))
            name = type(self._sampler).__name__
            if any(getattr(number, "ndim", isinstance(number, Sequence)) for number in numbers):
                raise SettingError("sampler", name, YIELDS_BATCHES)
            if len(numbers) != self._length:
                remedy = (
                    f"its length was {self._length} when training began; yield {self._length} rows"
                    " in each epoch"
                )
                raise SettingError("sampler", name, remedy)
            # Together, so that the state of the epoch before is kept if a draw fails.
            self._numbers = torch.tensor(numbers, dtype=torch.int64)
            self._random_state = random_state
            self._epoch = epoch
        return self._numbers

    def last_drawn(self, epoch: int) -> torch.Tensor:
        """Return the order that was drawn last, in place of an epoch that is not drawn yet."""
        return self._numbers

    def state_dict(self) -> dict[str, Any]:
        """Return the random state at the start of the epoch's draws, and their checksum."""
        return {
            "epoch": self._epoch,
            "random": self._random_state,
            "checksum": zlib.crc32(self._numbers.numpy().tobytes()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw the epoch of the state again.

        Raises:
            SettingError: the sampler draws other rows than before.
        """
        # No epoch is drawn, so that the call draws it even if it is this one.
        self._epoch = -1
        if state["epoch"] < 0:
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state["random"]["torch"])
            if self._generator is not None and "generator" in state["random"]:
                self._generator.set_state(state["random"]["generator"])
            self(state["epoch"])
        if self.state_dict()["checksum"] != state["checksum"]:
            remedy = (
                "it yields other rows than it did before the state was saved; seed it by its epoch"
            )
            raise SettingError("sampler", type(self._sampler).__name__, remedy)
