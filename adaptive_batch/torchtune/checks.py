"""Checks of keys against each other, and settings that have no effect. A key alone is checked where it is read (:mod:`.settings`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from adaptive_batch.data import largest_divisor
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import needs_noise_scale

from .keys import keys_of

if TYPE_CHECKING:
    from .settings import ProbeSettings, Settings

TOKEN_KEYS = ("micro_batch_tokens", "batch_tokens")


# --- refused ------------------------------------------------------------------------------------------------------------


def check_before_reading(config: Mapping[str, Any]) -> None:
    """Refuse two rules of growth before either is imported.

    Raises:
        SettingError: both are set.
    """
    schedule = config.get("batch_size_schedule")
    if config.get("batch_increase_function") is not None and schedule is not None:
        remedy = "batch_increase_function is set too; both set how the batch grows, so remove one"
        raise SettingError("batch_size_schedule", schedule, remedy)


def check_together(settings: Settings, config: Mapping[str, Any]) -> None:
    """Refuse keys that contradict each other.

    Raises:
        SettingError: naming one of them, with what to change.
    """
    _check_validation(settings)
    _check_batches(settings)
    _check_schedule(settings, config)
    _check_optimizer_in_backward(settings, config)
    collate = config.get("collate_fn")
    if "left_pad_sequence" in str(collate or ""):
        raise SettingError(
            "collate_fn", collate, "left padding is for inference; give torchtune.data.padded_collate_sft"
        )


def _refused(settings: Settings, name: str, remedy: str) -> SettingError:
    return SettingError(name, getattr(settings, name), remedy)


def _check_validation(settings: Settings) -> None:
    every, dataset = settings.run_val_every_n_steps, settings.dataset_val
    if every is None:
        return
    if dataset is None:
        remedy = "there is nothing to validate on; set dataset_val to a dataset block"
        raise SettingError("run_val_every_n_steps", every, remedy)
    blocks = dataset if isinstance(dataset, list) else [dataset]
    if not blocks or not all(isinstance(block, Mapping) and block.get("_component_") for block in blocks):
        raise SettingError("dataset_val", dataset, "give a block with _component_, as dataset is, or a list of such")


def _check_batches(settings: Settings) -> None:
    if settings.micro_batch_size is not None and settings.micro_batch_tokens is not None:
        remedy = f"micro_batch_size={settings.micro_batch_size} is set too; both set what is run at once, so remove one"
        raise _refused(settings, "micro_batch_tokens", remedy)
    if settings.batch_tokens and settings.batch_changes:
        key = "use_maximum_batch_size" if settings.use_maximum_batch_size else "batch_increase_function"
        remedy = f"a step holds tokens, and {key} sets its rows; remove one (what fits is found with batch_tokens alone, too)"
        raise _refused(settings, "batch_tokens", remedy)
    if settings.max_rows_per_batch is not None and settings.min_rows_per_batch > settings.max_rows_per_batch:
        remedy = f"max_rows_per_batch is {settings.max_rows_per_batch}; give that or less"
        raise _refused(settings, "min_rows_per_batch", remedy)
    size = settings.micro_batch_size
    changes = settings.batch_changes or settings.grows or bool(settings.batch_tokens)
    rows_alike = settings.uniform_micro_batches in ("rows", "both") and not changes
    splits = isinstance(size, int) and 1 < size < settings.step_rows
    if rows_alike and splits and largest_divisor(settings.step_rows, at_most=int(size or 1)) == 1:
        remedy = (
            f"the {settings.step_rows} rows of a step divide into equal micro-batches of up to {size} only one by one; "
            "change batch_size or micro_batch_size so that one divides the other"
        )
        raise _refused(settings, "uniform_micro_batches", remedy)


def _check_schedule(settings: Settings, config: Mapping[str, Any]) -> None:
    rule = settings.batch_size_schedule
    if rule is not None and settings.gradient_accumulation_steps > 1:
        remedy = "batch_size_schedule gives the rows of a whole step, and its micro-batches follow from what fits; set it to 1"
        raise _refused(settings, "gradient_accumulation_steps", remedy)
    if rule is not None and settings.batch_tokens and needs_noise_scale(rule):
        remedy = "the gradient noise scale is counted in rows; remove batch_tokens, or take another schedule"
        raise _refused(settings, "batch_tokens", remedy)
    if settings.lr_clock.warmup != settings.lr_clock.decay and config.get("lr_scheduler") is not None:
        steps = config["lr_scheduler"].get("num_warmup_steps")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise SettingError(
                "lr_clock",
                config["lr_clock"],
                "a warm-up in another unit needs a scheduler with num_warmup_steps, such as "
                "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup; give one unit for both",
            )


def _check_optimizer_in_backward(settings: Settings, config: Mapping[str, Any]) -> None:
    if not settings.optimizer_in_bwd:
        return
    nothing_accumulates = "with the optimizer in backward each micro-batch is stepped as it comes, so a step is one"
    off = "or set optimizer_in_bwd=False"
    if settings.gradient_accumulation_steps > 1:
        remedy = f"{nothing_accumulates}; set it to 1, {off}"
        raise _refused(settings, "gradient_accumulation_steps", remedy)
    if config.get("clip_grad_norm") is not None:
        raise SettingError(
            "clip_grad_norm",
            config["clip_grad_norm"],
            f"with the optimizer in backward there is never a whole gradient; set it to null, {off}",
        )
    if settings.on_out_of_memory == "shrink":
        raise SettingError(
            "on_out_of_memory",
            "shrink",
            "with the optimizer in backward a step that failed has changed some weights already, and cannot be replayed; "
            f"give raise, {off}",
        )
    if settings.measures_noise:
        key = "log_gradient_noise_scale" if settings.log_gradient_noise_scale else "batch_size_schedule"
        remedy = "with the optimizer in backward there is no gradient left to measure; remove it"
        raise SettingError(key, config[key], f"{remedy}, {off}")
    for key in (*TOKEN_KEYS, "uniform_micro_batches", "grow_beyond_maximum"):
        if config.get(key):
            raise SettingError(key, config[key], f"{nothing_accumulates}; remove it, {off}")
    size = settings.micro_batch_size
    if isinstance(size, int) and (size < settings.batch_size or settings.batch_changes or settings.grows):
        raise SettingError("micro_batch_size", size, f"{nothing_accumulates}; remove it, {off}")


# --- without effect -----------------------------------------------------------------------------------------------------

_ONE_RANK = "it is for several ranks, and this is one (tune run --nproc_per_node N starts more)"


def without_effect(settings: Settings, config: Mapping[str, Any], *, ranks: int = 1) -> list[tuple[str, str]]:
    """Return the keys that are set and do nothing, each with the reason.

    Args:
        settings: as read from `config`.
        config: the whole configuration, as plain dicts and lists.
        ranks: that train.
    """
    found = [*_without_what_they_need(settings, config), *_overruled(settings, config)]
    if ranks == 1:
        found += [(name, _ONE_RANK) for name in ("fsdp_cpu_offload", "custom_sharded_layers") if config.get(name)]
        if not settings.sync_gradients_every_micro_batch:
            found.append(("sync_gradients_every_micro_batch", _ONE_RANK))
    probe, default = settings.probe, type(settings.probe)()
    if probe != default:
        fits_itself = settings.validation is not None and settings.validation.fits_itself
        if not settings.needs_bound and not fits_itself:
            found.append(("probe", "nothing that needs to know what fits is on"))
        elif probe.sequence_lengths:
            found.append(("probe.sequence_lengths", "it is for adaptive_probe"))
    if settings.estimate != type(settings.estimate)():
        found.append(("estimate", "it is for adaptive_estimate"))
    return found


def without_effect_on_probe(probe: ProbeSettings, *, ranks: int = 1) -> list[tuple[str, str]]:
    """Return the keys of the `probe` block that are set and do nothing in ``adaptive_probe``, each with the reason.

    Args:
        probe: the block.
        ranks: that probe.
    """
    reasons = {"assumed_maximum": "it is for preview"}
    if probe.sequence_lengths:
        reasons["sequence_length"] = "probe.sequence_lengths gives them"
    if ranks == 1:
        reasons["trial_timeout"] = "it is for several ranks, and this is one"
    return _changed(probe, reasons)


def without_effect_on_estimate(settings: Settings) -> list[tuple[str, str]]:
    """Return the keys of the `probe` block that are set and do nothing in ``adaptive_estimate``, each with the reason."""
    reasons = {
        "device_memory": "estimate.devices gives what the devices have",
        "sequence_lengths": "it is for adaptive_probe; give estimate.sequence_lengths",
        "assumed_maximum": "it is for preview",
    }
    if settings.estimate.sequence_lengths:
        reasons["sequence_length"] = "estimate.sequence_lengths gives the lengths"
    if settings.estimate.headroom is not None:
        reasons["headroom"] = "estimate.headroom gives it"
    tries = ("search", "cache", "round_to_power_of_two", "trial_timeout")
    reasons |= dict.fromkeys(tries, "an estimate tries nothing, and returns the largest size that fits")
    return _changed(settings.probe, reasons)


def _changed(probe: ProbeSettings, reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the keys of the `probe` block, of those with a reason, that are not at their default."""
    default = type(probe)()
    return [(f"probe.{key}", reason) for key, reason in reasons.items() if getattr(probe, key) != getattr(default, key)]


def _without_what_they_need(settings: Settings, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys that are set without the key that they are for."""
    for prefix, block, given in (("", settings, config), ("probe.", settings.probe, config.get("probe") or {})):
        for name, key in keys_of(type(block)).items():
            is_set = given.get(name) is not None and given[name] is not False
            if is_set and key.needs and not any(_is_set(need, settings, config) for need in key.needs):
                needs = " or ".join(key.needs)
                yield prefix + name, f"it is for {needs}" + ("" if "=" in needs else ", which is not set")


def _is_set(need: str, settings: Settings, config: Mapping[str, Any]) -> bool:
    """Return whether a key is set; of ``key=value``, whether it has that value."""
    name, _, value = need.partition("=")
    return bool(getattr(settings, name) == value if value else config.get(name))


def _overruled(settings: Settings, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys whose place another key takes."""
    accumulates = settings.gradient_accumulation_steps > 1
    if settings.batch_tokens and accumulates and (settings.lr_scaling == "none" or settings.reference_batch_size):
        yield "gradient_accumulation_steps", "batch_tokens sets what a step holds"
    if settings.sample_order != "dataloader" and config.get("shuffle") is False:
        yield "shuffle", f"sample_order={settings.sample_order} sets the order of rows"
    if settings.batch_size_schedule is not None and settings.use_maximum_batch_size:
        yield "use_maximum_batch_size", "batch_size_schedule sets the rows of a step"
    if settings.measures_noise and (why := _why_no_noise(settings)):
        yield "log_gradient_noise_scale" if settings.log_gradient_noise_scale else "batch_size_schedule", why


def _why_no_noise(settings: Settings) -> str:
    """Return why steps give no sample of the gradient noise scale; empty where they do."""
    if settings.micro_batch_tokens is not None:
        return (
            "micro-batches by tokens are grouped by length, so they are no random part of a step; use micro_batch_size"
        )
    if settings.sample_order == "seqlen":
        return "rows come sorted by length, so a micro-batch is no random part of a step"
    whole_steps = settings.micro_batch_size is None and settings.gradient_accumulation_steps == 1
    if whole_steps and not settings.grow_beyond_maximum:
        return "a step is one micro-batch, and it takes two; set micro_batch_size or gradient_accumulation_steps"
    return ""
