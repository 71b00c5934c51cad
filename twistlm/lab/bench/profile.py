"""Where a step's time goes on a GPU: milliseconds of its kernels, in groups."""

from __future__ import annotations

from collections.abc import Callable

import torch

N_STEPS = 3
GROUPS = {  # parts of a kernel's name; the first group that fits takes it
    "attention": ("sdpa", "flash", "fmha", "cudnn"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "softmax and loss": ("_softmax",),
    "AdamW": ("rsub_sqrt",),
    "gradients into the buffer": ("multi_tensor_apply",),
    "norms, GELU, sums, copies": ("",),
}


def profile(step: Callable[[], object], device: torch.device) -> dict[str, float] | None:
    """Milliseconds of a step by group of kernels; the rest of its time is gaps. None on a CPU."""
    if device.type != "cuda":
        return None
    on_gpu = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=on_gpu, acc_events=True) as made:
        for _ in range(N_STEPS):
            step()
        torch.cuda.synchronize(device)
    events = made.key_averages()
    return by_group([(e.key, e.self_device_time_total / 1e3 / N_STEPS) for e in events])


def by_group(kernels: list[tuple[str, float]]) -> dict[str, float]:
    """Sums of (name, ms) over the groups."""
    groups = dict.fromkeys(GROUPS, 0.0)
    for name, ms in kernels:
        groups[next(g for g, parts in GROUPS.items() if any(p in name for p in parts))] += ms
    return groups
