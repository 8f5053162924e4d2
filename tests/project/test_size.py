"""The code may shrink. It grows only with a reason in size.csv."""

from support.paths import ROOT
from support.size import measure, read_limits


def test_no_package_grows():
    limits, problems = read_limits(), []
    for part, counts in measure(ROOT).items():
        for unit, count in counts.items():
            if part not in limits:
                problems.append(f"{part} has {count} {unit} and no row")
            elif count > int(limits[part][unit]):
                problems.append(f"{part} grew from {limits[part][unit]} to {count} {unit}")
    assert not problems, (
        f"{'; '.join(problems)}. Delete as much elsewhere in it, or raise its limit in"
        " tests/project/size.csv and write the reason into the row"
    )
