"""What a comparison measures, as data: parents x settings x sizes x methods.

Sizes are as they are typed: `6/12`, or a share for each kind of layer as `attn=2/3,ffn=6/12`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...baselines import STRUCTURED
from ...baselines.methods import METHODS
from ...config import BlocksConfig, Method, Setting
from ...model import huggingface
from ...model.blocks import SETTINGS
from ...tickets import IMPORTANCES, NEEDS_TEXT
from ...tickets.parent import Parent, open_parent, recut, what_is

BLOCKS = ("attn_by", "n_ffn", "shared_first", "shared_last")  # what says how layers are cut
# What a cell measures: one of these, or a method of `baselines.NAMES`
WHOLE, RANDOM = "whole", "random"
NESTED = "nested"  # the first blocks of a parent's own order
SCORED_BY = "mask-fisher"  # the best score for whole blocks so far
HEALED, NESTED_HEALED = f"{STRUCTURED}{SCORED_BY} + heal", f"{NESTED} + heal"
SCRATCH = "from scratch"  # the shape of HEALED, trained from random weights
TRAINED = (HEALED, NESTED_HEALED, SCRATCH)
SCORES = {f"{STRUCTURED}{name}": name for name in IMPORTANCES}  # what chooses a cell's blocks
SCORES |= {HEALED: SCORED_BY, SCRATCH: SCORED_BY}
OWN = (RANDOM, NESTED, NESTED_HEALED)  # tickets as a parent gives them: rows go by its name


@dataclass(frozen=True)
class ComparedParent:
    """One parent, cut in the widest setting that is asked for."""

    label: str  # what tables call it
    method: Method  # how it was trained
    parent: Parent
    sha256: str  # of its weights: results belong to them, wherever the folder lies
    settings: tuple[Setting, ...]  # those that its training cut


@dataclass(frozen=True)
class Cell:
    """One number of a comparison: what is measured of which parent, at which size."""

    parent: ComparedParent
    what: str
    setting: Setting | None = None
    ratio: str = ""

    def __str__(self) -> str:
        parts = [self.parent.label, self.setting, self.ratio, self.what]
        return " ".join(part for part in parts if part)


def reads_text(what: str) -> bool:
    """Whether what is measured needs calibration text."""
    if what in METHODS:
        return METHODS[what].observe is not None
    return SCORES.get(what) in NEEDS_TEXT


def open_all(
    sources: Sequence[tuple[Method, str]],
    settings: Sequence[Setting],
    device: str,
    overrides: Sequence[str],
) -> list[ComparedParent]:
    """Open the parents in order; the first one's text, precision and blocks hold for all."""
    if not sources:
        raise ValueError("give at least one of --parent-dense, --parent-dropout and --parent-twist")
    kinds = {kind for setting in settings for kind in SETTINGS[setting]}
    widest = next(name for name, cut in SETTINGS.items() if set(cut) == kinds)
    found: list[ComparedParent] = []
    for method, source in sources:
        opened = open_parent(source, device, overrides)
        trained = opened.cfg.train.method
        if what_is(source) == "checkpoint" and trained != method:
            raise ValueError(
                f"--parent-{method} {source} was trained with train.method = {trained}: "
                f"give it as --parent-{trained}"
            )
        # of a setting that its training never cut, a parent's tickets are no better than dense ones
        learnt = SETTINGS[opened.cfg.blocks.setting] if method != "dense" else SETTINGS["both"]
        shown = tuple(s for s in settings if set(SETTINGS[s]) <= set(learnt))
        alone = sum(other == method for other, _ in sources) == 1
        label = ("TwIST" if method == "twist" else method) + ("" if alone else f" {source}")
        sha256 = huggingface.weights_sha256(opened.template)
        found.append(ComparedParent(label, method, recut(opened, widest), sha256, shown))
        _check_alike(found[0].parent, found[-1].parent)
    return found


def _check_alike(one: Parent, other: Parent) -> None:
    """Numbers of two parents mean something side by side if text, model and blocks are the same."""
    pair = other, one
    shapes = [huggingface.shapes(p.template) for p in pair]
    shas = [p.tokenizer_sha256 for p in pair]
    looks: dict[str, list[Any]] = {"it is a": [p.template.config.model_type for p in pair]}
    looks["its tokenizer has sha256"] = ["", ""] if None in shas else shas
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        looks[f"{name} has shape"] = [each.get(name) for each in shapes]
    # C belongs to a parent's training, as its K does: each keeps its own
    none = BlocksConfig()
    if one.block_map.with_common(none) != other.block_map.with_common(none):
        looks |= {f"blocks.{key} =": [getattr(p.cfg.blocks, key) for p in pair] for key in BLOCKS}
    looks["data.seq_len ="] = [p.cfg.data.seq_len for p in pair]
    for what, (a, b) in looks.items():
        if a != b:
            advice = f"; give {what[:-2]}=... for all of them" if what.endswith("=") else ""
            raise ValueError(
                f"{other.source} cannot be compared with {one.source}: {what} {a}, not {b}{advice}"
            )
