"""What `import twistlm` offers: train a parent, open any parent, cut tickets out of it, evaluate both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from . import config
from .config import Config
from .system.terminal import progress
from .tickets import parent
from .tickets.extract import ProvenTicket, choose
from .tickets.parent import Parent, what_is
from .tickets.requests import TicketRequest
from .tickets.score import ScoreRequest, Scores, score_model, score_parent, score_ticket, text_of
from .training import rounds


def train(source: str | Config, *overrides: str, resume: bool = False) -> Path:
    """Train a parent as a config says; returns its last checkpoint, which `open_parent` takes.

    `source` is the name of a preset ("demo"), the path of a TOML file, or a `Config`; `overrides` are
    changes to it such as "train.rounds=20". `resume` goes on from the newest checkpoint in `run.out`.
    """
    if isinstance(source, Config):
        cfg = config.override(source, overrides)
    else:
        cfg = config.load(source, overrides)
    return rounds.train(cfg, resume=resume)


def open_parent(
    source: str | Path | PreTrainedModel,
    *overrides: str,
    data: str | Path | None = None,
    tokens: int | None = None,
    device: str = "auto",
) -> OpenedParent:
    """Open a model that tickets can be cut from.

    `source` is a run folder or checkpoint of `train`, a Hugging Face folder or hub id, gguf:FILE, or a
    causal language model of transformers in memory. `overrides` such as "blocks.setting=ffn" say how it is
    cut, "data.seq_len=512" how it is measured. Perplexities are taken on `data`, a token file that
    `twistlm prepare` wrote (default: the run's own validation tokens): its first `tokens` tokens, 0 for all (default: all,
    and for tickets 4096).
    """
    opened = parent.open_parent(source, device, overrides)
    return OpenedParent(opened, str(data) if data is not None else None, tokens)


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

    A ticket has no tokens of its own: it needs `data`. See `open_parent` for sources and `data`.
    """
    if what_is(source) == "ticket":
        text = str(data) if data is not None else None
        return score_ticket(Path(source), data=text, tokens=tokens, device=device)
    opened = open_parent(source, data=data, tokens=tokens, device=device)
    return opened.evaluate(ratios, n=n, seed=seed)


@dataclass(frozen=True)
class OpenedParent:
    """A parent in memory, and the text that it and its tickets are measured on."""

    parent: Parent
    data: str | None
    tokens: int | None

    def extract(self, **asked: Any) -> Ticket:
        """Cut out the ticket that a budget buys, and measure it.

        Keywords are the options of `twistlm extract` (`TicketRequest`). Give one budget: `ratio`
        ("6/12" of the blocks, or "attn=2/3,ffn=6/12"), `params` ("85M"), `size` ("60MB" of
        weights), `latency` ("12ms" per decoded token, measured here), or `memory` with `context`
        ("2GB" of weights and of what "8k" tokens leave in the cache). `pick` says which blocks
        stay, `spend` where a budget's blocks go, `stock` asks for a plain model of the family.
        """
        text = {"data": self.data} | ({} if self.tokens is None else {"tokens": self.tokens})
        request = TicketRequest(**text | asked)
        with progress(quiet=True) as bar:
            return Ticket(choose(self.parent, request, bar), request.data, request.tokens)

    def evaluate(self, ratios: Sequence[str] = ("6/12",), *, n: int = 20, seed: int = 0) -> Scores:
        """Perplexity of the whole model and of `n` random tickets of each ratio."""
        request = ScoreRequest(
            ratios=tuple(ratios), n=n, data=self.data, tokens=self.tokens or 0, seed=seed
        )
        return score_parent(self.parent, request, Path(self.parent.source).name, quiet=True)


@dataclass(frozen=True)
class Ticket:
    """A dense model that was cut out of a parent; `save` writes it as a Hugging Face folder."""

    _proven: ProvenTicket
    _data: str | None
    _tokens: int

    @property
    def model(self) -> PreTrainedModel:
        """The model itself, for `generate`, `to` and whatever else transformers offers."""
        return self._proven.model

    @property
    def proof(self) -> dict[str, Any]:
        """What was measured: parameters, bytes, speed, perplexity, the budget asked and spent."""
        return self._proven.proof

    def evaluate(self, data: str | Path | None = None, tokens: int | None = None) -> Scores:
        """The ticket's perplexity, on the text of its parent unless another one is named."""
        source = self._proven.parent
        stem = self._data if data is None else str(data)
        text = text_of(source, stem, self._tokens if tokens is None else tokens)
        return score_model(self.model, text, "ticket", source.cfg.train.precision)

    def save(self, folder: str | Path) -> Path:
        """Write the ticket's folder, which `load_ticket` and transformers read; returns it."""
        self._proven.save(Path(folder))
        return Path(folder)
