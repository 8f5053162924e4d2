"""Results of estimates: rows that fit, tables, files, and ranked changes."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from support.targets import counted

from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import (
    Change,
    CurveCheck,
    LengthEstimate,
    MemoryEstimate,
    Resident,
    Target,
    rank_changes,
)
from adaptive_batch.estimate.devices import find_device
from adaptive_batch.memory import GIB, Line, MemoryCurve

RESIDENT = Resident(parameters=2 * GIB, buffers=GIB // 4, optimizer=4 * GIB, gradients=0)
FLAT = Line(Fraction(9 * GIB), Fraction(GIB, 8))
STEEP = Line(Fraction(7 * GIB), Fraction(GIB))
LENGTH = LengthEstimate(
    sequence_length=512,
    resident=RESIDENT,
    traced_curve=MemoryCurve((FLAT, STEEP)),
    one_row_bytes=10 * GIB,
    optimizer_peak_bytes=8 * GIB,
    check=CurveCheck(5, 12 * GIB, 12 * GIB),
)
BIG = Target("80 GiB", 80 * GIB, 75 * GIB, (("the CUDA context", GIB), ("headroom (5%)", 4 * GIB)))
SMALL = Target("small", 12 * GIB, 11 * GIB)


def plan(*targets, **options):
    lengths, maximum = options.pop("lengths", (LENGTH,)), options.pop("maximum", 4096)
    devices = tuple(counted(target, lengths, maximum=maximum) for target in targets or (BIG, SMALL))
    return MemoryEstimate(devices, maximum, lengths=lengths, **options)


def bounds(estimate):
    return [device.lengths[0].max_batch_size for device in estimate.devices]


def test_the_rows_follow_from_the_curve_and_the_maximum():
    assert bounds(plan()) == [68, 4]
    assert bounds(plan(maximum=16)) == [16, 4]
    flat = replace(LENGTH, traced_curve=MemoryCurve((Line(Fraction(GIB), Fraction(0)),)))
    assert flat.max_rows(75 * GIB) is None
    assert bounds(plan(BIG, lengths=(flat,))) == [4096]


def test_a_traced_row_that_fits_overrides_the_curve():
    little = replace(LENGTH, one_row_bytes=7 * GIB)
    assert little.curve.max_rows(8 * GIB) == 0
    assert little.max_rows(8 * GIB) == 1
    assert little.peak_bytes(1) == 8 * GIB  # the optimizer's step
    assert replace(little, optimizer_peak_bytes=None).peak_bytes(1) == 7 * GIB


@pytest.mark.parametrize(
    ("gib", "what"),
    [
        (0, "context and headroom take the whole device"),
        (6, "the optimizer's state (4.00 GiB, 6.25 GiB with the parts before)"),
        (7, "the optimizer's step (8.00 GiB at the peak)"),
        (9, "forward and backward of one row (10.00 GiB at the peak)"),
        (10, None),
    ],
)
def test_the_first_part_that_does_not_fit_is_named(gib, what):
    assert LENGTH.first_too_large(int(gib * GIB)) == what
    target = Target("it", 100 * GIB, int(gib * GIB))
    assert (bounds(plan(target)) == [0]) == (what is not None)
    assert plan(target).devices[0].lengths[0].first_too_large == what


@pytest.mark.parametrize("counted", [11 * GIB, 14 * GIB])
def test_a_check_that_is_off_scales_the_curve(counted):
    off = replace(LENGTH, check=CurveCheck(5, counted, 12 * GIB))
    assert off.curve.peak_bytes(5) == counted
    assert (off.max_rows(12 * GIB) > 5) == (counted < 12 * GIB)
    assert "warning: a traced step of 5 rows" in plan(lengths=(off,)).table()


@pytest.mark.parametrize(
    "name", ["80GiB", "80 GiB", "80.00 GiB", "h100", "NVIDIA H100", "H100", "H100 (79.11 GiB)"]
)
def test_a_device_is_found_by_name_and_size(name):
    given = find_device("H100" if "100" in name else "80GiB")
    device = replace(BIG, name=given.describe())
    assert plan(device).fits(name, 68)
    assert not plan(device).fits(name, 69)
    with pytest.raises(SettingError, match="give one of them"):
        plan(device).fits("RTX4090")


def test_the_file_has_plain_values_in_bytes(tmp_path):
    made = plan(
        left_out=("compile",),
        changes=(Change(("a=1",), "time", (None, 3)),),
        refused=(Change(("b=2",), "more", refused="it cannot be"),),
        seconds=1.23,
        world_size=2,
    )
    path = tmp_path / "below" / "estimate.json"
    made.save(path)
    record = json.loads(path.read_text())
    assert [device["name"] for device in record["devices"]] == ["80 GiB", "small"]
    answer = record["devices"][0]["lengths"][0]
    assert (answer["sequence_length"], answer["max_batch_size"]) == (512, 68)
    assert sum(answer["composition"].values()) == answer["allocated_bytes"] == 75 * GIB


def test_changes_are_ranked_by_gain_and_useless_ones_dropped():
    some, most = Change(("some=1",), "", (12, 5)), Change(("most=1",), "", (20, 8))
    unlimited, one_only = Change(("unlimited=1",), "", (None, 4)), Change(("one=1",), "", (10, 5))
    longer = Change(("two=1", "keys=2"), "", (20, 8))
    nothing, worse = Change(("nothing=1",), "", (10, 4)), Change(("worse=1",), "", (9, 3))
    refused = Change(("refused=1",), "", refused="it cannot be")
    given = [nothing, longer, some, refused, one_only, unlimited, worse, most]
    assert rank_changes(given, [10, 4]) == (unlimited, most, longer, some, one_only)


def test_the_table_of_changes_has_the_rows_of_each_device():
    lines = plan(changes=(Change(("a=1",), "compute", (None, 30)),)).table_of_changes().splitlines()
    cells = [line.split() for line in lines]
    assert cells[1:] == [
        ["key=value", "80", "GiB", "small", "cost"],
        ["(unchanged)", "68", "4"],
        ["a=1", "4096+", "30", "compute"],
    ]
    assert plan().table_of_changes() == ""
