"""The usual losses have one gradient, whatever a batch is split into; and the formulas of others
that have not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.losses import (
    CASES,
    Batch,
    Page,
    distil_by_share,
    divergences_of,
    forward_kl,
    ratio_over_batch,
    rows_of,
    taken_gradients,
    token_losses_of,
    token_mean,
    whole_gradients_of,
)
from support.sharded_model import bits, relative_error
from torch import nn
from torch.nn.functional import kl_div, logsigmoid

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


def seed_all() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


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


def test_statistics_count_rows_without_a_label_and_see_a_batch_that_they_may_change():
    page = Page.of_decoder()
    batch = page.batch(LENGTHS)
    batch["completion_mask"][2:4] = False
    seen = []

    def count(part: Part) -> dict[str, Any]:
        assert not torch.is_grad_enabled()
        tokens = part.batch.pop("tokens")
        return {"rows": len(tokens), "tokens": tokens.sum()}

    def loss(part: Part) -> None:
        if not part.is_trial:
            seen.append(part.statistics)
        page.token_mean(part)

    step = AdaptiveStep(
        page.model,
        loss,
        micro_batch_size=2,
        num_labels=page.completion_tokens,
        statistics=count,
    )
    step(batch)
    assert len(seen) == 3
    for statistics in seen:
        assert statistics == {"rows": 7, "tokens": batch["tokens"].sum()}


def test_a_search_runs_both_passes():
    page = Page.of_decoder()
    rows: dict[str, list[int]] = {"statistics": [], "loss": []}

    def sums(part: Part) -> dict[str, torch.Tensor]:
        assert part.is_trial
        rows["statistics"].append(part.num_rows)
        return page.sums(part)

    def distill(part: Part) -> None:
        rows["loss"].append(part.num_rows)
        page.distill(part)

    step = AdaptiveStep(page.model, distill, num_labels=page.completion_tokens, statistics=sums)
    optimizer = torch.optim.AdamW(page.model.parameters())
    row = page.batch([9])

    def sample(number: int) -> Batch:
        return {key: tensor.repeat_interleave(number, dim=0) for key, tensor in row.items()}

    found = step.find_bound(optimizer, sample, device_memory="1MiB", maximum=16)
    assert found.max_batch_size >= 1
    assert rows["statistics"] == rows["loss"]
    assert rows["loss"]


def test_an_estimate_runs_both_passes(page):
    calls = []

    def sums(part: Part) -> dict[str, torch.Tensor]:
        calls.append(part.num_rows)
        return {"loss": page.token_losses(part.batch).sum()}

    def loss(part: Part) -> None:
        (page.token_losses(part.batch).sum() / part.statistics["loss"].abs()).backward()

    row = page.batch([9])

    def sample(number: int) -> Batch:
        return {key: tensor.repeat_interleave(number, dim=0) for key, tensor in row.items()}

    step = AdaptiveStep(page.model, loss, statistics=sums)
    optimizer = torch.optim.AdamW(page.model.parameters())
    estimate = step.estimate(optimizer, sample, "1GiB", maximum=4, context=0)
    assert estimate.devices[0].lengths[0].max_batch_size == 4
    assert 4 in calls


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        (lambda part: 3.0, r"statistics='float': return a mapping"),
        (lambda part: {f"of {part.num_rows}": 1}, r"statistics=\"of two parts \['of 2'\] and"),
        (lambda part: {"loss": torch.ones(part.num_rows)}, r"loss of shapes \(2,\) and \(1,\)"),
    ],
)
def test_statistics_that_do_not_add_up_are_refused(page, statistics, message):
    step = AdaptiveStep(
        page.model,
        page.token_mean,
        micro_batch_size=2,
        num_labels=page.completion_tokens,
        statistics=statistics,
    )
    with pytest.raises(SettingError, match=message):
        step(page.batch([5, 9, 4]))
    assert taken_gradients(page.model) == {}


def test_statistics_are_a_function(page):
    with pytest.raises(SettingError, match=r"statistics=3: give a function"):
        AdaptiveStep(page.model, page.token_mean, statistics=3)


def test_means_of_parts_are_no_statistics_and_refused(page):
    """They add up to another ratio than that of the whole batch."""

    def means(part: Part) -> dict[str, torch.Tensor]:
        cross_entropy, divergence = page.distillation_losses(part.batch)
        return {"cross_entropy": cross_entropy / part.num_rows, "divergence": divergence}

    step = AdaptiveStep(
        page.model,
        page.distill,
        micro_batch_size=2,
        num_labels=page.completion_tokens,
        statistics=means,
    )
    with pytest.raises(SettingError, match="so a split would train something else"):
        step(page.batch(LENGTHS))


def contrastive(page: Page) -> Callable[[Part], None]:
    def forward_backward(part: Part) -> None:
        states = page.model(part.batch["tokens"]).mean(dim=1)
        scores = states @ states.T
        targets = torch.arange(part.num_rows)
        (nn.functional.cross_entropy(scores, targets) * part.share).backward()

    return forward_backward


def test_a_loss_that_compares_rows_is_refused(page):
    step = AdaptiveStep(page.model, contrastive(page), micro_batch_size=2)
    with pytest.raises(SettingError, match="a loss that compares rows"):
        step(page.batch(LENGTHS))


# --- what threads of other projects report: their formula is wrong, and refused; ours is right


def part_batches(batch: Batch, num_rows: int) -> list[Batch]:
    """The parts of a batch, of so many rows."""
    num_all = len(batch["tokens"])
    return [
        {key: tensor[first : first + num_rows] for key, tensor in batch.items()}
        for first in range(0, num_all, num_rows)
    ]


def kl_mean(page: Page, batch: Batch) -> torch.Tensor:
    """Forward KL, a mean over the tokens of a batch."""
    return divergences_of(page, batch).mean()


def check_thread(
    page: Page,
    batch: Batch,
    *,
    theirs: Callable[[Page, Batch, int], torch.Tensor],
    whole: Callable[[Page, Batch], torch.Tensor],
    ours: Callable[[Part], Any],
    num_rows: int = 1,
    shows_in_few_rows: bool = True,
    **arguments: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Assert that a step with our function has the gradient of the whole batch, that parts with the
    thread's formula have another, and that the check of a split refuses it.

    Args:
        page: with the model.
        batch: batch of rows.
        theirs: loss of a part as the thread computes it, which is told how many parts there are.
        whole: loss of the whole batch.
        ours: function for a part.
        num_rows: rows of a part.
        shows_in_few_rows: whether some rows show it, and not the whole batch alone.
        arguments: what our step is given.

    Returns:
        The gradients of the whole batch, and those of the thread's formula.
    """
    expected, _ = whole_gradients_of(page, whole, batch)
    parts = part_batches(batch, num_rows)
    # Of one part the formula is right: it is the split that changes it.
    one_part, _ = whole_gradients_of(page, lambda page, batch: theirs(page, batch, 1), batch)
    assert relative_error(one_part, expected) <= EXACT
    for part in parts:
        theirs(page, part, len(parts)).backward()
    wrong = taken_gradients(page.model)
    assert relative_error(wrong, expected) > 0.01
    step = AdaptiveStep(page.model, ours, micro_batch_size=num_rows, **arguments)
    step(batch)
    assert relative_error(taken_gradients(page.model), expected) <= EXACT

    def formula(part: Part) -> None:
        num_parts = 1 if part.num_rows == len(batch["tokens"]) else len(parts)
        theirs(page, part.batch, num_parts).backward()

    if shows_in_few_rows:
        refused = AdaptiveStep(page.model, formula, micro_batch_size=num_rows)
        with pytest.raises(SettingError, match="so a split would train something else"):
            refused(batch)
    return expected, wrong


def scaled(gradients: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    return {name: factor * gradient for name, gradient in gradients.items()}


def test_verl_7200_distillation_is_not_a_sum_of_means_of_parts(page):
    batch = page.batch(LENGTHS)
    _, wrong = check_thread(
        page,
        batch,
        theirs=lambda page, part, num_parts: kl_mean(page, part),
        whole=forward_kl,
        ours=distil_by_share(page),
        num_labels=page.completion_tokens,
    )

    def sum_of_sequence_means(page: Page, batch: Batch) -> torch.Tensor:
        return torch.stack([kl_mean(page, row) for row in rows_of(batch)]).sum()

    of_sequences, _ = whole_gradients_of(page, sum_of_sequence_means, batch)
    assert relative_error(wrong, of_sequences) <= EXACT


def test_verl_7321_tokens_are_those_of_the_batch_and_not_of_the_part(page):
    def agg_loss(page: Page, part: Batch, num_parts: int) -> torch.Tensor:
        losses = torch.cat(token_losses_of(page, part))
        return losses.sum() / len(losses)

    check_thread(
        page,
        page.batch(LENGTHS),
        theirs=agg_loss,
        whole=token_mean,
        ours=page.token_mean,
        num_rows=2,
        num_labels=page.completion_tokens,
    )


def divided_again(num_tokens: int) -> Callable[[Page, Batch, int], torch.Tensor]:
    """The sum over tokens, divided by those of the batch and by the number of parts."""

    def loss(page: Page, part: Batch, num_parts: int) -> torch.Tensor:
        return torch.cat(token_losses_of(page, part)).sum() / num_tokens / num_parts

    return loss


def test_ms_swift_10117_dapo_is_not_divided_by_accumulation_once_more(page):
    batch = page.batch(LENGTHS)
    expected, wrong = check_thread(
        page,
        batch,
        theirs=divided_again(int(page.completion_tokens(batch))),
        shows_in_few_rows=False,
        whole=token_mean,
        ours=page.token_mean,
        num_rows=2,
        num_labels=page.completion_tokens,
    )
    assert relative_error(wrong, scaled(expected, 1 / 4)) <= EXACT


def test_trl_5619_dapo_needs_no_number_of_parts(page):
    """The thread asks for the division that the loss of TRL's GRPO has."""
    batch = page.batch([9] * 6)
    expected, wrong = check_thread(
        page,
        batch,
        theirs=divided_again(int(page.completion_tokens(batch))),
        shows_in_few_rows=False,
        whole=token_mean,
        ours=page.token_mean,
        num_labels=page.completion_tokens,
    )
    assert relative_error(wrong, scaled(expected, 1 / 6)) <= EXACT


class BinaryPolicy(nn.Module):
    """A policy of one parameter that chooses an action with probability 1/2."""

    def __init__(self) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def token_losses(self, batch: Batch) -> torch.Tensor:
        log_prob = logsigmoid(self.logit)
        ratio = (log_prob - log_prob.detach()).exp()
        return -ratio * batch["advantages"][:, None] * batch["completion_mask"]


def test_twinkle_292_means_over_tokens_are_not_weighted_by_rows():
    """Responses of 1 and 3 tokens, with advantages 1 and -1: loss 0.5, gradient 0.25."""
    lengths = torch.tensor([1, 3])
    batch = {
        "completion_mask": torch.arange(3) < lengths[:, None],
        "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64),
    }
    policy = BinaryPolicy()

    def mean_loss(part: Part) -> float:
        mean = policy.token_losses(part.batch).sum() / part.batch["completion_mask"].sum()
        loss = mean * part.share
        loss.backward()
        return loss.item()

    def taken() -> float:
        gradient = float(policy.logit.grad)
        policy.zero_grad()
        return gradient

    by_rows = [
        mean_loss(Part({key: tensor[row : row + 1] for key, tensor in batch.items()}, 1, share=0.5))
        for row in range(2)
    ]
    assert (sum(by_rows), taken()) == (0.0, 0.0)
    step = AdaptiveStep(
        policy,
        mean_loss,
        micro_batch_size=1,
        num_labels=lambda batch: batch["completion_mask"].sum(),
    )
    assert (sum(step(batch)), taken()) == (0.5, 0.25)
    refused = AdaptiveStep(policy, mean_loss, micro_batch_size=1)
    with pytest.raises(SettingError, match="so a split would train something else"):
        refused(batch)


def test_trl_4719_gkd_is_no_mean_of_means(page):
    def jensen_shannon(page: Page, batch: Batch) -> torch.Tensor:
        """The divergence of each token of the completions, half-way between the two models."""
        of_tokens = []
        for row in rows_of(batch):
            inputs = row["tokens"][:, :-1]
            student = page.model(inputs).log_softmax(-1)
            teacher = page.reference(inputs).log_softmax(-1)
            middle = torch.logaddexp(student, teacher) - math.log(2)
            divergence = kl_div(middle, student, reduction="none", log_target=True)
            divergence = divergence + kl_div(middle, teacher, reduction="none", log_target=True)
            of_tokens.append(divergence.sum(-1)[row["completion_mask"][:, 1:]] / 2)
        return torch.cat(of_tokens)

    def ours(part: Part) -> None:
        (jensen_shannon(page, part.batch).mean() * part.share).backward()

    check_thread(
        page,
        page.batch(LENGTHS),
        theirs=lambda page, part, num_parts: jensen_shannon(page, part).mean() / num_parts,
        whole=lambda page, batch: jensen_shannon(page, batch).mean(),
        ours=ours,
        num_labels=page.completion_tokens,
    )


def test_soup_932_parts_of_distillation_are_not_weighted_alike(page):
    expected, wrong = check_thread(
        page,
        page.batch([4, 14, 5, 12]),
        theirs=lambda page, part, num_parts: kl_mean(page, part) / num_parts,
        whole=forward_kl,
        ours=distil_by_share(page),
        num_rows=2,
        num_labels=page.completion_tokens,
    )
    differs = torch.cat(
        [
            ~torch.isclose(wrong[name], gradient, rtol=1e-4, atol=0.0).flatten()
            for name, gradient in expected.items()
        ]
    )
    assert differs.double().mean() > 0.94


def test_nemo_rl_4172_a_ratio_is_that_of_the_batch_and_not_of_the_part(page):
    batch = page.batch(LENGTHS)
    num_tokens = int(page.completion_tokens(batch))

    def ratio_of_part(page: Page, part: Batch, num_parts: int) -> torch.Tensor:
        share = int(page.completion_tokens(part)) / num_tokens
        return ratio_over_batch(page, part) * share

    check_thread(
        page,
        batch,
        theirs=ratio_of_part,
        whole=ratio_over_batch,
        ours=page.distill,
        num_rows=2,
        num_labels=page.completion_tokens,
        statistics=page.sums,
    )


def test_a_ratio_of_a_part_that_changes_the_loss_is_refused(page):
    def ratio_of_part(part: Part) -> None:
        cross_entropy, divergence = page.distillation_losses(part.batch)
        ratio = (divergence / cross_entropy).detach()
        mean = (cross_entropy + ratio * divergence) / page.completion_tokens(part.batch)
        (mean * part.share).backward()

    step = AdaptiveStep(
        page.model, ratio_of_part, micro_batch_size=2, num_labels=page.completion_tokens
    )
    with pytest.raises(SettingError, match="so a split would train something else"):
        step(page.batch(LENGTHS))


@pytest.mark.parametrize("times", ["n", "1/n"])
def test_unsloth_zoo_1023_a_loss_is_divided_once(page, times):
    """By the labels of the step and by accumulation too, or by neither: parts of equal means."""
    batch = page.batch([9] * 6)
    num_tokens = int(page.completion_tokens(batch))
    theirs = divided_again(num_tokens)
    if times == "n":

        def theirs(page: Page, part: Batch, num_parts: int) -> torch.Tensor:
            return token_mean(page, part)

    expected, wrong = check_thread(
        page,
        batch,
        theirs=theirs,
        shows_in_few_rows=times == "n",
        whole=token_mean,
        ours=page.token_mean,
        num_rows=2,
        num_labels=page.completion_tokens,
    )
    factor = {"n": 3.0, "1/n": 1 / 3}[times]
    assert relative_error(wrong, scaled(expected, factor)) <= EXACT
