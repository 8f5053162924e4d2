"""The losses of examples/snippets/losses.py on an attention model in float64, and the same losses
computed row by row, without padding or parts.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from support.paths import ROOT
from support.sharded_model import Decoder
from torch import nn
from torch.nn.functional import kl_div, logsigmoid

from adaptive_batch.training import AdaptiveStep

SNIPPETS = "examples/snippets/losses.py"
MOST_TOKENS = 16
Batch = dict[str, torch.Tensor]


class Page:
    """The names that the snippet defines, as attributes. Its functions run decoders with different
    weights.
    """

    def __init__(self, **options: Any) -> None:
        program = ast.parse((ROOT / SNIPPETS).read_text())
        # Keep definitions only: other statements train the snippet's model.
        program.body = [node for node in program.body if _is_definition(node)]
        self.names: dict[str, Any] = {}
        exec(compile(program, SNIPPETS, "exec"), self.names)
        reference = Decoder().requires_grad_(False)
        generator = torch.Generator().manual_seed(7)
        for parameter in reference.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.add_(drawn)
        self.names.update(model=Decoder(**options), reference=reference)

    def __getattr__(self, name: str) -> Any:
        return self.names[name]

    def batch(self, lengths: list[int], *, seed: int = 3) -> Batch:
        """Return a batch whose log-probabilities differ from those of the current policy."""
        torch.manual_seed(seed)
        batch = self.make_batch(lengths)
        batch["old_log_probs"] += 0.3 * torch.randn_like(batch["old_log_probs"])
        return batch

    def pairs(self, lengths: list[int], *, seed: int = 3) -> Batch:
        torch.manual_seed(seed)
        return self.make_pairs(lengths)


def _is_definition(node: ast.stmt) -> bool:
    """Return whether a statement imports, or defines a function or a constant."""
    if isinstance(node, ast.Assign):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)


def rows_of(batch: Batch) -> list[Batch]:
    """Return each row as a batch, without padding if the batch has a mask."""
    rows = []
    for number in range(len(next(iter(batch.values())))):
        row = {key: tensor[number : number + 1] for key, tensor in batch.items()}
        if "attention_mask" in row:
            length = int(row["attention_mask"].sum())
            row = {key: part[:, :length] if part.dim() == 2 else part for key, part in row.items()}
        rows.append(row)
    return rows


def token_losses_of(page: Page, batch: Batch) -> list[torch.Tensor]:
    """Return the token losses of each completion."""
    return [page.token_losses(row)[row["completion_mask"]] for row in rows_of(batch)]


def token_mean(page: Page, batch: Batch) -> torch.Tensor:
    return torch.cat(token_losses_of(page, batch)).mean()


def sequence_mean(page: Page, batch: Batch) -> torch.Tensor:
    return torch.stack([losses.mean() for losses in token_losses_of(page, batch)]).mean()


def dr_grpo(page: Page, batch: Batch) -> torch.Tensor:
    losses = token_losses_of(page, batch)
    return torch.cat(losses).sum() / (len(losses) * MOST_TOKENS)


def dpo(page: Page, batch: Batch) -> torch.Tensor:
    losses = []
    for pair in rows_of(batch):
        margin = 0.0
        for answer, sign in (("chosen", 1), ("rejected", -1)):
            mask = pair[f"{answer}_mask"]
            tokens = pair[answer]
            policy = page.log_probs(page.model, tokens)[mask].sum()
            margin = margin + sign * (policy - page.log_probs(page.reference, tokens)[mask].sum())
        losses.append(-logsigmoid(0.1 * margin))
    return torch.stack(losses).mean()


def ratio_over_batch(page: Page, batch: Batch) -> torch.Tensor:
    """Return cross-entropy plus forward KL of completion tokens, weighted by the ratio of their
    sums.
    """
    entropies, divergences = [], []
    for row in rows_of(batch):
        entropies.append(-page.log_probs(page.model, row["tokens"])[row["completion_mask"]])
        student = page.model(row["tokens"][:, :-1]).log_softmax(-1)
        teacher = page.reference(row["tokens"][:, :-1]).log_softmax(-1)
        divergence = kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
        divergences.append(divergence[row["completion_mask"][:, 1:]])
    entropy, divergence = torch.cat(entropies), torch.cat(divergences)
    ratio = (entropy.sum() / divergence.sum()).detach()
    return (entropy + ratio * divergence).mean()


@dataclass(frozen=True)
class Case:
    """A loss of parts, and the same loss of the whole batch."""

    function: str  # name of the function for a part
    whole: Callable[[Page, Batch], torch.Tensor]
    arguments: dict[str, str] = field(
        default_factory=dict
    )  # names of functions by argument of AdaptiveStep
    makes_pairs: bool = False

    def step(self, page: Page, **options: Any) -> AdaptiveStep:
        named = {key: page.names[name] for key, name in self.arguments.items()}
        return AdaptiveStep(page.model, page.names[self.function], **named, **options)

    def batch(self, page: Page, lengths: list[int], *, seed: int = 3) -> Batch:
        return (page.pairs if self.makes_pairs else page.batch)(lengths, seed=seed)


BY_TOKENS = {"num_labels": "completion_tokens"}
CASES = {
    "mean over tokens": Case("token_mean", token_mean, BY_TOKENS),
    "mean over sequences": Case("sequence_mean", sequence_mean),
    "Dr. GRPO": Case("dr_grpo", dr_grpo),
    "DPO": Case("dpo", dpo, makes_pairs=True),
    "ratio over the batch": Case("distill", ratio_over_batch, {**BY_TOKENS, "statistics": "sums"}),
}


def whole_gradients_of(
    page: Page, whole: Callable[[Page, Batch], torch.Tensor], batch: Batch
) -> tuple[dict[str, torch.Tensor], float]:
    """Return gradients and loss of the whole batch in plain torch, and clear the gradients."""
    page.model.zero_grad(set_to_none=True)
    loss = whole(page, batch)
    loss.backward()
    return taken_gradients(page.model), loss.item()


def taken_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of a model and clear them."""
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return gradients
