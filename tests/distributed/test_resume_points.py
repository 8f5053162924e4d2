"""All ranks write a checkpoint, and any number of ranks reads it."""

from __future__ import annotations

import re
import resource
import time
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
import torchao.optim
from support import sharded_model
from support.processes import run_on_ranks
from support.same_state import assert_same, bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

from adaptive_batch.checkpoint import (
    CheckpointManager,
    checkpoint,
    checkpoints_in,
    load_named_optimizer_state,
    named_optimizer_state,
    newest_complete,
)
from adaptive_batch.errors import CheckpointError


class Small(nn.Module):
    """Two sharded layers and a root whose sizes no number of ranks divides."""

    def __init__(self, width=7):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, width), nn.Linear(width, 3)])
        self.head = nn.Linear(3, 2)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x * self.scale)


class ByColumn(torch.optim.Optimizer):
    """An optimizer whose state has one number for each column of a parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["by_column"] = parameter.new_full((parameter.shape[-1],), 0.125)
                    state["step"] = torch.tensor(0.0)
                state["by_column"].mul_(1.5)
                state["step"] += 1
                parameter.sub_(state["by_column"] * group["lr"])


class Wide(nn.Sequential):
    """Has 8-bit states of one weight on rank 1 only, and of the other on both ranks."""

    def __init__(self):
        super().__init__(nn.Linear(64, 129), nn.Linear(129, 64), nn.Linear(64, 128))


EIGHT_BITS = {"optimizer": torchao.optim.AdamW8bit}


def host_group():
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def made(
    kind,
    group,
    *,
    in_backward=False,
    seed=0,
    optimizer=torch.optim.AdamW,
    groups=2,
    mesh=None,
    empty=False,
):
    """Return a model, sharded on several ranks, its optimizers and the names of its parameters."""
    torch.manual_seed(seed)
    with torch.device("meta" if empty else "cpu"):
        model = kind()
    if kind is Parallel and group is not None:
        plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["dp"]
    if group is not None:
        for layer in [*getattr(model, "layers", []), model]:
            fully_shard(layer, mesh=mesh)
    if empty:
        model.to_empty(device="cpu")
    names = {parameter: name for name, parameter in model.named_parameters()}
    if in_backward:
        return model, [optimizer([parameter], lr=0.05) for parameter in names], names
    parameters = list(names)
    if groups == 1:
        return model, [optimizer(parameters, lr=0.05)], names
    return (
        model,
        [optimizer([{"params": parameters[:3], "lr": 0.1}, {"params": parameters[3:]}], lr=0.05)],
        names,
    )


def train(model, optimizers, steps=2):
    generator = torch.Generator().manual_seed(0)
    size = next(iter(model.parameters())).shape[1]
    with torch.compiler.set_stance("force_eager"):
        for _ in range(steps):
            model(torch.randn(4, size, generator=generator)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def whole(tree):
    """Return the unsharded tensors."""
    return tree_map_only(
        torch.Tensor, lambda tensor: sharded_model.whole(tensor).detach().clone(), tree
    )


def state_of(model, optimizers, names):
    return {"model": model.state_dict(), "optimizer": named_optimizer_state(optimizers, names)}


def loaded(folder, group, kind=Small, **options):
    """Load the newest checkpoint into a new model and new optimizers; return both."""
    model, optimizers, names = made(kind, group, empty=True, **options)
    point = point_in(folder)
    point.load_into({"model": model.state_dict()}, process_group=group)
    load_named_optimizer_state(
        point.load_optimizer(optimizers, names, process_group=group), optimizers, names
    )
    return model, optimizers, names


def saved(folder, group, kind=Small, *, asynchronous=False, **options):
    """Train and save; return the unsharded state, or the bits of one with 8-bit states."""
    trained = made(kind, group, **options)
    train(*trained[:2])
    expected = whole(state_of(*trained)) if kind is not Wide else bits(state_of(*trained))
    with closing(
        CheckpointManager(folder, process_group=group, asynchronous=asynchronous)
    ) as points:
        points.save(2, state_of(*trained), {"from": 0 if group is None else group.rank()})
        if asynchronous:
            train(*trained[:2], steps=1)  # train during the save, with collectives
    return expected


def point_in(folder):
    return newest_complete(checkpoints_in(folder))[0]


def message_of(call):
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return None


def two_ranks(folder):
    """Save in each way, and load a checkpoint of one process."""
    group = host_group()
    facts = {
        "two": saved(folder / "two", group),
        "two async": saved(folder / "two async", group, asynchronous=True),
        "two in backward": saved(folder / "two in backward", group, in_backward=True),
        "eight bits": saved(folder / "eight bits", group, Wide, **EIGHT_BITS),
        "one, loaded": whole(state_of(*loaded(folder / "one", group))),
    }
    model, optimizers, names = loaded(folder / "eight bits", group, Wide, **EIGHT_BITS)
    facts["eight bits, loaded"] = bits(state_of(model, optimizers, names))
    state = optimizers[0].state[model[0].weight]["exp_avg"]
    facts["kind of eight bits"] = type(state.to_local()).__name__
    model, optimizers, names = loaded(folder / "two in backward", group, in_backward=True)
    facts["in backward, loaded"] = whole(state_of(model, optimizers, names))
    facts["eight bits of one"] = message_of(
        lambda: loaded(folder / "eight bits of one", group, Wide, **EIGHT_BITS)
    )
    facts["another model"] = message_of(lambda: loaded(folder / "one", group, Wide))
    checkpoint._SEEN_SECONDS = 0.2
    facts["not shared"] = message_of(lambda: saved(folder / f"on machine {group.rank()}", group))
    facts["failures"] = failures(folder / "failures", group)
    facts["goes on"] = goes_on(folder / "two", group)
    return facts


def goes_on(folder, group):
    """Train four steps with and without a resume; return both states and the kinds of loads."""
    model, optimizers, names = made(Small, group)
    train(model, optimizers)
    train(model, optimizers)
    resumed = loaded(folder, group)
    state = point_in(folder).load_optimizer(*resumed[1:], process_group=group)
    kinds = {
        key: type(tensor).__name__
        for entries in state["state"].values()
        for key, tensor in entries.items()
    }
    train(*resumed[:2])
    return whole(state_of(model, optimizers, names)), whole(state_of(*resumed)), kinds


def failures(folder, group):
    """Fail with a full disk on one rank and with a state that cannot be pickled; then save."""
    tree = {"w": sharded_tensor(200_000)}
    points = CheckpointManager(folder, process_group=group, keep_last=1)
    points.save(1, {"w": sharded_tensor(10)}, {"step": 1})
    found = {}
    for rank in (0, 1):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if group.rank() == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        begin = time.monotonic()
        found[f"full on {rank}"] = message_of(lambda: points.save(2, tree, {"step": 2}))
        found[f"seconds {rank}"] = time.monotonic() - begin
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        dist.barrier(group)
        found[f"left by {rank}"] = sorted(path.name for path in folder.iterdir())
    try:
        points.save(2, tree, {"unfit": {1}} if group.rank() == 0 else None)
    except TypeError as error:
        found["unfit"] = str(error)
    in_background = CheckpointManager(folder, process_group=group, asynchronous=True)
    if group.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    in_background.save(3, tree, {})
    found["told"] = message_of(in_background.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    points.save(4, tree, {"step": 4})
    dist.barrier(group)
    found["at last"] = sorted(path.name for path in folder.iterdir())
    return found


def sharded_tensor(rows):
    return fully_shard(nn.Linear(1, rows, bias=False)).weight.detach()


def four_ranks(folder):
    group = host_group()
    tied, tied_again = (fully_shard(Tied()) for _ in range(2))
    with closing(CheckpointManager(folder / "tied", process_group=group)) as points:
        points.save(1, {"model": tied.state_dict()}, None)
    point_in(folder / "tied").load_into({"model": tied_again.state_dict()}, process_group=group)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {
        "replicated": saved(folder / "replicated", group, mesh=mesh),
        "replicated, loaded": whole(state_of(*loaded(folder / "replicated", group, mesh=mesh))),
        "by column": saved(folder / "columns of four", group, optimizer=ByColumn),
        "by column, loaded": whole(
            state_of(*loaded(folder / "columns of one", group, optimizer=ByColumn))
        ),
        "tied": whole(tied.state_dict()),
        "tied, loaded": whole(tied_again.state_dict()),
        "two by two": two_by_two(folder, group),
        "four": saved(folder / "four", group),
        "one, loaded": whole(state_of(*loaded(folder / "one", group))),
        "two, loaded": whole(state_of(*loaded(folder / "two", group))),
        "in backward, loaded": whole(
            state_of(*loaded(folder / "two in backward", group, in_backward=True))
        ),
        "eight bits": message_of(lambda: loaded(folder / "eight bits", group, Wide, **EIGHT_BITS)),
    }


class Tied(nn.Module):
    """A tied weight with fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 5)
        self.output = nn.Linear(5, 3, bias=False)
        self.output.weight = self.embedding.weight


class Parallel(Small):
    """A model with column and row parallelism over two ranks."""

    def __init__(self):
        super().__init__(width=6)


def two_by_two(folder, group):
    """Load a checkpoint of one process on 2 x 2 data and tensor parallel ranks; train; reload."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    of_one = loaded(folder / "parallel one", group, Parallel, groups=1, mesh=mesh)
    facts = {"one, loaded": whole(state_of(*of_one))}
    train(*of_one[:2], steps=1)
    facts["saved"] = whole(state_of(*of_one))
    with closing(CheckpointManager(folder / "two by two", process_group=group)) as points:
        points.save(3, state_of(*of_one), None)
    again = loaded(folder / "two by two", group, Parallel, groups=1, mesh=mesh)
    facts["loaded"] = whole(state_of(*again))
    return facts


def two_ranks_again(folder):
    group = host_group()
    return {"four, loaded": whole(state_of(*loaded(folder / "four", group)))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("points")


@pytest.fixture(scope="module")
def one(folder):
    return {
        "one": saved(folder / "one", None),
        "parallel": saved(folder / "parallel one", None, Parallel, groups=1),
        "by column": saved(folder / "columns of one", None, optimizer=ByColumn),
        "eight bits": saved(folder / "eight bits of one", None, Wide, **EIGHT_BITS),
    }


@pytest.fixture(scope="module")
def two(folder, one):
    return run_on_ranks(two_ranks, 2, folder)


@pytest.fixture(scope="module")
def four(folder, two):
    return run_on_ranks(four_ranks, 4, folder)


@pytest.mark.slow
def test_ranks_resume_from_a_point_of_more_or_fewer(folder, one, two, four):
    for facts in [*two, *four]:
        assert_same(facts["one, loaded"], one["one"])
    for facts in four:
        assert_same(facts["two, loaded"], two[0]["two"])
    for facts in run_on_ranks(two_ranks_again, 2, folder):
        assert_same(facts["four, loaded"], four[0]["four"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "two async", "four"])
def test_one_process_resumes_from_a_point_of_several_ranks(folder, two, four, name):
    expected = {**two[0], **four[0]}[name]
    assert_same(whole(state_of(*loaded(folder / name, None))), expected)
    tree, small = point_in(folder / name).load()
    assert_same(tree, expected)
    assert small == {"from": 0}


@pytest.mark.slow
def test_any_number_of_ranks_resumes_with_the_optimizer_in_backward(folder, two, four):
    expected = two[0]["two in backward"]
    assert len(expected["optimizer"]["param_groups"]) == 6
    for facts in [*two, *four]:
        assert_same(facts["in backward, loaded"], expected)
    assert_same(
        whole(state_of(*loaded(folder / "two in backward", None, in_backward=True))), expected
    )


@pytest.mark.slow
def test_any_ranks_resume_from_a_point_of_tensor_parallel_ranks(folder, one, four):
    for facts in four:
        found = facts["two by two"]
        assert_same(found["one, loaded"], one["parallel"])
        assert_same(found["loaded"], found["saved"])
    assert_same(
        whole(state_of(*loaded(folder / "two by two", None, Parallel, groups=1))),
        four[0]["two by two"]["saved"],
    )


@pytest.mark.slow
def test_ranks_that_replicate_shards_resume_and_one_process_reads_their_point(folder, four):
    for facts in four:
        assert_same(facts["replicated, loaded"], four[0]["replicated"])
    found = loaded(folder / "replicated", None)
    assert_same(whole(state_of(*found)), four[0]["replicated"])


@pytest.mark.slow
def test_states_of_another_shape_than_their_parameter_are_the_same_on_every_rank(folder, one, four):
    for facts in four:
        assert_same(facts["by column, loaded"], one["by column"])
    found = loaded(folder / "columns of four", None, optimizer=ByColumn)
    assert_same(whole(state_of(*found)), four[0]["by column"])


@pytest.mark.slow
def test_tied_weights_come_back_even_if_a_rank_has_no_rows(four):
    for facts in four:
        assert_same(facts["tied, loaded"], facts["tied"])


def test_resumed_training_has_the_same_bits_and_each_rank_reads_its_own_part(two):
    for facts in two:
        at_once, resumed, kinds = facts["goes on"]
        assert_same(resumed, at_once)
        assert kinds == {"step": "Tensor", "exp_avg": "DTensor", "exp_avg_sq": "DTensor"}


def test_each_rank_writes_its_shards_and_the_manifest_lists_all_files(folder, two):
    point = point_in(folder / "two")
    assert sorted(point.files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.pt"]
    assert {name: (point.path / name).stat().st_size for name in point.files} == {
        name: file.bytes for name, file in point.files.items()
    }


def test_a_save_that_fails_on_one_rank_is_reported_on_all_and_the_next_is_complete(two):
    for facts in two:
        found = facts["failures"]
        for rank in (0, 1):
            said = found[f"full on {rank}"]
            reason = f"rank {rank}: [Errno 27] File too large"
            assert f"step_2 failed ({reason}): earlier saves are unchanged" in said
            assert found[f"left by {rank}"] == ["step_1"]
            assert found[f"seconds {rank}"] < 30
        assert found["unfit"] == "rank 0: unfit is a set; checkpoints cannot store it"
        assert "step_3 failed (rank 1: [Errno 27] File too large)" in found["told"]
        assert found["at last"] == ["step_4"]


def test_a_point_whose_files_rank_zero_does_not_see_is_not_saved(folder, two):
    for facts in two:
        assert "rank zero does not see all that was saved" in facts["not shared"]
        assert "__1_0.distcp is missing" in facts["not shared"]
        assert "output_dir must be on a file system that all ranks share" in facts["not shared"]
    assert point_in(folder / "on machine 0") is None


def test_a_point_of_another_model_is_refused_on_all_ranks(two):
    for facts in two:
        assert "model.0.weight was not saved; it belongs to another model" in facts["another model"]


def test_low_bit_states_come_back_on_as_many_ranks_as_saved_them(two):
    for facts in two:
        assert_same(facts["eight bits, loaded"], facts["eight bits"])
    # 65 rows of 64 have no whole blocks.
    assert [facts["kind of eight bits"] for facts in two] == ["Tensor", "OptimState8bit"]


@pytest.mark.slow
def test_low_bit_states_are_not_divided_among_another_number_of_ranks(folder, two, four):
    def refused(*, saved, here):
        return (
            rf"is a low-bit state that {saved} ranks saved \(.*\); {here} ranks \(.*\)"
            rf" cannot split it again: resume with {saved} ranks"
        )

    for facts in four:
        assert re.search(refused(saved=2, here=4), facts["eight bits"])
    for facts in two:
        assert re.search("2.weight.exp_avg " + refused(saved=1, here=2), facts["eight bits of one"])
    with pytest.raises(CheckpointError, match=refused(saved=2, here=1)):
        loaded(folder / "eight bits", None, Wide, **EIGHT_BITS)
    with pytest.raises(CheckpointError, match=refused(saved=2, here=1)):
        point_in(folder / "eight bits").load()
    model, _, _ = made(Wide, None, seed=1)
    point_in(folder / "eight bits").load_into({"model": model.state_dict()})  # the weights are
    assert model[2].bias.shape == (128,)
