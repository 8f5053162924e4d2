"""The losses of examples/snippets/losses.py with an attention model in float64, and the same losses
of a whole batch: row by row, without padding or parts.
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

from adaptive_batch.training import Part

SNIPPETS = "examples/snippets/losses.py"
MOST_TOKENS = 16
Batch = dict[str, torch.Tensor]


class Page:
    """Names that the snippet defines, as attributes.

    Args:
        model: model that the snippet's functions run.
        reference: frozen model beside it.
    """

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        program = ast.parse((ROOT / SNIPPETS).read_text())
        # Steps on the file's own model run with the file.
        program.body = [node for node in program.body if _is_definition(node)]
        names: dict[str, Any] = {}
        exec(compile(program, SNIPPETS, "exec"), names)
        self.names = names
        self.use(model, reference)

    def use(self, model: nn.Module, reference: nn.Module) -> None:
        """Let the snippet's functions run these models."""
        self.names.update(model=model, reference=reference)

    def __getattr__(self, name: str) -> Any:
        return self.names[name]

    @classmethod
    def of_decoder(cls, **options: Any) -> Page:
        """The page with decoders, of different weights."""
        reference = Decoder().requires_grad_(False)
        generator = torch.Generator().manual_seed(7)
        for parameter in reference.parameters():
            parameter.data.add_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
        return cls(Decoder(**options), reference)

    def batch(self, lengths: list[int], *, seed: int = 3) -> Batch:
        """A batch whose policy has moved since it was sampled."""
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
    """Each row alone; without padding where the batch has a mask."""
    rows = []
    for number in range(len(next(iter(batch.values())))):
        row = {key: tensor[number : number + 1] for key, tensor in batch.items()}
        if "attention_mask" in row:
            length = int(row["attention_mask"].sum())
            row = {
                key: tensor[:, :length] if tensor.dim() == 2 else tensor
                for key, tensor in row.items()
            }
        rows.append(row)
    return rows


def token_losses_of(page: Page, batch: Batch) -> list[torch.Tensor]:
    """The losses of the tokens of each completion."""
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


def divergences_of(page: Page, batch: Batch) -> torch.Tensor:
    """Forward KL of each token of the completions."""
    divergences = []
    for row in rows_of(batch):
        mask = row["completion_mask"][:, 1:]
        inputs = row["tokens"][:, :-1]
        student = page.model(inputs).log_softmax(-1)
        teacher = page.reference(inputs).log_softmax(-1)
        divergences.append(kl_div(student, teacher, reduction="none", log_target=True)[mask].sum(1))
    return torch.cat(divergences)


def forward_kl(page: Page, batch: Batch) -> torch.Tensor:
    return divergences_of(page, batch).mean()


def ratio_over_batch(page: Page, batch: Batch) -> torch.Tensor:
    entropies = torch.cat(
        [
            -page.log_probs(page.model, row["tokens"])[row["completion_mask"]]
            for row in rows_of(batch)
        ]
    )
    divergences = divergences_of(page, batch)
    ratio = (entropies.sum() / divergences.sum()).detach()
    return (entropies + ratio * divergences).mean()


def distil_by_share(page: Page) -> Callable[[Part], torch.Tensor]:
    """Forward KL, a mean over tokens, as the page's functions are written."""

    def forward_backward(part: Part) -> torch.Tensor:
        _, divergence = page.distillation_losses(part.batch)
        loss = divergence / page.completion_tokens(part.batch) * part.share
        loss.backward()
        return loss.detach()

    return forward_backward


@dataclass(frozen=True)
class Case:
    """A loss, as a step runs it and of the whole batch.

    Attributes:
        function: name of the page's function for a part; empty for :func:`distil_by_share`.
        whole: the loss of the whole batch.
        arguments: names of the page's functions that the step is given.
        makes_pairs: whether rows are pairs.
    """

    function: str
    whole: Callable[[Page, Batch], torch.Tensor]
    arguments: dict[str, str] = field(default_factory=dict)
    makes_pairs: bool = False

    def step_arguments(self, page: Page) -> dict[str, Any]:
        return {key: page.names[name] for key, name in self.arguments.items()}

    def forward_backward(self, page: Page) -> Callable[[Part], torch.Tensor]:
        if not self.function:
            return distil_by_share(page)
        return page.names[self.function]

    def batch(self, page: Page, lengths: list[int], *, seed: int = 3) -> Batch:
        make = page.pairs if self.makes_pairs else page.batch
        return make(lengths, seed=seed)


BY_TOKENS = {"num_labels": "completion_tokens"}
CASES = {
    "mean over tokens": Case("token_mean", token_mean, BY_TOKENS),
    "mean over sequences": Case("sequence_mean", sequence_mean),
    "Dr. GRPO": Case("dr_grpo", dr_grpo),
    "DPO": Case("dpo", dpo, makes_pairs=True),
    "forward KL": Case("", forward_kl, BY_TOKENS),
    "ratio over the batch": Case("distill", ratio_over_batch, {**BY_TOKENS, "statistics": "sums"}),
}


def whole_gradients_of(
    page: Page, whole: Callable[[Page, Batch], torch.Tensor], batch: Batch
) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients and loss of the whole batch in plain torch; none are left."""
    page.model.zero_grad(set_to_none=True)
    loss = whole(page, batch)
    loss.backward()
    return taken_gradients(page.model), loss.item()


def taken_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a model, which has none afterwards."""
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return gradients
