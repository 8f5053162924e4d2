"""What a run that ended on all ranks at once leaves for its next start: ``lost.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import atomic_write
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.distributed import End

from .data import Data
from .job import Job
from .probe_cache import settings_name
from .resumed_run import ResumedRun

# Kinds of trials that ended all ranks, in words.
TRIALS = {
    "trial_rows": "",
    "trial_rows_val": "of validation ",
    "trial_rows_reference": "of the reference ",
}


class LostRun:
    """Why an earlier attempt of this run ended on all ranks: a limit that was too large, or a trial
    without an answer.

    Reading is a collective; what belongs to another run is deleted.

    Args:
        job: job of the run.
        name: name of the run.
        resumes: whether the run resumes from a checkpoint; one that torchrun has started again need
            not.
        trials_name: name of what the answer of a trial depends on; with another name it is another
            question.
    """

    def __init__(self, job: Job, *, name: str, resumes: bool, trials_name: str) -> None:
        self._settings = job.settings
        self._path = Path(job.cfg.output_dir) / "adaptive_batch" / "lost.json"
        self._name = name
        self._trials_name = trials_name
        self._facts: dict[str, Any] = distributed.from_rank_zero(
            lambda: self._read(resumes=resumes)
        )

    @classmethod
    def of(cls, job: Job, data: Data, resumed: ResumedRun) -> LostRun:
        """Read what an attempt of this run has left."""
        trials_name = settings_name(job, data)
        return cls(job, name=resumed.name, resumes=bool(resumed.saved), trials_name=trials_name)

    def trial_rows(self, key: str) -> int | None:
        """Return the rows of a trial that ended all ranks, by a key of :data:`TRIALS`; None where
        none did.
        """
        rows: int | None = self._facts.get(key)
        return rows

    def limit(self, conditions: Mapping[str, Any]) -> MicroBatchLimit | None:
        """Return the limit that would have been less, under the same conditions; None where memory
        did not run out.
        """
        amount = self._facts.get("limit")
        if not amount or any(self._facts[key] != value for key, value in conditions.items()):
            return None
        return MicroBatchLimit(amount, self._facts["unit"])

    def write_down(
        self,
        end: End,
        *,
        event: Callable[..., object],
        conditions: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Log why all ranks end, and keep what a restart should know.

        Args:
            end: why they end.
            event: function that takes a kind, a message and facts.
            conditions: function that returns what a limit of training depends on.
        """
        event("ended", end.message, prints=False, rank=end.rank, reason=end.kind, **end.facts)
        shrinks = self._settings.on_out_of_memory == "shrink"
        self.keep(end.facts, conditions() if shrinks else None)

    def keep(self, facts: Mapping[str, Any], conditions: Mapping[str, Any] | None) -> None:
        """Write down why the ranks end, beside what an earlier attempt has kept.

        Args:
            facts: facts of the rank that ended first.
            conditions: what a limit depends on; None where no limit is to be kept.
        """
        kept = {key: facts[key] for key in TRIALS if key in facts}
        if kept:
            kept["trial_settings"] = self._trials_name
        if "limit" in facts and conditions is not None:
            kept |= {"limit": facts["limit"], "unit": facts["unit"], **conditions}
        if kept:
            self._facts |= {"run": self._name, "launch": distributed.launch_name(), **kept}
            atomic_write(self._path, json.dumps(self._facts))

    def _read(self, *, resumes: bool) -> dict[str, Any]:
        try:
            facts: dict[str, Any] = json.loads(self._path.read_text())
            is_restart = (
                facts["launch"] is not None and facts["launch"] == distributed.launch_name()
            )
            if not (is_restart or (resumes and facts["run"] == self._name)):
                self._path.unlink()
                return {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        if facts.get("trial_settings") != self._trials_name:
            facts = {key: value for key, value in facts.items() if not key.startswith("trial_")}
        return facts
