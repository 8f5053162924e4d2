import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.batching import split_by_rows


@given(rows=st.lists(st.integers()), micro_batch_size=st.integers(1, 50))
def test_every_row_comes_once_and_in_order(rows, micro_batch_size):
    pieces = split_by_rows(rows, micro_batch_size)
    assert [row for piece in pieces for row in piece] == rows


@given(rows=st.lists(st.integers()), micro_batch_size=st.integers(1, 50))
def test_all_pieces_but_the_last_are_full_and_none_is_empty(rows, micro_batch_size):
    sizes = [len(piece) for piece in split_by_rows(rows, micro_batch_size)]
    assert all(size == micro_batch_size for size in sizes[:-1])
    assert all(1 <= size <= micro_batch_size for size in sizes)


def test_rows_may_be_any_sequence():
    assert split_by_rows("abcde", 2) == [["a", "b"], ["c", "d"], ["e"]]
    assert split_by_rows(range(3), 5) == [[0, 1, 2]]


@pytest.mark.parametrize("micro_batch_size", [0, -1])
def test_a_micro_batch_below_one_row_is_refused(micro_batch_size):
    with pytest.raises(ValueError, match=f"micro_batch_size={micro_batch_size}: must be 1 or more"):
        split_by_rows([1, 2], micro_batch_size)
