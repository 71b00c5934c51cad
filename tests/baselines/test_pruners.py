"""Post-training pruning: each method against a loop written here, one contract for all of them."""

from __future__ import annotations

import json
import shutil
import weakref
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from commands import check_refusal, in_process
from conftest import make_tokens, tiny, write_words
from families_table import TABLE, VOCAB, tiny_model, ways
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

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
from twistlm.baselines.write import patterns, write
from twistlm.config import BlocksConfig
from twistlm.model import families
from twistlm.model.blocks import BlockMap
from twistlm.tickets import deploy
from twistlm.tickets.parent import open_parent
from twistlm.training import rounds

ROWS = ("gpt2", "llama", "llama-gqa")
BY_ROW = ("wanda", "zpruner-rows")  # methods that compare within an output row
HALF = Pattern(Fraction(1, 2))


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def correlated(n_tokens: int, n_inputs: int, seed: int = 1) -> Tensor:
    """Inputs [tokens, in] that say much about each other."""
    return draw(n_tokens, n_inputs, seed=seed) @ draw(n_inputs, n_inputs, seed=seed + 1)


# ---------------------------------------------------------------- one matrix


def obs(
    weight: Tensor, hessian: Tensor, pattern: Pattern, columns=128, damp=0.01, gone=None
) -> Tensor:
    """Optimal brain surgeon by brute force: an inverse of its own for every column, row by row.

    `gone` are the places that another method chose.
    """
    weight, hessian, given = weight.clone(), hessian.clone(), gone is not None
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

    gone = set(gone or ())
    for j in range(n_inputs):
        if given:
            pass
        elif pattern.m and j % pattern.m == 0:
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
@pytest.mark.parametrize("columns", [4, 5, 7, 128])
@pytest.mark.parametrize("asked", ["0", "0.25", "2/3", "2:4", "1:4", "2:3"])
def test_sparsegpt_is_optimal_brain_surgeon(columns, asked, damp):
    """Groups of columns are multiples of m: no m neighbours are torn apart."""
    pattern = n_of_m(asked) if ":" in asked else Pattern(sparsity_of(asked))
    weight, x, m = draw(6, 12), correlated(40, 12), pattern.m or 1
    ours = sparsegpt.prune(weight, sparsegpt.observe(x), pattern, columns, damp)
    want = obs(weight, 2 * x.T @ x, pattern, max(columns // m, 1) * m, damp)
    torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-9)
    if pattern.m:
        assert ((ours.view(-1, m) == 0).sum(1) == pattern.n).all()
    for start in range(0, 12 if not pattern.m else 0, columns):
        group = ours[:, start : start + columns]
        assert int((group == 0).sum()) == int(group.numel() * pattern.sparsity) + 1


def test_dead_inputs_lose_their_weights_and_disturb_no_other():
    weight, x = draw(6, 12), correlated(40, 12)
    x[:, [3, 7]] = 0
    for pattern in (HALF, n_of_m("2:4")):
        ours = sparsegpt.prune(weight, sparsegpt.observe(x), pattern)
        torch.testing.assert_close(ours, obs(weight, 2 * x.T @ x, pattern))
        others = (method(weight, input_norms(x), pattern) for method in (wanda, zpruner))
        assert not any(made[:, [3, 7]].any() for made in (ours, *others))
    nothing = torch.zeros(12, 12, dtype=torch.float64)
    assert not sparsegpt.prune(weight, nothing, HALF).any()


def test_wanda_is_its_loop():
    weight, x, pattern = draw(7, 10), correlated(20, 10), Pattern(sparsity_of("0.35"))
    a = [sum(float(v) ** 2 for v in x[:, j]) for j in range(10)]
    want = weight.clone()
    for row in want:
        order = sorted(range(10), key=lambda j: abs(float(row[j])) * a[j] ** 0.5)
        row[order[: int(10 * Fraction("0.35"))]] = 0
    ours = wanda(weight, input_norms(x), pattern)
    assert torch.equal(ours, want)
    assert ((ours != 0).sum(1) == 10 - 3).all()
    assert torch.equal(ours, wanda(weight, 7.3 * input_norms(x), pattern))
    # equal scores: the first go
    ones = torch.ones(3, 200, dtype=torch.float64)
    ours = wanda(ones, ones[0], Pattern(0.25))
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
        pattern = Pattern(Fraction(n, len(places)))
        ours = zpruner(weight, input_norms(x) if with_data else None, pattern)
        assert torch.equal(ours, want), n


def test_zpruner_by_rows_drops_the_same_number_in_each():
    """Its own scores, sorted row by row; by the matrix, others go."""
    weight, x = draw(15, 20) * torch.arange(1, 16)[:, None], correlated(20, 20)
    norms, pattern, want = input_norms(x), Pattern(Fraction(2, 5)), weight.clone()
    for row, score in zip(want, z_scores(weight, norms), strict=True):
        row[sorted(range(20), key=lambda j, score=score: float(score[j]))[:8]] = 0
    assert torch.equal(zpruner(weight, norms, pattern, by_row=True), want)
    assert not torch.equal(zpruner(weight, norms, pattern), want)


def test_zpruner_with_update_keeps_its_mask_and_answers_better():
    """The zeros are Z-Pruner's own; the rest is what optimal brain surgeon leaves for this mask."""
    weight, x = draw(6, 9), correlated(40, 9)
    plain = zpruner(weight, input_norms(x), HALF)
    ours = zpruner(weight, sparsegpt.observe(x), HALF, update=True)
    assert torch.equal(ours == 0, plain == 0)
    gone = {(int(r), int(j)) for r, j in (plain == 0).nonzero()}
    want = obs(weight, 2 * x.T @ x, HALF, damp=sparsegpt.DAMP, gone=gone)
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
    order = sorted(range(80), key=lambda i: abs(float(weight.flatten()[i])))
    want = weight.flatten().clone()
    want[order[:29]] = 0
    assert torch.equal(magnitude(weight, None, Pattern(0.35)).flatten(), want)


@pytest.mark.parametrize("name", METHODS)
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


def prune_all_(model, block_map, ids, method="sparsegpt", pattern=HALF, **more) -> dict[str, int]:
    """Every matrix by one pattern; `more` changes the method."""
    chosen = replace(METHODS[method], **more)
    return prune_(model, block_map, chosen, {g.name: pattern for g in block_map.groups}, ids)


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


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@torch.no_grad()
def fed(
    model: PreTrainedModel, params: dict[str, Tensor], weight: str, ids: Tensor
) -> list[Tensor]:
    """What Hugging Face's own forward pass with these parameters feeds the module of `weight`."""
    seen: list[Tensor] = []
    for name, param in model.named_parameters():
        param.copy_(params[name])
    module = model.get_submodule(weight.removesuffix(".weight"))
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    for sequence in ids:
        model(input_ids=sequence[None], use_cache=False)
    hook.remove()
    return seen


WALKS = [
    *((name, by, method, "both", 1) for name, by in ways(*ROWS) for method in METHODS),
    *((name, by, "wanda", "both", 0) for name, by in ways() if name not in ROWS),
    *((name, "head", "sparsegpt", s, 2) for name in ("gpt2", "llama") for s in ("attn", "ffn")),
]


@pytest.mark.parametrize(("name", "attn_by", "method", "setting", "first"), WALKS)
def test_every_matrix_is_pruned_by_what_the_pruned_layers_before_it_give(
    name, attn_by, method, setting, first
):
    model, block_map, ids = small(name, setting, attn_by, first)
    before = copy_of(model)
    zeros = prune_all_(model, block_map, ids, method, Pattern(0.6))
    after = copy_of(model)
    cut, prefix = cut_matrices(name, setting, attn_by, first), f"{TABLE[name].layers}."
    assert set(zeros) == set(cut)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    for param, value in before.items():
        assert torch.equal(value, after[param]) == (param not in cut), param
    turn = (lambda w: w.T) if TABLE[name].transposed else (lambda w: w)

    def layer(param: str) -> str:
        inside = param.startswith(prefix)
        return param.removeprefix(prefix).partition(".")[0] if inside else "9"

    for param in cut:
        params = {p: (after if layer(p) < layer(param) else before)[p] for p in before}
        mean, observe = None, METHODS[method].observe
        if observe is not None:
            mean = sum(observe(x) for x in fed(model, params, param, ids)) / len(ids)
        want = METHODS[method].prune(turn(before[param]), mean, Pattern(0.6))
        torch.testing.assert_close(turn(after[param]), want, rtol=1e-8, atol=1e-10)
        n_out, n_in = want.shape
        n_zeros = n_out * int(n_in * 0.6) if method in BY_ROW else int(n_out * n_in * 0.6) + 1
        assert int((after[param] == 0).sum()) == zeros[param] == n_zeros


def test_sparsity_zero_leaves_the_model_as_it_is():
    for method in METHODS:
        model, block_map, ids = small("llama")
        before = copy_of(model)
        prune_all_(model, block_map, ids, method, Pattern(0))
        assert all(torch.equal(value, before[name]) for name, value in copy_of(model).items())


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "opt"])
def test_batches_change_nothing(name, monkeypatch):
    """Sequences one by one, two and one, or all at once: masks and positions serve any batch."""
    made = []
    for batch in (11, 22, 33):  # tokens, of sequences of 11
        monkeypatch.setattr("twistlm.baselines.walk.BATCH", batch)
        model, block_map, ids = small(name)
        prune_all_(model, block_map, ids)
        made.append(copy_of(model))
    for other in made[1:]:
        torch.testing.assert_close(other, made[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_matrices_with_one_input_share_a_statistic_and_a_layer_goes_before_the_next(name):
    """q, k, v (and gate, up) are fed one tensor: one Hessian for all of them."""
    model, block_map, ids = small(name, first=0)
    alive: list[weakref.ref] = []
    counts = []

    def observe(x: Tensor) -> Tensor:
        counts.append(sum(ref() is not None for ref in alive))
        made = sparsegpt.observe(x)
        alive.append(weakref.ref(made))
        return made

    prune_all_(model, block_map, ids, observe=observe)
    assert len(counts) == 3 * 4  # of a layer: attention, its output, FFN, its output
    assert max(counts) <= 4  # three of this layer, and the last one of the layer before


def test_numbers_that_are_not_finite_are_refused():
    model, block_map, ids = small("gpt2")
    with torch.no_grad():
        model.get_parameter("transformer.h.1.mlp.c_fc.weight")[0, 0] = float("nan")
    before = copy_of(model)
    for name in METHODS:
        with pytest.raises(ValueError, match=r"mlp.c_fc.weight holds 1 numbers that are not fin"):
            prune_all_(model, block_map, ids, name)
        for param, value in copy_of(model).items():
            assert torch.equal(value.nan_to_num(), before[param].nan_to_num()), name
    model, block_map, ids = small("gpt2")
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("inf"))
    with pytest.raises(ValueError, match=r"feeds into .*c_attn.weight .* not finite"):
        prune_all_(model, block_map, ids, "wanda")


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


CUT = "data.seq_len=20 blocks.n_ffn=4 blocks.shared_first=1 blocks.shared_last=0"


@pytest.fixture
def tried(monkeypatch, capsys):
    """`lab prune` with these words: code, output and errors."""
    return lambda text: in_process(
        monkeypatch, capsys, "lab", "prune", *text.split(), "--device", "cpu"
    )


@pytest.fixture
def prune(tried):
    """The same, which ends well; what it printed."""

    def prune(text: str) -> str:
        code, out, err = tried(text)
        assert code == 0, err
        return out

    return prune


@pytest.mark.parametrize(
    ("name", "method"), [*(("gpt2", m) for m in METHODS), ("llama", "sparsegpt")]
)
def test_command_writes_a_plain_model(home, prune, name, method):
    asked = f"{name} {CUT} --method {method} --ratio 1/4 --data tokens --n 8"
    text = prune(f"{asked} -o out")
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
    # the same seed gives the same bytes; another other sequences, which only some methods read
    weights = Path("out/model.safetensors").read_bytes()
    prune(f"{asked} -o out")
    assert Path("out/model.safetensors").read_bytes() == weights
    prune(f"{asked} -o seeded --seed 1")
    same = Path("seeded/model.safetensors").read_bytes() == weights
    assert same == (METHODS[method].observe is None)


@pytest.mark.parametrize("method", ["fisher", "mask-fisher", "taylor", "magnitude", "random"])
def test_command_writes_a_ticket(home, prune, method):
    for out in ("one", "two"):
        prune(f"gpt2 {CUT} --method block:{method} --ratio 1/4 --data tokens --n 4 -o {out}")
    one, two = (deploy.read_ticket(Path(name)) for name in ("one", "two"))
    assert one["blueprint"] == two["blueprint"]
    assert one["method"] == f"block:{method}"
    assert list(one["widths"].values()) == ["1/4"] * 4
    deploy.load_ticket(Path("one"))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_repaired_ticket_is_a_ticket(home, prune, name):
    asked = f"{name} {CUT} --method block:random --ratio 2/4 --data tokens --n 8"
    prune(f"{asked} -o plain")
    prune(f"{asked} -o fitted --repair lstsq")
    plain, fitted = (deploy.read_ticket(Path(out)) for out in ("plain", "fitted"))
    assert plain["blueprint"] == fitted["blueprint"]
    assert "repair" not in plain
    assert fitted["repair"] == {"how": "lstsq", "data": "tokens", "n_sequences": 8}
    a, b = (dict(deploy.load_ticket(Path(o)).named_parameters()) for o in ("plain", "fitted"))
    row, tails = TABLE[name], ("weight", "bias") if name == "gpt2" else ("weight",)
    outs = [f"{row.layers}.{i}.{out}" for i in (1, 2) for out in (row.attn_out, row.ffn_out)]
    changed = {param for param in a if not torch.equal(a[param], b[param])}
    assert changed == {f"{out}.{tail}" for out in outs for tail in tails}
    assert "lstsq" in Path("fitted/README.md").read_text()


def test_a_run_brings_its_own_tokens_and_tokenizer(tmp_path, monkeypatch, prune):
    monkeypatch.chdir(tmp_path)
    write_words("tokens", [f"w{i}" for i in range(VOCAB)], 1600)
    last = rounds.train(tiny("tokens", Path("run"), train={"rounds": 1}), quiet=True)
    prune("run -o out --method wanda --ratio 2/4 --n 9")
    before, after = (copy_of(AutoModelForCausalLM.from_pretrained(name)) for name in (last, "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(cut_matrices("gpt2", "both", "head", 1))
    record = json.loads(Path("out/prune.json").read_text())
    assert record["calibration"] == {"data": "tokens", "n_sequences": 9, "seq_len": 16, "seed": 0}
    assert AutoTokenizer.from_pretrained("out").encode("w3 w5") == [3, 5]


def test_a_ratio_is_a_sparsity_of_each_kind(home):
    parent = open_parent("gpt2", "cpu", CUT.split())
    found = patterns(parent.block_map, None, "attn=1,ffn=1/4", None)
    shares = {(name[-4:], p.sparsity) for name, p in found.items()}
    assert shares == {("attn", Fraction(0)), (".ffn", Fraction(3, 4))}
    weights = parent.central.weights.clone()
    request = PruneRequest(method="magnitude", ratio="attn=1,ffn=1/4")
    made = write(parent, Path("out"), request, quiet=True)
    assert torch.equal(weights, parent.central.weights)
    assert {n for p, n in made["zeros"].items() if "attn" in p} == {0}
    assert {n for p, n in made["zeros"].items() if "mlp" in p} == {32 * 48 * 3 // 4 + 1}


BAD = {  # what follows `--method` -> a part of the sentence
    "wands --ratio 1/4": "--method 'wands': use one of sparsegpt",
    "magnitude": "give one of --sparsity, --ratio and --nm",
    "wanda --sparsity 0.5 --ratio 2/4": "give one of",
    "magnitude --sparsity 1": "sparsity 1: it must lie in [0, 1)",
    "magnitude --sparsity=-0.1": "it must lie in [0, 1)",
    "magnitude --sparsity nan": "--sparsity 'nan' is no number",
    "magnitude --sparsity half": "--sparsity 'half' is no number",
    "wanda --ratio 1/3": "no whole number of attn blocks",
    "block:fisher --ratio 1/3": "no whole number of attn blocks",
    "block:random --sparsity 0.5": "give --ratio",
    "sparsegpt --nm 4:2": "--nm '4:2': use N:M with 0 < N < M",
    "sparsegpt --nm 2:5 --data tokens --n 2": "of 5",
    "wanda --nm 2:4 --ratio 1/4": "sparsity of 0.5, not 0.75",
    "wanda --ratio 1/4": "no tokens to calibrate on: give --data",
    "wanda --ratio 1/4 --data tokens": "tokens is too short for --n 128: it has 35 sequences of "
    "data.seq_len = 20",
    "block:taylor --ratio 1/4 --data tokens --n 36": "tokens is too short for --n 36",
    "wanda --ratio 1/4 --data tokens --n 2 data.seq_len=50": "data.seq_len = 50: the model has 40",
    "block:random --ratio 2/4 --repair ols": "use one of bias",
    "wanda --ratio 2/4 --repair bias": "removes none",
    "block:random --ratio 2/4 --repair bias": "has a bias",
    "block:random --ratio 2/4 --repair lstsq": "no tokens to calibrate on: give --data",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_one_sentence_and_writes_nothing(home, tried, text):
    before = sorted(home.rglob("*"))
    name = "llama" if "bias" in text else "gpt2"
    check_refusal(*tried(f"{name} {CUT} -o out --method {text}"), (BAD[text],))
    assert sorted(home.rglob("*")) == before


def test_folders_in_use_are_left_alone(home, tried, prune):
    asked = f"{CUT} --method magnitude --ratio 1/4"
    for record in ("prune.json", "ticket.json"):  # their names do not make them ours
        Path(f"orchard-{record}").mkdir()
        Path(f"orchard-{record}", record).write_text('{"trees": 3}')
    for out in ("gpt2", "llama", "orchard-prune.json", "orchard-ticket.json"):
        check_refusal(*tried(f"gpt2 -o {out} {asked}"), ("choose another folder",))
    prune(f"gpt2 -o once {asked}")
    check_refusal(*tried(f"once -o once {asked}"), ("is the model to prune",))
    AutoModelForCausalLM.from_pretrained("once")
