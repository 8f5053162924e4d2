"""Real text of drawn lengths to train on, and a larger model than the demo's, for benchmarks."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from turns import configuration

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import demo


def half_billion(folder: Path) -> dict[str, Any]:
    """Qwen2.5 0.5B's shape with random weights in a folder; returns the blocks of the configuration
    that name it.
    """
    from safetensors.torch import save_file
    from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf
    from torchtune.models.qwen2_5 import qwen2_5_0_5b

    with torch.device("meta"):
        skeleton = qwen2_5_0_5b()
    generator = torch.Generator().manual_seed(demo.SEED)
    weights: dict[str, torch.Tensor] = {}
    for name, like in skeleton.state_dict().items():
        weights[name] = weight = torch.empty(like.shape, dtype=torch.bfloat16)
        if name.endswith(".scale"):
            weight.fill_(1)
        elif name.endswith(".bias"):
            weight.zero_()
        else:
            weight.normal_(0, demo.INITIALIZER_RANGE, generator=generator)
    folder.mkdir(parents=True)
    save_file(qwen2_tune_to_hf(weights), folder / "model.safetensors", metadata={"format": "pt"})
    heads = {
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "hidden_size": 896,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(heads))
    return {
        "model": {"_component_": "torchtune.models.qwen2_5.qwen2_5_0_5b"},
        "checkpointer": {"checkpoint_dir": str(folder)},
    }


def drawn_lengths(
    sigma: float, num_rows: int, *, mean: float, shortest: int, longest: int
) -> list[int]:
    """Draw lognormal lengths that have the mean after they are cut to what is allowed."""
    normal = torch.randn(
        num_rows, generator=torch.Generator().manual_seed(demo.SEED), dtype=torch.float64
    )

    def lengths(location: float) -> torch.Tensor:
        return (location + sigma * normal).exp().clamp(shortest, longest).round().long()

    low, high = 0.0, math.log(longest)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).double().mean() < mean else (low, middle)
    return lengths(high).tolist()


def answers_of(
    lengths: list[int], text: str, num_tokens: Callable[[str], int], *, around: int
) -> Iterator[str]:
    """Yield an answer of so many tokens for each length: words of a text in their order, but those
    that no longer fit.

    Args:
        lengths: tokens of each row, everything around the answer included.
        text: is repeated where it ends.
        num_tokens: of a word with the space before it; tokens do not reach across words.
        around: tokens of a row whose answer is ":".
    """
    words = cycle([(word, num_tokens(" " + word)) for word in text.split()])
    for length in lengths:
        left, taken = length - around, [":"]
        while left:
            word, tokens = next(words)
            if tokens <= left:
                taken.append(word)
                left -= tokens
        yield " ".join(taken)


def write_rows(path: Path, answers: Iterator[str], *, pairs: bool) -> None:
    """Write a row for each answer into a JSONL file, or a pair for each two."""
    with path.open("w", encoding="utf-8") as file:
        for answer in answers:
            row: dict[str, Any] = {"signature": "text", "docstring": answer}
            if pairs:
                row = {
                    column: [
                        {"role": "user", "content": "text"},
                        {"role": "assistant", "content": content},
                    ]
                    for column, content in (("chosen", answer), ("rejected", next(answers)))
                }
            file.write(json.dumps(row) + "\n")


@dataclass(frozen=True)
class Setting:
    """Rows to train on, and all that the ways to train on them share.

    Attributes:
        folder: with the demo's files.
        name: of the rows.
        lengths: tokens of each row, in order.
        overrides: over the demo's configuration.
        blocks: of another model's configuration; they replace the demo's.
        padded: tokens of each row as it is collated alone.
    """

    folder: Path
    name: str
    lengths: list[int]
    overrides: tuple[str, ...]
    blocks: dict[str, Any]
    padded: list[int]

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def configuration(self, name: str, *overrides: str) -> DictConfig:
        """Return the configuration of a way; it has its own caches, so that no search knows of
        another.
        """
        cfg = configuration(self.folder, name, [*self.overrides, *overrides])
        os.environ["ADAPTIVE_BATCH_CACHE"] = f"{cfg.output_dir}/cache"
        if self.blocks:
            cfg.model = self.blocks["model"]
            cfg.checkpointer = OmegaConf.merge(cfg.checkpointer, self.blocks["checkpointer"])
        return cfg


def make_rows(
    folder: Path,
    name: str,
    sigma: float,
    num_rows: int,
    mean: int,
    longest: int,
    overrides: tuple[str, ...],
    blocks: dict[str, Any],
    *,
    pairs: bool = False,
) -> Setting:
    """Write rows of lognormal lengths, and make sure that the recipes' dataset has them so.

    Args:
        folder, name, overrides, blocks: of the setting.
        sigma: of the logarithm of a row's tokens; 0 makes all alike.
        num_rows: how many.
        mean, longest: tokens of a row; what would be longer is cut.
        pairs: write preference pairs, of which each answer is as long as a row.
    """
    columns = ("chosen_input_ids", "rejected_input_ids") if pairs else ("tokens",)
    size = len(columns)
    own = (
        f"model.max_seq_len={longest}",
        f"tokenizer.max_seq_len={longest}",
        "shuffle=False",
        "epochs=1",
        *overrides,
    )
    cfg = Setting(folder, name, [], own, blocks, []).configuration("any")
    tokenizer = config.instantiate(cfg.tokenizer)
    text = " ".join(row["docstring"] for row in demo.read_rows(folder / "data" / "train.jsonl"))

    def num_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_bos=False, add_eos=False))

    def write(path: Path, answers: Iterable[str]) -> list[list[int]]:
        """Write rows; return the tokens of each answer's row as the dataset has them."""
        write_rows(path, iter(answers), pairs=pairs)
        dataset = OmegaConf.merge(cfg.dataset, {"data_files": str(path)})
        rows = config.instantiate(dataset, tokenizer)
        return [[len(row[column]) for column in columns] for row in rows]

    # The tokenizer is made of the docstrings of this Python's library, and so are its tokens.
    around = write(folder / f"{name}-empty.jsonl", [":"] * size)[0][0]
    answers = drawn_lengths(sigma, size * num_rows, mean=mean, shortest=around + 2, longest=longest)
    of_rows = [answers[start : start + size] for start in range(0, len(answers), size)]
    path = folder / f"{name}.jsonl"
    assert write(path, answers_of(answers, text, num_tokens, around=around)) == of_rows
    return Setting(
        folder,
        name,
        [sum(row) for row in of_rows],
        (*own, f"dataset.data_files={path}"),
        blocks,
        [size * max(row) for row in of_rows],
    )
