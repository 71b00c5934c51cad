"""Which blocks a ticket keeps: random ones, the best of N draws, or the highest scores."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from rich.progress import Progress
from torch import Tensor

from ..compute.perplexity import Evaluator
from ..data.builtin import resolve
from ..data.token_file import open_tokens
from ..model import generator, huggingface
from ..model.blocks import Blueprint, Widths
from . import importance
from .parent import Parent

MOST_EXAMPLES = 128  # calibration sequences behind an importance


@dataclass(frozen=True)
class Pick:
    """`random` is one draw, `best-of:N` are N draws, `importance[:METHOD]` draws nothing."""

    asked: str
    n_draws: int = 1
    method: str | None = None

    @property
    def needs_perplexity(self) -> bool:
        return self.n_draws > 1

    @property
    def needs_calibration(self) -> bool:
        return self.method in importance.NEEDS_TEXT


@dataclass(frozen=True)
class Calibration:
    """The sequences that an importance is measured on."""

    stem: str
    ids: Tensor  # int64 [n_sequences, seq_len]


def parse(text: str) -> Pick:
    """A pick as it is typed."""
    name, colon, rest = text.partition(":")
    if text == "random":
        return Pick(text)
    if name == "best-of" and rest.isdecimal() and int(rest) > 0:
        return Pick(text, n_draws=int(rest))
    method = rest if colon else "fisher"
    if name == "importance" and method in importance.METHODS:
        return Pick(text, method=method)
    raise ValueError(
        f"--pick {text!r}: use random, best-of:N, importance or importance:METHOD "
        f"(METHOD is one of {', '.join(importance.METHODS)})"
    )


def pick(
    parent: Parent,
    widths: Widths,
    how: Pick,
    seed: int,
    ready: Evaluator | None,
    calibration: Calibration | None,
    bar: Progress,
) -> tuple[Blueprint, dict[str, Any]]:
    """A blueprint of these widths, and what it was chosen by."""
    block_map = parent.block_map
    drawn = [
        generator.for_deployment(block_map, widths, seed=seed, draw=number)
        for number in range(how.n_draws)
    ]
    if how.method is not None:
        ids = calibration.ids if calibration else None
        task = bar.add_task(f"pick {how.asked}", total=1 if ids is None else len(ids), note="")
        scores = importance.score(parent, how.method, ids, seed, lambda: bar.advance(task))
        bar.update(task, completed=1 if ids is None else len(ids))
        based_on: dict[str, Any] = {"method": how.method}
        if calibration:
            n, seq_len = calibration.ids.shape
            based_on |= {"data": calibration.stem, "n_sequences": n, "seq_len": seq_len}
        return importance.keep_best(block_map, scores, widths), based_on
    if how.n_draws == 1:
        return drawn[0], {}
    assert ready is not None
    task = bar.add_task(f"pick {how.asked}", total=how.n_draws, note="")
    found: list[float] = []
    for blueprint in drawn:
        found.append(ready.subnet_perplexity(blueprint))
        bar.update(task, advance=1, note=f"best perplexity {min(found):.2f}")
    return drawn[found.index(min(found))], {"data": ready.text.file.stem, "perplexities": found}


def calibrate(parent: Parent, data: str | None, tokens: int, seed: int) -> Calibration:
    """Random windows of the training tokens; where these are gone, of `data` or the validation's."""
    cfg, errors = parent.cfg.data, []
    for stem, split in ((cfg.train, "train"), (data or cfg.valid, "valid")):
        try:
            file = open_tokens(resolve(stem, split)) if stem else None
        except ValueError as error:
            errors.append(error)
            continue
        if file is None:
            continue
        file.check(cfg.seq_len, huggingface.vocab_size(parent.template), parent.tokenizer_sha256)
        n_asked = max(1, tokens // cfg.seq_len) if tokens else MOST_EXAMPLES
        n_all = file.n_sequences(cfg.seq_len)
        rows = random.Random(seed).sample(range(n_all), min(n_asked, MOST_EXAMPLES, n_all))
        return Calibration(file.stem, file.sequences(rows, cfg.seq_len))
    if errors:
        raise errors[-1]
    raise ValueError(f"{parent.source} has no tokens to calibrate on: give --data STEM")
