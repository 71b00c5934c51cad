"""What a training takes on this machine: hours by a short measurement, memory by counting."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ..config import Config
from ..model import families, huggingface
from ..model.count import count
from ..system.device import pick_device
from .memory import teacher_cost
from .run import n_rows

SIDE = 1024  # of the matrices whose product is timed
EFFICIENCY = 0.4  # of a training step against that product: a guess, not measured
FLOAT32 = 4


@dataclass(frozen=True)
class Here:
    """A forecast for this machine alone."""

    device: str
    gflops: float  # of a float32 matrix product
    hours: float
    n_bytes: (
        int  # in float32: weights, gradients, moments, logits, teacher; activations come on top
    )
    teacher_share: float = 0.0  # of the FLOPs

    def __str__(self) -> str:
        took = f"{self.hours:,.1f} hours" if self.hours >= 1 else f"{60 * self.hours:,.0f} minutes"
        teacher = f"; {self.teacher_share:.0%} of the time is the teacher's"
        memory = (
            f", at least {self.n_bytes / 1e6:,.0f} MB of memory" if self.device == "cpu" else ""
        )
        return (
            f"here ({self.device}, {self.gflops:,.0f} GFLOP/s in a matrix product): about {took}{memory}"
            f"{teacher if self.teacher_share else ''}"
        )


def forecast(cfg: Config, n_sequences: int) -> Here:
    """6 FLOPs per parameter and token (forward and backward), all workers played by one process.

    A teacher that is no cache takes 2 for each of its own (forward alone).
    """
    model = huggingface.on_meta(huggingface.planned_config(cfg.model))
    shapes = huggingface.shapes(model)
    block_map = families.partition(model, cfg.blocks)
    n_full = count(block_map, shapes, block_map.full_widths())
    n_subnet = n_full
    if cfg.train.method == "twist":
        ks = {"attn": cfg.blocks.k_attn, "ffn": cfg.blocks.k_ffn}
        widths = {g.name: min(g.n_blocks, max(ks[g.kind])) for g in block_map.groups}
        n_subnet = count(block_map, shapes, widths)
    device = pick_device(cfg.run.device)
    speed = _flops(device)
    n_tokens = n_sequences * cfg.data.seq_len
    logits = 2 * cfg.train.batch * cfg.data.seq_len * huggingface.vocab_size(model)
    taught = teacher_cost(cfg)
    n_teacher = taught.n_params if taught else 0
    held = (1 + n_rows(cfg)) * n_full + 4 * n_subnet
    held += logits + n_teacher
    flops = 6 * n_subnet + 2 * n_teacher  # per token
    return Here(
        str(device),
        speed / 1e9,
        flops * n_tokens / (EFFICIENCY * speed) / 3600,
        held * FLOAT32,
        2 * n_teacher / flops,
    )


def _flops(device: torch.device) -> float:
    """FLOP/s of a float32 matrix product: the best of three."""
    a = torch.randn(SIDE, SIDE, device=device)
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * SIDE**3 / best
