"""The number of examples of a property test."""

from hypothesis import settings

# That a profile sets by default: see tests/conftest.py.
_USUAL = 100


def examples(num, **options):
    """Settings of a property test that draws `num` examples, and ten times as many at night."""
    return settings(max_examples=num * settings().max_examples // _USUAL, **options)
