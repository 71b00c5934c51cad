"""Perplexities of a parent or a ticket as one record and one table: what `eval` and `demo` print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from tokenizers import Tokenizer

from .. import config
from ..compute.perplexity import Evaluator, Spread, Text, perplexity
from ..config import Config, DataConfig
from ..data.builtin import resolve
from ..data.token_file import TokenFile, open_tokens
from ..model import huggingface
from ..model.blocks import widths_of_ratio
from ..system import provenance, terminal
from ..system.device import pick_device
from ..system.terminal import progress
from . import deploy
from . import parent as parents
from .parent import Parent


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
    file.check(cfg.data.seq_len, huggingface.vocab_size(parent.template), parent.tokenizer_sha256)
    text = Text(file, cfg.data.seq_len, tokens)
    return Evaluator(
        parent.template, parent.block_map, parent.central, text,
        scale=parent.scale, precision=cfg.train.precision, rho=parent.progress.rho,
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
        name, parent.progress.round, parent.central.layout.n_params, full, subnets, text.file.stem,
        text.n_sequences * text.seq_len, seed, provenance.describe_run(),
    )  # fmt: skip


def score_checkpoint(
    source: str | Path,
    ratios: list[str],
    n: int,
    *,
    data: str | None = None,
    tokens: int = 0,
    seed: int = 0,
    device: str = "auto",
    name: str | None = None,
    overrides: Sequence[str] = (),
) -> Scores:
    """A parent of any kind, whole and cut."""
    opened = parents.open_(source, device, overrides)
    ready = evaluator(opened, data, tokens)
    return score(ready, opened, ratios, n, name=name or Path(source).name, seed=seed)


def score_ticket(
    folder: Path,
    *,
    data: str | None,
    tokens: int = 0,
    device: str = "auto",
    overrides: Sequence[str] = (),
) -> Scores:
    """A ticket as it is: one number."""
    if data is None:
        raise ValueError(f"{folder} is a ticket and has no tokens of its own: give --data STEM")
    model = deploy.load_ticket(folder)
    most = getattr(model.config, "max_position_embeddings", None) or 1024
    default = Config(data=DataConfig(seq_len=min(1024, most)))
    cfg = config.override(default, overrides)
    file = open_tokens(resolve(data, "valid"))
    file.check(cfg.data.seq_len, huggingface.vocab_size(model))
    check_same_tokenizer(file, folder / "tokenizer.json")
    text = Text(file, cfg.data.seq_len, tokens)
    torch.nn.Module.to(model, pick_device(device))
    return Scores(
        folder.name, 0, sum(p.numel() for p in model.parameters()),
        perplexity(model, text, cfg.train.precision), (), file.stem, text.n_sequences * text.seq_len,
        0, provenance.describe_run(),
    )  # fmt: skip


def check_same_tokenizer(file: TokenFile, path: Path) -> None:
    """Tokens of another tokenizer would give a number that means nothing."""
    theirs = file.tokenizer_path
    if path.is_file() and theirs.is_file():
        # by the parts that make ids out of text: transformers writes the others in its own way
        ours, other = (json.loads(Tokenizer.from_file(str(p)).to_str()) for p in (path, theirs))
        if any(ours[part] != other[part] for part in ("normalizer", "pre_tokenizer", "model")):
            raise ValueError(f"{file.stem} was made with another tokenizer than {path}")


def table(rows: list[Scores]) -> Table:
    """One column per parent: mean ± sd (worst) of the random subnets at each size."""
    first = rows[0]
    title = f"perplexity on {first.n_tokens:,} tokens"
    if first.subnets:
        title += f"; {len(first.subnets[0].values)} random subnets: mean ± sd (worst)"
    result = terminal.table(title, "blocks", "parameters", *(row.name for row in rows))
    whole = "full" if first.subnets else "ticket"
    result.add_row(whole, f"{first.n_params:,}", *(f"{row.full:.2f}" for row in rows))
    for i, spread in enumerate(first.subnets):
        cells = (str(row.subnets[i]) for row in rows)
        result.add_row(spread.ratio, f"{spread.n_params:,}", *cells)
    return result
