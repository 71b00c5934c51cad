"""`twistlm plan`: what a run costs, counted from shapes before anything runs.

On a GPU in bf16, a worker takes, in bytes:

trainer       16 per parameter of a subnet: weights and moments in float32, bf16 copy and gradient
teacher       2 per parameter
activations   2 for what compiled layers keep for the backward pass of every token:
              3 d (both normed inputs, the residual) + outputs of the projections into a layer's
              blocks + inputs of those out of them: once in FFN layers; in attention twice, three
              times if gated
logits        2, a chunk of tokens at a time: the model's (two of several chunks), a teacher's
rest          library workspaces and what a backward pass holds for a moment
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ..compute.loss import ALIGN, CHUNK
from ..config import Config
from ..data.teacher_cache import id_bytes, open_teacher_cache
from ..data.token_file import open_tokens
from ..model import families, generator, huggingface
from ..model.blocks import (
    KINDS,
    SETTINGS,
    BlockMap,
    Kind,
    Shapes,
    Widths,
    count,
    widths_of_ratio,
)
from ..system import terminal
from ..system.device import pick_device
from ..system.terminal import console
from ..transport.traffic import subnet_bytes
from . import checkpoint
from .run import n_rows

RATIOS = ("10/12", "8/12", "6/12", "4/12", "3/12")
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))
# bytes beyond the count, in the middle of twelve steps of GPT-2 small to large on an H200
REST = 320_000_000
HALF, FULL = 2, 4  # bytes of a number
TRAINER = 3 * FULL + 2 * HALF
TOP = 64  # likeliest tokens in a cache that is not made yet: the default of `twistlm prepare`
SIDE = 1024  # of the matrices whose product is timed
EFFICIENCY = 0.4  # of a training step against that product: a guess, not measured
SMALL = 0.1  # of the local steps' time: an engine that costs less is worth what it survives
STORE = 5.0  # Gbit/s that Ray's object store carries between hosts, however fast they are linked

Engine = Literal["ray", "sharded", "ddp"]
ENGINES: tuple[Engine, ...] = ("ray", "sharded", "ddp")


@dataclass(frozen=True)
class Counted:
    """A run's model on the meta device: nothing is downloaded or allocated."""

    cfg: Config
    model: PreTrainedModel

    @cached_property
    def shapes(self) -> Shapes:
        return huggingface.shapes(self.model)

    @cached_property
    def block_map(self) -> BlockMap:
        return families.partition(self.model, self.cfg.blocks)

    def n_params(self, widths: Widths | None = None) -> int:
        """Parameters of the model, or of a subnet of it."""
        widths = self.block_map.full_widths() if widths is None else widths
        return count(self.block_map, self.shapes, widths)

    @cached_property
    def n_shared(self) -> int:
        """Parameters in no block."""
        return self.n_params(dict.fromkeys(self.block_map.full_widths(), 0))

    @cached_property
    def subnets(self) -> list[Widths]:
        """The widths of every subnet that comes up; a trainer is kept for each."""
        cfg, groups = self.cfg, self.block_map.groups
        if cfg.train.method != "twist":
            return [self.block_map.full_widths()]
        attn, ffn = (cfg.blocks.k(kind) or (0,) for kind in ("attn", "ffn"))  # none: not cut
        by_worker = cfg.blocks.widths == "worker"
        n = cfg.train.n_workers if by_worker else math.lcm(len(attn), len(ffn))
        pairs = sorted({(attn[i % len(attn)], ffn[i % len(ffn)]) for i in range(n)})
        return [{g.name: min(g.n_blocks, ks[g.kind == "ffn"]) for g in groups} for ks in pairs]

    def held_share(self) -> Fraction:
        """The share of the blocks' parameters that a worker holds, over all widths."""
        held = [self.n_params(widths) - self.n_shared for widths in self.subnets]
        return Fraction(sum(held), (self.n_params() - self.n_shared) * len(held))


def counted(cfg: Config) -> Counted:
    return Counted(cfg, huggingface.on_meta(huggingface.planned_config(cfg.model)))


@dataclass(frozen=True)
class Here:
    """A forecast for this machine alone: hours by a short measurement, memory by counting."""

    device: str
    gflops: float  # of a float32 matrix product
    hours: float
    n_bytes: int  # in float32: weights, gradients, moments, logits, teacher; activations on top
    teacher_share: float = 0.0  # of the FLOPs

    def __str__(self) -> str:
        minutes = 60 * self.hours
        took = (
            f"about {self.hours:,.1f} hours" if minutes >= 60 else f"about {minutes:,.0f} minutes"
        )
        took = took if minutes >= 1 else "less than a minute"
        line = f"here ({self.device}, {self.gflops:,.0f} GFLOP/s in a matrix product): {took}"
        if self.device == "cpu":
            line += f", at least {self.n_bytes / 1e6:,.0f} MB of memory"
        if self.teacher_share:
            line += f"; {self.teacher_share:.0%} of the time is the teacher's"
        return line


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    worker: int  # a process that trains one subnet at a time
    process: int  # one that has the central model, too, and plays all workers in turn

    def __str__(self) -> str:
        return (
            f"on a GPU in bf16: about {self.worker / 1e9:,.1f} GB for a worker, "
            f"{self.process / 1e9:,.1f} GB where one process has the central model and plays all "
            f"workers"
        )


@dataclass(frozen=True)
class TeacherCost:
    """What a frozen teacher, or the cache of its predictions, adds to a run."""

    n_params: int  # of the model beside every worker; 0 with a cache
    round_bytes: int  # to all workers in a round, beside their tokens; 0 without a cache

    def __str__(self) -> str:
        if self.round_bytes:
            n_bytes = self.round_bytes / 1e6
            return f"the teacher's cache: {n_bytes:,.1f} MB to all workers in a round"
        return (
            f"the teacher: {self.n_params:,} parameters beside every worker; run.variant = ray "
            f"sends them once to each, {FULL * self.n_params / 1e6:,.1f} MB in float32"
        )


@dataclass(frozen=True)
class PlanRow:
    """One subnet size."""

    setting: str
    ratio: str
    n_params: int
    paper_bytes: int  # weights only, the paper's number of rounds
    true_bytes: int  # weights only, rounds of `interval` local steps
    carried_bytes: int  # weights and both moments, the same rounds


@dataclass(frozen=True)
class Links:
    """The busiest link in a round, by engine."""

    share: float  # of the blocks that a worker holds
    gbit: float
    tflops: float
    n_bytes: dict[Engine, int]
    seconds: dict[Engine, float]
    train_seconds: float  # of the local steps
    take: Engine


@dataclass(frozen=True)
class Plan:
    """Everything `twistlm plan` prints."""

    model: str
    n_params: int
    n_workers: int
    n_sequences: int
    sequences_from: str
    paper_rounds: int
    true_rounds: int
    legal_k: dict[Kind, tuple[int, int]]
    rows: tuple[PlanRow, ...]
    links: Links
    here: Here
    gpu_bytes: Memory
    teacher: TeacherCost | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make(cfg: Config, ratio: str | None = None, gbit: float = 1.0, tflops: float = 100.0) -> Plan:
    """Count parameters and multiply.

    `ratio` is the share of blocks behind the forecast for links of `gbit` Gbit/s and workers of
    `tflops` TFLOP/s; None: what the config's workers hold.
    """
    if not gbit > 0 or not tflops > 0:
        raise ValueError(f"--gbit {gbit:g} and --tflops {tflops:g}: both must be greater than 0")
    run, t = counted(cfg), cfg.train
    generator.check(run.block_map, cfg.blocks, t.n_workers)
    share = run.held_share() if ratio is None else parse_share(ratio)
    n_sequences, source, epochs = _sequences(cfg)
    # the paper counts global batches, whoever computes them
    in_paper = int(n_sequences * epochs / t.batch / t.interval)
    in_truth = int(n_sequences * epochs // (t.batch * t.interval * t.n_workers))
    per_round = FULL * 2 * t.n_workers  # bytes of a parameter, down and up
    sizes = [("full", "12/12", run.n_params())]
    for setting in SETTINGS:
        try:
            cut = families.partition(run.model, replace(cfg.blocks, setting=setting))
        except ValueError:
            continue  # this kind cannot be cut in this family
        for part in RATIOS:
            try:
                sizes.append((setting, part, count(cut, run.shapes, widths_of_ratio(cut, part))))
            except ValueError:
                continue  # no whole number of blocks
    rows = [
        PlanRow(
            *size,
            paper_bytes=size[2] * per_round * in_paper,
            true_bytes=size[2] * per_round * in_truth,
            carried_bytes=size[2] * per_round * in_truth * 3,  # with m and v
        )
        for size in sizes
    ]
    legal = {
        kind: generator.legal_range(n, t.n_workers, len(cfg.blocks.common(kind)))
        for kind in KINDS
        if (n := run.block_map.n_blocks(kind))
    }
    teacher = teacher_cost(cfg)
    return Plan(
        model=cfg.model.type,
        n_params=run.n_params(),
        n_workers=t.n_workers,
        n_sequences=n_sequences,
        sequences_from=source,
        paper_rounds=in_paper,
        true_rounds=in_truth,
        legal_k=legal,
        rows=tuple(rows),
        links=links(run, share, gbit, tflops),
        here=forecast(run, round(n_sequences * epochs), teacher),
        gpu_bytes=gpu_bytes(run, teacher),
        teacher=teacher,
    )


def _sequences(cfg: Config) -> tuple[int, str, float]:
    """Training sequences, where that number comes from, and epochs over them."""
    t = cfg.train
    if t.rounds:
        return t.rounds * t.interval * t.batch * t.n_workers, "train.rounds", 1.0
    try:
        return open_tokens(cfg.data.train).n_sequences(cfg.data.seq_len), cfg.data.train, t.epochs
    except ValueError as error:
        if not cfg.data.planned_sequences:
            raise ValueError(f"{error}; without tokens, give data.planned_sequences=N") from None
    return cfg.data.planned_sequences, "data.planned_sequences", t.epochs


def parse_share(ratio: str) -> Fraction:
    """`4/12` or `0.5`: a share of the blocks, of which there may be any number."""
    try:
        share = Fraction(ratio)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise ValueError(f"--ratio {ratio}: use a share in (0, 1], such as 4/12 or 0.5")
    return share


def forecast(run: Counted, n_sequences: int, teacher: TeacherCost | None) -> Here:
    """6 FLOPs per parameter and token (forward and backward), all workers played by one process.

    A teacher that is no cache takes 2 for each of its own (forward alone).
    """
    cfg, n_full = run.cfg, run.n_params()
    n_subnet = max(run.n_params(widths) for widths in run.subnets)
    device = pick_device(cfg.run.device)
    speed = _flops(device)
    logits = 2 * cfg.train.batch * cfg.data.seq_len * huggingface.vocab_size(run.model)
    n_teacher = teacher.n_params if teacher else 0
    held = (1 + n_rows(cfg)) * n_full + 4 * n_subnet + logits + n_teacher
    flops = 6 * n_subnet + 2 * n_teacher  # per token
    hours = flops * n_sequences * cfg.data.seq_len / (EFFICIENCY * speed) / 3600
    return Here(str(device), speed / 1e9, hours, held * FULL, 2 * n_teacher / flops)


def _flops(device: torch.device) -> float:
    """FLOP/s of a float32 matrix product: the best of three."""
    a = torch.randn(SIDE, SIDE, device=device)
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * SIDE**3 / best


def teacher_cost(cfg: Config) -> TeacherCost | None:
    """None without a teacher. One that is not on this disk counts as large as the model."""
    t = cfg.train
    if t.teacher == "none" or t.distil == 0:
        return None
    model = counted(cfg).model
    if t.teacher == "cache":
        vocab = huggingface.vocab_size(model)
        try:
            found = open_teacher_cache(open_tokens(cfg.data.train), cfg.data.seq_len, vocab)
            record = found.meta.record
        except ValueError:  # not made yet
            record = TOP * (id_bytes(vocab) + HALF)
        n = t.n_workers * t.interval * t.batch * (cfg.data.seq_len - 1)
        return TeacherCost(0, n * record)
    files = Path(checkpoint.weights_of(t.teacher)).glob("model*.safetensors")
    stored = sum(math.prod(shape) for file in files for shape in huggingface.header(file).values())
    return TeacherCost(stored or sum(param.numel() for param in model.parameters()), 0)


def gpu_bytes(run: Counted, teacher: TeacherCost | None) -> Memory:
    """The peak of a round without evaluation; activations are those of the largest subnet."""
    cfg, t, block_map = run.cfg, run.cfg.train, run.block_map
    uncut = replace(cfg.blocks, setting="both", shared_first=0, shared_last=0)
    largest = max(run.subnets, key=run.n_params)
    fresh = cfg.blocks.masks != "round" and t.method != "dense"
    gated = {g.name for g in block_map.groups if fresh or largest[g.name] < g.n_blocks}
    kept = values_per_token(families.partition(run.model, uncut), run.shapes, largest, gated)
    n_tokens = t.batch * (cfg.data.seq_len - 1)
    n_teacher = teacher.n_params if teacher else 0
    n_logits = min(n_tokens, CHUNK) * (1 + (n_tokens > CHUNK) + (n_teacher > 0))
    vocab = huggingface.vocab_size(run.model)
    worker = TRAINER * sum(map(run.n_params, run.subnets)) + HALF * n_teacher + REST
    worker += HALF * (kept * t.batch * cfg.data.seq_len + n_logits * (vocab + -vocab % ALIGN))
    # the central buffer, and the sums that workers' results are added up in
    central = FULL * run.n_params() * n_rows(cfg) * (1 + (t.method == "twist"))
    central += FULL * run.n_params() * (t.nesterov() is not None)
    return Memory(worker, worker + central)


def values_per_token(every: BlockMap, shapes: Shapes, widths: Widths, gated: set[str]) -> int:
    """Numbers that the compiled layers of a model keep for the backward pass of a token.

    `every` has the groups of all layers; those that `widths` does not name are whole.
    """
    kept, d = 0, shapes[every.groups[0].out[0]][1 - every.groups[0].out_part.dim]
    for group in every.groups:
        out = group.out_part
        into = [p for p in group.parts if p.param not in group.out and len(shapes[p.param]) > 1]
        copies = 2 + (group.name in gated) if group.kind == "attn" else 1
        numbers = sum(shapes[p.param][p.dim] for p in into) + copies * shapes[out.param][out.dim]
        kept += numbers * widths.get(group.name, group.n_blocks) // group.n_blocks
    n_layers = 1 + max(group.layer for group in every.groups)
    return kept + (3 * n_layers + 2) * d  # and what goes into the last norm and the head


def busiest(engine: Engine, n_workers: int, subnet: int, full: int, interval: int) -> int:
    """Bytes of the busiest link; `subnet` is one subnet both ways, `full` one gradient."""
    if engine == "ray":
        return n_workers * subnet
    if engine == "sharded":
        return subnet * (n_workers - 1) // n_workers
    return 2 * full * (n_workers - 1) // n_workers * interval


def links(run: Counted, share: Fraction, gbit: float, tflops: float) -> Links:
    """Bytes and seconds of a round, by the speed of links and workers."""
    cfg, t, n_params = run.cfg, run.cfg.train, run.n_params()
    n_subnet = run.n_shared + int(share * (n_params - run.n_shared))
    rows = 3 if t.moments == "carry" else 1
    both = sum(part.total for part in subnet_bytes(run.n_shared, n_subnet, rows, cfg.run.wire))
    gradient = FULL * n_params
    n_bytes = {e: busiest(e, t.n_workers, both, gradient, t.interval) for e in ENGINES}
    speeds: dict[Engine, float] = {"ray": min(gbit, STORE), "sharded": gbit, "ddp": gbit}
    seconds = {engine: 8 * n / (1e9 * speeds[engine]) for engine, n in n_bytes.items()}
    steps = 6 * n_subnet * t.interval * t.batch * cfg.data.seq_len / (1e12 * tflops)
    take: Engine = "ray"
    if seconds["ray"] > SMALL * steps:
        take = "ddp" if seconds["ddp"] < seconds["sharded"] else "sharded"
    return Links(float(share), gbit, tflops, n_bytes, seconds, steps, take)


def show(plan: Plan, cfg: Config) -> None:
    """Print a plan for a person."""
    for line in (plan.here, plan.gpu_bytes, plan.teacher):
        if line is not None:
            console.print(str(line))
    megabytes = plan.n_params * FULL / 1e6
    console.print(f"{plan.model}: {plan.n_params:,} parameters, {megabytes:,.1f} MB in float32")
    for kind, (least, most) in plan.legal_k.items():
        console.print(f"legal K for {kind} with S = {plan.n_workers}: {least}..{most}")
    console.print(
        f"{plan.n_sequences:,} sequences ({plan.sequences_from}): {plan.true_rounds:,} rounds of "
        f"local steps; the paper's formula counts {plan.paper_rounds:,}"
    )
    _show_sizes(plan)
    _show_links(plan, cfg)


def _show_sizes(plan: Plan) -> None:
    size, unit = _unit(max(row.carried_bytes for row in plan.rows))
    heads = ("setting", "blocks", "parameters", "of full", "MB", f"paper's formula, {unit}")
    title = "one subnet, and bytes both ways over all workers and rounds"
    table = terminal.table(title, *heads, f"weights, {unit}", f"+ moments, {unit}")
    for row in plan.rows:
        table.add_row(
            row.setting,
            row.ratio,
            f"{row.n_params:,}",
            f"{row.n_params / plan.n_params:.1%}",
            f"{row.n_params * FULL / 1e6:,.1f}",
            f"{row.paper_bytes / size:,.2f}",
            f"{row.true_bytes / size:,.2f}",
            f"{row.carried_bytes / size:,.2f}",
            end_section=row.ratio in ("12/12", RATIOS[-1]),
        )
    console.print(table)


def _unit(largest: float) -> tuple[float, str]:
    return next((n, u) for n, u in UNITS if largest >= n / 10 or n == UNITS[-1][0])


def _show_links(plan: Plan, cfg: Config) -> None:
    found, t = plan.links, cfg.train
    what = "weights and moments" if t.moments == "carry" else "weights"
    title = (
        f"the busiest link in a round: {found.share:.0%} of the blocks, {what}, run.wire = "
        f"{cfg.run.wire}, {found.gbit:g} Gbit/s"
    )
    names = {"ray": "ray", "sharded": "sharded", "ddp": "data parallel"}
    why = {
        "ray": "it survives any worker (hybrid, true and masked cost as much and survive none)",
        "sharded": "a death ends the run, which resumes from its checkpoint",
        "ddp": "train.method = dense; or try run.wire = int8, train.moments = reset",
    }
    size, unit = _unit(max(found.n_bytes.values()))
    table = terminal.table(title, "engine", unit, "s")
    for engine in ENGINES:
        numbers = (found.n_bytes[engine] / size, found.seconds[engine])
        table.add_row(names[engine], *map(_short, numbers))
    console.print(table)
    console.print(
        f"local steps: {_short(found.train_seconds)} s ({t.interval} of {t.batch} x "
        f"{cfg.data.seq_len} tokens at {found.tflops:g} TFLOP/s)"
    )
    console.print(f"take {names[found.take]}: {why[found.take]}")


def _short(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
