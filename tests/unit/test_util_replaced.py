"""Temporary attributes of an object."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

from torch import nn

from adaptive_batch._util import replaced


def test_attributes_are_restored_even_after_an_error():
    owner = SimpleNamespace(kept=1, changed=2)
    with suppress(KeyError), replaced(owner, changed=3, added=4):
        assert vars(owner) == {"kept": 1, "changed": 3, "added": 4}
        raise KeyError
    assert vars(owner) == {"kept": 1, "changed": 2}


def test_a_method_of_a_class_is_restored():
    model = nn.Linear(2, 2).eval()
    with replaced(model, train=lambda mode=True: model):
        assert not model.train().training
    assert model.train().training
    assert "train" not in vars(model)
