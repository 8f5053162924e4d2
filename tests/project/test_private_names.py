"""A private name of another library has a row in private_names.csv, with the reason."""

import pytest
from support.paths import ROOT
from support.private_names import names_in, read_table


def test_each_private_name_has_a_library_and_a_reason():
    rows = read_table()
    assert rows.keys() == names_in(ROOT).keys(), "new names, or rows of names that are gone"
    assert all(row["library"] and row["reason"] for row in rows.values())


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch._ops import OpOverload", {"torch._ops.OpOverload"}),
        ("from adaptive_batch._util import count", set()),
        ("import torch\ntorch.cuda.memory._snapshot()", {"torch.cuda.memory._snapshot"}),
        ('private("torch._guards", "TracingContext").x', {"torch._guards.TracingContext"}),
        ('private(group, "_comm")\ngroup._comm', {"_comm"}),
        ('getattr(parameter, "_backward_hooks")', {"_backward_hooks"}),
        ("replaced(autocast, _enabled=False)", {"_enabled"}),
        ('NAMES = {"x": "torch._C._y"}', {"torch._C._y"}),
        ("class A:\n    def __init__(self):\n        self._x = 1\nA()._x", set()),
        ("torch.ops.aten._softmax(x)\nname = '_softmax'", set()),
        ("module._buffers", {"_buffers"}),
        ("cfg.model._component_", set()),
    ],
)
def test_names_are_found_wherever_they_are_written(tmp_path, code, names):
    (tmp_path / "adaptive_batch").mkdir()
    (tmp_path / "adaptive_batch" / "a.py").write_text(code)
    assert names_in(tmp_path) == {name: {"adaptive_batch/a.py"} for name in names}
