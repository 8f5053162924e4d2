"""A report shows what was recorded, all of it and nothing else, on a page that needs no
other file.
"""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image
from support.run_records import NASTY, PROBE, Records, full_records

from adaptive_batch.__main__ import main
from adaptive_batch.errors import SettingError
from adaptive_batch.report import read_records, write_report
from adaptive_batch.report.drawing import DARK, LIGHT, MARKS, Points
from adaptive_batch.report.page import facts_of, render
from adaptive_batch.report.run_figures import figures_of
from adaptive_batch.report.run_history import Timeline

EVERY_FIGURE = [
    "probe",
    "batch_size",
    "micro_batches",
    "lr",
    "loss-over-samples",
    "loss-over-time",
    "padding",
    "tokens-per-second",
    "peak-memory",
    "noise-scale",
]


def timeline_of(records: Records) -> Timeline:
    return Timeline.of([json.loads(line) for line in records.lines])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_report(full_records().write(tmp_path_factory.mktemp("run"), probe=PROBE))


@pytest.fixture(scope="module")
def page(written):
    return written[0].read_text()


def lines_of(figure):
    """What a figure draws: each named line with its points."""
    axes = Figure().subplots()
    figure.draw(axes)
    return {
        line.get_label(): [tuple(point) for point in line.get_xydata()] for line in axes.get_lines()
    }


def marks_in(figure):
    """The places of the marks above the axes, by their shape."""
    axes = Figure().subplots()
    figure.draw(axes)
    return {
        line.get_marker(): list(line.get_xdata())
        for line in axes.get_lines()
        if not line.get_clip_on()
    }


def figures_in(page: str) -> list[str]:
    return re.findall(r'<figure id="([^"]+)"', page)


# --- what is on the page


@pytest.mark.slow
def test_every_figure_is_there_when_its_numbers_are(page):
    assert figures_in(page) == EVERY_FIGURE
    assert "Not recorded" not in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "figures", "title"),
    [
        ("lr", {"lr"}, "learning rate"),
        ("loss", {"loss-over-samples", "loss-over-time"}, "loss over samples, loss over time"),
        ("padding_fraction", {"padding"}, "padding"),
        ("tokens_per_second_per_gpu", {"tokens-per-second"}, "tokens per second"),
    ],
)
def test_a_figure_without_numbers_is_left_out_and_named(metric, figures, title):
    records = Records()
    records.start()
    for number in range(1, 6):
        records.step(number, **{metric: None})
    page, _ = render(timeline_of(records), PROBE, name="run")
    constant = {"batch_size", "micro_batches", "lr"}
    absent = {"peak-memory", "noise-scale"} | constant
    assert set(figures_in(page)) == set(EVERY_FIGURE) - figures - absent
    same = re.search(r"The same in all steps: (.*?)\.</p>", page)
    assert same
    assert same[1].startswith("rows per step 16, micro-batches per step 1")
    assert ("learning rate" in same[1]) == (metric != "lr")
    missing = re.search(r"Not recorded, and so not shown: (.*?)\.</p>", page)
    assert missing
    assert title in missing[1]


@pytest.mark.slow
def test_each_kind_of_event_is_explained_and_marked_in_every_figure_over_the_run():
    records = full_records()
    records.add("limit", message="longer rows: a micro-batch holds 4", before=8, after=4)
    records.add("nonfinite_loss", message="step 601: the loss is nan", step=601, skipped=False)
    timeline = timeline_of(records)
    page, _ = render(timeline, PROBE, name="run")
    explained = re.search(r'<ul class="marks".*?</ul>', page, re.DOTALL)
    assert explained
    assert [event for event in MARKS if event in explained[0]] == list(MARKS)
    drawn, *_ = figures_of(timeline, PROBE)
    shapes = {marker for marker, _, _ in MARKS.values()}
    assert [figure.name for figure in drawn if set(marks_in(figure)) != shapes] == ["probe"]
    assert marks_in(drawn[1])[MARKS["restarted"][0]] == [timeline.steps[419].samples]


def test_a_bound_that_is_the_most_that_was_tried_has_a_plus():
    for most, shown in ((24, "24+"), (25, "24")):
        probe = {**PROBE, "maximum": most}
        assert dict(facts_of(timeline_of(Records()), probe))["bound"] == shown
        (figure, *_), *_ = figures_of(timeline_of(Records()), probe)
        assert f"The largest that fits has {shown} rows" in figure.description


def test_the_head_has_the_bound_of_a_reference_that_runs_apart():
    records = Records()
    records.start()
    for bound in (12, 9):
        records.add("reference_bound", message=f"reference: {bound} rows", max_batch_size=bound)
    assert dict(facts_of(timeline_of(records), None))["bound of the reference"] == "9"


def test_the_head_has_the_facts_of_the_run():
    facts = dict(facts_of(timeline_of(full_records()), PROBE))
    assert facts["rows"] == "4,096"
    assert (facts["epochs"], facts["steps"], facts["samples"]) == ("1", "600", "28,800")
    assert (facts["bound"], facts["first batch"], facts["last batch"]) == ("24", "16", "64")
    assert (facts["restarts"], facts["out of memory"]) == ("1", "1")
    assert facts["final val_loss"] == "2.467"
    assert facts["time"] == "5:36 min"  # ten hours between the stop and the restart are not in it


def test_a_short_last_step_is_not_taken_for_the_last_batch():
    records = Records()
    records.start()
    for number, rows in enumerate((16, 24, 24, 8), start=1):
        records.step(number, rows=rows)
    facts = dict(facts_of(timeline_of(records), None))
    assert (facts["first batch"], facts["last batch"]) == ("16", "24 (last step 8)")


def test_the_probe_shows_what_fits_what_does_not_and_the_budget():
    (figure, *_), *_ = figures_of(timeline_of(Records()), PROBE)
    shown = lines_of(figure)
    assert shown["fits"] == [(1, 2), (16, 9), (24, 13)]
    assert shown["does not fit"] == [(32, 14)]  # without a peak, where the budget ends
    assert {y for _, y in shown["budget 14.00 GiB"]} == {14}
    assert shown["bound: 24 rows"] == [(24, 13)]


def test_the_speed_of_micro_batches_is_drawn_where_they_were_timed():
    choices = (("grouped", 512, 900.0), ("packed", 512, 800.0), ("packed", 1024, 1000.0))
    timed = [
        {"kind": kind, "limit": {"amount": amount, "unit": "tokens"}, "tokens_per_second": rate}
        for kind, amount, rate in choices
    ]
    fastest = {**timed[-1], "trials": timed}
    drawn, *_ = figures_of(timeline_of(full_records(30)), {"throughput": fastest})
    (speed,) = [figure for figure in drawn if figure.name == "throughput"]
    assert "Fastest: packed, up to 1,024 tokens at once, 1,000 tokens/s." in speed.description
    lines = lines_of(speed)
    assert lines["packed"] == [(512, 800), (1024, 1000)]
    assert lines["chosen"] == [(1024, 1000)]


@pytest.mark.parametrize("damage", [{"trials": 3}, {"limit": None}, {"tokens_per_second": "x"}])
def test_timings_that_cannot_be_read_are_left_out(damage):
    trial = {"kind": "packed", "limit": {"amount": 8, "unit": "rows"}, "tokens_per_second": 1.0}
    throughput = {**trial, "trials": [trial], **damage}
    drawn, missing, _ = figures_of(timeline_of(full_records(30)), {"throughput": throughput})
    assert "throughput" not in [figure.name for figure in drawn]
    assert "Speed of micro-batches" in missing


def test_what_was_run_last_and_what_the_audit_says_is_on_the_page(tmp_path):
    records = Records()
    for seed in ("7", "8"):
        records.start()
        records.add("config", message="the configuration", settings={"seed": seed})
    records.step(1)
    page = write_report(records.write(tmp_path))[0].read_text()
    assert '<th scope="row">seed</th><td>8</td>' in page
    assert "<td>7</td>" not in page
    assert "<summary>Audit</summary><pre>run log" in page


@pytest.mark.parametrize("settings", [None, "text", 3, ["a"]])
def test_settings_that_cannot_be_read_are_left_out(tmp_path, settings):
    records = Records()
    records.start()
    records.add("config", message="the configuration", settings=settings)
    assert "What was run" not in write_report(records.write(tmp_path))[0].read_text()


def test_the_final_loss_is_the_mean_that_its_figure_ends_with():
    records = Records()
    records.start()
    for number in range(1, 31):
        records.step(number, loss=float(number))
    facts = dict(facts_of(timeline_of(records), None))
    assert facts["final loss"] == "28 (mean of 5 steps)"
    records.step(31, loss=None)
    records.step(32, loss=32.0)
    # Of the last five steps, one has no loss.
    assert dict(facts_of(timeline_of(records), None))["final loss"] == "29.75 (mean of 4 steps)"


def test_text_of_the_run_is_escaped_everywhere(tmp_path):
    records = Records()
    records.start()
    records.add("config", message=NASTY, settings={NASTY: NASTY})
    records.add(NASTY, message=f"{NASTY}\n{NASTY}", before=NASTY, after=1)
    records.step(1, loss=NASTY)
    folder = records.write(tmp_path / 'out<put>&"', probe={**PROBE, "sequence_length": NASTY})
    page = write_report(folder)[0].read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert "out<put>" not in page
    assert page.count("&lt;script&gt;") >= 4


def test_a_kind_that_is_recorded_very_often_is_cut_in_the_middle_and_says_so():
    records = Records()
    records.start()
    for number in range(1, 1001):
        records.add("validation", message=f"validated {number}.", val_loss=2.0)
    records.add("batch_size", message="batch_size 1 -> 2", before=1, after=2)
    page, _ = render(timeline_of(records), None, name="run")
    assert [f"validated {number}." in page for number in (1, 50, 51, 950, 951, 1000)] == [
        1,
        1,
        0,
        0,
        1,
        1,
    ]
    assert "900 more of the kind validation" in page
    assert "batch_size 1 -&gt; 2" in page


# --- the page alone


def test_the_page_refers_to_nothing_outside(page):
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(
        r"https?:|//\w+\.|src=|@import|<script|<iframe|<object|<embed", without_names
    )
    assert set(re.findall(r"url\(([^)])", without_names)) <= {"#"}
    references = re.findall(r'href="([^"]*)"', without_names)
    assert references
    assert all(reference.startswith("#") or reference == "data:," for reference in references)


def test_each_figure_is_xml_with_a_name_a_description_and_ids_of_its_own(page):
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 100
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        root = ElementTree.fromstring(svg)
        assert root.get("role") == "img"
        for name in root.get("aria-labelledby").split():
            assert re.search(rf'<(figcaption|p) id="{name}">[^<]+<', page), name
        here = {element.get("id") for element in root.iter() if element.get("id")}
        xlink = "{http://www.w3.org/1999/xlink}href"
        pointed = {element.get(xlink)[1:] for element in root.iter() if element.get(xlink)}
        pointed |= set(re.findall(r"url\(#([^)]+)\)", svg))
        assert pointed <= here


def test_each_colour_of_a_figure_has_one_for_a_dark_ground(page):
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert set(re.findall(r"(?:fill|stroke): (#\w+)", svg)) <= set(LIGHT.values())
    dark = page[page.index("prefers-color-scheme") :]
    for name, colour in LIGHT.items():
        assert f'[style*="stroke: {colour}"]{{stroke:{DARK[name]}!important}}' in dark
        assert f'[style*="fill: {colour}"]{{fill:{DARK[name]}!important}}' in dark


def test_the_picture_has_the_same_figures_and_is_not_blank(written):
    picture = Image.open(written[1]).convert("RGB")
    assert min(picture.size) > 1000
    found = {colour for count, colour in picture.getcolors(maxcolors=1 << 24) if count > 50}
    drawn = {
        tuple(bytes.fromhex(LIGHT[name][1:]))
        for name in ("blue", "vermilion", "green", "purple", "text")
    }
    assert drawn <= found
    assert (255, 255, 255) in found


# --- restarts


@pytest.mark.slow
def test_steps_that_a_restart_rolled_back_are_apart():
    timeline = timeline_of(full_records())
    assert [step.number for step in timeline.steps] == list(range(1, 601))
    assert [[step.number for step in stretch] for stretch in timeline.rolled_back] == [
        list(range(421, 481))
    ]
    page, _ = render(timeline, None, name="run")
    assert "Steps that restarts rolled back: 60." in page


def test_only_the_last_run_of_a_file_is_shown_and_that_is_said():
    records = full_records()
    records.start()
    records.samples = {0: 0}
    records.step(1)
    timeline = timeline_of(records)
    assert ([step.number for step in timeline.steps], timeline.other_runs) == ([1], 1)
    assert dict(facts_of(timeline, None))["restarts"] == "0"
    assert (
        "Only the last run of the file is shown; other runs in it: 1."
        in render(timeline, None, name="run")[0]
    )


def test_what_a_restart_rolled_back_is_not_marked_but_what_happened_stays_marked():
    records = Records()
    records.start()
    for number in range(1, 11):
        records.step(number)
    records.add("batch_size", message="taken", before=16, after=32)
    records.add("limit", message="out", before=16, after=8, out_of_memory=True)
    records.start(after=5, resumed=True)
    records.step(6)
    timeline = timeline_of(records)
    assert [(event, one.step, one.samples) for event, one in timeline.marked] == [
        ("out of memory", 10, 160),
        ("restarted", 5, 80),
    ]
    assert "(rolled back by a restart)" in render(timeline, None, name="run")[0]


def test_steps_whose_loss_is_not_finite_are_named_and_marked_once_each():
    records = Records()
    records.start()
    for number in range(1, 31):
        if number in (7, 20):
            records.add("nonfinite_loss", message=f"step {number}", step=number, skipped=False)
        records.step(
            number, **{7: {"loss": "nan"}, 8: {"loss": "nan"}, 9: {"loss": "-inf"}}.get(number, {})
        )
    timeline = timeline_of(records)
    wrong = [step.samples for step in timeline.steps if step.number in (7, 8, 9, 20)]
    marker, character, colour = MARKS["loss not finite"]
    page, _ = render(timeline, None, name="run")
    assert "Loss is NaN at step 7 (2 steps)." in page
    assert "Loss is infinite at step 9 (1 step)." in page
    assert f'style="color:var(--{colour})">{character}</span> loss not finite' in page
    drawn, *_ = figures_of(timeline, None)
    (loss,) = [figure for figure in drawn if figure.name == "loss-over-samples"]
    assert sorted(marks_in(loss)[marker]) == wrong
    assert colour == "red"


# --- what is not as it should be


def test_a_record_that_was_cut_at_any_byte_still_makes_a_timeline(tmp_path):
    whole = full_records(60).write(tmp_path) / "adaptive_batch" / "run.jsonl"
    content = whole.read_bytes()
    for size in range(0, len(content), 97):
        whole.write_bytes(content[:size] + b"\n" + content[size : size + 20])
        timeline = Timeline.of(read_records(whole))
        figures, missing, constants = figures_of(timeline, None)
        assert len(figures) + len(missing) + len(constants) == len(EVERY_FIGURE)


def test_torn_lines_and_numbers_that_are_none_still_make_a_page(tmp_path):
    records = Records()
    records.start()
    for number in range(1, 40):
        records.step(
            number, **({"loss": "nan"} if number == 7 else {"loss": "inf"} if number == 9 else {})
        )
    records.lines[20] = records.lines[20][:30]
    records.lines[22:22] = [
        "5",
        "null",
        "[]",
        '{"kind": 3}',
        '{"kind": "step"}',
        '{"kind": "x", "time": "soon"}',
        "\0\0",
    ]
    page = write_report(records.write(tmp_path))[0].read_text()
    assert "Values that are not finite: 2." in page
    assert "loss-over-samples" in figures_in(page)


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        *("nan", "-inf", 1e300, "text", 10**400),
        *(
            pytest.param(value, marks=pytest.mark.nightly)
            for value in ("inf", -1e300, 0, 1e-300, True, [])
        ),
    ],
)
def test_any_value_of_a_metric_makes_a_page(value):
    records = Records()
    records.start()
    for number in range(1, 4):
        records.step(
            number,
            loss=value,
            lr=value,
            padding_fraction=value,
            gradient_noise_scale=value,
            batch_size=value,
        )
    page, picture = render(
        timeline_of(records), {**PROBE, "budget_bytes": value, "max_batch_size": value}, name="run"
    )
    assert "loss-over-samples" in figures_in(page)
    assert Image.open(io.BytesIO(picture)).size[0] > 500


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_very_short_runs_make_a_page(tmp_path, num_steps):
    records = Records()
    records.start()
    for number in range(1, num_steps + 1):
        records.step(number)
    page = write_report(records.write(tmp_path))[0].read_text()
    assert ("No optimizer step is recorded." in page) == (num_steps == 0)
    assert ("loss-over-samples" in figures_in(page)) == (num_steps > 0)


def test_a_probe_alone_makes_a_page(tmp_path):
    folder = Records().write(tmp_path, probe=PROBE)
    (folder / "adaptive_batch" / "run.jsonl").unlink()
    page = write_report(folder)[0].read_text()
    assert figures_in(page) == ["probe"]
    assert "<h1>Probe report <small>" in page
    assert "No optimizer step" not in page


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", '{"trials": [3, {"batch_size": "x"}]}'),
        *(pytest.param(text, marks=pytest.mark.nightly) for text in ("", "{}", '{"trials": 3}')),
    ],
)
def test_a_probe_that_cannot_be_read_is_left_out(tmp_path, content):
    records = Records()
    records.start()
    records.step(1)
    folder = records.write(tmp_path)
    (folder / "adaptive_batch" / "probe.json").write_text(content)
    page = write_report(folder)[0].read_text()
    assert "probe" not in figures_in(page)
    assert "peak memory of trials" in page


def test_a_folder_without_a_run_is_refused_with_what_would_do(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(tmp_path)])
    assert exit_.value.code == 2
    assert (
        "holds neither adaptive_batch/run.jsonl nor a probe.json or estimate.json; give a run's"
        " output_dir" in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("output", ["report.png", "nowhere/report.html", "."])
def test_an_output_that_cannot_be_a_page_is_refused(tmp_path, output):
    full_records(12).write(tmp_path)
    with pytest.raises(
        SettingError, match=r"give a file that ends in \.html, in a folder that is there"
    ):
        write_report(tmp_path, output=tmp_path / output)


def test_the_command_says_where_page_and_picture_are(tmp_path, capsys):
    folder = full_records(12).write(tmp_path / "run")
    assert main(["report", str(folder), "--output", str(tmp_path / "look.html")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "look.html"),
        str(tmp_path / "look.png"),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "look.html", "look.png"}


def test_without_matplotlib_one_line_names_the_extra(tmp_path):
    folder = full_records(12).write(tmp_path)
    program = textwrap.dedent("""
        import sys
        sys.modules["matplotlib"] = None
        from adaptive_batch.__main__ import main
        sys.exit(main(["report", sys.argv[1]]))
        """)
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "pip install 'adaptive-batch[report]'" in line


# --- long runs


@given(y=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), window=st.integers(1, 70))
def test_the_running_mean_is_the_mean_of_the_values_before(y, window):
    means = Points.of(range(len(y)), y).running_mean(window).y
    assert len(means) == len(y)
    for place, mean in enumerate(means):
        values = y[max(0, place + 1 - window) : place + 1]
        assert mean == pytest.approx(math.fsum(values) / len(values), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [25_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_a_long_run_makes_a_small_page_soon_and_keeps_its_spike(tmp_path, num_steps):
    records = full_records(num_steps)
    place, step = next(
        (p, r)
        for p, line in enumerate(records.lines)
        if (r := json.loads(line)).get("step") == 12_345
    )
    records.lines[place] = json.dumps({**step, "loss": 123.25})
    folder = records.write(tmp_path, probe=PROBE)
    start = time.process_time()
    page, _ = write_report(folder)
    assert time.process_time() - start < 120  # 10 s for 100,000 steps on a quiet machine
    assert page.stat().st_size < 2_000_000
    assert "largest 123.2" in page.read_text()
    svg = re.search(r'<figure id="loss-over-samples".*?</svg>', page.read_text(), re.DOTALL)[0]
    curve = max(re.findall(r' d="(.*?)"', svg, re.DOTALL), key=len)
    heights = [float(point.split()[2]) for point in curve.strip().splitlines() if point[0] in "ML"]
    assert 1000 < len(heights) < 20_000
    assert (
        sum(height < min(heights) + 50 for height in heights) < 10
    )  # the spike alone is at the top


def run_command(*arguments, **environment):
    command = [sys.executable, "-m", "adaptive_batch", *arguments]
    return subprocess.run(
        command, capture_output=True, timeout=120, env={**os.environ, **environment}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [b"caf\xe9", "größe €".encode()], ids=["no UTF-8", "UTF-8"])
@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"PYTHONIOENCODING": "ascii"}, marks=pytest.mark.nightly),
        {"LC_ALL": "C", "PYTHONUTF8": "0"},
    ],
    ids=str,
)
def test_a_folder_of_any_name_is_reported_on_any_terminal(tmp_path, name, environment):
    folder = full_records(60).write(tmp_path / os.fsdecode(name))
    done = run_command("report", folder, **environment)
    assert done.returncode == 0, done.stderr.decode()
    assert (folder / "adaptive_batch" / "report.png").is_file()
    assert b"adaptive_batch/report.html" in done.stdout


def test_the_values_of_a_figure_are_shown_where_the_pointer_rests():
    records = full_records(60)
    text, _ = render(timeline_of(records), PROBE, name="run")
    steps = [json.loads(line) for line in records.lines]
    losses = {step["samples_seen"]: step["loss"] for step in steps if "samples_seen" in step}
    values = re.findall(r"<title>samples (\S+): loss of a step (\S+)</title>", text)
    assert len(values) == 30
    for samples, loss in values:
        assert losses[int(samples.replace(",", ""))] == pytest.approx(float(loss), rel=1e-3)


def test_a_reader_that_ends_early_ends_the_command_without_a_word(tmp_path):
    folder = full_records(60).write(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "adaptive_batch", "audit", str(folder)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=120)
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode == -signal.SIGPIPE
