"""A small model in training, for facts about trials: every optimizer, dtype and way of running that
they are held for.

Shared by tests/unit/probe/test_trial.py (a short form) and benchmarks/traceless.py (all
combinations).
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torchao.optim
from support.sharded_model import Decoder, bits, training_state
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, AdamW, Optimizer

from adaptive_batch.errors import DoesNotFitError
from adaptive_batch.memory import DeviceMemory, OptimizerInBackward, device_memory
from adaptive_batch.probe import DryRun

VOCABULARY, WIDTH, LENGTH = 128, 64, 24
PLENTY = 2**40
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # see deterministic()
gc.freeze()  # each probe collects garbage; what is imported need not be looked through every time
CPU = torch.device("cpu")
ADAPTERS = ("LoRA", "DoRA", "QLoRA")
# Five, so that each meets every flag of a combination.
KINDS_OF_TASKS = (
    ("DPO", "LoRA"),
    ("distillation", ""),
    ("DPO", ""),
    ("distillation", "LoRA"),
    ("DPO", "DoRA"),
)


class Counting(Optimizer):
    """Keeps what others keep in odd places: plain numbers and lists in its state, in its groups and
    on itself.
    """

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
try:
    import bitsandbytes
except ImportError:
    bitsandbytes = None
CUDA_OPTIMIZERS = dict(OPTIMIZERS)
if bitsandbytes is not None:
    CUDA_OPTIMIZERS["PagedAdamW8bit"] = lambda p: bitsandbytes.optim.PagedAdamW8bit(p, lr=1e-2)


@dataclass(frozen=True)
class Case:
    """One way of training."""

    optimizer: str
    in_backward: bool = False
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    resumed: bool = False
    adapters: str = ""  # which kind is on a frozen base
    task: str = ""  # DPO or distillation; else next tokens

    def __str__(self) -> str:
        where = " in backward" if self.in_backward else ""
        checkpointing = ", checkpointing" if self.checkpointing else ""
        start = "resumed" if self.resumed else "fresh"
        adapters = f", {self.adapters}" if self.adapters else ""
        task = f", {self.task}" if self.task else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.optimizer}{where}, {dtype}{checkpointing}, {start}{adapters}{task}"


def all_cases(optimizers: dict[str, Any] = OPTIMIZERS) -> list[Case]:
    """Every combination."""
    dtypes = (torch.float32, torch.bfloat16)
    flags = (False, True)
    return [
        Case(*combination)
        for combination in itertools.product(optimizers, flags, dtypes, flags, flags)
    ]


def cases_with_adapters(optimizers: dict[str, Any] = OPTIMIZERS) -> list[Case]:
    """Every combination, with each kind of adapter in turn."""
    kinds = itertools.cycle(ADAPTERS)
    return [
        replace(case, adapters=kind)
        for case, kind in zip(all_cases(optimizers), kinds, strict=False)
    ]


def cases_with_tasks(optimizers: dict[str, Any] = OPTIMIZERS) -> list[Case]:
    """Every combination, with a task of each kind in turn."""
    kinds = itertools.cycle(KINDS_OF_TASKS)
    return [
        replace(case, adapters=adapters, task=task)
        for case, (task, adapters) in zip(all_cases(optimizers), kinds, strict=False)
    ]


def put_adapters(model: nn.Module, kind: str) -> None:
    """Put torchtune's adapters into each linear layer, the base of QLoRA in four bits and without
    bias, and freeze all else.
    """
    from torchtune.modules import (
        peft,
    )  # which takes seconds that a process without adapters need not wait

    make = peft.DoRALinear if kind == "DoRA" else peft.LoRALinear
    quantized = (
        {"quantize_base": True, "block_size": 64, "scaler_block_size": 32}
        if kind == "QLoRA"
        else {}
    )
    for module in list(model.modules()):
        for name, linear in list(module.named_children()):
            if isinstance(linear, nn.Linear):
                adapted = make(
                    linear.in_features,
                    linear.out_features,
                    4,
                    8,
                    dropout=0.1,
                    use_bias=not quantized,
                    **quantized,
                )
                setattr(module, name, adapted.to(linear.weight))
                if kind == "DoRA":
                    adapted.initialize_dora_magnitude()
    peft.set_trainable_params(model, peft.get_adapter_params(model))


class Training:
    """A model and its optimizer after a step or none, gradients of a first micro-batch there unless
    stepped in backward.
    """

    def __init__(
        self, case: Case, *, device: torch.device = CPU, optimizers: dict[str, Any] = OPTIMIZERS
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.case, self.device = case, device
        self.memory = device_memory(device)
        self._make = optimizers[case.optimizer]
        self.model = self._decoder(checkpointing=case.checkpointing)
        if case.adapters:
            put_adapters(self.model, case.adapters)
        self.model.frozen.eval()
        self.models: nn.Module = self.model
        self._learned: Any = None
        if case.task:
            # Which imports what other cases need not wait for.
            from support.learned_tasks import LearnedTask

            second = None
            if case.task == "distillation" or not case.adapters:
                second = self._decoder(checkpointing=False)
            self._learned = LearnedTask(case.task, self.model, second)
            self.models = self._learned.models
        self.phase = ""
        self.optimizer = self._optimizer(None)
        if case.resumed:
            self.train(2)
            states = [optimizer.state_dict() for optimizer in self.optimizers]
            if isinstance(self.optimizer, OptimizerInBackward):
                for parameter in self.model.parameters():
                    parameter._post_accumulate_grad_hooks = None  # type: ignore[attr-defined]
            self.optimizer = self._optimizer(states)
        if not case.in_backward:
            self.forward_backward(2)

    def _decoder(self, *, checkpointing: bool) -> Decoder:
        size = {"width": WIDTH, "vocabulary": VOCABULARY}
        kind = {"draws": True, "checkpointing": checkpointing, "dtype": self.case.dtype}
        return Decoder(**size, **kind).to(self.device)

    def _optimizer(self, states: list[Any] | None) -> Optimizer | OptimizerInBackward:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        made = (
            [self._make([p]) for p in trained] if self.case.in_backward else [self._make(trained)]
        )
        for optimizer, state in zip(made, states or [], strict=False):
            optimizer.load_state_dict(state)
        return (
            OptimizerInBackward(dict(zip(trained, made, strict=True)))
            if self.case.in_backward
            else made[0]
        )

    @property
    def optimizers(self) -> list[Optimizer]:
        if isinstance(self.optimizer, OptimizerInBackward):
            return list(self.optimizer.optimizers.values())
        return [self.optimizer]

    def forward_backward(self, rows: int) -> None:
        """Forward and backward of rows that are drawn, so that every generator moves."""
        self.phase = "forward"
        tokens = torch.randint(VOCABULARY, (rows, LENGTH), device=self.device)
        tokens[0, 0], tokens[0, 1] = (
            random.randrange(VOCABULARY),
            int(np.random.randint(VOCABULARY)),
        )
        loss = self._loss(tokens)
        self.phase = "backward"
        loss.backward()
        self.phase = "done"

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._learned is None:
            logits = self.model(tokens)[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        rows = [{"tokens": row, "labels": row} for row in tokens.tolist()]
        batch = self._learned.collate(rows)
        return self._learned.mean_loss({key: part.to(self.device) for key, part in batch.items()})

    def step(self) -> None:
        """Clip and step."""
        self.phase = "step"
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.phase = "done"

    def train(self, steps: int) -> None:
        """Train in earnest."""
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
        memory: DeviceMemory | None = None,
    ) -> DryRun:
        return DryRun(
            model=self.model,
            optimizer=self.optimizer,
            forward_backward=forward_backward or self.forward_backward,
            step=self.step,
            accumulates=accumulates,
            memory=memory or self.memory,
            budget_bytes=budget_bytes,
            row=f"one row of {LENGTH} tokens",
            frozen_modules=self._learned.held if self._learned else (),
        )

    def everything(self) -> dict[str, Any]:
        """All that training goes on from, bit by bit."""
        found = training_state(self.models, *self.optimizers)
        if self.device.type != "cpu":
            found["device"] = bits(getattr(torch, self.device.type).get_rng_state(self.device))
        return found

    def objects(self) -> dict[str, int]:
        """Return the identities of gradients, buffers and optimizer states, which a trial keeps."""
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
    """On CUDA some kernels add up in any order, so that training would differ from itself."""
    if device.type != "cuda":
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what differs."""
    return [
        name
        for name in sorted(before.keys() | after.keys())
        if before.get(name, "absent") != after.get(name, "absent")
    ]


# --- what may happen in a probe


class Mishap(Exception):
    """Something else than memory."""


def fits(training: Training) -> None:
    with training.rehearsal() as trial:
        assert all(trial(rows).fits for rows in (1, 3, 2))


def fits_accumulating(training: Training) -> None:
    with training.rehearsal(accumulates=not training.case.in_backward) as trial:
        assert all(trial(rows).fits for rows in (1, 3))


def out_of_memory_in_forward(training: Training) -> None:
    _out_of_memory(training, "forward")


def out_of_memory_in_backward(training: Training) -> None:
    _out_of_memory(training, "backward")


def _out_of_memory(training: Training, phase: str) -> None:
    """Run out half-way through the layers, between trials that fit."""
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


def one_row_does_not_fit(training: Training) -> None:
    _cannot_enter(training, budget_bytes=2**10)


def optimizer_does_not_fit(training: Training) -> None:
    """Each point of the first step at which memory may run out: budgets from too small for anything
    to just enough.
    """
    peaks: list[int] = []
    with training.rehearsal() as trial:
        peaks += [trial.resident_bytes, trial(1).peak_bytes or 0, trial.optimizer_peak_bytes or 0]
    for part in (0.6, 0.85, 0.99):
        _cannot_enter(training, budget_bytes=int(part * max(peaks)) - 1)


def _cannot_enter(training: Training, *, budget_bytes: int) -> None:
    before = training.everything()
    with pytest.raises(DoesNotFitError) as caught, training.rehearsal(budget_bytes=budget_bytes):
        pass
    sizes = r"needs [\d.]+ ([GMK]iB|bytes), \S+ allows [\d.]+ ([GMK]iB|bytes);"
    assert re.search(sizes, str(caught.value))
    assert differences(before, training.everything()) == []


OUTCOMES: dict[str, Callable[[Training], None]] = {
    "fits": fits,
    "fits, accumulating": fits_accumulating,
    "OOM in forward": out_of_memory_in_forward,
    "OOM in backward": out_of_memory_in_backward,
    "another error": another_error,
    "one row does not fit": one_row_does_not_fit,
    "optimizer does not fit": optimizer_does_not_fit,
}


def traces(
    case: Case, *, steps: int = 2, device: torch.device = CPU
) -> Iterator[tuple[str, list[str]]]:
    """Run every outcome one after another in the midst of training.

    Yields:
        The outcome, and the names of what differs after it; last, what differs from training that
        was never probed.
    """
    with (
        torch.compiler.set_stance("force_eager"),
        deterministic(device),
    ):  # torchao's optimizers compile for minutes
        training = Training(case, device=device, optimizers=CUDA_OPTIMIZERS)
        for name, probe in OUTCOMES.items():
            before, objects = training.everything(), training.objects()
            probe(training)
            yield (
                name,
                differences(before, training.everything())
                + differences(objects, training.objects()),
            )
        training.train(steps)
        probed = training.everything()
        undisturbed = Training(case, device=device, optimizers=CUDA_OPTIMIZERS)
        undisturbed.train(steps)
        yield "training went on", differences(undisturbed.everything(), probed)
