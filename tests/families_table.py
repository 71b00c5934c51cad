"""Tiny random models of every supported family, their table, and uneven tickets of them.

Names and head counts are written down here by hand and never read from `twistlm.model.families`: a
reference that asks the code under test proves nothing.
"""

import copy
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from twistlm import config
from twistlm.model import central, families, generator, huggingface, layout, subnet
from twistlm.model.blocks import BlockMap, Blueprint
from twistlm.model.central import cut_subnet
from twistlm.tickets import deploy, parent
from twistlm.tickets.parent import Parent

VOCAB = 64
N_LAYERS = 3
N_NEURONS = 48
CUT_FFN = 3  # blocks of 16 neurons in the parent of a ticket
KEPT_FFN = ((0, 2), (0, 1, 2), (1,))  # that a ticket keeps, by layer
KEPT_ATTN = ((1, 2), (0,), (0, 2))


@dataclass(frozen=True)
class Row:
    """One model: its Hugging Face config, and where its attention and FFN projections are."""

    type: str
    config: dict[str, Any]
    n_query: int = 4
    n_kv: int = 4
    head_dim: int = 8
    layers: str = "model.layers"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attn_out: str = "self_attn.o_proj"
    ffn_ins: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    ffn_out: str = "mlp.down_proj"
    transposed: bool = False  # weights are [in, out]
    ways: tuple[str, ...] = ("head",)  # legal blocks.attn_by

    def n_attn(self, attn_by: str) -> int:
        """Attention blocks in a layer."""
        return self.n_query // self.n_kv if attn_by == "query" else self.n_kv

    def block_of_head(self, attn_by: str, head: int) -> int:
        """The block that query head `head` belongs to."""
        queries_per_kv = self.n_query // self.n_kv
        return head % queries_per_kv if attn_by == "query" else head // queries_per_kv

    def block_of_input(self, kind: str, attn_by: str, position: int, n_ffn: int) -> int:
        """The block that one input of the output projection comes from."""
        if kind == "attn":
            return self.block_of_head(attn_by, position // self.head_dim)
        return position // (N_NEURONS // n_ffn)


def _common(**more: Any) -> dict[str, Any]:
    """Special tokens are off: greedy generation must not stop early."""
    off = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {"vocab_size": VOCAB, "num_hidden_layers": N_LAYERS, **off, **more}


def _llama_like(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": N_NEURONS, "num_attention_heads": 4}
    return _common(**{**sizes, "max_position_embeddings": 40, **more})


def _gqa(**more: Any) -> dict[str, Any]:
    """9 query heads on 3 kv heads, as in SmolLM2, so that both ways to cut leave K = 1, 2 < N."""
    heads = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
    return _llama_like(**heads, **more)


GROUPED: dict[str, Any] = {"n_query": 9, "n_kv": 3, "ways": ("group", "query")}
PHI: dict[str, Any] = {"attn_out": "self_attn.dense", "ffn_ins": ("mlp.fc1",), "ffn_out": "mlp.fc2"}

TABLE: dict[str, Row] = {
    "gpt2": Row(
        "gpt2", _common(n_embd=32, n_head=4, n_inner=N_NEURONS, n_positions=40),
        layers="transformer.h", qkv=("attn.c_attn",), attn_out="attn.c_proj",
        ffn_ins=("mlp.c_fc",), ffn_out="mlp.c_proj", transposed=True,
    ),
    "opt": Row(
        "opt", _llama_like(ffn_dim=N_NEURONS), layers="model.decoder.layers",
        attn_out="self_attn.out_proj", ffn_ins=("fc1",), ffn_out="fc2",
    ),
    "phi": Row("phi", _llama_like(), **PHI),
    "phi-qk-norm": Row("phi", _llama_like(qk_layernorm=True), **PHI),
    "llama": Row("llama", _llama_like()),
    "llama-biases": Row("llama", _llama_like(attention_bias=True, mlp_bias=True)),
    "llama-gqa": Row("llama", _gqa(head_dim=8), **GROUPED),
    "llama-mqa": Row("llama", _llama_like(num_key_value_heads=1), n_kv=1, ways=("query",)),
    "mistral": Row("mistral", _gqa(head_dim=8, sliding_window=5), **GROUPED),
    "qwen2": Row("qwen2", _gqa(), **GROUPED, head_dim=4),
    "qwen3": Row("qwen3", _gqa(head_dim=8), **GROUPED),
    "gemma3_text": Row(
        "gemma3_text", **GROUPED,
        config=_gqa(head_dim=8, query_pre_attn_scalar=8, sliding_window=5,
                    layer_types=["full_attention", "sliding_attention", "full_attention"]),
    ),
    "smollm3": Row("smollm3", _gqa(no_rope_layers=[1, 0, 1]), **GROUPED, head_dim=4),
}  # fmt: skip


def ways(*names: str) -> Iterator[tuple[str, str]]:
    """(row, attn_by) for the named rows, or for all."""
    yield from ((name, attn_by) for name in names or TABLE for attn_by in TABLE[name].ways)


def build(model_type: str, config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A random model in float32 with noise on every parameter.

    Hugging Face starts biases at 0 and norms at 1: a bias cut or scaled wrongly would not show.
    """
    torch.manual_seed(seed)
    hf_config = AutoConfig.for_model(model_type, **config)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.2 * torch.randn_like(param))
    return model.eval()


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """The model of one row; `.double()` it where float32 is too coarse."""
    return build(TABLE[name].type, TABLE[name].config, seed)


N_FFN = 4
CUT = ("blocks.n_ffn=4", "blocks.shared_first=0", "blocks.shared_last=0")
SHARED_FIRST = 1
CPU = torch.device("cpu")
BOTH = [(name, attn_by, "both") for name, attn_by in ways()]
ALONE = [(*way, setting) for way in ways("gpt2", "llama-gqa") for setting in ("attn", "ffn")]
Key = tuple[str, str, str]
Kept = dict[tuple[int, str], tuple[int, ...]]  # (layer, kind) -> block ids
Cuts = dict[str, tuple[int, list[int]]]  # parameter -> dimension and kept positions


def central_of(model: PreTrainedModel, block_map: BlockMap) -> central.Central:
    where = layout.layout(block_map, huggingface.shapes(model))
    segments = layout.cut_segments(where, block_map, CPU)
    return central.create(segments, huggingface.state(model), carry=False, outer=False)


def as_parent(model: PreTrainedModel, block_map: BlockMap, whole, scale: str) -> parent.Parent:
    cfg = config.override(config.Config(), [f"train.scale={scale}"])
    return parent.Parent("tiny", cfg, model, block_map, whole, None, None)


@dataclass(frozen=True)
class Case:
    """A model, a subnet of it, and the same subnet made by hand."""

    row: Row
    attn_by: str
    model: PreTrainedModel
    block_map: BlockMap
    kept: Kept
    blueprint: Blueprint
    reference: PreTrainedModel
    central: central.Central

    def ticket(self, scale: str = "sqrt") -> PreTrainedModel:
        return deploy.cut_ticket(self.parent(scale), self.blueprint)

    def parent(self, scale: str = "sqrt") -> parent.Parent:
        return as_parent(self.model, self.block_map, self.central, scale)

    @property
    def scales(self) -> dict[str, float]:
        return subnet.scales(self.block_map, self.block_map.widths(self.blueprint), "sqrt")

    def masked(self, grads: Tensor | None = None) -> subnet.Subnet:
        """The full model with masks and the scale."""
        where, weights = self.central.layout, self.central.weights.clone()
        result = subnet.build(self.model, self.block_map, where, weights, grads, gates="all")
        result.keep_(self.blueprint, self.scales)
        return result

    def physical(self) -> tuple[subnet.Subnet, layout.Layout, Tensor, Tensor]:
        """The narrow model with the scale; its layout, weights and gradients."""
        widths, shapes = self.block_map.widths(self.blueprint), huggingface.shapes(self.model)
        where = layout.layout(self.block_map, self.block_map.narrowed(shapes, widths))
        weights = cut_subnet(self.central, self.blueprint)[0]
        grads = torch.zeros_like(weights)
        result = subnet.build(self.model, self.block_map, where, weights, grads)
        result.keep_(self.blueprint, self.scales)
        return result, where, weights, grads


def draw_kept(key: Key, row: Row) -> Kept:
    """Random blocks, always fewer than N, of another width in every layer and kind."""
    name, attn_by, setting = key
    rng, n_attn = random.Random(f"{name}/{attn_by}"), row.n_attn(attn_by)
    widths = {(1, "attn"): n_attn - 1, (2, "attn"): n_attn // 2, (1, "ffn"): 2, (2, "ffn"): 3}
    n_blocks = {"attn": n_attn, "ffn": N_FFN}
    drawn = {at: tuple(sorted(rng.sample(range(n_blocks[at[1]]), k))) for at, k in widths.items()}
    return {at: blocks for at, blocks in drawn.items() if setting in (at[1], "both")}


def cut_by_hand(row: Row, attn_by: str, kind: str, blocks: tuple[int, ...]) -> Cuts:
    """Partitioned parameters of a layer -> dimension and kept positions, head by head."""
    dim_in, dim_out = (1, 0) if row.transposed else (0, 1)
    dh = row.head_dim
    if kind == "ffn":
        kept = [i for i in range(N_NEURONS) if i // (N_NEURONS // N_FFN) in blocks]
        out, ins = row.ffn_out, dict.fromkeys(row.ffn_ins, kept)
    else:
        heads = [h for h in range(row.n_query) if row.block_of_head(attn_by, h) in blocks]
        kept = [h * dh + d for h in heads for d in range(dh)]
        out, ins = row.attn_out, {row.qkv[0]: kept}
        if len(row.qkv) == 1:  # q, k and v side by side
            ins = {row.qkv[0]: [m * row.n_query * dh + i for m in range(3) for i in kept]}
        elif attn_by != "query":  # kv heads go with their block; by query they are shared
            kv = [h * dh + d for h in blocks for d in range(dh)]
            ins |= {row.qkv[1]: kv, row.qkv[2]: kv}
    cut: Cuts = {f"{out}.weight": (dim_out, kept)}
    for module, positions in ins.items():
        cut |= {f"{module}.weight": (dim_in, positions), f"{module}.bias": (0, positions)}
    return cut


def by_hand(model: PreTrainedModel, row: Row, attn_by: str, kept: Kept) -> PreTrainedModel:
    """The stock model: zero what absent blocks feed to the output projections, then scale these."""
    model = copy.deepcopy(model)
    for (layer, kind), blocks in kept.items():
        n_blocks = row.n_attn(attn_by) if kind == "attn" else N_FFN
        name = row.attn_out if kind == "attn" else row.ffn_out
        weight = model.get_parameter(f"{row.layers}.{layer}.{name}.weight").data
        dim, inputs = cut_by_hand(row, attn_by, kind, blocks)[f"{name}.weight"]
        present = torch.zeros_like(weight).index_fill_(dim, torch.tensor(inputs).long(), 1.0)
        weight *= present * (math.sqrt(n_blocks / len(blocks)) if blocks else 0.0)
    return model


def cut(model: PreTrainedModel, setting="both", attn_by="auto", n_ffn=N_FFN, first=0) -> BlockMap:
    """A model's map with the first layers shared."""
    many = {"n_ffn": n_ffn, "shared_first": first, "shared_last": 0}
    blocks = config.BlocksConfig(setting=setting, attn_by=attn_by, **many)
    return families.partition(model, blocks)


@cache
def case(key: Key) -> Case:
    name, attn_by, setting = key
    row, model, kept = TABLE[name], tiny_model(name), draw_kept(key, TABLE[name])
    block_map = cut(model, setting, attn_by, first=SHARED_FIRST)
    assert {(group.layer, group.kind) for group in block_map.groups} == set(kept)
    blueprint = {group.name: kept[group.layer, group.kind] for group in block_map.groups}
    reference, whole = by_hand(model, row, attn_by, kept), central_of(model, block_map)
    return Case(row, attn_by, model, block_map, kept, blueprint, reference, whole)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Random ids without 0, which stands for padding."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **kwargs: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False, **kwargs).logits


def loss_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Of every next token, by Hugging Face's own logits in float64."""
    found = model(input_ids=ids, use_cache=False).logits[:, :-1].double()
    return F.cross_entropy(found.flatten(0, 1), ids[:, 1:].flatten())


def perplexity(model: PreTrainedModel, stem: Path | str, seq_len: int, n_tokens: int) -> float:
    """By Hugging Face's own logits, over the first windows of a token file of two-byte numbers."""
    text = np.fromfile(f"{stem}.bin", "<u2")[:n_tokens].astype(np.int64)
    ids = torch.from_numpy(text).view(-1, seq_len)
    with torch.no_grad():
        return math.exp(loss_of(model, ids))


@torch.no_grad()
def fed(model: PreTrainedModel, module: str, *batches: Tensor) -> list[Tensor]:
    """What Hugging Face's own forward pass of each batch feeds a module: [tokens, in]."""
    seen: list[Tensor] = []
    hook = model.get_submodule(module).register_forward_pre_hook(
        lambda _, args: seen.append(args[0].flatten(0, -2))
    )
    for ids in batches:
        model(input_ids=ids, use_cache=False)
    hook.remove()
    return seen


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def all_cuts(c: Case) -> Cuts:
    """Every partitioned parameter of the model -> dimension and kept positions."""
    params = dict(c.model.named_parameters())
    return {
        f"{c.row.layers}.{layer}.{name}": where
        for (layer, kind), blocks in c.kept.items()
        for name, where in cut_by_hand(c.row, c.attn_by, kind, blocks).items()
        if f"{c.row.layers}.{layer}.{name}" in params
    }


def sentence(call, *args, **kwargs) -> str:
    with pytest.raises(ValueError, match=r"\w+ \w+ \w+") as caught:
        call(*args, **kwargs)
    return str(caught.value)


def open_parent(
    name: str, attn_by: str, folder: Path, *words: str, without: int = -1, **config: Any
) -> tuple[Parent, Blueprint]:
    """A parent on disk, opened as a user would, and the blueprint of an uneven ticket.

    The ticket has no layer of number `without`.
    """
    row = TABLE[name]
    build(row.type, row.config | config).save_pretrained(folder)
    own = (f"blocks.attn_by={attn_by}", f"blocks.n_ffn={CUT_FFN}")
    opened = parent.open_parent(folder, "cpu", [*CUT, *own, *words])
    kept, groups = {"attn": KEPT_ATTN, "ffn": KEPT_FFN}, opened.block_map.groups
    return opened, {g.name: kept[g.kind][g.layer] if g.layer != without else () for g in groups}


def save_random(parent: Parent, folder: Path, k: int, seed: int = 0) -> None:
    """A ticket of k random blocks of every group, in its folder."""
    widths = dict.fromkeys(parent.block_map.full_widths(), k)
    blueprint = generator.for_deployment(parent.block_map, widths, seed=seed)
    deploy.save_ticket(parent, blueprint, folder)


def tiny_ticket(name: str, attn_by: str, folder: Path, **config: Any) -> PreTrainedModel:
    """The ticket as it is loaded from its own folder in `folder`; `config` as in `open_parent`."""
    deploy.save_ticket(*open_parent(name, attn_by, folder, **config), folder / "ticket")
    return deploy.load_ticket(folder / "ticket")


def stock_ticket(key: Key, folder: Path) -> PreTrainedModel:
    """A ticket that stock transformers loads, in its folder; returns the same made by hand."""
    name, attn_by, setting = key
    own = (f"blocks.attn_by={attn_by}", f"blocks.setting={setting}")
    opened = parent.open_parent(tiny_model(name), "cpu", [*CUT, *own])
    kept = {"attn": (0, 2), "ffn": (0, 1, 3)}
    groups = opened.block_map.groups
    deploy.save_ticket(opened, {g.name: kept[g.kind] for g in groups}, folder)
    by_place = {(g.layer, g.kind): kept[g.kind] for g in groups}
    return by_hand(tiny_model(name), TABLE[name], attn_by, by_place)
