"""The report shows all recorded values of a run on a self-contained page."""

import base64
import io
import json
import math
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from adaptive_batch.__main__ import main
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import GIB
from adaptive_batch.probe import ProbeResult, Trial
from adaptive_batch.report import read_records, write_report
from adaptive_batch.report.page import points, run_facts, run_panels, search_panel
from adaptive_batch.report.run_log import last_run

NASTY = "<script>alert(\"x\")</script> & <b>bold</b> 'quoted'"
SEARCH = ProbeResult(
    max_batch_size=24,
    batch_size=16,
    trials=(
        Trial(1, True, 2 * GIB, GIB),
        Trial(32, False),
        Trial(24, True, 13 * GIB, GIB),
        Trial(16, True, 9 * GIB, GIB),
    ),
    seconds=(0.1, 0.2, 0.3, 0.2),
    sequence_length=512,
    resident_bytes=GIB,
    budget_bytes=14 * GIB,
)


class Records:
    """Lines of a made-up ``run.jsonl``, half a second apart."""

    def __init__(self):
        self.lines = []
        self.time = 1_790_000_000.0
        self.samples = {0: 0}

    def add(self, kind, **values):
        self.time += 0.5
        self.lines.append(json.dumps({"kind": kind, "time": self.time, **values}))

    def start(self, *, after=0, resumed=False):
        self.add(
            "start",
            message="going on" if resumed else "starting",
            resumed=resumed,
            rows=4096,
            progress={"epoch": 0, "steps": after},
        )

    def step(self, number, *, rows=16, **values):
        self.samples[number] = self.samples[number - 1] + rows
        shared = {
            "loss": 2 + 5 * math.exp(-number / 200) + 0.3 * math.sin(number * 1.7),
            "lr": 1e-3,
            "tokens_per_second_per_gpu": 5000 + 800 * math.sin(number),
            "batch_size": rows,
            "micro_batches": 1,
            "padding_fraction": 0.3 + 0.1 * math.sin(number * 2.3),
            "samples_seen": self.samples[number],
            "tokens_seen": 90 * self.samples[number],
            "oom_count": 0,
        }
        self.add(
            "step", step=number, epoch=0, position=self.samples[number], **{**shared, **values}
        )

    def write(self, output_dir: Path) -> Path:
        folder = output_dir / "adaptive_batch"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.jsonl").write_text("".join(line + "\n" for line in self.lines))
        return output_dir


def full_records(num_steps: int = 600) -> Records:
    """Return records of a run with growth, an OOM, validation, saves, preemption and a restart
    that repeats a tenth of the steps.
    """
    records, grow, fail, stop = Records(), num_steps // 3, num_steps // 2, 4 * num_steps // 5
    again = stop - num_steps // 10
    records.start()
    table = "probe of the largest batch:\n rows  fits\n   24   yes"
    records.add("bound", message=table, max_batch_size=24, search=SEARCH.record())
    records.add("no_effect", message=f"a key has no effect: {NASTY}")

    def run(first, last):
        for number in range(first, last + 1):
            if number == grow + 1:
                records.add("batch_size", message="batch_size 16 -> 64", before=16, after=64)
            if number == fail + 1:
                message = "out of memory with 16 rows of 512 tokens at once"
                records.add("limit", message=message, before=16, after=8, out_of_memory=True)
            rows = 16 if number <= grow else 64
            values = {
                "micro_batches": rows // (16 if number <= fail else 8),
                "oom_count": int(number > fail),
                "lr": 1e-3 * min(1, number / 50) * (1 - number / num_steps / 2),
                "peak_memory_reserved": 13.5,
                "peak_memory_active": 11.0 + rows / 64,
                "peak_memory_alloc": 11.2 + rows / 64,
            }
            if number > 20:
                values["gradient_noise_scale"] = 8 + number / 10
            if number % 4 == 0:
                values["loss_per_full_batch"] = 2 + 5 * math.exp(-number / 200)
            records.step(number, rows=rows, **values)
            if number % (num_steps // 6) == 0:
                message, val_loss = f"step {number}: val_loss", 2.4 + 40 / number
                records.add("validation", message=message, steps=number, val_loss=val_loss)
            if number == again:
                records.add("resume_point", message=f"step {number} saved", step=number)

    run(1, stop)
    records.add("preempted", message="asked to stop")
    records.time += 36_000
    records.start(after=again, resumed=True)
    run(again + 1, num_steps)
    records.add("checkpoint", message="epoch 0 saved", epoch=0, steps=num_steps)
    return records


def run_of(records: Records):
    return last_run([json.loads(line) for line in records.lines])[0]


def short(num_steps=5, **values) -> Records:
    records = Records()
    records.start()
    for number in range(1, num_steps + 1):
        records.step(number, **values)
    return records


def test_the_page_begins_with_a_summary_of_the_run():
    found = run_facts(run_of(full_records()))
    assert found["rows"] == "4,096"
    assert (found["epochs"], found["steps"], found["samples"]) == ("1", "600", "28,800")
    assert (found["bound"], found["restarts"], found["out of memory"]) == ("24", "1", "1")
    assert found["final val_loss"] == "2.467"
    assert run_facts(run_of(Records()))["steps"] == "0"


def test_all_text_is_escaped(tmp_path):
    records = Records()
    records.start()
    records.add("config", message=NASTY)
    records.add(NASTY, message=f"{NASTY}\n{NASTY}", before=NASTY, after=1)
    records.step(1, loss=NASTY)
    folder = records.write(tmp_path / 'out<put>&"')
    page = write_report(folder)[0].read_text()
    assert "<h2>Audit</h2>\n<pre>run log" in page
    assert "<script" not in page
    assert "<b>" not in page
    assert "out<put>" not in page
    assert page.count("&lt;script&gt;") == 4


def test_names_and_messages_that_utf8_cannot_encode_are_escaped(tmp_path):
    records = short(1)
    records.add("config", message="\udcff")
    # This is invalid mathematical text to matplotlib.
    folder = records.write(tmp_path / "run\udcff$\\frac$")
    page = write_report(folder)[0].read_text()
    assert "<h1>run\\udcff$\\frac$</h1>" in page
    assert "<td>\\udcff</td>" in page


def test_a_page_does_not_get_the_name_of_its_picture(tmp_path):
    folder = short(1).write(tmp_path)
    with pytest.raises(SettingError, match=r"--output=.*the picture gets this name"):
        write_report(folder, output=tmp_path / "report.png")


def test_the_trials_of_the_last_search_in_training_are_drawn():
    earlier = replace(SEARCH, trials=(Trial(2, True, GIB, GIB),)).record()
    records = Records()
    records.start()
    records.add("bound", search=earlier)
    records.add("bound", search=SEARCH.record())
    records.add("validation_bound", search=earlier)
    axes = Figure().subplots()
    search_panel(run_of(records))["Trials of the search"](axes)
    fits, fails = (trials.get_offsets().tolist() for trials in axes.collections)
    assert fits == [[1, 2], [24, 13], [16, 9]]
    # A trial that ran out of memory has no peak, and is drawn at the budget.
    assert fails == [[32, 14]]


def test_a_running_mean_ends_at_the_last_step_and_one_large_value_makes_a_logarithmic_scale():
    records = short(79)
    records.step(80, loss=1e6)
    records.step(81, loss=1e300)
    axes = Figure().subplots()
    run = run_of(records)
    run_panels(run)["Loss"](axes)
    values, means = axes.lines
    assert (means.get_xdata()[0], means.get_xdata()[-1], values.get_xdata()[-1]) == (2, 80, 80)
    assert means.get_ydata()[-1] == pytest.approx(sum(values.get_ydata()[-2:]) / 2)
    assert axes.get_yscale() == "log"


def test_the_page_embeds_the_picture_and_has_no_external_reference(tmp_path):
    path, picture_path = write_report(full_records().write(tmp_path))
    page = path.read_text()
    assert not re.search(r"https?:|//\w+\.|@import|<script|<iframe|<object|<embed", page)
    assert re.findall(r'href="([^"]*)"', page) == ["data:,"]
    (source,) = re.findall(r'src="([^"]*)"', page)
    picture = base64.b64decode(source.removeprefix("data:image/png;base64,"))
    assert picture == picture_path.read_bytes()
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    assert min(image.size) > 1000
    assert len([1 for count, _ in image.getcolors(maxcolors=1 << 24) if count > 50]) > 20


def test_rolled_back_steps_are_not_drawn_but_events_are_marked(tmp_path):
    records = short(10)
    records.step(11, loss="nan")
    records.add("batch_size", message="taken", before=16, after=32)
    records.add("limit", message="out", before=16, after=8, out_of_memory=True)
    records.start(after=5, resumed=True)
    facts = run_facts(run_of(records))
    assert (facts["samples"], facts["steps without a finite loss"]) == ("80", "0")
    records.step(6, rows=32)
    run = run_of(records)
    numbers = [1, 2, 3, 4, 5, 6]
    assert points(run, "batch_size") == list(zip(numbers, [16] * 5 + [32], strict=True))
    page = write_report(records.write(tmp_path))[0].read_text()
    assert "(rolled back by a restart) taken" in page
    assert "<dt>steps rolled back</dt><dd>6</dd>" in page


def test_a_log_cut_at_any_byte_is_drawn(tmp_path):
    whole = full_records(60).write(tmp_path) / "adaptive_batch" / "run.jsonl"
    content = whole.read_bytes()
    for size in range(0, len(content), 97):
        whole.write_bytes(content[:size] + b"\n" + content[size : size + 20])
        run, _ = last_run(read_records(whole))
        num_steps = sum(entry.kind == "step" for entry in run.entries)
        assert ("Loss" in run_panels(run)) == bool(num_steps)
    assert ", 2 of them torn" in write_report(tmp_path)[0].read_text()


def test_the_first_and_the_last_of_many_events_are_listed(tmp_path):
    records = short(1)
    for number in range(2000):
        records.add("validation", message=f"number {number};")
    page = write_report(records.write(tmp_path))[0].read_text()
    assert "number 0;" in page
    assert "number 1999;" in page
    assert page.count("<td>validation</td>") == 999


def test_the_command_prints_the_paths_or_refuses_a_folder_without_a_run(tmp_path, capsys):
    folder = full_records(12).write(tmp_path / "run")
    assert main(["report", str(folder), "--output", str(tmp_path / "look.html")]) == 0
    files = [str(tmp_path / "look.html"), str(tmp_path / "look.png")]
    assert capsys.readouterr().out.splitlines() == files
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(tmp_path)])
    assert exit_.value.code == 2
    assert "OUTPUT_DIR" in capsys.readouterr().err


def test_a_missing_matplotlib_is_reported_with_the_extra(tmp_path):
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


NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_shows_the_picture_and_the_text_of_the_run(tmp_path, width):
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    assert chromium, "no chromium on PATH: apt-get install chromium"
    page, picture = write_report(full_records().write(tmp_path / "run"))
    shot = tmp_path / "shot.png"
    command = [chromium, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
    size = f"--window-size={width},1600"
    subprocess.run([*command, size, f"--screenshot={shot}", page.as_uri()], check=True, timeout=120)
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], check=True, timeout=120, capture_output=True
    )
    shown = Image.open(shot).convert("RGB")
    assert shown.size[0] == width
    colours = Image.open(picture).convert("RGB").getcolors(1 << 24)
    drawn = {colour for count, colour in colours if count > 500}
    # The page shows the blue of the curves and other colours.
    assert len(drawn & {colour for _, colour in shown.getcolors(1 << 24)}) > 3
    text = done.stdout.decode()
    assert NASTY.replace("<", "&lt;").replace(">", "&gt;").replace("&b", "&amp;b")[:14] in text
    assert "<script" not in text
