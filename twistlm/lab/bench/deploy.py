"""`twistlm lab bench deploy`: the full parent against tickets of several sizes, on this machine.

Latency: one process holds all sizes and runs them in turn, so that a busy machine slows all of them
alike. Memory: one process per size.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from ...export import gguf, llamacpp, need, onnx
from ...export.verify import Runner, TorchRunner
from ...model import generator, huggingface
from ...model.blocks import widths_of_ratio
from ...system import terminal
from ...system.files import whole_folder
from ...system.provenance import describe_run
from ...system.terminal import progress
from ...tickets import deploy
from ...tickets.parent import Parent
from .request import DeployRequest

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


def _ticket_itself(ticket: Path, folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(ticket.glob("*.safetensors")))


def _load_ticket(path: Path, threads: int, n_context: int) -> Runner:
    torch.set_num_threads(threads)
    return TorchRunner(deploy.load_ticket(path.parent))


def _as_onnx(type_: str, ticket: Path, folder: Path) -> tuple[Path, ...]:
    onnx.export(deploy.load_ticket(ticket), folder, type_)
    return tuple(sorted(folder.glob(f"{onnx.FILE}*")))  # the graph, then its weights


def _load_onnx(path: Path, threads: int, n_context: int) -> Runner:
    return onnx.OnnxRunner(path.parent, threads)


def _as_gguf(type_: str, ticket: Path, folder: Path) -> tuple[Path, ...]:
    need("llama.cpp (it compiles)", "llama", "llama_cpp")
    path = folder / "ticket.gguf"
    gguf.export(deploy.load_ticket(ticket), path, type_)
    return (path,)


def _load_gguf(path: Path, threads: int, n_context: int) -> Runner:
    return llamacpp.LlamaRunner(path, n_context, threads)


@dataclass(frozen=True)
class Runtime:
    """`write` raises ValueError where a library is missing or the family has no home there."""

    write: Callable[[Path, Path], tuple[Path, ...]]  # (ticket, its own folder) -> files of weights
    load: Callable[[Path, int, int], Runner]  # (first of the files, threads, tokens to hold)


RUNTIMES = {
    "torch": Runtime(_ticket_itself, _load_ticket),
    "onnx": Runtime(partial(_as_onnx, "f32"), _load_onnx),
    "onnx-q8": Runtime(partial(_as_onnx, "q8"), _load_onnx),
    "llama.cpp-f16": Runtime(partial(_as_gguf, "f16"), _load_gguf),
    "llama.cpp-q8_0": Runtime(partial(_as_gguf, "q8_0"), _load_gguf),
    "llama.cpp-q4_k_m": Runtime(partial(_as_gguf, "q4_k_m"), _load_gguf),
}


FULL = "full"
PREFILL = (128, 512)  # tokens


@dataclass(frozen=True)
class ModelTimes:
    """One model in one runtime; milliseconds are all repeats, in order."""

    runtime: str
    ratio: str
    n_bytes: int
    prefill_ms: dict[int, list[float]]  # prompt length -> ms of the whole prompt
    decode_ms: list[float]  # of each token
    peak_bytes: int | None
    delta: float  # max |logit - torch's logit| after the shortest prompt
    logits: np.ndarray

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(ms) for name, ms in self._times().items()}

    def minima(self) -> dict[str, float]:
        return {name: min(ms) for name, ms in self._times().items()}

    def _times(self) -> dict[str, list[float]]:
        times = {f"prefill {n}": ms for n, ms in self.prefill_ms.items()}
        return {**times, "decode": self.decode_ms}

    def to_dict(self) -> dict[str, Any]:
        plain = {**asdict(self), "median_ms": self.medians(), "min_ms": self.minima()}
        del plain["logits"]
        return plain


@dataclass(frozen=True)
class DeployBench:
    """All rows, and the machine's state while they were measured."""

    source: str
    plan: Workload
    rows: tuple[ModelTimes, ...]
    left_out: dict[str, str]  # runtime -> why
    load_average: tuple[float, float]  # over a minute, before and after
    run: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() for row in self.rows]
        return {**asdict(self), "rows": rows, "memory": MEMORY}


def bench(
    parent: Parent, request: DeployRequest, folder: Path | None = None, *, quiet: bool = False
) -> DeployBench:
    """Measure the full parent and one random ticket per ratio; `folder` keeps the models too."""
    if folder is not None and folder.exists():
        raise ValueError(f"--out {folder} exists already: choose another folder")
    cut, kept = parent.block_map, {FULL: parent.block_map.full()}
    for ratio in request.ratio:
        kept[ratio] = generator.for_deployment(cut, widths_of_ratio(cut, ratio), seed=request.seed)
    plan = Workload(
        prefill=_lengths(parent, request.prefill, request.decode),
        n_decode=request.decode,
        n_repeats=request.repeats,
        threads=request.threads or torch.get_num_threads(),
        vocab_size=huggingface.vocab_size(parent.template),
    )
    # torch is always there: the others' logits are compared with its own
    chosen = [r for r in RUNTIMES if not request.runtime or r in ("torch", *request.runtime)]
    before, rows, left_out = os.getloadavg()[0], list[ModelTimes](), dict[str, str]()
    with _place(folder) as place, progress(quiet) as bar:
        task = bar.add_task("bench", total=2 * len(chosen), note="extract")
        tickets = {}
        for ratio, blueprint in kept.items():
            tickets[ratio] = place / "torch" / ratio.replace("/", "-")
            deploy.save_ticket(parent, blueprint, tickets[ratio])
        files = {}
        for name in chosen:
            bar.update(task, note=f"write {name}")
            try:
                files[name] = _write(name, tickets, place / name)
            except ValueError as error:  # a library is missing, or the family has no home there
                if name in request.runtime:
                    raise
                left_out[name] = str(error)
                shutil.rmtree(place / name)
                bar.advance(task)  # nothing to measure
            bar.advance(task)
        for name, written in files.items():
            bar.update(task, note=f"measure {name}")
            rows += _measure(name, written, plan, rows)
            bar.advance(task)
        made = DeployBench(
            parent.source, plan, tuple(rows), left_out, (before, os.getloadavg()[0]), describe_run()
        )
        (place / "deploy.json").write_text(json.dumps(made.to_dict(), indent=1) + "\n")
    return made


@contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    """Where models are written: a folder that appears when all is measured, or a passing one."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="twistlm-bench-") as name:
            yield Path(name)
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as draft:
            yield draft


def _lengths(parent: Parent, asked: Sequence[int], n_decode: int) -> tuple[int, ...]:
    """Prompt lengths that leave room for decoding; by default those of 128 and 512 that fit."""
    most = getattr(parent.template.config, "max_position_embeddings", None) or 1 << 30
    room = most - n_decode
    if bad := [n for n in asked if not 1 <= n <= room]:
        raise ValueError(
            f"--prefill {bad[0]}: {parent.source} has {most} positions, of which decoding takes "
            f"{n_decode}: use 1..{room}"
        )
    if room < 1:
        raise ValueError(f"--decode {n_decode}: {parent.source} has only {most} positions")
    return tuple(asked) or tuple(n for n in PREFILL if n <= room) or (room,)


def _write(name: str, tickets: dict[str, Path], place: Path) -> dict[str, tuple[Path, ...]]:
    """A runtime's files for every ticket."""
    files = {}
    for ratio, ticket in tickets.items():
        folder = place / ticket.name
        folder.mkdir(parents=True, exist_ok=True)
        files[ratio] = RUNTIMES[name].write(ticket, folder)
    return files


def _measure(
    name: str, files: dict[str, tuple[Path, ...]], plan: Workload, earlier: list[ModelTimes]
) -> list[ModelTimes]:
    """The rows of one runtime."""
    heads = {ratio: paths[0] for ratio, paths in files.items()}
    reference = {row.ratio: row.logits for row in earlier if row.runtime == "torch"}
    rows = []
    for ratio, (prefill_ms, decode_ms, logits) in in_a_process(times, name, heads, plan).items():
        n_bytes = sum(path.stat().st_size for path in files[ratio])
        peak = in_a_process(peak_bytes, name, heads[ratio], plan)
        delta = float(np.abs(logits - reference.get(ratio, logits)).max())
        rows.append(ModelTimes(name, ratio, n_bytes, prefill_ms, decode_ms, peak, delta, logits))
    return rows


def table(made: DeployBench) -> Table:
    """Median / minimum milliseconds, and how many times faster than the full parent."""
    plan = made.plan
    title = (
        f"{made.source}: ms, median / minimum of {plan.n_repeats} runs in turn (x full); "
        f"{plan.threads} threads, load average {made.load_average[0]:.1f} to "
        f"{made.load_average[1]:.1f}"
    )
    heads = ("MB on disk", "peak MB", *made.rows[0].medians(), "max |Δlogit|")
    result = terminal.table(title, "runtime", "blocks", *heads, words=2)
    full = {row.runtime: row.medians() for row in made.rows if row.ratio == FULL}
    for row in made.rows:
        least = row.minima()
        cells = [
            f"{ms:.2f} / {least[name]:.2f} ({full[row.runtime][name] / ms:.2f}x)"
            for name, ms in row.medians().items()
        ]
        peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}"
        mega = f"{row.n_bytes / 1e6:.1f}"
        result.add_row(row.runtime, row.ratio, mega, peak, *cells, f"{row.delta:.1e}")
    return result
