"""The report shows all recorded values of a run on a self-contained page."""

import base64
import html
import io
import json
import math
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from PIL import Image
from support.targets import counted

from adaptive_batch.__main__ import main
from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import Change, LengthEstimate, MemoryEstimate, Target
from adaptive_batch.estimate.fake_step import Resident
from adaptive_batch.memory import GIB, Line, MemoryCurve
from adaptive_batch.probe import ProbeResult, Trial
from adaptive_batch.report import read_records, write_estimate_picture, write_report
from adaptive_batch.report.page import RunData, run_facts, run_panels
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
PROBE = {"format": 1, "fingerprint": "0", **SEARCH.record(), "earlier": []}


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

    def write(self, output_dir: Path, *, probe=None) -> Path:
        folder = output_dir / "adaptive_batch"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.jsonl").write_text("".join(line + "\n" for line in self.lines))
        if probe is not None:
            (folder / "probe.json").write_text(json.dumps(probe))
        return output_dir


def full_records(num_steps: int = 600) -> Records:
    """Growth, an out-of-memory error, validation, saving, pre-emption and a restart that takes a
    tenth of the run back.
    """
    records, grow, fail, stop = Records(), num_steps // 3, num_steps // 2, 4 * num_steps // 5
    again = stop - num_steps // 10
    records.start()
    table = "probe of the largest batch:\n rows  fits\n   24   yes"
    records.add("bound", message=table, max_batch_size=24)
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


def facts(records: Records, search=None):
    return run_facts(RunData.from_entries(run_of(records).entries), search)


def short(num_steps=5, **values) -> Records:
    records = Records()
    records.start()
    for number in range(1, num_steps + 1):
        records.step(number, **values)
    return records


def test_the_page_begins_with_the_facts_of_the_run():
    found = facts(full_records(), SEARCH)
    assert found["rows"] == "4,096"
    assert (found["epochs"], found["steps"], found["samples"]) == ("1", "600", "28,800")
    assert (found["bound"], found["first batch"], found["last batch"]) == ("24", "16", "64")
    assert (found["restarts"], found["out of memory"]) == ("1", "1")
    assert found["final val_loss"] == "2.467"
    # Without the ten hours between the stop and the restart.
    assert found["time"] == "0:05:36"
    assert facts(Records(), replace(SEARCH, maximum=24))["bound"] == "24+"


def test_the_bound_is_that_of_training_not_of_validation(tmp_path):
    records = short(1)
    for kind, rows in (("bound", 24), ("reference_bound", 16)):
        records.add(kind, message="", search=replace(SEARCH, max_batch_size=rows).record())
    assert "<dt>bound</dt><dd>24</dd>" in write_report(records.write(tmp_path))[0].read_text()


def test_all_text_is_escaped(tmp_path):
    records = Records()
    records.start()
    records.add("config", message=NASTY, settings={NASTY: NASTY})
    records.add(NASTY, message=f"{NASTY}\n{NASTY}", before=NASTY, after=1)
    records.step(1, loss=NASTY)
    folder = records.write(tmp_path / 'out<put>&"', probe={**PROBE, "sequence_length": NASTY})
    page = write_report(folder)[0].read_text()
    assert "<h2>Audit</h2>\n<pre>run log" in page
    assert "<script" not in page
    assert "<b>" not in page
    assert "out<put>" not in page
    assert page.count("&lt;script&gt;") >= 4


def test_the_page_embeds_the_picture_and_has_no_external_reference(tmp_path):
    path, picture_path = write_report(full_records().write(tmp_path, probe=PROBE))
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
    records.add("batch_size", message="taken", before=16, after=32)
    records.add("limit", message="out", before=16, after=8, out_of_memory=True)
    records.start(after=5, resumed=True)
    records.step(6, rows=32)
    data = RunData.from_entries(run_of(records).entries)
    samples = [16, 32, 48, 64, 80, 112]
    assert data.points("batch_size") == list(zip(samples, [16] * 5 + [32], strict=True))
    assert data.marks() == [("out of memory", 160), ("restarted", 80)]
    page = write_report(records.write(tmp_path))[0].read_text()
    assert "(rolled back by a restart) taken" in page
    assert "<dt>steps rolled back</dt><dd>5</dd>" in page


def test_a_log_cut_at_any_byte_is_drawn(tmp_path):
    whole = full_records(60).write(tmp_path) / "adaptive_batch" / "run.jsonl"
    content = whole.read_bytes()
    for size in range(0, len(content), 97):
        whole.write_bytes(content[:size] + b"\n" + content[size : size + 20])
        run, _ = last_run(read_records(whole))
        panels = {panel.title for panel in run_panels(RunData.from_entries(run.entries))}
        num_steps = sum(entry.kind == "step" for entry in run.entries)
        assert ("Loss" in panels) == bool(num_steps)
    assert ", 2 of them torn" in write_report(tmp_path)[0].read_text()


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"trials": [3, {"batch_size": "x"}]}', '{"trials": 3}']
)
def test_a_search_alone_has_a_page_and_an_invalid_one_is_skipped(tmp_path, content):
    folder = short(1).write(tmp_path, probe=PROBE)
    (folder / "adaptive_batch" / "probe.json").write_text(content)
    assert write_report(folder)[1].stat().st_size
    folder = Records().write(tmp_path, probe=PROBE)
    (folder / "adaptive_batch" / "run.jsonl").unlink()
    page = write_report(folder)[0].read_text()
    assert "<dt>bound</dt><dd>24</dd>" in page
    assert "<dt>steps</dt>" not in page


def test_a_search_that_cannot_be_read_is_replaced_by_probe_json_or_reported(tmp_path, caplog):
    old = {key: value for key, value in PROBE.items() if key != "counts_eager"}
    records = Records()
    records.start()
    records.add("bound", message="", search=old)
    folder = records.write(tmp_path, probe=PROBE)
    assert "<dt>bound</dt><dd>24</dd>" in write_report(folder)[0].read_text()
    assert "a search cannot be read, and is left out: it lacks counts_eager" in caplog.text
    records.write(tmp_path, probe=old)
    (folder / "adaptive_batch" / "run.jsonl").unlink()
    with pytest.raises(SettingError, match=r"probe\.json or estimate\.json that this version can"):
        write_report(folder)


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
    page, picture = write_report(full_records().write(tmp_path / "run", probe=PROBE))
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
    # The blue of curves, and several others, are seen on the page.
    assert len(drawn & {colour for _, colour in shown.getcolors(1 << 24)}) > 3
    text = done.stdout.decode()
    assert NASTY.replace("<", "&lt;").replace(">", "&gt;").replace("&b", "&amp;b")[:14] in text
    assert "<script" not in text


def length_of(tokens):
    """An estimate of 4 GiB and half a GiB for each row, or 3.2 GiB and one."""
    lines = ((4.0, 0.5), (3.2, 1.0))
    curve = MemoryCurve(
        tuple(
            Line(Fraction(int(fixed * GIB)), Fraction(int(each * GIB)), number)
            for number, (fixed, each) in enumerate(lines)
        )
    )
    resident = Resident(GIB, GIB // 1000, 2 * GIB, GIB // 8)
    return LengthEstimate(tokens, resident, curve, curve.peak_bytes(1), 3 * GIB)


def estimate_of(*tokens):
    lengths = tuple(map(length_of, tokens))
    targets = [Target(name, 80 * GIB, gib * GIB) for name, gib in (("H100", 75), ("L4", 20))]
    return MemoryEstimate(
        tuple(counted(target, lengths, maximum=4096) for target in targets),
        4096,
        lengths=lengths,
        left_out=("a <thing>",),
        changes=(Change(("enable=True",), "more <compute>", (None, 30)),),
    )


@pytest.mark.parametrize("tokens", [(512,), (512, 1024, 2048)], ids=len)
def test_the_picture_is_not_blank(tmp_path, tokens):
    write_estimate_picture(estimate_of(*tokens), tmp_path / "estimate.png")
    picture = Image.open(tmp_path / "estimate.png").convert("RGB")
    assert (picture.size[0] > 1000) == (len(tokens) > 1)
    colours = picture.getcolors(maxcolors=1 << 24)
    assert len({colour for count, colour in colours if count > 500}) >= 4


def test_an_estimate_alone_has_a_page_with_its_tables(tmp_path):
    estimate = estimate_of(512, 2048)
    estimate.save(tmp_path / "adaptive_batch" / "estimate.json")
    page = write_report(tmp_path)[0].read_text()
    assert html.escape(estimate.table()) in page
    assert "more &lt;compute&gt;" in page
    assert "left out: a &lt;thing&gt;" in page
    assert "<dt>steps</dt>" not in page
