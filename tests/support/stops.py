"""Components that end a run, or fill its disk, at a chosen step, named by dotted paths; and the
copy of a run that a kill would have left.
"""

import ctypes
import json
import resource
import shutil
import signal
import time
from pathlib import Path

from support.cli import block
from torchtune.training import FullModelHFCheckpointer
from torchtune.training.metric_logging import DiskLogger

from adaptive_batch.report.auditing import RECORD


def asks_at_step(step, by=signal.SIGTERM):
    """The overrides of a run that gets a signal when it has logged a step."""
    return block("metric_logger", "support.stops.AskingToEnd", at_step=step, by=int(by))


def asks_in_epoch(epoch):
    """The overrides of a run that is asked to end as it saves an epoch, or as it loads: -1."""
    return block("checkpointer", "support.stops.AskingCheckpointer", at_epoch=epoch)


class ActingLogger(DiskLogger):
    """A log that acts once a step is logged; further arguments are its attributes."""

    def __init__(self, log_dir, filename, **options):
        super().__init__(log_dir, filename)
        vars(self).update(options)

    def log_dict(self, payload, step):
        super().log_dict(payload, step)
        if "loss" in payload:
            self.act(step)


class AskingToEnd(ActingLogger):
    """A log that sends its process the signal `by` at step `at_step`."""

    def act(self, step):
        if step == self.at_step:
            signal.raise_signal(self.by)


class WaitingToBeAsked(ActingLogger):
    """A log that creates `file` at `at_step`, and waits there until its process is asked to end."""

    def act(self, step):
        if step != self.at_step:
            return
        handler = signal.getsignal(signal.SIGTERM)
        asked = []

        def note(number, frame):
            asked.append(number)
            handler(number, frame)

        signal.signal(signal.SIGTERM, note)
        Path(self.file).touch()
        while not asked:
            time.sleep(0.01)


class FillingDisk(ActingLogger):
    """A log that limits files to `num_bytes` from step `from_step` until step `until_step`."""

    def act(self, step):
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        limits = {self.from_step: self.num_bytes, self.until_step: most}
        if step in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[step], most))


class TakingMemory(ActingLogger):
    """A log that leaves the process, after a step, only `bytes_left` more of address space than it
    has. The C library returns freed memory at once: what it keeps could be enough for further
    steps.
    """

    def __init__(self, log_dir, filename, **options):
        super().__init__(log_dir, filename, **options)
        assert ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD of malloc.h

    def act(self, step):
        if step == self.after_step:
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (held + self.bytes_left, most))


class AskingCheckpointer(FullModelHFCheckpointer):
    """A checkpointer that asks its process to end while it saves an epoch, or loads: epoch -1."""

    def __init__(self, *args, at_epoch, **rest):
        super().__init__(*args, **rest)
        self.at_epoch = at_epoch

    def load_checkpoint(self):
        if self.at_epoch == -1:
            signal.raise_signal(signal.SIGTERM)
        return super().load_checkpoint()

    def save_checkpoint(self, state_dict, epoch, **rest):
        if epoch == self.at_epoch:
            signal.raise_signal(signal.SIGTERM)
        super().save_checkpoint(state_dict, epoch, **rest)


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
        if record["kind"] == "checkpoint":
            saved.add(f"epoch_{record['epoch']}")
        if record["kind"] == "resume_point":
            saved.add(f"step_{record['step']}")
        lines.append(line)
    (folder / RECORD).write_text("".join(lines))
    for path in [*folder.glob("epoch_*"), *folder.glob("step_*")]:
        if path.name not in saved:
            shutil.rmtree(path)
    return folder
