"""What a comparison measures, as data: parents x settings x sizes x methods.

Sizes are as they are typed: `6/12`, or a share for each kind of layer as `attn=2/3,ffn=6/12`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...baselines import COMPARED, STRUCTURED
from ...baselines.methods import METHODS, sparsities
from ...config import BlocksConfig, Method, Setting
from ...model import families, huggingface
from ...model.blocks import SETTINGS, widths_of_ratio
from ...tickets import NEEDS_TEXT
from ...tickets.budget import amount
from ...tickets.parent import Parent, open_parent, recut, what_is
from ...tickets.text import calibrate, open_text, text_of
from ...tickets.ticket_scale import choice_text
from . import CompareRequest

BLOCKS = ("attn_by", "n_ffn", "shared_first", "shared_last")  # what says how layers are cut
# What a cell measures: one of these, or a method of `baselines.NAMES`
WHOLE, RANDOM = "whole", "random"
NESTED = "nested"  # the first blocks of a parent's own order
SCORED_BY = "mask-fisher"  # the best score for whole blocks so far
HEALED, NESTED_HEALED = f"{STRUCTURED}{SCORED_BY} + heal", f"{NESTED} + heal"
SCRATCH = "from scratch"  # the shape of HEALED, trained from random weights
TRAINED = (HEALED, NESTED_HEALED, SCRATCH)
OWN = (RANDOM, NESTED, NESTED_HEALED)  # tickets as a parent gives them: rows go by its name


@dataclass(frozen=True)
class ComparedParent:
    """One parent, cut in the widest setting that is asked for."""

    label: str  # what tables call it
    method: Method  # how it was trained
    parent: Parent
    sha256: str  # of its weights: results belong to them, wherever the folder lies
    settings: tuple[Setting, ...]  # those that its training cut


class Sweep:
    """What is compared, with its text and its calibration sequences read.

    All that can be refused is refused here, before anything is measured.
    """

    def __init__(self, request: CompareRequest, device: str, overrides: Sequence[str]):
        self.n, self.seed, heal = request.n, request.seed, request.heal
        settings: Any = _names(request.settings, "--settings", list(SETTINGS))
        self.settings: tuple[Setting, ...] = settings
        if not self.settings:
            raise ValueError(f"--settings names none of {', '.join(SETTINGS)}")
        self.ratios = _sizes(request.ratios)
        self.methods = _names(request.methods, "--methods", COMPARED)
        # tokens that all sizes of a setting share, each trained for itself
        self.heal = int(amount("tokens", heal, "--heal")) if heal else 0
        kinds = {method for method, _ in request.sources}
        if self.methods and kinds and "dense" not in kinds:
            raise ValueError("--methods prune a data-parallel parent: give --parent-dense, or ''")
        if heal and "dense" not in kinds:
            raise ValueError("--heal prunes and trains a data-parallel parent: give --parent-dense")
        self.parents = _open_all(request.sources, self.settings, device, overrides)
        first = self.parents[0].parent
        source, cfg = first.source, first.cfg
        self.ids: Tensor | None = None  # calibration [n, seq_len], where something needs it
        if heal or any(map(reads_text, self.methods)):
            options = ("--calibration", "--calibration-sequences")
            n = request.calibration_sequences
            self.ids = calibrate(first, request.calibration, n, request.seed, options).ids
        self.text = text_of(first, request.data, request.tokens)
        for each in (each.parent for each in self.parents):
            vocab = huggingface.vocab_size(each.template)
            self.text.file.check(cfg.data.seq_len, vocab, each.tokenizer_sha256)
            self._check_ratios(each)
        # what activation scales are chosen on: never `text`
        self.choice = choice_text(self.text, cfg.data, Path(source))
        self.heal_data = open_text(source, cfg, request.calibration, "train").stem if heal else ""

    def _check_ratios(self, parent: Parent) -> None:
        """Of single weights any share can stay, of tickets a whole number of blocks."""
        has_tickets = self.n > 0 or self.heal > 0 or not set(self.methods) <= set(METHODS)
        read: Any = widths_of_ratio if has_tickets else sparsities
        for setting in self.settings:
            blocks = replace(parent.cfg.blocks, setting=setting)
            block_map = families.partition(parent.template, blocks)
            for ratio in self.ratios:
                try:
                    read(block_map, ratio)
                except ValueError as error:
                    n_blocks = {block_map.n_blocks(kind) for kind in SETTINGS[setting]}
                    advice = "; each kind can have its own, as in --ratios attn=1/3,ffn=4/12"
                    advice = advice if len(n_blocks) > 1 and "=" not in ratio else ""
                    raise ValueError(f"--ratios {ratio}: {error}{advice}") from None


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


def list_cells(sweep: Sweep) -> list[Cell]:
    """All cells in the order of measurement: parent, setting, ratio."""
    found: list[Cell] = []
    for parent in sweep.parents:
        found.append(Cell(parent, WHOLE))
        for setting in sweep.settings:
            rows = list(_rows(parent, setting, sweep))
            found += [Cell(parent, what, setting, r) for r in sweep.ratios for what in rows]
    return found


def _rows(parent: ComparedParent, setting: Setting, sweep: Sweep) -> Iterator[str]:
    """What is measured of a parent at every size of a setting."""
    learnt, has_order = setting in parent.settings, bool(parent.parent.progress.order)
    if sweep.n and learnt:
        yield RANDOM
        yield from (NESTED,) if has_order else ()
    if parent.method == "dense":
        yield from sweep.methods
        yield from (HEALED, SCRATCH) if sweep.heal else ()
    elif sweep.heal and has_order and learnt:
        yield NESTED_HEALED


def importance_of(what: str) -> str | None:
    """What the blocks of a cell are scored by, if they are."""
    if what in (HEALED, SCRATCH):
        return SCORED_BY
    return what.removeprefix(STRUCTURED) if what.startswith(STRUCTURED) else None


def reads_text(what: str) -> bool:
    """Whether what is measured needs calibration text."""
    if what in METHODS:
        return METHODS[what].observe is not None
    return importance_of(what) in NEEDS_TEXT


def _names(text: str, option: str, legal: Sequence[str]) -> tuple[str, ...]:
    """The parts of `a,b,c`, each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in found:
        if name not in legal:
            raise ValueError(f"{option} {name!r}: use some of {', '.join(legal)}")
    return found


def _open_all(
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


def _sizes(options: Sequence[str]) -> tuple[str, ...]:
    """Each size once: `8/12,6/12` are two, `attn=2/3,ffn=6/12` is one."""
    found = [[typed] if "=" in typed else typed.split(",") for typed in options]
    sizes = [size.replace(" ", "") for some in found for size in some if size.strip()]
    if not sizes:
        raise ValueError("--ratios names no ratio: give some as 8/12,6/12")
    return tuple(dict.fromkeys(sizes))
