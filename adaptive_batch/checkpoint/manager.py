"""Save checkpoints atomically as ``{output_dir}/step_N``, and find the latest one.

A checkpoint is written to a temporary folder, flushed to disk and renamed. A kill at any moment
leaves complete checkpoints unchanged. Older checkpoints are removed only after a newer one is
complete. Several ranks write one checkpoint to a shared file system, each rank its own part. An
error on one rank is raised on all ranks.
"""

from __future__ import annotations

import logging
import platform
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from adaptive_batch._util import format_bytes, move_into_place
from adaptive_batch.distributed import local_part
from adaptive_batch.errors import CheckpointError
from adaptive_batch.memory import host_available_bytes, plain_tensors

from .checkpoint import Checkpoint, SkippedCheckpoint, inspect, write_checkpoint
from .content import Content, gather_content
from .files import Ranks, saving

log = logging.getLogger("adaptive_batch")

_STEP = re.compile(r"step_\d+")
_SAVING = ".saving-"
_REPLACED = ".replaced-"
_REMOVED = ".removed-"
_LEFTOVER = re.compile(r"\.(saving|replaced|removed)-(?P<step>step_\d+)")


def checkpoints_in(output_dir: Path) -> tuple[list[Checkpoint], list[SkippedCheckpoint]]:
    """Return the checkpoints with correct file sizes and the other step folders, without reading
    files.
    """
    complete: list[Checkpoint] = []
    skipped: list[SkippedCheckpoint] = []
    folders = sorted(output_dir.iterdir()) if output_dir.is_dir() else []
    for folder in folders:
        # A save renames the checkpoint that it replaces. If it was killed before it put the new one
        # in place, the renamed one still counts.
        name = folder.name.removeprefix(_REPLACED)
        is_replaced = name != folder.name and (output_dir / name).exists()
        if is_replaced or not _STEP.fullmatch(name) or not folder.is_dir():
            continue
        checkpoint = inspect(folder)
        if isinstance(checkpoint, Checkpoint):
            complete.append(checkpoint)
        else:
            skipped.append(checkpoint)
    return complete, skipped


class CheckpointManager:
    """Saves checkpoints and removes old ones.

    With a process group, every rank creates a manager and calls the same methods in the same order.

    Args:
        output_dir: folder of the run.
        run: name of the run, stored in each checkpoint.
        keep_last: number of complete checkpoints of the run to keep; each save removes older ones
            and older incomplete ones. None keeps all.
        asynchronous: copy the tensors to the host in :meth:`save` and write them in a thread. If
            the host lacks memory for the copy, save synchronously and log a warning.
        process_group: ranks that save together; None for one process. An asynchronous save requires
            a group of its own.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        run: str = "",
        keep_last: int | None = None,
        asynchronous: bool = False,
        process_group: Any = None,
    ) -> None:
        self._output_dir = Path(output_dir)
        self._run = run
        self._keep_last = keep_last
        self._ranks = Ranks(process_group)
        self._writer = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None
        self._copies: dict[str, torch.Tensor] = {}

    def save(self, step: int, tensors_tree: Any, small_state: Any) -> None:
        """Save a checkpoint, after waiting for an earlier asynchronous save.

        Args:
            step: optimizer steps so far; a checkpoint of the same step is replaced.
            tensors_tree: the large state, such as ``{"model": ..., "optimizer": ...}``: dicts,
                lists, tuples, tensors and plain values, nested. Equal on all ranks except for the
                shards of DTensors.
            small_state: the small state, of the same types; can be loaded without the tensors. Rank
                0's is saved.

        Raises:
            CheckpointError: saving failed on a rank, or the previous asynchronous save failed and
                this one did not start; earlier checkpoints are unchanged.
            TypeError: a value has an unsupported type; nothing was written.
        """
        self.wait()
        try:
            content = gather_content(tensors_tree, small_state, self._ranks)
            # False without room for a copy on the host: the save is synchronous then.
            is_copied = self._writer is not None and self._copy(
                {**content.tensors, **content.low_bit}
            )
        except CheckpointError as error:
            raise CheckpointError(
                f"step {step} cannot be saved ({error}); earlier saves are unchanged"
            ) from error
        if self._writer is not None and is_copied:
            copies = replace(
                content,
                tensors={name: self._copies[name] for name in content.tensors},
                low_bit={name: self._copies[name] for name in content.low_bit},
            )
            self._pending = self._writer.submit(self._write, step, copies)
        else:
            self._write(step, content)

    def wait(self) -> None:
        """Wait for the last save; raise CheckpointError if it failed."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the last save, release thread and memory, and remove what killed saves left;
        raise CheckpointError if the last save failed.
        """
        try:
            self.wait()
        finally:
            self._copies = {}
            if self._writer is not None:
                self._writer.shutdown()
            if self._ranks.rank == 0:
                # A run that resumes after its last step never saves, so no save has removed them.
                try:
                    self._clear_leftovers()
                except OSError as error:
                    log.warning("what a killed save left could not be removed: %s", error)

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Copy this rank's tensors to the host; return False if the host lacks memory. A
        collective.

        Ranks of one host share its memory. Copies are reused by the next save: allocating memory
        takes longer than copying.
        """
        self._copies = {
            name: copy
            for name, copy in self._copies.items()
            if name in tensors and _form(copy) == _form(tensors[name])
        }
        own_bytes = sum(
            part.nbytes
            for name, tensor in tensors.items()
            if name not in self._copies
            for part in plain_tensors(local_part(tensor))
        )
        # Host, needed bytes and available bytes of each rank.
        by_rank = self._ranks.each(lambda: (platform.node(), own_bytes, host_available_bytes()))
        for host, _, available_bytes in by_rank:
            needed_bytes = sum(needed for other_host, needed, _ in by_rank if other_host == host)
            if needed_bytes > available_bytes:
                self._copies = {}
                log.warning(
                    "asynchronous save: the copy needs %s of host memory, %s are available;"
                    " saving synchronously",
                    format_bytes(needed_bytes),
                    format_bytes(available_bytes),
                )
                return False
        self._ranks.each(lambda: self._copy_tensors(tensors))
        return True

    def _copy_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name in self._copies:
                local_part(self._copies[name]).copy_(local_part(tensor))
            else:
                self._copies[name] = tensor.to("cpu", copy=True)

    def _write(self, step: int, content: Content) -> None:
        """Write and rename the checkpoint. If a rank fails in a phase, all ranks stop after that
        phase.
        """
        target = self._output_dir / f"step_{step}"
        temporary = self._output_dir / f"{_SAVING}step_{step}"
        ranks = self._ranks
        with saving(target, temporary, num_bytes=content.num_bytes, removes=ranks.rank == 0):
            order = ranks.first(lambda: self._prepare(target, temporary, content.num_bytes))
            write_checkpoint(temporary, content, step=step, order=order, run=self._run, ranks=ranks)
            ranks.first(lambda: move_into_place(temporary, target))
        if ranks.rank == 0:
            self._remove_old(order)

    def make_room(self, num_bytes: int) -> None:
        """Remove checkpoints that the next save will supersede if the disk cannot hold both. The
        newest checkpoint stays.

        Args:
            num_bytes: bytes of the next save.
        """
        if self._keep_last is None or shutil.disk_usage(self._output_dir).free > num_bytes:
            return
        # With the next save there will be one checkpoint more.
        num_kept = max(self._keep_last - 1, 1)
        for checkpoint in self._complete()[num_kept:]:
            log.info("removed %s to free disk space for the next save", checkpoint.path.name)
            remove_folder(checkpoint.path)

    def _prepare(self, target: Path, temporary: Path, num_bytes: int) -> int:
        """Remove leftovers of a killed save and create the temporary folder; return the order of
        the new checkpoint.
        """
        self._output_dir.mkdir(parents=True, exist_ok=True)
        self._clear_leftovers()
        if target.exists():
            found = inspect(target)
            if isinstance(found, SkippedCheckpoint) and not found.is_ours:
                raise FileExistsError(f"{target} exists and is not ours to replace: {found.reason}")
        self.make_room(num_bytes)
        temporary.mkdir()
        # Count up from existing checkpoints: clocks may be wrong.
        complete, skipped = checkpoints_in(self._output_dir)
        orders = [checkpoint.order for checkpoint in complete]
        orders += [damaged.order or 0 for damaged in skipped]
        return 1 + max(orders, default=0)

    def _clear_leftovers(self) -> None:
        """Remove folders of saves that were killed. If one was killed while it replaced a
        checkpoint, restore the old checkpoint.
        """
        for path in sorted(self._output_dir.glob(".*")):
            leftover = _LEFTOVER.fullmatch(path.name)
            if leftover is None:
                continue
            original = self._output_dir / leftover["step"]
            if path.name.startswith(_REPLACED) and not original.exists():
                # The process was killed between the two renames; restore the old checkpoint.
                path.rename(original)
            else:
                shutil.rmtree(path)

    def _complete(self) -> list[Checkpoint]:
        """Return the checkpoints of this run with correct file sizes, newest first."""
        complete, _ = checkpoints_in(self._output_dir)
        own = [checkpoint for checkpoint in complete if checkpoint.run == self._run]
        return sorted(own, key=lambda checkpoint: -checkpoint.order)

    def _remove_old(self, newest: int) -> None:
        """Remove old checkpoints of this run; keep those of other runs and versions, and users'
        folders.
        """
        if self._keep_last is None:
            return
        for checkpoint in self._complete()[self._keep_last :]:
            remove_folder(checkpoint.path)
        _, skipped = checkpoints_in(self._output_dir)
        for damaged in skipped:
            is_older = damaged.order is None or damaged.order < newest
            if damaged.is_ours and is_older and damaged.run in (None, self._run):
                remove_folder(damaged.path)


def remove_folder(path: Path) -> None:
    """Remove the folder of a checkpoint; log a warning if that fails."""
    removed = path.with_name(_REMOVED + path.name)
    try:
        # A partly removed folder under its own name might look like a user's folder.
        path.rename(removed)
        shutil.rmtree(removed)
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors if one can be copied into the other's memory."""
    local = local_part(tensor)
    placements = tensor.placements if isinstance(tensor, DTensor) else None
    return (type(tensor), tensor.shape, placements, local.dtype, local.shape, local.stride())
