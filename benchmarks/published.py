"""Published peaks of GPU memory, compared with estimates of the same steps.

    python benchmarks/published.py [--only TEXT] [--output DIR]
    adaptive-batch emulate --device a100-80gb -- python benchmarks/published.py --emulated

published_memory.csv has the published figures with their sources and the known facts of each
measurement. A row is estimated if its code is known: model, library versions, loss and lengths.
`MODELS` notes the facts that were derived from the published bytes only. For every other row, the
output has the reason why it is not estimated. ``--emulated`` runs the steps of Trainer on the
device of this process instead.
"""

from __future__ import annotations

import csv
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import harness
import torch
from torch import nn
from torch.nn import functional
from torchtune.models.llama3_1 import Llama3ScaledRoPE
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

from adaptive_batch.estimate import (
    MemoryEstimate,
    cuda_operators,
    estimate_memory,
)
from adaptive_batch.memory import GIB

CONFIGS = Path(__file__).parents[1] / "configs"
TABLE = Path(__file__).with_name("published_memory.csv")
IGNORED = -100
SAME_CODE = "the same code"
OUT_OF_MEMORY = "ran out of memory"


class Published(SimpleNamespace):
    """A published figure and its conditions; the fields are the columns of the table."""

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
    def keeps_logits(self) -> bool:
        """True if logits are held in bfloat16 too; rows that ran out of memory need one version."""
        return "transformers 4.48" in self.framework and not self.ran_out

    @property
    def peak_bytes(self) -> float:
        return float(self.bytes or float(self.gib) * GIB)


class NotEstimated(Exception):
    """A row that is not estimated, and the reason."""


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
    """Keep keys and values of all layers until the loss is computed; they are views of the
    projections.

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
    """The parts of a step of Hugging Face's Trainer.

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
    return estimate_memory(
        step.model,
        step.batch,
        step.optimizer,
        DEVICES if rows else DEVICES[:1],
        mean_loss=step.mean_loss,
        max_grad_norm=1.0,
        maximum=rows or 32,
        headroom=0,
    )


def run_trainer_step(row: Published, steps: int = 3) -> int | None:
    """Run a step of Hugging Face's Trainer on the CUDA device, an A100, and return the peak of
    allocated bytes, or None if it runs out of memory.
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


# --- comparison

# Device of the published runs, and one on which every run fits.
DEVICES = ("A100-80GB", "1024GiB")
CUBLAS_BYTES = 2 * cuda_operators.workspace_bytes((8, 0))  # are there when the optimizer steps

NO_ESTIMATE = (
    # Pattern of the id, and the reason; the first match counts.
    (
        r"^tt-ladder-baseline|^litgpt|^ao-llama2-7B|^tt-pr389|^tt-lora-tutorial",
        "lengths of the rows are not known",
    ),
    (r"^tt-ladder", "compiled, or with activations offloaded"),
    (r"^ao-llama2-1B", "compiled as a whole by an unpublished script"),
    (r"^ao-titan|compile", "float8, or a script whose optimizer is not known"),
    (r"^tt-readme", "compiled, and the keys are not known"),
    (
        r"^tt-2024-05|^tt-pr961|^tt-pr1530",
        "figure and unit are not known; maintainers differ by 20% on one command",
    ),
    (r"^titan", "on several ranks; eight of FSDP2 are estimated at 588735d9"),
    (r"^peft", "only reserved memory is published, and the lengths of the rows are not known"),
    (r"^automodel", "the loss may keep 45 to 61 GiB more on one GPU"),
    (r"^cookbook|^liger-medusa|^thunder", "code, rows or lengths are not known"),
    (r"^qwen|^swift", "the code of the model and the measurement are not known"),
)


def rows_of_table() -> list[Published]:
    """Return all rows."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [Published(**row) for row in csv.DictReader(file)]


def compare(row: Published) -> dict[str, Any]:
    """Return a row with its estimate; errors are above 0 if the estimate is too high.

    `reserved_bytes` follows this version of PyTorch; `nvidia_smi_bytes` is published, from the
    version of then, and includes the context.

    Raises:
        NotEstimated: with the reason.
    """
    if row.id == "tt-ladder-packed":
        estimate = torchtune_step(int(row.length), int(row.rows))
    elif not row.is_fms:
        raise NotEstimated(next(why for pattern, why in NO_ESTIMATE if re.search(pattern, row.id)))
    elif not row.is_whole:
        raise NotEstimated("FSDP1" if int(row.gpus) > 1 else "kernels that are not PyTorch's")
    else:
        estimate = trainer_step(
            row.model,
            is_lora=row.is_lora,
            keeps_logits=row.keeps_logits,
            length=int(row.length),
            rows=None if row.ran_out else int(row.rows),
        )
    on_device, anywhere = estimate.devices[0].lengths[0], estimate.devices[-1].lengths[0]
    found = {
        "id": row.id,
        "group": OUT_OF_MEMORY if row.ran_out else SAME_CODE,
        "fits": on_device.max_batch_size >= int(row.rows),
        "fitted": not row.ran_out,
    }
    if row.ran_out:
        return found | {"error": None}
    resident = estimate.lengths[0].resident.total + CUBLAS_BYTES
    return found | {
        "published_bytes": row.peak_bytes,
        "estimated_bytes": anywhere.allocated_bytes,
        "error": anywhere.allocated_bytes / row.peak_bytes - 1,
        "resident_error": resident / int(row.resident_bytes) - 1 if row.resident_bytes else None,
        "reserved_bytes": anywhere.reserved_bytes,
        "nvidia_smi_bytes": int(row.nvidia_smi_mib) * 2**20 if row.nvidia_smi_mib else None,
    }


def summary(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the errors of each group."""
    for group in dict.fromkeys(row["group"] for row in rows):
        here = [row for row in rows if row["group"] == group]
        errors = [abs(row["error"]) for row in here if row["error"] is not None]
        yield {
            "group": group,
            "rows": len(here),
            "median": median(errors) if errors else None,
            "worst": max(errors, default=None),
            "fit_or_oom_right": sum(row["fits"] == row["fitted"] for row in here),
        }


def run_known_step(row: Published) -> dict[str, Any]:
    """Run a step of Trainer, and compare its peak with the published one."""
    peak = run_trainer_step(row)
    error = peak / row.peak_bytes - 1 if peak and not row.ran_out else None
    return {
        "id": row.id,
        "group": OUT_OF_MEMORY if row.ran_out else SAME_CODE,
        "estimated_bytes": peak,
        "error": error,
        "fits": peak is not None,
        "fitted": not row.ran_out,
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose id has this text")
    parser.add_argument("--emulated", action="store_true", help="run the steps of Trainer")
    arguments = parser.parse_args()
    start = time.perf_counter()
    table = harness.Table("id:<68 GiB:>8.3f error:>9.4% fits:>5 fitted:>6")
    rows: list[dict[str, Any]] = []
    reasons: dict[str, list[str]] = defaultdict(list)
    chosen = [row for row in rows_of_table() if arguments.only in row.id]
    for row in chosen:
        if arguments.emulated and not row.is_whole:
            continue
        try:
            result = run_known_step(row) if arguments.emulated else compare(row)
        except NotEstimated as reason:
            reasons[str(reason)].append(row.id)
            continue
        rows.append(result)
        peak = result.get("estimated_bytes")
        table.print(result, GiB=peak and peak / GIB)
    groups = list(summary(rows))
    table = harness.Table("group:<20 rows:>4 median:>9.4% worst:>9.4% fit_or_oom_right:>16")
    for group in groups:
        table.print(group)
    print(f"\nnot estimated: {sum(map(len, reasons.values()))} of {len(chosen)}")
    for reason, ids in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"{len(ids):>4}  {reason}")
    harness.write(
        "published" + "_emulated" * arguments.emulated + f"_{arguments.only}".rstrip("_"),
        arguments.output,
        groups=groups,
        rows=rows,
        not_estimated=reasons,
        seconds=round(time.perf_counter() - start, 1),
    )


if __name__ == "__main__":
    main()
