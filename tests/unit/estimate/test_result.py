"""Results of estimates: rows that fit, tables, files, and rank_changes changes."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    read_estimate,
)
from adaptive_batch.estimate.devices import find_device
from adaptive_batch.memory import GIB, Line, MemoryCurve

RESIDENT = Resident(parameters=2 * GIB, buffers=GIB // 4, optimizer=4 * GIB, gradients=0)
FLAT = Line(Fraction(9 * GIB), Fraction(GIB, 8), 0)
STEEP = Line(Fraction(7 * GIB), Fraction(GIB), 1)
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


def test_the_memory_of_a_small_device_is_in_mib():
    small = Target("12.00 MiB", 12 * 2**20, 11 * 2**20, (("headroom (8%)", 2**20),))
    lines = plan(small).table().splitlines()
    assert "12.00 MiB: 11.00 MiB may be used of 12.00 MiB, 1.00 MiB for headroom (8%)" in lines


def test_the_rows_follow_from_the_curve_and_the_maximum():
    assert bounds(plan()) == [68, 4]
    assert bounds(plan(maximum=16)) == [16, 4]
    flat = replace(LENGTH, traced_curve=MemoryCurve((Line(Fraction(GIB), Fraction(0), 0),)))
    assert flat.max_rows(75 * GIB) is None
    assert bounds(plan(BIG, lengths=(flat,))) == [4096]


@pytest.mark.parametrize(
    ("budget", "rows"),
    [(10 * GIB, 3), (10 * GIB - 1, 0), (8 * GIB - 1, 0)],
    ids=["a row fits", "no row fits", "the optimizer's step does not fit"],
)
def test_one_row_and_the_optimizers_step_must_fit(budget, rows):
    assert LENGTH.max_rows(budget) == rows


def test_a_traced_row_that_fits_overrides_the_curve():
    little = replace(LENGTH, one_row_bytes=7 * GIB)
    assert little.curve.max_rows(8 * GIB) == 0
    assert little.max_rows(8 * GIB) == 1
    assert little.peak_bytes(1) == 8 * GIB  # the optimizer's step
    assert replace(little, optimizer_peak_bytes=None).peak_bytes(1) == 7 * GIB


@pytest.mark.parametrize(
    ("gib", "what"),
    [
        (1, "the parameters (2.00 GiB, 2.00 GiB with the parts before)"),
        (2.1, "the buffers (0.250 GiB, 2.25 GiB with the parts before)"),
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
    lines = plan(target).table().splitlines()
    line = f"  a row of 512 tokens: too large: {what}"
    assert (line in lines) == (what is not None)
    assert plan(target).devices[0].lengths[0].first_too_large == what


def test_the_table_has_a_line_for_each_device_and_length():
    longer = replace(LENGTH, sequence_length=1024, check=None)
    made = plan(lengths=(LENGTH, longer), left_out=("something",))
    lines = made.table().splitlines()
    assert lines[0].split() == [
        "device",
        "length",
        "max_batch_size",
        "tokens",
        "peak",
        "a",
        "row",
        "free",
    ]
    rows = [line.split() for line in lines[1:5]]
    assert rows[0] == [
        "80",
        "GiB",
        "512",
        "68",
        "34816",
        "75.00",
        "GiB",
        "1.00",
        "GiB",
        "0",
        "bytes",
    ]
    assert rows[2] == ["small", "512", "4", "2048", "11.00", "GiB", "1.00", "GiB", "0", "bytes"]
    assert [row[-9] for row in rows] == ["512", "1024", "512", "1024"]
    assert len({len(line) for line in lines[:5]}) == 1  # aligned
    assert (
        lines[5]
        == "80 GiB: 75.00 GiB may be used of 80.00 GiB, 1.00 GiB for the CUDA context, 4.00 GiB for"
        " headroom (5%)"
    )
    assert lines[8] == "small: 11.00 GiB may be used of 12.00 GiB"
    assert lines[9].startswith("  peak of 4 rows of 512 tokens: 11.00 GiB: ")
    assert lines[-1] == "left out: something"


def test_rows_at_the_maximum_have_a_plus():
    assert plan(BIG, maximum=16).table().splitlines()[1].split()[3] == "16+"


def test_a_device_without_a_fitting_row_has_no_free_memory():
    assert plan(Target("tiny", GIB, GIB)).table().splitlines()[1].split() == [
        "tiny",
        "512",
        "0",
        "0",
        "10.00",
        "GiB",
        "0.125",
        "GiB",
        "-",
    ]


def test_a_check_within_a_thousandth_is_not_shown():
    off = replace(LENGTH, check=CurveCheck(5, 12 * GIB, 12 * GIB + GIB // 100))
    assert plan(lengths=(off,)).table() == plan().table()


@pytest.mark.parametrize("counted", [11 * GIB, 14 * GIB])
def test_a_check_that_is_off_scales_the_curve(counted):
    off = replace(LENGTH, check=CurveCheck(5, counted, 12 * GIB))
    assert off.curve.peak_bytes(5) == counted
    assert (off.max_rows(12 * GIB) > 5) == (counted < 12 * GIB)
    assert "warning: a traced step of 5 rows" in plan(lengths=(off,)).table()


def test_the_table_names_several_ranks():
    assert "75.00 GiB may be used on each of 8 ranks of 80.00 GiB" in plan(world_size=8).table()


def test_a_larger_optimizers_step_is_shown():
    assert "optimizer's step" not in plan(BIG).table()
    larger = replace(LENGTH, optimizer_peak_bytes=20 * GIB)
    line = "    the optimizer's step needs more: 20.00 GiB, for any batch"
    assert line in plan(BIG, lengths=(larger,), maximum=4).table().splitlines()


def test_the_composition_of_the_peak_begins_with_the_largest_part():
    text = plan(BIG).devices[0].lengths[0].explain()
    assert (
        text
        == "peak of 68 rows of 512 tokens: 75.00 GiB: activations 55.00 GiB, backward temporaries"
        " 13.75 GiB, optimizer state"
        " 4.00 GiB, parameters 2.00 GiB"
    )


def test_each_device_has_its_own_composition():
    old = replace(LENGTH, traced_curve=MemoryCurve((FLAT,)))
    devices = (counted(BIG, (LENGTH,), maximum=68), counted(SMALL, (old,), maximum=4))
    text = MemoryEstimate(devices, 4096).table()
    rows = [line.split() for line in text.splitlines()[1:3]]
    assert [row[6:8] for row in (rows[0][1:], rows[1])] == [["1.00", "GiB"], ["0.125", "GiB"]]
    assert "peak of 68 rows of 512 tokens: 75.00 GiB: activations 55.00 GiB" in text
    assert "peak of 4 rows of 512 tokens: 9.50 GiB: " in text


def test_rows_without_tokens_have_no_length():
    images = replace(LENGTH, sequence_length=1)
    text = plan(lengths=(images,)).table()
    assert "token" not in text
    assert text.splitlines()[0].split()[:2] == ["device", "max_batch_size"]


@pytest.mark.parametrize("name", ["80GiB", "80 GiB", "80.00 GiB", "h100", "NVIDIA H100", "H100"])
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
    assert (answer["allocated_bytes"], answer["bytes_per_row"]) == (75 * GIB, GIB)
    assert sum(answer["composition"].values()) == 75 * GIB
    assert record["devices"][0]["taken"] == [["the CUDA context", GIB], ["headroom (5%)", 4 * GIB]]
    assert answer["composition"]["optimizer state"] == 4 * GIB
    assert answer["optimizer_bytes"] == 8 * GIB
    assert "lengths" not in record
    assert record["changes"][0]["bounds"] == [None, 3]
    assert record["refused"][0]["refused"] == "it cannot be"
    assert (record["seconds"], record["left_out"], record["world_size"]) == (1.23, ["compile"], 2)
    assert [file.name for file in path.parent.iterdir()] == ["estimate.json"]
    assert read_estimate(path) == made


@given(
    fixed=st.integers(0, 10**12),
    refused=st.text(),
    bounds=st.lists(st.none() | st.integers(0, 9)),
    optimizer=st.none() | st.integers(0),
)
def test_a_saved_estimate_is_read_back(tmp_path_factory, fixed, refused, bounds, optimizer):
    curve = MemoryCurve((Line(Fraction(fixed), Fraction(GIB, 8), 0),))
    change = Change((refused,), "cost", tuple(bounds), refused)
    made = plan(
        lengths=(replace(LENGTH, traced_curve=curve, optimizer_peak_bytes=optimizer),),
        changes=(change,),
    )
    path = tmp_path_factory.mktemp("saved") / "estimate.json"
    made.save(path)
    assert read_estimate(path) == made


def test_changes_are_ranked_by_gain_and_useless_ones_dropped():
    some, most = Change(("some=1",), "", (12, 5)), Change(("most=1",), "", (20, 8))
    unlimited, one_only = Change(("unlimited=1",), "", (None, 4)), Change(("one=1",), "", (10, 5))
    longer = Change(("two=1", "keys=2"), "", (20, 8))
    nothing, worse = Change(("nothing=1",), "", (10, 4)), Change(("worse=1",), "", (9, 3))
    refused = Change(("refused=1",), "", refused="it cannot be")
    found = rank_changes(
        [nothing, longer, some, refused, one_only, unlimited, worse, most], [10, 4]
    )
    assert [change.overrides[0] for change in found] == [
        "unlimited=1",
        "most=1",
        "two=1",
        "some=1",
        "one=1",
    ]


def test_the_table_of_changes_is_aligned():
    changes = (
        Change(("checkpointing=True",), "compute", (None, 30)),
        Change(("a=1", "b=2"), "nothing", (70, 4)),
    )
    lines = plan(changes=changes).table_of_changes().splitlines()
    assert lines[0] == "effect of one change, in rows of 512 tokens:"
    assert lines[1].split() == ["key=value", "80", "GiB", "small", "cost"]
    assert lines[2].split() == ["(unchanged)", "68", "4"]
    assert lines[3].split() == ["checkpointing=True", "4096+", "30", "compute"]
    assert lines[4].split() == ["a=1", "b=2", "70", "4", "nothing"]
    assert (
        len(
            {
                line.index(cell) + len(cell)
                for line, cell in zip(lines[2:], ("68", "4096+", "70"), strict=True)
            }
        )
        == 1
    )
    assert plan().table_of_changes() == ""
