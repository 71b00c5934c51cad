"""The device that a run computes on, and in which precision."""

import platform
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of a config, ready for use."""
    if name == "auto":
        name = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"run.device = {name!r}: use auto, cpu, cuda or cuda:N")
    if device.type == "cpu" and platform.machine() in ("aarch64", "arm64"):
        # oneDNN's path for a transposed matrix, one per linear in every backward pass, is 14x
        # slower than OpenBLAS at small sizes on ARM and no faster at large ones (docs/log.md)
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment,unused-ignore]
    if device.type == "cuda":
        number = local_rank if device.index is None else device.index
        if number >= (n_gpus := torch.cuda.device_count()):
            raise ValueError(f"run.device = {name!r}: this machine has {n_gpus} CUDA devices")
        device = torch.device("cuda", number)
    return device


@contextmanager
def cpu_threads(n: int) -> Iterator[None]:
    """n CPU threads inside, and as before afterwards: they add up in another order; 0: as now."""
    before = torch.get_num_threads()
    if n:
        torch.set_num_threads(n)
    try:
        yield
    finally:
        if n:
            torch.set_num_threads(before)


def is_bf16(precision: str, device: torch.device) -> bool:
    """Whether the model runs in bf16: where asked for, or by `auto` on a GPU that has it."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return precision == "bf16"


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """bf16 products over float32 weights and a float32 residual stream: for evaluation."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_bf16(precision, device))


def out_of_memory(error: Exception) -> str:
    """Who had no memory for how much, of an error that says so; empty of any other one."""
    of_gpu, told = isinstance(error, torch.OutOfMemoryError), str(error)
    # SystemError: Python's own, where C code found no memory and could not even say so
    of_python = isinstance(error, MemoryError | SystemError)
    if not (of_gpu or of_python or "DefaultCPUAllocator" in told or "bad_alloc" in told):
        return ""
    asked = re.search(r"tried to allocate ([\d.]+ \w+)", told, re.IGNORECASE)
    more = asked[1] if asked else "what was asked for"
    return f"{'the GPU' if of_gpu else 'this machine'} has no memory left for {more}"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """To a device without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
