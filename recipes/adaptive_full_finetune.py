"""Full fine-tuning on one device or many, with a batch size that is known: found before training,
grown during it.

    tune run adaptive_full_finetune --config NAME use_maximum_batch_size=True
    tune run --nproc_per_node 8 adaptive_full_finetune --config NAME use_maximum_batch_size=True

Everything of torchtune's `full_finetune_single_device` and `full_finetune_distributed` works as it
does there, with the same keys; any config of those recipes runs unchanged. The keys that are ours
are in docs/configuration.md.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch.utils.data import DataLoader
from torchtune import training
from torchtune.recipe_interfaces import FTRecipeInterface
from torchtune.training import PROFILER_KEY

from adaptive_batch import distributed
from adaptive_batch.data import Batches, PlannedRows
from adaptive_batch.distributed import Preemption, Watchdog, raising_on_request
from adaptive_batch.torchtune import (
    Data,
    FullModel,
    Job,
    LimitFinder,
    LostRun,
    NextTokens,
    ResumedRun,
    RunProfiler,
    RunStore,
    Saver,
    Settings,
    StepTally,
    Task,
    Trainer,
    TrainingLog,
    TrainingPreview,
    Validation,
    all_ranks,
    build_rate,
    check_output_dir,
    check_scheduler,
    couple_batch,
    interruptible,
    run_recipe,
    show_details,
    without_effect,
)
from adaptive_batch.training import RankReport

log = logging.getLogger("adaptive_batch")


class AdaptiveFullFinetuneRecipe(FTRecipeInterface):
    """Full fine-tuning of a transformer. With several ranks each of them runs this, and all decide
    alike.

    Args:
        cfg: the configuration: YAML and key=value.
        builder: builds the model; None for full fine-tuning.
        task: what a row is and what is learned from it.
        watch: the watchdog of this rank, of several.

    Raises:
        SettingError: a setting cannot be used; nothing has been loaded or written yet.
    """

    def __init__(
        self,
        cfg: DictConfig,
        builder: FullModel | None = None,
        *,
        task: type[Task] = NextTokens,
        watch: Watchdog | None = None,
    ) -> None:
        self.cfg = cfg
        self.watch = watch
        self.settings = Settings.from_config(cfg)
        self.without_effect = without_effect(self.settings, cfg)
        self.job = Job(cfg, self.settings, builder, task=task)
        self.device = self.job.device
        self.seed = training.set_seed(
            seed=cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None)
        )
        self.preemption = Preemption(same_within=10.0 if watch else 0.0)
        self.closing = ExitStack()
        self._what_is_resumed_from: Callable[[], str] = lambda: (
            "nothing is changed yet; start it again"
        )

    # --- setup

    def setup(self) -> None:
        """Build everything in an order that refuses mistakes before weights load, then find the
        bound.
        """
        check_output_dir(self.cfg.output_dir)
        self.profiler = RunProfiler(self.cfg.get(PROFILER_KEY, None), self.device)
        self._setup_data()
        if self.settings.preview:
            text = self.preview.alone(self.limit_finder, self.sizers.training)
            if distributed.is_rank_zero():
                print(*self.without_effect.values(), text, sep="\n")
            return
        self._setup_log()
        self._setup_model()
        self._setup_steps()
        self._setup_rate()

    def _setup_data(self) -> None:
        """Read the data and the checkpoint that is resumed from, and check all that needs no
        weights.
        """
        settings = self.settings
        job = self.job
        self.data = data = Data.read(job)
        self.log = TrainingLog(job, data)
        self.closing.callback(self.log.close)
        self.store = RunStore(
            self.cfg, settings, keeps_base=job.builder.keeps_base, on_failure=self.log.failed_save
        )
        self._what_is_resumed_from = self.store.after_end
        self.resumed = ResumedRun(job, data, self.store.found, seed=self.seed)
        data.check_rows()
        self.sizers = data.sizers(self.log.limit_change)
        self.batches = Batches(
            data.dataset,
            job.batching(
                seed=self.resumed.seed, max_steps_per_epoch=self.resumed.max_steps_per_epoch
            ),
            self.sizers.training,
            counts_tokens=settings.rate.lr_clock.counts_tokens,
            event=self.log.event,
        )
        self.batches.resume(
            self.resumed.progress,
            self.resumed.state_of("steps"),
            keeps_batch=self.resumed.keeps_batch,
        )
        # A step has any number of rows, and its batches are collated when they are cut.
        self.loader: DataLoader[Any] = DataLoader(
            data.dataset, batch_sampler=self.batches, collate_fn=list
        )
        self.saver = Saver(job, self.store, self.resumed, self.batches, self.log, self.preemption)
        self.lost = None
        if not settings.preview:
            self.lost = LostRun.of(job, data, self.resumed)
        self.limit_finder = LimitFinder(
            job, data, lost=self.lost, watch=self.watch, event=self.log.event
        )
        if settings.searches:
            self.limit_finder.check()
        check_scheduler(self.cfg)
        couple_batch(job, self.batches)
        self.preview = TrainingPreview(job, self.batches, self.resumed)
        self.preview.check()

    def _setup_log(self) -> None:
        self.store.begin(self.resumed.name)
        self.log.open()
        self.log.starts(self.resumed, replaces=self.store.replaces)
        self.log.changes(self.resumed, without_effect=self.without_effect)

    def _setup_model(self) -> None:
        """Load weights and optimizer, and find what fits."""
        job = self.job
        data = self.data
        assert self.lost is not None
        if self.watch:
            self.watch.call_at_end(
                partial(
                    self.lost.write_down,
                    event=self.log.event,
                    conditions=self.sizers.training.conditions,
                )
            )
        self.trainer = trainer = Trainer.load(job, data, self.store, self.sizers)
        self.store.check(trainer, job.builder.num_bytes_saved(trainer.model, self.cfg))
        self.saver.keep("limits", self.sizers.training)
        if self.sizers.reference is not None:
            self.saver.keep("reference_limits", self.sizers.reference)
        if self.device.type != "cpu" and distributed.is_rank_zero():
            training.log_memory_stats(training.get_memory_stats(device=self.device))
        if self.resumed.saved:
            self.store.load_optimizer(trainer)
            self.resumed.change_optimizer(trainer.optimizers)
            self.saver.export_missing(trainer)
        self.limit_finder.begin(trainer, self.batches, self.resumed)
        self.validation = None
        if self.settings.validation.is_on:
            self.validation = Validation(job, data, trainer, self.limit_finder, self.log)

    def _setup_steps(self) -> None:
        """Plan the epoch, and look ahead at what comes after it."""
        self.batches.begin_epoch()
        self.log.too_short()
        self.ahead = self.preview.plan_remaining()
        self.tally = StepTally(
            self.job,
            self.trainer,
            self.log,
            self.saver,
            remedy=self.store.after_end,
            full_batch_rows=self.ahead.full_batch_rows,
        )

    def _setup_rate(self) -> None:
        rate = build_rate(
            self.job,
            self.trainer.optimizers,
            total_steps=self.ahead.schedule_steps,
            saved=self.resumed.state_of("learning_rate"),
        )
        self.rate = self.saver.keep("learning_rate", rate)
        if self.resumed.saved:
            self.log.whose_rate(self.rate.base)
        self._log_epoch()
        self.log.rate_and_stages(self.rate, self.preview, self.ahead, self.resumed.saved)
        self.trainer.record_collectives()

    # --- training

    def train(self) -> None:
        """Every epoch: grow, step through its rows, save."""
        if self.settings.preview:
            return
        if self.cfg.compile:
            log.info("the model is compiled in its first forward: expect a slow first step")
        # Searches have compiled for trials, and what they compiled is forgotten.
        self.trainer.engine.compilations.forget()
        self.profiler.start()
        first_epoch = self.batches.progress.epoch
        epochs = self.settings.epochs
        if first_epoch >= epochs:
            message = f"nothing to train: {first_epoch} epochs are done and epochs={epochs}"
            self.log.event("nothing_to_train", message)
        with self.preemption:
            for epoch in range(first_epoch, epochs):
                self.data.dataset.expect([])
                if epoch == first_epoch:
                    batches = self.resumed.begin_reading(self.loader, self.batches.progress)
                else:
                    self.batches.begin_epoch()
                    self._log_epoch()
                    batches = iter(self.loader)
                self._train_epoch(batches)
                self.tally.end_epoch(self.batches)
                self.batches.end_epoch()
                self.save_checkpoint(epoch=epoch)
        self.store.close()
        if first_epoch < epochs:
            self.log.ends(self.batches.progress)
        self.profiler.stop()

    def _train_epoch(self, batches: Iterator[list[Any]]) -> None:
        """Step through what is left of the epoch.

        Args:
            batches: rows of each step.
        """
        batches = self.log.progress_bar(
            batches, total=self.batches.plan.steps, done=self.batches.progress.epoch_steps
        )
        for rows in batches:
            step = self.batches.oldest
            self.data.dataset.expect(step.following)
            self._prepare(step, rows)
            size = self.batches.size_of_step(step, rows, in_tokens=self.rate.counts_tokens)
            rates = self.rate.apply(step.progress, batch=size)
            report = RankReport(
                batch_size=self.batches.batch_size,
                num_rows=len(step.numbers),
                requested=step.progress.batch,
                ends=self.preemption.requested,
            )
            # Forward and backward of all micro-batches; the gradients are clipped.
            result = self.trainer.engine.run(
                rows, report, measures_noise=self.tally.measures_noise(step)
            )
            if not self.tally.drops(step, result, lr=rates["lr"]):
                self.trainer.step()
            measured = self.tally.add(step, result)
            progress = self.batches.done(tokens=result.tokens, ends_epoch=False, **measured)
            self.log.step(
                result,
                progress,
                rates=rates,
                numbers=step.numbers,
                num_out_of_memory=self.sizers.training.num_out_of_memory,
                full_batch_loss=self.tally.full_batch_loss,
            )
            if self.validation:
                self.validation.run_where_due(progress.steps)
            self.profiler.end_step()
            self.trainer.engine.compilations.log_new(self.log.event)
            self.saver.save_where_due(self.trainer, ends=result.ends)

    def _prepare(self, step: PlannedRows, rows: list[Any]) -> None:
        """Do what comes before a step: try rows longer than any before, notify the watchdog."""
        self.profiler.begin_step(step.progress)
        # Several ranks try the longest row of all when they begin.
        if distributed.world_size() == 1:
            self.limit_finder.try_longer(self.trainer, self.batches, rows)
        if self.watch:
            self.watch.beat(f"step {step.progress.steps + 1}")

    def _log_epoch(self) -> None:
        self.log.epoch(self.batches, self.rate)

    # --- checkpoints

    def save_checkpoint(self, epoch: int) -> None:
        """Save the weights and, unless training is done, all that resuming needs; end here if that
        was asked for.
        """
        self.saver.save_epoch(self.trainer, epoch=epoch)

    def after_end(self) -> str:
        """Return what is resumed from if this is ended now, as the end of a sentence."""
        return self._what_is_resumed_from()

    def cleanup(self) -> None:
        """Close the logs, if they were opened."""
        self.closing.close()


def main(
    cfg: DictConfig, builder: FullModel | None = None, *, task: type[Task] = NextTokens
) -> None:
    """Run one configuration, on the ranks that were launched.

    Args:
        cfg: the configuration: YAML and key=value.
        builder: builds the model; None for full fine-tuning.
        task: what a row is and what is learned from it.
    """
    recipe = None
    try:
        with all_ranks(cfg) as watch:
            show_details(cfg, recipe_name=Path(sys.argv[0]).stem)
            recipe = AdaptiveFullFinetuneRecipe(cfg, builder, task=task, watch=watch)
            with interruptible(recipe.after_end):
                with raising_on_request():
                    recipe.setup()
                recipe.train()
    finally:
        if recipe:
            recipe.cleanup()


def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe: YAML first, then key=value from the command line over it."""
    main(cfg)


if __name__ == "__main__":
    run_recipe(recipe_main)
