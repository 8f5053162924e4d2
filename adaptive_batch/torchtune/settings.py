"""The configuration keys as frozen dataclasses, and every check that needs no device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from adaptive_batch._util import check_whole
from adaptive_batch.data import LONG_ROWS, ORDERS, UNIFORM, largest_divisor
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import RULES, Clock, Progress, Reference, needs_noise_scale, parse_reference

from .components import load_increment, load_schedule
from .estimate_settings import EstimateSettings
from .keys import auto_or_whole, check_key_names, choice, switch, whole
from .probe_settings import ProbeSettings
from .validation_settings import ValidationSettings

TOKEN_KEYS = ("micro_batch_tokens", "batch_tokens")


@dataclass(frozen=True)
class Settings:
    """What the batch depends on.

    Attributes:
        batch_size: rows of one micro-batch, as configured; rows of a step where it is `gradient_accumulation_steps` of these.
        gradient_accumulation_steps: `batch_size` times this is a step.
        epochs: how often the dataset is gone through.
        max_steps_per_epoch: optimizer steps after which an epoch ends; None for none.
        use_maximum_batch_size: set `batch_size` to what the probe finds.
        batch_increase_function: rows to add at the start of each epoch; None for none.
        batch_size_schedule: rows of a step on one device (tokens, with `batch_tokens`) as a function of progress; None for none.
        grow_beyond_maximum: a batch that grows may pass what fits at once.
        plan_only: show the plan and stop before weights load.
        micro_batch_size: rows at once: a number, ``auto``, or None for `batch_size`.
        micro_batch_tokens: padded tokens at once: a number, ``auto``, or None.
        batch_tokens: real tokens of a step, in place of a number of rows; None for rows.
        sample_order: ``dataloader``, ``random`` or ``seqlen``.
        sample_window: rows within which ``seqlen`` sorts; None for the whole dataset.
        min_rows_per_batch, max_rows_per_batch: of a step by tokens.
        long_rows: what becomes of a row above `batch_tokens`: ``error``, ``drop`` or ``alone``.
        uniform_micro_batches: what all micro-batches of a step have in common: ``rows``, ``lengths``, ``both`` or None.
        pad_to_multiple_of: padded lengths are rounded up to a multiple of it; 1 does nothing.
        drop_last: whether the last, short step of an epoch is dropped; follows `adaptive` where the key is absent.
        lr_scaling: ``none``, ``linear`` or ``sqrt``.
        reference_batch_size: the global batch that the configured rate belongs to; None for the configured one.
        lr_clock: what the learning rate's schedule counts.
        log_gradient_noise_scale: measure it and log it.
        on_out_of_memory: ``shrink`` or ``raise``.
        optimizer_in_bwd: step each parameter inside the backward pass.
        sync_gradients_every_micro_batch: with several ranks, reduce gradients after each micro-batch, and not the last alone.
        validation: None for none.
        save_every_n_steps: optimizer steps from one resume point to the next; None for none.
        keep_last_n_checkpoints: resume points that are kept; None for all.
        saves_asynchronously: write resume points while training goes on.
        resume_allow_changes: keys that may differ from the checkpoint's.
        probe: the `probe` block.
        estimate: the `estimate` block.
    """

    batch_size: int
    gradient_accumulation_steps: int
    epochs: int
    max_steps_per_epoch: int | None
    use_maximum_batch_size: bool
    batch_increase_function: Callable[[int, int], int] | None
    batch_size_schedule: Callable[[Progress], int] | None
    grow_beyond_maximum: bool
    plan_only: bool
    micro_batch_size: int | str | None
    micro_batch_tokens: int | str | None
    batch_tokens: int | None
    sample_order: str
    sample_window: int | None
    min_rows_per_batch: int
    max_rows_per_batch: int | None
    long_rows: str
    uniform_micro_batches: str | None
    pad_to_multiple_of: int
    drop_last: bool
    lr_scaling: str
    reference_batch_size: Reference | None
    lr_clock: Clock
    log_gradient_noise_scale: bool
    on_out_of_memory: str
    optimizer_in_bwd: bool
    sync_gradients_every_micro_batch: bool
    validation: ValidationSettings | None
    save_every_n_steps: int | None
    keep_last_n_checkpoints: int | None
    saves_asynchronously: bool
    resume_allow_changes: tuple[str, ...]
    probe: ProbeSettings
    estimate: EstimateSettings

    @property
    def step_rows(self) -> int:
        """Rows of a step on one device, as configured."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def batch_changes(self) -> bool:
        """Whether `batch_size` is found or grown, rather than configured."""
        return self.use_maximum_batch_size or self.batch_increase_function is not None

    @property
    def grows(self) -> bool:
        """Whether a rule says how the batch changes during training."""
        return self.batch_increase_function is not None or self.batch_size_schedule is not None

    @property
    def measures_noise(self) -> bool:
        """Whether the gradient noise scale is measured."""
        rule = self.batch_size_schedule
        return self.log_gradient_noise_scale or (rule is not None and needs_noise_scale(rule))

    @property
    def restores_random_state(self) -> bool:
        """Whether a resumed run goes on with the random numbers of the saved one; torchtune's recipe seeds anew."""
        return self.adaptive or self.save_every_n_steps is not None

    @property
    def fits_itself(self) -> bool:
        """Whether a micro-batch holds as much as fits."""
        return "auto" in (self.micro_batch_size, self.micro_batch_tokens)

    @property
    def needs_bound(self) -> bool:
        """Whether training needs to know the largest batch that fits."""
        has_own_number = isinstance(self.micro_batch_size or self.micro_batch_tokens, int)
        grows_freely = self.grow_beyond_maximum and has_own_number
        return self.use_maximum_batch_size or self.fits_itself or (self.grows and not grows_freely)

    @property
    def adaptive(self) -> bool:
        """Whether any key is on that changes batches or how they are run; off means torchtune's own behaviour."""
        return (
            self.needs_bound
            or self.grows
            or self.sample_order != "dataloader"
            or self.pad_to_multiple_of > 1
            or any((self.micro_batch_size, self.micro_batch_tokens, self.batch_tokens, self.uniform_micro_batches))
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Read and check a whole recipe configuration, as plain dicts and lists.

        Raises:
            SettingError: a key that is nearly one of ours, or a value that cannot be used.
        """
        if config.get("batch_increase_function") is not None and config.get("batch_size_schedule") is not None:
            raise SettingError(
                "batch_size_schedule",
                config["batch_size_schedule"],
                "batch_increase_function is set too; both say how the batch grows, so remove one",
            )
        check_key_names(config)
        schedule = config.get("batch_size_schedule")
        if schedule is not None:
            schedule = load_schedule(schedule, key="batch_size_schedule")
        for key in ("batch_size", "gradient_accumulation_steps", "epochs"):
            check_whole(key, config.get(key))
        function = config.get("batch_increase_function")
        if function is not None:
            function = load_increment(function, key="batch_increase_function")
        in_backward = switch(config, "optimizer_in_bwd", default=False)
        micro_rows, micro_tokens = (auto_or_whole(config, f"micro_batch_{unit}") for unit in ("size", "tokens"))
        by_tokens = whole(config, "batch_tokens")
        if by_tokens and micro_rows is None and micro_tokens is None:
            micro_tokens = "auto"  # what a batch by tokens means says nothing of what fits
        settings = cls(
            batch_size=config["batch_size"],
            gradient_accumulation_steps=config["gradient_accumulation_steps"],
            epochs=config["epochs"],
            max_steps_per_epoch=whole(config, "max_steps_per_epoch"),
            use_maximum_batch_size=switch(config, "use_maximum_batch_size", default=False),
            batch_increase_function=function,
            batch_size_schedule=schedule,
            grow_beyond_maximum=switch(config, "grow_beyond_maximum", default=False),
            plan_only=switch(config, "plan_only", default=False),
            micro_batch_size=micro_rows,
            micro_batch_tokens=micro_tokens,
            batch_tokens=by_tokens,
            sample_order=choice(config, "sample_order", ORDERS, default="dataloader"),
            sample_window=whole(config, "sample_window"),
            min_rows_per_batch=whole(config, "min_rows_per_batch") or 1,
            max_rows_per_batch=whole(config, "max_rows_per_batch"),
            long_rows=choice(config, "long_rows", LONG_ROWS, default="error"),
            uniform_micro_batches=choice(config, "uniform_micro_batches", UNIFORM, default="") or None,
            pad_to_multiple_of=whole(config, "pad_to_multiple_of") or 1,
            drop_last=True,
            lr_scaling=choice(config, "lr_scaling", RULES, default="none"),
            reference_batch_size=_reference(config.get("reference_batch_size")),
            lr_clock=Clock.from_config(config.get("lr_clock")),
            log_gradient_noise_scale=switch(config, "log_gradient_noise_scale", default=False),
            on_out_of_memory=choice(
                config, "on_out_of_memory", ("shrink", "raise"), default="raise" if in_backward else "shrink"
            ),
            optimizer_in_bwd=in_backward,
            sync_gradients_every_micro_batch=switch(config, "sync_gradients_every_micro_batch", default=True),
            validation=ValidationSettings.from_config(config),
            save_every_n_steps=whole(config, "save_every_n_steps"),
            keep_last_n_checkpoints=whole(config, "keep_last_n_checkpoints"),
            saves_asynchronously=switch(config, "enable_async_checkpointing", default=False),
            resume_allow_changes=_names_of_keys(config, "resume_allow_changes"),
            probe=ProbeSettings.from_config(config.get("probe")),
            estimate=EstimateSettings.from_config(config.get("estimate")),
        )
        settings._check_batches(config)
        settings._check_schedule(config)
        settings._check_optimizer_in_backward(config)
        if "left_pad_sequence" in str(config.get("collate_fn") or ""):
            raise SettingError(
                "collate_fn",
                config["collate_fn"],
                "left padding is for inference; torchtune.data.padded_collate_sft would do",
            )
        drop_last = switch(config, "drop_last", default=not settings.adaptive)
        return replace(settings, drop_last=drop_last)

    def _check_batches(self, config: Mapping[str, Any]) -> None:
        if self.micro_batch_size is not None and self.micro_batch_tokens is not None:
            raise SettingError(
                "micro_batch_tokens",
                self.micro_batch_tokens,
                f"micro_batch_size={self.micro_batch_size} is set too; both say what is run at once, so remove one",
            )
        if self.batch_tokens and self.batch_changes:
            key = "use_maximum_batch_size" if self.use_maximum_batch_size else "batch_increase_function"
            raise SettingError(
                "batch_tokens",
                self.batch_tokens,
                f"a step holds tokens, and {key} sets its rows; remove one (what fits is found with batch_tokens alone, too)",
            )
        if self.max_rows_per_batch is not None and self.min_rows_per_batch > self.max_rows_per_batch:
            raise SettingError(
                "min_rows_per_batch",
                self.min_rows_per_batch,
                f"max_rows_per_batch is {self.max_rows_per_batch}; give that or less",
            )
        size = self.micro_batch_size
        changes = self.batch_changes or self.grows or bool(self.batch_tokens)
        rows_alike = self.uniform_micro_batches in ("rows", "both") and not changes
        splits = isinstance(size, int) and 1 < size < self.step_rows
        if rows_alike and splits and largest_divisor(self.step_rows, at_most=int(size or 1)) == 1:
            raise SettingError(
                "uniform_micro_batches",
                self.uniform_micro_batches,
                f"the {self.step_rows} rows of a step divide into equal micro-batches of up to {size} only one by one; "
                "change batch_size or micro_batch_size so that one divides the other",
            )

    def _check_schedule(self, config: Mapping[str, Any]) -> None:
        rule = self.batch_size_schedule
        if rule is not None and self.gradient_accumulation_steps > 1:
            raise SettingError(
                "gradient_accumulation_steps",
                self.gradient_accumulation_steps,
                "batch_size_schedule gives the rows of a whole step, and its micro-batches follow from what fits; set it to 1",
            )
        if rule is not None and self.batch_tokens and needs_noise_scale(rule):
            raise SettingError(
                "batch_tokens",
                self.batch_tokens,
                "the gradient noise scale is counted in rows; remove batch_tokens, or take another schedule",
            )
        if self.lr_clock.warmup != self.lr_clock.decay and config.get("lr_scheduler") is not None:
            steps = config["lr_scheduler"].get("num_warmup_steps")
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
                raise SettingError(
                    "lr_clock",
                    config["lr_clock"],
                    "a warm-up of its own unit needs a scheduler with num_warmup_steps, such as "
                    "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup; give one unit for both",
                )

    def _check_optimizer_in_backward(self, config: Mapping[str, Any]) -> None:
        if not self.optimizer_in_bwd:
            return
        nothing_accumulates = "with the optimizer in backward each micro-batch is stepped as it comes, so a step is one"
        off = "or set optimizer_in_bwd=False"
        if self.gradient_accumulation_steps > 1:
            raise SettingError(
                "gradient_accumulation_steps",
                self.gradient_accumulation_steps,
                f"{nothing_accumulates}; set it to 1, {off}",
            )
        if config.get("clip_grad_norm") is not None:
            raise SettingError(
                "clip_grad_norm",
                config["clip_grad_norm"],
                f"with the optimizer in backward there is never a whole gradient; set it to null, {off}",
            )
        if self.on_out_of_memory == "shrink":
            raise SettingError(
                "on_out_of_memory",
                "shrink",
                "with the optimizer in backward a step that failed has changed some weights already, and cannot be replayed; "
                f"give raise, {off}",
            )
        if self.measures_noise:
            key = "log_gradient_noise_scale" if self.log_gradient_noise_scale else "batch_size_schedule"
            remedy = "with the optimizer in backward there is no gradient left to measure; remove it"
            raise SettingError(key, config[key], f"{remedy}, {off}")
        for key in (*TOKEN_KEYS, "uniform_micro_batches", "grow_beyond_maximum"):
            if config.get(key):
                raise SettingError(key, config[key], f"{nothing_accumulates}; remove it, {off}")
        size = self.micro_batch_size
        if isinstance(size, int) and (size < self.batch_size or self.batch_changes or self.grows):
            raise SettingError("micro_batch_size", size, f"{nothing_accumulates}; remove it, {off}")


def _reference(value: object) -> Reference | None:
    if value is None:
        return None
    try:
        return parse_reference(value)
    except ValueError as error:
        raise SettingError("reference_batch_size", value, str(error)) from None


def _names_of_keys(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key)
    names = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise SettingError(key, value, "give the names of keys, such as [dataset]")
    return tuple(names)
