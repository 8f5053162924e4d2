"""AdaptiveLoop trains the same on several ranks as on one, and all ranks decide alike."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.loops import train, training
from support.processes import run_on_ranks
from support.sharded_model import (
    Decoder,
    divided,
    make_rows,
    relative_error,
    run_out_of_memory,
    whole_parameters,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from adaptive_batch import distributed
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import at_epochs

UNLABELLED = make_rows(
    [3 + (5 * number) % 13 for number in range(33)], unlabelled=[n for n in range(33) if n % 3]
)


def masked_mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a mean whose gradient is NaN without labels; that of torch's cross-entropy is zero."""
    labels = batch["labels"][:, 1:]
    picked = (
        model(batch["tokens"])[:, :-1]
        .log_softmax(-1)
        .gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    )
    return -(picked * (labels >= 0)).sum() / (labels != -100).sum()


def on_ranks(**options: Any) -> SimpleNamespace:
    """Train with global batches of 8 rows. The last one of an epoch has one row, so a rank has
    none.
    """
    ranks = distributed.world_size()
    model = divided(Decoder())
    loss = options.pop("loss", None)
    loss = loss(model) if loss else (lambda batch: masked_mean(model, batch))
    options = {
        "lr_scaling": "sqrt",
        "max_grad_norm": 0.5,
        "batch_increase_function": at_epochs({1: 8 // ranks}),
        **options,
    }
    return training(model=model, rows=UNLABELLED, batch_size=8 // ranks, mean_loss=loss, **options)


def spoils_gradients_on_rank_one(model: nn.Module) -> Any:
    """A finite loss whose gradients are once not finite on rank 1."""
    calls: list[int] = []

    def mean_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        loss = masked_mean(model, batch)
        return loss + torch.sqrt(0 * loss) if distributed.rank() == 1 and len(calls) == 4 else loss

    return mean_loss


def facts(one: SimpleNamespace, seen: list[SimpleNamespace]) -> dict[str, Any]:
    return {
        "rows": [step.rows for step in seen],
        "losses": [step.loss for step in seen],
        "rates": [step.rate for step in seen],
        "micro_batches": [step.result.micro_batches for step in seen],
        "progress": one.loop.progress.state_dict(),
        "parameters": whole_parameters(one.model),
    }


def on_two_ranks() -> dict[str, dict[str, Any]]:
    found: dict[str, Any] = {}
    one = on_ranks(grow_beyond_maximum=True)
    found["bound"] = one.loop.find_bound(device_memory="1GiB", maximum=3).max_batch_size
    found["steps"] = one.loop.num_steps(2)
    found["whole"] = facts(one, train(one, epochs=2))

    one = on_ranks(loss=spoils_gradients_on_rank_one, on_nonfinite_loss="skip", max_grad_norm=None)
    found["skipped"] = facts(one, seen := train(one)) | {
        "finite": [step.result.is_finite for step in seen]
    }
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    models = {"whole": Decoder(), "over fewer ranks": divided(Decoder(), mesh=mesh["data"])}
    models["twice"] = divided(tensor_parallel(Decoder(), mesh["tensor"]), mesh=mesh["data"])
    partly = Decoder()
    for layer in partly.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    models["partly"] = partly
    for name, model in models.items():
        with pytest.raises(SettingError) as refused:
            training(model=model)
        found[f"refused, {name}"] = str(refused.value)
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    one = training(model=divided(Decoder(), mesh=both), rows=UNLABELLED)
    found["replicated"] = [step.loss for step in train(one)]
    return found


def tensor_parallel(model: Decoder, mesh: Any) -> Decoder:
    parallelize_module(model.layers[0].mlp, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    return model


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_on_ranks(on_two_ranks, 2)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    one = on_ranks()
    return facts(one, train(one, epochs=2))


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["rates"] == pytest.approx(expected["rates"], rel=1e-12)
    assert found["progress"]["samples"] == expected["progress"]["samples"]
    assert found["progress"]["tokens"] == expected["progress"]["tokens"]
    for name, parameter in expected["parameters"].items():
        assert torch.allclose(found["parameters"][name], parameter, rtol=1e-5, atol=1e-8), name


def test_two_ranks_train_as_one_device_does(two_ranks, alone):
    for rank in two_ranks:
        assert rank["bound"] == 3
        assert rank["steps"] == len(rank["whole"]["losses"]) == 5 + 3
        assert rank["whole"]["micro_batches"] == [2, 2, 2, 2, 0, 3, 3, 1]
        assert_alike(rank["whole"], alone)
    for number, rows in enumerate(alone["rows"]):
        assert sorted(
            two_ranks[0]["whole"]["rows"][number] + two_ranks[1]["whole"]["rows"][number]
        ) == sorted(rows)


def test_gradients_that_are_not_finite_on_one_rank_are_skipped_on_all(two_ranks):
    for rank in two_ranks:
        found = rank["skipped"]
        assert found["finite"].count(False) == 1
        assert all(map(math.isfinite, found["losses"]))
        assert all(parameter.isfinite().all() for parameter in found["parameters"].values())
        assert found["progress"] == two_ranks[0]["skipped"]["progress"]


def test_a_model_that_is_not_fully_sharded_is_refused(two_ranks):
    for rank in two_ranks:
        for name in ("whole", "over fewer ranks", "twice"):
            said = rank[f"refused, {name}"]
            assert "a model that fully_shard alone has sharded over all ranks" in said
        said = rank["refused, partly"]
        assert (
            "fully_shard leaves out 1 parameter (embed.weight)" in said
        )  # and one that is frozen need not be
        assert said.endswith("call fully_shard on the whole model too, after its parts")


def weights_after(phase: str, *, fails: bool) -> dict[str, torch.Tensor]:
    """Train a model that FSDP2 shards over a single rank and that may run out of memory once."""
    model = Decoder()
    for module in (*model.layers, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    one = training(model=model, micro_batch_size=2)
    calls = itertools.count(1)

    def runs_out() -> None:
        if fails and not one.loop.is_trial and next(calls) == 3:
            run_out_of_memory()

    model.burden[phase] = runs_out
    train(one, until=3)
    assert one.loop.num_out_of_memory == fails
    return whole_parameters(model)


def on_one_rank() -> list[float]:
    return [
        relative_error(weights_after(phase, fails=True), weights_after(phase, fails=False))
        for phase in ("forward", "backward")
    ]


@pytest.mark.slow
def test_a_model_sharded_over_one_rank_continues_after_an_oom():
    (errors,) = run_on_ranks(on_one_rank, 1)
    assert max(errors) < 1e-12


def test_a_model_that_is_replicated_and_sharded_trains(two_ranks):
    one = training(rows=UNLABELLED, batch_size=8)
    assert two_ranks[0]["replicated"] == pytest.approx([step.loss for step in train(one)], rel=1e-6)
