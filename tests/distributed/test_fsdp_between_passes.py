"""A micro-batch runs the same collectives after a forward of the script."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks
from support.sharded_model import Decoder, divided, make_rows, runner_of, whole_parameters
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.memory import OptimizerInBackward
from adaptive_batch.training import RecipeStep

pytestmark = pytest.mark.slow

ROWS = (5, 6)


class Apart(nn.Module):
    """A model without direct parameters, whose children are sharded.

    Args:
        whole: whether the model itself is sharded too. If not, one of its children never runs.
    """

    def __init__(self, *, whole: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(53, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 53)
        self.unused = nn.Linear(16, 16).requires_grad_(False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (self.unused, self.embed, *self.layers, self.head, *([self] if whole else [])):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


def inside_another() -> nn.Module:
    """Return a sharded model inside another sharded model that has run."""
    outer = nn.Sequential(divided(Decoder()), nn.Linear(53, 3))
    fully_shard(outer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    own_forward(outer)
    return outer[0]


def own_forward(model: nn.Module) -> None:
    """Run a forward as a validation does."""
    with torch.no_grad():
        model(torch.ones(2, 4, dtype=torch.long))


def collectives_of_a_step(model: Any, runner: RecipeStep) -> int:
    runner.run(make_rows(ROWS))
    model.zero_grad()
    return len(runner.sharding._completed)


def collectives_around(model: Any, between: str) -> tuple[int, int]:
    """Return the number of collectives of a step before and after another forward."""
    accumulates = runner_of(model, MicroBatchLimit(8))
    accumulates.record_collectives_of_row()
    before = collectives_of_a_step(model, accumulates)
    if between == "a validation":
        model.eval()
        accumulates.try_evaluation(make_rows(ROWS))
        model.train()
    else:
        own_forward(model)
    return before, collectives_of_a_step(model, accumulates)


def replayed_after_own_forward() -> tuple[float, float]:
    """Return the losses of a step after another forward, without and with an OOM on rank 1."""
    losses = []
    for fails in (False, True):
        model = divided(Decoder())
        accumulates = runner_of(model, MicroBatchLimit(8))
        accumulates.run(make_rows(ROWS))
        model.zero_grad()
        own_forward(model)
        if fails and dist.get_rank() == 1:
            errors = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")]

            def burden(errors=errors) -> None:
                if errors:
                    raise errors.pop()

            model.burden["forward"] = burden
        losses.append(accumulates.run(make_rows(ROWS)).loss)
    return losses[0], losses[1]


def moved_without_labels() -> tuple[list[float], list[int]]:
    """Return the changes of steps in backward with labels on all ranks, on one, on none, on all."""
    model = divided(Decoder())
    OptimizerInBackward(
        {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters() if p.requires_grad}
    )
    accumulates = runner_of(model, MicroBatchLimit(8), scale_gradients=False, retries=False)
    moved, run = [], []
    on_one_rank = (0, 1) if dist.get_rank() else ()
    for unlabelled in ((), on_one_rank, (0, 1), ()):
        before = whole_parameters(model)
        run.append(accumulates.run(make_rows(ROWS, unlabelled=unlabelled)).micro_batches)
        after = whole_parameters(model)
        moved.append(max(float((after[name] - before[name]).abs().max()) for name in before))
    return moved, run


def everything() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    return {
        "collectives": {
            (kind, between): collectives_around(make(), between)
            for kind, make in (
                ("parts of its own", lambda: divided(Decoder())),
                ("none", Apart),
                ("parts by themselves", lambda: Apart(whole=False)),
                ("a part of what is divided", inside_another),
            )
            for between in ("a validation", "a forward of its own")
        },
        "replayed": replayed_after_own_forward(),
        "in backward": moved_without_labels(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(everything, 2, timeout=120)


def test_a_step_has_the_same_collectives_after_another_forward(ranks):
    for facts in ranks:
        for case, (before, after) in facts["collectives"].items():
            assert before == after > 3, case


def test_a_step_after_a_forward_of_the_script_is_retried(ranks):
    for facts in ranks:
        undisturbed, replayed = facts["replayed"]
        assert replayed == pytest.approx(undisturbed, rel=1e-12)


def test_with_the_optimizer_in_backward_a_step_without_any_label_moves_nothing(ranks):
    for facts in ranks:
        moved, run = facts["in backward"]
        assert [distance > 1e-3 for distance in moved] == [True, True, False, True]
        assert moved[2] == 0
        assert run == [1, 1, 0, 1]
