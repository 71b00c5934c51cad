"""`twistlm plan`: what a run costs, counted from shapes before anything runs.

On a GPU in bf16, a worker takes, in bytes:

trainer       16 per parameter of a subnet: weights and moments in float32, bf16 copy and gradient
teacher       2 per parameter
activations   2 for what compiled layers keep for the backward pass of every token:
              3 d (both normed inputs, the residual) + outputs of the projections into a layer's
              blocks + inputs of those out of them: once in FFN layers; in attention twice, three
              times if gated. With train.recompute d for every layer, and all of this for one
logits        2, a chunk of tokens at a time, and beside it a teacher's or the last chunk's
rest          library workspaces and what a backward pass holds for a moment

On a CPU, in float32 and not compiled: as many for weights, moments and gradient, 4 of a teacher,
and 4 for what every operation of a layer keeps: 6 d (two norms: input, normed, times its weights),
the outputs of attention once less, and twice the inputs of the FFN's projections out. Logits are
at most `SMALL`, in several copies. The FFN of families whose activation is written in Python
(GPT-2's) keeps more.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from ..compute.loss import ALIGN, CHUNK, SMALL
from ..config import Config
from ..data.builtin import NAME, find
from ..data.teacher_cache import id_bytes, open_teacher_cache
from ..data.token_file import TokenFile, open_tokens
from ..model import families, generator, huggingface
from ..model.blocks import SETTINGS, BlockMap, Kind, Shapes, Widths, count, widths_of_ratio
from ..model.huggingface import Model
from ..system import terminal
from ..system.terminal import console
from ..transport import wire
from . import checkpoint
from .run import is_in_place, n_rows, n_state_rows

RATIOS = ("10/12", "8/12", "6/12", "4/12", "3/12")
# bytes beyond the count, in the middle of twelve steps of GPT-2 small to large on an H200
REST = 320_000_000
CPU_REST = 450_000_000  # Python, torch and transformers
HALF, FULL = 2, 4  # bytes of a number
TRAINER = 3 * FULL + 2 * HALF  # on a CPU no copy in bf16, and a gradient in float32
TOP = 64  # likeliest tokens in a cache that is not made yet: the default of `twistlm prepare`
CHEAP = 0.1  # of the local steps' time: an engine that costs less is worth what it survives
STORE = 5.0  # Gbit/s that Ray's object store carries between hosts, however fast they are linked
ALL = "all blocks"  # what a worker holds
ENGINES = {
    "ray": "it survives any worker and any machine",
    "sharded": "a death ends the run, which resumes from its checkpoint",
    "ddp": "train.method = dense; or try run.wire = int8, train.moments = reset",
}
CONTROL = "gradients are averaged in every step: torchrun with run.variant = hybrid"


def make(
    cfg: Config, gbit: float = 1.0, tflops: float = 100.0, memories: Sequence[int] = ()
) -> dict[str, Any]:
    """Count parameters and multiply, for links of `gbit` Gbit/s and workers of `tflops` TFLOP/s.

    `memories` are bytes that machines on Ray have for each of their workers.
    """
    if not gbit > 0 or not tflops > 0:
        raise ValueError(f"--gbit {gbit:g} and --tflops {tflops:g}: both must be greater than 0")
    cfg = checkpoint.resolved(cfg)
    t, blocks = cfg.train, cfg.blocks
    model = huggingface.planned(cfg.model)  # nothing is allocated
    block_map, shapes = families.partition(model, blocks), huggingface.shapes(model)
    if t.method != "dense":
        generator.check(block_map, blocks, t.n_workers, t.method)
    n_full, (n_sequences, epochs) = model.num_parameters(), _sequences(cfg)
    made: dict[str, Any] = {"model": cfg.model.type, "n_params": n_full, "n_sequences": n_sequences}
    # the paper counts global batches, whoever computes them
    in_paper = made["paper_rounds"] = int(n_sequences * epochs / t.batch / t.interval)
    rounds = int(n_sequences * epochs // (t.batch * t.interval * t.n_workers))
    made |= {"true_rounds": rounds, "legal_k": {}, "rows": []}
    for kind in block_map.kinds if t.method != "dense" else ():
        n_blocks, n_common = block_map.n_blocks(kind), len(blocks.common(kind))
        made["legal_k"][kind] = generator.legal_range(n_blocks, t.n_workers, n_common, t.method)
    for setting, ratio, n in _sizes(cfg, model, shapes, n_full):
        each = n * FULL * 2 * t.n_workers  # bytes of a round, down and up
        row = {"setting": setting, "ratio": ratio, "n_params": n, "paper_bytes": each * in_paper}
        # weights alone, and with m and v
        made["rows"] += [row | {"true_bytes": each * rounds, "carried_bytes": 3 * each * rounds}]

    # on a GPU: a process that trains one subnet at a time; one that has the central model, too
    made["worker_bytes"], made["process_bytes"] = memory(cfg, model)
    made |= {"cpu_bytes": memory(cfg, model, "cpu")[1], "holding": _holding(cfg, model)}
    # of the model beside every worker; from a cache to all workers in a round
    made["teacher_params"], made["teacher_bytes"] = _teacher(cfg, model)
    taught = made["teacher_params"] > 0
    made["machines"] = {n: largest_k(cfg, model, taught, n) for n in memories}

    sizes, n_sent = [count(block_map, shapes, widths) for widths in _dealt(cfg, block_map)], 0
    for n in sizes:
        shape = (3 if t.moments == "carry" else 1, n)
        n_sent += wire.down_bytes(cfg.run.wire, shape) + wire.up_bytes(cfg.run.wire, shape)
    # of a mean subnet, both ways
    counts = (t.n_workers, n_sent // len(sizes), FULL * n_full, t.interval)
    state = FULL * n_full * n_state_rows(cfg)
    owners = cfg.ray.owners or t.n_workers  # a machine for every worker
    # of the busiest link in a round, by engine
    engines = ENGINES if t.method == "twist" else ("ddp",)
    n_bytes = {e: busiest(e, *counts, state=state, owners=owners) for e in engines}
    speeds = {"ray": min(gbit, STORE), "sharded": gbit, "ddp": gbit}
    seconds = {engine: 8 * n / (1e9 * speeds[engine]) for engine, n in n_bytes.items()}
    # forward and backward take 6 FLOPs per parameter and token
    steps = 6 * max(sizes) * t.interval * t.batch * cfg.data.seq_len / (1e12 * tflops)
    take = min(("sharded", "ddp"), key=lambda engine: seconds.get(engine, math.inf))
    if seconds.get("ray", math.inf) <= CHEAP * steps:
        take = "ray"
    made |= {"link_bytes": n_bytes, "link_seconds": seconds}
    return made | {"train_seconds": steps, "take": take}


def memory(cfg: Config, model: Model, device: str = "cuda") -> tuple[int, int]:
    """Bytes of the largest worker, and of a process with the central model that plays all."""
    n_teacher, subnets = _teacher(cfg, model)[0], list[Widths]()
    for widths in _dealt(cfg, families.partition(model, cfg.blocks)):
        subnets += [] if widths in subnets else [widths]  # a trainer is kept for each
    everything = worker = worker_bytes(cfg, model, subnets, n_teacher, device)
    if cfg.blocks.widths == "worker":
        worker = max(worker_bytes(cfg, model, [own], n_teacher, device) for own in subnets)
    # the central buffer, the sums that workers' results are added up in, the outer momentum
    n_buffers = n_state_rows(cfg) + n_rows(cfg)
    if is_in_place(cfg) or (cfg.run.central == "host" and device != "cpu"):
        n_buffers = 0
    return worker, everything + FULL * model.num_parameters() * n_buffers


def worker_bytes(
    cfg: Config, model: Model, subnets: list[Widths], n_teacher: int, device: str = "cuda"
) -> int:
    """What a worker that trains subnets of these widths takes on a GPU in bf16, or on a CPU."""
    block_map, shapes = families.partition(model, cfg.blocks), huggingface.shapes(model)
    sizes = [count(block_map, shapes, widths) for widths in subnets]
    values = _values(cfg, model, subnets[sizes.index(max(sizes))], n_teacher, device)
    number, rest = HALF, REST
    if device == "cpu":  # autograd holds a parameter's gradient for a moment, a tied one's twice
        number, rest = FULL, CPU_REST + 2 * FULL * max(map(math.prod, shapes.values()))
    return TRAINER * sum(sizes) + number * (n_teacher + values) + rest


def _holding(cfg: Config, model: Model) -> dict[str, int]:
    """Bytes of a worker without a teacher, by what it holds."""
    shared, found = cfg.blocks, {}
    ways = {ALL: (shared, 1), "half of the blocks": (shared, 2)}
    ways["half, no shared layers"] = replace(shared, shared_first=0, shared_last=0), 2
    for name, (blocks, part) in ways.items():
        groups = families.partition(model, blocks).groups
        widths = {g.name: max(g.least, g.n_blocks // part) for g in groups}
        found[name] = worker_bytes(replace(cfg, blocks=blocks), model, [widths], 0)
    return found


def largest_k(cfg: Config, model: Model, taught: bool, n_bytes: int) -> dict[Kind, int]:
    """The largest K, one share of both kinds, whose worker takes at most `n_bytes`.

    `taught`: a teacher as large as the model lies beside it.
    """
    block_map, n_teacher = families.partition(model, cfg.blocks), model.num_parameters() * taught
    n_blocks = {kind: block_map.n_blocks(kind) for kind in block_map.kinds}
    shares = {Fraction(k, n) for n in n_blocks.values() for k in range(1, n + 1)}
    for share in sorted(shares, reverse=True):
        least = {kind: max(1, len(cfg.blocks.common(kind))) for kind in n_blocks}
        ks = {kind: max(least[kind], int(share * n)) for kind, n in n_blocks.items()}
        widths = {group.name: ks[group.kind] for group in block_map.groups}
        if (takes := worker_bytes(cfg, model, [widths], n_teacher)) <= n_bytes:
            return ks
    raise ValueError(
        f"a worker has {decimal(n_bytes)} of memory, and the smallest one of this run takes "
        f"{decimal(takes)}: see `twistlm plan`"
    )


def _dealt(cfg: Config, block_map: BlockMap) -> list[Widths]:
    """The widths of every worker, or of all workers in rounds after one another."""
    if cfg.train.method != "twist":
        return [block_map.full_widths()]
    attn, ffn = (cfg.blocks.k(kind) or (0,) for kind in ("attn", "ffn"))  # none: not cut
    by_worker = cfg.blocks.widths == "worker"
    n = cfg.train.n_workers if by_worker else math.lcm(len(attn), len(ffn))
    pairs = [(attn[i % len(attn)], ffn[i % len(ffn)]) for i in range(n)]
    groups = block_map.groups
    return [{g.name: min(g.n_blocks, ks[g.kind == "ffn"]) for g in groups} for ks in pairs]


def _sequences(cfg: Config) -> tuple[int, float]:
    """Training sequences, and epochs over them."""
    t = cfg.train
    if t.rounds:
        return t.rounds * t.interval * t.batch * t.n_workers, 1.0
    try:
        return _train_tokens(cfg).n_sequences(cfg.data.seq_len), t.epochs
    except ValueError as error:
        if not cfg.data.planned_sequences:
            raise ValueError(f"{error}; without tokens, give data.planned_sequences=N") from None
    return cfg.data.planned_sequences, t.epochs


def _train_tokens(cfg: Config) -> TokenFile:
    """Where they are there: a plan does not make the built-in corpus."""
    stem = find(cfg.data.train, "train", Path(cfg.run.out))
    if cfg.data.train == NAME and not Path(f"{stem}.json").is_file():
        raise ValueError(f"data.train = {NAME!r}: it is made when a run first reads it")
    return open_tokens(stem)


def _sizes(cfg: Config, model: Model, shapes: Shapes, n_full: int) -> list[tuple[str, str, int]]:
    """Setting, ratio and parameters of the subnets in Table 2, as far as the family has them."""
    sizes = [("full", "12/12", n_full)]
    for setting, ratio in product(SETTINGS, RATIOS):
        # this kind cannot be cut, or not into a whole number of blocks
        with suppress(ValueError):
            cut = families.partition(model, replace(cfg.blocks, setting=setting))
            sizes.append((setting, ratio, count(cut, shapes, widths_of_ratio(cut, ratio))))
    return sizes


def _teacher(cfg: Config, model: Model) -> tuple[int, int]:
    """Parameters of a teacher, as large as the model if it is not on this disk; or bytes of its
    cache in a round."""
    t = cfg.train
    if t.teacher == "none" or t.distil == 0:
        return 0, 0
    if t.teacher == "cache":
        vocab = huggingface.vocab_size(model)
        try:
            found = open_teacher_cache(_train_tokens(cfg), cfg.data.seq_len, vocab)
            record = found.meta.shape[-1]
        except ValueError:  # not made yet
            record = TOP * (id_bytes(vocab) + HALF)
        return 0, t.n_workers * t.interval * t.batch * (cfg.data.seq_len - 1) * record
    if t.teacher == "start":
        return model.num_parameters(), 0
    files = Path(checkpoint.weights_of(t.teacher)).glob("model*.safetensors")
    stored = sum(math.prod(shape) for file in files for shape in huggingface.header(file).values())
    return stored or model.num_parameters(), 0


def _values(cfg: Config, model: Model, widths: Widths, n_teacher: int, device: str) -> int:
    """Numbers of a step's activations and logits, in a subnet of these widths."""
    t, shapes, vocab = cfg.train, huggingface.shapes(model), huggingface.vocab_size(model)
    fresh = cfg.blocks.masks != "round" and t.method != "dense"
    # the groups of all layers; those that are not cut are whole
    uncut = replace(cfg.blocks, setting="both", shared_first=0, shared_last=0)
    groups = families.partition(model, uncut).groups
    d = shapes[groups[0].out[0]][1 - groups[0].out_part.dim]
    eager = device == "cpu"
    layers = [(6 if eager else 3) * d] * (1 + max(group.layer for group in groups))
    for group in groups:
        out = group.out_part
        into = [p for p in group.parts if p.param not in group.out and len(shapes[p.param]) > 1]
        is_attn = group.kind == "attn"
        gated = group.name in widths and (fresh or widths[group.name] < group.n_blocks)
        copies = 2 - eager + gated if is_attn else 1 + eager
        numbers = sum(shapes[p.param][p.dim] for p in into) + copies * shapes[out.param][out.dim]
        layers[group.layer] += numbers * widths.get(group.name, group.n_blocks) // group.n_blocks
    # recomputed: the inputs of all, and one layer at a time; and last norm, head
    kept = (len(layers) * d + max(layers) if t.recompute else sum(layers)) + 2 * d
    n_rows = t.batch // t.accumulate
    n_tokens = n_rows * (cfg.data.seq_len - 1)
    n_logits = min(n_tokens, CHUNK) * (2 if n_tokens > CHUNK or n_teacher else 1)
    n_logits *= vocab + -vocab % ALIGN
    if eager:
        n_logits = min(n_tokens * vocab, SMALL) * (10 if t.teacher != "none" else 5)
    return kept * n_rows * cfg.data.seq_len + n_logits


def busiest(
    engine: str, n_workers: int, subnet: int, full: int = 0, interval: int = 0, *,
    state: int = 0, owners: int = 1,
) -> int:  # fmt: skip
    """Bytes of the busiest link; `subnet` is one subnet both ways, `full` one gradient.

    On Ray, `owners` have a machine and a worker each, and one of several sends a copy of its part
    of the central model's `state` in every round. One way after the other, or the busier of both.
    """
    if engine == "ray" and owners == 1:
        return n_workers * subnet
    if engine == "ray":
        return subnet * (n_workers + owners - 2) // (2 * owners) + state // owners
    if engine == "sharded":
        return subnet * (n_workers - 1) // n_workers
    return 2 * full * (n_workers - 1) // n_workers * interval


def show(made: dict[str, Any], cfg: Config) -> None:
    t, n_params = cfg.train, made["n_params"]
    lines = [
        f"on a GPU in bf16: about {decimal(made['worker_bytes'])} for the largest worker, "
        f"{decimal(made['process_bytes'])} where one process has the central model and plays all "
        f"workers",
        f"on a CPU: about {decimal(made['cpu_bytes'])} for such a process",
        f"{made['model']}: {n_params:,} parameters, {decimal(FULL * n_params)} in float32",
        f"{made['n_sequences']:,} sequences: {made['true_rounds']:,} rounds of local steps; the "
        f"paper's formula counts {made['paper_rounds']:,}",
    ]
    if n := made["teacher_bytes"]:
        lines += [f"the teacher's cache: {decimal(n)} to all workers in a round"]
    if n := made["teacher_params"]:
        lines += [f"the teacher: {n:,} parameters beside every worker"]
    for kind, (least, most) in made["legal_k"].items():
        lines += [f"legal K for {kind} with S = {t.n_workers}: {least}..{most}"]
    if not huggingface.is_here(cfg.model) and cfg.model.weights != "random":
        lines += [f"model.weights = {cfg.model.weights!r} is not here: counted as [model] says"]
    console.print("\n".join(lines))
    title = "a worker's process on a GPU in bf16: state and activations, no teacher"
    held, whole = terminal.table(title, "it holds", "bytes", "of all"), made["holding"][ALL]
    for name, n in made["holding"].items():
        held.add_row(name, decimal(n, precision=2), f"{n / whole:.2f}")
    console.print(held)
    for n, ks in made["machines"].items():
        takes = " and ".join(f"{k} {kind}" for kind, k in ks.items())
        console.print(f"with {decimal(n)} for each worker (twistlm node --memory): {takes} blocks")
    title = "one subnet, and bytes both ways over all workers and rounds"
    heads = ("setting", "blocks", "parameters", "of full", "paper's formula", "weights")
    sizes = terminal.table(title, *heads, "+ moments")
    for setting, ratio, n, *n_bytes in (row.values() for row in made["rows"]):
        ends = ratio in ("12/12", RATIOS[-1])
        shown = (decimal(each, precision=2) for each in n_bytes)
        sizes.add_row(setting, ratio, f"{n:,}", f"{n / n_params:.1%}", *shown, end_section=ends)
    console.print(sizes)
    what = "weights and moments" if t.moments == "carry" else "weights"
    title = f"the busiest link in a round: {what}, run.wire = {cfg.run.wire}"
    table = terminal.table(title, "engine", "bytes", "s")
    for engine, n in made["link_bytes"].items():
        table.add_row(engine, decimal(n, precision=2), f"{made['link_seconds'][engine]:,.2f}")
    console.print(table)
    console.print(f"local steps: {made['train_seconds']:,.2f} s of a round")
    why = ENGINES[made["take"]] if t.method == "twist" else CONTROL
    console.print(f"take {made['take']}: {why}")
