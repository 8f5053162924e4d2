"""How a step runs: what AdaptiveStep and AdaptiveLoop are told beside their main arguments."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import check_bool, check_choice, instance_of
from adaptive_batch.data import LAYOUT_KINDS
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import DeviceMemory
from adaptive_batch.schedules import UNITS, check_scaled

from .sizing import LimitChange, OOMPolicy
from .step_result import ON_NONFINITE_LOSS

log = logging.getLogger("adaptive_batch")

# Options of a loop, which has rows, a rate and an optimizer; the script of a bare step has its own.
_OF_LOOP = {
    "max_grad_norm": "clip between step(batch) and optimizer.step()",
    "to_device": "move part.batch in forward_backward",
    "on_nonfinite_loss": "look at what step(batch) returns",
    "scale_with_batch": "give it to AdaptiveRate",
    "lr_clock": "give it to AdaptiveRate",
}


# What lets a row fit.
REMEDIES = (
    "shorten the rows, recompute activations (torch.utils.checkpoint), use an optimizer with less"
    " state or a chunked loss, or allow more memory"
)


@dataclass(frozen=True)
class Terms:
    """Names of the caller's API, for errors.

    Attributes:
        function: function whose loss is split.
        num_labels: argument that counts labels.
        split: fix of rows that are divided wrongly, in the imperative.
        share: fix of a mean that has the wrong weight, in the imperative.
        sum: fix of a loss that is a sum, in the imperative.
        totals: fix of a loss that needs totals of the batch, after a space; empty without one.
    """

    function: str = "forward_backward"
    num_labels: str = "num_labels="
    split: str = "give split=, a function that returns SplitBatch(num_rows, part)"
    share: str = "multiply a mean by part.share before backward"
    sum: str = "do not multiply it by part.share"
    totals: str = " give statistics= if it needs a total of the batch, such as a ratio;"


@dataclass(frozen=True)
class StepOptions:
    """How a step runs.

    Attributes:
        max_grad_norm: norm that all gradients are clipped to; None clips nothing. Of AdaptiveLoop
            alone, as are `to_device`, `on_nonfinite_loss`, `scale_with_batch` and `lr_clock`:
            elsewhere they stay in the script.
        to_device: function that returns a batch on the device; None moves the tensors in mappings
            and sequences, and what has ``to``.
        on_out_of_memory: ``shrink`` runs a step again with a smaller limit, ``raise`` lets the
            error through.
        oom_policy: when the limit that ran out of memory is tried again; None for
            :class:`OOMPolicy` as it is.
        sync_gradients_every_micro_batch: False keeps unsharded gradients until the last
            micro-batch.
        overlap_reduction: under DDP, True reduces gradients while the backward of the last part
            runs, as DDP does; a rank that runs out of memory there is lost, see `RankLostError`.
        count_labels_over: ``rank`` weights a part by the labels of this rank's batch, so that the
            mean which FSDP takes over ranks is the script's own; ``ranks`` by those of all ranks.
        memory: memory of the model's device; None asks torch.
        on_nonfinite_loss: what a step does whose loss is NaN or infinite. ``warn`` logs a line;
            ``skip`` and ``stop`` look at the norm of its gradients too; ``skip`` leaves no
            gradients, so that ``optimizer.step()`` changes nothing, and ``stop`` raises.
        micro_batch_layout: ``padded``, ``grouped`` or ``packed``; None for padded, or with
            ``micro_batch_tokens="auto"`` what :meth:`AdaptiveLoop.find_bound` finds fastest. Packed
            rows are mappings with ``labels`` and ``tokens`` or ``input_ids``, of which
            :func:`pack_rows` makes the batch in the place of `collate`.
        scale_with_batch: what of the optimizer follows the batch beside the rate: ``{"beta2":
            "half_life", "weight_decay": "per_token"}`` or one of them; None for neither.
        event: function that receives events, as ``event(kind, message, **facts)``, such as a
            :class:`adaptive_batch.report.RunLog`. AdaptiveStep reports changes of what a part
            holds, and compilations; AdaptiveLoop also reports each step with its rows.
        lr_clock: what the schedule of the rate counts: ``samples``, ``tokens`` or ``steps``.

    Raises:
        SettingError: a value cannot be used.
    """

    max_grad_norm: float | None = None
    to_device: Callable[[Any], Any] | None = None
    on_out_of_memory: str = "shrink"
    oom_policy: OOMPolicy | None = None
    sync_gradients_every_micro_batch: bool = True
    overlap_reduction: bool = False
    count_labels_over: str = "rank"
    memory: DeviceMemory | None = None
    on_nonfinite_loss: str = "warn"
    micro_batch_layout: str | None = None
    scale_with_batch: Mapping[str, str] | None = None
    lr_clock: str = "samples"
    event: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        if self.event is not None and not callable(self.event):
            raise SettingError("event", self.event, "give a function, such as RunLog(folder)")
        if self.to_device is not None and not callable(self.to_device):
            raise SettingError("to_device", self.to_device, "give a function of a batch")
        instance_of(OOMPolicy, "oom_policy", self.oom_policy)
        if self.memory is not None and not hasattr(self.memory, "total_bytes"):
            raise SettingError("memory", self.memory, "give a DeviceMemory")
        check_bool("sync_gradients_every_micro_batch", self.sync_gradients_every_micro_batch)
        check_bool("overlap_reduction", self.overlap_reduction)
        check_scaled("scale_with_batch", self.scale_with_batch or {})
        if self.micro_batch_layout is not None:
            check_choice("micro_batch_layout", self.micro_batch_layout, tuple(LAYOUT_KINDS))
        norm = self.max_grad_norm
        is_number = isinstance(norm, int | float) and not isinstance(norm, bool)
        if norm is not None and not (is_number and 0 < norm < math.inf):
            raise SettingError(
                "max_grad_norm", norm, "give a number above 0, or None to clip nothing"
            )
        check_choice("on_out_of_memory", self.on_out_of_memory, ("shrink", "raise"))
        check_choice("count_labels_over", self.count_labels_over, ("rank", "ranks"))
        check_choice("on_nonfinite_loss", self.on_nonfinite_loss, ON_NONFINITE_LOSS)
        check_choice("lr_clock", self.lr_clock, UNITS)

    def report(self, kind: str, message: str, *, prints: bool = True, **facts: Any) -> None:
        """Log an event on rank zero, unless `prints` is False, and pass it to `event`."""
        if prints and distributed.is_rank_zero():
            log.warning("%s", message)
        if self.event is not None:
            self.event(kind, message, prints=False, **facts)

    def report_change(self, change: LimitChange, *, kind: str = "limit", prefix: str = "") -> None:
        """Log a change of a limit, and report it as an event of a kind."""
        text = prefix + change.describe()
        if distributed.is_rank_zero():
            log.log(logging.INFO if change.grows else logging.WARNING, "%s", text)
        self.report(kind, text, prints=False, **change.facts())

    def check_of_step(self) -> None:
        """Refuse what a bare step does not do.

        Raises:
            SettingError: with where it belongs.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _OF_LOOP and value != field.default:
                raise SettingError(
                    field.name, value, f"it is of AdaptiveLoop; {_OF_LOOP[field.name]}"
                )
        layout = self.micro_batch_layout
        if layout is not None and not LAYOUT_KINDS[layout].pads:
            remedy = (
                "a batch that is made cannot be packed; give padded or grouped, or use AdaptiveLoop"
            )
            raise SettingError("micro_batch_layout", layout, remedy)
