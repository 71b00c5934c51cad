"""Which activation scale suits the tickets of a parent, chosen on text that is not reported on.

A parent that never saw a scale in training is not helped by one that was made for others, so tables
give every parent its own best: no scale, sqrt(N/K), the measured one or that of its training, each
with or without output biases that make up for the mean of what absent blocks would have added.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from ..compute.perplexity import Evaluator, Text, summarize
from ..config import ActivationScale, DataConfig
from ..data.builtin import resolve
from ..data.token_file import open_tokens
from ..model.blocks import BlockMap, Blueprint, Widths
from ..model.generator import draws
from ..model.subnet import Means, Rho, measure_means
from .parent import Parent

SCALES = {"none": "no scale", "sqrt": "sqrt(N/K)", "measured": "measured", "inverse": "N/K"}
TRIED: tuple[ActivationScale, ...] = ("none", "sqrt", "measured")
MOST_TOKENS = 16_384  # that a choice is made on, and no more than are reported on
LEAST_WINDOWS = 8  # behind the reported ones; where fewer are left, training text is taken
N_MEASURED = 16  # sequences that rho and means are measured on
N_DRAWS = 3  # random tickets behind a choice, none of them a reported one


@dataclass(frozen=True)
class TicketScale:
    """What the tickets of a parent get: a scale, and whether biases make up for absent blocks."""

    scale: ActivationScale
    means: bool = False

    def __str__(self) -> str:
        return SCALES[self.scale] + (" + mean" if self.means else "")


def choice_text(reported: Text, data: DataConfig, near: Path | None = None) -> Text | None:
    """Windows of the same file behind the reported ones; else training text; else None.

    `near` is the run's own folder, from which its training text is looked for.
    """
    n = max(LEAST_WINDOWS, min(reported.n_sequences, MOST_TOKENS // reported.seq_len))
    n_tokens, first = n * reported.seq_len, reported.first + reported.n_sequences
    behind = replace(reported, first=first, max_tokens=n_tokens)
    if behind.first + LEAST_WINDOWS <= reported.file.n_sequences(reported.seq_len):
        return behind
    if not data.train:
        return None
    file = open_tokens(resolve(data.train, "train", near))
    return Text(file, reported.seq_len, n_tokens, reported.batch)


class TicketScales:
    """The activation scales of one parent, tried on tickets like those that are reported.

    `choice` is the text that they are tried on; without any, the parent's own scale is taken.
    """

    def __init__(
        self, parent: Parent, reported: Text, choice: Text | None, precision: str | None = None
    ):
        self.parent, self.choice = parent, choice
        ready = parent.evaluator(reported)
        self.ready = replace(ready, precision=precision or ready.precision)

    @cached_property
    def measured(self) -> tuple[Rho, Means]:
        """rho and means of the whole parent on the choice's text."""
        if self.choice is None:
            return self.parent.progress.rho, {}
        text = self.choice
        rows = [text.first + row for row in range(min(N_MEASURED, text.n_sequences))]
        return measure_means(self.parent.whole(), text.file.sequences(rows, text.seq_len))

    def candidates(self) -> list[TicketScale]:
        """The parent's own first: of equal ones it is kept."""
        scales = dict.fromkeys((self.parent.scale, *(TRIED if self.choice else ())))
        biased = any(len(group.out) > 1 for group in self.parent.block_map.groups)
        means = (False, True) if biased and self.choice else (False,)
        return [TicketScale(scale, m) for m, scale in product(means, scales)]

    def parent_with(self, chosen: TicketScale) -> Parent:
        """The parent as its tickets are cut with this scale."""
        parent, (rho, means) = self.parent, self.measured
        trained = chosen.scale == parent.scale and bool(parent.progress.rho)
        return replace(
            parent,
            cfg=replace(parent.cfg, train=replace(parent.cfg.train, scale=chosen.scale)),
            progress=parent.progress if trained else replace(parent.progress, rho=rho),
            means=means if chosen.means else {},
        )

    def evaluator(self, scale: TicketScale, text: Text | None = None) -> Evaluator:
        """On the reported text, or on `text`; models of all sizes are this object's, built once."""
        made = self.parent_with(scale).evaluator(text or self.ready.text)
        return replace(made, precision=self.ready.precision, models=self.ready.models)

    def best(self, tickets: Sequence[Blueprint]) -> tuple[TicketScale, dict[str, Any]]:
        """The scale with the lowest mean loss of these tickets, and the perplexities of all."""
        text, candidates = self.choice, self.candidates()
        if text is None:
            return candidates[0], {"chosen": str(candidates[0]), "tried": {}, "text": None}
        found = {}
        for scale in candidates:
            ready = self.evaluator(scale, text)
            losses = [math.log(ready.subnet_perplexity(ticket)) for ticket in tickets]
            found[scale] = statistics.fmean(losses)
        chosen = min(found, key=found.__getitem__)
        return chosen, {
            "chosen": str(chosen),
            "tried": {str(scale): math.exp(loss) for scale, loss in found.items()},
            "text": text.file.stem,
            "first_window": text.first,
            "n_tokens": text.n_tokens,
        }


def score_tickets(
    scales: TicketScales, tickets: Iterable[Blueprint], held_out: Sequence[Blueprint] = ()
) -> dict[str, Any]:
    """Choose an activation scale on other text, then measure every ticket with it.

    It is chosen on the tickets `held_out`, by default on `tickets` themselves. As points store it.
    """
    tickets = list(tickets)
    scale, record = scales.best(held_out or tickets)
    ready = scales.evaluator(scale)
    values = [ready.subnet_perplexity(each) for each in tickets]
    return {"values": values, **summarize(values), "treatment": record}


def random_tickets(
    block_map: BlockMap, widths: Widths, *, n: int, seed: int
) -> tuple[list[Blueprint], list[Blueprint]]:
    """n random tickets, and `N_DRAWS` held-out ones that their scale is chosen on."""
    drawn = list(draws(block_map, widths, seed=seed, n=n + N_DRAWS))
    return drawn[:n], drawn[n:]
