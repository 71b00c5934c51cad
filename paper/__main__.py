"""`python -m paper`: the experiments of the paper, and tables of what they measured."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from twistlm.cli import main as run_command

from . import NAMES
from .scales import SCALES

UNFINISHED = 3  # exit code: the time was up, the same command goes on

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(
    epilog="Examples:\n\n"
    "python -m paper stability --scale smoke\n\n"
    "python -m paper all --scale gpu --minutes 9 data.train=data/wiki/train "
    "data.valid=data/wiki/test\n\n"
    "python -m paper shift --scale gpu start.train.rounds=100 train.rounds=40\n\n"
    "python -m paper recipe --scale gpu --only TwIST --only 'seed 1' model.weights=runs/start\n\n"
    "python -m paper report paper/points/*.jsonl -o report"
)
def experiment(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME... [SECTION.KEY=VALUE...]",
            help=f"{', '.join(NAMES)}, several, or all; changes to every training config "
            "(start.SECTION.KEY=VALUE: to the dense start alone; model.weights=FOLDER instead "
            "of one). `report PATH...` shows what was measured.",
            show_default=False,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Say which experiments there are.")] = False,
    scale: Annotated[
        str,
        typer.Option(help=f"{', '.join(SCALES)}: model, data and all sizes; smoke runs on a CPU."),
    ] = "smoke",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder of parents and points, or a .jsonl file of points (default: "
            "runs/lab-SCALE).",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these settings (both,attn,ffn), this way of the recipe, seed ('seed 1') or "
            "rate ('rate 2'); may be given again.",
        ),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(min=0, help="Stop cleanly after this time (exit code 3); 0: never."),
    ] = 0,
) -> None:
    """Run experiments of the paper point by point; a finished point is never run again."""
    given = names or []
    if list_ or not given:
        for name, what in NAMES.items():
            typer.echo(f"{name:<12}{what}")
        return
    from .experiments import run

    overrides = [word for word in given if "=" in word]
    chosen = [word for word in given if "=" not in word]
    folder = out or Path("runs") / f"lab-{scale}"
    if not run(chosen, scale, folder, overrides, minutes=minutes, only=only or []):
        raise typer.Exit(UNFINISHED)


report_app = typer.Typer(pretty_exceptions_enable=False)


@report_app.command(
    epilog="Examples:\n\n"
    "python -m paper report paper/points/*.jsonl\n\n"
    "python -m paper report runs/lab-smoke runs/demo -o report"
)
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of `python -m paper NAME` or `twistlm train`, running ones too; a "
            "folder of runs; a .jsonl of points."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write this folder: tables.md and a PNG for each figure."),
    ] = None,
) -> None:
    """Print what was measured as Markdown: tables, and which claims hold."""
    from .report import report

    page = report(paths, out)
    typer.echo(f"written: {out}/tables.md and its figures" if out else page)


def main() -> None:
    """`report`, or experiments by their names."""
    reports = sys.argv[1:2] == ["report"]
    command = partial(report_app, sys.argv[2:]) if reports else partial(app, sys.argv[1:])
    run_command(command, "" if reports else "; the same command goes on where it stopped")


if __name__ == "__main__":
    main()
