"""The names of configuration keys, and how a value is read or refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from adaptive_batch._util import check_bool, check_whole
from adaptive_batch.errors import SettingError

OURS = (
    "use_maximum_batch_size",
    "batch_increase_function",
    "batch_size_schedule",
    "grow_beyond_maximum",
    "plan_only",
    "micro_batch_size",
    "micro_batch_tokens",
    "batch_tokens",
    "sample_order",
    "sample_window",
    "min_rows_per_batch",
    "max_rows_per_batch",
    "long_rows",
    "uniform_micro_batches",
    "pad_to_multiple_of",
    "drop_last",
    "lr_scaling",
    "reference_batch_size",
    "lr_clock",
    "log_gradient_noise_scale",
    "on_out_of_memory",
    "dataset_val",
    "batch_size_val",
    "run_val_every_n_steps",
    "max_validation_batches",
    "save_every_n_steps",
    "keep_last_n_checkpoints",
    "resume_allow_changes",
    "sync_gradients_every_micro_batch",
    "probe",
    "estimate",
)

# Keys of torchtune's full fine-tune configs. One that looks like ours is still torchtune's.
TORCHTUNE_KEYS = frozenset(
    [
        "ac_mode",
        "ac_option",
        "batch_size",
        "checkpointer",
        "clip_grad_norm",
        "collate_fn",
        "compile",
        "cudnn_deterministic_mode",
        "custom_sharded_layers",
        "dataset",
        "device",
        "dtype",
        "enable_activation_checkpointing",
        "enable_activation_offloading",
        "enable_async_checkpointing",
        "epochs",
        "fsdp_cpu_offload",
        "fsdp_reshard_after_forward",
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
        "tensor_parallel_dim",
        "tensor_parallel_plan",
        "tokenizer",
    ]
)


def check_key_names(config: Mapping[str, Any]) -> None:
    """Refuse a top-level key that is nearly one of ours.

    Raises:
        SettingError: with the key that was probably meant.
    """
    for key in config:
        if key in OURS or key in TORCHTUNE_KEYS:
            continue
        # 0.77 sees lr_scaling in lr_scale, and leaves train_batch_size (0.75 of micro_batch_size) to its owner
        if meant := difflib.get_close_matches(str(key), OURS, n=1, cutoff=0.77):
            raise SettingError(str(key), config[key], f"there is no such key; {meant[0]} is probably meant")


def switch(config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """The value of a key that is True or False."""
    value = config.get(key)
    return default if value is None else check_bool(key, value)


def choice(config: Mapping[str, Any], key: str, options: Sequence[str], *, default: str) -> str:
    """The value of a key that is one of some words."""
    value = config.get(key)
    if value is None:
        return default
    if value not in options:
        raise SettingError(key, value, f"give one of {', '.join(options)}")
    return str(value)


def whole(config: Mapping[str, Any], key: str) -> int | None:
    """The value of a key that is a whole number, 1 or more."""
    value = config.get(key)
    return None if value is None else check_whole(key, value)


def auto_or_whole(config: Mapping[str, Any], key: str) -> int | str | None:
    """The value of a key that is ``auto`` or a whole number, 1 or more."""
    value = config.get(key)
    if value is None:
        return None
    if value == "auto":
        return "auto"
    return check_whole(key, value, remedy="give auto, or a whole number, 1 or more")
