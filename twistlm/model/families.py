"""How each Hugging Face family names its layers: model_type -> block map.

A family is a description, never a branch: two `Sublayer`s say which projections are cut and which
attributes follow. Families with a tensor-parallel plan (`base_model_tp_plan`: Llama, Mistral,
Qwen2, Qwen3, Gemma3, SmolLM3, Phi, ...) are derived from it; the others have a row in `ROWS`.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from ..config import BlocksConfig
from . import huggingface
from .blocks import KINDS, SETTINGS, BlockGroup, BlockMap, Kind, Partition, Shapes
from .huggingface import HFConfig, Model

CUT = ("colwise", "rowwise")  # styles of a plan's projections into and out of blocks
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
    # (field, value, why) of a config with which no layer can be left out
    whole: tuple[tuple[str, Any, str], ...] = ()


ROWS: dict[str, Family] = {
    "gpt2": Family(
        "transformer.h",
        Sublayer(
            ("attn.c_attn",), "attn.c_proj", fused=3, transposed=True, width="n_head",
            follows=(("attn.num_heads", "heads"), ("attn.split_size", "features")),
        ),
        Sublayer(("mlp.c_fc",), "mlp.c_proj", transposed=True, width="n_inner"),
        (("scale_attn_by_inverse_layer_idx", True, "a layer's number scales its attention"),),
    ),
    "opt": Family(
        "model.decoder.layers",
        Sublayer(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.out_proj",
            width="num_attention_heads", follows=(("self_attn.num_heads", "heads"),),
        ),
        Sublayer(("fc1",), "fc2", width="ffn_dim"),
        (("do_layer_norm_before", False, "norms follow the sums, and stay in every layer"),),
    ),
}  # fmt: skip


def family(model: Model) -> Family:
    """The description of a model's family, from the table or derived from its plan."""
    model_type = model.config.model_type
    if model_type in ROWS:
        return ROWS[model_type]
    plan = getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        known = f"known: {', '.join(ROWS)}, and what publishes a tensor-parallel plan"
        raise ValueError(f"model type {model_type!r} cannot be cut; {known}")
    return Family(
        layers=f"{model.base_model_prefix}.layers",
        attn=_derive(plan, "self_attn", model_type),
        ffn=_derive(plan, "mlp", model_type),
    )


def _derive(plan: dict[str, str], module: str, model_type: str) -> Sublayer | str:
    """Colwise projections are `ins`, the rowwise one is `out`; anything else mixes blocks."""
    start = f"layers.*.{module}."
    styles = {n.removeprefix("layers.*."): s for n, s in plan.items() if n.startswith(start)}
    ins, outs = (tuple(n for n, s in styles.items() if s == style) for style in CUT)
    odd = {n: s for n, s in styles.items() if s not in CUT and not s.startswith("replicated")}
    if odd or len(outs) != 1 or (module == "self_attn" and len(ins) != 3):
        found = ", ".join(f"{n} is {s!r}" for n, s in (odd or styles).items()) or "nothing"
        what = f"{model_type} publishes no plan that splits {module} into independent blocks"
        return f"{what} ({found})"
    if module != "self_attn":
        return Sublayer(ins, outs[0])
    # repeat_kv reads this attribute; all head counts are inferred from head_dim
    follows: Any = ((f"{module}.num_key_value_groups", "queries_per_kv"),)
    return Sublayer(ins, outs[0], width="num_attention_heads", follows=follows)


def partition(model: Model, blocks: BlocksConfig) -> BlockMap:
    """The map of a model: heads, kv groups or query heads, and `n_ffn` runs of neurons (R)."""
    config, described, groups = model.config, family(model), []
    n_layers, first, last = config.num_hidden_layers, blocks.shared_first, blocks.shared_last
    if n_layers < 1:
        raise ValueError(f"model.config: {n_layers} layers leave nothing to cut")
    if first < 0 or last < 0 or first + last >= n_layers:
        said = f"blocks.shared_first = {first} and blocks.shared_last = {last}"
        raise ValueError(f"{said} of {n_layers} layers: their sum must be in 0..{n_layers - 1}")
    shapes = huggingface.shapes(model)
    for layer, kind in product(range(first, n_layers - last), SETTINGS[blocks.setting]):
        prefix, sub = f"{described.layers}.{layer}", _cuttable(getattr(described, kind), kind)
        in_dim, out_dim = (1, 0) if sub.transposed else (0, 1)
        out = [f"{prefix}.{sub.out}.{leaf}" for leaf in ("weight", "bias")]
        if kind == "attn":
            n_blocks, ins, chunk, sections = _heads(config, shapes, sub, prefix, blocks.attn_by)
        else:
            n_blocks, sections, n = blocks.n_ffn, 1, shapes[out[0]][out_dim]
            if n % n_blocks:  # a ticket's layers have their own widths
                legal = ", ".join(str(i) for i in range(1, n + 1) if n % i == 0)
                raise ValueError(f"blocks.n_ffn = {n_blocks}: {n} ffn blocks; legal: {legal}")
            chunk = n // n_blocks
            ins = dict.fromkeys(sub.ins, chunk)
        parts = [
            Partition(f"{prefix}.{name}.{leaf}", dim, n_features, sections * sub.fused)
            for name, n_features in ins.items()
            for leaf, dim in (("weight", in_dim), ("bias", 0))
            if f"{prefix}.{name}.{leaf}" in shapes
        ]
        parts.append(Partition(out[0], out_dim, chunk, sections))
        cut = tuple(parts), tuple(name for name in out if name in shapes)
        groups.append(BlockGroup(f"{prefix}.{kind}", kind, layer, n_blocks, *cut))
    result = BlockMap(tuple(groups))
    result.check(shapes)
    return result.with_common(blocks)


def refit_(model: Model, cut: BlockMap) -> None:
    """Set the sizes that modules remember to those of their (narrowed) weights."""
    described = family(model)
    for group in cut.groups:
        sub = _cuttable(getattr(described, group.kind), group.kind)
        layer, sizes = model.get_submodule(f"{described.layers}.{group.layer}"), {}
        for name in (*sub.ins, sub.out):
            module: Any = layer.get_submodule(name)
            if sub.transposed:  # transformers' Conv1D
                sizes[name] = module.nx, module.nf = module.weight.shape
            else:
                sizes[name] = module.in_features, module.out_features = module.weight.shape[::-1]
        features, dh = sizes[sub.out][0], head_dim(model.config)
        found: dict[Counts, int] = {"heads": features // dh, "features": features}
        found["queries_per_kv"] = features // sizes[sub.ins[-1]][1]
        for name, counts in sub.follows:
            module_name, _, attribute = name.rpartition(".")
            setattr(layer.get_submodule(module_name), attribute, found[counts])


def n_cached(model: Model, shapes: Shapes, context: int) -> int:
    """Numbers in the KV cache of `context` tokens, or of a window, for these (narrowed) shapes."""
    config, attn = model.config, sublayers(model).get("attn")
    n_kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads = dict.fromkeys(range(config.num_hidden_layers), n_kv)
    if attn is not None:  # else it is never cut
        widths, kv = layer_widths(model, shapes, {"attn": attn}), kv_name(config, attn)
        heads = {layer: each[kv] for layer, each in widths.items()}
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    seen = min(context, getattr(config, "sliding_window", None) or context)
    tokens = {i: seen if kinds[i] == "sliding_attention" else context for i in heads}
    return 2 * head_dim(config) * sum(n * tokens[layer] for layer, n in heads.items())


def head_dim(config: HFConfig) -> int:
    """Features of one head, of which only some families have a name for."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _cuttable(sub: Sublayer | str, kind: Kind) -> Sublayer:
    if isinstance(sub, str):
        other = f"try blocks.setting = {'ffn' if kind == 'attn' else 'attn'!r}"
        raise ValueError(f"{kind} layers of this model cannot be cut: {sub}; {other}")
    return sub


def _heads(
    config: HFConfig, shapes: Shapes, sub: Sublayer, prefix: str, attn_by: str
) -> tuple[int, dict[str, int], int, int]:
    """Of one layer: blocks, features of one in each cut projection and in the output, sections."""
    n_query, dh = config.num_attention_heads, head_dim(config)
    n_kv = getattr(config, "num_key_value_heads", None) or n_query
    per_kv = n_query // n_kv
    # anything else inside attention must act on one head alone, or heads are not independent
    module = f"{prefix}.{sub.out.split('.')[0]}."
    projections = tuple(f"{prefix}.{name}." for name in (*sub.ins, sub.out))
    for param, shape in shapes.items():
        if param.startswith(module) and not param.startswith(projections) and shape != (dh,):
            why = f"{param} {shape} spans more than one head of {dh}"
            raise ValueError(f"attn layers cannot be cut: {why}; try blocks.setting = 'ffn'")
    if attn_by == "auto":
        attn_by = "head" if n_kv == n_query else "group" if n_kv > 1 else "query"
    if attn_by == "head" and n_kv != n_query:
        legal = f"use 'group' ({n_kv} blocks) or 'query' ({per_kv} blocks)"
        raise ValueError(f"blocks.attn_by = 'head': {n_query} heads share {n_kv} kv heads; {legal}")
    if attn_by != "query":
        return n_kv, dict.fromkeys(sub.ins, dh) | {sub.ins[0]: per_kv * dh}, per_kv * dh, 1
    if len(sub.ins) != 3:
        raise ValueError("blocks.attn_by = 'query': q, k and v are fused here; use 'head'")
    # kv heads are shared; block i is the i-th query head of every kv head
    return per_kv, {sub.ins[0]: dh}, dh, n_kv


def layer_widths(
    model: Model, shapes: Shapes, subs: dict[Kind, Sublayer] | None = None
) -> dict[int, dict[str, int]]:
    """Each layer's widths by their names in the config, read off shapes; some may be left out."""
    config, layers, subs = model.config, family(model).layers, subs or sublayers(model)
    found: dict[int, dict[str, int]] = {}
    for layer, (kind, sub) in product(range(config.num_hidden_layers), subs.items()):
        start, unit = f"{layers}.{layer}", head_dim(config) if kind == "attn" else 1
        out_dim, in_dim = (1, 0) if sub.transposed else (0, 1)
        if (out := shapes.get(f"{start}.{sub.out}.weight")) is not None:
            widths = found.setdefault(layer, {})
            if kind == "attn" and (kv := kv_name(config, sub)) != sub.width:
                widths[kv] = shapes[f"{start}.{sub.ins[1]}.weight"][out_dim] // unit
            widths[sub.width] = out[in_dim] // unit
    return found


def kv_name(config: HFConfig, attn: Sublayer) -> str:
    """The config's name for the number of kv heads: that of heads where each has its own."""
    fields = config.to_dict()  # of a ticket, the attribute itself may differ by layer
    return "num_key_value_heads" if fields.get("num_key_value_heads") else attn.width


def sublayers(model: Model) -> dict[Kind, Sublayer]:
    """The kinds of layer that the family lets us cut."""
    both = {kind: getattr(family(model), kind) for kind in KINDS}
    return {kind: sub for kind, sub in both.items() if isinstance(sub, Sublayer)}
