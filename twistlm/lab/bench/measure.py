"""Times and memory of models in a runtime, each taken in a process of its own.

Latency: one process holds all sizes and runs them in turn, so that a busy machine slows all of them
alike. Memory: one process per size.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...export import gguf, llamacpp, need, onnx
from ...export.verify import Runner, TorchRunner
from ...tickets import deploy

MEMORY = (
    "peak resident memory while running, less what the process held before the model was loaded "
    "(VmHWM after a reset - VmRSS), a process for each"
)
Times = tuple[dict[int, list[float]], list[float], np.ndarray]  # prefill ms, decode ms, logits


@dataclass(frozen=True)
class Workload:
    """What every model is put through."""

    prefill: tuple[int, ...]  # prompt lengths
    n_decode: int  # tokens read one by one after the shortest prompt
    n_repeats: int
    threads: int
    vocab_size: int

    @property
    def n_context(self) -> int:
        return max(self.prefill) + self.n_decode

    def ids(self, n: int) -> list[int]:
        return np.random.default_rng(0).integers(self.vocab_size, size=n).tolist()


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call it where nothing else was imported, loaded or started."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(function, *args).result()
    except BrokenProcessPool:
        raise OSError(f"the process that ran {args[0]} was killed: is memory short?") from None


def times(name: str, files: dict[str, Path], plan: Workload) -> dict[str, Times]:
    """Times of every size, in turn: each repeat runs all of them."""
    runners = {
        ratio: RUNTIMES[name].load(path, plan.threads, plan.n_context)
        for ratio, path in files.items()
    }
    result: dict[str, Times] = {}
    for _ in range(1 + plan.n_repeats):
        for ratio, runner in runners.items():
            prefill_ms, decode_ms, logits = _once(runner, plan)
            if ratio not in result:  # the first run of each warms up
                result[ratio] = ({n: [] for n in plan.prefill}, [], logits)
                continue
            for n, ms in prefill_ms.items():
                result[ratio][0][n].append(ms)
            result[ratio][1].extend(decode_ms)
    return result


def _once(runner: Runner, plan: Workload) -> tuple[dict[int, float], list[float], np.ndarray]:
    """Every prompt, the shortest last; then tokens one by one after it."""
    ids = plan.ids(plan.n_context)
    prefill_ms, decode_ms = {}, []
    for n in sorted(plan.prefill, reverse=True):
        prefill_ms[n], logits = _timed(runner.prefill, ids[:n])
    for token in ids[n : n + plan.n_decode]:
        decode_ms.append(_timed(runner.decode, token)[0])
    return prefill_ms, decode_ms, logits[-1]


def _timed(read: Callable[[Any], np.ndarray], tokens: Any) -> tuple[float, np.ndarray]:
    began = time.perf_counter()
    logits = read(tokens)
    return 1000 * (time.perf_counter() - began), logits


def peak_bytes(name: str, path: Path, plan: Workload) -> int | None:
    """Memory of one model at work; None where the system keeps no such count."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.is_file():
        return None
    before = _resident(status, "VmRSS")
    runner = RUNTIMES[name].load(path, plan.threads, plan.n_context)
    gc.collect()
    try:
        reset.write_text("5")  # forget the peak of loading
    except OSError:
        return None
    _once(runner, plan)
    return _resident(status, "VmHWM") - before


def _resident(status: Path, key: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


@dataclass(frozen=True)
class Runtime:
    """One row of the table; `write` raises ValueError where library or family do not permit."""

    name: str
    write: Callable[[Path, Path], tuple[Path, ...]]  # (ticket, its own folder) -> files of weights
    load: Callable[[Path, int, int], Runner]  # (first of the files, threads, tokens to hold)


def _ticket_itself(ticket: Path, folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(ticket.glob("*.safetensors")))


def _load_ticket(path: Path, threads: int, n_context: int) -> Runner:
    torch.set_num_threads(threads)
    return TorchRunner(deploy.load_ticket(path.parent))


def _as_onnx(type_: str) -> Callable[[Path, Path], tuple[Path, ...]]:
    def write(ticket: Path, folder: Path) -> tuple[Path, ...]:
        onnx.export(deploy.load_ticket(ticket), folder, type_)
        return tuple(sorted(folder.glob(f"{onnx.FILE}*")))  # the graph, then its weights

    return write


def _load_onnx(path: Path, threads: int, n_context: int) -> Runner:
    return onnx.OnnxRunner(path.parent, threads)


def _as_gguf(type_: str) -> Callable[[Path, Path], tuple[Path, ...]]:
    def write(ticket: Path, folder: Path) -> tuple[Path, ...]:
        need("llama.cpp (it compiles)", "llama", "llama_cpp")
        path = folder / "ticket.gguf"
        gguf.export(deploy.load_ticket(ticket), path, type_)
        return (path,)

    return write


def _load_gguf(path: Path, threads: int, n_context: int) -> Runner:
    return llamacpp.LlamaRunner(path, n_context, threads)


RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        Runtime("torch", _ticket_itself, _load_ticket),
        Runtime("onnx", _as_onnx("f32"), _load_onnx),
        Runtime("onnx-q8", _as_onnx("q8"), _load_onnx),
        *(Runtime(f"llama.cpp-{t}", _as_gguf(t), _load_gguf) for t in ("f16", "q8_0", "q4_k_m")),
    )
}
