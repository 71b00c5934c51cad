"""Stock tickets: with the same widths in every layer, a ticket is a plain model of its family.

Any program that loads the family loads it then: no code of its own, no width per layer. The
family's own class decides: it is built without memory from the narrowed config, and must come out
in the ticket's shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig, PreTrainedModel

from ..config import BlocksConfig
from ..model import families, huggingface
from ..model.blocks import KINDS, Kind, Shapes, Widths
from ..model.families import layer_widths, sublayers
from .parent import Parent


def stock_config(full: PreTrainedModel, shapes: Shapes) -> PretrainedConfig | str:
    """The family's own config of a model with these shapes, or the reason why there is none."""
    name, subs = full.config.model_type, sublayers(full)
    layers = range(full.config.num_hidden_layers)
    widths = [layer_widths(full, shapes, i, subs) for i in layers]
    for key in widths[0]:
        if len(found := sorted({layer[key] for layer in widths})) > 1:
            sizes = ", ".join(map(str, found))
            return f"its layers differ in {key} ({sizes}), and {name} has one for all layers"
    fields = full.config.to_dict() | widths[0]
    if "attn" in subs and fields[heads := subs["attn"].width] != getattr(full.config, heads):
        fields["head_dim"] = families.head_dim(full.config)  # or it is guessed from the heads
    try:
        config = type(full.config).from_dict(fields)
        with torch.device("meta"):
            made = huggingface.shapes(type(full)(config))
    except (StrictDataclassError, ValueError, TypeError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1].strip().removeprefix("ValueError: ").rstrip(".")
        return f"{name}'s config refuses it: {why}"
    for key, shape in shapes.items():
        if made.get(key) != shape:
            return f"{name}'s config cannot say it: {key} would be {made.get(key)}, not {shape}"
    config.architectures = [type(full).__name__]
    return config


def described(full: PreTrainedModel, shapes: Shapes) -> dict[str, str] | str:
    """`k/n` of every width of a stock ticket by its name in the config, or why it is none."""
    found = stock_config(full, shapes)
    if isinstance(found, str):
        return found
    subs = sublayers(full)
    ours, whole = (layer_widths(full, s, 0, subs) for s in (shapes, huggingface.shapes(full)))
    return {name: f"{ours[name]}/{whole[name]}" for name in ours}


def fits(parent: Parent, widths: Widths) -> str | None:
    """None if tickets of these widths are stock, else the reason why not."""
    shapes = parent.block_map.narrowed(huggingface.shapes(parent.template), widths)
    found = stock_config(parent.template, shapes)
    return found if isinstance(found, str) else None


def stock_widths(parent: Parent) -> Iterator[Widths]:
    """All widths of this parent's stock tickets: one K for each kind, in all layers."""
    groups = parent.block_map.groups
    kinds = [kind for kind in KINDS if parent.block_map.n_blocks(kind)]
    good: dict[Kind, list[int]] = {}
    for kind in kinds:  # the kinds do not disturb each other: n + m looks instead of n * m
        full = parent.block_map.full_widths()
        n_blocks = parent.block_map.n_blocks(kind)
        good[kind] = [
            k
            for k in range(1, n_blocks + 1)
            if fits(parent, full | {g.name: k for g in groups if g.kind == kind}) is None
        ]
    for ks in product(*(good[kind] for kind in kinds)):
        each = dict(zip(kinds, ks, strict=True))
        yield {group.name: each[group.kind] for group in groups}


def demand(parent: Parent, widths: Widths | None) -> list[Widths]:
    """All stock widths of a parent; an error says what would do if `widths`, or all, are none."""
    legal = list(stock_widths(parent))
    if widths is not None and (reason := fits(parent, widths)) is not None:
        raise ValueError(
            f"--stock: this ratio makes no stock ticket, for {reason}; {_legal(parent)}"
        )
    if not legal or legal == [parent.block_map.full_widths()]:
        raise ValueError(f"--stock: {_legal(parent)}")
    return legal


def shared_layers(blocks: BlocksConfig) -> str:
    """Why a parent with shared layers has no stock tickets."""
    return (
        f"blocks.shared_first={blocks.shared_first} blocks.shared_last={blocks.shared_last} leave "
        "layers whole: train a parent with both at 0, or cut this one so by giving both here"
    )


def _legal(parent: Parent) -> str:
    """What a user can ask for instead."""
    block_map, blocks = parent.block_map, parent.cfg.blocks
    found: dict[Kind, set[int]] = {group.kind: set() for group in block_map.groups}
    for widths in stock_widths(parent):
        for group in block_map.groups:
            found[group.kind].add(widths[group.name])
    if any(ks - {block_map.n_blocks(kind)} for kind, ks in found.items()):
        shares = " and ".join(
            f"{kind}=K/{block_map.n_blocks(kind)} with K in {', '.join(map(str, sorted(ks)))}"
            for kind, ks in found.items()
        )
        return f"--ratio {shares} would do"
    if blocks.shared_first or blocks.shared_last:
        return shared_layers(blocks)
    return "no cut of this parent is stock" + ("; blocks.setting=ffn may be" * ("attn" in found))
