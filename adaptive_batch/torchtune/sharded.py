"""The model of many ranks: built without memory, divided among them as torchtune's distributed recipe divides it, and loaded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import partial
from typing import Any, Protocol, cast

import torch
from omegaconf import DictConfig
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torchtune import config, modules, training
from torchtune.training.activations import apply_selective_activation_checkpointing

from adaptive_batch import distributed
from adaptive_batch.errors import SettingError


class Weights(Protocol):
    """What loads a model's weights.

    Attributes:
        is_divided: they were saved as each rank holds them, and :meth:`load_divided` loads them.
    """

    is_divided: bool

    def load_weights(self) -> Mapping[str, Any]:
        """The whole model's state dict on rank zero, unless it is divided, and nothing on others; a collective."""

    def load_divided(self, model: torch.nn.Module) -> None:
        """Load into the parts of a model that are there; a collective."""


def build_sharded(cfg: DictConfig, *, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """The model on the meta device, divided by tensor parallelism and FSDP2, whose order matters to both.

    Args:
        cfg: the recipe's configuration.
        dtype: of its parameters.
        device: where it will be.

    Raises:
        SettingError: it cannot be divided as configured.
    """
    with training.set_default_dtype(dtype), torch.device("meta"):
        model: torch.nn.Module = config.instantiate(cfg.model)
    if cfg.compile:
        training.compile_model(model, verbose=distributed.is_rank_zero())
    ranks = distributed.data_parallel_size()
    mesh = init_device_mesh(
        device.type, mesh_shape=(ranks, distributed.world_size() // ranks), mesh_dim_names=("dp", "tp")
    )
    tied = tied_modules(model)
    if distributed.world_size() > ranks:
        plan = config.instantiate(cfg.tensor_parallel_plan)
        _check_tensor_parallel(model, plan, tied, dim=distributed.world_size() // ranks)
        model = training.prepare_mha_for_tp(model, mesh["tp"])
        parallelize_module(model, mesh["tp"], parallelize_plan=plan)
    apply_checkpointing(model, cfg)
    if ranks > 1:
        reshards = bool(cfg.get("fsdp_reshard_after_forward", True))
        apart = [name for name in cfg.get("custom_sharded_layers", None) or () if name in tied]
        if apart and reshards:
            needs = f"the output layer is tied to {apart[0]}, and needs its weights after it was called"
            remedy = f"{needs}; leave it out, or set fsdp_reshard_after_forward=False"
            raise SettingError("custom_sharded_layers", list(cfg.custom_sharded_layers), remedy)
        training.shard_model(
            model=model,
            shard_conditions=[partial(training.get_shard_conditions, names_to_match=cfg.get("custom_sharded_layers"))],
            cpu_offload=bool(cfg.get("fsdp_cpu_offload", False)),
            reshard_after_forward=reshards,
            dp_mesh=mesh["dp"],
        )
    return model


def tied_modules(model: torch.nn.Module) -> set[str]:
    """The names of modules whose weights an output layer takes as its own."""
    tied = {
        id(attribute.tied_module)
        for module in model.modules()
        for attribute in vars(module).values()
        if isinstance(attribute, modules.TiedLinear)
    }
    return {name for name, module in model.named_modules() if id(module) in tied}


def _check_tensor_parallel(model: torch.nn.Module, plan: Any, tied: set[str], *, dim: int) -> None:
    """Refuse a model that cannot be divided among so many ranks."""
    for module in getattr(model, "decoder", model).modules():
        if isinstance(module, modules.MultiHeadAttention):
            heads, key_heads = module.num_heads, module.num_kv_heads
            if heads % dim or key_heads % dim:
                both = math.gcd(heads, key_heads)
                divisors = ", ".join(str(n) for n in range(1, both + 1) if both % n == 0)
                remedy = f"it must divide the model's {heads} heads and {key_heads} key heads; give one of {divisors}"
                raise SettingError("tensor_parallel_dim", dim, remedy)
    for pattern in plan if isinstance(plan, Mapping) else ():
        if any(fnmatch(name, pattern) for name in tied):
            remedy = f"the model's output layer is tied to {pattern}, whose weights its plan divides, and cannot take a part of them"
            raise SettingError(
                "tensor_parallel_dim", dim, f"{remedy}; give 1, and ranks divide the model by FSDP alone"
            )


def apply_checkpointing(model: torch.nn.Module, cfg: DictConfig) -> None:
    """Recompute activations as configured: those of each layer, or with `ac_mode` of the layers that `ac_option` chooses."""
    all_layers, mode = bool(cfg.get("enable_activation_checkpointing", False)), cfg.get("ac_mode", None)
    if mode is not None and not all_layers:
        apply_selective_activation_checkpointing(model, mode, cfg.get("ac_option", None))
    elif all_layers and mode is None:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})


def load_sharded(
    model: torch.nn.Module, weights: Weights, cfg: DictConfig, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Give each rank its part of the weights: as it was saved, or of what rank zero has read.

    Args:
        model: of :func:`build_sharded`.
        weights: what loads them.
        cfg: the recipe's configuration.
        dtype: of parameters.
        device: where they go, unless they are offloaded.
    """
    offload = bool(cfg.get("fsdp_cpu_offload", False))
    whole = weights.load_weights()
    if weights.is_divided:
        model.to_empty(device=torch.device("cpu") if offload else device)
        for module in model.modules():  # parameters alone are offloaded
            buffers = {name: None if buffer is None else buffer.to(device) for name, buffer in module._buffers.items()}
            module._buffers.update(buffers)
        compute_rotary_buffers(model, dtype=dtype, device=device)
        weights.load_divided(model)
        return
    compute_rotary_buffers(model, dtype=dtype, device=device)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    state = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in whole.items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True, cpu_offload=offload)
    with warnings.catch_warnings():  # torch's own words to itself
        warnings.filterwarnings("ignore", message=".*_get_pg_default_device|Multiple backends are registered")
        set_model_state_dict(model, state, options=options)
    training.validate_no_params_on_meta_device(model)


def compute_rotary_buffers(model: torch.nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the buffers that no checkpoint holds."""
    with training.set_default_dtype(dtype), device:
        for module in model.modules():
            if hasattr(module, "rope_init"):
                cast(Any, module).rope_init()
