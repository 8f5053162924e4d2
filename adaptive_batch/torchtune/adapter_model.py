"""Adapters on a frozen base: LoRA, QLoRA and DoRA, as torchtune's builders make them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from omegaconf import DictConfig
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
from adaptive_batch.checkpoint import parameter_name
from adaptive_batch.errors import SettingError

from .checks import has_tensor_parallelism
from .config_errors import component_of
from .model import (
    FullModel,
    Weights,
    compute_rotary_buffers,
    load_from_rank_zero,
    named_parameters,
    refusing_other_weights,
    whole_bytes,
)

# Keys that torchtune saves with adapters, each with an example.
_SAVED_WITH_ADAPTERS = {
    "lora_rank": "give a whole number, such as 8",
    "lora_alpha": "give a number, such as 16",
    "lora_attn_modules": "give a list, such as [q_proj,v_proj]",
    "apply_lora_to_mlp": "give True or False",
}


class AdapterModel(FullModel):
    """Adapters train, and the base stays as it is.

    An epoch holds the adapters, and the base with them merged unless they are saved alone.
    """

    keeps_base = True

    def check(self, model: torch.nn.Module, cfg: DictConfig) -> None:
        """Check a model with adapters against its block.

        Raises:
            SettingError: it has no adapters, or not those of its block; the block lacks a key that
                torchtune saves; or adapters would be divided by tensor parallelism.
        """
        if not get_adapter_params(model):
            remedy = (
                "it has no adapters; `tune run adaptive_full_finetune` trains every weight, or give"
                " a model with adapters, such as torchtune.models.llama3_2.lora_llama3_2_1b"
            )
            raise SettingError("model", component_of(cfg.model), remedy)
        for key, remedy in _SAVED_WITH_ADAPTERS.items():
            if cfg.model.get(key) is None:
                remedy = f"it is missing, and is saved with adapters; {remedy}"
                raise SettingError(f"model.{key}", None, remedy)
        _check_adapters_are_made(model, cfg.model)
        if has_tensor_parallelism(cfg):
            remedy = "adapters are not divided by tensor parallelism; give 1, and ranks use FSDP"
            raise SettingError("tensor_parallel_dim", cfg.tensor_parallel_dim, remedy)

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
        state = super().to_save(model, cfg, device=device)[training.MODEL_KEY]
        if distributed.world_size() == 1:
            # Merging changes tensors in place, and on a CPU these would be the model's own.
            state = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
        content[training.ADAPTER_KEY] = get_adapter_state_dict(state)
        return content | {
            training.MODEL_KEY: get_merged_lora_ckpt(state, block.lora_rank, block.lora_alpha)
        }

    def _load(self, model: torch.nn.Module, weights: Weights, cfg: DictConfig) -> None:
        state = weights.load_weights()
        with refusing_other_weights(model, state, cfg):
            keys = model.load_state_dict(state, strict=False)
        missing = map(parameter_name, keys.missing_keys)
        self._check_base(model, missing, keys.unexpected_keys, cfg)
        self._load_adapters(model, weights)

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
        self._load_adapters(model, weights)

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

    def _load_adapters(self, model: torch.nn.Module, weights: Weights) -> None:
        """Load saved adapters; keep new ones as initialized otherwise.

        DoRA's magnitudes are initialized from the base model.
        """
        for module in model.modules():
            if hasattr(module, "initialize_dora_magnitude"):
                module.initialize_dora_magnitude()  # type: ignore[operator]
        if weights.is_divided:
            weights.load_divided(self.state(model))


def _check_adapters_are_made(model: torch.nn.Module, block: DictConfig) -> None:
    """Raise for a key of adapters that the model's builder ignores."""
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
        "lora_attn_modules": kinds.issuperset(block.lora_attn_modules),
    }
    for key, is_made in made.items():
        if block.get(key) and not is_made:
            remedy = (
                f"{component_of(block)} adds no such adapters to the model (it has adapters of"
                f" {', '.join(sorted(kinds))}); give names of these, or remove it"
            )
            raise SettingError(f"model.{key}", block[key], remedy)


def builder_of(cfg: DictConfig) -> FullModel | None:
    """Return the builder of the configured model; None for full fine-tuning.

    It is chosen by the keys that torchtune's builders of adapters take.
    """
    block = cfg.get("model", None)
    if isinstance(block, DictConfig) and "lora_attn_modules" in block:
        return AdapterModel()
    return None
