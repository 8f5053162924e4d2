"""adaptive_estimate finds the memory that trials measure, without weights, files or a network."""

from __future__ import annotations

import json
import re
import socket

import pytest
import torch
from omegaconf import OmegaConf
from support.model_families import MODELS, Combination
from torch._subclasses.fake_tensor import FakeTensor
from torchtune import config
from torchtune.data import padded_collate_packed

from adaptive_batch.config_files import config_files, shipped_configs
from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import FakeDevice
from adaptive_batch.memory import ALLOCATOR_VARIABLES
from adaptive_batch.torchtune import estimate_devices
from adaptive_batch.torchtune.estimates import FakeRun

SMALL = Combination("qwen2", 32)
TENSOR_PARALLEL = {
    "tensor_parallel_dim": 2,
    "tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"},
}


def planned(cfg, **keys):
    """Return the plan of a configuration with these overrides, and the printed text."""
    merged = OmegaConf.merge(cfg, {"estimate": {"devices": ["80GiB"], "changes": False}}, keys)
    said = []
    return estimate_devices(merged, show=said.append), "\n".join(said)


def small(**keys):
    return planned(SMALL.to_estimate(), **keys)


def test_an_estimate_equals_the_result_of_a_search(small):
    # Neither is a preview, even if the key is left from one.
    own = ("epochs=1", "probe.device_memory=24MiB", "probe.headroom=0", "preview=True")
    keys = ("estimate.devices=24MiB", "estimate.headroom=0", "estimate.changes=False")
    planned = small.run_in_process("adaptive_estimate", *own, *keys).output_dir
    folder = small.run_in_process("adaptive_probe", *own).output_dir
    plan = json.loads((planned / "adaptive_batch" / "estimate.json").read_text())
    found = json.loads((folder / "adaptive_batch" / "probe.json").read_text())
    (device,) = plan["devices"]
    (answer,) = device["lengths"]
    assert device["budget_bytes"] == found["budget_bytes"]
    for figure in ("max_batch_size", "sequence_length"):
        assert answer[figure] == found[figure]
    peaks = {trial["batch_size"]: trial["peak_bytes"] for trial in found["trials"]}
    assert answer["allocated_bytes"] == peaks[found["max_batch_size"]]
    assert not list((planned / "adaptive_batch").glob("probe*"))


def test_the_fake_mask_of_packed_rows_has_torchtunes_shape_and_takes_no_memory():
    cfg = Combination("llama3_2", 64, packed=True).config()
    run = FakeRun(cfg, FakeDevice(), reads_data=False)
    rows = [run.job.task.synthetic_row(24, packed=True)] * 3
    ours, theirs = run.data.collator.collate(rows), padded_collate_packed(rows)
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in ours.items()} == {
        key: (tensor.shape, tensor.dtype) for key, tensor in theirs.items()
    }
    huge = run.data.collator.collate([run.job.task.synthetic_row(2**17, packed=True)] * 5)[
        "mask"
    ]  # 80 GiB
    assert isinstance(huge, FakeTensor)
    assert not any("flex" in sentence for sentence in run.left_out)
    on_cuda, _ = planned(cfg, device="cuda", estimate={"sequence_lengths": [64]})
    assert any(sentence.startswith("flex attention: packed rows") for sentence in on_cuda.left_out)
    assert huge.numel() == 5 * 2**34


@pytest.mark.slow
def test_tensor_parallelism_divides_the_estimated_weights():
    alone = planned(Combination("llama3", 64, fused=False).to_estimate())[0].lengths[0]
    cfg = Combination("llama3", 64, fused=False).to_estimate(sequence_lengths=[64], world_size=2)
    divided = planned(cfg, **TENSOR_PARALLEL)[0].lengths[0]
    assert divided.check.counted_bytes == divided.check.expected_bytes
    assert 0.5 <= divided.resident.parameters / alone.resident.parameters < 0.7
    # Clipping and stepping add the gradients to the resident memory, but no copy of the model.
    assert divided.optimizer_peak_bytes < 1.5 * (
        divided.resident.total + divided.resident.parameters
    )


@pytest.fixture
def no_network(monkeypatch):
    """Fail on an attempt to connect, even if the code catches the error."""
    attempts = []

    def fail(*arguments, **__):
        attempts.append(arguments)
        raise AssertionError("a connection is made")

    monkeypatch.setattr(socket.socket, "connect", fail)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    yield
    assert not attempts


@pytest.mark.usefixtures("no_network")
def test_given_lengths_need_no_tokenizer_data_weights_or_network(tmp_path):
    cfg = SMALL.to_estimate(sequence_lengths=[32, 64])
    assert "nowhere" in cfg.tokenizer.path
    plan, _ = planned(cfg, output_dir=str(tmp_path / "not_there"))
    assert [length.sequence_length for length in plan.lengths] == [32, 64]
    assert list(tmp_path.iterdir()) == []


def _with_a_small_model(cfg):
    """Return the configuration with a small model of the same family."""
    family = str(cfg.model._component_).split(".")[2]
    families = {
        component["_component_"].split(".")[2]: component
        for component in MODELS.values()
        if len(component) > 1
    }
    alike = {"qwen2_5": "qwen2", "code_llama2": "llama2", "phi4": "phi3", "llama3_3": "llama3_1"}
    changed = OmegaConf.create(OmegaConf.to_container(cfg))
    changed.model = families[alike.get(family, family)]
    if "rlhf" in str(cfg.loss._component_):
        # The small model has no adapters, so DPO needs a separate reference.
        changed.ref_checkpointer = changed.checkpointer
    if "teacher_model" in changed:
        changed.teacher_model = changed.model
    return changed


@pytest.mark.nightly
@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", [name for name, _ in shipped_configs()])
def test_every_shipped_configuration_is_estimated(name):
    cfg = OmegaConf.load(config_files()[name])
    world_size = 8 if "8gpu" in name else 1
    keys = {"sequence_lengths": [64], "world_size": world_size}
    plan, said = planned(_with_a_small_model(cfg), estimate=keys)
    (length,) = plan.lengths
    assert length.check.counted_bytes == length.check.expected_bytes
    assert plan.devices[0].lengths[0].max_batch_size > 100
    assert "max_batch_size" in said


FEW_LENGTHS = {"sequence_lengths": [32], "world_size": 2}
OF_A_LIST = {"tensor_parallel_plan": {"_component_": "builtins.list"}}
OF_NOTHING = {"tensor_parallel_plan": {"_component_": "torchtune.nothing"}}
# The key of the error, the model, and the changed keys.
REFUSED = [
    *(
        ("estimate.devices", "qwen2", {"estimate": {"devices": devices}})
        for devices in ("H1000", "80 pounds", 0.9, [], None)
    ),
    ("device", "qwen2", {"device": "mps"}),
    ("tensor_parallel_dim", "qwen2", {"estimate": {"world_size": 3}, **TENSOR_PARALLEL}),
    (
        "tensor_parallel_dim",
        "llama3",
        {"estimate": {"world_size": 4}, **TENSOR_PARALLEL, "tensor_parallel_dim": 4},
    ),
    ("tensor_parallel_dim", "qwen2, tied", {"estimate": FEW_LENGTHS, **TENSOR_PARALLEL}),
    ("tensor_parallel_plan", "llama3", {"estimate": FEW_LENGTHS, **TENSOR_PARALLEL, **OF_A_LIST}),
    ("tensor_parallel_plan", "llama3", {"estimate": FEW_LENGTHS, **TENSOR_PARALLEL, **OF_NOTHING}),
    (
        "custom_sharded_layers",
        "qwen2, tied",
        {"estimate": FEW_LENGTHS, "custom_sharded_layers": ["tok_embeddings"]},
    ),
    (
        "custom_sharded_layers",
        "llama3",
        {"estimate": FEW_LENGTHS, "custom_sharded_layers": ["tok_embedding"]},
    ),
    ("fsdp_cpu_offload", "qwen2", {"estimate": FEW_LENGTHS, "fsdp_cpu_offload": True}),
    ("estimate.sequence_lengths", "qwen2", {"estimate": {"sequence_lengths": [300]}}),
    ("tokenizer", "qwen2", {"estimate": {"sequence_lengths": None}}),
    (
        "tokenizer",
        "qwen2",
        {
            "collate_fn": "torchtune.data.padded_collate_sft",
            "tokenizer": {"_component_": "nowhere.tokenizer"},
        },
    ),
    *(
        ("enable_activation_offloading", "qwen2", {**keys, "enable_activation_offloading": True})
        for keys in ({"device": "cuda"}, {"enable_activation_checkpointing": True})
    ),
    ("optimizer._component_", "qwen2", {"optimizer": {"_component_": "bitsandbytes.optim.LARS"}}),
    ("model", "qwen2", {"model": {"_component_": "support.model_families.LooksAtValues"}}),
]


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(("key", "model", "keys"), REFUSED, ids=str)
def test_a_run_that_cannot_be_estimated_is_refused_by_its_key(key, model, keys):
    cfg = Combination(model, 32, fused=False).to_estimate()
    with pytest.raises(SettingError) as refused:
        planned(cfg, **keys)
    assert refused.value.key == key


def test_an_estimate_in_one_of_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SettingError):
        small()


def test_no_process_group_is_left_behind():
    small(estimate={"world_size": 4})
    assert not torch.distributed.is_initialized()
    with pytest.raises(SettingError):
        small(fsdp_cpu_offload=True, estimate={"world_size": 4})
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("name", "moments", "is_8bit"),
    [
        ("PagedAdamW8bit", 2, True),
        ("AdamW", 2, False),
        ("Lion8bit", 1, True),
        ("PagedAdamW32bit", 2, False),
    ],
)
def test_states_of_bitsandbytes_have_their_documented_sizes(name, moments, is_8bit):
    plan, _ = small(optimizer={"_component_": f"bitsandbytes.optim.{name}", "fused": None})
    by_hand = 0
    with torch.device("meta"):
        model = config.instantiate(SMALL.config().model)
    for elements in (parameter.numel() for parameter in model.parameters()):
        if is_8bit and elements >= 4096:
            by_hand += moments * (elements + 4 * -(-elements // 256))
        else:
            by_hand += moments * 4 * elements
    assert plan.lengths[0].resident.optimizer == by_hand
    assert any(sentence.startswith("bitsandbytes: ") for sentence in plan.left_out)


SMOOTHED = {"loss": {"_component_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1}}


@pytest.mark.slow
def test_suggested_changes_are_sorted_by_gain_and_refused_changes_are_reported():
    """One change has a loss that cannot be built."""
    said, saved = [], []
    changes = {"estimate": {"devices": ["40MiB"], "changes": True}}
    cfg = OmegaConf.merge(SMALL.to_estimate(), SMOOTHED, changes)
    plan = estimate_devices(cfg, show=said.append, save=saved.append)
    by_key = {change.overrides: change for change in plan.changes}
    checkpointing = by_key["enable_activation_checkpointing=True",]
    changed, _ = small(
        enable_activation_checkpointing=True, estimate={"devices": ["40MiB"]}, **SMOOTHED
    )
    before, (after,) = plan.devices[0].lengths[0].max_batch_size, checkpointing.bounds
    assert before < after == changed.devices[0].lengths[0].max_batch_size
    assert any("enable_activation_checkpointing=True" in line for line in said)
    gains = [change.bounds[0] for change in plan.changes]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > before
    refused = (
        "not estimated: loss=torchtune.modules.loss.CEWithChunkedOutputLoss: loss='.*': it cannot"
        " be built: TypeError"
    )
    assert any(re.match(refused, line) for line in said)
    assert [bool(one.changes) for one in saved] == [False, True]
    assert any("TypeError" in change.refused for change in plan.refused)
    assert saved[-1] == plan


@pytest.mark.slow
def test_a_suggestion_of_expandable_segments_uses_their_smaller_headroom(monkeypatch):
    cfg = Combination("qwen2", 32, device="cuda").to_estimate(context=0, headroom="auto")
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    now, _ = planned(cfg, estimate={"devices": ["100MiB"], "changes": True})
    (change,) = (change for change in now.changes if "expandable" in change.overrides[0])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    expanding, said = planned(cfg, estimate={"devices": ["100MiB"]})
    assert "for headroom (1%)" in said
    assert change.bounds == (expanding.devices[0].lengths[0].max_batch_size,)
