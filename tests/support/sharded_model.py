"""A small causal transformer that is sharded over ranks, its rows, and their gradients in plain
torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.runners import IGNORED, build_runner
from support.same_state import bits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.distributed import Sharding
from adaptive_batch.training import Part, RecipeStep

VOCABULARY, WIDTH, LAYERS = 53, 16, 2
Row = dict[str, Any]


class Layer(nn.Module):
    """Attention and a feed-forward network. It has no key bias, whose gradient is rounding."""

    def __init__(self, *, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(3 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, x.shape[-1] // 2))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout * self.training
        )
        x = x + attended.transpose(1, 2).flatten(-2)
        return x + self.mlp(x)


class Decoder(nn.Module):
    """A decoder with tied embeddings and a frozen layer. Shards of its 53 words are uneven.

    Args:
        draws: whether a forward draws from each generator and updates running statistics: a counter
            in place, and a mean by replacement.
        checkpointing: whether backward recomputes the activations of each layer.
        width: width of the residual stream.
        vocabulary: number of words.
        layers: number of layers.
        dtype: dtype of the parameters.
    """

    seen: torch.Tensor
    mean: torch.Tensor

    def __init__(
        self,
        *,
        draws: bool = False,
        checkpointing: bool = False,
        width: int = WIDTH,
        vocabulary: int = VOCABULARY,
        layers: int = LAYERS,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, width, dtype=dtype)
        self.layers = nn.ModuleList(
            Layer(width=width, dropout=0.1 if draws else 0.0).to(dtype) for _ in range(layers)
        )
        self.frozen = nn.Linear(width, width, dtype=dtype).requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width, dtype=dtype))
        self.draws, self.checkpointing = draws, checkpointing
        # Bytes that the second layer allocates and frees in each phase, or a function that it
        # calls.
        self.burden: dict[str, int | Callable[[], object]] = {}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits ``[batch, sequence, vocabulary]``."""
        x = self.embed(tokens)
        if self.training and self.draws:
            x = x * (1 + 0.1 * random.random() + 0.1 * np.random.random())
            self.seen += len(tokens)
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        for number, layer in enumerate(self.layers):
            if number == 1 and self.burden:
                self._bear("forward", x)
                if x.requires_grad:
                    x.register_hook(lambda gradient: self._bear("backward", gradient))
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.frozen(x) @ self.embed.weight.T

    def _bear(self, phase: str, x: torch.Tensor) -> None:
        burden = self.burden.get(phase, 0)
        if callable(burden):
            burden()
        else:
            torch.empty(burden, dtype=torch.uint8, device=x.device)


def divided(
    model: Decoder, *, reshard_after_forward: bool = True, mesh: DeviceMesh | None = None
) -> Decoder:
    """Apply `fully_shard` to each layer and to the model, as torchtune does; on one rank, do
    nothing.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in [*model.layers, model]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return model


def padded(rows: Sequence[Row], **values: int) -> dict[str, torch.Tensor]:
    """Return a batch of the named columns of rows, padded with the given values."""
    return {
        key: pad_sequence([torch.as_tensor(row[key]) for row in rows], True, value)
        for key, value in values.items()
    }


def collate(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    return padded(rows, tokens=0, labels=IGNORED)


def token_losses(
    model: nn.Module, batch: dict[str, torch.Tensor], reduction: str = "mean"
) -> torch.Tensor:
    """Return the loss of the label tokens; labels are shifted."""
    logits = model(batch["tokens"])[:, :-1]
    labels = batch.pop("labels")[:, 1:]
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def runner_of(
    model: Decoder, limit: MicroBatchLimit, *, syncs_every_micro_batch: bool = True, **options: Any
) -> RecipeStep:
    """Return the step that trains the model; a dummy row has three tokens."""
    options.setdefault("collate", collate)
    options.setdefault("mean_loss", lambda batch: token_losses(model, batch, "mean"))
    options.setdefault("sharding", Sharding(model, syncs_every_micro_batch=syncs_every_micro_batch))
    options.setdefault("dummy_row", lambda: {"row": -1, "tokens": [1, 2, 3], "labels": [1, 2, 3]})
    return build_runner(model, limit, **options)


class RunsOutOnRankOne:
    """A function of a part that runs out of memory between two layers on rank 1.

    Args:
        function: function of a part.
        model: model that it runs.
        phase: phase of the OOM, ``forward`` or ``backward``.
        most_rows: maximum rows that fit.
        trials_fit: whether trials and checks of a split do not run out of memory.

    Attributes:
        rows: rows of each part, without those of trials.
    """

    def __init__(
        self,
        function: Callable[[Part], Any],
        model: Decoder,
        *,
        phase: str = "forward",
        most_rows: int = 10**9,
        trials_fit: bool = False,
    ) -> None:
        self.function, self.model, self.phase = function, model, phase
        self.most_rows, self.trials_fit = most_rows, trials_fit
        self.rows: list[int] = []

    def __call__(self, part: Part) -> Any:
        if not part.is_trial:
            self.rows.append(part.num_rows)
        fits = part.num_rows <= self.most_rows or (part.is_trial and self.trials_fit)
        if not fits and dist.get_rank() == 1:
            self.model.burden = {self.phase: run_out_of_memory}
        try:
            return self.function(part)
        finally:
            self.model.burden = {}


def run_out_of_memory() -> None:
    torch.empty(2**50, dtype=torch.uint8)


def make_rows(
    lengths: Sequence[int], *, unlabelled: Sequence[int] = (), seed: int = 1
) -> list[Row]:
    """Return rows of these lengths. The first one to three tokens of each row have no label; rows
    of `unlabelled` have no labels.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, length in enumerate(lengths):
        tokens = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        masked = length if number in unlabelled else 1 + number % 3
        rows.append(
            {"row": number, "tokens": tokens, "labels": [IGNORED] * masked + tokens[masked:]}
        )
    return rows


def by_hand(model: Decoder, rows: Sequence[Row]) -> tuple[dict[str, torch.Tensor], float, int]:
    """Return mean gradients, mean loss and number of label tokens, computed row by row in plain
    torch. Without labels, means are zeros.
    """
    model.zero_grad(set_to_none=True)
    loss_sum, label_tokens = 0.0, 0
    for row in rows:
        batch = collate([row])
        count = int((batch["labels"][:, 1:] != IGNORED).sum())
        if count:
            loss = token_losses(model, batch, "sum")
            loss.backward()
            loss_sum, label_tokens = loss_sum + loss.item(), label_tokens + count
    divisor = max(1, label_tokens)
    gradients = {name: sums / divisor for name, sums in whole_gradients(model).items()}
    return gradients, loss_sum / divisor, label_tokens


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the unsharded gradients; zeros for a parameter without a gradient."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            has_none = parameter.grad is None
            gradient = torch.zeros_like(parameter) if has_none else parameter.grad
            gradients[name] = whole(gradient).clone()
    return gradients


def whole_parameters(model: Decoder) -> dict[str, torch.Tensor]:
    """Return the unsharded parameters."""
    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return an unsharded tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest error relative to its tensor's largest entry; absolute for zeros."""
    assert found.keys() == expected.keys()
    errors = []
    for name, tensor in expected.items():
        largest, apart = float(tensor.abs().max()), float((found[name] - tensor).abs().max())
        errors.append(apart / largest if largest else apart)
    return max(errors)


def training_state(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the bits of all state that training on this rank depends on."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    for name, parameter in model.named_parameters():
        found |= {f"parameter {name}": parameter, f"gradient {name}": parameter.grad}
    found |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    found |= {f"training {name}": module.training for name, module in model.named_modules()}
    for number, optimizer in enumerate(optimizers):
        found[f"state {number}"] = optimizer.state_dict()
        attributes = vars(optimizer).items()
        found[f"optimizer {number}"] = [
            (name, value) for name, value in attributes if isinstance(value, int | float | str)
        ]
    return {name: bits(value) for name, value in found.items()}
