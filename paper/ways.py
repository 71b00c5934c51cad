"""Ways to train that the recipe compares: each row is a recipe with overrides and its rates."""

from __future__ import annotations

from dataclasses import dataclass

from twistlm.config import TrainConfig

from .scales import DENSE, DROPOUT, TWIN, TWIST, TWIST_FRESH, Recipe, Scale

WHOLE_FIRST = (12, 12, 12, 12, 12, 8, 6, 3)  # widths of masks, most of them whole
OURS, WHOLE_NAME, TWIN_NAME = "TwIST", "TwIST, whole first", "synchronous twin"
DENSE_NAME, DROPOUT_NAME = "data parallel", "dropout K=6"
NESTED_NAME = "TwIST, 0.35 nested"  # more masks along the order than the presets' quarter
OFTEN_NAME = "TwIST, interval 4"  # as near to its twin as 0.45 of the bytes allow


@dataclass(frozen=True)
class Way:
    """One way to train: a recipe, what differs from it, and its rates, times the scale's own."""

    recipe: Recipe
    rates: tuple[float, ...]
    changes: tuple[str, ...] = ()
    share: float = 1.0  # of the usual interval
    widths: tuple[int, ...] = ()  # of masks, where they are not the recipe's
    # share of the tokens that train the whole model first: the start and teacher of the rest
    dense: float = 0.0


BYTES = ("run.wire=int8",)  # what independent workers send; a ring sends gradients in bf16
HALF_DECAY = "train.weight_decay=0.05"  # of the preset's 0.1
# a single worker's gradient is noisier: v averages it over longer than with the preset's 0.95
BETA2 = {beta2: f"train.betas=[0.9, {beta2}]" for beta2 in (0.98, 0.99)}
WHOLE = (*BYTES, "blocks.nested=0.5")
SLOWER = (HALF_DECAY, BETA2[0.98])
# workers that hold half of the blocks, or one that holds all among them, dealt along the order
HALF = ("blocks.deal=order", "blocks.k_attn=[6]", "blocks.k_ffn=[6]", *SLOWER)
MIXED = ("blocks.deal=order", "blocks.widths=worker", "blocks.k_attn=[12, 6, 6, 6]", *SLOWER)
SHARE = 0.4  # of the usual interval: six steps
OFTEN = 4 / 15  # of it: four steps

WAYS: dict[str, Way] = {
    DENSE_NAME: Way(DENSE, (1, 2)),
    DROPOUT_NAME: Way(DROPOUT, (1, 2)),
    "TwIST K=6, the paper's masks": Way(TWIST, (1, 2)),
    OURS: Way(TWIST_FRESH, (4, 3), BYTES, SHARE),
    NESTED_NAME: Way(TWIST_FRESH, (4, 3), (*BYTES, "blocks.nested=0.35"), SHARE),
    OFTEN_NAME: Way(TWIST_FRESH, (4, 3), BYTES, OFTEN),
    # sqrt(S) times the twin's rate decays weights sqrt(S) times as fast
    f"{OFTEN_NAME}, half the decay": Way(TWIST_FRESH, (4,), (*BYTES, HALF_DECAY), OFTEN),
    f"{OFTEN_NAME}, half the decay, twice the clip": Way(
        TWIST_FRESH, (4,), (*BYTES, HALF_DECAY, "train.clip=2.0"), OFTEN
    ),
    f"{OFTEN_NAME}, half the decay, beta2 0.98": Way(
        TWIST_FRESH, (4,), (*BYTES, HALF_DECAY, BETA2[0.98]), OFTEN
    ),
    f"{OFTEN_NAME}, half the decay, beta2 0.99": Way(
        TWIST_FRESH, (4,), (*BYTES, HALF_DECAY, BETA2[0.99]), OFTEN
    ),
    "TwIST, half workers": Way(
        TWIST_FRESH, (4, 3), (*BYTES, *HALF), SHARE, (6, 6, 6, 6, 4, 4, 3, 3)
    ),
    "TwIST, one whole, the rest half": Way(
        TWIST_FRESH, (4, 3), (*BYTES, *MIXED, "blocks.k_ffn=[12, 6, 6, 6]"), SHARE
    ),
    TWIN_NAME: Way(TWIN, (2, 3)),
    f"{TWIN_NAME}, half the decay": Way(TWIN, (2,), (HALF_DECAY,)),
    f"{TWIN_NAME}, half the decay, beta2 0.98": Way(TWIN, (2,), (HALF_DECAY, BETA2[0.98])),
    f"{TWIN_NAME}, half the decay, beta2 0.99": Way(TWIN, (2,), (HALF_DECAY, BETA2[0.99])),
    WHOLE_NAME: Way(TWIST_FRESH, (1, 2), WHOLE, SHARE, WHOLE_FIRST),
    f"{OURS}, dense first": Way(TWIST_FRESH, (4, 3), BYTES, SHARE, dense=1 / 3),
    f"{WHOLE_NAME} after dense": Way(TWIST_FRESH, (1, 2), WHOLE, SHARE, WHOLE_FIRST, dense=1 / 2),
    f"{WHOLE_NAME} after 2/3 dense": Way(
        TWIST_FRESH, (1, 2), WHOLE, SHARE, WHOLE_FIRST, dense=2 / 3
    ),
    "… half the decay": Way(TWIST_FRESH, (4,), (*BYTES, HALF_DECAY), SHARE),
    "… interval 1, half the decay": Way(TWIST_FRESH, (4,), ("run.wire=fp32", HALF_DECAY), 1 / 15),
    "… fp32": Way(TWIST_FRESH, (4,), ("run.wire=fp32",), SHARE),
    "… bf16, interval 10": Way(TWIST_FRESH, (4,), ("run.wire=bf16",), 2 / 3),
    "… no teacher": Way(TWIST_FRESH, (4,), (*BYTES, "train.teacher=none"), SHARE),
    "… no order": Way(TWIST_FRESH, (4,), (*BYTES, "blocks.nested=0.0"), SHARE),
    "… a mask per step": Way(TWIST_FRESH, (4,), (*BYTES, "blocks.masks=step"), SHARE),
    "… a mask per round, teacher": Way(TWIST, (2,), (*BYTES, "train.teacher=start"), SHARE),
}


def changes(scale: Scale, t: TrainConfig, way: Way, rate: float) -> list[str]:
    """A way as `section.key=value`, each key once: as many tokens whatever the interval."""
    interval = max(1, round(t.interval * way.share))
    n_rounds = (t.rounds - _n_dense(t, way)) * t.interval // interval
    some = [*scale.changes_of(way.recipe), f"train.lr={rate * t.lr:g}"]
    some += [f"train.interval={interval}", f"train.rounds={n_rounds}"]
    if way.widths:
        attn = [scale.k_attn(k) for k in way.widths]
        some += [f"blocks.mask_attn={attn}", f"blocks.mask_ffn={list(way.widths)}"]
    last = {change.partition("=")[0]: change for change in [*some, *way.changes]}
    return sorted(last.values())


def dense_changes(scale: Scale, t: TrainConfig, way: Way) -> list[str]:
    """What comes before where a way trains the whole model first, at data parallel's rate."""
    if not (n_rounds := _n_dense(t, way)):
        return []
    lr = WAYS[DENSE_NAME].rates[0] * t.lr
    return sorted([*scale.changes_of(DENSE), f"train.lr={lr:g}", f"train.rounds={n_rounds}"])


def _n_dense(t: TrainConfig, way: Way) -> int:
    return round(t.rounds * way.dense)
