"""The order of the rows of an epoch: stored, or computed on access."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

import torch

from adaptive_batch._util import check_choice, check_whole
from adaptive_batch.errors import SettingError

ORDERS = ("dataloader", "random", "seqlen")

# Drawing a permutation of this many rows takes 0.04 s, and of twice as many 0.1 s.
_STORED_ROWS = 2**20

# Six rounds of random functions cannot be told from a random permutation by fewer rows than a
# table has entries (Patarin, CRYPTO 2004). With five, orders of 1,000 rows differ from chance.
_ROUNDS = 6

# Several steps; few enough that torch computes them on the calling thread.
_BLOCK_ROWS = 2048


class RowOrder(Protocol):
    """Row numbers in the order of an epoch: parts of it are int64 tensors, and ``order[:]`` is all.

    A tensor of row numbers is such an order, too.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, places: slice | torch.Tensor, /) -> torch.Tensor: ...


def row_order(
    num_rows: int,
    *,
    order: str = "dataloader",
    shuffle: bool = False,
    lengths: torch.Tensor | None = None,
    window: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    stored_rows: int = _STORED_ROWS,
) -> RowOrder:
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
        stored_rows: most rows of an order that is a tensor. A larger order, unless by ``seqlen``,
            is computed on access, with other permutations.

    Returns:
        Row numbers, each once: an int64 tensor ``[rows]``, or an order that is computed.

    Raises:
        SettingError: `order` is unknown, or `window` is below 1.
    """
    check_choice("order", order, ORDERS)
    if window is not None:
        check_whole("window", window, remedy="give 1 row or more, or None to sort the whole epoch")
    generator = _generator(order, shuffle=shuffle, seed=seed, epoch=epoch)
    if num_rows > stored_rows and order != "seqlen":
        return _ComputedOrder(num_rows, generator)
    if generator is None:
        return torch.arange(num_rows)
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


def _generator(order: str, *, shuffle: bool, seed: int, epoch: int) -> torch.Generator | None:
    """Return the generator of an epoch's permutation; None for the dataset's own order."""
    if order == "dataloader":
        # The seed of DistributedSampler, whose permutation torchtune's recipes take.
        if not shuffle:
            return None
        return torch.Generator().manual_seed(seed + epoch)
    # Hashed, as seed + epoch would repeat one seed's epochs under the next seed.
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


class _ComputedOrder:
    """A permutation of any number of rows; reading a part takes the time and memory of that part.

    It is a Feistel network on the two digits of a row number in base `side`, the square root of the
    rows. Each round adds to one digit the other digit's entry in a table of random numbers. A round
    can be undone, so each row comes once.

    Args:
        num_rows: rows of the epoch.
        generator: source of the tables; None keeps the order of the dataset.
    """

    def __init__(self, num_rows: int, generator: torch.Generator | None) -> None:
        self._num_rows = num_rows
        self._side = math.isqrt(max(0, num_rows - 1)) + 1
        rounds = 0 if generator is None else _ROUNDS
        self._tables = torch.randint(self._side, (rounds, self._side), generator=generator)
        self._block = lru_cache(maxsize=2)(self._compute_block)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, places: slice | torch.Tensor, /) -> torch.Tensor:
        if isinstance(places, torch.Tensor):
            return self._permute(places)
        begin, end, step = places.indices(self._num_rows)
        first = begin // _BLOCK_ROWS
        last = max(begin, end) // _BLOCK_ROWS
        numbers = torch.cat([self._block(block) for block in range(first, last + 1)])
        offset = begin % _BLOCK_ROWS
        return numbers[offset : offset + max(0, end - begin) : step]

    def _compute_block(self, block: int) -> torch.Tensor:
        end = min((block + 1) * _BLOCK_ROWS, self._num_rows)
        return self._permute(torch.arange(block * _BLOCK_ROWS, end))

    def _permute(self, numbers: torch.Tensor) -> torch.Tensor:
        high = numbers // self._side
        low = numbers % self._side
        for table in self._tables:
            high, low = low, (high + table[low]) % self._side
        permuted = high * self._side + low
        # Permute a number beyond the rows again, until it is the number of a row.
        beyond = permuted >= self._num_rows
        if beyond.any():
            permuted[beyond] = self._permute(permuted[beyond])
        return permuted


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
        return _SampledOrder(self, epoch)

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


class _SampledOrder:
    """The order of one epoch of a sampler."""

    def __init__(self, order: SamplerOrder, epoch: int) -> None:
        self._order = order
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, places: slice | torch.Tensor, /) -> torch.Tensor:
        if isinstance(places, torch.Tensor):
            return self[:][places]
        begin, end, _ = places.indices(len(self))
        return self._order.read(self._epoch, begin, end)
