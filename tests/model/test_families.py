"""Every family: a subnet, cut or masked, is Hugging Face's own model with blocks taken out.

The reference is the stock model with zeros and the scale written into its output projections by
loops over heads and neurons. It knows nothing of block maps, gates or flat buffers.
"""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from families_table import (
    ALONE,
    BOTH,
    CPU,
    N_FFN,
    N_LAYERS,
    N_NEURONS,
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
    cut_by_hand,
    far,
    logits,
    sentence,
    tiny_model,
    tokens,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

from twistlm import config
from twistlm.compute.loss import next_token_loss
from twistlm.model import central, families, huggingface, subnet
from twistlm.tickets import deploy

every_case = pytest.mark.parametrize("key", BOTH + ALONE, ids="/".join)
every_row = pytest.mark.parametrize("key", BOTH, ids="/".join)


@every_case
def test_physical_and_masked_logits_are_those_of_the_stock_model_with_blocks_zeroed(key):
    c, ids = case(key), tokens(2, 12)
    want = logits(c.reference, ids)
    assert far(logits(c.physical()[0].model, ids), want) < 1e-5
    assert far(logits(c.masked().model, ids), want) < 1e-5
    assert far(logits(c.ticket(), ids), want) < 1e-5
    assert far(logits(c.model, ids), want) > 1e-2  # the full model is something else


@every_case
def test_a_mask_for_every_sequence(key):
    """One sequence of a batch behind the mask, the other whole: neither sees the other's."""
    c, ids = case(key), tokens(2, 12)
    full = c.masked()
    masks = [gate.values for gate in full.gates.values()]  # [1, 1, blocks]
    rows = [torch.cat([mask, torch.ones_like(mask)]) for mask in masks]
    torch._foreach_copy_(full.gate_tensors(2), rows)
    want = torch.cat([logits(c.reference, ids[:1]), logits(c.model, ids[1:])])
    assert far(logits(full.model, ids), want) < 1e-5


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


def test_biases_are_where_the_table_wants_them():
    """The bias of every kind of projection is tried by some row, or a wrong cut would go unseen."""

    def has_bias(name: str, module: str) -> bool:
        return f"{TABLE[name].layers}.1.{module}.bias" in dict(tiny_model(name).named_parameters())

    for name in ("gpt2", "opt", "phi", "phi-qk-norm", "llama-biases"):
        row = TABLE[name]
        assert all(
            has_bias(name, m) for m in (*row.qkv, row.attn_out, *row.ffn_ins, row.ffn_out)
        ), name
    assert all(has_bias("qwen2", module) for module in TABLE["qwen2"].qkv)
    assert not has_bias("qwen2", TABLE["qwen2"].attn_out)
    for name in TABLE:
        for param in tiny_model(name).parameters():
            assert float(param.detach().std()) > 0.05


@every_case
def test_gradients_of_physical_masked_and_stock_model_agree(key):
    c, ids = case(key), tokens(2, 12)
    cuts, shapes = all_cuts(c), huggingface.shapes(c.model)

    narrow, where, _, narrow_grads = c.physical()
    next_token_loss(narrow.model, ids).backward()
    physical = where.views(narrow_grads)

    full_grads = torch.zeros_like(c.central.weights)
    next_token_loss(c.masked(full_grads).model, ids).backward()
    masked = c.central.layout.views(full_grads)

    stock = copy.deepcopy(c.reference)
    out = stock(input_ids=ids, use_cache=False).logits[:, :-1]
    F.cross_entropy(out.reshape(-1, VOCAB), ids[:, 1:].reshape(-1)).backward()
    # the stock model's output projections are scale x ours: the chain rule gives the factor
    factors = {}
    for (layer, kind), blocks in c.kept.items():
        name = c.row.attn_out if kind == "attn" else c.row.ffn_out
        weight = f"{c.row.layers}.{layer}.{name}.weight"
        factors[weight] = math.sqrt(c.n_blocks(kind) / len(blocks))

    largest = float(full_grads.abs().max())
    assert largest > 1e-2
    for name, param in stock.named_parameters():
        # a key bias moves no softmax: its gradient is 0 but for rounding, hence the floor
        close = 1e-5 * max(float(masked[name].abs().max()), 0.1 * largest)
        want = param.grad * factors.get(name, 1.0)
        if name not in cuts:
            assert physical[name].shape == shapes[name]
            assert far(physical[name], masked[name]) < close, name
            assert far(masked[name], want) < close, name
            continue
        dim, positions = cuts[name]
        here = torch.tensor(positions)
        absent = torch.tensor([i for i in range(shapes[name][dim]) if i not in positions])
        kept_grad = masked[name].index_select(dim, here)
        assert far(physical[name], kept_grad) < close, name
        assert far(kept_grad, want.index_select(dim, here)) < close, name
        assert not masked[name].index_select(dim, absent).any(), name  # exactly zero
        if not name.endswith(("k_proj.bias", "c_attn.bias")):
            assert float(kept_grad.abs().max()) > 0, name


@every_case
def test_each_mask_alone_changes_the_logits(key):
    """transformers 5 swallows an unknown head_mask without a word; ours must not be ignored."""
    c, ids = case(key), tokens(2, 12)
    full = subnet.build(c.model, c.block_map, c.central.layout, c.central.weights, gates="all")
    whole = logits(full.model, ids)
    assert far(whole, logits(c.model, ids)) == 0.0  # no mask, no scale: the model itself
    for group in c.block_map.groups:
        full.keep_(c.block_map.full() | {group.name: c.blueprint[group.name]})
        assert far(logits(full.model, ids), whole) > 1e-3, group.name
    full.keep_(c.block_map.full())
    assert far(logits(full.model, ids), whole) == 0.0


@every_case
def test_a_ticket_generates_what_the_stock_model_generates(key):
    c, prompt = case(key), tokens(2, 6, seed=3)

    def greedy(model: PreTrainedModel, use_cache: bool) -> tuple[Tensor, Tensor]:
        # 6 + 12 tokens run past the sliding windows of mistral and gemma3
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            use_cache=use_cache,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        assert made.sequences.shape == (2, 18)
        return made.sequences, torch.stack(made.logits)

    ticket, (want, steps) = c.ticket(), greedy(c.reference, use_cache=True)
    for use_cache in (True, False):
        got, logits_of_steps = greedy(ticket, use_cache)
        assert torch.equal(got, want)
        assert far(logits_of_steps, steps) < 1e-5  # tokens alone are coarse
    assert far(greedy(c.model, use_cache=True)[1], steps) > 1e-2  # not the full model's


@every_case
def test_left_padded_batches(key):
    c, ticket = case(key), case(key).ticket()
    lengths, size = (10, 7, 4), 10
    ids, mask = torch.zeros(3, size, dtype=torch.int64), torch.zeros(3, size, dtype=torch.int64)
    rows = [tokens(1, n, seed=n) for n in lengths]
    for i, row in enumerate(rows):
        ids[i, size - row.shape[1] :], mask[i, size - row.shape[1] :] = row[0], 1
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    got = logits(ticket, ids, attention_mask=mask, position_ids=places)
    want = logits(c.reference, ids, attention_mask=mask, position_ids=places)
    real = mask.bool()
    assert far(got[real], want[real]) < 1e-5
    for i, row in enumerate(rows):  # and padding changes nothing at all
        assert far(got[i, size - row.shape[1] :], logits(ticket, row)[0]) < 1e-5


@every_case
def test_ticket_round_trip(key, tmp_path):
    c, ids = case(key), tokens(2, 12)
    ticket = c.ticket()
    deploy.save_ticket(c.parent(), c.blueprint, tmp_path / "ticket")
    loaded = deploy.load_ticket(tmp_path / "ticket")
    assert torch.equal(logits(loaded, ids), logits(ticket, ids))
    assert huggingface.shapes(loaded) == huggingface.shapes(ticket)
    assert isinstance(loaded, type(c.model))
    note = json.loads((tmp_path / "ticket/ticket.json").read_text())
    assert {name: tuple(kept) for name, kept in note["blueprint"].items()} == c.blueprint
    assert note["n_params"] == sum(param.numel() for param in ticket.parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["ticket"]  # no draft is left behind


@every_case
def test_narrowed_modules_report_their_sizes(key, tmp_path):
    """Printing, exporting and counting FLOPs read these, not the weights."""
    c = case(key)
    deploy.save_ticket(c.parent(), c.blueprint, tmp_path / "ticket")
    for model in (c.ticket(), deploy.load_ticket(tmp_path / "ticket"), c.physical()[0].model):
        for (layer, kind), blocks in c.kept.items():
            cut = cut_by_hand(c.row, c.attn_by, kind, blocks)
            out = c.row.attn_out if kind == "attn" else c.row.ffn_out
            for name in (*(c.row.qkv if kind == "attn" else c.row.ffn_ins), out):
                module = model.get_submodule(f"{c.row.layers}.{layer}.{name}")
                before = c.model.get_submodule(f"{c.row.layers}.{layer}.{name}").weight.shape
                n_in, n_out = before if c.row.transposed else reversed(before)
                if name == out:
                    n_in = len(cut[f"{name}.weight"][1])
                elif f"{name}.weight" in cut:
                    n_out = len(cut[f"{name}.weight"][1])
                if c.row.transposed:
                    assert (module.nx, module.nf) == (n_in, n_out)
                else:
                    assert isinstance(module, nn.Linear)
                    assert (module.in_features, module.out_features) == (n_in, n_out)
    # layers in front of the partitioned ones keep their sizes
    for name in (c.row.attn_out, c.row.ffn_out):
        path = f"{c.row.layers}.{SHARED_FIRST - 1}.{name}.weight"
        assert c.ticket().get_parameter(path).shape == c.model.get_parameter(path).shape


@every_row
def test_building_subnets_leaves_the_template_alone(key):
    """All seats are built from one template: one that shrinks would spoil the next."""
    model, ids = tiny_model(key[0]), tokens(2, 12)
    before, sizes = logits(model, ids), str(model)
    c = case(key)
    whole = central.create(
        huggingface.state(model),
        huggingface.shapes(model),
        c.block_map,
        carry=True,
        outer=True,
        device=CPU,
    )
    deploy.cut_ticket(as_parent(model, c.block_map, whole, "sqrt"), c.blueprint)
    subnet.build(model, c.block_map, whole.layout, whole.weights, gates="all").keep_(c.blueprint)
    assert torch.equal(logits(model, ids), before)
    assert str(model) == sizes
    assert all(param.requires_grad for param in model.parameters())


@pytest.mark.parametrize("key", [BOTH[0], ("llama-gqa", "query", "both")], ids="/".join)
def test_a_subnet_lives_in_its_buffer(key):
    """The optimizer writes to the buffer and never to the model: they must be one storage."""
    c, ids = case(key), tokens(2, 12)
    narrow, where, weights, grads = c.physical()
    start, end = weights.data_ptr(), weights.data_ptr() + weights.numel() * weights.element_size()
    assert all(start <= p.data_ptr() < end for p in narrow.model.parameters())
    assert sum(p.numel() for p in narrow.model.parameters()) == where.n_params == weights.numel()
    before = logits(narrow.model, ids)
    weights.mul_(0.5)
    assert far(logits(narrow.model, ids), before) > 1e-3
    weights.mul_(2.0)
    assert torch.equal(logits(narrow.model, ids), before)
    next_token_loss(narrow.model, ids).backward()
    once = grads.clone()
    assert float(once.abs().max()) > 1e-3
    next_token_loss(narrow.model, ids).backward()
    assert torch.allclose(grads, 2 * once)  # gradients add up in the buffer until it is zeroed


@pytest.mark.parametrize("name", ["gpt2", "opt", "gemma3_text", "smollm3"])
def test_a_tied_embedding_is_one_parameter(name, tmp_path):
    key = (name, TABLE[name].ways[0], "both")
    c = case(key)
    names = [n for n, p in c.model.named_parameters() if p.shape[0] == VOCAB]
    assert len(names) == 1
    assert sum(n == names[0] for n in c.central.layout.shapes) == 1
    deploy.save_ticket(c.parent(), c.blueprint, tmp_path / "ticket")
    for model in (c.ticket(), c.physical()[0].model, deploy.load_ticket(tmp_path / "ticket")):
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@every_row
def test_partition_is_what_the_config_says(key):
    """The one call that `twistlm train` makes gives the map that these tests put together."""
    name, attn_by, setting = key
    blocks = config.BlocksConfig(
        setting=setting, attn_by=attn_by, n_ffn=N_FFN, shared_first=SHARED_FIRST, shared_last=0
    )
    assert families.partition(tiny_model(name), blocks) == case(key).block_map


def test_attn_by_auto():
    """Heads where each has its own keys, kv groups where they share, queries for one kv head."""
    wanted = {"gpt2": "head", "llama": "head", "llama-gqa": "group", "llama-mqa": "query"}
    for name, want in wanted.items():
        model = tiny_model(name)
        assert families.block_map(model) == families.block_map(model, "both", want), name


def olmo2() -> PreTrainedModel:
    return build("olmo2", TABLE["llama"].config)


def test_olmo2_attention_is_refused():
    """Its q and k norms run over all heads at once, so heads are not independent."""
    for setting in ("attn", "both"):
        text = sentence(families.block_map, olmo2(), setting)
        assert "olmo2" in text
        assert "attn" in text
        assert "q_proj" in text or "q_norm" in text
        assert "independent" in text or "more than one head" in text
        assert "blocks.setting = 'ffn'" in text


def test_a_norm_over_heads_is_refused_even_where_the_plan_says_nothing():
    """The shapes tell on such a norm, should a family publish a plan that hides it."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.q_norm = nn.LayerNorm(32)
    text = sentence(families.block_map, model, "attn")
    assert "q_norm" in text
    assert "more than one head" in text
    assert "blocks.setting = 'ffn'" in text
    assert families.block_map(model, "ffn").n_blocks("ffn") == N_NEURONS


@pytest.mark.parametrize(
    ("model_type", "layers", "ins", "out"),
    [
        ("olmo2", "model.layers", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
        ("gpt_neox", "gpt_neox.layers", ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"),
    ],
)
def test_a_family_whose_attention_is_refused_still_serves_ffn(
    model_type, layers, ins, out, tmp_path
):
    row = Row(model_type, TABLE["llama"].config, layers=layers, ffn_ins=ins, ffn_out=out)
    model = build(row.type, row.config)
    assert "ffn" in sentence(families.block_map, model, "both")
    block_map = families.block_map(model, "ffn").select("ffn", SHARED_FIRST).coarsen("ffn", N_FFN)
    kept: Kept = {(1, "ffn"): (0, 3), (2, "ffn"): (1,)}
    blueprint = {group.name: kept[group.layer, "ffn"] for group in block_map.groups}
    reference, ids = by_hand(model, row, "head", kept), tokens(2, 12)
    state = huggingface.state(model)
    whole = central.create(
        state, huggingface.shapes(model), block_map, carry=False, outer=False, device=CPU
    )
    full = as_parent(model, block_map, whole, "sqrt")
    ticket = deploy.cut_ticket(full, blueprint)
    assert far(logits(ticket, ids), logits(reference, ids)) < 1e-5
    assert far(logits(ticket, ids), logits(model, ids)) > 1e-2
    deploy.save_ticket(full, blueprint, tmp_path / "ticket")
    assert torch.equal(logits(deploy.load_ticket(tmp_path / "ticket"), ids), logits(ticket, ids))


def test_an_unknown_family_is_refused():
    bloom = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": N_LAYERS, "n_head": 4}
    for setting in ("attn", "ffn", "both"):
        text = sentence(families.block_map, build("bloom", bloom), setting)
        assert "'bloom'" in text
        assert "gpt2" in text
        assert "opt" in text


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.n_kv < row.n_query])
def test_heads_that_share_keys_are_no_blocks(name):
    row = TABLE[name]
    text = sentence(families.block_map, tiny_model(name), "both", "head")
    assert "blocks.attn_by = 'head'" in text
    assert f"'group' ({row.n_kv} blocks)" in text
    assert f"'query' ({row.n_query // row.n_kv} blocks)" in text


def test_attn_by_is_one_of_four():
    text = sentence(families.block_map, tiny_model("gpt2"), "both", "heads")
    assert all(way in text for way in ("'heads'", "auto", "head", "group", "query"))
    assert "fused" in sentence(families.block_map, tiny_model("gpt2"), "both", "query")


def test_extract_refuses_a_blueprint_of_another_model():
    c, other = case(BOTH[0]), case(("llama", "head", "both"))
    text = sentence(deploy.cut_ticket, c.parent(), other.blueprint)
    assert "does not fit" in text


def test_load_ticket_refuses_another_folder(tmp_path):
    assert "ticket.json" in sentence(deploy.load_ticket, tmp_path)
