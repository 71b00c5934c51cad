"""Every family: a subnet, cut or masked, is Hugging Face's own model with blocks taken out.

The reference is the stock model with zeros and the scale written into its output projections by
loops over heads and neurons. It knows nothing of block maps, gates or flat buffers.
"""

import copy

import pytest
import torch
from families_table import (
    ALONE,
    BOTH,
    N_LAYERS,
    SHARED_FIRST,
    TABLE,
    VOCAB,
    Kept,
    Row,
    all_cuts,
    as_parent,
    build,
    by_hand,
    case,
    central_of,
    cut,
    far,
    logits,
    loss_of,
    sentence,
    tiny_model,
    tokens,
)
from torch import nn

from twistlm.compute.loss import next_token_loss
from twistlm.tickets import deploy

every_case = pytest.mark.parametrize("key", BOTH + ALONE, ids="/".join)


@every_case
def test_masked_cut_and_extracted_are_the_stock_model_with_blocks_zeroed(key):
    c, ids = case(key), tokens(2, 12)
    want, whole = logits(c.reference, ids), logits(c.model, ids)
    assert far(whole, want) > 1e-2  # the full model is something else
    full = c.masked()
    for model in (c.physical()[0].model, full.model, c.ticket()):
        assert far(logits(model, ids), want) < 1e-5
        for module in model.modules():  # exporters and FLOP counters read these, not the weights
            if isinstance(module, nn.Linear):
                assert module.weight.shape == (module.out_features, module.in_features)
            elif hasattr(module, "nx"):
                assert module.weight.shape == (module.nx, module.nf)
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        assert (ends[0].weight is ends[1].weight) == c.model.config.tie_word_embeddings
    # one sequence of a batch behind the mask, the other whole: neither sees the other's
    masks = [gate.values for gate in full.gates.values()]  # [1, 1, blocks]
    rows = [torch.cat([mask, torch.ones_like(mask)]) for mask in masks]
    torch._foreach_copy_(full.gate_tensors(2), rows)
    mixed = torch.cat([logits(c.reference, ids[:1]), logits(c.model, ids[1:])])
    assert far(logits(full.model, ids), mixed) < 1e-5
    # each mask counts: transformers 5 swallows an unknown head_mask without a word
    full = c.masked()
    for group in c.block_map.groups:
        full.keep_(c.block_map.full() | {group.name: c.blueprint[group.name]})
        assert far(logits(full.model, ids), whole) > 1e-3, group.name
    full.keep_(c.block_map.full())
    assert far(logits(full.model, ids), whole) == 0.0
    # all workers are built from one template: one that shrinks would spoil the next
    assert torch.equal(logits(tiny_model(key[0]), ids), whole)
    assert str(c.model) == str(tiny_model(key[0]))


@every_case
def test_the_map_names_the_parameters_that_belong_to_blocks_and_the_cut_takes_their_slices(key):
    """Logits do not see two heads that swap places; the aggregator would mix them up."""
    c = case(key)
    cuts = all_cuts(c)
    assert set(c.block_map.partitioned()) == set(cuts)
    _, where, weights, _ = c.physical()
    views, full = where.views(weights), dict(c.model.named_parameters())
    for name, param in full.items():
        want = param
        if name in cuts:
            dim, positions = cuts[name]
            want = param.index_select(dim, torch.tensor(positions))
        assert torch.equal(views[name], want), name
    for group in c.block_map.groups:
        out = c.row.attn_out if group.kind == "attn" else c.row.ffn_out
        names = [f"{c.row.layers}.{group.layer}.{out}.{leaf}" for leaf in ("weight", "bias")]
        assert list(group.out) == [name for name in names if name in full]


@pytest.mark.parametrize("key", BOTH, ids="/".join)
def test_gradients_of_physical_masked_and_stock_model_agree(key):
    c, ids = case(key), tokens(2, 12)
    cuts = all_cuts(c)

    narrow, where, _, narrow_grads = c.physical()
    next_token_loss(narrow.model, ids).backward()
    physical = where.views(narrow_grads)

    full_grads = torch.zeros_like(c.central.weights)
    next_token_loss(c.masked(full_grads).model, ids).backward()
    masked = c.central.layout.views(full_grads)

    stock = copy.deepcopy(c.reference)
    loss_of(stock, ids).backward()
    # the stock model's output projections are scale x ours: the chain rule gives the factor
    factors = {group.out[0]: c.scales[group.name] for group in c.block_map.groups}
    largest = float(full_grads.abs().max())
    assert largest > 1e-2
    for name, param in stock.named_parameters():
        # a key bias moves no softmax: its gradient is 0 but for rounding, hence the floor
        close = 1e-5 * max(float(masked[name].abs().max()), 0.1 * largest)
        dim, kept = cuts.get(name, (0, range(len(param))))
        here = torch.tensor(kept)
        want = (param.grad * factors.get(name, 1.0)).index_select(dim, here)
        assert far(physical[name], want) < close, name
        assert far(masked[name].index_select(dim, here), want) < close, name
        assert not masked[name].index_fill(dim, here, 0.0).any(), name  # absent: exactly zero


def test_auto_is_heads_or_kv_groups_or_queries():
    """Heads where each has its own keys, kv groups where they share, queries for one kv head."""
    wanted = {"gpt2": "head", "llama": "head", "llama-gqa": "group", "llama-mqa": "query"}
    for name, want in wanted.items():
        model = tiny_model(name)
        assert cut(model) == cut(model, "both", want), name


def norm_over_heads():
    """The shapes tell on such a norm, should a family publish a plan that hides it."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.q_norm = nn.LayerNorm(32)
    return model


def bloom():
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": N_LAYERS, "n_head": 4}
    return build("bloom", sizes)


FFN = "blocks.setting = 'ffn'"
REFUSED = [  # a model, arguments, and what is said
    # its q and k norms run over all heads at once, so heads are not independent
    (lambda: build("olmo2", TABLE["llama"].config), ("both",), ["olmo2", "attn", "q_", FFN]),
    (norm_over_heads, ("attn",), ["q_norm", "more than one head", FFN]),
    (bloom, ("both",), ["'bloom'", "gpt2", "opt"]),
    (
        lambda: tiny_model("llama-gqa"),
        ("both", "head"),
        ["blocks.attn_by = 'head'", "'group' (3 blocks)", "'query' (3 blocks)"],
    ),
    (lambda: tiny_model("gpt2"), ("both", "query"), ["fused"]),
]


def test_refused_with_what_to_do():
    for model, arguments, parts in REFUSED:
        text = sentence(cut, model(), *arguments)
        assert all(part in text for part in parts), text


NEOX = {"ffn_ins": ("mlp.dense_h_to_4h",), "ffn_out": "mlp.dense_4h_to_h"}


def test_a_family_whose_attention_is_refused_still_serves_ffn():
    row = Row("gpt_neox", TABLE["llama"].config, layers="gpt_neox.layers", **NEOX)
    model = build(row.type, row.config)
    assert "ffn" in sentence(cut, model, "both")
    block_map = cut(model, "ffn", first=SHARED_FIRST)
    kept: Kept = {(1, "ffn"): (0, 3), (2, "ffn"): (1,)}
    blueprint = {group.name: kept[group.layer, "ffn"] for group in block_map.groups}
    reference, ids = by_hand(model, row, "head", kept), tokens(2, 12)
    parent = as_parent(model, block_map, central_of(model, block_map), "sqrt")
    ticket = deploy.cut_ticket(parent, blueprint)
    assert far(logits(ticket, ids), logits(reference, ids)) < 1e-5
    assert far(logits(ticket, ids), logits(model, ids)) > 1e-2
