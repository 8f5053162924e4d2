"""Progress as a bar on a terminal, or as log lines."""

import io
import sys

import pytest

from adaptive_batch import _util
from adaptive_batch._util import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def advance(times, **arguments):
    with ProgressBar(4, "steps", "trained", **arguments) as bar:
        for number in range(times):
            bar.advance(f"loss {number}")


@pytest.fixture
def clock(monkeypatch):
    """Advance the clock by 4 seconds at each call."""
    seconds = iter(range(0, 1000, 4))
    monkeypatch.setattr(_util.time, "monotonic", lambda: next(seconds))


@pytest.mark.usefixtures("clock")
def test_without_a_terminal_lines_are_logged_every_ten_seconds_and_at_the_end(caplog, capsys):
    caplog.set_level("INFO")
    advance(4)
    assert caplog.messages == ["loss 2: 3 of 4 steps", "loss 3: 4 of 4 steps"]
    assert capsys.readouterr().err == ""


def test_units_that_are_already_done_count(caplog):
    caplog.set_level("INFO")
    advance(2, done=2)
    assert caplog.messages == ["loss 1: 4 of 4 steps"]


def test_on_a_terminal_there_is_a_bar_and_no_line(caplog, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    caplog.set_level("INFO")
    advance(4)
    assert "loss 3: 100%" in terminal.getvalue()
    assert caplog.messages == []


def test_on_a_terminal_without_tqdm_there_are_lines(caplog, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setitem(sys.modules, "tqdm", None)
    caplog.set_level("INFO")
    advance(4)
    assert caplog.messages == ["loss 3: 4 of 4 steps"]
    assert terminal.getvalue() == ""


def test_a_hidden_bar_is_silent(caplog, monkeypatch):
    caplog.set_level("INFO")
    advance(4, shown=False)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    advance(4, shown=False)
    assert caplog.messages == []
    assert terminal.getvalue() == ""
