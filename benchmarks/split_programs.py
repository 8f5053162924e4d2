"""Programs of Transformers, TRL, Lightning and accelerate that a split keeps, for split_check.py.

Ten programs of each run with `micro_batch_size=4` and batches of 16 rows, in each dtype, with a
fresh model and with one that trained for 20 steps without a split. In float32 the updates of four
steps of SGD are compared with those of a run that is not split.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
import zlib
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import chain, islice, product, repeat
from types import SimpleNamespace
from typing import Any, NamedTuple

import datasets
import lightning
import torch
import transformers as tf
import trl
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from split_check import DTYPES, PART_ROWS, observe, off_by, to_dtype
from split_setups import CORRECT, ROWS, SMALL, VISION, Setup, hf, pictures
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from trl.experimental.cpo import CPOConfig, CPOTrainer

from adaptive_batch import AdaptiveStep
from adaptive_batch.integrations.lightning import AdaptiveCallback
from adaptive_batch.integrations.transformers import AdaptiveArguments, AdaptiveTrainer
from adaptive_batch.training import Part

STEPS = 20
SPLIT_STEPS = 4
AUTOENCODER = VISION | {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1}
AUTOENCODER |= {"decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}

MORE = {
    "GPT-2, label smoothing": CORRECT["GPT-2"],
    "ViTMAE": hf("ForPreTraining", "ViTMAE", pictures(), AUTOENCODER, draws=True),
}
OF_TRAINER = ["BERT, dropout", "BERT, masked lm", "BERT, spans", "GPT-2", *MORE, "T5", "ViT"]
OF_TRAINER += ["Llama, checkpoint", "diffusion"]
OF_LIGHTNING = ["classes", "multi-label", "vae", "masked autoencoder", "lstm", "group norm"]
OF_LIGHTNING += ["segmentation", "causal lm, dropout", "spans over padding", "adapter"]
OF_ACCELERATE = ["causal lm", "masked lm", "grpo", "pairs, split by pairs", "Whisper", "BART"]
OF_ACCELERATE += ["Mixtral", "dropped paths", "gradient penalty", "noise in embeddings"]
OF_TRL: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig, {}),
    "SFT, completions": (trl.SFTTrainer, trl.SFTConfig, {"completion_only_loss": True}),
    "SFT, dft": (trl.SFTTrainer, trl.SFTConfig, {"loss_type": "dft"}),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, {}),
    "DPO, ipo": (trl.DPOTrainer, trl.DPOConfig, {"loss_type": "ipo"}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, {}),
    "SimPO": (CPOTrainer, CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, {"loss_type": "grpo"}),
    "Dr. GRPO": (trl.GRPOTrainer, trl.GRPOConfig, {"loss_type": "dr_grpo"}),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, {}),
}


# --- rows


def rows_of_setup(setup: Setup) -> list[dict[str, torch.Tensor]]:
    """Return rows without their padding."""
    rows = []
    for _ in range(SPLIT_STEPS):
        batch = setup.batch()
        width = batch.get("attention_mask", torch.empty(0)).shape[-1]
        for number in range(ROWS):
            row = {key: value[number] for key, value in batch.items()}
            for key, value in row.items():
                if width and value.shape == (width,):
                    row[key] = value[: int(row["attention_mask"].sum())]
                elif key == "labels" and value.dim() == 1:
                    row[key] = value[: int((value != -100).nonzero().max()) + 1]
            rows.append(row)
    return rows


def collate(rows: list[dict[str, torch.Tensor]], dtype: str) -> dict[str, torch.Tensor]:
    """Return a batch padded to its longest row."""
    batch = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        padding = -100 if key == "labels" else 0
        is_padded = values[0].dim() == 1 and not values[0].is_floating_point()
        batch[key] = pad_sequence(values, True, padding) if is_padded else torch.stack(values)
    return to_dtype(batch, torch.bfloat16 if dtype == "bfloat16" else torch.float32)


def words(texts: str, seed: int) -> datasets.Dataset:
    """Return rows of texts of random words, in columns."""
    random = torch.Generator().manual_seed(seed)

    def text() -> str:
        length = int(torch.randint(2, 9, (), generator=random))
        return "".join(f" w{n}" for n in torch.randint(0, 36, (length,), generator=random))

    rows = [{key: text() for key in texts.split()} for _ in range(SPLIT_STEPS * ROWS)]
    return datasets.Dataset.from_list(rows)


def tokenizer() -> tf.PreTrainedTokenizerFast:
    numbers = {word: n for n, word in enumerate(["<pad>", "<unk>", "<eos>"])}
    numbers |= {f"w{n}": n + 3 for n in range(37)}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, **special)


# --- programs


class Run(NamedTuple):
    """How a program runs: with a dtype, rows of a part or None, steps, an optimizer, and a seed."""

    dtype: str
    micro: int | None
    steps: int
    optimizer: str
    seed: int

    def arguments(self, setup: Setup) -> dict[str, Any]:
        return {"micro_batch_size": self.micro, **setup.arguments}

    def trainer_arguments(self) -> dict[str, Any]:
        fixed = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
        return fixed | {
            "output_dir": tempfile.mkdtemp(),
            "per_device_train_batch_size": ROWS,
            "max_steps": self.steps,
            "learning_rate": 0.01,
            "lr_scheduler_type": "constant",
            "optim": {"SGD": "sgd", "AdamW": "adamw_torch"}[self.optimizer],
            "bf16": self.dtype == "autocast",
            "seed": self.seed,
        }

    def loader(self, setup: Setup) -> DataLoader[Any]:
        torch.manual_seed(self.seed)
        to_batch = partial(collate, dtype=self.dtype)
        return DataLoader(rows_of_setup(setup), ROWS, collate_fn=to_batch)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return getattr(torch.optim, self.optimizer)(trained, 0.01)


def run_trainer(name: str, setup: Setup, model: nn.Module, run: Run) -> None:
    class WithLoss(AdaptiveTrainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
            return setup.loss(model, SimpleNamespace(**inputs))

    more = {"label_smoothing_factor": 0.1} if "smoothing" in name else {}
    loader = run.loader(setup)
    trainer_class = AdaptiveTrainer if isinstance(model, tf.PreTrainedModel) else WithLoss
    trainer = trainer_class(
        model,
        tf.TrainingArguments(**run.trainer_arguments(), remove_unused_columns=False, **more),
        data_collator=loader.collate_fn,
        train_dataset=loader.dataset,
        adaptive=AdaptiveArguments(**run.arguments(setup)),
    )
    trainer.remove_callback(tf.PrinterCallback)
    trainer.train()


def run_lightning(name: str, setup: Setup, model: nn.Module, run: Run) -> None:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = setup.loss(self.model, SimpleNamespace(**batch))
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return run.make_optimizer(self)

    precision = {"float32": "32-true", "autocast": "bf16-mixed", "bfloat16": "bf16-true"}
    hidden = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    lightning.Trainer(
        accelerator="cpu",
        precision=precision[run.dtype],
        max_steps=run.steps,
        callbacks=[AdaptiveCallback(AdaptiveArguments(**run.arguments(setup)))],
        enable_model_summary=False,
        **hidden,
    ).fit(Module(), run.loader(setup))


def run_accelerate(name: str, setup: Setup, model: nn.Module, run: Run) -> None:
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if run.dtype == "autocast" else "no")
    prepared = accelerator.prepare(model, run.make_optimizer(model), run.loader(setup))
    wrapped, optimizer, loader = prepared

    def forward_backward(part: Part) -> None:
        loss = setup.loss(wrapped, SimpleNamespace(**part.batch))
        accelerator.backward(loss * part.share)

    step = AdaptiveStep(wrapped, forward_backward, **run.arguments(setup))
    for batch in islice(chain.from_iterable(repeat(loader)), run.steps):
        step(batch)
        optimizer.step()
        optimizer.zero_grad()


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a number for each completion, which differs from one to the next."""
    return [zlib.crc32(completion.encode()) / 2**32 for completion in completions]


def run_trl(name: str, setup: Setup, model: nn.Module, run: Run) -> None:
    trainer_class, config_class, settings = OF_TRL[name]
    texts, more, arguments = "prompt chosen rejected", {}, run.trainer_arguments()
    if name.startswith("SFT"):
        texts = "prompt completion" if "completions" in name else "text"
    elif name.startswith("DPO"):
        more["ref_model"] = deepcopy(model)
    elif "GRPO" in name or name == "RLOO":
        texts, more["reward_funcs"] = "prompt", reward
        arguments |= {"num_generations": 4, "max_completion_length": 8, "beta": 0.0}

    class Adaptive(trainer_class, AdaptiveTrainer):
        adaptive = AdaptiveArguments(**run.arguments(setup))

    trainer = Adaptive(
        model,
        args=config_class(**arguments, **settings),
        train_dataset=words(texts, run.seed),
        processing_class=tokenizer(),
        **more,
    )
    trainer.remove_callback(tf.PrinterCallback)
    trainer.train()


LLAMA = hf("ForCausalLM", "Llama", list, SMALL)
SCORER = hf("ForSequenceClassification", "Llama", list, SMALL | {"num_labels": 1})
PROGRAMS: dict[str, tuple[Callable[..., None], Setup]] = {
    f"{framework}: {name}": (program, setups[name])
    for framework, program, setups, names in (
        ("Transformers", run_trainer, CORRECT | MORE, OF_TRAINER),
        ("TRL", run_trl, dict.fromkeys(OF_TRL, LLAMA) | {"reward": SCORER}, OF_TRL),
        ("Lightning", run_lightning, CORRECT, OF_LIGHTNING),
        ("accelerate", run_accelerate, CORRECT, OF_ACCELERATE),
    )
    for name in names
}


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])


def measure_program(case: tuple[str, int]) -> list[dict[str, Any]]:
    """Return a record of each state and dtype of a program with a seed."""
    name, seed = case
    program, setup = PROGRAMS[name]
    program = partial(program, name.split(": ")[1], setup)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    tf.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = []
    for state, dtype in product(("fresh", "trained"), DTYPES):
        torch.manual_seed(zlib.crc32(name.encode()) + seed)
        model = setup.make()
        if dtype == "bfloat16":
            model.to(torch.bfloat16)
        if state == "trained":
            program(model, Run(dtype, None, STEPS, "AdamW", seed))
        # A copy of a model that a trainer prepared generates other texts.
        before, split, whole = weights(model), deepcopy(model), deepcopy(model)
        run = Run(dtype, PART_ROWS, SPLIT_STEPS, "SGD", seed)
        result = observe(partial(program, split, run))
        trained = []
        if not result["refusal"]:
            program(whole, run._replace(micro=None))
            trained = [off_by(weights(split) - before, weights(whole) - before)]
        if setup.draws:
            trained = [0.0] * len(trained)
        keys = {"name": name, "seed": seed, "state": state, "dtype": dtype}
        found.append(keys | result | {"harms": [0.0], "trained": trained})
    return found
