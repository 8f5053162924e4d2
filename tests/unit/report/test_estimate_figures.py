"""The figures of an estimate show what it holds, from its file alone."""

import io
import json
import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image
from support.targets import counted

from adaptive_batch.estimate import (
    Change,
    CurveCheck,
    LengthEstimate,
    MemoryEstimate,
    Target,
    read_estimate,
)
from adaptive_batch.estimate.fake_step import Resident
from adaptive_batch.memory import GIB, Line, MemoryCurve
from adaptive_batch.report import write_estimate_picture, write_report
from adaptive_batch.report.drawing import to_svg
from adaptive_batch.report.estimate_figures import estimate_figures


def target(name, gib):
    return Target(name, int(gib * 1.1 * GIB), int(gib * GIB), (("headroom (5%)", GIB),))


def length_of(
    *lines,
    tokens=512,
    one_row=None,
    optimizer=3.0,
    resident=(1.0, 0.001, 2.0, 0.125),
):
    """A plan whose lines are (fixed, a row) in GiB."""
    parts = Resident(*(int(part * GIB) for part in resident))
    curve = MemoryCurve(
        tuple(
            Line(Fraction(int(fixed * GIB)), Fraction(int(each * GIB)), number)
            for number, (fixed, each) in enumerate(lines)
        )
    )
    length = LengthEstimate(
        tokens, parts, curve, 0, None if optimizer is None else int(optimizer * GIB)
    )
    return replace(
        length, one_row_bytes=length.curve.peak_bytes(1) if one_row is None else int(one_row * GIB)
    )


def plan_with(*lengths, targets=(("80 GiB", 75.0), ("L4 (21.96 GiB)", 20.0)), **values):
    lengths = lengths or (length_of((4.0, 0.5), (3.2, 1.0)),)
    maximum = values.setdefault("maximum", 4096)
    return MemoryEstimate(
        tuple(counted(target(*one), lengths, maximum=maximum) for one in targets),
        lengths=lengths,
        **values,
    )


def drawn(figure):
    axes = Figure().subplots()
    figure.draw(axes)
    return axes


def bars(axes):
    """By kind: the lower and the upper edge on each device."""
    return {
        bar.get_label(): [(one.get_y(), one.get_y() + one.get_height()) for one in bar]
        for bar in axes.containers
    }


def ticks(axes):
    return [tick.get_text() for tick in axes.get_xticklabels()]


# --- what is shown


@given(
    lines=st.lists(st.tuples(st.floats(3.6, 20), st.floats(0.01, 4)), min_size=1, max_size=5),
    gib=st.floats(20, 90),
)
def test_the_kinds_are_stacked_to_the_peak_of_forward_and_backward(lines, gib):
    # No two lines of a hull are parallel.
    slopes = {int(each * GIB): (fixed, each) for fixed, each in lines}
    length = length_of(*(slopes[slope] for slope in sorted(slopes)))
    plan = plan_with(length, targets=(("device", gib), ("other", 30.0)))
    kinds = list(bars(drawn(estimate_figures(plan)[0])).values())
    for number, device in enumerate(plan.devices):
        rows = max(1, device.lengths[0].max_batch_size)
        edges = [kind[number] for kind in kinds]
        assert edges[0][0] == 0
        assert all(low[1] == pytest.approx(high[0]) for low, high in pairwise(edges))
        assert edges[-1][1] == pytest.approx(length.curve.peak_bytes(rows) / GIB, rel=1e-6)


def test_each_device_has_its_name_its_rows_and_a_line_at_what_may_be_used():
    (figure,) = estimate_figures(plan_with())
    axes = drawn(figure)
    assert ticks(axes) == ["80 GiB\n71 rows", "L4\n16 rows"]
    (lines,) = axes.collections
    assert [segment[0][1] for segment in lines.get_segments()] == [75.0, 20.0]
    assert "L4 (21.96 GiB): 16 rows, 19.20 GiB: parameters" in figure.description


def test_each_length_has_a_figure_with_its_own_rows():
    plan = plan_with(length_of((3.2, 1.0)), length_of((3.2, 4.0), tokens=2048))
    short, long = estimate_figures(plan)
    assert ticks(drawn(short))[0] == "80 GiB\n71 rows"
    assert ticks(drawn(long))[0] == "80 GiB\n17 rows"
    assert (short.name, long.name) == ("estimate-1", "estimate-2")
    assert "2,048 tokens" in long.title


def test_a_bound_where_the_search_would_end_is_shown_as_at_least_that():
    axes = drawn(estimate_figures(plan_with(maximum=30))[0])
    assert ticks(axes) == ["80 GiB\n30+ rows", "L4\n16 rows"]


def test_where_nothing_fits_the_first_row_is_shown():
    (figure,) = estimate_figures(plan_with(targets=(("small", 2.0), ("smaller", 1.0))))
    assert ticks(drawn(figure)) == ["small\nno row", "smaller\nno row"]
    assert max(edges[0][1] for edges in bars(drawn(figure)).values()) == pytest.approx(4.5)
    assert "small: no row fits; one needs 4.50 GiB: parameters" in figure.description


def test_a_kind_that_is_not_there_is_not_shown():
    (figure,) = estimate_figures(plan_with(length_of((4.0, 0.5), resident=(1.0, 0.001, 2.0, 0.0))))
    kinds = ["parameters", "buffers", "optimizer state", "activations", "backward temporaries"]
    assert list(bars(drawn(figure))) == kinds
    assert (
        ": parameters 1.00 GiB, buffers 1.02 MiB, optimizer state 2.00 GiB, activations"
        in figure.description
    )


def test_the_optimizers_step_is_shown_where_it_holds_more():
    low, high = (
        bars(drawn(estimate_figures(plan_with(length_of((4.0, 1.0), optimizer=peak)))[0]))
        for peak in (4.5, 76.0)
    )
    assert "optimizer's step" not in low
    assert high["optimizer's step"] == [(0, 76.0)] * 2


# --- the file


def full_plan():
    lengths = (
        length_of((4.0, 0.5), (3.2, 1.0)),
        replace(length_of((4.0, 2.0), tokens=2048), check=CurveCheck(5, 14, 14)),
    )
    better = Change(("enable=True", "~that"), "more <compute>", (None, 30))
    return plan_with(
        *lengths, world_size=2, left_out=("a <thing>",), changes=(better,), seconds=1.25
    )


def test_a_plan_that_is_saved_and_read_says_the_same(tmp_path):
    plan = full_plan()
    plan.save(tmp_path / "estimate.json")
    read = read_estimate(tmp_path / "estimate.json")
    assert read == plan
    assert read.table() == plan.table()
    assert read.table_of_changes() == plan.table_of_changes()
    assert [to_svg(one) for one in estimate_figures(read)] == [
        to_svg(one) for one in estimate_figures(plan)
    ]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"devices": [], "lengths": []}',
        '{"devices": [{"name": 1}]}',
        '{"devices": 3}',
    ],
)
def test_a_plan_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "estimate.json").write_text(content)
    assert read_estimate(tmp_path / "estimate.json") is None
    assert read_estimate(tmp_path / "nowhere.json") is None


@pytest.mark.parametrize("value", [None, [], float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["sequence_length", "allocated_bytes", "composition"])
def test_a_plan_with_a_value_that_is_none_is_refused_as_a_whole(tmp_path, key, value):
    full_plan().save(tmp_path / "estimate.json")
    saved = json.loads((tmp_path / "estimate.json").read_text())
    saved["devices"][0]["lengths"][0][key] = value
    (tmp_path / "estimate.json").write_text(json.dumps(saved))
    assert read_estimate(tmp_path / "estimate.json") is None


def rows_of_tables(page):
    """The cells of each line of each table."""
    lines = re.findall(r"<tr>(<th scope=\"row\">.*?)</tr>", page, re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line, re.DOTALL) for line in lines]


def test_the_tables_have_each_device_and_length_and_each_change(tmp_path):
    plan = full_plan()
    fit = replace(
        plan.devices[0].lengths[0],
        max_batch_size_with_retries=73,
        allocated_bytes=60 * GIB,
        reserved_bytes=70 * GIB,
    )
    first = replace(plan.devices[0], lengths=(fit, *plan.devices[0].lengths[1:]))
    replace(plan, devices=(first, *plan.devices[1:])).save(
        tmp_path / "adaptive_batch" / "estimate.json"
    )
    lines = rows_of_tables(write_report(tmp_path)[0].read_text())
    allowed = f"{plan.devices[0].budget_bytes / GIB:.2f}"
    assert lines[0] == ["80 GiB", "512", "71", "73", "36,352", "60.00", "70.00", allowed]
    assert [line[:5] for line in lines[1:4]] == [
        ["80 GiB", "2,048", "35", "35", "71,680"],
        ["L4 (21.96 GiB)", "512", "16", "16", "8,192"],
        ["L4 (21.96 GiB)", "2,048", "8", "8", "16,384"],
    ]
    assert lines[4:] == [
        ["(as it is)", "71", "16", ""],
        ["enable=True ~that", "4096+", "30", "more &lt;compute&gt;"],
    ]
    replace(full_plan(), changes=()).save(tmp_path / "adaptive_batch" / "estimate.json")
    assert len(rows_of_tables(write_report(tmp_path)[0].read_text())) == 4


@pytest.mark.parametrize("num_lengths", [1, 3])
def test_the_picture_is_written_and_not_blank(tmp_path, num_lengths):
    plan = full_plan()
    devices = (
        replace(device, lengths=(device.lengths * 2)[:num_lengths]) for device in plan.devices
    )
    write_estimate_picture(replace(plan, devices=tuple(devices)), tmp_path / "estimate.png")
    picture = Image.open(io.BytesIO((tmp_path / "estimate.png").read_bytes())).convert("RGB")
    assert (picture.size[0] > 1000) == (num_lengths > 1)
    assert (
        len({colour for count, colour in picture.getcolors(maxcolors=1 << 24) if count > 500}) >= 4
    )


def test_a_report_of_a_folder_with_a_plan_alone_shows_its_figures_and_tables(tmp_path):
    full_plan().save(tmp_path / "adaptive_batch" / "estimate.json")
    page = write_report(tmp_path)[0].read_text()
    assert page.count('<figure id="estimate-') == 2
    assert '<th scope="row">L4 (21.96 GiB)</th>' in page
    assert "What one change would bring, in rows of 512 tokens" in page
    assert "more &lt;compute&gt;" in page
    assert "Left out: a &lt;thing&gt;." in page
    assert "Not recorded" not in page
    assert "<h1>Memory estimate <small>" in page
    assert ": memory estimate</title>" in page
    assert "No optimizer step" not in page
