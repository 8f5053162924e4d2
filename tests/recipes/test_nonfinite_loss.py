"""A loss that is NaN, through the real command line: it is said, skipped, or ends the run before
anything is damaged.
"""

import math

import pytest
import torch
from support.cli import OURS, records, resume_run
from support.stops import stopped_after
from torch.distributed.checkpoint import FileSystemReader, load

from adaptive_batch.errors import NonfiniteLossError, SettingError
from adaptive_batch.report import read_records

KEY = "on_nonfinite_loss"
SPOILED = (
    "loss=support.components.SpoiledLoss", "epochs=1", "max_steps_per_epoch=6", "lr_scaling=linear",
    "reference_batch_size=2", "batch_size=4",
)  # fmt: skip


def same(weights, others):
    return all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


def test_by_default_each_is_recorded_and_training_continues(small):
    finished = small.run_in_process(OURS, *SPOILED, "loss.at=[3]")
    events = records(finished, "nonfinite_loss")
    assert [(event["step"], event["loss"], event["skipped"]) for event in events] == [
        (step, "nan", False) for step in (3, 4, 5, 6)
    ]
    assert events[0]["message"].startswith("step 3: the loss is nan, lr 0.02; step 2 had loss ")
    assert [event["message"] for event in records(finished, "nonfinite_steps")] == [
        "4 of 6 steps had a loss or gradients that are not finite"
    ]
    assert len(records(finished, "step")) == 6


@pytest.mark.parametrize("gradients_alone", [False, True])
def test_a_step_that_is_skipped_changes_neither_weights_nor_optimizer(small, gradients_alone):
    """Its rows are consumed: what comes after is the training of an optimizer that has not seen the
    step.
    """
    settings = (
        *SPOILED,
        f"loss.gradients_alone={gradients_alone}",
        f"{KEY}=skip",
        "save_every_n_steps=1",
    )
    finished = small.run_in_process(OURS, *settings, "loss.at=[3,4]")
    assert [(event["step"], event["skipped"]) for event in records(finished, "nonfinite_loss")] == [
        (3, True),
        (4, True),
    ]
    steps = records(finished, "step")
    assert [step["samples_seen"] for step in steps] == [4, 8, 12, 16, 20, 24]
    assert [math.isfinite(float(step["grad_norm"])) for step in steps] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert len({step["lr"] for step in steps}) == 1

    def saved(step):
        """Of a resume point: what it holds besides counts."""
        reader = FileSystemReader(finished.output_dir / f"step_{step}")
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if hasattr(entry, "size")
        }
        load(tensors, storage_reader=reader)
        return tensors

    assert same(saved(2), saved(4))
    assert not same(saved(4), saved(5))
    assert all(tensor.isfinite().all() for tensor in finished.weights(0).values())


def test_an_epoch_of_which_every_step_is_skipped_is_an_error(small):
    folder = small.fresh_folder()
    with pytest.raises(
        NonfiniteLossError,
        match=r"^epoch 0: the loss or the gradients of all 6 steps are not finite, so nothing",
    ):
        small.run_in_process(
            OURS, *SPOILED, "loss.at=[1,2,3,4,5,6]", f"{KEY}=skip", f"output_dir={folder}"
        )
    assert not list(folder.glob("epoch_*"))


def test_steps_that_were_skipped_before_a_run_was_resumed_count_in_its_epoch(small):
    settings = (*SPOILED, f"{KEY}=skip", "save_every_n_steps=2")
    whole = small.run_in_process(OURS, *settings, "loss.at=[1,2,3,4]")

    def resumed(*steps):
        return (
            stopped_after(whole, small, 4),
            f"loss.at=[{','.join(map(str, steps))}]",
            "resume_from_checkpoint=True",
        )

    folder, *again = resumed(2)
    rest = small.run_in_process(OURS, *settings, f"output_dir={folder}", *again)
    assert [event["steps"] for event in records(rest, "nonfinite_steps")] == [5]
    folder, *again = resumed(1, 2)
    with pytest.raises(NonfiniteLossError, match="gradients of all 6 steps are not finite"):
        small.run_in_process(OURS, *settings, f"output_dir={folder}", *again)


STOPS = (*SPOILED, "loss.at=[4]", f"{KEY}=stop", "save_every_n_steps=2")


def test_a_run_that_is_to_stop_ends_before_the_step_and_names_what_was_saved(small):
    folder = small.fresh_folder()
    with pytest.raises(NonfiniteLossError) as error:
        small.run_in_process(OURS, *STOPS, f"output_dir={folder}")
    assert str(error.value).startswith("step 4: the loss is nan, lr 0.02; step 3 had loss ")
    assert str(error.value).endswith("/step_2")
    assert [path.name for kind in ("step_*", "epoch_*") for path in folder.glob(kind)] == ["step_2"]
    rest = resume_run(small, folder, *SPOILED, "loss.at=[]")
    assert [step["step"] for step in records(rest, "step")] == [1, 2, 3, 3, 4, 5, 6]
    assert [event["step"] for event in records(rest, "nonfinite_loss")] == [4]


def test_gradients_that_are_not_finite_stop_a_run_too_and_nothing_may_have_been_saved(small):
    with pytest.raises(
        NonfiniteLossError,
        match=r"the norm of the gradients is nan, .*; nothing of this run is saved",
    ):
        small.run_in_process(
            OURS, *SPOILED, "loss.at=[1]", "loss.gradients_alone=True", f"{KEY}=stop"
        )


def test_with_the_optimizer_in_backward_a_step_cannot_be_skipped(small):
    in_backward = ("optimizer_in_bwd=True", "gradient_accumulation_steps=1", "clip_grad_norm=null")
    with pytest.raises(SettingError, match=f"^{KEY}='skip': with the optimizer in backward"):
        small.run_in_process(OURS, *SPOILED, "loss.at=[3]", *in_backward, f"{KEY}=skip")
    with pytest.raises(
        NonfiniteLossError, match=r"step 3: the loss is nan, .*the weights have been stepped by it"
    ):
        small.run_in_process(OURS, *SPOILED, "loss.at=[3]", *in_backward, f"{KEY}=stop")


def test_where_all_is_finite_looking_at_the_gradients_changes_no_bit(small):
    looks = small.run_in_process(OURS, *SPOILED, "loss.at=[]", f"{KEY}=skip")
    plain = small.run_in_process(OURS, *SPOILED, "loss.at=[]")
    assert looks.losses == plain.losses
    assert same(looks.weights(0), plain.weights(0))


@pytest.mark.parametrize("lr", ["1e-3", "1e38"])
def test_weights_that_the_last_step_has_ruined_are_pointed_out(small, lr):
    done = small.run_in_process(OURS, "epochs=1", "max_steps_per_epoch=1", f"optimizer.lr={lr}")
    log = read_records(done.output_dir / "adaptive_batch" / "run.jsonl")
    said = [record["message"] for record in log if record["kind"] == "nonfinite_weights"]
    assert len(said) == (lr == "1e38")
