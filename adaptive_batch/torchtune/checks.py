"""Checks of a whole configuration before anything loads.

Keys that contradict each other are refused. Keys that are ignored are reported. The range of a
single key is checked in :mod:`.settings`.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from adaptive_batch._util import check_bool, check_share, check_whole
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import needs_noise_scale

from .configuration import (
    as_dict,
    check_block,
    fields_of,
    load_function,
    missing,
    unread,
    values_of,
)

if TYPE_CHECKING:
    from .settings import Settings

# The value of `resume_from_checkpoint` for jobs that are started again by the same command.
AUTO = "auto"
_BLOCKS = ("model", "tokenizer", "dataset", "loss", "optimizer")
_OPTIONAL_BLOCKS = (
    *("lr_scheduler", "checkpointer", "metric_logger", "tensor_parallel_plan", "dataset_val"),
)
TO_PLAN = ("device", "dtype", *_BLOCKS)
TO_TRAIN = (*TO_PLAN, "seed", "shuffle", "output_dir")
# Annotations of arguments that are truth values.
_BOOLS = (bool, bool | None, "bool", "bool | None", "Optional[bool]")
# Optimizers whose kernels need the parameters on the device.
_NEEDS_THE_DEVICE = ("bitsandbytes.", "torchao.optim.CPUOffloadOptimizer")


# --- values of torchtune's keys that would train something else, or fail after the weights load


def _check_positive(key: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        raise SettingError(key, value, "give a number above 0")


def _check_rate(key: str, value: Any) -> None:
    # A rate of 0 trains nothing, as in torchtune.
    if value != 0 or isinstance(value, bool):
        _check_positive(key, value)


def _check_merges(key: str, value: object) -> None:
    # Any file can be read as merges, and gives other tokens.
    if not isinstance(value, str) or value.endswith(".json"):
        raise SettingError(key, value, "merges are lines of text; give merges.txt")


def _refuse_adapters(key: str, value: object) -> None:
    remedy = (
        "a run resumes from its own adapters by resume_from_checkpoint, and a new one begins with"
        " new adapters; give checkpoint_dir an epoch's folder, whose weights have its adapters"
        " merged, and remove this"
    )
    raise SettingError(key, value, remedy)


_check_warmup = partial(check_whole, least=0, remedy="give a whole number, 0 or more")
_VALUES: tuple[tuple[str, Callable[[str, Any], object]], ...] = (
    ("compile", check_bool),
    ("enable_activation_checkpointing", check_bool),
    ("enable_activation_offloading", check_bool),
    ("log_peak_memory_stats", check_bool),
    ("low_cpu_ram", check_bool),
    ("save_adapter_weights_only", check_bool),
    ("fsdp_cpu_offload", check_bool),
    ("fsdp_reshard_after_forward", check_bool),
    ("tensor_parallel_dim", check_whole),
    ("dataset.packed", check_bool),
    ("dataset_val.packed", check_bool),
    ("model.attn_dropout", check_share),
    ("model.lora_dropout", check_share),
    ("loss.label_smoothing", check_share),
    ("tokenizer.max_seq_len", check_whole),
    ("tokenizer.merges_file", _check_merges),
    ("model.lora_rank", check_whole),
    ("model.lora_alpha", _check_positive),
    ("model.norm_eps", _check_positive),
    ("ac_option", check_whole),
    ("optimizer.lr", _check_rate),
    ("lr_scheduler.num_warmup_steps", _check_warmup),
    ("checkpointer.adapter_checkpoint", _refuse_adapters),
)


def _check_values(config: Mapping[str, Any]) -> None:
    """Raise SettingError for a value that is invalid whatever the other keys are."""
    for name in _OPTIONAL_BLOCKS:
        if config.get(name) is not None:
            check_block(name, config[name], several=name == "dataset_val")
    for key, check in _VALUES:
        for value in values_at(config, key):
            check(key, value)
    for name, value in config.items():
        _check_colons(name, value)
        # `dataset` and `dataset_val` may be lists of blocks.
        for block in value if isinstance(value, list) else [value]:
            if isinstance(block, Mapping) and "_component_" in block:
                _check_bool_arguments(name, block)


def _check_colons(key: str, value: Any) -> None:
    """Raise SettingError for ``{input:text}``, which YAML reads as a key ``input:text`` with null:
    ``input`` would keep its former value.
    """
    if isinstance(value, list):
        for item in value:
            _check_colons(key, item)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if item is None and ":" in str(name):
                raise SettingError(key, name, "it has no value; put a space after the colon")
            _check_colons(f"{key}.{name}", item)


def _check_bool_arguments(key: str, block: Mapping[str, Any]) -> None:
    """Raise SettingError for text or a number as a bool argument of a component: Python would
    take even "False" as True.
    """
    try:
        component = load_function(block["_component_"], key=key)
        parameters = inspect.signature(component).parameters
    except (SettingError, TypeError, ValueError):
        # Building the component raises a better error later, which names the block.
        return
    for name, parameter in parameters.items():
        is_bool = isinstance(parameter.default, bool) or parameter.annotation in _BOOLS
        if is_bool and block.get(name) is not None:
            check_bool(f"{key}.{name}", block[name])


def values_at(config: Mapping[str, Any] | DictConfig, key: str) -> list[Any]:
    """Return the values of a key, without null.

    Args:
        config: configuration.
        key: top-level key, or a dotted one such as ``dataset.packed``. If the first part holds a
            list of blocks, each may have a value.
    """
    name, _, inner_key = key.partition(".")
    values = [config.get(name)]
    if inner_key:
        blocks = values[0] if isinstance(values[0], list | ListConfig) else values
        values = [block.get(inner_key) for block in blocks if isinstance(block, Mapping)]
    return [value for value in values if value is not None]


# --- keys that contradict each other: (refused key, predicate of settings and config, fix). The fix
# may format the settings as `s`.

_Rule = tuple[str, Callable[["Settings", Mapping[str, Any]], object], str]


_RULES: tuple[_Rule, ...] = (
    (
        "seed",
        lambda s, c: not 0 <= s.seed < 2**32,
        "give a whole number, 0 to 4294967295, or null",
    ),
    (
        "cudnn_deterministic_mode",
        lambda s, c: (
            c.get("cudnn_deterministic_mode") not in (None, "default", "warn", "error", 0, 1, 2)
        ),
        "give default, warn or error, or null",
    ),
    (
        "profiler",
        lambda s, c: not isinstance(c.get("profiler"), Mapping | None),
        "give a block, such as {{enabled: True}}",
    ),
    (
        "dtype",
        lambda s, c: str(c.get("dtype")) in ("fp16", "float16"),
        "fp16 needs gradient scaling; use bf16 or fp32",
    ),
    (
        "enable_activation_offloading",
        lambda s, c: (
            c.get("enable_activation_offloading")
            and not (
                # torchtune takes CUDA where there is one and no device is named.
                (c.get("device") or torch.cuda.is_available())
                and str(c.get("device") or "cuda").startswith("cuda")
                and c.get("enable_activation_checkpointing")
            )
        ),
        "it needs device=cuda and enable_activation_checkpointing=True; set it to False",
    ),
    (
        "ac_mode",
        lambda s, c: (
            s.ac_mode in ("full", "selective") and c.get("enable_activation_checkpointing")
        ),
        "enable_activation_checkpointing is True too, for all layers; remove one",
    ),
    (
        "ac_option",
        lambda s, c: s.ac_mode == "selective" and c.get("ac_option") is None,
        "give a whole number n: the activations of every n-th layer are recomputed",
    ),
    (
        "probe.trial_seconds",
        # Null would mean the default.
        lambda s, c: (c.get("probe") or {}).get("trial_seconds", 1) is None,
        "a trial always has a limit; give a whole number of seconds",
    ),
    (
        "run_val_every_n_steps",
        lambda s, c: s.validates and s.dataset_val is None,
        "there is nothing to validate on; set dataset_val to a dataset block",
    ),
    (
        "micro_batch_tokens",
        lambda s, c: s.micro_batch_size and s.micro_batch_tokens,
        "micro_batch_size={s.micro_batch_size} is set too; remove one",
    ),
    (
        "batch_tokens",
        lambda s, c: s.batch_tokens and s.batch_changes,
        "use_maximum_batch_size and batch_increase_function set the rows of a step; remove them"
        " (batch_tokens alone finds what fits, too)",
    ),
    (
        "uniform_micro_batches",
        lambda s, c: (
            s.uniform_micro_batches in ("rows", "both")
            and not (s.batch_changes or s.grows or s.batch_tokens)
            and isinstance(s.micro_batch_size, int)
            and 1 < s.micro_batch_size < s.step_rows
            and all(s.step_rows % rows for rows in range(2, s.micro_batch_size + 1))
        ),
        "the {s.step_rows} rows of a step divide into equal micro-batches of up to"
        " {s.micro_batch_size} only one by one; change batch_size or"
        " micro_batch_size so that one divides the other",
    ),
    (
        "micro_batch_layout",
        lambda s, c: s.layout_kind != "padded" and s.uniform_micro_batches,
        "uniform_micro_batches={s.uniform_micro_batches} needs padded rows; remove one",
    ),
    (
        "micro_batch_layout",
        lambda s, c: s.layout_kind == "packed" and s.pad_to_multiple_of > 1,
        "packed rows have no padding, and pad_to_multiple_of is {s.pad_to_multiple_of}; remove one",
    ),
    (
        "activation_memory_budget",
        lambda s, c: s.activation_memory_budget < 1 and not c.get("compile"),
        "only compiled parts have a budget; set compile to True, or give"
        " enable_activation_checkpointing=True instead",
    ),
    (
        "gradient_accumulation_steps",
        lambda s, c: s.batch_size_schedule is not None and s.gradient_accumulation_steps > 1,
        "batch_size_schedule gives the rows of a whole step; set it to 1",
    ),
)

_STEPPED = "each micro-batch is stepped as it comes, so a step is one; remove it"
_IN_BACKWARD: tuple[_Rule, ...] = (
    (
        "gradient_accumulation_steps",
        lambda s, c: s.gradient_accumulation_steps > 1,
        "each micro-batch is stepped as it comes; set it to 1",
    ),
    (
        "clip_grad_norm",
        lambda s, c: s.clip_grad_norm is not None,
        "there is never a whole gradient; set it to null",
    ),
    (
        "on_out_of_memory",
        lambda s, c: s.on_out_of_memory == "shrink",
        "a step that failed has changed some weights, and cannot be run again; give raise",
    ),
    (
        "on_nonfinite_loss",
        lambda s, c: s.on_nonfinite_loss == "skip",
        "a step has changed the weights before its loss is known; give stop",
    ),
    (
        "log_gradient_noise_scale",
        lambda s, c: s.log_gradient_noise_scale,
        "no gradient is left to measure; remove it",
    ),
    (
        "batch_size_schedule",
        lambda s, c: s.measures_noise,
        "no gradient is left to measure; remove it",
    ),
    ("batch_tokens", lambda s, c: s.batch_tokens, _STEPPED),
    ("micro_batch_tokens", lambda s, c: s.micro_batch_tokens, _STEPPED),
    ("uniform_micro_batches", lambda s, c: s.uniform_micro_batches, _STEPPED),
    ("grow_beyond_maximum", lambda s, c: s.grow_beyond_maximum, _STEPPED),
    ("micro_batch_layout", lambda s, c: s.layout_kind == "grouped", _STEPPED),
    (
        "micro_batch_size",
        lambda s, c: (
            isinstance(s.micro_batch_size, int)
            and (s.micro_batch_size < s.batch_size or s.batch_changes or s.grows)
        ),
        _STEPPED,
    ),
)


def _is_one_micro_batch(s: Settings) -> bool:
    """Return whether every step is known to run as one micro-batch, so that the noise scale, which
    compares a micro-batch with its step, is never measured.
    """
    size = s.micro_batch_size
    if size is None:
        # A step is divided only by these keys.
        return s.gradient_accumulation_steps == 1 and not s.grow_beyond_maximum
    if needs_noise_scale(s.batch_size_schedule):
        # The schedule stays at its start until there is a measurement.
        step_rows = s.batch_size_schedule.start  # type: ignore[union-attr]
    elif s.batch_changes or s.batch_size_schedule is not None:
        # Later steps may be larger than a micro-batch.
        return False
    else:
        step_rows = s.step_rows
    return isinstance(size, int) and size >= step_rows


# The noise scale needs a micro-batch that is a random part of its step. Without one, it would never
# be measured, and a schedule that follows it would stay at its start.
_NOISE: tuple[_Rule, ...] = (
    (
        "",
        lambda s, c: s.batch_tokens,
        "batch_tokens begins a step with the row that did not fit in the step before, often a long"
        " one; use batch_size",
    ),
    (
        "",
        lambda s, c: s.micro_batch_tokens is not None,
        "micro_batch_tokens cuts micro-batches by length; use micro_batch_size",
    ),
    (
        "",
        lambda s, c: s.layout_kind == "grouped",
        "micro_batch_layout={s.micro_batch_layout} sorts rows by length; use padded or packed",
    ),
    (
        "",
        lambda s, c: s.uniform_micro_batches in ("lengths", "both"),
        "uniform_micro_batches={s.uniform_micro_batches} sorts rows; use rows",
    ),
    (
        "",
        lambda s, c: s.sample_order == "seqlen",
        "sample_order=seqlen sorts rows by length; use random",
    ),
    (
        "",
        lambda s, c: s.sample_order == "dataloader" and not s.shuffle,
        "rows are in the order of the dataset; set shuffle=True",
    ),
    (
        "",
        lambda s, c: has_tensor_parallelism(c),
        "tensor parallelism keeps no gradient of a micro-batch; set tensor_parallel_dim to 1",
    ),
    (
        "",
        lambda s, c: _is_one_micro_batch(s),
        "a step is one micro-batch, and it takes two; set micro_batch_size to fewer rows than a"
        " step has",
    ),
)


def check_together(settings: Settings, config: Mapping[str, Any]) -> None:
    """Raise SettingError for keys that contradict each other; it names one of them and the fix."""
    _check_values(config)
    settings.check_together()
    _refuse(_RULES, settings, config)
    if settings.optimizer_in_bwd:
        sentence = "with the optimizer in backward {}, or set optimizer_in_bwd=False"
        _refuse(_IN_BACKWARD, settings, config, sentence)
    if settings.measures_noise:
        is_logged = settings.log_gradient_noise_scale
        key = "log_gradient_noise_scale" if is_logged else "batch_size_schedule"
        sentence = "the gradient noise scale cannot be measured: {}"
        _refuse(_NOISE, settings, config, sentence, key=key)


def _refuse(
    rules: Sequence[_Rule],
    settings: Settings,
    config: Mapping[str, Any],
    sentence: str = "{}",
    *,
    key: str = "",
) -> None:
    """Raise SettingError for the first rule that applies.

    Args:
        rules, settings, config: rules and their arguments.
        sentence: message with ``{}`` for the fix of the rule.
        key: refused key; empty for the key of the rule.
    """
    for key_of_rule, applies, fix in rules:
        if applies(settings, config):
            refused_key = key or key_of_rule
            remedy = sentence.format(fix.format(s=settings))
            raise SettingError(refused_key, config.get(refused_key), remedy)


def has_tensor_parallelism(config: Mapping[str, Any] | DictConfig) -> bool:
    """Return whether several ranks share the tensors of one model."""
    return int(config.get("tensor_parallel_dim") or 1) > 1


# --- what a recipe needs


def complete(cfg: DictConfig, *, needs: Iterable[str]) -> None:
    """Check that keys are set, and set `compile` to torchtune's default if it is missing, in place.

    Raises:
        SettingError: a key of `needs` is missing, refers to a missing key, or is not a block.
    """
    plain = as_dict(cfg)
    # The configs of torchtune's distributed recipes lack it.
    if "compile" not in cfg:
        OmegaConf.update(cfg, "compile", False, force_add=True)
    for key in needs:
        if key not in cfg:
            raise missing(key)
        if key in _BLOCKS:
            check_block(key, plain[key], several=key == "dataset")


def check_output_dir(given: Any, *, key: str = "output_dir") -> Path:
    """Return a folder of the configuration; make it if it is missing.

    Raises:
        SettingError: it cannot be made or written to, or its name is empty.
    """
    try:
        folder = Path(given)
        folder.mkdir(parents=True, exist_ok=True)
        # An empty name would mean the current folder.
        if not str(given) or not os.access(folder, os.W_OK):
            raise OSError("it cannot be written to")
    except (OSError, TypeError) as error:
        raise SettingError(key, given, f"give a folder of yours ({error})") from None
    return folder


def check_parallel(cfg: DictConfig, *, world_size: int) -> int:
    """Return the number of ranks that share one copy of the model by tensor parallelism.

    Raises:
        SettingError: a key for several ranks cannot be used.
    """
    # Ranks call this function before _check_values(), which checks this key in a single process.
    for value in values_at(cfg, "tensor_parallel_dim"):
        check_whole("tensor_parallel_dim", value)
    optimizer = str(OmegaConf.select(cfg, "optimizer._component_") or "")
    tp_size = int(cfg.get("tensor_parallel_dim") or 1)
    is_sharded = world_size > 1
    offloads = is_sharded and cfg.get("fsdp_cpu_offload", False)
    for applies, key, remedy in (
        (world_size % tp_size, "tensor_parallel_dim", f"it must divide the {world_size} ranks"),
        (
            tp_size > 1 and cfg.get("tensor_parallel_plan", None) is None,
            "tensor_parallel_plan",
            "tensor parallelism needs a plan, such as"
            " tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan",
        ),
        (
            offloads and str(cfg.device).startswith("cpu"),
            "fsdp_cpu_offload",
            "device is cpu, where all lies on the host; set it to False",
        ),
        (
            offloads and optimizer.startswith(_NEEDS_THE_DEVICE),
            "fsdp_cpu_offload",
            f"{optimizer} cannot step parameters on the host; set it to False, or give"
            " torch.optim.AdamW with fused=True",
        ),
        (
            # Fused kernels reject tensors of tensor parallelism; SGD's rejects those of FSDP, too.
            any(values_at(cfg, "optimizer.fused"))
            and (tp_size > 1 or (is_sharded and optimizer == "torch.optim.SGD")),
            "optimizer.fused",
            f"{optimizer} cannot step divided parameters so; set it to False",
        ),
    ):
        if applies:
            raise SettingError(key, OmegaConf.select(cfg, key), remedy)
    return tp_size


# --- without effect

# Keys that another key replaces: (key, predicate of settings and config, reason)
_REPLACED: tuple[_Rule, ...] = (
    (
        "gradient_accumulation_steps",
        # The rate's reference is computed from it, unless one is configured.
        lambda s, c: (
            s.batch_tokens
            and s.gradient_accumulation_steps > 1
            and (s.lr_scaling == "none" or s.reference_batch_size)
        ),
        "batch_tokens sets what a step holds",
    ),
    (
        "shuffle",
        lambda s, c: s.sample_order != "dataloader" and c.get("shuffle") is False,
        "sample_order sets the order of rows",
    ),
    (
        "use_maximum_batch_size",
        lambda s, c: s.batch_size_schedule is not None and s.use_maximum_batch_size,
        "batch_size_schedule sets the rows of a step",
    ),
)


def without_effect(settings: Settings, cfg: Mapping[str, Any] | DictConfig) -> dict[str, str]:
    """Return a message for each key that is set and ignored: nothing reads it, it needs another
    key, or another key replaces it.
    """
    config = as_dict(cfg)
    values = values_of(settings)

    def is_met(need: str) -> Any:
        # `key=value` needs that value, `key` alone any value but null, 0 and False.
        key, _, value = need.partition("=")
        return values[key] == value if value else config.get(key)

    reasons = dict.fromkeys(unread(type(settings), cfg), "nothing reads it")
    for name, key_field in fields_of(type(settings)).items():
        needs = key_field.metadata["option"].needs
        is_set = config.get(name) not in (None, False, key_field.default)
        if is_set and needs and not any(map(is_met, needs)):
            reasons[name] = f"it needs {' or '.join(needs)}"
    for name, applies, reason in _REPLACED:
        if applies(settings, config):
            reasons[name] = reason
    return {name: f"{name} has no effect: {reason}" for name, reason in reasons.items()}
