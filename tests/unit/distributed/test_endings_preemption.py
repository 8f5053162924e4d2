"""Preemption records a request to end; a second request ends the process."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from adaptive_batch.distributed import Preemption

REQUESTS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


pytestmark = pytest.mark.usefixtures("usual_signal_handlers")


@pytest.mark.parametrize("number", REQUESTS, ids=lambda number: number.name)
def test_a_request_is_recorded_and_the_signal_handlers_are_restored(number):
    before = [signal.getsignal(number) for number in REQUESTS]
    with Preemption() as preemption:
        assert not preemption.requested
        os.kill(os.getpid(), number)
        assert preemption.requested
    assert [signal.getsignal(number) for number in REQUESTS] == before


def test_an_ignored_signal_stays_ignored():
    """nohup ignores SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not preemption.requested
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def ended(program):
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("first", "second"),
    [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT"), ("SIGHUP", "SIGTERM"), ("SIGTERM", "SIGINT")],
)
def test_a_second_request_ends_the_process(first, second):
    process = ended(f"""
        import os, signal
        from adaptive_batch.distributed import Preemption
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.{first})
            print("noted", preemption.requested, flush=True)
            os.kill(os.getpid(), signal.{second})
            print("still here", flush=True)
        """)
    assert (process.stdout, process.returncode) == ("noted True\n", -signal.Signals[second])
    assert ("Ctrl-C again stops immediately" in process.stderr) == (first == "SIGINT")


def test_a_second_request_ends_a_process_that_runs_no_python_code():
    process = ended("""
        import os, signal, subprocess
        from adaptive_batch.distributed import Preemption
        with Preemption():
            os.kill(os.getpid(), signal.SIGTERM)
            subprocess.Popen(["sh", "-c", f"sleep 0.2; kill {os.getpid()}"])
            signal.alarm(20)  # otherwise ends the process
            sum(range(10**11))
        """)
    assert process.returncode == -signal.SIGTERM


def test_a_request_that_a_launcher_repeats_within_same_within_counts_once():
    process = ended("""
        import os, signal, time
        from adaptive_batch.distributed import Preemption
        now = 100.0
        time.monotonic = lambda: now
        with Preemption(same_within=0.5) as preemption:
            os.kill(os.getpid(), signal.SIGTERM)
            now += 0.4
            os.kill(os.getpid(), signal.SIGTERM)
            print("noted", preemption.requested, flush=True)
            now += 0.2
            os.kill(os.getpid(), signal.SIGTERM)
            print("still here", flush=True)
        """)
    assert (process.stdout, process.returncode) == ("noted True\n", -signal.SIGTERM)
