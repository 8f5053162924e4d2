"""The configuration keys as frozen dataclasses, and every check that needs no device."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .components import load_increment, nearest
from .errors import SettingError
from .memory import GIB, parse_size

SEARCHES = ("predict", "binary", "halve")

# Keys that the design names and that do not work yet, with the values that already mean what happens without them.
NOT_SUPPORTED_YET: Mapping[str, tuple[object, ...]] = {
    "batch_size_schedule": (),
    "grow_beyond_maximum": (False,),
    "micro_batch_size": (),
    "micro_batch_tokens": (),
    "batch_tokens": (),
    "sample_order": ("dataloader",),
    "sample_window": (),
    "min_rows_per_batch": (),
    "max_rows_per_batch": (),
    "long_rows": (),
    "uniform_micro_batches": (),
    "pad_to_multiple_of": (),
    "lr_scaling": ("none",),
    "reference_batch_size": (),
    "lr_clock": ("samples",),
    "on_out_of_memory": ("raise",),
    "sync_gradients_every_micro_batch": (True,),
    "dataset_val": (),
    "batch_size_val": (),
    "run_val_every_n_steps": (),
    "max_validation_batches": (),
    "save_every_n_steps": (),
    "keep_last_n_checkpoints": (),
    "plan_only": (False,),
}
OURS = ("use_maximum_batch_size", "batch_increase_function", "drop_last", "probe", *NOT_SUPPORTED_YET)

# Keys of torchtune's full fine-tune configs. One that looks like ours is still torchtune's.
TORCHTUNE_KEYS = frozenset(
    [
        "batch_size",
        "checkpointer",
        "clip_grad_norm",
        "collate_fn",
        "compile",
        "cudnn_deterministic_mode",
        "dataset",
        "device",
        "dtype",
        "enable_activation_checkpointing",
        "enable_activation_offloading",
        "epochs",
        "gradient_accumulation_steps",
        "log_every_n_steps",
        "log_peak_memory_stats",
        "loss",
        "lr_scheduler",
        "max_steps_per_epoch",
        "metric_logger",
        "model",
        "optimizer",
        "optimizer_in_bwd",
        "output_dir",
        "profiler",
        "resume_from_checkpoint",
        "seed",
        "shuffle",
        "tokenizer",
    ]
)


@dataclass(frozen=True)
class ProbeSettings:
    """The `probe` block.

    Attributes:
        search: ``predict``, ``binary`` or ``halve``.
        device_memory: what a trial may use: None for what is available, a size such as ``"12GiB"``, or a share of the device.
        headroom: share of that which is left free, in [0, 1).
        sequence_length: ``longest`` (the longest real rows), ``max_seq_len`` (rows as long as the tokenizer cuts them), or a
            number of tokens.
        sequence_lengths: for ``adaptive_probe``: one search for each.
        round_to_power_of_two: train with the power of two at or below the bound.
        maximum: no larger size is tried; where ``halve`` starts.
        cache: use a bound that was found before, after trying it once.
    """

    search: str = "predict"
    device_memory: int | float | str | None = None
    headroom: float = 0.05
    sequence_length: int | str = "longest"
    sequence_lengths: tuple[int | str, ...] = ()
    round_to_power_of_two: bool = True
    maximum: int = 4096
    cache: bool = True

    @classmethod
    def from_config(cls, config: object) -> ProbeSettings:
        """Read and check the block.

        Raises:
            SettingError: an unknown key, or a value that cannot be used.
        """
        if config is None:
            return cls()
        if not isinstance(config, Mapping):
            raise SettingError("probe", config, "give a block of settings, such as probe.search=predict")
        known = [field.name for field in fields(cls)]
        for key in config:
            if key not in known:
                raise SettingError(f"probe.{key}", config[key], f"there is no such key; {nearest(str(key), known)}")
        values = {key: value for key, value in config.items() if value is not None}
        if "sequence_lengths" in values:
            lengths = values["sequence_lengths"]
            if not isinstance(lengths, list | tuple) or not lengths:
                raise SettingError(
                    "probe.sequence_lengths", lengths, "give a list of lengths, such as [512, 1024, 2048]"
                )
            values["sequence_lengths"] = tuple(lengths)
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        if self.search not in SEARCHES:
            raise SettingError("probe.search", self.search, f"give one of {', '.join(SEARCHES)}")
        if self.device_memory is not None:
            try:
                parse_size(self.device_memory, total_bytes=GIB)
            except ValueError as error:
                raise SettingError("probe.device_memory", self.device_memory, str(error)) from None
        _check_share("probe.headroom", self.headroom)
        for length in (self.sequence_length, *self.sequence_lengths):
            key = (
                "probe.sequence_lengths"
                if self.sequence_lengths and length != self.sequence_length
                else "probe.sequence_length"
            )
            if isinstance(length, str):
                if length not in ("longest", "max_seq_len"):
                    raise SettingError(key, length, "give longest, max_seq_len or a number of tokens")
            else:
                _check_whole(key, length)
        _check_bool("probe.round_to_power_of_two", self.round_to_power_of_two)
        _check_whole("probe.maximum", self.maximum)
        _check_bool("probe.cache", self.cache)

    def budget_bytes(self, *, total_bytes: int, available_bytes: int) -> int:
        """What a trial may use on a device that has `total_bytes`, of which `available_bytes` can be had.

        Raises:
            SettingError: more is asked for than the device has.
        """
        limit = available_bytes
        if self.device_memory is not None:
            limit = parse_size(self.device_memory, total_bytes=total_bytes)
            if limit > total_bytes:
                raise SettingError(
                    "probe.device_memory",
                    self.device_memory,
                    f"the device has {total_bytes / GIB:.2f} GiB; give that or less, or null for what is available",
                )
        return int(min(limit, available_bytes) * (1 - self.headroom))


@dataclass(frozen=True)
class Settings:
    """What the batch depends on.

    Attributes:
        batch_size: rows of one micro-batch, as configured.
        gradient_accumulation_steps: micro-batches of one optimizer step.
        epochs: how often the dataset is gone through.
        max_steps_per_epoch: optimizer steps after which an epoch ends; None for none.
        use_maximum_batch_size: set `batch_size` to what the probe finds.
        batch_increase_function: rows to add at the start of each epoch; None for none.
        drop_last: whether the last, short step of an epoch is dropped; follows `adaptive` where the key is absent.
        optimizer_in_bwd: step each parameter inside the backward pass.
        probe: the `probe` block.
    """

    batch_size: int
    gradient_accumulation_steps: int
    epochs: int
    max_steps_per_epoch: int | None
    use_maximum_batch_size: bool
    batch_increase_function: Callable[[int, int], int] | None
    drop_last: bool
    optimizer_in_bwd: bool
    probe: ProbeSettings

    @property
    def adaptive(self) -> bool:
        """Whether any key that changes the batch is on; off means torchtune's own behaviour."""
        return self.use_maximum_batch_size or self.batch_increase_function is not None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Read and check a whole recipe configuration, as plain dicts and lists.

        Raises:
            SettingError: a key that is nearly one of ours, a key that is not supported yet, or a value that cannot be used.
        """
        check_key_names(config)
        if config.get("batch_increase_function") is not None and config.get("batch_size_schedule") is not None:
            raise SettingError(
                "batch_size_schedule",
                config["batch_size_schedule"],
                "batch_increase_function is set too; both say how the batch grows, so remove one",
            )
        for key, harmless in NOT_SUPPORTED_YET.items():
            value = config.get(key)
            if value is not None and not any(type(value) is type(h) and value == h for h in harmless):
                raise SettingError(key, value, "not supported yet; remove it or set it to null")
        use_maximum, in_backward = (
            False if config.get(key) is None else config[key] for key in ("use_maximum_batch_size", "optimizer_in_bwd")
        )
        _check_bool("use_maximum_batch_size", use_maximum)
        _check_bool("optimizer_in_bwd", in_backward)
        function = config.get("batch_increase_function")
        if function is not None:
            function = load_increment(function, key="batch_increase_function")
        drop_last = config.get("drop_last")
        if drop_last is None:
            drop_last = not (use_maximum or function)
        _check_bool("drop_last", drop_last)
        for key in ("batch_size", "gradient_accumulation_steps", "epochs"):
            _check_whole(key, config.get(key))
        max_steps = config.get("max_steps_per_epoch")
        if max_steps is not None:
            _check_whole("max_steps_per_epoch", max_steps)
        settings = cls(
            batch_size=config["batch_size"],
            gradient_accumulation_steps=config["gradient_accumulation_steps"],
            epochs=config["epochs"],
            max_steps_per_epoch=max_steps,
            use_maximum_batch_size=use_maximum,
            batch_increase_function=function,
            drop_last=drop_last,
            optimizer_in_bwd=in_backward,
            probe=ProbeSettings.from_config(config.get("probe")),
        )
        settings._check_together(config)
        return settings

    def _check_together(self, config: Mapping[str, Any]) -> None:
        if self.optimizer_in_bwd and self.gradient_accumulation_steps > 1:
            raise SettingError(
                "gradient_accumulation_steps",
                self.gradient_accumulation_steps,
                "with the optimizer in backward nothing accumulates; set it to 1, or optimizer_in_bwd=False",
            )
        if self.optimizer_in_bwd and config.get("clip_grad_norm") is not None:
            raise SettingError(
                "clip_grad_norm",
                config["clip_grad_norm"],
                "with the optimizer in backward there is never a whole gradient; set it to null, or optimizer_in_bwd=False",
            )
        if "left_pad_sequence" in str(config.get("collate_fn") or ""):
            raise SettingError(
                "collate_fn",
                config["collate_fn"],
                "left padding is for inference; torchtune.data.padded_collate_sft would do",
            )


def check_key_names(config: Mapping[str, Any]) -> None:
    """Refuse a top-level key that is nearly one of ours.

    Raises:
        SettingError: with the key that was probably meant.
    """
    for key in config:
        if key in OURS or key in TORCHTUNE_KEYS:
            continue
        if meant := difflib.get_close_matches(str(key), OURS, n=1, cutoff=0.8):
            raise SettingError(str(key), config[key], f"there is no such key; {meant[0]} is probably meant")


def _check_whole(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(key, value, "give a whole number, 1 or more")


def _check_bool(key: str, value: object) -> None:
    if not isinstance(value, bool):
        raise SettingError(key, value, "give True or False")


def _check_share(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value < 1:
        raise SettingError(key, value, "give a share of at least 0 and below 1, such as 0.05")
