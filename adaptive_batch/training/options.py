"""Options of AdaptiveStep and AdaptiveLoop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import check_options, instance_of, one_of, option
from adaptive_batch.data import LAYOUT_KINDS
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import DeviceMemory
from adaptive_batch.schedules import UNITS, parse_scaled_options

from .sizing import LimitChange, OOMPolicy
from .step_result import ON_NONFINITE_LOSS

log = logging.getLogger("adaptive_batch")

# Options that only AdaptiveLoop takes, with their replacement in a script with AdaptiveStep.
_ONLY_IN_LOOP = {
    "max_grad_norm": "clip between step(batch) and optimizer.step()",
    "to_device": "move part.batch in forward_backward",
    "on_nonfinite_loss": "check the results of step(batch)",
    "scale_with_batch": "give it to AdaptiveRate",
    "lr_clock": "give it to AdaptiveRate",
}


@dataclass(frozen=True)
class Terms:
    """Names of the caller's API, for errors.

    Attributes:
        function: function whose loss is split.
        num_labels: argument that counts labels.
        split: fix for a wrong division of rows, in the imperative.
        share: fix for a mean with a wrong weight, in the imperative.
        sum: fix for a loss that is a sum, in the imperative.
        totals: fix for a loss that needs totals of the batch, after a space; empty without one.
    """

    function: str = "forward_backward"
    num_labels: str = "num_labels="
    split: str = "give split=, a function that returns SplitBatch(num_rows, part)"
    share: str = "multiply a mean by part.share before backward"
    sum: str = "do not multiply it by part.share"
    totals: str = " give statistics= if it needs a total of the batch, such as a ratio;"


def _norm(key: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        raise SettingError(key, value, "give a number above 0, or None for no clipping")


def _function(key: str, value: object, *, remedy: str) -> None:
    if not callable(value):
        raise SettingError(key, value, remedy)


def _device_memory(key: str, value: object) -> None:
    if not hasattr(value, "total_bytes"):
        raise SettingError(key, value, "give a DeviceMemory")


@dataclass(frozen=True)
class StepOptions:
    """Options of a step.

    Attributes:
        max_grad_norm: maximum norm of all gradients. None: no clipping. Only AdaptiveLoop supports
            this option, `to_device`, `on_nonfinite_loss`, `scale_with_batch` and `lr_clock`. With
            AdaptiveStep, your script does this work itself.
        to_device: function that moves a batch to the device. None moves tensors in mappings and
            sequences, and objects with a method ``to``.
        on_out_of_memory: ``shrink`` repeats the step with a smaller limit. ``raise`` raises the
            error.
        oom_policy: policy that decides when a former limit is tried again after an OOM. None: the
            default :class:`OOMPolicy`.
        sync_gradients_every_micro_batch: whether sharded gradients are reduced after each
            micro-batch. False keeps unsharded gradients until the last micro-batch.
        overlap_reduction: whether DDP reduces gradients during the backward of the last part, as
            plain DDP does. An OOM in that part ends all ranks with a `RankLostError`.
        count_labels_over: ``rank``: a part's weight is its share of the labels in this rank's
            batch, and FSDP and DDP average over ranks, as without a split. ``ranks``: a part's
            weight is its share of the labels on all ranks.
        memory: memory of the model's device. None: determined by torch.
        on_nonfinite_loss: reaction to a loss that is NaN or infinite. ``warn`` logs a line;
            ``skip`` and ``stop`` also check the norm of the gradients. ``skip`` clears the
            gradients, so that ``optimizer.step()`` changes nothing, and ``stop`` raises.
        micro_batch_layout: ``padded``, ``grouped`` or ``packed``. None: ``padded``, or with
            ``micro_batch_tokens="auto"`` the fastest layout that :meth:`AdaptiveLoop.find_bound`
            finds. For ``packed``, rows are mappings with ``labels`` and ``tokens`` or
            ``input_ids``, and :func:`pack_rows` replaces `collate`.
        scale_with_batch: optimizer settings that follow the batch, in addition to the rate:
            ``{"beta2": "half_life", "weight_decay": "per_token"}`` or one of the two.
        event: function ``event(kind, message, **facts)`` that receives events, such as a
            :class:`adaptive_batch.report.RunLog`. AdaptiveStep reports changed limits. AdaptiveLoop
            also reports each step with its rows.
        lr_clock: unit of the learning rate schedule: ``samples``, ``tokens`` or ``steps``.

    Raises:
        SettingError: a value cannot be used.
    """

    max_grad_norm: float | None = option(None, _norm)
    to_device: Callable[[Any], Any] | None = option(
        None, partial(_function, remedy="give a function of a batch")
    )
    on_out_of_memory: str = option("shrink", one_of("shrink", "raise"))
    oom_policy: OOMPolicy | None = option(None, partial(instance_of, OOMPolicy))
    sync_gradients_every_micro_batch: bool = option(True)
    overlap_reduction: bool = option(False)
    count_labels_over: str = option("rank", one_of("rank", "ranks"))
    memory: DeviceMemory | None = option(None, _device_memory)
    on_nonfinite_loss: str = option("warn", one_of(*ON_NONFINITE_LOSS))
    micro_batch_layout: str | None = option(None, one_of(*LAYOUT_KINDS))
    scale_with_batch: Mapping[str, str] | None = option(None, parse_scaled_options)
    lr_clock: str = option("samples", one_of(*UNITS))
    event: Callable[..., object] | None = option(
        None, partial(_function, remedy="give a function, such as RunLog(folder)")
    )

    def __post_init__(self) -> None:
        check_options(self)

    def report(self, kind: str, message: str, *, prints: bool = True, **facts: Any) -> None:
        """Log an event on rank zero, unless `prints` is False, and pass it to `event`."""
        if prints and distributed.is_rank_zero():
            log.warning("%s", message)
        if self.event is not None:
            self.event(kind, message, prints=False, **facts)

    def report_change(self, change: LimitChange, *, kind: str = "limit", prefix: str = "") -> None:
        """Log a change of a limit, and report it as an event of a kind."""
        self.report(kind, prefix + change.describe(), **change.facts())

    def check_of_step(self) -> None:
        """Raise if an option is set that AdaptiveStep does not take.

        Raises:
            SettingError: only AdaptiveLoop takes the option.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _ONLY_IN_LOOP and value != field.default:
                raise SettingError(
                    field.name, value, f"only AdaptiveLoop takes it; {_ONLY_IN_LOOP[field.name]}"
                )
        layout = self.micro_batch_layout
        if layout == "packed":
            remedy = (
                "a collated batch cannot be packed; give padded or grouped, or use AdaptiveLoop"
            )
            raise SettingError("micro_batch_layout", layout, remedy)
