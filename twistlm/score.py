"""Perplexities of a checkpoint as one record and one table: what `eval` and `demo` print."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from . import checkpoint, models
from . import parent as parents
from .blocks import widths_of_ratio
from .corpus import resolve
from .data import open_tokens
from .evaluate import Evaluator, Spread, Text
from .parent import Parent
from .terminal import progress


@dataclass(frozen=True)
class Scores:
    """Full-model perplexity and the spread of random subnets at each ratio."""

    name: str
    round: int
    n_params: int
    full: float
    subnets: tuple[Spread, ...]
    data: str
    n_tokens: int
    seed: int
    run: dict[str, Any]  # command, git hash, versions, device

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        for row, spread in zip(plain["subnets"], self.subnets, strict=True):
            row |= spread.summary()
        return plain


def evaluator(parent: Parent, data: str | None = None, tokens: int = 0) -> Evaluator:
    """An evaluator on the run's own validation tokens, or on `data`."""
    cfg = parent.cfg
    if not (data or cfg.data.valid):
        raise ValueError(f"{parent.source} has no validation tokens of its own: give --data STEM")
    file = open_tokens(resolve(data or cfg.data.valid, "valid"))
    file.check(cfg.data.seq_len, models.vocab_size(parent.template), parent.tokenizer_sha256)
    text = Text(file, cfg.data.seq_len, tokens)
    return Evaluator(
        parent.template, parent.block_map, parent.central, text,
        scale=parent.scale, precision=cfg.train.precision,
    )  # fmt: skip


@torch.no_grad()
def score(
    ready: Evaluator,
    parent: Parent,
    ratios: list[str],
    n: int,
    *,
    name: str,
    seed: int = 0,
    quiet: bool = False,
) -> Scores:
    """Evaluate the full model and n random subnets per ratio."""
    widths = {ratio: widths_of_ratio(parent.block_map, ratio) for ratio in ratios}
    with progress(quiet) as bar:
        task = bar.add_task(f"evaluate {name}", total=1 + n * len(ratios), note="")
        full = ready.full_perplexity()
        bar.advance(task)
        subnets = tuple(
            ready.random_subnets(ratio, widths[ratio], n, seed, lambda: bar.advance(task))
            for ratio in ratios
        )
    text = ready.text
    return Scores(
        name, parent.central.round, parent.central.layout.n_params, full, subnets, text.file.stem,
        text.n_sequences * text.seq_len, seed, checkpoint.describe_run(),
    )  # fmt: skip


def score_checkpoint(
    path: Path,
    ratios: list[str],
    n: int,
    *,
    data: str | None = None,
    tokens: int = 0,
    seed: int = 0,
    device: str = "auto",
    name: str | None = None,
) -> Scores:
    opened = parents.open_(path, device)
    return score(
        evaluator(opened, data, tokens), opened, ratios, n, name=name or path.name, seed=seed
    )


def table(rows: list[Scores]) -> Table:
    """One column per parent: mean ± sd (worst) of the random subnets at each size."""
    first = rows[0]
    n = len(first.subnets[0].values) if first.subnets else 0
    result = Table(
        title=f"perplexity on {first.n_tokens:,} tokens; {n} random subnets: mean ± sd (worst)",
        title_justify="left",
    )
    result.add_column("blocks")
    result.add_column("parameters", justify="right")
    for row in rows:
        result.add_column(row.name, justify="right")
    result.add_row("full", f"{first.n_params:,}", *(f"{row.full:.2f}" for row in rows))
    for i, spread in enumerate(first.subnets):
        cells = (str(row.subnets[i]) for row in rows)
        result.add_row(spread.ratio, f"{spread.n_params:,}", *cells)
    return result
