"""What `import twistlm` offers: train a parent, open any, cut tickets out of it, evaluate both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from . import config
from .config import Config
from .system.terminal import progress
from .tickets import extract, parent
from .tickets.extract import Ticket
from .tickets.parent import what_is
from .tickets.requests import ScoreRequest, TicketRequest
from .tickets.score import Scores, score_parent, score_ticket
from .training import rounds

Overrides = str | Mapping[str, Any]  # "train.lr=1e-3" or {"train.lr": 1e-3}


def train(
    source: str | Path | Config,
    *overrides: Overrides,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Train a parent as a config says; returns its last checkpoint, which `open_parent` takes.

    `source` is the name of a preset ("demo"), the path of a TOML file, or a `Config`; `overrides`
    are changes to it, such as "train.rounds=20" or {"train.rounds": 20}. `resume` goes on from the
    newest checkpoint in `run.out`. `on_round` is called after every round with its metrics: the
    line of `metrics.jsonl`.
    """
    with python_words():
        if isinstance(source, Config):
            cfg = config.override(source, _words(overrides))
        elif isinstance(source, str | Path):
            cfg = config.load(str(source), _words(overrides))
        else:
            raise ValueError(
                f"train takes a preset, a TOML file or a Config, not a {type(source).__name__}: to "
                'train a model on, save it with save_pretrained(FOLDER) and call train("demo", '
                '"model.weights=FOLDER")'
            )
        return rounds.train(cfg, resume=resume, on_round=on_round)


def open_parent(
    source: str | Path | PreTrainedModel,
    *overrides: Overrides,
    data: str | Path | None = None,
    tokens: int | None = None,
    device: str = "auto",
) -> Parent:
    """Open a model that tickets can be cut from.

    `source` is a run folder or checkpoint of `train`, a Hugging Face folder or hub id, gguf:FILE,
    or a causal language model of transformers in memory. `overrides` such as "blocks.setting=ffn"
    say how it is cut, "data.seq_len=512" how it is measured. Perplexities are taken on `data`, a
    token file that `twistlm prepare` wrote (default: the run's own validation tokens): its first
    `tokens` tokens, 0 for all (default: all, and for tickets 4096).
    """
    with python_words():
        opened = parent.open_parent(source, device, _words(overrides))
    return Parent(**vars(opened), data=None if data is None else str(data), tokens=tokens)


def evaluate(
    source: str | Path,
    ratios: Sequence[str] = ("6/12",),
    *,
    n: int = 20,
    data: str | Path | None = None,
    tokens: int = 0,
    seed: int = 0,
    device: str = "auto",
) -> Scores:
    """Perplexity of a ticket folder, or of any parent with `n` random tickets of each ratio.

    See `open_parent` for sources and `data`; a ticket's own text is that of its parent's run.
    """
    if what_is(source) == "ticket":
        text = str(data) if data is not None else None
        with python_words():
            return score_ticket(Path(source), data=text, tokens=tokens, device=device)
    opened = open_parent(source, data=data, tokens=tokens, device=device)
    return opened.evaluate(ratios, n=n, seed=seed)


@dataclass(frozen=True, repr=False)
class Parent(parent.Parent):
    """A model in memory that tickets are cut from, and the text that both are measured on."""

    data: str | None = None  # a token file; None: the validation tokens of its run
    tokens: int | None = None  # of it; None: all, and for tickets what `extract` takes

    def extract(self, **asked: Any) -> Ticket:
        """Cut out the ticket that a budget buys, and measure it.

        Keywords are the options of `twistlm extract` (`TicketRequest`). Give one budget: `ratio`
        ("6/12" of the blocks, or "attn=2/3,ffn=6/12"), `params` ("85M"), `size` ("60MB" of
        weights), `latency` ("12ms" per decoded token, measured here), or `memory` with `context`
        ("2GB" of weights and of what "8k" tokens leave in the cache). `pick` says which blocks
        stay, `spend` where a budget's blocks go, `stock` asks for a plain model of the family.
        """
        text = {"data": self.data} | ({} if self.tokens is None else {"tokens": self.tokens})
        with python_words(), progress(quiet=True) as bar:
            return extract.choose(self, TicketRequest(**text | asked), bar)

    def evaluate(self, ratios: Sequence[str] = ("6/12",), *, n: int = 20, seed: int = 0) -> Scores:
        """Perplexity of the whole model and of `n` random tickets of each ratio."""
        ratios = (ratios,) if isinstance(ratios, str) else tuple(map(str, ratios))
        tokens = self.tokens or 0
        request = ScoreRequest(ratios=ratios, n=n, data=self.data, tokens=tokens, seed=seed)
        with python_words():
            return score_parent(self, request, Path(self.source).name, quiet=True)


def _words(overrides: Sequence[Overrides]) -> list[str]:
    """`section.key=value` for every change; tables may hold "section.key", or tables of keys."""
    found = []
    for each in overrides:
        for key, value in each.items() if isinstance(each, Mapping) else ():
            if isinstance(value, Mapping):
                found += _words([{f"{key}.{name}": inner for name, inner in value.items()}])
            else:
                found.append(f"{key}={json.dumps(value)}")
        found += [] if isinstance(each, Mapping) else [each]
    return found


@contextmanager
def python_words() -> Iterator[None]:
    """Errors that speak of `--data STEM` speak of `data` here."""
    try:
        yield
    except ValueError as error:
        said = re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), str(error))
        raise ValueError(said) from None
