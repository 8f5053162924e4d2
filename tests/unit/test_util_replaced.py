"""Attributes that an object has for a time."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

from torch import nn

from adaptive_batch._util import replaced


def test_an_object_has_other_attributes_inside_and_its_own_afterwards_also_after_an_error():
    owner = SimpleNamespace(kept=1, changed=2)
    with suppress(KeyError), replaced(owner, changed=3, added=4):
        assert vars(owner) == {"kept": 1, "changed": 3, "added": 4}
        raise KeyError
    assert vars(owner) == {"kept": 1, "changed": 2}


def test_a_method_of_a_class_is_hidden_inside_and_not_left_on_the_object():
    model = nn.Linear(2, 2).eval()
    with replaced(model, train=lambda mode=True: model):
        assert not model.train().training
    assert model.train().training
    assert "train" not in vars(model)
