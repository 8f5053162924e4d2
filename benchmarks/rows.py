"""Real text of drawn lengths to train on, and a larger model than the demo's, for benchmarks."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
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

AROUND = 14  # tokens of a row whose answer is ":"
SHORTEST = AROUND + 2


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


def drawn_lengths(sigma: float, num_rows: int, *, mean: float, longest: int) -> list[int]:
    """Draw lognormal lengths that have the mean after they are cut to what is allowed."""
    normal = torch.randn(
        num_rows, generator=torch.Generator().manual_seed(demo.SEED), dtype=torch.float64
    )

    def lengths(location: float) -> torch.Tensor:
        return (location + sigma * normal).exp().clamp(SHORTEST, longest).round().long()

    low, high = 0.0, math.log(longest)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).double().mean() < mean else (low, middle)
    return lengths(high).tolist()


def write_rows(path: Path, lengths: list[int], text: str, num_tokens: Callable[[str], int]) -> None:
    """Write a row of so many tokens for each length: words of a text in their order, but those that
    no longer fit.

    Args:
        path: of the JSONL file.
        lengths: tokens of each row, everything around the answer included.
        text: is repeated where it ends.
        num_tokens: of a word with the space before it; tokens do not reach across words.
    """
    words = cycle([(word, num_tokens(" " + word)) for word in text.split()])
    with path.open("w", encoding="utf-8") as file:
        for length in lengths:
            left, taken = length - AROUND, [":"]
            while left:
                word, tokens = next(words)
                if tokens <= left:
                    taken.append(word)
                    left -= tokens
            file.write(json.dumps({"signature": "text", "docstring": " ".join(taken)}) + "\n")


@dataclass(frozen=True)
class Setting:
    """Rows to train on, and all that the ways to train on them share.

    Attributes:
        folder: with the demo's files.
        name: of the rows.
        lengths: tokens of each row, in order.
        overrides: over the demo's configuration.
        blocks: of another model's configuration; they replace the demo's.
    """

    folder: Path
    name: str
    lengths: list[int]
    overrides: tuple[str, ...]
    blocks: dict[str, Any]

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
) -> Setting:
    """Write rows of lognormal lengths, and make sure that the recipes' dataset has them so.

    Args:
        folder, name, overrides, blocks: of the setting.
        sigma: of the logarithm of a row's tokens; 0 makes all alike.
        num_rows: how many.
        mean, longest: tokens of a row; what would be longer is cut.
    """
    lengths = drawn_lengths(sigma, num_rows, mean=mean, longest=longest)
    path = folder / f"{name}.jsonl"
    own = (
        f"model.max_seq_len={longest}",
        f"tokenizer.max_seq_len={longest}",
        f"dataset.data_files={path}",
    )
    setting = Setting(
        folder, name, lengths, (*own, "shuffle=False", "epochs=1", *overrides), blocks
    )
    cfg = setting.configuration("any")
    tokenizer = config.instantiate(cfg.tokenizer)
    text = " ".join(row["docstring"] for row in demo.read_rows(folder / "data" / "train.jsonl"))
    write_rows(
        path, lengths, text, lambda text: len(tokenizer.encode(text, add_bos=False, add_eos=False))
    )
    assert [len(row["tokens"]) for row in config.instantiate(cfg.dataset, tokenizer)] == lengths
    return setting
