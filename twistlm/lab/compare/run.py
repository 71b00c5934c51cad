"""`twistlm compare`: open the parents, fill the cells that are missing, write the table.

FOLDER/
  points/        a JSON file per cell: a stopped comparison goes on from here
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
from typing import Any

from rich.table import Table

from ...compute.perplexity import Text
from ...config import Method
from ...data.builtin import resolve
from ...data.token_file import open_tokens
from ...model import families, huggingface
from ...model.blocks import SETTINGS, widths_of_ratio
from ...pruners import calibrate
from ...pruners import repair as repairs
from ...pruners.methods import METHODS
from ...pruners.write import NAMES, STRUCTURED
from ...system.files import whole_file
from ...system.provenance import describe_run
from ...system.terminal import progress
from ...tickets import importance
from ...tickets.parent import Parent
from . import table
from .cells import Asked, Grid
from .rivals import LABELS, Rival, open_all

RANDOM = f"{STRUCTURED}random"  # every parent's random tickets are in the table anyway
DEFAULT = tuple(name for name in NAMES if name != RANDOM)
TOKENS = 32768  # evaluated at once on a GPU
FILES = ("compare.csv", "compare.md", "compare.json")


def names(text: str, option: str, legal: Sequence[str]) -> tuple[str, ...]:
    """The parts of `a,b,c`, each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in found:
        if name not in legal:
            raise ValueError(f"{option} {name!r}: use some of {', '.join(legal)}")
    return found


def check_folder(folder: Path) -> None:
    """A comparison of ours, an empty folder, or none yet."""
    if (folder / "points").is_dir() or not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ValueError(f"--out {folder} exists and is no comparison: choose another folder")


def compare(
    sources: Sequence[tuple[Method, str]],
    folder: Path,
    *,
    ratios: str,
    settings: str,
    methods: str | None = None,
    on: str = "dense",
    repair: str = "",
    n: int = 20,
    data: str | None = None,
    tokens: int = 0,
    calibration: str | None = None,
    n_calibration: int = 128,
    seed: int = 0,
    device: str = "auto",
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> list[Table]:
    """Measure what is missing and write the table; returns it for the terminal."""
    check_folder(folder)
    wanted: Any = names(settings, "--settings", list(SETTINGS))
    shares = _ratios(ratios)
    if not wanted:
        raise ValueError(f"--settings names none of {', '.join(SETTINGS)}")
    chosen = DEFAULT if methods is None else names(methods, "--methods", DEFAULT)
    kinds = names(on, "--on", list(LABELS)) if chosen else ()
    for kind in kinds if sources else ():
        if kind not in dict(sources):
            raise ValueError(
                f"--on {kind!r}: give --parent-{kind}, other parents to prune, or --methods ''"
            )
    fixes = names(repair, "--repair", list(repairs.METHODS))
    rivals = open_all(sources, wanted, device, overrides)
    first = rivals[0].parent
    for how in fixes:
        repairs.check(first, how)
    ids = None
    if fixes or any(_needs_text(method) for method in chosen):
        options = ("--calibration", "--calibration-sequences")
        ids = calibrate.windows(first, calibration, n_calibration, seed, options)[1]
    text = _text(rivals, data, tokens)
    asked = Asked(wanted, shares, chosen, kinds, fixes, n, seed, text, ids)
    for setting in asked.settings if asked.tickets else ():
        blocks = replace(first.cfg.blocks, setting=setting)
        for ratio in shares:
            widths_of_ratio(families.partition(first.template, blocks), ratio)
    points = folder / "points"
    grid = Grid(rivals, asked, points)
    cells = grid.cells()
    cut = tuple(s for s in wanted if any(cell.is_pruned and cell.setting == s for cell in cells))
    if not cut:
        raise ValueError(
            f"nothing to compare in --settings {settings}: no method, and no parent that was trained so "
            f"shows random tickets (--n {n})"
        )
    missing = [cell for cell in cells if cell.find(points) is None]
    points.mkdir(parents=True, exist_ok=True)
    try:
        with progress(quiet) as bar:
            task = bar.add_task("compare", total=len(cells), note="")
            bar.update(task, completed=len(cells) - len(missing))
            for cell in missing:
                bar.update(task, note=str(cell))
                cell.fill(points, lambda where, cell=cell: bar.update(task, note=f"{cell} {where}"))  # type: ignore[misc]
                bar.advance(task)
    finally:  # what is there is shown, whatever stopped the rest
        made = table.rows(cells, points)
        _write(folder, made, cut, asked, rivals)
    return [table.to_rich(table.summary(made, s), title(asked, s)) for s in cut]


def _ratios(text: str) -> tuple[str, ...]:
    found: dict[Fraction, str] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        try:
            share = Fraction(part)
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"--ratios {part!r} is not a fraction such as 6/12 or 0.5") from None
        if not 0 < share <= 1:
            raise ValueError(f"--ratios {part!r}: it must lie in (0, 1]")
        found.setdefault(share, part)
    if not found:
        raise ValueError("--ratios names no ratio: give some as 8/12,6/12")
    return tuple(found.values())


def _needs_text(method: str) -> bool:
    if method.startswith(STRUCTURED):
        return method.removeprefix(STRUCTURED) in importance.NEEDS_TEXT
    return METHODS[method].observe is not None


def _text(rivals: list[Rival], data: str | None, tokens: int) -> Text:
    """The text of the first parent, checked against all of them."""
    first: Parent = rivals[0].parent
    stem = data or first.cfg.data.valid
    if not stem:
        raise ValueError(f"{first.source} has no validation tokens of its own: give --data STEM")
    file, seq_len = open_tokens(resolve(stem, "valid")), first.cfg.data.seq_len
    for rival in rivals:
        parent = rival.parent
        file.check(seq_len, huggingface.vocab_size(parent.template), parent.tokenizer_sha256)
    gpu = first.central.weights.device.type == "cuda"
    return Text(file, seq_len, tokens, max(1, TOKENS // seq_len) if gpu else 16)


def title(asked: Asked, setting: str) -> str:
    n_tokens = asked.text.n_sequences * asked.text.seq_len
    spread = f" (random: mean ± sd of {asked.n})" if asked.n > 1 else ""
    least = min(asked.ratios, key=Fraction)
    costs = "seconds after training, calibration tokens, MB on disk and decoding speed on a CPU"
    return f"{setting}: perplexity on {n_tokens:,} tokens{spread}; {costs} at {least}"


def _write(
    folder: Path,
    made: list[table.Row],
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
    parts += [
        "Seconds: after training, for one ticket. Calibration: tokens that were read. MB: the weights on disk in "
        "float32. Decode: measured speed on the CPU against the whole parent, of tickets by their shapes, of "
        "single zeros once, where there are most.",
        "", "## All rows", "", table.to_markdown(everything), "",
        f"`{run['command']}`, twistlm {run['git']}, {run['device']}, "
        + ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        "",
    ]  # fmt: skip
    texts = (table.to_csv(everything), "\n".join(parts), json.dumps(record, indent=1) + "\n")
    for name, content in zip(FILES, texts, strict=True):
        whole_file(folder / name, content)
