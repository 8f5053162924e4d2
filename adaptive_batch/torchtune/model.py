"""Models of a run: building, weights and saving of the one that trains, and frozen ones."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatch
from functools import partial
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torchao.dtypes import nf4tensor
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import modules, training
from torchtune.modules import common_utils
from torchtune.modules.peft import (
    disable_adapter,
    get_adapter_params,
    get_adapter_state_dict,
    get_lora_module_names,
    get_merged_lora_ckpt,
    set_trainable_params,
)
from torchtune.training.activations import apply_selective_activation_checkpointing

from adaptive_batch import distributed
from adaptive_batch._util import nearest, replaced
from adaptive_batch.checkpoint import parameter_name
from adaptive_batch.errors import SettingError

from .checks import has_tensor_parallelism
from .configuration import component_of, instantiate, one_line, refusing
from .model_files import ModelFiles


class Weights(ABC):
    """Source of a model's weights.

    Attributes:
        is_divided: whether each rank saved its own part, which :meth:`load_divided` loads.
    """

    is_divided = False

    @abstractmethod
    def load_weights(self) -> Mapping[str, Any]:
        """Return the state dict of the model, or of the base of adapters; a collective.

        It is whole on rank zero, and empty on other ranks and if the saved model is divided.
        """

    def load_divided(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the parts that :meth:`FullModel.state` returned; a collective."""
        raise AssertionError("no rank has saved its part")


class FullModel:
    """Full fine-tuning: every parameter trains, and a checkpoint holds the whole model.

    A subclass for another kind of fine-tuning changes how a model is built, trained and saved.
    Data, search, loop and checkpoints are the same for all.

    Args:
        key: key of the model's block, for errors.

    Attributes:
        key: as given.
        keeps_base: whether the saved weights are trained on a frozen base that resuming reads
            again.
    """

    keeps_base = False

    def __init__(self, key: str = "model") -> None:
        self.key = key

    def check(self, model: torch.nn.Module, cfg: DictConfig) -> None:
        """Raise SettingError for a model of another kind of fine-tuning.

        Args:
            model: model with or without memory.
            cfg: configuration of the recipe.
        """
        if get_adapter_params(model):
            remedy = (
                "it has adapters; train them with adaptive_lora_finetune, or give a model without"
                " adapters"
            )
            raise SettingError(self.key, component_of(cfg.model), remedy)

    def skeleton(self, cfg: DictConfig, *, dtype: torch.dtype) -> torch.nn.Module:
        """Return the model without memory, on the meta device."""
        with _on(torch.device("meta"), dtype):
            model: torch.nn.Module = instantiate(self.key, cfg.model)
        _fuse_norms(model, cfg)
        return model

    def build(
        self, cfg: DictConfig, weights: Weights, *, dtype: torch.dtype, device: torch.device
    ) -> torch.nn.Module:
        """Return the model with its weights on its device, compiled as configured and divided over
        several ranks.
        """
        is_divided = distributed.world_size() > 1
        model = build_without_weights(cfg, self, dtype=dtype, device=device, on_meta=is_divided)
        if is_divided:
            self._load_sharded(model, weights, cfg, dtype=dtype, device=device)
        else:
            self._load(model, weights, cfg)
        return model

    def _load(self, model: torch.nn.Module, weights: Weights, cfg: DictConfig) -> None:
        """Load the weights on one rank."""
        state = weights.load_weights()
        if weights.is_divided:
            weights.load_divided(self.state(model))
            return
        with refusing_other_weights(model, state, cfg, key=self.key):
            model.load_state_dict(state)

    def _load_sharded(
        self,
        model: torch.nn.Module,
        weights: Weights,
        cfg: DictConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Give each rank its part of the weights: as it was saved, or as rank zero has read it."""
        # Empty where a resume point holds the model; the checkpointer learns from it how to save.
        whole = weights.load_weights()
        if weights.is_divided:
            parameter_device = device
            if cfg.get("fsdp_cpu_offload", False):
                parameter_device = torch.device("cpu")
            model.to_empty(device=parameter_device)
            # Buffers are not offloaded.
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(device)
        compute_rotary_buffers(model, dtype=dtype, device=device)
        if weights.is_divided:
            weights.load_divided(self.state(model))
        else:
            load_from_rank_zero(model, whole, cfg, key=self.key)
            training.validate_no_params_on_meta_device(model)

    def freeze(self, model: torch.nn.Module) -> None:
        """Freeze the parameters that do not train; here none.

        :meth:`build` calls it, and so does an estimate of a step's memory.
        """

    def trained(self, model: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
        """Return the optimizer's parameters; the optimizer skips frozen ones."""
        return model.parameters()

    def num_bytes_saved(self, model: torch.nn.Module, cfg: DictConfig) -> int:
        """Return the bytes of the tensors that :meth:`to_save` returns."""
        return whole_bytes(model.state_dict())

    def state(self, model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """Return this rank's part of the model for a resume point, by name."""
        state: Mapping[str, torch.Tensor] = model.state_dict()
        return state

    def to_save(
        self, model: torch.nn.Module, cfg: DictConfig, *, device: torch.device
    ) -> Mapping[str, Any]:
        """Return the state of an epoch for torchtune's checkpointer, on the host of rank zero; a
        collective.
        """
        if distributed.world_size() == 1:
            return {training.MODEL_KEY: model.state_dict()}
        state = training.gather_cpu_state_dict(model, distributed.is_rank_zero(), device=device)
        return {training.MODEL_KEY: state}


def whole_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of tensors as one rank would hold them, with those of NF4 made whole."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())


@contextmanager
def refusing_other_weights(
    model: torch.nn.Module, weights: Mapping[str, Any], cfg: DictConfig, *, key: str = "model"
) -> Iterator[None]:
    """Context manager: check weights against the model, and turn torch's errors into ours.

    Raises:
        SettingError: a shape differs, or a name is missing or unknown.
    """
    remedy = "give the model that the checkpoint is of"
    for name, tensor in named_parameters(model).items():
        if name in weights and weights[name].shape != tensor.shape:
            shape = tuple(tensor.shape)
            saved_shape = tuple(weights[name].shape)
            problem = f"its {name} is of shape {shape}, and {saved_shape} in the checkpoint"
            raise SettingError(key, str(cfg.model._component_), f"{problem}; {remedy}")
    try:
        yield
    except RuntimeError as error:
        if "in loading state_dict" not in str(error):
            raise
        # torch lists the names below its first line.
        names = str(error).splitlines()[1].strip()
        problem = f"the checkpoint is of another model: {names[:150]} ..."
        raise SettingError(key, str(cfg.model._component_), f"{problem}; {remedy}") from error


def num_token_embeddings(model: torch.nn.Module) -> int | None:
    """Return the number of token ids with an embedding; None if unknown."""
    embeddings = getattr(getattr(model, "decoder", model), "tok_embeddings", torch.nn.Identity())
    return (
        sum(
            part.num_embeddings
            for part in embeddings.modules()
            if isinstance(part, torch.nn.Embedding)
        )
        or None
    )


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by their names in checkpoints, whatever wraps their modules."""
    return {parameter_name(name): parameter for name, parameter in model.named_parameters()}


class FusedRMSNorm(modules.RMSNorm):  # type: ignore[misc]
    """RMSNorm as one operation, which keeps only its input for backward; torchtune's also keeps
    float32 copies of input and output.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.normalized_shape, self.scale, self.eps)


def _fuse_norms(model: torch.nn.Module, cfg: DictConfig) -> None:
    if not cfg.get("fused_rms_norm", False):
        return
    norms = [module for module in model.modules() if type(module) is modules.RMSNorm]
    if not norms:
        remedy = f"{cfg.model._component_} has no RMSNorm of torchtune's; leave it out"
        raise SettingError("fused_rms_norm", True, remedy)
    # Both classes have the same parameters, so the weights stay.
    for norm in norms:
        norm.__class__ = FusedRMSNorm


def apply_checkpointing(model: torch.nn.Module, cfg: DictConfig) -> None:
    """Recompute activations as configured.

    These are the activations of each layer or, with `ac_mode`, of the layers that `ac_option`
    chooses.
    """
    all_layers = bool(cfg.get("enable_activation_checkpointing", False))
    mode = cfg.get("ac_mode", None)
    if mode is not None and not all_layers:
        apply_selective_activation_checkpointing(model, mode, cfg.get("ac_option", None))
    elif all_layers and mode is None:
        training.set_activation_checkpointing(
            model, auto_wrap_policy={modules.TransformerSelfAttentionLayer}
        )


# --- several ranks


@contextmanager
def _on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Context manager: build models on a device; without memory, round weights to 4 bits in one
    piece.
    """
    in_one_piece: AbstractContextManager[None] = nullcontext()
    if device.type == "meta":
        in_one_piece = replaced(nf4tensor, CHUNK_SIZE=2**62)
    with training.set_default_dtype(dtype), device, in_one_piece:
        yield


def build_without_weights(
    cfg: DictConfig,
    builder: FullModel,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_meta: bool,
) -> torch.nn.Module:
    """Return the model before its weights are loaded, compiled and recomputing activations as
    configured; on several ranks divided by tensor parallelism, then by FSDP2.

    This is the order of torchtune's recipe.

    Raises:
        SettingError: it is of another kind of fine-tuning, or cannot be divided as configured.
    """
    with _on(torch.device("meta") if on_meta else device, dtype):
        model: torch.nn.Module = instantiate(builder.key, cfg.model)
    builder.check(model, cfg)
    _fuse_norms(model, cfg)
    builder.freeze(model)
    if cfg.compile:
        training.compile_model(model, verbose=distributed.is_rank_zero())
    if distributed.world_size() == 1:
        apply_checkpointing(model, cfg)
        return model
    ranks = distributed.data_parallel_size()
    dim = distributed.world_size() // ranks
    mesh = init_device_mesh(device.type, mesh_shape=(ranks, dim), mesh_dim_names=("dp", "tp"))
    tied = _tied_modules(model)
    if dim > 1:
        plan = instantiate("tensor_parallel_plan", cfg.tensor_parallel_plan)
        try:
            model = training.prepare_mha_for_tp(model, mesh["tp"])
        except ValueError as error:
            # The heads cannot be divided.
            raise SettingError(
                "tensor_parallel_dim", dim, f"{one_line(error)} Give a divisor of both"
            ) from error
        with refusing("tensor_parallel_plan", cfg.tensor_parallel_plan._component_):
            _check_plan_of_tied(plan, tied, dim)
            parallelize_module(model, mesh["tp"], parallelize_plan=plan)
    # Checkpointing wraps what tensor parallelism has divided, and FSDP wraps both.
    apply_checkpointing(model, cfg)
    if ranks > 1:
        _shard(model, cfg, mesh["dp"], tied)
    return model


def _check_plan_of_tied(plan: Mapping[str, Any], tied: set[str], dim: int) -> None:
    """Raise SettingError if a plan divides weights that a tied output layer uses."""
    for pattern in plan:
        if any(fnmatch(name, pattern) for name in tied):
            remedy = (
                f"the model's output layer is tied to {pattern}, whose weights the plan"
                " divides; give 1"
            )
            raise SettingError(
                "tensor_parallel_dim",
                dim,
                f"{remedy}, and ranks divide the model by FSDP alone",
            )


def _shard(model: torch.nn.Module, cfg: DictConfig, mesh: DeviceMesh, tied: set[str]) -> None:
    """Shard the model by FSDP2; refuse a tied layer that gives its weights back too early."""
    layers = cfg.get("custom_sharded_layers", None)
    known = {name for name, _ in model.named_modules()}
    for name in {*(layers or ())} - known:
        children = [child for child, _ in model.named_children()]
        remedy = f"the model has no {name}; {nearest(name, children)}"
        raise SettingError("custom_sharded_layers", list(layers), remedy)
    reshards = bool(cfg.get("fsdp_reshard_after_forward", True))
    tied_layers = [name for name in layers or () if name in tied]
    if tied_layers and reshards:
        problem = (
            f"the output layer is tied to {tied_layers[0]}, and needs its weights after it was"
            " called"
        )
        remedy = f"{problem}; leave it out, or set fsdp_reshard_after_forward=False"
        raise SettingError("custom_sharded_layers", list(cfg.custom_sharded_layers), remedy)
    training.shard_model(
        model=model,
        shard_conditions=[partial(training.get_shard_conditions, names_to_match=layers)],
        cpu_offload=bool(cfg.get("fsdp_cpu_offload", False)),
        reshard_after_forward=reshards,
        dp_mesh=mesh,
    )


def _tied_modules(model: torch.nn.Module) -> set[str]:
    """Return the names of modules whose weights a tied output layer uses."""
    tied = {
        id(attribute.tied_module)
        for module in model.modules()
        for attribute in vars(module).values()
        if isinstance(attribute, modules.TiedLinear)
    }
    return {name for name, module in model.named_modules() if id(module) in tied}


def load_from_rank_zero(
    model: torch.nn.Module,
    whole: Mapping[str, Any],
    cfg: DictConfig,
    *,
    key: str = "model",
    strict: bool = True,
) -> None:
    """Give each rank its part of whole tensors that rank zero has; a collective.

    Not strict, the model may have tensors that rank zero has not.
    """
    # A checkpoint may be of another dtype than the model.
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    state = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in whole.items()}
    offload = bool(cfg.get("fsdp_cpu_offload", False))
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=strict, cpu_offload=offload
    )
    with warnings.catch_warnings():
        # torch warns of calls that it makes itself.
        warnings.filterwarnings(
            "ignore", message=".*_get_pg_default_device|Multiple backends are registered"
        )
        with refusing_other_weights(model, state, cfg, key=key):
            set_model_state_dict(model, state, options=options)


def compute_rotary_buffers(
    model: torch.nn.Module, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Fill the buffers that no checkpoint holds."""
    with training.set_default_dtype(dtype), device:
        for module in model.modules():
            if hasattr(module, "rope_init"):
                cast(Any, module).rope_init()


# --- frozen models


class FrozenModel:
    """The frozen model that a task compares with: the base of adapters, or a second model.

    Args:
        policy: the model that trains.
        second: a frozen model; None for the policy with its adapters disabled.

    Attributes:
        second: as given.
    """

    def __init__(self, policy: torch.nn.Module, second: torch.nn.Module | None = None) -> None:
        self._policy = policy
        self.second = second
        if second is not None:
            second.requires_grad_(False)
            second.eval()

    @torch.no_grad()
    def logits(self, **batch: Any) -> torch.Tensor | list[torch.Tensor]:
        """Return the reference's logits of a batch; a list if it returns chunks."""
        logits: torch.Tensor | list[torch.Tensor]
        if self.second is None:
            with disable_adapter(self._policy):
                logits = self._policy(**batch)
            return logits
        # torchtune's teacher keeps its mark on one device: torch chooses the kernel of a chunk's
        # product by it, and their bits differ.
        self.second.requires_grad_(distributed.world_size() == 1)
        try:
            logits = self.second(**batch)
        finally:
            self.second.requires_grad_(False)
        return logits

    @property
    def models(self) -> torch.nn.Module:
        """Both models as one module; the trained model if it is its own reference."""
        if self.second is None:
            return self._policy
        return torch.nn.ModuleList([self._policy, self.second])


class SecondModel:
    """Frozen second model of a task, as configured.

    Args:
        cfg: configuration of the recipe.
        key: key of the model's block; `model` if it is built like the trained model.
        checkpointer_key: key of the checkpointer's block.

    Attributes:
        builder: builder of the model.
        cfg: configuration for the builder, without activation checkpointing.

    Raises:
        SettingError: the models would be divided by tensor parallelism.
    """

    def __init__(self, cfg: DictConfig, *, key: str = "model", checkpointer_key: str) -> None:
        if has_tensor_parallelism(cfg):
            remedy = (
                "a second model is not divided by tensor parallelism; give 1, and ranks divide both"
                " models by FSDP"
            )
            raise SettingError("tensor_parallel_dim", cfg.tensor_parallel_dim, remedy)
        self.builder = FullModel(key)
        self._checkpointer_key = checkpointer_key
        own = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
        assert isinstance(own, DictConfig)
        own.model = own[key]
        own.checkpointer = own[checkpointer_key]
        own.enable_activation_checkpointing = False
        own.ac_mode = None
        self.cfg = own

    def skeleton(self, *, dtype: torch.dtype) -> torch.nn.Module:
        """Return the model without memory, on the meta device."""
        model = self.builder.skeleton(self.cfg, dtype=dtype)
        self.builder.check(model, self.cfg)
        return model

    def loading(self) -> Callable[..., torch.nn.Module]:
        """Find the files of the weights; return a function of dtype and device that builds the
        model.

        Raises:
            SettingError: the checkpointer cannot be built, for example because a file is missing.
        """
        weights = _WholeWeights(self.cfg.checkpointer, key=self._checkpointer_key)
        return partial(self.builder.build, self.cfg, weights)


class _WholeWeights(Weights):
    """Weights of a second model, which rank zero reads."""

    def __init__(self, block: DictConfig, *, key: str) -> None:
        # None on other ranks, where nothing asks it.
        self._files: Any = distributed.on_rank_zero(lambda: ModelFiles(block, key=key))

    def load_weights(self) -> Mapping[str, Any]:
        """Return the state dict on rank zero; empty on others."""
        return distributed.on_rank_zero(lambda: self._files.load_weights()) or {}


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
