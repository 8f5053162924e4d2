"""The proof, from the record of a run alone, that in every epoch each row was used exactly once across all restarts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptive_batch.errors import SettingError

from .history.ledger import Epoch, Ledger
from .history.lineage import Lineage, Record, follow, trace
from .run_log import iterate_records

RECORD = Path("adaptive_batch") / "run.jsonl"


@dataclass(frozen=True)
class Audit:
    """What a record proves.

    Attributes:
        lines: the whole of it as aligned text, the verdict last.
        problems: why it does not hold, one sentence each; the first fifty.
    """

    lines: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether each row was used exactly once in each epoch, or is said to be left out, and nothing speaks against it."""
        return not self.problems


class _File:
    """The records of a file, which can be gone through more than once without being kept."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[Record | None]:
        return iterate_records(self._path)


def audit(output_dir: str | Path) -> Audit:
    """Audits the record of a run, read line by line.

    Args:
        output_dir: where the run wrote; its record is ``adaptive_batch/run.jsonl`` in it.

    Raises:
        SettingError: there is no such folder, or no record that can be read in it.
    """
    folder, path = Path(output_dir), Path(output_dir) / RECORD
    if not folder.is_dir():
        raise SettingError("OUTPUT_DIR", str(output_dir), "there is no such folder; give the output_dir of a run")
    try:
        path.open("rb").close()
    except OSError as error:
        remedy = f"{path} cannot be read ({error.strerror}); give the output_dir of a run"
        raise SettingError("OUTPUT_DIR", str(output_dir), remedy) from None
    return audit_records(_File(path))


def audit_records(records: Iterable[Record | None]) -> Audit:
    """Audits records.

    Args:
        records: of one file, in order, None for a torn line; gone through twice, so no iterator.
    """
    lineage = trace(records)
    ledger = Ledger(lineage)
    for entry in follow(records, lineage):
        ledger.add(entry)
    ledger.finish()
    return Audit(tuple(_aligned(_report(ledger, lineage))), tuple(ledger.problems))


def _report(ledger: Ledger, lineage: Lineage) -> Iterator[tuple[str, str]]:
    """Everything as pairs of a heading and one line, the verdict last."""
    torn = f", {ledger.num_torn:,} of them torn" if ledger.num_torn else ""
    yield "record", f"{lineage.num_records:,} lines{torn}"
    if others := len(set(lineage.runs) - {0, lineage.run}):
        yield (
            "",
            f"the last run is audited; {others} earlier or other {'run is' if others == 1 else 'runs are'} left aside",
        )
    resumed = [f"{steps:,}" for steps in ledger.starts[1:]]
    went_on = f", resumed {_times(len(resumed))} at step {_listed(resumed)}" if resumed else ""
    yield "starts", f"{len(ledger.starts)}{went_on}"
    for epoch in ledger.epochs:
        yield f"epoch {epoch.number}", _describe(epoch)
    yield from (("batch size", line) for line in ledger.batch_sizes.lines())
    yield from (("lr", line) for line in ledger.rates.lines())
    yield from (("capacity", line) for line in ledger.capacities or ["unchanged"])
    yield from (("repeats", line) for line in _repeated(ledger))
    yield from (("note", note) for note in [*ledger.notes, *_first(ledger.repeats.explained)])
    yield from (("problem", problem) for problem in _first(ledger.problems, num_all=ledger.num_problems))
    yield "verdict", _verdict(ledger)


def _repeated(ledger: Ledger) -> Iterator[str]:
    repeats = ledger.repeats
    unlike = len(repeats.different) + len(repeats.explained)
    if unlike:
        yield f"steps done again: {repeats.num_alike + unlike:,}, alike: {repeats.num_alike:,}"
    else:
        yield f"steps done again: {repeats.num_alike:,}" + (", all alike" if repeats.num_alike else "")
    if repeats.num_open:
        yield f"steps taken back and not done again so far: {repeats.num_open:,}"


def _describe(epoch: Epoch) -> str:
    steps = f"steps {epoch.steps[0]:,} to {epoch.steps[1]:,}" if epoch.steps[0] else "no step"
    if not epoch.is_done:
        return f"{steps}, goes on: {epoch.used:,} of {epoch.num_rows:,} rows used so far"
    reasons = ", ".join(f"{reason} {rows:,}" for reason, rows in epoch.reasons.items())
    left_out = f", {epoch.num_rows - epoch.used:,} left out ({reasons})" if reasons else ""
    return f"{steps}: {epoch.used:,} of {epoch.num_rows:,} rows used{left_out}"


def _verdict(ledger: Ledger) -> str:
    if ledger.num_problems:
        return f"DOES NOT HOLD: {ledger.num_problems:,} {'problem' if ledger.num_problems == 1 else 'problems'}"
    parts = []
    for epoch in ledger.epochs:
        whole = epoch.is_done and epoch.used == epoch.num_rows
        left_out = f", {epoch.num_rows - epoch.used:,} left out as said" if epoch.is_done else " so far"
        rows = f"each of {epoch.num_rows:,} rows" if whole else f"{epoch.used:,} of {epoch.num_rows:,} rows"
        parts.append((f"{rows} exactly once in", "" if whole else left_out, epoch.number))
    sentences = []
    for words in dict.fromkeys(part[:2] for part in parts):
        sentences.append(f"{words[0]} {_ranges([part[2] for part in parts if part[:2] == words])}{words[1]}")
    return "holds: " + ("; ".join(sentences) or "no step counts yet")


def _aligned(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Pairs as lines; a heading that comes again is left away."""
    listed = list(pairs)
    width = max(len(heading) for heading, _ in listed)
    before = ""
    for heading, line in listed:
        yield f"{'' if heading == before else heading:<{width}}  {line}"
        before = heading or before


def _first(sentences: Sequence[str], *, num_all: int | None = None) -> list[str]:
    """The first twenty, and how many more there are."""
    more = (len(sentences) if num_all is None else num_all) - 20
    return [*sentences[:20], f"and {more:,} more"] if more > 0 else list(sentences)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _listed(words: Sequence[str]) -> str:
    """``40``, ``40 and 62``; of many the first ten."""
    if len(words) > 10:
        return f"{', '.join(words[:10])}, ..."
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _ranges(numbers: Sequence[int]) -> str:
    """``epoch 1``, ``epochs 0 to 2 and 4``."""
    pieces: list[list[int]] = []
    for one in numbers:
        if pieces and one == pieces[-1][-1] + 1:
            pieces[-1] = [pieces[-1][0], one]
        else:
            pieces.append([one])
    words = _listed([" to ".join(map(str, piece)) for piece in pieces])
    return f"{'epoch' if len(numbers) == 1 else 'epochs'} {words}"
