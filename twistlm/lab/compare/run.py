"""`twistlm compare`: open the parents, fill the cells that are missing, write the table.

FOLDER/
  points.jsonl   a line per cell: a stopped comparison goes on from here
  compare.csv    a row per parent, method, setting and ratio, all numbers
  compare.md     a table per setting, then all rows
  compare.json   the same, with parents, text, calibration and versions
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import cast

from rich.table import Table

from ...baselines import COMPARED, STRUCTURED, repair
from ...baselines.methods import METHODS
from ...compute.perplexity import Text
from ...config import Method, Setting
from ...model import families, huggingface
from ...model.blocks import KINDS, SETTINGS, shares_of_ratio, widths_of_ratio
from ...system.files import whole_file
from ...system.provenance import describe_run
from ...system.terminal import markdown_code, markdown_text, progress
from ...tickets import importance
from ...tickets.budget import amount
from ...tickets.calibration import calibrate
from ...tickets.parent import open_text
from ...tickets.ticket_scale import choice_text
from ..points import Place, Points, place_of
from . import table
from .cells import Asked, Cell, Grid, exact, mean_share, named_shares
from .measure import Healing
from .rivals import LABELS, Rival, open_all

FILES = ("compare.csv", "compare.md", "compare.json")


def compare(request: CompareRequest) -> list[Table]:
    """Measure what is missing and write the table; returns it for the terminal."""
    place = place_of(request.out)
    _check_place(place)
    request.check()
    settings = request.chosen_settings()
    rivals = open_all(request.sources, settings, request.device, request.overrides)
    asked = read(request, rivals)
    for rival in rivals:
        _check_ratios(rival, asked)
    points = Points(place)
    cells = Grid(rivals, asked, points).cells()
    cut = tuple(s for s in settings if any(cell.is_pruned and cell.setting == s for cell in cells))
    if not cut:
        raise ValueError(
            f"nothing to compare in --settings {request.settings}: no method, and no parent that was "
            f"trained so shows random tickets (--n {request.n})"
        )
    place.folder.mkdir(parents=True, exist_ok=True)
    try:
        _fill(cells, points, request.quiet)
        with suppress(OSError):  # unfinished sizes lie there
            (place.folder / HEALING).rmdir()
    finally:  # what is there is shown, whatever stopped the rest
        made = table.rows(cells, points)
        _write(place.folder, made, cut, asked, rivals)
    return [table.to_rich(table.summary(made, s), title(asked, s)) for s in cut]


def _check_place(place: Place) -> None:
    """A comparison or a lab of ours, an empty folder, or none yet."""
    folder = place.folder
    if place.exists() or not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ValueError(f"--out {folder} exists and is no comparison: choose another folder")


def _check_ratios(rival: Rival, asked: Asked) -> None:
    """Refuse a ratio of layers that are not cut and, for tickets, one that is no whole number of blocks
    in a layer or has no room for C."""
    parent = rival.parent
    for setting in asked.settings:
        block_map = families.partition(parent.template, replace(parent.cfg.blocks, setting=setting))
        for ratio in asked.ratios_in(setting):
            try:
                (widths_of_ratio if asked.tickets else shares_of_ratio)(block_map, ratio)
            except ValueError as error:
                n_blocks = {block_map.n_blocks(kind) for kind in SETTINGS[setting]}
                uneven = len(n_blocks) > 1 and not named_shares(ratio)
                advice = "; each kind can have its own, as in --ratios attn=1/3,ffn=4/12"
                raise ValueError(f"--ratios {ratio}: {error}{advice if uneven else ''}") from None


def _fill(cells: list[Cell], points: Points, quiet: bool) -> None:
    """Measure the cells that are not finished, under a progress bar."""
    missing = [cell for cell in cells if cell.find(points) is None]
    with progress(quiet) as bar:
        task = bar.add_task("compare", total=len(cells), note="")
        bar.update(task, completed=len(cells) - len(missing))
        for cell in missing:
            bar.update(task, note=str(cell))
            cell.fill(points, lambda where, cell=cell: bar.update(task, note=f"{cell} {where}"))  # type: ignore[misc]
            bar.advance(task)


def title(asked: Asked, setting: Setting) -> str:
    """What stands above the table of one setting."""
    n_tokens = asked.text.n_sequences * asked.text.seq_len
    spread = f" (random: mean ± sd of {asked.n})" if asked.n > 1 else ""
    least = table.size_name(min(asked.ratios_in(setting), key=mean_share))
    costs = "seconds after training, calibration tokens, MB on disk and decoding speed on a CPU"
    return f"{setting}: perplexity on {n_tokens:,} tokens{spread}; {costs} at {least}"


def _write(
    folder: Path,
    made: list[table.ComparisonRow],
    settings: Sequence[Setting],  # those with rows
    asked: Asked,
    rivals: list[Rival],
) -> None:
    everything = table.everything(made)
    n_calibration = [] if asked.ids is None else list(asked.ids.shape)
    choice, chosen_on, said = asked.choice, None, "that of training"
    if choice is not None:
        n_choice = choice.n_sequences * choice.seq_len
        chosen_on = {"data": choice.file.stem, "first": choice.first, "n_tokens": n_choice}
        said = f"the best of some on {n_choice:,} tokens of {choice.file.stem}, from sequence {choice.first} on"
    run = describe_run()
    record = {
        "rows": table.to_dict(made),
        "parents": {rival.label: rival.describe() for rival in rivals},
        "text": {
            "data": asked.text.file.stem,
            "n_tokens": asked.text.n_sequences * asked.text.seq_len,
        },
        "chosen_on": chosen_on,
        "calibration": n_calibration,
        "seed": asked.seed,
        **run,
    }
    parts = ["# Comparison", ""]
    for setting in settings:
        shown = table.to_markdown(table.summary(made, setting))
        parts += [f"## {title(asked, setting)}", "", shown, ""]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    parts += [
        "Scale: the activation scale of tickets, with `+ mean` where biases make up for absent blocks: "
        f"{markdown_text(said)}. Seconds: after training, for one ticket. Calibration: tokens that were read. MB: the weights on disk in "
        "float32. Decode: measured speed on the CPU (the fastest token) against the whole parent, of tickets by their "
        "shapes, of single zeros once, where there are most.",
        "",
        "## All rows",
        "",
        table.to_markdown(everything),
        "",
        f"{markdown_code(run['command'])}, twistlm {run['git']}, {run['device']}, {versions}",
        "",
    ]
    texts = (table.to_csv(everything), "\n".join(parts), json.dumps(record, indent=1) + "\n")
    for name, content in zip(FILES, texts, strict=True):
        whole_file(folder / name, content)


TOKENS = 32768  # evaluated at once on a GPU
HEALING = "healing"  # a folder for sizes that are being trained


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """A comparison as it is typed; lists are separated by commas, as in `8/12,6/12`."""

    sources: Sequence[tuple[Method, str]]  # how each parent was trained, and where it lies
    out: Path  # a folder, or a file of points
    ratios: Sequence[str]  # each a list of fractions, or one ratio by kinds: `attn=2/3,ffn=6/12`
    settings: str
    methods: str | None = None  # None: all that are known
    on: str = "dense"  # the kinds of parent that these methods prune
    repair: str = ""
    heal: str = ""  # tokens to train sizes for themselves, shared by all of a setting
    n: int = 20  # random tickets of each parent and size
    data: str | None = None  # None: the validation tokens of the first parent's run
    tokens: int = 0  # of them; 0: all
    calibration: str | None = None  # None: the training tokens of the first parent's run
    n_calibration: int = 128  # sequences
    seed: int = 0
    device: str = "auto"
    overrides: Sequence[str] = ()
    quiet: bool = False

    def chosen_settings(self) -> tuple[Setting, ...]:
        chosen = names(self.settings, "--settings", list(SETTINGS))
        if not chosen:
            raise ValueError(f"--settings names none of {', '.join(SETTINGS)}")
        return cast(tuple[Setting, ...], chosen)

    def chosen_ratios(self) -> tuple[str, ...]:
        """Each size once, as it was typed first."""
        found: dict[str, str] = {}
        for typed in self.ratios:
            pieces = [piece.strip() for piece in typed.split(",") if piece.strip()]
            for ratio in [self._by_kind(typed, pieces)] if "=" in typed else pieces:
                for text in named_shares(ratio).values() or [ratio]:
                    _check_share(text)
                found.setdefault(exact(ratio), ratio)
        if not found:
            raise ValueError("--ratios names no ratio: give some as 8/12,6/12")
        return tuple(found.values())

    def _by_kind(self, typed: str, pieces: list[str]) -> str:
        """`attn=2/3,ffn=6/12` without spaces; it must speak of every kind that is cut, and once of each."""
        legal = "one ratio by kinds of layer is attn=2/3,ffn=6/12, others follow in a --ratios of their own"
        found: dict[str, str] = {}
        for piece in pieces:
            key, equals, text = (part.strip() for part in piece.partition("="))
            kind, dot, layer = key.partition(".")
            if not equals or kind not in KINDS or (dot and not layer.isdecimal()) or key in found:
                raise ValueError(f"--ratios {typed!r}: {piece!r} is out of place; {legal}")
            found[key] = text
        for setting in self.chosen_settings():
            for kind in SETTINGS[setting]:
                if kind not in found:
                    raise ValueError(
                        f"--ratios {typed!r} says nothing about {kind}, which --settings {setting} cuts; {legal}"
                    )
        return ",".join(f"{key}={text}" for key, text in found.items())

    def chosen_methods(self) -> tuple[str, ...]:
        return COMPARED if self.methods is None else names(self.methods, "--methods", COMPARED)

    def chosen_kinds(self) -> tuple[str, ...]:
        """The kinds of parent that are pruned; each of them must be among the sources."""
        kinds = names(self.on, "--on", list(LABELS)) if self.chosen_methods() else ()
        for kind in kinds if self.sources else ():
            if kind not in dict(self.sources):
                raise ValueError(
                    f"--on {kind!r}: give --parent-{kind}, other parents to prune, or --methods ''"
                )
        return kinds

    def chosen_repairs(self) -> tuple[str, ...]:
        return names(self.repair, "--repair", list(repair.METHODS))

    def check(self) -> None:
        """Refuse what can be refused before a parent is opened."""
        self.chosen_settings()
        self.chosen_ratios()
        self.chosen_kinds()
        self.chosen_repairs()
        if self.heal:
            amount("tokens", self.heal, "--heal")
            if "dense" not in dict(self.sources):
                raise ValueError(
                    "--heal prunes and trains a data-parallel parent: give --parent-dense"
                )


def read(request: CompareRequest, rivals: list[Rival]) -> Asked:
    """The request with its text and calibration sequences, which must fit all parents."""
    first, methods, repairs = rivals[0].parent, request.chosen_methods(), request.chosen_repairs()
    for how in repairs:
        repair.check_repair(first, how)
    ids = None
    if repairs or request.heal or any(_needs_text(method) for method in methods):
        options = ("--calibration", "--calibration-sequences")
        n, seed = request.n_calibration, request.seed
        ids = calibrate(first, request.calibration, n, seed, options).ids
    text = _text(rivals, request.data, request.tokens)
    return Asked(
        settings=request.chosen_settings(),
        ratios=request.chosen_ratios(),
        methods=methods,
        on=request.chosen_kinds(),
        repairs=repairs,
        n=request.n,
        seed=request.seed,
        text=text,
        choice=choice_text(text, first.cfg.data, Path(first.source)),
        healing=_healing(request, rivals) if request.heal else None,
        ids=ids,
    )


def _healing(request: CompareRequest, rivals: list[Rival]) -> Healing:
    """All sizes of a setting share the tokens, since one training of the others serves them all."""
    n_tokens = int(amount("tokens", request.heal, "--heal"))
    dense = next(rival for rival in rivals if rival.method == "dense")
    data = open_text(rivals[0].parent, request.calibration, "train").stem
    return Healing(dense, n_tokens, data, place_of(request.out).folder / HEALING)


def _check_share(text: str) -> None:
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--ratios {text!r} is not a fraction such as 6/12 or 0.5") from None
    if not 0 < share <= 1:
        raise ValueError(f"--ratios {text!r}: it must lie in (0, 1]")


def names(text: str, option: str, legal: Sequence[str]) -> tuple[str, ...]:
    """The parts of `a,b,c`, each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in found:
        if name not in legal:
            raise ValueError(f"{option} {name!r}: use some of {', '.join(legal)}")
    return found


def _needs_text(method: str) -> bool:
    if method.startswith(STRUCTURED):
        return method.removeprefix(STRUCTURED) in importance.NEEDS_TEXT
    return METHODS[method].observe is not None


def _text(rivals: list[Rival], data: str | None, tokens: int) -> Text:
    """The text of the first parent, checked against all of them."""
    first = rivals[0].parent
    file, seq_len = open_text(first, data, "valid"), first.cfg.data.seq_len
    for rival in rivals:
        parent = rival.parent
        huggingface.check_positions(parent.template, seq_len)
        file.check(seq_len, huggingface.vocab_size(parent.template), parent.tokenizer_sha256)
    gpu = first.central.weights.device.type == "cuda"
    return Text(file, seq_len, tokens, max(1, TOKENS // seq_len) if gpu else 16)
