"""Training's first steps of rows of real lengths are replayed as they are trained, and said beside
the estimate.
"""

from __future__ import annotations

import math
import random
from array import array
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.fake_steps import Decoder, fake_step, run
from torch.nn import functional as F

from adaptive_batch import AdaptiveLoop, AdaptiveStep, SettingError, SplitBatch, StepOptions
from adaptive_batch.data import MicroBatchLayout, MicroBatchLimit, micro_batches
from adaptive_batch.estimate import (
    REPLAYED_STEPS,
    AllocatorSettings,
    CachingAllocator,
    CudaKernels,
    FakeDevice,
    Fit,
    PlannedSteps,
    StepLog,
    StepReplay,
    TracedShapes,
    batches_in_order,
    checked_lengths,
    length_replay,
    lengths_of_quantiles,
    packed_row_lengths,
    read_estimate,
    step_logs,
)
from adaptive_batch.estimate.length_replay import Shape, num_replayed
from adaptive_batch.estimate.step_log import Phase
from adaptive_batch.estimate.trial_replay import (
    TrialLog,
    TrialPiece,
    TrialReplay,
    TrialStepLog,
)
from adaptive_batch.training import rows_apart
from adaptive_batch.training.sampled_step import SampledStep

MIB = 2**20
LONGEST = 200


def drawn_lengths(num_rows=120):
    draw = random.Random(0)
    return [draw.randint(8, LONGEST - 1) for _ in range(num_rows - 1)] + [LONGEST]


def few_lengths():
    """Rows whose micro-batches have few shapes to be traced."""
    return [60 * math.ceil(length / 60) for length in drawn_lengths()]


def batch_of(lengths, *, token=0):
    tokens = torch.full((len(lengths), max(lengths)), token)
    labels = torch.full_like(tokens, -100)
    for row, length in enumerate(lengths):
        labels[row, :length] = 1
    return {"tokens": tokens, "labels": labels}


def sample(rows):
    return batch_of([LONGEST] * rows)


def adaptive_step(calls=None, **arguments):
    model = Decoder()

    def forward_backward(part):
        if calls is not None:
            calls.append(part)
        logits = model(part.batch["tokens"].to("cuda"))
        labels = part.batch["labels"].cuda()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * part.share
        loss.backward()
        return loss.detach()

    return AdaptiveStep(model, forward_backward, **arguments), torch.optim.AdamW(model.parameters())


# --- lengths that are given


@pytest.mark.parametrize(
    "lengths",
    [[3, 0, 200], (3, 0, 200), torch.tensor([3, 0, 200]), torch.tensor([3, 0, 200]).numpy()],
)
def test_lengths_are_whole_numbers_of_any_sequence(lengths):
    assert checked_lengths(lengths, longest=200, owner="a row") == [3, 0, 200]


def test_lengths_of_quantiles_have_these_quantiles():
    quantiles = {0: 10, 0.5: 20, 0.9: 100, 1: 200}
    lengths = lengths_of_quantiles(quantiles, 1001)
    assert lengths == lengths_of_quantiles(dict(reversed(quantiles.items())), 1001)
    assert lengths != sorted(lengths)
    drawn = sorted(lengths)
    assert [drawn[round(1000 * share)] for share in quantiles] == [10, 20, 100, 200]
    assert drawn[250] == 15
    assert lengths_of_quantiles({0: 7, 1: 7}, 3) == [7, 7, 7]
    shares = np.array([0.0, 0.5, 1.0])
    tokens = np.array([1, 5, 9])
    assert sorted(lengths_of_quantiles(dict(zip(shares, tokens, strict=True)), 3)) == [1, 5, 9]


QUANTILES = (
    "give tokens by the share of rows that have no more, from 0 (the shortest) to 1 (the longest),"
    " such as {0: 12, 0.5: 180, 0.9: 700, 1: 2048}"
)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({}, QUANTILES),
        ({0.5: 10, 1: 20}, QUANTILES),
        ({0: 10, 0.9: 20}, QUANTILES),
        ({0: 10, 100: 20}, f"100 is no share; {QUANTILES}"),
        ({0: 10, float("nan"): 15, 1: 20}, f"nan is no share; {QUANTILES}"),
        ({0: 30, 1: 20}, QUANTILES),
        ({"50%": 20, 1: 30}, f"'50%' is no share; {QUANTILES}"),
        ({0: 1.5, 1: 3}, f"1.5 is no count of tokens; {QUANTILES}"),
        ({0: -1, 1: 3}, f"-1 is no count of tokens; {QUANTILES}"),
    ],
)
def test_quantiles_that_are_none_are_refused_before_anything_runs(lengths, message):
    calls = []
    step, optimizer = adaptive_step(calls)
    with pytest.raises(SettingError) as raised:
        step.estimate(optimizer, sample, "H100", lengths=lengths, batch_size=4)
    assert str(raised.value) == f"lengths={lengths!r}: {message}"
    assert not calls


def test_a_step_of_quantiles_is_replayed_as_one_of_rows_that_have_them():
    # Between which few lengths lie, as each shape is traced.
    quantiles = {0: 20, 0.8: 22, 1: 25}
    replays = []
    for lengths in (quantiles, lengths_of_quantiles(quantiles, 4 * REPLAYED_STEPS)):
        step, optimizer = adaptive_step([])
        estimate = step.estimate(optimizer, sample, "1GiB", lengths=lengths, batch_size=4)
        (device,) = estimate.devices
        replays.append(device.replay)
    assert replays[0] == replays[1]
    assert replays[0].num_steps == REPLAYED_STEPS


GIVE = "give the tokens of each row of the dataset, whole numbers from 0 on"


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], f"lengths=[]: {GIVE}"),
        (torch.zeros(0), f"lengths=[]: {GIVE}"),
        (7, f"lengths=7: {GIVE}"),
        (torch.tensor(7), f"lengths=7: {GIVE}"),
        ("12", f"lengths='12': {GIVE}"),
        ([5, -3], f"lengths=-3: that is row 1; {GIVE}"),
        ([5.0], f"lengths=5.0: that is row 0; {GIVE}"),
        (torch.tensor([1.5]), f"lengths=1.5: that is row 0; {GIVE}"),
        ([True], f"lengths=True: that is row 0; {GIVE}"),
        (torch.ones(1, 2, dtype=torch.long), f"lengths=[1, 1]: that is row 0; {GIVE}"),
        (
            [LONGEST, LONGEST + 1],
            "lengths=201: that is row 1, and the longest row of sample(1) has 200 tokens; cut the"
            " lengths to it, or give longer rows",
        ),
    ],
)
def test_lengths_that_cannot_be_used_are_refused_before_anything_runs(lengths, message):
    calls = []
    step, optimizer = adaptive_step(calls)
    with pytest.raises(SettingError) as raised:
        step.estimate(optimizer, sample, "H100", lengths=lengths, batch_size=4)
    assert str(raised.value) == message
    assert not calls


@pytest.mark.parametrize("batch_size", [None, 0, 2.5, True])
def test_lengths_need_the_rows_of_a_batch(batch_size):
    step, optimizer = adaptive_step()
    with pytest.raises(SettingError, match="give the rows of the script's batches"):
        step.estimate(optimizer, sample, "H100", lengths=[8], batch_size=batch_size)


# --- a split of its own


def split_batch(batch, *, cuts=False, lengths=None):
    if lengths is None:
        lengths = (batch["labels"] != -100).sum(dim=1).tolist()

    def part(rows):
        width = batch["tokens"].shape[1]
        if cuts:
            width = max(lengths[row] for row in rows)
        return {name: tensor[rows][:, :width] for name, tensor in batch.items()}

    return SplitBatch(len(batch["tokens"]), part, lengths)


def mixed_sample(rows):
    """The longest row, and the others shorter."""
    return batch_of([LONGEST, *[LONGEST // 2] * (rows - 1)])


def replay_of_split(sample, **arguments):
    lengths = [min(length, LONGEST) for length in few_lengths()]
    step, optimizer = adaptive_step(micro_batch_tokens=600, **arguments)
    estimate = step.estimate(optimizer, sample, "2GiB", lengths=lengths, batch_size=8, maximum=16)
    return estimate.devices[0].replay


def test_a_split_whose_parts_are_cut_is_replayed_as_rows_that_are_split_by_themselves():
    own = replay_of_split(sample)
    # That parts are cut shows where rows of a sample have several lengths.
    assert replay_of_split(mixed_sample, split=partial(split_batch, cuts=True)) == own
    uncut = replay_of_split(mixed_sample, split=split_batch)
    assert uncut.num_steps == own.num_steps
    assert uncut.memory.allocated_bytes >= own.memory.allocated_bytes
    assert uncut.num_shapes != own.num_shapes
    assert replay_of_split(sample, split=partial(split_batch, cuts=True)) == uncut


def test_a_sample_of_a_split_is_cut_where_one_row_has_so_many_tokens():
    columns = 5
    seen = []
    model = Decoder()

    def by_columns(rows):
        return {"x": torch.zeros(columns, rows, dtype=torch.long), "kinds": torch.zeros(rows, 7)}

    def split(batch):
        length, rows = batch["x"].shape
        return SplitBatch(rows, lambda some: {"x": batch["x"][:, some]}, [length] * rows)

    def forward_backward(part):
        seen.append((tuple(part.batch["x"].shape), tuple(part.batch["kinds"].shape)))
        model(part.batch["x"].to("cuda").T).sum().backward()

    step = AdaptiveStep(model, forward_backward, split=split, num_labels=lambda batch: 1)
    optimizer = torch.optim.AdamW(model.parameters())
    step.estimate(optimizer, by_columns, "2GiB", lengths=[3, 4], batch_size=columns, maximum=8)
    # As many rows as a row has tokens.
    assert ((4, columns), (columns, 7)) in seen


def end_to_end(rows):
    return {"x": torch.zeros(rows * LONGEST, 4), "row": torch.arange(rows * LONGEST) // LONGEST}


def test_a_split_of_rows_that_lie_end_to_end_is_refused_as_it_would_be_cut_to_one_row():
    calls = []

    def split(batch):
        lengths = torch.bincount(batch["row"]).tolist()
        return SplitBatch(len(lengths), lambda rows: batch, lengths)

    step, optimizer = adaptive_step(calls, split=split)
    with pytest.raises(SettingError) as raised:
        step.estimate(optimizer, end_to_end, "H100", lengths=[8], batch_size=4)
    assert str(raised.value) == (
        "lengths='together with split': the rows of sample(2) have [200, 200] tokens; with every"
        " dimension cut to 100 that is the row's in sample(1), SplitBatch gives them [100]; give"
        " batches in which no rows lie end to end in one dimension, or leave lengths out here"
    )
    assert not calls


def test_what_is_looked_at_of_a_sample_is_no_more_than_the_maximum_and_draws_nothing():
    numbers = []

    def drawing_sample(rows):
        numbers.append(rows)
        batch = mixed_sample(rows)
        batch["tokens"].random_(2)
        return batch

    step, optimizer = adaptive_step([], split=split_batch)
    state = torch.get_rng_state()
    with pytest.raises(SettingError, match="H10"):
        # Refused after the lengths, and before a step is run.
        step.estimate(optimizer, drawing_sample, "H10", lengths=[8], batch_size=4, maximum=3)
    assert max(numbers) == 3
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("split", "value", "message"),
    [
        (
            lambda batch: SplitBatch(len(batch["tokens"]), lambda rows: batch),
            "of a sample",
            "SplitBatch has none of sample(1); give them there, or leave them out here",
        ),
        (
            partial(split_batch, lengths=[LONGEST]),
            "together with split",
            "the row of sample(1) has 200 tokens; with every dimension of that size cut to 100,"
            " SplitBatch gives it [200]; give lengths in SplitBatch that follow from the shapes,"
            " or leave them out here",
        ),
    ],
)
def test_a_split_that_does_not_show_how_shorter_rows_look_is_refused(split, value, message):
    calls = []
    step, optimizer = adaptive_step(calls, split=split)
    with pytest.raises(SettingError) as raised:
        step.estimate(optimizer, sample, "H100", lengths=[8], batch_size=4)
    assert str(raised.value) == f"lengths={value!r}: {message}"
    assert not calls


# --- steps that are planned


def test_batches_are_rows_in_their_order_and_from_the_start_again():
    assert [*batches_in_order([1, 2, 3], 2, num_steps=3)] == [[1, 2], [3, 1], [2, 3]]


@pytest.mark.parametrize(
    "arguments", [{"micro_batch_tokens": 300}, {"micro_batch_size": 3}, {}], ids=str
)
def test_steps_are_planned_as_the_step_runs_them(arguments):
    model = torch.nn.Linear(1, 1)
    widths = []

    def forward_backward(part):
        widths.append(tuple(part.batch["tokens"].shape))
        (model(torch.ones(1, 1)).sum() * part.share).backward()

    step = AdaptiveStep(model, forward_backward, num_labels=lambda batch: 1, **arguments)
    lengths = drawn_lengths(24)
    batches = [*batches_in_order(lengths, 8, num_steps=3)]
    limit = step.sizer.limit_where_fits(16, length=LONGEST, batch_size=8)
    planned = PlannedSteps.of(batches, limit, partial(step.parts.plan, limit=limit))
    for batch, shapes in zip(batches, planned.steps, strict=True):
        step(batch_of(batch))
        assert [*shapes] == [
            (len(piece.rows), max(batch[row] for row in piece.rows)) for piece in step.pieces
        ]
        assert widths[-len(shapes) :] == [*shapes]


def planned_steps(step, lengths, *, max_batch_size):
    sampled = SampledStep(
        sample,
        step.parts,
        step._split_batch,
        device=torch.device("cpu"),
        keeps_columns=False,
    )
    plan = sampled.length_plan(lengths, 8, maximum=16)
    return plan.steps(Fit(LONGEST, max_batch_size, max_batch_size, 0, 0))


@pytest.mark.parametrize("arguments", [{"micro_batch_tokens": 300}, {"micro_batch_size": 3}])
def test_checks_of_splits_are_planned_as_the_step_runs_them(arguments):
    model = torch.nn.Linear(1, 1)
    evaluated = []

    def forward_backward(part):
        if part.is_trial:
            evaluated.append(tuple(part.batch["tokens"].shape))
        (model(torch.ones(1, 1)).sum() * part.share).backward()

    step = AdaptiveStep(model, forward_backward, num_labels=lambda batch: 1, **arguments)
    lengths = drawn_lengths(24)
    planned = planned_steps(step, [*lengths, LONGEST], max_batch_size=16)
    assert sum(map(bool, planned.checks)) == 6
    for batch, checked in zip(
        batches_in_order([*lengths, LONGEST], 8), planned.checks, strict=True
    ):
        evaluated.clear()
        step(batch_of(batch))
        assert evaluated == [*checked]


@pytest.mark.parametrize(("fitting_rows", "checked_rows"), [(4, [4, 2, 2]), (1, [8, *[1] * 8])])
def test_where_a_search_tells_what_fits_the_largest_part_is_checked_unless_it_is_one_row(
    fitting_rows, checked_rows
):
    step = AdaptiveStep(torch.nn.Linear(1, 1), print, micro_batch_size="auto")
    planned = planned_steps(step, [LONGEST] * 8, max_batch_size=fitting_rows)
    assert [shape.rows for shape in planned.checks[0]] == checked_rows


class ReadsInEvaluation(Decoder):
    """Reads values of its tokens, in evaluation mode alone."""

    def forward(self, tokens):
        if not self.training and (tokens > 0).all():
            tokens = tokens.clone()
        return super().forward(tokens)


def by_its_method(loss):
    loss.backward()


def eight_rows_at_most(rows):
    if rows > 8:
        raise ValueError(f"there are 8 rows\nand not {rows}")
    return sample(rows)


@pytest.mark.parametrize(
    ("model", "backward", "own_sample", "error"),
    [
        (Decoder, torch.autograd.backward, sample, "RuntimeError: element 0 of tensors does not"),
        (ReadsInEvaluation, by_its_method, sample, "DataDependentOutputException: aten._local_sc"),
        (Decoder, by_its_method, eight_rows_at_most, "ValueError: there are 8 rows"),
        (
            Decoder,
            by_its_method,
            lambda rows: sample(min(rows, 8)),
            "SettingError: sample='8 rows': a check of a split has 32; return as many of"
            " sample(32)",
        ),
    ],
)
def test_checks_that_cannot_be_traced_are_left_out_and_said_so(model, backward, own_sample, error):
    net = model()

    def forward_backward(part):
        logits = net(part.batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), part.batch["labels"].flatten())
        backward(loss * part.share)

    step = AdaptiveStep(net, forward_backward, micro_batch_size=4)
    optimizer = torch.optim.AdamW(net.parameters())
    arguments = {"lengths": [50, 60], "batch_size": 32, "maximum": 8}
    estimate = step.estimate(optimizer, own_sample, ["H100", "4GiB"], **arguments)
    replays = [device.replay for device in estimate.devices]
    assert [replay.failed_step for replay in (replays[0].memory, replays[1].memory)] == [None] * 2
    assert all(replay.check_error.startswith(error) for replay in replays)
    said = "checks of splits are not replayed, as one cannot be traced: "
    lines = [line for line in estimate.table().splitlines() if line.startswith(said)]
    assert lines == [f"{said}{replays[0].check_error}"]


# --- logs of shapes


def shapes_on(step, device, shapes, **options):
    def run_shape(rows, length):
        run(step.model, device.batch, rows, length=length)

    return TracedShapes(step, run_shape, shapes, **options)


def test_sizes_between_traced_shapes_are_those_of_a_trace():
    device = FakeDevice()
    step = fake_step("AdamW foreach", accumulates=True, device=device)
    limit = MicroBatchLimit(600, "tokens")
    batches = batches_in_order(drawn_lengths(), 8, num_steps=8)
    steps = PlannedSteps.of(batches, limit, lambda batch: micro_batches(batch, limit)).steps
    all_shapes = [shape for shapes in steps for shape in shapes]
    between = shapes_on(step, device, all_shapes, most_traced=6)
    traced = shapes_on(step, device, all_shapes)
    assert traced.is_exact
    assert not between.is_exact
    for interpolated, exact in zip(
        step_logs(step, between, steps), step_logs(step, traced, steps), strict=True
    ):
        assert interpolated == exact


class CountedSteps:
    """Steps of which a micro-batch allocates one block, of a size that is a function of its shape;
    the first of a step another one more.
    """

    model = None
    runs_few_layers = False
    accumulates = True

    def __init__(self, size):
        self.size = size
        self.num_traces = 0

    def phase(self, run_shape, *, is_first):
        self.num_traces += 1
        sizes = [self.size(*run_shape.args)]
        if is_first:
            sizes.append(sizes[0] + 1)
        return Phase(array("q", sizes), (), {})


def test_first_micro_batches_that_allocate_otherwise_lie_on_a_line_of_their_own():
    step = CountedSteps(lambda rows, length: 8 * rows * length)
    shapes = [Shape(2 + number % 5, 64 + number) for number in range(60)]
    lines = TracedShapes(step, lambda rows, length: None, shapes)
    for shape in shapes:
        size = step.size(*shape)
        assert [*lines.phase(shape, is_first=True).log] == [size, size + 1]
    assert step.num_traces < 40


def test_sizes_of_packed_rows_between_traced_ones_are_those_of_a_trace():
    device = FakeDevice(CudaKernels((9, 0), 132))
    with torch.device("meta"):
        model = Decoder().to(torch.bfloat16)
    step = fake_step("AdamW foreach", accumulates=True, device=device, model=model)
    limit = MicroBatchLimit(600, "tokens")
    layout = MicroBatchLayout(kind="packed")
    batches = batches_in_order(drawn_lengths(), 8, num_steps=8)
    planned = PlannedSteps.of(batches, limit, lambda batch: micro_batches(batch, limit, layout))
    assert planned.is_packed
    for shapes, size in zip(planned.steps, planned.largest, strict=True):
        assert size == max(tokens for _, tokens in shapes) <= 600

    def run_shape(rows, tokens):
        with rows_apart(packed_row_lengths(rows, tokens)):
            run(step.model, device.batch, 1, length=tokens)

    all_shapes = [shape for shapes in planned.steps for shape in shapes]
    between = TracedShapes(step, run_shape, all_shapes, is_packed=True, most_traced=6)
    traced = TracedShapes(step, run_shape, all_shapes, is_packed=True)
    assert not between.is_exact
    for interpolated, exact in zip(
        step_logs(step, between, planned.steps), step_logs(step, traced, planned.steps), strict=True
    ):
        assert interpolated == exact


def test_no_more_packed_rows_are_traced_than_there_are_tokens():
    asked = []
    step = SimpleNamespace(
        model=None,
        accumulates=True,
        phase=lambda run, *, is_first: asked.append(run.args) or Phase(array("q"), (), {}),
    )
    shapes = [Shape(rows, rows) for rows in range(2, 9)]
    traced = TracedShapes(step, lambda rows, tokens: None, shapes, is_packed=True, most_traced=1)
    for shape in shapes:
        traced.phase(shape, is_first=True)
    assert asked
    assert all(rows <= tokens for rows, tokens in asked)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 7), (3, 7), (7, 7), (4, 4096)])
def test_packed_rows_have_their_tokens_in_all(rows, tokens):
    lengths = packed_row_lengths(rows, tokens)
    assert (len(lengths), sum(lengths)) == (rows, tokens)
    assert max(lengths) - min(lengths) <= 1


def test_one_shape_is_traced_as_the_first_of_a_step_for_all():
    traced_first = []
    device = FakeDevice()
    step = fake_step("AdamW foreach", accumulates=True, device=device)
    shapes = [Shape(rows, 10 * rows) for rows in range(1, 20)]
    for most_traced in (1, 100):
        logs = shapes_on(step, device, shapes, most_traced=most_traced)
        trace = step.phase

        def phase(run_shape, *, is_first, trace=trace):
            traced_first.append(is_first)
            return trace(run_shape, is_first=is_first)

        step.phase = phase
        firsts = [logs.phase(shape, is_first=True) for shape in shapes[1:]]
        step.phase = trace
        assert sum(traced_first) == 1
        traced_first.clear()
        for shape, first in zip(shapes[1:], firsts, strict=True):
            run_shape = partial(run, step.model, device.batch, shape.rows, length=shape.length)
            assert first == step.phase(run_shape, is_first=True)


def test_steps_of_one_micro_batch_each_have_the_log_of_one_that_could_have_several():
    logs = {}
    steps = [(Shape(rows, length),) for rows, length in ((2, 24), (3, 8), (1, 40), (2, 24))]
    for accumulates in (False, True):
        device = FakeDevice()
        step = fake_step("AdamW foreach", accumulates=accumulates, device=device)
        shapes = shapes_on(step, device, [shape for shapes in steps for shape in shapes])
        logs[accumulates] = list(step_logs(step, shapes, steps))
    assert logs[False] == logs[True]


class _Workspaces:
    """A step whose forward and backward allocate a workspace each, and its shapes."""

    loading = Phase(array("q", [8]), (), {})

    def optimizer_step(self, number):
        return Phase(array("q"), (), {})

    def evaluated(self, shapes):
        return [Phase(array("q", [5, ~0]), (), {}, ((1, 100),)) for _ in shapes]

    def phase(self, shape, *, is_first):
        return Phase(array("q", [7, ~0]), (), {}, ((0, 100), (1, 200)))


@pytest.mark.parametrize("checked_step", [0, 1])
def test_what_a_check_allocates_once_training_does_not_allocate_again(checked_step):
    once = _Workspaces()
    steps = [(Shape(1, 1), Shape(1, 1))] * 2
    checks = [steps[0] if number == checked_step else () for number in range(2)]
    sizes = [
        [[entry for entry in part if entry > 0] for part in (log.check, log.micro_batches)]
        for log in step_logs(once, once, steps, checks)
    ]
    if checked_step == 0:
        assert sizes == [[[5, 100, 5], [7, 200, 7]], [[], [7, 7]]]
    else:
        assert sizes == [[[], [100, 7, 200, 7]], [[5, 5], [7, 7]]]


def one_row_each(lengths):
    limit = MicroBatchLimit(1)
    batches = [[length] for length in lengths]
    return PlannedSteps.of(batches, limit, lambda batch: micro_batches(batch, limit))


def test_of_more_shapes_than_are_traced_the_steps_before_are_replayed_if_they_are_ten():
    planned = one_row_each(range(30, 0, -1))
    assert [num_replayed([planned], most) for most in (30, 29, 10, 9)] == [30, 29, 10, 30]
    assert planned.first(2).steps == ((Shape(1, 30),), (Shape(1, 29),))


def test_no_step_is_left_out_whose_micro_batch_is_the_largest():
    falling = one_row_each(range(30, 0, -1))
    peaking = one_row_each([*range(20), 99, *range(9)])
    assert num_replayed([peaking], 21) == 30
    assert num_replayed([peaking], 20) == 30
    assert num_replayed([falling, peaking], 20) == 30
    assert num_replayed([falling], 20) == 20


def test_few_shapes_are_traced_each():
    device = FakeDevice()
    step = fake_step(accumulates=True, device=device)
    shapes = shapes_on(step, device, [Shape(2, 8), Shape(3, 8)] * 10)
    assert shapes.is_exact
    assert shapes.num_shapes == 2


# --- the allocator


def step_log(number, *sizes):
    """A step that allocates sizes one beside the other and frees them; allocations are numbered
    from `number` on.
    """
    frees = [~(number + place) for place in range(len(sizes))]
    return array("q", [*sizes, *frees])


def replay_of(*steps, largest, checks=None, budget=1000 * MIB, expandable=False, of_optimizer=()):
    logs = []
    number = 1
    loading = array("q", [64 * MIB])
    for place, sizes in enumerate(steps):
        parts = []
        for own_sizes in ((checks or {}).get(place, ()), sizes, of_optimizer):
            parts.append(step_log(number, *own_sizes))
            number += len(own_sizes)
        logs.append(StepLog(loading, *parts))
        loading = array("q")
    settings = AllocatorSettings(expandable_segments=expandable)
    return StepReplay(logs, budget_bytes=budget, settings=settings, largest=largest)


GROWING = [[size * MIB] for size in (100, 120, 140, 160)]


def test_steps_that_grow_reserve_all_that_came_before_unless_the_cache_is_given_back():
    kept = replay_of(*GROWING, largest=None)
    assert [step.reserved_bytes // MIB for step in kept.steps] == [164, 284, 424, 584]
    # There is a block before each that is larger, with something to spare.
    in_blocks = replay_of(*GROWING, largest=[100, 120, 140, 160])
    assert [step.reserved_bytes // MIB for step in in_blocks.steps] == [164, 194, 214, 236]
    assert in_blocks.memory.allocated_bytes == 224 * MIB
    assert in_blocks.memory.fragmentation == pytest.approx(1.05, abs=0.01)


def one_by_one(number):
    """Buffers of which each is too large for what is free of the one before."""
    log = []
    for place, size in enumerate((80, 100, 120), start=number):
        log += [size * MIB, ~place]
    return log


def test_steps_after_a_search_begin_with_the_block_of_its_last_trial():
    trial = TrialLog((), [TrialStepLog(1, one_by_one(3 * step), ()) for step in range(3)])
    after = TrialReplay(trial, budget_bytes=250 * MIB)
    assert after.fits
    replays = [
        StepReplay(
            [StepLog((), (), one_by_one(number), ())],
            budget_bytes=250 * MIB,
            settings=AllocatorSettings(),
            largest=[1],
            after=last_trial,
        )
        for number, last_trial in ((0, None), (9, after))
    ]
    assert [replay.memory.num_retries for replay in replays] == [1, 0]


@pytest.mark.parametrize("accumulates", [False, True])
def test_after_a_search_a_step_holds_what_it_holds_without_one(accumulates):
    device = FakeDevice()
    step = fake_step("AdamW foreach", accumulates=accumulates, device=device)
    pieces = [TrialPiece(2, step.forward_backward, 24)] * (1 + accumulates)
    trial = TrialLog.of(step, [pieces] * 3)
    after = TrialReplay(trial, budget_bytes=2**40)
    assert after.fits
    steps = [(Shape(2, 24),) * (1 + accumulates)] * 2
    shapes = shapes_on(step, device, [Shape(2, 24)])
    kept, new = (
        StepReplay(
            list(step_logs(step, shapes, steps, after=of_search and trial)),
            budget_bytes=2**40,
            settings=AllocatorSettings(),
            largest=[48] * 2,
            after=of_search,
        )
        for of_search in (after, None)
    )
    # The states of the trial give way to those of the first step.
    assert kept.steps[1].allocated_bytes == new.steps[1].allocated_bytes
    assert after.peaks[0] == new.steps[1].allocated_bytes


def test_what_the_trial_of_a_search_has_given_back_is_no_peak_of_training():
    # The second is larger than its block, of which a third has one that is large enough.
    sizes = [100 * MIB, 120 * MIB, 100 * MIB]
    steps = [TrialStepLog(1, [size, ~number], ()) for number, size in enumerate(sizes)]
    after = TrialReplay(TrialLog((), steps), budget_bytes=250 * MIB)
    assert after.fits
    log = StepLog((), (), [100 * MIB, ~3], ())
    replay = StepReplay(
        [log], budget_bytes=250 * MIB, settings=AllocatorSettings(), largest=[1], after=after
    )
    assert replay.memory.reserved_bytes < 130 * MIB < 200 * MIB < after.peaks[1]


def test_a_cache_that_is_given_back_is_one_block_of_what_a_step_needs():
    fragmented = [[10 * MIB] * 10, [100 * MIB], [10 * MIB] * 10, [100 * MIB]]
    # Micro-batches of as many tokens, in other shapes.
    replay = replay_of(*fragmented, largest=[1] * 4)
    assert [step.reserved_bytes // MIB for step in replay.steps] == [164, 264, 172, 172]
    assert (
        replay_of(*fragmented, largest=[1] * 4, expandable=True).steps[-1].reserved_bytes
        <= 180 * MIB
    )


def test_the_cache_is_made_for_the_peaks_until_an_optimizers_step():
    steps = [[30 * MIB], [30 * MIB], [30 * MIB]]
    replay = replay_of(*steps, largest=[1] * 3, of_optimizer=[100 * MIB])
    assert [step.allocated_bytes // MIB for step in replay.steps] == [164] * 3
    # 194 are held after the first step, 94 of which its micro-batch was seen to need.
    assert [step.reserved_bytes // MIB for step in replay.steps] == [194, 200, 172]


def test_what_runs_out_of_memory_is_named_and_what_is_tried_again_is_counted():
    replay = replay_of(*GROWING, largest=[100, 120, 140, 160], budget=210 * MIB)
    assert replay.failed_step == 4
    assert len(replay.steps) == 3
    assert replay.memory.describe() == "out of memory in step 4"
    retried = replay_of(*GROWING[:3], budget=210 * MIB, largest=None)
    assert retried.failed_step is None
    assert retried.memory.num_retries == 2


def test_the_check_of_a_split_leaves_its_cache_and_no_peak():
    steps = [[50 * MIB] * 2, [50 * MIB] * 2]
    replay = replay_of(*steps, largest=None, checks={1: [100 * MIB]})
    assert [step.reserved_bytes // MIB for step in replay.steps] == [164, 264]
    # What needs more than training did gives the cache back, and its peak is none of training.
    replay = replay_of(*steps, largest=None, checks={1: [101 * MIB]})
    assert [step.reserved_bytes // MIB for step in replay.steps] == [164, 164]
    assert [step.allocated_bytes // MIB for step in replay.steps] == [164, 164]
    assert replay.memory.num_retries == 0
    assert replay.memory.fragmentation == pytest.approx(1)


def test_a_check_that_does_not_fit_leaves_the_cache_empty():
    steps = [[40 * MIB] * 2, [60 * MIB]]
    replay = replay_of(
        *steps, largest=None, checks={1: [90 * MIB, 40 * MIB, 30 * MIB]}, budget=210 * MIB
    )
    assert replay.failed_step is None
    assert [step.reserved_bytes // MIB for step in replay.steps] == [144, 124]
    assert replay.memory.num_retries == 0


def test_what_a_check_allocates_once_is_there_for_training_where_the_check_does_not_fit():
    allocator = CachingAllocator(210 * MIB)
    kept = [16 * MIB, 8 * MIB]
    allocator.replay_apart(array("q", [100 * MIB, kept[0], 120 * MIB, kept[1], ~0, ~2]))
    assert allocator.allocated_bytes == sum(kept)
    assert allocator.num_retries == 0
    # Allocations are numbered on.
    allocator.replay(array("q", [5 * MIB, ~3, ~4]))
    assert allocator.allocated_bytes == kept[0]
    with pytest.raises(torch.OutOfMemoryError):
        allocator.replay_apart(array("q", [300 * MIB]))


# --- what is said


@pytest.mark.parametrize("most_traced", [6, 256])
def test_a_step_says_what_real_lengths_reserve_and_what_expandable_segments_bring(
    tmp_path, monkeypatch, most_traced
):
    monkeypatch.setattr(length_replay, "MOST_TRACED", most_traced)
    step, optimizer = adaptive_step(micro_batch_tokens=600)
    estimate = step.estimate(
        optimizer, sample, ["H100", "2GiB"], lengths=drawn_lengths(), batch_size=8, maximum=16
    )
    for device in estimate.devices:
        replay = device.replay
        assert (replay.num_steps, replay.batch_size) == (50, 8)
        assert replay.limit == "600 padded tokens"
        assert replay.memory.reserved_bytes >= replay.memory.allocated_bytes > 0
        assert replay.expandable.allocated_bytes == replay.memory.allocated_bytes
    lines = estimate.table().splitlines()
    begin = lines.index("the first 50 steps of rows of real lengths:")
    assert lines[begin + 1].split() == [
        *("device", "batch_size", "micro-batch", "allocated"),
        *("reserved", "fragmentation", "retries"),
    ]
    assert lines[begin + 2].startswith("H100 (79.11 GiB)")
    assert lines[begin + 4].startswith(
        "H100 (79.11 GiB), PYTORCH_ALLOC_CONF=expandable_segments:True: reserved "
    )
    notes = [line for line in lines[begin:] if line.startswith("sizes of most of the ")]
    assert len(notes) == (most_traced == 6)
    estimate.save(tmp_path / "estimate.json")
    assert read_estimate(tmp_path / "estimate.json") == estimate


def test_without_lengths_nothing_is_replayed():
    step, optimizer = adaptive_step()
    estimate = step.estimate(optimizer, sample, "H100", maximum=16)
    assert estimate.devices[0].replay is None
    assert "real lengths" not in estimate.table()


def test_where_no_row_fits_nothing_is_replayed():
    step, optimizer = adaptive_step()
    estimate = step.estimate(
        optimizer, sample, "1MiB", lengths=[8], batch_size=2, maximum=16, context=0
    )
    assert estimate.devices[0].lengths[0].max_batch_size == 0
    assert estimate.devices[0].replay is None


def test_expandable_segments_that_are_set_are_not_offered(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    step, optimizer = adaptive_step()
    estimate = step.estimate(optimizer, sample, "H100", lengths=[8, 20], batch_size=2, maximum=16)
    assert estimate.devices[0].replay.expandable is None
    assert "expandable_segments" not in estimate.table()


def test_without_a_size_a_part_holds_what_fits():
    step, optimizer = adaptive_step(micro_batch_size="auto")
    estimate = step.estimate(optimizer, sample, "H100", lengths=[8], batch_size=40, maximum=16)
    assert estimate.devices[0].replay.limit == "16 rows"


def test_a_step_that_never_splits_holds_what_one_with_room_for_all_rows_holds():
    memories = []
    for micro_batch_size in (None, 8):
        step, optimizer = adaptive_step(micro_batch_size=micro_batch_size)
        estimate = step.estimate(
            optimizer, sample, "H100", lengths=[50, 60, 70], batch_size=8, maximum=16
        )
        memories.append(estimate.devices[0].replay.memory)
    assert memories[0] == memories[1]


# --- a loop


def loop_of(lengths, *, dtype=torch.float32, **arguments):
    model = Decoder().to(dtype)
    rows = [{"tokens": [1] * length, "labels": [1] * length} for length in lengths]

    def mean_loss(batch):
        return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    return AdaptiveLoop(
        model,
        torch.optim.AdamW(model.parameters()),
        rows,
        collate=lambda some: batch_of([len(row["tokens"]) for row in some], token=1),
        mean_loss=mean_loss,
        **arguments,
    )


def test_a_loop_replays_its_own_steps():
    lengths = few_lengths()
    loop = loop_of(lengths, batch_size=8, micro_batch_tokens=600)
    epochs = loop._batches.planner.epochs
    batches = [*epochs.rows_ahead(loop.progress, batch_size=8, num_steps=50)]
    assert len(batches) == 50
    drawn = [[len(row["tokens"]) for row in rows] for rows in loop]
    assert [[lengths[number] for number in batch] for batch in batches[:15]] == drawn
    estimate = loop.estimate("H100", lengths=torch.tensor(lengths), maximum=16)
    assert estimate.devices[0].replay.limit == "600 padded tokens"
    assert loop.progress.steps == 0


def test_a_loop_that_takes_what_fits_is_replayed_with_that():
    loop = loop_of(drawn_lengths(), batch_size="max")
    estimate = loop.estimate("H100", lengths=drawn_lengths(), maximum=16)
    assert estimate.devices[0].replay.batch_size == 16


def test_a_loop_replays_packed_rows():
    lengths = few_lengths()
    limits = {"micro_batch_tokens": 600, "batch_size": 8}
    replays = {}
    for layout in ("grouped", "packed"):
        options = StepOptions(micro_batch_layout=layout)
        loop = loop_of(lengths, options=options, dtype=torch.bfloat16, **limits)
        estimate = loop.estimate("H100", lengths=lengths, maximum=16)
        replays[layout] = estimate.devices[0].replay
    assert replays["packed"].limit == "600 padded tokens"
    assert replays["packed"].num_shapes > 6
    memory = replays["packed"].memory
    assert 0 < memory.allocated_bytes <= memory.reserved_bytes
    assert replays["grouped"].limit == replays["packed"].limit
    # Each holds 600 tokens at most, of which packed rows are more often without padding.
    assert replays["packed"].num_shapes != replays["grouped"].num_shapes
    grouped_bytes = replays["grouped"].memory.allocated_bytes
    assert memory.allocated_bytes == pytest.approx(grouped_bytes, rel=0.01)


def test_a_loop_needs_the_length_of_each_of_its_rows():
    loop = loop_of(drawn_lengths(), batch_size=8)
    with pytest.raises(SettingError) as raised:
        loop.estimate("H100", lengths=[8, 9])
    assert str(raised.value) == (
        "lengths='2 numbers': give one for each of the 120 rows of the dataset"
    )
