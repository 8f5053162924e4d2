"""What FSDP2 does in a micro-batch, and that a rank which fails in one neither leaves the others
waiting nor leaves a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.ranks import run_on_ranks
from support.sharded_model import (
    Decoder,
    bits,
    by_hand,
    divided,
    make_rows,
    relative_error,
    runner_of,
    twin,
    whole_gradients,
)
from torch.distributed.fsdp import FSDPModule

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.distributed import Sharding, local_part, whole_tensor
from adaptive_batch.errors import TorchVersionError
from adaptive_batch.training import RecipeStep

ROWS = make_rows((9, 7, 8, 6))
PHASES = ("forward", "backward")


class Broken(Exception):
    """What a rank fails with."""


def fail() -> None:
    raise Broken


def run_of(model: Decoder, **options: Any) -> RecipeStep:
    return runner_of(model, MicroBatchLimit(2), **options)


def my_rows() -> list[dict[str, Any]]:
    return ROWS[2 * distributed.rank() :][:2]


def fails_in(run: RecipeStep, model: Decoder, phase: str, *, is_last: bool = True) -> None:
    """A micro-batch that fails half-way through the layers."""
    model.burden = {phase: fail}
    with pytest.raises(Broken):
        run.try_rows(my_rows(), is_last=is_last)
    model.burden = {}


def local_gradients(model: Decoder) -> Any:
    return bits({name: parameter.grad for name, parameter in model.named_parameters()})


# --- on two ranks


def when_it_can_finish() -> dict[str, Any]:
    model = divided(Decoder())
    run = run_of(model, syncs_every_micro_batch=False)
    sharding = run.sharding
    found: dict[str, Any] = {"before anything": sharding.can_finish}
    kinds = [[sharding.knows(is_last=is_last) for is_last in (False, True)]]
    for phase in PHASES:
        fails_in(run, model, phase)
        found[f"first ever, {phase}"] = sharding.can_finish
        sharding.reset()
    run.try_rows(my_rows())
    found["after one that went well"] = sharding.can_finish
    kinds.append([sharding.knows(is_last=is_last) for is_last in (False, True)])
    for phase in PHASES:
        fails_in(run, model, phase)
        found[f"known, {phase}"] = sharding.can_finish
        sharding.reset()
        sharding.finish()
        found[f"finished, {phase}"] = sharding.can_finish
        fails_in(run, model, phase, is_last=False)
        found[f"another kind, {phase}"] = sharding.can_finish
        sharding.reset()
    run.try_rows(my_rows(), is_last=False)
    kinds.append([sharding.knows(is_last=is_last) for is_last in (False, True)])
    fails_in(run, model, "backward", is_last=False)
    found["that kind, known"] = sharding.can_finish
    sharding.reset()
    group = sharding._states[0]._fsdp_param_groups[0]
    group._all_gather_comm._comm, comm = (
        FailingCollective(group._all_gather_comm._comm),
        group._all_gather_comm._comm,
    )
    with pytest.raises(Broken):
        run.try_rows(my_rows())
    found["within a collective"] = sharding.can_finish
    group._all_gather_comm._comm = comm
    sharding.reset()
    whole = divided(Decoder())
    forbidden = runner_of(whole, MicroBatchLimit(2), sharding=Sharding(whole, finishes=False))
    forbidden.try_rows(my_rows())
    fails_in(forbidden, whole, "forward")
    found["it must not"] = forbidden.sharding.can_finish
    return {"can": found, "knows": kinds}


class FailingCollective:
    """In place of FSDP's own."""

    def __init__(self, comm: Any) -> None:
        self.allocate = comm.allocate

    def __call__(self, *_: Any, **__: Any) -> None:
        fail()


def after_one_rank_failed(phase: str, *, reshard: bool, checkpointing: bool) -> dict[str, Any]:
    """Rank one fails and finishes; then both run a step whose gradients are known."""
    model = Decoder(checkpointing=checkpointing)
    expected, *_ = by_hand(twin(model), ROWS)
    divided(model, reshard_after_forward=reshard)
    run = run_of(model)
    run.run(my_rows())
    undisturbed = local_gradients(model)
    model.zero_grad(set_to_none=True)
    calls = [len(calls) for calls in run.sharding._known.values()]
    if distributed.rank() == 1:
        fails_in(run, model, phase)
        run.sharding.reset()
        run.sharding.finish()
    else:
        run.try_rows(my_rows())
    run.sharding.reset()
    model.zero_grad(set_to_none=True)
    run.run(my_rows())
    same_bits = local_gradients(model) == undisturbed
    return {
        "error": relative_error(whole_gradients(model), expected),
        "same bits": same_bits,
        "calls": calls == [len(calls) for calls in run.sharding._known.values()],
    }


def standing_in() -> dict[str, Any]:
    """Rank one stands in for whole micro-batches of each kind, and then both run a step."""
    model = Decoder()
    expected, *_ = by_hand(twin(model), ROWS)
    divided(model)
    run = run_of(model, syncs_every_micro_batch=False)
    sharding = run.sharding
    run.try_rows(my_rows(), is_last=False)
    run.try_rows(my_rows())
    run.try_evaluation(my_rows())
    model.zero_grad(set_to_none=True)
    if distributed.rank() == 1:
        sharding.run_dummy_collectives(is_last=False)
        kept = sum(1 for _ in sharding.kept_gradients())
        sharding.run_dummy_collectives()
        sharding.run_dummy_collectives(evaluates=True)
    else:
        run.try_rows(my_rows(), is_last=False)
        kept = sum(1 for _ in sharding.kept_gradients())
        run.try_rows(my_rows())
        run.try_evaluation(my_rows())
    gradients = sum(parameter.grad is not None for parameter in model.parameters())
    sharding.reset()
    model.zero_grad(set_to_none=True)
    run.run(my_rows())
    return {
        "kept": kept,
        "gradients": gradients,
        "error": relative_error(whole_gradients(model), expected),
    }


def what_is_kept() -> dict[str, Any]:
    """The gradients between micro-batches that are not reduced."""
    model = Decoder()
    mine, _, labels = by_hand(twin(model), my_rows()[:1])
    divided(model)
    run = run_of(model, syncs_every_micro_batch=False)
    trained = sum(gradient.numel() for gradient in mine.values())
    run.try_rows(my_rows()[:1], is_last=False)
    kept = list(run.sharding.kept_gradients())
    squares = sum(float(gradient.square().sum()) for gradient in kept)
    expected = sum(float((gradient * labels).square().sum()) for gradient in mine.values())
    found = {
        "numel": (sum(gradient.numel() for gradient in kept), trained),
        "squares": abs(squares - expected) / expected,
        "reduced": sum(parameter.grad is not None for parameter in model.parameters()),
    }
    del kept
    run.try_rows(my_rows()[1:])
    found["after the last"] = sum(1 for _ in run.sharding.kept_gradients())
    run.try_rows(my_rows()[:1], is_last=False)
    run.sharding.reset()
    found["after a reset"] = sum(1 for _ in run.sharding.kept_gradients())
    return found


def after_resets(phase: str, *, reshard: bool, is_last: bool) -> bool:
    """Both ranks fail, reset and run a step: whether its gradients are those of ranks that never
    failed, bit by bit.
    """
    model = divided(Decoder(), reshard_after_forward=reshard)
    run = run_of(model, syncs_every_micro_batch=False)
    rows = [*my_rows(), *my_rows(), *my_rows()]
    run.run(rows)
    undisturbed = local_gradients(model)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        run.try_rows(my_rows(), is_last=False)
        fails_in(run, model, phase, is_last=is_last)
        run.sharding.reset()
    model.zero_grad(set_to_none=True)
    sharded = all(type(parameter.data).__name__ == "DTensor" for parameter in model.parameters())
    run.run(rows)
    return sharded and local_gradients(model) == undisturbed


def everything() -> dict[str, Any]:
    flags = (True, False)
    return {
        "can finish": when_it_can_finish(),
        "one failed": {
            (phase, reshard, checkpointing): after_one_rank_failed(
                phase, reshard=reshard, checkpointing=checkpointing
            )
            for phase in PHASES
            for reshard, checkpointing in ((True, True), (True, False), (False, False))
        },
        "standing in": standing_in(),
        "kept": what_is_kept(),
        "resets": {
            (phase, reshard, is_last): after_resets(phase, reshard=reshard, is_last=is_last)
            for phase in PHASES
            for reshard in flags
            for is_last in flags
        },
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(everything, 2, timeout=240)


@pytest.mark.slow
def test_a_micro_batch_can_be_finished_once_one_of_its_kind_has_been_run(ranks):
    for facts in ranks:
        can = facts["can finish"]["can"]
        assert {name for name, value in can.items() if value} == {
            "known, forward",
            "known, backward",
            "that kind, known",
        }
        assert len(can) == 13
        assert facts["can finish"]["knows"] == [[False, False], [False, True], [True, True]]


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_fails_and_finishes_leaves_no_trace(ranks, phase):
    for facts in ranks:
        for case, found in facts["one failed"].items():
            if case[0] == phase:
                assert found["error"] <= 1e-7, case
                assert found["same bits"], case
                assert found["calls"], case


def test_a_rank_that_stands_in_computes_nothing_and_keeps_the_others_going(ranks):
    first, second = (facts["standing in"] for facts in ranks)
    assert (first["kept"], first["gradients"]) == (13, 13)  # one for each trained parameter
    assert (second["kept"], second["gradients"]) == (0, 0)
    assert max(first["error"], second["error"]) <= 1e-7


def test_gradients_that_are_not_reduced_are_kept_whole_until_the_last_micro_batch(ranks):
    for facts in ranks:
        kept = facts["kept"]
        assert kept["numel"][0] == kept["numel"][1]
        assert kept["squares"] <= 1e-12
        assert (kept["reduced"], kept["after the last"], kept["after a reset"]) == (0, 0, 0)


def test_after_a_reset_a_step_is_the_same_to_the_bit(ranks):
    for facts in ranks:
        assert [case for case, same in facts["resets"].items() if not same] == []
        assert len(facts["resets"]) == 8


# --- on one


def test_a_torch_that_cannot_reset_fsdp_is_refused(monkeypatch):
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    error = pytest.raises(TorchVersionError, match=r"pip install 'torch>=2\.13'")
    with distributed.fake_process_group(2), error:
        Sharding(divided(Decoder()))


def test_on_one_rank_it_does_nothing():
    model = Decoder()
    sharding = Sharding(model, syncs_every_micro_batch=False)
    acts: list[Callable[[], object]] = [sharding.finish, sharding.run_dummy_collectives]
    for act in [*acts, sharding.reset]:
        act()
    assert not sharding.is_sharded
    assert sharding.can_finish
    assert list(sharding.kept_gradients()) == []
    weight = model.embed.weight
    assert whole_tensor(weight) is weight
    assert local_part(weight) is weight
