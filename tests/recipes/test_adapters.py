"""Adapter fine-tuning: checkpoints, exports, changes of the number of ranks, refused settings."""

from __future__ import annotations

import shutil

import pytest
import torch
import torchtune
import transformers
from omegaconf import OmegaConf
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.cli import MODEL, make_setup, resume_run, resumes
from support.cli import OURS as FULL
from support.stops import stopped_after
from support.tasks import ADAPTERS, KINDS, LORA, adapters, make_wide_setup, same_epoch
from torchtune.models.qwen2 import lora_qwen2

from adaptive_batch.checkpoint import checkpoints_in
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.report import audit
from adaptive_batch.torchtune import AdapterModel, NextTokens

POINTS = (*LORA, "epochs=1", "save_every_n_steps=3", "save_adapter_weights_only=True")


@pytest.fixture(scope="module")
def begun(small):
    return small.run_in_process(ADAPTERS.ours, *POINTS)


def test_an_adapter_checkpoint_omits_the_base_and_resumes_bit_for_bit(small, begun):
    folder = stopped_after(begun, small, 6)
    for point in checkpoints_in(folder):
        held, _ = point.load()
        trained = adapters(begun, 0).keys()
        assert held["model"].keys() == held["optimizer"]["state"].keys() == trained
    resumed = resume_run(small, folder, *POINTS, recipe=ADAPTERS.ours)
    assert resumed.losses == [*begun.losses, *begun.losses[6:]]  # one log for both starts
    assert same_epoch(resumed, begun, 0)


def test_a_changed_base_is_refused_by_its_checksum(begun, tmp_path):
    setup = make_setup(tmp_path)
    folder = stopped_after(begun, setup, 6)
    path = setup.base / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="are not the base that the adapters were trained"):
        resume_run(setup, folder, *POINTS, recipe=ADAPTERS.ours)


def test_a_checkpoint_of_the_other_recipe_is_refused(small, begun):
    folder = stopped_after(begun, small, 6)
    with pytest.raises(SettingError, match=r"^model=.*: the checkpoint was trained with .*lora"):
        resume_run(small, folder)
    whole = small.run_in_process(FULL, "max_steps_per_epoch=1")
    with pytest.raises(SettingError, match=r"^model=.*lora.*: the checkpoint was trained with"):
        resume_run(small, whole.output_dir, *LORA, recipe=ADAPTERS.ours)


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("model", ()),
        ("model.apply_lora_to_mlp", (*LORA[:2], *LORA[3:5])),
        ("tensor_parallel_dim", (*LORA, "tensor_parallel_dim=2")),
        *(
            (f"model.{key}", (*LORA, f"model.{key}={value}"))
            for key, value in (
                ("lora_attn_modules", "[q_proj,vproj]"),
                ("lora_attn_modules", "q_proj"),
                ("lora_rank", 0),
                ("lora_alpha", 0),
                ("lora_dropout", 1),
                ("use_dora", "maybe"),
                ("apply_lora_to_output", 1),
            )
        ),
        ("model", (*LORA, "model.embed_dim=33")),
        ("model", (*LORA, "model.lora_attn_modules=[]")),
        ("checkpointer.adapter_checkpoint", (*LORA, "checkpointer.adapter_checkpoint=nowhere.pt")),
    ],
    ids=lambda value: str(value[-1:]) if isinstance(value, tuple) else value,
)
def test_an_invalid_adapter_is_refused_before_weights_load(small, key, overrides):
    with pytest.raises(SettingError) as refused:
        small.run_in_process(ADAPTERS.ours, *overrides, "checkpointer.checkpoint_dir=nowhere")
    assert refused.value.key == key
    assert "\n" not in str(refused.value)


def test_an_adapter_key_that_the_builder_ignores_is_refused(small):
    """All builders of torchtune 0.6.1 use these keys; a user's builder may ignore them."""
    shape = {**MODEL, "lora_rank": 2, "lora_alpha": 4.0}
    block = {**shape, "lora_attn_modules": ["q_proj"], "apply_lora_to_mlp": False}
    with torch.device("meta"):
        model = lora_qwen2(**block)
    AdapterModel().check(model, OmegaConf.create({"model": block}))
    for key, value in {
        "lora_attn_modules": ["q_proj", "k_proj"],
        "apply_lora_to_mlp": True,
        "apply_lora_to_output": True,
        "use_dora": True,
        "lora_dropout": 0.1,
        "quantize_base": True,
    }.items():
        cfg = OmegaConf.create({"model": {**block, key: value}})
        with pytest.raises(SettingError, match="adds no such adapters") as refused:
            AdapterModel().check(model, cfg)
        assert refused.value.key == f"model.{key}"


def test_adapters_train_with_the_optimizer_in_backward(small):
    keys = (*LORA[:-1], "epochs=1", "max_steps_per_epoch=4")
    whole = small.run_in_process(ADAPTERS.ours, *keys, "optimizer_in_bwd=False")
    stepped = small.run_in_process(ADAPTERS.ours, *keys, "optimizer_in_bwd=True")
    losses = [float(loss) for loss in whole.losses]
    assert [float(loss) for loss in stepped.losses] == pytest.approx(losses, rel=1e-6)


def test_a_chunked_loss_is_refused_for_a_model_without_output_chunks():
    cfg = OmegaConf.create(
        {"model": {"_component_": "mine.Own"}, "loss": {"_component_": "chunked"}}
    )
    chunked = torchtune.modules.loss.CEWithChunkedOutputLoss()
    with pytest.raises(SettingError, match=r"mine\.Own has no set_num_output_chunks.*CrossEntropy"):
        NextTokens(cfg, chunked).check_models(torch.nn.Linear(1, 1), None)
    NextTokens(cfg, torch.nn.CrossEntropyLoss()).check_models(torch.nn.Linear(1, 1), None)


FAMILIES = {  # transformers' configuration class, its arguments, and torchtune's overrides
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}, ()),
    "llama3_2": (
        transformers.LlamaConfig,
        {"tie_word_embeddings": False},
        ("model.tie_word_embeddings=False",),
    ),
}


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
@pytest.mark.parametrize("family", [*FAMILIES])
def test_peft_matches_the_merged_weights(tmp_path, family, kind):
    setup = make_setup(tmp_path)
    config, differs, typed = FAMILIES[family]
    shape = {
        "vocab_size": MODEL["vocab_size"],
        "num_hidden_layers": MODEL["num_layers"],
        "num_attention_heads": MODEL["num_heads"],
        "num_key_value_heads": MODEL["num_kv_heads"],
        "hidden_size": MODEL["embed_dim"],
        "intermediate_size": MODEL["intermediate_dim"],
    }
    base = transformers.AutoModelForCausalLM.from_config(
        config(**shape, **differs, initializer_range=0.2)
    )
    base.save_pretrained(setup.base)
    overrides = (
        *(*LORA, *KINDS[kind], *typed),
        f"model._component_=torchtune.models.{family}.lora_{family}",
        "model.lora_attn_modules=[q_proj,k_proj,v_proj]",
        f"checkpointer.model_type={family.upper()}",
        "epochs=1",
    )
    folder = setup.run_in_process(ADAPTERS.ours, *overrides).output_dir / "epoch_0"
    merged = shutil.copytree(
        folder, tmp_path / "merged", ignore=shutil.ignore_patterns("adapter_*")
    )
    tokens = torch.arange(64).reshape(2, 32)
    with torch.inference_mode():
        before = base(tokens).logits
        expected = transformers.AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
        found = PeftModel.from_pretrained(base, folder)(tokens).logits
    assert (found - expected).abs().max() < 1e-4 * (expected - before).abs().max()


@pytest.mark.slow
def test_adapters_of_a_quantized_base_resume_bit_for_bit(tmp_path):
    wide = make_wide_setup(tmp_path)
    own = (*POINTS, *KINDS["QLoRA"], "max_steps_per_epoch=4")
    begun = wide.run_in_process(ADAPTERS.ours, *own)
    folder = stopped_after(begun, wide, 3)
    resumed = resume_run(wide, folder, *own, recipe=ADAPTERS.ours)
    assert same_epoch(resumed, begun, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("DoRA", 2, 1), pytest.param("QLoRA", 1, 2, marks=pytest.mark.nightly)],
)
def test_adapters_resume_on_a_different_number_of_ranks(tmp_path, kind, before, after):
    setup = make_wide_setup(tmp_path)
    keys = (*KINDS[kind], "save_every_n_steps=2", "save_adapter_weights_only=True", "batch_size=4")
    keys = (ADAPTERS.ours, *LORA, "epochs=1", *keys)
    whole = setup.run(*keys, ranks=before)
    folder = stopped_after(whole, setup, 2)
    resumed = setup.run(*keys, *resumes(ADAPTERS.ours, folder), ranks=after)
    assert audit(folder).holds
    rest = [float(loss) for loss in whole.losses[2:]]
    # The resumed run appends to the copied log of the whole run.
    found = [float(loss) for loss in resumed.losses[len(whole.losses) :]]
    assert found == pytest.approx(rest, rel=0.02 if kind == "QLoRA" else 2e-5)
