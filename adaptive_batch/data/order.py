"""The order of the rows of an epoch: computed, or drawn from a script's sampler."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias

import torch

from adaptive_batch._util import check_choice, check_whole
from adaptive_batch.errors import SettingError

ORDERS = ("dataloader", "random", "seqlen")


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

    Raises:
        SettingError: `order` is unknown, or `window` is below 1.
    """
    check_choice("order", order, ORDERS)
    if window is not None:
        check_whole("window", window, remedy="give 1 row or more, or None to sort the whole epoch")
    if order == "dataloader":
        if not shuffle:
            return torch.arange(num_rows)
        # The seed of DistributedSampler, whose permutation torchtune's recipes take.
        generator = torch.Generator().manual_seed(seed + epoch)
    else:
        # Hashed, as seed + epoch would repeat one seed's epochs under the next seed.
        digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
        first_bytes = int.from_bytes(digest[:8], "little", signed=True)
        generator = torch.Generator().manual_seed(first_bytes)
    shuffled = torch.randperm(num_rows, generator=generator)
    if order != "seqlen":
        return shuffled
    assert lengths is not None, "rows are ordered by the length of each"
    assert len(lengths) == num_rows, f"{len(lengths)} lengths of {num_rows} rows"
    keys = lengths.to(torch.int64)[shuffled]
    if window is not None and window < num_rows:
        keys += torch.arange(num_rows).div_(window, rounding_mode="floor").mul_(int(keys.max()) + 1)
    # Stable: rows of equal length stay as they were shuffled.
    return shuffled[torch.sort(keys, stable=True).indices]


# Remedy of a sampler whose items are batches.
YIELDS_BATCHES = "it yields batches, which are made here; give its sampler"


class SamplerOrder:
    """The order of a script's own sampler, drawn as far as it is needed.

    A run that resumes within an epoch repeats the sampler's draws from torch's random numbers or
    from its own generator.

    Args:
        sampler: yields row numbers, and has a length; its ``set_epoch`` is called.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._epoch = -1
        self._numbers: list[int] = []
        self._drawn: Iterator[int] = iter(())
        # Random state at the start of an epoch's draws, to repeat them.
        self._random_state: dict[str, torch.Tensor] = {}

    @property
    def _generator(self) -> torch.Generator | None:
        """The sampler's own generator."""
        generator = getattr(self._sampler, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def __len__(self) -> int:
        return len(self._sampler)

    def __call__(self, epoch: int) -> RowOrder:
        """Return the order of an epoch, whose rows are drawn when they are read."""
        return SampledOrder(self, epoch)

    def ahead(self, epoch: int) -> RowOrder:
        """Return the order that an epoch would have if it began now, drawn without a trace. An
        epoch that has begun keeps its order.
        """
        if epoch == self._epoch:
            return self(epoch)
        generator = self._generator or torch.Generator()
        with torch.random.fork_rng(devices=[]):
            state = generator.get_state()
            numbers = SamplerOrder(self._sampler).read(epoch, 0, len(self))
            generator.set_state(state)
        if self._epoch >= 0 and hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self._epoch)
        return numbers

    def read(self, epoch: int, begin: int, end: int) -> torch.Tensor:
        """Return a part of the order of an epoch; another epoch than the last one begins."""
        if epoch != self._epoch:
            self._begin(epoch)
        drawn = list(islice(self._drawn, max(0, end - len(self._numbers))))
        if any(isinstance(number, list | tuple) for number in drawn):
            raise SettingError("sampler", type(self._sampler).__name__, YIELDS_BATCHES)
        self._numbers += map(int, drawn)
        return torch.tensor(self._numbers[begin:end], dtype=torch.int64)

    def _begin(self, epoch: int) -> None:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        self._epoch = epoch
        self._numbers = []
        self._random_state = {"torch": torch.get_rng_state()}
        if self._generator is not None:
            self._random_state["generator"] = self._generator.get_state()
        self._drawn = iter(self._sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return the random state at the start of the epoch's draws, and a checksum of the draws so
        far.
        """
        drawn = torch.tensor(self._numbers, dtype=torch.int64)
        checksum = zlib.crc32(drawn.numpy().tobytes())
        return {
            "epoch": self._epoch,
            "random": self._random_state,
            "rows": len(drawn),
            "checksum": checksum,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw the current epoch again.

        Raises:
            SettingError: the sampler draws other rows than before.
        """
        self._epoch = -1
        if state["epoch"] < 0:
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state["random"]["torch"])
            if self._generator is not None and "generator" in state["random"]:
                self._generator.set_state(state["random"]["generator"])
            self.read(state["epoch"], 0, state["rows"])
        if self.state_dict()["checksum"] != state["checksum"]:
            remedy = (
                "it yields other rows than it did before the state was saved; seed it by its epoch"
            )
            raise SettingError("sampler", type(self._sampler).__name__, remedy)


class SampledOrder:
    """The order of one epoch of a sampler."""

    def __init__(self, order: SamplerOrder, epoch: int) -> None:
        self._order = order
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, places: slice, /) -> torch.Tensor:
        begin, end, _ = places.indices(len(self))
        return self._order.read(self._epoch, begin, end)


# A slice of an order is an int64 tensor, and [:] is all of it.
RowOrder: TypeAlias = torch.Tensor | SampledOrder
