"""The number of examples of a property test."""

from hypothesis import settings

# Examples of the default profile; see tests/conftest.py.
_USUAL = 100


def examples(num, **options):
    """Return settings of a property test with `num` examples; the nightly profile draws 10 times
    more.
    """
    return settings(max_examples=num * settings().max_examples // _USUAL, **options)
