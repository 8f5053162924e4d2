"""The `probe` block of the configuration, and every check of it that needs no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from adaptive_batch._util import check_bool, check_share, check_whole, nearest
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import check_device_memory

SEARCHES = ("predict", "binary", "halve")
# Keys of an estimate, which has a block and a recipe of its own.
_MOVED = {"plan_for": "devices", "plan_world_size": "world_size", "plan_changes": "changes"}


@dataclass(frozen=True)
class ProbeSettings:
    """The `probe` block.

    Attributes:
        search: ``predict``, ``binary`` or ``halve``.
        device_memory: what a trial may use: None for what is available, a size such as ``"12GiB"``, or a share of the device.
        headroom: share of that which is left free, in [0, 1).
        sequence_length: ``longest`` (the longest real rows), ``max_seq_len`` (rows as long as the tokenizer cuts them), or a
            number of tokens.
        sequence_lengths: for ``adaptive_probe``: one search for each.
        round_to_power_of_two: train with the power of two at or below the bound.
        maximum: no larger size is tried; where ``halve`` starts.
        cache: use a bound that was found before, after trying it once.
        trial_timeout: with several ranks, seconds after which a trial that does not end ends the run.
        assumed_maximum: rows that fit, for ``plan_only``, which tries nothing; None for what a search has found before.
    """

    search: str = "predict"
    device_memory: int | float | str | None = None
    headroom: float = 0.05
    sequence_length: int | str = "longest"
    sequence_lengths: tuple[int | str, ...] = ()
    round_to_power_of_two: bool = True
    maximum: int = 4096
    cache: bool = True
    trial_timeout: int = 600
    assumed_maximum: int | None = None

    @classmethod
    def from_config(cls, config: object) -> ProbeSettings:
        """Read and check the block.

        Raises:
            SettingError: an unknown key, or a value that cannot be used.
        """
        if config is None:
            return cls()
        if not isinstance(config, Mapping):
            raise SettingError("probe", config, "give a block of settings, such as probe.search=predict")
        known = [field.name for field in fields(cls)]
        for key in config:
            if key in _MOVED:
                raise SettingError(
                    f"probe.{key}",
                    config[key],
                    f"it is estimate.{_MOVED[key]} now: tune run adaptive_estimate --config NAME estimate.devices=...",
                )
            if key not in known:
                raise SettingError(f"probe.{key}", config[key], f"there is no such key; {nearest(str(key), known)}")
        values = {key: value for key, value in config.items() if value is not None}
        if "sequence_lengths" in values:
            values["sequence_lengths"] = read_lengths("probe.sequence_lengths", values["sequence_lengths"])
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        if self.search not in SEARCHES:
            raise SettingError("probe.search", self.search, f"give one of {', '.join(SEARCHES)}")
        check_device_memory("probe.device_memory", self.device_memory)
        check_share("probe.headroom", self.headroom)
        _check_length("probe.sequence_length", self.sequence_length)
        check_bool("probe.round_to_power_of_two", self.round_to_power_of_two)
        check_whole("probe.maximum", self.maximum)
        check_bool("probe.cache", self.cache)
        check_whole("probe.trial_timeout", self.trial_timeout, remedy="give seconds, a whole number, 1 or more")
        if self.assumed_maximum is not None:
            check_whole("probe.assumed_maximum", self.assumed_maximum)


def read_lengths(key: str, lengths: object) -> tuple[int | str, ...]:
    """A list of lengths, each ``longest``, ``max_seq_len`` or a number of tokens.

    Raises:
        SettingError: naming `key`.
    """
    if not isinstance(lengths, list | tuple) or not lengths:
        raise SettingError(key, lengths, "give a list of lengths, such as [512, 1024, 2048]")
    if twice := next((length for number, length in enumerate(lengths) if length in lengths[:number]), None):
        raise SettingError(key, lengths, f"{twice} is there twice; leave one out")
    for length in lengths:
        _check_length(key, length)
    return tuple(lengths)


def _check_length(key: str, length: object) -> None:
    if not isinstance(length, str):
        check_whole(key, length)
    elif length not in ("longest", "max_seq_len"):
        raise SettingError(key, length, "give longest, max_seq_len or a number of tokens")
