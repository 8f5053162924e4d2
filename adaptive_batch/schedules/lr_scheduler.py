"""What a torch scheduler says at a point of training, before the batch has its say."""

from __future__ import annotations

import logging
import warnings
from bisect import bisect_right
from collections import Counter
from itertools import islice, zip_longest
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR, SequentialLR

log = logging.getLogger("adaptive_batch")


class Scheduled(NamedTuple):
    """What a schedule says for one parameter group; no factor where it says a rate whatever the base."""

    base: float
    factor: float | None
    rate: float

    def of(self, base: float) -> float:
        """For a group of another optimizer, with a base of its own."""
        return self.rate if self.factor is None or base == self.base else base * self.factor


class Schedule:
    """A scheduler, asked for the rates at a clock; it sees no rate but its own.

    Args:
        scheduler: built around `optimizer`; None for rates that stay.
        optimizer: each group keeps its base rate in its ``initial_lr``.

    Attributes:
        follows_clock: it is a function of the clock, and keeps no count of its own.
    """

    def __init__(self, scheduler: LRScheduler | None, optimizer: Optimizer) -> None:
        self.follows_clock = scheduler is None or _is_function_of_clock(scheduler)
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._last_clock: float | None = None
        self._rates: list[float] | None = None  # of a scheduler that is stepped: what it said last
        self._named_left_out = False

    def at(self, clock: float) -> list[Scheduled]:
        """For each group of the optimizer; a scheduler that keeps its own count is stepped if the clock has moved."""
        said = self._said_at(clock)
        self._last_clock = clock
        return said

    def applied(self) -> None:
        """Let the scheduler's ``get_last_lr()`` report what the groups have now."""
        if self._scheduler is not None:
            self._scheduler._last_lr = [*read_rates(self._optimizer)]

    def state_dict(self) -> dict[str, Any]:
        """As numbers, strings, lists and dicts; nothing where it is a function of the clock."""
        if self.follows_clock or self._scheduler is None:
            return {}
        left_out: list[str] = []
        state = {
            "scheduler": type(self._scheduler).__name__,
            "scheduler_state": _plain(self._scheduler.state_dict(), left_out),
            "rates": self._rates or read_rates(self._optimizer),
            "clock": self._last_clock,
        }
        if left_out and not self._named_left_out:
            self._named_left_out = True
            log.warning(
                "%s keeps %s, which a checkpoint cannot hold: resuming takes what the scheduler is built with then",
                state["scheduler"],
                ", ".join(left_out),
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        if self.follows_clock or self._scheduler is None or not state:
            return
        if state["scheduler"] != (name := type(self._scheduler).__name__):
            log.warning("the checkpoint's schedule is a %s: %s begins where it was built", state["scheduler"], name)
            return
        self._scheduler.load_state_dict(_like(self._scheduler.state_dict(), state["scheduler_state"]))
        self._rates, self._last_clock = list(state["rates"]), state["clock"]

    def _said_at(self, clock: float) -> list[Scheduled]:
        groups = self._optimizer.param_groups
        bases = [float(group["initial_lr"]) for group in groups]
        if self._scheduler is None:
            return [Scheduled(base, 1.0, base) for base in bases]
        if self.follows_clock:
            return _evaluate(self._scheduler, int(clock) if clock == int(clock) else clock)
        if self._rates is None:
            self._rates = read_rates(self._optimizer)
        elif self._last_clock is not None and clock != self._last_clock:
            for group, rate in zip(groups, self._rates, strict=True):
                write_rate(group, rate)
            with warnings.catch_warnings():  # in a resumed run the scheduler steps before the optimizer's first step
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                self._scheduler.step()
            self._rates = read_rates(self._optimizer)
        own = _brings_rates(self._scheduler)
        return [
            Scheduled(base, None if own or not base else rate / base, rate)
            for base, rate in zip(bases, self._rates, strict=True)
        ]


def read_rates(optimizer: Optimizer) -> list[float]:
    """The rate of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def write_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of a parameter group, in place where it is a tensor, as torchao's optimizers keep it."""
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _is_function_of_clock(scheduler: LRScheduler) -> bool:
    if type(scheduler) is SequentialLR:
        parts_follow = all(isinstance(part, LambdaLR) and _is_function_of_clock(part) for part in scheduler._schedulers)
        return parts_follow and scheduler._milestones == sorted(scheduler._milestones)
    return isinstance(scheduler, LambdaLR) and type(scheduler).get_lr is LambdaLR.get_lr


def _evaluate(scheduler: LRScheduler, clock: float) -> list[Scheduled]:
    """A function of the clock, at the clock; a part of a sequence counts from the milestone where it begins."""
    if isinstance(scheduler, SequentialLR):
        index = bisect_right(scheduler._milestones, clock)
        clock -= scheduler._milestones[index - 1] if index else 0
        scheduler = scheduler._schedulers[index]
    assert isinstance(scheduler, LambdaLR)
    bases = [float(base) for base in scheduler.base_lrs]
    factors = [rule(clock) for rule in scheduler.lr_lambdas]  # type: ignore[arg-type]  # torch's are asked at whole steps
    return [Scheduled(base, factor, base * factor) for base, factor in zip(bases, factors, strict=True)]


def _brings_rates(scheduler: LRScheduler) -> bool:
    parts = getattr(scheduler, "_schedulers", ())
    return isinstance(scheduler, OneCycleLR | CyclicLR) or any(_brings_rates(part) for part in parts)


def _plain(value: Any, left_out: list[str]) -> Any:
    """As numbers, strings, lists and dicts; what a dict holds that cannot be written so is named in `left_out`."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item, left_out) for item in value]
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} is not plain")
    plain = {}
    for key, item in value.items():
        try:
            plain[_plain(key, left_out)] = _plain(item, left_out)
        except TypeError:
            left_out.append(str(key))
    return plain


def _like(own: Any, saved: Any) -> Any:
    """What was saved plain, in the types of a scheduler's own state; what was left out stays its own."""
    if isinstance(own, torch.Tensor):
        return torch.tensor(saved, dtype=own.dtype, device=own.device)
    if isinstance(own, Counter):
        return Counter(saved)
    if isinstance(own, dict) and isinstance(saved, dict):
        return {**own, **{key: _like(own.get(key), item) for key, item in saved.items()}}
    if isinstance(saved, list):
        pairs = zip_longest(own if isinstance(own, list | tuple) else (), saved)
        items = [_like(*pair) for pair in islice(pairs, len(saved))]
        return tuple(items) if isinstance(own, tuple) else items
    return saved
