"""Checkpoints are complete or absent, and load the saved state bit for bit."""

from __future__ import annotations

import json
import pickle
import re
import resource
import shutil
import signal
from collections import OrderedDict
from contextlib import closing

import numpy as np
import pytest
import torch
import torchao.optim
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.examples import examples
from support.same_state import assert_same
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from adaptive_batch.checkpoint import CheckpointManager, checkpoints_in, newest_complete, saving
from adaptive_batch.errors import CheckpointError

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int64,
    torch.bool,
)


def saved_and_loaded(tmp_path, tree, small=None):
    with closing(CheckpointManager(tmp_path)) as points:
        points.save(1, tree, small)
    point, passed_over = newest_complete(checkpoints_in(tmp_path))
    assert passed_over == []
    assert point.step == 1
    return point.load()


def values(step):
    """Return a small state with values that encode the step."""
    return {"weight": torch.full((50, 3), float(step)), "bias": torch.full((7,), step)}


def save(output_dir, *steps, **options):
    with closing(CheckpointManager(output_dir, **options)) as points:
        for step in steps:
            points.save(step, values(step), {"step": step})


def steps_there(output_dir):
    return sorted(
        int(path.name.removeprefix("step_"))
        for path in output_dir.iterdir()
        if path.name.startswith("step_")
    )


def hidden(output_dir):
    return [path.name for path in output_dir.iterdir() if path.name.startswith(".")]


OPTIMIZERS = {
    "stateless sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adam fused": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), fused=True),
    "adamw 8 bit": lambda p: torchao.optim.AdamW8bit(p, lr=0.01),
    "adamw 4 bit": lambda p: torchao.optim.AdamW4bit(p, lr=0.01),
    "adamw fp8": lambda p: torchao.optim.AdamWFp8(p, lr=0.01),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_a_model_and_its_optimizer_is_saved_and_loaded(tmp_path, name, asynchronous):
    model = nn.Sequential(nn.Linear(128, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    optimizer = OPTIMIZERS[name](model.parameters())
    with torch.compiler.set_stance("force_eager"):
        model(torch.randn(8, 128)).square().sum().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with closing(CheckpointManager(tmp_path, asynchronous=asynchronous)) as points:
        points.save(3, state, {"rng": torch.get_rng_state()})
        points.wait()
        tree, small = newest_complete(checkpoints_in(tmp_path))[0].load()
    assert_same(tree, state)
    assert_same(small, {"rng": torch.get_rng_state()})


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([*DTYPES, torch.device("cpu"), torch.Size([2, 3])])
)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensor = (
        torch.randn([*shape, 2], generator=generator).mul(9).to(dtype)[..., 0]
    )  # not contiguous
    return draw(
        st.sampled_from(
            [tensor, tensor.contiguous(), tensor.contiguous().transpose(0, -1) if shape else tensor]
        )
    )


trees = st.recursive(
    plain | tensors(),
    lambda children: (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(
            st.integers() | st.text(max_size=4) | st.sampled_from(["0", 0, "a.b", "a"]),
            children,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees, small=trees)
def test_a_nested_state_is_saved_and_loaded(tmp_path, tree, small):
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    found_tree, found_small = saved_and_loaded(tmp_path / "out", tree, small)
    assert_same(found_tree, tree)
    assert_same(found_small, small)


def test_unusual_tensors_are_saved_and_loaded(tmp_path):
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    odd = {
        "bits": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "channels_last": image,
        "expanded": torch.ones(1).expand(5),
        "part": torch.randn(10_000)[3:7],
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": nn.Parameter(torch.randn(2)),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
    }
    found, _ = saved_and_loaded(tmp_path, {"odd": odd})
    plain = {name: odd[name].resolve_conj().resolve_neg() for name in ("conjugate", "negative")}
    assert_same(found["odd"], odd | plain)
    assert found["odd"]["channels_last"].stride() == image.stride()
    # A view is saved without the rest of its storage.
    assert sum(path.stat().st_size for path in (tmp_path / "step_1").iterdir()) < 40_000


def test_subclasses_of_plain_values_load_as_their_base_class(tmp_path):
    tree = OrderedDict(a=np.float64(0.1), b=signal.SIGTERM)
    for found in saved_and_loaded(tmp_path, tree, tree):
        assert_same(found, {"a": 0.1, "b": int(signal.SIGTERM)})


class Scaled(torch.Tensor):
    """A tensor subclass without an inner tensor."""


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [1, {2: {3}}]}, "a.1.2 is a set; checkpoints cannot store it"),
        ({"a": b"bytes"}, "a is a bytes; checkpoints cannot store it"),
        (object(), "the state is a object; checkpoints cannot store it"),
    ],
)
@pytest.mark.parametrize("which", ["tensors", "small"])
def test_the_error_names_an_unsupported_value_and_nothing_is_written(
    tmp_path, tree, message, which
):
    points = CheckpointManager(tmp_path / "out")
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        points.save(1, *((tree, None) if which == "tensors" else (None, tree)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(2, device="meta"), torch.eye(3).to_sparse(), torch.ones(2).as_subclass(Scaled)],
)
def test_the_error_names_an_unsupported_tensor(tmp_path, tensor):
    with pytest.raises(TypeError, match=r"^a\.0 is a (Tensor|Scaled) of layout torch\.\w+ on "):
        CheckpointManager(tmp_path).save(1, {"a": [tensor]}, None)


def test_saving_a_tensor_that_cannot_be_loaded_is_refused(tmp_path):
    save(tmp_path, 1)
    says = r"failed \(the state could not be read again: torch.load\(weights_only"
    with pytest.raises(CheckpointError, match=says):
        CheckpointManager(tmp_path).save(2, {"w": TwoTensor(torch.ones(2), torch.ones(2))}, None)
    assert newest_complete(checkpoints_in(tmp_path))[0].step == 1
    assert hidden(tmp_path) == []


def test_checkpoints_of_other_runs_are_kept(tmp_path):
    save(tmp_path, 1, 2, run="a")
    save(tmp_path, 3, 4, run="b", keep_last=1)
    complete = checkpoints_in(tmp_path)
    assert sorted((point.run, point.step) for point in complete) == [("a", 1), ("a", 2), ("b", 4)]


def test_a_later_save_of_a_step_replaces_the_earlier(tmp_path):
    with closing(CheckpointManager(tmp_path)) as points:
        points.save(5, values(1), {"save": 1})
        points.save(5, values(2), {"save": 2})
    point, _ = newest_complete(checkpoints_in(tmp_path))
    tree, small = point.load()
    assert_same(tree, values(2))
    assert small == point.load_small_state() == {"save": 2}
    assert (steps_there(tmp_path), hidden(tmp_path)) == ([5], [])


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    save(tmp_path, 4)
    (tmp_path / "step_4").rename(tmp_path / ".replaced-step_4")
    shutil.copytree(tmp_path / ".replaced-step_4", tmp_path / ".saving-step_4")
    point, _ = newest_complete(checkpoints_in(tmp_path))
    assert_same(point.load()[0], values(4))
    save(tmp_path, 6)
    assert (steps_there(tmp_path), hidden(tmp_path)) == ([4, 6], [])
    assert newest_complete(checkpoints_in(tmp_path))[0].step == 6


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.pt", "resume.json"])
def test_a_checkpoint_with_a_missing_cut_or_changed_file_is_passed_over(tmp_path, name, data):
    if not (tmp_path / "step_2").exists():
        save(tmp_path, 1, 2)
    path = tmp_path / "step_2" / name
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        for damaged in (changed, whole[:10], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            point, (passed_over,) = newest_complete(checkpoints_in(tmp_path))
            assert (point.step, passed_over.path) == (1, tmp_path / "step_2")
            said = passed_over.problem
            assert name in said or (name == "resume.json" and "reads format" in said)
            assert_same(point.load()[0], values(1))
    finally:
        path.write_bytes(whole)
    assert newest_complete(checkpoints_in(tmp_path))[0].step == 2


def test_a_checkpoint_of_another_format_is_passed_over_and_kept(tmp_path):
    save(tmp_path, 1, 2)
    manifest = tmp_path / "step_2" / "resume.json"
    whole = manifest.read_text()
    content = json.loads(whole)
    manifest.write_text(json.dumps({**content, "format": "other", "format_version": 7}))
    point, (passed_over,) = newest_complete(checkpoints_in(tmp_path))
    assert (point.step, passed_over.problem) == (1, "resume.json is truncated or changed")
    manifest.write_text(json.dumps({**content, "format_version": 7, "package_version": "9.9"}))
    point, (passed_over,) = newest_complete(checkpoints_in(tmp_path))
    assert point.step == 1
    assert (
        passed_over.problem
        == "format 7, written by adaptive_batch 9.9; this version reads format 3: use that version"
    )
    save(tmp_path, 3, keep_last=1)
    assert steps_there(tmp_path) == [2, 3]


@pytest.mark.parametrize("keep_last", [None, 1])
def test_a_users_folder_is_neither_loaded_nor_changed(tmp_path, keep_last):
    for name in ("step_7", "step_8", "step_x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    (tmp_path / "step_8" / "resume.json").write_text('{"my": "resume"}')
    (tmp_path / "step_9").write_text("a file")
    save(tmp_path, 1, 2, keep_last=keep_last)
    with pytest.raises(
        CheckpointError,
        match=r"failed \(/\S+7 exists and is not ours .* directory\)\): earlier saves",
    ):
        save(tmp_path, 7)
    with pytest.raises(CheckpointError, match="step_9 exists and is not ours"):
        save(tmp_path, 9)
    point, passed_over = newest_complete(checkpoints_in(tmp_path))
    assert point.step == 2
    assert [(other.path.name, other.problem) for other in passed_over] == [
        ("step_7", "unrecognized: resume.json cannot be read (No such file or directory)"),
        ("step_8", "resume.json is unrecognized"),
    ]
    for name in ("step_7", "step_8", "step_x"):
        assert (tmp_path / name / "mine.txt").read_text() == "mine"


def test_a_model_with_fewer_or_more_tensors_than_were_saved_is_refused(tmp_path):
    weight = values(2)["weight"]
    with closing(CheckpointManager(tmp_path)) as points:
        points.save(2, {"model": values(2)}, None)
    point = newest_complete(checkpoints_in(tmp_path))[0]
    with pytest.raises(CheckpointError, match=r"model\.bias was saved but has no target"):
        point.load_into({"model": {"weight": weight}})
    with pytest.raises(CheckpointError, match=r"model\.more was not saved"):
        point.load_into({"model": {**values(2), "more": weight}})


def test_a_failed_save_names_the_type_of_another_error(tmp_path):
    says = r"step_1 failed \(KeyError: 'w'\): earlier saves are unchanged"
    with (
        pytest.raises(CheckpointError, match=says),
        saving(tmp_path / "step_1", tmp_path / ".saving"),
    ):
        raise KeyError("w")


class Evil:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize("name", [".metadata", "state.pt"])
def test_loading_a_pickle_does_not_execute_code(tmp_path, capsys, name):
    save(tmp_path, 1)
    point, _ = newest_complete(checkpoints_in(tmp_path))
    path = tmp_path / "step_1" / name
    if name == "state.pt":
        torch.save(Evil(), path)
    else:
        path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"weights_only=True\) does not|names builtins"):
        point.load()
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("asynchronous", [False, True])
def test_keep_last_deletes_older_checkpoints_of_the_run(tmp_path, asynchronous):
    save(tmp_path, 1, 2, 3, 4, 5, keep_last=2, asynchronous=asynchronous)
    assert steps_there(tmp_path) == [4, 5]
    save(tmp_path, 1, keep_last=2)  # another run in the same folder
    assert steps_there(tmp_path) == [1, 5]
    # The newest checkpoint was saved last; its step is not the largest.
    assert newest_complete(checkpoints_in(tmp_path))[0].step == 1


def test_keep_last_does_not_count_broken_checkpoints(tmp_path):
    save(tmp_path, 1, 2, 3)
    (tmp_path / "step_2" / ".metadata").write_bytes(b"cut")
    (tmp_path / "step_3" / "resume.json").unlink()
    save(tmp_path, 4, keep_last=2)
    assert steps_there(tmp_path) == [1, 2, 3, 4]


def test_close_removes_what_a_kill_left(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / "step_1").rename(tmp_path / ".removed-step_1")
    CheckpointManager(tmp_path).close()
    assert steps_there(tmp_path) == [2]
    assert not list(tmp_path.glob(".*"))


@pytest.fixture
def limit_files():
    """Return a function that limits the bytes of a file, or removes the limit if it gets None."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes):
        soft = before[0] if num_bytes is None else num_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))

    yield limit
    limit(None)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "num_bytes", [1_000_000, 100_000, 700], ids=["tensors", "state", "metadata"]
)
def test_a_failed_write_keeps_the_last_checkpoint_and_the_next_save_works(
    tmp_path, limit_files, asynchronous, num_bytes
):
    points = CheckpointManager(tmp_path, keep_last=1, asynchronous=asynchronous)

    def save_and_wait(step, state, small=None):
        points.save(step, state, small)
        points.wait()

    save_and_wait(1, values(1))
    limit_files(num_bytes)
    message = r"step_2 failed \(\[Errno 27\] .*saves are unchanged"
    with pytest.raises(CheckpointError, match=message):
        save_and_wait(2, {"weight": torch.ones(2_000_000)}, {"small": torch.ones(50_000)})
    limit_files(None)
    assert newest_complete(checkpoints_in(tmp_path))[0].step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    save_and_wait(3, values(3))
    assert newest_complete(checkpoints_in(tmp_path))[0].step == 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_may_change_as_soon_as_save_returns(tmp_path, asynchronous):
    tree = {
        "w": torch.full((2000, 500), 1.0),
        "strided": torch.ones(30, 40).t(),
        "moments": [torch.ones(3)],
    }
    small = {"seen": torch.ones(10), "counts": [1, 2]}
    points = CheckpointManager(tmp_path, asynchronous=asynchronous)
    for step in (1, 2, 3):
        points.save(step, tree, small)
        tree["w"].add_(1)
        tree["strided"].add_(1)
        tree["moments"][0].add_(1)
        small["seen"].add_(1)
        small["counts"][0] += 1
    tree["grown"] = torch.ones(7)
    del tree["moments"]
    points.save(4, tree, small)
    points.close()
    complete = checkpoints_in(tmp_path)
    assert len(complete) == 4
    for point in complete:
        (tree_then, small_then), step = point.load(), point.step
        assert float(tree_then["w"].min()) == float(tree_then["w"].max()) == step
        assert float(tree_then["strided"].max()) == step
        assert (float(small_then["seen"][0]), small_then["counts"][0]) == (step, step)
    assert list(tree_then) == ["w", "strided", "grown"]


def test_without_host_memory_for_a_copy_the_save_is_synchronous_and_raises_immediately(
    tmp_path, caplog, monkeypatch
):
    save(tmp_path, 1)
    points = CheckpointManager(tmp_path, asynchronous=True)
    with pytest.raises(CheckpointError, match=r"step_2 failed \(.*allocate"):
        points.save(
            2, {"too large for any machine": torch.ones(1, dtype=torch.uint8).expand(2**62)}, None
        )
    assert "the copy needs 4294967296.00 GiB of host memory" in caplog.text
    monkeypatch.setattr("adaptive_batch.checkpoint.checkpoint.host_available_bytes", lambda: 11)
    points.save(2, values(2), None)
    assert re.search(
        r"needs [\d.]+ (KiB|bytes) of host memory, 11 bytes are available", caplog.text
    )
    points.save(3, values(3), None)
    points.close()
    assert steps_there(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_a_failed_asynchronous_save_is_reported_by_the_next_call(tmp_path, call):
    (tmp_path / "file").write_text("")
    points = CheckpointManager(tmp_path / "file", asynchronous=True)
    points.save(1, values(1), None)
    with pytest.raises(CheckpointError, match="step_1 failed"):
        {
            "save": lambda: points.save(2, values(2), None),
            "wait": points.wait,
            "close": points.close,
        }[call]()
    points.wait()  # reported once
