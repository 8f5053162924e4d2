"""Checkpoints: saved atomically as ``{output_dir}/step_N``, checked, found and loaded.

A checkpoint is a folder with files of torch.distributed.checkpoint, the small state, and a manifest
that is written last and lists the size and checksum of each file. An existing ``.metadata`` does
not prove that a checkpoint is complete: it may be older than the data files.

A checkpoint is written to a temporary folder, flushed to disk and renamed. A kill at any moment
leaves complete checkpoints unchanged. Older checkpoints are removed only after a newer one is
complete. Several ranks write one checkpoint to a shared file system, each rank its own part. An
error on one rank is raised on all ranks.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from adaptive_batch import __version__
from adaptive_batch._util import atomic_write, format_bytes, move_into_place
from adaptive_batch.distributed import local_part
from adaptive_batch.errors import CheckpointError
from adaptive_batch.memory import host_available_bytes, plain_tensors

from .content import Content, gather_content, read_into, read_optimizer, read_whole
from .files import (
    METADATA,
    Ranks,
    SavedFile,
    changed_content,
    changed_size,
    load_safely,
    low_bit_file,
    manifest_text,
    read_manifest,
    reason,
    saving,
    write_tensors,
)

log = logging.getLogger("adaptive_batch")
Result = TypeVar("Result")

MANIFEST = "resume.json"
STATE = "state.pt"
FORMAT = "adaptive_batch resume point"
FORMAT_VERSION = 3
# Time for a file of another node to become visible.
_SEEN_SECONDS = 10.0
_STEP = re.compile(r"step_\d+")
_SAVING = ".saving-"
_REPLACED = ".replaced-"
_REMOVED = ".removed-"


# --- one checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint, or a folder with the name of one that has a problem.

    Attributes:
        path: folder of the checkpoint.
        problem: reason why the folder is not a complete checkpoint; empty if all files exist with
            the saved sizes.
        is_ours: whether this version knows the format of the folder.
        step: optimizer steps so far.
        order: position among the checkpoints of an output directory; the newest has the largest.
            None if unknown.
        run: name of the run that saved it, which may be empty; None if unknown.
        files: sizes and checksums of the files by name.
    """

    path: Path
    problem: str = ""
    is_ours: bool = True
    step: int = 0
    order: int | None = None
    run: str | None = None
    files: Mapping[str, SavedFile] = field(default_factory=dict)

    @property
    def age(self) -> tuple[int, int]:
        """Key that is larger for a newer checkpoint."""
        return self.order or 0, self.step

    def load(self) -> tuple[Any, Any]:
        """Load the tree of full tensors and the small state to the CPU, without running pickled
        code.

        Raises:
            CheckpointError: a file cannot be read; a tensor subclass needs the import of its
                package (torchao); or several ranks saved low-bit states, which cannot be merged.
        """
        return self._read(lambda state: (read_whole(self.path, state), state["small"]), Ranks())

    def load_into(self, tree: Mapping[str, Any], *, process_group: Any = None) -> None:
        """Load into existing tensors; each rank reads only its own part of a DTensor. A collective.

        Args:
            tree: entries of the saved tree, such as ``{"model": model.state_dict()}``. Their
                tensors have the saved keys and shapes. Other values are ignored.
            process_group: ranks that load together; None for one process.

        Raises:
            CheckpointError: a file cannot be read, or the trees differ; raised on all ranks.
        """
        ranks = Ranks(process_group)
        self._read(lambda state: read_into(self.path, state, tree, ranks), ranks)

    def load_optimizer(
        self,
        optimizers: Iterable[Optimizer],
        names: Mapping[nn.Parameter, str],
        *,
        process_group: Any = None,
    ) -> dict[str, Any]:
        """Load the state of optimizers with the sharding of their parameters; each rank reads only
        its own part. A collective.

        Args:
            optimizers: optimizers of the state; they are not changed.
            names: names of their parameters, as in ``model.named_parameters()``.
            process_group: ranks that load together; None for one process.

        Returns:
            The state for :func:`.load_named_optimizer_state`.

        Raises:
            CheckpointError: a file cannot be read, the state belongs to other parameters, or a
                different number of ranks saved low-bit states; raised on all ranks.
        """
        ranks = Ranks(process_group)
        optimizers = list(optimizers)
        return self._read(
            lambda state: read_optimizer(self.path, state, optimizers, names, ranks), ranks
        )

    def load_small_state(self) -> Any:
        """Load only the small state; raise CheckpointError if it cannot be read."""
        return self._read(lambda state: state["small"], Ranks())

    def _read(self, read: Callable[[Any], Result], ranks: Ranks) -> Result:
        """Read on each rank; raise the error of one rank on all ranks."""
        # Results need not be picklable: they stay on their rank.
        results: list[Result] = []
        try:
            ranks.each(lambda: results.append(read(load_safely(self.path / STATE))))
        except Exception as error:
            raise CheckpointError(
                f"resume point {self.path} cannot be read ({reason(error)})"
            ) from error
        return results[0]


def newest_complete(
    checkpoints: Iterable[Checkpoint],
) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """Find the newest complete checkpoint by comparing the checksums of all files.

    With several ranks, one rank calls this function and broadcasts the result, which can be
    pickled.

    Returns:
        The checkpoint or None, and the folders with problems that are newer or of unknown age.
    """
    checkpoints = list(checkpoints)
    skipped = [each for each in checkpoints if each.problem]
    complete = [each for each in checkpoints if not each.problem]
    for checkpoint in sorted(complete, key=lambda each: each.age, reverse=True):
        problem = changed_content(checkpoint.path, checkpoint.files)
        if not problem:
            newer = [each for each in skipped if each.order is None or each.age >= checkpoint.age]
            return checkpoint, newer
        skipped.append(replace(checkpoint, problem=problem))
    return None, skipped


def write_checkpoint(
    folder: Path, content: Content, *, step: int, order: int, run: str, ranks: Ranks
) -> None:
    """Write a checkpoint into an empty folder of a shared file system and flush it; a collective.

    Raises:
        Exception: writing failed on a rank; raised on all ranks.
        CheckpointError: the state cannot be read with ``weights_only=True``, or rank 0 does not see
            the files of another rank.
    """
    written = write_tensors(folder, content.tensors, ranks)

    def write_low_bit() -> dict[str, SavedFile]:
        if content.low_bit:
            name = low_bit_file(ranks.rank)
            _save(dict(content.low_bit), folder / name)
            written.append(name)
        return {name: SavedFile.of(folder / name) for name in written}

    files: dict[str, SavedFile] = {}
    for files_of_rank in ranks.each(write_low_bit):
        files |= files_of_rank

    def write_state_and_manifest() -> None:
        _save(content.state, folder / STATE)
        for name in (METADATA, STATE):
            files[name] = SavedFile.of(folder / name)
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "package_version": __version__,
            "step": step,
            "order": order,
            "run": run,
            "world_size": ranks.count,
        }
        atomic_write(folder / MANIFEST, manifest_text(manifest, files), sync=True)
        # On a network file system, files of another node may become visible after a while.
        deadline = time.monotonic() + _SEEN_SECONDS
        seen = inspect(folder)
        while seen.problem:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank zero does not see all that was saved ({seen.problem}); output_dir must"
                    " be on a file system that all ranks share"
                )
            time.sleep(0.1)
            seen = inspect(folder)

    ranks.first(write_state_and_manifest)


def inspect(folder: Path) -> Checkpoint:
    """Check the sizes of a checkpoint's files; :func:`changed_content` checks their content."""
    # Another program's folder may have the name of a step, and must not be removed as ours.
    is_ours = (folder / METADATA).exists() and (folder / STATE).exists()
    try:
        text = (folder / MANIFEST).read_bytes().decode(errors="replace")
    except OSError as error:
        kind = "incomplete" if is_ours else "unrecognized"
        problem = f"{kind}: {MANIFEST} cannot be read ({error.strerror})"
        return Checkpoint(folder, problem, is_ours)
    is_ours |= FORMAT in text
    try:
        manifest = json.loads(text)
        version = int(manifest["format_version"])
        order = int(manifest["order"])
        if manifest["format"] == FORMAT and version != FORMAT_VERSION:
            writer = f"adaptive_batch {manifest.get('package_version')}"
            problem = (
                f"format {version}, written by {writer}; this version reads format"
                f" {FORMAT_VERSION}: use that version"
            )
            return Checkpoint(folder, problem, is_ours=False, order=order)
        manifest, files = read_manifest(text)
        step, run = manifest["step"], manifest["run"]
    except (ValueError, KeyError, TypeError):
        kind = "truncated or changed" if is_ours else "unrecognized"
        return Checkpoint(folder, f"{MANIFEST} is {kind}", is_ours)
    problem = changed_size(folder, files)
    return Checkpoint(folder, problem, step=step, order=order, run=run, files=files)


def _save(value: Any, path: Path) -> None:
    """Write a file and flush it; raise if it could not be read."""
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        load_safely(path, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"the state could not be read again: {reason(error)}") from error


# --- the checkpoints of a folder


def checkpoints_in(output_dir: Path) -> list[Checkpoint]:
    """Return the step folders, without reading large files."""
    checkpoints: list[Checkpoint] = []
    folders = sorted(output_dir.iterdir()) if output_dir.is_dir() else []
    for folder in folders:
        # A save renames the checkpoint that it replaces. If it was killed before it put the new one
        # in place, the renamed one still counts.
        name = folder.name.removeprefix(_REPLACED)
        is_replaced = name != folder.name and (output_dir / name).exists()
        if _STEP.fullmatch(name) and folder.is_dir() and not is_replaced:
            checkpoints.append(inspect(folder))
    return checkpoints


class CheckpointManager:
    """Saves checkpoints and removes old ones.

    With a process group, every rank creates a manager and calls the same methods in the same order.

    Args:
        output_dir: folder of the run.
        run: name of the run, stored in each checkpoint.
        keep_last: number of complete checkpoints of the run to keep; each save removes older ones.
            None keeps all.
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
                    clear_leftovers(self._output_dir, "step")
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
        with saving(target, temporary, removes=ranks.rank == 0):
            order = ranks.first(lambda: self._prepare(target, temporary))
            write_checkpoint(temporary, content, step=step, order=order, run=self._run, ranks=ranks)
            ranks.first(lambda: move_into_place(temporary, target))
        if ranks.rank == 0:
            self._remove_old()

    def _prepare(self, target: Path, temporary: Path) -> int:
        """Remove leftovers of a killed save and create the temporary folder; return the order of
        the new checkpoint.
        """
        self._output_dir.mkdir(parents=True, exist_ok=True)
        clear_leftovers(self._output_dir, "step")
        if target.exists():
            found = inspect(target)
            if not found.is_ours:
                raise FileExistsError(
                    f"{target} exists and is not ours to replace: {found.problem}"
                )
        temporary.mkdir()
        # Count up from existing checkpoints: clocks may be wrong.
        orders = [checkpoint.order or 0 for checkpoint in checkpoints_in(self._output_dir)]
        return 1 + max(orders, default=0)

    def _remove_old(self) -> None:
        """Remove old checkpoints of this run; keep all other folders."""
        if self._keep_last is None:
            return
        complete = [each for each in checkpoints_in(self._output_dir) if not each.problem]
        own = [checkpoint for checkpoint in complete if checkpoint.run == self._run]
        own.sort(key=lambda checkpoint: checkpoint.age, reverse=True)
        for checkpoint in own[self._keep_last :]:
            remove_folder(checkpoint.path)


def clear_leftovers(output_dir: Path, kind: str) -> None:
    """Remove folders of saves that were killed. If one was killed while it replaced an earlier
    save, restore that one.

    Args:
        output_dir: folder of the saves.
        kind: start of their names, ``step`` or ``epoch``.
    """
    for prefix in (_SAVING, _REPLACED, _REMOVED):
        for path in output_dir.glob(f"{prefix}{kind}_*"):
            original = output_dir / path.name.removeprefix(prefix)
            if prefix == _REPLACED and not original.exists():
                # The process was killed between the two renames.
                path.rename(original)
            else:
                shutil.rmtree(path)


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
