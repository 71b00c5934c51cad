"""Perplexities of a parent or a ticket, and what random tickets promise for all of them."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from transformers import PreTrainedModel

from .. import config
from ..compute.perplexity import Spread, Text, perplexity, summarize
from ..config import Config, DataConfig
from ..data.builtin import resolve
from ..data.token_file import TokenFile, open_tokens
from ..model import huggingface
from ..model.blocks import widths_of_ratio
from ..system import provenance, terminal
from ..system.terminal import progress
from ..training import checkpoint
from .deploy import cut_from, read_ticket
from .parent import Parent, default_seq_len, what_is
from .requests import ScoreRequest
from .runnable import open_runnable
from .text import open_text, text_for, text_of

N_SUBNETS = 20  # random ones behind each number
N_CERTIFIED = 200  # and behind a certificate
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)  # the quantiles of a certificate


@dataclass(frozen=True)
class Scores:
    """Full-model perplexity and the spread of random subnets at each ratio."""

    name: str
    n_params: int
    full: float
    data: str
    n_tokens: int
    seq_len: int  # tokens that the model reads at a time
    round: int = 0
    subnets: tuple[Spread, ...] = ()
    seed: int = 0
    scale: str = ""  # of the subnets, where it is not that of training
    nested: tuple[float, ...] = ()  # at each ratio, where the parent has an order of blocks
    run: dict[str, Any] = field(default_factory=provenance.describe_run)

    def __post_init__(self) -> None:
        values = self.full, *self.nested, *(v for spread in self.subnets for v in spread.values)
        if any(map(math.isnan, values)):
            raise ValueError(f"{self.name} has no perplexity: its logits are not finite")

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        for row, spread in zip(plain["subnets"], self.subnets, strict=True):
            row |= summarize(spread.values)
        return plain


def usual_ratios(parent: Parent) -> tuple[str, ...]:
    """`run.eval_ratios`; where they are no whole numbers of a parent's blocks, about half."""
    block_map, ratios = parent.block_map, parent.cfg.run.eval_ratios
    with suppress(ValueError):
        if ratios and all(widths_of_ratio(block_map, ratio) for ratio in ratios):
            return ratios
    kinds = {group.kind: group for group in block_map.groups}
    half = {kind: max(g.least, math.ceil(g.n_blocks / 2)) for kind, g in kinds.items()}
    return (",".join(f"{kind}={k}/{kinds[kind].n_blocks}" for kind, k in half.items()),)


def score_parent(parent: Parent, request: ScoreRequest, name: str, quiet: bool = False) -> Scores:
    """Perplexity of the full model and of n random subnets of each ratio."""
    text = whole_windows(text_of(parent, request.data, request.tokens))
    ratios, n = request.ratios or usual_ratios(parent), request.n or N_SUBNETS
    with progress(quiet) as bar:
        task = bar.add_task(f"evaluate {name}", total=1 + n * len(ratios), note="")
        full, subnets, nested = parent.evaluator(text).all_sizes(
            ratios, n, request.seed, parent.progress.order, partial(bar.advance, task)
        )
    return Scores(
        name,
        parent.central.layout.n_params,
        full,
        text.file.stem,
        text.n_tokens,
        text.seq_len,
        round=parent.progress.round,
        subnets=tuple(subnets),
        seed=request.seed,
        nested=tuple(nested),
    )


def score_whole(
    source: str | Path, request: ScoreRequest, device: str = "auto", overrides: Sequence[str] = ()
) -> Scores:
    """The perplexity of a ticket, or of a model that was not trained here, as it is."""
    folder, seq_len, is_ticket = Path(source), 0, what_is(source) == "ticket"
    if request.data:
        file = open_tokens(resolve(request.data, "valid"))
    elif is_ticket:
        file, seq_len = _parents_text(folder)
    else:
        huggingface.check_there(str(source))
        raise ValueError(f"{source} has no tokens of its own: give --data STEM")
    if is_ticket:  # its windows are those it was measured with, last when it was healed
        record = read_ticket(folder)
        measured = record.get("healed", [record.get("perplexity", {})])[-1]
        seq_len = measured.get("seq_len", seq_len)
    model = open_runnable(source, device).model
    default = Config(data=DataConfig(seq_len=seq_len or default_seq_len(model)))
    cfg = config.override(default, overrides)
    text = text_for(model, file, cfg.data.seq_len, request.tokens, folder / "tokenizer.json")
    return score_model(model, whole_windows(text), folder.name, cfg.train.precision)


def whole_windows(text: Text) -> Text:
    """A text of one window or more, for no less can be read."""
    if 0 < text.max_tokens < text.seq_len:
        raise ValueError(
            f"--tokens {text.max_tokens}: fewer than data.seq_len = {text.seq_len}, which the "
            f"model reads at a time; legal are 0 (all), {text.seq_len} and more"
        )
    return text


def _parents_text(folder: Path) -> tuple[TokenFile, int]:
    """The validation tokens of the run that a ticket was cut out of, and its sequence length."""
    source = cut_from(read_ticket(folder))
    with suppress(ValueError):  # no checkpoint is here, or its text is not
        cfg = checkpoint.open_(source).config
        return open_text(source, cfg, None, "valid"), cfg.data.seq_len
    raise ValueError(
        f"{folder} is a ticket and has no tokens of its own, nor has its parent {source} any that "
        "are here: give --data STEM"
    )


def score_model(model: PreTrainedModel, text: Text, name: str, precision: str = "auto") -> Scores:
    """The perplexity of a model as it is: one number."""
    full, n_params = perplexity(model, text, precision), model.num_parameters()
    return Scores(name, n_params, full, text.file.stem, text.n_tokens, text.seq_len)


def table(rows: list[Scores]) -> Table:
    """One column per parent: mean ± sd (worst) of the random subnets at each size."""
    first = rows[0]
    title = f"perplexity on {first.n_tokens:,} tokens, {first.seq_len:,} at a time"
    if first.subnets:
        title += f"; {len(first.subnets[0].values)} random subnets: mean ± sd (worst)"
        title += "; nested one" if any(row.nested for row in rows) else ""
    names = (f"{row.name}, {row.scale}" if row.scale else row.name for row in rows)
    result = terminal.table(title, "blocks", "parameters", *names)
    whole = "full" if first.subnets else "whole"
    result.add_row(whole, f"{first.n_params:,}", *(f"{row.full:.2f}" for row in rows))
    for i, spread in enumerate(first.subnets):
        cells = (
            f"{row.subnets[i]}" + (f"; {row.nested[i]:.2f}" if row.nested else "") for row in rows
        )
        result.add_row(spread.ratio, f"{spread.n_params:,}", *cells)
    return result


def certificate(values: Sequence[float], coverage: float, confidence: float) -> dict[str, Any]:
    """Of the perplexities of n random tickets: a bound on `coverage` of all, with `confidence`."""
    r, n = rank(len(values), coverage, confidence), len(values)
    return {
        "coverage": coverage,
        "confidence": confidence,
        "rank": r,
        "bound": sorted(values)[r - 1],
        "quantiles": {percent(share): float(np.quantile(values, share)) for share in SHARES},
        "covered_by_worst": float(1 - Fraction(str(confidence))) ** (1 / n),
        "n": n,
    }


def reading(made: dict[str, Any]) -> str:
    """What the draws promise, in three sentences."""
    worst = int(made["covered_by_worst"] * 1000) / 10  # rounded down: a promise must hold
    seen = (f"{share} are at or below {value:.2f}" for share, value in made["quantiles"].items())
    return (
        f"{percent(made['coverage'])} of tickets are at or below {made['bound']:.2f}, with "
        f"{percent(made['confidence'])} confidence (draw {made['rank']} of {made['n']} in order). "
        f"With the same confidence, {worst}% are no worse than the worst one seen. "
        f"Of those seen, {', '.join(seen)}."
    )


def rank(n: int, coverage: float, confidence: float) -> int:
    """The smallest r with P(Binomial(n, coverage) >= r) <= 1 - confidence, counted exactly.

    With this confidence, the r-th smallest of n draws bounds that share of all tickets.
    """
    for name, value in {"coverage": coverage, "confidence": confidence}.items():
        if not 0 < value < 1:
            raise ValueError(f"{name} = {value}: must lie between 0 and 1")
    p, wrong = Fraction(str(coverage)), 1 - Fraction(str(confidence))  # as typed: 0.95 is 19/20
    hits, misses = p.numerator, p.denominator - p.numerator
    # probabilities in units of p.denominator ** -n: integers
    most, tail, r = wrong * p.denominator**n, 0, n + 1
    for k in range(n, -1, -1):
        tail += math.comb(n, k) * hits**k * misses ** (n - k)  # now P(Binomial >= k)
        if tail > most:
            break
        r = k
    if r > n:
        raise ValueError(
            f"n = {n} draws bound no {percent(coverage)} of tickets with {percent(confidence)} "
            f"confidence: n must be at least {math.ceil(math.log(wrong) / math.log(p) - 1e-9)}"
        )
    return r


def percent(share: float) -> str:
    """`99.9%`, with no more digits than it has."""
    return f"{100 * share:.10g}%"
