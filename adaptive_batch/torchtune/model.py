"""Models of a run: building, loading and saving the trained model, and frozen second models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
from torchtune.modules.model_fusion import FusionEmbedding, FusionLayer
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
from .configuration import component_of, instantiate, refusing
from .model_files import ModelFiles


@dataclass(frozen=True)
class Weights:
    """Source of a model's weights.

    Attributes:
        load_base: function that returns the state dict of the model, or of the base of adapters; a
            collective. Rank 0 has all tensors. The dict is empty on other ranks, and on rank 0 if a
            checkpoint holds the whole model.
        load_shards: function that loads this rank's shards of :meth:`FullModel.state` from the
            checkpoint that holds the trained weights; a collective. None without a checkpoint.
    """

    load_base: Callable[[], Mapping[str, Any]]
    load_shards: Callable[[Mapping[str, torch.Tensor]], object] | None = None


class FullModel:
    """Full fine-tuning: every parameter trains, and a checkpoint holds the whole model.

    A subclass for another kind of fine-tuning changes how a model is built, trained and saved.
    Data, search, loop and checkpoints are the same for all.

    Args:
        key: key of the model's block, for errors.

    Attributes:
        key: key of the model's block.
        has_frozen_base: whether the base model is frozen: a checkpoint then holds only the
            adapters, and resuming reads the base again.
    """

    has_frozen_base = False

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
        # torchtune's builders of quantized models read this global instead of an argument.
        common_utils._use_low_cpu_ram = bool(cfg.get("low_cpu_ram", False))
        return self.new_model(cfg, dtype=dtype, device=torch.device("meta"))

    def new_model(
        self, cfg: DictConfig, *, dtype: torch.dtype, device: torch.device
    ) -> torch.nn.Module:
        """Return the configured model on a device, with fused norms if they are configured.

        Raises:
            SettingError: the model cannot be built, or has no norms to fuse.
        """
        # torchao quantizes weights to NF4 in chunks, to save memory. The meta device has none to
        # save, and a single chunk is much faster.
        single_chunk: AbstractContextManager[None] = nullcontext()
        if device.type == "meta":
            single_chunk = replaced(nf4tensor, CHUNK_SIZE=2**62)
        with training.set_default_dtype(dtype), device, single_chunk:
            model: torch.nn.Module = instantiate(self.key, cfg.model)
        if cfg.get("fused_rms_norm", False):
            norms = [module for module in model.modules() if type(module) is modules.RMSNorm]
            if not norms:
                remedy = f"{component_of(cfg.model)} has no torchtune.modules.RMSNorm; remove it"
                raise SettingError("fused_rms_norm", True, remedy)
            for norm in norms:
                # Both classes have the same parameters, so weights and their names stay.
                norm.__class__ = FusedRMSNorm
        return model

    def build(
        self, cfg: DictConfig, weights: Weights, *, dtype: torch.dtype, device: torch.device
    ) -> torch.nn.Module:
        """Return the model with its weights on its device, compiled as configured and sharded over
        several ranks.
        """
        is_sharded = distributed.world_size() > 1
        # One rank may not have the memory for a whole model, so each makes its shards alone.
        model = build_without_weights(
            cfg,
            self,
            dtype=dtype,
            device=device,
            on_meta=is_sharded,
            # With adapters, rank 0 still reads the base.
            reads_shards=weights.load_shards is not None and not self.has_frozen_base,
        )
        if is_sharded:
            self._load_sharded(model, weights, cfg, dtype=dtype, device=device)
        else:
            self._load(model, weights, cfg)
        return model

    def _load(self, model: torch.nn.Module, weights: Weights, cfg: DictConfig) -> None:
        """Load the weights on one rank."""
        # Needed for a checkpoint, too: torchtune's checkpointer reads the base before it can save.
        base = weights.load_base()
        if weights.load_shards is not None:
            weights.load_shards(self.state(model))
            return
        with refusing_other_weights(model, base, cfg, key=self.key):
            model.load_state_dict(base)

    def _load_sharded(
        self,
        model: torch.nn.Module,
        weights: Weights,
        cfg: DictConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Load each rank's shards from the checkpoint, or from the base that rank 0 has read."""
        # Needed for a checkpoint, too: torchtune's checkpointer reads the base before it can save.
        base = weights.load_base()
        if weights.load_shards is None:
            compute_rotary_buffers(model, dtype=dtype, device=device)
            load_from_rank_zero(model, base, cfg, key=self.key)
            training.validate_no_params_on_meta_device(model)
            return
        # Shards are read into existing tensors, so the model leaves the meta device first.
        model.to_empty(device=_parameter_device(cfg, device))
        # FSDP offloads parameters but not buffers.
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        compute_rotary_buffers(model, dtype=dtype, device=device)
        weights.load_shards(self.state(model))

    def freeze(self, model: torch.nn.Module) -> None:
        """Freeze the parameters that do not train; here none.

        :meth:`build` calls it, and so does an estimate of a step's memory.
        """

    def state(self, model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """Return this rank's shards of the model for a checkpoint, by name."""
        state: Mapping[str, torch.Tensor] = model.state_dict()
        return state

    def to_save(
        self, model: torch.nn.Module, cfg: DictConfig, *, device: torch.device
    ) -> Mapping[str, Any]:
        """Return the content of an export for torchtune's checkpointer, in host memory of rank 0;
        a collective.
        """
        if distributed.world_size() == 1:
            return {training.MODEL_KEY: model.state_dict()}
        state = training.gather_cpu_state_dict(model, distributed.is_rank_zero(), device=device)
        return {training.MODEL_KEY: state}


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
        # Pass on other errors, such as out of memory.
        if "in loading state_dict" not in str(error):
            raise
        # The second line of torch's message lists the missing or the unknown names.
        names = str(error).splitlines()[1].strip()
        problem = f"the checkpoint is of another model: {names[:150]} ..."
        raise SettingError(key, str(cfg.model._component_), f"{problem}; {remedy}") from error


def num_token_embeddings(model: torch.nn.Module) -> int | None:
    """Return the number of token ids with an embedding; None if unknown."""
    # The text model of a multimodal model is its `decoder`.
    embeddings = getattr(getattr(model, "decoder", model), "tok_embeddings", torch.nn.Identity())
    # torchtune's fusion models keep those of added special tokens in a second table.
    tables = [part for part in embeddings.modules() if isinstance(part, torch.nn.Embedding)]
    return sum(table.num_embeddings for table in tables) or None


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by their names in checkpoints, without the names of wrappers."""
    return {parameter_name(name): parameter for name, parameter in model.named_parameters()}


class FusedRMSNorm(modules.RMSNorm):  # type: ignore[misc]
    """RMSNorm as one operation, which keeps only its input for backward; torchtune's also keeps
    float32 copies of input and output.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.normalized_shape, self.scale, self.eps)


def apply_checkpointing(model: torch.nn.Module, cfg: DictConfig) -> None:
    """Recompute activations as configured.

    These are the activations of each layer or, with `ac_mode`, of the layers that `ac_option`
    chooses.
    """
    in_all_layers = bool(cfg.get("enable_activation_checkpointing", False))
    mode = cfg.get("ac_mode", None)
    if mode is not None and not in_all_layers:
        apply_selective_activation_checkpointing(model, mode, cfg.get("ac_option", None))
    elif in_all_layers and mode is None:
        training.set_activation_checkpointing(
            model, auto_wrap_policy={modules.TransformerSelfAttentionLayer}
        )


# --- several ranks


def _parameter_device(cfg: DictConfig, device: torch.device) -> torch.device:
    """Return the device of sharded parameters: the host if FSDP offloads them."""
    return torch.device("cpu") if cfg.get("fsdp_cpu_offload", False) else device


def build_without_weights(
    cfg: DictConfig,
    builder: FullModel,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_meta: bool,
    reads_shards: bool = False,
) -> torch.nn.Module:
    """Return the model before its weights are loaded, compiled and recomputing activations as
    configured. Several ranks shard it by tensor parallelism, then by FSDP2.

    The order of these steps is that of torchtune's recipe.

    Args:
        cfg: configuration of the recipe.
        builder: builder of the model.
        dtype: dtype of the parameters.
        device: device of the run.
        on_meta: whether to build on the meta device.
        reads_shards: whether each rank then reads its shards of all weights from a checkpoint.

    Raises:
        SettingError: the model is for another recipe, or cannot be sharded as configured.
    """
    built_on = torch.device("meta") if on_meta else device
    model = builder.new_model(cfg, dtype=dtype, device=built_on)
    builder.check(model, cfg)
    builder.freeze(model)
    if cfg.compile:
        training.compile_model(model, verbose=distributed.is_rank_zero())
    if distributed.world_size() == 1:
        apply_checkpointing(model, cfg)
        return model
    # Fusion layers rename their parameters in state dicts, and load_from_rank_zero() looks for the
    # other names.
    has_fusion = any(isinstance(each, FusionLayer | FusionEmbedding) for each in model.modules())
    if has_fusion and not reads_shards:
        remedy = "torch cannot load torchtune's fusion layers on several ranks; use one device"
        raise SettingError(builder.key, component_of(cfg.model), remedy)
    dp_size = distributed.data_parallel_size()
    tp_size = distributed.world_size() // dp_size
    mesh = init_device_mesh(device.type, mesh_shape=(dp_size, tp_size), mesh_dim_names=("dp", "tp"))
    # By name, before wrappers change the names.
    tied = _tied_modules(model)
    if tp_size > 1:
        plan = instantiate("tensor_parallel_plan", cfg.tensor_parallel_plan)
        with refusing("tensor_parallel_dim", tp_size, "give a divisor of the numbers of heads"):
            model = training.prepare_mha_for_tp(model, mesh["tp"])
        with refusing("tensor_parallel_plan", cfg.tensor_parallel_plan._component_):
            _refuse_sharding_tied(plan, tied, tp_size)
            parallelize_module(model, mesh["tp"], parallelize_plan=plan)
    # Activation checkpointing wraps the modules that tensor parallelism has changed, and FSDP wraps
    # the result.
    apply_checkpointing(model, cfg)
    if dp_size > 1:
        _shard(model, cfg, mesh["dp"], tied)
    return model


def _refuse_sharding_tied(plan: Mapping[str, Any], tied: set[str], tp_size: int) -> None:
    """Raise SettingError if a plan shards weights that a tied output layer uses, too."""
    for pattern in plan:
        if any(fnmatch(name, pattern) for name in tied):
            remedy = (
                f"the model's output layer is tied to {pattern}, whose weights the plan"
                " divides; give 1, and ranks divide the model by FSDP alone"
            )
            raise SettingError("tensor_parallel_dim", tp_size, remedy)


def _shard(model: torch.nn.Module, cfg: DictConfig, mesh: DeviceMesh, tied: set[str]) -> None:
    """Shard the model by FSDP2.

    Args:
        model: model to shard.
        cfg: configuration.
        mesh: device mesh of the ranks.
        tied: names of the layers whose weights the output layer uses too.

    Raises:
        SettingError: `custom_sharded_layers` has an unknown layer, or one with tied weights.
    """
    layers = list(cfg.get("custom_sharded_layers") or ())
    unknown = [name for name in layers if name not in dict(model.named_modules())]
    if unknown:
        children = [name for name, _ in model.named_children()]
        remedy = f"the model has no {unknown[0]}; {nearest(unknown[0], children)}"
        raise SettingError("custom_sharded_layers", layers, remedy)
    reshards = bool(cfg.get("fsdp_reshard_after_forward", True))
    tied_layers = [name for name in layers if name in tied]
    # FSDP frees the gathered weights of such a layer after its forward. The output layer, which
    # runs last, would find only this rank's shard of them.
    if tied_layers and reshards:
        problem = (
            f"the output layer is tied to {tied_layers[0]}, and needs its weights after it was"
            " called"
        )
        remedy = f"{problem}; leave it out, or set fsdp_reshard_after_forward=False"
        raise SettingError("custom_sharded_layers", layers, remedy)
    training.shard_model(
        model=model,
        shard_conditions=[partial(training.get_shard_conditions, names_to_match=layers)],
        cpu_offload=bool(cfg.get("fsdp_cpu_offload", False)),
        reshard_after_forward=reshards,
        dp_mesh=mesh,
    )


def _tied_modules(model: torch.nn.Module) -> set[str]:
    """Return the names of modules whose weights a tied output layer uses."""
    # TiedLinear is no module, so modules() does not list it: it is an attribute of the decoder.
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
    """Load each rank's shards of whole tensors that rank 0 has; a collective.

    Without `strict`, tensors of the model that rank 0 does not have keep their values.
    """
    # torch needs the dtypes of the model, and the base model's files may have others.
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    state = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in whole.items()}
    offload = bool(cfg.get("fsdp_cpu_offload", False))
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=strict, cpu_offload=offload
    )
    with warnings.catch_warnings():
        # These warnings are about calls that torch makes itself, so users cannot act on them.
        warnings.filterwarnings(
            "ignore", message=".*_get_pg_default_device|Multiple backends are registered"
        )
        with refusing_other_weights(model, state, cfg, key=key):
            set_model_state_dict(model, state, options=options)


def compute_rotary_buffers(
    model: torch.nn.Module, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Compute the tables of rotary embeddings, which no checkpoint holds."""
    with training.set_default_dtype(dtype), device:
        for module in model.modules():
            if hasattr(module, "rope_init"):
                cast(Any, module).rope_init()


# --- frozen models


class FrozenModel:
    """The frozen model that a task compares with: the base of adapters, or a second model.

    Args:
        policy: the trained model.
        second: second model, which the constructor freezes; None for the policy with its adapters
            disabled.

    Attributes:
        second: second model, or None.
        models: both models as one module; the trained model alone if there is no second one.
    """

    def __init__(self, policy: torch.nn.Module, second: torch.nn.Module | None = None) -> None:
        self._policy = policy
        self.second = second
        self.models = policy
        if second is not None:
            self.models = torch.nn.ModuleList([policy, second])
            second.requires_grad_(False)
            second.eval()

    @torch.no_grad()
    def logits(self, **batch: Any) -> torch.Tensor | list[torch.Tensor]:
        """Return the frozen model's logits of a batch; a list if it returns chunks."""
        logits: torch.Tensor | list[torch.Tensor]
        if self.second is None:
            with disable_adapter(self._policy):
                logits = self._policy(**batch)
            return logits
        # torch chooses a matrix product's kernel by `requires_grad`, and the kernels differ in the
        # last bits. In torchtune's single-device recipe the teacher's weights require gradients, so
        # require them here during the forward to have the same bits.
        self.second.requires_grad_(distributed.world_size() == 1)
        try:
            logits = self.second(**batch)
        finally:
            self.second.requires_grad_(False)
        return logits


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
        # The builder reads `model` and `checkpointer`, so give it a copy with this model's blocks.
        own = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
        assert isinstance(own, DictConfig)
        own.model = own[key]
        own.checkpointer = own[checkpointer_key]
        # A frozen model has no backward to recompute activations for.
        own.enable_activation_checkpointing = False
        own.ac_mode = None
        self.cfg = own

    def skeleton(self, *, dtype: torch.dtype) -> torch.nn.Module:
        """Return the model without memory, on the meta device."""
        model = self.builder.skeleton(self.cfg, dtype=dtype)
        self.builder.check(model, self.cfg)
        return model

    def prepare_build(self) -> Callable[..., torch.nn.Module]:
        """Find the files of the weights; return a function of dtype and device that builds the
        model with them.

        Raises:
            SettingError: the checkpointer cannot be built, for example because a file is missing.
        """
        key = self._checkpointer_key
        # None on other ranks, which do not use it.
        files: Any = distributed.on_rank_zero(lambda: ModelFiles(self.cfg.checkpointer, key=key))
        weights = Weights(lambda: distributed.on_rank_zero(lambda: files.load_weights()) or {})
        return partial(self.builder.build, self.cfg, weights)


# Keys of the model's block that torchtune saves with adapters, and the fix if one is missing.
_SAVED_WITH_ADAPTERS = {
    "lora_rank": "give a whole number, such as 8",
    "lora_alpha": "give a number, such as 16",
    "lora_attn_modules": "give a list, such as [q_proj,v_proj]",
    "apply_lora_to_mlp": "give True or False",
}


class AdapterModel(FullModel):
    """Fine-tuning of adapters on a frozen base.

    An export holds the adapters and, unless `save_adapter_weights_only` is set, the base with the
    adapters merged.
    """

    has_frozen_base = True

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
        for key, fix in _SAVED_WITH_ADAPTERS.items():
            if cfg.model.get(key) is None:
                remedy = f"it is missing, and is saved with adapters; {fix}"
                raise SettingError(f"model.{key}", None, remedy)
        _check_adapters_are_made(model, cfg.model)
        if has_tensor_parallelism(cfg):
            remedy = "adapters are not divided by tensor parallelism; give 1, and ranks use FSDP"
            raise SettingError("tensor_parallel_dim", cfg.tensor_parallel_dim, remedy)

    def freeze(self, model: torch.nn.Module) -> None:
        """Freeze all but the adapters."""
        set_trainable_params(model, get_adapter_params(model))

    def state(self, model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the adapters."""
        return {
            parameter_name(name): parameter for name, parameter in get_adapter_params(model).items()
        }

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
        peft_config = {
            "r": block.lora_rank,
            "lora_alpha": block.lora_alpha,
            "target_modules": modules,
        }
        if block.get("use_dora", False):
            # torchtune's recipe omits this key, so PEFT would load the adapters as LoRA.
            peft_config["use_dora"] = True
        peft_config["peft_type"] = "LORA"
        if cfg.get("save_adapter_weights_only", False):
            adapters = {
                name: distributed.whole_tensor(shard.detach()).cpu()
                for name, shard in self.state(model).items()
            }
            return {training.ADAPTER_CONFIG: peft_config, training.ADAPTER_KEY: adapters}
        state = super().to_save(model, cfg, device=device)[training.MODEL_KEY]
        if distributed.world_size() == 1:
            # Merging changes tensors in place. On a CPU they would be the model's own.
            state = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
        return {
            training.ADAPTER_CONFIG: peft_config,
            # Before merging, which removes the adapters from `state`.
            training.ADAPTER_KEY: get_adapter_state_dict(state),
            training.MODEL_KEY: get_merged_lora_ckpt(state, block.lora_rank, block.lora_alpha),
        }

    def _load(self, model: torch.nn.Module, weights: Weights, cfg: DictConfig) -> None:
        base = weights.load_base()
        with refusing_other_weights(model, base, cfg):
            # Not strict: the base has no adapters. _check_base() refuses other differences.
            keys = model.load_state_dict(base, strict=False)
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
        with training.set_default_dtype(dtype), device:
            for module in model.modules():
                if hasattr(module, "adapter_params"):
                    module.to_empty(device=_parameter_device(cfg, device))
                    module.initialize_parameters()  # type: ignore[operator]
        compute_rotary_buffers(model, dtype=dtype, device=device)
        base = weights.load_base()
        parameters = named_parameters(model)
        # Only rank 0 has the base, but every rank has to know its names.
        names = set(distributed.from_rank_zero(lambda: list(base)))
        missing, unexpected = parameters.keys() - names, names - parameters.keys()
        self._check_base(model, sorted(missing), sorted(unexpected), cfg)
        quantized = {
            name
            for name in names
            if isinstance(distributed.local_part(parameters[name]), NF4Tensor)
        }
        load_from_rank_zero(
            model, {name: base[name] for name in base if name not in quantized}, cfg, strict=False
        )
        # load_from_rank_zero() cannot shard NF4 tensors. torchtune's function can, if every rank
        # has the whole tensor. Send one at a time, so that a device holds only one whole tensor.
        for name in sorted(quantized):
            whole = torch.empty(parameters[name].shape, dtype=dtype, device=device)
            if name in base:
                whole.copy_(base[name])
            distributed.broadcast(whole)
            offload = bool(cfg.get("fsdp_cpu_offload", False))
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
        """Raise SettingError if the base lacks a tensor other than an adapter's, or has another."""
        adapters = self.state(model)
        differences = [f"it has no {name}" for name in missing if name not in adapters]
        differences += [f"its {name} is none of the model's" for name in unexpected]
        if differences:
            remedy = (
                f"the checkpoint is of another model: {differences[0]}; give the model that the"
                " checkpoint is of"
            )
            raise SettingError("model", str(cfg.model._component_), remedy)

    def _load_adapters(self, model: torch.nn.Module, weights: Weights) -> None:
        """Load the adapters of the checkpoint; without one, new adapters keep their initial values.

        The base has to be loaded before.
        """
        for module in model.modules():
            # DoRA's magnitudes are norms of the base's weights.
            if hasattr(module, "initialize_dora_magnitude"):
                module.initialize_dora_magnitude()  # type: ignore[operator]
        if weights.load_shards is not None:
            weights.load_shards(self.state(model))


def _check_adapters_are_made(model: torch.nn.Module, block: DictConfig) -> None:
    """Raise for a key of adapters that the model's builder ignores."""
    adapters = {
        name: module for name, module in model.named_modules() if hasattr(module, "adapter_params")
    }
    # The last parts of their names, such as q_proj.
    modules = {name.rpartition(".")[2] for name in adapters}
    # True if the model has the adapters of the key.
    has_effect = {
        "apply_lora_to_mlp": any("mlp" in name.split(".") for name in adapters),
        "apply_lora_to_output": "output" in modules,
        "use_dora": any(hasattr(module, "magnitude") for module in adapters.values()),
        "lora_dropout": any(
            isinstance(getattr(module, "dropout", None), torch.nn.Dropout)
            for module in adapters.values()
        ),
        "quantize_base": any(
            getattr(module, "_quantize_base", False) for module in adapters.values()
        ),
        "lora_attn_modules": modules.issuperset(block.lora_attn_modules),
    }
    for key, key_has_effect in has_effect.items():
        if block.get(key) and not key_has_effect:
            remedy = (
                f"{component_of(block)} adds no such adapters to the model (it has adapters of"
                f" {', '.join(sorted(modules))}); give names of these, or remove it"
            )
            raise SettingError(f"model.{key}", block[key], remedy)


def builder_of(cfg: DictConfig) -> FullModel:
    """Return the builder of the configured model."""
    block = cfg.get("model", None)
    # Every builder of adapters in torchtune takes this key, and no other builder does.
    if isinstance(block, DictConfig) and "lora_attn_modules" in block:
        return AdapterModel()
    return FullModel()
