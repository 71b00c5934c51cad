"""The activation scale and the gates that apply it."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from families_table import TABLE, VOCAB, tiny_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from twistlm.compute.loss import next_token_loss
from twistlm.model import families, huggingface, layout, subnet
from twistlm.model.blocks import Partition

N_FFN = 4
CPU = torch.device("cpu")


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
        mean = sum(float(shares[list(kept)].sum(0).square().sum()) for kept in subsets) / len(
            subsets
        )
        p, p2 = k / n, k * (k - 1) / (n * (n - 1))
        assert mean / whole == pytest.approx((p - p2) / rho + p2, rel=1e-12)
        scale = subnet.activation_scale("measured", n, k, rho)
        assert scale**2 * mean == pytest.approx(whole, rel=1e-12)  # the norm is restored


def test_each_group_has_its_own_scale():
    block_map = families.block_map(tiny_model("llama-gqa"), "both", "group")
    block_map = block_map.select("both", shared_first=1).coarsen("ffn", N_FFN)
    names = [group.name for group in block_map.groups]
    assert names == [f"model.layers.{i}.{kind}" for i in (1, 2) for kind in ("attn", "ffn")]
    widths = dict(zip(names, (1, 3, 2, 4), strict=True))
    factors = subnet.scales(block_map, widths, "sqrt")
    assert [factors[name] for name in names] == pytest.approx(
        [3**0.5, (4 / 3) ** 0.5, 1.5**0.5, 1.0]
    )
    # a layer that was not measured yet counts as uncorrelated
    factors = subnet.scales(block_map, widths, "measured", {names[0]: 3.0, names[3]: 2.0})
    assert [factors[name] for name in names] == pytest.approx([3.0, (4 / 3) ** 0.5, 1.5**0.5, 1.0])


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_a_gate_scales_and_masks_blocks_and_leaves_the_bias(kind):
    torch.manual_seed(0)
    module, x = Conv1D(5, 6) if kind == "conv1d" else nn.Linear(6, 5), torch.randn(2, 3, 6)
    bias = module.bias.detach().normal_()
    weight = module.weight.detach() if kind == "conv1d" else module.weight.detach().T  # [in, out]
    # 3 blocks, each of an input in either half
    part = Partition("a.weight", 0, chunk=1, sections=2)
    gate = subnet.Gate(module, part, torch.ones(1, 1, 3))

    def by_hand(x: Tensor, factors: list[float]) -> Tensor:
        y = bias.expand(*x.shape[:-1], 5).clone()
        for i in range(6):
            y = y + factors[i % 3] * x[..., i, None] * weight[i]
        return y

    torch.testing.assert_close(module(x), by_hand(x, [1.0, 1.0, 1.0]))
    gate.values.copy_(torch.tensor([3.0, 0.0, 0.5]))
    torch.testing.assert_close(module(x), by_hand(x, [3.0, 0.0, 0.5]))
    torch.testing.assert_close(module(torch.zeros_like(x)), bias.expand(2, 3, 5))
    gate.values = torch.tensor([[[3.0, 0.0, 0.5]], [[0.0, 2.0, 1.0]]])  # a row for each sequence
    both = torch.stack([by_hand(x[0], [3.0, 0.0, 0.5]), by_hand(x[1], [0.0, 2.0, 1.0])])
    torch.testing.assert_close(module(x), both)
    torch.testing.assert_close(module(x.view(6, 6)), both.view(6, 5))  # OPT flattens before it


def full_subnet(name: str, attn_by: str) -> tuple[subnet.Subnet, Tensor, layout.Layout]:
    model = tiny_model(name)
    block_map = families.block_map(model, "both", attn_by).select("both", 1).coarsen("ffn", N_FFN)
    where = layout.layout(block_map, huggingface.shapes(model))
    weights = torch.empty(where.n_params)
    for param, view in where.views(weights).items():
        view.copy_(huggingface.state(model)[param].detach())
    return subnet.build(model, block_map, where, weights, gates="all"), weights, where


def test_gates_are_refilled_and_never_replaced():
    """A captured graph reads the tensors it saw first."""
    full, _, _ = full_subnet("gpt2", "head")
    before = {name: gate.values for name, gate in full.gates.items()}
    factors = {name: 2.0 + i for i, name in enumerate(full.gates)}
    for kept in ((1, 3), (0,)):  # the old mask is gone
        full.keep_({group.name: kept for group in full.block_map.groups}, factors)
        for name, gate in full.gates.items():
            assert gate.values is before[name]
            values = [factors[name] * (block in kept) for block in range(4)]
            assert gate.values.tolist() == [[values]]


@pytest.mark.parametrize("name", ["gpt2", "llama-biases"])
def test_fold_scales_output_projections_and_nothing_else(name):
    row = TABLE[name]
    full, weights, where = full_subnet(name, row.ways[0])
    before = {param: view.clone() for param, view in where.views(weights).items()}
    factors = {group.name: 2.0 + i for i, group in enumerate(full.block_map.groups)}
    subnet.fold_(where.views(weights), full.block_map, factors)
    expected = {}
    for i, (layer, out) in enumerate((n, o) for n in (1, 2) for o in (row.attn_out, row.ffn_out)):
        expected[f"{row.layers}.{layer}.{out}.weight"] = 2.0 + i
    assert len(set(expected) & set(before)) == 4
    for param, view in where.views(weights).items():
        assert torch.equal(view, before[param] * expected.get(param, 1.0)), param


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

    full, _, _ = full_subnet(name, attn_by)
    n_hooks = sum(len(m._forward_pre_hooks) for m in full.model.modules())
    got = subnet.measure_rho(full, ids)
    assert set(got) == {group.name for group in full.block_map.groups}
    with torch.no_grad():
        for group in full.block_map.groups:
            assert got[group.name] == pytest.approx(rho(group.layer, group.kind), rel=1e-4)
    assert sum(len(m._forward_pre_hooks) for m in full.model.modules()) == n_hooks  # hooks are gone


def test_next_token_loss_against_a_loop():
    """Position t predicts token t + 1, and the mean runs over all predictions."""
    model = tiny_model("llama").double()
    ids = torch.randint(1, VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        loss = next_token_loss(model, ids)
    total = 0.0
    for row in range(2):
        for t in range(4):
            scores = [math.exp(x) for x in logits[row, t].tolist()]
            total -= math.log(scores[ids[row, t + 1]] / sum(scores))
    assert loss.dtype == torch.float64
    assert float(loss) == pytest.approx(total / 8, rel=1e-12)
