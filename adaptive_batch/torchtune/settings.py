"""All configuration keys of ours: name, type, default, range, effect on resuming, documentation.

``python docs/tools/keys.py`` writes the tables of docs/configuration.md from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from omegaconf import DictConfig

from adaptive_batch._util import auto_or_whole, check_headroom, check_whole, one_of, option
from adaptive_batch.data import LAYOUT_KINDS, UNIFORM, Batching
from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import parse_devices
from adaptive_batch.memory import check_device_memory, parse_size
from adaptive_batch.schedules import (
    RULES,
    UNITS,
    ReferenceBatch,
    Schedule,
    needs_noise_scale,
    parse_reference,
    parse_scaled_options,
    rate_rule,
)
from adaptive_batch.training import ON_NONFINITE_LOSS, ProbeOptions

from .checks import check_together
from .configuration import (
    TORCHTUNE_KEYS,
    as_dict,
    block,
    check_names,
    function,
    keys_of,
    read_keys,
    table,
)


def fraction(name: str, value: Any) -> None:
    """Raise SettingError if a value is not a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise SettingError(name, value, "give a number from 0 to 1, such as 0.5")


def _length(name: str, value: Any) -> None:
    if not isinstance(value, str):
        check_whole(name, value)
    elif value not in ("longest", "max_seq_len"):
        raise SettingError(name, value, "give longest, max_seq_len or a number of tokens")


def _lengths(name: str, value: Any) -> tuple[int | str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise SettingError(name, value, "give a list of lengths, such as [512, 1024, 2048]")
    for length in value:
        _length(name, length)
    return tuple(dict.fromkeys(value))


def _context(name: str, value: Any) -> int:
    if isinstance(value, str):
        check_device_memory(name, value)
        return parse_size(value, total_bytes=0)
    remedy = 'give a size such as "600MiB", or a whole number of bytes'
    return check_whole(name, value, least=0, remedy=remedy)


def _headroom(name: str, value: Any) -> None:
    # A size as in `device_memory`; otherwise `auto`, or a share such as 0.05 or 0.
    is_size = value != "auto" and isinstance(value, int | str) and value != 0
    check = check_device_memory if is_size else check_headroom
    check(name, value)


def _devices(name: str, value: Any) -> None:
    parse_devices(value)


def _validation_batches(name: str, value: Any) -> None:
    if value != -1:
        check_whole(name, value)


def _norm(name: str, value: Any) -> float:
    with suppress(TypeError, ValueError):
        # torchtune's recipes accept "inf".
        if not isinstance(value, bool) and float(value) > 0:
            return float(value)
    raise SettingError(name, value, "give a norm above 0, such as 1.0, or null")


def _names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise SettingError(name, value, "give a list of names, such as [dataset] or [output]")
    return tuple(value)


@dataclass(frozen=True)
class ProbeSettings(ProbeOptions):
    """The `probe` block.

    Attributes:
        sequence_length: length of the rows in trials: `longest` for the longest rows of the
            dataset, `max_seq_len` for the limit of the tokenizer, or a number of tokens, at least
            the length of the longest row.
        sequence_lengths: list of lengths for `adaptive_probe`, which searches once for each length.
            Replaces `probe.sequence_length`.
        trial_seconds: maximum duration of a trial in seconds. A size that would take longer is not
            tried.
        assumed_maximum: maximum batch size that `preview` assumes, because `preview` does not
            search.
        cache: whether to reuse results in `{output_dir}/adaptive_batch/probe.json` from runs with
            the same settings and versions. A reused maximum is tried once.
    """

    sequence_length: int | str = option("longest", _length)
    sequence_lengths: tuple[int | str, ...] = option((), _lengths, shown="none")
    round_to_power_of_two: bool = option(True)
    trial_seconds: float | None = option(60, check_whole)
    assumed_maximum: int | None = option(None, check_whole)
    cache: bool = option(True)
    memory_key: str = "probe.device_memory"


@dataclass(frozen=True)
class EstimateSettings:
    """The `estimate` block, for ``adaptive_estimate``.

    Attributes:
        devices: devices to estimate for: a size such as `80GiB`, a name such as `H100`, or a list
            of these.
        sequence_lengths: list of row lengths, each in the form of `probe.sequence_length`. None:
            only the length in `probe.sequence_length`.
        world_size: number of ranks that shard the model.
        changes: whether to also estimate the effect of single changes to the configuration.
        headroom: memory that stays free: a size such as `2GiB`, a number of bytes, or a fraction
            such as `0.05`. `auto`: as for `probe.headroom`.
        context: memory of the CUDA context and libraries outside of the allocator: a number of
            bytes, or a size such as `600MiB`. None: 770 MiB for an H100 or H200, 500 MiB otherwise.
    """

    devices: object = option(None, _devices)
    sequence_lengths: tuple[int | str, ...] = option((), _lengths, shown="null")
    world_size: int = option(1, partial(check_whole, most=10**5))
    changes: bool = option(True)
    headroom: int | float | str = option("auto", _headroom)
    context: int | None = option(None, _context)


@dataclass(frozen=True, kw_only=True)
class Settings(Batching):
    """The top-level keys: each field is the key of its name, which :meth:`from_config` reads. Keys
    without documentation are torchtune's, with torchtune's meaning.

    Attributes:
        use_maximum_batch_size: whether to search for the largest batch that fits in memory, and
            train with it. The batch is limited to the number of rows in an epoch. See
            `probe.round_to_power_of_two`.
        batch_increase_function: function `f(epoch, batch_size) -> int` that returns the rows to add
            to `batch_size` at the start of each epoch, not the new size. Give the dotted path of
            the function, or a block with `_component_` that builds it. See
            [below](#growth-functions).
        batch_size_schedule: function `rule(progress) -> int` that returns the number of rows in a
            step on one device. With `batch_tokens`, it returns the number of real tokens instead.
            See [below](#batch-size-schedules).
        preview: whether to print the training plan and stop before weights load.
        micro_batch_size: maximum number of rows in a micro-batch. `auto`: found by a search (see
            `probe.objective`). None: `batch_size`.
        micro_batch_tokens: maximum number of tokens in a micro-batch, including padding. This limit
            must be at least the length of the longest row. `auto`: found by a search. None: no
            limit in tokens. With a limit, the rows of a step are grouped by length. Not supported
            for rows with images.
        reference_micro_batch_size: number of pairs in a micro-batch of the DPO reference. With this
            key, the reference runs before the step. `auto`: as many tokens as fit. None: the
            reference runs within each micro-batch of training. See [preference
            pairs](torchtune.md#micro-batches-of-the-reference).
        micro_batch_layout: `padded`, `grouped` or `packed`. None: with `auto`, the fastest layout;
            otherwise `padded`. See [below](#micro-batch-layouts).
        uniform_micro_batches: property that is the same in all micro-batches of a step: `rows`,
            `lengths` or `both`. Useful for pipelines and compiled graphs.
        pad_to_multiple_of: padded lengths are rounded up to a multiple of this number. This reduces
            the number of shapes to compile.
        fused_rms_norm: whether to run torchtune's `RMSNorm` as one operation without float32
            copies. Results differ only by rounding.
        activation_memory_budget: fraction of the activations, from 0 to 1, that compiled code keeps
            for backward. The rest is recomputed. Needs `compile: True`.
        on_out_of_memory: `shrink`: repeat the step with smaller micro-batches, and try the former
            limit again later. `raise`: end the run. With the optimizer in backward, the default is
            `raise`.
        on_nonfinite_loss: handling of a step whose loss is NaN or infinite. `warn`: log the step.
            `skip`: leave weights and optimizer unchanged. `stop`: end the run. See
            [below](#a-loss-that-is-not-finite).
        sync_gradients_every_micro_batch: whether several ranks reduce gradients after each
            micro-batch. `False`: reduce gradients only after the last micro-batch, which sends less
            data but needs more memory.
        lr_scaling: factor by which the learning rate is multiplied. `linear`: the global batch of
            the step / `reference_batch_size`. `sqrt`: the square root of this ratio.
        reference_batch_size: global batch for which `lr` was chosen: a number of rows, or a number
            of tokens such as `8192tok`. Default: the configured `batch_size` x
            `gradient_accumulation_steps` x ranks.
        scale_with_batch: other optimizer settings that follow the batch: `{beta2: half_life}`,
            `{weight_decay: per_token}` or both. See [below](#what-follows-the-batch).
        lr_clock: unit in which `lr_scheduler` measures the progress of training: `samples`,
            `tokens` or `steps`. See [below](#the-learning-rates-clock).
        dataset_val: dataset block for validation, or a list of such blocks.
        run_val_every_n_steps: number of optimizer steps between two validations. Each validation
            logs `val_loss`.
        batch_size_val: number of rows in a validation batch.
        max_validation_batches: maximum number of batches in a validation. None or -1: all.
        drop_last: whether to drop the short step at the end of an epoch. See
            [below](#defaults-that-depend-on-the-keys).
        log_gradient_noise_scale: whether to measure and log the gradient noise scale. Needs
            `micro_batch_size`, a random order of rows and at least two micro-batches in a step.
        save_every_n_steps: number of optimizer steps between two resume points. A resume point is a
            checkpoint of the whole training state.
        keep_last_n_checkpoints: number of resume points to keep, including those that are saved
            after epochs. None: all, or only the newest if `save_every_n_steps` is not set. The
            weights of epochs are never deleted.
        enable_async_checkpointing: whether training continues while a resume point is written.
        keep_final_state: whether to save a resume point after the last epoch, so that the run can
            continue if you raise `epochs`. `False`: save only weights, as torchtune does.
        overwrite_output_dir: whether a new run may start in an `output_dir` with checkpoints of
            other runs. These checkpoints are deleted after the first save of the new run.
        resume_allow_changes: list of keys that may differ from the checkpoint, such as `[dataset]`.
        verbose: whether to print the resolved configuration and torchtune's log.
        probe: options of the search for the largest batch; see below.
        estimate: options of the estimate for other devices; see below.
    """

    use_maximum_batch_size: bool = option(False, resume="report")
    gradient_accumulation_steps: int = option(read=check_whole)
    # Limited, as each is previewed.
    epochs: int = option(read=partial(check_whole, most=10**6))
    log_every_n_steps: int | None = option(None, check_whole)
    optimizer_in_bwd: bool = option(False)
    clip_grad_norm: float | None = option(None, _norm)
    ac_mode: str | None = option(None, one_of("none", "full", "selective"))
    custom_sharded_layers: tuple[str, ...] = option((), _names)
    batch_increase_function: Callable[[int, int], int] | None = option(
        None, function, resume="refuse"
    )
    batch_size_schedule: Schedule | None = option(None, function, resume="refuse", fills_steps=True)
    preview: bool = option(False)
    micro_batch_size: int | str | None = option(None, auto_or_whole, resume="report")
    micro_batch_tokens: int | str | None = option(None, auto_or_whole, resume="report")
    reference_micro_batch_size: int | str | None = option(None, auto_or_whole, resume="report")
    micro_batch_layout: str | None = option(None, one_of(*LAYOUT_KINDS), resume="report")
    uniform_micro_batches: str | None = option(
        None, one_of(*UNIFORM), resume="report", fills_steps=True
    )
    pad_to_multiple_of: int = option(1, check_whole, shown="null", resume="report")
    fused_rms_norm: bool = option(False, resume="report")
    activation_memory_budget: float = option(1.0, fraction, resume="report")
    on_out_of_memory: str = option("shrink", one_of("shrink", "raise"))
    on_nonfinite_loss: str = option("warn", one_of(*ON_NONFINITE_LOSS), resume="report")
    sync_gradients_every_micro_batch: bool = option(True)
    lr_scaling: str = option("none", one_of(*RULES), resume="report")
    reference_batch_size: ReferenceBatch | None = option(
        None,
        parse_reference,
        shown="configured",
        resume="report",
        needs=("lr_scaling=linear", "lr_scaling=sqrt", "scale_with_batch"),
    )
    scale_with_batch: Mapping[str, str] | None = option(None, parse_scaled_options, resume="report")
    lr_clock: str = option("samples", one_of(*UNITS), resume="refuse", needs=("lr_scheduler",))
    # check_together checks the blocks.
    dataset_val: Any = option(None, lambda name, value: None, needs=("run_val_every_n_steps",))
    run_val_every_n_steps: int | None = option(None, check_whole)
    batch_size_val: int | None = option(
        None, check_whole, shown="`batch_size`", needs=("run_val_every_n_steps",)
    )
    max_validation_batches: int | None = option(
        None, _validation_batches, needs=("run_val_every_n_steps",)
    )
    drop_last: bool = option(True, shown="see below", resume="report")
    log_gradient_noise_scale: bool = option(False)
    save_every_n_steps: int | None = option(None, check_whole)
    keep_last_n_checkpoints: int | None = option(None, check_whole, needs=("save_every_n_steps",))
    enable_async_checkpointing: bool = option(False, needs=("save_every_n_steps",))
    keep_final_state: bool = option(True)
    overwrite_output_dir: bool = option(False)
    resume_allow_changes: tuple[str, ...] = option(
        (), _names, shown="none", needs=("resume_from_checkpoint",)
    )
    verbose: bool = option(False)
    probe: ProbeSettings = option(ProbeSettings(), block(ProbeSettings), shown="block")
    estimate: EstimateSettings = option(EstimateSettings(), block(EstimateSettings), shown="block")

    def __post_init__(self) -> None:
        """Check nothing: :meth:`from_config` has checked each key as it was typed."""

    @property
    def batch_changes(self) -> bool:
        """True if a search or a growth function changes `batch_size`."""
        return self.use_maximum_batch_size or self.batch_increase_function is not None

    @property
    def grows(self) -> bool:
        """True if a rule changes the batch during training."""
        return self.batch_increase_function is not None or self.batch_size_schedule is not None

    @property
    def measures_noise(self) -> bool:
        """True if the gradient noise scale is measured."""
        return self.log_gradient_noise_scale or needs_noise_scale(self.batch_size_schedule)

    @property
    def layout_kind(self) -> str:
        """Layout of a micro-batch, unless ``auto`` chooses another."""
        return self.micro_batch_layout or "padded"

    @property
    def micro_batch_limit(self) -> int | str | None:
        """Configured size of a micro-batch, in rows or in tokens: a number, ``auto`` or None."""
        return self.micro_batch_size or self.micro_batch_tokens

    # --- validation

    @property
    def validates(self) -> bool:
        """True if training validates."""
        return self.run_val_every_n_steps is not None

    @property
    def validation_batch_size(self) -> int:
        """Rows of a batch of validation."""
        return self.batch_size_val or self.batch_size

    def validated_rows(self, rows: int, *, ranks: int) -> int:
        """Return the number of rows of a dataset that are validated on: the first ones.

        Args:
            rows: rows of the dataset.
            ranks: ranks that run a batch each at a time.
        """
        # As in torchtune, -1 means all rows, like null.
        if self.max_validation_batches in (None, -1):
            return rows
        return min(rows, self.max_validation_batches * self.validation_batch_size * ranks)

    # --- searches before training

    @property
    def searches_training(self) -> bool:
        """True if training needs the maximum batch size."""
        # A growing batch needs the maximum as its end. If it may grow beyond that, its steps are
        # split by the maximum, unless the size of a micro-batch is a number.
        has_number = isinstance(self.micro_batch_limit, int)
        growth_needs_it = self.grows and not (self.grow_beyond_maximum and has_number)
        return self.use_maximum_batch_size or self.micro_batch_limit == "auto" or growth_needs_it

    @property
    def searches(self) -> bool:
        """True if training or a reference needs a search for what fits."""
        return self.searches_training or self.reference_micro_batch_size == "auto"

    @property
    def chooses_fastest(self) -> bool:
        """True if a search chooses the fastest micro-batches, not the largest."""
        # With the optimizer in backward, a step is one micro-batch, so there is no choice.
        is_timed = self.probe.times_micro_batches and not self.optimizer_in_bwd
        return self.micro_batch_limit == "auto" and is_timed

    @property
    def whole_step_rows(self) -> int | None:
        """Rows of each step on one device, if ``auto`` searches for the micro-batch: more need not
        be tried. None without ``auto``, or if steps have different numbers of rows.
        """
        step_varies = self.use_maximum_batch_size or self.grows or self.batch_tokens is not None
        if step_varies or self.micro_batch_limit != "auto":
            return None
        return self.step_rows

    @property
    def splits_steps(self) -> bool:
        """True if a step has several micro-batches even if it fits at once."""
        return (
            isinstance(self.micro_batch_limit, int)
            or self.batch_tokens is not None
            or self.layout_kind == "grouped"
            or self.chooses_fastest
            or (self.grows and self.grow_beyond_maximum)
            or (self.gradient_accumulation_steps > 1 and self.whole_step_rows is None)
        )

    @property
    def adaptive(self) -> bool:
        """True if a key changes batches or how they run; torchtune's recipe has none."""
        return (
            self.use_maximum_batch_size
            or self.grows
            or self.sample_order != "dataloader"
            or self.pad_to_multiple_of > 1
            or self.micro_batch_limit is not None
            or self.batch_tokens is not None
            or self.uniform_micro_batches is not None
            or self.layout_kind != "padded"
        )

    @classmethod
    def from_config(cls, given: Mapping[str, Any] | DictConfig) -> Settings:
        """Read and check a whole recipe configuration.

        A given value becomes the field of the same name. The lines below add the defaults that
        depend on other keys.
        """
        config = as_dict(given)
        check_names(cls, given)
        values = read_keys(cls, config)
        # As in torchtune's recipes, null is False.
        values.setdefault("shuffle", False)
        # A step of `batch_tokens` may not fit at once, so let a search find the micro-batches.
        if values.get("batch_tokens") and "micro_batch_size" not in values:
            values.setdefault("micro_batch_tokens", "auto")
        # A step that has changed some weights in backward cannot be repeated.
        if values.get("optimizer_in_bwd"):
            values.setdefault("on_out_of_memory", "raise")
        # Some schedules bring their own rule.
        scaling = values.get("lr_scaling", "none")
        values["lr_scaling"] = rate_rule(values.get("batch_size_schedule"), scaling)
        settings = cls(**values)
        # Without a key of ours, drop the last, short step of an epoch as torchtune's recipes do.
        if "drop_last" not in values:
            settings = replace(settings, drop_last=not settings.adaptive)
        check_together(settings, config)
        return settings


OURS = tuple(name for name in keys_of(Settings) if name not in TORCHTUNE_KEYS)
RESUME: Mapping[str, str] = {
    **{name: key.resume for name, key in keys_of(Settings).items()},
    **TORCHTUNE_KEYS,
}
# Keys that, with `batch_tokens`, decide which rows a step holds.
FILLS_STEPS = tuple(name for name, key in keys_of(Settings).items() if key.fills_steps)


def reference_tables() -> dict[str, str]:
    """Return the tables of docs/configuration.md, by the name in the two markers of each."""

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    refused = listed(name for name in RESUME if RESUME[name] == "refuse")
    row_keys = listed(name for name in RESUME if RESUME[name] == "epoch")
    by_tokens = listed(name for name in FILLS_STEPS if RESUME[name] != "refuse")
    return {
        "keys": table(Settings),
        "probe": table(ProbeSettings, prefix="probe."),
        "estimate": table(EstimateSettings, prefix="estimate."),
        "resume": "\n".join(
            [
                "| difference from the checkpoint | effect |",
                "|---|---|",
                (
                    f"| {refused} | an error with both values, unless the key is in"
                    " `resume_allow_changes` |"
                ),
                f"| within an epoch: {row_keys}; with `batch_tokens`: {by_tokens} | as for the keys"
                " above |",
                "| the class of the optimizer, `optimizer_in_bwd` | an error |",
                (
                    "| settings of the optimizer (except `fused`, `foreach`, `capturable`), `seed`,"
                    " `max_steps_per_epoch` | the checkpoint's value is used; a line is logged |"
                ),
                (
                    "| `optimizer.lr`, `optimizer.weight_decay`, `max_steps_per_epoch`, if"
                    " the key is in `resume_allow_changes` | the new value is used; a line is"
                    " logged |"
                ),
                (
                    "| any other key that affects results, for example `epochs` or `batch_size` |"
                    " the new value is used; a line is logged |"
                ),
            ]
        ),
    }
