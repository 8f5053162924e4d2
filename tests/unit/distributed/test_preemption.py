"""A request to end is noted, and acted on by whoever asks for it; a second one ends the process."""

import os
import signal
import subprocess
import sys
import textwrap

from adaptive_batch.distributed import Preemption


def test_a_request_is_noted_and_the_way_of_before_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert not preemption.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_request_ends_the_process():
    program = textwrap.dedent("""
        import os, signal
        from adaptive_batch.distributed import Preemption
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGTERM)
            print("noted", preemption.requested, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            print("still here", flush=True)
        """)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.returncode) == ("noted True\n", -signal.SIGTERM)


def test_a_request_that_follows_at_once_is_the_same_where_a_launcher_hands_it_on():
    program = textwrap.dedent("""
        import os, signal, time
        from adaptive_batch.distributed import Preemption
        with Preemption(same_within=0.5) as preemption:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            print("noted", preemption.requested, flush=True)
            time.sleep(0.6)
            os.kill(os.getpid(), signal.SIGTERM)
            print("still here", flush=True)
        """)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.returncode) == ("noted True\n", -signal.SIGTERM)
