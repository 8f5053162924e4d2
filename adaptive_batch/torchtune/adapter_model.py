"""Adapters on a frozen base: LoRA, QLoRA and DoRA, as torchtune's builders make them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch.distributed.tensor import DTensor, distribute_tensor
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import training
from torchtune.modules import common_utils
from torchtune.modules.peft import (
    get_adapter_params,
    get_adapter_state_dict,
    get_lora_module_names,
    get_merged_lora_ckpt,
    set_trainable_params,
)

from adaptive_batch import distributed
from adaptive_batch.checkpoint import parameter_name, reason
from adaptive_batch.errors import SettingError

from .checks import check_adapters_train
from .model import (
    FullModel,
    Weights,
    compute_rotary_buffers,
    load_from_rank_zero,
    named_parameters,
    refusing_other_weights,
    whole_bytes,
)

log = logging.getLogger("adaptive_batch")


class AdapterModel(FullModel):
    """Adapters train, and the base stays as it is.

    An epoch holds the adapters, and the base with them merged unless they are saved alone.
    """

    keeps_base = True

    def check(self, model: torch.nn.Module, cfg: DictConfig) -> None:
        """Refuse a model without adapters, and adapters to begin with that are of another model."""
        check_adapters_train(model, cfg)
        try:
            begun = _given_adapters(cfg)
        except SettingError:
            # A run that resumes has its own, and needs the file no more.
            if cfg.get("resume_from_checkpoint"):
                return
            raise
        if begun is None:
            return
        state = self.state(model)
        differing = [
            name
            for name in sorted(begun.keys() | state.keys())
            if name not in begun or name not in state or begun[name].shape != state[name].shape
        ]
        if differing:
            name = differing[0]
            shape, expected = (
                f"{tuple(tensors[name].shape)}" if name in tensors else "missing"
                for tensors in (begun, state)
            )
            remedy = (
                f"its {name} is {shape}, and {expected} in the model; give the model that these"
                " adapters were trained on"
            )
            raise _refused(cfg, remedy)
        _warn_of_other_strength(cfg)

    def skeleton(self, cfg: DictConfig, *, dtype: torch.dtype) -> torch.nn.Module:
        """Return the model without memory, on the meta device."""
        # torchtune's builders read this global.
        common_utils._use_low_cpu_ram = bool(cfg.get("low_cpu_ram", False))
        return super().skeleton(cfg, dtype=dtype)

    def freeze(self, model: torch.nn.Module) -> None:
        """Freeze all but the adapters."""
        set_trainable_params(model, get_adapter_params(model))

    def state(self, model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the adapters."""
        return {
            parameter_name(name): parameter for name, parameter in get_adapter_params(model).items()
        }

    def num_bytes_saved(self, model: torch.nn.Module, cfg: DictConfig) -> int:
        """Return the bytes of the adapters and, unless they are saved alone, of merged weights."""
        num_bytes = whole_bytes(self.state(model))
        if not cfg.get("save_adapter_weights_only", False):
            num_bytes += whole_bytes(model.state_dict())
        return num_bytes

    def to_save(
        self, model: torch.nn.Module, cfg: DictConfig, *, device: torch.device
    ) -> Mapping[str, Any]:
        """Return the adapters, their configuration and the merged weights.

        `save_adapter_weights_only` omits the merged weights.
        """
        block = cfg.model
        on_output = bool(block.get("apply_lora_to_output", False))
        modules = get_lora_module_names(
            list(block.lora_attn_modules), block.apply_lora_to_mlp, on_output
        )
        described = {
            "r": block.lora_rank,
            "lora_alpha": block.lora_alpha,
            "target_modules": modules,
        }
        if block.get("use_dora", False):
            # torchtune's recipe omits this key, so PEFT loads the adapters as LoRA.
            described["use_dora"] = True
        content: dict[str, Any] = {training.ADAPTER_CONFIG: {**described, "peft_type": "LORA"}}
        if cfg.get("save_adapter_weights_only", False):
            state = self.state(model)
            adapters = {
                name: distributed.whole_tensor(part.detach()).cpu() for name, part in state.items()
            }
            return content | {training.ADAPTER_KEY: adapters}
        # Merging changes tensors in place, and on a CPU these would be the model's own.
        if distributed.world_size() == 1:
            state = {
                name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()
            }
        else:
            state = training.gather_cpu_state_dict(model, distributed.is_rank_zero(), device=device)
        content[training.ADAPTER_KEY] = get_adapter_state_dict(state)
        return content | {
            training.MODEL_KEY: get_merged_lora_ckpt(state, block.lora_rank, block.lora_alpha)
        }

    def _load(
        self, model: torch.nn.Module, weights: Weights, state: Mapping[str, Any], cfg: DictConfig
    ) -> None:
        with refusing_other_weights(model, state, cfg):
            keys = model.load_state_dict(state, strict=False)
        missing = map(parameter_name, keys.missing_keys)
        self._check_base(model, missing, keys.unexpected_keys, cfg)
        self._load_adapters(model, weights, cfg)

    def _load_sharded(
        self,
        model: torch.nn.Module,
        weights: Weights,
        cfg: DictConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        offload = bool(cfg.get("fsdp_cpu_offload", False))
        parameter_device = device
        if offload:
            parameter_device = torch.device("cpu")
        with training.set_default_dtype(dtype), device:
            for module in model.modules():
                if hasattr(module, "adapter_params"):
                    module.to_empty(device=parameter_device)
                    module.initialize_parameters()  # type: ignore[operator]
        compute_rotary_buffers(model, dtype=dtype, device=device)
        base = weights.load_weights()
        parameters = named_parameters(model)
        # Only rank zero has the base, and every rank has to know its names.
        names = set(distributed.from_rank_zero(lambda: list(base)))
        self._check_base(
            model, sorted(parameters.keys() - names), sorted(names - parameters.keys()), cfg
        )
        quantized = {
            name
            for name in names
            if isinstance(distributed.local_part(parameters[name]), NF4Tensor)
        }
        load_from_rank_zero(
            model, {name: base[name] for name in base if name not in quantized}, cfg, strict=False
        )
        # torch's own function cannot divide four-bit tensors.
        for name in sorted(quantized):
            whole = torch.empty(parameters[name].shape, dtype=dtype, device=device)
            if name in base:
                whole.copy_(base[name])
            distributed.broadcast(whole)
            training.load_from_full_model_state_dict(
                model, {name: whole}, device, cpu_offload=offload
            )
        training.validate_no_params_on_meta_device(model)
        self._load_adapters(model, weights, cfg)

    def _check_base(
        self,
        model: torch.nn.Module,
        missing: Iterable[str],
        unexpected: Iterable[str],
        cfg: DictConfig,
    ) -> None:
        # The base model has no adapters.
        differences = [f"it has no {name}" for name in missing if name not in self.state(model)]
        differences += [f"its {name} is none of the model's" for name in unexpected]
        if differences:
            remedy = (
                f"the checkpoint is of another model: {differences[0]}; give the model that the"
                " checkpoint is of"
            )
            raise SettingError("model", str(cfg.model._component_), remedy)

    def _load_adapters(self, model: torch.nn.Module, weights: Weights, cfg: DictConfig) -> None:
        """Load saved or given adapters; keep new ones as initialized otherwise.

        DoRA's magnitudes are initialized from the base model.
        """
        for module in model.modules():
            if hasattr(module, "initialize_dora_magnitude"):
                module.initialize_dora_magnitude()  # type: ignore[operator]
        state = self.state(model)
        if weights.is_divided:
            weights.load_divided(state)
            return
        adapters = _given_adapters(cfg) or {}
        with torch.no_grad():
            for name, saved in adapters.items():
                target = state[name]
                if isinstance(target, DTensor):
                    saved = saved.to(target.to_local())
                    saved = distribute_tensor(saved, target.device_mesh, target.placements)
                target.copy_(saved)


def _given_path(cfg: DictConfig) -> Path | None:
    given = cfg.get("checkpointer", {}).get("adapter_checkpoint", None)
    if given is None:
        return None
    path = Path(given)
    if path.exists():
        return path
    # torchtune's checkpointers look for the file there.
    return Path(cfg.checkpointer.output_dir, given)


def _warn_of_other_strength(cfg: DictConfig) -> None:
    """Warn if the given adapters were trained with another `lora_alpha`."""
    path = _given_path(cfg)
    assert path is not None
    try:
        saved = json.loads(path.with_name("adapter_config.json").read_text())["lora_alpha"]
        strength = cfg.model.lora_alpha / saved
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        # The file was moved without adapter_config.json, or this package did not write it.
        return
    if strength != 1 and distributed.is_rank_zero():
        log.warning(
            "checkpointer.adapter_checkpoint was trained with lora_alpha=%s: with %s its adapters"
            " act %.3g times as strongly",
            saved,
            cfg.model.lora_alpha,
            strength,
        )


def _given_adapters(cfg: DictConfig) -> Mapping[str, torch.Tensor] | None:
    """Load the adapters of ``checkpointer.adapter_checkpoint``; None if it is not set.

    Raises:
        SettingError: the file cannot be read, or torchtune did not save it.
    """
    path = _given_path(cfg)
    if path is None:
        return None
    try:
        adapters = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise _refused(cfg, f"{reason(error)}; give the adapter_model.pt of an epoch") from error
    if not isinstance(adapters, dict) or any(
        name.startswith("base_model.") or not isinstance(value, torch.Tensor)
        for name, value in adapters.items()
    ):
        raise _refused(cfg, "it is not in torchtune's form; give the adapter_model.pt of an epoch")
    return adapters


def _refused(cfg: DictConfig, remedy: str) -> SettingError:
    return SettingError(
        "checkpointer.adapter_checkpoint", str(cfg.checkpointer.adapter_checkpoint), remedy
    )


def builder_of(cfg: DictConfig) -> FullModel | None:
    """Return the builder of the configured model; None for full fine-tuning.

    It is chosen by the keys that torchtune's builders of adapters take.
    """
    block = cfg.get("model", None)
    if isinstance(block, DictConfig) and "lora_attn_modules" in block:
        return AdapterModel()
    return None
