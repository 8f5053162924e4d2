"""Settings that are set and do nothing, each with the reason: a user who set one should hear of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .estimate_settings import EstimateSettings
from .probe_settings import ProbeSettings
from .settings import Settings


def without_effect(settings: Settings, config: Mapping[str, Any], *, ranks: int = 1) -> list[tuple[str, str]]:
    """The keys that are set and do nothing, each with the reason.

    Args:
        settings: as read from `config`.
        config: the whole configuration, as plain dicts and lists.
        ranks: that train.
    """
    found: list[tuple[str, str]] = []

    def say(keys: tuple[str, ...], reason: str) -> None:
        found.extend((key, reason) for key in keys if config.get(key) is not None)

    def say_if_on(keys: tuple[str, ...], reason: str) -> None:
        found.extend((key, reason) for key in keys if config.get(key))

    if ranks == 1:
        alone = "it is for several ranks, and this is one (tune run --nproc_per_node N starts more)"
        say_if_on(("fsdp_cpu_offload", "custom_sharded_layers"), alone)
        if not settings.sync_gradients_every_micro_batch:
            found.append(("sync_gradients_every_micro_batch", alone))
    if not settings.batch_tokens:
        say(
            ("min_rows_per_batch", "max_rows_per_batch", "long_rows"),
            "it is for steps by batch_tokens, which is not set",
        )
    elif settings.gradient_accumulation_steps > 1 and (settings.lr_scaling == "none" or settings.reference_batch_size):
        say(("gradient_accumulation_steps",), "batch_tokens says what a step holds")
    if settings.sample_order != "dataloader" and config.get("shuffle") is False:
        say(("shuffle",), f"sample_order={settings.sample_order} says in which order rows come")
    if settings.sample_order != "seqlen":
        say(("sample_window",), "it is for sample_order=seqlen")
    if settings.measures_noise and (why := _why_no_noise(settings)):
        found.append(("log_gradient_noise_scale" if settings.log_gradient_noise_scale else "batch_size_schedule", why))
    if not settings.grows:
        say_if_on(("grow_beyond_maximum",), "no rule makes the batch grow")
    if settings.batch_size_schedule is not None:
        say_if_on(("use_maximum_batch_size",), "batch_size_schedule says how many rows a step has")
    if settings.save_every_n_steps is None:
        say(("keep_last_n_checkpoints",), "it is for save_every_n_steps, which is not set")
        say_if_on(("enable_async_checkpointing",), "it is for save_every_n_steps, which is not set")
    if not config.get("resume_from_checkpoint"):
        say(("resume_allow_changes",), "resume_from_checkpoint is False, so nothing is compared")
    if config.get("lr_scheduler") is None:
        say(("lr_clock",), "there is no lr_scheduler")
    if settings.lr_scaling == "none":
        say(("reference_batch_size",), "lr_scaling is none; linear or sqrt would use it")
    if settings.validation is None:
        reason = "run_val_every_n_steps is not set, so nothing is validated"
        say(("dataset_val", "batch_size_val", "max_validation_batches"), reason)
    if settings.probe.assumed_maximum is not None and not settings.plan_only:
        found.append(("probe.assumed_maximum", "it is for plan_only; training finds what fits"))
    if config.get("probe") and settings.probe != ProbeSettings():
        if not settings.needs_bound and not (settings.validation and settings.validation.fits_itself):
            say(("probe",), "nothing that needs to know what fits is on")
        elif settings.probe.sequence_lengths:
            found.append(("probe.sequence_lengths", "it is for adaptive_probe"))
    if settings.estimate != EstimateSettings():
        found.append(("estimate", "it is for adaptive_estimate"))
    return found


def without_effect_on_probe(probe: ProbeSettings, *, ranks: int = 1) -> list[tuple[str, str]]:
    """The keys of the `probe` block that are set and do nothing in ``adaptive_probe``, each with the reason.

    Args:
        probe: the block.
        ranks: that probe.
    """
    reasons = {"assumed_maximum": "it is for plan_only"}
    if probe.sequence_lengths:
        reasons["sequence_length"] = "probe.sequence_lengths says which"
    if ranks == 1:
        reasons["trial_timeout"] = "it is for several ranks, and this is one"
    return _set(probe, reasons)


def without_effect_on_estimate(settings: Settings) -> list[tuple[str, str]]:
    """The keys of the `probe` block that are set and do nothing in ``adaptive_estimate``, each with the reason."""
    reasons = {
        "device_memory": "estimate.devices gives what the devices have",
        "sequence_lengths": "it is for adaptive_probe; give estimate.sequence_lengths",
        "assumed_maximum": "it is for plan_only",
    }
    if settings.estimate.sequence_lengths:
        reasons["sequence_length"] = "estimate.sequence_lengths gives the lengths"
    if settings.estimate.headroom is not None:
        reasons["headroom"] = "estimate.headroom gives it"
    tries = ("search", "cache", "round_to_power_of_two", "trial_timeout")
    reasons |= dict.fromkeys(tries, "an estimate tries nothing, and returns the largest size that fits")
    return _set(settings.probe, reasons)


def _set(probe: ProbeSettings, reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Those of the keys of the `probe` block that are not at their default."""
    default = ProbeSettings()
    return [(f"probe.{key}", reason) for key, reason in reasons.items() if getattr(probe, key) != getattr(default, key)]


def _why_no_noise(settings: Settings) -> str:
    """Why steps give no sample of the gradient noise scale; empty where they do."""
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
