"""A small model in training, for tests that trials leave no trace, with each optimizer and dtype.
benchmarks/traceless.py runs all combinations.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import torchao.optim
from support.same_state import bits, differences, seed_all
from support.sharded_model import Decoder, collate, token_losses, training_state
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, AdamW, Optimizer

from adaptive_batch.errors import DoesNotFitError
from adaptive_batch.memory import (
    DeviceMemory,
    OptimizerInBackward,
    device_memory,
    optimizer_state_tensors,
)
from adaptive_batch.probe import DryRun

VOCABULARY, WIDTH, LENGTH = 128, 64, 24
PLENTY = 2**40
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # see deterministic()
gc.freeze()  # each trial collects garbage; frozen imported objects are not traversed
CPU = torch.device("cpu")
# Adapters and tasks, which combinations use in turn. With five tasks, each meets every flag.
KINDS = {
    "": [("", "")],
    "adapters": [("LoRA", ""), ("DoRA", ""), ("QLoRA", "")],
    "tasks": [
        ("LoRA", "DPO"),
        ("", "distillation"),
        ("", "DPO"),
        ("LoRA", "distillation"),
        ("DoRA", "DPO"),
    ],
}


class Counting(Optimizer):
    """An optimizer with plain numbers and lists in its state, its groups and its attributes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0})
        self.steps_taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps_taken += 1
        self.last_step_was = "taken"
        for group in self.param_groups:
            group["k"] += 1
            group["weights"] = [group["k"]]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state.setdefault("norms", []).append(float(parameter.grad.norm()))
                    state.setdefault("sums", [torch.zeros_like(parameter)])[0].add_(parameter.grad)
                    parameter.sub_(state["sums"][0], alpha=group["lr"] / group["k"])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "SGD momentum": lambda p: SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
    "AdamW8bit": lambda p: torchao.optim.AdamW8bit(p, lr=1e-2),
    "AdamW4bit": lambda p: torchao.optim.AdamW4bit(p, lr=1e-2, bf16_stochastic_round=True),
    "counting": Counting,
}
CUDA_OPTIMIZERS = dict(OPTIMIZERS)
if find_spec("bitsandbytes"):
    import bitsandbytes

    CUDA_OPTIMIZERS["PagedAdamW8bit"] = lambda p: bitsandbytes.optim.PagedAdamW8bit(p, lr=1e-2)


@dataclass(frozen=True)
class Case:
    """Configuration of a training."""

    optimizer: str
    in_backward: bool = False
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    resumed: bool = False
    adapters: str = ""  # kind of adapters; none if empty
    task: str = ""  # DPO or distillation; next-token prediction if empty

    def __str__(self) -> str:
        marks = (
            self.optimizer + " in backward" * self.in_backward,
            str(self.dtype).removeprefix("torch.") + ", checkpointing" * self.checkpointing,
            "resumed" if self.resumed else "fresh",
            self.adapters,
            self.task,
        )
        return ", ".join(filter(None, marks))


def cases(kind: str = "", optimizers: dict[str, Any] = OPTIMIZERS) -> list[Case]:
    """Return all combinations, with the adapters and tasks of a kind in turn."""
    flags = (False, True)
    dtypes = (torch.float32, torch.bfloat16)
    combinations = itertools.product(optimizers, flags, dtypes, flags, flags)
    in_turn = itertools.cycle(KINDS[kind])
    return [Case(*combination, *next(in_turn)) for combination in combinations]


class Training:
    """A model and its optimizer, fresh or after a step, with the gradients of a micro-batch unless
    the optimizer steps in backward.
    """

    def __init__(
        self, case: Case, *, device: torch.device = CPU, has_gradients: bool = True
    ) -> None:
        seed_all()
        self.case, self.device = case, device
        self.memory = device_memory(device)
        self.model = self._decoder(checkpointing=case.checkpointing)
        self.models: nn.Module = self.model
        self.learned: Any = None
        if case.adapters or case.task:
            # Imported here, because torchtune takes seconds to import.
            from support.learned_tasks import LearnedTask, put_adapters

            if case.adapters:
                put_adapters(self.model, case.adapters)
            if case.task:
                has_base = case.adapters and case.task == "DPO"
                second = None if has_base else self._decoder(checkpointing=False)
                self.learned = LearnedTask(case.task, self.model, second)
                self.models = self.learned.models
        self.model.frozen.eval()
        self.phase = ""
        self.optimizer = self._optimizer()
        if case.resumed:
            self.train(2)
            states = [optimizer.state_dict() for optimizer in self.optimizers]
            if isinstance(self.optimizer, OptimizerInBackward):
                for parameter in self.model.parameters():
                    parameter._post_accumulate_grad_hooks = None  # type: ignore[attr-defined]
            self.optimizer = self._optimizer(states)
        if has_gradients and not case.in_backward:
            self.forward_backward(2)

    def _decoder(self, *, checkpointing: bool) -> Decoder:
        size = {"width": WIDTH, "vocabulary": VOCABULARY}
        kind = {"draws": True, "checkpointing": checkpointing, "dtype": self.case.dtype}
        return Decoder(**size, **kind).to(self.device)

    def _optimizer(self, states: Sequence[Any] = ()) -> Optimizer | OptimizerInBackward:
        make = CUDA_OPTIMIZERS[self.case.optimizer]
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [[p] for p in trained] if self.case.in_backward else [trained]
        made = [make(group) for group in groups]
        for optimizer, state in zip(made, states, strict=False):
            optimizer.load_state_dict(state)
        if self.case.in_backward:
            return OptimizerInBackward(dict(zip(trained, made, strict=True)))
        return made[0]

    @property
    def optimizers(self) -> list[Optimizer]:
        if isinstance(self.optimizer, OptimizerInBackward):
            return list(self.optimizer.optimizers.values())
        return [self.optimizer]

    def resident(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that training holds between its steps."""
        yield from (*self.model.parameters(), *self.model.buffers())
        yield from (p.grad for p in self.model.parameters() if p.grad is not None)
        yield from optimizer_state_tensors(self.optimizers)

    def forward_backward(self, rows: int) -> None:
        """Run forward and backward of random rows, drawn from each generator."""
        self.phase = "forward"
        tokens = torch.randint(VOCABULARY, (rows, LENGTH), device=self.device)
        tokens[0, 0] = random.randrange(VOCABULARY)
        tokens[0, 1] = int(np.random.randint(VOCABULARY))
        batch = self.collate([{"tokens": row, "labels": row} for row in tokens.tolist()])
        loss = self.mean_loss({key: part.to(self.device) for key, part in batch.items()})
        self.phase = "backward"
        loss.backward()
        self.phase = "done"

    def collate(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return collate(rows) if self.learned is None else self.learned.collate(rows)

    def mean_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        if self.learned is None:
            return token_losses(self.model, batch)
        return self.learned.mean_loss(batch)

    def step(self) -> None:
        """Clip and step."""
        self.phase = "step"
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.phase = "done"

    def train(self, steps: int) -> None:
        """Train for some steps."""
        for _ in range(steps):
            self.forward_backward(3)
            if not self.case.in_backward:
                self.step()
                for optimizer in self.optimizers:
                    optimizer.zero_grad(set_to_none=True)

    def rehearsal(
        self,
        *,
        budget_bytes: int = PLENTY,
        accumulates: bool = False,
        forward_backward: Callable[[int], None] | None = None,
        step: Callable[[], object] | None = None,
        memory: DeviceMemory | None = None,
        **options: Any,
    ) -> DryRun:
        return DryRun(
            model=self.model,
            optimizer=self.optimizer,
            forward_backward=forward_backward or self.forward_backward,
            step=step or self.step,
            accumulates=accumulates,
            memory=memory or self.memory,
            budget_bytes=budget_bytes,
            row=f"one row of {LENGTH} tokens",
            frozen_modules=self.learned.held if self.learned else (),
            **options,
        )

    def everything(self) -> dict[str, Any]:
        """Return the bits of all state that training depends on."""
        found = training_state(self.models, *self.optimizers)
        if self.device.type != "cpu":
            found["device"] = bits(getattr(torch, self.device.type).get_rng_state(self.device))
        return found

    def objects(self) -> dict[str, int]:
        """Return the ids of parameters, gradients, buffers and optimizer states."""
        found = {f"gradient {name}": id(p.grad) for name, p in self.models.named_parameters()}
        found |= {f"parameter {name}": id(p) for name, p in self.models.named_parameters()}
        found |= {f"buffer {name}": id(buffer) for name, buffer in self.models.named_buffers()}
        for index, optimizer in enumerate(self.optimizers):
            for number, state in enumerate(optimizer.state.values()):
                found |= {
                    f"{index} {number} {key}": id(v)
                    for key, v in state.items()
                    if isinstance(v, torch.Tensor)
                }
        return found


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Context manager: use deterministic kernels, since some CUDA kernels sum in random order."""
    if device.type != "cuda":
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


# --- outcomes of a search


class Mishap(Exception):
    """An error other than an OOM."""


def fits(training: Training, *, accumulates: bool = False) -> None:
    with training.rehearsal(accumulates=accumulates and not training.case.in_backward) as trial:
        assert all(trial(rows).fits for rows in (1, 3, 2))


def runs_out(training: Training, *, phase: str) -> None:
    """Run out of memory between trials that fit."""
    with training.rehearsal(budget_bytes=training.memory.total_bytes() // 2) as trial:
        assert trial(2).fits
        training.model.burden = {phase: training.memory.total_bytes()}
        assert not trial(3).fits
        assert training.phase == phase, f"ran out in {training.phase}, not in {phase}"
        training.model.burden = {}
        assert trial(3).fits


def another_error(training: Training) -> None:
    def fail(rows: int) -> None:
        training.forward_backward(rows)
        if rows == 3:
            raise Mishap("index out of range")

    with (
        pytest.raises(RuntimeError, match="3 rows") as caught,
        training.rehearsal(forward_backward=fail) as trial,
    ):
        trial(3)
    assert isinstance(caught.value.__cause__, Mishap)


def optimizer_does_not_fit(training: Training) -> None:
    """Run out of memory at several points of the optimizer's first step, with smaller budgets."""
    peaks: list[int] = []
    with training.rehearsal() as trial:
        peaks += [trial.resident_bytes, trial(1).peak_bytes or 0, trial.optimizer_peak_bytes or 0]
    for part in (0.6, 0.85, 0.99):
        does_not_fit(training, budget_bytes=int(part * max(peaks)) - 1)


def does_not_fit(training: Training, *, budget_bytes: int) -> None:
    before = training.everything()
    with pytest.raises(DoesNotFitError) as caught, training.rehearsal(budget_bytes=budget_bytes):
        pass
    sizes = r"needs more than the [\d.]+ ([GMK]iB|bytes) that \S+ allows;"
    assert re.search(sizes, str(caught.value))
    assert differences(before, training.everything()) == []


OUTCOMES: dict[str, Callable[[Training], None]] = {
    "fits": fits,
    "fits, accumulating": partial(fits, accumulates=True),
    "OOM in forward": partial(runs_out, phase="forward"),
    "OOM in backward": partial(runs_out, phase="backward"),
    "another error": another_error,
    "one row does not fit": partial(does_not_fit, budget_bytes=2**10),
    "optimizer does not fit": optimizer_does_not_fit,
}


def traces(
    case: Case, *, steps: int = 2, device: torch.device = CPU
) -> Iterator[tuple[str, list[str]]]:
    """Run all outcomes one after another during training.

    Yields:
        Name of the outcome, and names of values that differ after it; last, the values that differ
        from a training without trials.
    """
    # torchao's optimizers would compile for minutes.
    with torch.compiler.set_stance("force_eager"), deterministic(device):
        training = Training(case, device=device)
        for name, probe in OUTCOMES.items():
            before, objects = training.everything(), training.objects()
            probe(training)
            differing = differences(before, training.everything())
            yield name, differing + differences(objects, training.objects())
        training.train(steps)
        probed = training.everything()
        undisturbed = Training(case, device=device)
        undisturbed.train(steps)
        yield "training went on", differences(undisturbed.everything(), probed)
