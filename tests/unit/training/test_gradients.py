"""A split batch has the gradients of one backward, also in leaves outside of the model."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.autograd import backward as imported_backward
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from adaptive_batch.errors import SettingError
from adaptive_batch.training import AdaptiveStep, find_max_batch_size

NUM_ROWS = 12


class Task:
    """A step's encoder, and three kinds of leaves that the step does not know.

    Args:
        call: calls backward of a loss.
        checkpoints: whether the head runs in a reentrant checkpoint.
        fails: `forward` or `backward` of a part, and the number of that part, which runs out of
            memory above three rows. The head already has its gradient if backward fails.
    """

    def __init__(self, call=torch.Tensor.backward, *, checkpoints=False, fails=("", 0)):
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.bias = torch.zeros(3, requires_grad=True)
        self.batch = (torch.randn(NUM_ROWS, 8), torch.randint(0, 3, (NUM_ROWS,)))
        self.call, self.checkpoints, self.fails = call, checkpoints, fails
        self.num_parts, self.failed = 0, []

    @property
    def leaves(self):
        return [*self.encoder.parameters(), *self.head.parameters(), self.temperature, self.bias]

    def gradients(self):
        return [None if leaf.grad is None else leaf.grad.clone() for leaf in self.leaves]

    def loss(self, x, y, *, fails_in_backward=False):
        hidden = self.encoder(x)
        if fails_in_backward:
            hidden.register_hook(lambda _: self.run_out_of_memory())
        if self.checkpoints and torch.is_grad_enabled():
            logits = checkpoint(self.head, hidden, use_reentrant=True)
        else:
            logits = self.head(hidden)
        return cross_entropy(logits * self.temperature + self.bias, y)

    def run_out_of_memory(self):
        self.failed.append(self.gradients())
        torch.empty(2**50, dtype=torch.uint8)

    def __call__(self, part):
        if part.is_first:
            self.num_parts = 0
        place, number = self.fails
        is_failing = torch.is_grad_enabled() and part.num_rows > 3 and number == self.num_parts
        self.num_parts += 1
        if is_failing and place == "forward":
            self.run_out_of_memory()
        loss = self.loss(*part.batch, fails_in_backward=is_failing and place == "backward")
        self.call(loss * part.share)


def assert_close(found, expected):
    for gradient, due in zip(found, expected, strict=True):
        assert (gradient is None) == (due is None)
        if due is not None:
            torch.testing.assert_close(gradient, due, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("earlier", [False, True], ids=["clear", "accumulated"])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("number", [0, 1], ids=["first part", "second part"])
@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoints": True}, {"call": torch.autograd.backward}, {"call": imported_backward}],
    ids=["", "checkpointed", "autograd.backward", "imported"],
)
def test_a_failed_attempt_is_undone_in_all_leaves(earlier, place, number, options):
    plain = Task(**options)
    plain.loss(*plain.batch).backward()
    expected = plain.gradients()
    task = Task(**options, fails=(place, number))
    step = AdaptiveStep(task.encoder, task, micro_batch_size=6 if number else None)
    if earlier:
        task.loss(*task.batch).backward()
        expected = [2 * gradient for gradient in expected]
    held = [leaf.grad for leaf in task.leaves]
    step(task.batch)
    # Only the first forward fails without gradients to undo.
    assert earlier or (task.failed[0][-1] is None) == ((place, number) == ("forward", 0))
    assert_close(task.gradients(), expected)
    for leaf, gradient in zip(task.leaves, held, strict=True):
        # Gradients accumulate in place, as in autograd.
        assert gradient is None or leaf.grad is gradient


def test_an_error_of_the_script_restores_earlier_gradients_of_all_leaves():
    task = Task()
    # Twice the gradients of the batch that fails.
    (2 * task.loss(*task.batch)).backward()
    expected = task.gradients()

    def forward_backward(part):
        task.loss(*part.batch).backward()
        raise KeyError("of the script")

    with pytest.raises(KeyError):
        AdaptiveStep(task.encoder, forward_backward)(task.batch)
    assert all(map(torch.equal, task.gradients(), expected))


@pytest.mark.parametrize("earlier", [False, True], ids=["clear", "accumulated"])
@pytest.mark.parametrize("search", ["find_bound", "find_max_batch_size"])
def test_a_search_does_not_change_the_gradients_of_any_leaf(search, earlier):
    task = Task()
    if earlier:
        task.loss(*task.batch).backward()
    held, expected = [leaf.grad for leaf in task.leaves], task.gradients()
    optimizer = torch.optim.AdamW(task.encoder.parameters())

    def sample(num_rows):
        return torch.randn(num_rows, 8), torch.zeros(num_rows, dtype=torch.long)

    def run(batch):
        task.loss(*batch).backward()

    options = {"device_memory": "1MiB", "maximum": 64}
    if search == "find_bound":
        AdaptiveStep(task.encoder, task).find_bound(optimizer, sample, **options)
    else:
        find_max_batch_size(task.encoder, optimizer, run, sample, **options)
    assert all(leaf.grad is gradient for leaf, gradient in zip(task.leaves, held, strict=True))
    assert_close(task.gradients(), expected)


class StepsInBackward:
    """A hook that steps a parameter and frees its gradient."""

    num_steps = 0

    def __call__(self, parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None
        self.num_steps += 1


HOOKED = {
    "a parameter of the module": lambda task: task.encoder.weight,
    "the head": lambda task: task.head.bias,
    "a tensor": lambda task: task.bias,
}


@pytest.mark.parametrize("hooked", HOOKED.values(), ids=HOOKED)
@pytest.mark.parametrize("form", ["object", "partial", "lambda"])
def test_a_hook_that_may_step_an_optimizer_is_refused_before_the_first_part(hooked, form):
    task = Task()
    hook = StepsInBackward()
    forms = {"object": hook, "partial": functools.partial(hook), "lambda": lambda leaf: hook(leaf)}
    hooked(task).register_post_accumulate_grad_hook(forms[form])
    weights = [leaf.clone() for leaf in task.leaves]
    with pytest.raises(SettingError, match=r"^register_post_accumulate_grad_hook=.*each part"):
        AdaptiveStep(task.encoder, task, micro_batch_size=6)(task.batch)
    assert hook.num_steps == 0
    assert all(map(torch.equal, task.leaves, weights))
    assert task.gradients() == [None] * len(weights)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("hooked", HOOKED.values(), ids=HOOKED)
def test_a_hook_runs_for_whole_batches_and_is_refused_for_a_split(hooked, place):
    task = Task()
    hook = StepsInBackward()
    hooked(task).register_post_accumulate_grad_hook(hook)
    step = AdaptiveStep(task.encoder, task)
    step(task.batch)
    assert hook.num_steps == 1
    task.fails = (place, 0)
    with pytest.raises(SettingError, match="register_post_accumulate_grad_hook"):
        step(task.batch)
    assert hook.num_steps == 1 + (place == "backward" and hooked(task) is not task.encoder.weight)


def test_optimizers_that_torch_applies_in_backward_are_refused():
    task = Task()
    _apply_optimizer_in_backward(torch.optim.SGD, task.encoder.parameters(), {"lr": 0.1})
    weights = [parameter.clone() for parameter in task.encoder.parameters()]
    with pytest.raises(SettingError, match=r"optimizer.step\(\)='SGD'"):
        AdaptiveStep(task.encoder, task, micro_batch_size=6)(task.batch)
    assert all(map(torch.equal, task.encoder.parameters(), weights))


@pytest.mark.parametrize("foreign", [False, True])
def test_an_optimizer_that_forward_backward_steps_is_refused_in_the_first_part(foreign):
    task = Task()
    optimizer = torch.optim.AdamW(task.leaves if foreign else task.encoder.parameters())

    def forward_backward(part):
        task(part)
        optimizer.step()
        optimizer.zero_grad()

    step = AdaptiveStep(task.encoder, forward_backward)
    step(task.batch)
    weights = [leaf.clone() for leaf in task.leaves]
    state = copy.deepcopy(optimizer.state_dict())
    task.fails = ("forward", 0)
    with pytest.raises(SettingError, match=r"^optimizer\.step\(\)='AdamW': .*after the batch"):
        step(task.batch)
    assert all(map(torch.equal, task.leaves, weights))
    assert str(optimizer.state_dict()) == str(state)
    # Outside of parts the optimizer may step.
    optimizer.step()
