"""`python -m paper`: the experiments of the paper, and a page of what they measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twistlm.cli.options import words

from . import NAMES
from .scales import SCALES

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

UNFINISHED = 3  # exit code: the time was up, the same command goes on


@app.command(
    epilog="Examples:\n\n"
    "python -m paper experiment --list\n\n"
    "python -m paper experiment stability --scale smoke\n\n"
    "python -m paper experiment all --scale gpu data.train=data/wiki/train data.valid=data/wiki/test --minutes 9\n\n"
    "python -m paper experiment shift --scale gpu start.train.rounds=100 train.rounds=40\n\n"
    "python -m paper experiment recipe --scale gpu --only TwIST --only 'dropout K=6' model.weights=runs/my-start"
)
def experiment(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME... [SECTION.KEY=VALUE...]",
            help=f"{words(NAMES)}, several, or all; changes to every training config "
            "(start.SECTION.KEY=VALUE: to the dense start alone; model.weights=FOLDER instead of one).",
            show_default=False,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Say which experiments there are.")] = False,
    scale: Annotated[
        str,
        typer.Option(
            help=f"{words(SCALES)}: a model, its data and all sizes; smoke runs on a CPU."
        ),
    ] = "smoke",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder of parents and points, or a .jsonl file of points; default: runs/lab-SCALE.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            "--settings",
            help="Only these settings (both,attn,ffn), this way of the recipe, seed ('seed 1') or rate ('rate 2'); may be given again.",
        ),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(min=0, help="Stop cleanly after this time (exit code 3); 0: never."),
    ] = 0,
) -> None:
    """Reproduce the paper's tables and figures, point by point; a finished point is never run again."""
    from twistlm.system.terminal import console

    given = names or []
    if list_ or not given:
        for name, what in NAMES.items():
            console.print(f"{name:<12}{what}")
        return
    from .run import run

    overrides = [word for word in given if "=" in word]
    folder = out or Path("runs") / f"lab-{scale}"
    chosen = [word for word in given if "=" not in word]
    if not run(chosen, scale, folder, overrides, minutes=minutes, only=only or []):
        raise typer.Exit(UNFINISHED)


@app.command(
    epilog="Examples:\n\n"
    "python -m paper report runs/lab-smoke -o report.html\n\n"
    "python -m paper report runs/demo -o demo.html\n\n"
    "python -m paper report paper/points/*.jsonl paper/points/*.compare.json -o docs/report.html --markdown docs/results.md"
)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of `python -m paper experiment`, `compare` or `train`, running ones too, a folder of trainings, "
            "or a lab's .jsonl and a comparison's .json file."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="The page; a folder of the same name gets PNG, SVG, JSON."
        ),
    ] = Path("report.html"),
    markdown: Annotated[
        Path | None,
        typer.Option(
            help="Also write the tables into this file, between two marks; the rest stays. figures/ beside it "
            "gets its pictures."
        ),
    ] = None,
) -> None:
    """One self-contained page: what was run, tables, figures, and which of the paper's claims hold."""
    from twistlm.system.terminal import console

    from .report.write import report

    written = report(runs, out, markdown)
    console.print(f"written: {out} and {len(written) - 1} more files")


if __name__ == "__main__":
    app()
