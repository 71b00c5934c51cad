"""What training takes of a GPU's memory in bf16, counted from shapes before anything runs.

trainer          16 bytes per parameter of a subnet: weights and moments in float32, a bf16 copy and a bf16 gradient
teacher       2 bytes per parameter
activations   2 bytes for what compiled layers keep for the backward pass of every token:
              3 d (both normed inputs, the residual) + outputs of the projections into a layer's blocks
              + inputs of those out of them: once in FFN layers; in attention twice, three times if gated
logits        2 bytes, a chunk of tokens at a time: the model's, of several chunks two at once, and a teacher's
rest          library workspaces and what a backward pass holds for a moment
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from ..compute.loss import ALIGN, CHUNK
from ..config import Config
from ..data.teacher_cache import id_bytes, open_teacher_cache
from ..data.token_file import open_tokens
from ..model import families, huggingface
from ..model.blocks import BlockMap, Shapes, Widths
from ..model.count import count
from . import checkpoint
from .run import n_rows

# bytes beyond the count, in the middle of twelve steps of GPT-2 small to large on an H200 (docs/results.md)
REST = 320_000_000
HALF, FULL = 2, 4  # bytes of a number
SEAT = 3 * FULL + 2 * HALF
TOP = 64  # likeliest tokens in a cache that is not made yet: the default of `twistlm prepare`


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    worker: int  # a process that trains one subnet at a time
    process: int  # one that has the central model, too, and plays all workers in turn

    def __str__(self) -> str:
        return (
            f"on a GPU in bf16: about {self.worker / 1e9:,.1f} GB for a worker, {self.process / 1e9:,.1f} GB where "
            f"one process has the central model and plays all workers"
        )


@dataclass(frozen=True)
class TeacherCost:
    """What a frozen teacher, or the cache of its predictions, adds to a run."""

    n_params: int  # of the model beside every worker; 0 with a cache
    round_bytes: int  # to all workers in a round, beside their tokens; 0 without a cache

    def __str__(self) -> str:
        if self.round_bytes:
            return (
                f"the teacher's cache: {self.round_bytes / 1e6:,.1f} MB to all workers in a round"
            )
        return (
            f"the teacher: {self.n_params:,} parameters beside every worker; run.variant = ray sends them once to "
            f"each, {FULL * self.n_params / 1e6:,.1f} MB in float32"
        )


def teacher_cost(cfg: Config) -> TeacherCost | None:
    """None without a teacher. One that is not on this disk counts as large as the model."""
    t = cfg.train
    if t.teacher == "none" or t.distil == 0:
        return None
    model = huggingface.on_meta(huggingface.planned_config(cfg.model))
    if t.teacher == "cache":
        vocab = huggingface.vocab_size(model)
        try:
            told = open_teacher_cache(open_tokens(cfg.data.train), cfg.data.seq_len, vocab)
            record = told.meta.record
        except ValueError:  # not made yet
            record = TOP * (id_bytes(vocab) + HALF)
        n = t.n_workers * t.interval * t.batch * (cfg.data.seq_len - 1)
        return TeacherCost(0, n * record)
    files = Path(checkpoint.weights_of(t.teacher)).glob("model*.safetensors")
    stored = sum(math.prod(shape) for file in files for shape in huggingface.header(file).values())
    return TeacherCost(stored or sum(param.numel() for param in model.parameters()), 0)


def gpu_bytes(cfg: Config) -> Memory:
    """The peak of a round without evaluation; activations are those of the largest subnet."""
    model = huggingface.on_meta(huggingface.planned_config(cfg.model))
    shapes, block_map = huggingface.shapes(model), families.partition(model, cfg.blocks)
    every = families.partition(
        model, replace(cfg.blocks, setting="both", shared_first=0, shared_last=0)
    )
    n_full = count(block_map, shapes, block_map.full_widths())
    trainers = [count(block_map, shapes, widths) for widths in subnet_widths(cfg, block_map)]
    largest = max(subnet_widths(cfg, block_map), key=lambda w: count(block_map, shapes, w))
    fresh = cfg.blocks.masks != "round" and cfg.train.method != "dense"
    gated = {g.name for g in block_map.groups if fresh or largest[g.name] < g.n_blocks}
    kept = values_per_token(every, shapes, largest, gated)
    n_tokens = cfg.train.batch * (cfg.data.seq_len - 1)
    taught = teacher_cost(cfg)
    n_teacher = taught.n_params if taught else 0
    n_logits = min(n_tokens, CHUNK) * (1 + (n_tokens > CHUNK) + (n_teacher > 0))
    vocab = huggingface.vocab_size(model)
    worker = SEAT * sum(trainers) + HALF * n_teacher + REST
    worker += HALF * (
        kept * cfg.train.batch * cfg.data.seq_len + n_logits * (vocab + -vocab % ALIGN)
    )
    # the central buffer, and the sums that workers' results are added up in
    central = FULL * n_full * n_rows(cfg) * (1 + (cfg.train.method == "twist"))
    central += FULL * n_full * (cfg.train.nesterov() is not None)
    return Memory(worker, worker + central)


def subnet_widths(cfg: Config, block_map: BlockMap) -> list[Widths]:
    """Of every subnet that comes up; a trainer is kept for each."""
    if cfg.train.method != "twist":
        return [block_map.full_widths()]
    attn, ffn = (cfg.blocks.k(kind) or (0,) for kind in ("attn", "ffn"))  # none: it is not cut
    by_worker = cfg.blocks.widths == "worker"
    n = cfg.train.n_workers if by_worker else math.lcm(len(attn), len(ffn))
    pairs = {(attn[i % len(attn)], ffn[i % len(ffn)]) for i in range(n)}
    return [
        {g.name: min(g.n_blocks, k_attn if g.kind == "attn" else k_ffn) for g in block_map.groups}
        for k_attn, k_ffn in sorted(pairs)
    ]


def held_share(cfg: Config, block_map: BlockMap, shapes: Shapes) -> Fraction:
    """The share of all parameters in blocks that a worker holds, over the widths that come up."""
    n_shared = count(block_map, shapes, dict.fromkeys(block_map.full_widths(), 0))
    n_blocks = count(block_map, shapes, block_map.full_widths()) - n_shared
    held = [count(block_map, shapes, w) - n_shared for w in subnet_widths(cfg, block_map)]
    return Fraction(sum(held), n_blocks * len(held))


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
