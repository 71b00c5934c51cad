"""bench train, deploy, comm: times, bytes and memory on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from ..config import Setting, Wire
from ..export import RUNTIMES
from .options import JsonOut, Overrides, Parent, Preset, lab, seed_of, words, write_json

group = typer.Typer(help="Times, bytes and memory on this machine.", no_args_is_help=True)
lab.add_typer(group, name="bench")

RATIOS = ("8/12", "6/12", "4/12", "3/12")


@group.command(
    epilog="Examples:\n\n"
    "twistlm lab bench train paper\n\n"
    "twistlm lab bench train paper train.batch=32 --sizes 12/12,4/12 --settings both --json bench.json\n\n"
    "twistlm lab bench train demo run.device=cpu"
)
def train(
    preset: Preset,
    overrides: Overrides = None,
    sizes: Annotated[
        str, typer.Option(help="Workers to measure, as shares of the blocks.")
    ] = "12/12,10/12,8/12,6/12,4/12,3/12",
    settings: Annotated[
        str, typer.Option(help=f"{words(get_args(Setting))}; several with commas.")
    ] = "both,attn,ffn",
    steps: Annotated[int, typer.Option(min=0, help="Steps behind one time; 0: enough.")] = 0,
    references: Annotated[bool, typer.Option(help="Measure Hugging Face's own step too.")] = True,
    json_out: JsonOut = None,
) -> None:
    """A worker's local step and a round at every size: ms, tokens/s, TFLOP/s, memory, overhead.

    The model of the preset is built with random weights and fed random tokens; nothing is loaded.
    """
    from .. import config

    cfg = config.load(preset, overrides or [])
    from ..lab.bench.train import bench
    from ..lab.bench.train_tables import tables
    from ..system.terminal import console

    made = bench(
        cfg,
        sizes.split(","),
        settings.split(","),
        n_steps=steps,
        references=references,
        save=lambda made: write_json(json_out, made.to_dict()),
    )
    for table in tables(made):
        console.print(table)


@group.command(
    epilog="Examples:\n\n"
    "twistlm lab bench deploy runs/demo/twist\n\n"
    "twistlm lab bench deploy gpt2 --ratio 6/12 --ratio 4/12 --runtime onnx --threads 2 -o runs/bench"
)
def deploy(
    source: Parent,
    overrides: Overrides = None,
    ratio: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Size of a ticket, as 6/12 or attn=2/3,ffn=6/12; repeatable; default: {', '.join(RATIOS)}."
        ),
    ] = None,
    runtime: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{words(RUNTIMES)}; repeatable; default: all that are installed and can run "
            "this model."
        ),
    ] = None,
    prefill: Annotated[
        list[int] | None,
        typer.Option(help="Prompt length; repeatable; default: 128 and 512, if they fit."),
    ] = None,
    decode: Annotated[int, typer.Option(min=1, help="Tokens to decode after the prompt.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Runs behind each number.")] = 5,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: torch's choice.")] = 0,
    seed: Annotated[int, seed_of("the random tickets")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="New folder for the numbers and the models measured."),
    ] = None,
) -> None:
    """The full parent against tickets: prefill, decode with KV cache, bytes on disk, memory."""
    from ..lab.bench.deploy import DeployRequest, bench, table
    from ..system.terminal import console
    from ..tickets.parent import open_parent

    request = DeployRequest(
        ratios=ratio or RATIOS,
        runtimes=runtime or (),
        prefill=prefill or (),
        n_decode=decode,
        n_repeats=repeats,
        threads=threads,
        seed=seed,
    )
    made = bench(open_parent(source, "cpu", overrides or []), request, out)
    console.print(table(made))
    for name, why in made.left_out.items():
        console.print(f"without {name}: {why}")


@group.command(
    epilog="Examples:\n\n"
    "twistlm lab bench comm\n\n"
    "twistlm lab bench comm --mb 250 --slow 4 --slow 8 --slow-mb 64 --gbit 1 --json comm.json"
)
def comm(
    workers: Annotated[int, typer.Option(min=3, help="S on this machine's loopback.")] = 4,
    mb: Annotated[float, typer.Option(min=0.1, help="MB of a subnet there.")] = 250.0,
    slow: Annotated[
        list[int] | None,
        typer.Option(
            min=3, help="S on slow links, repeatable; default: 4 and 8. Needs root, ip and tc."
        ),
    ] = None,
    slow_mb: Annotated[float, typer.Option(min=0.1, help="MB of a subnet there.")] = 64.0,
    gbit: Annotated[float, typer.Option(min=0.01, help="Speed of a slow link, Gbit/s.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Exchanges behind a number.")] = 3,
    wire: Annotated[str, typer.Option(help=f"{words(get_args(Wire))}.")] = "fp32",
    json_out: JsonOut = None,
) -> None:
    """Bare gloo, Ray, torchrun's star and shards: on this machine, and in network namespaces.

    A round's exchange with nothing trained; every subnet keeps a third of the blocks.
    """
    from .. import config

    cfg = config.from_dict({"run": {"wire": wire}})
    from ..lab.bench.comm import bench, table
    from ..system.terminal import console

    made = bench(
        loopback=workers,
        megabytes=mb,
        slow=slow or (4, 8),
        slow_megabytes=slow_mb,
        gbit=gbit,
        repeats=repeats,
        wire=cfg.run.wire,
    )
    console.print(table(made))
    for name, ratio in made.ratios().items():
        console.print(f"{name}: {ratio:.2f}")
    for name, why in made.left_out.items():
        console.print(f"{name}: {why}")
    write_json(json_out, made.to_dict())
