"""`twistlm lab compare`: open the parents, fill the cells that are missing, write the table.

FOLDER/
  points.jsonl   a line per cell: a stopped comparison goes on from here
  compare.csv    a row per parent, method, setting and ratio, all numbers
  compare.md     a table per setting, then all rows
  compare.json   the same, with parents, text, calibration and versions
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rich.table import Table

from ...baselines import COMPARED, REPAIRS, repair
from ...compute.perplexity import Text
from ...config import Setting
from ...model import families, huggingface
from ...model.blocks import SETTINGS, shares_of_ratio, widths_of_ratio
from ...system.terminal import progress
from ...tickets.budget import amount
from ...tickets.calibration import calibrate
from ...tickets.parent import open_text
from ...tickets.ticket_scale import choice_text
from ..points import Place, Points, place_of
from . import table
from .cells import Cell, Healing, Sweep, list_cells, named_shares, parse_ratios
from .measure import Comparison, reads_text
from .parents import LABELS, ComparedParent, open_all
from .request import CompareRequest

TOKENS = 32768  # evaluated at once on a GPU
HEALING = "healing"  # a folder for sizes that are being trained


def compare(
    request: CompareRequest,
    out: Path,
    device: str = "auto",
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> list[Table]:
    """Measure what is missing and write the table to `out`; returns it for the terminal.

    `out` is a folder, or a file of points FILE.jsonl with the table in FILE/.
    """
    place = place_of(out)
    _check_place(place)
    chosen = _check(request)
    parents = open_all(request.sources, chosen["settings"], device, overrides)
    sweep = _read(request, chosen, parents, place.folder / HEALING)
    for parent in parents:
        _check_ratios(parent, sweep)
    cells = list_cells(parents, sweep)
    comparison = Comparison(parents, sweep, Points(place))
    cut = tuple(s for s in sweep.settings if any(c.is_pruned and c.setting == s for c in cells))
    if not cut:
        raise ValueError(
            f"nothing to compare in --settings {request.settings}: no method, and no parent that "
            f"was trained so shows random tickets (--n {request.n})"
        )
    place.folder.mkdir(parents=True, exist_ok=True)
    try:
        _fill(cells, comparison, quiet)
        with suppress(OSError):  # unfinished sizes lie there
            (place.folder / HEALING).rmdir()
    finally:  # what is there is shown, whatever stopped the rest
        rows = table.rows([(cell, comparison.find(cell) or {}) for cell in cells])
        summaries = {table.title(sweep, s): table.summary(rows, s) for s in cut}
        table.write(place.folder, rows, summaries, _record(sweep, parents))
    return [table.to_rich(lines, title) for title, lines in summaries.items()]


def _fill(cells: list[Cell], comparison: Comparison, quiet: bool) -> None:
    """Measure the cells that are not finished, under a progress bar."""
    missing = [cell for cell in cells if comparison.find(cell) is None]
    with progress(quiet) as bar:
        task = bar.add_task("compare", total=len(cells), note="")
        bar.update(task, completed=len(cells) - len(missing))
        for cell in missing:
            bar.update(task, note=str(cell))
            comparison.fill(
                cell,
                lambda where, cell=cell: bar.update(task, note=f"{cell} {where}"),  # type: ignore[misc]
            )
            bar.advance(task)


def _check_place(place: Place) -> None:
    """A comparison or a lab of ours, an empty folder, or none yet."""
    folder = place.folder
    if place.exists() or not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ValueError(f"--out {folder} exists and is no comparison: choose another folder")


def _check(request: CompareRequest) -> dict[str, Any]:
    """The lists of a request, read; refuses what can be refused before a parent is opened."""
    settings = cast(tuple[Setting, ...], _names(request.settings, "--settings", list(SETTINGS)))
    if not settings:
        raise ValueError(f"--settings names none of {', '.join(SETTINGS)}")
    methods = _names(request.methods, "--methods", COMPARED)
    kinds = {method for method, _ in request.sources}
    on = _names(request.on, "--on", list(LABELS)) if methods else ()
    for kind in on if kinds else ():
        if kind not in kinds:
            raise ValueError(
                f"--on {kind!r}: give --parent-{kind}, other parents to prune, or --methods ''"
            )
    if request.heal:
        amount("tokens", request.heal, "--heal")
        if "dense" not in kinds:
            raise ValueError("--heal prunes and trains a data-parallel parent: give --parent-dense")
    return {
        "settings": settings,
        "ratios": parse_ratios(request.ratios, settings),
        "methods": methods,
        "on": on,
        "repairs": _names(request.repair, "--repair", REPAIRS),
    }


def _names(text: str, option: str, legal: Sequence[str]) -> tuple[str, ...]:
    """The parts of `a,b,c`, each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in found:
        if name not in legal:
            raise ValueError(f"{option} {name!r}: use some of {', '.join(legal)}")
    return found


def _read(
    request: CompareRequest, chosen: dict[str, Any], parents: list[ComparedParent], healing: Path
) -> Sweep:
    """The sweep with its text and calibration sequences, which must fit all parents."""
    first = parents[0].parent
    for how in chosen["repairs"]:
        repair.check_repair(first, how)
    ids, healed = None, None
    if chosen["repairs"] or request.heal or any(map(reads_text, chosen["methods"])):
        options = ("--calibration", "--calibration-sequences")
        n = request.calibration_sequences
        ids = calibrate(first, request.calibration, n, request.seed, options).ids
    text = _text(parents, request.data, request.tokens)
    if request.heal:
        dense = next(parent for parent in parents if parent.method == "dense")
        data = open_text(first.source, first.cfg, request.calibration, "train").stem
        healed = Healing(dense, int(amount("tokens", request.heal, "--heal")), data, healing)
    return Sweep(
        **chosen,
        n=request.n,
        seed=request.seed,
        text=text,
        choice=choice_text(text, first.cfg.data, Path(first.source)),
        ids=ids,
        healing=healed,
    )


def _text(parents: list[ComparedParent], data: str | None, tokens: int) -> Text:
    """The text of the first parent, checked against all of them."""
    first = parents[0].parent
    file, seq_len = open_text(first.source, first.cfg, data, "valid"), first.cfg.data.seq_len
    for parent in (each.parent for each in parents):
        huggingface.check_positions(parent.template, seq_len)
        file.check(seq_len, huggingface.vocab_size(parent.template), parent.tokenizer_sha256)
    gpu = first.central.weights.device.type == "cuda"
    return Text(file, seq_len, tokens, max(1, TOKENS // seq_len) if gpu else 16)


def _check_ratios(compared: ComparedParent, sweep: Sweep) -> None:
    """Refuse a ratio of layers that are not cut and, for tickets, one that is no whole number of
    blocks in a layer or has no room for C."""
    parent = compared.parent
    for setting in sweep.settings:
        block_map = families.partition(parent.template, replace(parent.cfg.blocks, setting=setting))
        for ratio in sweep.ratios_in(setting):
            try:
                (widths_of_ratio if sweep.has_tickets else shares_of_ratio)(block_map, ratio)
            except ValueError as error:
                n_blocks = {block_map.n_blocks(kind) for kind in SETTINGS[setting]}
                uneven = len(n_blocks) > 1 and not named_shares(ratio)
                advice = "; each kind can have its own, as in --ratios attn=1/3,ffn=4/12"
                raise ValueError(f"--ratios {ratio}: {error}{advice if uneven else ''}") from None


def _record(sweep: Sweep, parents: list[ComparedParent]) -> dict[str, Any]:
    """What stands beside the rows in compare.json."""

    def about(text: Text) -> dict[str, Any]:
        return {"data": text.file.stem, "n_tokens": text.n_sequences * text.seq_len}

    choice = sweep.choice
    return {
        "parents": {parent.label: parent.describe() for parent in parents},
        "text": about(sweep.text),
        "chosen_on": None if choice is None else about(choice) | {"first": choice.first},
        "calibration": [] if sweep.ids is None else list(sweep.ids.shape),
        "seed": sweep.seed,
    }
