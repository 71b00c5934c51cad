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
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from rich.filesize import decimal
from transformers import PreTrainedModel

from ..compute.loss import ALIGN, CHUNK
from ..config import Config
from ..data.teacher_cache import id_bytes, open_teacher_cache
from ..data.token_file import open_tokens
from ..model import families, generator, huggingface
from ..model.blocks import KINDS, SETTINGS, BlockMap, Kind, Shapes, Widths, count, widths_of_ratio
from ..system import terminal
from ..system.device import pick_device
from ..system.terminal import console
from ..transport import wire
from . import checkpoint
from .run import n_rows

RATIOS = ("10/12", "8/12", "6/12", "4/12", "3/12")
# bytes beyond the count, in the middle of twelve steps of GPT-2 small to large on an H200
REST = 320_000_000
HALF, FULL = 2, 4  # bytes of a number
TRAINER = 3 * FULL + 2 * HALF
TOP = 64  # likeliest tokens in a cache that is not made yet: the default of `twistlm prepare`
SIDE = 1024  # of the matrices whose product is timed
EFFICIENCY = 0.4  # of a training step against that product: a guess, not measured
SMALL = 0.1  # of the local steps' time: an engine that costs less is worth what it survives
STORE = 5.0  # Gbit/s that Ray's object store carries between hosts, however fast they are linked
ENGINES = {
    "ray": "it survives any worker (hybrid, true and masked cost as much and survive none)",
    "sharded": "a death ends the run, which resumes from its checkpoint",
    "ddp": "train.method = dense; or try run.wire = int8, train.moments = reset",
}


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


def counted(cfg: Config) -> Counted:
    return Counted(cfg, huggingface.on_meta(huggingface.planned_config(cfg.model)))


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
class Plan:
    """Everything `twistlm plan` prints."""

    model: str
    n_params: int
    n_sequences: int
    paper_rounds: int
    true_rounds: int
    legal_k: dict[Kind, tuple[int, int]]
    rows: tuple[PlanRow, ...]
    device: str  # of this machine
    gflops: float  # of a float32 matrix product on it
    hours: float  # on it alone
    worker_bytes: int  # on a GPU: a process that trains one subnet at a time
    process_bytes: int  # on a GPU: one that has the central model, too, and plays all workers
    teacher_params: int  # of the model beside every worker; 0 with a cache
    teacher_bytes: int  # from a cache to all workers in a round, beside their tokens
    link_bytes: dict[str, int]  # of the busiest link in a round, by engine
    link_seconds: dict[str, float]
    train_seconds: float  # of a round's local steps
    take: str  # the engine


def make(cfg: Config, gbit: float = 1.0, tflops: float = 100.0) -> Plan:
    """Count parameters and multiply, for links of `gbit` Gbit/s and workers of `tflops` TFLOP/s."""
    if not gbit > 0 or not tflops > 0:
        raise ValueError(f"--gbit {gbit:g} and --tflops {tflops:g}: both must be greater than 0")
    run, t = counted(cfg), cfg.train
    generator.check(run.block_map, cfg.blocks, t.n_workers)
    n_sequences, epochs = _sequences(cfg)
    # the paper counts global batches, whoever computes them
    in_paper = int(n_sequences * epochs / t.batch / t.interval)
    in_truth = int(n_sequences * epochs // (t.batch * t.interval * t.n_workers))
    per_round = FULL * 2 * t.n_workers  # bytes of a parameter, down and up
    rows = [
        PlanRow(
            setting,
            ratio,
            n,
            paper_bytes=n * per_round * in_paper,
            true_bytes=n * per_round * in_truth,
            carried_bytes=n * per_round * in_truth * 3,  # with m and v
        )
        for setting, ratio, n in _sizes(run)
    ]
    n_teacher, cache_bytes = teacher_cost(run)
    n_subnet = max(map(run.n_params, run.subnets))
    # forward and backward take 6 FLOPs per parameter and token, a teacher's forward 2
    flops = (6 * n_subnet + 2 * n_teacher) * n_sequences * epochs * cfg.data.seq_len
    device = pick_device(cfg.run.device)
    speed = _flops(device)
    worker, process = gpu_bytes(run, n_teacher)
    n_bytes, seconds = links(run, gbit)
    steps = 6 * n_subnet * t.interval * t.batch * cfg.data.seq_len / (1e12 * tflops)
    take = "ray"
    if seconds["ray"] > SMALL * steps:
        take = "ddp" if seconds["ddp"] < seconds["sharded"] else "sharded"
    return Plan(
        model=cfg.model.type,
        n_params=run.n_params(),
        n_sequences=n_sequences,
        paper_rounds=in_paper,
        true_rounds=in_truth,
        legal_k={
            kind: generator.legal_range(n, t.n_workers, len(cfg.blocks.common(kind)))
            for kind in KINDS
            if (n := run.block_map.n_blocks(kind))
        },
        rows=tuple(rows),
        device=str(device),
        gflops=speed / 1e9,
        hours=flops / (EFFICIENCY * speed) / 3600,
        worker_bytes=worker,
        process_bytes=process,
        teacher_params=n_teacher,
        teacher_bytes=cache_bytes,
        link_bytes=n_bytes,
        link_seconds=seconds,
        train_seconds=steps,
        take=take,
    )


def _sequences(cfg: Config) -> tuple[int, float]:
    """Training sequences, and epochs over them."""
    t = cfg.train
    if t.rounds:
        return t.rounds * t.interval * t.batch * t.n_workers, 1.0
    try:
        return open_tokens(cfg.data.train).n_sequences(cfg.data.seq_len), t.epochs
    except ValueError as error:
        if not cfg.data.planned_sequences:
            raise ValueError(f"{error}; without tokens, give data.planned_sequences=N") from None
    return cfg.data.planned_sequences, t.epochs


def _sizes(run: Counted) -> list[tuple[str, str, int]]:
    """Setting, ratio and parameters of the subnets in Table 2, as far as the family has them."""
    sizes = [("full", "12/12", run.n_params())]
    for setting in SETTINGS:
        for ratio in RATIOS:
            try:
                cut = families.partition(run.model, replace(run.cfg.blocks, setting=setting))
                sizes.append((setting, ratio, count(cut, run.shapes, widths_of_ratio(cut, ratio))))
            except ValueError:
                continue  # this kind cannot be cut, or not into a whole number of blocks
    return sizes


def _flops(device: torch.device) -> float:
    """FLOP/s of a float32 matrix product: the best of three."""
    a = torch.randn(SIDE, SIDE, device=device)
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * SIDE**3 / best


def teacher_cost(run: Counted) -> tuple[int, int]:
    """Parameters of a teacher, bytes of its cache in a round.

    One that is not on this disk counts as large as the model.
    """
    cfg, t = run.cfg, run.cfg.train
    if t.teacher == "none" or t.distil == 0:
        return 0, 0
    if t.teacher == "cache":
        vocab = huggingface.vocab_size(run.model)
        try:
            found = open_teacher_cache(open_tokens(cfg.data.train), cfg.data.seq_len, vocab)
            record = found.meta.record
        except ValueError:  # not made yet
            record = TOP * (id_bytes(vocab) + HALF)
        return 0, t.n_workers * t.interval * t.batch * (cfg.data.seq_len - 1) * record
    files = Path(checkpoint.weights_of(t.teacher)).glob("model*.safetensors")
    stored = sum(math.prod(shape) for file in files for shape in huggingface.header(file).values())
    return stored or run.n_params(), 0


def gpu_bytes(run: Counted, n_teacher: int) -> tuple[int, int]:
    """The peak of a round without evaluation, of a worker and of a process that plays all workers.

    Activations are those of the largest subnet.
    """
    cfg, t, block_map = run.cfg, run.cfg.train, run.block_map
    uncut = replace(cfg.blocks, setting="both", shared_first=0, shared_last=0)
    largest = max(run.subnets, key=run.n_params)
    fresh = cfg.blocks.masks != "round" and t.method != "dense"
    gated = {g.name for g in block_map.groups if fresh or largest[g.name] < g.n_blocks}
    kept = values_per_token(families.partition(run.model, uncut), run.shapes, largest, gated)
    n_tokens = t.batch * (cfg.data.seq_len - 1)
    n_logits = min(n_tokens, CHUNK) * (1 + (n_tokens > CHUNK) + (n_teacher > 0))
    vocab = huggingface.vocab_size(run.model)
    worker = TRAINER * sum(map(run.n_params, run.subnets)) + HALF * n_teacher + REST
    worker += HALF * (kept * t.batch * cfg.data.seq_len + n_logits * (vocab + -vocab % ALIGN))
    # the central buffer, and the sums that workers' results are added up in
    central = FULL * run.n_params() * n_rows(cfg) * (1 + (t.method == "twist"))
    central += FULL * run.n_params() * (t.nesterov() is not None)
    return worker, worker + central


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


def busiest(engine: str, n_workers: int, subnet: int, full: int, interval: int) -> int:
    """Bytes of the busiest link; `subnet` is one subnet both ways, `full` one gradient."""
    if engine == "ray":
        return n_workers * subnet
    if engine == "sharded":
        return subnet * (n_workers - 1) // n_workers
    return 2 * full * (n_workers - 1) // n_workers * interval


def links(run: Counted, gbit: float) -> tuple[dict[str, int], dict[str, float]]:
    """Bytes and seconds of a round on its busiest link, by engine; a subnet of mean size."""
    cfg, t = run.cfg, run.cfg.train
    n_subnet = sum(map(run.n_params, run.subnets)) // len(run.subnets)
    shape = (3 if t.moments == "carry" else 1, n_subnet)
    both = wire.down_bytes(cfg.run.wire, shape) + wire.up_bytes(cfg.run.wire, shape)
    gradient = FULL * run.n_params()
    n_bytes = {e: busiest(e, t.n_workers, both, gradient, t.interval) for e in ENGINES}
    speeds = {"ray": min(gbit, STORE), "sharded": gbit, "ddp": gbit}
    return n_bytes, {e: 8 * n / (1e9 * speeds[e]) for e, n in n_bytes.items()}


def show(plan: Plan, cfg: Config) -> None:
    """Print a plan for a person."""
    t, hours = cfg.train, plan.hours
    took = f"{hours:,.1f} hours" if hours >= 1 else f"{3600 * hours:,.0f} seconds"
    lines = [
        f"here ({plan.device}, {plan.gflops:,.0f} GFLOP/s in a matrix product): about {took}",
        f"on a GPU in bf16: about {decimal(plan.worker_bytes)} for a worker, "
        f"{decimal(plan.process_bytes)} where one process has the central model and plays all "
        f"workers",
        f"{plan.model}: {plan.n_params:,} parameters, {decimal(FULL * plan.n_params)} in float32",
        f"{plan.n_sequences:,} sequences: {plan.true_rounds:,} rounds of local steps; the paper's "
        f"formula counts {plan.paper_rounds:,}",
    ]
    if plan.teacher_bytes:
        lines += [f"the teacher's cache: {decimal(plan.teacher_bytes)} to all workers in a round"]
    if plan.teacher_params:
        lines += [f"the teacher: {plan.teacher_params:,} parameters beside every worker"]
    for kind, (least, most) in plan.legal_k.items():
        lines += [f"legal K for {kind} with S = {t.n_workers}: {least}..{most}"]
    console.print("\n".join(lines))
    title = "one subnet, and bytes both ways over all workers and rounds"
    heads = ("setting", "blocks", "parameters", "of full", "paper's formula", "weights")
    sizes = terminal.table(title, *heads, "+ moments")
    for row in plan.rows:
        n_bytes = (row.paper_bytes, row.true_bytes, row.carried_bytes)
        sizes.add_row(
            row.setting,
            row.ratio,
            f"{row.n_params:,}",
            f"{row.n_params / plan.n_params:.1%}",
            *(decimal(n, precision=2) for n in n_bytes),
            end_section=row.ratio in ("12/12", RATIOS[-1]),
        )
    console.print(sizes)
    what = "weights and moments" if t.moments == "carry" else "weights"
    title = f"the busiest link in a round: {what}, run.wire = {cfg.run.wire}"
    table = terminal.table(title, "engine", "bytes", "s")
    for engine, n in plan.link_bytes.items():
        table.add_row(engine, decimal(n, precision=2), f"{plan.link_seconds[engine]:,.2f}")
    console.print(table)
    console.print(f"local steps: {plan.train_seconds:,.2f} s of a round")
    console.print(f"take {plan.take}: {ENGINES[plan.take]}")
