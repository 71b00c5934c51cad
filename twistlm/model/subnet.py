"""(4) Subnets of a Hugging Face model: masked or physically narrowed, and the activation scale.

Both are a copy of the model bound to a flat buffer, with a gate before each output projection. A
physical subnet has narrow weights; a masked one has full weights, and gates of 0 for absent blocks.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..system.device import to_device
from . import huggingface
from .blocks import BlockGroup, BlockMap, Blueprint, Partition, State, Widths
from .families import refit_
from .huggingface import Model
from .layout import Layout

Gates = Literal["cut", "all", "none"]  # which layers of a subnet have one
# group name -> |sum_b y_b|^2 / sum_b |y_b|^2, y_b what block b adds to the layer's output: 1 if
# blocks are uncorrelated, the number of blocks if all say the same
Rho = dict[str, float]
Means = dict[str, Tensor]  # group name -> what each block adds on average: [n_blocks, d]


class Gate:
    """A hook before one output projection: `y = W (g * x) + b`, with a factor g for every block.

    A factor is the mask (0 or 1) times the activation scale. `values` [rows, tokens, blocks] has a
    row for every sequence of a batch, or one for all, and the same for tokens; it is refilled, not
    replaced, so a captured graph stays valid.
    """

    def __init__(self, module: nn.Module, part: Partition, values: Tensor):
        self.part, self.values = part, values
        module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        x, n_rows = args[0], len(self.values)
        # some families flatten [batch, tokens] before the projection: rows still lie together
        # [rows, tokens, sections, blocks, chunk]
        cut = x.reshape(n_rows, -1, self.part.sections, self.values.shape[-1], self.part.chunk)
        return ((cut * self.values[:, :, None, :, None]).to(x.dtype).reshape(x.shape),)


@dataclass(frozen=True)
class Subnet:
    """A runnable subnet (or the full model) over a flat buffer."""

    model: Model
    block_map: BlockMap
    widths: Widths
    gates: dict[str, Gate]

    def keep_(self, blueprint: Blueprint, factors: dict[str, float] | None = None) -> None:
        """Let these blocks through, each layer's times its factor, and mask the others."""
        factors = factors or dict.fromkeys(blueprint, 1.0)
        values = gate_values(self.block_map, blueprint, factors)
        if self.widths == self.block_map.full_widths():
            values = spread(self.block_map, blueprint, values)
        if self.gates:  # a subnet of all blocks has none
            torch._foreach_copy_(self.gate_tensors(1), self.split(values))

    def gate_tensors(self, n_rows: int) -> list[Tensor]:
        """The gates' factors [n_rows, 1, blocks]; another number than before makes new tensors."""
        for gate in self.gates.values():
            if len(gate.values) != n_rows:
                gate.values = gate.values.new_ones(n_rows, 1, gate.values.shape[-1])
        return [gate.values for gate in self.gates.values()]

    def split(self, values: Tensor) -> list[Tensor]:
        """Factors [..., blocks of all groups] as one contiguous tensor [..., blocks] a gate."""
        like = next((gate.values for gate in self.gates.values()), values)
        pieces = to_device(values.to(like.dtype), like.device).split([*self.widths.values()], -1)
        named = dict(zip(self.widths, pieces, strict=True))
        return [named[name].contiguous() for name in self.gates]


def gate_values(block_map: BlockMap, blueprint: Blueprint, factors: dict[str, float]) -> Tensor:
    """Factors of a subnet whose blocks are all there: float64 [1, 1, kept blocks of all groups]."""
    kept = [factors[group.name] for group in block_map.groups for _ in blueprint[group.name]]
    return torch.tensor([[kept]], dtype=torch.float64)


def spread(block_map: BlockMap, blueprint: Blueprint, values: Tensor) -> Tensor:
    """Factors [..., kept blocks] among those of the full model [..., all blocks]; others are 0."""
    numbers = block_map.numbers()
    full = values.new_zeros(*values.shape[:-1], sum(map(len, numbers.values())))
    full[..., [of[block] for name, of in numbers.items() for block in blueprint[name]]] = values
    return full


def build(
    template: Model,
    block_map: BlockMap,
    layout: Layout,
    weights: Tensor,
    grads: Tensor | None = None,
    *,
    gates: Gates = "cut",
) -> Subnet:
    """A model of `layout` over views of `weights`, with gates in `cut`, `all` or no layers."""
    model = huggingface.clone_structure(template)
    huggingface.bind_(model, layout.views(weights), grads if grads is None else layout.views(grads))
    nn.Module.to(model, weights.device)  # parameters are there already; this moves buffers
    refit_(model, block_map)
    exact = torch.promote_types(weights.dtype, torch.float32)  # bf16 rounds by 0.1%
    widths, made = {}, {}
    for group in block_map.groups:
        part = group.out_part
        n_inputs = layout.shapes[group.out[0]][part.dim]
        width = widths[group.name] = n_inputs // (part.sections * part.chunk)
        if gates == "all" or (gates == "cut" and width < group.n_blocks):
            module = model.get_submodule(group.out[0].rpartition(".")[0])
            ones = torch.ones(1, 1, width, dtype=exact, device=weights.device)
            made[group.name] = Gate(module, part, ones)
    # eval mode is dropout 0 for every family; there is nothing else in a decoder that it changes
    return Subnet(model.eval(), block_map, widths, made)


def activation_scale(mode: str, n_blocks: int, k: int, rho: float = 1.0) -> float:
    """What a layer of K out of N blocks multiplies its output by.

    `measured`: 1/sqrt((p - p2)/rho + p2), p = K/N, p2 = K(K-1)/(N(N-1)), exact in expectation. A
    layer that is left out has 0: of the block that stands for it nothing is added.
    """
    if k == 0:
        return 0.0
    if mode == "none" or k == n_blocks:
        return 1.0
    if mode != "measured":
        return n_blocks / k if mode == "inverse" else math.sqrt(n_blocks / k)
    p, p2 = k / n_blocks, k * (k - 1) / (n_blocks * (n_blocks - 1))
    return 1 / math.sqrt((p - p2) / rho + p2)


def scales(
    block_map: BlockMap, widths: Widths, mode: str, rho: Rho | None = None
) -> dict[str, float]:
    factor = scale_of(mode, rho or {})
    return {g.name: factor(g, widths[g.name]) for g in block_map.groups}


def scale_of(mode: str, rho: Rho) -> Callable[[BlockGroup, int], float]:
    """The activation scale as a function of a layer and the number of its blocks that are kept."""
    return lambda group, k: activation_scale(mode, group.n_blocks, k, rho.get(group.name, 1.0))


def fold_(params: State, block_map: BlockMap, factors: dict[str, float]) -> None:
    """Multiply output projections (not biases) by their scale, so that no gate is needed."""
    for group in block_map.groups:
        params[group.out[0]].mul_(factors[group.name])


@torch.no_grad()
def add_means_(
    params: State,
    block_map: BlockMap,
    blueprint: Blueprint,
    factors: dict[str, float],
    means: Means,
) -> None:
    """Output biases make up for absent blocks: b += sum mean_b - factor * sum of kept mean_b."""
    for group in block_map.groups:
        if group.name in means and len(group.out) > 1:
            mean = means[group.name].to(params[group.out[1]])
            kept = mean[list(blueprint[group.name])].sum(0)
            params[group.out[1]].add_(mean.sum(0) - factors[group.name] * kept)


@torch.no_grad()
def measure_means(full: Subnet, ids: Tensor) -> tuple[Rho, Means]:
    """rho of every layer and, where it has a bias, the mean of what each block adds."""
    squares: dict[str, tuple[float, float]] = {}
    means: Means = {}

    def add(group: BlockGroup, outputs: Tensor) -> None:
        whole, each = squares.get(group.name, (0.0, 0.0))
        whole += float(outputs.sum(1).square().sum(dtype=torch.float64))
        squares[group.name] = whole, each + float(outputs.square().sum(dtype=torch.float64))
        if len(group.out) > 1:
            mean = outputs.mean(0, dtype=torch.float64) / len(ids)
            means[group.name] = means.get(group.name, 0.0) + mean

    with block_outputs(full.model, full.block_map, add):
        for example in ids.split(1):  # blocks' outputs are n_blocks times a layer's
            full.model(input_ids=to_device(example, full.model.device), use_cache=False)
    return {name: whole / each for name, (whole, each) in squares.items()}, means


@torch.no_grad()
def measure_rho(full: Subnet, ids: Tensor) -> Rho:
    """rho of every layer on these ids [batch, seq_len]."""
    rho: Rho = {}
    with block_outputs(full.model, full.block_map, lambda g, s: rho.update({g.name: rho_of(s)})):
        full.model(input_ids=ids, use_cache=False)
    return rho


def rho_of(outputs: Tensor) -> float:
    """How aligned a layer's blocks are, from what each adds [tokens, n, d]: see `Rho`."""
    return float(outputs.sum(1).square().sum() / outputs.square().sum())


@contextmanager
def block_outputs(
    model: Model, block_map: BlockMap, add: Callable[[BlockGroup, Tensor], None]
) -> Iterator[None]:
    """Within, forward passes call `add` with what each block alone adds, [tokens, n_blocks, d]."""

    def look(group: BlockGroup, module: Any, args: tuple[Tensor]) -> None:
        part = group.out_part
        cut = (part.sections, group.n_blocks, part.chunk)
        inputs = args[0].reshape(-1, *cut).float()
        weight = (module.weight if part.dim == 0 else module.weight.T).float()  # [in, out]
        add(group, torch.einsum("tsnc,sncd->tnd", inputs, weight.reshape(*cut, -1)))

    with ExitStack() as hooks:
        for group in block_map.groups:
            module = model.get_submodule(group.out[0].rpartition(".")[0])
            hooks.enter_context(module.register_forward_pre_hook(partial(look, group)))
        yield
