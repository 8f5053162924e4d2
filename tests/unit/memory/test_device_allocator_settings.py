"""Expandable segments are enabled unless the user configures the allocator."""

import os
import sys

import pytest
import torch

from adaptive_batch.memory import (
    ALLOCATOR_VARIABLES,
    allocator_settings,
    check_segments,
    expand_segments,
    segments_expand,
)


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    for variable in ALLOCATOR_VARIABLES:
        # Set first, so that monkeypatch removes the values that a test sets.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.version, "hip", None)


def test_segments_expand_without_other_settings():
    assert not segments_expand()
    expand_segments()
    assert segments_expand()


@pytest.mark.parametrize("variable", ALLOCATOR_VARIABLES)
@pytest.mark.parametrize("settings", ["", "expandable_segments:False", "max_split_size_mb:64"])
def test_settings_of_the_environment_are_kept(monkeypatch, variable, settings):
    monkeypatch.setenv(variable, settings)
    before = dict(os.environ)
    expand_segments()
    assert dict(os.environ) == before
    assert not segments_expand()


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [(sys, "platform", "win32"), (sys, "platform", "darwin"), (torch.version, "hip", "6.4")],
)
def test_nothing_is_set_if_pytorch_does_not_support_them(monkeypatch, module, name, value):
    monkeypatch.setattr(module, name, value)
    expand_segments()
    assert allocator_settings() == ("", {})


def test_the_driver_is_checked_only_for_cuda(monkeypatch):
    told = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    expand_segments()
    check_segments(torch.device("cpu"))
    assert told == []
    assert segments_expand()
