"""bench save: how long a checkpoint keeps training waiting, and how long it takes to be safe on disk."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...config import Config
from ...model import families, huggingface
from ...model.central import create
from ...system.device import pick_device
from ...system.provenance import describe_run
from ...system.terminal import progress
from ...training import checkpoint
from ...training.progress import Progress
from ...training.writer import Writer

TICK = 1e-3  # seconds


@dataclass(frozen=True)
class Saving:
    """Seconds of n checkpoints, in order."""

    n_bytes: int  # weights, carried moments, outer momentum
    blocked: tuple[float, ...]  # until training goes on
    pause: tuple[float, ...]  # the longest pause of the training thread while the other one writes
    safe: tuple[float, ...]  # until the folder has its name, all of it on disk
    run: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench(cfg: Config, parent: Path, n: int, quiet: bool = False) -> Saving:
    """Save the untrained central model of a config n times into a folder that is removed again."""
    if not parent.is_dir():
        raise ValueError(f"--out {parent} is no folder: give one on the disk to measure")
    device = pick_device(cfg.run.device)
    template = huggingface.load(checkpoint.resolved(cfg).model, cfg.run.seed)
    central = create(
        huggingface.state(template),
        huggingface.shapes(template),
        families.partition(template, cfg.blocks),
        carry=cfg.train.moments == "carry",
        outer=cfg.train.nesterov() is not None,
        device=device,
    )
    n_bytes = central.buffer.nbytes + (
        central.velocity.nbytes if central.velocity is not None else 0
    )
    blocked, pause, safe = [], [], []
    with (
        TemporaryDirectory(dir=parent, prefix="bench-save-") as folder,
        Writer(Path(folder), cfg, template, None, central) as writer,
        progress(quiet) as bar,
    ):
        task = bar.add_task("bench save", total=n, note="")
        for done in range(1, n + 1):
            began = time.perf_counter()
            writer.save(central, Progress(done))
            blocked.append(time.perf_counter() - began)
            pause.append(_longest_pause(writer))
            safe.append(time.perf_counter() - began)
            writer.wait()
            bar.advance(task)
    return Saving(n_bytes, tuple(blocked), tuple(pause), tuple(safe), describe_run())


def _longest_pause(writer: Writer) -> float:
    """Of a thread that wants to run every millisecond until the writer is done."""
    longest, last = 0.0, time.perf_counter()
    while writer.busy:
        time.sleep(TICK)
        now = time.perf_counter()
        longest, last = max(longest, now - last - TICK), now
    return longest


def sentence(made: Saving) -> str:
    """All of it in one line."""
    return (
        f"{made.n_bytes / 1e9:.3f} GB, {len(made.blocked)} times: training waits for at most "
        f"{max(made.blocked):.3f} s; the longest pause while it is written is {max(made.pause):.3f} s; safe on "
        f"disk after at most {max(made.safe):.3f} s"
    )
