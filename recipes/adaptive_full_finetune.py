"""Full fine-tuning on one device, with a batch size that is known: found before training, grown during it.

    tune run adaptive_full_finetune --config NAME use_maximum_batch_size=True

Everything of torchtune's `full_finetune_single_device` works as it does there, with the same keys; any config of that
recipe runs unchanged. The keys that are ours are in docs/configuration.md.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from adaptive_bound import BoundSearch
from adaptive_capacity import TrainingCapacity
from adaptive_checkpoint import STATE_KEY, EpochCheckpoints
from adaptive_parts import TrainingParts, set_up_terminal, use_shipped_config
from adaptive_validation import Validation
from omegaconf import DictConfig, OmegaConf
from torchtune import config, training, utils
from torchtune.recipe_interfaces import FTRecipeInterface
from torchtune.training import PROFILER_KEY
from tqdm import tqdm

from adaptive_batch import distributed
from adaptive_batch.accumulation import StepResult
from adaptive_batch.components import load_function
from adaptive_batch.errors import SettingError
from adaptive_batch.growth import next_batch_size
from adaptive_batch.learning_rate import LearningRate, Reference, describe_unscaled
from adaptive_batch.progress import EpochPlan, Progress, schedule_clock
from adaptive_batch.report import RunRecord
from adaptive_batch.schedule import write_rate
from adaptive_batch.settings import Settings
from adaptive_batch.snapshot import RandomState
from adaptive_batch.stream import RowStream

log = utils.get_logger("INFO")


class AdaptiveFullFinetuneRecipe(FTRecipeInterface):
    """Full fine-tuning of a transformer on one device.

    Args:
        cfg: the configuration: YAML and key=value.

    Raises:
        SettingError: a setting cannot be used; nothing has been loaded or written yet.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        plain = OmegaConf.to_container(cfg, resolve=True)
        self.settings = Settings.from_config(plain)
        self.without_effect = self.settings.without_effect(plain)
        self.parts = TrainingParts(cfg, self.settings)
        self.bounds = BoundSearch(self.parts)
        self.device = self.parts.device
        self.output_dir = Path(cfg.output_dir)
        self.log_every_n_steps: int = cfg.get("log_every_n_steps") or 1
        self.log_peak_memory_stats = bool(cfg.get("log_peak_memory_stats", False)) and self.device.type != "cpu"
        if cfg.get("log_peak_memory_stats", False) and not self.log_peak_memory_stats:
            log.info("log_peak_memory_stats has no effect on a CPU")
        self.seed = training.set_seed(seed=cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
        self.max_steps_per_epoch = self.settings.max_steps_per_epoch
        self.batch_size = self.settings.batch_size
        self.first_batch_size: int | None = None
        self.continues_batch = False
        self.progress = Progress()

    # --- setup ------------------------------------------------------------------------------------------------------

    def load_checkpoint(self) -> None:
        """Find the weights, and where training stood if it is resumed."""
        self.checkpoints = EpochCheckpoints(self.cfg.checkpointer, resume=self.cfg.resume_from_checkpoint)
        state = self.checkpoints.recipe_state
        if state is None:
            return
        for name, key in (("seed", training.SEED_KEY), ("max_steps_per_epoch", training.MAX_STEPS_KEY)):
            if getattr(self, name) != state[key]:
                log.warning(
                    "%s=%s differs from the checkpoint's; going on with %s", name, getattr(self, name), state[key]
                )
                setattr(self, name, state[key])
        ours: dict[str, Any] = state.get(STATE_KEY, {})
        self.progress = Progress(**ours["progress"]) if ours else Progress(epoch=state[training.EPOCHS_KEY])
        component = str(self.cfg.optimizer._component_)
        if ours and ours["optimizer"] != component:
            raise SettingError(
                "optimizer._component_", component, f"the checkpoint's state is of {ours['optimizer']}; go on with that"
            )
        if ours and ours["optimizer_in_bwd"] != self.settings.optimizer_in_bwd:
            raise SettingError(
                "optimizer_in_bwd",
                self.settings.optimizer_in_bwd,
                f"the checkpoint's optimizer state was saved with {ours['optimizer_in_bwd']}; go on with that",
            )
        # a batch that was found or grown goes on; one that now is to be found for the first time is found
        asked_before = ours.get("use_maximum_batch_size") or not self.settings.use_maximum_batch_size
        if self.settings.batch_changes and ours.get("bound") is not None and asked_before:
            self.continues_batch = True
            self.batch_size, self.first_batch_size = ours["batch_size"], ours["first_batch_size"]

    def setup(self) -> None:
        """Build everything in an order that refuses mistakes before weights load, then find the bound."""
        settings, parts = self.settings, self.parts
        check_output_dir(self.output_dir)
        parts.build_data()
        parts.check_rows()
        self.load_checkpoint()
        validates_what_fits = settings.validation is not None and settings.validation.fits_itself
        if settings.needs_bound or validates_what_fits:
            self.bounds.check()
        self._check_scheduler()
        if settings.batch_increase_function and self.progress.epoch < settings.epochs:
            self._ask_ahead()
        self.metric_logger = config.instantiate(self.cfg.metric_logger)
        self.metric_logger.log_config(self.cfg)
        self.record = RunRecord(self.output_dir / "adaptive_batch" / "run.jsonl", enabled=distributed.is_rank_zero())
        resumed = self.checkpoints.recipe_state or {}
        self.record.decision(
            "start",
            f"{'resuming' if resumed else 'starting'} with epoch {self.progress.epoch}; {len(parts.dataset)} rows",
            resumed=bool(resumed),
            rows=len(parts.dataset),
            progress=self.progress.state_dict(),
        )
        self._say_what_changed(resumed)
        self.capacity = TrainingCapacity(parts, self.bounds, self.record)
        parts.build_model(self.checkpoints.load_weights, on_change=self.capacity.lower)
        if self.device.type != "cpu":
            training.log_memory_stats(training.get_memory_stats(device=self.device))
        parts.build_optimizer(resumed.get(training.OPT_KEY))
        if resumed:
            self._say_whose_rate()
        self.batch_size = self.capacity.find(
            self.batch_size, goes_on=self.continues_batch, saved=resumed.get(STATE_KEY, {})
        )
        self.validation = (
            Validation(parts, self.bounds, capacities=self.capacity, record=self.record)
            if settings.validation
            else None
        )
        self.stream = RowStream(
            parts.dataset,
            shuffle=self.cfg.shuffle,
            seed=0 if settings.sample_order == "dataloader" else self.seed,  # 0 is the seed of torchtune's sampler
            order=settings.sample_order,
            lengths=parts.lengths if settings.sample_order == "seqlen" else None,
            window=settings.sample_window,
        )
        self.token_batches = lru_cache(maxsize=2)(lambda epoch: parts.token_batches(self.stream.order(epoch)))
        self._begin_epoch()
        if self.first_batch_size is None:
            self.first_batch_size = self.batch_size
        self.reference = self._plan(0, self.first_batch_size)
        if self.reference.steps == 0:
            raise SettingError(
                "batch_size",
                self.batch_size,
                f"an epoch of {len(self.stream)} rows has no whole step; set drop_last=False",
            )
        every = settings.validation.every_n_steps if settings.validation else 0
        if every > settings.epochs * self.reference.steps:
            message = f"the run has {settings.epochs * self.reference.steps} steps, so nothing is validated"
            self.record.decision("no_effect", f"run_val_every_n_steps={every} has no effect: {message}")
        if not resumed.get(STATE_KEY):
            self.progress = Progress(self.progress.epoch, steps=self.progress.epoch * self.reference.steps)
        self._setup_learning_rate(resumed.get(STATE_KEY, {}))
        self._setup_profiler(self.cfg.get(PROFILER_KEY, None))
        if settings.adaptive and resumed.get(STATE_KEY):
            RandomState.from_state_dict(resumed[STATE_KEY]["random_state"], self.device).restore()
        resumed.clear()  # the optimizer has its own copy

    def _say_what_changed(self, resumed: Mapping[str, Any]) -> None:
        """One line for each setting that differs from the checkpoint's, or that has no effect."""
        before, ours = resumed.get(training.TOTAL_EPOCHS_KEY), resumed.get(STATE_KEY, {})
        if before is not None and before != self.settings.epochs:
            message = f"epochs {before} -> {self.settings.epochs}: the learning rate's schedule spans the new number"
            self.record.decision("epochs", message, before=before, after=self.settings.epochs)
        configured, saved = self.settings.batch_size, ours.get("batch_size", self.settings.batch_size)
        if configured != saved and not (self.settings.use_maximum_batch_size and not self.continues_batch):
            what = "the checkpoint's goes on" if self.continues_batch else f"the checkpoint was trained with {saved}"
            message = f"batch_size {self.batch_size}: configured is {configured}, {what}"
            self.record.decision("batch_size", message, before=saved, after=self.batch_size)
        for name, value in self._what_results_depend_on().items():
            if ours.get(name, value) != value:
                message = f"{name} {ours[name]} -> {value}: not what the checkpoint was trained with"
                self.record.decision(name, message, before=ours[name], after=value)
        if not resumed and (self.output_dir / "recipe_state").exists():
            message = f"{self.output_dir} holds an earlier run, which this one replaces epoch by epoch"
            self.record.decision(
                "replaces", f"{message}; until its first epoch is saved, resuming goes on with the earlier"
            )
        for key, reason in self.without_effect:
            self.record.decision("no_effect", f"{key} has no effect: {reason}", key=key)
        if self.settings.optimizer_in_bwd and self.cfg.get("on_out_of_memory") is None:
            message = "with the optimizer in backward a step that runs out of memory has changed some weights already"
            self.record.decision("on_out_of_memory", f"on_out_of_memory=raise: {message}, so it is not replayed")

    def _what_results_depend_on(self) -> dict[str, Any]:
        names = (
            "gradient_accumulation_steps",
            "batch_tokens",
            "sample_order",
            "sample_window",
            "min_rows_per_batch",
            "max_rows_per_batch",
            "long_rows",
        )
        settings = {name: getattr(self.settings, name) for name in names}
        return {**settings, "rows": len(self.parts.dataset), "reference_batch_size": str(self.reference_batch)}

    def _say_whose_rate(self) -> None:
        group = self.parts.optimizers[0].param_groups[0]
        configured, saved = self.cfg.optimizer.get("lr"), float(group.get("initial_lr", group["lr"]))
        if configured is not None and not math.isclose(float(configured), saved, rel_tol=1e-6):
            message = f"optimizer.lr={configured} has no effect: the checkpoint's {saved:g} goes on"
            self.record.decision("lr", message, configured=float(configured), lr=saved)

    def _check_scheduler(self) -> None:
        """Refuse a scheduler that cannot be built as torchtune's recipes build one."""
        if block := self.cfg.get("lr_scheduler", None):
            key = "lr_scheduler._component_"
            component = load_function(block._component_, key=key)
            arguments = {str(name): value for name, value in block.items() if name != "_component_"}
            try:
                signature(component).bind(None, num_training_steps=1, last_epoch=-1, **arguments)
            except TypeError as error:
                raise SettingError(
                    key,
                    block._component_,
                    f"it is called with an optimizer, num_training_steps, last_epoch and its other keys: {error}; "
                    "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup would do",
                ) from None
            stand_in = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
            LearningRate(stand_in, config.instantiate(block, stand_in, num_training_steps=1000, last_epoch=-1))

    def _ask_ahead(self) -> None:
        """Ask the growth function once, for nothing, so that its mistakes show before weights load."""
        assert self.settings.batch_increase_function
        random_state = RandomState(self.device)
        next_batch_size(
            self.settings.batch_increase_function, epoch=self.progress.epoch, batch_size=self.batch_size, maximum=None
        )
        random_state.restore()

    def _plan(self, epoch: int, batch_size: int) -> EpochPlan:
        """An epoch, divided into optimizer steps: by rows of this batch size, or by tokens."""
        ends: dict[str, Any] = {"drop_last": self.settings.drop_last, "max_steps": self.max_steps_per_epoch}
        if self.settings.batch_tokens:
            return EpochPlan.of_sizes(self.token_batches(epoch).sizes.tolist(), **ends)
        step_rows = batch_size * self.settings.gradient_accumulation_steps * distributed.world_size()
        return EpochPlan.of(len(self.stream), step_rows=step_rows, **ends)

    def _begin_epoch(self) -> None:
        """Grow the batch, and plan the steps of the epoch that begins."""
        epoch = self.progress.epoch
        self._grow(epoch)
        self.parts.accumulator.capacity = self.capacity.of(self.batch_size)
        self.plan = self._plan(epoch, self.batch_size)
        if self.plan.steps == 0 and self.settings.adaptive and self.settings.drop_last:
            raise SettingError(
                "drop_last", True, f"a step of {self.plan.step_rows} rows is more than an epoch's {self.plan.rows}"
            )
        if self.settings.adaptive:
            self._say_plan(epoch)
            self.capacity.say_if_one_by_one(self.batch_size)

    def _grow(self, epoch: int) -> None:
        """Ask the growth function for the rows to add."""
        function = self.settings.batch_increase_function
        if function is None or epoch >= self.settings.epochs:
            return
        growth = distributed.from_rank_zero(
            lambda: next_batch_size(function, epoch=epoch, batch_size=self.batch_size, maximum=self.capacity.bound)
        )
        self.record.decision(
            "batch_size",
            growth.describe(),
            epoch=epoch,
            before=growth.before,
            requested=growth.requested,
            after=growth.after,
        )
        self.batch_size = growth.after

    def _say_plan(self, epoch: int) -> None:
        plan, settings, capacity = self.plan, self.settings, self.capacity.of(self.batch_size)
        if plan.sizes is not None:
            rows = f"{min(plan.sizes)} to {max(plan.sizes)} rows"
            what = f"{plan.steps} steps of up to {settings.batch_tokens} tokens, {rows} each"
        else:
            accumulated = f"batch_size {self.batch_size} x {settings.gradient_accumulation_steps} accumulated"
            what = f"global batch {plan.step_rows} = {accumulated}, {plan.steps} steps"
        self.record.decision(
            "plan",
            f"epoch {epoch}: {what}; a micro-batch holds {capacity}",
            epoch=epoch,
            global_batch=plan.step_rows,
            batch_size=self.batch_size,
            batch_tokens=settings.batch_tokens,
            capacity=capacity.amount,
            unit=capacity.unit,
            steps=plan.steps,
        )
        configured = settings.step_rows * distributed.world_size()
        group = self.parts.optimizers[0].param_groups[0]
        rate = float(group.get("initial_lr", group["lr"]))
        if settings.lr_scaling == "none" and plan.step_rows != configured:
            message = describe_unscaled(rate, batch=plan.step_rows, reference=configured)
            self.record.decision("lr", message, lr=rate, global_batch=plan.step_rows, reference=configured)

    def _setup_learning_rate(self, saved: Mapping[str, Any]) -> None:
        block = self.cfg.get("lr_scheduler", None)
        scheduler = block and config.instantiate(
            block,
            self.parts.optimizers[0],
            num_training_steps=self.settings.epochs * self.reference.steps,
            last_epoch=self.progress.epoch * self.reference.steps - 1,
        )
        settings, before = self.settings, saved.get("lr_scaling", "none")
        if saved and before != settings.lr_scaling:
            message = f"lr_scaling {before} -> {settings.lr_scaling}: not what the checkpoint was trained with"
            self.record.decision("lr_scaling", message, before=before, after=settings.lr_scaling)
            for group in (group for optimizer in self.parts.optimizers for group in optimizer.param_groups):
                write_rate(group, float(group.get("initial_lr", group["lr"])))  # what was saved is scaled
        self.learning_rate = LearningRate(
            self.parts.optimizers,
            scheduler,
            rule=settings.lr_scaling,
            reference=self.reference_batch,
            batch_can_change=settings.batch_increase_function is not None or bool(settings.batch_tokens),
        )
        self.learning_rate.load_state_dict(saved.get("learning_rate", {}))
        if settings.lr_scaling != "none":
            group, reference = self.parts.optimizers[0].param_groups[0], self.reference_batch
            message = f"lr {group['initial_lr']:g} belongs to {reference} a step, and is scaled by the rule {settings.lr_scaling}"
            self.record.decision("lr", message, reference=str(reference), rule=settings.lr_scaling)

    @property
    def reference_batch(self) -> Reference:
        """The global batch that the configured learning rate belongs to."""
        return self.settings.reference_batch_size or Reference(
            self.settings.step_rows * distributed.world_size(), "rows"
        )

    def _set_learning_rate(self, rows: list[dict[str, Any]]) -> float:
        """Apply the rate of a step of these rows, and return it."""
        in_tokens = self.reference_batch.unit == "tokens"
        batch = distributed.total(sum(map(self.parts.num_real_tokens, rows)) if in_tokens else len(rows))
        clock = schedule_clock(self.progress, plan=self.plan, reference=self.reference)
        return self.learning_rate.set(clock, batch=batch)

    def _setup_profiler(self, cfg_profiler: DictConfig | None) -> None:
        block = OmegaConf.create(dict(cfg_profiler) if cfg_profiler is not None else {"enabled": False})
        component = "torchtune.training.setup_torch_profiler"
        if block.get("_component_", component) != component:
            raise SettingError("profiler._component_", block._component_, f"only {component} works")
        block["_component_"] = component
        self.profiler, self.profiler_cfg = config.instantiate(block)

    # --- training ---------------------------------------------------------------------------------------------------

    def _start_epoch(self) -> None:
        """Hand out the rows of the epoch from its beginning; list those that no step has room for."""
        epoch = self.progress.epoch
        if not self.settings.batch_tokens:
            self.stream.start_epoch(epoch)
            return
        batches = self.token_batches(epoch)
        self.stream.start_epoch(epoch, rows=batches.rows)
        left_out = {
            f"of more than batch_tokens={self.settings.batch_tokens}": batches.dropped.tolist(),
            "of the last step (drop_last)": batches[-1] if self.settings.drop_last else [],
        }
        for which, rows in left_out.items():
            if rows:
                some = ", ".join(map(str, sorted(rows)[:10])) + (", ..." if len(rows) > 10 else "")
                message = f"epoch {epoch}: {len(rows)} rows {which} are dropped: {some}"
                self.record.decision("dropped", message, epoch=epoch, rows=sorted(rows))

    def train(self) -> None:
        """Every epoch: grow, step through its rows, save."""
        if self.cfg.compile:
            log.info("the model is compiled in its first forward: expect a slow first step")
        self.profiler.start()
        first_epoch = self.progress.epoch
        if first_epoch >= self.settings.epochs:
            log.info("nothing to train: %d epochs are done and epochs=%d", first_epoch, self.settings.epochs)
        for epoch in range(first_epoch, self.settings.epochs):
            if epoch > first_epoch:
                self._begin_epoch()
            self._start_epoch()
            unlabelled = 0
            with tqdm(total=self.plan.steps, disable=not distributed.is_rank_zero()) as bar:
                for step in range(self.plan.steps):
                    self._record_memory_history(step)
                    start = time.perf_counter()
                    rows = self.stream.take(self.plan.rows_of_step(step))
                    self.capacity.try_longer(rows, batch_size=self.batch_size)
                    rate = self._set_learning_rate(rows)
                    result = self.parts.accumulator.run(rows)
                    self.parts.step()
                    self.progress = self.progress.after_step(rows=result.rows, tokens=result.tokens)
                    unlabelled += not result.micro_batches
                    bar.update(1)
                    bar.set_description(f"{epoch + 1}|{self.progress.steps}|Loss: {result.loss}")
                    self._log(result, rate=rate, seconds=time.perf_counter() - start)
                    self._validate()
                    self.profiler.step()
            self._check_labels(unlabelled)
            self.progress = self.progress.after_epoch()
            self.save_checkpoint(epoch=epoch)
        self.profiler.stop()

    def _check_labels(self, unlabelled: int) -> None:
        """Say how many steps of the epoch had no label to learn from; refuse to go on when none had any."""
        if unlabelled == self.plan.steps:
            raise SettingError(
                "dataset",
                str(self.cfg.dataset),
                "no row of a whole epoch has a label; see its train_on_input and masks",
            )
        if unlabelled:
            message = f"{unlabelled} of {self.plan.steps} steps had no label at all, and changed nothing"
            self.record.decision("no_labels", message, steps=unlabelled)

    def _validate(self) -> None:
        """Every so many steps, the loss on the rows that are not trained on."""
        if self.validation and self.progress.steps % self.settings.validation.every_n_steps == 0:
            loss = self.validation.run()
            message = f"step {self.progress.steps}: val_loss {loss:.4f} over {self.validation.num_rows} rows"
            self.record.decision("validation", message, steps=self.progress.steps, val_loss=loss)
            self.metric_logger.log_dict({"val_loss": loss}, step=self.progress.steps)

    def _log(self, result: StepResult, *, rate: float, seconds: float) -> None:
        metrics = {
            "loss": result.loss,
            "lr": rate,
            "tokens_per_second_per_gpu": float(result.label_tokens) / seconds,
            "batch_size": result.rows,
            "micro_batches": result.micro_batches,
            "padding_fraction": result.padding_fraction,
            "samples_seen": self.progress.samples,
            "tokens_seen": self.progress.tokens,
            "oom_count": self.capacity.num_out_of_memory,
        }
        if result.grad_norm is not None:
            metrics["grad_norm"] = float(result.grad_norm)
        if self.log_peak_memory_stats:
            metrics.update(training.get_memory_stats(device=self.device))
        self.record.step(step=self.progress.steps, epoch=self.progress.epoch, position=self.stream.position, **metrics)
        if self.progress.steps % self.log_every_n_steps == 0:
            self.metric_logger.log_dict(metrics, step=self.progress.steps)

    def _record_memory_history(self, step: int) -> None:
        """Record the CUDA allocator's history while the profiler is active in the first epoch, as torchtune does."""
        cfg = self.profiler_cfg
        if (
            self.progress.epoch
            or self.device.type != "cuda"
            or not (cfg["enabled"] and cfg.get("profile_memory", False))
        ):
            return
        begin = cfg["wait_steps"] + cfg["warmup_steps"]
        if step == begin:
            torch.cuda.memory._record_memory_history()
        elif step == begin + cfg["active_steps"] + 1:
            torch.cuda.memory._record_memory_history(enabled=None)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(self, epoch: int) -> None:
        """Save the weights and, unless training is done, all that resuming needs."""
        state = None
        if epoch + 1 < self.settings.epochs:
            state = {
                training.SEED_KEY: self.seed,
                training.EPOCHS_KEY: self.progress.epoch,
                training.TOTAL_EPOCHS_KEY: self.settings.epochs,
                training.MAX_STEPS_KEY: self.max_steps_per_epoch,
                training.DATALOADER_KEY: {},  # torchtune's own recipe asks for it when it resumes, and does not use it
                training.OPT_KEY: self.parts.optimizer.state_dict(),
                STATE_KEY: {
                    "batch_size": self.batch_size,
                    "first_batch_size": self.first_batch_size,
                    **self.capacity.state_dict(),
                    "lr_scaling": self.settings.lr_scaling,
                    "learning_rate": self.learning_rate.state_dict(),
                    "use_maximum_batch_size": self.settings.use_maximum_batch_size,
                    "optimizer": str(self.cfg.optimizer._component_),
                    "optimizer_in_bwd": self.settings.optimizer_in_bwd,
                    **self._what_results_depend_on(),
                    "progress": self.progress.state_dict(),
                    "random_state": RandomState(self.device).state_dict(),
                },
            }
        self.checkpoints.save(self.parts.model.state_dict(), recipe_state=state, epoch=epoch)
        self.record.decision("checkpoint", f"epoch {epoch} saved", epoch=epoch, steps=self.progress.steps)

    def cleanup(self) -> None:
        """Close the logs."""
        self.metric_logger.close()
        self.record.close()


def check_output_dir(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before anything is built."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise SettingError("output_dir", str(folder), f"it cannot be made ({error}); give a folder of yours") from None
    if not writable:
        raise SettingError("output_dir", str(folder), "it cannot be written to; give a folder of yours")


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe: YAML first, then key=value from the command line over it."""
    config.log_config(recipe_name="AdaptiveFullFinetuneRecipe", cfg=cfg)
    recipe = AdaptiveFullFinetuneRecipe(cfg=cfg)
    recipe.setup()
    recipe.train()
    recipe.cleanup()


def main() -> None:
    """The command line: shipped configs are found by name, and our own errors are shown plainly."""
    set_up_terminal()
    use_shipped_config(sys.argv)
    recipe_main()


if __name__ == "__main__":
    sys.exit(main())
