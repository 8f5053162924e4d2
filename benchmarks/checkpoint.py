"""Whether the demo's tuned checkpoint is the same model in transformers and in torchtune.

    make demo && python benchmarks/checkpoint.py [--directory adaptive_batch_demo]

Both load the last epoch by their own public means; the held-out rows go through both.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import records
import torch
from omegaconf import OmegaConf
from torchtune import config
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaptive_batch.config_files import config_path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import demo


@torch.inference_mode()
def compare(folder: Path, texts: list[str], *, aside: Path) -> dict[str, float | int]:
    """Run `texts` through both; `folder` is an epoch in Hugging Face format, `aside` an empty place
    for torchtune.
    """
    cfg = OmegaConf.load(config_path("demo_cpu"))
    files = [path.name for path in sorted(folder.glob("*.safetensors"))]
    checkpointer = config.instantiate(
        cfg.checkpointer, checkpoint_dir=str(folder), checkpoint_files=files, output_dir=str(aside)
    )
    ours = config.instantiate(cfg.model).eval()
    ours.load_state_dict(checkpointer.load_checkpoint()["model"])
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    difference, same, positions = 0.0, 0, 0
    for text in texts:
        tokens = torch.tensor([tokenizer(text)["input_ids"][: cfg.model.max_seq_len]])
        logits, their_logits = ours(tokens), theirs(tokens).logits
        difference = max(difference, float((logits - their_logits).abs().max()))
        same += int((logits.argmax(-1) == their_logits.argmax(-1)).sum())
        positions += tokens.numel()
    return {"largest_difference": difference, "same_choices": same, "positions": positions}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path(demo.DIRECTORY))
    parser.add_argument("--output", type=Path, default=records.RESULTS)
    arguments = parser.parse_args()
    lines = (arguments.directory / "data" / "held_out.jsonl").read_text().splitlines()
    texts = [f"{row['signature']}\n{row['docstring']}" for row in map(json.loads, lines)]
    folder = max(
        (arguments.directory / "tuned").glob("epoch_*"),
        key=lambda path: int(path.name.split("_")[1]),
    )
    found = compare(folder, texts, aside=arguments.directory / "compared")
    print(
        f"{folder}: logits differ by {found['largest_difference']:.2e} at most (target 1e-4), ",
        end="",
    )
    print(f"{found['same_choices']} of {found['positions']} next-token choices are the same")
    records.write("checkpoint", arguments.output, checkpoint=folder.name, texts=len(texts), **found)


if __name__ == "__main__":
    main()
