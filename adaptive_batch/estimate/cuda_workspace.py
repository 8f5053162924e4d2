"""A model of CUDA's kernel workspaces: memory that a step takes there and that counting tensors on a CPU does not show.

A CPU has another kernel for attention, and no tensor shows what a CUDA kernel allocates while it runs. Everything here is modelled
from the source of PyTorch 2.13 and not measured on a GPU; each formula names the file that it was read from, below aten/src/ATen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Backend = Literal["flash", "efficient", "cudnn", "math"]


def left_out(architectures: Collection[str], *, dtype: torch.dtype, world_size: int = 1) -> tuple[str, ...]:
    """Return what no formula here counts, a sentence each; an architecture is empty where only a size is known."""
    capabilities = [int(name.removeprefix("sm_")) for name in architectures if name.startswith("sm_")]
    is_rocm = any(name.startswith("gfx") for name in architectures)
    is_hopper_or_blackwell = any(90 <= number < 110 for number in capabilities)
    lacks_bfloat16 = dtype == torch.bfloat16 and any(number < 80 for number in capabilities)
    sentences = {
        "CUDA's kernels are modelled from the source of PyTorch, not measured on a GPU": True,
        "what other processes and a display take of the device, and kernels that are not PyTorch's own (flex attention)": True,
        "cuDNN's own workspace for attention on Hopper and Blackwell is not known; flash attention's is counted": is_hopper_or_blackwell,
        "bfloat16 before Ampere: CUDA keeps the weights of attention, a CPU does not, so the estimate is too low": lacks_bfloat16,
        "float32 weights: CUDA has one kernel for rms_norm, which keeps one activation less for each norm, so the estimate is too high": (
            dtype == torch.float32
        ),
        "the buffers of NCCL": world_size > 1,
        "ROCm: attention is modelled as on CUDA, but is done by another library": is_rocm,
    }
    return tuple(sentence for sentence, is_so in sentences.items() if is_so)


@dataclass(frozen=True)
class Attention:
    """One call of ``scaled_dot_product_attention`` without dropout.

    The query is ``[batch, heads, queries, head_dim]``, key and value are ``[batch, key_heads, keys, head_dim]``. `mask` is the
    shape of a boolean mask, which both devices turn into one of `dtype`.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: torch.dtype
    key_heads: int
    mask: tuple[int, ...] | None = None

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None = None) -> Attention:
        """Return the call with these tensors, of which only shapes and dtype are read."""
        batch, heads, queries, head_dim = query.shape
        mask_shape = None if mask is None else tuple(mask.shape)
        return cls(batch, heads, queries, key.shape[2], head_dim, query.dtype, key.shape[1], mask_shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def is_half(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionDifference:
    """Bytes that one call of attention takes on CUDA beyond what it takes on a CPU."""

    saved_bytes: int = 0  # from the forward operation until the backward one
    forward_bytes: int = 0  # while the forward operation runs
    backward_bytes: int = 0  # while the backward operation runs, without those saved


def attention_backend(call: Attention, compute_capability: tuple[int, int] | None = None) -> Backend:
    """Return the kernel that CUDA takes (native/transformers/cuda/sdp_utils.cpp: ``priority_order`` and the constraints of each).

    Flash, then memory-efficient, then math; cuDNN before these on Hopper and the first Blackwells, where its version is 9.15.1
    or later, as it is in wheels for CUDA 13. A `compute_capability` of None is taken as (8, 0).
    """
    capability = compute_capability or (8, 0)
    if call.is_half and capability[0] in (9, 10) and call.head_dim <= 128 and call.head_dim % 8 == 0:
        return "cudnn"
    if call.is_half and capability[0] >= 8 and call.mask is None and call.head_dim <= 256:
        little_shared_memory = (8, 6) <= capability <= (8, 9) or capability[0] == 12
        if not (little_shared_memory and 192 < call.head_dim <= 224):
            return "flash"
    if call.dtype == torch.float64 or (call.dtype == torch.bfloat16 and capability[0] < 8):
        return "math"
    alignment = (8 if capability[0] >= 7 else 1) if call.is_half else (4 if capability[0] >= 8 else 1)
    return "math" if call.head_dim % alignment else "efficient"


def attention_difference_bytes(call: Attention, backend: Backend) -> AttentionDifference:
    """Return what attention takes on CUDA beyond what it takes on a CPU.

    ``flash`` (native/transformers/cuda/flash_attn/flash_api.cpp: ``mha_fwd``, ``mha_bwd``) saves what a CPU saves: the output and
    float32 sums ``[batch, heads, queries]``. Its backward takes, in float32, ``dq_accum`` ``[batch, queries, heads, head_dim]`` and
    ``softmax_d`` ``[batch, heads, queries]``, queries rounded up to 128 and head_dim to 32 (to 64 beyond 128), and where there are
    fewer key heads than heads, gradients of key and value for all heads.

    ``efficient`` (attention.cu, attention_backward.cu and mem_eff_attention/kernel_backward.h, all in native/transformers/cuda) rounds the
    sums up to 32 queries. Its backward takes ``delta`` ``[batch, heads, queries]`` in float32 and a workspace in which the gradient
    of the query is added up, in blocks of float32; for float32 also the product of output and gradient, before that. With halves
    of more than 128 the forward adds up in float32. A mask whose last dimension is no multiple of 8 is copied into one that is
    (native/transformers/attention.cpp: ``preprocess_mask``).

    ``cudnn`` is taken as flash. ``math`` is made of operations that a CPU has as well: where CUDA takes it, a trial under
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` counts it.
    """
    if backend == "math":
        return AttentionDifference()
    if backend == "efficient":
        return _efficient_difference(call)
    rows = _up(call.queries, 128) * call.batch * call.heads
    accumulated = 4 * rows * (_up(call.head_dim, 32 if call.head_dim <= 128 else 64) + 1)
    expanded = 2 * call.batch * call.heads * call.keys * call.head_dim * call.itemsize
    return AttentionDifference(backward_bytes=accumulated + (expanded if call.key_heads != call.heads else 0))


def _efficient_difference(call: Attention) -> AttentionDifference:
    rows = call.batch * call.heads * call.queries
    padding = 4 * call.batch * call.heads * (_up(call.queries, 32) - call.queries)
    copied = 0
    if call.mask is not None and (beyond := call.mask[-1] % 8):
        row_bytes = math.prod(call.mask[:-1]) * call.itemsize
        padding += row_bytes * (8 - beyond)
        copied = row_bytes * (call.mask[-1] + 8 - beyond)
    accumulator = 4 * rows * call.head_dim if call.is_half and call.head_dim > 128 else 0
    workspace = 4 * rows + _efficient_workspace_bytes(call)
    if not call.is_half:
        workspace = max(workspace, 4 * rows * (call.head_dim + 2))
    return AttentionDifference(padding, max(accumulator, copied), workspace)


def _efficient_workspace_bytes(call: Attention) -> int:
    """``workspace_size()`` of mem_eff_attention/kernel_backward.h with the blocks that kernels/cutlassB.h names first from sm_80 on."""
    if call.head_dim <= 64:
        block_queries, block_keys = 64, 64
    elif call.is_half and call.head_dim <= 128:
        block_queries, block_keys = 128, 128
    else:
        block_queries, block_keys = 128, 64
    blocks = math.ceil(call.queries / block_queries) * math.ceil(call.head_dim / block_keys)
    elements = blocks * (4 + block_queries * block_keys)  # each block has a lock and a counter, 16 bytes in all
    if call.is_half and call.head_dim > block_queries:  # gradients of key and value do not stay in registers
        splits = max(1, min(math.ceil(call.keys / block_keys), 200 // (call.batch * call.heads)))
        elements += 2 * splits * block_keys * _up(call.head_dim, block_queries)
    return 4 * call.batch * call.heads * _up(elements, 4)


def embedding_backward_bytes(*, tokens: int, vocabulary: int, dim: int) -> int:
    """Return what the backward of an embedding takes on CUDA while it runs; a CPU takes nothing.

    Up to 3072 tokens it takes nothing. Beyond that it sorts them, and adds up in float32 parts of at most 10 tokens: one row of
    `dim` for each (native/cuda/Embedding.cu, native/cuda/EmbeddingBackwardKernel.cu).
    """
    if tokens <= 3072:
        return 0
    distinct = min(tokens, vocabulary)
    parts = tokens // 10 + distinct
    return 4 * parts * dim + 8 * (3 * tokens + 2 * distinct + parts)


def workspace_bytes(
    operation: object,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    compute_capability: tuple[int, int] | None = None,
) -> int:
    """Return what CUDA allocates while it runs an operation that is counted on a CPU, without its result."""
    if operation is torch.ops.aten.embedding_dense_backward.default:
        gradient, tokens, vocabulary = args[:3]
        return embedding_backward_bytes(tokens=tokens.numel(), vocabulary=vocabulary, dim=gradient.shape[-1])
    is_forward = operation is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    if not is_forward and operation is not torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return 0
    query, key = args[:2] if is_forward else args[1:3]
    call = Attention.of(query, key, (kwargs or {}).get("attn_mask"))
    difference = attention_difference_bytes(call, attention_backend(call, compute_capability))
    return difference.forward_bytes if is_forward else difference.backward_bytes


def library_workspace_bytes(architecture: str = "") -> int:
    """Return what cuBLAS keeps, from PyTorch's allocator: one workspace for the thread of forward, one for autograd's.

    32 MiB each on Hopper and Blackwell, 8 MiB and 128 KiB on what was before; on ROCm 128 MiB on gfx94 and gfx95, or else 32 MiB
    (cuda/CublasHandlePool.cpp: ``parseChosenWorkspaceSize``, where CUBLAS_WORKSPACE_CONFIG does not say otherwise). An empty
    architecture is taken as the largest of CUDA.
    """
    if architecture.startswith("gfx"):
        return 2 * (128 if architecture.startswith(("gfx94", "gfx95")) else 32) * 1024**2
    if architecture in ("sm_60", "sm_61", "sm_70", "sm_75", "sm_80", "sm_86", "sm_87", "sm_89"):
        return 2 * (2 * 4096 + 8 * 16) * 1024
    return 2 * 32 * 1024**2


def _up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
