"""A torch that lacks what is needed is refused in one line, and what is declared is what
was run.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.torch_versions import PAIRS
from torch.torch_version import TorchVersion

from adaptive_batch import _torch
from adaptive_batch.errors import TorchVersionError

ROOT = Path(__file__).parents[2]


def newest_first(versions: set[str]) -> list[str]:
    return sorted(
        versions, key=lambda version: [int(part) for part in version.split(".")], reverse=True
    )


def refused(asks: object) -> str:
    with pytest.raises(TorchVersionError) as error:
        asks()
    assert "\n" not in str(error.value)
    return str(error.value)


def asked_for_anew() -> None:
    runpy.run_path(_torch.__file__)


@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.8.0", "2.10.0", "2.11.0.dev20260101"])
def test_an_older_torch_is_refused_with_the_reason_and_those_that_do(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    said = refused(asked_for_anew)
    assert said.startswith(f"torch {version} is too old: ")
    assert said.endswith(f"pip install 'torch>={_torch.OLDEST},<={_torch.NEWEST}'")


@pytest.mark.parametrize("version", [_torch.OLDEST, "2.12.1+cpu", "2.16.0", "3.0"])
def test_every_other_is_taken(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    asked_for_anew()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._C", "_current_graph_task_id"),
        ("torch.utils._python_dispatch", "_disable_current_modes"),
        ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    ],
)
def test_a_name_that_is_gone_is_named(monkeypatch, module, name):
    monkeypatch.delattr(f"{module}.{name}")
    assert refused(asked_for_anew).startswith(f"torch {torch.__version__} has no {module}.{name}; ")


def test_what_is_asked_of_an_object_or_of_a_module_is_named_too():
    group = SimpleNamespace(_all_gather_comm=None)
    assert _torch.private(group, "_all_gather_comm") is group
    assert "no SimpleNamespace._reduce_scatter_comm; " in refused(
        lambda: _torch.private(group, "_reduce_scatter_comm")
    )
    module = "torch.testing._internal.distributed.fake_pg"
    assert _torch.private(module, "FakeStore").__name__ == module
    assert f"no {module}.FakeShop; " in refused(lambda: _torch.private(module, "FakeShop"))


def test_what_is_declared_was_run():
    torches = newest_first({torch for torch, _ in PAIRS})
    pythons = newest_first({python for _, python in PAIRS})
    assert (torches[0], torches[-1]) == (_torch.NEWEST, _torch.OLDEST)
    declared = (ROOT / "pyproject.toml").read_text()
    assert f'dependencies = ["torch>={torches[-1].removesuffix(".0")}"]' in declared
    assert f'requires-python = ">={pythons[-1]}"' in declared
    assert newest_first(set(re.findall(r"Python :: (3\.\d+)", declared))) == pythons
