"""The activation scale and the gates that apply it."""

import pytest
import torch
from families_table import N_FFN, TABLE, case, fed, tiny_model, tokens

from twistlm.model import subnet


def test_scales_by_their_formulas():
    """Uncorrelated blocks (rho = 1) need sqrt(N/K), equal ones (rho = N) need N/K, all none."""
    scale = subnet.activation_scale
    assert (scale("none", 12, 3), scale("measured", 2, 2, rho=0.3)) == (1.0, 1.0)
    for rho, formula, want in ((1, "sqrt", 2.0), (12, "inverse", 4.0)):
        assert scale(formula, 12, 3) == pytest.approx(want, rel=1e-15)
        assert scale("measured", 12, 3, rho) == pytest.approx(want)


def test_gates_are_refilled_with_each_groups_scale_and_never_replaced():
    """A captured graph reads the tensors it saw first."""
    full = case(("llama", "head", "both")).masked()
    before = {name: gate.values for name, gate in full.gates.items()}
    blueprint = dict(zip(before, ((1, 3), (0,), (2,), (0, 1, 2, 3)), strict=True))
    # a layer that was not measured yet counts as uncorrelated, a whole one is not scaled
    rho = dict(zip(before, (4.0, 1.0, 1.0, 2.0), strict=True))
    del rho["model.layers.1.ffn"]
    widths = full.block_map.widths(blueprint)
    factors = subnet.scales(full.block_map, widths, "measured", rho)
    assert list(factors.values()) == pytest.approx([2.0, 2.0, 2.0, 1.0])
    full.keep_(blueprint, factors)
    for name, gate in full.gates.items():
        assert gate.values is before[name]
        values = [factors[name] * (block in blueprint[name]) for block in range(4)]
        assert gate.values[0, 0].tolist() == pytest.approx(values)


@pytest.mark.parametrize(("name", "attn_by"), [("gpt2", "head"), ("llama-gqa", "query")])
def test_rho_against_a_loop_over_blocks(name, attn_by):
    """Run the stock model's output projection once per block, on that block's inputs alone."""
    row, model = TABLE[name], tiny_model(name)
    ids, full = tokens(3, 11, seed=2), case((name, attn_by, "both")).masked()
    full.keep_(full.block_map.full())
    got = subnet.measure_rho(full, ids)
    assert set(got) == {group.name for group in full.block_map.groups}
    for group in full.block_map.groups:
        kind = group.kind
        name = f"{row.layers}.{group.layer}.{row.attn_out if kind == 'attn' else row.ffn_out}"
        module, (x,) = model.get_submodule(name), fed(model, name, ids)
        owners = [row.block_of_input(kind, attn_by, i, N_FFN) for i in range(x.shape[-1])]
        n_blocks = row.n_attn(attn_by) if kind == "attn" else N_FFN
        mine = [torch.tensor(owners) == block for block in range(n_blocks)]
        with torch.no_grad():  # the bias belongs to no block
            shares = torch.stack([module(x * kept) - module(0 * x) for kept in mine]).double()
        rho = shares.sum(0).square().sum() / shares.square().sum()
        assert got[group.name] == pytest.approx(float(rho), rel=1e-4)
