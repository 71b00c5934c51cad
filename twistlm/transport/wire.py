"""What travels: values or changes of a subnet's buffer as bytes.

With `fp32` everything travels as it is, so one process and many give the same bits, and with `bf16`
too. In `int8` and `int4` values side by side share a scale: bits depend on who owns which range.
With `bf16`, `int8` and `int4`:

    weights   down  in bf16; the centre keeps its own and adds changes to them: nothing is lost
              up    the change since they came down, in the kind
    v         both  values in bf16, or in 8 bits of its logarithm: the error is relative, so a small
                    v neither vanishes nor turns negative
    m         both  values in bf16, or 8 or 4 bits of m / sqrt(v), which Adam multiplies its rate
                    with: those shares are alike in neurons with gradients of very different sizes
"""

import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from ..config import Wire

Code = Literal[Wire, "log8"]
Shape = tuple[int, ...]  # [rows, n] of a subnet's buffer
# the codes of weights, m and v; beside a log8 of v, m / sqrt(v) travels
DOWN: dict[Wire, tuple[Code, ...]] = {
    "fp32": ("fp32", "fp32", "fp32"),
    "bf16": ("bf16", "bf16", "bf16"),
    "int8": ("bf16", "int8", "log8"),
    "int4": ("bf16", "int4", "log8"),
}
UP: dict[Wire, tuple[Code, ...]] = DOWN | {
    "int8": ("int8", "int8", "log8"),
    "int4": ("int4", "int4", "log8"),
}
GROUPS = {8: 256, 4: 64}  # bits -> values that share a float32 scale
# below a group's largest value that log8 can tell; what is smaller, or 0, is raised to the last
OCTAVES = 24
STEPS = 255  # of log8 in these octaves: an error of at most 3.4%
ALIGN = 8  # bytes: so that payloads laid end to end can be read in place
FLOAT32 = torch.float32


def n_bytes(kind: Code, n: int, dtype: torch.dtype = FLOAT32) -> int:
    """Bytes of n encoded values."""
    if kind == "fp32":
        exact = n * dtype.itemsize
    else:
        exact = 2 * n if kind == "bf16" else -(-n * _bits(kind) // 8) + 4 * _n_groups(kind, n)
    return -(-exact // ALIGN) * ALIGN


def encode(kind: Code, tensor: Tensor) -> Tensor:
    """uint8 [n_bytes] on the tensor's device; `fp32` is its own bytes, float64 ones too."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():  # torch cannot view nothing as bytes
        return torch.empty(0, dtype=torch.uint8, device=flat.device)
    if kind == "fp32":
        parts = [_bytes(flat)]
    elif kind == "bf16":
        parts = [_bytes(flat.to(torch.bfloat16))]
    else:
        groups = _groups(flat.float(), GROUPS[_bits(kind)])
        scales, steps = _fused(_few_bits, flat.is_cuda)(kind, groups)
        parts = [_bytes(scales), _bytes(steps)[: -(-flat.numel() * _bits(kind) // 8)]]
    gap = n_bytes(kind, flat.numel(), tensor.dtype) - sum(part.numel() for part in parts)
    if gap:
        parts.append(torch.zeros(gap, dtype=torch.uint8, device=flat.device))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def decode(kind: Code, payload: Tensor, shape: Shape, dtype: torch.dtype = FLOAT32) -> Tensor:
    """The tensor behind a payload; its shape is known beforehand and never read from a peer."""
    n = math.prod(shape)
    want = n_bytes(kind, n, dtype)
    if payload.dtype != torch.uint8 or payload.numel() != want:
        raise ValueError(
            f"a {kind} payload of {n} values has {want} bytes, this one {payload.numel()}"
        )
    if kind == "fp32":
        return payload[: n * dtype.itemsize].view(dtype).view(shape)
    if kind == "bf16":
        return payload[: 2 * n].view(torch.bfloat16).to(dtype).view(shape)
    first, bits = 4 * _n_groups(kind, n), _bits(kind)
    steps = _groups(payload[first:][: -(-n * bits // 8)], GROUPS[bits] * bits // 8)
    scales = payload[:first].view(FLOAT32)
    values = _fused(_values, payload.is_cuda)(kind, scales[:, None], steps)
    return values.view(-1)[:n].to(dtype).view(shape)


def down(kind: Wire, buffer: Tensor) -> Tensor:
    """A subnet's buffer [rows, n] on its way to a worker; with `fp32` it is not copied."""
    return encode(kind, buffer) if kind == "fp32" else _write(DOWN[kind], [*buffer])


def read_down(kind: Wire, payload: Tensor, shape: Shape, dtype: torch.dtype = FLOAT32) -> Tensor:
    """What the worker makes of it."""
    return _read(DOWN[kind], payload, shape, dtype)


def up(kind: Wire, result: Tensor, sent: Tensor) -> Tensor:
    """A trained buffer [rows, n] on its way back; `sent` [n] are the weights that came."""
    if kind == "fp32":
        return encode(kind, result)
    return _write(UP[kind], [result[0] - sent, *result[1:]])


def read_up(kind: Wire, payload: Tensor, shape: Shape, sent: Tensor) -> Tensor:
    """What the centre makes of it; `sent` [n] are its own weights, not rounded."""
    result = _read(UP[kind], payload, shape, sent.dtype)
    if kind != "fp32":
        result[0] += sent
    return result


def down_bytes(kind: Wire, shape: Shape, dtype: torch.dtype = FLOAT32) -> int:
    """Bytes of a buffer [rows, n] to a worker."""
    return sum(_sizes(DOWN[kind], shape, dtype))


def up_bytes(kind: Wire, shape: Shape, dtype: torch.dtype = FLOAT32) -> int:
    """Bytes of a buffer [rows, n] from a worker."""
    return sum(_sizes(UP[kind], shape, dtype))


def _sizes(kinds: tuple[Code, ...], shape: Shape, dtype: torch.dtype) -> list[int]:
    """Bytes of each row; where all are `fp32` the buffer travels as one."""
    rows, n = shape
    if kinds[0] == "fp32":
        return [n_bytes("fp32", rows * n, dtype)]
    return [n_bytes(kind, n, dtype) for kind in kinds[:rows]]


def _write(kinds: tuple[Code, ...], rows: list[Tensor]) -> Tensor:
    """Rows end to end; m is divided by the root of v as the other side will read it."""
    if len(rows) == 1:
        return encode(kinds[0], rows[0])
    m, v = rows[1], encode(kinds[2], rows[2])
    if kinds[2] == "log8":
        m = _fused(_shares, m.is_cuda)(m, decode("log8", v, m.shape, m.dtype))
    return torch.cat([encode(kinds[0], rows[0]), encode(kinds[1], m), v])


def _read(kinds: tuple[Code, ...], payload: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    sizes = _sizes(kinds, shape, dtype)
    if payload.numel() != sum(sizes):
        raise ValueError(
            f"a buffer {list(shape)} has {sum(sizes)} bytes, this payload {payload.numel()}"
        )
    if len(sizes) == 1:  # in place: a copy into fresh memory costs more than the transfer
        return decode(kinds[0], payload, shape, dtype)
    parts = zip(kinds, payload.split(sizes), strict=False)
    rows = [decode(kind, part, shape[1:], dtype) for kind, part in parts]
    if kinds[2] == "log8":
        rows[1] = _fused(_undo_shares, payload.is_cuda)(rows[1], rows[2])
    return torch.stack(rows)


def _shares(m: Tensor, v: Tensor) -> Tensor:
    return m / _root(v)


def _undo_shares(shares: Tensor, v: Tensor) -> Tensor:
    return shares * _root(v)


def _root(v: Tensor) -> Tensor:
    """What m is a share of; positive, so that an m without a v is read back."""
    return v.sqrt().clamp_min(torch.finfo(FLOAT32).tiny)


def _groups(flat: Tensor, size: int) -> Tensor:
    """[n_groups, size], the last one filled up with zeros; not copied if it is full."""
    rest = -flat.numel() % size
    return (torch.nn.functional.pad(flat, (0, rest)) if rest else flat).view(-1, size)


def _few_bits(kind: Code, groups: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 scale per group, and its bytes: one per value, or one per two; in few passes.

    A NaN or Inf makes its scale NaN or Inf, and so the whole group when it is read: it stays seen.
    """
    largest = torch.linalg.vector_norm(groups, math.inf, dim=1, keepdim=True)
    if kind != "log8":
        scales = largest / (127 if _bits(kind) == 8 else 7)
        steps = (groups / scales.clamp_min(torch.finfo(FLOAT32).tiny)).round_()
        if _bits(kind) == 8:
            return scales, steps.to(torch.int8)
        steps = (steps + 8).to(torch.uint8)  # 1..15
        return scales, steps[:, ::2] | steps[:, 1::2] << 4
    # 0..255 are the last of the octaves to the largest value, and half a step more rounds
    highest = (OCTAVES - largest.log2()) * (STEPS / OCTAVES) + 0.5
    steps = groups.log2().mul_(STEPS / OCTAVES).add_(highest)
    return largest, steps.clamp_(0, STEPS).to(torch.uint8)


def _values(kind: Code, scales: Tensor, steps: Tensor) -> Tensor:
    """float32 [n_groups, values of one] of its bytes and the scales [n_groups, 1]."""
    if _bits(kind) == 4:
        pairs = torch.stack((steps & 15, steps >> 4), dim=-1)
        return (pairs.flatten(1).to(FLOAT32) - 8) * scales
    if kind != "log8":
        return steps.view(torch.int8) * scales
    return steps.to(FLOAT32).mul_(OCTAVES / STEPS).sub_(OCTAVES).exp2_().mul_(scales)


@cache
def _fused(function: Callable, is_cuda: bool) -> Callable:
    """On a GPU one kernel instead of one per operation: each pass over memory counts."""
    return torch.compile(function) if is_cuda and find_spec("triton") else function


def _bits(kind: Code) -> int:
    return 4 if kind == "int4" else 8


def _n_groups(kind: Code, n: int) -> int:
    return -(-n // GROUPS[_bits(kind)])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
