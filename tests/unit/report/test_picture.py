"""The picture of an estimate."""

import html
import io
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
)
from adaptive_batch.estimate.fake_step import Resident
from adaptive_batch.memory import GIB, Line, MemoryCurve
from adaptive_batch.report import write_estimate_picture, write_report
from adaptive_batch.report.picture import estimate_panels


def target(name, gib):
    return Target(name, int(gib * 1.1 * GIB), int(gib * GIB), (("headroom (5%)", GIB),))


def length_of(
    *lines,
    tokens=512,
    one_row=None,
    optimizer=3.0,
    resident=(1.0, 0.001, 2.0, 0.125),
):
    """An estimate whose curve has lines of (fixed, per row) GiB."""
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
    """Return the lower and upper edges on each device by kind."""
    return {
        bar.get_label(): [(one.get_y(), one.get_y() + one.get_height()) for one in bar]
        for bar in axes.containers
    }


# Panels.


@given(
    lines=st.lists(st.tuples(st.floats(3.6, 20), st.floats(0.01, 4)), min_size=1, max_size=5),
    gib=st.floats(20, 90),
)
def test_the_bars_add_up_to_the_peak(lines, gib):
    # The lines of a curve have distinct slopes.
    slopes = {int(each * GIB): (fixed, each) for fixed, each in lines}
    length = length_of(*(slopes[slope] for slope in sorted(slopes)))
    plan = plan_with(length, targets=(("device", gib), ("other", 30.0)))
    kinds = list(bars(drawn(estimate_panels(plan)[0])).values())
    for number, device in enumerate(plan.devices):
        rows = max(1, device.lengths[0].max_batch_size)
        edges = [kind[number] for kind in kinds]
        assert edges[0][0] == 0
        assert all(low[1] == pytest.approx(high[0]) for low, high in pairwise(edges))
        assert edges[-1][1] == pytest.approx(length.curve.peak_bytes(rows) / GIB, rel=1e-6)


# Files.


def full_plan():
    lengths = (
        length_of((4.0, 0.5), (3.2, 1.0)),
        replace(length_of((4.0, 2.0), tokens=2048), check=CurveCheck(5, 14, 14)),
    )
    better = Change(("enable=True", "~that"), "more <compute>", (None, 30))
    return plan_with(
        *lengths, world_size=2, left_out=("a <thing>",), changes=(better,), seconds=1.25
    )


@pytest.mark.parametrize("num_lengths", [1, 3])
def test_the_picture_is_not_blank(tmp_path, num_lengths):
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


def test_an_estimate_alone_has_a_page_with_its_tables(tmp_path):
    plan = full_plan()
    plan.save(tmp_path / "adaptive_batch" / "estimate.json")
    page = write_report(tmp_path)[0].read_text()
    assert html.escape(plan.table()) in page
    assert "more &lt;compute&gt;" in page
    assert "left out: a &lt;thing&gt;" in page
    assert "<dt>steps</dt>" not in page
