"""What a search advises where it leaves memory unused, and what adaptive_probe times with
probe.tune.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from adaptive_batch.errors import DoesNotFitError
from adaptive_batch.estimate import not_estimated
from adaptive_batch.report import read_records
from adaptive_batch.torchtune import advice
from adaptive_batch.torchtune.estimate_changes import spending

OURS = "adaptive_full_finetune"
CHECKPOINTED = ("enable_activation_checkpointing=True", "loss.num_output_chunks=1")
ROOMY = ("probe.device_memory=40MiB", "micro_batch_size=4", "use_maximum_batch_size=True")
SHORT = ("epochs=1", "max_steps_per_epoch=1")
OFF, SELECTIVE = "enable_activation_checkpointing=False", "ac_mode=selective ac_option=2"


def records(finished, kind):
    return [
        r
        for r in read_records(finished.output_dir / "adaptive_batch" / "run.jsonl")
        if r["kind"] == kind
    ]


def joined(settings):
    return [" ".join(one.overrides) for one in settings]


def chosen(world_size=1, **keys):
    base = {"device": "cpu", "loss": {"_component_": "torch.nn.CrossEntropyLoss"}}
    return joined(spending(OmegaConf.create({**base, **keys}), world_size=world_size))


CHUNKED = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}


def test_settings_that_save_memory_are_given_back_alone_and_together():
    assert chosen() == []
    assert chosen(enable_activation_checkpointing=True) == [OFF, f"{OFF} {SELECTIVE}"]
    assert chosen(ac_mode="full") == ["ac_mode=null", SELECTIVE]
    assert chosen(ac_mode="selective", ac_option=2) == ["ac_mode=null"]
    assert chosen(loss=CHUNKED) == ["loss.num_output_chunks=1"]
    assert chosen(loss={**CHUNKED, "num_output_chunks": 1}) == []
    assert chosen(fsdp_reshard_after_forward=True) == []
    assert chosen(2) == ["fsdp_reshard_after_forward=False"]
    both = chosen(enable_activation_checkpointing=True, loss=CHUNKED)
    assert both[0] == f"{OFF} loss.num_output_chunks=1"
    assert len(both) == len(set(both)) == 5


def test_activations_are_offloaded_only_where_every_layer_is_recomputed_and_eight_are_tried():
    keys = {"enable_activation_checkpointing": True, "enable_activation_offloading": True}
    off = "enable_activation_offloading=False"
    assert chosen(**keys) == [f"{OFF} {off}", f"{OFF} {SELECTIVE} {off}", off]
    assert len(chosen(2, **keys, loss=CHUNKED)) == 8


BUDGET = "activation_memory_budget={}".format


@pytest.mark.skipif(
    not_estimated() is not None, reason="compiled steps are not estimated on this torch"
)
def test_under_compile_a_budget_of_activations_is_tried_in_place_of_what_saves_memory():
    compiled = {"device": "cuda", "compile": True}
    assert chosen(**compiled) == []
    assert chosen(**compiled, enable_activation_checkpointing=True) == [
        OFF,
        f"{OFF} {BUDGET(0.5)}",
        f"{OFF} {SELECTIVE}",
    ]
    raised = [BUDGET(1.0), BUDGET(0.6)]
    assert chosen(**compiled, activation_memory_budget=0.2) == raised
    assert chosen(**compiled, activation_memory_budget=0) == [BUDGET(1.0), BUDGET(0.5)]
    both = chosen(**compiled, activation_memory_budget=0.2, enable_activation_checkpointing=True)
    assert both[:3] == [f"{OFF} {raised[0]}", f"{OFF} {raised[1]}", OFF]
    # What is not estimated as compiled needs the same with any budget.
    assert chosen(device="cpu", compile=True, activation_memory_budget=0.2) == []
    lower = {**compiled, "activation_memory_budget": 0.2}
    assert BUDGET(1.0) in chosen(2, **lower)
    assert BUDGET(1.0) not in chosen(2, **lower, tensor_parallel_dim=2)


@pytest.mark.parametrize("compiles", [False, True])
def test_rows_that_run_out_of_memory_as_they_are_timed_are_one_error(compiles):
    def try_rows(rows):
        raise torch.OutOfMemoryError("Tried to allocate 50.00 MiB")

    model = torch.nn.Linear(1, 1)
    if compiles:
        model.compile()
    trainer = SimpleNamespace(runner=SimpleNamespace(try_rows=try_rows, model=model))
    says = r"^2 rows fit, but .*50\.00 MiB.* probe\.headroom=0\.05$"
    with pytest.raises(DoesNotFitError, match=says) as refused:
        advice.tokens_per_second(trainer, SimpleNamespace(throughput=None), [{}, {}])
    assert ("tunes its kernels" in str(refused.value)) == compiles


@pytest.fixture(scope="module")
def advised(small):
    return small.run_in_process(OURS, *CHECKPOINTED, *ROOMY, *SHORT)


@pytest.mark.slow
def test_memory_that_a_micro_batch_leaves_is_better_spent_on_what_is_recomputed(advised):
    (said,) = records(advised, "advice")
    told, *lines = said["message"].splitlines()
    assert re.match(
        r"4 rows at once leave \d\d% of 0.037 GiB unused; .* modelled by FLOPs alone", told
    )
    assert [re.sub(r": .*", "", line).strip() for line in lines] == [OFF, f"{OFF} {SELECTIVE}"]
    less = [int(found) for found in re.findall(r": (\d+)% less time, peak \d", said["message"])]
    assert 0 < less[0] < 25  # of a quarter at most, as most of a forward is the output layer here
    assert less == sorted(less, reverse=True)


@pytest.mark.parametrize(
    "overrides",
    [
        (*ROOMY, "enable_activation_checkpointing=False", "loss.num_output_chunks=1"),
        (
            *CHECKPOINTED,
            "probe.device_memory=16MiB",
            "use_maximum_batch_size=True",
            "probe.round_to_power_of_two=False",
        ),
    ],
    ids=["nothing to give back", "no room"],
)
def test_nothing_is_advised(small, overrides):
    assert records(small.run_in_process(OURS, *overrides, *SHORT), "advice") == []


def test_where_time_is_modelled_by_flops_nothing_is_estimated_for_chunks_alone(small, monkeypatch):
    estimated = []
    monkeypatch.setattr(advice, "_estimate", lambda *arguments: estimated.append(arguments) or [])
    small.run_in_process(OURS, *ROOMY, *SHORT, "loss.num_output_chunks=8")
    assert estimated == []
    small.run_in_process(OURS, *ROOMY, *SHORT, *CHECKPOINTED)
    assert len(estimated) == 1


@pytest.mark.slow
def test_a_bound_that_was_known_is_not_advised_on_and_an_estimate_that_fails_stops_nothing(
    small, advised, monkeypatch
):
    folder = f"output_dir={advised.output_dir}"
    again = small.run_in_process(OURS, *CHECKPOINTED, *ROOMY, *SHORT, folder)
    assert len(records(again, "start")) == 2
    assert len(records(again, "advice")) == 1
    monkeypatch.setattr(advice, "_estimate", lambda *_: 1 / 0)
    failed = small.run_in_process(OURS, *CHECKPOINTED, *ROOMY, *SHORT)
    assert records(failed, "advice") == []
    assert len(records(failed, "step")) == 1


@pytest.mark.slow
def test_advice_leaves_training_as_it_was(small, monkeypatch):
    dropout = (*CHECKPOINTED, *ROOMY, "epochs=1", "max_steps_per_epoch=3", "model.attn_dropout=0.2")
    with_it = small.run_in_process(OURS, *dropout)
    assert records(with_it, "advice")
    monkeypatch.setattr(advice, "spending", lambda *_, **__: [])
    without = small.run_in_process(OURS, *dropout)
    assert not records(without, "advice")
    assert with_it.losses == without.losses


@pytest.mark.slow
def test_the_probe_advises_and_with_tune_it_times_what_was_estimated(small, capsys):
    rounded = (*CHECKPOINTED, "probe.device_memory=24MiB", "use_maximum_batch_size=True")
    small.run_in_process("adaptive_probe", *rounded, "micro_batch_size=4")
    assert re.search(
        rf"unused; settings that would use it, .*:\n  {OFF}: \d+% less time",
        capsys.readouterr().out,
    )
    threads = torch.get_num_threads()
    small.run_in_process("adaptive_probe", *rounded, "probe.tune=True")
    assert torch.get_num_threads() == threads
    said = capsys.readouterr().out
    table = said[said.index("tokens/s  setting") :].splitlines()
    timed = {line[29:]: (int(line[:6]), int(line[18:27])) for line in table[1:4]}
    assert set(timed) == {"(as it is)", OFF, f"{OFF} {SELECTIVE}"}
    assert timed["(as it is)"][0] >= timed[OFF][0] > 0  # rows
    speeds = [speed for _, speed in timed.values()]
    assert speeds == sorted(speeds, reverse=True)
    fastest = next(iter(timed)).replace("(as it is)", "the configuration as it is")
    assert table[4] == f"fastest: {fastest}"
    assert "unused; settings" not in said


@pytest.mark.slow
def test_the_probe_tunes_rows_that_the_dataset_has_packed(small, capsys):
    packed = ("dataset.packed=True", "probe.device_memory=24MiB", "probe.tune=True")
    small.run_in_process("adaptive_probe", *CHECKPOINTED, *packed)
    assert "\nfastest: " in capsys.readouterr().out


@pytest.mark.nightly
def test_ranks_are_advised_by_one_of_them_on_gathering_once_as_well(small):
    (said,) = records(small.run(OURS, *CHECKPOINTED, *ROOMY, *SHORT, ranks=2), "advice")
    lines = said["message"].splitlines()[1:]
    assert len(lines) == 3
    assert any("fsdp_reshard_after_forward=False" in line for line in lines)
