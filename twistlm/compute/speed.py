"""How fast a model is here and now: milliseconds for a prompt and for one decoded token."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..model.huggingface import Model, n_positions, vocab_size
from ..system.device import is_bf16, pick_device

PROMPT = 128  # tokens, or half of what the model can see
STEPS = 16  # decoded tokens after it
# a compiled step of a pass: Qwen2.5 0.5B on an H200, a token with its teacher 9.7 µs of 37
COMPILED = 0.26
LONGEST = 20.0  # seconds after which no further run begins, where a machine is slow or busy


@dataclass(frozen=True)
class Speed:
    """Medians over repeated runs, batch 1, with the KV cache."""

    prefill_ms: float  # the whole prompt
    decode_ms: float  # one token
    fastest_decode_ms: float  # the least of them: what a machine that is busy now and then can do
    n_prompt: int
    n_steps: int
    n_repeats: int
    device: str
    n_threads: int


@torch.inference_mode()
def measure_all(
    models: Sequence[Model],
    n_repeats: int = 3,
    n_prompt: int = PROMPT,
    n_steps: int = STEPS,
) -> list[Speed]:
    """Prefill a prompt, then decode greedily: models in turn, as a busy machine slows all alike."""
    first = models[0]
    most = n_positions(first)
    n_prompt = min(n_prompt, most // 2)
    n_steps = min(n_steps, most - n_prompt)
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocab_size(first), (1, n_prompt), generator=draw).to(first.device)
    runs: list[list[list[float]]] = []  # run, model, step
    began = time.perf_counter()
    while len(runs) < 2 or (len(runs) <= n_repeats and time.perf_counter() - began < LONGEST):
        runs.append([_seconds(m, prompt, n_steps) for m in models])
    runs = runs[1:]  # the first only warms up
    return [
        Speed(
            prefill_ms=1000 * statistics.median(run[i][0] for run in runs),
            decode_ms=1000 * statistics.median(second for run in runs for second in run[i][1:]),
            fastest_decode_ms=1000 * min(second for run in runs for second in run[i][1:]),
            n_prompt=n_prompt,
            n_steps=n_steps,
            n_repeats=len(runs),
            device=str(model.device),
            n_threads=torch.get_num_threads(),
        )
        for i, model in enumerate(models)
    ]


def blank(model: Model, device: str, dtype: torch.dtype) -> Model:
    """A model without storage as one of zeros: as fast as any of its shapes."""
    made: Any = torch.nn.Module.to_empty(copy.deepcopy(model), device=pick_device(device))
    made.to(dtype)
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.data.zero_()
    return made.eval()


def training_seconds(model: Model, seq_len: int, device: str) -> float:
    """Seconds that a token takes in training, out of a plain forward and backward pass here."""
    where = pick_device(device)
    shape = (2, seq_len) if where.type == "cuda" else (1, min(seq_len, PROMPT))
    ready = blank(model, device, torch.bfloat16 if is_bf16("auto", where) else torch.float32)
    ids = torch.zeros(shape, dtype=torch.int64, device=where)
    run = partial(ready, input_ids=ids, labels=ids, use_cache=False)
    least = min(times(lambda: run().loss.backward(), where, 3))
    return least / ids.numel() * (COMPILED if where.type == "cuda" else 1)


def _seconds(model: Any, ids: Tensor, n_steps: int) -> list[float]:
    """Seconds of the prompt and of every greedy step after it."""
    seconds, past = [], None
    for _ in range(1 + n_steps):
        began = now(ids.device)
        # the last logits alone: with all of them the LM head would be most of the prefill
        out = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        ids, past = out.logits[:, -1:].argmax(-1), out.past_key_values
        seconds.append(now(ids.device) - began)
    return seconds


def times(
    call: Callable[[], Any], device: torch.device, n_repeats: int, n_calls: int = 1
) -> list[float]:
    """Seconds of one call, each from `n_calls`."""
    found = []
    for _ in range(n_repeats):
        began = now(device)
        for _ in range(n_calls):
            call()
        found.append((now(device) - began) / n_calls)
    return found


def now(device: torch.device) -> float:
    """Seconds, once the device has done all it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
