"""Where a step's time goes on a GPU: its kernels, in groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table

from ...system import terminal

N_STEPS = 3
N_KERNELS = 40  # kept one by one

GROUPS = {  # parts of a kernel's name; the first group that fits takes it
    "attention": ("sdpa", "flash", "fmha", "cudnn"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "softmax and loss": ("_softmax",),
    "AdamW": ("rsub_sqrt",),
    "gradients into the buffer": ("multi_tensor_apply",),
}
REST = "norms, GELU, sums, copies"


@dataclass(frozen=True)
class Profile:
    """Kernels of one step."""

    n_kernels: int
    busy_ms: float  # sum over kernels: the rest of a step is gaps between them
    groups: dict[str, float]  # ms
    kernels: tuple[tuple[str, float, float], ...]  # name, calls, ms; the longest first


def profile(step: Callable[[], object], device: torch.device) -> Profile | None:
    """None on a CPU."""
    if device.type != "cuda":
        return None
    on_gpu = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=on_gpu, acc_events=True) as made:
        for _ in range(N_STEPS):
            step()
        torch.cuda.synchronize(device)
    seen = [
        (event.key, event.count / N_STEPS, event.self_device_time_total / 1e3 / N_STEPS)
        for event in made.key_averages()
    ]
    return summary(seen)


def summary(seen: list[tuple[str, float, float]]) -> Profile:
    groups = dict.fromkeys((*GROUPS, REST), 0.0)
    for name, _, ms in seen:
        groups[_group(name)] += ms
    longest = sorted(seen, key=lambda kernel: -kernel[2])[:N_KERNELS]
    n_kernels = round(sum(calls for _, calls, _ in seen))
    return Profile(n_kernels, sum(groups.values()), groups, tuple(longest))


def _group(name: str) -> str:
    fits = (group for group, parts in GROUPS.items() if any(part in name for part in parts))
    return next(fits, REST)


def kernel_table(rows: list[tuple[str, float, Profile]]) -> Table:
    """One column per size: (title, ms of a step, profile)."""
    heads = (title for title, _, _ in rows)
    result = terminal.table("where a step's milliseconds go", "", *heads)
    for group in (*GROUPS, REST):
        result.add_row(group, *(f"{made.groups[group]:.2f}" for _, _, made in rows))
    result.add_row("gaps", *(f"{ms - made.busy_ms:.2f}" for _, ms, made in rows))
    result.add_row("kernels", *(f"{made.n_kernels}" for _, _, made in rows))
    return result
