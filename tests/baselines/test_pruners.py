"""Post-training pruning: each method against a loop written here, and one contract for all of them."""

from __future__ import annotations

import json
import shutil
import sys
import weakref
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from conftest import make_tokens, tiny, write_words
from families_table import TABLE, VOCAB, tiny_model, ways
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from twistlm import cli
from twistlm.baselines import sparsegpt
from twistlm.baselines.methods import (
    METHODS,
    input_norms,
    magnitude,
    prune_,
    wanda,
    z_scores,
    zpruner,
)
from twistlm.baselines.pattern import Pattern, n_of_m, sparsity_of
from twistlm.baselines.request import PruneRequest
from twistlm.baselines.walk import linears, walk_
from twistlm.baselines.write import patterns, write
from twistlm.config import BlocksConfig
from twistlm.model import families
from twistlm.model.blocks import BlockMap
from twistlm.tickets import deploy
from twistlm.tickets.parent import open_parent
from twistlm.training import rounds

ROWS = ("gpt2", "llama", "llama-gqa")
BY_ROW = ("wanda", "zpruner-rows")  # methods that compare within an output row


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def correlated(n_tokens: int, n_inputs: int, seed: int = 1) -> Tensor:
    """Inputs [tokens, in] that say much about each other."""
    return draw(n_tokens, n_inputs, seed=seed) @ draw(n_inputs, n_inputs, seed=seed + 1)


# ---------------------------------------------------------------- SparseGPT, one matrix


def obs(weight: Tensor, hessian: Tensor, pattern: Pattern, columns: int, damp: float) -> Tensor:
    """Optimal brain surgeon by brute force: an inverse of its own for every column, row by row."""
    weight, hessian = weight.clone(), hessian.clone()
    n_rows, n_inputs = weight.shape
    for j in range(n_inputs):
        if hessian[j, j] == 0:
            hessian[j, j] = 1.0
            weight[:, j] = 0.0
    hessian += damp * hessian.diagonal().mean() * torch.eye(n_inputs, dtype=torch.float64)
    inverses = [torch.linalg.inv(hessian[j:, j:]) for j in range(n_inputs)]

    def costs(first: int, end: int) -> dict[tuple[int, int], float]:
        return {
            (r, j): float(weight[r, j] ** 2 / inverses[j][0, 0])
            for r in range(n_rows)
            for j in range(first, end)
        }

    gone: set[tuple[int, int]] = set()
    for j in range(n_inputs):
        if pattern.m and j % pattern.m == 0:
            cost = costs(j, j + pattern.m)
            for r in range(n_rows):
                row = sorted((place for place in cost if place[0] == r), key=cost.__getitem__)
                gone |= set(row[: pattern.n])
        elif not pattern.m and j % columns == 0:
            cost = costs(j, min(j + columns, n_inputs))
            order = sorted(cost, key=cost.__getitem__)
            gone |= set(order[: int(len(order) * pattern.sparsity) + 1])
        for r in range(n_rows):
            if (r, j) in gone:
                step = weight[r, j] / inverses[j][0, 0]
                weight[r, j:] -= step * inverses[j][0]
                weight[r, j] = 0.0
    return weight


@pytest.mark.parametrize("damp", [0.01, 0.3])
@pytest.mark.parametrize("columns", [4, 5, 128])
@pytest.mark.parametrize("sparsity", [0.0, 0.25, Fraction(2, 3)])
def test_sparsegpt_is_optimal_brain_surgeon(columns, sparsity, damp):
    weight, x = draw(6, 12), correlated(40, 12)
    ours = sparsegpt.prune(weight, sparsegpt.observe(x), Pattern(sparsity), columns, damp)
    torch.testing.assert_close(
        ours, obs(weight, 2 * x.T @ x, Pattern(sparsity), columns, damp), rtol=1e-9, atol=1e-9
    )
    for start in range(0, 12, columns):
        group = ours[:, start : start + columns]
        assert int((group == 0).sum()) == int(group.numel() * sparsity) + 1


@pytest.mark.parametrize("text", ["2:4", "1:4", "2:3"])
def test_sparsegpt_n_of_m(text):
    weight, x, pattern = draw(5, 12), correlated(40, 12), n_of_m(text)
    # 7 is no multiple of 4 or 3: no m neighbours may be torn apart
    ours = sparsegpt.prune(weight, 2 * x.T @ x, pattern, columns=7)
    torch.testing.assert_close(ours, obs(weight, 2 * x.T @ x, pattern, 7, 0.01))
    assert ((ours.view(-1, pattern.m) == 0).sum(1) == pattern.n).all()


def test_the_factor_holds_the_inverse_of_what_is_left():
    x = correlated(30, 9)
    hessian = 2 * x.T @ x
    upper = sparsegpt.inverse_factor(hessian, 0.01)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(9, dtype=torch.float64)
    for i in range(9):
        first = torch.linalg.inv(damped[i:, i:])[0]
        torch.testing.assert_close(upper[i, i] * upper[i, i:], first)


def test_one_drop_is_answered_by_least_squares():
    weight, x = draw(1, 8) + 9.0, correlated(50, 8)
    weight[0, 0] = 1e-3
    ours = sparsegpt.prune(weight, 2 * x.T @ x, Pattern(0.0), damp=0.0)
    best = torch.linalg.lstsq(x[:, 1:], x @ weight[0]).solution
    assert ours[0, 0] == 0
    torch.testing.assert_close(ours[0, 1:], best, rtol=1e-7, atol=1e-7)


def test_independent_inputs_make_sparsegpt_magnitude():
    weight, identity = draw(16, 24), 2 * torch.eye(24, dtype=torch.float64)
    ours = sparsegpt.prune(weight, identity, Pattern(0.6), damp=0.0)
    assert torch.equal(ours, magnitude(weight, None, Pattern(0.6)))
    assert torch.equal(ours, torch.where(Pattern(0.6).lowest(weight.abs()), 0, weight))


@pytest.mark.parametrize("seed", range(4))
def test_sparsegpt_rebuilds_best_where_inputs_share_a_few_causes(seed):
    causes, spread = draw(200, 6, seed=seed + 20), draw(6, 24, seed=seed + 30)
    weight, x = draw(32, 24, seed=seed), draw(200, 24, seed=seed + 10) + causes @ spread
    pattern = Pattern(0.5)
    made = [
        sparsegpt.prune(weight, sparsegpt.observe(x), pattern),
        wanda(weight, input_norms(x), pattern),
        magnitude(weight, None, pattern),
    ]
    errors = [float((x @ (weight - other).T).norm()) for other in made]
    assert errors[0] < 0.9 * min(errors[1:])


def test_dead_inputs_lose_their_weights_and_disturb_no_other():
    weight, x = draw(6, 12), correlated(40, 12)
    x[:, [3, 7]] = 0
    for pattern in (Pattern(0.5), n_of_m("2:4")):
        ours = sparsegpt.prune(weight, sparsegpt.observe(x), pattern)
        torch.testing.assert_close(ours, obs(weight, 2 * x.T @ x, pattern, 128, 0.01))
        for made in (
            ours,
            wanda(weight, input_norms(x), pattern),
            zpruner(weight, input_norms(x), pattern),
        ):
            assert not made[:, [3, 7]].any()
    nothing = torch.zeros(12, 12, dtype=torch.float64)
    assert not sparsegpt.prune(weight, nothing, Pattern(0.5)).any()


# ---------------------------------------------------------------- Wanda, Z-Pruner, magnitude


def test_wanda_is_its_loop():
    weight, x = draw(7, 10), correlated(20, 10)
    a = [sum(float(v) ** 2 for v in x[:, j]) for j in range(10)]
    want = weight.clone()
    for row in want:
        order = sorted(range(10), key=lambda j: abs(float(row[j])) * a[j] ** 0.5)
        row[order[: int(10 * Fraction("0.35"))]] = 0
    ours = wanda(weight, input_norms(x), Pattern(sparsity_of("0.35")))
    assert torch.equal(ours, want)
    assert ((ours != 0).sum(1) == 10 - 3).all()
    larger = wanda(weight, 7.3 * input_norms(x), Pattern(sparsity_of("0.35")))
    assert torch.equal(ours, larger)


def test_wanda_with_equal_norms_is_magnitude_per_row_and_stable():
    weight = draw(5, 12)
    ours = wanda(weight, torch.full((12,), 3.0, dtype=torch.float64), Pattern(0.5))
    for row, new in zip(weight, ours, strict=True):
        assert torch.equal(new, torch.where(row.abs() < row.abs().sort().values[6], 0, row))
    equal = torch.ones(3, 200, dtype=torch.float64)
    ours = wanda(equal, torch.ones(200, dtype=torch.float64), Pattern(0.25))
    assert not ours[:, :50].any()
    assert ours[:, 50:].all()


@pytest.mark.parametrize("with_data", [True, False])
def test_zpruner_is_its_loop(with_data):
    """The whole ranking, one weight more at a time: a coefficient moves few places of it."""
    n_out, n_in = 15, 20
    weight, x = draw(n_out, n_in) ** 3, correlated(20, n_in)  # heavy tails: many weights are small
    a = [sum(float(v) ** 2 for v in x[:, j]) for j in range(n_in)]
    values = [[float(v) for v in row] for row in weight]
    row_norm = [sum(v * v for v in row) ** 0.5 for row in values]
    col_norm = [sum(row[j] ** 2 for row in values) ** 0.5 for j in range(n_in)]
    places = [(r, j) for r in range(n_out) for j in range(n_in)]

    def z(cells: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
        mean = sum(cells.values()) / len(cells)
        std = (sum((v - mean) ** 2 for v in cells.values()) / (len(cells) - 1)) ** 0.5
        return {place: (v - mean) / std for place, v in cells.items()}

    zr = z({(r, j): values[r][j] / row_norm[r] for r, j in places})
    zc = z({(r, j): values[r][j] / col_norm[j] for r, j in places})
    mean = sum(abs(values[r][j]) for r, j in places) / len(places)
    rho = sum(abs(values[r][j]) < 0.1 * mean for r, j in places) / len(places)
    assert 0.2 < rho < 0.8
    alpha = 0.7 * (1 - 0.3 * rho)
    score = {
        (r, j): (alpha * abs(zr[r, j]) ** 3 + (1 - alpha) * abs(zc[r, j]) ** 3)
        * ((a[j] ** 0.5) ** 1.5 if with_data else 1.0)
        for r, j in places
    }
    want = weight.clone()
    for n, (r, j) in enumerate(sorted(places, key=score.__getitem__)):
        want[r, j] = 0
        sparsity = Fraction(n, len(places))
        ours = zpruner(weight, input_norms(x) if with_data else None, Pattern(sparsity))
        assert torch.equal(ours, want), n


def test_zpruner_by_rows_drops_the_same_number_in_each():
    """Its own scores, sorted row by row; where the rows' scales differ, other weights go than by the matrix."""
    weight, x = draw(15, 20) * torch.arange(1, 16)[:, None], correlated(20, 20)
    scores = z_scores(weight, input_norms(x))
    ours = zpruner(weight, input_norms(x), Pattern(Fraction(2, 5)), by_row=True)
    for row, kept, score in zip(weight, ours, scores, strict=True):
        gone = sorted(range(20), key=lambda j, score=score: float(score[j]))[:8]
        want = row.clone()
        want[gone] = 0
        assert torch.equal(kept, want)
    assert not torch.equal(ours, zpruner(weight, input_norms(x), Pattern(Fraction(2, 5))))


def test_zpruner_with_repair_keeps_its_mask_and_answers_better():
    """The zeros are Z-Pruner's own; the rest is what optimal brain surgeon leaves for this mask."""
    n_out, n_in = 6, 9
    weight, x = draw(n_out, n_in), correlated(40, n_in)
    hessian, pattern = sparsegpt.observe(x), Pattern(Fraction(1, 2))
    plain = zpruner(weight, input_norms(x), pattern)
    ours = zpruner(weight, hessian, pattern, update=True)
    assert torch.equal(ours == 0, plain == 0)
    damped = hessian + sparsegpt.DAMP * hessian.diagonal().mean() * torch.eye(n_in).double()
    want = weight.clone()
    for j in range(n_in):
        inverse = torch.linalg.inv(damped[j:, j:])
        for r in range(n_out):
            if plain[r, j] == 0:
                want[r, j:] -= want[r, j] * inverse[0] / inverse[0, 0]
    torch.testing.assert_close(ours, want, rtol=0, atol=1e-9)
    error, before = (float(((w - weight) @ x.T).norm()) for w in (ours, plain))
    assert error < 0.9 * before


def test_zpruner_survives_zero_rows_zero_columns_and_equal_weights():
    """A NaN would compare false with the threshold and let everything stay."""
    for zero in ((2, slice(None)), (slice(None), 4)):
        weight = draw(6, 9)
        weight[zero] = 0
        ours = zpruner(weight, None, Pattern(0.6))
        assert ours.isfinite().all()
        assert 54 > int((ours == 0).sum()) >= int(54 * 0.6) + 1
    for odd in (torch.zeros(3, 4), torch.ones(3, 4), torch.ones(1, 1)):
        assert not zpruner(odd, None, Pattern(0.5)).any()  # equal scores go together


def test_magnitude_counts_over_the_matrix():
    weight = draw(8, 10)
    ours = magnitude(weight, None, Pattern(0.35))
    order = sorted(range(80), key=lambda i: abs(float(weight.flatten()[i])))
    want = weight.flatten().clone()
    want[order[:29]] = 0
    assert torch.equal(ours.flatten(), want)


@pytest.mark.parametrize("name", ["wanda", "zpruner", "zpruner-datafree", "magnitude"])
def test_two_of_four(name):
    weight, x = draw(5, 12), correlated(20, 12)
    mean = METHODS[name].observe(x) if METHODS[name].observe else None
    ours = METHODS[name].prune(weight, mean, n_of_m("2:4"))
    assert ((ours.view(-1, 4) == 0).sum(1) == 2).all()
    if name in ("wanda", "magnitude"):
        score = weight.abs() * (mean.sqrt() if mean is not None else 1)
        for kept, row in zip((ours != 0).view(-1, 4), score.view(-1, 4), strict=True):
            assert row[kept].min() > row[~kept].max()


# ---------------------------------------------------------------- the walk, every method


def small(
    name: str, setting: str = "both", attn_by: str = "auto", first: int = 1
) -> tuple[PreTrainedModel, BlockMap, Tensor]:
    """A tiny model in float64, its map and 3 sequences."""
    model = tiny_model(name).double()
    blocks = BlocksConfig(
        setting=setting, n_ffn=4, attn_by=attn_by, shared_first=first, shared_last=0
    )
    ids = torch.randint(VOCAB, (3, 11), generator=torch.Generator().manual_seed(5))
    return model, families.partition(model, blocks), ids


def cut_matrices(name: str, setting: str, attn_by: str, first: int) -> list[str]:
    """Names of the weights that a setting covers, from the tests' own table."""
    row = TABLE[name]
    qkv = row.qkv[:1] if attn_by == "query" else row.qkv
    kinds = {"attn": (*qkv, row.attn_out), "ffn": (*row.ffn_ins, row.ffn_out)}
    kinds["both"] = kinds["attn"] + kinds["ffn"]
    return [
        f"{row.layers}.{layer}.{module}.weight"
        for layer in range(first, 3)
        for module in kinds[setting]
    ]


def everywhere(block_map: BlockMap, pattern: Pattern) -> dict[str, Pattern]:
    return {group.name: pattern for group in block_map.groups}


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@torch.no_grad()
def fed(
    model: PreTrainedModel, params: dict[str, Tensor], weight: str, ids: Tensor
) -> list[Tensor]:
    """What the module of `weight` is fed by Hugging Face's own forward pass with these parameters."""
    seen: list[Tensor] = []
    for name, param in model.named_parameters():
        param.copy_(params[name])
    module = model.get_submodule(weight.removesuffix(".weight"))
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    for sequence in ids:
        model(input_ids=sequence[None], use_cache=False)
    hook.remove()
    return seen


def check_walk(name: str, attn_by: str, method: str, setting: str = "both", first: int = 1) -> None:
    """Every matrix is what the method makes of the inputs that the pruned layers before it give."""
    model, block_map, ids = small(name, setting, attn_by, first)
    before = copy_of(model)
    zeros = prune_(model, block_map, METHODS[method], everywhere(block_map, Pattern(0.6)), ids)
    after = copy_of(model)
    cut = cut_matrices(name, setting, attn_by, first)
    assert set(zeros) == set(cut)
    for param, value in before.items():
        assert torch.equal(value, after[param]) == (param not in cut), param
    turn = (lambda w: w.T) if TABLE[name].transposed else (lambda w: w)
    for param in cut:
        layer = param.removeprefix(TABLE[name].layers + ".").partition(".")[0]
        prefix = f"{TABLE[name].layers}."
        params = {
            p: after[p]
            if p.startswith(prefix) and p.removeprefix(prefix).partition(".")[0] < layer
            else value
            for p, value in before.items()
        }
        observe = METHODS[method].observe
        mean = None
        if observe is not None:
            mean = sum(observe(x) for x in fed(model, params, param, ids)) / len(ids)
        want = METHODS[method].prune(turn(before[param]), mean, Pattern(0.6))
        torch.testing.assert_close(turn(after[param]), want, rtol=1e-8, atol=1e-10)
        n_out, n_in = want.shape
        n_zeros = n_out * int(n_in * 0.6) if method in BY_ROW else int(n_out * n_in * 0.6) + 1
        assert int((after[param] == 0).sum()) == zeros[param] == n_zeros


def test_which_methods_read_data():
    needs = {name: method.observe for name, method in METHODS.items()}
    assert needs == {
        "sparsegpt": sparsegpt.observe,
        "wanda": input_norms,
        "zpruner": input_norms,
        "zpruner-datafree": None,
        "zpruner-rows": input_norms,
        "zpruner-repair": sparsegpt.observe,
        "magnitude": None,
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "attn_by"), list(ways(*ROWS)))
def test_contract(name, attn_by, method):
    check_walk(name, attn_by, method)


@pytest.mark.parametrize(("name", "attn_by"), [way for way in ways() if way[0] not in ROWS])
def test_the_walk_on_every_family(name, attn_by):
    check_walk(name, attn_by, "wanda", first=0)


@pytest.mark.parametrize("setting", ["attn", "ffn"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_setting_limits_what_is_pruned(name, setting):
    check_walk(name, "head", "sparsegpt", setting, first=2)


@pytest.mark.parametrize("method", METHODS)
def test_conv1d_and_linear_give_the_same(method):
    """GPT-2 as it is, against a GPT-2 whose projections are Linear with transposed weights."""
    model, block_map, ids = small("gpt2")
    other, _, _ = small("gpt2")
    for name, module in list(other.named_modules()):
        if type(module).__name__ == "Conv1D":
            linear = nn.Linear(*module.weight.shape, dtype=torch.float64)
            linear.weight = nn.Parameter(module.weight.detach().T.clone())
            linear.bias = module.bias
            other.set_submodule(name, linear)
    flipped = BlockMap(
        tuple(
            replace(
                group,
                parts=tuple(
                    replace(part, dim=1 - part.dim) if part.param.endswith("weight") else part
                    for part in group.parts
                ),
            )
            for group in block_map.groups
        )
    )
    for m, cut in ((model, block_map), (other, flipped)):
        prune_(m, cut, METHODS[method], everywhere(cut, Pattern(0.5)), ids)
    for param in cut_matrices("gpt2", "both", "head", 1):
        ours, theirs = model.get_parameter(param), other.get_parameter(param).T
        assert torch.equal(ours == 0, theirs == 0)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_sparsity_zero_leaves_the_model_as_it_is():
    for method in METHODS.values():
        model, block_map, ids = small("llama")
        before = copy_of(model)
        prune_(model, block_map, method, everywhere(block_map, Pattern(0)), ids)
        assert all(torch.equal(value, before[name]) for name, value in copy_of(model).items())


def test_statistics_are_means_over_sequences():
    """The methods care for no common factor, so the recursion of the mean is checked by itself."""
    model, block_map, ids = small("llama")
    before, seen = copy_of(model), {}
    for observe in (sparsegpt.observe, input_norms):
        walk_(
            model, linears(model, block_map), ids, observe,
            lambda alike, mean: seen.update({linear.param: mean.clone() for linear in alike}),
        )  # fmt: skip
        assert set(seen) == set(cut_matrices("llama", "both", "head", 1))
        for param, mean in seen.items():
            h = torch.zeros_like(mean)
            for n, x in enumerate(fed(model, before, param, ids)):
                h = h * (n / (n + 1))
                h += (2 * x.T @ x if observe is sparsegpt.observe else x.norm(dim=0) ** 2) / (n + 1)
            torch.testing.assert_close(mean, h, rtol=1e-10, atol=1e-12)


def test_the_walk_leaves_no_hook_and_ticks_for_every_sequence():
    model, block_map, ids = small("llama")
    ticks: list[int] = []
    method = METHODS["wanda"]
    wanted = everywhere(block_map, Pattern(0.5))
    prune_(model, block_map, method, wanted, ids, lambda: ticks.append(1))
    assert len(ticks) == 2 * 3  # layers 1 and 2
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "opt"])
def test_batches_change_nothing(name, monkeypatch):
    """Sequences one by one, two and one, or all three at once: masks and positions serve any batch."""
    made = []
    for batch in (11, 22, 33):  # tokens, of sequences of 11
        monkeypatch.setattr("twistlm.baselines.walk.BATCH", batch)
        model, block_map, ids = small(name)
        prune_(model, block_map, METHODS["sparsegpt"], everywhere(block_map, Pattern(0.5)), ids)
        made.append(copy_of(model))
    for other in made[1:]:
        torch.testing.assert_close(other, made[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("name", "n_inputs"), [("gpt2", 4), ("llama", 4), ("opt", 4)])
def test_matrices_with_one_input_share_its_statistic_and_its_factor(name, n_inputs):
    """q, k, v (and gate, up) are fed one tensor: one Hessian and one Cholesky for all of them."""
    model, block_map, ids = small(name, first=2)
    seen: list[Tensor] = []
    factored: list[Tensor] = []

    def observe(x: Tensor) -> Tensor:
        seen.append(x)
        return sparsegpt.observe(x)

    def factor(mean: Tensor) -> Tensor:
        factored.append(mean)
        return sparsegpt.inverse_factor(mean)

    method = replace(METHODS["sparsegpt"], observe=observe, factor=factor)
    prune_(model, block_map, method, everywhere(block_map, Pattern(0.5)), ids)
    assert (
        len(seen) == len(factored) == n_inputs
    )  # of layer 2: attention, its output, FFN, its output


def test_one_layers_statistics_live_at_a_time():
    model, block_map, ids = small("llama", first=0)
    alive: list[weakref.ref] = []
    most = 0

    def observe(x: Tensor) -> Tensor:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        made = sparsegpt.observe(x)
        alive.append(weakref.ref(made))
        return made

    method = replace(METHODS["sparsegpt"], observe=observe)
    prune_(model, block_map, method, everywhere(block_map, Pattern(0.5)), ids)
    assert len(alive) == 3 * 4
    assert most <= 4  # three of this layer, and the last one of the layer before


def test_numbers_that_are_not_finite_are_refused():
    model, block_map, ids = small("gpt2")
    with torch.no_grad():
        model.get_parameter("transformer.h.1.mlp.c_fc.weight")[0, 0] = float("nan")
    for name, method in METHODS.items():
        before = copy_of(model)
        with pytest.raises(
            ValueError, match=r"mlp.c_fc.weight holds 1 numbers that are not finite"
        ):
            prune_(model, block_map, method, everywhere(block_map, Pattern(0.5)), ids)
        for param, value in copy_of(model).items():
            assert torch.equal(value.nan_to_num(), before[param].nan_to_num()), name
    model, block_map, ids = small("gpt2")
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("inf"))
    with pytest.raises(ValueError, match=r"feeds into .*c_attn.weight .* not finite"):
        prune_(model, block_map, METHODS["wanda"], everywhere(block_map, Pattern(0.5)), ids)


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tokens(folder / "tokens", 700)
    for name in ("gpt2", "llama"):
        tiny_model(name).save_pretrained(folder / name)
    return folder


@pytest.fixture
def home(models, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    return tmp_path


CUT = ("data.seq_len=20", "blocks.n_ffn=4", "blocks.shared_first=1", "blocks.shared_last=0")


def run(monkeypatch, capsys, source: str, *args: str, cut=CUT) -> tuple[int, str]:
    monkeypatch.setattr(
        sys, "argv", ["twistlm", "lab", "prune", source, *cut, *args, "--device", "cpu"]
    )
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, err or out


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("method", METHODS)
def test_command_writes_a_plain_model(home, monkeypatch, capsys, name, method):
    base = (name, "--method", method, "--ratio", "1/4", "--data", "tokens", "--n", "8")
    code, text = run(monkeypatch, capsys, *base, "-o", "out")
    assert code == 0, text
    before = dict(AutoModelForCausalLM.from_pretrained(name).named_parameters())
    after = dict(AutoModelForCausalLM.from_pretrained("out").named_parameters())
    record = json.loads(Path("out/prune.json").read_text())
    cut = cut_matrices(name, "both", "head", 1)
    assert record["method"] == method
    assert set(record["zeros"]) == set(cut)
    for param, value in before.items():
        assert torch.equal(value, after[param]) == (param not in cut), param
        if param in cut:
            n_zeros = value.numel() * 3 // 4 + (method not in BY_ROW)
            assert int((after[param] == 0).sum()) == record["zeros"][param] == n_zeros
    assert record["versions"]
    assert record["command"].startswith("twistlm lab prune")
    n_zeros, n_pruned = sum(record["zeros"].values()), sum(before[param].numel() for param in cut)
    assert f"{n_zeros:,} of {n_pruned:,} weights are zero" in text
    # the same seed gives the same bytes; another one other sequences, which only some methods read
    weights = Path("out/model.safetensors").read_bytes()
    assert run(monkeypatch, capsys, *base, "-o", "out")[0] == 0
    assert Path("out/model.safetensors").read_bytes() == weights
    assert run(monkeypatch, capsys, *base, "-o", "seeded", "--seed", "1")[0] == 0
    same = Path("seeded/model.safetensors").read_bytes() == weights
    assert same == (METHODS[method].observe is None)


@pytest.mark.parametrize("method", ["fisher", "mask-fisher", "taylor", "magnitude", "random"])
def test_command_writes_a_ticket(home, monkeypatch, capsys, method):
    args = ("gpt2", "--method", f"block:{method}", "--ratio", "1/4", "--data", "tokens", "--n", "4")
    for out in ("one", "two"):
        code, text = run(monkeypatch, capsys, *args, "-o", out)
        assert code == 0, text
    one, two = (deploy.read_ticket(Path(name)) for name in ("one", "two"))
    assert one["blueprint"] == two["blueprint"]
    assert one["method"] == f"block:{method}"
    assert set(one["widths"].values()) == {"1/4"}
    assert len(one["widths"]) == 4
    deploy.load_ticket(Path("one"))


def test_a_run_brings_its_own_tokens_and_tokenizer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_words("tokens", [f"w{i}" for i in range(VOCAB)], 1600)
    last = rounds.train(tiny("tokens", Path("run"), train={"rounds": 1}), quiet=True)
    args = ("--method", "wanda", "--ratio", "2/4", "--n", "9")
    code, text = run(monkeypatch, capsys, "run", "-o", "out", *args, cut=())
    assert code == 0, text
    before, after = (AutoModelForCausalLM.from_pretrained(name) for name in (last, "out"))
    found = {
        name
        for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert found == set(cut_matrices("gpt2", "both", "head", 1))
    record = json.loads(Path("out/prune.json").read_text())
    assert record["calibration"] == {"data": "tokens", "n_sequences": 9, "seq_len": 16, "seed": 0}
    assert AutoTokenizer.from_pretrained("out").encode("w3 w5") == [3, 5]


def test_a_ratio_is_a_sparsity_of_each_kind(home):
    parent = open_parent("gpt2", "cpu", list(CUT))
    found = patterns(parent.block_map, None, "attn=1,ffn=1/4", None)
    assert {(name[-4:], p.sparsity) for name, p in found.items()} == {
        ("attn", Fraction(0)),
        (".ffn", Fraction(3, 4)),
    }
    weights = parent.central.weights.clone()
    made = write(
        parent, Path("out"), PruneRequest(method="magnitude", ratio="attn=1,ffn=1/4"), quiet=True
    )
    assert torch.equal(weights, parent.central.weights)
    assert {n for p, n in made["zeros"].items() if "attn" in p} == {0}
    assert {n for p, n in made["zeros"].items() if "mlp" in p} == {32 * 48 * 3 // 4 + 1}


BAD = {
    "method": (["--method", "wands", "--ratio", "1/4"], "--method 'wands': use one of sparsegpt"),
    "nothing": (["--method", "magnitude"], "give one of --sparsity, --ratio and --nm"),
    "both": (["--method", "wanda", "--sparsity", "0.5", "--ratio", "2/4"], "give one of"),
    "one": (["--method", "magnitude", "--sparsity", "1"], "sparsity 1: it must lie in [0, 1)"),
    "minus": (["--method", "magnitude", "--sparsity=-0.1"], "it must lie in [0, 1)"),
    "nan": (["--method", "magnitude", "--sparsity", "nan"], "--sparsity 'nan' is no number"),
    "word": (["--method", "magnitude", "--sparsity", "half"], "--sparsity 'half' is no number"),
    "ratio": (["--method", "wanda", "--ratio", "1/3"], "no whole number of attn blocks"),
    "blocks": (["--method", "block:fisher", "--ratio", "1/3"], "no whole number of attn blocks"),
    "block-sparsity": (["--method", "block:random", "--sparsity", "0.5"], "give --ratio"),
    "nm": (["--method", "sparsegpt", "--nm", "4:2"], "--nm '4:2': use N:M with 0 < N < M"),
    "nm-width": (["--method", "sparsegpt", "--nm", "2:5", "--data", "tokens", "--n", "2"], "of 5"),
    "nm-other": (["--method", "wanda", "--nm", "2:4", "--ratio", "1/4"], "sparsity of 0.5, not 0.75"),
    "no-data": (["--method", "wanda", "--ratio", "1/4"], "no tokens to calibrate on: give --data"),
    "short": (
        ["--method", "wanda", "--ratio", "1/4", "--data", "tokens"],
        "tokens is too short for --n 128: it has 35 sequences of data.seq_len = 20",
    ),
    "short-blocks": (
        ["--method", "block:taylor", "--ratio", "1/4", "--data", "tokens", "--n", "36"],
        "tokens is too short for --n 36",
    ),
    "long": (
        ["--method", "wanda", "--ratio", "1/4", "--data", "tokens", "--n", "2", "data.seq_len=50"],
        "data.seq_len = 50: the model has 40 positions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_writes_nothing(home, monkeypatch, capsys, case):
    args, sentence = BAD[case]
    before = sorted(home.rglob("*"))
    code, text = run(monkeypatch, capsys, "gpt2", "-o", "out", *args)
    assert code == 2
    assert text.startswith("error: ")
    assert sentence in text
    assert text.count("\n") == 1
    assert sorted(home.rglob("*")) == before


def test_folders_in_use_are_left_alone(home, monkeypatch, capsys):
    for record in ("prune.json", "ticket.json"):  # their names do not make them ours
        Path(f"orchard {record}").mkdir()
        Path(f"orchard {record}", record).write_text('{"trees": 3}')
    for out in ("gpt2", "llama", "orchard prune.json", "orchard ticket.json"):
        code, text = run(
            monkeypatch, capsys, "gpt2", "-o", out, "--method", "magnitude", "--ratio", "1/4"
        )
        assert code == 2
        assert "choose another folder" in text
    args = ("--method", "magnitude", "--ratio", "1/4")
    assert run(monkeypatch, capsys, "gpt2", "-o", "once", *args)[0] == 0
    code, text = run(monkeypatch, capsys, "once", "-o", "once", *args)
    assert code == 2
    assert "is the model to prune" in text
    AutoModelForCausalLM.from_pretrained("once")
