"""Compiled functions and CUDA graphs: one local step without Python and without launch gaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_CALLS = 2  # before a graph is recorded: compilation, autotuning and library handles

_pools: dict[torch.device, Any] = {}  # graphs never overlap, so those of a device share memory


def is_on(compile: str, device: torch.device) -> bool:
    """Whether `train.compile` means yes on this device; `auto` compiles where it pays, on a GPU."""
    return device.type == "cuda" if compile == "auto" else compile == "true"


def compiled(function: Callable) -> Callable:
    # one entry per subnet width and parameter slice; beyond the limit torch falls back to eager
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 512)
    return torch.compile(function)


class Replayed:
    """A function of fixed tensors; on a GPU it is recorded once as a CUDA graph and then replayed."""

    def __init__(self, function: Callable[[], None], device: torch.device, enabled: bool):
        self.function, self.device = function, device
        self.enabled = enabled and device.type == "cuda"
        self.n_calls = 0
        self.graph: Any = None

    def __call__(self) -> None:
        if not self.enabled:
            self.function()
            return
        if self.n_calls < WARM_CALLS:
            self.n_calls += 1
            self._on_side_stream()
            return
        if self.graph is None:
            pool = _pools.setdefault(self.device, torch.cuda.graph_pool_handle())
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=pool):
                self.function()
        self.graph.replay()

    def _on_side_stream(self) -> None:
        """Recording forbids the default stream, so what is warmed up must not hang on it."""
        stream, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.function()
        current.wait_stream(stream)
