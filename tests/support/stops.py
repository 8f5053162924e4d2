"""Components that end a run, or fill its disk, at a chosen step, named by dotted paths; and the
copy of a run that a kill would have left.
"""

import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path

from torchtune.training import FullModelHFCheckpointer
from torchtune.training.metric_logging import DiskLogger

from adaptive_batch.report.auditing import RECORD


def ask_to_end(by=signal.SIGTERM):
    os.kill(os.getpid(), by)


class AskingToEnd(DiskLogger):
    """A log that asks its process to end when a step is logged, by a signal."""

    def __init__(self, log_dir, filename, at_step, by=signal.SIGTERM):
        super().__init__(log_dir, filename)
        self.at_step = at_step
        self.by = by

    def log_dict(self, payload, step):
        super().log_dict(payload, step)
        if step == self.at_step and "loss" in payload:
            ask_to_end(self.by)


class WaitingToBeAsked(DiskLogger):
    """A log that creates a file at a step, and waits there until its process is asked to end."""

    def __init__(self, log_dir, filename, at_step, file):
        super().__init__(log_dir, filename)
        self.at_step = at_step
        self.file = Path(file)

    def log_dict(self, payload, step):
        super().log_dict(payload, step)
        if step != self.at_step or "loss" not in payload:
            return
        handler = signal.getsignal(signal.SIGTERM)
        asked = []

        def note(number, frame):
            asked.append(number)
            handler(number, frame)

        signal.signal(signal.SIGTERM, note)
        self.file.touch()
        while not asked:
            time.sleep(0.01)


class AskingCheckpointer(FullModelHFCheckpointer):
    """A checkpointer that asks its process to end while it saves an epoch, or loads: epoch -1."""

    def __init__(self, *args, at_epoch, **rest):
        super().__init__(*args, **rest)
        self.at_epoch = at_epoch

    def load_checkpoint(self):
        if self.at_epoch == -1:
            ask_to_end()
        return super().load_checkpoint()

    def save_checkpoint(self, state_dict, epoch, **rest):
        if epoch == self.at_epoch:
            ask_to_end()
        super().save_checkpoint(state_dict, epoch, **rest)


class Limiting(DiskLogger):
    """A log after one step of which no file may grow beyond so many bytes, until after another
    step: a disk that is full.
    """

    def __init__(self, log_dir, filename, from_step, num_bytes, until_step):
        super().__init__(log_dir, filename)
        _, self.most = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.limits = {from_step: num_bytes, until_step: self.most}

    def log_dict(self, payload, step):
        super().log_dict(payload, step)
        if step in self.limits and "loss" in payload:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limits[step], self.most))


def stopped_after(finished, setup, step, *, taken_back=0):
    """A copy of a run as a kill would have left it `taken_back` steps after a step; returns its
    folder.
    """
    folder = setup.fresh_folder()
    shutil.copytree(finished.output_dir, folder, dirs_exist_ok=True)
    lines, saved = [], set()
    for line in (folder / RECORD).read_text().splitlines(keepends=True):
        record = json.loads(line)
        if record["kind"] == "step" and record["step"] > step + taken_back:
            break
        if record["kind"] in ("checkpoint", "resume_point"):
            saved.add(
                f"epoch_{record['epoch']}"
                if record["kind"] == "checkpoint"
                else f"step_{record['step']}"
            )
        lines.append(line)
    (folder / RECORD).write_text("".join(lines))
    for path in [*folder.glob("epoch_*"), *folder.glob("step_*")]:
        if path.name not in saved:
            shutil.rmtree(path)
    return folder
