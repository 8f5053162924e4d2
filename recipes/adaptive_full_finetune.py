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
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from adaptive_checkpoint import STATE_KEY, EpochCheckpoints
from adaptive_parts import TrainingParts, set_up_terminal, use_shipped_config
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
from adaptive_batch.learning_rate import LearningRate, describe_unscaled
from adaptive_batch.memory import GIB
from adaptive_batch.probe import ProbeResult
from adaptive_batch.progress import EpochPlan, Progress, schedule_clock
from adaptive_batch.report import RunRecord
from adaptive_batch.settings import ProbeSettings, Settings
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
        self.settings = Settings.from_config(OmegaConf.to_container(cfg, resolve=True))
        self.parts = TrainingParts(cfg, self.settings)
        self.device = self.parts.device
        self.output_dir = Path(cfg.output_dir)
        self.log_every_n_steps: int = cfg.get("log_every_n_steps") or 1
        self.log_peak_memory_stats = bool(cfg.get("log_peak_memory_stats", False)) and self.device.type != "cpu"
        if cfg.get("log_peak_memory_stats", False) and not self.log_peak_memory_stats:
            log.info("log_peak_memory_stats has no effect on a CPU")
        self.seed = training.set_seed(seed=cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
        self.max_steps_per_epoch = self.settings.max_steps_per_epoch
        self.batch_size = self.settings.batch_size
        self.bound: int | None = None
        self.first_batch_size: int | None = None
        self.continues_batch = False
        self.progress = Progress()
        self.num_out_of_memory = 0

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
        if self.settings.adaptive and ours.get("bound") is not None and asked_before:
            self.continues_batch = True
            self.batch_size, self.first_batch_size = ours["batch_size"], ours["first_batch_size"]

    def setup(self) -> None:
        """Build everything in an order that refuses mistakes before weights load, then find the bound."""
        settings, parts = self.settings, self.parts
        check_output_dir(self.output_dir)
        parts.build_data()
        self.load_checkpoint()
        if settings.adaptive:
            parts.check_model()
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
        parts.build_model(self.checkpoints.load_weights)
        if self.device.type != "cpu":
            training.log_memory_stats(training.get_memory_stats(device=self.device))
        parts.build_optimizer(resumed.get(training.OPT_KEY))
        if resumed:
            self._say_whose_rate()
        if settings.adaptive:
            self._find_bound()
        self.stream = RowStream(parts.dataset, shuffle=self.cfg.shuffle)
        self._grow()
        if self.first_batch_size is None:
            self.first_batch_size = self.batch_size
        self.reference = self._plan(self.first_batch_size)
        if self.reference.steps == 0:
            raise SettingError(
                "batch_size",
                self.batch_size,
                f"an epoch of {len(self.stream)} rows has no whole step; set drop_last=False",
            )
        if not resumed.get(STATE_KEY):
            self.progress = Progress(self.progress.epoch, steps=self.progress.epoch * self.reference.steps)
        self._setup_learning_rate()
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
        now = {
            "gradient_accumulation_steps": self.settings.gradient_accumulation_steps,
            "rows": len(self.parts.dataset),
        }
        for name, value in now.items():
            if ours and ours[name] != value:
                message = f"{name} {ours[name]} -> {value}: not what the checkpoint was trained with"
                self.record.decision(name, message, before=ours[name], after=value)
        if not resumed and (self.output_dir / "recipe_state").exists():
            message = f"{self.output_dir} holds an earlier run, which this one replaces epoch by epoch"
            self.record.decision(
                "replaces", f"{message}; until its first epoch is saved, resuming goes on with the earlier"
            )
        probe = self.settings.probe
        if not self.settings.adaptive and self.cfg.get("probe") and probe != ProbeSettings():
            self.record.decision("no_effect", "the probe block has no effect: nothing that adapts the batch is on")
        if probe.sequence_lengths:
            self.record.decision("no_effect", "probe.sequence_lengths has no effect here; it is for adaptive_probe")

    def _say_whose_rate(self) -> None:
        group = self.parts.optimizers[0].param_groups[0]
        configured, saved = self.cfg.optimizer.get("lr"), float(group.get("initial_lr", group["lr"]))
        if configured is not None and not math.isclose(float(configured), saved, rel_tol=1e-6):
            message = f"optimizer.lr={configured} has no effect: the checkpoint's {saved:g} goes on"
            self.record.decision("lr", message, configured=float(configured), lr=saved)

    def _find_bound(self) -> None:
        result = self.probe(accumulates=self.settings.gradient_accumulation_steps > 1)
        if self.continues_batch and self.batch_size > result.max_batch_size:
            if self.settings.optimizer_in_bwd:
                raise SettingError(
                    "optimizer_in_bwd",
                    True,
                    f"the checkpoint's batch_size {self.batch_size} is above the {result.max_batch_size} rows that fit here, "
                    "and cannot be split into micro-batches; go on where it fits, or start anew with optimizer_in_bwd=False",
                )
            result = self.probe(accumulates=True)  # its steps will accumulate, which takes more memory
        self.bound = result.max_batch_size
        if self.continues_batch:
            if self.batch_size > self.bound:
                self.record.decision(
                    "capacity",
                    f"batch_size {self.batch_size} is kept; {self.bound} rows fit here, so it runs as more micro-batches",
                    batch_size=self.batch_size,
                    micro_batch_size=self.bound,
                )
        elif self.settings.use_maximum_batch_size:
            self.record.decision(
                "batch_size",
                f"batch_size {self.batch_size} -> {result.batch_size} (use_maximum_batch_size; bound {self.bound})",
                before=self.batch_size,
                after=result.batch_size,
                bound=self.bound,
            )
            self.batch_size = result.batch_size
        elif self.batch_size > self.bound:
            raise SettingError(
                "batch_size",
                self.batch_size,
                f"{self.bound} rows fit; set batch_size={self.bound} or less (gradient_accumulation_steps makes up for it), "
                "or allow more memory",
            )

    def probe(self, *, accumulates: bool) -> ProbeResult:
        """Search for the bound, show the table, and write it to ``probe.json``."""
        result = self.parts.find_bound(
            length=self.settings.probe.sequence_length,
            accumulates=accumulates,
            path=self.output_dir / "adaptive_batch" / "probe.json",
        )
        out_of_memory = 0 if result.from_cache else result.num_out_of_memory
        self.num_out_of_memory += out_of_memory
        self.record.decision(
            "bound",
            "probe of the largest batch:\n" + result.table(),
            max_batch_size=result.max_batch_size,
            budget_gib=round(result.budget_bytes / GIB, 3),
            trials=len(result.trials),
            out_of_memory=out_of_memory,
            from_cache=result.from_cache,
            seconds=round(sum(result.seconds), 2),
        )
        return result

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

    def _ask_ahead(self) -> None:
        """Ask the growth function once, for nothing, so that its mistakes show before weights load."""
        assert self.settings.batch_increase_function
        random_state = RandomState(self.device)
        next_batch_size(
            self.settings.batch_increase_function, epoch=self.progress.epoch, batch_size=self.batch_size, maximum=None
        )
        random_state.restore()

    def _plan(self, batch_size: int) -> EpochPlan:
        """An epoch, divided into optimizer steps of this batch size."""
        return EpochPlan.of(
            len(self.stream),
            step_rows=batch_size * self.settings.gradient_accumulation_steps * distributed.world_size(),
            drop_last=self.settings.drop_last,
            max_steps=self.max_steps_per_epoch,
        )

    def _grow(self) -> None:
        """Ask the growth function for the epoch that begins, and plan its steps."""
        function, epoch = self.settings.batch_increase_function, self.progress.epoch
        if function and epoch < self.settings.epochs:
            growth = distributed.from_rank_zero(
                lambda: next_batch_size(function, epoch=epoch, batch_size=self.batch_size, maximum=self.bound)
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
        self.micro_batch_size = min(self.batch_size, self.bound or self.batch_size)
        self.plan = self._plan(self.batch_size)
        if self.plan.steps == 0 and self.settings.adaptive and self.settings.drop_last:
            raise SettingError(
                "drop_last", True, f"a step of {self.plan.step_rows} rows is more than an epoch's {self.plan.rows}"
            )
        if self.settings.adaptive:
            self.record.decision(
                "plan",
                f"epoch {epoch}: global batch {self.plan.step_rows} = batch_size {self.batch_size} x "
                f"{self.settings.gradient_accumulation_steps} accumulated, {self.plan.steps} steps",
                epoch=epoch,
                global_batch=self.plan.step_rows,
                batch_size=self.batch_size,
                steps=self.plan.steps,
            )
            configured = self.settings.batch_size * self.settings.gradient_accumulation_steps * distributed.world_size()
            group = self.parts.optimizers[0].param_groups[0]
            rate = float(group.get("initial_lr", group["lr"]))
            if self.plan.step_rows != configured:
                message = describe_unscaled(rate, batch=self.plan.step_rows, reference=configured)
                self.record.decision("lr", message, lr=rate, global_batch=self.plan.step_rows, reference=configured)

    def _setup_learning_rate(self) -> None:
        block = self.cfg.get("lr_scheduler", None)
        scheduler = block and config.instantiate(
            block,
            self.parts.optimizers[0],
            num_training_steps=self.settings.epochs * self.reference.steps,
            last_epoch=self.progress.epoch * self.reference.steps - 1,
        )
        self.learning_rate = LearningRate(
            self.parts.optimizers, scheduler, batch_can_change=self.settings.batch_increase_function is not None
        )

    def _setup_profiler(self, cfg_profiler: DictConfig | None) -> None:
        block = OmegaConf.create(dict(cfg_profiler) if cfg_profiler is not None else {"enabled": False})
        component = "torchtune.training.setup_torch_profiler"
        if block.get("_component_", component) != component:
            raise SettingError("profiler._component_", block._component_, f"only {component} works")
        block["_component_"] = component
        self.profiler, self.profiler_cfg = config.instantiate(block)

    # --- training ---------------------------------------------------------------------------------------------------

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
                self._grow()
            self.stream.start_epoch(epoch)
            unlabelled = 0
            with tqdm(total=self.plan.steps, disable=not distributed.is_rank_zero()) as bar:
                for step in range(self.plan.steps):
                    self._record_memory_history(step)
                    start = time.perf_counter()
                    rows = self.stream.take(self.plan.rows_of_step(step))
                    rate = self.learning_rate.set(
                        schedule_clock(self.progress, plan=self.plan, reference=self.reference)
                    )
                    result = self.parts.accumulator.run(rows, micro_batch_size=self.micro_batch_size)
                    norm = self.parts.step()
                    self.progress = self.progress.after_step(rows=result.rows, tokens=result.tokens)
                    unlabelled += not result.micro_batches
                    bar.update(1)
                    bar.set_description(f"{epoch + 1}|{self.progress.steps}|Loss: {result.loss}")
                    self._log(result, rate=rate, norm=norm, seconds=time.perf_counter() - start)
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

    def _log(self, result: StepResult, *, rate: float, norm: torch.Tensor | None, seconds: float) -> None:
        metrics = {
            "loss": result.loss,
            "lr": rate,
            "tokens_per_second_per_gpu": float(result.label_tokens) / seconds,
            "batch_size": result.rows,
            "micro_batches": result.micro_batches,
            "padding_fraction": result.padding_fraction,
            "samples_seen": self.progress.samples,
            "tokens_seen": self.progress.tokens,
            "oom_count": self.num_out_of_memory,
        }
        if norm is not None:
            metrics["grad_norm"] = float(norm)
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
                    "bound": self.bound,
                    "use_maximum_batch_size": self.settings.use_maximum_batch_size,
                    "optimizer": str(self.cfg.optimizer._component_),
                    "optimizer_in_bwd": self.settings.optimizer_in_bwd,
                    "gradient_accumulation_steps": self.settings.gradient_accumulation_steps,
                    "rows": len(self.parts.dataset),
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
