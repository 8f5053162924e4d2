"""Losses of user functions are checked, and rows of datasets are measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adaptive_batch.data import DatasetAdapter, check_loss, count_other_bytes
from adaptive_batch.errors import SettingError

WEIGHTS = torch.ones(4, 3, requires_grad=True)


NO_LOSSES = {
    "tuple": (WEIGHTS.mean(), WEIGHTS),
    "dict": {"loss": WEIGHTS.mean()},
    "float": 1.5,
    "NoneType": None,
    r"torch.float32 of \[4\]": WEIGHTS.sum(1),
    r"torch.int64 of \[\]": WEIGHTS.sum().long(),
}


def test_an_invalid_mean_loss_is_refused_with_its_type() -> None:
    for kind, loss in NO_LOSSES.items():
        with pytest.raises(SettingError, match=f"^mean_loss='{kind}': "):
            check_loss(loss)
    with pytest.raises(SettingError, match=r"^mean_loss=12\.0: its result depends on no parameter"):
        check_loss(WEIGHTS.sum().detach())


def test_a_mean_loss_is_converted_to_a_scalar_of_at_least_32_bits() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        expected = torch.float64 if dtype == torch.float64 else torch.float32
        for shape in ((), (1,), (1, 1)):
            given = WEIGHTS.mean().to(dtype).reshape(shape)
            loss = check_loss(given)
            assert (loss.dtype, loss.shape, loss.item()) == (expected, (), given.item())
    single = WEIGHTS.mean()
    assert check_loss(single) is single
    with torch.no_grad():  # as in validation
        assert check_loss(WEIGHTS.mean()) == 1


def test_rows_are_measured_in_tokens_and_in_bytes_of_other_data() -> None:
    text = {"input_ids": torch.arange(5), "mask": [True] * 5, "weight": np.int64(3)}
    tiles = [torch.ones(2, 3), {"pixels": np.ones((4, 4), np.uint8)}, (torch.ones(5),), "name"]
    rows = DatasetAdapter([text, {**text, "tiles": tiles}])
    assert (rows.lengths.tolist(), rows.other_bytes.tolist()) == ([5, 5], [0, 24 + 16 + 20])
    assert DatasetAdapter([text], 7).other_bytes.tolist() == [0]


def test_of_a_list_of_numbers_only_the_first_is_looked_at() -> None:
    # Recipes count the bytes of each row that they read; looking at each entry of torchtune's mask,
    # a list of NumPy's booleans, took 6% of a small model's step.
    class Untouched:
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(f"{name} of the second entry is read")

    assert count_other_bytes({"mask": [np.bool_(True), Untouched()]}) == 0
    for number in (0.5, np.float32(0.5), np.float64(0.5), torch.tensor(0.5)):
        assert count_other_bytes([number] * 3) == 12
    assert count_other_bytes([torch.tensor(5)] * 3) == 0
