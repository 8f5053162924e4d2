"""A small Llama trained on the standard library's docstrings with Hugging Face's Trainer.

python examples/hugging_face.py                     with adaptive_batch
python examples/hugging_face.py --plain 8 16 32    without, at the sizes that the former printed
"""

import argparse
import inspect
import json
import random
import statistics
import tempfile
import textwrap

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

# --- adaptive_batch
from adaptive_batch import geometric
from adaptive_batch.integrations.transformers import AdaptiveArguments, AdaptiveTrainer

# ---

MODULES = (argparse, inspect, json, random, statistics, textwrap)
DOCSTRINGS = {
    text
    for module in MODULES
    for one in vars(module).values()
    if (text := getattr(one, "__doc__", None))
}
ROWS = [{"input_ids": list(text.encode()[:64])} for text in sorted(DOCSTRINGS)[:128]]
EPOCHS, BATCH_SIZE = 3, 8


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    mask = pad_sequence([torch.ones_like(one) for one in ids], True)
    return {
        "input_ids": pad_sequence(ids, True),
        "attention_mask": mask,
        "labels": pad_sequence(ids, True, -100),
    }


class PlainTrainer(Trainer):
    """Trains on the same batches with the same learning rates, from a plain DataLoader."""

    def batches(self, sizes: list[int]) -> list[list[int]]:
        numbers = []
        for epoch, size in enumerate(sizes):
            sampler = DistributedSampler(ROWS, 1, 0, seed=self.args.seed)
            sampler.set_epoch(epoch)
            numbers += torch.tensor(list(sampler)).split(size)
        return [batch.tolist() for batch in numbers]

    def get_train_dataloader(self):
        return DataLoader(ROWS, batch_sampler=self.batches(self.sizes), collate_fn=collate)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        rows = len(inputs["input_ids"])
        for group, scheduled in zip(
            self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = scheduled * (rows / BATCH_SIZE) ** 0.5
        return super().training_step(model, inputs, num_items_in_batch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", type=int, nargs=EPOCHS, help="batch size of each epoch")
    plain = parser.parse_args().plain
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, num_key_value_heads=2, max_position_embeddings=128, **shape)
    )
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=EPOCHS,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    given = {"train_dataset": ROWS, "data_collator": collate}
    if plain is None:
        # --- adaptive_batch
        adaptive = AdaptiveArguments(
            micro_batch_size="auto",
            device_memory="20MiB" if arguments.device.type == "cpu" else None,
            batch_increase_function=geometric(2.0),
            lr_scaling="sqrt",
        )
        trainer = AdaptiveTrainer(model, arguments, adaptive=adaptive, **given)
        trainer.train()
        print("max_batch_size:", trainer.adaptive_step.max_batch_size)
        # ---
        print("batch sizes:", *(BATCH_SIZE * 2**epoch for epoch in range(EPOCHS)))
    else:
        trainer = PlainTrainer(model, arguments, **given)
        trainer.sizes = plain
        arguments.max_steps = len(trainer.batches(plain))
        trainer.train()
    print("optimizer steps:", trainer.state.global_step)
    with torch.no_grad():
        model.eval()
        batch = {name: tensor.to(model.device) for name, tensor in collate(ROWS[:32]).items()}
        print("final loss:", model(**batch).loss.item())


if __name__ == "__main__":
    main()
