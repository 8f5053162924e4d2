"""The demo makes the same files each time, and its epochs load in transformers.

`make demo` runs all of it.
"""

from pathlib import Path

import demo
import pytest
import torch
from omegaconf import OmegaConf
from support.processes import run_python
from torchtune import config

from adaptive_batch.config_files import config_files

DEMO = Path(demo.__file__).parent
NUM_ROWS = 400  # of about 4,300, to save time


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    demo.prepare(directory, num_rows=NUM_ROWS)
    return directory


def held_out_texts(directory):
    rows = demo.read_rows(directory / "data" / "held_out.jsonl")
    return [text for row in rows for text in row.values()]


def test_no_held_out_docstring_is_trained_on(made):
    train = demo.read_rows(made / "data" / "train.jsonl")
    held_out = demo.read_rows(made / "data" / "held_out.jsonl")
    assert (len(train), len(held_out)) == (NUM_ROWS - 64, 64)
    assert {row["docstring"] for row in train} & {row["docstring"] for row in held_out} == set()


def test_torchtune_and_transformers_give_the_same_tokens(made):
    from transformers import AutoTokenizer

    cfg = OmegaConf.load(config_files()["demo_cpu"])
    cfg.demo_dir = str(made)
    ours = config.instantiate(cfg.tokenizer)
    theirs = AutoTokenizer.from_pretrained(made / "base")
    for text in [
        *held_out_texts(made),
        "Ünïcödé 漢字 \N{ROCKET} don't\r\n\n  x",
        "<|im_start|>user\nhi<|im_end|>",
    ]:
        assert theirs(text)["input_ids"] == ours.encode(text, add_bos=False, add_eos=False)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_id, ours.pad_id)
    assert len(theirs) <= demo.MODEL["vocab_size"]


@torch.inference_mode()
def differences_of_epoch(folder, texts, *, aside):
    """Return the largest difference of logits, and which next tokens are equal."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cfg = OmegaConf.load(config_files()["demo_cpu"])
    files = [path.name for path in sorted(folder.glob("*.safetensors"))]
    checkpointer = config.instantiate(
        cfg.checkpointer, checkpoint_dir=str(folder), checkpoint_files=files, output_dir=str(aside)
    )
    ours = config.instantiate(cfg.model).eval()
    ours.load_state_dict(checkpointer.load_checkpoint()["model"])
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    largest, same = 0.0, []
    for text in texts:
        tokens = torch.tensor([tokenizer(text)["input_ids"][: cfg.model.max_seq_len]])
        logits, their_logits = ours(tokens), theirs(tokens).logits
        largest = max(largest, float((logits - their_logits).abs().max()))
        same += (logits.argmax(-1) == their_logits.argmax(-1)).flatten().tolist()
    return largest, same


def test_a_tuned_epoch_is_the_same_model_in_transformers_and_torchtune(made, small, tmp_path):
    overrides = (
        f"demo_dir={made}",
        f"metric_logger.log_dir={tmp_path}",
        "epochs=1",
        "max_steps_per_epoch=2",
    )
    finished = small.run_in_process("adaptive_full_finetune", *overrides, config="demo_cpu")
    texts, aside = held_out_texts(made)[:8], tmp_path / "aside"
    largest, same = differences_of_epoch(finished.output_dir / "epoch_0", texts, aside=aside)
    assert largest < 1e-4
    assert len(same) > 100
    assert all(same)


@pytest.mark.slow
def test_a_demo_that_was_not_made_is_one_line(small, tmp_path):
    finished = small.run(
        "adaptive_full_finetune", f"demo_dir={tmp_path}", config="demo_cpu", expect=1
    )
    assert f"No such file or directory: '{tmp_path}/base/tokenizer.json'" in finished.output
    assert "those of demo_cpu are made by `make demo`" in finished.output
    assert "Traceback" not in finished.output


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--directory", "a=b"], 2, "must not contain '='"),
        (["--dpo"], 1, "epoch_2 has no tuned model: create it with `make demo`"),
    ],
)
def test_what_the_demo_cannot_do_is_refused_before_anything_is_made(
    tmp_path, arguments, status, says
):
    finished = run_python(DEMO, *arguments, folder=tmp_path, expect=status)
    assert says in finished.stderr
    assert list(Path(tmp_path).iterdir()) == []
