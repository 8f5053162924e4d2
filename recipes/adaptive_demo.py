"""The demo: makes a small task from the Python that is installed, and runs the real recipe on it.

    python -m adaptive_demo [--directory DIR] [key=value ...]

No file is downloaded. ``prepare`` makes in DIR, once:

    data/   train.jsonl, held_out.jsonl     the standard library's docstrings: signature -> docstring
    base/   a Qwen2 checkpoint in Hugging Face's format, with random weights, and the byte-level BPE tokenizer
            that was trained on the data; torchtune and transformers both load it

``tokenizer`` and ``grow`` are what ``configs/demo_cpu.yaml`` and the demo's command name by their dotted paths.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import pkgutil
import random
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig
    from torchtune.models.qwen2 import Qwen2Tokenizer
    from torchtune.modules import TransformerDecoder

DIRECTORY = "./adaptive_batch_demo"
SEED = 7
NUM_TRAIN_ROWS = 2048
NUM_HELD_OUT_ROWS = 64

# The sizes of the base model; configs/demo_cpu.yaml spells the same ones for torchtune.models.qwen2.qwen2.
MODEL = {
    "vocab_size": 2048,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 128,
    "intermediate_dim": 384,
    "max_seq_len": 192,
    "norm_eps": 1e-6,
    "rope_base": 1_000_000.0,
    "tie_word_embeddings": True,
}
# Qwen2's own standard deviation for a fresh model; torch's default of 1 for embeddings would start at a loss of 60.
INITIALIZER_RANGE = 0.02

END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen2's pre-tokenizer, which torchtune has built in: a tokenizer for it must be trained on the same pieces.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What torchtune's Qwen2 tokenizer makes of a dialogue, for transformers.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Tests of the standard library, and packages that a distribution may leave out.
SKIPPED_MODULES = {"ensurepip", "idlelib", "lib2to3", "test", "tests", "tkinter", "turtledemo"}
DATA_FILES = ("train.jsonl", "held_out.jsonl")
BASE_FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
)


# ---------------------------------------------------------------------------- the data


def stdlib_sources() -> Iterator[tuple[str, str]]:
    """Yield (dotted name, source) of every public standard library module, sorted; nothing is imported."""

    def walk(names: Iterable[str], path: list[str], prefix: str) -> Iterator[tuple[str, str]]:
        for name in sorted(names):
            if name.startswith("_") or name in SKIPPED_MODULES:
                continue
            spec = PathFinder.find_spec(prefix + name, path)
            loader = spec.loader if spec is not None else None
            if spec is None or not hasattr(loader, "get_source"):
                continue  # built in, or a namespace
            try:
                source = loader.get_source(prefix + name)
            except (ImportError, UnicodeDecodeError):
                continue
            if source is not None:  # None for an extension module
                yield prefix + name, source
            if spec.submodule_search_locations:
                locations = list(spec.submodule_search_locations)
                yield from walk(
                    {module.name for module in pkgutil.iter_modules(locations)}, locations, f"{prefix}{name}."
                )

    yield from walk(sys.stdlib_module_names, [sysconfig.get_path("stdlib")], "")


def docstring_rows(name: str, source: str) -> Iterator[dict[str, str]]:
    """Yield one row for each public class and function of a module that has a docstring, and for the module itself."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return

    def walk(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[dict[str, str]]:
        for child in node.body:
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or child.name.startswith(
                "_"
            ):
                continue
            dotted = f"{prefix}.{child.name}"
            if isinstance(child, ast.ClassDef):
                bases = ", ".join(ast.unparse(base) for base in child.bases)
                signature = f"class {dotted}({bases})" if bases else f"class {dotted}"
            else:
                signature = f"def {dotted}({ast.unparse(child.args)})"
            if docstring := ast.get_docstring(child):
                yield {"signature": signature, "docstring": docstring}
            if isinstance(child, ast.ClassDef):
                yield from walk(child, dotted)

    if docstring := ast.get_docstring(tree):
        yield {"signature": f"module {name}", "docstring": docstring}
    yield from walk(tree, name)


def instruction_rows(num_rows: int | None = None) -> list[dict[str, str]]:
    """Return the docstrings of the standard library as rows, in a fixed random order.

    A docstring that several signatures share is kept once, so that no held-out row stands in the training rows too.

    Args:
        num_rows: how many to return; ``None`` is all.
    """
    rows: dict[str, dict[str, str]] = {}
    for name, source in stdlib_sources():
        for row in docstring_rows(name, source):
            # A prompt of a few hundred characters could fill the model's sequence and leave no label.
            if len(row["signature"]) <= 200 and len(row["docstring"]) >= 16:
                rows.setdefault(row["docstring"], row)
    shuffled = list(rows.values())
    random.Random(SEED).shuffle(shuffled)
    return shuffled[:num_rows]


def write_data(folder: Path, *, num_rows: int | None = None) -> None:
    """Write train.jsonl and held_out.jsonl into an empty folder."""
    rows = instruction_rows(num_rows)
    if len(rows) < 2 * NUM_HELD_OUT_ROWS:
        raise RuntimeError(
            f"{sysconfig.get_path('stdlib')} holds {len(rows)} docstrings in readable source files; the demo needs "
            f"at least {2 * NUM_HELD_OUT_ROWS}: run it with a Python that has its standard library's sources"
        )
    held_out, train = rows[:NUM_HELD_OUT_ROWS], rows[NUM_HELD_OUT_ROWS:][:NUM_TRAIN_ROWS]
    for name, part in zip(DATA_FILES, (train, held_out), strict=True):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------------------- the base checkpoint


def write_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """Train a byte-level BPE tokenizer and write it in the files that torchtune and transformers read.

    The last ids of the vocabulary are the special tokens; they stand in tokenizer.json alone, as with Qwen2.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"] - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.model.save(str(folder))  # vocab.json and merges.txt
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MODEL["max_seq_len"],
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_base(folder: Path, texts: Iterable[str]) -> None:
    """Write the whole base checkpoint, tokenizer included, into an empty folder; the same bytes for the same texts."""
    import torch
    from safetensors.torch import save_file
    from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf

    write_tokenizer(folder, texts)
    special_ids = {
        token["content"]: token["id"]
        for token in json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    }
    _write_json(folder / "config.json", _hf_config())
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": None,
            "eos_token_id": [special_ids[IM_END], special_ids[END_OF_TEXT]],
            "pad_token_id": special_ids[END_OF_TEXT],
        },
    )

    generator = torch.Generator().manual_seed(SEED)
    weights = build_model().state_dict()
    for name, weight in weights.items():
        if name.endswith(".scale"):
            weight.fill_(1)
        elif name.endswith(".bias"):
            weight.zero_()
        else:
            weight.normal_(0, INITIALIZER_RANGE, generator=generator)
    save_file(qwen2_tune_to_hf(weights), folder / "model.safetensors", metadata={"format": "pt"})


def _hf_config() -> dict[str, Any]:
    """config.json of the base: what torchtune's conversion and transformers' Qwen2 need."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "float32",
        "vocab_size": MODEL["vocab_size"],
        "hidden_size": MODEL["embed_dim"],
        "intermediate_size": MODEL["intermediate_dim"],
        "num_hidden_layers": MODEL["num_layers"],
        "num_attention_heads": MODEL["num_heads"],
        "num_key_value_heads": MODEL["num_kv_heads"],
        "max_position_embeddings": MODEL["max_seq_len"],
        "rms_norm_eps": MODEL["norm_eps"],
        "rope_theta": MODEL["rope_base"],
        "tie_word_embeddings": MODEL["tie_word_embeddings"],
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": INITIALIZER_RANGE,
        "use_sliding_window": False,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------- what the configuration names


def prepare(directory: str | Path, *, num_rows: int | None = None) -> None:
    """Make the demo's data and base checkpoint in ``directory``; what is there already is kept.

    Each of the two folders is made aside and renamed, so an interrupted call leaves no half-made one, and two
    processes may call at once.

    Args:
        directory: where; made if it is not there.
        num_rows: how many docstrings to use; ``None`` is all that the split needs.

    Raises:
        RuntimeError: the standard library has no readable sources, or a folder of an earlier make is not whole.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / "data"

    def texts() -> Iterator[str]:
        for row in read_rows(data / "train.jsonl"):
            yield row["signature"]
            yield row["docstring"]

    make_once(data, DATA_FILES, lambda folder: write_data(folder, num_rows=num_rows))
    make_once(directory / "base", BASE_FILES, lambda folder: write_base(folder, texts()))
    if json.loads((directory / "base" / "config.json").read_text(encoding="utf-8")) != _hf_config():
        raise RuntimeError(f"{directory / 'base'} was made for another version of the demo: remove it, and run again")


def make_once(folder: Path, names: tuple[str, ...], write: Callable[[Path], None]) -> None:
    """Have ``write`` fill a folder aside and rename it to ``folder``, unless ``folder`` is there.

    Args:
        folder: what is made; whole or absent, whatever interrupts.
        names: the files that it must hold.
        write: fills the empty folder that it is given.

    Raises:
        RuntimeError: ``folder`` is there and lacks one of ``names``.
    """
    if not folder.exists():
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as aside:
            made = Path(aside) / folder.name
            made.mkdir()
            write(made)
            try:
                made.rename(folder)
            except OSError:  # another process was first
                if not folder.exists():
                    raise
        print(f"demo: made {folder} in {time.perf_counter() - started:.1f} s", flush=True)
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise RuntimeError(f"{folder} lacks {', '.join(missing)}: remove the folder, and it is made again")


def tokenizer(directory: str | Path, max_seq_len: int | None = None) -> Qwen2Tokenizer:
    """Return the demo's tokenizer, having made the demo's files first where they are missing.

    Args:
        directory: the demo's directory.
        max_seq_len: rows are cut to this many tokens; ``None`` cuts none.
    """
    from torchtune.models.qwen2 import qwen2_tokenizer

    prepare(directory)
    base = Path(directory) / "base"
    return qwen2_tokenizer(
        path=str(base / "vocab.json"),
        merges_file=str(base / "merges.txt"),
        special_tokens_path=str(base / "tokenizer.json"),
        max_seq_len=max_seq_len,
    )


def grow(epoch: int, batch_size: int) -> int:
    """The demo's own growth function: as it was in epoch 0, 4 rows more from epoch 1 on, half as many again after that.

    Args:
        epoch: the epoch that is about to start, counted from 0.
        batch_size: the rows of a step so far.

    Returns:
        Rows to add. What goes beyond the bound is cut to it by the recipe.
    """
    if epoch == 0:
        return 0
    return 4 if epoch == 1 else batch_size // 2


def build_model() -> TransformerDecoder:
    """Return the demo's model, its weights not yet loaded."""
    from torchtune.models.qwen2 import qwen2

    return qwen2(**MODEL)


# ---------------------------------------------------------------------------- the command


def main() -> None:
    """Run the real command on the demo's files, then compare the tuned model with the base."""
    parser = argparse.ArgumentParser(prog="python -m adaptive_demo", description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default=DIRECTORY, help="where everything goes (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="passed on to tune run, after the demo's own")
    arguments = parser.parse_args()
    if "=" in arguments.directory:
        parser.error("--directory must not contain '=': tune run could not pass it on")

    settings = [
        f"demo_dir={arguments.directory}",
        "use_maximum_batch_size=True",
        "batch_increase_function=adaptive_demo.grow",
        *arguments.overrides,
    ]
    started = time.perf_counter()
    cfg = _resolved(settings)
    prepare(cfg.demo_dir)

    command = ["tune", "run", "adaptive_full_finetune", "--config", "demo_cpu", *settings]
    print(f"$ {shlex.join(command)}", flush=True)
    finished = subprocess.run([_beside_python("tune"), *command[1:]], check=False)
    if finished.returncode:
        sys.exit(finished.returncode)

    print_epochs(Path(cfg.output_dir) / "adaptive_batch" / "run.jsonl")
    compare(cfg, Path(cfg.output_dir) / f"epoch_{cfg.epochs - 1}")
    print(f"\n{time.perf_counter() - started:.0f} s in all. Everything is in {cfg.demo_dir}.")


def _resolved(settings: list[str]) -> DictConfig:
    """demo_cpu.yaml as the command's settings make it."""
    from omegaconf import OmegaConf

    from adaptive_batch.torchtune import config_path

    path = config_path("demo_cpu")
    assert path is not None, "demo_cpu.yaml is shipped with adaptive_batch"
    values = [setting for setting in settings if "=" in setting and not setting.startswith("~")]
    return OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(values))


def _beside_python(command: str) -> str:
    """The command that was installed with this Python, on PATH or not."""
    scripts = os.pathsep.join([str(Path(sys.executable).parent), sysconfig.get_path("scripts")])
    found = shutil.which(command, path=scripts) or shutil.which(command)
    if found is None:
        sys.exit(f"{command} is not installed: python -m adaptive_batch check says what is wrong")
    return found


def print_epochs(record: Path) -> None:
    """Print batch size, steps and mean loss of each epoch of the latest run in a run.jsonl."""
    from adaptive_batch.report import read_records

    epochs: dict[int, list[dict[str, Any]]] = {}
    for entry in read_records(record):
        if entry["kind"] == "start":
            epochs.clear()
        elif entry["kind"] == "step":
            epochs.setdefault(entry["epoch"], []).append(entry)
    print("\nepoch  batch size  steps  mean loss")
    for epoch, steps in epochs.items():
        mean_loss = sum(step["loss"] for step in steps) / len(steps)
        print(f"{epoch:>5}  {steps[0]['batch_size']:>10}  {len(steps):>5}  {mean_loss:>9.3f}")


def compare(cfg: DictConfig, tuned: Path) -> None:
    """Print the loss of base and tuned model on the held-out rows, and what each writes for one of their prompts."""
    import torch
    from torchtune import config

    directory = Path(cfg.demo_dir)
    demo_tokenizer = config.instantiate(cfg.tokenizer)
    held_out = directory / "data" / "held_out.jsonl"
    dataset = config.instantiate(cfg.dataset, demo_tokenizer, data_files=str(held_out))
    rows = [dataset[index] for index in range(len(dataset))]
    prompt = "def string.join_lines(lines, separator='\\n')"

    losses: dict[str, float] = {}
    print(f"\nprompt: {prompt}")
    for name, folder in (("base", directory / "base"), ("tuned", tuned)):
        model = load(folder)
        with torch.inference_mode():
            losses[name] = held_out_loss(model, rows, pad_id=demo_tokenizer.pad_id)
            text = sample(model, demo_tokenizer, prompt)
        print(f"\n{name} ({folder}):")
        print("\n".join(f"    {line}" for line in text.splitlines()))
    print(
        f"\nmean loss per token on {len(rows)} held-out rows: " + ", ".join(f"{n} {v:.3f}" for n, v in losses.items())
    )


def load(folder: Path) -> TransformerDecoder:
    """Return the demo's model with the weights of a folder in Hugging Face's format."""
    from safetensors.torch import load_file
    from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune

    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    model = build_model()
    model.load_state_dict(qwen2_hf_to_tune(weights, tie_word_embeddings=bool(MODEL["tie_word_embeddings"])))
    return model.eval()


def held_out_loss(model: TransformerDecoder, rows: list[dict[str, Any]], *, pad_id: int) -> float:
    """Return the mean cross-entropy over all label tokens of tokenized rows.

    Args:
        model: gives logits of shape [batch, sequence, vocabulary].
        rows: with ``tokens`` and ``labels`` as torchtune's datasets give them.
        pad_id: the token that fills the shorter rows of a batch.
    """
    import torch
    from torchtune.data import padded_collate_sft

    total, num_labels, batch_size = 0.0, 0, 16
    for start in range(0, len(rows), batch_size):
        batch = padded_collate_sft(rows[start : start + batch_size], padding_idx=pad_id)
        logits = model(batch["tokens"])[:, :-1].flatten(0, 1).float()
        labels = batch["labels"][:, 1:].flatten()
        total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        num_labels += int((labels != -100).sum())
    return total / num_labels


def sample(model: TransformerDecoder, demo_tokenizer: Qwen2Tokenizer, prompt: str, *, max_new_tokens: int = 64) -> str:
    """Return what the model writes for a signature, drawn with a fixed seed."""
    import torch
    from torchtune.data import Message
    from torchtune.generation import generate

    messages = [Message(role="user", content=prompt), Message(role="assistant", content="")]
    tokens, _ = demo_tokenizer.tokenize_messages(messages, add_eos=False)
    generated, _ = generate(
        model,
        torch.tensor(tokens),
        max_generated_tokens=max_new_tokens,
        pad_id=demo_tokenizer.pad_id,
        temperature=0.5,
        top_k=20,
        stop_tokens=demo_tokenizer.stop_tokens,
        rng=torch.Generator().manual_seed(SEED),
    )
    return demo_tokenizer.decode(generated[0].tolist()[len(tokens) :], skip_special_tokens=True)


if __name__ == "__main__":
    main()
