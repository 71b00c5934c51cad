"""The parents of a comparison: opened, and refused where their numbers cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import Method, Setting
from ...model import huggingface
from ...model.blocks import SETTINGS
from ...tickets.parent import Parent, open_parent, recut, what_is

LABELS: dict[Method, str] = {"dense": "dense", "dropout": "dropout", "twist": "TwIST"}


@dataclass(frozen=True)
class ComparedParent:
    """One parent, cut in the widest setting that is asked for."""

    label: str  # what tables call it
    method: Method  # how it was trained
    parent: Parent
    sha256: str  # of its weights: results belong to them, wherever the folder lies
    settings: tuple[Setting, ...]  # those that its training cut

    def describe(self) -> dict[str, Any]:
        cfg = self.parent.cfg
        return {
            "source": self.parent.source,
            "weights_sha256": self.sha256,
            "method": self.method,
            "round": self.parent.progress.round,
            "scale": cfg.train.scale,
            "trained_on": cfg.blocks.setting,
            "k_attn": cfg.blocks.k_attn,
            "k_ffn": cfg.blocks.k_ffn,
            "common_attn": cfg.blocks.common_attn,
            "common_ffn": cfg.blocks.common_ffn,
            "common_by": cfg.blocks.common_by,
        }


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
        label = LABELS[method] if alone else f"{LABELS[method]} {_name(source)}"
        if label in (other.label for other in found):
            label += f" #{1 + sum(other.method == method for other in found)}"
        made = ComparedParent(
            label, method, recut(opened, widest), huggingface.weights_sha256(opened.template), shown
        )
        if found:
            _check_alike(found[0].parent, made.parent, source)
        found.append(made)
    return found


def _check_alike(one: Parent, other: Parent, source: str) -> None:
    """Numbers of two parents mean something side by side if text, model and blocks are the same."""

    def refuse(what: str, values: Sequence[Any], advice: str = "") -> None:
        raise ValueError(
            f"{source} cannot be compared with {one.source}: {what} {values[0]}, not {values[1]}"
            f"{advice}"
        )

    n_tokens = [huggingface.vocab_size(p.template) for p in (other, one)]
    if n_tokens[0] != n_tokens[1]:
        refuse("it has a vocabulary of", n_tokens)
    shas = [p.tokenizer_sha256 for p in (other, one)]
    if None not in shas and shas[0] != shas[1]:
        refuse("its tokenizer has sha256", [f"{str(sha)[:12]}..." for sha in shas])
    if other.template.config.model_type != one.template.config.model_type:
        refuse("it is a", [p.template.config.model_type for p in (other, one)])
    shapes = [huggingface.shapes(p.template) for p in (other, one)]
    if shapes[0] != shapes[1]:
        names = sorted(shapes[0].keys() | shapes[1].keys())
        odd = next(n for n in names if shapes[0].get(n) != shapes[1].get(n))
        refuse(f"{odd} has shape", [each.get(odd) for each in shapes])
    keys = ("shared_first", "shared_last", "n_ffn", "attn_by")
    # C belongs to a parent's training, as its K does: each keeps its own
    if one.block_map.with_common({}) != other.block_map.with_common({}):
        blocks = [p.cfg.blocks for p in (other, one)]
        odd = next(key for key in keys if getattr(blocks[0], key) != getattr(blocks[1], key))
        values = [getattr(each, odd) for each in blocks]
        refuse(f"blocks.{odd} =", values, f"; give blocks.{odd}=... for all of them")
    lengths = [p.cfg.data.seq_len for p in (other, one)]
    if lengths[0] != lengths[1]:
        refuse("data.seq_len =", lengths, "; give data.seq_len=... for all of them")


def _name(source: str) -> str:
    """The run folder's own name."""
    parts = [p for p in Path(source).parts if p != "checkpoints" and not p.startswith("round-")]
    return parts[-1] if parts else source
