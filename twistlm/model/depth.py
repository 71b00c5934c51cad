"""Depth: subnets that do without whole layers.

A layer none of whose blocks are kept adds its output biases to the residual stream and nothing
else. Under a mask it stays as it is. A ticket leaves it out: the layer before adds the constant.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from torch import nn

from .blocks import Blueprint, State
from .families import family, sublayers
from .huggingface import Model, clone_structure

PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")  # lists in configs
T = TypeVar("T")


def with_all_layers(blueprint: Blueprint) -> Blueprint:
    """Block 0 where a layer keeps none: at a scale of 0 it stands for the layer."""
    return {name: kept or (0,) for name, kept in blueprint.items()}


def check(model: Model, dropped: Collection[int]) -> None:
    """Refuse to leave out these layers where a family forbids it, or nothing would remain."""
    n_layers = model.config.num_hidden_layers
    if len(dropped) >= n_layers:
        raise ValueError(f"all {n_layers} layers would be left out: at least one must stay")
    for name, value, why in family(model).whole:
        if getattr(model.config, name) == value:
            what = f"no layer of this {model.config.model_type} can be left out"
            raise ValueError(f"{what}: with {name} = {value} {why}")


def fold_biases_(params: State, model: Model, dropped: Collection[int]) -> None:
    """Add what layers that are left out add, their output biases, to the stream before them.

    It is exact at the FFN's output bias of the last layer that stays, or else at embeddings that
    are added once for every token.
    """
    described, subs, place = family(model), sublayers(model), _start(model)
    for layer in range(model.config.num_hidden_layers):
        biases = {kind: f"{described.layers}.{layer}.{s.out}.bias" for kind, s in subs.items()}
        if layer not in dropped:
            place = biases["ffn"]
            continue
        for name in biases.values():
            if name not in params:
                continue
            if place not in params:
                joins = f"{name} would have to join {place or 'untied embeddings'}"
                raise ValueError(f"layer {layer} cannot be left out: {joins}, which is not there")
            params[place] += params[name]


def _start(model: Model) -> str:
    """Embeddings that start the residual stream and are not the LM head's weights, too."""
    head: Any = model.get_output_embeddings()
    for name, module in model.named_modules():
        is_own = isinstance(module, nn.Embedding) and module.weight is not head.weight
        if is_own and module.weight.shape[1] == model.config.hidden_size:
            return f"{name}.weight"
    return ""


def shallower(model: Model, dropped: Collection[int]) -> Model:
    """The model without these layers, the others numbered anew; its parameters are still its."""
    if not dropped:
        return model
    model = clone_structure(model)
    where, _, attribute = family(model).layers.rpartition(".")
    layers: Any = getattr(model.get_submodule(where), attribute)
    kept = [i for i in range(len(layers)) if i not in dropped]
    setattr(model.get_submodule(where), attribute, nn.ModuleList(layers[i] for i in kept))
    for number, i in enumerate(kept):
        for module in layers[i].modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    for name in PER_LAYER:
        if values := getattr(model.config, name, None):
            setattr(model.config, name, [values[i] for i in kept])
    model.config.num_hidden_layers = len(kept)
    return model


def renumbered(model: Model, named: Mapping[str, T]) -> dict[str, T]:
    """What is named by parameters of some layers, as the layers are numbered without the others."""
    layers = family(model).layers
    pattern = re.compile(rf"^{re.escape(layers)}\.(\d+)\.")
    kept = sorted({int(found[1]) for found in map(pattern.match, named) if found})

    def number(found: re.Match[str]) -> str:
        return f"{layers}.{kept.index(int(found[1]))}."

    return {pattern.sub(number, name): value for name, value in named.items()}
