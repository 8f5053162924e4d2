"""Refuses, before anything loads, keys that contradict each other; names those without effect. A
key alone is checked in :mod:`.settings`.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune.modules.peft import get_adapter_params

from adaptive_batch._util import check_bool, check_whole, count
from adaptive_batch.data import largest_divisor
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import needs_noise_scale

from .config_errors import as_dict, check_block, missing, plainly
from .keys import keys_of, load_function
from .names import unread

if TYPE_CHECKING:
    from .settings import Settings

TOKEN_KEYS = ("micro_batch_tokens", "batch_tokens")
_SPLIT = ("uniform_micro_batches", "grow_beyond_maximum")
_BLOCKS = ("model", "tokenizer", "dataset", "loss", "optimizer")
TO_PLAN = ("device", "dtype", *_BLOCKS)
TO_TRAIN = (*TO_PLAN, "seed", "output_dir")
_SWITCHES = (
    "shuffle",
    "resume_from_checkpoint",
    "compile",
    "enable_activation_checkpointing",
    "enable_activation_offloading",
    "log_peak_memory_stats",
    "dataset.packed",
    "dataset.train_on_input",
    "dataset_val.packed",
    "dataset_val.train_on_input",
    "profiler.enabled",
)
# Numbers that torchtune's components take for something else when they are none of these, or fail
# on once weights are loaded.
_WHOLE = (
    "tokenizer.max_seq_len",
    *(
        f"model.{name}"
        for name in ("num_layers", "num_heads", "num_kv_heads", "embed_dim", "intermediate_dim")
    ),
    "model.vocab_size",
    "model.max_seq_len",
    "loss.num_output_chunks",
)
# Optimizers whose kernels want the parameters on the device.
_NEEDS_THE_DEVICE = ("bitsandbytes.", "torchao.optim.CPUOffloadOptimizer")


# --- what full fine-tuning needs
# ----------------------------------------------------------------------------------------


def complete(cfg: DictConfig, *, needs: Iterable[str]) -> None:
    """Fill in torchtune's defaults, in place, and refuse a configuration that lacks what training
    needs.

    Raises:
        SettingError: a key of `needs` is missing, refers to one that is, or holds what it cannot.
    """
    try:
        plain = as_dict(cfg)
    except OmegaConfBaseException as error:
        raise plainly(error) or error from error
    if "compile" not in cfg:  # torchtune's distributed recipe does without
        OmegaConf.update(cfg, "compile", False, force_add=True)
    for key in needs:
        if key not in cfg:
            raise missing(key)
        if key in _BLOCKS:
            check_block(key, plain[key], several=key == "dataset")


def check_loss(loss_fn: Any, cfg: DictConfig) -> None:
    """Refuse a loss without `ignore_index`: it is not one of next tokens."""
    if not isinstance(getattr(loss_fn, "ignore_index", None), int):
        remedy = (
            "it has no ignore_index, so it is none of next tokens (preferences and rewards are not"
            " trained on here); give torchtune.modules.loss.CEWithChunkedOutputLoss or"
            " torch.nn.CrossEntropyLoss"
        )
        raise SettingError("loss", _component(cfg.loss), remedy)


def check_all_is_trained(model: torch.nn.Module, cfg: DictConfig) -> None:
    """Refuse a model with adapters (LoRA, DoRA, on quantized weights or not); name the full one
    where its builder is known.
    """
    if get_adapter_params(model):
        component = _component(cfg.model)
        remedy = (
            "every weight is trained here, and adapters by `tune run adaptive_lora_finetune`; run"
            " that, or give the full model"
        )
        raise SettingError("model", component, remedy + _full(component, cfg.model))


def check_adapters_train(model: torch.nn.Module, cfg: DictConfig) -> None:
    """Refuse a model without adapters, or one whose block does not say what torchtune writes down
    of them.
    """
    component = _component(cfg.model)
    if not get_adapter_params(model):
        remedy = (
            "it has no adapters; `tune run adaptive_full_finetune` trains every weight, or give a"
            " model with adapters"
        )
        raise SettingError(
            "model", component, f"{remedy}, such as torchtune.models.llama3_2.lora_llama3_2_1b"
        )
    for key in ("lora_rank", "lora_alpha", "lora_attn_modules", "apply_lora_to_mlp"):
        if key not in cfg.model:
            raise missing(f"model.{key}")
    if int(cfg.get("tensor_parallel_dim", 1) or 1) > 1:
        remedy = (
            "adapters are not divided by tensor parallelism; give 1, and ranks divide the model by"
            " FSDP"
        )
        raise SettingError("tensor_parallel_dim", cfg.tensor_parallel_dim, remedy)


def _full(component: str, block: DictConfig) -> str:
    """Return what to type for the model that one of torchtune's builders puts adapters on; empty
    where it is not known.
    """
    module, _, name = component.rpartition(".")
    full = f"{module}.{re.sub('^q?lora_', '', name)}"
    try:
        takes = (
            inspect.signature(load_function(full, key="model")).parameters
            if full != component
            else None
        )
    except (SettingError, TypeError):
        takes = None
    if takes is None:
        return ""
    removed = [f"~model.{key}" for key in map(str, block) if key not in (*takes, "_component_")]
    return " ".join([f": model={full}", *removed])


def _component(block: Any) -> Any:
    return block.get("_component_") if isinstance(block, Mapping) else block


def check_output_dir(given: Any, *, key: str = "output_dir") -> Path:
    """Return a folder of the configuration; refuse one that cannot be written to, before anything
    is built.
    """
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
    """Refuse what is configured for several ranks and cannot be used; return how many ranks hold
    one copy of the model.
    """
    block = cfg.get("optimizer", None)  # which is refused elsewhere, if it is no block
    block = block if isinstance(block, DictConfig) else DictConfig({})
    several = world_size > 1
    component = str(block.get("_component_", ""))
    dim = cfg.get("tensor_parallel_dim", None)
    dim = 1 if dim is None else check_whole("tensor_parallel_dim", dim)
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
    if block.get("fused", False) and (dim > 1 or (several and component == "torch.optim.SGD")):
        raise SettingError(
            "optimizer.fused",
            True,
            f"{component} cannot step divided parameters so; set it to False",
        )
    return dim


# --- keys that contradict each other
# ------------------------------------------------------------------------------------


def _refuse(config: Mapping[str, Any] | DictConfig, *checks: tuple[object, str, str]) -> None:
    """Raise the first of (whether it is wrong, key, remedy) that is wrong."""
    for wrong, key, remedy in checks:
        if wrong:
            raise SettingError(key, config.get(key), remedy)


def check_together(settings: Settings, config: Mapping[str, Any]) -> None:
    """Refuse keys that contradict each other, naming one of them, with what to change."""
    s = settings
    size = settings.micro_batch_size
    tokens = settings.batch_tokens
    rule = settings.batch_size_schedule
    all_layers = config.get("enable_activation_checkpointing")
    option = str(config.get("ac_option"))
    most = s.step_rows
    finds = "use_maximum_batch_size" if s.use_maximum_batch_size else "batch_increase_function"
    rows_alike = s.uniform_micro_batches in ("rows", "both") and not (
        s.batch_changes or s.grows or tokens
    )
    one_by_one = (
        isinstance(size, int) and 1 < size < most and largest_divisor(most, at_most=size) == 1
    )
    scheduler = config.get("lr_scheduler")
    warmup = scheduler.get("num_warmup_steps") if isinstance(scheduler, Mapping) else None
    two_units = s.lr_clock.warmup != s.lr_clock.decay and config.get("lr_scheduler") is not None
    validates = s.run_val_every_n_steps is not None
    by_rule = rule is not None
    kind = s.micro_batch_layout
    packs = s.micro_batch_layout == "packed"
    for name in ("lr_scheduler", "checkpointer", "metric_logger"):
        if config.get(name) is not None:
            check_block(name, config[name])
    for keys, check in (
        (_SWITCHES, check_bool),
        (_WHOLE, check_whole),
        (("lr_scheduler.num_warmup_steps",), _check_whole_or_zero),
    ):
        for key in keys:
            for value in _values(config, key):
                check(key, value)
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
            config.get("device") == "npu" and config.get("compile"),
            "compile",
            "an NPU does not compile; set it to False",
        ),
        (
            config.get("enable_activation_offloading") and not all_layers,
            "enable_activation_offloading",
            "it needs CUDA and enable_activation_checkpointing=True; set it to False",
        ),
        (
            s.ac_mode in ("full", "selective") and all_layers,
            "ac_mode",
            "enable_activation_checkpointing is True too, for all layers; remove one",
        ),
        (
            s.ac_mode == "selective" and not (option.isdigit() and int(option) > 0),
            "ac_option",
            "give a whole number: of so many layers, the activations of one are recomputed",
        ),
        (
            "left_pad_sequence" in str(config.get("collate_fn")),
            "collate_fn",
            "left padding is for inference; give torchtune.data.padded_collate_sft",
        ),
        (
            validates and s.dataset_val is None,
            "run_val_every_n_steps",
            "there is nothing to validate on; set dataset_val to a dataset block",
        ),
        (
            size is not None and s.micro_batch_tokens is not None,
            "micro_batch_tokens",
            f"micro_batch_size={size} is set too; both set what is run at once, so remove one",
        ),
        (
            tokens and s.batch_changes,
            "batch_tokens",
            (
                f"a step holds tokens, and {finds} sets its rows; remove one (batch_tokens alone"
                " finds what fits, too)"
            ),
        ),
        (
            s.max_rows_per_batch is not None and s.min_rows_per_batch > s.max_rows_per_batch,
            "min_rows_per_batch",
            f"max_rows_per_batch is {s.max_rows_per_batch}; give that or less",
        ),
        (
            rows_alike and one_by_one,
            "uniform_micro_batches",
            (
                f"the {most} rows of a step divide into equal micro-batches of up to {size} only"
                " one by one; change batch_size or micro_batch_size so that one divides the other"
            ),
        ),
        (
            kind not in (None, "padded") and s.uniform_micro_batches,
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
        (
            packs and why_unpacked(config),
            "micro_batch_layout",
            f"{why_unpacked(config)}; give grouped",
        ),
        (
            by_rule and s.gradient_accumulation_steps > 1,
            "gradient_accumulation_steps",
            (
                "batch_size_schedule gives the rows of a whole step, and its micro-batches follow"
                " from what fits; set it to 1"
            ),
        ),
        (
            by_rule and tokens and needs_noise_scale(rule),
            "batch_tokens",
            (
                "the gradient noise scale is counted in rows; remove batch_tokens, or take another"
                " schedule"
            ),
        ),
        (
            two_units and warmup is None,
            "lr_clock",
            (
                "a warm-up in another unit needs a scheduler with num_warmup_steps, such as"
                " torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup; give one unit"
                " for both"
            ),
        ),
    )
    if validates:
        check_block("dataset_val", s.dataset_val, several=True)
    if s.optimizer_in_bwd:
        _check_optimizer_in_backward(s, config)
    if by_rule and needs_noise_scale(rule) and (why := _hides_noise(s)):
        raise SettingError(
            "batch_size_schedule",
            config["batch_size_schedule"],
            f"it follows the gradient noise scale: {why}",
        )


def why_unpacked(config: Mapping[str, Any] | DictConfig) -> str:
    """Return why the rows of a micro-batch cannot be packed as configured; empty where nothing
    speaks against it.
    """
    checks = (
        (config.get("collate_fn"), "collate_fn makes batches of its own"),
        (config.get("compile"), "compile is on, and packed micro-batches are of ever other shapes"),
        (
            int(config.get("tensor_parallel_dim", 1) or 1) > 1,
            "tensor_parallel_dim divides attention among ranks",
        ),
        (
            any(_values(config, "dataset.packed")),
            "dataset.packed is True: its rows are packed already",
        ),
    )
    return next((why for applies, why in checks if applies), "")


def _values(config: Mapping[str, Any] | DictConfig, key: str) -> list[Any]:
    """Return what is given for a key; for a dotted one in a block, or in each of a list of blocks."""
    name, _, inner = key.partition(".")
    given = config.get(name)
    blocks = given if isinstance(given, list) else [given]
    values = (
        [block.get(inner) for block in blocks if isinstance(block, Mapping)] if inner else [given]
    )
    return [value for value in values if value is not None]


def _check_whole_or_zero(key: str, value: object) -> None:
    if value != 0:
        check_whole(key, value, remedy="give a whole number, 0 or more")


def _check_optimizer_in_backward(settings: Settings, config: Mapping[str, Any]) -> None:
    s = settings
    size = settings.micro_batch_size
    less = isinstance(size, int) and (size < s.batch_size or s.batch_changes or s.grows)
    noise_key = "log_gradient_noise_scale" if s.log_gradient_noise_scale else "batch_size_schedule"
    one = "each micro-batch is stepped as it comes, so a step is one"
    failed = "a step that failed has changed some weights already, and cannot be run again"
    checks: tuple[tuple[object, str, str], ...] = (
        (s.gradient_accumulation_steps > 1, "gradient_accumulation_steps", f"{one}; set it to 1"),
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
        *((config.get(key), key, f"{one}; remove it") for key in (*TOKEN_KEYS, *_SPLIT)),
        (s.micro_batch_layout == "grouped", "micro_batch_layout", f"{one}; remove it"),
        (less, "micro_batch_size", f"{one}; remove it"),
    )
    for wrong, key, why in checks:
        remedy = f"with the optimizer in backward {why}, or set optimizer_in_bwd=False"
        _refuse(config, (wrong, key, remedy))


# --- without effect
# -----------------------------------------------------------------------------------------------------

_SEARCH_KEYS = ("search", "cache", "round_to_power_of_two", "trial_timeout")
_ONE_RANK = "it is for several ranks, and this is one (tune run --nproc_per_node N starts more)"


class NoEffect(NamedTuple):
    """Keys that are set and do nothing, and the reason."""

    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key} {'have' if ', ' in self.key else 'has'} no effect: {self.reason}"


def without_effect(
    settings: Settings, cfg: Mapping[str, Any] | DictConfig, *, ranks: int = 1
) -> list[NoEffect]:
    """Return the keys that are set and do nothing in training, each with the reason; those that
    nothing reads are one.
    """
    config = as_dict(cfg)
    found = [*_without_what_they_need(settings, config), *_overruled(settings, config)]
    if ranks == 1:
        found += [
            (name, _ONE_RANK)
            for name in ("fsdp_cpu_offload", "custom_sharded_layers")
            if config.get(name)
        ]
        if not settings.sync_gradients_every_micro_batch:
            found.append(("sync_gradients_every_micro_batch", _ONE_RANK))
    probe = settings.probe
    default = type(settings.probe)()
    if probe != default:
        fits_itself = settings.validation is not None and settings.validation.fits_itself
        if not settings.needs_bound and not fits_itself:
            found.append(("probe", "nothing that needs to know what fits is on"))
        else:
            for_probe = [
                name for name in ("sequence_lengths", "critical_batch") if getattr(probe, name)
            ]
            found += [(f"probe.{name}", "it is for adaptive_probe") for name in for_probe]
    if settings.estimate != type(settings.estimate)():
        found.append(("estimate", "it is for adaptive_estimate"))
    return [*_unread(settings, cfg), *(NoEffect(key, reason) for key, reason in found)]


def without_effect_on(
    recipe: str, settings: Settings, cfg: DictConfig, *, ranks: int = 1
) -> list[NoEffect]:
    """Return the keys that nothing reads, and those of `probe` that do nothing in
    ``adaptive_probe`` or ``adaptive_estimate``.
    """
    probe = settings.probe
    estimate = settings.estimate
    unused = {"assumed_maximum": "it is for preview"}
    if recipe == "adaptive_probe" and probe.critical_batch:
        of_search = (*_SEARCH_KEYS, "sequence_length", "sequence_lengths", "device_memory", "tune")
        unused |= dict.fromkeys(of_search, "probe.critical_batch does not search")
    elif recipe == "adaptive_probe":
        unused |= (
            {"sequence_length": "probe.sequence_lengths gives them"}
            if probe.sequence_lengths
            else {}
        )
        unused |= {"trial_timeout": _ONE_RANK} if ranks == 1 else {}
    else:
        unused |= {"device_memory": "estimate.devices gives it"}
        unused |= dict.fromkeys(
            ("sequence_lengths", "tune", "critical_batch"), "it is for adaptive_probe"
        )
        unused |= (
            {"sequence_length": "estimate.sequence_lengths gives them"}
            if estimate.sequence_lengths
            else {}
        )
        unused |= {"headroom": "estimate.headroom gives it"}
        unused |= dict.fromkeys(
            _SEARCH_KEYS, "an estimate tries nothing, and returns the largest size that fits"
        )
    if not probe.critical_batch:
        names = (f"critical_batch_{name}" for name in ("from", "rows", "tolerance"))
        unused |= dict.fromkeys(names, "it is for probe.critical_batch, which is not set")
    default = type(probe)()
    changed = [key for key in unused if getattr(probe, key) != getattr(default, key)]
    found = [*_unread(settings, cfg), *(NoEffect(f"probe.{key}", unused[key]) for key in changed)]
    if (
        recipe == "adaptive_estimate"
        and cfg.get("device") == "cpu"
        and estimate.context != type(estimate)().context
    ):
        found.append(NoEffect("estimate.context", "device is cpu, which has none"))
    return found


def _unread(settings: Settings, cfg: Mapping[str, Any] | DictConfig) -> list[NoEffect]:
    names = unread(type(settings), cfg)
    pronoun = "it" if len(names) == 1 else "them"
    return [NoEffect(", ".join(names), f"nothing reads {pronoun}")] if names else []


def _without_what_they_need(
    settings: Settings, config: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the keys that are set without the key that they are for."""

    def is_set(need: str) -> bool:  # key=value asks for that value
        name, _, value = need.partition("=")
        return bool(getattr(settings, name) == value if value else config.get(name))

    for prefix, block, given in (
        ("", settings, config),
        ("probe.", settings.probe, config.get("probe") or {}),
    ):
        for name, key in keys_of(type(block)).items():
            does_nothing = given.get(name) in (None, False, getattr(type(block), name, None))
            met = any(is_set(need) or given.get(need.removeprefix(prefix)) for need in key.needs)
            if key.needs and not does_nothing and not met:
                needs = " or ".join(key.needs)
                yield (
                    prefix + name,
                    f"it is for {needs}" + ("" if "=" in needs else ", which is not set"),
                )


def _overruled(settings: Settings, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys whose place another key takes."""
    accumulates = settings.gradient_accumulation_steps > 1
    if (
        settings.batch_tokens
        and accumulates
        and (settings.lr_scaling == "none" or settings.reference_batch_size)
    ):
        yield "gradient_accumulation_steps", "batch_tokens sets what a step holds"
    if settings.sample_order != "dataloader" and config.get("shuffle") is False:
        yield "shuffle", f"sample_order={settings.sample_order} sets the order of rows"
    if settings.batch_size_schedule is not None and settings.use_maximum_batch_size:
        yield "use_maximum_batch_size", "batch_size_schedule sets the rows of a step"
    size = settings.micro_batch_size
    changes = settings.batch_changes or settings.grows or settings.batch_tokens
    if isinstance(size, int) and size > settings.batch_size and not (changes or accumulates):
        yield "micro_batch_size", f"a step has {count(settings.batch_size, 'row')}, fewer than that"
    if settings.log_gradient_noise_scale and (why := _hides_noise(settings)):
        yield "log_gradient_noise_scale", why


def _hides_noise(settings: Settings) -> str:
    """Return why the gradient noise scale is never measured; empty where it may be."""
    size = settings.micro_batch_size
    rule = settings.batch_size_schedule
    rows: int | None = settings.step_rows
    if rule is not None:  # one that follows the noise stays where it starts until there is some
        rows = getattr(rule, "start", None) if needs_noise_scale(rule) else None
    stays = not (settings.batch_changes or settings.batch_tokens)
    whole_steps = (
        size is None
        and settings.gradient_accumulation_steps == 1
        and not settings.grow_beyond_maximum
    )
    by_length = settings.micro_batch_tokens is not None or settings.micro_batch_layout == "grouped"
    if settings.uniform_micro_batches in (
        ("rows", "lengths", "both") if by_length else ("lengths", "both")
    ):
        return (
            "uniform_micro_batches leaves no random part of a step a micro-batch of its own; remove"
            " it, or use micro_batch_size"
        )
    if settings.sample_order == "seqlen":
        return "rows come sorted by length, so a micro-batch is no random part of a step"
    one_each = whole_steps or (
        stays and isinstance(size, int) and isinstance(rows, int) and size >= rows
    )
    if one_each and not by_length:
        return (
            "a step is one micro-batch, and it takes two; set micro_batch_size to fewer rows than a"
            " step has"
        )
    return ""
