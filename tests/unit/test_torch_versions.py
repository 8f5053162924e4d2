"""Versions of torch: older ones are refused, newer ones cause a warning, missing names an error."""

from __future__ import annotations

import logging
import re
import runpy
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from adaptive_batch import _torch
from adaptive_batch.errors import TorchVersionError

TESTED = (
    f"; adaptive_batch was tested with torch {_torch.OLDEST} to {_torch.NEWEST}:"
    f" pip install 'torch>={_torch.OLDEST},<={_torch.NEWEST}'"
)


def import_with(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    runpy.run_path(_torch.__file__)


@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.8.0", "2.10.0", "2.11.0.dev20260101"])
def test_an_older_torch_is_refused(monkeypatch, version):
    with pytest.raises(TorchVersionError) as error:
        import_with(monkeypatch, version)
    message = str(error.value)
    assert message.startswith(f"torch {version} is too old: ")
    assert message.endswith(TESTED)
    assert "\n" not in message


@pytest.mark.parametrize("version", [_torch.OLDEST, "2.12.1+cpu", "2.15.0+cu128", "2.15.2"])
def test_a_tested_torch_is_imported_without_a_warning(monkeypatch, caplog, version):
    import_with(monkeypatch, version)
    assert caplog.messages == []


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev20270101+cu130", "3.0"])
def test_a_newer_torch_causes_one_warning_per_run(monkeypatch, caplog, version):
    import_with(monkeypatch, version)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        f"torch {version} is newer than the newest tested version, {_torch.NEWEST}: "
    )
    monkeypatch.setenv("RANK", "1")
    import_with(monkeypatch, version)
    assert caplog.records == [record]


def test_the_names_of_an_object_or_a_module_are_checked():
    private = _torch.PrivateNames("FSDP2")
    group = SimpleNamespace(_all_gather_comm=None)
    assert private(group, "_all_gather_comm") is group
    prefix = f"torch {torch.__version__} has no "
    with pytest.raises(TorchVersionError) as error:
        private(group, "_all_gather_comm", "_reduce_scatter_comm")
    assert str(error.value) == (
        f"{prefix}SimpleNamespace._reduce_scatter_comm, so FSDP2 cannot be used{TESTED}"
    )
    module = "torch.testing._internal.distributed.fake_pg"
    assert private(module, "FakeStore").__name__ == module
    with pytest.raises(TorchVersionError, match=re.escape(f"{prefix}{module}.FakeShop, so FSDP2")):
        private(module, "FakeShop")
    with pytest.raises(TorchVersionError, match=re.escape(f"{prefix}torch._gone, so FSDP2")):
        private("torch._gone", "name")
