"""How each Hugging Face family names its layers: model_type -> block map.

A family is a description, never a branch: two `Sublayer`s say which projections are cut and which
attributes follow the cut weights. Families with a published tensor-parallel plan
(`base_model_tp_plan`: Llama, Mistral, Qwen2, Qwen3, Gemma3, SmolLM3, Phi, ...) are derived from it;
the others have a row in `ROWS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PretrainedConfig, PreTrainedModel

from ..config import BlocksConfig, Setting
from .blocks import KINDS, BlockGroup, BlockMap, Kind, Partition, Shapes

# what an attribute of an attention module counts: heads, their features, or query heads per kv head
Counts = Literal["heads", "features", "queries_per_kv"]


@dataclass(frozen=True)
class Sublayer:
    """One attention or FFN layer; module names are relative to the transformer layer."""

    ins: tuple[str, ...]  # projections whose outputs are cut; for attention: q, k, v or one fused
    out: str  # the projection whose inputs are cut
    fused: int = 1  # matrices side by side in one of `ins`
    transposed: bool = False  # weights are stored [in, out] (Conv1D), not [out, in] (Linear)
    width: str = "intermediate_size"  # the config's name for how wide it is
    # attribute -> what it counts: what the forward pass reads besides weights
    follows: tuple[tuple[str, Counts], ...] = ()


@dataclass(frozen=True)
class Family:
    """A string in place of a sublayer is the reason why it cannot be cut."""

    layers: str  # module list of the transformer layers
    attn: Sublayer | str
    ffn: Sublayer | str


ROWS: dict[str, Family] = {
    "gpt2": Family(
        layers="transformer.h",
        attn=Sublayer(
            ins=("attn.c_attn",),
            out="attn.c_proj",
            fused=3,
            transposed=True,
            width="n_head",
            follows=(("attn.num_heads", "heads"), ("attn.split_size", "features")),
        ),
        ffn=Sublayer(ins=("mlp.c_fc",), out="mlp.c_proj", transposed=True, width="n_inner"),
    ),
    "opt": Family(
        layers="model.decoder.layers",
        attn=Sublayer(
            ins=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            out="self_attn.out_proj",
            width="num_attention_heads",
            follows=(("self_attn.num_heads", "heads"),),
        ),
        ffn=Sublayer(ins=("fc1",), out="fc2", width="ffn_dim"),
    ),
}


def family(model: PreTrainedModel) -> Family:
    """The description of a model's family, from the table or derived from its plan."""
    model_type = model.config.model_type
    if model_type in ROWS:
        return ROWS[model_type]
    plan = getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"model type {model_type!r} cannot be cut: it has no row in twistlm/model/families.py "
            f"and publishes no tensor-parallel plan; known: {', '.join(ROWS)} and Llama-like "
            "families"
        )
    return Family(
        layers=f"{model.base_model_prefix}.layers",
        attn=_derive(plan, "self_attn", model_type),
        ffn=_derive(plan, "mlp", model_type),
    )


def _derive(plan: dict[str, str], module: str, model_type: str) -> Sublayer | str:
    """Colwise projections are `ins`, the rowwise one is `out`; anything else mixes blocks."""
    styles = {
        name.removeprefix("layers.*."): style
        for name, style in plan.items()
        if name.startswith(f"layers.*.{module}.")
    }
    ins = tuple(name for name, style in styles.items() if style == "colwise")
    outs = tuple(name for name, style in styles.items() if style == "rowwise")
    odd = {name: style for name, style in styles.items() if name not in ins + outs}
    mixing = {name: style for name, style in odd.items() if not style.startswith("replicated")}
    if mixing or len(outs) != 1 or (module == "self_attn" and len(ins) != 3):
        found = ", ".join(f"{name} is {style!r}" for name, style in (mixing or styles).items())
        return (
            f"{model_type} publishes no plan that splits {module} into independent blocks "
            f"({found or 'nothing'})"
        )
    if module != "self_attn":
        return Sublayer(ins, outs[0])
    # repeat_kv reads this attribute; all head counts are inferred from head_dim
    follows: tuple[tuple[str, Counts], ...] = (
        (f"{module}.num_key_value_groups", "queries_per_kv"),
    )
    return Sublayer(ins, outs[0], width="num_attention_heads", follows=follows)


def block_map(model: PreTrainedModel, setting: Setting = "both", attn_by: str = "auto") -> BlockMap:
    """The map of a model: attention by head, kv group or query head; FFN by single neuron.

    Only the kinds of `setting` are looked at, so a family whose attention cannot be cut still
    serves `ffn`. Coarsen the FFN to the paper's R with `BlockMap.coarsen`.
    """
    if model.config.num_hidden_layers < 1:
        raise ValueError(
            f"model.config: a model of {model.config.num_hidden_layers} layers has nothing to cut"
        )
    described = family(model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    groups: list[BlockGroup] = []
    for layer in range(model.config.num_hidden_layers):
        prefix = f"{described.layers}.{layer}"
        if setting in ("attn", "both"):
            sub = _cuttable(described.attn, "attn")
            mine = {name: s for name, s in shapes.items() if name.startswith(f"{prefix}.")}
            groups.append(_attn_group(model.config, mine, sub, prefix, layer, attn_by))
        if setting in ("ffn", "both"):
            sub = _cuttable(described.ffn, "ffn")
            dim = 0 if sub.transposed else 1
            n_neurons = shapes[f"{prefix}.{sub.out}.weight"][dim]
            name, ins = f"{prefix}.ffn", dict.fromkeys(sub.ins, 1)
            groups.append(_group(name, "ffn", layer, shapes, sub, n_neurons, ins, 1))
    result = BlockMap(tuple(groups))
    result.check(shapes)
    return result


def partition(model: PreTrainedModel, blocks: BlocksConfig) -> BlockMap:
    """The block map that a config describes for a model."""
    cut = block_map(model, blocks.setting, blocks.attn_by)
    cut = cut.select(blocks.setting, blocks.shared_first, blocks.shared_last)
    cut = cut.coarsen("ffn", blocks.n_ffn)
    named = cut.with_common({kind: blocks.common(kind) for kind in KINDS})
    return named if blocks.common_by == "index" else cut  # ranks wait for the order: `with_ranks`


def refit_(model: PreTrainedModel, cut: BlockMap) -> None:
    """Set the sizes that modules remember to those of their (narrowed) weights."""
    described = family(model)
    for group in cut.groups:
        sub = _cuttable(described.attn if group.kind == "attn" else described.ffn, group.kind)
        layer, sizes = model.get_submodule(f"{described.layers}.{group.layer}"), {}
        for name in (*sub.ins, sub.out):
            module: Any = layer.get_submodule(name)
            if sub.transposed:  # transformers' Conv1D
                n_in, n_out = module.nx, module.nf = module.weight.shape
            else:
                n_out, n_in = module.out_features, module.in_features = module.weight.shape
            sizes[name] = n_in, n_out
        features = sizes[sub.out][0]
        found: dict[Counts, int] = {
            "heads": features // head_dim(model.config),
            "features": features,
            "queries_per_kv": features // sizes[sub.ins[-1]][1],
        }
        for name, counts in sub.follows:
            module_name, _, attribute = name.rpartition(".")
            setattr(layer.get_submodule(module_name), attribute, found[counts])


def n_cached(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], context: int) -> int:
    """Numbers in the KV cache of `context` tokens, for weights of these (narrowed) shapes.

    A layer with a sliding window keeps no more tokens than that.
    """
    config, total = model.config, 0
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    described = family(model)
    for layer in range(config.num_hidden_layers):
        slides = bool(window) and (not kinds or kinds[layer] == "sliding_attention")
        n_tokens = min(context, int(window)) if slides and window else context
        sub = described.attn
        if isinstance(sub, str):  # never cut
            n_kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            total += n_tokens * 2 * n_kv * head_dim(config)
            continue
        dim = 1 if sub.transposed else 0
        sizes = [shapes[f"{described.layers}.{layer}.{name}.weight"][dim] for name in sub.ins]
        total += n_tokens * (sum(sizes[1:]) if len(sizes) == 3 else sizes[0] * 2 // sub.fused)
    return total


def head_dim(config: PretrainedConfig) -> int:
    """Features of one head, of which only some families have a name for."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _cuttable(sub: Sublayer | str, kind: Kind) -> Sublayer:
    if isinstance(sub, str):
        other = "ffn" if kind == "attn" else "attn"
        raise ValueError(
            f"{kind} layers of this model cannot be cut: {sub}; try blocks.setting = {other!r}"
        )
    return sub


def _attn_group(
    config: PretrainedConfig, shapes: Shapes, sub: Sublayer, prefix: str, layer: int, attn_by: str
) -> BlockGroup:
    """Attention of one layer, whose parameters have these shapes."""
    n_query = config.num_attention_heads
    n_kv = getattr(config, "num_key_value_heads", None) or n_query
    dh = head_dim(config)
    name = f"{prefix}.attn"
    # anything else inside attention must act on one head alone, or heads are not independent
    module = f"{prefix}.{sub.out.split('.')[0]}."
    projections = tuple(f"{prefix}.{name}." for name in (*sub.ins, sub.out))
    for param, shape in shapes.items():
        if param.startswith(module) and not param.startswith(projections) and shape != (dh,):
            raise ValueError(
                f"attn layers of {config.model_type} cannot be cut: {param} has shape {shape}, "
                f"which spans more than one head of {dh}; try blocks.setting = 'ffn'"
            )
    if attn_by == "auto":
        attn_by = "head" if n_kv == n_query else "group" if n_kv > 1 else "query"
    if attn_by == "head" and n_kv != n_query:
        raise ValueError(
            f"blocks.attn_by = 'head', but {n_query} query heads share {n_kv} kv heads: use "
            f"'group' ({n_kv} blocks) or 'query' ({n_query // n_kv} blocks)"
        )
    per_kv = n_query // n_kv
    if attn_by == "query":  # kv heads are shared; block i is the i-th query head of every kv head
        if len(sub.ins) != 3:
            raise ValueError(
                f"blocks.attn_by = 'query': {config.model_type} has fused q, k, v; use 'head'"
            )
        ins = {sub.ins[0]: dh}
        return _group(name, "attn", layer, shapes, sub, per_kv, ins, dh, sections=n_kv)
    ins = dict.fromkeys(sub.ins, dh) | {sub.ins[0]: per_kv * dh}
    return _group(name, "attn", layer, shapes, sub, n_kv, ins, per_kv * dh)


def _group(
    group: str,
    kind: Kind,
    layer: int,
    shapes: Shapes,
    sub: Sublayer,
    n_blocks: int,
    ins: dict[str, int],  # projection -> features of one block; others of `sub.ins` are not cut
    out_chunk: int,
    sections: int = 1,
) -> BlockGroup:
    prefix = group.removesuffix(f".{kind}")
    in_dim, out_dim = (1, 0) if sub.transposed else (0, 1)
    parts = []
    for name, chunk in ins.items():
        parts.append(Partition(f"{prefix}.{name}.weight", in_dim, chunk, sections * sub.fused))
        if f"{prefix}.{name}.bias" in shapes:
            parts.append(Partition(f"{prefix}.{name}.bias", 0, chunk, sections * sub.fused))
    out = f"{prefix}.{sub.out}"
    parts.append(Partition(f"{out}.weight", out_dim, out_chunk, sections))
    scaled = (f"{out}.weight",) + ((f"{out}.bias",) if f"{out}.bias" in shapes else ())
    return BlockGroup(group, kind, layer, n_blocks, tuple(parts), scaled)


def layer_widths(
    model: PreTrainedModel, shapes: Shapes, layer: int, subs: dict[Kind, Sublayer]
) -> dict[str, int]:
    """The widths of one layer by their names in the config, read off its weights' shapes."""
    prefix, dh, widths = f"{family(model).layers}.{layer}", head_dim(model.config), {}
    for kind, sub in subs.items():
        unit = dh if kind == "attn" else 1
        out_dim, in_dim = (1, 0) if sub.transposed else (0, 1)
        if kind == "attn" and (kv := kv_name(model.config, sub)) != sub.width:
            widths[kv] = shapes[f"{prefix}.{sub.ins[1]}.weight"][out_dim] // unit
        widths[sub.width] = shapes[f"{prefix}.{sub.out}.weight"][in_dim] // unit
    return widths


def kv_name(config: PretrainedConfig, attn: Sublayer) -> str:
    """The config's name for the number of kv heads: that of heads where each has its own."""
    fields = config.to_dict()  # of a ticket, the attribute itself may differ by layer
    return "num_key_value_heads" if fields.get("num_key_value_heads") else attn.width


def sublayers(model: PreTrainedModel) -> dict[Kind, Sublayer]:
    """The kinds of layer that the family lets us cut."""
    both = {kind: getattr(family(model), kind) for kind in KINDS}
    return {kind: sub for kind, sub in both.items() if isinstance(sub, Sublayer)}
