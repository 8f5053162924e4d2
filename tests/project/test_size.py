"""The code may shrink. It grows only with a reason in size.csv."""

from support.paths import ROOT
from support.size import measure, read_limits, too_large


def test_no_package_grows():
    problems = too_large(measure(ROOT), read_limits())
    assert not problems, (
        f"{'; '.join(problems)}. Delete as much elsewhere in it, or raise its limit in"
        " tests/project/size.csv and write the reason into the row"
    )
