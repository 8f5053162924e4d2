"""Tiny data and models, made of the standard library's docstrings, as the scripts read them."""

from __future__ import annotations

import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
import transformers.utils
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from demo import docstring_rows
from demo.data import stdlib_sources

NUM_ROWS = 120
_MODULES = ("argparse", "ast", "collections", "datetime")
_NUM_WORDS = 500


def write_data(folder: Path) -> None:
    """Write what all scripts read into a folder."""
    rows = [
        row
        for name, source in stdlib_sources()
        if name in _MODULES
        for row in docstring_rows(name, source)
    ][:NUM_ROWS]
    texts = [row["docstring"] for row in rows]
    _write_lines(folder / "texts.jsonl", [{"text": text} for text in texts])
    _write_lines(folder / "prompts.jsonl", [{"prompt": row["signature"]} for row in rows])
    pairs = [
        {"prompt": row["signature"], "chosen": row["docstring"], "rejected": other}
        for row, other in zip(rows, reversed(texts), strict=True)
    ]
    _write_lines(folder / "pairs.jsonl", pairs)
    instructions = [{"instruction": row["signature"], "output": row["docstring"]} for row in rows]
    (folder / "instructions.json").write_text(json.dumps(instructions))
    text = "\n".join(texts)
    for name in ("train.txt", "valid.txt", "test.txt"):
        (folder / name).write_text(text[:6000])
    _write_bytes(folder / "data" / "docstrings", text)
    _write_model(folder / "model", text)


def _write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_bytes(folder: Path, text: str) -> None:
    """Write what nanoGPT reads: tokens, which here are bytes."""
    folder.mkdir(parents=True)
    tokens = numpy.frombuffer(text.encode(), dtype=numpy.uint8).astype(numpy.uint16)
    for name in ("train.bin", "val.bin"):
        tokens.tofile(folder / name)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))


def _write_model(folder: Path, text: str) -> None:
    """Write a GPT-2 of two layers and a tokenizer of words."""
    words = ["<unk>", "<eos>", "<pad>", *sorted(set(text.split()))][:_NUM_WORDS]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=_NUM_WORDS,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=2,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def nothing() -> None:
    """Change nothing before a script runs."""


def litgpt_checkpoint() -> None:
    """Write a model of two layers as litgpt reads it."""
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    config = Config(
        name="tiny", block_size=64, n_layer=2, n_embd=32, n_head=2, padded_vocab_size=_NUM_WORDS
    )
    save_config(config, Path("model"))
    torch.save(GPT(config).state_dict(), "model/lit_model.pth")


def name_of_transformers_4() -> None:
    """Give a name that run_clm_no_trainer.py imports, and transformers 5 no longer has."""
    transformers.utils.send_example_telemetry = lambda *arguments: None


def torchvision_of_docstrings() -> None:
    """Put a torchvision in place whose MNIST shows bytes of docstrings; its digit is a byte's."""
    lines = Path("texts.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"].encode()[:784].ljust(784) for line in lines]
    images = [torch.tensor(list(text), dtype=torch.float32).view(1, 28, 28) / 255 for text in texts]
    rows = [(image, text[0] % 10) for image, text in zip(images, texts, strict=True)]

    def mnist(*arguments: Any, **keywords: Any) -> list[tuple[torch.Tensor, int]]:
        return rows

    def nothing(*arguments: Any) -> None:
        return None

    torchvision: Any = types.ModuleType("torchvision")
    torchvision.datasets = types.SimpleNamespace(MNIST=mnist)
    torchvision.transforms = types.SimpleNamespace(
        Compose=nothing, ToTensor=nothing, Normalize=nothing
    )
    sys.modules["torchvision"] = torchvision
