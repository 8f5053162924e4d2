"""Mistakes are refused before weights load: the error names the key, the value and what would do."""

import re

import pytest
from small_run import OURS

from adaptive_batch.errors import AdaptiveBatchError

FUNCTION = "batch_increase_function"
PROBE = "use_maximum_batch_size=True"

REFUSED = {
    # the growth function
    "a module that is not there": ([f"{FUNCTION}=nowhere.f"], "nowhere.f", "no module nowhere"),
    "a name that is not there": ([f"{FUNCTION}=small_growth.four_mor"], FUNCTION, "near it: four_more"),
    "no dotted path": ([f"{FUNCTION}=grow"], FUNCTION, "dotted path"),
    "not callable": ([f"{FUNCTION}=small_growth.NOT_CALLABLE"], FUNCTION, "give a function"),
    "takes other arguments": ([f"{FUNCTION}=small_growth.takes_one"], FUNCTION, "epoch, batch_size"),
    "raises": ([f"{FUNCTION}=small_growth.raises"], r"epoch=0, batch_size=4", "KeyError: 'no such stage'"),
    "returns None": ([f"{FUNCTION}=small_growth.returns_none"], r"epoch=0, batch_size=4", "whole number"),
    "returns a float": ([f"{FUNCTION}=small_growth.returns_float"], r"epoch=0, batch_size=4", "whole number"),
    "returns a bool": ([f"{FUNCTION}=small_growth.returns_bool"], r"epoch=0, batch_size=4", "whole number"),
    "returns a negative number": ([f"{FUNCTION}=small_growth.returns_negative"], r"epoch=0, batch_size=4", "0 or more"),
    "returns a huge number": ([f"{FUNCTION}=small_growth.returns_huge"], r"epoch=0, batch_size=4", "at most"),
    "a number": ([f"{FUNCTION}=3"], f"{FUNCTION}=3", "dotted path"),
    "a component called without its arguments": (
        [f"{FUNCTION}._component_=small_growth.four_more"],
        FUNCTION,
        f"for a function itself write {FUNCTION}: small_growth.four_more",
    ),
    "a ready function with a wrong factor": (
        [f"{FUNCTION}._component_=adaptive_batch.growth.geometric", f"{FUNCTION}.factor=0"],
        "factor",
        "",
    ),
    "both ways to grow": (
        [f"{FUNCTION}=small_growth.four_more", "batch_size_schedule=x.y"],
        "batch_size_schedule",
        "remove one",
    ),
    # whole numbers
    **{
        f"{key}={value}": ([f"{key}={value}"], f"{key}=", "whole number, 1 or more")
        for key in ("batch_size", "epochs", "gradient_accumulation_steps")
        for value in (0, -3, 2.5, "True")
    },
    "max_steps_per_epoch=0": (["max_steps_per_epoch=0"], "max_steps_per_epoch=0", "whole number"),
    # switches
    "a switch that is no switch": (["use_maximum_batch_size=3"], "use_maximum_batch_size=3", "True or False"),
    "drop_last that is no switch": (["drop_last=some"], "drop_last='some'", "True or False"),
    # the probe
    "an unknown search": (["probe.search=fast"], "probe.search='fast'", "predict, binary, halve"),
    "no size": (["probe.device_memory=12XiB"], "probe.device_memory='12XiB'", "12GiB"),
    "a negative size": (["probe.device_memory=-1"], "probe.device_memory=-1", "12GiB"),
    "more than the device has": (
        [PROBE, "probe.device_memory=900TiB"],
        "probe.device_memory='900TiB'",
        "the device has",
    ),
    "less than the weights need": (
        [PROBE, "probe.device_memory=100KiB"],
        "probe.device_memory='100KiB'",
        "weights alone need",
    ),
    "headroom of one": (["probe.headroom=1"], "probe.headroom=1", "below 1"),
    "negative headroom": (["probe.headroom=-0.1"], "probe.headroom=-0.1", "at least 0"),
    "headroom that is not a number": (["probe.headroom=nan"], "probe.headroom=", "share"),
    "maximum of zero": (["probe.maximum=0"], "probe.maximum=0", "1 or more"),
    "an unknown key in probe": (["probe.serach=binary"], "probe.serach='binary'", "near it: search"),
    "probe that is no block": (["probe=binary"], "probe='binary'", "block"),
    "a word for the length": (
        ["probe.sequence_length=shortest"],
        "probe.sequence_length='shortest'",
        "longest, max_seq_len",
    ),
    "a length above the model's": (
        [PROBE, "probe.sequence_length=65"],
        "probe.sequence_length=65",
        "64 tokens at most",
    ),
    "no lengths": (["probe.sequence_lengths=[]"], "probe.sequence_lengths=", "list of lengths"),
    "no length at which the tokenizer cuts": (
        [PROBE, "probe.sequence_length=max_seq_len", "tokenizer.max_seq_len=null", "dataset.packed=False"],
        "probe.sequence_length='max_seq_len'",
        "",
    ),
    "rows longer than the model takes": (
        [PROBE, "tokenizer.max_seq_len=100"],
        "probe.sequence_length='longest'",
        "tokenizer.max_seq_len=64",
    ),
    "a batch above the rows of an epoch": (
        [f"{FUNCTION}=small_growth.four_more", "batch_size=64"],
        "batch_size=64",
        "an epoch has 32 rows; give 32 or less",
    ),
    "a batch above the probe's maximum": (
        [f"{FUNCTION}=small_growth.four_more", "batch_size=16", "probe.maximum=8"],
        "batch_size=16",
        "probe.maximum is 8; give 8 or less",
    ),
    "a word for a switch": (["optimizer_in_bwd=maybe"], "optimizer_in_bwd='maybe'", "True or False"),
    # keys
    "a key that is nearly ours": (["use_max_batch_size=True"], "use_max_batch_size=True", "use_maximum_batch_size"),
    **{
        f"{key} is for later": ([f"{key}={value}"], f"{key}=", "not supported yet")
        for key, value in {
            "grow_beyond_maximum": "True",
            "lr_clock": "steps",
            "save_every_n_steps": 10,
            "batch_size_schedule": "a.b",
            "plan_only": "True",
        }.items()
    },
    # what does not go together
    "optimizer in backward with accumulation": (
        ["optimizer_in_bwd=True", "gradient_accumulation_steps=2"],
        "gradient_accumulation_steps=2",
        "optimizer_in_bwd=False",
    ),
    "optimizer in backward with clipping": (
        ["optimizer_in_bwd=True", "clip_grad_norm=1.0"],
        "clip_grad_norm=1.0",
        "optimizer_in_bwd=False",
    ),
    "a collate function for inference": (
        ["collate_fn=torchtune.data.left_pad_sequence"],
        "collate_fn=",
        "padded_collate_sft",
    ),
    "half precision without scaling": (["dtype=fp16"], "dtype='fp16'", "bf16 or fp32"),
    "offloading without CUDA": (["enable_activation_offloading=True"], "enable_activation_offloading=True", "CUDA"),
    "a scheduler that torchtune's recipes cannot build": (
        ["lr_scheduler._component_=torch.optim.lr_scheduler.StepLR", "lr_scheduler.step_size=2"],
        "lr_scheduler._component_='torch.optim.lr_scheduler.StepLR'",
        "num_training_steps",
    ),
    "an output folder that cannot be made": (
        ["output_dir=/proc/nowhere"],
        "output_dir='/proc/nowhere'",
        "cannot be made",
    ),
    # the data
    "an empty dataset": (["dataset._component_=small_growth.empty_dataset"], "dataset=", "no rows"),
    "a dataset smaller than one batch": (["batch_size=33"], "batch_size=33", "the dataset has 32"),
}


@pytest.mark.parametrize(("overrides", "names", "remedy"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_before_weights_load(small, overrides, names, remedy):
    output = small.fresh_folder()
    # weights that cannot be read: whatever is refused later than they load fails as that instead
    base = output / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"not weights")
    (base / "config.json").write_text((small.folder / "base" / "config.json").read_text())
    with pytest.raises(AdaptiveBatchError) as refused:
        small.run_in_process(OURS, f"output_dir={output / 'run'}", f"checkpointer.checkpoint_dir={base}", *overrides)
    assert isinstance(refused.value, ValueError), refused.value
    assert re.search(names, str(refused.value)) or names in str(refused.value)
    assert remedy in str(refused.value)
    assert not list(output.glob("run/epoch_*"))


def test_on_the_terminal_a_mistake_is_one_line(small):
    finished = small.run(OURS, "use_max_batch_size=True", expect=1)
    last = finished.output.strip().splitlines()[-1]
    assert (
        last == "SettingError: use_max_batch_size=True: there is no such key; use_maximum_batch_size is probably meant"
    )
    assert "Traceback" not in finished.output


def test_a_config_that_is_neither_file_nor_shipped_is_refused_with_what_there_is(small):
    finished = small.run(OURS, config="demo_gpu", expect=1)
    assert "--config='demo_gpu'" in finished.output
    assert "demo_cpu" in finished.output
