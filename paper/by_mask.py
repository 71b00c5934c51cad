"""What it would bring to cut by masks inside a step: sequences of one mask run in its own subnet.

    python paper/by_mask.py paper/smollm2.toml [SECTION.KEY=VALUE ...]

A masked step computes every block that its worker holds, and multiplies some by 0. Here each mask's
subnet is gathered from the worker's weights, its sequences alone go through it, and its gradient
is added to the worker's. Forward and backward pass of one step, with random weights and tokens and
without a teacher, for every size of worker in the config. The loss and gradient are compared.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from twistlm import config
from twistlm.compute import graphs
from twistlm.compute.gradient import gradient_of
from twistlm.compute.loss import loss_for
from twistlm.compute.speed import times
from twistlm.config import Config
from twistlm.model import generator, huggingface, masks
from twistlm.model.blocks import BlockMap, Blueprint
from twistlm.model.generator import Order
from twistlm.model.layout import CutModel, Layout, cut_model, cut_segments, gather_
from twistlm.model.subnet import Gates, build, scale_of
from twistlm.system.device import cpu_threads, pick_device
from twistlm.system.provenance import describe_run

WARM, REPEATS = 3, 3  # a graph is recorded at the third call


class Step:
    """The gradient of one subnet's loss on its sequences, into a flat buffer."""

    def __init__(self, cut: CutModel, where: Layout, ids: Tensor, gates: Gates):
        fast = ids.is_cuda
        dtype = torch.bfloat16 if fast else torch.float32
        self.weights = torch.zeros(1, where.n_params, dtype=dtype, device=ids.device)
        self.grad, self.ids = torch.zeros_like(self.weights), ids
        self.subnet = build(cut.template, cut.block_map, where, self.weights[0], gates=gates)
        self.subnet.model.requires_grad_()
        loss = loss_for(cut.template, None)
        self.gradient = gradient_of(self.subnet.model, loss, where.views(self.grad[0]), fast)

    def mask(self, values: Tensor) -> None:
        """Set the factors of its gates, [rows, blocks]."""
        gates = self.subnet.gate_tensors(len(values))
        torch._foreach_copy_(gates, self.subnet.split(values[:, None]))

    def run(self, share: float = 1.0) -> Tensor:
        return share * self.gradient(self.ids, share, None, False)


class ByMask:
    """The same gradient, one mask after the other."""

    def __init__(self, cut: CutModel, whole: Step, values: Tensor):
        self.cut, self.whole, self.parts = cut, whole, []
        self.grad = torch.zeros_like(whole.grad)
        rows: dict[tuple[float, ...], list[int]] = {}
        for row, factors in enumerate(values.tolist()):
            rows.setdefault(tuple(factors), []).append(row)
        for factors, mine in rows.items():
            numbers = cut.block_map.numbers()
            kept = {
                g: tuple(i for i, n in enumerate(of) if factors[n]) for g, of in numbers.items()
            }
            step = Step(cut, cut.segments.layout_of(kept), whole.ids[mine].clone(), "all")
            step.mask(torch.tensor([[x for x in factors if x]], dtype=torch.float64))
            self.parts.append((step, len(mine) / len(values), cut.segments.index(kept)))

    def run(self) -> Tensor:
        total, n = torch.zeros((), device=self.grad.device), self.cut.full.n_params
        n_shared, grain = self.cut.segments.full.n_shared, self.cut.segments.grain
        self.grad.zero_()
        blocks = self.grad[0, n_shared:n].view(-1, grain)
        for step, share, index in self.parts:
            gather_(step.weights, self.whole.weights, self.cut.segments, index)
            total += step.run(share)
            self.grad[0, :n_shared] += step.grad[0, :n_shared]
            blocks.index_add_(0, index.long(), step.grad[0, n_shared:].view(-1, grain))
        return total


def worker(cfg: Config, cut: CutModel, number: int, held: Blueprint) -> None:
    """One worker's row: tokens/s with masks, cut by mask, and without any masks."""
    device, t, seed = cut.device, cfg.train, cfg.run.seed
    drawn = masks.WorkerRound(seed, 0, number, 1, t.batch)
    order = natural(cut.block_map)
    scale = scale_of(t.scale, {})
    values = masks.draw(cut.block_map, held, cfg.blocks, drawn, order, t.method, scale)[0]
    # from here on the worker's subnet is the whole model
    where = cut.segments.layout_of(held)
    own = BlockMap(tuple(replace(g, n_blocks=len(held[g.name])) for g in cut.block_map.groups))
    cut = replace(cut, block_map=own, segments=cut_segments(where, own, device))
    vocab = huggingface.vocab_size(cut.template)
    ids = torch.randint(vocab, (t.batch, cfg.data.seq_len), device=device)
    masked, plain = Step(cut, where, ids, "all"), Step(cut, where, ids, "none")
    masked.weights.normal_(std=0.02)
    plain.weights.copy_(masked.weights)
    masked.mask(values)
    by_mask = ByMask(cut, masked, values)
    losses = [float(masked.run()), float(by_mask.run())]
    off = float((masked.grad - by_mask.grad).float().norm() / masked.grad.float().norm())
    runs: dict[str, Callable[[], object]] = {}
    runs |= {"masked": masked.run, "cut by mask": by_mask.run, "no masks": plain.run}
    found: dict[str, list[float]] = {name: [] for name in runs}
    on_gpu = device.type == "cuda"
    ready = {name: graphs.Replayed(run, device, on_gpu) for name, run in runs.items()}
    warm = WARM if on_gpu else 0  # on a CPU the comparison above was the first call
    for _ in range(warm + REPEATS):
        for name, replayed in ready.items():
            found[name] += times(replayed, device, 1)
    speed = {name: ids.numel() / statistics.median(each[warm:]) for name, each in found.items()}
    print(
        f"worker {number}: {where.n_params:,} parameters, {t.batch} sequences of {cfg.data.seq_len}"
    )
    print(f"  {len(by_mask.parts)} masks; losses {losses}; gradients differ by {off:.1e}")
    for name, each in speed.items():
        print(f"  {name:<12}{each:10,.0f} tokens/s {each / speed['masked']:6.2f}", flush=True)


def natural(block_map: BlockMap) -> Order:
    """Any order will do for a time: a run would score its blocks first."""
    return {group.name: tuple(range(group.n_blocks)) for group in block_map.groups}


def main(cfg: Config) -> None:
    device, n = pick_device(cfg.run.device), cfg.train.n_workers
    torch.manual_seed(cfg.run.seed)
    with device:  # a CPU takes a minute to draw a billion weights
        template = huggingface.drawn(huggingface.planned_config(cfg.model), cfg.run.seed)
    cut = cut_model(torch.nn.Module.to(template, "cpu"), cfg.blocks, device, torch.float32)
    how = {"seed": cfg.run.seed, "round": 0, "order": natural(cut.block_map)}
    dealt = generator.for_training(cut.block_map, n, cfg.blocks, **how)
    seen = []
    for number, held in enumerate(dealt):
        if (widths := cut.block_map.widths(held)) not in seen:
            seen.append(widths)
            worker(cfg, cut, number, held)


if __name__ == "__main__":
    cfg = config.load(sys.argv[1], sys.argv[2:])
    with cpu_threads(cfg.run.threads):
        print(describe_run())
        main(cfg)
