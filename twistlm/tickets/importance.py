"""How much each block matters, on which text, and which blocks a ticket keeps.

A score is a number per block of every group, read through the `(sections, n_blocks, chunk)` view.
The loss of an example (one sequence) is its mean next-token loss under the full parent, float32.
Masks on blocks (`compute.slopes`): dl/dm_b = <C_b, dl/dC_b>, C_b the block's rows of the output
projection.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from ..compute import slopes
from ..compute.loss import next_token_loss
from ..compute.perplexity import Evaluator
from ..fields import words
from ..model.blocks import Blueprint, Widths
from ..model.generator import draws
from ..model.masks import prefixes
from ..model.subnet import build
from . import IMPORTANCES, NEEDS_TEXT, PICKS
from .parent import Parent
from .text import Calibration

BlockScores = dict[str, Tensor]  # group name -> float64 [n_blocks]


def score(
    parent: Parent,
    method: str,
    ids: Tensor | None,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> BlockScores:
    """Scores of every block; `ids` [n, seq_len] are calibration sequences, `tick` follows each.

    fisher        mean over examples of the sum over the block's weights of (dl/dw)^2
    mask-fisher   mean over examples of (dl/dm_b)^2
    taylor        mean over tokens of |dl/dm_b|, with a mask of its own for every token
    magnitude     the L2 norm of all weights of a block
    random        keeping the best of these is the paper's random extraction (SE)
    """
    central, block_map = parent.central, parent.block_map
    kind: dict = {"dtype": torch.float64, "device": central.weights.device}
    scores = {group.name: torch.zeros(group.n_blocks, **kind) for group in block_map.groups}
    if method == "random":
        kind = {"dtype": torch.float64, "generator": torch.Generator().manual_seed(seed)}
        scores = {name: torch.rand(len(zeros), **kind) for name, zeros in scores.items()}
    elif method == "magnitude":
        _add_squares_(scores, parent, central.weights)
        scores = {name: values.sqrt() for name, values in scores.items()}
    elif ids is None:
        raise ValueError(f"importance {method!r} needs calibration text")
    elif method == "fisher":
        grads = torch.zeros_like(central.weights)
        full = build(parent.template, block_map, central.layout, central.weights, grads)
        for example in ids.split(1):  # the square of a batch's gradient is no sum of squares
            grads.zero_()
            next_token_loss(full.model, example.to(grads.device)).backward()
            _add_squares_(scores, parent, grads, len(ids))
            tick()
    elif method == "mask-fisher":
        found = slopes.mask_slopes(parent.template, block_map, central, ids)
        scores = slopes.mask_fisher(found, len(ids), tick)
    else:
        for each in slopes.mask_slopes(parent.template, block_map, central, ids):
            for name, slope in each.items():
                scores[name] += slope.abs().mean(0) / len(ids)
            tick()
    if bad := [name for name, values in scores.items() if not values.isfinite().all()]:
        raise FloatingPointError(f"importance {method!r} of {bad[0]} is not finite")
    return {name: values.cpu() for name, values in scores.items()}


def _add_squares_(scores: BlockScores, parent: Parent, values: Tensor, n: int = 1) -> None:
    """Add 1/n of the sums of squares over each block's parts of all parameters."""
    views = parent.central.layout.views(values.detach())
    for group in parent.block_map.groups:
        for part in group.parts:
            rows = views[part.param].square().movedim(part.dim, 0)
            rows = rows.reshape(part.sections, group.n_blocks, -1)
            scores[group.name] += rows.sum((0, 2), dtype=torch.float64) / n


@dataclass(frozen=True)
class Pick:
    """`random` is one draw, `best-of:N` are N; the others draw nothing.

    `auto` is `nested` for a parent that was trained with an order of blocks, else `random`.
    """

    asked: str
    n_draws: int = 1
    method: str | None = None

    @property
    def needs_calibration(self) -> bool:
        return self.method in NEEDS_TEXT


RANDOM, NESTED, AUTO = Pick("random"), Pick("nested"), Pick("auto")
NEURONS = Pick("neurons", method="neurons")  # nested, in a parent whose neurons are sorted first


def parse_pick(text: str) -> Pick:
    """A pick as it is typed."""
    name, colon, rest = text.partition(":")
    if (plain := Pick(text)) in (RANDOM, NESTED, AUTO):
        return plain
    if text == NEURONS.asked:
        return NEURONS
    if name == "best-of" and rest.isdecimal() and int(rest) > 0:
        return Pick(text, n_draws=int(rest))
    method = rest if colon else "fisher"
    if name == "importance" and method in IMPORTANCES:
        return Pick(text, method=method)
    raise ValueError(f"--pick {text!r}: use {words(PICKS)} (METHOD is {words(IMPORTANCES)})")


def pick_for(parent: Parent, text: str = "auto") -> Pick:
    """What `auto` means for a parent; a nested ticket needs a parent with an order."""
    how, has_order = parse_pick(text), bool(parent.progress.order)
    if how == AUTO:
        return NESTED if has_order else RANDOM
    if how == NESTED and not has_order:
        raise ValueError(
            f"--pick nested: {parent.source} was trained without an order of blocks "
            "(blocks.nested = 0); use importance:mask-fisher, which scores them now, or random"
        )
    return how


def with_sorted_neurons(parent: Parent, ids: Tensor, bar: Progress | None = None) -> Parent:
    """The same model with each FFN layer's neurons by importance (`blocks.sort`), and its order."""
    bar = bar or Progress(disable=True)
    task = bar.add_task("sort neurons", total=len(ids), note="")
    central = replace(parent.central, state=parent.central.state.clone())
    order = slopes.sort_neurons_(
        parent.template, parent.block_map, central, ids, lambda: bar.advance(task)
    )
    return replace(parent, central=central, progress=replace(parent.progress, order=order))


def pick_blocks(
    parent: Parent,
    widths: Widths,
    how: Pick,
    seed: int = 0,
    evaluator: Evaluator | None = None,
    calibration: Calibration | None = None,
    bar: Progress | None = None,
) -> tuple[Blueprint, dict[str, Any]]:
    """A blueprint of these widths, and what it was chosen by.

    `best-of:N` needs the `evaluator`, scores that go by text need the `calibration`.
    """
    bar, block_map = bar or Progress(disable=True), parent.block_map
    if how == NESTED:
        return prefixes(block_map, parent.progress.order, widths), {}
    if how.method is not None:
        ids = calibration.ids if calibration else None
        task = bar.add_task(f"pick {how.asked}", total=1 if ids is None else len(ids), note="")
        scores = score(parent, how.method, ids, seed, lambda: bar.advance(task))
        based_on = {"method": how.method} | (calibration.to_dict() if calibration else {})
        return prefixes(block_map, slopes.order_of(scores), widths), based_on
    drawn = draws(block_map, widths, seed=seed, n=how.n_draws)
    if how.n_draws == 1:
        return next(drawn), {}
    assert evaluator is not None
    task = bar.add_task(f"pick {how.asked}", total=how.n_draws, note="")
    found: list[float] = []
    for blueprint in drawn:  # one at a time, however many are asked for
        found.append(evaluator.subnet_perplexity(blueprint))
        if found[-1] < min(found[:-1], default=math.inf):
            best = blueprint
        bar.update(task, advance=1, note=f"best perplexity {min(found):.2f}")
    return best, {"data": evaluator.text.file.stem, "perplexities": found}
