"""Searches for the largest batch, as users call them: accelerate's decorator and
`find_max_batch_size` in a script; `auto_find_batch_size` and `AdaptiveTrainer` in Trainer; both of
Lightning's searches and `AdaptiveCallback` in Lightning; and Composer's rule for micro-batches.

    python benchmarks/search_in_trainers.py [--quick] [--output DIR]

A model with 0.2 million parameters trains in float32 on rows of equal and of varying length. The
bytes of live tensors are counted, and an OOM is raised above a budget. The true maximum is found by
bisection with the same trainer on the longest rows. If ours searches for the rows of a part, it is
found with the gradients of another part in memory. "ours" knows the budget, as on an accelerator;
"ours, blind" does not. The state at the start of training (weights, random number generators, first
batch) is compared with a run without a search.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import random
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import harness
import lightning.pytorch as pl
import torch
from accelerate.utils import find_executable_batch_size
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from adaptive_batch import find_max_batch_size
from adaptive_batch.integrations.lightning import AdaptiveArguments, AdaptiveCallback
from adaptive_batch.integrations.transformers import AdaptiveTrainer
from adaptive_batch.memory.tracker import MemoryTracker

MIB = 2**20
BUDGETS_MIB = (24, 48, 96)
NUM_ROWS = 512
VOCABULARY = 512
FEW_BYTES = 4096
# accelerate's decorator starts from it by default. Trainer's search shrinks this configured size.
FIRST_TRIED = 128
COMPOSER = "Composer's rule"

Row = dict[str, list[int]]


def rows_of(lengths: str) -> list[Row]:
    draw = random.Random(0)
    rows = []
    for _ in range(NUM_ROWS):
        length = 64
        if lengths == "varying":
            length = min(256, max(4, round(draw.lognormvariate(3.2, 0.9))))
        tokens = [draw.randrange(VOCABULARY) for _ in range(length)]
        rows.append({"input_ids": tokens, "labels": tokens})
    return rows


def collate(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {
        "input_ids": torch.zeros(len(rows), longest, dtype=torch.long),
        "labels": torch.full((len(rows), longest), -100),
        "attention_mask": torch.zeros(len(rows), longest, dtype=torch.long),
    }
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        batch["input_ids"][number, :length] = torch.tensor(row["input_ids"])
        batch["labels"][number, :length] = torch.tensor(row["labels"])
        batch["attention_mask"][number, :length] = 1
    return batch


class Began(Exception):
    """Raised at the first step of training, to end the run."""


@dataclass
class Search:
    """The trials of a search, and the state at the start of training after it.

    Attributes:
        found: rows of a batch.
        trials: rows of each trial, and whether it fitted.
        steps: of runs that ran out of memory and began again.
        beginning: checksums of what training begins with, by name.
    """

    found: int = 0
    trials: list[tuple[int, bool]] = field(default_factory=list)
    steps: int = 0
    beginning: dict[str, str] = field(default_factory=dict)
    stops_there: bool = False

    def begin_trial(self, rows: int) -> None:
        self.trials.append((rows, True))
        self.beginning = {}

    def run_out(self) -> None:
        if self.trials:
            self.trials[-1] = (self.trials[-1][0], False)

    def watch(
        self,
        model: nn.Module,
        optimizer: Callable[[], Any],
        is_trial: Callable[[], bool] = lambda: False,
    ) -> None:
        """Compute the checksums when the first step of training runs the model."""

        def look(module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
            if self.beginning or is_trial():
                return
            weights = [parameter.detach() for parameter in module.parameters()]
            gradients = [
                parameter.grad for parameter in module.parameters() if parameter.grad is not None
            ]
            states = [
                value.detach()
                for state in optimizer().state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            ]
            self.beginning = {
                "weights": checksum(weights),
                "gradients": checksum(gradients),
                "optimizer": checksum(states),
                "random numbers": checksum([torch.get_rng_state()]),
                "first rows": checksum([inputs["input_ids"]]),
            }
            if self.stops_there:
                raise Began

        model.register_forward_pre_hook(look, with_kwargs=True)


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        # A gradient of zeros is that of a model without one.
        if tensor.any():
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:12]


class Budget(MemoryTracker):
    """Counts live bytes; one above the budget raises an error that peers recognize as an OOM."""

    def __init__(self, budget_bytes: int, run_out: Callable[[], None]) -> None:
        super().__init__(budget_bytes)
        self._run_out = run_out
        self._live_before = 0

    def check(self) -> None:
        before = self._live_before
        self._live_before = self.live_bytes
        # As on an accelerator, few bytes are served from blocks that are there.
        if self.live_bytes > self.budget_bytes and self.live_bytes - before > FEW_BYTES:
            self._run_out()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


class TrialsInLog(logging.Handler):
    """Takes the trials of our searches from their log."""

    def __init__(self, search: Search) -> None:
        super().__init__(logging.INFO)
        self._search = search

    def emit(self, record: logging.LogRecord) -> None:
        # A trial is logged with its number, its rows and its outcome.
        if str(record.msg).startswith("trial "):
            _, rows, outcome = record.args
            self._search.trials.append((int(rows.split()[0]), outcome == "fits"))


def new_model(dropout: float) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            attention_dropout=dropout,
        )
    )


def longest_first(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: len(row["input_ids"]), reverse=True)


@dataclass(frozen=True)
class Job:
    """Model and rows of a search.

    Attributes:
        search: receives the result.
        rows: of the dataset.
        batch_size: of a run without a search, and of ours, which leave it as it is.
        shuffles: whether rows come in a random order.
        accumulation: batches of a step.
        device_memory: memory budget of our searches; None for the memory of the machine.
        dropout: of attention.
        first_tried: first rows of a search that shrinks a configured size.
    """

    search: Search
    rows: Sequence[Row]
    batch_size: int = 1
    shuffles: bool = True
    accumulation: int = 1
    device_memory: int | None = None
    dropout: float = 0.0
    first_tried: int = FIRST_TRIED

    def loader(self, batch_size: int) -> DataLoader[Any]:
        rows: Any = self.rows
        return DataLoader(rows, batch_size=batch_size, shuffle=self.shuffles, collate_fn=collate)

    @property
    def adaptive(self) -> AdaptiveArguments:
        return AdaptiveArguments(
            micro_batch_size="auto", device_memory=self.device_memory, headroom=0.0
        )


# --- a script


def script(job: Job, method: str) -> None:
    def train(batch_size: int) -> None:
        # As in accelerate's examples, each run makes all that it needs.
        gc.collect()
        model = new_model(job.dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        job.search.watch(model, lambda: optimizer)
        num_steps = 0
        try:
            for number, batch in enumerate(job.loader(batch_size), 1):
                model(**batch).loss.backward()
                if number % job.accumulation:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                num_steps += 1
        except torch.OutOfMemoryError:
            job.search.steps += num_steps
            raise

    def attempt(batch_size: int) -> int:
        job.search.begin_trial(batch_size)
        train(batch_size)
        return batch_size

    if method == "plain":
        train(job.batch_size)
    elif method == "accelerate":
        search = find_executable_batch_size(attempt, starting_batch_size=job.first_tried)
        job.search.found = search()
    elif method == COMPOSER:
        job.search.found = train_by_composers_rule(job)
    else:
        model = new_model(job.dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        worst = longest_first(job.rows)
        job.search.found = find_max_batch_size(
            model,
            optimizer,
            lambda batch: model(**batch).loss.backward(),
            lambda count: collate(worst[:count]),
            device_memory=job.device_memory,
            headroom=0.0,
            maximum=len(job.rows),
        ).max_batch_size
        job.search.watch(model, lambda: optimizer)
        model(**next(iter(job.loader(job.batch_size))))


def train_by_composers_rule(job: Job) -> int:
    """Train by the rule of Composer's automatic micro-batches, which themselves need a GPU, and a
    PyTorch below 2.7.1; written after ``Trainer._train_batch`` and
    ``_adjust_device_train_microbatch_size`` of
    https://github.com/mosaicml/composer/blob/v0.32.1/composer/trainer/trainer.py

    A micro-batch begins with all rows of the batch. After an OOM, gradients are cleared and the
    batch is repeated with half as many rows. An OOM with one row is an error.

    Returns:
        The rows of a micro-batch at the end of the epoch.
    """
    model = new_model(job.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.search.watch(model, lambda: optimizer)

    def accumulates(batch: dict[str, torch.Tensor], at_once: int) -> bool:
        """Return whether the micro-batches of a batch fit; then their gradients are present."""
        num_rows = len(batch["input_ids"])
        try:
            for start in range(0, num_rows, at_once):
                part = {name: values[start : start + at_once] for name, values in batch.items()}
                (model(**part).loss * len(part["input_ids"]) / num_rows).backward()
        except torch.OutOfMemoryError:
            return False
        return True

    at_once = job.first_tried
    job.search.begin_trial(at_once)
    is_first_batch = True
    for batch in job.loader(FIRST_TRIED):
        while not accumulates(batch, at_once):
            if at_once == 1:
                raise torch.OutOfMemoryError("one row at a time does not fit")
            at_once //= 2
            optimizer.zero_grad()
            gc.collect()
            if is_first_batch:
                job.search.begin_trial(at_once)
            else:
                job.search.trials.append((at_once, True))
        optimizer.step()
        optimizer.zero_grad()
        is_first_batch = False
    return at_once


# --- Trainer


class CountedTrainer(Trainer):
    search: Search

    def _inner_training_loop(self, batch_size: int, *args: Any, **given: Any) -> Any:
        self.search.begin_trial(batch_size)
        self.search.found = batch_size
        try:
            return super()._inner_training_loop(batch_size, *args, **given)
        except torch.OutOfMemoryError:
            self.search.steps += self.state.global_step
            raise


def trainer(job: Job, method: str) -> None:
    model = new_model(job.dropout)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=(
                job.first_tried if method == "auto_find" else job.batch_size
            ),
            auto_find_batch_size=method == "auto_find",
            num_train_epochs=1,
            max_steps=1 if method == "ours" else -1,
            gradient_accumulation_steps=job.accumulation,
            train_sampling_strategy="random" if job.shuffles else "sequential",
            optim="adamw_torch",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        given: dict[str, Any] = {
            "model": model,
            "args": arguments,
            "train_dataset": [*job.rows],
            "data_collator": collate,
        }
        if method == "ours":
            ours = AdaptiveTrainer(adaptive=job.adaptive, **given)
            ours.remove_callback(PrinterCallback)
            # Before its first step there is a search, and no training.
            job.search.watch(
                model,
                lambda: ours.optimizer,
                lambda: ours.adaptive_step is None or ours.adaptive_step.is_trial,
            )
            ours.train()
            assert ours.adaptive_step is not None
            job.search.found = ours.adaptive_step.max_batch_size or 0
            return
        theirs = CountedTrainer(**given)
        job.search.watch(model, lambda: theirs.optimizer)
        theirs.remove_callback(PrinterCallback)
        theirs.search = job.search
        theirs.train()


# --- Lightning


class Module(pl.LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = new_model(job.dropout)
        self.batch_size = job.batch_size
        self.searches = False
        self._job = job

    def train_dataloader(self) -> DataLoader[Any]:
        return self._job.loader(self.batch_size)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.searches and not batch_idx:
            self._job.search.begin_trial(self.batch_size)
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def lightning(job: Job, method: str) -> None:
    module = Module(job)
    callback = AdaptiveCallback(job.adaptive)
    searches_by_itself = method in ("power", "binsearch")
    with tempfile.TemporaryDirectory() as folder:
        fitter = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            max_steps=-1 if method == "plain" else 1,
            accumulate_grad_batches=job.accumulation,
            callbacks=[callback] if method == "ours" else [],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        if searches_by_itself:
            module.searches = True
            job.search.found = Tuner(fitter).scale_batch_size(module, mode=method) or 0
            module.searches = False
        job.search.beginning = {}
        job.search.watch(
            module.model,
            lambda: fitter.optimizers[0],
            lambda: method == "ours" and (callback.step is None or callback.step.is_trial),
        )
        fitter.fit(module)
    if method == "ours":
        assert callback.step is not None
        job.search.found = callback.step.max_batch_size or 0


# --- the table

PROGRAMS: dict[str, Callable[[Job, str], None]] = {
    "script": script,
    "Trainer": trainer,
    "Lightning": lightning,
}
SEARCHES = (
    ("script", "accelerate"),
    ("script", COMPOSER),
    ("script", "ours"),
    ("script", "ours, blind"),
    ("Trainer", "auto_find"),
    ("Trainer", "ours"),
    ("Trainer", "ours, blind"),
    ("Lightning", "power"),
    ("Lightning", "binsearch"),
    ("Lightning", "ours"),
    ("Lightning", "ours, blind"),
)


@cache
def true_maximum(
    program: str, lengths: str, budget_mib: int, accumulation: int, dropout: float
) -> int:
    """Return the most rows that two steps of the longest fit with, by bisection."""
    worst = longest_first(rows_of(lengths))

    def fits(rows: int) -> bool:
        job = Job(
            Search(),
            worst[:rows] * (2 * accumulation),
            batch_size=rows,
            shuffles=False,
            accumulation=accumulation,
            dropout=dropout,
        )
        try:
            with Budget(budget_mib * MIB, lambda: None):
                PROGRAMS[program](job, "plain")
        except torch.OutOfMemoryError:
            return False
        finally:
            gc.collect()
        return True

    low, high = 0, NUM_ROWS + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def measured(
    program: str, method: str, lengths: str, budget_mib: int, *, dropout: float = 0.0
) -> dict[str, Any]:
    """Run one search under one budget, and compare the start of training after it."""
    rows = rows_of(lengths)
    is_ours = method.startswith("ours")
    search = Search()
    told = budget_mib * MIB if method == "ours" else None
    handler = TrialsInLog(search)
    log = logging.getLogger("adaptive_batch")
    if is_ours:
        log.addHandler(handler)
    run_out = (lambda: None) if is_ours else search.run_out
    try:
        with Budget(budget_mib * MIB, run_out):
            job = Job(search, rows, device_memory=told, dropout=dropout)
            PROGRAMS[program](job, method.split(",")[0])
    except torch.OutOfMemoryError:
        # A first step that does not fit after its search.
        pass
    finally:
        log.removeHandler(handler)
        gc.collect()
    if is_ours and (search.found, True) not in search.trials:
        raise AssertionError(f"{search.found} rows were not tried: {search.trials}")
    # A part runs with the gradients of earlier parts in memory; a script's whole batch does not.
    runs_parts = method == COMPOSER or (is_ours and program != "script")
    plain = Search(stops_there=True)
    with contextlib.suppress(Began):
        plain_job = Job(
            plain,
            rows,
            batch_size=1 if is_ours else search.found,
            dropout=dropout,
            first_tried=search.found,
        )
        PROGRAMS[program](plain_job, COMPOSER if method == COMPOSER else "plain")
    differs = [
        name for name, value in plain.beginning.items() if search.beginning.get(name) != value
    ]
    return {
        "program": program,
        "search": method,
        "lengths": lengths,
        "budget_mib": budget_mib,
        "found": search.found,
        "true": true_maximum(program, lengths, budget_mib, 2 if runs_parts else 1, dropout),
        "trials": search.trials,
        "out_of_memory": sum(not fits for _, fits in search.trials),
        "steps_thrown_away": search.steps,
        "begins_alike": not differs,
        "differs": differs,
    }


def be_quiet() -> None:
    """Silence the libraries, and log our trials without printing them."""
    logging.getLogger("adaptive_batch").setLevel(logging.INFO)
    logging.getLogger("adaptive_batch").propagate = False
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def main() -> None:
    parser = harness.parser(__doc__, quick="one budget")
    arguments = parser.parse_args()
    be_quiet()
    table = harness.Table(
        "lengths:<9 budget_mib:>10 program:<10 search:<16 found:>5 true:>5 trials:>6"
        " out_of_memory:>13 steps_thrown_away:>17 begins_alike:>12"
    )
    results = []
    for lengths in ("equal", "varying"):
        for budget_mib in BUDGETS_MIB[:1] if arguments.quick else BUDGETS_MIB:
            for program, method in SEARCHES:
                row = measured(program, method, lengths, budget_mib)
                results.append(row)
                alike = "yes" if row["begins_alike"] else "no"
                table.print(row, trials=len(row["trials"]), begins_alike=alike)
    harness.write("search_in_trainers", arguments.output, results=results)


if __name__ == "__main__":
    main()
