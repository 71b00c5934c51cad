"""Block scores against loops by hand, closed forms and finite differences, for every family."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from families_table import CPU, N_FFN, TABLE, as_parent, case, cut_by_hand, tiny_model, tokens, ways
from torch import Tensor

from twistlm.compute.slopes import mask_slopes, order_of
from twistlm.model import central, families, huggingface
from twistlm.tickets import importance
from twistlm.tickets.parent import Parent

IDS = tokens(3, 7, seed=5)
every_way = pytest.mark.parametrize("key", list(ways()), ids="/".join)


@cache
def parent64(name: str, attn_by: str) -> Parent:
    """A parent in float64 that cuts all layers."""
    model = tiny_model(name).double()
    block_map = families.block_map(model, "both", attn_by).coarsen("ffn", N_FFN)
    whole = central.create(
        huggingface.state(model),
        huggingface.shapes(model),
        block_map,
        carry=False,
        outer=False,
        device=CPU,
    )
    return as_parent(model, block_map, whole, "sqrt")


def score(parent: Parent, method: str, ids: Tensor | None = IDS, seed: int = 0):
    return importance.score(parent, method, ids, seed)


def loss_of(model, ids: Tensor) -> Tensor:
    """By the definition, with no help from the package."""
    logp = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    picked = [logp[i, t, ids[i, t + 1]] for i in range(len(ids)) for t in range(ids.shape[1] - 1)]
    return -sum(picked) / len(picked)


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
    parent = parent64(*key)
    model = copy.deepcopy(parent.template)
    want = {g.name: torch.zeros(g.n_blocks, dtype=torch.float64) for g in parent.block_map.groups}
    for example in IDS:
        model.zero_grad()
        loss_of(model, example[None]).backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        for group, block, rows in block_rows(parent, *key):
            assert rows
            for name, (dim, at) in rows.items():
                squares = grads[name].index_select(dim, torch.tensor(at)).square()
                want[group.name][block] += squares.sum() / len(IDS)
    got = score(parent, "fisher")
    assert list(got) == list(want)
    for name in want:
        assert want[name].min() > 0
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=0)
    batched = score(parent, "fisher", IDS[:1].repeat(3, 1))  # equal examples: the mean is one
    torch.testing.assert_close(batched, score(parent, "fisher", IDS[:1]), rtol=1e-9, atol=0)


@every_way
def test_mask_gradient_is_the_output_rows_times_their_gradient(key):
    """dl/dm_b = <C_b, dl/dC_b>, C_b found by hand in the stock model."""
    parent = parent64(*key)
    row, model = TABLE[key[0]], copy.deepcopy(parent.template)
    slopes = list(mask_slopes(parent.template, parent.block_map, parent.central, IDS))
    for example, slope in zip(IDS, slopes, strict=True):
        model.zero_grad()
        loss_of(model, example[None]).backward()
        params = dict(model.named_parameters())
        for group, block, rows in block_rows(parent, *key):
            out = row.attn_out if group.kind == "attn" else row.ffn_out
            name = f"{row.layers}.{group.layer}.{out}.weight"
            dim, at = rows[name]
            pick = torch.tensor(at)
            product = params[name] * params[name].grad
            want = product.index_select(dim, pick).sum().detach()
            got = slope[group.name].sum(0)[block]
            torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-12)
    fisher, taylor = score(parent, "mask-fisher"), score(parent, "taylor")
    for group in parent.block_map.groups:
        for block in range(group.n_blocks):
            mine = [slope[group.name][:, block].tolist() for slope in slopes]
            squares = [sum(per_token) ** 2 for per_token in mine]
            sizes = [abs(x) for per_token in mine for x in per_token]
            assert float(fisher[group.name][block]) == pytest.approx(sum(squares) / len(squares))
            assert float(taylor[group.name][block]) == pytest.approx(sum(sizes) / len(sizes))


@pytest.mark.parametrize("key", list(ways("gpt2", "llama-gqa")), ids="/".join)
def test_finite_differences_in_the_mask(key):
    """A hook scales one block's inputs of the output projection by 1 +- h, at one token or all."""
    parent = parent64(*key)
    # RMS norms round to float32 inside: there the step must be large enough to be seen
    h, tolerance = (1e-5, 1e-5) if key[0] == "gpt2" else (1e-2, 1e-2)
    row, model, ids = TABLE[key[0]], copy.deepcopy(parent.template), IDS[:1]
    (slope,) = mask_slopes(parent.template, parent.block_map, parent.central, ids)
    for group, block, rows in block_rows(parent, *key):
        if group.layer != 1:
            continue
        out = f"{row.layers}.1.{row.attn_out if group.kind == 'attn' else row.ffn_out}"
        at = torch.tensor(rows[f"{out}.weight"][1])
        for token in (None, 2):

            def loss(m: float, at=at, token=token, out=out) -> float:
                def scale(module, args):
                    x = args[0].clone()
                    flat = x.view(-1, x.shape[-1])  # batch 1: one row per token
                    rows = torch.arange(len(flat)) if token is None else torch.tensor([token])
                    flat[rows[:, None], at] *= m
                    return (x,)

                handle = model.get_submodule(out).register_forward_pre_hook(scale)
                with torch.no_grad():
                    value = float(loss_of(model, ids))
                handle.remove()
                return value

            want = (loss(1 + h) - loss(1 - h)) / (2 * h)
            values = slope[group.name][:, block]
            got = float(values.sum() if token is None else values[token])
            assert got == pytest.approx(want, rel=tolerance, abs=1e-4 * tolerance)


@every_way
def test_magnitude_is_the_norm_of_the_weights(key):
    parent = parent64(*key)
    params = dict(parent.template.named_parameters())
    got = score(parent, "magnitude", None)
    for group, block, rows in block_rows(parent, *key):
        pieces = [
            params[name].detach().index_select(dim, torch.tensor(at)).flatten()
            for name, (dim, at) in rows.items()
        ]
        assert float(got[group.name][block]) == pytest.approx(float(torch.cat(pieces).norm()))


@pytest.mark.parametrize("method", importance.METHODS)
def test_a_score_leaves_the_parent_alone(method):
    """One contract over the table: names, shapes, finite numbers, same again, weights untouched."""
    parent = case(("llama-gqa", "group", "both")).parent()
    before, ticks = parent.central.weights.clone(), []
    scores = importance.score(parent, method, IDS, 3, lambda: ticks.append(1))
    assert list(scores) == [group.name for group in parent.block_map.groups]
    for group in parent.block_map.groups:
        assert scores[group.name].shape == (group.n_blocks,)
        assert scores[group.name].isfinite().all()
        assert (scores[group.name] > 0).all()
    again = importance.score(parent, method, IDS, 3)
    assert all(torch.equal(scores[name], again[name]) for name in scores)
    assert torch.equal(parent.central.weights, before)
    assert all(param.grad is None for param in parent.template.parameters())
    assert len(ticks) == (len(IDS) if method in importance.NEEDS_TEXT else 0)
    other = importance.score(parent, method, IDS, 4)
    assert (method == "random") == any(not torch.equal(scores[n], other[n]) for n in scores)
    if method in importance.NEEDS_TEXT:
        for ids in (None, IDS[:0]):
            with pytest.raises(ValueError, match="needs text"):
                score(parent, method, ids)


def test_keep_best_sorts_and_breaks_ties_by_order():
    block_map = parent64("gpt2", "head").block_map
    scores = {g.name: torch.tensor([1.0, 3.0, 2.0, 3.0]).double() for g in block_map.groups}
    kept = {k: importance.keep_best(block_map, scores, dict.fromkeys(scores, k)) for k in (1, 2, 3)}
    assert [set(kept[k].values()) for k in (1, 2, 3)] == [{(1,)}, {(1, 3)}, {(1, 2, 3)}]
    assert set(order_of(scores).values()) == {(1, 3, 2, 0)}
    tied = {"many": torch.arange(100).remainder(2).double()}  # an unstable sort would mix these
    assert order_of(tied) == {"many": (*range(1, 100, 2), *range(0, 100, 2))}
