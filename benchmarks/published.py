"""What others have published of the memory of training on GPUs, beside what an estimate says of the
same step.

    python benchmarks/published.py [--only TEXT] [--output DIR]
    adaptive-batch emulate --device a100-80gb -- python benchmarks/published.py --emulated

published_memory.csv has the figures, each with its source, what is known of how it was measured,
and what is not. A row is estimated where its code is known: model, library versions, loss, lengths.
What was known from the published bytes alone is said at `MODELS`. A figure of kernels that are not
PyTorch's, or of ranks, can be compared as well where the optimizer's step is the peak, since that
is the same with all kernels; it is taken to be where forward and backward of PyTorch's kernels,
which hold more, stay below it. Each of the others is listed with the reason why there is no
estimate. ``--emulated`` runs the steps of Trainer whose code is known on the device of this process
instead.
"""

from __future__ import annotations

import csv
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import records
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchtune.models.llama2 import llama2_7b
from torchtune.models.llama3 import llama3_8b
from torchtune.models.llama3_1 import Llama3ScaledRoPE, llama3_1_8b
from torchtune.models.llama3_2 import llama3_2_3b
from torchtune.modules import RMSNorm as TorchtuneRMSNorm
from torchtune.modules import RotaryPositionalEmbeddings
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.models.granite.modeling_granite import GraniteRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from adaptive_batch.distributed import Sharding, fake_process_group
from adaptive_batch.estimate import (
    AllocatorSettings,
    CachingAllocator,
    CompiledParts,
    CudaKernels,
    FakeDevice,
    FakeStep,
    LengthEstimate,
    MemoryEstimate,
    cuda_operators,
    estimate_memory,
)
from adaptive_batch.memory import GIB
from adaptive_batch.torchtune import builder_of, estimate_devices

CONFIGS = Path(__file__).parents[1] / "configs"
TABLE = Path(__file__).with_name("published_memory.csv")
IGNORED = -100
FAKE_ATTENTION = (
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_like.default,
)  # what an estimate makes of it

SAME_CODE = "the same code"
OPTIMIZERS_STEP = "other kernels: the optimizer's step is the peak"
ON_RANKS = "FSDP1: the optimizer's step is the peak"
FSDP2 = "FSDP2 with mixed precision, 8 ranks"
FSDP2_RESERVED = "FSDP2 with mixed precision, reserved memory"
FSDP2_COMPILED = "FSDP2 with mixed precision, compiled by layer, reserved memory"
COMPILED = "compiled: torchtune 0.4, beside the recipe of today"
OUT_OF_MEMORY = "ran out of memory"


@dataclass(frozen=True)
class Published:
    """A figure, with what is known of how it was measured; columns as in the table."""

    id: str
    model: str
    method: str
    framework: str
    torch: str
    checkpointing: str
    compile: str
    loss: str
    rows: str
    length: str
    gpus: str
    sharding: str
    figure: str
    gib: str
    bytes: str
    resident_bytes: str
    nvidia_smi_mib: str
    not_known: str
    source: str

    @property
    def is_fms(self) -> bool:
        return self.id.startswith("fms-")

    @property
    def is_lora(self) -> bool:
        return self.method.startswith("LoRA")

    @property
    def ran_out(self) -> bool:
        return self.gib == "OOM"

    @property
    def is_whole(self) -> bool:
        """True if all of a step of Trainer is known; kernels that are not PyTorch's hold less."""
        return self.is_fms and int(self.gpus) == 1 and (self.ran_out or self.loss == "CE")

    @property
    def is_compiled(self) -> bool:
        return self.compile == "yes"

    @property
    def keeps_logits(self) -> bool:
        """Whether logits are held in bfloat16 too; one version is enough for what is far too
        large.
        """
        return "transformers 4.48" in self.framework and not self.ran_out

    @property
    def peak_bytes(self) -> float:
        return float(self.bytes or float(self.gib) * GIB)


@dataclass(frozen=True)
class Compared:
    """A published figure beside the estimate; `error` above 0 where the estimate is too high, None
    where there is no figure.

    `reserved_bytes` is by the rules of this version of PyTorch, where `nvidia_smi_bytes` is by
    those of then, and with the context.
    """

    id: str
    group: str
    published_bytes: float | None
    estimated_bytes: int | None
    error: float | None
    resident_error: float | None
    reserved_bytes: int | None
    nvidia_smi_bytes: int | None
    fits: bool
    fitted: bool


@dataclass(frozen=True)
class NotEstimated:
    """A row that is not compared, and why."""

    id: str
    reason: str


# --- models


def causal(
    module: nn.Module,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Any, None]:
    """Flash attention as in the package flash-attn: causal, key heads are not copied, no mask,
    dropout keeps nothing.
    """
    shared = query.shape[1] != key.shape[1]
    result = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=shared
    )
    return result.transpose(1, 2).contiguous(), None


AttentionInterface.register("causal", causal)
AttentionMaskInterface.register("causal", lambda *_, **__: None)

# Sizes are those of the published configurations. Read off the published bytes: vocabularies of
# Mistral (32000 and one for padding) and santacoder, biases of PowerLM; santacoder's rows have 2048
# tokens by the tokens a second that were published with them.
MODELS: dict[str, Callable[[], tuple[type[PreTrainedModel], Any]]] = {
    "mistralai/Mistral-7B-v0.1": lambda: (
        MistralForCausalLM,
        MistralConfig(
            vocab_size=32001, intermediate_size=14336, num_key_value_heads=8, sliding_window=None
        ),
    ),
    "meta-llama/Meta-Llama-3-8B": lambda: (
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=128257,
            intermediate_size=14336,
            num_key_value_heads=8,
            max_position_embeddings=8192,
        ),
    ),
    "NousResearch/Llama-2-70b-hf": lambda: (
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=32001,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            max_position_embeddings=4096,
        ),
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": lambda: (
        MixtralForCausalLM,
        MixtralConfig(vocab_size=32001, sliding_window=None, experts_implementation="grouped_mm"),
    ),
    "ibm/PowerLM-3b": lambda: (
        GraniteForCausalLM,
        GraniteConfig(
            vocab_size=49152,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=40,
            num_attention_heads=36,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            logits_scaling=9.0,
        ),
    ),
    "bigcode/gpt_bigcode-santacoder": lambda: (
        GPTBigCodeForCausalLM,
        GPTBigCodeConfig(
            vocab_size=49158,
            n_embd=2048,
            n_head=16,
            n_inner=8192,
            n_layer=24,
            n_positions=2048,
            bos_token_id=0,
            eos_token_id=0,
        ),
    ),
}
WITHOUT_DECAY = (
    nn.LayerNorm,
    LlamaRMSNorm,
    GraniteRMSNorm,
)  # Trainer's list of then, which lacks MistralRMSNorm


class LoRA(nn.Module):
    """A frozen linear layer with an adapter in float32, as PEFT makes it for a model in
    bfloat16.
    """

    def __init__(
        self, base: nn.Linear, *, rank: int = 16, alpha: int = 16, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False, device="meta")
        self.b = nn.Linear(rank, base.out_features, bias=False, device="meta")
        self.dropout = nn.Dropout(dropout)
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        adapted = self.b(self.a(self.dropout(x.to(self.a.weight.dtype)))) * self.scale
        return (result + adapted).to(result.dtype)


def with_adapters(
    model: PreTrainedModel, names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
) -> None:
    """Freeze a model and give adapters to the linear layers of these names."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names:
                setattr(module, name, LoRA(child))
    model.enable_input_require_grads()


# --- the step of Hugging Face's Trainer


def mean_loss(model: PreTrainedModel, batch: dict[str, Any], *, keeps_logits: bool) -> torch.Tensor:
    """The loss as transformers 4.45 made it; 4.48 still holds the logits in bfloat16 while it works
    in float32.
    """
    with keeping_presents(model) if isinstance(model, GPTBigCodeForCausalLM) else nullcontext():
        hidden = model.get_decoder()(
            input_ids=batch["input_ids"], use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden)
        if isinstance(model, GPTBigCodeForCausalLM):  # never in float32
            return shifted_loss(logits, batch["labels"])
        if isinstance(model, GraniteForCausalLM):
            logits = logits / model.config.logits_scaling
        in_float = logits.float()
        if not keeps_logits:
            del logits
        return shifted_loss(in_float, batch["labels"])


@contextmanager
def keeping_presents(model: GPTBigCodeForCausalLM) -> Iterator[None]:
    """Keep keys and values of all layers until the loss is there, and with them the projections
    that they are views of.

    ``use_cache`` was on in that model, whose layers are checkpointed in the way that runs forward
    without gradients.
    """
    kept: list[torch.Tensor] = []
    hooks = [
        layer.attn.c_attn.register_forward_hook(
            lambda *call: None if torch.is_grad_enabled() else kept.append(call[-1])
        )
        for layer in model.transformer.h
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each token's prediction of the next."""
    predictions = logits[..., :-1, :].contiguous()
    return functional.cross_entropy(
        predictions.view(-1, predictions.shape[-1]),
        labels[..., 1:].contiguous().view(-1),
        ignore_index=IGNORED,
    )


@dataclass(frozen=True)
class TrainerStep:
    """What a step of Hugging Face's Trainer is made of.

    Attributes:
        model: each layer of it is checkpointed.
        optimizer: foreach AdamW.
        batch: two rows.
        mean_loss: the loss of a batch.
    """

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    batch: dict[str, torch.Tensor]
    mean_loss: Callable[[dict[str, torch.Tensor]], torch.Tensor]

    @classmethod
    def of(
        cls,
        model_name: str,
        *,
        is_lora: bool,
        keeps_logits: bool,
        length: int,
        place: Callable[[nn.Module], None] = lambda model: None,
    ) -> TrainerStep:
        """Make the step of a model in bfloat16, without autocast, on the meta device or where
        ``place`` moves it.
        """
        kind, config = MODELS[model_name]()
        config._attn_implementation = "causal"
        with torch.device("meta"):
            model = kind(config).to(torch.bfloat16)
        model.activation_checkpointing_enable({"use_reentrant": True})
        if is_lora:
            with_adapters(model)
        place(model)
        norms = {
            parameter
            for module in model.modules()
            if isinstance(module, WITHOUT_DECAY)
            for parameter in module.parameters()
        }
        trained = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        plain = [parameter for name, parameter in trained if parameter in norms or "bias" in name]
        decayed = [
            parameter for _, parameter in trained if not any(parameter is one for one in plain)
        ]
        groups = [
            {"params": decayed, "weight_decay": 0.01},
            {"params": plain, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=1e-5, foreach=True
        )
        batch = {
            name: torch.ones(2, length, dtype=torch.int64)
            for name in ("input_ids", "labels", "attention_mask")
        }
        return cls(model, optimizer, batch, partial(mean_loss, model, keeps_logits=keeps_logits))


@cache
def trainer_step(
    model_name: str, *, is_lora: bool, keeps_logits: bool, length: int, rows: int | None = None
) -> MemoryEstimate:
    """Estimate a step of Hugging Face's Trainer on an A100."""
    step = TrainerStep.of(model_name, is_lora=is_lora, keeps_logits=keeps_logits, length=length)
    devices, maximum = (DEVICES, rows) if rows else (DEVICES[:1], 32)
    return estimate_memory(
        step.model,
        step.batch,
        step.optimizer,
        devices,
        mean_loss=step.mean_loss,
        max_grad_norm=1.0,
        maximum=maximum,
        headroom=0,
    )


def run_trainer_step(row: Published, steps: int = 3) -> int | None:
    """Run a step of Hugging Face's Trainer on the CUDA device, which an A100 has to be, and return
    the peak of allocated bytes; None where it runs out of memory.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        step = TrainerStep.of(
            row.model,
            is_lora=row.is_lora,
            keeps_logits=row.keeps_logits,
            length=int(row.length),
            place=lambda model: model.to_empty(device="cuda").tie_weights(),
        )
        shape = int(row.rows), int(row.length)
        for _ in range(steps):
            batch = {
                name: torch.ones(shape, dtype=torch.int64, device="cuda") for name in step.batch
            }
            step.mean_loss(batch).backward()
            parameters = [one for one in step.model.parameters() if one.requires_grad]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            step.optimizer.step()
            step.optimizer.zero_grad()
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated()


# --- torchtune


class RMSNormOf04(nn.Module):
    """RMSNorm of torchtune 0.4, which keeps less for backward than that of 0.6.1."""

    def __init__(self, norm: TorchtuneRMSNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.scale = norm.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_fp32 = x.float()
        normed = (x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)
        return normed * self.scale


def with_norms_of_04(model: nn.Module) -> None:
    """Give a model of torchtune's, made on the meta device, those norms, and its positions their
    tables.
    """
    for module in list(model.modules()):
        if isinstance(module, Llama3ScaledRoPE | RotaryPositionalEmbeddings):
            module.rope_init()
        for name, child in list(module.named_children()):
            if isinstance(child, TorchtuneRMSNorm):
                setattr(module, name, RMSNormOf04(child))


@cache
def torchtune_step(length: int, rows: int) -> MemoryEstimate:
    """Estimate a step of torchtune 0.4 with Llama 3.2 3B: rows packed to the length, plain
    cross-entropy, nothing checkpointed, fused AdamW.
    """
    with torch.device("meta"):
        model = llama3_2_3b().to(torch.bfloat16)
    with_norms_of_04(model)
    batch = {
        name: torch.ones(2, length, dtype=torch.int64) for name in ("tokens", "labels", "input_pos")
    }

    def of_batch(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["tokens"], input_pos=batch["input_pos"])
        ignored = torch.full((batch["labels"].shape[0], 1), IGNORED, dtype=torch.int64)
        labels = torch.hstack((batch["labels"][..., 1:], ignored))
        return functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED
        )

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    return estimate_memory(
        model, batch, optimizer, DEVICES, mean_loss=of_batch, maximum=rows, headroom=0
    )


# Rows of torchtune's table, and the keys that tell them apart.
COMPILED_ROWS = {
    "tt-ladder-packed+compile+chunkedCE": ("enable_activation_checkpointing=False",),
    "tt-ladder-+AC": ("enable_activation_checkpointing=True",),
    "tt-ladder-+optimizer_in_bwd": (
        "enable_activation_checkpointing=True",
        "optimizer_in_bwd=True",
    ),
}


def compiled_step(length: int, rows: int, overrides: tuple[str, ...]) -> MemoryEstimate:
    """Estimate a compiled step of the recipe with Llama 3.2 3B: the chunked loss, fused AdamW."""
    given = [
        "compile=True",
        *overrides,
        "estimate.changes=False",
        f"estimate.sequence_lengths=[{length}]",
        f"probe.maximum={rows}",
        f"estimate.devices=[{','.join(DEVICES)}]",
    ]
    written = OmegaConf.load(CONFIGS / "llama3_2_3B.yaml")
    cfg = OmegaConf.merge(written, OmegaConf.from_dotlist(given))
    assert isinstance(cfg, DictConfig)
    return estimate_devices(cfg, show=lambda text: None, builder=builder_of(cfg))


# --- torchtitan


TITAN_MODELS = {
    "Llama-2 7B shape (dim 4096, 32 layers, 32 heads, vocab 32000)": llama2_7b,
    "Llama-3 8B": llama3_8b,
    "Llama-3.1 8B": llama3_1_8b,
}
TITAN_ROWS = {
    *("titan-165-FSDP2-ful", "titan-165-FSDP2-sel", "titan-165-compile-sel-8"),
    *("titan-202412-fsdp8", "titan-202412-fsdp8-compile", "ao-titan-8B-bf16-compile"),
    *("titan-202412-fsdp128", "titan-202412-fsdp128-compile"),
}
KEPT_OPERATORS = {
    *FAKE_ATTENTION,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def saves_every_second_product() -> Any:
    """Selective checkpointing by operation: attention and every second matrix product are kept."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_product = operation is torch.ops.aten.mm.default
        products[context.is_recompute] += is_product
        is_kept = products[context.is_recompute] % 2 if is_product else operation in KEPT_OPERATORS
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def torchtitan_step(row: Published) -> CachingAllocator:
    """Replay steps of torchtitan's FSDP2: shards in float32, bfloat16 inside. Its first version
    keeps the logits until the step ends.
    """
    ranks, length = int(row.gpus), int(row.length)
    keeps_logits = row.id.startswith("titan-165")
    with fake_process_group(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        with torch.device("meta"):
            model = TITAN_MODELS[row.model]()
        with_norms_of_04(model)
        of_all = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        selective = {"context_fn": saves_every_second_product}
        recomputing = selective if row.checkpointing == "selective (op)" else {}
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(
                layer, preserve_rng_state=False, **recomputing
            )
            if row.is_compiled:
                model.layers[number].compile()
            is_last = number == len(model.layers) - 1
            fully_shard(model.layers[number], reshard_after_forward=not is_last, **of_all)
        fully_shard(model, **of_all)
        device = FakeDevice(CudaKernels((9, 0)))
        parts = CompiledParts(device)
        parts.take_over_modules(model)
        device.move(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def forward_backward(rows: int) -> None:
            batch = {
                name: torch.ones(rows, length, dtype=torch.int64) for name in ("tokens", "labels")
            }
            device.batch(batch)
            logits = model(batch["tokens"])
            loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(0, 1))
            if not keeps_logits:
                del logits
            loss.backward()

        step = FakeStep(
            model=model,
            optimizer=optimizer,
            forward_backward=forward_backward,
            step=optimizer.step,
            accumulates=False,
            device=device,
            sharding=Sharding(model),
        )
        allocator = CachingAllocator(2**50, AllocatorSettings())
        allocator.replay(step.log(int(row.rows)))
        assert not parts.left_out, parts.left_out
        return allocator


# --- comparison

# Rows fit on the first; the second shows what they hold in any case.
DEVICES = ("A100-80GB", "1024GiB")
CUBLAS_BYTES = 2 * cuda_operators.workspace_bytes((8, 0))  # are there when the optimizer steps

NO_ESTIMATE = (
    # the first that matches: a pattern of the id, and the reason
    (
        r"^tt-ladder-baseline|^litgpt|^ao-llama2-7B|^tt-pr389|^tt-lora-tutorial",
        "lengths of the rows are not known",
    ),
    (r"^tt-ladder", "with activations offloaded"),
    (r"^ao-llama2-1B", "compiled as a whole from a script of its own"),
    (r"^ao-titan|compile", "float8, or a script whose optimizer is not known"),
    (r"^tt-readme", "compiled, and the keys are not known"),
    (
        r"^tt-2024-05|^tt-pr961|^tt-pr1530",
        "which figure and unit is not said; maintainers differ by 20% on one command",
    ),
    (
        r"^titan",
        "FSDP1, 2D, float8, or only reserved memory of an eager step, of which two are compared",
    ),
    (r"^peft", "only reserved memory is published, and the lengths of the rows are not known"),
    (r"^automodel", "what the loss keeps is not known, which is worth 45 to 61 GiB on one GPU"),
    (r"^cookbook|^liger-medusa|^thunder", "code, rows or lengths are not known"),
    (r"^qwen|^swift", "code of the model and what is measured are not known"),
)


def rows_of_table() -> list[Published]:
    """All rows."""
    columns = Published.__dataclass_fields__
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [Published(**{name: row[name] for name in columns}) for row in csv.DictReader(file)]


def compare(row: Published) -> Compared | NotEstimated:
    """A row beside the estimate."""
    if row.id == "tt-ladder-packed":
        return compared(row, SAME_CODE, torchtune_step(int(row.length), int(row.rows)))
    if row.id in COMPILED_ROWS:
        estimate = compiled_step(int(row.length), int(row.rows), COMPILED_ROWS[row.id])
        return compared(row, COMPILED, estimate)
    if row.id in TITAN_ROWS:
        return on_fsdp2(row)
    if not row.is_fms:
        return NotEstimated(
            row.id, next(reason for pattern, reason in NO_ESTIMATE if re.search(pattern, row.id))
        )
    ranks, rows = int(row.gpus), int(row.rows)
    other_code = "FSDP1" if ranks > 1 else "kernels that are not PyTorch's"
    is_whole = row.is_whole
    if not is_whole and (row.is_lora or row.ran_out):
        return NotEstimated(row.id, other_code)
    estimate_of = partial(
        trainer_step,
        row.model,
        is_lora=row.is_lora,
        keeps_logits=row.keeps_logits,
        length=int(row.length),
    )
    if is_whole:
        return (
            compared(row, OUT_OF_MEMORY, estimate_of())
            if row.ran_out
            else compared(row, SAME_CODE, estimate_of(rows=rows))
        )
    estimate = estimate_of()
    in_float = ranks > 1 and row.id.startswith(
        "fms-liger"
    )  # accelerate shards weights in float32 under bf16=True
    length, width = estimate.lengths[0], 2 if in_float else 1
    step = width * (length.optimizer_peak_bytes or 0) // ranks
    if forward_backward_bytes(length, rows, ranks=ranks, width=width) > step:
        return NotEstimated(row.id, f"{other_code}, and the optimizer's step may not be the peak")
    return compared(row, ON_RANKS if ranks > 1 else OPTIMIZERS_STEP, estimate, of_step=step)


def on_fsdp2(row: Published) -> Compared:
    """A row of torchtitan's beside the estimate; blocks that wait for another stream are taken to
    be free at once.
    """
    allocator = torchtitan_step(row)
    reserved = allocator.peak_reserved_bytes
    peak = allocator.peak_allocated_bytes
    group = FSDP2
    if row.figure == "reserved":
        peak = reserved
        group = FSDP2_COMPILED if row.is_compiled else FSDP2_RESERVED
    return Compared(
        id=row.id,
        group=group,
        published_bytes=row.peak_bytes,
        estimated_bytes=peak,
        error=peak / row.peak_bytes - 1,
        resident_error=None,
        reserved_bytes=reserved,
        nvidia_smi_bytes=None,
        fits=reserved < 95 * GIB,
        fitted=True,
    )


def forward_backward_bytes(length: LengthEstimate, rows: int, *, ranks: int, width: int) -> float:
    """Most that forward and backward can hold on one of some ranks: its share of what is resident,
    and all else.
    """
    gathered = (
        length.resident.parameters / 10 if ranks > 1 else 0
    )  # two layers, or embedding and output layer
    resident = length.resident.total
    others = length.curve.peak_bytes(rows) - resident
    return width * resident / ranks + others + gathered


def compared(
    row: Published, group: str, estimate: MemoryEstimate, *, of_step: int | None = None
) -> Compared:
    """A row beside what is estimated, or only its optimizer's step."""
    length, rows = estimate.lengths[0], int(row.rows)
    on_device, anywhere = estimate.devices[0].lengths[0], estimate.devices[-1].lengths[0]
    if of_step:
        peak, fits = (
            of_step + CUBLAS_BYTES,
            of_step + CUBLAS_BYTES <= estimate.devices[0].budget_bytes,
        )
    else:
        peak, fits = anywhere.allocated_bytes, on_device.max_batch_size_with_retries >= rows
    resident = length.resident.total + CUBLAS_BYTES
    return Compared(
        id=row.id,
        group=group,
        published_bytes=None if row.ran_out else row.peak_bytes,
        estimated_bytes=None if row.ran_out else peak,
        error=None if row.ran_out else peak / row.peak_bytes - 1,
        resident_error=(
            resident / int(row.resident_bytes) - 1 if row.resident_bytes and not of_step else None
        ),
        reserved_bytes=None if row.ran_out or of_step else anywhere.reserved_bytes,
        nvidia_smi_bytes=int(row.nvidia_smi_mib) * 2**20 if row.nvidia_smi_mib else None,
        fits=fits,
        fitted=not row.ran_out,
    )


def summary(rows: list[Compared]) -> Iterator[dict[str, Any]]:
    """For each group: how far it is off."""
    for group in dict.fromkeys(row.group for row in rows):
        here = [row for row in rows if row.group == group]
        errors = [abs(row.error) for row in here if row.error is not None]
        yield {
            "group": group,
            "rows": len(here),
            "median": median(errors) if errors else None,
            "worst": max(errors, default=None),
            "fit_or_oom_right": sum(row.fits == row.fitted for row in here),
            "said_fits_and_did_not": sum(row.fits and not row.fitted for row in here),
        }


def run_known_steps(only: str, output: Path) -> None:
    """Run the steps of Trainer that are known, and print and record the peaks beside the published
    ones.
    """
    rows = []
    for row in rows_of_table():
        if row.is_whole and only in row.id:
            peak = run_trainer_step(row)
            error = peak / row.peak_bytes - 1 if peak and not row.ran_out else None
            rows.append({"id": row.id, "bytes": peak, "error": error, "ran_out": row.ran_out})
            said = "OOM" if peak is None else f"{peak / GIB:.3f} GiB"
            published = "OOM" if row.ran_out else f"{error:+.4%}" if peak else "wrong"
            print(f"{row.id:<68} {said:>12} {published:>10}", flush=True)
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    right = sum((row["bytes"] is None) == row["ran_out"] for row in rows)
    print(f"{len(errors)} peaks, median {median(errors):.4%}, worst {max(errors):.4%}")
    print(f"fits or runs out of memory as published: {right} of {len(rows)}")
    records.write("published_emulated", output, rows=rows)


def main() -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose id has this text")
    parser.add_argument("--emulated", action="store_true", help="run the steps of Trainer")
    arguments = parser.parse_args()
    start = time.perf_counter()
    if arguments.emulated:
        run_known_steps(arguments.only, arguments.output)
        return
    rows: list[Compared] = []
    left_out: list[NotEstimated] = []
    for row in rows_of_table():
        if arguments.only not in row.id:
            continue
        result = compare(row)
        if isinstance(result, NotEstimated):
            left_out.append(result)
            continue
        rows.append(result)
        error = "" if result.error is None else f"{result.error:+.4%}"
        ratio = f"reserved {result.reserved_bytes / GIB:.2f}" if result.reserved_bytes else ""
        said = ("fits" if result.fits else "OOM") + (
            "" if result.fits == result.fitted else " (wrong)"
        )
        peak = "" if result.estimated_bytes is None else f"{result.estimated_bytes / GIB:.3f} GiB"
        print(f"{result.id:<68} {peak:>12} {error:>10} {said} {ratio}", flush=True)
    groups = list(summary(rows))
    print()
    table = records.Table("group:<52 rows:>4 median:>9.4% worst:>9.4% fit_or_oom_right:>16")
    for group in groups:
        table.print({key: "-" if value is None else value for key, value in group.items()})
    reasons: dict[str, list[str]] = defaultdict(list)
    for one in left_out:
        reasons[one.reason].append(one.id)
    print(f"\nnot estimated: {len(left_out)} of {len(left_out) + len(rows)}")
    for reason, ids in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"{len(ids):>4}  {reason}")
    records.write(
        f"published_{arguments.only}" if arguments.only else "published",
        arguments.output,
        groups=groups,
        rows=[asdict(row) for row in rows],
        not_estimated=reasons,
        seconds=round(time.perf_counter() - start, 1),
    )


if __name__ == "__main__":
    main()
