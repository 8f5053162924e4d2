"""Components named by dotted paths that end a run or limit its resources at a chosen step, and a
copy of a run in the state after a kill.
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

from adaptive_batch.report.run_log import RECORD


def asks_at_step(step, by=signal.SIGTERM):
    """Return the overrides of a run that gets a signal after it has logged a step."""
    return block("metric_logger", "support.stops.AskingToEnd", at_step=step, by=int(by))


def asks_in_epoch(epoch):
    """Return the overrides of a run that gets SIGTERM as it saves an epoch, or loads (-1)."""
    return block("checkpointer", "support.stops.AskingCheckpointer", at_epoch=epoch)


class ActingLogger(DiskLogger):
    """A logger that acts after a step is logged; further arguments become attributes."""

    def __init__(self, log_dir, filename, **options):
        super().__init__(log_dir, filename)
        vars(self).update(options)

    def log_dict(self, payload, step):
        super().log_dict(payload, step)
        if "loss" in payload:
            self.act(step)


class AskingToEnd(ActingLogger):
    """A logger that sends its process the signal `by` at step `at_step`."""

    def act(self, step):
        if step == self.at_step:
            signal.raise_signal(self.by)


class WaitingToBeAsked(ActingLogger):
    """A logger that creates `file` at step `at_step` and waits for SIGTERM."""

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
    """A logger that limits files to `num_bytes` from step `from_step` until step `until_step`."""

    def act(self, step):
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        limits = {self.from_step: self.num_bytes, self.until_step: most}
        if step in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[step], most))


class TakingMemory(ActingLogger):
    """A logger that limits the address space to `bytes_left` more than is used after a step. The C
    library then returns freed memory at once, since kept memory could suffice for further steps.
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
    """A checkpointer that sends its process SIGTERM as it saves epoch `at_epoch`, or loads (-1)."""

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
    """Copy a run in the state after a kill, `taken_back` steps after a step; return the folder."""
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
