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
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from omegaconf import DictConfig
from torch.utils.data import DataLoader
from torchtune import training
from torchtune.recipe_interfaces import FTRecipeInterface

from adaptive_batch.distributed import Watchdog
from adaptive_batch.torchtune import (
    Data,
    FullModel,
    Job,
    LimitFinder,
    NextTokens,
    RunStore,
    Task,
    Trainer,
    TrainingLog,
    TrainingPreview,
    Validation,
    build_rate,
    run_recipe,
    run_training,
)

log = logging.getLogger("adaptive_batch")


class AdaptiveFullFinetuneRecipe(FTRecipeInterface):
    """Full fine-tuning of a transformer; each rank runs this, and all ranks decide alike.

    Args:
        cfg: the configuration: YAML and key=value.
        builder: builder of the model; None for full fine-tuning.
        task: kind of rows, and what is learned from them.
        watch: watchdog of this rank, of several.

    Raises:
        SettingError: a setting cannot be used; nothing has been loaded yet.
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
        self.job = Job.to_train(cfg, builder, task=task)
        self.settings = self.job.settings
        self.device = self.job.device
        self.seed = training.set_seed(
            seed=cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None)
        )
        self.closing = ExitStack()
        self._after_end: Callable[[], str] = lambda: "nothing is changed yet; start it again"

    # --- setup

    def setup(self) -> None:
        """Set up everything in an order that refuses mistakes before weights load, then find what
        fits.
        """
        self._setup_data()
        self._setup_steps()
        if self.settings.preview:
            self.preview.show(self.limit_finder, self.sizers.training)
            return
        self._setup_log()
        self._setup_model()
        self._setup_rate()

    def _setup_data(self) -> None:
        """Read the rows, and find the checkpoint to resume from."""
        self.data = Data.read(self.job)
        self.log = TrainingLog(self.job, self.data)
        self.closing.callback(self.log.close)
        self.profiler = self.log.profiler
        self.store = RunStore(
            self.cfg,
            self.settings,
            keeps_base=self.job.builder.keeps_base,
            on_failure=self.log.failed_save,
        )
        self._after_end = self.store.after_end
        self.resumed = self.store.resume(self.job, self.data, seed=self.seed)
        self.data.check_rows()

    def _setup_steps(self) -> None:
        """Set up the rows of each step, and check all that needs no weights."""
        self.sizers = self.data.sizers(self.log.limit_change)
        self.batches = self.resumed.batches(self.data, self.sizers.training, event=self.log.event)
        # A step has any number of rows, and its batches are collated when they are cut.
        self.loader: DataLoader[Any] = DataLoader(
            self.data.dataset, batch_sampler=self.batches, collate_fn=list
        )
        self.saver = self.store.saver(
            self.job, self.resumed, self.batches, self.log, same_within=10.0 if self.watch else 0.0
        )
        self.limit_finder = LimitFinder(
            self.job, self.data, lost=self.resumed.lost, watch=self.watch, event=self.log.event
        )
        if self.settings.searches:
            self.limit_finder.check()
        self.preview = TrainingPreview(self.job, self.batches, self.resumed)
        self.preview.check()

    def _setup_log(self) -> None:
        self.store.begin(self.resumed.name)
        self.log.open()
        self.log.starts(self.resumed, replaces=self.store.replaces)
        self.log.changes(self.resumed, without_effect=self.job.without_effect)
        if self.watch and self.resumed.lost:
            self.watch.call_at_end(
                partial(
                    self.resumed.lost.write_down,
                    event=self.log.event,
                    conditions=self.sizers.training.conditions,
                )
            )

    def _setup_model(self) -> None:
        """Load weights and optimizer, and find what fits."""
        self.trainer = Trainer.load(self.job, self.data, self.store, self.sizers)
        self.store.check(
            self.trainer, self.job.builder.num_bytes_saved(self.trainer.model, self.cfg)
        )
        self.saver.keep("limits", self.sizers.training)
        if self.sizers.reference is not None:
            self.saver.keep("reference_limits", self.sizers.reference)
        if self.resumed.saved:
            self.store.load_optimizer(self.trainer)
            self.resumed.change_optimizer(self.trainer.optimizers)
            self.saver.export_missing(self.trainer)
        self.limit_finder.begin(self.trainer, self.batches, self.resumed)
        self.validation = None
        if self.settings.validation.is_on:
            self.validation = Validation(
                self.job, self.data, self.trainer, self.limit_finder, self.log
            )

    def _setup_rate(self) -> None:
        """Plan the first epoch, and schedule the learning rate over the steps that are left."""
        self.batches.begin_epoch()
        self.log.too_short()
        ahead = self.preview.plan_remaining()
        self.monitor = self.log.monitor(
            self.trainer,
            self.saver,
            remedy=self.store.after_end,
            full_batch_rows=ahead.full_batch_rows,
        )
        rate = build_rate(
            self.job,
            self.trainer.optimizers,
            total_steps=ahead.schedule_steps,
            saved=self.resumed.state_of("learning_rate"),
        )
        self.rate = self.saver.keep("learning_rate", rate)
        if self.resumed.saved:
            self.log.whose_rate(self.rate.base)
        self.log.epoch(self.batches, self.rate)
        self.log.rate_and_stages(self.rate, self.preview, ahead, self.resumed.saved)
        self.trainer.record_collectives()

    # --- training

    def train(self) -> None:
        """Train each epoch: grow the batch, step through the rows, save."""
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
        with self.saver.preemption:
            for epoch in range(first_epoch, epochs):
                self.data.dataset.expect([])
                if epoch == first_epoch:
                    batches = self.resumed.begin_reading(self.loader, self.batches.progress)
                else:
                    self.batches.begin_epoch()
                    self.log.epoch(self.batches, self.rate)
                    batches = iter(self.loader)
                for rows in self.log.progress_bar(batches, self.batches):
                    self._train_step(rows)
                self.monitor.end_epoch(self.batches)
                self.batches.end_epoch()
                self.save_checkpoint(epoch=epoch)
        self.store.close()
        if first_epoch < epochs:
            self.log.ends(self.batches.progress)
        self.profiler.stop()

    def _train_step(self, rows: list[Any]) -> None:
        """Take one optimizer step with the rows of this rank."""
        step = self.batches.oldest
        self.data.dataset.expect(step.following)
        self.profiler.begin_step(step.progress)
        if self.watch:
            self.watch.beat(f"step {step.progress.steps + 1}")
        else:
            # Several ranks have tried the longest row of all before training.
            self.limit_finder.try_longer(self.trainer, self.batches, rows)

        # The learning rate follows schedule and batch within `optimizer.step()`.
        size = self.batches.size_of_step(step, rows, in_tokens=self.rate.counts_tokens)
        rates = self.rate.apply(step.progress, batch=size)

        # Forward and backward of all micro-batches; the gradients are scaled and clipped.
        result = self.trainer.forward_backward(
            rows,
            step,
            batch_size=self.batches.batch_size,
            ends=self.saver.preemption.requested,
            measures_noise=self.monitor.measures_noise(step),
        )
        if not self.monitor.drops(step, result, lr=rates["lr"]):
            # The optimizer's step, and zero_grad.
            self.trainer.step()

        measured = self.monitor.add(step, result)
        progress = self.batches.done(tokens=result.tokens, ends_epoch=False, **measured)
        self.log.step(
            result,
            progress,
            rates=rates,
            numbers=step.numbers,
            num_out_of_memory=self.sizers.training.num_out_of_memory,
            full_batch_loss=self.monitor.full_batch_loss,
        )
        if self.validation:
            self.validation.run_where_due(progress.steps)
        self.profiler.end_step()
        self.trainer.engine.compilations.log_new(self.log.event)
        self.saver.save_where_due(self.trainer, ends=result.ends)

    # --- checkpoints

    def save_checkpoint(self, epoch: int) -> None:
        """Save a resume point, unless training is done, and export the weights; end here if that
        was asked for.
        """
        self.saver.save_epoch(self.trainer, epoch=epoch)

    def after_end(self) -> str:
        """Return what is resumed from if this is ended now, as the end of a sentence."""
        return self._after_end()

    def cleanup(self) -> None:
        """Close the logs, if they were opened."""
        self.closing.close()


def main(
    cfg: DictConfig, builder: FullModel | None = None, *, task: type[Task] = NextTokens
) -> None:
    """Run one configuration, on the ranks that were launched.

    Args:
        cfg: the configuration: YAML and key=value.
        builder: builder of the model; None for full fine-tuning.
        task: kind of rows, and what is learned from them.
    """
    run_training(
        cfg, lambda watch: AdaptiveFullFinetuneRecipe(cfg, builder, task=task, watch=watch)
    )


def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe: YAML first, then key=value from the command line over it."""
    main(cfg)


if __name__ == "__main__":
    run_recipe(recipe_main)
