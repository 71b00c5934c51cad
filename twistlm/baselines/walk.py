"""The one walk over transformer layers that every method with statistics takes.

Inputs of a layer come from the layers before it as they are after pruning; its statistics are taken
while it is still whole; then it is pruned, and a second pass makes the next layer's inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model import families
from ..model.blocks import BlockMap

# inputs [tokens, in] of whole sequences -> a sum over tokens, which is averaged over sequences
Observe = Callable[[Tensor], Tensor]
Tick = Callable[[], None]  # called after every sequence of every layer

BATCH = 8192  # tokens that go through a layer at once


@dataclass(frozen=True)
class Linear:
    """One matrix of a block map."""

    param: str
    group: str  # name of its block group
    layer: int
    transposed: bool  # stored [in, out]

    def weight(self, model: nn.Module) -> Tensor:
        """The weights as [out, in]: a view, so that writing to it changes the model."""
        stored = model.get_parameter(self.param).detach()
        return stored.T if self.transposed else stored


# gets matrices that are fed the same, and the mean over sequences of what was observed there
Prune = Callable[[list[Linear], Tensor], None]


def linears(model: nn.Module, block_map: BlockMap) -> list[Linear]:
    """The matrices of a map; biases are no matrices and stay as they are."""
    return [
        # blocks are inputs of the output projection, and outputs of all others
        Linear(name, group.name, group.layer, (part.dim == 0) == (part == group.out_part))
        for name, (group, part) in block_map.partitioned().items()
        if model.get_parameter(name).dim() == 2
    ]


def n_layers(block_map: BlockMap) -> int:
    """Layers of a map: a walk ticks so many times for every sequence."""
    return len({group.layer for group in block_map.groups})


@torch.no_grad()
def walk_(
    model: PreTrainedModel,
    matrices: list[Linear],
    ids: Tensor,
    observe: Observe,
    prune_: Prune,
    tick: Tick = lambda: None,
) -> None:
    """Prune these matrices by what they see of `ids` [n_sequences, seq_len].

    Memory: the hidden states of all sequences at one layer, and one layer's statistics.
    """
    layers: Any = model.get_submodule(families.family(model).layers)
    first, last = (pick(linear.layer for linear in matrices) for pick in (min, max))
    hidden, rest = _catch(model, list(layers[first : last + 1]), ids)
    for number in range(first, last + 1):
        args, kwargs = rest[number - first]

        def run(x: Tensor, layer: nn.Module = layers[number], args=args, kwargs=kwargs) -> Tensor:
            y = layer(x, *args, **kwargs)
            return y[0] if isinstance(y, tuple) else y

        mine = [linear for linear in matrices if linear.layer == number]
        for alike, mean in _observe(model, mine, hidden, run, observe, tick):
            prune_(alike, mean)
        if number < last:
            for i, x in enumerate(hidden):
                hidden[i] = run(x)


class _Reached(Exception):
    """The first layer of the walk has its inputs: the rest of the forward pass is not needed."""


def _catch(
    model: PreTrainedModel, layers: list[nn.Module], ids: Tensor
) -> tuple[list[Tensor], list[tuple[tuple, dict[str, Any]]]]:
    """Hidden states before the first of `layers`, batch by batch, and what else each layer gets.

    Masks and positions differ between layers (sliding windows) but not between whole sequences:
    those of one sequence serve a batch.
    """
    hidden: list[Tensor] = []
    rest: list[tuple[tuple, dict[str, Any]]] = []

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        rest.append((args[1:], kwargs))

    def stop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden.append(args[0])
        raise _Reached

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        model.base_model(input_ids=ids[:1].to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    hook = layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        for batch in ids.split(max(1, BATCH // ids.shape[1])):
            with contextlib.suppress(_Reached):
                model.base_model(input_ids=batch.to(model.device), use_cache=False)
    finally:
        hook.remove()
    return hidden, rest


def _observe(
    model: PreTrainedModel,
    matrices: list[Linear],
    hidden: list[Tensor],
    run: Callable[[Tensor], Tensor],
    observe: Observe,
    tick: Tick,
) -> Iterator[tuple[list[Linear], Tensor]]:
    """Matrices of one layer that are fed the same tensor, with the mean of what is observed."""
    alike: list[list[Linear]] = []  # each with one entry in `totals`
    totals: list[Tensor] = []
    fed: list[Tensor] = []  # of the batch that is under way, in the order of `alike`

    def hook_for(linear: Linear) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(module: nn.Module, args: tuple[Tensor]) -> None:
            x = args[0]
            same = next((i for i, other in enumerate(fed) if other is x), None)
            if same is None:
                same = len(fed)
                fed.append(x)
                seen = observe(x.flatten(0, -2))
                if same < len(totals):
                    totals[same] += seen
                else:
                    totals.append(seen)
                    alike.append([])
            if linear not in alike[same]:
                alike[same].append(linear)

        return hook

    hooks = [
        model.get_submodule(linear.param.rpartition(".")[0]).register_forward_pre_hook(
            hook_for(linear)
        )
        for linear in matrices
    ]
    n = 0  # sequences seen
    try:
        for x in hidden:
            run(x)
            fed.clear()
            n += len(x)
            for _ in range(len(x)):
                tick()
    finally:
        for hook in hooks:
            hook.remove()
    while alike:  # a statistic that is done with need not stay
        yield alike.pop(0), totals.pop(0).div_(n)
