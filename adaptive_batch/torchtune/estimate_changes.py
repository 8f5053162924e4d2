"""Single changes of a configuration that may let more rows fit, each with what it costs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import cast

import torch
from omegaconf import DictConfig
from torchtune import modules

from adaptive_batch.estimate import AllocatorSettings, check_compiler

from .checks import has_tensor_parallelism
from .config_errors import merged

_EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
# Optimizers that have a fused step.
_FUSED = ("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD")
# Each is estimated, as a smaller share may need more memory.
_BUDGETS = (0.5, 0.3, 0.15)


@dataclass(frozen=True)
class Candidate:
    """A change to estimate: what is typed, what it costs, and the length, the ranks and the
    allocator's settings if they change.
    """

    overrides: tuple[str, ...]
    cost: str
    sequence_length: int | None = None
    world_size: int | None = None
    allocator: AllocatorSettings | None = None


def candidates(
    cfg: DictConfig, model: torch.nn.Module, *, tokens: int, world_size: int
) -> Iterator[Candidate]:
    """Yield the changes that apply to a configuration with rows of so many tokens.

    Args:
        model: model of the configuration; it may be without memory.
    """
    yield from _of_activations(cfg, model)
    yield from _of_optimizer(cfg, world_size)
    yield from _of_operations(cfg, model)
    if tokens >= 256:
        half = tokens // 2
        yield Candidate(
            (f"tokenizer.max_seq_len={half}",),
            f"rows are cut to {half} tokens",
            sequence_length=half,
        )
    if "lora_attn_modules" in cfg.model:
        yield from _of_adapters(cfg.model)
    yield from _of_ranks(cfg, world_size)


def _of_activations(cfg: DictConfig, model: torch.nn.Module) -> Iterator[Candidate]:
    """Yield changes of the allocator, and of what is kept for backward."""
    if str(cfg.device) != "cpu" and not AllocatorSettings.from_environment().expandable_segments:
        cost = (
            "an environment variable; PyTorch's allocator then leaves less of what it has taken"
            " unused"
        )
        yield Candidate((_EXPANDABLE,), cost, allocator=AllocatorSettings(expandable_segments=True))
    # Share of the compute.
    recomputed = _share_of_layers(model) / 3
    if not cfg.get("enable_activation_checkpointing", False) and cfg.get("ac_mode", None) is None:
        cost = f"each layer's forward runs again in backward: about {recomputed:.0%} more compute"
        yield Candidate(("enable_activation_checkpointing=True",), cost)
        cost = f"every second layer's forward runs again: about {recomputed / 2:.0%} more compute"
        yield Candidate(("ac_mode=selective", "ac_option=2"), cost)
    cost = "each compiled part computes in backward what is cheapest to compute again"
    for budget in _BUDGETS if _estimates_compiled(cfg) else ():
        if budget < _activation_budget(cfg):
            yield Candidate((f"activation_memory_budget={budget}",), cost)


def _of_optimizer(cfg: DictConfig, world_size: int) -> Iterator[Candidate]:
    """Yield changes of the optimizer, its states and its step."""
    optimizer = str(cfg.optimizer._component_)
    if not cfg.get("optimizer_in_bwd", False) and not (
        world_size > 1 and optimizer.startswith("torchao.")
    ):
        overrides = ["optimizer_in_bwd=True"]
        if int(cfg.get("gradient_accumulation_steps", 1) or 1) > 1:
            overrides.append("gradient_accumulation_steps=1")
        if cfg.get("clip_grad_norm", None) is not None:
            overrides.append("clip_grad_norm=null")
        cost = "no accumulation, no clipping, and no retry of a step that runs out of memory"
        yield Candidate(tuple(overrides), cost)
    if optimizer in ("torch.optim.AdamW", "torch.optim.Adam"):
        overrides = [f"optimizer=torchao.optim.{optimizer.rpartition('.')[2]}8bit"]
        overrides += [
            f"~optimizer.{key}"
            for key in ("fused", "foreach")
            if cfg.optimizer.get(key, None) is not None
        ]
        yield Candidate(tuple(overrides), "the optimizer's states are rounded to 8 bits")
    if optimizer in _FUSED and not any(
        cfg.optimizer.get(key, None) for key in ("fused", "foreach")
    ):
        yield Candidate(
            ("optimizer.fused=True",),
            "the optimizer's step is one kernel: results differ by rounding",
        )


def _of_operations(cfg: DictConfig, model: torch.nn.Module) -> Iterator[Candidate]:
    """Yield changes of norms, of the loss and of the dtype."""
    loss = str(cfg.loss._component_)
    is_half = str(cfg.dtype) in ("bf16", "bfloat16", "fp16", "float16")
    if is_half and any(type(module) is modules.RMSNorm for module in model.modules()):
        yield Candidate(
            ("fused_rms_norm=True",), "norms are one operation each: results differ by rounding"
        )
    is_whole = loss in ("torch.nn.CrossEntropyLoss", "torchtune.modules.loss.CrossEntropyLoss")
    # A second loss takes logits in the same chunks.
    if is_whole and cfg.get("kd_loss", None) is None:
        yield Candidate(
            ("loss=torchtune.modules.loss.CEWithChunkedOutputLoss",),
            "the same loss, summed in 8 parts",
        )
    elif loss.endswith("CEWithChunkedOutputLoss"):
        chunks = 4 * int(cfg.loss.get("num_output_chunks", 8))
        # All losses take logits in the same chunks.
        losses = ("loss",) if cfg.get("kd_loss", None) is None else ("loss", "kd_loss")
        overrides = tuple(f"{name}.num_output_chunks={chunks}" for name in losses)
        yield Candidate(overrides, f"the same loss, summed in {chunks} parts")
    if str(cfg.dtype) in ("fp32", "float32"):
        yield Candidate(
            ("dtype=bf16",),
            "weights, gradients and states with 8 bits of precision: results differ",
        )


def _of_ranks(cfg: DictConfig, world_size: int) -> Iterator[Candidate]:
    """Yield changes of what FSDP gathers and reduces, and more devices."""
    if world_size > 1 and not cfg.get("fsdp_reshard_after_forward", True):
        yield Candidate(
            ("fsdp_reshard_after_forward=True",), "each layer is gathered again in backward"
        )
    if world_size > 1 and cfg.get("sync_gradients_every_micro_batch", None) is False:
        yield Candidate(
            ("sync_gradients_every_micro_batch=True",),
            "gradients are reduced after each micro-batch",
        )
    for more in (number for number in (2, 4, 8, 16, 32, 64, 128) if number > world_size):
        cost = (
            f"{more} devices, which gather and reduce each layer's parameters; rows of each device"
        )
        yield Candidate((f"--nproc_per_node {more}",), cost, world_size=more)


def _of_adapters(block: DictConfig) -> Iterator[Candidate]:
    """Yield changes of the adapters, and the base in four bits instead of its dtype."""
    component = str(block._component_)
    rank = int(block.get("lora_rank", 8))
    if rank > 1:
        yield Candidate((f"model.lora_rank={rank // 2}",), "adapters of half the rank hold less")
    if block.get("apply_lora_to_mlp", False):
        yield Candidate(
            ("model.apply_lora_to_mlp=False",),
            "no adapters in the MLP, whose inputs are then not kept",
        )
    if {*block.lora_attn_modules} - {"q_proj", "v_proj"}:
        cost = "adapters of queries and values alone in attention"
        yield Candidate(("model.lora_attn_modules=[q_proj,v_proj]",), cost)
    module, _, name = component.rpartition(".")
    builder = getattr(import_module(module), name)
    takes_base = "quantize_base" in inspect.signature(builder).parameters
    override = ""
    if name.startswith("lora_") and hasattr(import_module(module), f"q{name}"):
        override = f"model={module}.q{name}"
    elif takes_base and not block.get("quantize_base", False) and not name.startswith("qlora_"):
        override = "model.quantize_base=True"
    if override:
        cost = (
            "the base has 4 bits (NF4): it is rounded, and made whole again in each forward and"
            " backward"
        )
        yield Candidate((override,), cost)


def _estimates_compiled(cfg: DictConfig) -> bool:
    """Return whether a step is compiled, and estimated so."""
    if not cfg.get("compile", False) or str(cfg.device) == "cpu":
        return False
    return not has_tensor_parallelism(cfg) and check_compiler() is None


def _activation_budget(cfg: DictConfig) -> float:
    """Return the share of what each compiled part would keep for backward, 1 where not given."""
    budget = cfg.get("activation_memory_budget")
    return 1.0 if budget is None else float(budget)


def with_overrides(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a configuration with overrides as torchtune's command line takes them."""
    # What is for `tune run` or the environment is no key.
    of_keys = [override for override in overrides if not override.startswith(("--", "PYTORCH"))]
    changed: DictConfig = merged(cfg, of_keys)
    return changed


def _share_of_layers(model: torch.nn.Module) -> float:
    """Return the share of a forward's multiplications that is in the layers, by parameters; a
    backward has twice as many.
    """
    sizes = {"layers": 0, "others": 0}
    for name, parameter in model.named_parameters():
        # Looking up multiplies nothing.
        if "embeddings" not in name or not hasattr(model, "output"):
            sizes["layers" if "layers." in name else "others"] += parameter.numel()
    has_output = isinstance(getattr(model, "output", None), torch.nn.Linear)
    # A tied output layer multiplies by the embeddings.
    if not has_output and hasattr(model, "tok_embeddings"):
        sizes["others"] += cast(torch.nn.Embedding, model.tok_embeddings).weight.numel()
    return sizes["layers"] / max(1, sum(sizes.values()))
