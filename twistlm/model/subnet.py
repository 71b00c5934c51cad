"""(4) Subnets of a Hugging Face model: masked or physically narrowed, and the activation scale.

Both are one thing: a copy of the model bound to a flat buffer, with a gate at each output
projection. A physical subnet has narrow weights; a masked one has full weights and a mask in its
gates, which zeroes the inputs that come from absent blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import huggingface
from .blocks import BlockGroup, BlockMap, Blueprint, State, Widths, positions
from .families import refit_
from .layout import Layout

Rho = dict[str, float]  # group name -> running |sum y_b|^2 / sum |y_b|^2


class Gate:
    """Hooks at one output projection: `y = scale * (W (mask * x) + b)`.

    Mask and scale are tensors that are refilled, never replaced: a captured graph stays valid.
    """

    def __init__(self, module: nn.Module, n_inputs: int, like: Tensor):
        exact = (
            torch.float64 if like.dtype == torch.float64 else torch.float32
        )  # bf16 rounds by 0.1%
        self.scale = torch.ones((), dtype=exact, device=like.device)
        self.mask = torch.ones(n_inputs, dtype=like.dtype, device=like.device)
        self.masked = False
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        return (args[0] * self.mask.to(args[0].dtype),) if self.masked else None

    def _after(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return output * self.scale


@dataclass(frozen=True)
class Subnet:
    """A runnable subnet (or the full model) over a flat buffer."""

    model: PreTrainedModel
    block_map: BlockMap
    gates: dict[str, Gate]

    def scale_(self, scales: dict[str, float]) -> None:
        for name, factor in scales.items():
            if name in self.gates:
                self.gates[name].scale.fill_(factor)
            else:
                assert factor == 1.0, f"{name} is whole: it has no scale"

    def mask_(self, blueprint: Blueprint) -> None:
        """Let only these blocks through: for a subnet bound to full weights."""
        for group in self.block_map.groups:
            gate = self.gates[group.name]
            gate.masked = True
            gate.mask.zero_()
            gate.mask[positions(group, group.out_part, blueprint[group.name])] = 1.0


def build(
    template: PreTrainedModel,
    block_map: BlockMap,
    layout: Layout,
    weights: Tensor,
    grads: Tensor | None = None,
    *,
    masked: bool = False,
    gated: bool = True,
) -> Subnet:
    """A model with `layout`'s widths whose parameters are views of `weights`.

    A layer that is whole has scale 1 and gets no gate, unless the model is to be `masked`; nor does any
    layer where the scale is in the weights (not `gated`).
    """
    model = huggingface.clone_structure(template)
    huggingface.bind_(
        model, layout.views(weights), layout.views(grads) if grads is not None else None
    )
    nn.Module.to(model, weights.device)  # parameters are there already; this moves buffers
    refit_(model, block_map)
    gates = {}
    for group in block_map.groups if gated else ():
        part, n_inputs = group.out_part, layout.shapes[group.out[0]][group.out_part.dim]
        if masked or n_inputs < part.sections * group.n_blocks * part.chunk:
            module = model.get_submodule(group.out[0].rpartition(".")[0])
            gates[group.name] = Gate(module, n_inputs, weights)
    # eval mode is dropout 0 for every family; there is nothing else in a decoder that it changes
    return Subnet(model.eval(), block_map, gates)


def activation_scale(mode: str, n_blocks: int, k: int, rho: float = 1.0) -> float:
    """What a layer of K out of N blocks multiplies its output by.

    `measured`: 1/sqrt((p - p2)/rho + p2), p = K/N, p2 = K(K-1)/(N(N-1)), exact in expectation.
    """
    if mode == "none" or k == n_blocks:
        return 1.0
    if mode == "sqrt":
        return math.sqrt(n_blocks / k)
    if mode == "inverse":
        return n_blocks / k
    assert mode == "measured", mode
    p, p2 = k / n_blocks, k * (k - 1) / (n_blocks * (n_blocks - 1))
    return 1 / math.sqrt((p - p2) / rho + p2)


def scales(
    block_map: BlockMap, widths: Widths, mode: str, rho: Rho | None = None
) -> dict[str, float]:
    """The activation scale of every group of a subnet."""
    return {
        g.name: activation_scale(mode, g.n_blocks, widths[g.name], (rho or {}).get(g.name, 1.0))
        for g in block_map.groups
    }


def fold_(params: State, block_map: BlockMap, factors: dict[str, float]) -> None:
    """Multiply output projections (weight and bias) by their scale: a deployed model needs no gate."""
    for group in block_map.groups:
        for name in group.out:
            params[name].mul_(factors[group.name])


@torch.no_grad()
def measure_rho(full: Subnet, ids: Tensor) -> Rho:
    """rho = |sum_b y_b|^2 / sum_b |y_b|^2 per layer, y_b = block b's share of the output projection."""
    rho: Rho = {}

    def measure(group: BlockGroup, shares: Tensor) -> None:
        rho[group.name] = rho_of(shares)

    with block_shares(full.model, full.block_map, measure):
        full.model(input_ids=ids, use_cache=False)
    return rho


def rho_of(shares: Tensor) -> float:
    """|sum_b y_b|^2 / sum_b |y_b|^2 of a layer, from the shares of its blocks [tokens, n_blocks, d]."""
    return float(shares.sum(1).square().sum() / shares.square().sum())


@contextmanager
def block_shares(
    model: PreTrainedModel, block_map: BlockMap, add: Callable[[BlockGroup, Tensor], None]
) -> Iterator[None]:
    """Within, every forward pass calls `add(group, shares [tokens, n_blocks, d])` for each layer that is cut.

    A block's share is what its inputs alone write through the output projection, without the bias.
    """
    handles = []
    for group in block_map.groups:
        module = model.get_submodule(group.out[0].rpartition(".")[0])

        def before(module: Any, args: tuple[Tensor], group: BlockGroup = group) -> None:
            part = group.out_part
            cut = (part.sections, group.n_blocks, part.chunk)
            inputs = args[0].reshape(-1, *cut).float()
            weight = (module.weight if part.dim == 0 else module.weight.T).float()  # [in, out]
            add(group, torch.einsum("tsnc,sncd->tnd", inputs, weight.reshape(*cut, -1)))

        handles.append(module.register_forward_pre_hook(before))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
