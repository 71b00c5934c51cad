"""The one walk over transformer layers that every method with statistics takes.

Inputs of a layer come from the layers before it as they are after pruning; its statistics are taken
while it is still whole; then it is pruned, and a second pass makes the next layer's inputs.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..model import families
from ..model.blocks import BlockMap
from ..model.huggingface import Model

# inputs [tokens, in] of whole sequences -> a sum over tokens, which is averaged over sequences
Observe = Callable[[Tensor], Tensor]
Tick = Callable[[], None]  # called after every sequence of every layer

BATCH = 8192  # tokens that go through a layer at once


@dataclass(frozen=True)
class Linear:
    param: str
    group: str  # name of its block group
    layer: int
    transposed: bool  # stored [in, out]

    def weight(self, model: nn.Module) -> Tensor:
        """The weights as [out, in]: a view, so that writing to it changes the model."""
        stored = model.get_parameter(self.param).detach()
        return stored.T if self.transposed else stored


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
    model: Model,
    matrices: list[Linear],
    ids: Tensor,
    observe: Observe,
    prune_: Callable[[list[Linear], Tensor], None],
    tick: Tick = lambda: None,
) -> None:
    """Prune these matrices by what they see of `ids` [n_sequences, seq_len].

    `prune_` gets matrices that are fed the same, and the mean over sequences of what was observed.
    Memory: the hidden states of all sequences at one layer, and one layer's statistics.
    """
    layers: Any = model.get_submodule(families.family(model).layers)
    first, last = (pick(linear.layer for linear in matrices) for pick in (min, max))
    hidden, rest = _catch(model, list(layers[first : last + 1]), ids)
    for number, given in enumerate(rest, first):
        run = partial(_run, layers[number], *given)
        mine = [linear for linear in matrices if linear.layer == number]
        means = _means(model, mine, hidden, run, observe, tick)
        while means:  # a statistic that is done with need not stay
            prune_(*means.pop(0))
        if number < last:
            for i, x in enumerate(hidden):  # in its place: there is no memory for two of all
                hidden[i] = run(x)


def _run(layer: nn.Module, args: tuple, kwargs: dict[str, Any], x: Tensor) -> Tensor:
    y = layer(x, *args, **kwargs)
    return y[0] if isinstance(y, tuple) else y


def _means(
    model: nn.Module,
    matrices: list[Linear],
    hidden: list[Tensor],
    run: Callable[[Tensor], Tensor],
    observe: Observe,
    tick: Tick,
) -> list[tuple[list[Linear], Tensor]]:
    """The matrices of a layer that are fed the same, and what they see, a mean over sequences."""
    at = {model.get_submodule(linear.param.rpartition(".")[0]): linear for linear in matrices}
    fed: dict[Tensor, list[Linear]] = {}  # what each tensor of a batch goes into
    totals: list[Any] = []

    def look(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        fed.setdefault(args[0], []).append(at[module])

    with _hooked(at, look):
        for x in hidden:
            fed.clear()
            run(x)
            totals = totals or [0.0] * len(fed)
            for i, inputs in enumerate(fed):
                totals[i] += observe(inputs.flatten(0, -2))
            for _ in range(len(x)):
                tick()
    n_sequences = sum(map(len, hidden))
    return [
        (alike, total.div_(n_sequences)) for alike, total in zip(fed.values(), totals, strict=True)
    ]


@contextmanager
def _hooked(modules: Iterable[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
    """hook(module, args, kwargs) runs before each of these."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def _catch(
    model: Model, layers: list[nn.Module], ids: Tensor
) -> tuple[list[Tensor], list[tuple[tuple, dict[str, Any]]]]:
    """Hidden states before the first of `layers`, batch by batch, and what else each layer gets.

    Masks and positions differ between layers (sliding windows) but not between whole sequences:
    those of one sequence serve a batch.
    """
    hidden: list[Tensor] = []
    rest: list[tuple[tuple, dict[str, Any]]] = []

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if len(rest) < len(layers):
            rest.append((args[1:], kwargs))
        elif module is layers[0]:
            hidden.append(args[0])

    with _hooked(layers, note):
        for batch in (ids[:1], *ids.split(max(1, BATCH // ids.shape[1]))):
            model.base_model(input_ids=batch.to(model.device), use_cache=False)
    return hidden, rest
