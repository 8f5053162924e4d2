"""Checkpoint folder: files of torch.distributed.checkpoint, the small state, and a manifest.

The manifest is written last and lists the size and checksum of each file. An existing ``.metadata``
does not prove that a checkpoint is complete: it may be older than the data files.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch import __version__
from adaptive_batch._util import atomic_write
from adaptive_batch.errors import CheckpointError

from .content import Content, read_into, read_optimizer, read_whole
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
    write_tensors,
)

Result = TypeVar("Result")

MANIFEST = "resume.json"
STATE = "state.pt"
FORMAT = "adaptive_batch resume point"
FORMAT_VERSION = 3
# Time for a file of another node to become visible.
_SEEN_SECONDS = 10.0


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint whose files all exist with the saved sizes.

    Attributes:
        path: folder of the checkpoint.
        step: optimizer steps so far.
        order: position among the checkpoints of an output directory; the newest has the largest.
        run: name of the run that saved it; empty for a checkpoint without a run.
        files: sizes and checksums of the files by name.
    """

    path: Path
    step: int
    order: int
    run: str
    files: Mapping[str, SavedFile]

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


@dataclass(frozen=True)
class SkippedCheckpoint:
    """Folder that is not a complete checkpoint.

    Attributes:
        path: the folder.
        reason: reason for skipping it.
        is_ours: whether this version knows the format of the folder.
        order, run: as in :class:`Checkpoint`; None if unknown.
    """

    path: Path
    reason: str
    is_ours: bool
    order: int | None = None
    run: str | None = None

    def describe(self) -> str:
        """Return folder and reason in one line."""
        return f"{self.path} is skipped: {self.reason}"


def newest_complete(
    checkpoints: Iterable[Checkpoint], skipped: Iterable[SkippedCheckpoint]
) -> tuple[Checkpoint | None, list[SkippedCheckpoint]]:
    """Find the newest complete checkpoint by comparing the checksums of all files.

    With several ranks, one rank calls this function and broadcasts the result, which can be
    pickled.

    Returns:
        The checkpoint or None, and the skipped folders that are newer or of unknown age.
    """
    all_skipped = list(skipped)
    newest_first = sorted(checkpoints, key=lambda each: (each.order, each.step), reverse=True)
    for checkpoint in newest_first:
        order = checkpoint.order
        change = changed_content(checkpoint.path, checkpoint.files)
        if change is None:
            newer = [each for each in all_skipped if each.order is None or each.order >= order]
            return checkpoint, newer
        all_skipped.append(SkippedCheckpoint(checkpoint.path, change, True, order, checkpoint.run))
    return None, all_skipped


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
        while isinstance(seen, SkippedCheckpoint):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank zero does not see all that was saved ({seen.reason}); output_dir must be"
                    " on a file system that all ranks share"
                )
            time.sleep(0.1)
            seen = inspect(folder)

    ranks.first(write_state_and_manifest)


def inspect(folder: Path) -> Checkpoint | SkippedCheckpoint:
    """Check the sizes of a checkpoint's files; :func:`changed_content` checks their content."""
    # Another program's folder may have the name of a step, and must not be removed as ours.
    is_ours = (folder / METADATA).exists() and (folder / STATE).exists()
    try:
        text = (folder / MANIFEST).read_bytes().decode(errors="replace")
    except OSError as error:
        problem = "incomplete" if is_ours else "unrecognized"
        reason_of_skip = f"{problem}: {MANIFEST} cannot be read ({error.strerror})"
        return SkippedCheckpoint(folder, reason_of_skip, is_ours)
    is_ours |= FORMAT in text
    try:
        manifest = json.loads(text)
        version = int(manifest["format_version"])
        order = int(manifest["order"])
        if manifest["format"] == FORMAT and version != FORMAT_VERSION:
            writer = f"adaptive_batch {manifest.get('package_version')}"
            reason_of_skip = (
                f"format {version}, written by {writer}; this version reads format"
                f" {FORMAT_VERSION}: use that version"
            )
            return SkippedCheckpoint(folder, reason_of_skip, is_ours=False, order=order)
        manifest, files = read_manifest(text)
        checkpoint = Checkpoint(folder, manifest["step"], order, manifest["run"], files)
    except (ValueError, KeyError, TypeError):
        problem = "truncated or changed" if is_ours else "unrecognized"
        return SkippedCheckpoint(folder, f"{MANIFEST} is {problem}", is_ours)
    change = changed_size(folder, files)
    if change is not None:
        return SkippedCheckpoint(folder, change, True, order, checkpoint.run)
    return checkpoint


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
