"""Stock tickets: plain models of their family, which any program loads.

They have the same widths in every layer. The family's own class decides whether a config can say
them: it is built from the narrowed config, without memory.
"""

from itertools import product

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig, PreTrainedModel

from ..config import BlocksConfig
from ..model import families, huggingface
from ..model.blocks import BlockMap, Kind, Shapes, Widths
from ..model.families import layer_widths, sublayers
from .parent import Parent


def stock_config(full: PreTrainedModel, shapes: Shapes) -> PretrainedConfig | str:
    """The family's own config of a model with these shapes, or the reason why there is none."""
    name, subs = full.config.model_type, sublayers(full)
    widths = list(layer_widths(full, shapes, subs).values())
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


def refuse_shared(blocks: BlocksConfig) -> None:
    """A parent with shared layers has no stock tickets."""
    if blocks.shared_first or blocks.shared_last:
        raise ValueError(
            f"--stock: blocks.shared_first={blocks.shared_first} "
            f"blocks.shared_last={blocks.shared_last} leave layers whole: train a parent with both "
            "at 0, or cut this one so by giving both here"
        )


def stock_ks(model: PreTrainedModel, block_map: BlockMap) -> dict[Kind, list[int]]:
    """Every K of each cut kind with which, in all layers, a ticket is a plain model."""
    full, shapes = block_map.full_widths(), huggingface.shapes(model)
    legal: dict[Kind, list[int]] = {}  # kinds do not disturb each other: n + m looks, not n * m
    for kind in block_map.kinds:
        names = [group.name for group in block_map.groups if group.kind == kind]
        tried = {k: full | dict.fromkeys(names, k) for k in range(1, block_map.n_blocks(kind) + 1)}
        made = {k: stock_config(model, block_map.narrowed(shapes, w)) for k, w in tried.items()}
        legal[kind] = [k for k, config in made.items() if not isinstance(config, str)]
    return legal


def all_widths(block_map: BlockMap, legal: dict[Kind, list[int]]) -> list[Widths]:
    """One of the legal K for each kind, in all layers."""
    each = (dict(zip(legal, ks, strict=True)) for ks in product(*legal.values()))
    return [{group.name: k[group.kind] for group in block_map.groups} for k in each]


def stock_widths(parent: Parent, asked: Widths | None) -> list[Widths]:
    """All widths of this parent's stock tickets; `asked` must be among them."""
    refuse_shared(parent.cfg.blocks)
    block_map, full, why = parent.block_map, parent.template, ""
    legal = stock_ks(full, block_map)
    can_be = any(len(ks) > 1 for ks in legal.values())
    if asked is not None:
        found = stock_config(full, block_map.narrowed(huggingface.shapes(full), asked))
        if isinstance(found, str):
            why = f"this ratio makes no stock ticket, for {found}; "
    if can_be and not why:
        return all_widths(block_map, legal)
    ratios = (
        f"{kind}=K/{block_map.n_blocks(kind)} with K in {', '.join(map(str, ks))}"
        for kind, ks in legal.items()
    )
    would_do = f"--ratio {' and '.join(ratios)} would do"
    if not can_be:
        other = "; blocks.setting=ffn may be" if "attn" in legal else ""
        would_do = f"no cut of this parent is stock{other}"
    raise ValueError(f"--stock: {why}{would_do}")
