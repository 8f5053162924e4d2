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
    get_cosine_schedule_with_warmup,
)

# --- adaptive_batch
from adaptive_batch import AdaptiveLoop, Sampling, geometric

# ---

MODULES = (argparse, inspect, json, random, statistics, textwrap)
DOCSTRINGS = {
    text
    for module in MODULES
    for one in vars(module).values()
    if (text := getattr(one, "__doc__", None))
}
ROWS = [{"input_ids": list(text.encode()[:64])} for text in sorted(DOCSTRINGS)[:128]]
EPOCHS, BATCH_SIZE, RATE = 3, 8, 3e-3
SCHEDULE_STEPS = EPOCHS * len(ROWS) // BATCH_SIZE  # of a batch that does not grow


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    mask = pad_sequence([torch.ones_like(one) for one in ids], True)
    return {
        "input_ids": pad_sequence(ids, True),
        "attention_mask": mask,
        "labels": pad_sequence(ids, True, -100),
    }


class LoopTrainer(Trainer):
    """Takes its steps, already as large as they are to be, from `loop`; Trainer clips, steps, logs
    and saves.
    """

    # --- adaptive_batch
    loop: AdaptiveLoop

    def get_train_dataloader(self):
        return self.loop

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        model.train()
        return torch.tensor(self.loop.run(inputs).loss, device=self.args.device)

    # ---


class PlainTrainer(Trainer):
    """Takes the same batches, at the same rates, from a DataLoader of its own."""

    rows_done = 0

    def batches(self, sizes: list[int]) -> list[list[int]]:
        numbers = []
        for epoch, size in enumerate(sizes):
            sampler = DistributedSampler(ROWS, 1, 0, seed=0)
            sampler.set_epoch(epoch)
            numbers += torch.tensor(list(sampler)).split(size)
        return [batch.tolist() for batch in numbers]

    def get_train_dataloader(self):
        return DataLoader(ROWS, batch_sampler=self.batches(self.sizes), collate_fn=collate)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        rows = len(inputs["input_ids"])
        scheduled = self.lr_scheduler.lr_lambdas[0](self.rows_done / BATCH_SIZE)
        self.optimizer.param_groups[0]["lr"] = RATE * scheduled * (rows / BATCH_SIZE) ** 0.5
        self.rows_done += rows
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 4, SCHEDULE_STEPS)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=1,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model.to(arguments.device)
    kind = LoopTrainer if plain is None else PlainTrainer
    trainer = kind(model, arguments, train_dataset=ROWS, optimizers=(optimizer, scheduler))
    if plain is None:
        # --- adaptive_batch
        trainer.loop = loop = AdaptiveLoop(
            model,
            optimizer,
            ROWS,
            collate=collate,
            mean_loss=lambda batch: model(**batch).loss,
            batch_size=BATCH_SIZE,
            batch_increase_function=geometric(2.0),
            sampling=Sampling(grow_beyond_maximum=True),
            lr_scaling="sqrt",
            lr_scheduler=scheduler,
        )
        found = loop.find_bound(device_memory="20MiB" if arguments.device.type == "cpu" else None)
        arguments.max_steps = loop.num_steps(EPOCHS)
        # ---
        print(found.table())
    else:
        trainer.sizes = plain
        arguments.max_steps = len(trainer.batches(plain))
    trainer.train()
    if plain is None:
        print("batch sizes:", *(BATCH_SIZE * 2**epoch for epoch in range(EPOCHS)))
    print("optimizer steps:", trainer.state.global_step)
    with torch.no_grad():
        model.eval()
        batch = {name: tensor.to(model.device) for name, tensor in collate(ROWS[:32]).items()}
        print("final loss:", model(**batch).loss.item())


if __name__ == "__main__":
    main()
