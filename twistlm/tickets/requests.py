"""What can be asked of tickets: budgets, and requests with them.

Each request makes a command's options and a method's keywords. Imports no torch: `--help` reads
this module.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..fields import N_TOKENS, VALID_TEXT, WHOLE, Checked, option, seed_of, words
from . import DTYPES, IMPORTANCES, SPENDS

KINDS = ("ratio", "params", "size", "latency", "memory")  # of a budget
COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}
AMOUNTS: dict[str, tuple[Mapping[str, int | Decimal], str]] = {  # units, and examples
    "params": (COUNT, "85M or 1.5B"),
    "tokens": (COUNT, "20M or 500k"),
    "size": (BYTES, "60MB or 512KiB"),
    "memory": (BYTES, "2GB or 512MiB"),
    "latency": ({"us": Decimal("0.001"), "ms": 1, "s": 1000}, "12ms or 0.5s"),
    "context": ({"": 1, "k": 2**10, "m": 2**20}, "8k or 2048"),  # tokens
}


@dataclass(frozen=True)
class Budget:
    """What a ticket may cost."""

    kind: str  # ratio, params, size, latency or memory
    asked: str  # as it was typed
    limit: float = math.inf  # parameters, bytes or ms; a ratio has none
    context: int = 0  # tokens whose keys and values count as memory
    option: str = field(default="", compare=False)  # that named it, where the kind does not

    @property
    def said(self) -> str:
        """As it was typed, with its option."""
        return f"--{self.option or self.kind} {self.asked}"

    @property
    def slug(self) -> str:
        """A name for a folder: `params-85M`, `ratio-4-12`."""
        context = f"-context-{self.context}" if self.context else ""
        return re.sub(r"[^A-Za-z0-9.=_]+", "-", f"{self.kind}-{self.asked}{context}")

    def impossible(self, least: float) -> ValueError:
        unit = {"params": "parameters", "latency": "ms"}.get(self.kind, "bytes")
        takes = f"{least:.2f}" if unit == "ms" else f"{least:,}"
        return ValueError(
            f"{self.said} is impossible: the smallest ticket of this parent (one block, or the "
            f"common ones, in every cut layer that stays) takes {takes} {unit}"
        )


def parse_budgets(context: str | None, given: list[tuple[str, str]]) -> list[Budget]:
    """A budget of each (option, text); `context` belongs to `memory`."""
    if not given:
        raise ValueError(
            "give --ratio, --params, --size, --latency or --memory, several for several tickets"
        )
    if (context is None) != all(name != "memory" for name, _ in given):
        raise ValueError(
            "--memory and --context go together, as in --memory 2GB --context 8k: the weights and "
            "the cached keys and values of so many tokens"
        )
    n_tokens = 0 if context is None else int(amount("context", context))
    found: dict[str, Budget] = {}
    for name, text in given:
        kind = "params" if name == "to" else name
        limit = math.inf if kind == "ratio" else amount(kind, text, f"--{name}")
        each = Budget(kind, text, limit, n_tokens if kind == "memory" else 0, name)
        if found.setdefault(each.slug, each) is not each:
            raise ValueError(f"{each.slug} is asked for twice")
    return list(found.values())


def amount(kind: str, text: str, option: str | None = None) -> float:
    """Parameters of `85M`, bytes of `60MB` (10^6) or `60MiB` (2^20), milliseconds of `12ms`."""
    found = re.fullmatch(r"\s*(\d[\d_,]*(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    (units, examples), option = AMOUNTS[kind], option or f"--{kind}"
    if found is None or found[2].lower() not in units:
        legal = f"(units: {', '.join(unit for unit in units if unit)})"
        raise ValueError(f"{option} {text!r} is no amount such as {examples} {legal}")
    value = Decimal(re.sub("[_,]", "", found[1])) * units[found[2].lower()]
    if value > WHOLE:
        raise ValueError(f"{option} {text[:40]}: legal are less than 2^63")
    return float(value) if kind == "latency" else math.floor(value)


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
        "where it has one, else random); random; best-of:N by validation loss; neurons: each FFN "
        "layer's best (for pretrained models, where they lie in no order); importance (blocks by "
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
class ScoreRequest(Checked):
    """How many random subnets of which sizes are measured, and on what."""

    ratios: tuple[str, ...] = option(
        "Share of blocks, as 6/12 or attn=2/3,ffn=6/12; repeatable. Default: run.eval_ratios, of "
        "which --certify takes the first; half of the blocks where a parent has no such sizes.",
        (),
        "--ratio",
    )
    n: int = option(
        "Random subnets behind each number; 0: 20, with --certify 200.", 0, least=0, most=10**6
    )
    data: str | None = option(VALID_TEXT, None)
    tokens: int = option(N_TOKENS, 0, least=0)
    seed: int = seed_of("the random subnets")


@dataclass(frozen=True, kw_only=True)
class HealRequest(Checked):
    """Which ticket is trained, on how many tokens of what, and who teaches it."""

    ticket: Path = option("The folder of a ticket.", argument=True)
    out: Path = option("Folder of the healed ticket.")
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


@dataclass(frozen=True, kw_only=True)
class ShrinkRequest(Checked):
    """Which model becomes how small, on what text, for how many tokens or hours."""

    model: str = option(
        "A Hugging Face folder or hub id, gguf:FILE, or a run folder.", argument=True
    )
    out: Path = option("Folder for everything that is made.")
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
    hours: float | None = option("Train for about so long instead.", None, above=0, most=24 * 366)
    gguf: str | None = option("Write the tickets for llama.cpp, too: q8_0 or f16.", None)
    tasks: str | None = option("Zero-shot tasks at the end, as `eval` takes them.", None)
    tokenizer: str | None = option(
        "tokenizer.json, a folder with one, a hub id, or gguf:FILE. Default: the model's.", None
    )
    column: str = option("Text column of .jsonl and .parquet.", "text")
    dtype: str = _of(TicketRequest, "dtype")
    overrides: Sequence[str] = ()

    @property
    def budgets(self) -> list[Budget]:
        """Every size that is given."""
        given = [(name, x) for name in ("to", *KINDS[2:]) for x in getattr(self, name)]
        return parse_budgets(self.context, given) if given else []
