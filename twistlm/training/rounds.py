"""(1)-(5) The loop: a round, its commit, metrics, now and then an evaluation and a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..config import Config
from ..data.stream import Leases
from ..system import terminal
from ..system.device import cpu_threads
from ..system.files import alone
from ..system.signals import Ended, on_signals, stopped
from ..system.terminal import console
from . import checkpoint, engines
from .assignments import Outcome
from .checkpoint import Writer
from .engines.engine import Engine
from .metrics import Metrics
from .run import Progress, Run
from .startup import set_up
from .worker import learning_rate


class GivenUp(Exception):
    """An evaluation that a signal ended."""


def train(
    cfg: Config,
    *,
    resume: bool = False,
    quiet: bool = False,
    is_late: Callable[[], bool] | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    first: int = 0,
) -> Path:
    """Run all rounds of a config, or as many as end before it is late; returns the last checkpoint.

    `on_round` gets every round's line of `metrics.jsonl`, where the central model is. A run begins
    with the sequence `first` of its text.
    """
    with ExitStack() as open_:
        open_.enter_context(cpu_threads(cfg.run.threads))
        cluster = open_.enter_context(closing(engines.join(cfg)))
        if cluster.is_central:
            open_.enter_context(alone(Path(cfg.run.out)))
        run, progress = set_up(cfg, cluster, resume, quiet)
        if not progress.round:
            progress = replace(progress, leases=Leases(first))
        if progress.round < run.end(progress):  # else it was resumed, with nothing left to do
            engine = engines.start(run, progress, quiet, resume)
            run, progress = engine.run, engine.start
            good = Ended | KeyboardInterrupt
            open_.push(lambda kind, *_: engine.close(bool(kind) and not issubclass(kind, good)))
            open_.enter_context(on_signals(run.stop, quiet))
            recorder = RunRecorder(engine, quiet or not cluster.is_central, open_)
            progress = _loop(recorder, is_late, on_round)
    return Path(cfg.run.out) / "checkpoints" / checkpoint.folder_name(progress.round)


def _loop(
    recorder: RunRecorder,
    is_late: Callable[[], bool] | None,
    on_round: Callable[[dict[str, Any]], None] | None,
) -> Progress:
    """Rounds until the end, a signal or a late hour; the central rank records them."""
    run, engine, progress = recorder.run, recorder.engine, recorder.start
    if progress.round >= run.end(progress):  # owners on Ray had the last round, and no disk had it
        recorder.writer.save(engine.snapshot, progress)
    while progress.round < run.end(progress):
        began = time.perf_counter()
        try:
            outcome = engine.round(progress)
        except Ended:  # the round is abandoned, nothing of it is in the central model
            recorder.save_last(progress)
            raise
        progress = outcome.progress
        # the central rank's clock decides for all
        late = is_late is not None and run.cluster.broadcast([float(is_late())])[0] > 0
        evaluates = _is_due(run, progress, run.cfg.run.eval_every)
        saves = engine.stops or late or _is_due(run, progress, run.cfg.run.save_every)
        if evaluates or saves:
            engine.collect_()
        row = recorder.note(outcome, time.perf_counter() - began, evaluates, saves)
        try:
            if row and on_round is not None:
                on_round(row)
            if engine.stops and progress.round < run.end(progress):
                raise stopped(run.stop, progress.round)
        except BaseException:  # the caller's own, or a signal that came since
            recorder.save_last(progress)
            raise
        if late:
            break
    return progress


def _is_due(run: Run, progress: Progress, every: int) -> bool:
    """Every so many rounds and after the last; 0: only then, -1: never."""
    final = progress.round >= run.end(progress)
    return (final and every >= 0) or (every > 0 and progress.round % every == 0)


class RunRecorder:
    """Metrics, evaluations, checkpoints and the bar of a run, kept on the central rank alone."""

    def __init__(self, engine: Engine, quiet: bool, open_: ExitStack):
        run, start = engine.run, engine.start
        self.run, self.start, self.engine, self.quiet = run, start, engine, quiet
        self.saved = start.round  # the last round that was given to the writer
        self.is_central = run.cluster.is_central
        out, what = Path(run.cfg.run.out), (run.cut.template, run.batches.file.tokenizer_path)
        writer = Writer(out / "checkpoints", run.cfg, *what, run.state_bytes)
        self.writer = open_.enter_context(writer)
        if run.central is not None:
            run.central.wait_for_readers = writer.wait
        self.bar = open_.enter_context(terminal.progress(quiet, engine.events))
        name = f"{run.cfg.train.method} rounds"
        self.task = self.bar.add_task(name, total=run.end(start), completed=start.round, note="")
        if self.is_central:
            self.metrics = open_.enter_context(closing(Metrics(out, start.round, asdict(run.cfg))))

    def save_last(self, progress: Progress) -> None:
        """After a round that was abandoned: the one before, where it is not on disk yet."""
        unsaved = self.writer.failure or progress.round > self.saved
        # a copy that waits for `collect_` may be of an earlier round
        if self.is_central and self.engine.is_whole and unsaved:
            self.writer.save(self.engine.snapshot, progress)

    def note(
        self, outcome: Outcome, seconds: float, evaluates: bool, saves: bool
    ) -> dict[str, Any]:
        """A committed round: refuse a loss that is no number, write a line, evaluate, save."""
        run, now = self.run, outcome.progress
        if not self.is_central:
            return {}
        row = _row(run, outcome, seconds)
        speed = row["n_tokens"] / row["seconds"]
        note = f"loss {row['loss']:.3f}  {speed:,.0f} tokens/s"
        self.bar.update(self.task, total=run.end(now), completed=now.round, note=note)
        if evaluates:
            n_models = 1 + len(run.cfg.run.eval_ratios) * run.cfg.run.eval_n
            task = self.bar.add_task("evaluate", total=n_models, note=f"after round {now.round}")

            def advance() -> None:
                self.bar.advance(task)
                if run.stop.requested:
                    raise GivenUp

            try:
                row["eval"], line = self.engine.evaluate(now, advance)
            except GivenUp:  # a scheduler kills soon after its signal: the round is saved at once,
                saves = True  # though other ranks hear of the signal after one more round
                line = "its evaluation was given up; `twistlm eval` makes it"
            self.bar.remove_task(task)
            if not self.quiet:
                console.print(f"round {now.round}: loss {row['loss']:.3f}   {line}")
        self.metrics.write(row)
        # without a whole copy here, a failed save waits for the next round that collects one
        if saves or (self.writer.failure and self.engine.is_whole):
            self.writer.save(self.engine.snapshot, now)
            self.saved = now.round
        return row


def _row(run: Run, outcome: Outcome, seconds: float) -> dict[str, Any]:
    t, stats, done, device = run.cfg.train, outcome.stats, outcome.progress.round, run.cut.device
    n_steps = run.schedule_round(outcome.progress) * t.interval
    step = max(0, n_steps - 1)  # 0: the first results are lost
    began = time.perf_counter()
    loss = float(stats.loss_sum) / stats.n_steps  # the round's only wait for a GPU
    seconds += time.perf_counter() - began
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the training loss is {loss} in round {done - 1}: lower train.lr = {t.lr}, or set "
            f"train.clip; the last checkpoint is unharmed"
        )
    row = {
        "round": done,
        "n_rounds": run.end(outcome.progress),
        "loss": loss,
        "lr": learning_rate(t, step, run.total_steps),
        "n_steps": stats.n_steps,
        "n_tokens": stats.n_tokens,
        "seconds": seconds,
    }
    if device.type == "cuda":  # of all rounds so far: a recorded graph takes its bytes once
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return row | {f"bytes_{way}": n for way, n in asdict(outcome.traffic).items()}
