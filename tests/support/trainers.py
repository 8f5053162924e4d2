"""Trainers of Transformers on a CPU, with a small model and small rows."""

from __future__ import annotations

import functools
from collections import namedtuple

import torch
from support.loops import collate_features
from support.sharded_model import run_out_of_memory
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from adaptive_batch import distributed

NUM_ROWS = 24


def rows():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 17, (NUM_ROWS,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(3, 64, (length,), generator=generator).tolist()}
        for length in lengths
    ]


def llama(dropout=0.0):
    torch.manual_seed(0)
    counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    shape = {**sizes, **dict.fromkeys(counts, 2), "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**shape, attention_dropout=dropout))


def limited(model, num_rows, *, modes=(False,), rank=None):
    """Make a model run out of memory above `num_rows` rows: in training if True is in `modes`, in
    evaluation if False is; on one rank or on all.
    """
    forward = model.forward
    model.num_evaluations = 0

    @functools.wraps(forward)
    def limited_forward(*arguments, **keywords):
        model.num_evaluations += not model.training
        batch_size = len(next(value for value in keywords.values() if torch.is_tensor(value)))
        is_here = model.training in modes and rank in (None, distributed.rank())
        if num_rows and is_here and batch_size > num_rows:
            run_out_of_memory()
        return forward(*arguments, **keywords)

    model.forward = limited_forward
    return model


def trainer_of(kind, folder, model=None, data=None, collator=collate_features, **arguments):
    """Return a trainer on the CPU that evaluates its training rows."""
    adaptive = arguments.pop("adaptive", None)
    defaults = {
        "per_device_train_batch_size": 6,
        "per_device_eval_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    return kind(
        model or llama(),
        TrainingArguments(str(folder), **defaults | arguments),
        train_dataset=data or rows(),
        eval_dataset=data or rows(),
        data_collator=collator,
        **({} if adaptive is None else {"adaptive": adaptive}),
    )


Run = namedtuple("Run", "trainer losses weights")


def trained(kind, folder, model=None, *, resume=None, **given):
    trainer = trainer_of(kind, folder, model, **given)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])
    return Run(trainer, losses, weights)
