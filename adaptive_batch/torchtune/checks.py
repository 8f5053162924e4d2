"""Checks of a whole configuration before anything loads.

Keys that contradict each other are refused. Keys that are ignored are reported.

A key alone is checked in :mod:`.settings`.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune.modules.peft import get_adapter_params

from adaptive_batch._util import check_bool, check_share, check_whole
from adaptive_batch.data import largest_divisor
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import needs_noise_scale

from .config_errors import as_dict, check_block, component_of, computing, missing, plainly
from .keys import fields_of, load_function, values_of
from .names import unread

if TYPE_CHECKING:
    from .settings import Settings

# The value of `resume_from_checkpoint` for jobs that are started again by the same command.
AUTO = "auto"
# The second is `auto` where the first alone is given.
TOKEN_KEYS = ("batch_tokens", "micro_batch_tokens")
_SPLIT = ("uniform_micro_batches", "grow_beyond_maximum")
_BLOCKS = ("model", "tokenizer", "dataset", "loss", "optimizer")
TO_PLAN = ("device", "dtype", *_BLOCKS)
TO_TRAIN = (*TO_PLAN, "seed", "output_dir")
# Keys of torchtune that our recipes read as truth values: any text would count as True.
_SWITCHES = (
    "shuffle",
    "compile",
    "enable_activation_checkpointing",
    "enable_activation_offloading",
    "log_peak_memory_stats",
    "low_cpu_ram",
    "save_adapter_weights_only",
    "dataset.packed",
    "dataset_val.packed",
)
_PATHS = (
    "checkpointer.checkpoint_dir",
    "checkpointer.output_dir",
    "checkpointer.recipe_checkpoint",
    "checkpointer.adapter_checkpoint",
)
# Arguments for which torchtune's components accept values outside their range: they train something
# else, or fail after the weights are loaded.
_WHOLE = ("tokenizer.max_seq_len", "model.lora_rank")
_POSITIVE = ("lora_alpha", "norm_eps")
_SHARES = ("model.lora_dropout", "model.attn_dropout", "loss.label_smoothing")
# Classes of the logits that a loss is tried with.
_CLASSES = 8
# Annotations of arguments that are truth values.
_BOOLS = (bool, bool | None, "bool", "bool | None", "Optional[bool]")
# Optimizers whose kernels want the parameters on the device.
_NEEDS_THE_DEVICE = ("bitsandbytes.", "torchao.optim.CPUOffloadOptimizer")


# --- what full fine-tuning needs


def complete(cfg: DictConfig, *, needs: Iterable[str]) -> None:
    """Fill in torchtune's defaults, in place, and refuse a configuration that lacks a needed key.

    Raises:
        SettingError: a key of `needs` is missing, refers to one that is, or holds what it cannot.
    """
    try:
        plain = as_dict(cfg)
    except OmegaConfBaseException as error:
        raise plainly(error) or error from error
    # torchtune's configurations for its distributed recipe do without this key.
    if "compile" not in cfg:
        OmegaConf.update(cfg, "compile", False, force_add=True)
    for key in needs:
        if key not in cfg:
            raise missing(key)
        if key in _BLOCKS:
            check_block(key, plain[key], several=key == "dataset")


def check_loss(loss_fn: Any, cfg: DictConfig) -> None:
    """Refuse a loss without `ignore_index`: it is not a next-token loss."""
    if not isinstance(getattr(loss_fn, "ignore_index", None), int):
        remedy = (
            "not a next-token loss: it has no ignore_index (preferences are trained on by `tune run"
            " adaptive_dpo`, and rewards are not); give"
            " torchtune.modules.loss.CEWithChunkedOutputLoss or torch.nn.CrossEntropyLoss"
        )
        raise SettingError("loss", component_of(cfg.loss), remedy)
    _check_loss_computes(loss_fn, cfg)


def takes_chunks(loss_fn: Any) -> bool:
    """Return whether a loss takes logits in chunks."""
    return type(loss_fn).__name__ == "CEWithChunkedOutputLoss"


def _check_loss_computes(loss_fn: Any, cfg: DictConfig) -> None:
    """Refuse arguments for which torch's loss fails, or is not the mean cross-entropy of labels."""
    # User-defined losses may take other inputs.
    if not type(loss_fn).__module__.startswith(("torch.nn.", "torchtune.")):
        return
    label = 1 if loss_fn.ignore_index != 1 else 2
    with computing("loss", cfg.loss):
        if takes_chunks(loss_fn):
            num_labels = loss_fn.num_output_chunks
            logits = [torch.zeros(1, 1, _CLASSES)] * num_labels
            loss = loss_fn(logits, torch.full((1, num_labels), label))
        else:
            loss = loss_fn(torch.zeros(2, _CLASSES), torch.full((2,), label))
    expected = math.log(_CLASSES)
    if loss.dim() or not math.isclose(loss, expected, rel_tol=1e-4):
        remedy = (
            f"equal logits of {_CLASSES} classes give {loss.tolist()}, and their mean cross-entropy"
            f" is {expected:.4g}; give torch.nn.CrossEntropyLoss with reduction=mean"
        )
        raise SettingError("loss", as_dict(cfg.loss), remedy)


def check_chunks(model: torch.nn.Module, loss_fn: Any, cfg: DictConfig) -> None:
    """Refuse a loss of chunks for a model that does not return them."""
    if takes_chunks(loss_fn) and not hasattr(model, "set_num_output_chunks"):
        remedy = (
            f"{component_of(cfg.model)} has no set_num_output_chunks, by which it would return"
            " chunks; give torch.nn.CrossEntropyLoss"
        )
        raise SettingError("loss", component_of(cfg.loss), remedy)


def check_all_is_trained(model: torch.nn.Module, cfg: DictConfig) -> None:
    """Refuse a model with adapters, and a file of adapters."""
    if get_adapter_params(model):
        remedy = (
            "this recipe trains every weight; train adapters with `tune run"
            " adaptive_lora_finetune`, or give a model without adapters"
        )
        raise SettingError("model", component_of(cfg.model), remedy)
    adapters = cfg.get("checkpointer", {}).get("adapter_checkpoint", None)
    if adapters is not None:
        remedy = (
            "this recipe trains every weight; train adapters with `tune run"
            " adaptive_lora_finetune`, or remove it"
        )
        raise SettingError("checkpointer.adapter_checkpoint", str(adapters), remedy)


# Keys that torchtune saves with adapters, each with an example.
_SAVED_WITH_ADAPTERS = {
    "lora_rank": "give a whole number, such as 8",
    "lora_alpha": "give a number, such as 16",
    "lora_attn_modules": "give a list, such as [q_proj,v_proj]",
    "apply_lora_to_mlp": "give True or False",
}


def has_tensor_parallelism(cfg: DictConfig) -> bool:
    """Return whether several ranks share the tensors of one model."""
    return int(cfg.get("tensor_parallel_dim", 1) or 1) > 1


def check_adapters_train(model: torch.nn.Module, cfg: DictConfig) -> None:
    """Refuse a model without adapters or with others than its block names, and a block that lacks a
    key that torchtune saves.
    """
    component = component_of(cfg.model)
    if not get_adapter_params(model):
        remedy = (
            "it has no adapters; `tune run adaptive_full_finetune` trains every weight, or give a"
            " model with adapters"
        )
        raise SettingError(
            "model", component, f"{remedy}, such as torchtune.models.llama3_2.lora_llama3_2_1b"
        )
    for key, remedy in _SAVED_WITH_ADAPTERS.items():
        if key not in cfg.model:
            raise SettingError(
                f"model.{key}", None, f"it is missing, and is saved with adapters; {remedy}"
            )
    _check_adapters_are_made(model, cfg.model)
    if has_tensor_parallelism(cfg):
        remedy = (
            "adapters are not divided by tensor parallelism; give 1, and ranks divide the model by"
            " FSDP"
        )
        raise SettingError("tensor_parallel_dim", cfg.tensor_parallel_dim, remedy)


def _check_adapters_are_made(model: torch.nn.Module, block: DictConfig) -> None:
    """Refuse a key of adapters that the model's builder ignores."""
    adapters = {
        name: module for name, module in model.named_modules() if hasattr(module, "adapter_params")
    }
    kinds = {name.rpartition(".")[2] for name in adapters}
    made = {
        "apply_lora_to_mlp": any("mlp" in name.split(".") for name in adapters),
        "apply_lora_to_output": "output" in kinds,
        "use_dora": any(hasattr(module, "magnitude") for module in adapters.values()),
        "lora_dropout": any(
            isinstance(getattr(module, "dropout", None), torch.nn.Dropout)
            for module in adapters.values()
        ),
        "quantize_base": any(
            getattr(module, "_quantize_base", False) for module in adapters.values()
        ),
    }
    unmade = [key for key, is_made in made.items() if block.get(key) and not is_made]
    for name in block.lora_attn_modules:
        if name not in kinds:
            unmade.append("lora_attn_modules")
    for key in unmade:
        remedy = (
            f"{component_of(block)} adds no such adapters to the model (it has adapters of"
            f" {', '.join(sorted(kinds))}); give names of these, or remove it"
        )
        raise SettingError(f"model.{key}", block[key], remedy)


def check_output_dir(given: Any, *, key: str = "output_dir") -> Path:
    """Return a folder of the configuration; make it, and refuse one that cannot be written to."""
    if not isinstance(given, str | Path) or not str(given):
        raise SettingError(key, given, "give a folder of yours")
    folder = Path(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            key, str(folder), f"it cannot be made ({error}); give a folder of yours"
        ) from None
    if not os.access(folder, os.W_OK):
        raise SettingError(key, str(folder), "it cannot be written to; give a folder of yours")
    return folder


def check_parallel(cfg: DictConfig, *, world_size: int) -> int:
    """Refuse keys for several ranks that cannot be used; return the ranks of one model copy."""
    optimizer = cfg.get("optimizer", None)
    # An optimizer that is no block is refused elsewhere.
    if not isinstance(optimizer, DictConfig):
        optimizer = DictConfig({})
    several = world_size > 1
    component = str(optimizer.get("_component_", ""))
    dim = 1
    if cfg.get("tensor_parallel_dim", None) is not None:
        dim = check_whole("tensor_parallel_dim", cfg.get("tensor_parallel_dim"))
    for key in ("fsdp_cpu_offload", "fsdp_reshard_after_forward"):
        if cfg.get(key, None) is not None:
            check_bool(key, cfg.get(key))
    offloads = several and cfg.get("fsdp_cpu_offload", False)
    _refuse(
        cfg,
        (world_size % dim, "tensor_parallel_dim", f"it must divide the {world_size} ranks"),
        (
            dim > 1 and cfg.get("tensor_parallel_plan", None) is None,
            "tensor_parallel_plan",
            (
                "tensor parallelism needs a plan, such as"
                " tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan"
            ),
        ),
        (
            offloads and str(cfg.device).startswith("cpu"),
            "fsdp_cpu_offload",
            "device is cpu, where all lies on the host; set it to False",
        ),
        (
            offloads and component.startswith(_NEEDS_THE_DEVICE),
            "fsdp_cpu_offload",
            (
                f"{component} cannot step parameters that lie on the host; set it to False, or take"
                " torch.optim.AdamW with fused=True"
            ),
        ),
    )
    # Fused kernels take no tensors of tensor parallelism, and that of SGD none of FSDP.
    if optimizer.get("fused", False) and (dim > 1 or (several and component == "torch.optim.SGD")):
        raise SettingError(
            "optimizer.fused",
            True,
            f"{component} cannot step divided parameters so; set it to False",
        )
    return dim


# --- keys that contradict each other


def _refuse(config: Mapping[str, Any] | DictConfig, *checks: tuple[object, str, str]) -> None:
    """Raise the first of (whether it is wrong, key, remedy) that is wrong."""
    for wrong, key, remedy in checks:
        if wrong:
            raise SettingError(key, config.get(key), remedy)


def check_together(settings: Settings, config: Mapping[str, Any]) -> None:
    """Refuse keys that contradict each other, naming one of them, with what to change."""
    _check_values(config)
    _check_components(settings, config)
    _check_rows(settings, config)
    _check_layout(settings, config)
    _check_schedules(settings, config)
    if settings.validation.is_on:
        check_block("dataset_val", settings.validation.dataset_val, several=True)
    if settings.optimizer_in_bwd:
        _check_optimizer_in_backward(settings, config)
    if settings.measures_noise:
        _check_noise(settings, config)


def _check_values(config: Mapping[str, Any]) -> None:
    """Refuse values of torchtune's keys that train something else, or fail after weights load."""
    for name in ("lr_scheduler", "checkpointer", "metric_logger", "tensor_parallel_plan"):
        if config.get(name) is not None:
            check_block(name, config[name])
    for keys, check in (
        (_SWITCHES, check_bool),
        (_WHOLE, check_whole),
        (_SHARES, check_share),
        (_PATHS, _check_path),
        (
            ("lr_scheduler.num_warmup_steps",),
            partial(check_whole, least=0, remedy="give a whole number, 0 or more"),
        ),
        (("resume_from_checkpoint",), _check_resume),
        (("tokenizer.merges_file",), _check_merges),
    ):
        for key in keys:
            for value in values_at(config, key):
                check(key, value)
    model = config.get("model")
    for name in _POSITIVE:
        # Null fails as late as text does.
        if isinstance(model, Mapping) and name in model:
            _check_positive(f"model.{name}", model[name])
    for key in ("checkpointer.checkpoint_dir", "checkpointer.output_dir"):
        if config.get("checkpointer") is not None and not values_at(config, key):
            _check_path(key, None)
    for name, value in config.items():
        for block in value if isinstance(value, list) else [value]:
            if isinstance(block, Mapping) and "_component_" in block:
                _check_switches(name, block)


def _check_switches(key: str, block: Mapping[str, Any]) -> None:
    """Refuse text or a number for a bool argument of a component, which would count as True."""
    try:
        component = load_function(block["_component_"], key=key)
        parameters = inspect.signature(component).parameters
    except (SettingError, TypeError, ValueError):
        # The component is built later, and its error names the block.
        return
    for name, value in block.items():
        parameter = parameters.get(name)
        if parameter is None or value is None:
            continue
        if isinstance(parameter.default, bool) or parameter.annotation in _BOOLS:
            check_bool(f"{key}.{name}", value)


def _check_components(settings: Settings, config: Mapping[str, Any]) -> None:
    """Refuse a device, a dtype, recomputation, collation or validation that cannot be used."""
    all_layers = config.get("enable_activation_checkpointing")
    device = config.get("device")
    # torchtune takes CUDA where there is one and none is named.
    on_cuda = torch.cuda.is_available() if device is None else str(device).startswith("cuda")
    option = str(config.get("ac_option"))
    _refuse(
        config,
        (
            config.get("cudnn_deterministic_mode")
            not in (None, "default", "warn", "error", 0, 1, 2),
            "cudnn_deterministic_mode",
            "give default, warn or error, or null",
        ),
        (
            not isinstance(config.get("profiler"), Mapping | None),
            "profiler",
            "give a block, such as {enabled: True}",
        ),
        (
            str(config.get("dtype")) in ("fp16", "float16"),
            "dtype",
            "fp16 needs gradient scaling; use bf16 or fp32",
        ),
        (
            config.get("enable_activation_offloading") and not (on_cuda and all_layers),
            "enable_activation_offloading",
            "it needs device=cuda and enable_activation_checkpointing=True; set it to False",
        ),
        (
            settings.ac_mode in ("full", "selective") and all_layers,
            "ac_mode",
            "enable_activation_checkpointing is True too, for all layers; remove one",
        ),
        (
            settings.ac_mode == "selective" and not (option.isdigit() and int(option) > 0),
            "ac_option",
            "give a whole number: of so many layers, the activations of one are recomputed",
        ),
        (
            settings.validation.is_on and settings.validation.dataset_val is None,
            "run_val_every_n_steps",
            "there is nothing to validate on; set dataset_val to a dataset block",
        ),
    )


def _check_rows(settings: Settings, config: Mapping[str, Any]) -> None:
    """Refuse two keys that both set the rows of a step or of a micro-batch."""
    size = settings.micro_batch.micro_batch_size
    most_rows = settings.sampling.max_rows_per_batch
    finding_key = "batch_increase_function"
    if settings.use_maximum_batch_size:
        finding_key = "use_maximum_batch_size"
    _refuse(
        config,
        (
            size is not None and settings.micro_batch.micro_batch_tokens is not None,
            "micro_batch_tokens",
            f"micro_batch_size={size} is set too; both set what is run at once, so remove one",
        ),
        (
            settings.batch_tokens and settings.batch_changes,
            "batch_tokens",
            (
                f"a step holds tokens, and {finding_key} sets its rows; remove one (batch_tokens"
                " alone finds what fits, too)"
            ),
        ),
        (
            most_rows is not None and settings.sampling.min_rows_per_batch > most_rows,
            "min_rows_per_batch",
            f"max_rows_per_batch is {most_rows}; give that or less",
        ),
    )


def _check_layout(settings: Settings, config: Mapping[str, Any]) -> None:
    """Refuse equal micro-batches of one row each, and rows that cannot lie as configured."""
    s = settings
    size = settings.micro_batch.micro_batch_size
    step_rows = settings.step_rows
    # Only where each step has the same rows is it known before training how they divide.
    rows_alike = s.uniform_micro_batches in ("rows", "both") and not s.step_varies
    one_by_one = False
    if isinstance(size, int) and 1 < size < step_rows:
        one_by_one = largest_divisor(step_rows, at_most=size) == 1
    packs = not s.layout_kind.pads
    reason = why_unpacked(config)
    _refuse(
        config,
        (
            rows_alike and one_by_one,
            "uniform_micro_batches",
            (
                f"the {step_rows} rows of a step divide into equal micro-batches of up to {size}"
                " only one by one; change batch_size or micro_batch_size so that one divides the"
                " other"
            ),
        ),
        (
            not s.layout_kind.is_usual and s.uniform_micro_batches,
            "micro_batch_layout",
            f"uniform_micro_batches={s.uniform_micro_batches} needs padded rows; remove one",
        ),
        (
            packs and s.pad_to_multiple_of > 1,
            "micro_batch_layout",
            (
                f"packed rows have no padding, and pad_to_multiple_of is {s.pad_to_multiple_of};"
                " remove one"
            ),
        ),
        (packs and reason, "micro_batch_layout", f"{reason}; give grouped"),
        (
            s.activation_memory_budget < 1 and not config.get("compile"),
            "activation_memory_budget",
            "what a compiled part keeps is chosen as it is compiled; set compile to True, or give"
            " enable_activation_checkpointing=True instead",
        ),
    )


def _check_schedules(settings: Settings, config: Mapping[str, Any]) -> None:
    """Refuse keys that a schedule of the batch or of the rate cannot be used with."""
    rule = settings.batch_size_schedule
    clock = settings.rate.lr_clock
    scheduler = config.get("lr_scheduler")
    warmup = None
    if isinstance(scheduler, Mapping):
        warmup = scheduler.get("num_warmup_steps")
    has_two_units = clock.warmup != clock.decay and scheduler is not None
    _refuse(
        config,
        (
            rule is not None and settings.gradient_accumulation_steps > 1,
            "gradient_accumulation_steps",
            (
                "batch_size_schedule gives the rows of a whole step, and its micro-batches follow"
                " from what fits; set it to 1"
            ),
        ),
        (
            has_two_units and warmup is None,
            "lr_clock",
            (
                "a warm-up in another unit needs a scheduler with num_warmup_steps, such as"
                " torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup; give one unit"
                " for both"
            ),
        ),
    )


def why_unpacked(config: Mapping[str, Any] | DictConfig) -> str:
    """Return why the rows of a micro-batch cannot be packed as configured; empty where they can."""
    checks = (
        (config.get("collate_fn"), "collate_fn makes batches of its own"),
        (
            int(config.get("tensor_parallel_dim", 1) or 1) > 1,
            "tensor_parallel_dim divides attention among ranks",
        ),
        (
            any(values_at(config, "dataset.packed")),
            "dataset.packed is True: its rows are packed already",
        ),
    )
    return next((reason for applies, reason in checks if applies), "")


def values_at(config: Mapping[str, Any] | DictConfig, key: str) -> list[Any]:
    """Return the values of a key that are set; of a dotted one, in a block or a list of blocks."""
    name, _, inner = key.partition(".")
    value = config.get(name)
    values = [value]
    if inner:
        blocks = value if isinstance(value, list | ListConfig) else [value]
        values = [block.get(inner) for block in blocks if isinstance(block, Mapping)]
    return [value for value in values if value is not None]


def _check_positive(key: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        raise SettingError(key, value, "give a number above 0")


def _check_path(key: str, value: object) -> None:
    if not isinstance(value, str):
        raise SettingError(key, value, "give a path")


def _check_merges(key: str, value: object) -> None:
    # Any file can be read as merges, and the tokens would be others.
    if not isinstance(value, str) or value.endswith(".json"):
        raise SettingError(key, value, "merges are lines of text; give merges.txt")


def _check_resume(key: str, value: object) -> None:
    if isinstance(value, bool) or value == AUTO:
        return
    if not isinstance(value, str) or not Path(value).is_dir():
        remedy = "give True, False, auto, or a checkpoint's folder such as OUTPUT_DIR/step_100"
        raise SettingError(key, value, remedy)


def _check_optimizer_in_backward(settings: Settings, config: Mapping[str, Any]) -> None:
    """Refuse keys that need several micro-batches in a step, or a whole gradient."""
    s = settings
    size = settings.micro_batch.micro_batch_size
    is_split = isinstance(size, int) and (size < s.batch_size or s.batch_changes or s.grows)
    noise_key = "log_gradient_noise_scale" if s.log_gradient_noise_scale else "batch_size_schedule"
    stepped = "each micro-batch is stepped as it comes, so a step is one"
    failed = "a step that failed has changed some weights already, and cannot be run again"
    checks: tuple[tuple[object, str, str], ...] = (
        (
            s.gradient_accumulation_steps > 1,
            "gradient_accumulation_steps",
            f"{stepped}; set it to 1",
        ),
        (
            s.clip_grad_norm is not None,
            "clip_grad_norm",
            "there is never a whole gradient; set it to null",
        ),
        (s.on_out_of_memory == "shrink", "on_out_of_memory", f"{failed}; give raise"),
        (
            s.on_nonfinite_loss == "skip",
            "on_nonfinite_loss",
            "a step has changed the weights before its loss is known; give stop",
        ),
        (s.measures_noise, noise_key, "there is no gradient left to measure; remove it"),
        *((config.get(key), key, f"{stepped}; remove it") for key in (*TOKEN_KEYS, *_SPLIT)),
        (s.layout_kind.sorts, "micro_batch_layout", f"{stepped}; remove it"),
        (is_split, "micro_batch_size", f"{stepped}; remove it"),
    )
    for wrong, key, reason in checks:
        remedy = f"with the optimizer in backward {reason}, or set optimizer_in_bwd=False"
        _refuse(config, (wrong, key, remedy))


# --- without effect


def without_effect(settings: Settings, cfg: Mapping[str, Any] | DictConfig) -> dict[str, str]:
    """Return a message for each key that is set and ignored: keys that nothing reads, keys that
    need another key, and keys that another key replaces.
    """
    config = as_dict(cfg)
    reasons = [*_without_what_they_need(settings, config), *_overruled(settings, config)]
    return not_read(settings, cfg) | {
        key: f"{key} has no effect: {reason}" for key, reason in reasons
    }


def not_read(settings: Settings, cfg: Mapping[str, Any] | DictConfig) -> dict[str, str]:
    """Return a message for each key that nothing reads."""
    names = unread(type(settings), cfg)
    return {name: f"{name} has no effect: nothing reads it" for name in names}


def _without_what_they_need(
    settings: Settings, config: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield our keys that are set without any of the keys that they modify."""
    values = values_of(settings)
    for name, key_field in fields_of(type(settings)).items():
        needs = key_field.metadata["key"].needs
        if not needs or config.get(name) in (None, False, key_field.default):
            continue
        # A need of the form key=value asks for that value.
        pairs = [need.partition("=") for need in needs]
        if not any(values[key] == value if value else config.get(key) for key, _, value in pairs):
            yield name, f"it needs {' or '.join(needs)}"


def _overruled(settings: Settings, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys that another key replaces, so that training differs from what they ask for."""
    # Without a reference of its own, the rate's rule still reads how often is accumulated.
    is_read_by_rate = settings.rate.lr_scaling != "none" and not settings.rate.reference_batch_size
    accumulates = settings.gradient_accumulation_steps > 1
    if settings.batch_tokens and accumulates and not is_read_by_rate:
        yield "gradient_accumulation_steps", "batch_tokens sets what a step holds"
    order = settings.sampling.sample_order
    if order != "dataloader" and config.get("shuffle") is False:
        yield "shuffle", f"sample_order={order} sets the order of rows"
    if settings.batch_size_schedule is not None and settings.use_maximum_batch_size:
        yield "use_maximum_batch_size", "batch_size_schedule sets the rows of a step"


def _check_noise(settings: Settings, config: Mapping[str, Any]) -> None:
    """Refuse to measure the gradient noise scale where no micro-batch is a random part of a step: a
    schedule that follows the scale would stay at its start.
    """
    size = settings.micro_batch.micro_batch_size
    rule = settings.batch_size_schedule
    rows: int | None = settings.step_rows
    if rule is not None:
        # A rule that follows the noise scale stays at its start until there is a measurement.
        rows = getattr(rule, "start", None) if needs_noise_scale(rule) else None
    whole_steps = (
        size is None
        and settings.gradient_accumulation_steps == 1
        and not settings.grow_beyond_maximum
    )
    stays = not settings.batch_changes
    holds_step = stays and isinstance(size, int) and isinstance(rows, int) and size >= rows
    key = "log_gradient_noise_scale" if settings.log_gradient_noise_scale else "batch_size_schedule"
    reasons = (
        (
            settings.batch_tokens,
            "batch_tokens begins a step with the row that the step before had no room for, often a"
            " long one; use batch_size",
        ),
        (
            settings.micro_batch.micro_batch_tokens is not None,
            "micro_batch_tokens cuts micro-batches by length; use micro_batch_size",
        ),
        (
            settings.layout_kind.sorts,
            f"micro_batch_layout={settings.micro_batch_layout} sorts rows by length; use padded or"
            " packed",
        ),
        (
            settings.uniform_micro_batches in ("lengths", "both"),
            f"uniform_micro_batches={settings.uniform_micro_batches} sorts rows; use rows",
        ),
        (
            settings.sampling.sample_order == "seqlen",
            "sample_order=seqlen sorts rows by length; use random",
        ),
        (
            int(config.get("tensor_parallel_dim") or 1) > 1,
            "tensor parallelism keeps no gradient of a micro-batch; set tensor_parallel_dim to 1",
        ),
        (
            whole_steps or holds_step,
            "a step is one micro-batch, and it takes two; set micro_batch_size to fewer rows than a"
            " step has",
        ),
    )
    for applies, reason in reasons:
        if applies:
            raise SettingError(
                key, config[key], f"the gradient noise scale cannot be measured: {reason}"
            )
