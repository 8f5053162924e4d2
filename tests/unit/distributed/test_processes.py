import os
import signal
import subprocess
import sys
import time

import pytest

from adaptive_batch.distributed.processes import Processes, name_of_this_process


@pytest.fixture
def sleeping():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield process
    process.kill()
    process.wait()


def name_of(process):
    return f"{name_of_this_process().rpartition('/')[0]}/{process.pid}"


def until_one_has_ended(processes):
    until = time.monotonic() + 10
    while not (ended := processes.ended()) and time.monotonic() < until:
        time.sleep(0.01)
    return ended


def test_a_process_that_is_killed_has_ended_before_its_parent_asks_and_is_named_once(sleeping):
    processes = Processes()
    processes.look_after(3, name_of(sleeping))
    processes.look_after(4, name_of_this_process())
    assert processes.ended() == []
    os.kill(sleeping.pid, signal.SIGKILL)
    assert until_one_has_ended(processes) == [3]
    assert processes.ended() == []


def test_one_that_had_ended_before_has_ended(sleeping):
    sleeping.kill()
    sleeping.wait()
    processes = Processes()
    processes.look_after(3, name_of(sleeping))
    assert processes.ended() == [3]


def test_one_of_another_machine_or_of_nobody_knows_where_is_not_looked_after(sleeping, monkeypatch):
    processes = Processes()
    for where in ("00000000-0000-0000-0000-000000000000/pid:[4026531836]", "unknown"):
        processes.look_after(3, f"{where}/{sleeping.pid}")
    monkeypatch.setattr(os, "pidfd_open", forbidden)
    processes.look_after(3, name_of(sleeping))
    sleeping.kill()
    sleeping.wait()
    assert processes.ended() == []


def forbidden(number):
    raise PermissionError(f"process {number} is not to be looked after")


def test_none_is_looked_after_any_more_once_it_is_closed(sleeping):
    processes = Processes()
    processes.look_after(3, name_of(sleeping))
    (descriptor,) = processes._keys
    processes.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert processes.ended() == []


def test_one_whose_descriptor_another_has_closed_is_not_taken_for_ended(sleeping):
    processes = Processes()
    processes.look_after(3, name_of(sleeping))
    (descriptor,) = processes._keys
    os.close(descriptor)
    assert processes.ended() == []
    processes.close()
