"""Mistakes are refused in one line before weights load, and the error names the key.

The unit tests test_settings.py and test_checks.py test values that are invalid alone.
"""

import pytest
from support.cli import OURS, records
from support.tasks import LORA_MODEL

from adaptive_batch.errors import (
    AdaptiveBatchError,
    DoesNotFitError,
    GrowthFunctionError,
    SettingError,
)

COMPONENTS = "support.components"
PROBE = "use_maximum_batch_size=True"
OF_LENGTHS = (
    f"dataset._component_={COMPONENTS}.OfLengths dataset.lengths=[10,20,30,40] batch_size=2"
)
PICTURES = "dataset._component_=support.cli.pictures batch_size=2"
GROWS = f"batch_increase_function={COMPONENTS}.four_more"
SCHEDULE = "batch_size_schedule"
STEPS = (
    f"{SCHEDULE}._component_=adaptive_batch.schedules.steps {SCHEDULE}.batch_sizes=[4,8,16]"
    f" {SCHEDULE}.thresholds=[0.5ep,1ep]"
)
BY_NOISE = f"{SCHEDULE}._component_=adaptive_batch.schedules.by_noise_scale {SCHEDULE}.start=4"
COSINE = (
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    " lr_scheduler.num_warmup_steps=2"
)
SEESAW = f"{SCHEDULE}._component_=adaptive_batch.schedules.seesaw {COSINE} micro_batch_size=8"
SCALED = "scale_with_batch.beta2=half_life scale_with_batch.weight_decay=per_token"
VALIDATED = f"dataset_val._component_={COMPONENTS}.OfLengths run_val_every_n_steps=1"
ODD = f"dataset._component_={COMPONENTS}.WithOddRow batch_size=2"
CROSS_ENTROPY = "loss=torch.nn.CrossEntropyLoss"

# The key of the error, and the overrides after ``tune run adaptive_full_finetune``.
REFUSED = {
    "arguments": ["batch_size=[1", "seed=1=2", "~no_key", "--resume"],
    "batch_increase_function": [
        *(f"batch_increase_function={COMPONENTS}.{name}" for name in ("four_mor", "NOT_CALLABLE")),
        "batch_increase_function=nowhere.f",
        "batch_increase_function=adaptive_batch.schedules.geometric",
    ],
    "batch_increase_function._component_": [
        f"batch_increase_function._component_={COMPONENTS}.four_more"
    ],
    SCHEDULE: [
        f"{GROWS} {SCHEDULE}=x.y",
        f"{SCHEDULE}=adaptive_batch.schedules.by_noise_scale",
        f"{STEPS} {SCHEDULE}.batch_sizes=[4,8,64] drop_last=True",
        f"optimizer_in_bwd=True {BY_NOISE}",
        f"{STEPS} {SCHEDULE}.batch_sizes=[16,2,4] {SCHEDULE}.thresholds=[1sp,2sp]",
    ],
    f"{SCHEDULE}._component_": [
        f"{SCHEDULE}._component_=adaptive_batch.schedules.stepz",
        f"{SCHEDULE}._component_=adaptive_batch.schedules.linear_ramp {SCHEDULE}.start=4",
    ],
    "batch_size": [
        "batch_size=33",
        f"{GROWS} batch_size=64",
        f"{GROWS} batch_size=16 probe.maximum=8",
    ],
    "batch_tokens": [
        f"{PICTURES} batch_tokens=100",
        f"{OF_LENGTHS} batch_tokens=35",
        f"batch_tokens=200 {PROBE}",
        f"batch_tokens=200 {GROWS}",
        "optimizer_in_bwd=True batch_tokens=100",
    ],
    "gradient_accumulation_steps": [
        f"{STEPS} gradient_accumulation_steps=2",
        f"{SEESAW} gradient_accumulation_steps=2",
        "optimizer_in_bwd=True gradient_accumulation_steps=2",
    ],
    "micro_batch_size": ["optimizer_in_bwd=True micro_batch_size=2"],
    "micro_batch_tokens": [
        "micro_batch_size=2 micro_batch_tokens=auto",
        f"{OF_LENGTHS} micro_batch_tokens=39",
        f"{OF_LENGTHS} micro_batch_tokens=40 pad_to_multiple_of=16",
        f"{PICTURES} micro_batch_tokens=100",
        f"{PICTURES} micro_batch_tokens=auto",
        "optimizer_in_bwd=True micro_batch_tokens=auto",
        "optimizer_in_bwd=True micro_batch_tokens=100",
    ],
    "uniform_micro_batches": [
        f"{PICTURES} uniform_micro_batches=lengths",
        "optimizer_in_bwd=True uniform_micro_batches=rows",
    ],
    "micro_batch_layout": [
        "micro_batch_layout=packed uniform_micro_batches=rows",
        "micro_batch_layout=grouped uniform_micro_batches=both",
        "micro_batch_layout=packed pad_to_multiple_of=8",
        "micro_batch_layout=packed collate_fn=torchtune.data.padded_collate_sft",
        "micro_batch_layout=packed dataset.packed=True",
        "micro_batch_layout=grouped optimizer_in_bwd=True",
        f"{PICTURES} micro_batch_layout=packed",
    ],
    "pad_to_multiple_of": [f"{PICTURES} pad_to_multiple_of=8"],
    "min_rows_per_batch": ["batch_tokens=200 min_rows_per_batch=5 max_rows_per_batch=4"],
    "long_rows": [
        f"{OF_LENGTHS} batch_tokens=100 min_rows_per_batch=3 long_rows=alone",
        f"{STEPS} {SCHEDULE}.batch_sizes=[64,80,96] batch_tokens=64 long_rows=drop",
    ],
    "clip_grad_norm": ["optimizer_in_bwd=True clip_grad_norm=1.0"],
    "log_gradient_noise_scale": ["optimizer_in_bwd=True log_gradient_noise_scale=True"],
    "grow_beyond_maximum": ["optimizer_in_bwd=True grow_beyond_maximum=True"],
    "probe.sequence_length": [
        f"{PROBE} probe.sequence_length=65",
        f"{PROBE} {OF_LENGTHS} probe.sequence_length=20",
        f"{PROBE} {PICTURES} probe.sequence_length=64",
        *(
            f"{PROBE} {OF_LENGTHS} probe.sequence_length=max_seq_len tokenizer.max_seq_len={length}"
            for length in ("null", 100)
        ),
    ],
    "run_val_every_n_steps": ["run_val_every_n_steps=5"],
    "dataset_val": [
        f"{VALIDATED} dataset_val.lengths=[]",
        f"{VALIDATED} dataset_val._component_={COMPONENTS}.Endless",
    ],
    "lr_clock": [
        f"{SEESAW} lr_clock=steps",
    ],
    "lr_scaling": [f"{SEESAW} lr_scaling=linear"],
    "max_steps_per_epoch": [f"{SEESAW} max_steps_per_epoch=3"],
    f"{SCHEDULE}.maximum": [f"{SEESAW} {SCHEDULE}.maximum=2"],
    "scale_with_batch.beta2": [f"{SCALED} optimizer=torch.optim.SGD ~optimizer.fused"],
    "scale_with_batch.weight_decay": [f"{SCALED} optimizer.weight_decay=0"],
    "lr_scheduler": [
        f"{SCHEDULE}._component_=adaptive_batch.schedules.seesaw micro_batch_size=8",
        "lr_scheduler._component_=torch.optim.lr_scheduler.StepLR lr_scheduler.step_size=2",
        "lr_scheduler._component_=support.components.step_lr",
        f"{COSINE} lr_scheduler.num_cycles=abc",
    ],
    "device": ["device=cuda dtype=bf16", "device=xpu"],
    "output_dir": ["output_dir=/proc/nowhere"],
    "collate_fn": [
        "collate_fn=torchtune.data.padded_collate_dpo",
        f"collate_fn={COMPONENTS}.without_labels",
        *(f"collate_fn={value}" for value in ("[]", "torch.pi", "torch.nn.Linear")),
    ],
    "dataset": [
        *(
            f"dataset._component_={COMPONENTS}.{name}"
            for name in ("Stream", "Endless", "unbuildable")
        ),
        f"{OF_LENGTHS} dataset.lengths=[]",
        *(
            f"{ODD} dataset.row={row} {key}"
            for row in (
                *("raises", "long", "foreign", "foreign_label", "negative", "empty", "floats"),
                "unlike",
            )
            for key in ("batch_tokens=200", PROBE)
        ),
        "dataset.streaming=True",
        "dataset.streaming=True dataset.packed=True",
        "dataset.split=nosuch",
        "dataset.data_files=/nowhere",
        "tokenizer.max_seq_len=2",
    ],
    "dataset.train_on_input": ["dataset.train_on_input=maybe"],
    "dataset.column_map": ["dataset.column_map={input:foo}"],
    "tokenizer": ["tokenizer.path=/nowhere/vocab.json"],
    "loss": [
        f"{CROSS_ENTROPY} loss.reduction=Mean",
        f"{CROSS_ENTROPY} loss.reduction=sum",
        f"{CROSS_ENTROPY} loss.weight=[1,2]",
        "loss=torch.nn.NLLLoss",
        "loss=torch.nn.MSELoss",
        "loss._component_=torchtune.modules.loss.ForwardKLWithChunkedOutputLoss",
    ],
    "loss.label_smoothing": [
        f"{CROSS_ENTROPY} loss.label_smoothing={value}" for value in (-0.1, 2)
    ],
    "loss.ignore_index": ["loss.ignore_index=5"],
    "model": [" ".join(LORA_MODEL)],
    "optimizer.lr": ["optimizer.lr=abc", "optimizer.lr=.inf", "optimizer.lr=True"],
    "optimizer": [
        "optimizer.differentiable=null",
        "optimizer._component_=torch.optim.SGD optimizer.momentum=0.9 optimizer.dampening=abc",
    ],
    "checkpointer": ["checkpointer.nosuch=1", "checkpointer.checkpoint_files=model.safetensors"],
    "checkpointer.output_dir": [f"checkpointer.output_dir={value}" for value in ("null", 5)],
    "metric_logger": ["metric_logger=null"],
    "profiler": [
        "profiler.enable=True",
        "profiler._component_=torchtune.training.DummyProfiler",
        *(
            f"profiler.enabled=True profiler.{setting}"
            for setting in ("wait_steps=-1", "active_steps=0", "output_dir=3")
        ),
    ],
}
RULES = [  # functions that return invalid values
    f"batch_increase_function={COMPONENTS}.exits_in_second_epoch {PROBE}",
    f"{SCHEDULE}=support.components.raises_in_second_epoch",
    f"{OF_LENGTHS} batch_tokens=100 long_rows=alone"
    f" {SCHEDULE}=support.components.another_each_time",
]


@pytest.fixture
def unreadable(small):
    """Return overrides with unreadable weights, so that a check after loading them fails."""
    output = small.fresh_folder()
    base = output / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"not weights")
    (base / "config.json").write_text((small.folder / "base" / "config.json").read_text())
    yield f"output_dir={output / 'run'}", f"checkpointer.checkpoint_dir={base}"
    assert not list(output.glob("run/epoch_*"))


@pytest.mark.parametrize(
    ("key", "typed"),
    [
        pytest.param(key, typed, marks=[pytest.mark.slow] * bool(number))
        for key, cases in REFUSED.items()
        for number, typed in enumerate(cases)
    ],
    ids=lambda value: str(value)[:120],
)
def test_an_invalid_setting_is_refused_before_weights_load(small, unreadable, key, typed):
    with pytest.raises(SettingError) as refused:
        small.run_in_process(OURS, *unreadable, *typed.split())
    assert refused.value.key == key
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("typed", RULES)
def test_a_function_that_returns_invalid_values_is_refused_before_weights_load(
    small, unreadable, typed
):
    with pytest.raises(GrowthFunctionError) as refused:
        small.run_in_process(OURS, *unreadable, *typed.split())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("recipe", ["adaptive_probe", "adaptive_estimate"])
def test_an_invalid_argument_of_a_component_is_refused_by_each_recipe(small, recipe):
    with pytest.raises(SettingError) as refused:
        small.run_in_process(recipe, "dataset.packed=maybe", "estimate.devices=1GiB")
    assert refused.value.key == "dataset.packed"


@pytest.mark.parametrize("recipe", [OURS, "adaptive_estimate"])
@pytest.mark.parametrize("key", ["dataset", "model", "batch_increase_function._component_"])
def test_an_exit_of_a_component_is_an_error_that_names_the_line(small, recipe, key):
    exits = (f"{key}=support.components.exits", "estimate.devices=1GiB")
    with pytest.raises(AdaptiveBatchError, match=r"in exits \(.*components\.py:\d+\)"):
        small.run_in_process(recipe, *exits)


ENDS = ("loss=support.components.LossThatEnds", "epochs=1", "max_steps_per_epoch=2")


@pytest.mark.parametrize("recipe", [OURS, "adaptive_probe"])
@pytest.mark.parametrize("status", [0, 3])
def test_an_exit_during_training_is_an_error_that_names_the_line(small, recipe, status):
    says = rf"sys\.exit\({status}\) was called in forward \(.*components\.py:\d+\)"
    with pytest.raises(AdaptiveBatchError, match=says):
        small.run_in_process(recipe, *ENDS, f"loss.status={status}")


def test_the_step_limit_of_emulate_ends_a_run_with_status_0(small, monkeypatch):
    monkeypatch.setenv("ADAPTIVE_BATCH_EMULATED", "1")
    finished = small.run_in_process(OURS, *ENDS, "loss.status=0")
    assert not records(finished, "step")


def test_a_keyboard_interrupt_is_not_caught(small):
    with pytest.raises(KeyboardInterrupt):
        small.run_in_process(OURS, *ENDS, "loss.status=null")


@pytest.mark.slow
def test_a_terminal_shows_an_error_in_one_line(small):
    finished = small.run(OURS, "use_max_batch_size=True", expect=1)
    last = finished.output.strip().splitlines()[-1]
    assert (
        last
        == "SettingError: use_max_batch_size=True: there is no such key; use_maximum_batch_size is"
        " probably meant"
    )
    assert "Traceback" not in finished.output


def test_weights_of_another_model_type_are_refused(small):
    with pytest.raises(SettingError, match=r"cannot be read as weights of LLAMA3 .*model_type"):
        small.run_in_process(OURS, "checkpointer.model_type=LLAMA3")


def test_a_model_larger_than_the_host_memory_is_refused(small):
    with pytest.raises(
        DoesNotFitError, match=r"the weights alone .* fewer tokens in model\.max_seq"
    ):
        small.run_in_process(OURS, "model.max_seq_len=1000000000000")
