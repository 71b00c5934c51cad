"""Ways to train that the recipe is held against: each a recipe, what differs from it, and its rates."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import TrainConfig
from .scales import DENSE, DROPOUT, TWIN, TWIST, TWIST_FRESH, Recipe, Scale

WHOLE_FIRST = (12, 12, 12, 12, 12, 8, 6, 3)  # widths of masks, most of them whole
OURS, WHOLE_NAME, TWIN_NAME = "TwIST", "TwIST, whole first", "synchronous twin"
DENSE_NAME, DROPOUT_NAME = "data parallel", "dropout K=6"


@dataclass(frozen=True)
class Way:
    """One way to train: a recipe, what differs from it, and its rates, times the scale's own.

    The first rate is for every seed, others are tried with the first seed alone.
    """

    recipe: Recipe
    rates: tuple[float, ...]
    changes: tuple[str, ...] = ()
    share: float = 1.0  # of the usual interval
    widths: tuple[int, ...] = ()  # of masks, where they are not the recipe's


BYTES = ("run.wire=int8",)  # what independent workers send; a ring sends gradients in bf16
SHARE = 0.4  # of the usual interval: six steps
FIRST = 1  # the seed that rates are chosen with

WAYS: dict[str, Way] = {
    DENSE_NAME: Way(DENSE, (1, 2)),
    DROPOUT_NAME: Way(DROPOUT, (1, 2)),
    "TwIST K=6, the paper's masks": Way(TWIST, (1, 2)),
    OURS: Way(TWIST_FRESH, (4, 3), BYTES, SHARE),
    TWIN_NAME: Way(TWIN, (2, 3)),
    WHOLE_NAME: Way(TWIST_FRESH, (1, 2), (*BYTES, "blocks.nested=0.5"), SHARE, WHOLE_FIRST),
    "… half the decay": Way(TWIST_FRESH, (4,), (*BYTES, "train.weight_decay=0.05"), SHARE),
    "… fp32": Way(TWIST_FRESH, (4,), ("run.wire=fp32",), SHARE),
    "… bf16, interval 10": Way(TWIST_FRESH, (4,), ("run.wire=bf16",), 2 / 3),
    "… no teacher": Way(TWIST_FRESH, (4,), (*BYTES, "train.teacher=none"), SHARE),
    "… no order": Way(TWIST_FRESH, (4,), (*BYTES, "blocks.nested=0.0"), SHARE),
    "… a mask per step": Way(TWIST_FRESH, (4,), (*BYTES, "blocks.masks=step"), SHARE),
    "… a mask per round, teacher": Way(TWIST, (2,), (*BYTES, "train.teacher=start"), SHARE),
}


def changes(scale: Scale, t: TrainConfig, way: Way, rate: float) -> list[str]:
    """A way as `section.key=value` on a scale's own training, each key once: as many tokens whatever the interval."""
    interval = max(1, round(t.interval * way.share))
    some = [*scale.changes_of(way.recipe), f"train.lr={rate * t.lr:g}"]
    some += [f"train.interval={interval}", f"train.rounds={t.rounds * t.interval // interval}"]
    if way.widths:
        attn = [scale.k_attn(k) for k in way.widths]
        some += [f"blocks.mask_attn={attn}", f"blocks.mask_ffn={list(way.widths)}"]
    last = {change.partition("=")[0]: change for change in [*some, *way.changes]}
    return sorted(last.values())
