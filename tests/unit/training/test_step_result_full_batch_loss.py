"""The loss over a full batch is the mean over the label tokens of the steps that make one full."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.training import FullBatchLoss

STEPS = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 50), st.integers(1, 9)), max_size=60)


@given(STEPS, st.integers(1, 20), st.data())
def test_each_step_counts_in_one_average_weighted_by_its_label_tokens(steps, rows, data):
    cut = data.draw(st.integers(0, len(steps)))
    meter, open_steps = FullBatchLoss(rows), []
    for number, (loss, labels, size) in enumerate(steps):
        if number == cut:  # a restart between two steps changes no bit
            state, meter = meter.state_dict(), FullBatchLoss(1)
            meter.load_state_dict(state)
        mean = meter.add(loss, label_tokens=labels, rows=size)
        open_steps.append((loss, labels, size))
        full = sum(size for *_, size in open_steps) >= rows
        total = sum(labels for _, labels, _ in open_steps)
        assert (mean is not None) == (full and total > 0)
        if mean is not None:
            expected = sum(loss * labels for loss, labels, _ in open_steps) / total
            assert mean == (loss if len(open_steps) == 1 else pytest.approx(expected))
        if full:
            open_steps = []
