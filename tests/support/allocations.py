"""What calls of attention and norms allocate and free, in which order: on a CUDA device, and on
fake tensors inside CudaKernels.

Run as a program it reads calls from its input and writes what they allocate on CUDA: the stack
without a device is another device in another process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torchtune.modules import loss

from adaptive_batch.estimate import CudaKernels
from adaptive_batch.estimate.cuda_operators import CudaOperators
from adaptive_batch.estimate.tracker import AttributedTracker
from adaptive_batch.training import rows_apart

Log = list[int]  # n > 0: n bytes are allocated; n < 0: the allocation numbered ~n is freed


@dataclass(frozen=True)
class Attention:
    """A call of scaled_dot_product_attention; `layout` is of a tensor [batch, heads, tokens,
    head_dim], the slowest dimension first.
    """

    head_dim: int = 64
    dtype: str = "bfloat16"
    # or "none", "bool", "float", "tokens" (of two dimensions), "heads" (another for each head)
    mask: str = "causal"
    layout: str = "bshd"  # or "bhsd", "sbhd", "fused" (a part of a larger tensor)
    key_heads: int = 8
    grouped: bool = False  # enable_gqa; else keys and values are repeated
    batch: int = 2
    heads: int = 8
    queries: int = 512
    keys: int = 512
    dropout: float = 0.0

    def forward(
        self, device: str
    ) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]:
        """Return what calls it, and what runs its backward."""
        dtype = getattr(torch, self.dtype)
        query = self._tensor(self.heads, self.queries, dtype, device)
        key, value = (self._tensor(self.key_heads, self.keys, dtype, device) for _ in range(2))
        shapes = {
            "bool": (self.batch, 1, self.queries, self.keys),
            "float": (self.batch, 1, self.queries, self.keys),
            "tokens": (self.queries, self.keys),
            "heads": (self.batch, self.heads, self.queries, self.keys),
        }
        mask = None
        if self.mask in shapes:
            mask = torch.empty(
                shapes[self.mask],
                dtype=dtype if self.mask == "float" else torch.bool,
                device=device,
            )
        gradient = torch.empty(
            self.batch, self.queries, self.heads, self.head_dim, dtype=dtype, device=device
        )

        def call() -> torch.Tensor:
            keys, values = key, value
            if self.key_heads != self.heads and not self.grouped:
                repeats = (
                    self.batch,
                    self.key_heads,
                    self.heads // self.key_heads,
                    self.keys,
                    self.head_dim,
                )
                keys, values = (
                    tensor.unsqueeze(2).expand(repeats).flatten(1, 2) for tensor in (key, value)
                )
            return functional.scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=mask,
                dropout_p=self.dropout,
                is_causal=self.mask == "causal",
                enable_gqa=self.grouped,
            )

        def backward(output: torch.Tensor) -> Any:
            joined = output.transpose(1, 2).reshape(gradient.shape)
            return torch.autograd.grad(joined, (query, key, value), gradient)

        return call, backward

    def _tensor(self, heads: int, tokens: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        sizes = {"b": self.batch, "h": heads, "s": tokens, "d": self.head_dim}
        order = "bshd" if self.layout == "fused" else self.layout
        shape = [sizes[name] for name in order]
        if self.layout == "fused":
            shape[-1] *= 3
        tensor = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
        return tensor[..., : self.head_dim].permute([order.index(name) for name in "bhsd"])


@dataclass(frozen=True)
class Packed:
    """A call of attention inside of rows_apart."""

    lengths: tuple[int, ...] = (500, 12, 1000)
    head_dim: int = 64
    dtype: str = "bfloat16"
    layout: str = "bshd"
    key_heads: int = 8
    heads: int = 8

    def forward(
        self, device: str
    ) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]:
        """As of :class:`Attention`."""
        tokens = sum(self.lengths)
        alike = {
            "layout": self.layout,
            "key_heads": self.key_heads,
            "grouped": True,
            "heads": self.heads,
        }
        one = Attention(self.head_dim, self.dtype, batch=1, queries=tokens, keys=tokens, **alike)
        call, backward = one.forward(device)

        with rows_apart(self.lengths) as packed:
            packed._device_ends = packed.ends.to(device)  # once for all layers, four bytes a row

        def apart() -> torch.Tensor:
            with patch.object(functional, "scaled_dot_product_attention", packed):
                return call()

        return apart, backward


@dataclass(frozen=True)
class Norm:
    """A call of rms_norm or layer_norm."""

    kind: str = "rms_norm"
    dtype: str = "bfloat16"
    weight: str = "bfloat16"  # empty for none
    rows: int = 1024
    dim: int = 2048
    is_contiguous: bool = True

    def forward(
        self, device: str
    ) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]:
        """As of :class:`Attention`."""
        shape = (
            (2, self.rows // 2, self.dim) if self.is_contiguous else (self.rows // 2, 2, self.dim)
        )
        tensor = torch.empty(
            shape, dtype=getattr(torch, self.dtype), device=device, requires_grad=True
        )
        given = tensor if self.is_contiguous else tensor.transpose(0, 1)
        weights = [
            torch.empty(
                self.dim, dtype=getattr(torch, self.weight), device=device, requires_grad=True
            )
            for _ in range({"rms_norm": 1, "layer_norm": 2}[self.kind] if self.weight else 0)
        ]
        gradient = torch.empty(given.shape, dtype=given.dtype, device=device)
        norm = getattr(functional, self.kind)
        return lambda: norm(given, (self.dim,), *weights), lambda output: torch.autograd.grad(
            output, [given, *weights], gradient
        )


@dataclass(frozen=True)
class InPlace:
    """A view of all of a tensor, or of a part, that is multiplied in place."""

    view: str = "transposed"  # or "reshaped", "part", "itself"
    rows: int = 2048
    dim: int = 512

    def forward(
        self, device: str
    ) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]:
        """As of :class:`Attention`."""
        tensor = torch.empty(self.rows, self.dim, device=device, requires_grad=True)

        def call() -> torch.Tensor:
            made = tensor + 1
            views = {
                "transposed": made.t,
                "reshaped": lambda: made.view(-1),
                "part": lambda: made[1:],
                "itself": lambda: made,
            }
            return views[self.view]().mul_(2)

        return call, lambda output: torch.autograd.grad(output, [tensor], torch.empty_like(output))


@dataclass(frozen=True)
class Divergence:
    """A loss of distillation, of a sum over labels: its count would be read."""

    loss: str = "ForwardKLLoss"  # or "ReverseKLLoss"
    dtype: str = "bfloat16"
    tokens: int = 300
    vocabulary: int = 5000

    def forward(
        self, device: str
    ) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]:
        """As of :class:`Attention`."""
        options = {"dtype": getattr(torch, self.dtype), "device": device}
        student, teacher = (
            torch.empty(self.tokens, self.vocabulary, **options, requires_grad=is_student)
            for is_student in (True, False)
        )
        labels = torch.empty(self.tokens, dtype=torch.int64, device=device)
        loss_fn = getattr(loss, self.loss)()

        def call() -> torch.Tensor:
            divergence: torch.Tensor = loss_fn(student, teacher, labels, normalize=False)
            return divergence

        return call, lambda output: torch.autograd.grad(output, [student])


Call = Attention | Packed | Norm | InPlace | Divergence


def on_fake_tensors(calls: Sequence[Call], kernels: CudaKernels) -> list[tuple[Log, Log]]:
    """Return the logs of forward and backward of each call."""
    operators = CudaOperators(kernels.capability, kernels.multiprocessors)
    with FakeTensorMode(), AttributedTracker(operators=operators) as tracker, kernels:
        return _logs(calls, "cpu", partial(_counted, tracker))


def _counted(tracker: AttributedTracker, call: Callable[[], Any]) -> tuple[Any, Log]:
    start, first = len(tracker.log), sum(entry > 0 for entry in tracker.log)
    result = call()
    return result, [
        entry if entry > 0 else entry + first
        for entry in tracker.log[start:]
        if entry > 0 or ~entry >= first
    ]


def _logs(calls: Sequence[Call], device: str, logged: Callable[..., Any]) -> list[tuple[Log, Log]]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # cuBLAS takes its workspaces
        square = torch.empty(2, 8, 8, dtype=dtype, device=device, requires_grad=True)
        (square @ square).sum().backward()  # type: ignore[no-untyped-call]
    logs = []
    for call in calls:
        forward, backward = call.forward(device)
        output, first = logged(forward)
        _, second = logged(partial(backward, output))
        logs.append((first, second))
    return logs


def on_cuda(calls: Sequence[Call], *, device: str) -> list[tuple[Log, Log]]:
    """The same on PyTorch's CUDA stack without a device, for a device of that name."""
    given = json.dumps([(type(call).__name__, asdict(call)) for call in calls])
    environment = os.environ | {"STUB_CUDA_DEVICE": device}
    done = subprocess.run(
        [sys.executable, __file__], input=given, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [(first, second) for first, second in json.loads(done.stdout)]


def _traced(call: Callable[[], Any]) -> tuple[Any, Log]:
    memory = torch.cuda.memory
    memory._record_memory_history(None)
    memory._record_memory_history("all", context=None, stacks="python")
    result = call()
    events = memory._snapshot()["device_traces"][0]
    memory._record_memory_history(None)
    numbers: dict[int, int] = {}
    log: Log = []
    for event in events:
        if event["action"] == "alloc":
            numbers[event["addr"]] = sum(entry > 0 for entry in log)
            log.append(event["size"])
        elif (
            event["action"] == "free_requested"
            and (number := numbers.pop(event["addr"], None)) is not None
        ):
            log.append(~number)
    return result, log


def main() -> None:
    """Write the logs of the calls that are read."""
    kinds = {kind.__name__: kind for kind in (Attention, Packed, Norm, InPlace, Divergence)}
    calls = [kinds[kind](**fields) for kind, fields in json.load(sys.stdin)]
    json.dump(_logs(calls, "cuda", _traced), sys.stdout)


if __name__ == "__main__":
    main()
