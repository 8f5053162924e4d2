import os
import subprocess
import sys

import pytest

from adaptive_batch import SettingError
from adaptive_batch.__main__ import emulated_device, main
from adaptive_batch.emulate import launcher
from adaptive_batch.emulate.launcher import report_lines
from adaptive_batch.emulate.process import SOURCES


@pytest.mark.parametrize("text", ["24GiB", "24 gib", "25769803776B"])
def test_a_size_has_the_kernels_of_its_architecture(text):
    device = emulated_device(text, "sm_89")
    assert (device.total_bytes, device.capability) == (24 * 2**30, 89)
    assert device.multiprocessors > 0
    assert device.setting.count(",") == 3


@pytest.mark.parametrize(
    ("text", "architecture", "message"),
    [
        ("h1000", "sm_80", "--device='h1000': give a size .* H100"),
        ("400MiB", "sm_80", "--device='400MiB': the CUDA context needs more"),
        ("MI300X", "sm_80", "--device='MI300X': it does not run CUDA"),
        ("24GiB", "sm_999", "--architecture='sm_999': give one of sm_100, sm_120"),
    ],
)
def test_an_unknown_device_is_refused(text, architecture, message):
    with pytest.raises(SettingError, match=message):
        emulated_device(text, architecture)


@pytest.mark.parametrize("arguments", [["--device", "h100"], ["--device", "h1000", "--", "python"]])
def test_a_missing_program_and_an_unknown_device_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["emulate", *arguments])
    assert exit_.value.code == 2
    assert f"--device='{arguments[1]}': give " in capsys.readouterr().err


def test_the_list_has_the_devices_with_cuda(capsys):
    assert main(["emulate", "--list"]) == 0
    said = capsys.readouterr().out
    assert "H100           sm_90" in said
    assert "MI300X" not in said


GIB = 2**30


def report(**process):
    record = {
        "program": ["/home/me/train.py"],
        "rank": None,
        "steps": 3,
        "devices": [{"index": 0, "allocated": 2 * GIB, "reserved": 3 * GIB, "retries": 1}],
        "living": {"bytes": 2 * GIB, "device": 0, "lines": [["train.py:5", 2 * GIB]]},
        "out_of_memory": None,
        "times_out_of_memory": 0,
        "made_up": [],
        "not_counted": [],
    }
    return {
        "device": "NVIDIA H100",
        "total_bytes": 80 * GIB,
        "context_bytes": GIB,
        "seconds": 4.0,
        "processes": [record | process],
        "files": [],
        "folder": None,
        "ended_by_time_limit": False,
    }


def ran_out(asked, reserved, lines):
    last = {"line": "a.py:1", "asked": asked, "free": GIB, "allocated": 60 * GIB}
    living = {"bytes": 60 * GIB, "device": 0, "lines": lines}
    return report(out_of_memory=last | {"reserved": reserved}, times_out_of_memory=2, living=living)


def test_the_remedy_depends_on_the_holder_of_memory():
    cases = {
        "expandable_segments": ran_out(2 * GIB, 70 * GIB, []),
        "LoRA": ran_out(2 * GIB, 61 * GIB, [["optimizer: a.py:9", 40 * GIB]]),
        "batch size": ran_out(2 * GIB, 61 * GIB, [["model.py:9", 40 * GIB]]),
    }
    for word, case in cases.items():
        lines = "\n".join(report_lines(case))
        assert "Out of memory 2 times, the last at a.py:1: 2.000 GiB requested" in lines
        assert word in lines


def test_inexact_parts_are_named():
    made_up = [["shape", "topk", "a.py:3", 7], ["value", "addmm", "a.py:9", 1]]
    lines = "\n".join(report_lines(report(made_up=made_up, not_counted=["cudnnX"])))
    assert "their peak is a guess: a.py:3 (topk)." in lines
    assert "they were not computed: a.py:9 (addmm)." in lines
    assert "cudnnX" in lines


@pytest.mark.parametrize(
    ("script", "minutes", "result"),
    [
        ("sleep 60", 0.01, (0, True)),
        ("sleep 1; kill -INT $PPID; sleep 60", None, (143, False)),
        ("sleep 1; kill -INT $PPID; sleep 60", 1, (143, False)),
        ("exit 3", 1, (3, False)),
    ],
)
def test_ctrl_c_is_not_a_time_limit(script, minutes, result, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "SECONDS_TO_END", 0.2)
    command = ["sh", "-c", f"trap '' INT; {script}"]
    assert launcher._run(command, tmp_path, dict(os.environ), minutes) == result


APPENDS = "import sys; open('log.txt', 'a').write(sys.argv[1])"


@pytest.fixture(params=["", "-D_FORTIFY_SOURCE=3"])
def preloaded(request, tmp_path):
    library = tmp_path / "scratch.so"
    flags = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    command = ["gcc", *flags, *request.param.split(), SOURCES / "scratch.c", "-o", library, "-ldl"]
    subprocess.run(command, check=True)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    variables = {"LD_PRELOAD": str(library), "EMULATE_SCRATCH": str(scratch)}
    return scratch, {**os.environ, **variables}


def test_simultaneous_writes_are_kept_and_the_original_is_not_changed(preloaded, tmp_path):
    scratch, environment = preloaded
    own = tmp_path / "log.txt"
    own.write_text("own")
    (scratch / "log.txt").symlink_to(own)
    programs = [
        subprocess.Popen([sys.executable, "-c", APPENDS, text], cwd=scratch, env=environment)
        for text in "abcd"
    ]
    assert [program.wait() for program in programs] == [0] * 4
    assert own.read_text() == "own"
    written = (scratch / "log.txt").read_text()
    assert (written[:3], sorted(written[3:])) == ("own", list("abcd"))


def test_a_link_of_the_program_stays_a_link(preloaded):
    scratch, environment = preloaded
    script = "echo one > run.log; ln -s run.log latest.log; echo two >> latest.log; cat run.log"
    done = subprocess.run(
        ["sh", "-c", script], cwd=scratch, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "one\ntwo\n"
    assert (scratch / "latest.log").is_symlink()
