"""What can be asked of tickets: each request makes a command's options and a method's keywords.

Imports no torch: `--help` reads this module.
"""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from ..config import Config
from ..fields import N_TOKENS, VALID_TEXT, Checked, option, seed_of, words
from . import DTYPES, IMPORTANCES, SPENDS
from .budget import Budget, parse_budgets

KINDS = ("ratio", "params", "size", "latency", "memory")  # of a budget


@dataclass(frozen=True, kw_only=True)
class TicketRequest(Checked):
    """What a ticket may cost, how its blocks are picked, and what it is measured on."""

    ratio: tuple[str, ...] = option(
        "Share of blocks: 6/12, attn=2/3,ffn=6/12 or ffn=6/12,ffn.5=1 (layer 5, if it is cut). "
        "Budgets are repeatable: a ticket for each.",
        (),
    )
    params: tuple[str, ...] = option("At most so many parameters: 85M.", ())
    size: tuple[str, ...] = option(
        "At most so many bytes of weights: 60MB (10^6), 60MiB (2^20).", ()
    )
    latency: tuple[str, ...] = option("At most so long per decoded token, measured here: 12ms.", ())
    memory: tuple[str, ...] = option(
        "At most so many bytes of weights and of the keys and values of --context tokens: 2GB.", ()
    )
    context: str | None = option("Tokens that --memory has room for: 8k (8192) or 2000.", None)
    layers: int | None = option(
        "Keep so many layers, alone or with a budget: the first of the order that the parent was "
        "trained with, or else those whose absence costs the most loss.",
        None,
        least=1,
    )
    spend: str = option(
        "measured: blocks of a budget (not of a ratio) go where losing them costs the most loss "
        "on the text that blocks are scored on, and whole layers may go; even: the same share "
        "everywhere.",
        SPENDS[0],
        choices=SPENDS,
    )
    pick: str = option(
        "nested: the first blocks of the order that the parent was trained with (the default "
        "where it has one, else random); random; best-of:N by validation loss; importance (by "
        f"fisher), or importance:METHOD with METHOD {words(IMPORTANCES)}.",
        "auto",
    )
    stock: bool = option(
        "Only the same widths in all layers, so that the ticket is a plain model of its family "
        "that every runtime loads.",
        False,
    )
    seed: int = seed_of("the pick")
    data: str | None = option(VALID_TEXT, None)
    tokens: int = option(
        "Tokens for each perplexity and for calibration; 0 takes all.", 4096, least=0
    )
    dtype: str = option(f"{words(DTYPES)}.", DTYPES[0], choices=DTYPES)

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in KINDS:  # numbers are natural in Python: params=90_000, ratio=0.5
            object.__setattr__(self, kind, tuple(map(str, getattr(self, kind))))
        for name in ("context", "data"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, str(value))

    @property
    def budgets(self) -> list[Budget]:
        """Every budget that is given, each for a ticket of its own."""
        given = [(kind, asked) for kind in KINDS for asked in getattr(self, kind)]
        if self.layers is not None and not given:
            given = [("ratio", "1")]
        return parse_budgets(self.context, given)

    @property
    def budget(self) -> Budget:
        """The one budget of a request for one ticket."""
        first, *others = self.budgets
        if others:
            kinds = " and ".join(f"--{each.kind}" for each in (first, *others))
            raise ValueError(f"give one budget for one ticket (given: {kinds})")
        return first


def _of(request: type, name: str) -> Any:
    """The same option as another request's."""
    its = request.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return field(default=its.default, metadata=its.metadata)


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """How many random subnets of which sizes are measured, and on what."""

    ratios: tuple[str, ...] = option(
        "Share of blocks, as 6/12 or attn=2/3,ffn=6/12; repeatable.", ("6/12",), "--ratio"
    )
    n: int = option("Random subnets behind each number.", 20, least=1, most=10**6)
    data: str | None = option(VALID_TEXT, None)
    tokens: int = option(N_TOKENS, 0, least=0)
    seed: int = seed_of("the random subnets")


@dataclass(frozen=True, kw_only=True)
class HealRequest:
    """Which ticket is trained, on how many tokens of what, and who teaches it."""

    ticket: Path = option("The folder of a ticket.", argument=True)
    out: Path = option("Folder of the healed ticket.", MISSING, "--out", "-o")
    tokens: str = option("Tokens to train on: 20M.")
    teacher: str | None = option(
        "Whose predictions it learns: a run, a checkpoint, a Hugging Face folder or hub id with "
        "the same tokenizer; none: the text alone. Default: the ticket's parent.",
        None,
    )
    data: str | None = option(
        "Token file to train on; default: data.train of the teacher or parent.", None
    )
    valid: str | None = option(
        "Token file to measure on; default: data.valid of the same run.", None
    )
    valid_tokens: int = option("Use this many tokens of it; 0 takes all.", 0, least=0)
    device: str = "auto"
    overrides: Sequence[str] = ()
    like: Config | None = None  # a run whose settings are taken, instead of the teacher's


@dataclass(frozen=True, kw_only=True)
class ShrinkRequest(Checked):
    """Which model becomes how small, on what text, for how many tokens or hours."""

    model: str = option(
        "A Hugging Face folder or hub id, gguf:FILE, or a run folder.", argument=True
    )
    out: Path = option("Folder for everything that is made.", MISSING, "--out", "-o")
    text: tuple[str, ...] = option(  # from Python also iterables of documents
        "Files of text or sources, .jsonl, .parquet, a folder of them, hub:NAME or "
        "builtin:python-docs; repeatable, with a share of the tokens: code/:0.7.",
        (),
        metavar="SOURCE",
    )
    to: tuple[str, ...] = option(
        "At most so many parameters: 350M. Sizes are repeatable: a ticket for each.", ()
    )
    size: tuple[str, ...] = _of(TicketRequest, "size")
    latency: tuple[str, ...] = _of(TicketRequest, "latency")
    memory: tuple[str, ...] = _of(TicketRequest, "memory")
    context: str | None = _of(TicketRequest, "context")
    tokens: str | None = option("Tokens to train on: 50M. Default: the text once.", None)
    hours: float | None = option("Train for about so long instead.", None, least=0)
    gguf: str | None = option("Write the tickets for llama.cpp, too: q8_0 or f16.", None)
    tasks: str | None = option("Zero-shot tasks at the end, as `eval` takes them.", None)
    tokenizer: str | None = option(
        "tokenizer.json, a folder with one, a hub id, or gguf:FILE. Default: the model's.", None
    )
    column: str = option("Text column of .jsonl and .parquet.", "text")
    dtype: str = _of(TicketRequest, "dtype")
    overrides: Sequence[str] = ()
