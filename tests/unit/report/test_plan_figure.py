"""The figures of a plan show what the plan says, from its file alone, and no name hides another."""

import io
import json
import math
import subprocess
import sys
import textwrap
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from adaptive_batch.estimate import Change, Kinds, LengthEstimate, MemoryEstimate, Target, read_plan
from adaptive_batch.estimate.fake_step import Resident
from adaptive_batch.estimate.saved_plan import plan_of
from adaptive_batch.memory import GIB, Line, MemoryCurve
from adaptive_batch.report import write_plan_picture, write_report
from adaptive_batch.report.figures.beside import on_level_lines, right_of_areas, without_place
from adaptive_batch.report.figures.images import to_svg
from adaptive_batch.report.figures.plan_figure import answers, changes, plan_figures
from adaptive_batch.report.history.timeline import Timeline

NOTHING = Timeline.of([])
WIDTH, HEIGHT = 222, 230


def target(name, gib):
    return Target(name, int(gib * 1.1 * GIB), int(gib * GIB), (("headroom (5%)", GIB),), "https://example.org")


def length_of(*lines, tokens=512, one_row=None, optimizer=3.0, resident=(1.0, 0.001, 2.0, 0.0), of_gradients=0.5):
    """A plan whose lines are (fixed, a row) in GiB, of which a row's activations are four fifths."""
    parts = Resident(*(int(part * GIB) for part in resident))
    kinds = tuple(
        Kinds(
            Line(Fraction(int(fixed * GIB)), Fraction(int(each * GIB)), number),
            (0.0, 0.8 * each * GIB),
            int(of_gradients * GIB) if number == 0 else 0,
        )
        for number, (fixed, each) in enumerate(lines)
    )
    curve = MemoryCurve(tuple(kind.line for kind in kinds))
    peak = curve.peak_bytes(1) if one_row is None else int(one_row * GIB)
    return LengthEstimate(tokens, parts, curve, kinds, peak, None if optimizer is None else int(optimizer * GIB))


def plan_with(*lengths, targets=(("80 GiB", 75.0), ("L4 (21.96 GiB)", 20.0)), **values):
    lengths = lengths or (length_of((4.0, 0.5), (3.2, 1.0)),)
    return MemoryEstimate(tuple(target(*one) for one in targets), lengths, **{"maximum": 4096, **values})


def areas(figure):
    return [line for line in figure.lines if line.style == "area"]


def held(figure):
    """By row: the sizes of all areas together."""
    drawn = areas(figure)
    return {
        row: sum(line.series.y[place] - line.below[place] for line in drawn)
        for place, row in enumerate(drawn[0].series.x)
    }


# --- what is shown ------------------------------------------------------------------------------------------------------


@given(
    lines=st.lists(st.tuples(st.floats(3.6, 20), st.floats(0.01, 4)), min_size=1, max_size=5),
    gib=st.floats(0.5, 90),
    one_row=st.none() | st.floats(3.5, 30),
)
def test_at_each_row_the_kinds_are_stacked_to_the_peak_of_forward_and_backward(lines, gib, one_row):
    hull = sorted({each: fixed for fixed, each in lines}.items())
    length = length_of(*((fixed, each) for each, fixed in hull), one_row=one_row)
    (figure,) = plan_figures(plan_with(length, targets=(("device", gib),)))
    for row, size in held(figure).items():
        peak = length.one_row_bytes if row == 1 else length.curve.peak_bytes(row)
        assert size == pytest.approx(peak / GIB, rel=1e-6)
    for line in areas(figure):
        assert all(low <= high + 1e-9 for low, high in zip(line.below, line.series.y, strict=True))


def test_between_two_corners_the_peak_is_the_straight_line_that_is_drawn():
    length = length_of((9.0, 0.01), (6.0, 0.5), (3.2, 1.0))
    (figure,) = plan_figures(plan_with(length))
    drawn = held(figure)
    for (row, low), (following, high) in pairwise(sorted(drawn.items())):
        for between in range(max(2, row), following + 1):
            on_the_line = low + (high - low) * (between - row) / (following - row)
            assert (
                length.curve.peak_bytes(between) / GIB == pytest.approx(on_the_line, rel=1e-6) or following == row + 1
            )
    assert max(drawn) == figure.frame.x_to


def test_each_device_has_a_line_at_its_budget_with_its_name_and_bound_and_a_dot_on_the_curve():
    plan = plan_with()
    (figure,) = plan_figures(plan)
    level = {line.label: set(line.series.y) for line in figure.lines if line.style == "budget"}
    assert level == {"80 GiB: 71 rows": {75.0}, "L4: 16 rows": {20.0}}
    dots = {line.series.x: line.series.y for line in figure.lines if line.style == "dots"}
    length = plan.lengths[0]
    assert dots == {(rows,): (length.peak_bytes(rows) / GIB,) for rows in (71, 16)}
    assert figure.frame.x_from == 1
    assert figure.frame.x_to == math.ceil(1.12 * 71)
    assert "L4 (21.96 GiB): 16 rows, 19.20 GiB." in figure.description


def test_lengths_are_shown_at_one_height_each_with_its_own_rows():
    plan = plan_with(length_of((3.2, 1.0)), length_of((3.2, 4.0), tokens=2048))
    short, long = plan_figures(plan)
    assert short.frame.y_to == long.frame.y_to > 75
    assert short.frame.x_to > 3 * long.frame.x_to
    assert (short.name, long.name) == ("plan-1", "plan-2")
    assert "2,048 tokens" in long.title


def test_a_bound_where_the_search_would_end_is_shown_as_at_least_that():
    (figure,) = plan_figures(plan_with(maximum=30))
    assert [line.label for line in figure.lines if line.style == "budget"] == ["80 GiB: 30+ rows", "L4: 16 rows"]
    assert figure.frame.x_to == 30


def test_where_nothing_fits_the_first_row_is_shown_above_the_budget():
    plan = plan_with(targets=(("small", 2.0), ("smaller", 1.0)))
    (figure,) = plan_figures(plan)
    assert [line.label for line in figure.lines if line.style == "budget"] == ["small: no row", "smaller: no row"]
    assert [line for line in figure.lines if line.style == "dots"] == []
    assert figure.frame.y_to > held(figure)[1] > 2
    assert "small: no row fits; one needs 4.50 GiB." in figure.description


def test_a_kind_below_one_percent_is_shown_with_the_one_below_and_one_that_is_not_there_not_at_all():
    (figure,) = plan_figures(plan_with(length_of((4.0, 0.5), (3.2, 1.0), of_gradients=0.0)))
    assert [line.label for line in reversed(areas(figure))] == [
        "parameters",
        "optimizer state",
        "activations",
        "at work in backward",
    ]
    assert "Less than 1%, and shown with the kind below: buffers." in figure.description
    assert areas(figure)[-1].series.y[0] == pytest.approx(1.001, abs=1e-6)
    (with_buffers,) = plan_figures(plan_with(length_of((8.0, 1.0), resident=(1.0, 2.0, 2.0, 0.0))))
    assert "buffers" in [line.label for line in areas(with_buffers)]


def test_the_optimizers_step_is_shown_where_it_holds_more_than_a_row():
    low, high = (plan_figures(plan_with(length_of((4.0, 1.0), optimizer=peak)))[0] for peak in (4.5, 12.0))
    assert [line.label for line in low.lines if line.style == "level"] == []
    assert [(line.label, set(line.series.y)) for line in high.lines if line.style == "level"] == [
        ("optimizer's step", {12.0})
    ]


# --- names --------------------------------------------------------------------------------------------------------------

budgets = st.lists(st.floats(1, 200), min_size=1, max_size=4)


@given(budgets=budgets)
def test_no_name_of_four_devices_lies_on_another_and_each_is_beside_its_line(budgets):
    plan = plan_with(length_of((4.0, 0.5), (3.2, 1.0)), targets=[(f"device {n}", b) for n, b in enumerate(budgets)])
    (figure,) = plan_figures(plan)
    names = on_level_lines(figure, width=WIDTH, height=HEIGHT)
    assert len(names) == len([line for line in figure.lines if line.style in ("budget", "level")])
    for name in names:
        assert abs(name.middle - name.named) < 9.1
    for number, name in enumerate(names):
        for other in names[:number]:
            apart = abs(name.middle - other.middle) >= name.half + other.half - 1e-6
            assert apart or name.at_end != other.at_end
    beside = right_of_areas(figure, height=HEIGHT)
    for lower, upper in pairwise(beside):
        assert upper.middle - lower.middle >= lower.half + upper.half - 1e-6
    assert {name.text.replace("\n", " ") for name in beside} | {line.label for line in without_place(figure)} == {
        line.label for line in areas(figure)
    }


def test_a_figure_names_everything_once_in_its_svg():
    (figure,) = plan_figures(plan_with())
    svg = to_svg(figure, NOTHING)
    drawn = svg[svg.index("</desc>") :]
    for text in ("80 GiB: 71 rows", "L4: 16 rows", "parameters", "activations", "gradients", "at work in", "backward"):
        assert drawn.count(f">{text}<") == 1, text
    assert [line.label for line in without_place(figure)] == ["gradients"]


# --- the file -----------------------------------------------------------------------------------------------------------


def full_plan():
    lengths = (length_of((4.0, 0.5), (3.2, 1.0)), replace(length_of((4.0, 2.0), tokens=2048), checked=(5, 14, 14)))
    better = Change(("enable=True", "~that"), "more <compute>", (None, 30))
    return plan_with(*lengths, world_size=2, left_out=("a <thing>",), changes=(better,), seconds=1.25)


def test_a_plan_that_is_saved_and_read_says_the_same(tmp_path):
    plan = full_plan()
    plan.save(tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read == plan
    assert read.table() == plan.table()
    assert read.table_of_changes() == plan.table_of_changes()
    assert plan_figures(read) == plan_figures(plan)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", "{}", '{"devices": [], "lengths": []}', '{"devices": [{"name": 1}]}', '{"devices": 3}'],
)
def test_a_plan_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "plan.json").write_text(content)
    assert read_plan(tmp_path / "plan.json") is None
    assert read_plan(tmp_path / "nowhere.json") is None


@pytest.mark.parametrize("value", [None, "text", [], float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["sequence_length", "one_row_bytes", "lines", "resident"])
def test_a_plan_with_a_value_that_is_none_is_refused_as_a_whole(tmp_path, key, value):
    saved = full_plan().as_json()
    saved["lengths"][0][key] = value
    (tmp_path / "plan.json").write_text(json.dumps(saved))
    assert read_plan(tmp_path / "plan.json") is None
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError, OverflowError)):
        plan_of(saved)


def test_the_tables_have_each_device_and_length_and_each_change():
    head, lines = answers(full_plan())
    assert len(head) == len(lines[0])
    assert [line[:4] for line in lines] == [
        ["80 GiB", "512", "71", "36,352"],
        ["80 GiB", "2,048", "35", "71,680"],
        ["L4 (21.96 GiB)", "512", "16", "8,192"],
        ["L4 (21.96 GiB)", "2,048", "8", "16,384"],
    ]
    _, lines = changes(full_plan())
    assert lines == [["(as it is)", "71", "16", ""], ["enable=True ~that", "4096+", "30", "more <compute>"]]
    assert changes(replace(full_plan(), changes=()))[1] == []


@pytest.mark.parametrize("num_lengths", [1, 3])
def test_the_picture_is_written_and_not_blank(tmp_path, num_lengths):
    plan = full_plan()
    write_plan_picture(replace(plan, lengths=(plan.lengths * 2)[:num_lengths]), tmp_path / "plan.png")
    picture = Image.open(io.BytesIO((tmp_path / "plan.png").read_bytes())).convert("RGB")
    assert (picture.size[0] > 1000) == (num_lengths > 1)
    assert len({colour for count, colour in picture.getcolors(maxcolors=1 << 24) if count > 500}) >= 4


def test_a_report_of_a_folder_with_a_plan_alone_shows_its_figures_and_tables(tmp_path):
    full_plan().save(tmp_path / "adaptive_batch" / "plan.json")
    page = write_report(tmp_path)[0].read_text()
    assert page.count('<figure id="plan-') == 2
    assert '<th scope="row">L4 (21.96 GiB)</th>' in page
    assert "What one change would bring, in rows of 512 tokens" in page
    assert "more &lt;compute&gt;" in page
    assert "Left out: a &lt;thing&gt;." in page
    assert "Not recorded" not in page


def test_without_matplotlib_the_error_names_the_extra(tmp_path):
    full_plan().save(tmp_path / "plan.json")
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        sys.modules["matplotlib"] = None
        from adaptive_batch.report import write_plan_picture
        from adaptive_batch.estimate import read_plan
        try:
            write_plan_picture(read_plan(Path(sys.argv[1], "plan.json")), Path(sys.argv[1], "plan.png"))
        except Exception as error:
            print(error)
        """
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    (line,) = done.stdout.splitlines()
    assert "pip install 'adaptive-batch[report]'" in line
    assert not (tmp_path / "plan.png").exists()
