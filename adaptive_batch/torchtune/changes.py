"""Single changes of a configuration that need less memory: estimates try them, and errors about
memory suggest them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torchtune import modules

from adaptive_batch.estimate import AllocatorSettings, check_compiler

from .checks import has_tensor_parallelism
from .configuration import load_function

# Optimizers that have a fused step.
_FUSED = ("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD")


@dataclass(frozen=True)
class Candidate:
    """A change to estimate.

    Attributes:
        overrides: arguments and environment variables to type.
        cost: sentence about the drawback of the change.
        sequence_length: new length of the rows; None if it stays.
        world_size: new number of ranks; None if it stays.
        allocator: new settings of the allocator; None if they stay.
    """

    overrides: tuple[str, ...]
    cost: str
    sequence_length: int | None = None
    world_size: int | None = None
    allocator: AllocatorSettings | None = None


def candidates(
    cfg: DictConfig, model: torch.nn.Module, *, tokens: int, world_size: int
) -> Iterator[Candidate]:
    """Yield the single changes that apply to a configuration.

    Args:
        cfg: configuration.
        model: model of the configuration; it may be without memory.
        tokens: tokens of a row.
        world_size: ranks that share the model.
    """
    if str(cfg.device) != "cpu" and not AllocatorSettings.from_environment().expandable_segments:
        yield Candidate(
            ("PYTORCH_ALLOC_CONF=expandable_segments:True",),
            "an environment variable; PyTorch's allocator then leaves less of its memory unused",
            allocator=AllocatorSettings(expandable_segments=True),
        )
    if tokens >= 256:
        half = tokens // 2
        yield Candidate(
            (f"tokenizer.max_seq_len={half}",),
            f"rows are cut to {half} tokens",
            sequence_length=half,
        )
    for overrides, cost in _single_changes(cfg, model, world_size):
        yield Candidate(tuple(overrides), cost)
    is_compiled = bool(cfg.get("compile", False)) and str(cfg.device) != "cpu"
    # A budget changes only compiled steps, and only those that can be estimated are candidates.
    if is_compiled and not has_tensor_parallelism(cfg) and check_compiler() is None:
        budget = cfg.get("activation_memory_budget", None)
        # Yield all smaller budgets: the smallest does not always need the least memory.
        for share in (0.5, 0.3, 0.15):
            if budget is None or share < float(budget):
                cost = "each compiled part computes in backward what is cheapest to compute again"
                yield Candidate((f"activation_memory_budget={share}",), cost)
    for ranks in (2, 4, 8, 16, 32, 64, 128):
        if ranks > world_size:
            cost = f"{ranks} devices, which exchange each layer's parameters; rows of each device"
            yield Candidate((f"--nproc_per_node {ranks}",), cost, world_size=ranks)


def memory_remedies(cfg: DictConfig, model: torch.nn.Module, *, world_size: int) -> str:
    """Return the end of an error about a row that does not fit: the changes that apply to the
    configuration.
    """
    overrides = [" ".join(overrides) for overrides, _ in _single_changes(cfg, model, world_size)]
    remedy = "shorten the rows (tokenizer.max_seq_len) or allow more memory"
    return f"{remedy}, or set {', or '.join(overrides)}" if overrides else remedy


def _single_changes(
    cfg: DictConfig, model: torch.nn.Module, world_size: int
) -> Iterator[tuple[Sequence[str], str]]:
    """Yield the overrides and the cost of each change that applies."""
    changes = [*_changes_of_memory(cfg, model), *_changes_of_optimizer(cfg, world_size)]
    if "lora_attn_modules" in cfg.model:
        changes += _changes_of_adapters(cfg.model)
    for applies, overrides, cost in changes:
        if applies:
            yield overrides, cost


# For each change: whether it applies, its overrides and its cost.
_Changes = list[tuple[bool, Sequence[str], str]]


def _changes_of_memory(cfg: DictConfig, model: torch.nn.Module) -> _Changes:
    """Return changes of the activations, of the loss and of the dtype that save memory, with the
    condition under which each applies.
    """
    recomputes = cfg.get("enable_activation_checkpointing") or cfg.get("ac_mode") is not None
    dtype = str(cfg.dtype)
    loss = str(cfg.loss._component_)
    distils = cfg.get("kd_loss", None) is not None
    # More chunks need less memory. Both losses of a distillation take logits in the same chunks.
    more_chunks = 4 * int(cfg.loss.get("num_output_chunks", 8))
    losses = ("loss", "kd_loss") if distils else ("loss",)
    return [
        (
            not recomputes,
            ["enable_activation_checkpointing=True"],
            "each layer's forward runs again in backward: up to a third more compute",
        ),
        (
            not recomputes,
            ["ac_mode=selective", "ac_option=2"],
            "every second layer's forward runs again: up to a sixth more compute",
        ),
        (
            dtype in ("bf16", "bfloat16")
            and any(type(module) is modules.RMSNorm for module in model.modules()),
            ["fused_rms_norm=True"],
            "norms are one operation each: results differ by rounding",
        ),
        (
            loss in ("torch.nn.CrossEntropyLoss", "torchtune.modules.loss.CrossEntropyLoss")
            and not distils,
            ["loss=torchtune.modules.loss.CEWithChunkedOutputLoss"],
            "the same loss, summed in 8 parts",
        ),
        (
            loss.endswith("CEWithChunkedOutputLoss"),
            [f"{name}.num_output_chunks={more_chunks}" for name in losses],
            f"the same loss, summed in {more_chunks} parts",
        ),
        (
            dtype in ("fp32", "float32"),
            ["dtype=bf16"],
            "weights, gradients and states with 8 bits of precision: results differ",
        ),
    ]


def _changes_of_optimizer(cfg: DictConfig, world_size: int) -> _Changes:
    """Return changes of the optimizer's states and step, and of the sharding over several ranks."""
    optimizer = str(cfg.optimizer._component_)
    in_backward = ["optimizer_in_bwd=True"]
    # Keys that an optimizer in backward does not allow.
    if int(cfg.get("gradient_accumulation_steps", 1) or 1) > 1:
        in_backward.append("gradient_accumulation_steps=1")
    if cfg.get("clip_grad_norm", None) is not None:
        in_backward.append("clip_grad_norm=null")
    given = [key for key in ("fused", "foreach") if cfg.optimizer.get(key, None) is not None]
    is_sharded = world_size > 1
    return [
        (
            not cfg.get("optimizer_in_bwd", False)
            and not (is_sharded and optimizer.startswith("torchao.")),
            in_backward,
            "no accumulation, no clipping, and no retry of a step that runs out of memory",
        ),
        (
            optimizer in ("torch.optim.AdamW", "torch.optim.Adam"),
            [
                f"optimizer=torchao.optim.{optimizer.rpartition('.')[2]}8bit",
                # torchao's optimizers do not take these keys.
                *(f"~optimizer.{key}" for key in given),
            ],
            "the optimizer's states are rounded to 8 bits",
        ),
        (
            optimizer in _FUSED and not any(cfg.optimizer[key] for key in given),
            ["optimizer.fused=True"],
            "the optimizer's step is one kernel: results differ by rounding",
        ),
        (
            is_sharded and not cfg.get("fsdp_reshard_after_forward", True),
            ["fsdp_reshard_after_forward=True"],
            "each layer is gathered again in backward",
        ),
        (
            is_sharded and cfg.get("sync_gradients_every_micro_batch", None) is False,
            ["sync_gradients_every_micro_batch=True"],
            "gradients are reduced after each micro-batch",
        ),
    ]


def _changes_of_adapters(block: DictConfig) -> _Changes:
    """Return changes of the adapters, and the quantization of their base."""
    module, _, name = str(block._component_).rpartition(".")
    builder = load_function(block._component_, key="model._component_")
    rank = int(block.get("lora_rank", 8))
    # torchtune has qlora_NAME beside most builders lora_NAME. Other builders may take the key.
    has_qlora_builder = name.startswith("lora_") and hasattr(sys.modules.get(module), f"q{name}")
    takes_key = "quantize_base" in inspect.signature(builder).parameters
    is_quantized = block.get("quantize_base", False) or name.startswith("qlora_")
    quantize = f"model={module}.q{name}" if has_qlora_builder else "model.quantize_base=True"
    return [
        (rank > 1, [f"model.lora_rank={rank // 2}"], "adapters of half the rank hold less"),
        (
            bool(block.get("apply_lora_to_mlp", False)),
            ["model.apply_lora_to_mlp=False"],
            "no adapters in the MLP, whose inputs are then not kept",
        ),
        (
            bool({*block.lora_attn_modules} - {"q_proj", "v_proj"}),
            ["model.lora_attn_modules=[q_proj,v_proj]"],
            "adapters of queries and values alone in attention",
        ),
        (
            has_qlora_builder or (takes_key and not is_quantized),
            [quantize],
            "the base has 4 bits (NF4): it is rounded, and made whole again in each forward and"
            " backward",
        ),
    ]
