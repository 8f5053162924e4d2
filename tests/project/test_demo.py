import json
import os
import runpy
import subprocess
import sys
import unicodedata
from pathlib import Path

import demo
import pytest
import torch
from omegaconf import OmegaConf
from torchtune import config

from adaptive_batch.config_files import config_path

DEMO = Path(demo.__file__).parent
NUM_ROWS = 400  # of about 4,300: what is made is the same, sooner


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    demo.prepare(directory, num_rows=NUM_ROWS)
    return directory


def contents(directory):
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def held_out_texts(directory):
    rows = demo.read_rows(directory / "data" / "held_out.jsonl")
    return [text for row in rows for text in row.values()]


def tokenizer_of(directory, **changed):
    """The tokenizer as the shipped configuration builds it."""
    cfg = OmegaConf.load(config_path("demo_cpu"))
    cfg.demo_dir = str(directory)
    return config.instantiate(cfg.tokenizer, **changed)


# the data


def test_a_row_is_a_public_signature_and_its_docstring():
    source = '''
"""About the module."""
class Box(list):
    """A box of things."""
    def put(self, thing: int = 3, *, where="top"):
        """Put a thing
            into the box."""
    def _hidden(self):
        """Not public."""
    def bare(self): ...
async def wait(*things): "Wait for things."
'''
    assert list(demo.docstring_rows("boxes", source)) == [
        {"signature": "module boxes", "docstring": "About the module."},
        {"signature": "class boxes.Box(list)", "docstring": "A box of things."},
        {
            "signature": "def boxes.Box.put(self, thing: int=3, *, where='top')",
            "docstring": "Put a thing\ninto the box.",
        },
        {"signature": "def boxes.wait(*things)", "docstring": "Wait for things."},
    ]


def test_source_that_does_not_parse_gives_no_row():
    assert list(demo.docstring_rows("broken", "def (")) == []


def test_the_standard_library_gives_thousands_of_rows_of_uneven_length_and_none_is_imported():
    program = (
        f"import sys; sys.path.insert(0, {str(DEMO.parent)!r}); import demo; before ="
        " set(sys.modules); rows = demo.instruction_rows()\nlengths = sorted(len(row['docstring'])"
        " for row in rows)\nprint(len(rows), lengths[len(lengths) // 2], lengths[-1],"
        " *set(sys.modules) - before)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    num_rows, median, longest, *imported = finished.stdout.split()
    assert int(num_rows) > 3000
    assert int(longest) > 10 * int(median)
    assert {"this", "antigravity", "turtle", "tkinter"} & set(imported) == set()


def test_no_held_out_docstring_is_trained_on(made):
    train = demo.read_rows(made / "data" / "train.jsonl")
    held_out = demo.read_rows(made / "data" / "held_out.jsonl")
    assert (len(train), len(held_out)) == (NUM_ROWS - 64, 64)
    assert {row["docstring"] for row in train} & {row["docstring"] for row in held_out} == set()


# the files


def test_the_same_python_makes_the_same_bytes(made, tmp_path):
    demo.prepare(tmp_path, num_rows=NUM_ROWS)
    assert contents(tmp_path) == contents(made)


def test_what_is_there_is_not_made_again(made):
    times = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    demo.prepare(made, num_rows=NUM_ROWS)
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == times


def test_an_interrupted_make_leaves_nothing_behind(tmp_path):
    def half(folder):
        (folder / "train.jsonl").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.make_once(tmp_path / "data", ("train.jsonl",), half)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_comes_second_keeps_what_the_first_has_made(tmp_path):
    def overtaken(folder):
        (folder / "file").write_text("second")
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "file").write_text("first")

    demo.make_once(tmp_path / "data", ("file",), overtaken)
    assert contents(tmp_path) == {"data/file": b"first"}


def test_a_folder_that_lacks_a_file_is_named_and_not_used(made, tmp_path):
    (tmp_path / "data").symlink_to(made / "data")
    (tmp_path / "base").mkdir()
    with pytest.raises(RuntimeError, match=r"base lacks model\.safetensors, .*: remove the folder"):
        demo.prepare(tmp_path)


def test_a_base_of_changed_sizes_is_named_and_not_used(made, tmp_path):
    (tmp_path / "data").symlink_to(made / "data")
    (tmp_path / "base").mkdir()
    for path in (made / "base").iterdir():
        (tmp_path / "base" / path.name).write_bytes(path.read_bytes())
    other = json.loads((tmp_path / "base" / "config.json").read_text()) | {"hidden_size": 64}
    (tmp_path / "base" / "config.json").write_text(json.dumps(other))
    with pytest.raises(RuntimeError, match="made for another version of the demo: remove it"):
        demo.prepare(tmp_path)


# the tokenizer


def test_a_text_comes_back_from_its_tokens(made):
    tokenizer = tokenizer_of(made)
    for text in [
        *held_out_texts(made),
        "Ünïcödé, 漢字 and \N{ROCKET}\ttabs  \r\n\n end ",
        "don't 12345",
    ]:
        tokens = tokenizer.encode(text, add_bos=False, add_eos=False)
        assert tokenizer.decode(tokens) == unicodedata.normalize("NFC", text)
        assert max(tokens) < demo.MODEL["vocab_size"]


def test_torchtune_and_transformers_give_the_same_tokens(made):
    from transformers import AutoTokenizer

    ours = tokenizer_of(made)
    theirs = AutoTokenizer.from_pretrained(made / "base")
    for text in [
        *held_out_texts(made),
        "Ünïcödé 漢字 \N{ROCKET} don't\r\n\n  x",
        "<|im_start|>user\nhi<|im_end|>",
    ]:
        assert theirs(text)["input_ids"] == ours.encode(text, add_bos=False, add_eos=False)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_id, ours.pad_id)
    assert len(theirs) <= demo.MODEL["vocab_size"]


def test_transformers_chat_template_is_the_dialogue_that_is_trained(made):
    from torchtune.data import Message
    from transformers import AutoTokenizer

    ours = tokenizer_of(made)
    theirs = AutoTokenizer.from_pretrained(made / "base")
    prompt = {"role": "user", "content": "def f(x)"}
    templated = theirs.apply_chat_template([prompt], add_generation_prompt=True, tokenize=False)
    messages = [Message(role="user", content="def f(x)"), Message(role="assistant", content="")]
    assert theirs(templated)["input_ids"] == ours.tokenize_messages(messages, add_eos=False)[0]


# the base checkpoint


def test_the_configs_model_is_the_one_that_is_made():
    cfg = OmegaConf.load(config_path("demo_cpu"))
    assert OmegaConf.to_container(cfg.model) == {
        "_component_": "torchtune.models.qwen2.qwen2",
        **demo.MODEL,
    }
    assert cfg.tokenizer.max_seq_len == demo.MODEL["max_seq_len"]
    assert cfg.demo_dir == demo.DIRECTORY


@torch.inference_mode()
def test_torchtune_and_transformers_give_the_same_logits(made, tmp_path):
    from transformers import AutoModelForCausalLM

    cfg = OmegaConf.load(config_path("demo_cpu"))
    cfg.demo_dir = str(made)
    cfg.output_dir = str(tmp_path)
    model = config.instantiate(cfg.model).eval()
    model.load_state_dict(config.instantiate(cfg.checkpointer).load_checkpoint()["model"])
    theirs = AutoModelForCausalLM.from_pretrained(made / "base").eval()
    tokens = torch.randint(
        0, cfg.model.vocab_size, (3, 40), generator=torch.Generator().manual_seed(0)
    )
    logits, their_logits = model(tokens), theirs(tokens).logits
    assert (logits - their_logits).abs().max() < 1e-4
    assert torch.equal(logits.argmax(-1), their_logits.argmax(-1))
    assert torch.equal(demo.load(made / "base")(tokens), logits)


@torch.inference_mode()
def differences_of_epoch(folder, texts, *, aside):
    """Load an epoch in Hugging Face format with transformers and with torchtune.

    Returns:
        The largest difference of logits, and whether the next token is the same at each position.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cfg = OmegaConf.load(config_path("demo_cpu"))
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


@torch.inference_mode()
def test_the_base_knows_nothing_yet(made):
    cfg = OmegaConf.load(config_path("demo_cpu"))
    cfg.demo_dir = str(made)
    tokenizer = config.instantiate(cfg.tokenizer)
    dataset = config.instantiate(cfg.dataset, tokenizer)
    rows = [dataset[index] for index in range(40)]
    for row in rows:
        assert row["labels"][0] == -100
        assert any(label != -100 for label in row["labels"])
    loss = demo.held_out_loss(demo.load(made / "base"), rows, pad_id=tokenizer.pad_id)
    uniform = torch.tensor(float(cfg.model.vocab_size)).log().item()
    assert loss == pytest.approx(uniform, abs=0.1)


# preference pairs


@pytest.mark.parametrize(
    ("docstring", "first"),
    [
        ("Return it.  Then more.\nAnd more.", "Return it."),
        ("Return it\n\nThen more.", "Return it"),
        ("Version 3.11 of it. More.", "Version 3.11 of it."),
    ],
)
def test_a_sentence_ends_at_its_period_or_with_its_paragraph(docstring, first):
    assert demo.first_sentence(docstring) == first


def test_a_pair_is_a_first_sentence_and_the_whole_docstring(made):
    demo.write_pairs_once(made)
    for name in ("train.jsonl", "held_out.jsonl"):
        rows = {row["signature"]: row["docstring"] for row in demo.read_rows(made / "data" / name)}
        pairs = demo.read_rows(made / "pairs" / name)
        assert len(rows) / 4 < len(pairs) < len(rows)
        for pair in pairs:
            prompts, answers = zip(pair["chosen"], pair["rejected"], strict=True)
            assert prompts[0] == prompts[1]
            chosen, rejected = (message["content"] for message in answers)
            assert rows[prompts[0]["content"]] == rejected
            assert rejected.startswith(chosen)
            assert 2 * len(chosen) <= len(rejected)


@torch.inference_mode()
def test_the_log_probability_of_an_answer_is_that_of_its_tokens(made):
    model = demo.load(made / "base")
    short, long = [3, 5, 7, 9], [3, 5, 8, 2, 4, 6]
    pair = {
        "chosen_input_ids": short,
        "chosen_labels": [-100, -100, *short[2:]],
        "rejected_input_ids": long,
        "rejected_labels": [-100, -100, *long[2:]],
    }
    found = demo.answer_log_probs(model, [pair, pair], pad_id=0)
    assert found.shape == (2, 2)
    for answer, log_probs in zip((short, long), found, strict=True):
        each = model(torch.tensor([answer])).float().log_softmax(-1)[0]
        expected = sum(each[place - 1, answer[place]] for place in range(2, len(answer)))
        torch.testing.assert_close(log_probs, expected.expand(2))


# the command


@pytest.mark.slow
def test_a_demo_that_was_not_made_is_one_line(small, tmp_path):
    finished = small.run_in_fork(
        "adaptive_full_finetune", f"demo_dir={tmp_path}", config="demo_cpu", expect=1
    )
    assert f"No such file or directory: '{tmp_path}/base/tokenizer.json'" in finished.output
    assert "those of demo_cpu are made by `make demo`" in finished.output
    assert "Traceback" not in finished.output


def test_what_a_run_decides_is_shown_and_all_is_written_down(tmp_path, capfd):
    lines = ["trial 1: 1 row fits", "max_batch_size: 24", "1|5|Loss: 7.0: 5 of 28 steps"]
    lines += ["1|28|Loss: 6.0: 28 of 28 steps", "epoch 0 saved", "Traceback: what it is"]
    show = runpy.run_path(str(DEMO))["run_and_show"]
    program = f"print({chr(10).join(lines)!r}); import os, sys; sys.exit(int(os.environ['STATUS']))"
    command = [sys.executable, "-c", program]
    assert show(command, {"STATUS": "0"}, tmp_path / "log") == 0
    assert capfd.readouterr().out.splitlines() == [lines[1], lines[3], lines[5]]
    assert (tmp_path / "log").read_text().splitlines() == lines
    assert show(command, {"STATUS": "3"}, tmp_path / "log") == 3
    assert capfd.readouterr().err.split("\n")[:6] == lines


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--directory", "a=b"], 2, "must not contain '='"),
        (
            ["--dpo"],
            1,
            "there is no tuned model in adaptive_batch_demo/tuned/epoch_2: `make demo` makes it",
        ),
        (
            ["--lora"],
            1,
            "there is no tuned model in adaptive_batch_demo/tuned/epoch_2: `make demo` makes it",
        ),
    ],
)
def test_what_the_demo_cannot_do_is_refused_before_anything_is_made(
    tmp_path, arguments, status, says
):
    command = [sys.executable, str(DEMO), *arguments]
    finished = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == status
    assert says in finished.stderr
    assert list(Path(tmp_path).iterdir()) == []
