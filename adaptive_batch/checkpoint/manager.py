"""Resume points: what a run needs to go on, in ``{output_dir}/step_N``, each whole or absent.

A point is written into a fresh folder aside, flushed to the disk and renamed, so a kill at any moment leaves the points that
were whole. Older ones are removed when a newer one is whole, and not before. Several ranks write one point together, each what it
holds, into a file system that they share; what goes wrong on one goes wrong on all.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from adaptive_batch.distributed import Agreement
from adaptive_batch.errors import CheckpointError

from .content import Content, HostCopies, gathered_content
from .resume_point import PassedOver, ResumePoint, examine, flush_folder, write_point

__all__ = ["PassedOver", "ResumePoint", "ResumePoints", "newest_whole"]

log = logging.getLogger("adaptive_batch")

_STEP = re.compile(r"step_\d+")
_SAVING, _REPLACED, _REMOVED = ".saving-", ".replaced-", ".removed-"


def newest_whole(output_dir: Path) -> tuple[ResumePoint | None, list[PassedOver]]:
    """The resume point that was saved last and is whole, every file read and compared with its checksum.

    With several ranks one of them asks, and tells the others; a point can be pickled.

    Args:
        output_dir: of the run; it need not exist.

    Returns:
        The point, or None; and what was passed over before it was found: points that are newer, or of which nobody can say
        whether they are, each with the reason.
    """
    points, passed_over = _examined(output_dir)
    for point in points:
        if (damage := point.damage()) is None:
            return point, [other for other in passed_over if other.order is None or other.order > point.order]
        passed_over.append(PassedOver(point.path, damage, True, point.order))
    return None, passed_over


class ResumePoints:
    """Saves resume points, and removes old ones.

    With a process group, every rank makes one of these, calls the same methods in the same order, and sees them end alike.

    Args:
        output_dir: of the run.
        keep_last: whole points to keep; older ones, and older broken ones that were ours, are removed after each save. None keeps all.
        asynchronous: :meth:`save` copies the tensors to the host and returns, and a thread writes. Where the host has no room
            for the copy, that point is saved synchronously, and that is said.
        on_failure: is told of a save that failed, in the thread of the caller; None raises the error instead.
        process_group: whose ranks save together; None for one process. An asynchronous save needs one that nothing else uses.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        keep_last: int | None = None,
        asynchronous: bool = False,
        on_failure: Callable[[CheckpointError], object] | None = None,
        process_group: Any = None,
    ) -> None:
        assert keep_last is None or keep_last >= 1, keep_last
        self._output_dir = Path(output_dir)
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._on_failure = on_failure
        self._ranks = Agreement(process_group)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._copies = HostCopies(self._ranks)

    @property
    def is_saving(self) -> bool:
        """Whether an asynchronous save is being written now."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, tensors_tree: Any, small_state: Any) -> float:
        """Save what a run needs to go on.

        Args:
            step: optimizer steps so far; a point of the same step is replaced.
            tensors_tree: the large part, such as ``{"model": ..., "optimizer": ...}``; see :func:`.state_tree.flatten`. Alike on all
                ranks but for what each holds of a DTensor.
            small_state: the rest, of the same kinds of value; it can be read alone. That of rank zero is saved.

        Returns:
            Seconds that training stood still, waiting for an earlier asynchronous save included.

        Raises:
            CheckpointError: saving failed on one rank at least, or the asynchronous save before this one, which is then not begun;
                what was saved before is untouched.
            TypeError: a value is of a kind that cannot be saved; nothing was written.
        """
        start = time.perf_counter()
        self.wait()
        try:
            content = gathered_content(tensors_tree, small_state, self._ranks)
            copies = self._copies.of(content.tensors) if self._asynchronous else None
        except CheckpointException as error:  # of several ranks
            message = f"step {step} cannot be saved ({self._ranks.reason(error)})"
            if any(isinstance(failed, TypeError) for failed, _ in error.failures.values()):
                raise TypeError(message) from error
            self._error = CheckpointError(f"{message}; what was saved before is untouched")
        else:
            if copies is None:
                self._run(step, content)
            else:
                arguments = (step, replace(content, tensors=copies))
                self._thread = threading.Thread(target=self._run, args=arguments, name=f"save step_{step}")
                self._thread.start()
        if self._thread is None:
            self._report()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Return when the last save is whole.

        Raises:
            CheckpointError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._report()

    def close(self) -> None:
        """Wait, and let go of the memory of the copies.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            self.wait()
        finally:
            self._copies.release()

    def __enter__(self) -> ResumePoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, step: int, content: Content) -> None:
        """Save; the error is kept for :meth:`_report`, as this may be another thread."""
        try:
            self._write(step, content)
        except Exception as error:
            self._error = error

    def _report(self) -> None:
        error, self._error = self._error, None
        if isinstance(error, CheckpointError) and self._on_failure is not None:
            self._on_failure(error)
        elif error is not None:
            raise error

    def _write(self, step: int, content: Content) -> None:
        """Each rank goes through the same steps; one that fails on any of them is the last for all."""
        target = self._output_dir / f"step_{step}"
        aside = self._output_dir / f"{_SAVING}step_{step}"
        ranks = self._ranks
        try:
            order = ranks.from_rank_zero(lambda: self._prepare(target, aside))
            write_point(aside, step=step, order=order, tensors=content.tensors, state=content.state, ranks=ranks)
            ranks.from_rank_zero(lambda: self._move_into_place(aside, target))
        except (Exception, CheckpointException) as error:
            free = _free_bytes(self._output_dir)
            self._clear(aside)
            raise CheckpointError(
                f"saving {target} failed ({ranks.reason(error)}): it needs {content.num_bytes:,} bytes and a little more, and "
                f"{free:,} bytes were free when it failed; what was saved before is untouched: free disk space or mend the path"
            ) from error
        except BaseException:
            self._clear(aside)
            raise
        if ranks.rank == 0:
            self._remove_old(order)

    def _clear(self, aside: Path) -> None:
        if self._ranks.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)

    def _prepare(self, target: Path, aside: Path) -> int:
        """Clear away what a kill has left, and make an empty folder; returns the order of the new point."""
        self._output_dir.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._output_dir.iterdir()):
            for prefix in (_SAVING, _REPLACED, _REMOVED):
                name = path.name.removeprefix(prefix)
                if name == path.name or not _STEP.fullmatch(name):
                    continue
                if prefix == _REPLACED and not (self._output_dir / name).exists():
                    path.rename(self._output_dir / name)  # killed between the two renames: nothing has replaced it
                else:
                    shutil.rmtree(path)
        if target.exists():
            there = examine(target)
            if isinstance(there, PassedOver) and not there.is_ours:
                raise FileExistsError(f"{target} is there and is not ours to replace: {there.reason}")
        aside.mkdir()
        return max([time.time_ns(), *(order + 1 for order in self._orders())])

    def _orders(self) -> Iterator[int]:
        for folder in _step_folders(self._output_dir):
            if (order := examine(folder).order) is not None:
                yield order

    def _move_into_place(self, aside: Path, target: Path) -> None:
        replaced = target.with_name(_REPLACED + target.name)
        if target.exists():
            target.rename(replaced)
        try:
            aside.rename(target)
        except BaseException:
            if replaced.exists():
                replaced.rename(target)
            raise
        flush_folder(self._output_dir)
        shutil.rmtree(replaced, ignore_errors=True)

    def _remove_old(self, newest: int) -> None:
        """Keep the last few that are whole by name and size. Folders of users and of newer versions stay."""
        if self._keep_last is None:
            return
        points, passed_over = _examined(self._output_dir)
        older = [other for other in passed_over if other.is_ours and (other.order is None or other.order < newest)]
        for path in [*(point.path for point in points[self._keep_last :]), *(other.path for other in older)]:
            removed = path.with_name(_REMOVED + path.name)
            try:
                path.rename(removed)  # half removed, it might look like a user's folder
                shutil.rmtree(removed)
            except OSError as error:
                log.warning("%s could not be removed: %s", path, error)


def _examined(output_dir: Path) -> tuple[list[ResumePoint], list[PassedOver]]:
    """Points whose files have their sizes, the newest first, and the other folders."""
    found = [examine(folder) for folder in _step_folders(output_dir)]
    points = sorted((one for one in found if isinstance(one, ResumePoint)), key=lambda point: -point.order)
    return points, [one for one in found if isinstance(one, PassedOver)]


def _step_folders(output_dir: Path) -> list[Path]:
    """The folders named as points; one that was renamed aside by a save that never came to replace it counts."""
    if not output_dir.is_dir():
        return []
    return [
        path
        for path in sorted(output_dir.iterdir())
        if path.is_dir()
        and _STEP.fullmatch(name := path.name.removeprefix(_REPLACED))
        and (name == path.name or not (output_dir / name).exists())
    ]


def _free_bytes(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
