"""The activation scale and the gates that apply it."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from families_table import N_FFN, TABLE, VOCAB, case, tiny_model
from torch import Tensor

from twistlm.model import subnet


@pytest.mark.parametrize(("n", "k"), [(12, 6), (12, 3), (9, 4), (4, 1), (2, 2), (1, 1)])
def test_scales_by_their_formulas(n, k):
    """Uncorrelated blocks (rho = 1) need sqrt(N/K), equal ones (rho = N) need N/K, all none."""
    scale = subnet.activation_scale
    assert scale("none", n, k) == 1.0
    for rho, formula in ((1.0, "sqrt"), (float(n), "inverse")):
        want = math.sqrt(n / k) if formula == "sqrt" else n / k
        assert scale(formula, n, k) == pytest.approx(want, rel=1e-15)
        assert scale("measured", n, k, rho) == pytest.approx(want)
    assert n > k or scale("measured", n, k, rho=0.3) == 1.0


@pytest.mark.parametrize("shift", [0.0, 1.0, -0.4])
@pytest.mark.parametrize("n", [2, 5, 6])
def test_measured_is_exact_over_all_subsets(n, shift):
    """E|y'|^2 / |y|^2 = (p - p2)/rho + p2 over every subset; `shift` makes blocks correlated."""
    generator = torch.Generator().manual_seed(n)
    shares = torch.randn(n, 11, dtype=torch.float64, generator=generator)
    shares += shift * shares[0]  # they all lean one way
    whole = float(shares.sum(0).square().sum())
    rho = whole / float(shares.square().sum())
    for k in range(1, n):
        subsets = list(combinations(range(n), k))
        norms = [float(shares[list(kept)].sum(0).square().sum()) for kept in subsets]
        mean = sum(norms) / len(norms)
        p, p2 = k / n, k * (k - 1) / (n * (n - 1))
        assert mean / whole == pytest.approx((p - p2) / rho + p2, rel=1e-12)
        scale = subnet.activation_scale("measured", n, k, rho)
        assert scale**2 * mean == pytest.approx(whole, rel=1e-12)  # the norm is restored


def test_gates_are_refilled_with_each_groups_scale_and_never_replaced():
    """A captured graph reads the tensors it saw first."""
    full = case(("llama", "head", "both")).masked()
    before = {name: gate.values for name, gate in full.gates.items()}
    names = [f"model.layers.{i}.{kind}" for i in (1, 2) for kind in ("attn", "ffn")]
    assert list(before) == names
    for kept in (((1, 3), (0,), (2,), (0, 1, 2, 3)), ((0,),) * 4):  # the old mask is gone
        blueprint = dict(zip(names, kept, strict=True))
        # a layer that was not measured yet counts as uncorrelated, a whole one is not scaled
        rho, widths = {names[0]: 4.0, names[3]: 2.0}, full.block_map.widths(blueprint)
        factors = subnet.scales(full.block_map, widths, "measured", rho)
        want = {name: math.sqrt(4 / widths[name]) for name in names} | {names[0]: 4 / len(kept[0])}
        if len(kept[3]) == 4:
            assert factors == pytest.approx(want)
        full.keep_(blueprint, factors)
        for name, gate in full.gates.items():
            assert gate.values is before[name]
            values = [factors[name] * (block in blueprint[name]) for block in range(4)]
            assert gate.values[0, 0].tolist() == pytest.approx(values)


@pytest.mark.parametrize(("name", "attn_by"), [("gpt2", "head"), ("llama-gqa", "query")])
def test_rho_against_a_loop_over_blocks(name, attn_by):
    """Run the stock model's output projection once per block, on that block's inputs alone."""
    row, model = TABLE[name], tiny_model(name)
    ids = torch.randint(1, VOCAB, (3, 11), generator=torch.Generator().manual_seed(2))
    inputs: dict[tuple[int, str], Tensor] = {}
    outs = {
        (layer, kind): model.get_submodule(f"{row.layers}.{layer}.{out}")
        for layer in (1, 2)
        for kind, out in (("attn", row.attn_out), ("ffn", row.ffn_out))
    }
    for key, module in outs.items():
        module.register_forward_pre_hook(
            lambda _, args, key=key: inputs.update({key: args[0].detach().double()})
        )
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)

    def rho(layer: int, kind: str) -> float:
        module, x = outs[layer, kind].double(), inputs[layer, kind]
        n_inputs = x.shape[-1]
        nothing = module(torch.zeros_like(x))  # the bias belongs to no block
        shares = []
        for block in range(row.n_attn(attn_by) if kind == "attn" else N_FFN):
            owners = (row.block_of_input(kind, attn_by, i, N_FFN) for i in range(n_inputs))
            mine = torch.tensor([owner == block for owner in owners])
            shares.append(module(x * mine) - nothing)
        return float(sum(shares).square().sum() / sum(share.square().sum() for share in shares))

    full = case((name, attn_by, "both")).masked()
    full.keep_(full.block_map.full())
    n_hooks = sum(len(m._forward_pre_hooks) for m in full.model.modules())
    got = subnet.measure_rho(full, ids)
    assert set(got) == {group.name for group in full.block_map.groups}
    with torch.no_grad():
        for group in full.block_map.groups:
            assert got[group.name] == pytest.approx(rho(group.layer, group.kind), rel=1e-4)
    assert sum(len(m._forward_pre_hooks) for m in full.model.modules()) == n_hooks  # hooks are gone
