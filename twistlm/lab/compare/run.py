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
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from rich.table import Table

from ...model import families
from ...model.blocks import widths_of_ratio
from ...system.files import whole_file
from ...system.provenance import describe_run
from ...system.terminal import progress
from ...tickets.parent import Parent
from ..points import Place, Points, place_of
from . import table
from .cells import Asked, Cell, Grid
from .request import CompareRequest, read
from .rivals import Rival, open_all

FILES = ("compare.csv", "compare.md", "compare.json")


def compare(request: CompareRequest) -> list[Table]:
    """Measure what is missing and write the table; returns it for the terminal."""
    place = place_of(request.out)
    _check_place(place)
    request.check()
    settings = request.chosen_settings()
    rivals = open_all(request.sources, settings, request.device, request.overrides)
    asked = read(request, rivals)
    if asked.tickets:
        _check_whole_blocks(rivals[0].parent, asked)
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


def _check_whole_blocks(parent: Parent, asked: Asked) -> None:
    """Refuse a ratio that is no whole number of blocks in a layer that is cut."""
    for setting in asked.settings:
        blocks = replace(parent.cfg.blocks, setting=setting)
        for ratio in asked.ratios:
            widths_of_ratio(families.partition(parent.template, blocks), ratio)


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


def title(asked: Asked, setting: str) -> str:
    """What stands above the table of one setting."""
    n_tokens = asked.text.n_sequences * asked.text.seq_len
    spread = f" (random: mean ± sd of {asked.n})" if asked.n > 1 else ""
    least = min(asked.ratios, key=Fraction)
    costs = "seconds after training, calibration tokens, MB on disk and decoding speed on a CPU"
    return f"{setting}: perplexity on {n_tokens:,} tokens{spread}; {costs} at {least}"


def _write(
    folder: Path,
    made: list[table.ComparisonRow],
    settings: Sequence[str],  # those with rows
    asked: Asked,
    rivals: list[Rival],
) -> None:
    everything = table.everything(made)
    n_calibration = [] if asked.ids is None else list(asked.ids.shape)
    run = describe_run()
    record = {
        "rows": table.to_dict(made),
        "parents": {rival.label: rival.describe() for rival in rivals},
        "text": {
            "data": asked.text.file.stem,
            "n_tokens": asked.text.n_sequences * asked.text.seq_len,
        },
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
        "Seconds: after training, for one ticket. Calibration: tokens that were read. MB: the weights on disk in "
        "float32. Decode: measured speed on the CPU against the whole parent, of tickets by their shapes, of "
        "single zeros once, where there are most.",
        "",
        "## All rows",
        "",
        table.to_markdown(everything),
        "",
        f"`{run['command']}`, twistlm {run['git']}, {run['device']}, {versions}",
        "",
    ]
    texts = (table.to_csv(everything), "\n".join(parts), json.dumps(record, indent=1) + "\n")
    for name, content in zip(FILES, texts, strict=True):
        whole_file(folder / name, content)
