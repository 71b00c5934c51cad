"""`python -m paper`: the experiments of the paper, and tables of what they measured."""

from pathlib import Path

import typer

from twistlm.cli import main
from twistlm.cli.options import command
from twistlm.fields import option

from . import NAMES
from .scales import SCALES

WHAT = f"""{", ".join(NAMES)}, several, or all; changes to every training config
(model.weights=FOLDER: instead of a dense start).
`report PATH...`: what folders or .jsonl files of points hold, as Markdown."""
OUT = """Folder of parents and points, or a .jsonl file of points (default: runs/lab-SCALE).
Of a report: the folder for tables.md and a PNG for each figure."""
ONLY = """Only these settings (both,attn,ffn), this way of the recipe, seed ('seed 1') or rate
('rate 2'); may be given again."""

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")


@command(
    app,
    "python -m paper stability --scale smoke",
    "python -m paper all --scale gpu data.train=data/wiki/train data.valid=data/wiki/test",
    "python -m paper recipe --scale gpu --only TwIST --only 'seed 1' model.weights=runs/start",
    "python -m paper report paper/points/*.jsonl -o report",
)
def paper(
    names: list[str] | None = option(
        WHAT, None, metavar="NAME... [SECTION.KEY=VALUE...]", argument=True
    ),
    scale: str = option(f"{', '.join(SCALES)}; smoke: on a CPU.", "smoke"),
    out: Path | None = option(OUT, None, "--out", "-o"),
    only: tuple[str, ...] = option(ONLY, ()),
) -> None:
    """Run experiments of the paper point by point; a finished point is never run again."""
    given = names or []
    if not given:
        for name, what in NAMES.items():
            typer.echo(f"{name:<12}{what}")
    elif given[0] == "report":
        from .report import report

        page = report([Path(path) for path in given[1:]], out)
        typer.echo(f"written: {out}/tables.md and its figures" if out else page)
    else:
        from .experiments import run

        overrides = [word for word in given if "=" in word]
        chosen = [word for word in given if "=" not in word]
        folder = out or Path("runs") / f"lab-{scale}"
        run(chosen, scale, folder, overrides, only)


if __name__ == "__main__":
    main(app, "; the same command goes on where it stopped")
