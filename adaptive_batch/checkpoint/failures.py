"""One-line reasons for failures to read or write files.

Errors of torch are long, or recommend disabling ``weights_only``.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adaptive_batch.errors import CheckpointError

# A disk with less free space counts as full.
_FULL_BYTES = 2**16


def reason(error: BaseException) -> str:
    """Return an error as one line; prefer the OSError that torch wrapped, if there is one."""
    below = _of_the_system(error)
    if below is None and isinstance(error, pickle.UnpicklingError):
        # torch's own message recommends weights_only=False.
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named:
            return (
                f"it names {named[1]}, which torch.load(weights_only=True) allows only once its"
                " package is imported, if at all"
            )
        return "it is not what torch.save writes: truncated or changed"
    text = (str(below or error) or type(error).__name__).partition("\n")[0]
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _of_the_system(error: BaseException) -> OSError | None:
    below: BaseException | None = error
    while below is not None and not isinstance(below, OSError):
        below = below.__cause__ or below.__context__
    return below


@contextmanager
def saving(
    target: Path, temporary: Path, *, num_bytes: int, removes: bool = True
) -> Iterator[None]:
    """Remove the temporary folder if writing or renaming it fails, and raise a CheckpointError.

    A folder that a killed save left is removed first.

    Args:
        target, temporary: final folder, and the folder to write.
        num_bytes: bytes of the tensors.
        removes: whether this rank removes the folder.

    Raises:
        CheckpointError: saving failed; the message has the reason, the required and the free bytes.
    """
    if removes:
        shutil.rmtree(temporary, ignore_errors=True)
    nearest = next(folder for folder in target.parents if folder.exists())
    free = shutil.disk_usage(nearest).free
    try:
        yield
    except BaseException as error:
        left = shutil.disk_usage(nearest).free
        if removes:
            shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, Exception):
            raise
        cause = reason(error)
        if _of_the_system(error) is None:
            # torch does not report why a write failed.
            if left < _FULL_BYTES:
                cause = os.strerror(errno.ENOSPC)
            elif not isinstance(error, CheckpointError):
                cause = f"{type(error).__name__}: {cause}"
        raise CheckpointError(
            f"saving {target} failed ({cause}): it needs {num_bytes:,} bytes and a little more, and"
            f" {free:,} bytes were free; earlier saves are unchanged"
        ) from error
