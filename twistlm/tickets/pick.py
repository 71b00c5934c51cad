"""Which blocks a ticket keeps: the first of the order, random ones, the best of N, or by scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.progress import Progress

from ..compute.perplexity import Evaluator
from ..model.blocks import Blueprint, Widths
from ..model.generator import draws
from ..model.masks import prefixes
from . import IMPORTANCES, NEEDS_TEXT, PICKS, importance
from .calibration import Calibration
from .parent import Parent


@dataclass(frozen=True)
class Pick:
    """`random` is one draw, `best-of:N` are N, `nested` and `importance[:METHOD]` draw nothing.

    `auto` is `nested` for a parent that was trained with an order of blocks, else `random`.
    """

    asked: str
    n_draws: int = 1
    method: str | None = None

    @property
    def needs_perplexity(self) -> bool:
        return self.n_draws > 1

    @property
    def needs_calibration(self) -> bool:
        return self.method in NEEDS_TEXT


RANDOM, NESTED, AUTO = Pick("random"), Pick("nested"), Pick("auto")


def pick_for(parent: Parent, how: Pick) -> Pick:
    """What `auto` means for a parent; a nested ticket needs a parent with an order."""
    has_order = bool(parent.progress.order)
    if how == AUTO:
        return NESTED if has_order else RANDOM
    if how == NESTED and not has_order:
        raise ValueError(
            f"--pick nested: {parent.source} was trained without an order of blocks "
            "(blocks.nested = 0); use importance:mask-fisher, which scores them now, or random"
        )
    return how


def parse_pick(text: str) -> Pick:
    """A pick as it is typed."""
    name, colon, rest = text.partition(":")
    if plain := {how.asked: how for how in (RANDOM, NESTED, AUTO)}.get(text):
        return plain
    if name == "best-of" and rest.isdecimal() and int(rest) > 0:
        return Pick(text, n_draws=int(rest))
    method = rest if colon else "fisher"
    if name == "importance" and method in IMPORTANCES:
        return Pick(text, method=method)
    *names, last = PICKS
    raise ValueError(
        f"--pick {text!r}: use {', '.join(names)} or {last} "
        f"(METHOD is one of {', '.join(IMPORTANCES)})"
    )


def pick_blocks(
    parent: Parent,
    widths: Widths,
    how: Pick,
    *,
    seed: int = 0,
    evaluator: Evaluator | None = None,
    calibration: Calibration | None = None,
    bar: Progress | None = None,
) -> tuple[Blueprint, dict[str, Any]]:
    """A blueprint of these widths, and what it was chosen by.

    `best-of:N` needs the `evaluator`, scores that go by text need the `calibration`.
    """
    if how == NESTED:
        return prefixes(parent.block_map, parent.progress.order, widths), {}
    bar = bar or Progress(disable=True)
    if how.method is not None:
        ids = None if calibration is None else calibration.ids
        task = bar.add_task(f"pick {how.asked}", total=1 if ids is None else len(ids), note="")
        scores = importance.score(parent, how.method, ids, seed, lambda: bar.advance(task))
        bar.update(task, completed=1 if ids is None else len(ids))
        based_on: dict[str, Any] = {"method": how.method}
        if calibration is not None:
            n, seq_len = calibration.ids.shape
            based_on |= {"data": calibration.stem, "n_sequences": n, "seq_len": seq_len}
        return importance.keep_best(parent.block_map, scores, widths), based_on
    drawn = draws(parent.block_map, widths, seed=seed, n=how.n_draws)
    if how.n_draws == 1:
        return next(iter(drawn)), {}
    assert evaluator is not None
    task = bar.add_task(f"pick {how.asked}", total=how.n_draws, note="")
    found: list[float] = []
    for blueprint in drawn:  # one at a time, however many are asked for
        found.append(evaluator.subnet_perplexity(blueprint))
        if found[-1] == min(found) and found.count(found[-1]) == 1:
            best = blueprint
        bar.update(task, advance=1, note=f"best perplexity {min(found):.2f}")
    return best, {"data": evaluator.text.file.stem, "perplexities": found}
