"""How fast a model is here and now: milliseconds for a prompt and for one decoded token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import Config
from ..model import families, huggingface
from ..model.count import count
from ..model.huggingface import vocab_size
from ..system.device import pick_device

PROMPT = 128  # tokens, or half of what the model can see
STEPS = 16  # decoded tokens after it


@dataclass(frozen=True)
class Speed:
    """Medians over repeated runs, batch 1, with the KV cache."""

    prefill_ms: float  # the whole prompt
    decode_ms: float  # one token
    n_prompt: int
    n_steps: int
    n_repeats: int
    device: str
    n_threads: int


def measure(model: PreTrainedModel, n_repeats: int = 3) -> Speed:
    """Prefill a prompt, then decode greedily; the first run only warms up."""
    return measure_all([model], n_repeats)[0]


@torch.inference_mode()
def measure_all(
    models: Sequence[PreTrainedModel],
    n_repeats: int = 3,
    n_prompt: int = PROMPT,
    n_steps: int = STEPS,
) -> list[Speed]:
    """The same of several models in turn, so that a busy machine slows all of them alike."""
    first = models[0]
    most = getattr(first.config, "max_position_embeddings", None) or n_prompt + n_steps
    n_prompt = min(n_prompt, most // 2)
    n_steps = min(n_steps, most - n_prompt)
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocab_size(first), (1, n_prompt), generator=draw).to(first.device)
    runs = [[_seconds(m, prompt, n_steps) for m in models] for _ in range(1 + n_repeats)][1:]
    return [
        Speed(
            prefill_ms=1000 * statistics.median(run[i][0] for run in runs),
            decode_ms=1000 * statistics.median(second for run in runs for second in run[i][1:]),
            n_prompt=n_prompt,
            n_steps=n_steps,
            n_repeats=n_repeats,
            device=str(model.device),
            n_threads=torch.get_num_threads(),
        )
        for i, model in enumerate(models)
    ]


def _seconds(model: Any, ids: Tensor, n_steps: int) -> list[float]:
    """Seconds of the prompt and of every greedy step after it."""
    seconds, past = [], None
    for _ in range(1 + n_steps):
        began = _now(ids.device)
        # the last logits alone: with all of them the LM head would be most of the prefill
        out = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        ids, past = out.logits[:, -1:].argmax(-1), out.past_key_values
        seconds.append(_now(ids.device) - began)
    return seconds


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# what a training takes on this machine

SIDE = 1024  # of the matrices whose product is timed
EFFICIENCY = 0.4  # of a training step against that product: a guess, not measured
FLOAT32 = 4


@dataclass(frozen=True)
class Here:
    """A forecast for this machine alone."""

    device: str
    gflops: float  # of a float32 matrix product
    hours: float
    n_bytes: int  # weights, gradients, moments, logits and a teacher; activations come on top
    teacher_share: float = 0.0  # of the FLOPs

    def __str__(self) -> str:
        took = f"{self.hours:,.1f} hours" if self.hours >= 1 else f"{60 * self.hours:,.0f} minutes"
        teacher = f"; {self.teacher_share:.0%} of the time is the teacher's"
        return (
            f"here ({self.device}, {self.gflops:,.0f} GFLOP/s in a matrix product): about {took}, at least "
            f"{self.n_bytes / 1e6:,.0f} MB of memory{teacher if self.teacher_share else ''}"
        )


def forecast(cfg: Config, n_sequences: int) -> Here:
    """6 FLOPs per parameter and token (forward and backward), all workers played by one process.

    A teacher that is no cache is as large as the model and takes 2 more (forward alone).
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
    n_teacher = 0 if cfg.train.teacher in ("none", "cache") or cfg.train.distil == 0 else n_full
    held = (1 + (3 if cfg.train.moments == "carry" else 1)) * n_full + 4 * n_subnet
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
