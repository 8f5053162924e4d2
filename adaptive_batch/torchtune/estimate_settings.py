"""The `estimate` block of the configuration: devices that are not here, and what is estimated for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from adaptive_batch._util import check_bool, check_share, check_whole, nearest
from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import parse_devices
from adaptive_batch.memory import parse_size

from .probe_settings import ProbeSettings, read_lengths


@dataclass(frozen=True)
class EstimateSettings:
    """The `estimate` block, for ``adaptive_estimate``.

    Attributes:
        devices: a size or a name, or a list of them; ``adaptive_estimate`` needs it.
        sequence_lengths: each as `probe.sequence_length`; empty for that one alone.
        world_size: ranks that share the model.
        changes: also estimate what single changes of the configuration would bring.
        headroom: share of the memory that is left free, in [0, 1); None for `probe.headroom`.
        context: bytes that the CUDA context takes outside the allocator, given as a number or as a size such as ``"600MiB"``; None
            for what public out-of-memory messages show, and for nothing where ``device`` is ``cpu``.
    """

    devices: object = None
    sequence_lengths: tuple[int | str, ...] = ()
    world_size: int = 1
    changes: bool = True
    headroom: float | None = None
    context: int | None = None

    def lengths_of(self, probe: ProbeSettings) -> tuple[str, tuple[int | str, ...]]:
        """The key that gives the lengths, and the lengths."""
        if self.sequence_lengths:
            return "estimate.sequence_lengths", self.sequence_lengths
        return "probe.sequence_length", (probe.sequence_length,)

    @classmethod
    def from_config(cls, config: object) -> EstimateSettings:
        """Read and check the block.

        Raises:
            SettingError: an unknown key, or a value that cannot be used.
        """
        if config is None:
            return cls()
        if not isinstance(config, Mapping):
            raise SettingError("estimate", config, "give a block of settings, such as estimate.devices=[H100]")
        known = [field.name for field in fields(cls)]
        for key in config:
            if key not in known:
                raise SettingError(f"estimate.{key}", config[key], f"there is no such key; {nearest(str(key), known)}")
        values = {key: value for key, value in config.items() if value is not None}
        if "sequence_lengths" in values:
            values["sequence_lengths"] = read_lengths("estimate.sequence_lengths", values["sequence_lengths"])
        if "context" in values:
            values["context"] = _read_context(values["context"])
        settings = cls(**values)
        if settings.devices is not None:
            parse_devices(settings.devices)
        check_whole("estimate.world_size", settings.world_size)
        check_bool("estimate.changes", settings.changes)
        if settings.headroom is not None:
            check_share("estimate.headroom", settings.headroom)
        return settings


def _read_context(value: object) -> int:
    try:
        if isinstance(value, int | str) and not isinstance(value, bool):
            return 0 if value == 0 else parse_size(value, total_bytes=0)
    except ValueError:
        pass
    remedy = 'give a size such as "600MiB", or a whole number of bytes'
    raise SettingError("estimate.context", value, remedy)
