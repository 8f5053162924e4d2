"""The check before a split compares the gradients of a few rows with those of their parts."""

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.losses import taken_gradients
from torch import nn
from torch.nn.functional import cross_entropy, dropout, normalize

from adaptive_batch import AdaptiveStep, SettingError

WEIGHTS = torch.tensor([1.0, 5.0, 20.0])


def rows(number=16):
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(number, 8, generator=generator),
        "y": torch.randint(0, 3, (number,), generator=generator),
    }


class Net(nn.Module):
    def __init__(self, *, zero_head=False):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)
        if zero_head:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(dropout(self.body(x).tanh(), 0.5, self.training))


def new_step(model, loss, **arguments):
    """Return a step whose function multiplies the loss by the share of the part."""

    def forward_backward(part):
        (loss(model, part.batch) * part.share).backward()

    return AdaptiveStep(model, forward_backward, **{"micro_batch_size": 4, **arguments})


def mean(model, batch, weight=None):
    return cross_entropy(model(batch["x"]).float(), batch["y"], weight=weight)


def valid_rows(model, batch):
    losses = cross_entropy(model(batch["x"]).float(), batch["y"], reduction="none")
    return losses[batch["y"] > 0].mean()


@pytest.mark.parametrize("loss", [partial(mean, weight=WEIGHTS), valid_rows])
@pytest.mark.parametrize("how", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("zero_head", [False, True])
def test_a_mean_with_other_weights_is_refused(loss, how, zero_head):
    model = Net(zero_head=zero_head)
    batch = rows()
    if how == "bfloat16":
        model.bfloat16()
        batch["x"] = batch["x"].bfloat16()

    def in_type(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return loss(model, batch)

    with pytest.raises(SettingError, match=r"have the shares .* would fit;.* give num_labels="):
        new_step(model, in_type)(batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    new_step(Net(), mean)(rows())


def summed(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def contrastive(model, batch):
    outputs = normalize(model(batch["x"]))
    return cross_entropy(4 * outputs @ outputs.T, torch.arange(len(outputs)))


def of_batch_statistics(model, batch):
    """A loss whose model normalizes over the batch outside of a BatchNorm."""
    mean_and_variance = torch.zeros(3), torch.ones(3)
    outputs = nn.functional.batch_norm(model(batch["x"]), *mean_and_variance, training=True)
    return cross_entropy(outputs, batch["y"])


@pytest.mark.parametrize(
    ("loss", "has_share", "says"),
    [
        (contrastive, True, r"differ by \d.*must stay whole.*give split="),
        (of_batch_statistics, True, r"must stay whole.*attends to padding, mask it"),
        (summed, True, "is a sum over rows, not a mean: do not multiply it"),
        (mean, False, r"but 0\.25 and 0\.25 would fit;.* multiply a mean by"),
    ],
)
@pytest.mark.parametrize("runs_out", [False, True])
def test_the_error_names_the_fix_and_gradients_are_unchanged(loss, has_share, says, runs_out):
    model = Net()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def forward_backward(part):
        if runs_out and part.num_rows > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        (loss(model, part.batch) * (part.share if has_share else 1)).backward()

    step = AdaptiveStep(model, forward_backward, micro_batch_size=None if runs_out else 4)
    with pytest.raises(SettingError, match=says):
        step(rows())
    assert all((parameter.grad == 1).all() for parameter in model.parameters())


def noisy(model, batch, weight=None):
    noise = torch.randn_like(batch["x"])
    return mean(model, {**batch, "x": batch["x"] + noise}, weight)


def masked(model, batch):
    kept = torch.empty_like(batch["x"]).bernoulli_(0.5)
    return mean(model, {**batch, "x": batch["x"] * kept})


@pytest.mark.parametrize("loss", [noisy, masked])
def test_a_loss_that_draws_numbers_for_each_row_is_checked_with_the_same_numbers(loss, caplog):
    model, other = Net(), Net()
    torch.manual_seed(3)
    new_step(model, loss)(rows())
    state = torch.get_rng_state()
    assert caplog.text == ""
    # The gradients equal those of a step without a check.
    torch.manual_seed(3)
    for first in range(0, 16, 4):
        part = {key: value[first : first + 4] for key, value in rows().items()}
        (loss(other, part) / 4).backward()
    assert torch.equal(torch.get_rng_state(), state)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    with pytest.raises(SettingError, match=r"would fit;.* give num_labels="):
        new_step(Net(), partial(noisy, weight=WEIGHTS))(rows())


def noise_of_numpy(model, batch):
    noise = torch.from_numpy(np.random.randn(*batch["x"].shape)).float()
    return mean(model, {**batch, "x": batch["x"] + noise})


def noise_over_views(model, batch):
    x = torch.cat([batch["x"], batch["x"]])
    return mean(model, {"x": x + torch.randn_like(x), "y": torch.cat([batch["y"]] * 2)})


def unsteady(model, batch, calls=itertools.count()):  # noqa: B008
    losses = cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    weight = torch.ones(len(losses))
    weight[next(calls) % len(losses)] = 2.0
    return (losses * weight).mean()


@pytest.mark.parametrize("loss", [noise_of_numpy, noise_over_views, unsteady])
def test_a_random_loss_without_draws_per_row_trains_with_one_warning(loss, caplog):
    step = new_step(Net(), loss)
    for _ in range(4):
        step(rows())
    assert ["cannot be compared" in record.message for record in caplog.records] == [True]


def test_num_labels_is_required_if_rows_without_labels_add_to_the_loss():
    def of_all_rows(model, batch):
        losses = cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return losses.mean()

    labels = torch.full((16,), -100)
    labels[:4] = 1
    step = new_step(Net(), of_all_rows, micro_batch_size=2)
    with pytest.raises(SettingError, match="add to the loss, give num_labels="):
        step({**rows(), "labels": labels})


def test_the_check_includes_trained_parameters_outside_of_the_module():
    encoder = nn.Linear(8, 16).requires_grad_(False)
    head = nn.Linear(16, 3)

    def weighted(model, batch):
        return mean(nn.Sequential(model, head), batch, WEIGHTS)

    with pytest.raises(SettingError, match="so a split would train something else"):
        new_step(encoder, weighted)(rows())
    assert head.weight.grad is None


class Queue(Net):
    """A model that writes a buffer in each forward pass and has a gradient hook."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(3))
        self.head.weight.register_hook(lambda gradient: gradient * 2)

    def forward(self, x):
        self.queue.mul_(0.5).add_(1)
        return super().forward(x)


def test_buffers_that_forward_writes_and_gradient_hooks_cause_one_warning_each(caplog):
    model = Queue()
    step = new_step(model, mean)
    for _ in range(3):
        step(rows())
    assert len(caplog.records) == 2
    assert "writes 1 tensor (queue)" in caplog.text
    assert "head.weight" in caplog.text
    # Four parts of three batches, without the passes of the check.
    expected = torch.zeros(3)
    for _ in range(12):
        expected = expected * 0.5 + 1
    assert torch.equal(model.queue, expected)


def test_a_forward_that_writes_frozen_parameters_is_refused():
    model = Net()
    teacher = model.teacher = nn.Parameter(torch.ones(16, 8), requires_grad=False)

    def averages(model, batch):
        with torch.no_grad():
            teacher.lerp_(model.body.weight, 0.1)
        return mean(model, batch)

    with pytest.raises(SettingError, match=r"writes 1 parameter \(teacher\)"):
        new_step(model, averages)(rows())


def test_a_penalty_that_the_last_part_adds_is_compared(caplog):
    model = nn.Linear(8, 3)

    def forward_backward(part):
        loss = mean(model, part.batch) * part.share
        (loss + part.is_last * model.weight.square().sum()).backward()

    AdaptiveStep(model, forward_backward, micro_batch_size=4)(rows())
    assert not caplog.text


@pytest.mark.parametrize("factor", [1, 0], ids=["and another loss", "alone"])
def test_an_auxiliary_loss_of_experts_in_the_configuration_causes_one_warning(factor, caplog):
    model = Net()
    model.config = SimpleNamespace(router_aux_loss_coef=0.02)

    def balanced(model, batch, coefficient=None):
        if coefficient is None:
            coefficient = model.config.router_aux_loss_coef
        chosen = model(batch["x"]).softmax(-1).mean(0)
        # The gradients differ by more than twice the coefficient.
        return factor * mean(model, batch) + coefficient * 30 * chosen.square().sum()

    step = new_step(model, balanced)
    for _ in range(4):
        step(rows())
    assert caplog.text.count("an auxiliary loss of its own, with coefficient 0.02") == 1
    assert model.config.router_aux_loss_coef == 0.02
    for other in (Net(), model):
        with pytest.raises(SettingError, match="so a split would train something else"):
            new_step(other, partial(balanced, coefficient=0.02))(rows())


class Pooled(nn.Module):
    """A model that averages all columns, padding included, unless it uses the mask."""

    def __init__(self, *, masks):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 16)
        self.head = nn.Linear(16, 3)
        self.masks = masks

    def forward(self, batch):
        hidden = self.embedding(batch["input_ids"])
        if self.masks:
            hidden = hidden * batch["attention_mask"][..., None]
        return self.head(hidden.mean(1) if not self.masks else hidden.sum(1))


def texts():
    tokens = torch.zeros(8, 9, dtype=torch.long)
    for row in range(8):
        tokens[row, : row + 2] = row + 1
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "y": torch.arange(8) % 3}


def of_texts(model, batch):
    return cross_entropy(model(batch), batch["y"])


def pooled_step(model, **arguments):
    """Return a step, and the list of the widths of its parts."""
    widths = []

    def forward_backward(part):
        if not part.is_trial:
            widths.append(part.batch["input_ids"].shape[1])
        (of_texts(model, part.batch) * part.share).backward()

    return AdaptiveStep(model, forward_backward, micro_batch_size=4, **arguments), widths


@pytest.mark.parametrize("masks", [True, False])
def test_parts_keep_all_columns_if_the_gradient_depends_on_padding(masks, caplog):
    model = Pooled(masks=masks)
    step, widths = pooled_step(model)
    for _ in range(2):
        assert_trains_as_whole(step, model, of_texts, texts())
    assert widths == ([5, 9] * 2 if masks else [9, 9] * 2)
    assert ("parts of a batch keep all columns" in caplog.text) == (not masks)


def test_parts_keep_all_columns_in_a_retry_too():
    errors = [torch.OutOfMemoryError("no memory")]

    def num_labels(batch):
        if step.check.keeps_columns and errors:
            raise errors.pop()
        return len(batch["y"])

    step, widths = pooled_step(Pooled(masks=False), num_labels=num_labels)
    step(texts())
    assert not errors
    assert widths == [9] * 4


def test_a_function_that_changes_the_gradients_of_earlier_parts_is_refused():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clears(part):
        optimizer.zero_grad()
        (mean(model, part.batch) * part.share).backward()

    def assigns(part):
        loss = mean(model, part.batch) * part.share
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.grad = gradient

    for function in (clears, assigns):
        step = AdaptiveStep(model, function, micro_batch_size=4)
        with pytest.raises(SettingError, match="it changes gradients that earlier parts left"):
            step(rows())


def masked_tokens(number):
    """Return rows with labels at random tokens, including the first one, as for masked LMs."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, 9, (16, 12), generator=generator)
    labels = tokens.masked_fill(torch.rand(16, 12, generator=generator) > 0.3, -100)
    return {"input_ids": tokens, "labels": labels}


def token_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(9, 16), nn.Tanh(), nn.Linear(16, 9))


def assert_trains_as_whole(step, model, loss, batch):
    loss(model, batch).backward()
    expected = taken_gradients(model)
    step(batch)
    torch.testing.assert_close(taken_gradients(model), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_first_labels_count_from_the_first_batch_on_if_the_loss_includes_them(seed):
    model = token_model(seed)

    def of_tokens(model, batch):
        logits = model(batch["input_ids"]).flatten(0, 1)
        return cross_entropy(logits, batch["labels"].flatten())

    step = new_step(model, of_tokens)
    for number in range(6):
        assert_trains_as_whole(step, model, of_tokens, masked_tokens(100 * seed + number))


@pytest.mark.parametrize("seed", range(4))
def test_rows_with_only_a_first_label_run_if_the_loss_divides_by_the_labels_of_the_batch(seed):
    model = token_model(seed)

    def per_label_of_the_batch(model, batch):
        logits = model(batch["input_ids"]).flatten(0, 1)
        return cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / 50

    def forward_backward(part):
        # The share cancels out, as with Trainer's number of items.
        (per_label_of_the_batch(model, part.batch) / part.share * part.share).backward()

    step = AdaptiveStep(model, forward_backward, micro_batch_size=1)
    for number in range(6):
        tokens = torch.randint(1, 9, (8, 12))
        is_label = torch.zeros(8, 12, dtype=torch.bool)
        is_label[:, 0] = True
        # Rows with 4, 2, 5 and 2 labels.
        for row, columns in enumerate([[2, 3, 5], [3], [1, 2, 3, 4], [6]] * 2):
            is_label[row, columns] = number < 3 or row % 2 == 0
        batch = {"input_ids": tokens, "labels": tokens.masked_fill(~is_label, -100)}
        assert_trains_as_whole(step, model, per_label_of_the_batch, batch)


def test_a_part_with_only_first_labels_causes_a_warning_if_no_check_succeeded(caplog):
    model = token_model()

    def not_finite(model, batch):
        return model(batch["input_ids"]).mean() * torch.nan

    batch = masked_tokens(0)
    new_step(model, not_finite)(batch)
    assert "rows have no finite gradient" in caplog.text
    assert "a part is left out" not in caplog.text
    batch["labels"][:4, 1:] = -100
    batch["labels"][:4, 0] = 1
    new_step(model, not_finite)(batch)
    assert "a part is left out, since its only labels are the first ones" in caplog.text


def test_rows_of_one_token_have_no_label_in_a_causal_model():
    model = token_model()

    def causal(model, batch):
        ids, labels = batch["input_ids"], batch["labels"]
        return cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def batch_of(lengths):
        tokens = [torch.randint(1, 9, (length,)) for length in lengths]
        ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        labels = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-100)
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    step = new_step(model, causal, micro_batch_size=2)
    for lengths in ([9, 8, 7, 6], [5, 9, 4, 7], [9, 9, 1, 1], [3, 4, 1, 1]):
        assert_trains_as_whole(step, model, causal, batch_of(lengths))


def test_the_first_batch_with_parts_without_padding_is_checked(caplog):
    step = new_step(Pooled(masks=False), of_texts)
    even = {**texts(), "input_ids": torch.ones(8, 9, dtype=torch.long)}
    even["attention_mask"] = even["input_ids"]
    for _ in range(4):
        step(even)
    assert caplog.text == ""
    step(texts())
    assert "parts of a batch keep all columns" in caplog.text


def test_a_small_term_without_share_is_refused_for_many_parts():
    def forward_backward(part):
        weight = model.body.weight
        (mean(model, part.batch) * part.share + 5e-4 * weight.square().sum()).backward()

    model = Net()
    with pytest.raises(SettingError, match="so a split would train something else"):
        AdaptiveStep(model, forward_backward, micro_batch_size=4)(rows(256))


def test_the_error_of_a_failing_part_has_the_treatment_of_each_key():
    def fails(model, batch):
        if len(batch["x"]) != len(batch["more"]):
            raise ValueError("rows differ")
        return mean(model, batch)

    batch = {**rows(), "more": torch.zeros(15)}
    with pytest.raises(SettingError, match=r"x, y divided; more kept whole.*rows differ.*split="):
        new_step(Net(), fails)(batch)
