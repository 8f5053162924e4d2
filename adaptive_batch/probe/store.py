"""Records of searches on disk: results and memory curves."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adaptive_batch._util import atomic_write

log = logging.getLogger("adaptive_batch")

_FORMAT = 4
# Records of other lengths, devices or settings that a file keeps beside the newest.
_KEPT = 31


class Store:
    """Records in a JSON file: the newest at its top level, those before it under ``earlier``.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, value: str, *, name: str = "fingerprint") -> dict[str, Any] | None:
        """Return the newest record of which a name has this value; None where there is none."""
        found = [record for record in self._records() if record.get(name) == value]
        return found[-1] if found else None

    def put(self, fingerprint: str, record: Mapping[str, Any]) -> None:
        """Keep a record under the fingerprint of all that it depends on, if the disk lets it."""
        earlier = [each for each in self._records() if each["fingerprint"] != fingerprint]
        names = {"format": _FORMAT, "fingerprint": fingerprint}
        text = json.dumps({**names, **record, "earlier": earlier[-_KEPT:]}, indent=2)
        try:
            atomic_write(self.path, text, sync=True)
        except OSError as error:
            log.warning("%s cannot be written (%s); the next run searches again", self.path, error)

    def _records(self) -> list[dict[str, Any]]:
        """Return the records, oldest first; none where the file cannot be read."""
        try:
            latest = json.loads(self.path.read_text())
            records = [*latest.pop("earlier"), latest]
            if any(
                record["format"] != _FORMAT or "fingerprint" not in record for record in records
            ):
                raise ValueError("it was written by another version")
            return records
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s cannot be read (%r); probing again", self.path, error)
            return []
