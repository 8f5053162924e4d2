"""Fine-tuning of adapters: what a resume point holds, the base that it stands on, the bound, and
what is refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torchtune
import transformers
from omegaconf import OmegaConf
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.adapters import KINDS, LORA, OURS, adapters, make_wide_setup, same_epoch
from support.cli import MODEL, make_setup
from support.cli import OURS as FULL
from support.cli import STOCK as STOCK_FULL

from adaptive_batch.checkpoint import checkpoints_in
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.report import read_records
from adaptive_batch.torchtune import AdapterModel, Settings, builder_of
from adaptive_batch.torchtune.checks import check_loss
from adaptive_batch.torchtune.estimate_changes import candidates, with_overrides

POINTS = (*LORA, "epochs=1", "save_every_n_steps=3", "save_adapter_weights_only=True")


@pytest.fixture(scope="module")
def begun(small):
    return small.run_in_process(OURS, *POINTS)


def interrupted(setup, finished, *, step):
    """A copy of a run as it would be had it been killed after a resume point."""
    folder = setup.fresh_folder()
    shutil.copytree(finished.output_dir, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "epoch_0")
    for path in folder.glob("step_*"):
        if path.name != f"step_{step}":
            shutil.rmtree(path)
    return folder


def test_a_resume_point_holds_no_base_and_what_goes_on_from_it_ends_with_the_same_bits(
    small, begun
):
    folder = interrupted(small, begun, step=6)
    (point,) = checkpoints_in(folder)[0]
    held, _ = point.load()
    assert held["model"].keys() == held["optimizer"]["state"].keys() == adapters(begun, 0).keys()
    resumed = small.run_in_process(
        OURS, *POINTS, f"output_dir={folder}", "resume_from_checkpoint=True"
    )
    assert resumed.losses == [*begun.losses, *begun.losses[6:]]  # one log
    assert same_epoch(resumed, begun, 0)


@pytest.mark.slow
def test_a_quantized_base_resumes_from_a_point_to_the_bit(tmp_path):
    wide = make_wide_setup(tmp_path)
    own = (*POINTS, *KINDS["QLoRA"], "max_steps_per_epoch=4")
    begun = wide.run_in_process(OURS, *own)
    folder = interrupted(wide, begun, step=3)
    resumed = wide.run_in_process(OURS, *own, f"output_dir={folder}", "resume_from_checkpoint=True")
    assert same_epoch(resumed, begun, 0)


def test_another_base_than_that_of_the_checkpoint_is_refused_by_its_checksum(begun, tmp_path):
    setup = make_setup(tmp_path)
    folder = interrupted(setup, begun, step=6)
    path = setup.base / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError,
        match=r"^model\.safetensors of .* is not the base that the adapters were trained",
    ):
        setup.run_in_process(OURS, *POINTS, f"output_dir={folder}", "resume_from_checkpoint=True")


def test_the_other_recipe_that_goes_on_from_a_folder_is_named(small, begun):
    folder = interrupted(small, begun, step=6)
    with pytest.raises(
        SettingError,
        match=r"holds adapters, and weights are trained here; .*adaptive_lora_finetune",
    ):
        small.run_in_process(FULL, f"output_dir={folder}", "resume_from_checkpoint=True")
    whole = small.run_in_process(STOCK_FULL, "max_steps_per_epoch=1")
    with pytest.raises(
        SettingError, match=r"holds weights without adapters, .*`tune run adaptive_full_finetune`"
    ):
        small.run_in_process(
            OURS, *LORA, f"output_dir={whole.output_dir}", "resume_from_checkpoint=True"
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS])
def test_the_bound_is_found_in_few_trials_and_more_rows_do_not_fit(tmp_path, kind):
    wide = make_wide_setup(tmp_path)
    finds = (
        "use_maximum_batch_size=True",
        "probe.device_memory=32MiB",
        "probe.round_to_power_of_two=False",
        "epochs=1",
    )
    found = wide.run_in_process(OURS, *LORA, *KINDS[kind], *finds, "max_steps_per_epoch=1")
    records = read_records(found.output_dir / "adaptive_batch" / "run.jsonl")
    bound = next(record for record in records if record["kind"] == "bound")
    assert bound["trials"] <= 5
    assert bound["out_of_memory"] == 0
    bisected = wide.run_in_process(
        OURS, *LORA, *KINDS[kind], *finds, "max_steps_per_epoch=1", "probe.search=binary"
    )
    others = read_records(bisected.output_dir / "adaptive_batch" / "run.jsonl")
    assert (
        next(record for record in others if record["kind"] == "bound")["max_batch_size"]
        == bound["max_batch_size"]
    )


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        ((), "model", "it has no adapters; `tune run adaptive_full_finetune`"),
        ((*LORA[:2], *LORA[3:5]), "model.apply_lora_to_mlp", "it is missing"),
        ((*LORA, "tensor_parallel_dim=2"), "tensor_parallel_dim", ""),
    ],
)
def test_what_is_no_adapter_is_refused_before_weights_load(small, overrides, key, says):
    with pytest.raises(SettingError, match=says) as refused:
        small.run_in_process(OURS, *overrides, "checkpointer.checkpoint_dir=nowhere")
    assert refused.value.key == key


@pytest.mark.parametrize("name", ["llama3_1/8B_full_dpo", "llama2/7B_lora_dpo"])
def test_preferences_are_refused_in_one_line(name):
    cfg = OmegaConf.load(
        Path(torchtune.__file__).parents[1] / "recipes" / "configs" / f"{name}.yaml"
    )

    def check() -> None:
        Settings.from_config(cfg)
        check_loss(object(), cfg)

    with pytest.raises(SettingError, match="preferences") as refused:
        check()
    assert "\n" not in str(refused.value)


def test_changes_of_adapters_are_estimated_and_name_what_is_typed():
    cfg = OmegaConf.create(
        {
            "model": {
                "_component_": "torchtune.models.llama3_2.lora_llama3_2_1b",
                "lora_attn_modules": ["q_proj", "output_proj"],
                "apply_lora_to_mlp": True,
                "lora_rank": 64,
            },
            "optimizer": {"_component_": "torch.optim.AdamW"},
            "loss": {"_component_": "torch.nn.CrossEntropyLoss"},
            "dtype": "bf16",
            "device": "cuda",
        }
    )
    assert isinstance(builder_of(cfg), AdapterModel)
    with torch.device("meta"):
        model = torch.nn.Linear(1, 1)
    typed = [one.overrides for one in candidates(cfg, model, tokens=64, world_size=1)]
    expected = [
        "model.lora_rank=32",
        "model.apply_lora_to_mlp=False",
        "model.lora_attn_modules=[q_proj,v_proj]",
        "model=torchtune.models.llama3_2.qlora_llama3_2_1b",
    ]
    assert [one for (one, *_) in typed if one.startswith("model")] == expected
    for override in expected:
        assert json.dumps(
            OmegaConf.to_container(with_overrides(cfg, [override]).model)
        ) != json.dumps(OmegaConf.to_container(cfg.model))
    assert with_overrides(cfg, expected).model._component_.endswith("qlora_llama3_2_1b")


FAMILIES = {  # transformers' configuration, what differs in it, and what is typed for torchtune
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}, ()),
    "llama3_2": (
        transformers.LlamaConfig,
        {"tie_word_embeddings": False},
        ("model.tie_word_embeddings=False",),
    ),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 16}, ("model.head_dim=16",)),
}


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
@pytest.mark.parametrize("family", [*FAMILIES])
def test_peft_computes_what_the_merged_weights_compute(tmp_path, family, kind):
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
    folder = setup.run_in_process(OURS, *overrides).output_dir / "epoch_0"
    merged = shutil.copytree(
        folder, tmp_path / "merged", ignore=shutil.ignore_patterns("adapter_*")
    )
    tokens = torch.arange(64).reshape(2, 32)
    with torch.inference_mode():
        before = base(tokens).logits
        expected = transformers.AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
        found = PeftModel.from_pretrained(base, folder)(tokens).logits
    assert (found - expected).abs().max() < 1e-4 * (expected - before).abs().max()
