"""Counting live bytes changes neither gradients nor their accumulation in place."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_batch.estimate.allocator import LoggingTracker
from adaptive_batch.memory import MemoryTracker


class Doubled(torch.autograd.Function):
    """A function whose backward adds out of place."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone() + gradient.clone()


def forked(x):
    return x.exp() + x.sin() + x.cos()


def tied(x):
    return x @ x


def same_twice(x):
    return x + x


class InPlace(TorchDispatchMode):
    """Record whether each sum in backward is in place."""

    def __init__(self):
        super().__init__()
        self.sums = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        backward = torch._C._current_graph_task_id() != -1
        if backward and func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
            self.sums.append(func is torch.ops.aten.add_.Tensor)
        return func(*args, **(kwargs or {}))


def sums(function, *, fake=False):
    """Run a backward under a tracker and return for each sum whether it was in place."""
    with FakeTensorMode() if fake else torch.enable_grad():
        x = torch.linspace(-1, 1, 1024).reshape(32, 32).requires_grad_()
        with InPlace() as noted, LoggingTracker():
            function(x.clone()).sum().backward()
    return noted.sums


@pytest.mark.parametrize("fake", [False, True])
def test_gradients_of_a_reused_tensor_are_accumulated_in_place(fake):
    assert sums(forked, fake=fake) == [True, True]
    assert sums(tied, fake=fake) == [True]


def test_a_gradient_with_another_reference_is_not_overwritten():
    assert sums(same_twice) == [False]  # one gradient, for both
    assert sums(lambda x: Doubled.apply(x)) == [False]  # not a sum of autograd
    kept = []

    def with_hooks(x):
        parts = [part(x) for part in (torch.exp, torch.sin)]
        for part in parts:
            part.grad_fn.register_hook(lambda given, _: kept.extend(given))
        return parts[0] + parts[1]

    assert sums(with_hooks) == [False]
    exp, sin = kept
    assert not torch.equal(exp, sin)


@pytest.mark.parametrize("function", [forked, tied, same_twice, Doubled.apply])
def test_gradients_are_bit_identical_to_those_without_a_tracker(function):
    x = torch.linspace(-1, 1, 1024).reshape(32, 32)
    gradients = []
    for tracker in (None, MemoryTracker(2**40)):
        leaf = x.clone().requires_grad_()
        with tracker or torch.enable_grad():
            for _ in range(2):  # the second accumulates
                function(leaf.clone()).sin().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
