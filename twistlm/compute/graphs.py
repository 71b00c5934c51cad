"""Compiled functions and CUDA graphs: one local step without Python and without launch gaps."""

import os
import platform
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..model.huggingface import Model

CACHE = "TORCHINDUCTOR_CACHE_DIR"
WARM_CALLS = 2  # before a graph is recorded: compilation, autotuning and library handles


def is_on(compile: str, device: torch.device) -> bool:
    """Whether `train.compile` means yes on this device; `auto` compiles where it pays, on a GPU."""
    return device.type == "cuda" if compile == "auto" else compile == "true"


def compiled(function: Callable) -> Callable:
    """A function that torch compiles at its first call."""
    _prepare_compiler()
    return torch.compile(function)


def _prepare_compiler() -> None:
    """Let torch compile many widths, and keep its cache apart from that of other kinds of CPU.

    torch 2.13 takes code from its cache that was made for another vector width, and half of an
    AdamW step is then wrong.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes a second

    # one entry per subnet width and parameter slice; beyond the limit torch falls back to eager
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 512)
    capability = torch.backends.cpu.get_cpu_capability()
    if os.environ.get(CACHE, default_cache_dir()) == default_cache_dir():  # not set by the user
        own = f"{default_cache_dir()}-{platform.machine()}-{capability.replace(' ', '-')}"
        os.environ[CACHE] = own


def _layers(model: Model) -> list[torch.nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def recompute_layers_(model: Model) -> None:
    """Let a backward pass keep each layer's inputs alone; before `compile_layers_`, inside it."""
    for layer in _layers(model):
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable) -> Callable:
    # a function of its own: the compiler looks into it, but passes by a `functools.partial`
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        # nothing in a layer is random: there is no dropout in eval mode
        how: Any = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(forward, *args, **how, **kwargs)

    return recomputed


def compile_layers_(model: Model) -> bool:
    """Compile each layer by itself, for layers of one shape share a graph; False without any."""
    # by default torch does not look whether a layer has hooks: a gated one would take the graph of
    # a shared one of the same shapes, and run without its mask and scale
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    layers = _layers(model)
    _prepare_compiler()
    # torch's own tracer looks at the .grad of a layer's input, and torch then warns about it
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    for layer in layers:
        # a dozen small kernels are tried in several shapes each: seconds, for 1.5% of a step at
        # batch 2
        layer.compile(dynamic=False, options={"max_autotune_pointwise": True})
    return bool(layers)


@cache  # and so never freed: graphs never overlap, and those of a device share its memory
def _first_graph(device: torch.device) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device=device)
    return graph


@cache  # one for all warm-ups: cuBLAS keeps a workspace for every stream that it has seen
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


class Replayed:
    """A function of fixed tensors; a GPU records it once as a CUDA graph and replays that."""

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
            # recording forbids the default stream, so what is warmed up must not hang on it
            stream, current = _side_stream(self.device), torch.cuda.current_stream(self.device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self.function()
            current.wait_stream(stream)
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=_first_graph(self.device).pool()):
                self.function()
        self.graph.replay()
