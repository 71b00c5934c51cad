"""Block scores against loops by hand and gradients of the stock model, for every family."""

import copy
from functools import cache

import pytest
import torch
from families_table import (
    TABLE,
    as_parent,
    central_of,
    cut,
    cut_by_hand,
    loss_of,
    tiny_model,
    tokens,
    ways,
)
from torch import Tensor

from twistlm.compute.slopes import mask_slopes, order_of, sort_neurons_
from twistlm.model import huggingface
from twistlm.tickets import importance
from twistlm.tickets.parent import Parent

IDS = tokens(3, 7, seed=5)
every_way = pytest.mark.parametrize("key", list(ways()), ids="/".join)


@cache
def parent64(name: str, attn_by: str) -> Parent:
    """A parent in float64 that cuts all layers."""
    model = tiny_model(name).double()
    block_map = cut(model, "both", attn_by)
    return as_parent(model, block_map, central_of(model, block_map), "sqrt")


def score(parent: Parent, method: str, ids: Tensor | None = IDS, seed: int = 0):
    return importance.score(parent, method, ids, seed)


def block_rows(parent: Parent, name: str, attn_by: str):
    """(group, block, {parameter: (dim, positions)}) over the whole model, counted head by head."""
    params = dict(parent.template.named_parameters())
    for group in parent.block_map.groups:
        prefix = f"{TABLE[name].layers}.{group.layer}"
        for block in range(group.n_blocks):
            cuts = cut_by_hand(TABLE[name], attn_by, group.kind, (block,))
            rows = {f"{prefix}.{n}": w for n, w in cuts.items() if f"{prefix}.{n}" in params}
            yield group, block, rows


@every_way
def test_fisher_is_the_mean_of_squared_example_gradients(key):
    """Magnitude is the norm of the same weights."""
    parent = parent64(*key)
    model = copy.deepcopy(parent.template)
    params = dict(model.named_parameters())
    want = {g.name: torch.zeros(g.n_blocks, dtype=torch.float64) for g in parent.block_map.groups}
    sizes = copy.deepcopy(want)
    for example in IDS:
        model.zero_grad()
        loss_of(model, example[None]).backward()
        for group, block, rows in block_rows(parent, *key):
            for name, (dim, at) in rows.items():
                pick = torch.tensor(at)
                squares = params[name].grad.index_select(dim, pick).square()
                want[group.name][block] += squares.sum() / len(IDS)
                squares = params[name].detach().index_select(dim, pick).square()
                sizes[group.name][block] += squares.sum() / len(IDS)
    torch.testing.assert_close(score(parent, "fisher"), want, rtol=1e-9, atol=0)
    sizes = {name: values.sqrt() for name, values in sizes.items()}
    torch.testing.assert_close(score(parent, "magnitude", None), sizes, rtol=1e-9, atol=0)


@every_way
def test_mask_slopes_are_the_gradients_of_gates_by_hand(key):
    """Hooks multiply what the stock model's output projections are fed by ones, token by token."""
    parent = parent64(*key)
    row, model, groups = TABLE[key[0]], copy.deepcopy(parent.template), parent.block_map.groups
    outs = {"attn": row.attn_out, "ffn": row.ffn_out}
    outs = {group.name: f"{row.layers}.{group.layer}.{outs[group.kind]}" for group in groups}
    gates: dict[str, Tensor] = {}
    for name, out in outs.items():
        module = model.get_submodule(out)
        n_inputs = module.weight.shape[0 if row.transposed else 1]
        gate = torch.ones(IDS.shape[1], n_inputs, dtype=torch.float64, requires_grad=True)
        module.register_forward_pre_hook(lambda _, args, gate=gate: (args[0] * gate,))
        gates[name] = gate
    slopes = list(mask_slopes(parent.template, parent.block_map, parent.central, IDS))
    for example, slope in zip(IDS, slopes, strict=True):
        grads = torch.autograd.grad(loss_of(model, example[None]), list(gates.values()))
        grads = dict(zip(gates, grads, strict=True))
        for group, block, rows in block_rows(parent, *key):
            want = grads[group.name][:, rows[f"{outs[group.name]}.weight"][1]].sum(1)
            got = slope[group.name][:, block]
            torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-12)
    all_of = {name: torch.stack([slope[name] for slope in slopes]) for name in outs}
    fisher = {name: each.sum(1).square().mean(0) for name, each in all_of.items()}
    taylor = {name: each.abs().mean((0, 1)) for name, each in all_of.items()}
    torch.testing.assert_close(score(parent, "mask-fisher"), fisher)
    torch.testing.assert_close(score(parent, "taylor"), taylor)


def test_ties_are_broken_by_order():
    tied = {"many": torch.arange(100).remainder(2).double()}  # an unstable sort would mix these
    assert order_of(tied) == {"many": (*range(1, 100, 2), *range(0, 100, 2))}


@pytest.mark.parametrize("name", TABLE)
def test_sorted_neurons_compute_the_same_and_fall_in_importance(name):
    """What each neuron adds is counted by hooks of the stock model, token by token."""
    model, row = tiny_model(name).double(), TABLE[name]
    block_map = cut(model, "ffn")
    central = central_of(model, block_map)
    logits = model(input_ids=IDS).logits.detach()
    order = sort_neurons_(model, block_map, central, IDS)
    assert order == {group.name: tuple(range(group.n_blocks)) for group in block_map.groups}
    assert not torch.equal(central.weights, central_of(model, block_map).weights)
    huggingface.bind_(model, central.layout.views(central.weights))
    torch.testing.assert_close(model(input_ids=IDS).logits, logits, rtol=1e-9, atol=1e-9)
    for group in block_map.groups:
        module = model.get_submodule(f"{row.layers}.{group.layer}.{row.ffn_out}")
        n_inputs = module.weight.shape[0 if row.transposed else 1]
        gate = torch.ones(IDS.shape[1], n_inputs, dtype=torch.float64, requires_grad=True)
        hook = module.register_forward_pre_hook(lambda _, args, gate=gate: (args[0] * gate,))
        slopes = [torch.autograd.grad(loss_of(model, each[None]), gate)[0] for each in IDS]
        hook.remove()
        importance_of = torch.cat(slopes).square().sum(0)
        at_least = importance_of[1:] * (1 - 1e-6)  # another order of sums rounds otherwise
        assert (importance_of[:-1] >= at_least).all()
