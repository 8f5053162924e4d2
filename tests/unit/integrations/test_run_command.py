"""`adaptive-batch run` adopts the trainers of an unchanged program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import adaptive_batch
from adaptive_batch.__main__ import main

PROGRAM = """
import importlib.util, sys
import torch
from torch import nn
importlib.util.find_spec("transformers.trainer")
from transformers import Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)

    def forward(self, x, y):
        if len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"loss": (self.linear(x).squeeze(1) - y).square().mean()}

rows = [{"x": torch.randn(4), "y": torch.randn(())} for _ in range(12)]
arguments = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=6, max_steps=2, report_to="none", use_cpu=True,
    save_strategy="no", disable_tqdm=True, logging_steps=1,
)
trainer = Trainer(Model(), arguments, train_dataset=rows)
trainer.train()
print(type(trainer).__name__, trainer.adaptive_step.num_micro_batches)
"""


def run(tmp_path, *command, **environment):
    (tmp_path / "train.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, "-m", "adaptive_batch", "run", *command],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_program_trains_if_half_of_its_batch_fits(tmp_path):
    done = run(tmp_path, "--", sys.executable, "train.py", "output")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Trainer 2"
    assert "adopted Trainer: its steps split when out of memory" in done.stderr
    assert "out of memory with 6 rows" in done.stderr
    assert "no Transformers Trainer" not in done.stderr


def test_a_child_process_is_adopted_with_the_given_size(tmp_path):
    child = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, 'train.py', 'out']))"
    done = run(tmp_path, "--micro-batch-size", "2", "--", sys.executable, "-c", child)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Trainer 3"
    assert "(micro_batch_size=2)" in done.stderr


def test_the_exit_status_is_that_of_the_program_and_one_line_reports_no_adoption(tmp_path):
    done = run(tmp_path, "--", sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 7
    assert done.stderr.splitlines() == [
        "adaptive-batch run: the program trained no Transformers Trainer in micro-batches; start it"
        " without -S, -I and -E and keep its PYTHONPATH, or use AdaptiveStep for other loops"
    ]


def test_a_sitecustomize_of_the_program_runs_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('own sitecustomize')")
    program = "import sys; print(sys.modules.keys() & {'subprocess', 'torch', 'transformers'})"
    done = run(
        tmp_path,
        "--",
        sys.executable,
        "-c",
        program,
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    )
    assert done.stdout.splitlines()[-2:] == ["own sitecustomize", "set()"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--micro-batch-size", "0", "--", "true"], "micro_batch_size=0"),
        (["--micro-batch-size", "2", "--micro-batch-tokens", "8", "--", "true"], "micro_batch"),
        (["--micro-batch-size", "many", "--", "true"], "micro_batch_size='many'"),
        (["--headroom", "2", "--", "true"], "headroom=2"),
        (["--device-memory", "much", "--", "true"], "device_memory='much'"),
        (["--loss-reduction", "max", "--", "true"], "loss_reduction='max'"),
        (["--micro-batch-size", "2"], "give the program after --"),
        (["--micro-batch-sise", "2", "--", "true"], "unrecognized arguments: --micro-batch-sise"),
    ],
)
def test_invalid_arguments_are_refused_before_the_program_starts(arguments, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["run", *arguments])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("hooks", [{}, {"ADAPTIVE_BATCH_HOOKS": "/gone/hook.py"}])
def test_python_starts_without_a_message_if_a_hook_is_missing(hooks):
    inject = Path(adaptive_batch.__file__).with_name("inject")
    done = subprocess.run(
        [sys.executable, "-c", "print(1)"],
        env={**os.environ, "PYTHONPATH": str(inject), **hooks},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_the_error_names_a_program_that_cannot_start(capsys):
    assert main(["run", "--", "no-such-program"]) == 1
    assert "no-such-program cannot be started" in capsys.readouterr().err
