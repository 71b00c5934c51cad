"""What `import twistlm` offers: train and shrink models, open parents, cut and measure tickets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from . import config, shrinking
from .config import Config
from .fields import python_words
from .presets import as_toml
from .shrinking import Row
from .system.files import alone, whole_file, whole_folder
from .tickets import extract, parent
from .tickets.extract import Ticket
from .tickets.parent import what_is
from .tickets.requests import ScoreRequest, ShrinkRequest, TicketRequest
from .tickets.score import Scores, score_parent, score_whole
from .training import rounds

Overrides = str | Mapping[str, Any]  # "train.lr=1e-3" or {"train.lr": 1e-3}
IS_OVERRIDE = re.compile(r"[a-z]+(\.\w+)+=")


@python_words()
def train(
    source: str | Path | Config | PreTrainedModel,
    text: Any = None,
    *overrides: Overrides,
    tokenizer: Any = None,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Train a parent; returns its last checkpoint, which `open_parent` takes.

    `source` is a model: a Hugging Face folder or hub id, gguf:FILE, a run folder, or a causal
    language model of transformers in memory; it is trained on `text` (see `shrink`) once, as
    `shrink` would for tickets of 2/3 to 1/4 of the blocks. A model in memory needs its `tokenizer`,
    unless it was loaded by a name that has one. Or `source` is a config that names model and text:
    a preset ("demo"), the path of a TOML file, a run folder or a `Config`.

    `overrides` such as "train.rounds=20" or {"train.rounds": 20} are changes to the config. What is
    made lies in `run.out`; `resume` goes on from its newest checkpoint. `on_round` is called after
    every round with its metrics: the line of `metrics.jsonl`.
    """
    if on_round is not None and not callable(on_round):
        raise ValueError(f"on_round = {on_round!r}: must be a function of a round's metrics")
    if isinstance(text, Mapping) or (isinstance(text, str) and IS_OVERRIDE.match(text)):
        text, overrides = None, (text, *overrides)
    words = _words(overrides)
    if text is not None:
        cfg = _config_for(source, text, tokenizer, words, resume)
    elif isinstance(source, Config):
        cfg = config.override(source, words)
    elif isinstance(source, str | Path):
        cfg = config.load(str(source), words)
    else:
        raise ValueError(
            f"train takes a preset, a TOML file or a Config, or a model and its text: train("
            f"model, text); a {type(source).__name__} came alone"
        )
    return rounds.train(cfg, resume=resume, on_round=on_round)


@python_words()
def shrink(
    model: str | Path, text: Any, *overrides: Overrides, out: str | Path, **asked: Any
) -> list[Row]:
    """Train a model for the sizes asked for and write a ticket of each; whole models come first.

    `text` is a file, a folder, hub:NAME, a list of them ("code/:0.7"), or any other iterable: of
    documents. Other keywords are the options of `twistlm shrink` (`ShrinkRequest`): `to="350M"`,
    `tokens="50M"`. The same call goes on after a stop. The tickets are in `row.folder`.
    """
    given: dict[str, Any] = {"model": model, "text": text, "overrides": _words(overrides)}
    return shrinking.run(ShrinkRequest(out=Path(str(out)), **given, **asked))


@python_words()
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
    opened = parent.open_parent(source, device, _words(overrides))
    return Parent(**vars(opened), data=data, tokens=tokens)


@python_words()
def evaluate(
    source: str | Path | Parent | Ticket, ratios: Any = (), *, device: str = "auto", **asked: Any
) -> Scores:
    """Perplexity of a ticket, or of any parent with `n` random tickets of each ratio.

    Without `ratios` they are the run's own (`run.eval_ratios`), or half of the blocks.
    Keywords are options of `twistlm eval` (`ScoreRequest`): `n`, `data`, `tokens`, `seed`. See
    `open_parent` for sources and `data`; a ticket's own text is that of its parent's run.
    """
    request = ScoreRequest(ratios=ratios, **asked)
    if isinstance(source, Parent):
        return source.evaluate(ratios, **asked)
    if isinstance(source, Ticket) or what_is(source) == "ticket":
        if request.ratios:
            raise ValueError(f"ratios: {source} is a ticket, which is cut already")
        if isinstance(source, Ticket):
            return source.evaluate(asked.get("data"), asked.get("tokens"))
        return score_whole(source, request, device)
    opened = parent.open_parent(source, device)
    return score_parent(opened, request, Path(opened.source).name, quiet=True)


@dataclass(frozen=True, repr=False)
class Parent(parent.Parent):
    """A model in memory that tickets are cut from, and the text that both are measured on."""

    data: str | Path | None = None  # a token file; None: the validation tokens of its run
    tokens: int | None = None  # of it; None: all, and for tickets what `extract` takes

    @property
    def _text(self) -> dict[str, Any]:
        """What requests are told of it."""
        return {"data": self.data} | ({} if self.tokens is None else {"tokens": self.tokens})

    @python_words()
    def extract(self, **asked: Any) -> Ticket:
        """Cut out the ticket that a budget buys, and measure it.

        Keywords are the options of `twistlm extract` (`TicketRequest`). Give one budget: `ratio`
        ("6/12" of the blocks, or "attn=2/3,ffn=6/12"), `params` ("85M"), `size` ("60MB" of
        weights), `latency` ("12ms" per decoded token, measured here), or `memory` with `context`
        ("2GB" of weights and of what "8k" tokens leave in the cache). `pick` says which blocks
        stay, `spend` where a budget's blocks go, `stock` asks for a plain model of the family.
        """
        return extract.make_ticket(self, TicketRequest(**self._text | asked), quiet=True)

    @python_words()
    def evaluate(self, ratios: Any = (), **asked: Any) -> Scores:
        """Perplexity of the whole model and of `n` random tickets of each ratio.

        Without `ratios` they are the run's own (`run.eval_ratios`), or half of the blocks.
        Keywords are options of `twistlm eval` (`ScoreRequest`): `n`, `seed`.
        """
        request = ScoreRequest(ratios=ratios, **self._text | asked)
        return score_parent(self, request, Path(self.source).name, quiet=True)


def _config_for(model: Any, text: Any, tokenizer: Any, words: list[str], resume: bool) -> Config:
    """A model's training on text, all of it made ready in `run.out`, or what lies there."""
    out = Path(config.override(Config(), words).run.out)
    made = out / shrinking.CONFIG
    if isinstance(model, Config) or str(model) in config.preset_names():
        raise ValueError(f"{model} is a config, which names its own text: give no other")
    if not resume and (made.exists() or (out / "text").exists()):
        raise ValueError(
            f"run.out = {str(out)!r} already holds a run: say resume=True, or choose another folder"
        )
    if made.exists():
        return config.load(str(made), words)
    if isinstance(model, PreTrainedModel):
        tokenizer = tokenizer or model.name_or_path
        if not tokenizer:
            raise ValueError("a model in memory needs its tokenizer: train(..., tokenizer=...)")
        with whole_folder(out / "start") as draft:
            model.save_pretrained(draft)
        model = out / "start"
    if tokenizer is not None and not isinstance(tokenizer, str):  # of transformers, or its own
        own = getattr(tokenizer, "backend_tokenizer", tokenizer)
        tokenizer = str(out / "tokenizer.json")
        whole_file(Path(tokenizer), lambda draft: own.save(str(draft)))
    given: dict[str, Any] = {"model": model, "text": text, "tokenizer": tokenizer, "out": out}
    with alone(out):
        shrinking.prepare(ShrinkRequest(**given, overrides=[*words, *_words([{"run.out": out}])]))
    return config.load(str(made))


def _words(overrides: Sequence[Overrides]) -> list[str]:
    """`section.key=value` for every change; tables may hold "section.key", or tables of keys."""
    found = []
    for each in overrides:
        for key, value in each.items() if isinstance(each, Mapping) else ():
            if isinstance(value, Mapping):
                found += _words([{f"{key}.{name}": inner for name, inner in value.items()}])
            else:
                found.append(f"{key}={as_toml(value, key)}")
        found += [] if isinstance(each, Mapping) else [each]
    return found
