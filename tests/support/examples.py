"""The number of examples of a property test, and strategies that several tests share."""

from hypothesis import settings
from hypothesis import strategies as st

from adaptive_batch.data import MicroBatchLayout, MicroBatchLimit

# Examples of the default profile; see tests/conftest.py.
_USUAL = 100

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=24)
LIMITS = st.builds(MicroBatchLimit, st.integers(1, 200), st.sampled_from(["rows", "tokens"]))
SHAPES = st.builds(
    MicroBatchLayout,
    uniform=st.sampled_from([None, "rows", "lengths", "both"]),
    pad_to_multiple_of=st.integers(1, 8),
    longest=st.none() | st.integers(1, 40),
)


def examples(num, **options):
    """Return settings of a property test with `num` examples; the nightly profile draws 10 times
    more.
    """
    return settings(max_examples=num * settings().max_examples // _USUAL, **options)
