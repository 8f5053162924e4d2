"""Table 3 of docs/comparison.md: training that stops within an epoch and resumes, by other
libraries and by this project.

    python benchmarks/compare_resume.py [--only TEXT] [--output DIR]

Each method trains on 32 rows for two epochs in batches of 4, in random order and with dropout: once
without interruption, once until it stops after step 11 of 16, and once from the checkpoint of that
run. Each run has its own process, and is repeated without dropout. Rows are counted as the
model receives them. The weights after the last step are compared bit by bit.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import lightning.pytorch as pl
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtune.modules import TransformerDecoder

from adaptive_batch import AdaptiveBatches, AdaptiveStep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.cli import OURS, STOCK, SmallSetup, make_setup, resume_run

NUM_ROWS = 32
BATCH_SIZE = 4
NUM_EPOCHS = 2
STEPS_OF_EPOCH = NUM_ROWS // BATCH_SIZE
STOPS_AFTER = STEPS_OF_EPOCH + 3
SEED = 0
DROPOUT = 0.2

Rows = list[list[Any]]


class Stopped(Exception):
    """The run ends here, as one that is killed does."""


@dataclass
class Outcome:
    """A run.

    Attributes:
        rows: rows of each step.
        weights: after the last step.
    """

    rows: Rows
    weights: torch.Tensor


@dataclass(frozen=True)
class Run:
    """One of the three runs of a way.

    Attributes:
        folder: folder of the checkpoint.
        stops: whether it stops after step `STOPS_AFTER`.
        resumes: whether it starts from the checkpoint.
        dropout: of the model.
    """

    folder: Path
    dropout: float
    stops: bool = False
    resumes: bool = False


class Numbers(torch.utils.data.Dataset):
    """Rows of four numbers."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return {"x": torch.randn(4, generator=generator), "number": torch.tensor(number)}


class Model(nn.Module):
    """A small model with dropout, that remembers which rows it saw."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.rows: Rows = []

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        self.rows.append(number.tolist())
        return {"loss": self.layers(x).square().mean()}

    def outcome(self) -> Outcome:
        weights = torch.cat([parameter.detach().flatten() for parameter in self.parameters()])
        return Outcome(self.rows, weights)


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


# --- the ways


class StopTrainer(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == STOPS_AFTER:
            control.should_save = True
            control.should_training_stop = True


def trainer(run: Run) -> Outcome:
    arguments = transformers.TrainingArguments(
        str(run.folder),
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=NUM_EPOCHS,
        learning_rate=1e-2,
        save_strategy="no",
        logging_strategy="no",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
        report_to=[],
        seed=SEED,
    )
    transformers.set_seed(SEED)
    model = Model(run.dropout)
    callbacks = [StopTrainer()] if run.stops else []
    fitter = transformers.Trainer(model, arguments, train_dataset=Numbers(), callbacks=callbacks)
    fitter.remove_callback(transformers.PrinterCallback)
    fitter.train(resume_from_checkpoint=run.resumes or None)
    return model.outcome()


def accelerated(
    run: Run, *, is_stateful: bool, has_seedable_sampler: bool, has_own_generator: bool = False
) -> Outcome:
    """As accelerate's example of checkpoints by steps has it; the loader draws from the generator
    that the model draws from, unless it has its own.
    """
    set_seed(SEED)
    settings = DataLoaderConfiguration(
        use_stateful_dataloader=is_stateful, use_seedable_sampler=has_seedable_sampler
    )
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    module = Model(run.dropout)
    plain_loader = DataLoader(
        Numbers(),
        batch_size=BATCH_SIZE,
        shuffle=True,
        generator=torch.Generator().manual_seed(SEED) if has_own_generator else None,
    )
    model, optimizer, loader = accelerator.prepare(module, new_optimizer(module), plain_loader)
    num_steps = 0
    if run.resumes:
        accelerator.load_state(str(run.folder))
        num_steps = STOPS_AFTER
    first_epoch, skipped = divmod(num_steps, STEPS_OF_EPOCH)
    for epoch in range(first_epoch, NUM_EPOCHS):
        loader.set_epoch(epoch)
        batches = loader
        if run.resumes and epoch == first_epoch and not is_stateful:
            batches = accelerator.skip_first_batches(loader, skipped)
        for batch in batches:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1
            if run.stops and num_steps == STOPS_AFTER:
                accelerator.save_state(str(run.folder))
                return module.outcome()
    return module.outcome()


class LightningModel(pl.LightningModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.model = Model(dropout)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return new_optimizer(self)


class StopLightning(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STOPS_AFTER:
            raise Stopped


def lightning(run: Run, *, loader_class: type[DataLoader[Any]]) -> Outcome:
    pl.seed_everything(SEED, workers=True, verbose=False)
    model = LightningModel(run.dropout)
    saves = ModelCheckpoint(
        run.folder, filename="newest", every_n_train_steps=STOPS_AFTER, save_top_k=-1
    )
    fitter = pl.Trainer(
        accelerator="cpu",
        max_epochs=NUM_EPOCHS,
        callbacks=[saves, StopLightning()] if run.stops else [],
        enable_checkpointing=run.stops,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.folder,
    )
    loader = loader_class(Numbers(), batch_size=BATCH_SIZE, shuffle=True)
    newest = run.folder / "newest.ckpt"
    try:
        fitter.fit(model, loader, ckpt_path=newest if run.resumes else None)
    except Stopped:
        assert newest.exists()
    return model.model.outcome()


def ours_in_a_loop(run: Run) -> Outcome:
    torch.manual_seed(SEED)
    model = Model(run.dropout)
    optimizer = new_optimizer(model)
    batches = AdaptiveBatches(Numbers(), BATCH_SIZE)
    loader = DataLoader(Numbers(), batch_sampler=batches, generator=torch.Generator())
    step = AdaptiveStep(model, lambda part: (model(**part.batch)["loss"] * part.share).backward())
    path = run.folder / "state.pt"
    parts = (model, optimizer, batches)
    if run.resumes:
        *states, random_numbers = torch.load(path, weights_only=True)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        torch.set_rng_state(random_numbers)
    for _ in range(batches.progress.epoch, NUM_EPOCHS):
        for batch in loader:
            step(batch)
            optimizer.step()
            optimizer.zero_grad()
            batches.step()
            if run.stops and batches.progress.steps == STOPS_AFTER:
                states = [part.state_dict() for part in parts]
                torch.save([*states, torch.get_rng_state()], path)
                return model.outcome()
    return model.outcome()


def recipe(run: Run, *, name: str, settings: tuple[str, ...] = ()) -> Outcome:
    """A recipe on docstrings, which identifies rows by their tokens."""
    rows: Rows = []
    forward = TransformerDecoder.forward

    def watched(self: TransformerDecoder, tokens: torch.Tensor, **given: Any) -> Any:
        if run.stops and len(rows) == STOPS_AFTER:
            raise Stopped
        rows.append([str([token for token in row if token]) for row in tokens.tolist()])
        return forward(self, tokens, **given)

    TransformerDecoder.forward = watched
    files = run.folder / "files"
    output = run.folder / "output"
    overrides = (f"batch_size={BATCH_SIZE}", f"model.attn_dropout={run.dropout}", *settings)
    if run.resumes:
        setup = SmallSetup(files, files / "small.yaml")
        finished = resume_run(setup, output, *overrides, recipe=name)
    else:
        files.mkdir()
        try:
            finished = make_setup(files).run_in_process(name, f"output_dir={output}", *overrides)
        except Stopped:
            return Outcome(rows, torch.empty(0))
    weights = finished.weights(NUM_EPOCHS - 1)
    return Outcome(rows, torch.cat([weights[key].flatten() for key in sorted(weights)]))


@dataclass(frozen=True)
class Way:
    """A way to train, stop and resume.

    Attributes:
        name: of the row in the table.
        train: does one of its three runs.
        saved_after: step of the newest checkpoint at the stop.
    """

    name: str
    train: Callable[[Run], Outcome]
    saved_after: int = STOPS_AFTER


WAYS = (
    Way("Trainer", trainer),
    Way(
        "accelerate: skip_first_batches",
        partial(accelerated, is_stateful=False, has_seedable_sampler=False),
    ),
    Way(
        "accelerate: skip_first_batches, seedable sampler",
        partial(accelerated, is_stateful=False, has_seedable_sampler=True),
    ),
    Way(
        "accelerate: stateful loader",
        partial(accelerated, is_stateful=True, has_seedable_sampler=False),
    ),
    Way(
        "accelerate: stateful loader, seedable sampler",
        partial(accelerated, is_stateful=True, has_seedable_sampler=True),
    ),
    Way(
        "accelerate: skip_first_batches, seedable sampler, generator",
        partial(accelerated, is_stateful=False, has_seedable_sampler=True, has_own_generator=True),
    ),
    Way(
        "accelerate: stateful loader, seedable sampler, generator",
        partial(accelerated, is_stateful=True, has_seedable_sampler=True, has_own_generator=True),
    ),
    Way("Lightning", partial(lightning, loader_class=DataLoader)),
    Way("Lightning: StatefulDataLoader", partial(lightning, loader_class=StatefulDataLoader)),
    Way("torchtune's recipe", partial(recipe, name=STOCK), saved_after=STEPS_OF_EPOCH),
    Way("ours: AdaptiveBatches in a loop", ours_in_a_loop),
    Way(
        "ours: recipe", partial(recipe, name=OURS, settings=(f"save_every_n_steps={STOPS_AFTER}",))
    ),
)


# --- the table


def quietly(train: Callable[[Run], Outcome], run: Run) -> Outcome:
    """Train without output, in a process that ends afterwards."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    return train(run)


def in_a_child(train: Callable[[Run], Outcome], run: Run) -> Outcome:
    """Train in a fork of this process, which saves the imports."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(quietly, (train, run))


def weights_of_both(way: Way, dropout: float) -> tuple[Rows, Rows, float]:
    """Return the rows of the whole run, those that the resumed weights have seen, and the largest
    difference of a weight.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        whole = in_a_child(way.train, Run(Path(other), dropout))
        stopped = in_a_child(way.train, Run(Path(folder), dropout, stops=True))
        resumed = in_a_child(way.train, Run(Path(folder), dropout, resumes=True))
    assert len(whole.rows) == NUM_EPOCHS * STEPS_OF_EPOCH
    assert stopped.rows == whole.rows[:STOPS_AFTER]
    difference = float((resumed.weights - whole.weights).abs().max())
    # The weights lack the steps after the newest checkpoint.
    return whole.rows, stopped.rows[: way.saved_after] + resumed.rows, difference


def measured(way: Way) -> dict[str, Any]:
    """Return the rows that the resumed run lost and repeated, and the changes of its weights."""
    whole, trained, difference = weights_of_both(way, DROPOUT)
    _, _, difference_without_dropout = weights_of_both(way, 0.0)
    # Counted, as two docstrings can begin alike.
    expected = Counter(row for step in whole for row in step)
    times = Counter(row for step in trained for row in step)
    return {
        "way": way.name,
        "steps_done_again": STOPS_AFTER - way.saved_after,
        "rows_lost": (expected - times).total(),
        "rows_repeated": (times - expected).total(),
        "same_order": trained == whole,
        "same_bits": difference == 0,
        "same_bits_without_dropout": difference_without_dropout == 0,
        "largest_difference": difference,
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="ways whose name has this text")
    arguments = parser.parse_args()
    start = time.perf_counter()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = []
    table = harness.Table(
        "way:<60 steps_done_again:>16 rows_lost:>9 rows_repeated:>13 same_order:>10 same_bits:>9"
        " same_bits_without_dropout:>25"
    )
    for way in WAYS:
        if arguments.only not in way.name:
            continue
        row = measured(way)
        results.append(row)
        table.print(row)
    harness.write(
        "compare_resume",
        arguments.output,
        rows=NUM_ROWS,
        batch_size=BATCH_SIZE,
        epochs=NUM_EPOCHS,
        stops_after=STOPS_AFTER,
        results=results,
        seconds=round(time.perf_counter() - start, 1),
    )


if __name__ == "__main__":
    main()
