"""The usual losses have one gradient, whatever a batch is split into; and the formulas of others
that have not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.loops import seed_all
from support.losses import (
    CASES,
    Batch,
    Page,
    taken_gradients,
    whole_gradients_of,
)
from support.sharded_model import bits, relative_error

from adaptive_batch.errors import SettingError
from adaptive_batch.training import AdaptiveStep, Part, StepOptions

EXACT = 1e-12
LENGTHS = [5, 9, 4, 8, 7, 12, 6]


@pytest.fixture
def page() -> Page:
    return Page.of_decoder()


def random_split(generator: random.Random, lengths: list[int], *, has_lengths: bool) -> Any:
    """Arguments of a step that split a batch in some way."""
    layout = generator.choice(["padded", "grouped"]) if has_lengths else None
    options = StepOptions(micro_batch_layout=layout)
    if has_lengths and generator.random() < 0.5:
        tokens = generator.randint(max(lengths), sum(lengths))
        return {"micro_batch_tokens": tokens, "options": options}
    return {"micro_batch_size": generator.randint(1, len(lengths)), "options": options}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(8))
def test_any_split_has_the_gradient_of_the_whole_batch(page, name, seed):
    case = CASES[name]
    generator = random.Random(f"{name} {seed}")
    lengths = [generator.randint(3, 14) for _ in range(generator.randint(2, 10))]
    batch = case.batch(page, lengths, seed=seed)
    expected, whole_loss = whole_gradients_of(page, case.whole, batch)
    split = random_split(generator, lengths, has_lengths=not case.makes_pairs)
    step = AdaptiveStep(
        page.model, case.forward_backward(page), **case.step_arguments(page), **split
    )
    losses = step(batch)
    assert sum(losses).item() == pytest.approx(whole_loss, rel=EXACT)
    assert relative_error(taken_gradients(page.model), expected) <= EXACT


@pytest.mark.parametrize("name", CASES)
def test_a_batch_that_runs_out_of_memory_has_the_gradient_of_the_whole_batch(page, name):
    case = CASES[name]
    batch = case.batch(page, LENGTHS)
    expected, _ = whole_gradients_of(page, case.whole, batch)
    function = in_room_for(3, case.forward_backward(page))
    step = AdaptiveStep(page.model, function, **case.step_arguments(page))
    assert len(step(batch)) == 3
    assert relative_error(taken_gradients(page.model), expected) <= EXACT


# --- statistics of the whole batch


def in_room_for(most_rows: int, function: Callable[[Part], Any]) -> Callable[[Part], Any]:
    """A function that runs out of memory after it has run more rows."""

    def run(part: Part) -> Any:
        result = function(part)
        if part.num_rows > most_rows and not part.is_trial:
            torch.empty(2**50, dtype=torch.uint8)
        return result

    return run


@pytest.mark.parametrize("fails_in", ["statistics", "loss", "both"])
def test_memory_that_runs_out_in_either_pass_leaves_the_step_of_a_run_at_that_split(fails_in):
    """With dropout, random scales and running statistics."""
    ends = []
    for fails in (False, True):
        seed_all()
        page = Page.of_decoder(draws=True)
        batch = page.batch(LENGTHS)
        arguments: dict[str, Any] = {"num_labels": page.completion_tokens}
        loss = page.distill
        statistics = page.sums
        if fails and fails_in in ("statistics", "both"):
            statistics = in_room_for(5, statistics)
        if fails and fails_in in ("loss", "both"):
            loss = in_room_for(2 if fails_in == "both" else 5, loss)
        if not fails:
            arguments["micro_batch_size"] = 1 if fails_in == "both" else 3
        seed_all()
        step = AdaptiveStep(page.model, loss, statistics=statistics, **arguments)
        losses = torch.stack(step(batch))
        state = {**taken_gradients(page.model), **dict(page.model.named_buffers())}
        ends.append((bits({"losses": losses, **state}), torch.rand(1), random.random()))
    assert ends[0] == ends[1]


def test_one_part_has_the_bits_of_one_forward_in_which_the_ratio_is_taken():
    ends = []
    for is_plain in (True, False):
        seed_all()
        page = Page.of_decoder(draws=True)
        batch = page.batch(LENGTHS)
        seed_all()
        if is_plain:
            cross_entropy, divergence = page.distillation_losses(batch)
            ratio = (cross_entropy / divergence).detach()
            loss = (cross_entropy + ratio * divergence) / page.completion_tokens(batch)
            loss.backward()
        else:
            AdaptiveStep(page.model, page.distill, statistics=page.sums)(batch)
        buffers = dict(page.model.named_buffers())
        ends.append(bits({**taken_gradients(page.model), **buffers}))
    assert ends[0] == ends[1]


def test_statistics_count_rows_without_a_label_and_see_a_batch_that_they_may_change(page):
    batch = page.batch(LENGTHS)
    batch["completion_mask"][2:4] = False
    seen = []

    def count(part: Part) -> dict[str, Any]:
        assert not torch.is_grad_enabled()
        tokens = part.batch.pop("tokens")
        return {"rows": len(tokens), "tokens": tokens.sum()}

    def loss(part: Part) -> None:
        seen.extend([] if part.is_trial else [part.statistics])
        page.token_mean(part)

    arguments = {"micro_batch_size": 2, "num_labels": page.completion_tokens}
    AdaptiveStep(page.model, loss, statistics=count, **arguments)(batch)
    assert seen == [{"rows": 7, "tokens": batch["tokens"].sum()}] * 3


@pytest.mark.parametrize("estimates", [False, True])
def test_a_search_and_an_estimate_run_both_passes(page, estimates):
    rows: dict[str, list[int]] = {"statistics": [], "loss": []}

    def sums(part: Part) -> dict[str, torch.Tensor]:
        rows["statistics"].append(part.num_rows)
        return {"loss": page.token_losses(part.batch).sum()}

    def loss(part: Part) -> None:
        assert part.is_trial
        rows["loss"].append(part.num_rows)
        (page.token_losses(part.batch).sum() / part.statistics["loss"].abs()).backward()

    row = page.batch([9])

    def sample(number: int) -> Batch:
        return {key: tensor.repeat_interleave(number, dim=0) for key, tensor in row.items()}

    step = AdaptiveStep(page.model, loss, statistics=sums)
    optimizer = torch.optim.AdamW(page.model.parameters())
    if estimates:
        found = step.estimate(optimizer, sample, "1GiB", maximum=4, context=0).devices[0].lengths[0]
    else:
        found = step.find_bound(optimizer, sample, device_memory="1GiB", maximum=4)
    assert found.max_batch_size == 4
    assert rows["statistics"] == rows["loss"]
    assert 4 in rows["loss"]


def means(page: Page, part: Part) -> dict[str, torch.Tensor]:
    """Which add up to another ratio than that of the whole batch."""
    cross_entropy, divergence = page.distillation_losses(part.batch)
    return {"cross_entropy": cross_entropy / part.num_rows, "divergence": divergence}


@pytest.mark.parametrize(
    ("loss", "statistics", "message"),
    [
        ("token_mean", lambda page, part: 3.0, "statistics='float': return a mapping"),
        ("token_mean", lambda page, part: {f"of {part.num_rows}": 1}, "of one part and"),
        ("token_mean", lambda page, part: {"loss": torch.ones(part.num_rows)}, "loss of shape"),
        ("distill", means, "so a split would train something else"),
    ],
)
def test_statistics_that_do_not_add_up_are_refused(page, loss, statistics, message):
    arguments = {"micro_batch_size": 2, "num_labels": page.completion_tokens}
    arguments["statistics"] = partial(statistics, page)
    step = AdaptiveStep(page.model, page.names[loss], **arguments)
    with pytest.raises(SettingError, match=message):
        step(page.batch([5, 9, 4]))
    assert taken_gradients(page.model) == {}


# --- what threads of other projects report: their formula is another step if it is split
