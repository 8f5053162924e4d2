"""Every configuration key that we read, each in one place: its name, type, default, check, what
resuming does, its documentation.

The tables in docs/configuration.md are written from here by ``adaptive-batch keys
docs/configuration.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from adaptive_batch._util import check_bool, check_headroom, check_share, check_whole
from adaptive_batch.data import LAYOUT_KINDS, LONG_ROWS, ORDERS, UNIFORM, LayoutKind
from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import parse_devices
from adaptive_batch.memory import check_device_memory, parse_size
from adaptive_batch.probe import OBJECTIVES, needs_times
from adaptive_batch.schedules import (
    RULES,
    Clock,
    Progress,
    Reference,
    check_increment,
    check_scaled,
    check_schedule,
    needs_noise_scale,
    parse_reference,
    rate_rule,
)
from adaptive_batch.training import ON_NONFINITE_LOSS, SEARCHES, ConfiguredSize

from .checks import check_together
from .config_errors import as_dict
from .keys import (
    TORCHTUNE_KEYS,
    Resume,
    auto_or_whole,
    block,
    checked,
    function,
    group,
    key,
    keys_of,
    names_of_keys,
    one_of,
    read_keys,
    table,
)
from .names import check_names
from .removed_keys import check_removed


def _check_budget(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise SettingError(name, value, "give a share from 0 to 1, such as 0.5")


def _length(name: str, value: Any) -> int | str:
    if not isinstance(value, str):
        return check_whole(name, value)
    if value not in ("longest", "max_seq_len"):
        raise SettingError(name, value, "give longest, max_seq_len or a number of tokens")
    return value


def _lengths(name: str, value: Any) -> tuple[int | str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise SettingError(name, value, "give a list of lengths, such as [512, 1024, 2048]")
    for number, length in enumerate(value):
        if length in value[:number]:
            raise SettingError(name, value, f"{length} is there twice; leave one out")
    return tuple(_length(name, length) for length in value)


def _size(name: str, value: Any) -> int:
    try:
        if value == 0 and not isinstance(value, bool):
            return 0
        # A share would be of nothing.
        if isinstance(value, float):
            raise ValueError
        return parse_size(value, total_bytes=0)
    except ValueError:
        raise SettingError(
            name, value, 'give a size such as "600MiB", or a whole number of bytes'
        ) from None


def _headroom(name: str, value: Any) -> int | float | str:
    if isinstance(value, float):
        check_share(name, value)
    elif value != "auto":
        _size(name, value)
    size: int | float | str = value
    return size


def _number_of_batches(name: str, value: Any) -> int | None:
    # torchtune's later recipes write all so.
    if value == -1:
        return None
    return check_whole(name, value)


def _seed(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise SettingError(name, value, "give a whole number, 0 to 4294967295, or null")
    return value


def _norm(name: str, value: Any) -> float:
    try:
        # torchtune's recipes take "inf".
        norm = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        norm = math.nan
    if not norm > 0:
        raise SettingError(
            name, value, "give the largest norm of all gradients, above 0, such as 1.0, or null"
        )
    return norm


def _layers(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(layer, str) for layer in value):
        raise SettingError(
            name, value, "give a list of names, such as [tok_embeddings,output], or null"
        )
    return tuple(value)


@dataclass(frozen=True)
class ProbeSettings:
    """The `probe` block."""

    search: str = key(
        one_of(*SEARCHES),
        "`predict`: chooses each next size so that it fits by what the peaks have shown. `binary`:"
        " bisection of 1 to `maximum`. `halve`: `maximum`, then half of it, until one fits",
        default="predict",
    )
    objective: str = key(
        one_of(*OBJECTIVES),
        "what `auto` takes within the bound: `throughput`: the micro-batches that train the most"
        " real tokens a second, timed in a few trials; `largest`: as much at once as fits",
        default="throughput",
    )
    device_memory: int | float | str | None = key(
        checked(check_device_memory),
        "what training may use: null = what is free now plus what this process holds; a size such"
        " as `12GiB`; or a share of the device such as `0.9`",
        default=None,
    )
    headroom: float | str = key(
        checked(check_headroom),
        "share of that which is left free, at least 0 and below 1; `auto`: 0.01 on one GPU whose"
        " allocator has expandable segments, as recipes ask for, and 0.05 elsewhere",
        default="auto",
    )
    sequence_length: int | str = key(
        _length,
        "`longest`: the longest real rows of the dataset; `max_seq_len`: rows as long as the"
        " tokenizer cuts them; or a number of tokens. With less than the longest, longer rows may"
        " not fit, which is logged",
        default="longest",
    )
    sequence_lengths: tuple[int | str, ...] = key(
        _lengths,
        "for `adaptive_probe`: a list, each length once; one search for each, and none for"
        " `probe.sequence_length`",
        default=(),
        shown="none",
    )
    round_to_power_of_two: bool = key(
        check_bool,
        "train with the power of two at or below the bound, which is tried too: it stays the same"
        " where the bound moves by some rows from run to run, and batches that double divide each"
        " other. It leaves up to half of what fits unused, which is logged; `False`: the bound"
        " itself",
        default=True,
    )
    maximum: int = key(check_whole, "no larger size is tried; where `halve` starts", default=4096)
    trial_seconds: int | None = key(
        check_whole,
        "a size whose trial would take longer, by the time of the one before it, is not tried."
        " null: whatever it takes",
        default=60,
    )
    trial_timeout: int = key(
        check_whole,
        "several ranks: seconds after which a trial that does not end ends the run on all of them",
        default=600,
    )
    assumed_maximum: int | None = key(
        check_whole,
        "for `preview`, which tries nothing: rows that fit",
        default=None,
    )
    cache: bool = key(
        check_bool,
        "a bound in `{output_dir}/adaptive_batch/probe.json` that depends on the same things is"
        " tried once, and believed if it fits, whatever the learning rate; a search starts from a"
        " curve of the same step that was planned or counted before",
        default=True,
    )


@dataclass(frozen=True)
class EstimateSettings:
    """The `estimate` block, for ``adaptive_estimate``."""

    devices: object = key(
        checked(lambda name, value: parse_devices(value)),
        "for `adaptive_estimate`, which needs it: devices that are not here: a size such as"
        " `80GiB`, a name such as `H100`, or a list of them. See"
        " [estimates](without_a_gpu.md#estimate-a-config)",
        default=None,
    )
    sequence_lengths: tuple[int | str, ...] = key(
        _lengths,
        "a list of lengths, each as `probe.sequence_length`; null: that one alone",
        default=(),
        shown="null",
    )
    world_size: int = key(partial(check_whole, most=10**5), "ranks that share the model", default=1)
    changes: bool = key(
        check_bool,
        "also estimate what single changes of the configuration would bring",
        default=True,
    )
    headroom: int | float | str = key(
        _headroom,
        "what is left free beside that: a size such as `2GiB`, a number of bytes, or a share such"
        " as `0.05`; `auto`: as `probe.headroom`",
        default="auto",
    )
    context: int | None = key(
        _size,
        "what the driver's context and its libraries take outside of the allocator, in bytes or as"
        " a size such as `600MiB`; null: 770MiB of an H100 or H200, 500MiB of others. Of no effect"
        " if `device` is `cpu`. See [the context](without_a_gpu.md#the-context)",
        default=None,
    )

    def lengths_of(self, probe: ProbeSettings) -> tuple[str, tuple[int | str, ...]]:
        """Return the key that gives the lengths, and the lengths."""
        if self.sequence_lengths:
            return "estimate.sequence_lengths", self.sequence_lengths
        return "probe.sequence_length", (probe.sequence_length,)


@dataclass(frozen=True)
class SamplingSettings:
    """Keys of the order of rows and of steps that hold tokens."""

    sample_order: str = key(
        one_of(*ORDERS),
        "`dataloader`: torchtune's order, and beyond 1,048,576 rows another permutation for each"
        " epoch; `random`: shuffled again each epoch; `seqlen`: short to long",
        default="dataloader",
        resume="epoch",
    )
    sample_window: int | None = key(
        check_whole,
        "with `seqlen`: shuffle first and sort only within each so many rows, so that epochs differ"
        " in more than rows of equal length",
        default=None,
        resume="epoch",
        needs=("sample_order=seqlen",),
    )
    min_rows_per_batch: int = key(
        check_whole,
        "least rows of a step by `batch_tokens`, on each device. It comes before the budget: a step"
        " of this many long rows may have more tokens. Only the last step of an epoch may have"
        " fewer. Not together with `long_rows: alone`",
        default=1,
        resume="epoch",
        needs=("batch_tokens",),
    )
    max_rows_per_batch: int | None = key(
        check_whole,
        "most rows of a step by `batch_tokens`",
        default=None,
        resume="epoch",
        needs=("batch_tokens",),
    )
    long_rows: str = key(
        one_of(*LONG_ROWS),
        "a row above `batch_tokens`: `error`; `drop` (listed in `run.jsonl`); `alone`: a step of"
        " its own",
        default="error",
        resume="epoch",
        needs=("batch_tokens",),
    )


@dataclass(frozen=True)
class MicroBatchSettings(ConfiguredSize):
    """Keys of the size of a micro-batch."""

    micro_batch_size: int | str | None = key(
        auto_or_whole,
        "rows at once: null = `batch_size`; `auto` = what is fastest within the bound (see"
        " `probe.objective`); or a number. The rows of a step run in as few micro-batches as that"
        " allows; a `batch_size` above the bound is then no error",
        default=None,
        resume="report",
    )
    micro_batch_tokens: int | str | None = key(
        auto_or_whole,
        "tokens at once, padding included: `auto` = what is fastest within the bound (see"
        " `probe.objective`); or a number, at least the longest row. The rows of a step are grouped"
        " by length into as few micro-batches as can be, of nearly equal size and with little"
        " padding. Not together with `micro_batch_size`, and not for rows with images, which tokens"
        " do not measure",
        default=None,
        resume="report",
    )


@dataclass(frozen=True)
class RateSettings:
    """Keys of the learning rate, and of what else of the optimizer follows the batch."""

    lr_scaling: str = key(
        one_of(*RULES),
        "`linear` or `sqrt`: the rate is multiplied by (batch / reference) or its square root, by"
        " the global batch that is really stepped",
        default="none",
    )
    reference_batch_size: Reference | None = key(
        parse_reference,
        "the global batch that the configured `lr` belongs to: a number of rows, or tokens as in"
        " `8192tok`. Default: the configured `batch_size` x `gradient_accumulation_steps` x ranks,"
        " before any probe",
        default=None,
        shown="configured",
        resume="report",
        needs=("lr_scaling=linear", "lr_scaling=sqrt", "scale_with_batch"),
    )
    scale_with_batch: Mapping[str, str] | None = key(
        lambda name, value: check_scaled(name, value) or None,
        "what of the optimizer follows the batch, by the one that is really stepped over"
        " `reference_batch_size`: `{beta2: half_life}` keeps the half-life of the second moment in"
        " rows, `{weight_decay: per_token}` the decay for each row, or token where the reference is"
        " one of tokens; or both. See [below](#what-follows-the-batch)",
        default=None,
        resume="report",
    )
    lr_clock: Clock = key(
        lambda name, value: Clock.from_config(value),
        "what warm-up and decay of `lr_scheduler` count: `samples`, `tokens` or `steps`; or one for"
        " each, as in `{warmup: steps, decay: tokens}`. See below",
        default=Clock(),
        shown="`samples`",
        resume="refuse",
        needs=("lr_scheduler",),
    )


@dataclass(frozen=True)
class ValidationSettings:
    """Keys of validation during training; without `run_val_every_n_steps` there is none."""

    dataset_val: Any = key(
        # It is checked together with run_val_every_n_steps.
        checked(lambda name, value: None),
        "a dataset block, or a list of them, to validate on",
        default=None,
        needs=("run_val_every_n_steps",),
    )
    run_val_every_n_steps: int | None = key(
        check_whole, "validate after each so many optimizer steps; logs `val_loss`", default=None
    )
    batch_size_val: int | str | None = key(
        auto_or_whole,
        "rows at once in validation, and what `max_validation_batches` counts; `auto`: as many as"
        " fit, found for validation alone, counted in `batch_size` rows. Running out of memory in"
        " validation lowers this, never training's, whatever `on_out_of_memory` is",
        default=None,
        shown="`batch_size`",
        needs=("run_val_every_n_steps",),
    )
    max_validation_batches: int | None = key(
        _number_of_batches,
        "validate on the first so many batches; null or -1: on all",
        default=None,
        needs=("run_val_every_n_steps",),
    )

    @property
    def is_on(self) -> bool:
        """Whether training validates."""
        return self.run_val_every_n_steps is not None

    @property
    def fits_itself(self) -> bool:
        """Whether validation runs as many rows at once as fit."""
        return self.is_on and self.batch_size_val == "auto"

    def rows_at_once(self, of_training: int) -> int:
        """Return the rows of a batch of validation, given the configured `batch_size`."""
        size = self.batch_size_val
        return size if isinstance(size, int) else of_training

    def rows_of(self, rows: int, *, batch_size: int, ranks: int = 1) -> int:
        """Return how many of the `rows` of a dataset are validated on: its first; `ranks` run a
        batch each at a time. `batch_size` is the configured one.
        """
        if self.max_validation_batches is None:
            return rows
        return min(rows, self.max_validation_batches * self.rows_at_once(batch_size) * ranks)


@dataclass(frozen=True)
class SavingSettings:
    """Keys of what is saved, and of how a saved run is resumed."""

    save_every_n_steps: int | None = key(
        check_whole, "optimizer steps from one resume point to the next", default=None
    )
    keep_last_n_checkpoints: int | None = key(
        check_whole,
        "resume points that are kept; older ones go when a newer one is whole. null: all. Epoch"
        " checkpoints stay",
        default=None,
        needs=("save_every_n_steps",),
    )
    enable_async_checkpointing: bool = key(
        check_bool,
        "`True`: a resume point is copied to the host, and written while training continues",
        default=False,
        needs=("save_every_n_steps",),
    )
    keep_final_state: bool = key(
        check_bool,
        "the last epoch is saved with the optimizer's state as well, so that a finished run goes on"
        " from its end where `epochs` is raised; without it where the disk has no room. `False`:"
        " weights alone, as torchtune",
        default=True,
    )
    overwrite_output_dir: bool = key(
        check_bool,
        "`True`: a new run may replace one in `output_dir` that has not ended, which else is"
        " refused. All that other runs have saved there goes once the first save of this one is"
        " complete",
        default=False,
    )
    resume_allow_changes: tuple[str, ...] = key(
        names_of_keys,
        "names of keys that may differ from the checkpoint's, as in `[dataset]`. See below",
        default=(),
        shown="none",
        needs=("resume_from_checkpoint",),
    )


@dataclass(frozen=True)
class SearchPlan:
    """What is found before training, as all keys together ask for it.

    Attributes:
        is_needed: whether training needs to know the largest batch that fits.
        chooses_fastest: whether a micro-batch holds what is fastest, rather than as much as fits.
        whole_step_rows: rows of each step on one device, where a step always has those that are
            configured, in one micro-batch if they fit; None elsewhere.
        has_several: whether some step has several micro-batches whatever fits.
        rounds: whether the power of two at or below the bound is tried, too.
        sets_batch: whether training begins with the batch that is found, unless a checkpoint's is
            kept.
    """

    is_needed: bool
    chooses_fastest: bool
    whole_step_rows: int | None
    has_several: bool
    rounds: bool
    sets_batch: bool


@dataclass(frozen=True)
class Settings:
    """The top-level keys. Those without documentation are torchtune's, with torchtune's meaning."""

    batch_size: int = key(check_whole)
    gradient_accumulation_steps: int = key(check_whole)
    # Limited, as each is previewed.
    epochs: int = key(partial(check_whole, most=10**6))
    max_steps_per_epoch: int | None = key(check_whole, default=None)
    seed: int | None = key(_seed, default=None)
    log_every_n_steps: int | None = key(check_whole, default=None)
    optimizer_in_bwd: bool = key(check_bool, default=False)
    clip_grad_norm: float | None = key(_norm, default=None)
    ac_mode: str | None = key(one_of("none", "full", "selective"), default=None)
    custom_sharded_layers: tuple[str, ...] = key(_layers, default=())
    use_maximum_batch_size: bool = key(
        check_bool,
        "`True`: search, then set `batch_size` to the bound (see `probe.round_to_power_of_two`), at"
        " most the rows of an epoch; `gradient_accumulation_steps` stays",
        default=False,
        resume="report",
    )
    batch_increase_function: Callable[[int, int], int] | None = key(
        function(check_increment),
        "dotted path of `f(epoch, batch_size) -> int`, or a block with `_component_` that builds"
        " one: rows to add to `batch_size` at the start of each epoch. What goes beyond the bound"
        " is cut to it and logged. See [below](#growth-functions)",
        default=None,
        resume="refuse",
    )
    batch_size_schedule: Callable[[Progress], int] | None = key(
        function(check_schedule),
        "dotted path of `rule(progress) -> int`, or a block with `_component_` that builds one:"
        " rows of a step on one device during training; with `batch_tokens`, real tokens. It needs"
        " `gradient_accumulation_steps: 1` and no `batch_increase_function`. See"
        " [below](#schedules-of-the-batch)",
        default=None,
        resume="refuse",
        fills_steps=True,
    )
    grow_beyond_maximum: bool = key(
        check_bool,
        "`True`: the batch that either of these asks for may pass the bound; the step then runs as"
        " more micro-batches. `False`: it is cut to the bound, which is logged",
        default=False,
        resume="report",
        needs=("batch_increase_function", "batch_size_schedule"),
    )
    preview: bool = key(
        check_bool,
        "`True`: print what training will do and stop before weights load. The bound is that of an"
        " earlier search in `output_dir`, or `probe.assumed_maximum`",
        default=False,
    )
    micro_batch: MicroBatchSettings = group(MicroBatchSettings)
    reference_micro_batch_size: int | str | None = key(
        auto_or_whole,
        "for `adaptive_dpo`: pairs at once in the reference, which then runs for all pairs of a"
        " step before the first of them is trained: `auto` = as many tokens as fit, found for the"
        " reference alone, or fewer where that pads less; or a number, at most so many. null: the"
        " reference runs within each micro-batch of training. Running out of memory in it lowers"
        " this, never training's, whatever `on_out_of_memory` is. See"
        " [preference pairs](torchtune.md#pairs-at-once-in-the-reference)",
        default=None,
        resume="report",
    )
    micro_batch_layout: str | None = key(
        one_of(*LAYOUT_KINDS),
        "how the rows of a micro-batch lie in it; which rows a step has never changes. `padded`: to"
        " the longest; `grouped`: the same, sorted by length within the step and cut where that"
        " takes least time; `packed`: one after the other without padding, positions restart and no"
        " row sees another. null: `padded`, or with `auto` the fastest",
        default=None,
        resume="report",
    )
    batch_tokens: int | None = key(
        check_whole,
        "a step holds as many rows as fit into so many real tokens, instead of `batch_size` rows."
        " Sets `micro_batch_tokens: auto` unless either micro key is set. Not together with a key"
        " that changes `batch_size`",
        default=None,
        resume="epoch",
    )
    sampling: SamplingSettings = group(SamplingSettings)
    uniform_micro_batches: str | None = key(
        one_of(*UNIFORM),
        "all micro-batches of a step alike, for pipelines and compiled graphs: `rows`: as many"
        " rows; `lengths`: padded to one length; `both`",
        default=None,
        resume="report",
        fills_steps=True,
    )
    pad_to_multiple_of: int = key(
        check_whole,
        "padded lengths are rounded up, never beyond what the model takes, so that there are fewer"
        " shapes to compile",
        default=1,
        shown="null",
        resume="report",
    )
    fused_rms_norm: bool = key(
        check_bool,
        "torchtune's `RMSNorm` as one operation in the model's `dtype`, which keeps its input and"
        " no float32 copies of it; results differ by rounding",
        default=False,
        resume="report",
    )
    activation_memory_budget: float = key(
        checked(_check_budget),
        "with `compile: True`: share of what each compiled part would keep for backward, from 0 to"
        " 1; what is above it is computed again in backward, the cheapest first (PyTorch's"
        " `torch._functorch.config.activation_memory_budget`)",
        default=1.0,
        resume="report",
    )
    on_out_of_memory: str = key(
        one_of("shrink", "raise"),
        "`shrink`: the step runs again with less at once, and the former limit is tried later;"
        " `raise`. With the optimizer in backward the default is `raise`, and `shrink` is refused:"
        " a step that failed has changed weights already",
        default="shrink",
    )
    on_nonfinite_loss: str = key(
        one_of(*ON_NONFINITE_LOSS),
        "a step whose loss is NaN or infinite: `warn` logs it, and training continues; `skip`"
        " leaves weights and optimizer as they are; `stop` ends the run before the step is taken,"
        " with status 1. See [below](#a-loss-that-is-not-finite)",
        default="warn",
        resume="report",
    )
    sync_gradients_every_micro_batch: bool = key(
        check_bool,
        "several ranks: `True` reduces gradients after each micro-batch; `False` keeps them"
        " unsharded until the last of a step: less traffic, and as much more memory as all"
        " gradients less a rank's part of them. The probe measures the one that is set",
        default=True,
    )
    rate: RateSettings = group(RateSettings)
    validation: ValidationSettings = group(ValidationSettings)
    drop_last: bool = key(
        check_bool,
        "whether the last, short step of an epoch is dropped (`True`) or trained (`False`)",
        default=True,
        shown="see below",
        resume="report",
    )
    log_gradient_noise_scale: bool = key(
        check_bool,
        "`True`: measure the gradient noise scale from the micro-batches of steps and log it. It"
        " needs `micro_batch_size`, rows in a random order, and steps of two micro-batches or more;"
        " `auto` then chooses no layout",
        default=False,
    )
    saving: SavingSettings = group(SavingSettings)
    verbose: bool = key(
        check_bool,
        "`True`: print the resolved configuration, and all that torchtune logs. Either way"
        " `adaptive_batch/config.yaml` in `output_dir` has the configuration of training",
        default=False,
    )
    probe: ProbeSettings = key(
        block(ProbeSettings),
        "how the bound is searched for",
        default=ProbeSettings(),
        shown="block",
    )
    estimate: EstimateSettings = key(
        block(EstimateSettings),
        "devices that are not here, and what is estimated for them",
        default=EstimateSettings(),
        shown="block",
    )

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
        """Whether a rule changes the batch during training."""
        return self.batch_increase_function is not None or self.batch_size_schedule is not None

    @property
    def step_varies(self) -> bool:
        """Whether a step may have other rows than are configured."""
        return self.batch_changes or self.grows or self.batch_tokens is not None

    @property
    def measures_noise(self) -> bool:
        """Whether the gradient noise scale is measured."""
        return self.log_gradient_noise_scale or needs_noise_scale(self.batch_size_schedule)

    @property
    def restores_random_state(self) -> bool:
        """Whether a resumed run continues with the random numbers of the saved one; torchtune's
        recipe seeds again.
        """
        return self.adaptive or self.saving.save_every_n_steps is not None

    @property
    def layout_kind(self) -> LayoutKind:
        """How rows lie in a micro-batch, unless ``auto`` chooses another."""
        return LAYOUT_KINDS[self.micro_batch_layout or "padded"]

    @property
    def search_plan(self) -> SearchPlan:
        """What is found before training."""
        size = self.micro_batch
        grows_beyond = self.grows and self.grow_beyond_maximum
        grows_within = self.grows and not (grows_beyond and size.is_number)
        # With the optimizer in backward a step is one micro-batch.
        chooses_fastest = (
            size.needs_search and needs_times(self.probe.objective) and not self.optimizer_in_bwd
        )
        stays = size.needs_search and not self.step_varies
        divides = size.is_number or self.batch_tokens is not None or self.layout_kind.sorts
        repeats = self.gradient_accumulation_steps > 1 and not stays
        return SearchPlan(
            is_needed=self.use_maximum_batch_size or size.needs_search or grows_within,
            chooses_fastest=chooses_fastest,
            whole_step_rows=self.step_rows if stays else None,
            has_several=divides or chooses_fastest or grows_beyond or repeats,
            rounds=self.probe.round_to_power_of_two and self.use_maximum_batch_size,
            sets_batch=self.use_maximum_batch_size and self.batch_size_schedule is None,
        )

    @property
    def searches(self) -> bool:
        """Whether training, validation or a reference needs a search for what fits."""
        return (
            self.search_plan.is_needed
            or self.validation.fits_itself
            or self.reference_micro_batch_size == "auto"
        )

    @property
    def adaptive(self) -> bool:
        """Whether any key is on that changes batches or how they are run; off means torchtune's own
        behaviour.
        """
        return (
            self.use_maximum_batch_size
            or self.grows
            or self.sampling.sample_order != "dataloader"
            or self.pad_to_multiple_of > 1
            or self.micro_batch.is_given
            or self.batch_tokens is not None
            or self.uniform_micro_batches is not None
            or not self.layout_kind.is_usual
        )

    @classmethod
    def from_config(cls, given: Mapping[str, Any] | DictConfig) -> Settings:
        """Read and check a whole recipe configuration."""
        config = as_dict(given)
        check_removed(config)
        check_names(cls, given)
        schedule = config.get("batch_size_schedule")
        # Refused before either is imported.
        if config.get("batch_increase_function") is not None and schedule is not None:
            remedy = (
                "batch_increase_function is set too; both set how the batch grows, so remove one"
            )
            raise SettingError("batch_size_schedule", schedule, remedy)
        values = read_keys(cls, config)
        if values.get("batch_tokens") and not values["micro_batch"].is_given:
            # The tokens of a step do not tell what fits at once.
            values["micro_batch"] = MicroBatchSettings(micro_batch_tokens="auto")
        if values.get("optimizer_in_bwd"):
            values.setdefault("on_out_of_memory", "raise")
        rate = values["rate"]
        rule = rate_rule(values.get("batch_size_schedule"), rate.lr_scaling)
        values["rate"] = replace(rate, lr_scaling=rule)
        settings = cls(**values)
        if "drop_last" not in values:
            settings = replace(settings, drop_last=not settings.adaptive)
        check_together(settings, config)
        return settings


OURS = tuple(name for name in keys_of(Settings) if name not in TORCHTUNE_KEYS)
RESUME: Mapping[str, Resume] = {
    **{name: own_key.resume for name, own_key in keys_of(Settings).items()},
    **TORCHTUNE_KEYS,
}
# Keys that, with `batch_tokens`, decide which rows a step holds.
FILLS_STEPS = tuple(name for name, own_key in keys_of(Settings).items() if own_key.fills_steps)


def reference_tables() -> dict[str, str]:
    """Return the tables of docs/configuration.md, by the name in the two markers of each."""

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    refused, rows = (
        listed(name for name in RESUME if RESUME[name] == policy) for policy in ("refuse", "epoch")
    )
    by_tokens = listed(name for name in FILLS_STEPS if RESUME[name] != "refuse")
    return {
        "keys": table(Settings),
        "probe": table(ProbeSettings, prefix="probe."),
        "estimate": table(EstimateSettings, prefix="estimate."),
        "resume": "\n".join(
            [
                "| another than the checkpoint's | |",
                "|---|---|",
                (
                    f"| {refused} | refused with both values, unless `resume_allow_changes` lists"
                    " the key |"
                ),
                f"| within an epoch also {rows}; with `batch_tokens` {by_tokens} | the same |",
                "| optimizer, `optimizer_in_bwd` | refused |",
                (
                    "| everything else that results depend on, epochs and batch size among it |"
                    " logged |"
                ),
                (
                    "| settings of the optimizer (but `fused`, `foreach`, `capturable`), `seed`,"
                    " `max_steps_per_epoch` | the checkpoint's are kept, which is logged |"
                ),
                (
                    "| `optimizer.lr`, `optimizer.weight_decay`, `max_steps_per_epoch`, where"
                    " `resume_allow_changes` lists them | taken from now on, which is logged |"
                ),
            ]
        ),
    }


def write_reference(page: Path) -> None:
    """Rewrite the tables of a page of the documentation; each is between ``<!-- NAME: ... -->`` and
    ``<!-- end -->``.
    """
    text = page.read_text(encoding="utf-8")
    for name, rows in reference_tables().items():
        begin = text.index("-->", text.index(f"<!-- {name}: ")) + len("-->")
        text = f"{text[:begin]}\n\n{rows}\n\n{text[text.index('<!-- end -->', begin) :]}"
    page.write_text(text, encoding="utf-8")
