"""AdaptiveLoop on several ranks: trained as on one, retried on all, resumed on another number of
them.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.loops import (
    RATE,
    ROWS,
    RunsOut,
    sizes,
    train,
    training,
)
from support.ranks import run_on_ranks
from support.sharded_model import (
    Decoder,
    collate,
    divided,
    make_rows,
    relative_error,
    token_losses,
    whole_parameters,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from adaptive_batch import distributed
from adaptive_batch.errors import (
    SettingError,
)
from adaptive_batch.schedules import at_epochs
from adaptive_batch.training import AdaptiveLoop

# --- several ranks

UNLABELLED = make_rows(
    [3 + (5 * number) % 13 for number in range(33)], unlabelled=[n for n in range(33) if n % 3]
)


def masked_mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A mean whose gradient is not a number where there is no label; that of torch's cross-entropy
    is zero.
    """
    labels = batch["labels"][:, 1:]
    picked = (
        model(batch["tokens"])[:, :-1]
        .log_softmax(-1)
        .gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    )
    return -(picked * (labels >= 0)).sum() / (labels != -100).sum()


def on_ranks(**options: Any) -> SimpleNamespace:
    """Global batches of 8 rows, of which the last of an epoch has one: some rank has none of it."""
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
    """A loss that is finite everywhere; the gradients of one rank are not, once."""
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
        "capacity": one.loop.limit.amount,
        "out_of_memory": one.loop.num_out_of_memory,
    }


def on_two_ranks() -> dict[str, dict[str, Any]]:
    found: dict[str, Any] = {}
    one = on_ranks(grow_beyond_maximum=True)
    found["bound"] = one.loop.find_bound(device_memory="1GiB", maximum=3).max_batch_size
    found["steps"] = one.loop.num_steps(2)
    found["whole"] = facts(one, train(one, epochs=2))

    def fails_on_rank_one(model: nn.Module) -> Any:
        return RunsOut(model, most=2 if distributed.rank() == 1 else 99, after=5)

    for syncs in (True, False):
        one = on_ranks(
            loss=fails_on_rank_one, grow_beyond_maximum=True, sync_gradients_every_micro_batch=syncs
        )
        found[f"fails, {syncs}"] = facts(one, train(one, epochs=2))
    one = on_ranks(loss=spoils_gradients_on_rank_one, on_nonfinite_loss="skip", max_grad_norm=None)
    found["skipped"] = facts(one, seen := train(one)) | {
        "finite": [step.result.is_finite for step in seen]
    }
    one = on_ranks()
    found["begun"] = facts(one, train(one, epochs=2, until=3))
    found["state"] = one.loop.state_dict()
    found["optimizer"] = {
        name: {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value
            for key, value in state.items()
        }
        for name, state in (
            (n, one.optimizer.state[p]) for n, p in one.model.named_parameters() if p.requires_grad
        )
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
    found["after a validation"] = after_a_validation()
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    one = training(model=divided(Decoder(), mesh=both), rows=UNLABELLED)
    found["replicated"] = [step.loss for step in train(one)]
    return found


def after_a_validation() -> dict[str, Any]:
    """Train a model whose root has whole parameters after a forward without backward."""
    mesh = init_device_mesh("cpu", (distributed.world_size(),))
    model = Decoder()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def validate() -> bool:
        with torch.no_grad():
            model(torch.ones(2, 4, dtype=torch.int64))
        return all(hasattr(parameter, "device_mesh") for parameter in model.parameters())

    stays_divided = [validate()]
    loop = AdaptiveLoop(
        model,
        optimizer,
        ROWS,
        collate=collate,
        mean_loss=lambda batch: token_losses(model, batch, "mean"),
        batch_size=4,
    )
    before = whole_parameters(model)
    stays_divided.append(validate())
    bound = loop.find_bound(device_memory="1GiB", maximum=3).max_batch_size
    after = whole_parameters(model)
    loop.run(next(iter(loop)))
    stays_divided.append(validate())
    with pytest.raises(ValueError, match=r"call optimizer\.step\(\) and optimizer\.zero_grad\(\)"):
        loop.run(next(iter(loop)))
    return {
        "stays divided": stays_divided,
        "bound": bound,
        "changed": [
            name for name, tensor in before.items() if not torch.equal(tensor, after[name])
        ],
    }


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


@pytest.mark.parametrize("syncs", [True, False])
def test_a_step_that_runs_out_of_memory_on_one_rank_is_retried_on_all(two_ranks, alone, syncs):
    for rank in two_ranks:
        found = rank[f"fails, {syncs}"]
        assert_alike(found, alone)
        assert (found["capacity"], found["out_of_memory"]) == (2, 1)
        # The last row of the first epoch has no label.
        assert found["micro_batches"] == [1, 1, 1, 2, 0, 4, 4, 1]


def test_gradients_that_are_not_finite_on_one_rank_are_skipped_on_all(two_ranks):
    for rank in two_ranks:
        found = rank["skipped"]
        assert found["finite"].count(False) == 1
        assert all(map(math.isfinite, found["losses"]))
        assert all(parameter.isfinite().all() for parameter in found["parameters"].values())
        assert found["progress"] == two_ranks[0]["skipped"]["progress"]


def test_a_model_that_fully_shard_alone_does_not_divide_is_refused(two_ranks):
    for rank in two_ranks:
        for name in ("whole", "over fewer ranks", "twice"):
            said = rank[f"refused, {name}"]
            assert "a model that fully_shard alone has sharded over all ranks" in said
        said = rank["refused, partly"]
        assert (
            "fully_shard leaves out 1 parameter (embed.weight)" in said
        )  # and one that is frozen need not be
        assert said.endswith("call fully_shard on the whole model too, after its parts")


def on_one_rank() -> dict[str, Any]:
    """Train a model that FSDP2 divides over a single rank and that runs out of memory."""
    found = {"after a validation": after_a_validation()}
    for phase in ("forward", "backward"):
        weights = []
        for fails in (False, True):
            model = Decoder()
            for module in (*model.layers, model):
                fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
            one = training(model=model, micro_batch_size=2)
            calls: list[int] = []

            def runs_out(
                loop: AdaptiveLoop = one.loop,
                calls: list[int] = calls,
                at: int = 3 if fails else -1,
            ) -> None:
                if loop.is_trial:
                    return
                calls.append(1)
                if len(calls) == at:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

            model.burden[phase] = runs_out
            train(one, until=3)
            assert one.loop.num_out_of_memory == fails
            before = whole_parameters(model)
            model.burden.clear()
            one = training(model=model, mean_loss=RunsOut(model, most=2), grow_beyond_maximum=True)
            assert one.loop.find_bound(device_memory="1GiB").max_batch_size == 2
            after = whole_parameters(model)
            found[f"{phase}, {fails}"] = [
                name for name in before if not torch.equal(before[name], after[name])
            ]
            weights.append(after)
        found[phase] = relative_error(weights[1], weights[0])
    return found


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return run_on_ranks(on_one_rank, 1)[0]


@pytest.mark.slow
def test_a_model_divided_over_one_rank_trains_on_after_an_oom(one_rank):
    for phase in ("forward", "backward"):
        assert one_rank[phase] < 1e-12
        # A search changes no parameter.
        assert one_rank[f"{phase}, False"] == one_rank[f"{phase}, True"] == []


@pytest.mark.slow
def test_a_loop_works_after_a_forward_of_the_script(two_ranks, one_rank):
    alone = one_rank["after a validation"]
    for found in (alone, *(rank["after a validation"] for rank in two_ranks)):
        assert found["stays divided"] == [False, False, False]  # else there is nothing to hold
        assert found["bound"] == 3
        assert found["changed"] == []


def test_a_model_that_is_replicated_and_divided_trains(two_ranks):
    one = training(rows=UNLABELLED, batch_size=8)
    assert two_ranks[0]["replicated"] == pytest.approx([step.loss for step in train(one)], rel=1e-6)


def test_one_device_resumes_a_loop_of_two_ranks(two_ranks, alone):
    begun = two_ranks[0]
    model = Decoder()
    model.load_state_dict(begun["begun"]["parameters"], strict=False)
    one = training(
        model=model,
        rows=UNLABELLED,
        batch_size=4,
        lr_scaling="sqrt",
        max_grad_norm=0.5,
        batch_increase_function=at_epochs({1: 4}),
    )
    for name, parameter in model.named_parameters():
        if name in begun["optimizer"]:
            one.optimizer.state[parameter] = begun["optimizer"][name]
    one.loop.load_state_dict(begun["state"])
    seen = train(one, epochs=2)
    found = facts(one, seen)
    assert sizes(seen) == [8, 1, 16, 16, 1]
    found["losses"] = begun["begun"]["losses"] + found["losses"]
    found["rates"] = begun["begun"]["rates"] + found["rates"]
    assert_alike(found, alone)
