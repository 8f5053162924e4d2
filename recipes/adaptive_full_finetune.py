"""Full fine-tuning on one or more devices, with the largest batch size that fits and batches that
grow.

    tune run adaptive_full_finetune --config NAME use_maximum_batch_size=True
    tune run --nproc_per_node 8 adaptive_full_finetune --config NAME use_maximum_batch_size=True

Any config of torchtune's `full_finetune_single_device` and `full_finetune_distributed` runs
unchanged. docs/configuration.md describes the additional keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from omegaconf import DictConfig
from torch.utils.data import DataLoader
from torchtune import training
from torchtune.recipe_interfaces import FTRecipeInterface

from adaptive_batch.data import Batches
from adaptive_batch.distributed import Watchdog
from adaptive_batch.schedules import NoiseScale
from adaptive_batch.torchtune import (
    Data,
    FullModel,
    Job,
    LimitFinder,
    NextTokens,
    ResumedRun,
    RunStore,
    Saver,
    Settings,
    Task,
    Trainer,
    TrainingLog,
    TrainingPreview,
    Validation,
    build_profiler,
    build_rate,
    check_output_dir,
    check_rate,
    couple_seesaw,
    record_memory_history,
    run_recipe,
    run_training,
)
from adaptive_batch.training import FullBatchLoss, MicroBatchSizer, NonfiniteSteps, RankReport


class AdaptiveFullFinetuneRecipe(FTRecipeInterface):
    """Full fine-tuning of a transformer on this rank.

    Args:
        cfg: configuration from YAML and key=value arguments.
        builder: builder of the model; None for that of the configuration.
        task: training task, such as next-token prediction.
        watch: watchdog of this rank; None with one rank.

    Raises:
        SettingError: a setting is invalid; nothing has been loaded yet.
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
        self.job = Job(cfg, self.settings, builder, task=task)
        check_output_dir(cfg.output_dir)
        self.seed = training.set_seed(
            seed=cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None)
        )
        self.log = TrainingLog(self.job)
        # Hint of a run that is stopped before it can save.
        self._resume_hint: Callable[[], str] = lambda: "nothing has changed yet; start it again"

    # --- setup

    def setup(self) -> None:
        """Set up all objects, and search for limits. Invalid settings are refused before
        weights load.
        """
        self._setup_data()
        self._setup_steps()
        # A preview needs no weights and leaves no files.
        if self.settings.preview:
            self.preview.show(self.limit_finder)
            return
        self._setup_log()
        self._setup_model()
        self._setup_rate()

    def _setup_data(self) -> None:
        """Read the rows, find the checkpoint to resume, and check both against the settings."""
        self.data = Data.read(self.job)
        self.profiler, self.profiler_cfg = build_profiler(self.cfg)
        self.store = RunStore(self.job)
        self.resumed = ResumedRun(self.job, self.data, self.store.found, seed=self.seed)
        self.data.check_rows()

    def _setup_steps(self) -> None:
        """Set up the batches, and check everything that needs no weights."""
        # The owner of the micro-batch limit. For `auto`, _setup_model() gives it the result of a
        # search.
        self.sizer = MicroBatchSizer(
            micro_batch_size=self.settings.micro_batch_size,
            micro_batch_tokens=self.settings.micro_batch_tokens,
            layout=self.data.configured_layout,
            memory=self.job.memory,
            on_change=self.log.limit_change,
        )
        # The owner of progress and of the batch size: the configured one, or the checkpoint's.
        self.batches = Batches(
            self.data.dataset,
            self.resumed.batching,
            self.sizer,
            counts_tokens=self.settings.lr_clock == "tokens",
            event=self.log.event,
        )
        self.batches.resume(
            self.resumed.progress,
            self.resumed.state_of("steps"),
            keeps_batch=self.resumed.keeps_batch,
        )
        check_rate(self.job)
        # `batch_size_schedule=seesaw` follows the decay of the learning rate.
        couple_seesaw(self.job, self.batches)
        # Batches grow, so the loader returns lists of rows; each micro-batch is collated later.
        self.loader: DataLoader[Any] = DataLoader(
            self.data.dataset, batch_sampler=self.batches, collate_fn=list
        )
        self.limit_finder = LimitFinder(self.job, self.data, event=self.log.event)
        if self.settings.searches:
            self.limit_finder.check()
        self.preview = TrainingPreview(self.job, self.batches, self.sizer, self.resumed)
        self.preview.check()

    def _setup_log(self) -> None:
        """Begin the run in its output folder: from here on, it leaves files."""
        self.saver = Saver(
            self.job,
            self.store,
            self.resumed,
            self.batches,
            self.log,
            # A scheduler may signal all processes, and torchrun forwards its own signal: each rank
            # may get the same request twice.
            same_within=10.0 if self.watch else 0.0,
        )
        self._resume_hint = self.saver.resume_hint
        num_rows = len(self.data.dataset)
        self.log.start(self.resumed, num_rows=num_rows, replaces=self.saver.replaces)
        lost = self.limit_finder.lost
        lost.begin()
        # If this rank fails, record the limit or the trial that failed. The next attempt begins
        # below it.
        if self.watch:
            self.watch.on_end = partial(lost.write_down, conditions=self.sizer.conditions)

    def _setup_model(self) -> None:
        """Load weights and optimizer, and search for limits."""
        self.trainer = Trainer.load(self.job, self.data, self.store.weights, self.sizer)
        self.saver.check(self.trainer)
        # find_limits() below restores them from the checkpoint.
        self.saver.register("limits", self.sizer)
        if self.trainer.reference_sizer is not None:
            self.saver.register("reference_limits", self.trainer.reference_sizer)
        if self.resumed.saved:
            self.store.load_optimizer(self.trainer)
            self.resumed.change_optimizer(self.trainer.optimizers)
            self.saver.export_missing(self.trainer)
        # Search for `use_maximum_batch_size` and `auto`: set the batch size and the limit.
        self.limit_finder.find_limits(self.trainer, self.batches, self.resumed)
        self.validation = None
        if self.settings.validates:
            self.validation = Validation(self.job, self.data, self.trainer, self.log)

    def _setup_rate(self) -> None:
        """Plan the first epoch, and schedule the learning rate over the remaining steps."""
        self.batches.begin_epoch()
        remaining = self.preview.plan_remaining()
        # Each has a state that a resumed run continues with.
        nonfinite = NonfiniteSteps(
            self.settings.on_nonfinite_loss,
            self.trainer.engine.drop_gradients,
            event=self.log.event,
            is_taken=self.settings.optimizer_in_bwd,
            remedy=self.saver.resume_hint,
        )
        self.nonfinite = self.saver.restore("nonfinite", nonfinite)
        full_batch_loss = FullBatchLoss(remaining.full_batch_rows)
        self.full_batch_loss = self.saver.restore("full_batch_loss", full_batch_loss)
        self.noise_scale = self.saver.restore("noise_scale", NoiseScale())
        rate = build_rate(
            self.job,
            self.trainer.optimizers,
            total_steps=remaining.schedule_steps,
            saved=self.resumed.state_of("learning_rate"),
        )
        self.rate = self.saver.register("learning_rate", rate)
        self.log.epoch(self.batches, self.rate)
        self.log.rate_and_stages(self.rate, self.preview, remaining)
        self.trainer.record_collectives()

    # --- training

    def train(self) -> None:
        """Train all epochs: grow the batch, run the steps, save."""
        if self.settings.preview:
            return
        self.profiler.start()
        first_epoch = self.batches.progress.epoch
        epochs = self.settings.epochs
        if first_epoch >= epochs:
            message = f"nothing to train: {first_epoch} epochs are done and epochs={epochs}"
            self.log.event("nothing_to_train", message)
        # Within this context, SIGTERM, SIGHUP and Ctrl-C only set `preemption.requested`: the
        # current step is finished and saved.
        with self.saver.preemption, self.saver.adding_resume_hint():
            for epoch in range(first_epoch, epochs):
                if epoch == first_epoch:
                    # _setup_rate() has planned it. Start where the checkpoint ended, with its
                    # random state.
                    steps = self.resumed.begin_reading(self.loader, self.batches.progress)
                else:
                    # Ask `batch_increase_function`, order the rows and divide them into steps.
                    self.batches.begin_epoch()
                    self.log.epoch(self.batches, self.rate)
                    steps = iter(self.loader)
                for rows in self.log.progress_bar(steps, self.batches):
                    self._train_step(rows)
                self.log.end_epoch(self.batches)
                # End the run if all steps of the epoch were skipped.
                self.nonfinite.end_epoch(self.batches.progress)
                # Count the epoch as done: the next one begins at row 0.
                self.batches.end_epoch()
                # Save a checkpoint unless training is done, and export the weights. If a stop was
                # requested, exit.
                self.saver.save_epoch(self.trainer, epoch=epoch)
        # Wait for an asynchronous save, so that the log ends after it.
        self.saver.close()
        if first_epoch < epochs:
            self.log.end(self.batches.progress)
        self.profiler.stop()

    def _train_step(self, rows: list[Any]) -> None:
        """Run one optimizer step on the rows of this rank."""
        # The plan of this step: its row numbers, its batch, and the progress before it. It is the
        # oldest one, since the loader may have planned later steps already.
        step = self.batches.oldest
        # Name the next step's rows to a thread, which reads them while the device is busy.
        self.data.dataset.expect(self.batches.rows_after(step))
        # At the steps that the profiler configures, start and stop torch's memory recording.
        record_memory_history(self.profiler_cfg, self.job.device, step.progress)

        # Set the scheduled learning rate, and return it as `lr_scaling` scales it for the rows or
        # tokens of the step over all ranks. A hook scales it within `optimizer.step()` only.
        size = self.batches.size_of_step(step, rows, in_tokens=self.rate.counts_tokens)
        rates = self.rate.apply(step.progress, batch=size)

        # Run forward and backward of all micro-batches, then scale and clip the gradients.
        report = RankReport(
            batch_size=step.batch_size,
            num_rows=len(step.numbers),
            requested=step.progress.batch,
            # All ranks learn of it in the step's first collective.
            stop_requested=self.saver.preemption.requested,
        )
        measures_noise = self.settings.measures_noise and self.noise_scale.is_due(
            step.progress.steps
        )
        result = self.trainer.engine.run(rows, report, measures_noise=measures_noise)
        assert result.rows == len(step.numbers)
        if result.noise is not None:
            self.noise_scale.update(result.noise)
        # With `on_nonfinite_loss=skip`, a step whose loss or gradients are not finite changes
        # nothing; with `stop`, it ends the run.
        if not self.nonfinite.drop_if_nonfinite(result, step.progress, lr=rates["lr"]):
            # Run `optimizer.step()` and `zero_grad()`.
            self.trainer.step()

        # Only now do the rows count as trained; a checkpoint resumes after them. The noise scale
        # may set the next batch. train() ends the epoch.
        progress = self.batches.done(tokens=result.tokens, noise_scale=self.noise_scale.value)
        # The mean loss of a full batch if this step completes one; it does not depend on the batch
        # size.
        full_batch_loss = self.full_batch_loss.add(
            result.loss, label_tokens=float(result.num_labels), rows=result.rows
        )
        self.log.step(
            result,
            progress,
            rates=rates,
            numbers=step.numbers,
            num_out_of_memory=self.sizer.num_out_of_memory,
            full_batch_loss=full_batch_loss,
        )
        if self.validation:
            self.validation.run_where_due(progress.steps)
        self.profiler.step()
        # Save every `save_every_n_steps` steps. If a stop was requested, save and exit.
        self.saver.save_where_due(self.trainer, stop_requested=result.stop_requested)

    # --- end

    def resume_hint(self) -> str:
        """Return how a run that ends now can be resumed, for its final message."""
        return self._resume_hint()

    def cleanup(self) -> None:
        """Close the logs if they are open."""
        self.log.close()


def main(
    cfg: DictConfig, builder: FullModel | None = None, *, task: type[Task] = NextTokens
) -> None:
    """Run one configuration on all launched ranks.

    Args:
        cfg: configuration from YAML and key=value arguments.
        builder: builder of the model; None for that of the configuration.
        task: training task, such as next-token prediction.
    """
    run_training(
        cfg, lambda watch: AdaptiveFullFinetuneRecipe(cfg, builder, task=task, watch=watch)
    )


def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe; key=value arguments override the YAML config."""
    main(cfg, FullModel())


if __name__ == "__main__":
    run_recipe(recipe_main)
