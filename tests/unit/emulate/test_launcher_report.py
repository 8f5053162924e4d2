from adaptive_batch.emulate.launcher import report_lines

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


def test_each_device_of_a_process_has_a_row():
    lines = list(report_lines(report()))
    assert lines[3].split("  ")[0] == "process"
    assert " ".join(lines[4].split()) == "train.py 0 3 2.000 GiB 3.000 GiB 76.000 GiB 1"


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
