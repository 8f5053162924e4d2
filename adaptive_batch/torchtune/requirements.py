"""Refuses, before anything loads, a configuration that lacks what full fine-tuning needs or that belongs to another recipe of torchtune's."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException
from torchtune.config._errors import InstantiationError
from torchtune.modules.peft import get_adapter_params

from adaptive_batch._util import check_bool, check_whole
from adaptive_batch.errors import AdaptiveBatchError, SettingError

from .keys import load_function

# Defaults of torchtune's distributed recipe.
_DEFAULTS = {"compile": False}
_BLOCK = "give a block with _component_, as in torchtune's full fine-tune configs"
_NEEDED = {
    "device": "give cuda or cpu",
    "dtype": "give bf16 or fp32",
    "seed": "give a whole number, or null",
    "output_dir": "give a folder of yours",
    "resume_from_checkpoint": "give False, or True to resume from what was saved last",
    "shuffle": "give True or False",
}
_BLOCKS = ("model", "tokenizer", "dataset", "loss", "optimizer")
TO_PLAN = ("device", "dtype", *_BLOCKS)
TO_TRAIN = (*TO_PLAN, "seed", "output_dir")
_OF_OTHER_RECIPES = {
    "quantizer": "weights are trained as they are here, with nothing quantized (QAT is torchtune's qat_distributed)",
    "teacher_model": "nothing is distilled here (torchtune's knowledge_distillation recipes do)",
    "policy_model": "there is no reinforcement learning here (torchtune's ppo_full_finetune_single_device does it)",
}


def complete(cfg: DictConfig, *, needs: Iterable[str]) -> None:
    """Fill in torchtune's defaults, in place, and refuse a configuration that is not one of full fine-tuning.

    Args:
        cfg: the recipe's configuration.
        needs: keys that must be there.

    Raises:
        SettingError: a key is missing, refers to one that is, holds what it cannot, or belongs to another recipe.
    """
    try:
        OmegaConf.resolve(cfg.copy())
    except OmegaConfBaseException as error:
        raise _of_key(error) from error
    for key, why in _OF_OTHER_RECIPES.items():
        if (block := cfg.get(key, None)) is not None:
            raise SettingError(key, _component(block), f"{why}; remove it, and every weight is trained")
    for key, default in _DEFAULTS.items():
        if key not in cfg:
            OmegaConf.update(cfg, key, default, force_add=True)
    for key in needs:
        if key not in cfg:
            raise SettingError(key, None, f"it is missing; {_NEEDED.get(key, _BLOCK)}")
        if key in _BLOCKS:
            _check_block(key, cfg[key])
    limit = cfg.get("clip_grad_norm", None)
    if limit is not None and not _is_norm(limit):
        raise SettingError("clip_grad_norm", limit, "give the largest norm of all gradients, such as 1.0, or null")


def _check_block(key: str, block: Any) -> None:
    several = key == "dataset" and isinstance(block, ListConfig) and len(block)
    for one in block if several else [block]:
        if not (isinstance(one, DictConfig) and isinstance(one.get("_component_", None), str)):
            value = OmegaConf.to_container(one) if OmegaConf.is_config(one) else one
            raise SettingError(key, value, _BLOCK)


def _is_norm(limit: Any) -> bool:
    try:
        return not isinstance(limit, bool) and float(limit) >= 0  # false for NaN
    except (TypeError, ValueError):
        return False


def check_loss(loss_fn: Any, cfg: DictConfig) -> None:
    """Refuse a loss without `ignore_index`: it is not one of next tokens.

    Raises:
        SettingError: naming it.
    """
    if not isinstance(getattr(loss_fn, "ignore_index", None), int):
        remedy = (
            "it has no ignore_index, so it is none of next tokens (preferences and rewards are not trained on here); "
            "give torchtune.modules.loss.CEWithChunkedOutputLoss or torch.nn.CrossEntropyLoss"
        )
        raise SettingError("loss", _component(cfg.loss), remedy)


def check_all_is_trained(model: torch.nn.Module, cfg: DictConfig) -> None:
    """Refuse a model with adapters (LoRA, DoRA, on quantized weights or not).

    Raises:
        SettingError: naming the full model, where its builder is known.
    """
    if get_adapter_params(model):
        component = _component(cfg.model)
        remedy = f"adapters are not trained here: every weight is; give the full model{_full(component, cfg.model)}"
        raise SettingError("model", component, remedy)


def _full(component: str, block: DictConfig) -> str:
    """Return what to type for the model that one of torchtune's builders puts adapters on; empty where it is not known."""
    module, _, name = component.rpartition(".")
    full = f"{module}.{re.sub('^q?lora_', '', name)}"
    try:
        build = None if full == component else load_function(full, key="model")
    except SettingError:
        build = None
    if not callable(build):
        return ""
    takes = inspect.signature(build).parameters
    return ": " + " ".join(
        [f"model={full}", *(f"~model.{key}" for key in map(str, block) if key not in (*takes, "_component_"))]
    )


def plainly(error: BaseException) -> AdaptiveBatchError | None:
    """Return an error that is about the configuration as one of ours; None for any other."""
    if isinstance(error, AdaptiveBatchError):
        return error
    plain = None
    if isinstance(error, OmegaConfBaseException):
        plain = _of_key(error)
    elif isinstance(error, InstantiationError):
        named = re.match("Error loading '([^']*)'", str(error))
        plain = SettingError("_component_", named and named[1], told(error))
    if plain is not None:
        plain.__cause__ = error
    return plain


def _of_key(error: OmegaConfBaseException) -> SettingError:
    """Return the error for a key that OmegaConf cannot give: it is missing, or refers to one which is."""
    key = str(error.full_key or error.key or "config")
    if isinstance(error, ConfigAttributeError | ConfigKeyError | MissingMandatoryValue):
        return SettingError(key, None, f"it is missing; {_NEEDED.get(key, _BLOCK)}")
    return SettingError(key, _as_written(error), f"{str(error).partition(chr(10))[0]}; give it a value of its own")


def _as_written(error: OmegaConfBaseException) -> Any:
    """Return the value that an error is about; None where it cannot be read."""
    parent, key = error.parent_node, error.key
    content = parent._content if isinstance(parent, DictConfig | ListConfig) else None
    if isinstance(content, dict) and key in content:
        return content[key]._value()
    if isinstance(content, list) and isinstance(key, int) and key < len(content):
        return content[key]._value()
    return None


def told(error: BaseException) -> str:
    """Return an error's message on one line: of a long one the first line and the last, which often has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines if len(lines) <= 3 else (lines[0], "...", lines[-1]))


def check_file(path: str) -> None:
    """Refuse a file that is no configuration.

    Raises:
        SettingError: it cannot be read, is no YAML, or no block of keys.
    """
    from yaml import YAMLError  # type: ignore[import-untyped]  # it comes with OmegaConf

    try:
        cfg = OmegaConf.load(path)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        said = getattr(error, "problem", None) or told(error)
        raise SettingError("--config", path, f"it is no YAML: {said}{where}") from error
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise SettingError("--config", path, f"it cannot be read: {told(error)}") from error
    if not isinstance(cfg, DictConfig):
        raise SettingError("--config", path, "it holds a list; give a block of keys, as in torchtune's configs")


def _component(block: Any) -> Any:
    return block.get("_component_", None) if isinstance(block, DictConfig) else block


def check_output_dir(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before anything is built."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise SettingError("output_dir", str(folder), f"it cannot be made ({error}); give a folder of yours") from None
    if not writable:
        raise SettingError("output_dir", str(folder), "it cannot be written to; give a folder of yours")


def as_dict(cfg: DictConfig) -> dict[str, Any]:
    """Return a configuration as plain dicts and lists, with its references resolved."""
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


# Optimizers whose kernels want the parameters on the device.
_NEEDS_THE_DEVICE = ("bitsandbytes.", "torchao.optim.CPUOffloadOptimizer")


def check_parallel(cfg: DictConfig, *, world_size: int) -> int:
    """Refuse what is configured for several ranks and cannot be used.

    Returns:
        How many ranks hold one copy of the model.

    Raises:
        SettingError: naming the key.
    """
    component, on_host = str(cfg.optimizer._component_), cfg.get("fsdp_cpu_offload", None)
    dim = cfg.get("tensor_parallel_dim", None)
    dim = 1 if dim is None else check_whole("tensor_parallel_dim", dim)
    if world_size % dim:
        raise SettingError("tensor_parallel_dim", dim, f"it must divide the {world_size} ranks")
    if dim > 1 and cfg.get("tensor_parallel_plan", None) is None:
        remedy = "tensor parallelism needs a plan, such as tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan"
        raise SettingError("tensor_parallel_plan", None, remedy)
    if cfg.optimizer.get("fused", False) and (dim > 1 or (world_size > 1 and component == "torch.optim.SGD")):
        raise SettingError("optimizer.fused", True, f"{component} cannot step these parameters so; set it to False")
    for key in ("fsdp_cpu_offload", "fsdp_reshard_after_forward"):
        if cfg.get(key, None) is not None:
            check_bool(key, cfg.get(key))
    if world_size > 1 and on_host and str(cfg.device).startswith("cpu"):
        raise SettingError("fsdp_cpu_offload", True, "device is cpu, which has no other host; set it to False")
    if world_size > 1 and on_host and component.startswith(_NEEDS_THE_DEVICE):
        remedy = f"{component} cannot step parameters that lie on the host; set it to False, or take torch.optim.AdamW"
        raise SettingError("fsdp_cpu_offload", True, f"{remedy} with fused=True")
    return dim
