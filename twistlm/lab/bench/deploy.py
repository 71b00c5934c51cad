"""`twistlm lab bench deploy`: the full parent against tickets of several sizes, on this machine.

One process of each runtime holds all sizes and runs them in turn, so that a busy machine slows all
of them alike.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from ...export import RUNTIMES, gguf, need, onnx
from ...export.verify import Runner, TorchRunner
from ...model import generator, huggingface
from ...model.blocks import widths_of_ratio
from ...system import terminal
from ...system.provenance import describe_run
from ...system.terminal import progress
from ...tickets import deploy
from ...tickets.parent import Parent
from . import DeployRequest

FULL = "full"
PREFILL = (128, 512)  # tokens
Times = dict[str, list[float]]  # milliseconds of `prefill N` and `decode`, in order


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call it where nothing else was imported, loaded or started."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(function, *args).result()
    except BrokenProcessPool:
        raise OSError(f"the process that ran {args[0]} was killed: is memory short?") from None


def write_model(name: str, ticket: Path, folder: Path) -> list[Path]:
    """Write a ticket for a runtime; returns its files of weights.

    ValueError where a library is missing or the family has no home there.
    """
    if name == "torch":
        return sorted(ticket.glob("*.safetensors"))
    folder.mkdir(parents=True, exist_ok=True)
    if name.startswith("onnx"):
        onnx.export(deploy.load_ticket(ticket), folder, "q8" if name.endswith("q8") else "f32")
        return sorted(folder.glob(f"{onnx.FILE}*"))  # the graph, then its weights
    need("llama.cpp (it compiles)", "llama", "llama_cpp")
    file = folder / "ticket.gguf"
    gguf.export(deploy.load_ticket(ticket), file, name.removeprefix("llama.cpp-"))
    return [file]


def open_runner(name: str, path: Path, threads: int, n_context: int) -> Runner:
    """A model in its runtime, from the first of its files."""
    if name == "torch":
        torch.set_num_threads(threads)
        return TorchRunner(deploy.load_ticket(path.parent))
    if name.startswith("onnx"):
        return onnx.OnnxRunner(path.parent, threads)
    return gguf.LlamaRunner(path, n_context, threads)


def times(
    name: str, files: dict[str, Path], ids: list[int], plan: DeployRequest
) -> dict[str, tuple[Times, np.ndarray]]:
    """Times and last logits of every size, in turn: each repeat runs all of them.

    A run reads every prompt, the shortest last, then tokens one by one after it.
    """
    runners = {r: open_runner(name, path, plan.threads, len(ids)) for r, path in files.items()}
    keys = (*(f"prefill {n}" for n in plan.prefill), "decode")
    found: dict[str, Times] = {ratio: {key: [] for key in keys} for ratio in files}
    lengths, last = sorted(plan.prefill, reverse=True), {}
    for repeat in range(1 + plan.repeats):  # the first only warms up
        for ratio, runner in runners.items():
            steps: list[Any] = [(f"prefill {n}", runner.prefill, ids[:n]) for n in lengths]
            after = ids[lengths[-1] :][: plan.decode]
            steps += [("decode", runner.decode, token) for token in after]
            for key, read, tokens in steps:
                began = time.perf_counter()
                logits = read(tokens)
                if repeat:
                    found[ratio][key].append(1000 * (time.perf_counter() - began))
                elif key != "decode":
                    last[ratio] = logits[-1]
    return {ratio: (found[ratio], last[ratio]) for ratio in files}


def bench(parent: Parent, request: DeployRequest, *, quiet: bool = False) -> dict[str, Any]:
    """Measure the full parent and one random ticket per ratio."""
    cut, kept = parent.block_map, {FULL: parent.block_map.full()}
    for ratio in request.ratio:
        kept[ratio] = generator.for_deployment(cut, widths_of_ratio(cut, ratio), seed=request.seed)
    threads = request.threads or torch.get_num_threads()
    plan = replace(request, prefill=_lengths(parent, request), threads=threads)
    draw, vocab = np.random.default_rng(0), huggingface.vocab_size(parent.template)
    ids = draw.integers(vocab, size=max(plan.prefill) + plan.decode).tolist()
    # torch is always there: the others' logits are compared with its own
    chosen = [r for r in RUNTIMES if not request.runtime or r in ("torch", *request.runtime)]
    made: dict[str, Any] = {"source": parent.source, "plan": asdict(plan), "rows": []}
    made |= {"left_out": {}, "run": describe_run()}
    files: dict[str, dict[str, list[Path]]] = {}
    reference: dict[str, np.ndarray] = {}  # torch's logits after the shortest prompt
    with tempfile.TemporaryDirectory() as folder, progress(quiet) as bar:
        place, task = Path(folder), bar.add_task("bench", total=len(chosen), note="extract")
        places = {ratio: ratio.replace("/", "-") for ratio in kept}
        for ratio, blueprint in kept.items():
            deploy.save_ticket(parent, blueprint, place / "torch" / places[ratio])
        for name in chosen:
            bar.update(task, note=f"write {name}")
            try:
                files[name] = {
                    ratio: write_model(name, place / "torch" / where, place / name / where)
                    for ratio, where in places.items()
                }
            except ValueError as error:  # a library is missing, or the family has no home there
                if name in request.runtime:
                    raise
                made["left_out"][name] = str(error)
        bar.update(task, total=len(files))
        for name, written in files.items():
            bar.update(task, note=f"measure {name}")
            heads = {ratio: paths[0] for ratio, paths in written.items()}
            for ratio, (ms, logits) in in_a_process(times, name, heads, ids, plan).items():
                delta = np.abs(logits - reference.setdefault(ratio, logits)).max()
                row = {
                    "runtime": name,
                    "ratio": ratio,
                    "n_bytes": sum(path.stat().st_size for path in written[ratio]),
                    "ms": ms,
                    "median_ms": {key: statistics.median(each) for key, each in ms.items()},
                    "min_ms": {key: min(each) for key, each in ms.items()},
                    "delta": float(delta),  # max |logit - torch's logit|
                }
                made["rows"].append(row)
            bar.advance(task)
    return made


def _lengths(parent: Parent, asked: DeployRequest) -> tuple[int, ...]:
    """Prompt lengths that leave room for decoding; by default those of 128 and 512 that fit."""
    most = huggingface.n_positions(parent.template)
    room = most - asked.decode
    if room < 1:
        raise ValueError(f"--decode {asked.decode}: {parent.source} has only {most} positions")
    if bad := [n for n in asked.prefill if not 1 <= n <= room]:
        raise ValueError(
            f"--prefill {bad[0]}: {parent.source} has {most} positions, of which decoding takes "
            f"{asked.decode}: use 1..{room}"
        )
    return asked.prefill or tuple(n for n in PREFILL if n <= room) or (room,)


def table(made: dict[str, Any]) -> Table:
    """Median / minimum milliseconds, and how many times faster than the full parent."""
    plan, rows = made["plan"], made["rows"]
    title = (
        f"{made['source']}: ms, median / minimum of {plan['repeats']} runs in turn (x full); "
        f"{plan['threads']} threads"
    )
    heads = ("MB on disk", *rows[0]["ms"], "max |Δlogit|")
    result = terminal.table(title, "runtime", "blocks", *heads, words=2)
    full = {row["runtime"]: row["median_ms"] for row in rows if row["ratio"] == FULL}
    for row in rows:
        cells = [
            f"{ms:.2f} / {row['min_ms'][key]:.2f} ({full[row['runtime']][key] / ms:.2f}x)"
            for key, ms in row["median_ms"].items()
        ]
        head = (row["runtime"], row["ratio"], f"{row['n_bytes'] / 1e6:.1f}")
        result.add_row(*head, *cells, f"{row['delta']:.1e}")
    return result
