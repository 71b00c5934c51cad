"""The one walk over transformer layers, and the text it reads.

Inputs of a layer come from the layers before it as they are after pruning; its statistics are taken
while it is still whole; then its matrices are pruned, and a second pass makes the next layer's inputs.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import families, models
from ..blocks import BlockMap
from ..corpus import resolve
from ..data import open_tokens
from ..parent import Parent

Observe = Callable[[Tensor], Tensor]  # inputs of one sequence [tokens, in] -> what is averaged
Tick = Callable[[], None]  # called after every sequence of every layer


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


# gets a matrix and the mean over sequences of what was observed at its inputs
Prune = Callable[[Linear, Tensor], None]


def linears(model: nn.Module, block_map: BlockMap) -> list[Linear]:
    """The matrices of a map; biases are no matrices and stay as they are."""
    return [
        # blocks are inputs of the output projection, and outputs of all others
        Linear(name, group.name, group.layer, (part.dim == 0) == (part == group.out_part))
        for name, (group, part) in block_map.partitioned().items()
        if model.get_parameter(name).dim() == 2
    ]


@torch.no_grad()
def walk_(
    model: PreTrainedModel,
    block_map: BlockMap,
    ids: Tensor,
    observe: Observe,
    prune_: Prune,
    tick: Tick = lambda: None,
) -> None:
    """Prune all matrices of the map by what they see of `ids` [n_sequences, seq_len].

    Memory: the hidden states of all sequences at one layer, and one layer's statistics.
    """
    layers: Any = model.get_submodule(families.family(model).layers)
    matrices = linears(model, block_map)
    first, last = (pick(linear.layer for linear in matrices) for pick in (min, max))
    hidden, rest = _catch(model, list(layers[first : last + 1]), ids)
    for number in range(first, last + 1):
        args, kwargs = rest[number - first]

        def run(x: Tensor, layer: nn.Module = layers[number], args=args, kwargs=kwargs) -> Tensor:
            y = layer(x, *args, **kwargs)
            return y[0] if isinstance(y, tuple) else y

        mine = [linear for linear in matrices if linear.layer == number]
        means = _observe(model, mine, hidden, run, observe, tick)
        for linear in mine:
            prune_(linear, means.pop(linear.param))
        if number < last:
            for i, x in enumerate(hidden):
                hidden[i] = run(x)


class _Reached(Exception):
    """The first layer of the walk has its inputs: the rest of the forward pass is not needed."""


def _catch(
    model: PreTrainedModel, layers: list[nn.Module], ids: Tensor
) -> tuple[list[Tensor], list[tuple[tuple, dict[str, Any]]]]:
    """Each sequence's hidden states before the first of `layers`, and what else each layer is given.

    Masks and positions differ between layers (sliding windows) but not between whole sequences.
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
        for sequence in ids.split(1):
            with contextlib.suppress(_Reached):
                model.base_model(input_ids=sequence.to(model.device), use_cache=False)
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
) -> dict[str, Tensor]:
    """By parameter the running mean over sequences of what one layer's matrices are fed."""
    means: dict[str, Tensor] = {}
    n = 0  # sequences seen

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(module: nn.Module, args: tuple[Tensor]) -> None:
            seen = observe(args[0].flatten(0, -2))
            means[name] = means[name].mul_(n / (n + 1)).add_(seen, alpha=1 / (n + 1)) if n else seen

        return hook

    hooks = [
        model.get_submodule(linear.param.rpartition(".")[0]).register_forward_pre_hook(
            hook_for(linear.param)
        )
        for linear in matrices
    ]
    try:
        for x in hidden:
            run(x)
            n += 1
            tick()
    finally:
        for hook in hooks:
            hook.remove()
    return means


def windows(parent: Parent, data: str | None, n: int, seed: int) -> tuple[str, Tensor]:
    """`n` random windows of `data` (default: the training tokens): its stem, ids [n, seq_len]."""
    cfg = parent.cfg.data
    stem = data or cfg.train
    if not stem:
        raise ValueError(f"{parent.source} has no tokens to calibrate on: give --data STEM")
    file, seq_len = open_tokens(resolve(stem, "train")), cfg.seq_len
    file.check(seq_len, models.vocab_size(parent.template), parent.tokenizer_sha256)
    n_all = file.n_sequences(seq_len)
    if not 1 <= n <= n_all:
        raise ValueError(
            f"{file.stem} is too short for --n {n}: it has {n_all} sequences of data.seq_len = {seq_len}"
            if n > 0
            else f"--n {n}: calibration needs at least one sequence"
        )
    positions = getattr(parent.template.config, "max_position_embeddings", None)
    if positions is not None and seq_len > positions:
        raise ValueError(f"data.seq_len = {seq_len}: the model has {positions} positions")
    return file.stem, file.sequences(random.Random(seed).sample(range(n_all), n), seq_len)
