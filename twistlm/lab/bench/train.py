"""bench train: a worker's local step and a whole round, at every size, beside plain Hugging Face.

Weights and tokens are random: a step costs the same whatever they are. Every number is a median of
repeats in one run, so ratios hold on any machine.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from ...compute.loss import next_token_loss
from ...config import Config, override
from ...data.stream import Batches
from ...data.token_file import TokenFile, TokenMeta
from ...model import families, generator, huggingface
from ...model.blocks import BlockMap, widths_of_ratio
from ...model.central import create
from ...model.layout import Layout, cut_model
from ...system import terminal
from ...system.device import is_bf16
from ...system.provenance import describe_run
from ...system.terminal import progress
from ...training.engines.local import Local
from ...training.run import Run, beginning
from ...training.worker import LocalTrainer
from ...transport.ranks import Cluster
from .curve import stock_model
from .request import TrainBenchRequest

FULL = "12/12"
REPEATS = 7
SEQUENCES = 256  # random ones; rounds walk through them
N_STEPS = 3  # that are profiled
GROUPS = {  # parts of a kernel's name; the first group that fits takes it
    "attention": ("sdpa", "flash", "fmha", "cudnn"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "softmax and loss": ("_softmax",),
    "AdamW": ("rsub_sqrt",),
    "gradients into the buffer": ("multi_tensor_apply",),
    "norms, GELU, sums, copies": ("",),
}


@dataclass(frozen=True, kw_only=True)
class WorkerCost:
    """One size of worker."""

    setting: str
    ratio: str
    n_params: int
    ms: float  # median of a local step, optimizer included
    ms_fastest: float
    tokens_per_s: float
    tflops: float  # TFLOP/s by `_flops`
    flops: int  # of a step
    state_bytes: int  # weights, gradient and moments
    peak_bytes: int | None  # of the GPU's memory, with activations, without the central model
    round_ms: float  # median of a worker's round: dispatch, `interval` steps, aggregation
    overhead: float  # share of it that is not local steps
    round_bytes: int  # counted: down and up of all workers in a round, carried moments included
    profile: dict[str, float] | None = None  # ms of kernels, on a GPU


@dataclass(frozen=True)
class StockStep:
    """Hugging Face's own model and torch's own AdamW."""

    name: str
    ms: float
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """All rows of one run, and what they are held against."""

    rows: tuple[WorkerCost, ...]
    references: tuple[StockStep, ...]
    ceiling_tflops: float  # a large matrix product in the step's precision
    run: dict[str, Any]  # command, versions, device, config

    def full(self) -> WorkerCost | None:
        return next((row for row in self.rows if row.ratio == FULL), None)


def bench(
    cfg: Config,
    request: TrainBenchRequest,
    *,
    quiet: bool = False,
    save: Callable[[TrainBench], object] = lambda made: None,
) -> TrainBench:
    """Measure every size of every setting; whole models are the same in all settings.

    `save` gets what there is after every row: a run that is cut off loses nothing.
    """
    sizes, settings = request.sizes.split(","), request.settings.split(",")
    n_steps, t = request.steps, cfg.train
    cluster = Cluster("local", t.n_workers, "physical", cfg.run.device)
    device = cluster.device
    template = huggingface.load(replace(cfg.model, weights="random"), cfg.run.seed)
    points = [(s, r) for s in settings for r in sizes if r != FULL or s == settings[0]]
    for setting, ratio in points:  # a mistake is told before minutes are spent
        blocks = override(cfg, [f"blocks.setting={setting}"]).blocks
        widths_of_ratio(families.partition(template, blocks), ratio)
    names = ("Hugging Face, float32, eager", "Hugging Face, compiled") if request.references else ()
    made = TrainBench(
        rows=(), references=(), ceiling_tflops=0.0, run=describe_run() | {"config": asdict(cfg)}
    )
    with progress(quiet) as bar:
        task = bar.add_task("bench train", total=1 + len(points) + len(names), note="ceiling")
        made = replace(made, ceiling_tflops=_ceiling(device, is_bf16(t.precision, device)))
        bar.advance(task)
        for name in names:
            bar.update(task, note=name)
            reference = _reference(template, cfg, device, n_steps, name)
            made = replace(made, references=(*made.references, reference))
            save(made)
            bar.advance(task)
        for setting, ratio in points:
            bar.update(task, note=f"{ratio} {setting}")
            row = measure_worker(template, cfg, cluster, setting, ratio, n_steps)
            made = replace(made, rows=(*made.rows, row))
            save(made)
            bar.advance(task)
    return made


def measure_worker(
    template: PreTrainedModel, cfg: Config, cluster: Cluster, setting: str, ratio: str, n_steps: int
) -> WorkerCost:
    """One size of one setting."""
    blocks = override(cfg, [f"blocks.setting={setting}"]).blocks
    block_map = families.partition(template, blocks)
    widths = widths_of_ratio(block_map, ratio)
    ks = {group.kind: widths[group.name] for group in block_map.groups}
    k_attn, k_ffn = ((ks.get(kind, 1),) for kind in ("attn", "ffn"))
    cfg = replace(cfg, blocks=replace(blocks, k_attn=k_attn, k_ffn=k_ffn))
    _forget(cluster.device)
    run = _run(cfg, template, block_map, cluster)
    generator.check(block_map, cfg.blocks, cfg.train.n_workers)
    where = run.full.narrowed(block_map, widths)
    moved: list[int] = []
    # any order will do for a time: a run would score its blocks first
    order = {group.name: tuple(range(group.n_blocks)) for group in block_map.groups}
    engine, progress = Local(run), replace(beginning(block_map), order=order)

    def one_round(i: int) -> None:
        nonlocal progress
        done = engine.round(progress)
        progress = done.progress
        moved.append(done.traffic.down + done.traffic.up)

    round_times = list(_times(one_round, cluster.device, 3, warm=1))
    trainer = next(iter(run.trainers.made.values()))
    ids = run.batches(0, 0).to(cluster.device)

    step_times = _each(lambda: trainer.step(ids, cfg.train.lr), cluster.device, n_steps)
    ms = 1e3 * statistics.median(step_times)
    round_ms = 1e3 * statistics.median(round_times) / cfg.train.n_workers
    n_tokens = cfg.train.batch * cfg.data.seq_len
    flops = n_tokens * _flops(template, where, cfg.data.seq_len)
    return WorkerCost(
        setting=setting,
        ratio=ratio,
        n_params=where.n_params,
        ms=ms,
        ms_fastest=1e3 * min(step_times),
        tokens_per_s=1e3 * n_tokens / ms,
        tflops=flops / ms / 1e9,
        flops=flops,
        state_bytes=_state_bytes(trainer),
        peak_bytes=_peak(cluster.device, run),
        round_ms=round_ms,
        overhead=1 - cfg.train.interval * ms / round_ms,
        round_bytes=moved[-1],
        profile=profile(lambda: trainer.step(ids, cfg.train.lr), cluster.device),
    )


def _run(cfg: Config, template: PreTrainedModel, block_map: BlockMap, cluster: Cluster) -> Run:
    """A run over random tokens that lives in memory alone."""
    vocab, seq_len = huggingface.vocab_size(template), cfg.data.seq_len
    tokens = np.random.default_rng(cfg.run.seed).integers(0, vocab, SEQUENCES * seq_len)
    meta = TokenMeta(len(tokens), 1, vocab, vocab - 1, "uint32", "", None)
    file, t = TokenFile("random", meta, tokens), cfg.train
    batches = Batches(file, seq_len, t.n_workers, t.batch, cfg.run.seed)
    cut = cut_model(template, cfg.blocks, cluster.device, torch.float32)
    central = create(
        huggingface.state(template),
        cut.full.shapes,
        block_map,
        carry=t.moments == "carry",
        outer=t.nesterov() is not None,
        device=cluster.device,
    )
    return Run(cfg, cluster, cut, batches, 10**6, central)


def _reference(
    template: PreTrainedModel, cfg: Config, device: torch.device, n_steps: int, name: str
) -> StockStep:
    """Stock model, stock loss, stock AdamW: what most people run."""
    _forget(device)
    eager = name.endswith("eager")
    model = stock_model(template, device)
    adamw = torch.optim.AdamW(model.parameters(), lr=cfg.train.lr, fused=not eager)
    loss = next_token_loss if eager else torch.compile(next_token_loss)
    low = not eager and is_bf16(cfg.train.precision, device)
    vocab = huggingface.vocab_size(template)
    ids = torch.randint(vocab, (cfg.train.batch, cfg.data.seq_len), device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=low):
            value = loss(model, ids)
        value.backward()
        adamw.step()
        adamw.zero_grad()

    times = _each(step, device, n_steps)
    return StockStep(name, 1e3 * statistics.median(times), _peak(device))


def _each(function: Callable[[], Any], device: torch.device, n_calls: int) -> list[float]:
    """Seconds of one call, `REPEATS` times, each from `n_calls` (0: as many as take 0.2 s)."""

    def calls(_: int) -> None:
        for _ in range(n_calls):
            function()

    for _ in range(3):  # compile and record
        function()
    if not n_calls:
        n_calls = 1
        n_calls = max(1, round(0.2 / min(_times(calls, device, 2))))
    return [seconds / n_calls for seconds in _times(calls, device, REPEATS)]


def _times(
    function: Callable[[int], Any], device: torch.device, n: int, warm: int = 2
) -> Iterator[float]:
    """Seconds of n calls, after some that warm up."""
    for i in range(warm + n):
        _wait(device)
        began = time.perf_counter()
        function(i)
        _wait(device)
        if i >= warm:
            yield time.perf_counter() - began


def _ceiling(device: torch.device, low: bool) -> float:
    """TFLOP/s of a large square matrix product, once the clocks are up: the fastest of repeats."""
    size = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if low else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = [seconds for _ in range(3) for seconds in _each(lambda: torch.mm(a, b), device, 0)]
    return 2 * size**3 / min(times) / 1e12


def _flops(template: PreTrainedModel, where: Layout, seq_len: int) -> int:
    """FLOPs of a token: embeddings are looked up, not multiplied; the head is a product."""
    tables = {
        f"{name}.weight" for name, m in template.named_modules() if isinstance(m, nn.Embedding)
    }
    head: Any = template.get_output_embeddings()
    products = sum(
        math.prod(shape)
        for name, shape in where.shapes.items()
        if len(shape) == 2 and name not in tables
    )
    if not any(p is head.weight for n, p in template.named_parameters() if n not in tables):
        products += head.weight.numel()  # tied to a table
    attn = families.block_map(template, "attn").groups
    widths = [where.shapes[g.out[0]][g.out_part.dim] for g in attn]
    # forward 2, backward 4; scores and values over all positions, causal or not, as is usual
    return 6 * products + 12 * seq_len * sum(widths)


def _state_bytes(trainer: LocalTrainer) -> int:
    held = [trainer.buffer, trainer.grad]
    if trainer.work.data_ptr() != trainer.buffer.data_ptr():
        held.append(trainer.work)
    return sum(t.numel() * t.element_size() for t in held)


def _forget(device: torch.device) -> None:
    gc.collect()  # a trainer and its recorded graphs hold each other
    if device.type == "cuda":
        torch.cuda.init()  # in a fresh process there is no device to reset yet: PyTorch refuses
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device, run: Run | None = None) -> int | None:
    if device.type != "cuda":
        return None
    held = [] if run is None or run.central is None else [run.central.buffer, run.central.sums]
    central = sum(t.numel() * t.element_size() for t in held if t is not None)
    return torch.cuda.max_memory_allocated(device) - central


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profile(step: Callable[[], object], device: torch.device) -> dict[str, float] | None:
    """Milliseconds of a step by group of kernels; the rest of its time is gaps. None on a CPU."""
    if device.type != "cuda":
        return None
    on_gpu = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=on_gpu, acc_events=True) as made:
        for _ in range(N_STEPS):
            step()
        torch.cuda.synchronize(device)
    groups = dict.fromkeys(GROUPS, 0.0)
    for event in made.key_averages():
        group = next(g for g, parts in GROUPS.items() if any(p in event.key for p in parts))
        groups[group] += event.self_device_time_total / 1e3 / N_STEPS
    return groups


def tables(made: TrainBench) -> list[Table]:
    """The sizes, and what stock tools take in the same run."""
    train, seq_len = made.run["config"]["train"], made.run["config"]["data"]["seq_len"]
    title = (
        f"a local step: batch {train['batch']} x {seq_len} tokens, AdamW included (faster: than "
        "the full model; ideal: by FLOPs; ceiling: share of "
        f"{made.ceiling_tflops:.3g} TFLOP/s; overhead: share of a round of {train['n_workers']} "
        f"workers x {train['interval']} steps)"
    )
    result = terminal.table(
        title,
        *("blocks", "params", "ms", "tok/s", "TFLOP/s", "ceiling"),
        *("faster", "ideal", "state MB", "peak MB", "overhead"),
    )
    full = made.full()
    for row in made.rows:
        result.add_row(
            f"{row.ratio} {row.setting}",
            f"{row.n_params / 1e6:.1f}M",
            f"{row.ms:.2f}",
            f"{row.tokens_per_s / 1e3:.0f}k",
            f"{row.tflops:.3g}",
            f"{row.tflops / made.ceiling_tflops:.1%}",
            f"{full.ms / row.ms:.2f}x" if full else "",
            f"{full.flops / row.flops:.2f}x" if full else "",
            f"{row.state_bytes / 1e6:,.0f}",
            _megabytes(row.peak_bytes),
            f"{row.overhead:.1%}",
        )
    found = [result]
    shown = [r for r in made.rows if r.profile and r.setting == made.rows[0].setting]
    if shown:
        heads = (f"{row.ratio} {row.setting}" for row in shown)
        kernels = terminal.table("where a step's milliseconds go", "", *heads)
        for group in GROUPS:
            kernels.add_row(group, *(f"{(row.profile or {})[group]:.2f}" for row in shown))
        gaps = (row.ms - sum((row.profile or {}).values()) for row in shown)
        kernels.add_row("gaps", *(f"{ms:.2f}" for ms in gaps))
        found.append(kernels)
    if not made.references:
        return found
    beside = terminal.table(
        "the same step with stock parts", "", "ms/step", "peak MB", "ours at full width"
    )
    for reference in made.references:
        faster = f"{reference.ms / full.ms:.1f}x faster" if full else ""
        beside.add_row(
            reference.name, f"{reference.ms:.2f}", _megabytes(reference.peak_bytes), faster
        )
    return [*found, beside]


def _megabytes(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / 1e6:,.0f}"
