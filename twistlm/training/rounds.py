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
from ..model.blocks import widths_of_ratio
from ..model.masks import prefixes
from ..system import terminal
from ..system.device import cpu_threads
from ..system.files import alone
from ..system.signals import Ended, on_signals, stopped
from ..system.terminal import console
from . import checkpoint, engines
from .checkpoint import Writer
from .engines.engine import Engine, Outcome
from .metrics import Metrics
from .run import Progress, Run
from .startup import set_up
from .worker import learning_rate


def train(
    cfg: Config,
    *,
    resume: bool = False,
    quiet: bool = False,
    is_late: Callable[[], bool] | None = None,
    note: Callable[[str], None] | None = None,
) -> Path:
    """Run all rounds of a config, or as many as end before it is late; returns the last checkpoint.

    `note` is told after every round where the run is, for a caller with a bar of its own.
    """
    with ExitStack() as open_:
        open_.enter_context(cpu_threads(cfg.run.threads))
        cluster = open_.enter_context(closing(engines.join(cfg)))
        if cluster.is_central:
            open_.enter_context(alone(Path(cfg.run.out)))
        run, progress = set_up(cfg, cluster, resume, quiet)
        if progress.round >= run.end(progress):  # resumed, with nothing left to do
            return _folder(run, progress)
        engine = engines.start(run, progress, quiet)
        open_.push(lambda kind, *_: engine.close(crashed=kind is not None and not _is_end(kind)))
        open_.enter_context(on_signals(run.stop, quiet))
        return _loop(run, engine, progress, quiet or not cluster.is_central, is_late, note)


def _is_end(kind: type[BaseException]) -> bool:
    return issubclass(kind, Ended | KeyboardInterrupt)


def _folder(run: Run, progress: Progress) -> Path:
    return Path(run.cfg.run.out) / "checkpoints" / checkpoint.folder_name(progress.round)


def _loop(
    run: Run,
    engine: Engine,
    progress: Progress,
    quiet: bool,
    is_late: Callable[[], bool] | None,
    note: Callable[[str], None] | None,
) -> Path:
    """Rounds until the end, a signal or a late hour; the central rank records them."""
    with ExitStack() as open_:
        recorder = open_.enter_context(RunRecorder(run, progress, engine, quiet))
        while progress.round < run.end(progress):
            began = time.perf_counter()
            try:
                outcome = engine.round(progress)
            except Ended:  # the round is abandoned, nothing of it is in the central model
                recorder.save_last(progress)
                raise
            progress = outcome.progress
            final = progress.round >= run.end(progress)
            # the central rank's clock decides for all
            late = is_late is not None and run.cluster.broadcast([float(is_late())])[0] > 0
            evaluates = _is_evaluated(run, progress.round, final)
            saves = engine.stops or late or _is_saved(run, progress)
            if evaluates or saves:
                engine.collect_()
            recorder.note(outcome, time.perf_counter() - began, evaluates, saves)
            if note is not None:
                note(f"round {progress.round}/{run.end(progress)}")
            if engine.stops and not final:
                if not saves:  # the signal came since
                    recorder.save_last(progress)
                raise stopped(run.stop, progress.round)
            if late:
                break
    return _folder(run, progress)


def _is_evaluated(run: Run, n_done: int, final: bool) -> bool:
    every = run.cfg.run.eval_every
    return (final and every >= 0) or (every > 0 and n_done % every == 0)


def _is_saved(run: Run, progress: Progress) -> bool:
    """Whether a checkpoint is due after so many rounds."""
    every = run.cfg.run.save_every
    return progress.round >= run.end(progress) or bool(every and progress.round % every == 0)


class RunRecorder:
    """Metrics, evaluations, checkpoints and the bar of a run, kept on the central rank alone."""

    def __init__(self, run: Run, start: Progress, engine: Engine, quiet: bool):
        self.run, self.start, self.engine, self.quiet = run, start, engine, quiet
        self._open = ExitStack()

    def __enter__(self) -> RunRecorder:
        run, method = self.run, self.run.cfg.train.method
        out, tokenizer = Path(run.cfg.run.out), run.batches.file.tokenizer_path
        found = tokenizer if tokenizer.is_file() else None
        self.writer = self._open.enter_context(
            Writer(out / "checkpoints", run.cfg, run.template, found, run.central)
        )
        self.bar = self._open.enter_context(terminal.progress(self.quiet, self.engine.events))
        self.task = self.bar.add_task(
            f"{method} rounds", total=run.end(self.start), completed=self.start.round, note=""
        )
        self.metrics = Metrics(out, self.start.round) if run.central is not None else None
        return self

    def __exit__(self, *why: Any) -> None:
        if self.metrics is not None:
            self.metrics.close()
        self._open.__exit__(*why)

    def save_last(self, progress: Progress) -> None:
        """After a round that was abandoned: the one before, where it is not on disk yet."""
        run = self.run
        unsaved = progress.round > self.start.round and (
            self.writer.failure or not _is_saved(run, progress)
        )
        # a copy that waits for `collect_` may be of an earlier round
        if run.central is not None and self.engine.is_whole and unsaved:
            self.writer.save(run.central, progress)

    def note(self, outcome: Outcome, seconds: float, evaluates: bool, saves: bool) -> None:
        """A committed round: refuse a loss that is no number, write a line, evaluate, save."""
        run, now = self.run, outcome.progress
        if run.central is None or self.metrics is None:
            return
        row = _row(run, outcome, seconds)
        speed = row["n_tokens"] / row["seconds"]
        note = f"loss {row['loss']:.3f}  {speed:,.0f} tokens/s"
        self.bar.update(self.task, total=run.end(now), completed=now.round, note=note)
        if evaluates:
            n_models = 1 + len(run.cfg.run.eval_ratios) * run.cfg.run.eval_n
            task = self.bar.add_task("evaluate", total=n_models, note=f"after round {now.round}")
            row["eval"], line = evaluate(run, now, lambda: self.bar.advance(task))
            self.bar.remove_task(task)
            if not self.quiet:
                console.print(f"round {now.round}: loss {row['loss']:.3f}   {line}")
        self.metrics.write(row)
        # without a whole copy here, a failed save waits for the next round that collects one
        if saves or (self.writer.failure and self.engine.is_whole):
            self.writer.save(run.central, now)


def _row(run: Run, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """A round's line of metrics."""
    t, stats, done = run.cfg.train, outcome.stats, outcome.progress.round
    began = time.perf_counter()
    loss = float(stats.loss_sum) / stats.n_steps  # the round's only wait for a GPU
    seconds += time.perf_counter() - began
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the training loss is {loss} in round {done - 1}: lower train.lr = {t.lr}, or set "
            f"train.clip; the last checkpoint is unharmed"
        )
    return {
        "round": done,
        "loss": loss,
        "lr": learning_rate(t, done * t.interval - 1, run.total_steps),
        "n_steps": stats.n_steps,
        "n_tokens": stats.n_tokens,
        "seconds": seconds,
        **_peak(run.cluster.device),
        **{f"bytes_{way}": n for way, n in asdict(outcome.traffic).items()},
    }


def evaluate(
    run: Run, progress: Progress, advance: Callable[[], None] = lambda: None
) -> tuple[dict[str, Any], str]:
    """Perplexities of the full model and of random subnets, and a line for a person."""
    assert run.evaluator is not None
    ready = replace(run.evaluator, rho=progress.rho)
    full = ready.full_perplexity()
    advance()
    scores: dict[str, Any] = {"full": full}
    line = f"perplexity full {full:.2f}"
    for ratio in run.cfg.run.eval_ratios:
        widths = widths_of_ratio(run.block_map, ratio)
        spread = ready.random_subnets(ratio, widths, run.cfg.run.eval_n, run.cfg.run.seed, advance)
        scores[ratio] = spread.summary()
        line += f"   {ratio} {spread}"
        if progress.order:
            kept = prefixes(run.block_map, progress.order, widths)
            scores[ratio] |= {"nested": ready.subnet_perplexity(kept)}
            line += f" nested {scores[ratio]['nested']:.2f}"
    return scores, line


def _peak(device: torch.device) -> dict[str, int]:
    """The most bytes that tensors took on a GPU since the last call."""
    if device.type != "cuda":
        return {}
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"peak_bytes": most}
