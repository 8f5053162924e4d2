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
        context: what the CUDA context takes outside the allocator, in bytes or as a size such as ``"600MiB"``; None for what is
            known of public out-of-memory messages, and for nothing where ``device`` is ``cpu``.
    """

    devices: object = None
    sequence_lengths: tuple[int | str, ...] = ()
    world_size: int = 1
    changes: bool = True
    headroom: float | None = None
    context: int | str | None = None

    def lengths_of(self, probe: ProbeSettings) -> tuple[str, tuple[int | str, ...]]:
        """The key that gives the lengths, and the lengths."""
        if self.sequence_lengths:
            return "estimate.sequence_lengths", self.sequence_lengths
        return "probe.sequence_length", (probe.sequence_length,)

    @property
    def context_bytes(self) -> int | None:
        """The size of `context`; None where it is not set."""
        if self.context in (None, 0):
            return self.context  # type: ignore[return-value]
        return parse_size(self.context, total_bytes=0)

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
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        if self.devices is not None:
            parse_devices(self.devices)
        check_whole("estimate.world_size", self.world_size)
        check_bool("estimate.changes", self.changes)
        if self.headroom is not None:
            check_share("estimate.headroom", self.headroom)
        try:
            if isinstance(self.context, bool | float):
                raise ValueError
            _ = self.context_bytes
        except ValueError:
            remedy = 'give a size such as "600MiB", or a whole number of bytes'
            raise SettingError("estimate.context", self.context, remedy) from None
