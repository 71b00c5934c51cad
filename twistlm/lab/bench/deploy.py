"""`twistlm bench deploy`: the full parent against tickets of several sizes, on this machine."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from ...model import generator, huggingface
from ...model.blocks import Blueprint, widths_of_ratio
from ...system import terminal
from ...system.files import whole_folder
from ...system.provenance import describe_run
from ...system.terminal import progress
from ...tickets import deploy
from ...tickets.parent import Parent
from .measure import MEMORY, RUNTIMES, Workload, in_a_process, peak_bytes, times
from .request import DeployRequest

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


def blueprints(parent: Parent, ratios: Sequence[str], seed: int) -> dict[str, Blueprint]:
    """The full model, and a random ticket of every ratio."""
    cut = parent.block_map
    widths = {ratio: widths_of_ratio(cut, ratio) for ratio in ratios}
    tickets = {r: generator.for_deployment(cut, w, seed=seed) for r, w in widths.items()}
    return {FULL: cut.full(), **tickets}


def bench(
    parent: Parent, request: DeployRequest, folder: Path | None = None, *, quiet: bool = False
) -> DeployBench:
    """Measure the full parent and one random ticket per ratio; `folder` keeps the models too."""
    if folder is not None and folder.exists():
        raise ValueError(f"--out {folder} exists already: choose another folder")
    chosen_blocks = blueprints(parent, request.ratio, request.seed)
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
        for ratio, blueprint in chosen_blocks.items():
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
