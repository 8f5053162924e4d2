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
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config, training
from torchtune.recipe_interfaces import FTRecipeInterface
from torchtune.training import PROFILER_KEY

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import PlannedRows, RowReader, StepPlanner, StepQueue
from adaptive_batch.distributed import End, Preemption, Watchdog, raising_on_request
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import NoiseScale
from adaptive_batch.torchtune import (
    BoundFinder,
    Checkpoints,
    Data,
    EpochCounts,
    Job,
    LimitFinder,
    LostRun,
    ModelBuilder,
    NextTokens,
    ResumedRun,
    RunSaver,
    Settings,
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
    instantiate,
    interruptible,
    set_up_process,
    settings_name,
    show_details,
    use_shipped_config,
    without_effect,
)
from adaptive_batch.training import (
    FullBatchLoss,
    LimitChange,
    NonfiniteSteps,
    Question,
    StepResult,
)

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
        builder: ModelBuilder | None = None,
        *,
        task: type[Task] = NextTokens,
        watch: Watchdog | None = None,
    ) -> None:
        self.cfg = cfg
        self.watch = watch
        self.settings = Settings.from_config(cfg)
        self.without_effect = without_effect(self.settings, cfg, ranks=distributed.world_size())
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
        self._setup_profiler(self.cfg.get(PROFILER_KEY, None))
        self._setup_data()
        if self.settings.preview:
            text = self.preview.alone(
                self.resumed.progress,
                bounds=self.bounds,
                saved=self.resumed.saved,
                resumes=self.resumed.keeps_batch,
            )
            if distributed.is_rank_zero():
                print(
                    *self.without_effect,
                    *(message for _, message, _ in self.resumed.changes()),
                    text,
                    sep="\n",
                )
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
        self.checkpoints = Checkpoints(
            self.cfg, settings, keeps_base=job.builder.keeps_base, on_failure=self.log.failed_save
        )
        self._what_is_resumed_from = self.checkpoints.after_end
        self.resumed = ResumedRun(job, data, self.checkpoints, seed=self.seed)
        data.check_rows()
        batching = data.batching(
            seed=self.resumed.seed, max_steps_per_epoch=self.resumed.max_steps_per_epoch
        )
        by_tokens = settings.lr_clock.counts_tokens
        self.sizer = data.new_sizer(self.log.limit)
        planner = StepPlanner(
            data.dataset,
            batching,
            self.sizer,
            ranks=job.ranks,
            counts_tokens=by_tokens,
            event=self.log.event,
        )
        self.queue = StepQueue(planner)
        self.saver = RunSaver(
            job, self.checkpoints, self.resumed, self.queue, self.log, self.preemption
        )
        self.planner = self.saver.add("steps", planner)
        self.reader = RowReader(data.dataset)
        self.lost = None
        if not settings.preview:
            self.lost = LostRun(
                job,
                name=self.resumed.name,
                resumes=bool(self.resumed.saved),
                trials_name=settings_name(job, data),
            )
        self.bounds = BoundFinder(job, data, lost=self.lost, watch=self.watch)
        if settings.searches:
            self.bounds.check()
        check_scheduler(self.cfg)
        couple_batch(job, planner)
        self.preview = TrainingPreview(job, data, planner, self.sizer)
        self.preview.check(self.resumed.progress)

    def _setup_log(self) -> None:
        self.checkpoints.begin_job(self.resumed.name)
        self.log.open()
        self.log.starts(self.checkpoints, self.resumed)
        self.log.changes(self.resumed, without_effect=self.without_effect)

    def _setup_model(self) -> None:
        """Load weights and optimizer, and find what fits."""
        job = self.job
        data = self.data
        saved = self.resumed.saved
        if self.watch:
            self.watch.call_at_end(self._write_down_end)
        reference_sizer = data.new_reference_sizer(self._log_limit_of_reference)
        self.trainer = trainer = Trainer.load(
            job, data, self.checkpoints, self.sizer, reference_sizer=reference_sizer
        )
        self.checkpoints.check_disk(job.builder.num_bytes_saved(trainer.model, self.cfg))
        nonfinite = NonfiniteSteps(
            self.settings.on_nonfinite_loss,
            drop_gradients=trainer.runner.drop_gradients,
            event=self.log.event,
            is_taken=self.settings.optimizer_in_bwd,
            remedy=self.checkpoints.after_end,
        )
        self.nonfinite = self.saver.add("nonfinite", nonfinite)
        self.counts = self.saver.add("epoch", EpochCounts(job, self.log, nonfinite))
        assert self.lost is not None
        self.limit_finder = LimitFinder(
            job, data, trainer, self.planner, self.bounds, self.log, self.lost
        )
        self.saver.keep("limits", self.sizer)
        if reference_sizer is not None:
            self.saver.keep("reference_limits", reference_sizer)
        if self.device.type != "cpu" and distributed.is_rank_zero():
            training.log_memory_stats(training.get_memory_stats(device=self.device))
        if self.checkpoints.found.recipe_state is not None:
            self.checkpoints.load_optimizer(trainer)
            self.resumed.change_optimizer(trainer.optimizers)
        keeps_batch = self.resumed.keeps_batch or (
            bool(saved) and self.settings.batch_size_schedule is not None
        )
        self.limit_finder.find(
            keeps_batch=keeps_batch,
            saved=self.resumed.state_of("limits"),
            saved_reference=self.resumed.state_of("reference_limits"),
        )
        self.validation = None
        if self.settings.validation:
            self.validation = Validation(job, data, trainer, self.bounds, self.log)

    def _log_limit_of_reference(self, change: LimitChange) -> None:
        self.sizer.count_out_of_memory(change.out_of_memory)
        self.log.limit(change, kind="reference_limit")

    def _setup_steps(self) -> None:
        """Plan the epoch, and look ahead at what comes after it."""
        saved = self.resumed.saved
        self._check_saved_maximum_fits()
        progress = self.planner.begin(self.resumed.progress)
        epoch_steps = self.planner.reference.steps
        if not saved:
            # A checkpoint of torchtune's own recipe counts epochs alone.
            progress = replace(progress, steps=progress.epoch * epoch_steps)
        self.queue.resume(progress, is_begun=True)
        self._log_what_has_no_effect(self.settings.epochs * epoch_steps)
        is_changed = bool(self.resumed.differs)
        is_changed |= saved.get("configured_batch_size") != self.settings.batch_size
        self.preview.look_ahead(self.queue.progress, saved=saved, changed=is_changed)
        self.full_batch_loss = self.saver.add(
            "full_batch_loss", FullBatchLoss(self.preview.full_batch_rows)
        )
        self.noise_scale = self.saver.add("noise_scale", NoiseScale())

    def _check_saved_maximum_fits(self) -> None:
        """Refuse a checkpoint's schedule whose largest step does not fit and cannot be split."""
        settings = self.settings
        saved_maximum = self.planner.saved_maximum
        bound = self.sizer.max_batch_size
        cannot_split = settings.optimizer_in_bwd and settings.batch_size_schedule
        if cannot_split and bound and saved_maximum > bound:
            problem = (
                f"the checkpoint's schedule may ask for {saved_maximum} rows, of which {bound} fit"
                " here, and they cannot be split"
            )
            remedy = "resume with more memory, or start again with optimizer_in_bwd=False"
            raise SettingError("optimizer_in_bwd", True, f"{problem}; {remedy}")

    def _log_what_has_no_effect(self, num_steps: int) -> None:
        """Log that a resume point, validation, metrics or the profiler have no effect where they
        are due after more steps than the run has, and that a batch of more rows than there are is
        cut to these.
        """
        settings = self.settings
        step_rows = settings.step_rows * self.job.ranks
        rows = len(self.data.dataset)
        is_fixed = not (settings.batch_tokens or settings.batch_changes or settings.grows)
        if is_fixed and step_rows > rows:
            message = f"a step of {step_rows} rows is cut to {count(rows, 'row')}"
            self.log.event("no_effect", f"{message}: the dataset has no more")
        has_steps = f"the run has {count(num_steps, 'step')}"
        validation = settings.validation
        if validation is not None and not settings.grows:
            every = validation.every_n_steps
            if every > num_steps:
                message = f"run_val_every_n_steps={every} has no effect: {has_steps}"
                self.log.event("no_effect", f"{message}, so nothing is validated")
        saves_every = settings.save_every_n_steps
        if saves_every is not None and saves_every > num_steps and not settings.grows:
            message = f"save_every_n_steps={saves_every} has no effect: {has_steps}"
            self.log.event("no_effect", f"{message}, and is saved as each epoch ends")
        logs_every = settings.log_every_n_steps
        if logs_every is not None and logs_every > num_steps and not settings.grows:
            message = f"log_every_n_steps={logs_every} has no effect: {has_steps}"
            self.log.event("no_effect", f"{message}, so no metrics are logged")
        profiler = self.profiler_cfg
        if profiler.get("enabled"):
            waits = profiler.wait_steps + profiler.warmup_steps
            if waits >= num_steps:
                message = f"profiler has no effect: {has_steps}, and it waits and warms up {waits}"
                self.log.event("no_effect", f"{message}; lower wait_steps and warmup_steps")

    def _setup_rate(self) -> None:
        trainer = self.trainer
        saved = self.resumed.saved
        rate = build_rate(
            self.job,
            trainer.optimizers,
            total_steps=self.preview.schedule_steps,
            saved=self.resumed.state_of("learning_rate"),
        )
        self.rate = self.saver.keep("learning_rate", rate)
        if self.checkpoints.found.recipe_state is not None:
            self.log.whose_rate(self.rate.base)
        self._log_epoch()
        self.log.rate_and_stages(self.rate, self.preview, self.queue.progress, saved)
        trainer.learn_collectives()

    def _setup_profiler(self, cfg_profiler: DictConfig | None) -> None:
        # Null is as good as absent.
        given = {key: value for key, value in (cfg_profiler or {}).items() if value is not None}
        block = OmegaConf.create(given or {"enabled": False})
        component = "torchtune.training.setup_torch_profiler"
        if block.get("_component_", component) != component:
            raise SettingError("profiler._component_", block._component_, f"only {component} works")
        block["_component_"] = component
        self.profiler, self.profiler_cfg = instantiate(PROFILER_KEY, block)
        if self.profiler_cfg["enabled"]:
            available = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
            if not available.intersection(self.profiler.activities):
                remedy = "nothing else can be profiled here; set it to True, or enabled to False"
                raise SettingError("profiler.cpu", block.get("cpu"), remedy)

    # --- training

    def train(self) -> None:
        """Every epoch: grow, step through its rows, save."""
        if self.settings.preview:
            return
        if self.cfg.compile:
            log.info("the model is compiled in its first forward: expect a slow first step")
        self.profiler.start()
        first_epoch = self.queue.progress.epoch
        epochs = self.settings.epochs
        if first_epoch >= epochs:
            message = f"nothing to train: {first_epoch} epochs are done and epochs={epochs}"
            self.log.event("nothing_to_train", message)
        with self.preemption:
            for epoch in range(first_epoch, epochs):
                if epoch == first_epoch:
                    self.resumed.begin_reading(self.reader, self.queue.progress)
                else:
                    self.queue.begin_epoch()
                    self._log_epoch()
                    self.reader.begin()
                self._train_epoch()
                self.counts.end_epoch(self.queue.progress, self.planner)
                self.queue.end_epoch()
                self.save_checkpoint(epoch=epoch)
        self.checkpoints.close()
        if first_epoch < epochs:
            self.log.ends(self.queue.progress)
        self.profiler.stop()

    def _train_epoch(self) -> None:
        """Step through what is left of the epoch."""
        done = self.queue.progress.epoch_steps
        with self.log.progress_bar(self.planner.plan.steps, done=done) as bar:
            began = time.perf_counter()
            for step in self.queue.steps():
                rows = self.reader.read(step.own, following=step.following)
                if self.queue.plan_again():
                    continue
                self._prepare(step, rows)
                rates = self._set_rate(step, rows)
                result = self._forward_backward(step, rows)
                if not self._drops(step, result, rates):
                    self.trainer.step()
                self.rate.restore()
                self._count(step, result)
                self._log_step(step, result, rates, seconds=time.perf_counter() - began)
                place = f"{step.progress.epoch + 1}|{self.queue.progress.steps}"
                bar.advance(f"{place}|Loss: {result.loss:.4f}")
                self._validate()
                self.profiler.step()
                self.saver.save_where_due(self.trainer)
                began = time.perf_counter()

    def _prepare(self, step: PlannedRows, rows: list[Any]) -> None:
        """Do what comes before a step: try rows longer than any before, notify the watchdog."""
        self._record_memory_history(step.progress.epoch_steps)
        # Several ranks try the longest row of all when they begin.
        if distributed.world_size() == 1:
            self.limit_finder.try_longer(rows)
        if self.watch:
            self.watch.beat(f"step {step.progress.steps + 1}")

    def _set_rate(self, step: PlannedRows, rows: list[Any]) -> dict[str, float]:
        """Scale the learning rate for a step; return the rates by name."""
        batch = self.planner.size_of_step(step, rows, in_tokens=self.rate.counts_tokens)
        return self.rate.apply(step.progress, batch=batch)

    def _forward_backward(self, step: PlannedRows, rows: list[Any]) -> StepResult:
        """Leave the gradients of a step, once all ranks agree on it."""
        runner = self.trainer.runner
        small_rows = None
        if self.settings.measures_noise and self.noise_scale.is_due(step.progress.steps):
            small_rows = step.small_rows()
        question = Question(step.progress.batch, len(step.numbers), self.preemption.requested)
        division, ends = runner.agree(rows, step.rows_at_once, question, small_rows=small_rows)
        self.saver.note_end(ends)
        return runner.run(rows, step.rows_at_once, small_rows=small_rows, division=division)

    def _drops(self, step: PlannedRows, result: StepResult, rates: dict[str, float]) -> bool:
        """Return whether the gradients of a step are dropped, as they are not finite."""
        return self.nonfinite.drops(
            result,
            step=step.progress.steps + 1,
            lr=rates["lr"],
            epoch=step.progress.epoch,
            batch_size=step.progress.batch,
            micro_batch=self.sizer.limit(step.rows_at_once),
        )

    def _count(self, step: PlannedRows, result: StepResult) -> None:
        """Count a step as done, with what it has measured."""
        num_rows = len(step.numbers)
        assert result.rows == num_rows, f"a step of {num_rows} rows trained {result.rows} of them"
        self.counts.add(result)
        if result.noise is not None:
            self.noise_scale.update(result.noise)
        measured = {"noise_scale": self.noise_scale.value} if self.settings.measures_noise else {}
        self.queue.done(tokens=result.tokens, ends_epoch=False, **measured)

    def _log_step(
        self, step: PlannedRows, result: StepResult, rates: dict[str, float], *, seconds: float
    ) -> None:
        self.log.step(
            result,
            self.queue.progress,
            rates=rates,
            seconds=seconds,
            numbers=step.numbers,
            num_out_of_memory=self.sizer.num_out_of_memory,
            full_batch_loss=self.full_batch_loss,
        )

    def _log_epoch(self) -> None:
        self.log.epoch(self.queue.progress.epoch, self.planner, self.rate)
        self.limit_finder.log_if_one_by_one()

    def _validate(self) -> None:
        """Every so many steps, the loss on the rows that are not trained on."""
        settings = self.settings.validation
        num_steps = self.queue.progress.steps
        if self.validation and settings and num_steps % settings.every_n_steps == 0:
            loss = self.validation.run()
            self.log.validation(loss, rows=self.validation.num_rows, step=num_steps)

    def _record_memory_history(self, step: int) -> None:
        """Record the CUDA allocator's history while the profiler is active in the first epoch, as
        torchtune does.
        """
        cfg = self.profiler_cfg
        records = cfg["enabled"] and cfg.get("profile_memory", False) and self.device.type == "cuda"
        if not records or self.queue.progress.epoch or not distributed.is_rank_zero():
            return
        begin = cfg["wait_steps"] + cfg["warmup_steps"]
        if step == begin:
            torch.cuda.memory._record_memory_history()
        elif step == begin + cfg["active_steps"] + 1:
            torch.cuda.memory._record_memory_history(enabled=None)

    # --- checkpoints

    def save_checkpoint(self, epoch: int) -> None:
        """Save the weights and, unless training is done, all that resuming needs; end here if that
        was asked for.
        """
        self.saver.save_epoch(self.trainer, epoch=epoch)

    def _write_down_end(self, end: End) -> None:
        """On rank zero, log why all ranks end, and keep what a restart should know."""
        self.log.event(
            "ended", end.message, prints=False, rank=end.rank, reason=end.kind, **end.facts
        )
        if self.lost is not None:
            shrinks = self.settings.on_out_of_memory == "shrink"
            self.lost.keep(end.facts, self.sizer.conditions() if shrinks else None)

    def after_end(self) -> str:
        """Return what is resumed from if this is ended now, as the end of a sentence."""
        return self._what_is_resumed_from()

    def cleanup(self) -> None:
        """Close the logs, if they were opened."""
        self.closing.close()


def main(
    cfg: DictConfig, builder: ModelBuilder | None = None, *, task: type[Task] = NextTokens
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


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe: YAML first, then key=value from the command line over it."""
    main(cfg)


if __name__ == "__main__":
    set_up_process()
    use_shipped_config(sys.argv)
    sys.exit(recipe_main())
