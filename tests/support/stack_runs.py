"""Run training steps of the recipes on PyTorch's CUDA stack without a device. The weights are
uninitialized; no file is read.

:class:`StackRuns` keeps a process for each device and allocator configuration. Each run is a fork
of it, with a new CUDA context and allocator, and saves the imports.

    python -m support.stack_runs < RUNS
    python -m support.stack_runs --one < RUN

Each line of RUNS is a StackRun as a JSON object; each line of the output is an Outcome. With --one,
this process runs a single one without a fork, which a real driver needs.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from omegaconf import OmegaConf
from support.runners import report_of, sizer_of
from torchtune import config, training

from adaptive_batch.__main__ import emulated_device
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.memory import is_out_of_memory
from adaptive_batch.torchtune import Data, Job, Settings, Trainer
from adaptive_batch.torchtune.model import Weights

from .model_families import MODELS, Combination
from .paths import subprocess_environment


@dataclass(frozen=True)
class StackRun:
    """Steps of a combination, each with one micro-batch of `rows` rows."""

    combination: Combination
    rows: int
    steps: int = 3


@dataclass(frozen=True)
class Outcome:
    """Counts of a run, with peaks since its model was built."""

    steps: int
    allocated: int
    requested: int
    reserved: int
    retries: int
    ooms: int
    error: str | None = None  # OOM of the last step
    outside: int = 0  # bytes of the context and of other processes at the end

    @property
    def fits(self) -> bool:
        return self.error is None

    @property
    def is_clean(self) -> bool:
        """True if no allocation was retried."""
        return self.fits and not self.retries


def no_weights(combination: Combination | None = None) -> Weights:
    """Return uninitialized weights; for the base of adapters, zeros that take no memory."""

    def load_base() -> Mapping[str, Any]:
        if combination is None or not combination.adapters:
            return {}
        with torch.device("meta"):
            model = config.instantiate(OmegaConf.create(MODELS[combination.model]))
        zero = torch.zeros((), dtype=training.get_dtype(combination.dtype, torch.device("cpu")))
        return {name: zero.expand(tensor.shape) for name, tensor in model.state_dict().items()}

    return Weights(load_base, lambda state: None)


def train(run: StackRun) -> Outcome:
    """Build the recipe's trainer, and run steps until one runs out of memory."""
    cfg = run.combination.config()
    cfg.probe.search = "predict"
    cfg.on_out_of_memory = "raise"
    cfg.probe.cache = True
    job = Job(cfg, Settings.from_config(cfg))
    rows = [job.task.synthetic_row(run.combination.length)] * run.rows
    data = Data(job, rows[:1], packed=False)
    limit = MicroBatchLimit(run.rows)
    sizer = sizer_of(limit, layout=data.configured_layout, memory=job.memory)
    done, error = 0, None
    before: Mapping[str, int] = {"num_alloc_retries": 0, "num_ooms": 0}
    try:
        trainer = Trainer.load(job, data, no_weights(run.combination), sizer)
        trainer.model.train()
        before = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(run.steps):
            trainer.engine.run(rows, report_of(rows))
            trainer.step()
            done += 1
    except Exception as failure:
        cause: BaseException = failure
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if not is_out_of_memory(cause) and "out of memory" not in str(failure):
            raise
        error = str(failure).partition("\n")[0]
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    return Outcome(
        done,
        *(stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "requested", "reserved")),
        retries=stats["num_alloc_retries"] - before["num_alloc_retries"],
        ooms=stats["num_ooms"] - before["num_ooms"],
        error=error,
        outside=total - free - torch.cuda.memory_reserved(),
    )


class StackRuns:
    """Runs on emulated devices with allocator settings."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, ...], subprocess.Popen[str]] = {}

    def __call__(self, run: StackRun, device: str, *, conf: str, capacity: int) -> Outcome:
        variables = {
            "EMULATE_DEVICE": emulated_device(device, "").setting,
            "EMULATE_CAPACITY": str(capacity),
            # Without a value, the recipe would switch on expandable segments.
            "PYTORCH_CUDA_ALLOC_CONF": conf or "expandable_segments:False",
        }
        key = tuple(variables.values())
        if key not in self._servers:
            environment = subprocess_environment(**variables)
            # Estimates assume cuBLAS's default workspace.
            environment.pop("CUBLAS_WORKSPACE_CONFIG", None)
            self._servers[key] = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "support.stack_runs"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        server = self._servers[key]
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps(asdict(run)), file=server.stdin, flush=True)
        answer = json.loads(server.stdout.readline())
        if "failed" in answer:
            raise RuntimeError(f"{run} on {device}: {answer['failed']}")
        return Outcome(**answer)

    def close(self) -> None:
        for server in self._servers.values():
            assert server.stdin is not None
            server.stdin.close()
            server.wait()


def answer_to(line: str) -> dict[str, Any]:
    """Return the outcome or the error of a requested run."""
    asked = json.loads(line)
    run = StackRun(**{**asked, "combination": Combination(**asked["combination"])})
    try:
        return asdict(train(run))
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Fork for each requested run, or run a single one."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.freeze()
    if sys.argv[1:] == ["--one"]:
        print(json.dumps(answer_to(sys.stdin.readline())), file=answers, flush=True)
        return
    assert torch.cuda.memory_reserved() == 0
    # Imports have queried devices; the emulated driver permits a fork after that.
    torch.cuda._is_in_bad_fork = lambda: False
    for line in sys.stdin:
        child = os.fork()
        if not child:
            print(json.dumps(answer_to(line)), file=answers, flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"failed": f"ended with {status}"}), file=answers, flush=True)


if __name__ == "__main__":
    main()
