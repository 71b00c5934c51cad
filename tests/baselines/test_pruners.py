"""Post-training pruning: each method against a loop written here, one contract for all of them."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from commands import check_refusal, in_process
from conftest import make_tokens, tiny, write_words
from families_table import TABLE, VOCAB, fed, tiny_model, ways
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from twistlm.baselines.methods import (
    METHODS,
    Sparsity,
    hessian,
    input_norms,
    magnitude,
    prune_,
    sparsegpt,
    wanda,
    zpruner,
)
from twistlm.config import BlocksConfig
from twistlm.model import families
from twistlm.model.blocks import BlockMap
from twistlm.training import rounds

HALF = Fraction(1, 2)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def correlated(n_tokens: int, n_inputs: int, seed: int = 1) -> Tensor:
    """Inputs [tokens, in] that say much about each other."""
    return draw(n_tokens, n_inputs, seed=seed) @ draw(n_inputs, n_inputs, seed=seed + 1)


# ---------------------------------------------------------------- one matrix


def obs(weight: Tensor, hessian: Tensor, sparsity: Sparsity, columns=128, damp=0.01) -> Tensor:
    """Optimal brain surgeon by brute force: an inverse of its own for every column, row by row."""
    weight, hessian, dead = weight.clone(), hessian.clone(), hessian.diagonal() == 0
    n_inputs = weight.shape[1]
    hessian[dead, dead], weight[:, dead] = 1, 0
    hessian.diagonal().add_(damp * hessian.diagonal().mean())
    inverses = [torch.linalg.inv(hessian[j:, j:]) for j in range(n_inputs)]
    gone = torch.zeros_like(weight, dtype=torch.bool)
    for j in range(n_inputs):
        if j % columns == 0:
            some = range(j, min(j + columns, n_inputs))
            cost = torch.stack([weight[:, i] ** 2 / inverses[i][0, 0] for i in some], 1).flatten()
            chosen = cost.argsort().argsort() < int(cost.numel() * sparsity) + 1
            gone[:, some] = chosen.view(len(weight), -1)
        for r in gone[:, j].nonzero():
            weight[r, j:] -= weight[r, j] / inverses[j][0, 0] * inverses[j][0]
            weight[r, j] = 0
    return weight


@pytest.mark.parametrize(("ratio", "columns", "damp"), [("0.25", 5, 0.01), ("2/3", 128, 0.3)])
def test_sparsegpt_is_optimal_brain_surgeon(ratio, columns, damp):
    weight, x, sparsity = draw(6, 12), correlated(40, 12), Fraction(ratio)
    ours = sparsegpt(weight, hessian(x), sparsity, columns, damp)
    want = obs(weight, 2 * x.T @ x, sparsity, columns, damp)
    torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-9)


def test_dead_inputs_lose_their_weights_and_disturb_no_other():
    weight, x = draw(6, 12), correlated(40, 12)
    x[:, [3, 7]] = 0
    ours = sparsegpt(weight, hessian(x), HALF)
    torch.testing.assert_close(ours, obs(weight, 2 * x.T @ x, HALF))
    others = (method(weight, input_norms(x), HALF) for method in (wanda, zpruner))
    assert not any(made[:, [3, 7]].any() for made in (ours, *others))
    nothing = torch.zeros(12, 12, dtype=torch.float64)
    assert not sparsegpt(weight, nothing, HALF).any()


def test_wanda_and_magnitude_are_their_loops():
    weight, x, share = draw(7, 10), correlated(20, 10), Fraction("0.35")
    a = [sum(float(v) ** 2 for v in x[:, j]) for j in range(10)]
    want = weight.clone()
    for row in want:
        order = sorted(range(10), key=lambda j: abs(float(row[j])) * a[j] ** 0.5)
        row[order[: int(10 * share)]] = 0
    ours = wanda(weight, input_norms(x), share)
    assert torch.equal(ours, want)
    # magnitude counts over the matrix, and one more goes
    order, flat = weight.flatten().abs().argsort(), weight.flatten().clone()
    flat[order[: int(70 * share) + 1]] = 0
    assert torch.equal(magnitude(weight, None, share).flatten(), flat)
    # equal scores: the first go
    ones = torch.ones(3, 200, dtype=torch.float64)
    ours = wanda(ones, ones[0], 0.25)
    assert not ours[:, :50].any()
    assert ours[:, 50:].all()


def test_zpruner_is_its_formula():
    """The whole ranking, one weight more at a time: a coefficient moves few places of it."""
    weight, x = draw(15, 20) ** 3, correlated(20, 20)  # heavy tails: many weights are small
    scores = []
    for dim in (1, 0):
        scaled = weight / weight.square().sum(dim, keepdim=True).sqrt()
        scores.append(((scaled - scaled.mean()) / scaled.std()).abs() ** 3)
    rho = float((weight.abs() < 0.1 * weight.abs().mean()).double().mean())
    assert 0.2 < rho < 0.8
    alpha = 0.7 * (1 - 0.3 * rho)
    score = alpha * scores[0] + (1 - alpha) * scores[1]
    norms = x.square().sum(0)
    score *= norms**0.75
    want = weight.clone().flatten()
    for n, place in enumerate(score.flatten().argsort()):
        want[place] = 0
        ours = zpruner(weight, norms, Fraction(n, weight.numel()))
        assert torch.equal(ours.flatten(), want), n


def test_zpruner_survives_zero_rows_zero_columns_and_equal_weights():
    """A NaN would compare false with the threshold and let everything stay."""
    weight = draw(6, 9)
    weight[2], weight[:, 4] = 0, 0
    ours = zpruner(weight, torch.ones(9), 0.6)
    assert ours.isfinite().all()
    assert 54 > int((ours == 0).sum()) >= int(54 * 0.6) + 1
    for odd in (torch.zeros(3, 4), torch.ones(3, 4), torch.ones(1, 1)):
        assert not zpruner(odd, odd[0] ** 0, 0.5).any()  # equal scores go together


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


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


WALKS = [
    *(("gpt2", "head", method, "both", 1) for method in METHODS),
    *((name, by, "wanda", "both", 0) for name, by in ways()),
    *(("llama-gqa", "query", "sparsegpt", setting, 2) for setting in ("attn", "ffn")),
]


@pytest.mark.parametrize(("name", "attn_by", "method", "setting", "first"), WALKS)
def test_every_matrix_is_pruned_by_what_the_pruned_layers_before_it_give(
    name, attn_by, method, setting, first
):
    model, block_map, ids = small(name, setting, attn_by, first)
    before = copy_of(model)
    shares = dict.fromkeys((g.name for g in block_map.groups), 0)
    prune_(model, block_map, METHODS[method], shares, ids)
    assert all(torch.equal(value, before[name]) for name, value in copy_of(model).items())
    zeros = prune_(model, block_map, METHODS[method], dict.fromkeys(shares, 0.6), ids)
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
            model.load_state_dict(params, strict=False)
            inputs = fed(model, param.removesuffix(".weight"), *ids[:, None])
            mean = sum(map(observe, inputs)) / len(ids)
        want = METHODS[method].prune(turn(before[param]), mean, 0.6)
        torch.testing.assert_close(turn(after[param]), want, rtol=1e-8, atol=1e-10)
        n_out, n_in = want.shape
        n_zeros = n_out * int(n_in * 0.6) if method == "wanda" else int(n_out * n_in * 0.6) + 1
        assert int((after[param] == 0).sum()) == zeros[param] == n_zeros


@pytest.mark.parametrize("name", ["gemma3_text", "opt"])
def test_batches_change_nothing(name, monkeypatch):
    """Sequences one by one, two and one, or all at once: masks and positions serve any batch."""
    made = []
    for batch in (11, 22, 33):  # tokens, of sequences of 11
        monkeypatch.setattr("twistlm.baselines.walk.BATCH", batch)
        model, block_map, ids = small(name)
        shares = {g.name: HALF for g in block_map.groups}
        prune_(model, block_map, METHODS["sparsegpt"], shares, ids)
        made.append(copy_of(model))
    for other in made[1:]:
        torch.testing.assert_close(other, made[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("h.1.mlp.c_fc.weight", "mlp.c_fc.weight holds 1 numbers that are not finite"),
        ("wte.weight", r"feeds into .*c_attn.weight .* not finite"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(broken, said):
    model, block_map, ids = small("gpt2")
    ids[0, 0] = 0
    model.get_parameter(f"transformer.{broken}").data[0, 0] = float("nan")
    before = copy_of(model)
    with pytest.raises(ValueError, match=said):
        prune_(model, block_map, METHODS["wanda"], {g.name: HALF for g in block_map.groups}, ids)
    for param, value in copy_of(model).items():
        assert torch.equal(value.nan_to_num(), before[param].nan_to_num())


# ---------------------------------------------------------------- the command


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_tokens(Path("tokens"), 700)
    for name in ("gpt2", "llama"):
        tiny_model(name).save_pretrained(name)
    return tmp_path


CUT = "data.seq_len=20 blocks.n_ffn=4 blocks.shared_first=1 blocks.shared_last=0"


@pytest.fixture
def prune(monkeypatch, capsys):
    """`lab prune` with these words, which ends well or is refused in one sentence."""

    def prune(text: str, refused: str = "") -> None:
        words = "lab", "prune", *text.split(), "--device", "cpu"
        code, out, err = in_process(monkeypatch, capsys, *words)
        if refused:
            check_refusal(code, out, err, (refused,))
        else:
            assert code == 0, err

    return prune


def test_the_command_writes_a_plain_model(home, prune):
    """A run brings its tokens and their tokenizer; the same seed gives the same bytes."""
    write_words("words", [f"w{i}" for i in range(VOCAB)], 1600)
    last = rounds.train(tiny("words", Path("run"), train={"rounds": 1}), quiet=True)
    for out, more in (("out", ""), ("again", ""), ("seeded", "--seed 1")):
        prune(f"run -o {out} --method wanda --ratio 1/4 --n 9 {more}")
    before, after = (copy_of(AutoModelForCausalLM.from_pretrained(name)) for name in (last, "out"))
    record = json.loads(Path("out/prune.json").read_text())
    assert set(record["zeros"]) == set(cut_matrices("gpt2", "both", "head", 1))
    for param, value in before.items():
        n_zeros = record["zeros"].get(param, 0)
        assert torch.equal(value, after[param]) == (n_zeros == 0), param
        assert int((after[param] == 0).sum()) == int((value == 0).sum()) + n_zeros
        assert n_zeros in (0, value.numel() * 3 // 4)
    assert record["calibration"] == {"data": "words", "n_sequences": 9, "seq_len": 16, "seed": 0}
    assert AutoTokenizer.from_pretrained("out").encode("w3 w5") == [3, 5]
    first, same, other = (
        Path(out, "model.safetensors").read_bytes() for out in ("out", "again", "seeded")
    )
    assert first == same != other


def test_folders_in_use_are_left_alone(home, prune):
    asked = f"{CUT} --method magnitude --ratio 1/4"
    for record in ("prune.json", "ticket.json"):  # their names do not make them ours
        Path(f"orchard-{record}").mkdir()
        Path(f"orchard-{record}", record).write_text('{"trees": 3}')
    for out in ("llama", "orchard-prune.json", "orchard-ticket.json"):
        prune(f"gpt2 -o {out} {asked}", "choose another folder")
    prune(f"gpt2 -o once {asked}")
    prune(f"once -o once {asked}", "is the model to prune")
    AutoModelForCausalLM.from_pretrained("once")
