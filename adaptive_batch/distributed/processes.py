"""Processes of this machine that are no children of this one, and which of them have ended, however they did."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path


def name_of_this_process() -> str:
    """Its number, and where that means something: the machine since it was started, and its namespace of processes."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{machine}/{os.readlink('/proc/self/ns/pid')}/{os.getpid()}"
    except OSError:
        return f"unknown/{os.getpid()}"


class Processes:
    """Looks after processes by what the kernel keeps of each, so that a number given to another process is not taken for it.

    Where the system has no such thing (it is Linux's), or forbids it, none is looked after.
    """

    def __init__(self) -> None:
        self._mine = name_of_this_process().rpartition("/")[0]
        self._keys: dict[int, int] = {}  # by descriptor
        self._gone: list[int] = []

    def look_after(self, key: int, name: str) -> None:
        """Begin to look after a process, if it is of this machine.

        Args:
            key: what :meth:`ended` calls it.
            name: of :func:`name_of_this_process`, there.
        """
        where, _, number = name.rpartition("/")
        if where != self._mine or where == "unknown" or not hasattr(os, "pidfd_open"):
            return
        try:
            self._keys[os.pidfd_open(int(number))] = key
        except ProcessLookupError:
            self._gone.append(key)
        except OSError:  # forbidden, as in some containers
            pass

    def ended(self) -> list[int]:
        """Those that have ended since they were looked after; each is named once."""
        if self._keys:
            poll = select.poll()
            for descriptor in list(self._keys):
                poll.register(descriptor, select.POLLIN)
            for descriptor, events in poll.poll(0):
                key = self._keys.pop(descriptor, None)
                # Where another has closed the descriptor, nothing is known any more.
                if key is not None and events & select.POLLIN:
                    self._gone.append(key)
                    os.close(descriptor)
        gone, self._gone = self._gone, []
        return gone

    def close(self) -> None:
        """Look after none any more."""
        while self._keys:
            with contextlib.suppress(OSError):
                os.close(self._keys.popitem()[0])
