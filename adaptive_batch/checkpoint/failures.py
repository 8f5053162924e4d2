"""What went wrong with a file, in one line: errors of the system and of torch, whose own texts are
long or advise to allow everything.
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
from adaptive_batch.memory import is_out_of_memory

# What a text has where a file could not be written: of the system, of torch and of safetensors.
_WRITING = re.compile(r"\[Errno|PytorchStreamWriter|unexpected pos|write|I/O error", re.IGNORECASE)
# A disk with less is full.
_FULL_BYTES = 2**16


def reason(error: BaseException) -> str:
    """Return the text of an error in a line; the system's error if torch has wrapped others around
    it.
    """
    below = _of_the_system(error)
    if below is None and isinstance(error, pickle.UnpicklingError):
        # torch's own message advises to allow everything.
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
    """Inside, a folder is written and renamed; where that fails, what was written is removed, as is
    what a kill has left of it.

    Args:
        target, temporary: the folder to be, and the one that is written.
        num_bytes: of the tensors.
        removes: False where another rank does.

    Raises:
        CheckpointError: why it failed, what it needs and what is free.
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
        # torch does not say why a write failed.
        is_full = left < _FULL_BYTES and _of_the_system(error) is None
        if is_full:
            cause = os.strerror(errno.ENOSPC)
        untouched = "what was saved before is untouched"
        space = (
            f"it needs {num_bytes:,} bytes and a little more, and {free:,} bytes were free;"
            f" {untouched}"
        )
        if is_out_of_memory(error):
            problem = f"{space}: free memory"
        elif is_full or _of_the_system(error) or _WRITING.search(str(error)):
            problem = f"{space}: free disk space or correct the path"
        else:
            problem = f"{type(error).__name__}, which is not for lack of space; {untouched}"
        raise CheckpointError(f"saving {target} failed ({cause}): {problem}") from error
