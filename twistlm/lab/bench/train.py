"""bench train: a worker's local step and a whole round, at every size, beside plain Hugging Face.

Weights and tokens are random: a step costs the same whatever they are. Every number is a median of
repeats in one run, so ratios hold on any machine.
"""

import gc
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from ...compute.loss import next_token_loss
from ...compute.speed import times
from ...config import BlocksConfig, Config, override
from ...data.stream import Batches
from ...data.token_file import TokenFile, TokenMeta
from ...model import families, generator, huggingface
from ...model.blocks import SETTINGS, widths_of_ratio
from ...model.central import create, on_host
from ...model.huggingface import Model
from ...model.layout import Layout, cut_model
from ...system import terminal
from ...system.device import is_bf16
from ...system.provenance import describe_run
from ...system.terminal import progress
from ...training import checkpoint
from ...training.engines.engine import Outcome
from ...training.engines.local import Local
from ...training.run import Progress, Run, is_in_place
from ...transport.ranks import Cluster
from .. import typed
from . import TrainBenchRequest

REPEATS = 7
SEQUENCES = 256  # random ones; rounds walk through them


def bench(
    cfg: Config, request: TrainBenchRequest, save: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Measure every size of every setting; whole models are the same in all settings.

    `save` gets what there is after every row: a run that is cut off loses nothing.
    """
    sizes = typed.sizes(request.sizes, "--sizes")
    settings = typed.names(request.settings, "--settings", list(SETTINGS))
    cluster = Cluster("local", cfg.train.n_workers, "physical", cfg.run.device)
    start = checkpoint.resolved(cfg).model
    with cluster.device:  # a CPU takes a minute to draw a billion weights
        template = huggingface.drawn(huggingface.planned(start).config, cfg.run.seed)
    template = nn.Module.to(template, "cpu")
    points = [(s, r) for s in settings for r in sizes]
    for setting, ratio in points:  # a mistake is told before minutes are spent
        try:
            _cut_to(template, cfg, setting, ratio)
        except ValueError as error:
            raise ValueError(f"--sizes {ratio} with --settings {setting}: {error}") from None
    points = [(s, r) for s, r in points if s == settings[0] or not _is_whole(r)]
    made: dict[str, Any] = {"rows": [], "run": describe_run() | {"config": asdict(cfg)}}
    made["ceiling_tflops"] = _ceiling(cluster.device, is_bf16(cfg.train.precision, cluster.device))
    with progress() as bar:
        task = bar.add_task("bench train", total=len(points), note="")
        if request.references:
            bar.update(task, note="Hugging Face, compiled")
            made["hugging_face"] = _hugging_face(template, cfg, cluster.device, request.steps)
        for setting, ratio in points:
            bar.update(task, note=f"{setting} {ratio}")
            row = measure_worker(template, cfg, cluster, setting, ratio, request.steps)
            made["rows"].append(row)
            save(made)
            bar.advance(task)
    return made


def _is_whole(ratio: str) -> bool:
    """`12/12`, `1` or `attn=3/3,ffn=1.0`."""
    return all(Fraction(each.rpartition("=")[2]) == 1 for each in ratio.split(","))


def _cut_to(template: Model, cfg: Config, setting: str, ratio: str) -> Config:
    """The config of workers that all hold this share of the blocks."""
    blocks = override(cfg, [f"blocks.setting={setting}", "blocks.widths=cycle"]).blocks
    block_map = families.partition(template, blocks)
    widths = widths_of_ratio(block_map, ratio)
    ks: dict[str, Any] = {"k_attn": (1,), "k_ffn": (1,)}
    ks |= {f"k_{group.kind}": (widths[group.name],) for group in block_map.groups}
    blocks = replace(blocks, **ks)
    generator.check(block_map, blocks, cfg.train.n_workers)
    return replace(cfg, blocks=blocks)


def measure_worker(
    template: Model, cfg: Config, cluster: Cluster, setting: str, ratio: str, n_steps: int
) -> dict[str, Any]:
    t, device, cfg = cfg.train, cluster.device, _cut_to(template, cfg, setting, ratio)
    forget(device)
    run = _run(template, cfg, cluster)
    block_map = run.cut.block_map
    # any order will do for a time: a run would score its blocks first
    order = {group.name: tuple(range(group.n_blocks)) for group in block_map.groups}
    engine, begun = Local(run), Progress(order=order)
    made: list[Outcome] = []

    def one_round() -> None:
        made.append(engine.round(made[-1].progress if made else begun))

    round_ms = 1e3 * statistics.median(times(one_round, device, 4)[1:]) / t.n_workers
    trainer = next(iter(run.trainers.made.values()))
    rows = run.batches.rows_at(range(t.batch))
    ids = run.batches.file.sequences(rows, cfg.data.seq_len).to(device)
    ms = _step_ms(lambda: trainer.step(ids, t.lr), device, n_steps)
    where = run.cut.full.narrowed(block_map, widths_of_ratio(block_map, ratio))
    n_tokens = t.batch * cfg.data.seq_len
    # the work copy may lie in the buffer itself
    held = {t.data_ptr(): t.nbytes for t in (trainer.work, trainer.grad, trainer.buffer)}
    assert run.central is not None
    others = () if run.central.in_place else (run.central.buffer, run.central.sums)
    return {
        "setting": setting,
        "ratio": ratio,
        "n_params": where.n_params,
        "ms": ms,  # median of a local step, optimizer included
        "tokens_per_s": 1e3 * n_tokens / ms,
        "flops": n_tokens * _flops(template, where, cfg.data.seq_len),  # of a step
        "state_bytes": sum(held.values()),  # weights, gradient and moments
        # of the GPU's memory, with activations, without a central model beside the worker's
        "peak_bytes": _peak(device, *others),
        "round_ms": round_ms,  # of a worker: dispatch, `interval` steps, aggregation
        "overhead": 1 - t.interval * ms / round_ms,
        # counted: down and up of all workers, carried moments included
        "round_bytes": made[-1].traffic.down + made[-1].traffic.up,
    }


def _run(template: Model, cfg: Config, cluster: Cluster) -> Run:
    """A run over random tokens that lives in memory alone."""
    vocab, seq_len, t = huggingface.vocab_size(template), cfg.data.seq_len, cfg.train
    tokens = np.random.default_rng(cfg.run.seed).integers(0, vocab, SEQUENCES * seq_len)
    meta = TokenMeta(len(tokens), 1, vocab, vocab - 1, "uint32", "", None)
    batches = Batches(TokenFile("random", meta, tokens), seq_len, t.batch, cfg.run.seed)
    cut = cut_model(template, cfg.blocks, cluster.device, torch.float32)
    carry, outer = t.moments == "carry", t.nesterov() is not None
    central = create(cut.segments, huggingface.state(template), carry=carry, outer=outer)
    central.in_place = is_in_place(cfg)
    central = on_host(central) if cfg.run.central == "host" else central
    return Run(cfg, cluster, cut, batches, 10**6, central)


def _hugging_face(
    template: Model, cfg: Config, device: torch.device, n_steps: int
) -> dict[str, Any]:
    """A step of Hugging Face's model and torch's AdamW, compiled and in the same precision."""
    forget(device)
    t, model = cfg.train, huggingface.clone_structure(template)
    huggingface.bind_(model, {n: p.detach().clone() for n, p in template.named_parameters()})
    nn.Module.to(model, device).requires_grad_()
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups: list[Any] = [{"params": [p for p in model.parameters() if p.dim() > 1]}]
    groups += [{"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, t.lr, t.betas, t.eps, t.weight_decay, fused=True)
    loss_of, low = torch.compile(next_token_loss), is_bf16(t.precision, device)
    vocab = huggingface.vocab_size(template)
    ids = torch.randint(vocab, (t.batch, cfg.data.seq_len), device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=low):
            loss = loss_of(model, ids)
        loss.backward()
        if t.clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), t.clip)
        adamw.step()
        adamw.zero_grad()

    return {"ms": _step_ms(step, device, n_steps), "peak_bytes": _peak(device)}


def _step_ms(step: Callable[[], Any], device: torch.device, n_steps: int) -> float:
    """The median of `REPEATS` times of `n_steps` (0: as many as take 0.2 s)."""
    for _ in range(3):  # compile and record
        step()
    n_steps = n_steps or max(1, round(0.2 / min(times(step, device, 4)[2:])))
    return 1e3 * statistics.median(times(step, device, 2 + REPEATS, n_steps)[2:])


def _ceiling(device: torch.device, low: bool) -> float:
    """TFLOP/s of a large square matrix product in the step's precision, the fastest of repeats."""
    size, n_calls = (8192, 20) if device.type == "cuda" else (1024, 1)
    dtype = torch.bfloat16 if low else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / min(times(lambda: torch.mm(a, b), device, 9, n_calls)) / 1e12


def _flops(template: Model, where: Layout, seq_len: int) -> int:
    """FLOPs of a token: embeddings are looked up, not multiplied; the head is a product."""
    modules, head = dict(template.named_modules()), template.get_output_embeddings()
    tables = {f"{name}.weight" for name, m in modules.items() if isinstance(m, nn.Embedding)}
    shapes = [shape for name, shape in where.shapes.items() if name not in tables]
    products = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    if not any(p is head.weight for n, p in template.named_parameters() if n not in tables):
        products += head.weight.numel()  # tied to a table
    blocks = BlocksConfig(setting="attn", shared_first=0, shared_last=0)
    attn = families.partition(template, blocks).groups
    widths = [where.shapes[g.out[0]][g.out_part.dim] for g in attn]
    # forward 2, backward 4; scores and values over all positions, causal or not, as is usual
    return 6 * products + 12 * seq_len * sum(widths)


def _peak(device: torch.device, *without: Tensor | None) -> int | None:
    if device.type != "cuda":
        return None
    there = [tensor.nbytes for tensor in without if tensor is not None and tensor.is_cuda]
    return torch.cuda.max_memory_allocated(device) - sum(there)


def forget(device: torch.device) -> None:
    """Free what nobody holds any more, and count the peak of memory anew."""
    gc.collect()  # a trainer and its recorded graphs hold each other
    if device.type == "cuda":
        torch.cuda.init()  # in a fresh process there is no device to reset yet: PyTorch refuses
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def table(made: dict[str, Any]) -> Table:
    """A row for each size, and what stock tools take in the same run."""
    train, seq_len = made["run"]["config"]["train"], made["run"]["config"]["data"]["seq_len"]
    title = (
        f"a local step: batch {train['batch']} x {seq_len} tokens, AdamW included (faster: than "
        "the full model; ideal: by FLOPs; ceiling: share of a matrix product's "
        f"{made['ceiling_tflops']:.3g} TFLOP/s; overhead: share of a round of "
        f"{train['n_workers']} workers x {train['interval']} steps)"
    )
    heads = "blocks,params,ms,tok/s,TFLOP/s,ceiling,faster,ideal,state MB,peak MB,overhead"
    result = terminal.table(title, *heads.split(","))
    full = next((row for row in made["rows"] if _is_whole(row["ratio"])), None)
    for row in made["rows"]:
        size = f"{row['ratio']} {row['setting']}", f"{row['n_params'] / 1e6:.1f}M"
        speed: tuple[str, ...] = f"{row['ms']:.2f}", f"{row['tokens_per_s'] / 1e3:.0f}k"
        tflops = row["flops"] / row["ms"] / 1e9
        speed = (*speed, f"{tflops:.3g}", f"{tflops / made['ceiling_tflops']:.1%}")
        than = (f"{full[key] / row[key]:.2f}x" if full else "" for key in ("ms", "flops"))
        memory = map(_megabytes, (row["state_bytes"], row["peak_bytes"]))
        result.add_row(*size, *speed, *than, *memory, f"{row['overhead']:.1%}")
    if stock := made.get("hugging_face"):
        ms, peak = f"{stock['ms']:.2f}", _megabytes(stock["peak_bytes"])
        faster = f"{full['ms'] / stock['ms']:.2f}x" if full else ""
        result.add_row("Hugging Face, compiled", "", ms, "", "", "", faster, "", "", peak, "")
    return result


def _megabytes(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / 1e6:,.0f}"
