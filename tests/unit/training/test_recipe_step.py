"""Gradients are those of the mean over all label tokens of a step for each split."""

import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.examples import SHAPES, examples
from support.losses import taken_gradients
from support.runners import build_runner, sizer_of
from support.sharded_model import (
    IGNORED,
    VOCABULARY,
    WIDTH,
    Decoder,
    Layer,
    collate,
    relative_error,
    token_losses,
)
from torch import nn

from adaptive_batch.data import MicroBatchLimit, split_by_rows


class Causal(nn.Module):
    """A causal transformer of one layer, for right-padded rows."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = Layer(width=WIDTH, dropout=0.0)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)))


def model():
    """Return a model without dropout, since each split would draw another mask."""
    torch.manual_seed(0)
    return Causal().double().eval()


def runner(net, limit, **settings):
    return build_runner(
        net, limit, collate=collate, mean_loss=lambda batch: token_losses(net, batch), **settings
    )


def row(length, *, masked=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
    return {"tokens": tokens, "labels": [IGNORED] * masked + tokens[masked:]}


@st.composite
def rows(draw):
    length = draw(st.integers(2, 16))
    return row(length, masked=draw(st.integers(0, length)), seed=draw(st.integers(0, 99)))


def gradients(batch, capacity, **settings):
    net = model()
    result = runner(net, capacity, **settings).run(batch)
    return result, taken_gradients(net)


CAPACITIES = st.one_of(
    st.builds(MicroBatchLimit, st.integers(1, most), st.just(unit))
    for most, unit in ((9, "rows"), (150, "tokens"))
)


@given(batch=st.lists(rows(), min_size=1, max_size=9), capacity=CAPACITIES, shapes=SHAPES)
@examples(60)
def test_loss_and_gradients_are_those_of_the_mean_over_all_label_tokens(batch, capacity, shapes):
    """Any split has those of one batch, and these are computed row by row."""
    net = model()
    counts = [sum(label != IGNORED for label in row["labels"][1:]) for row in batch]
    assume(any(counts))
    for one, count in zip(batch, counts, strict=True):
        if count:
            (token_losses(net, collate([one])) * count / sum(counts)).backward()
    whole, expected = gradients(batch, MicroBatchLimit(len(batch)))
    # The tolerance is that of a float32 scale, as in torchtune.
    assert relative_error(expected, taken_gradients(net)) <= 1e-7
    split, found = gradients(batch, capacity, layout=shapes)
    assert relative_error(found, expected) <= 1e-12
    assert split.loss == pytest.approx(whole.loss, rel=1e-6)  # float32
    assert int(split.num_labels) == int(whole.num_labels) == sum(counts)
    assert (split.rows, split.tokens) == (whole.rows, whole.tokens)
    assert split.tokens == sum(len(row["tokens"]) for row in batch)


@pytest.mark.parametrize(
    "capacity", [MicroBatchLimit(4), MicroBatchLimit(1), MicroBatchLimit(20, "tokens")], ids=str
)
def test_gradients_are_clipped_and_their_norm_before_clipping_is_returned(capacity):
    batch = [row(length, seed=length) for length in (4, 9, 6, 3)]
    unclipped, expected = gradients(batch, capacity)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert unclipped.grad_norm is None
    for limit in (float(norm) / 8, 2 * float(norm)):
        clipped, found = gradients(batch, capacity, max_grad_norm=limit)
        assert float(clipped.grad_norm) == pytest.approx(float(norm), rel=1e-12)
        factor = min(1.0, limit / (norm + 1e-6))
        scaled = {name: gradient * factor for name, gradient in expected.items()}
        assert relative_error(found, scaled) <= 1e-12


def test_micro_batches_without_labels_are_skipped():
    unlabelled, labelled = row(3, masked=3), row(3, masked=1)
    result, found = gradients([unlabelled, labelled], MicroBatchLimit(1))
    assert result.micro_batches == 1
    assert all(torch.isfinite(gradient).all() for gradient in found.values())
    result, found = gradients([unlabelled], MicroBatchLimit(1))
    assert (result.loss, result.micro_batches, found) == (0.0, 0, {})


def squared_norm(gradients):
    """Return the squared norm of gradients of any type in float64."""
    return sum(float(gradient.double().square().sum()) for gradient in gradients.values())


LIMITS = st.sampled_from([None, 1e-3, 1e3])


@given(st.lists(rows(), min_size=1, max_size=9), CAPACITIES, SHAPES, LIMITS)
@examples(60)
def test_measuring_noise_changes_no_bit_of_a_step(batch, capacity, shapes, limit):
    assume(shapes.keeps_order(capacity))
    for dtype in (torch.float64, torch.bfloat16):
        nets, results = (model().to(dtype), model().to(dtype)), []
        for net, measures in zip(nets, (False, True), strict=True):
            settings = {"layout": shapes, "max_grad_norm": limit, "measures_noise": measures}
            results.append(runner(net, capacity, **settings).run(batch)._asdict())
        plain, measured = results
        assert plain.pop("noise") is None
        measured.pop("noise")
        assert plain == measured
        for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)


@given(
    batch=st.lists(rows(), min_size=2, max_size=9),
    capacity=st.builds(MicroBatchLimit, st.integers(1, 8)),
    limit=LIMITS,
)
@example([row(5), row(5, masked=5)], MicroBatchLimit(1), None)
@examples(60)
def test_the_noise_sample_has_the_first_micro_batch_and_the_whole_step(batch, capacity, limit):
    result, _ = gradients(batch, capacity, measures_noise=True, max_grad_norm=limit)
    (small, *_) = split_by_rows(batch, capacity.amount)
    first, of_first = gradients(small, capacity)
    whole, of_whole = gradients(batch, MicroBatchLimit(len(batch)))
    if result.micro_batches < 2 or not first.micro_batches:
        assert result.noise is None
        return
    per_row = int(first.num_labels) / len(small)
    assert {name: float(value) for name, value in vars(result.noise).items()} == {
        "small_rows": len(small),
        "small_squared_norm": pytest.approx(
            squared_norm(of_first), rel=1e-6
        ),  # divided by a float32
        "big_rows": len(batch),
        "big_squared_norm": pytest.approx(squared_norm(of_whole), rel=1e-6),
        "label_ratio": pytest.approx(per_row / (int(whole.num_labels) / len(batch))),
    }


FOUR = MicroBatchLimit(4)


class Validated:
    """Evaluation of a small model with dropout; one module is in evaluation mode."""

    def __init__(self, capacity=FOUR, **settings):
        self.model = Decoder(draws=True)
        self.model.layers[0].norm.eval()
        self.shapes_run, self.changes, self.changes_in_training = [], [], []
        self.too_large = lambda tokens: False
        self.engine = build_runner(
            self.model,
            MicroBatchLimit(8),
            collate=collate,
            mean_loss=self.mean_loss,
            on_change=self.changes_in_training.append,
            **settings,
        )
        self.sizer = sizer_of(capacity, on_change=self.changes.append)

    def run(self, rows):
        return self.engine.evaluate(rows, loss=self.engine.loss, sizer=self.sizer)

    def mean_loss(self, batch):
        self.shapes_run.append(tuple(batch["tokens"].shape))
        if self.too_large(batch["tokens"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        loss = token_losses(self.model, batch)
        assert not loss.requires_grad
        return loss

    def modes(self):
        return [module.training for module in self.model.modules()]


def mean_of_label_tokens(model, batch):
    """Compute the mean row by row."""
    model.eval()
    counts = [sum(label != IGNORED for label in one["labels"][1:]) for one in batch]
    with torch.no_grad():
        sums = [
            float(token_losses(model, collate([one]))) * count
            for one, count in zip(batch, counts, strict=True)
            if count
        ]
    return sum(sums) / sum(counts) if sum(counts) else math.nan


@given(batch=st.lists(rows(), max_size=9), capacity=CAPACITIES)
@examples(60)
def test_the_validation_loss_is_the_mean_over_label_tokens_for_each_limit(batch, capacity):
    validated = Validated(capacity)
    found = validated.run(iter(batch))
    # Micro-batches without labels do not run.
    assert math.isnan(found) == (validated.shapes_run == [])
    expected = mean_of_label_tokens(validated.model, batch)
    assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("error", [ValueError("a bad row"), KeyboardInterrupt()], ids=repr)
def test_training_modes_are_restored_after_an_error(error):
    validated = Validated()
    before = validated.modes()

    def fail(tokens):
        raise error

    validated.too_large = fail
    with pytest.raises(type(error)) as caught:
        validated.run([row(5)])
    assert caught.value is error
    assert validated.modes() == before


@pytest.mark.parametrize(
    ("capacity", "after"),
    [
        (MicroBatchLimit(8), MicroBatchLimit(2)),
        (MicroBatchLimit(72, "tokens"), MicroBatchLimit(18, "tokens")),
    ],
    ids=str,
)
def test_an_oom_in_validation_lowers_only_the_limit_of_validation(capacity, after):
    batch = [row(9, masked=seed % 4, seed=seed) for seed in range(8)]
    expected = Validated(capacity).run(batch)
    validated = Validated(capacity)
    before = validated.modes()
    validated.too_large = lambda tokens: tokens.shape[0] > 2
    assert validated.run(batch) == pytest.approx(expected, rel=1e-12)
    assert validated.sizer.limit() == after
    assert [change.grows for change in validated.changes] == [False, False]
    assert (validated.engine.sizer.limit(), validated.changes_in_training) == (
        MicroBatchLimit(8),
        [],
    )
    assert validated.modes() == before
    validated.shapes_run.clear()
    validated.run(batch)
    assert {shape[0] for shape in validated.shapes_run} == {2}
