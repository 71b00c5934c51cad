"""The paper as arithmetic: parameters, Table 2's communication column, asymptotic memory."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from twistlm import cli, config
from twistlm.model import count, families, huggingface
from twistlm.training import plan

TABLE_2 = {  # TB, 4 workers, 3 epochs
    ("attn", "10/12"): 44.35, ("attn", "8/12"): 43.20, ("attn", "6/12"): 42.05, ("attn", "4/12"): 40.90,
    ("both", "10/12"): 42.05, ("both", "8/12"): 38.60, ("both", "6/12"): 35.14, ("both", "4/12"): 31.69,
    ("ffn", "10/12"): 43.20, ("ffn", "8/12"): 40.90, ("ffn", "6/12"): 38.60, ("ffn", "4/12"): 36.29,
    ("full", "12/12"): 45.50,
}  # fmt: skip


@pytest.fixture(scope="module")
def paper() -> plan.Plan:
    return plan.make(config.load("paper"))


def test_gpt2_small_has_its_parameters(paper):
    assert paper.n_params == 124_439_808
    assert count.gpt2_params(12, 768, 50257, 1024) == 124_439_808


def test_all_13_communication_entries_of_table_2(paper):
    ours = {(row.setting, row.ratio): row for row in paper.rows}
    assert paper.paper_rounds == 11_427
    for key, terabytes in TABLE_2.items():
        assert ours[key].paper_bytes / 1e12 == pytest.approx(terabytes, abs=0.00501), key


def test_true_bytes_are_those_of_15_local_steps(paper):
    assert paper.true_rounds == 2_856
    for row in paper.rows:
        by_hand = row.n_params * 4 * 2 * 4 * 2_856
        assert row.true_bytes == by_hand
        assert row.carried_bytes == 3 * by_hand


def test_subnet_counts_follow_the_appendix(paper):
    """N_attn = 4 d_attn d + 3 d_attn + d and N_ffn = 2 d_ffn d + d_ffn + d, 8 of 12 layers cut."""
    d = 768
    rest = 124_439_808 - 8 * (4 * d * d + 3 * d + d + 8 * d * d + 4 * d + d)
    for row in paper.rows:
        k = int(row.ratio.split("/")[0])
        d_attn = d * k // 12 if row.setting in ("attn", "both") else d
        d_ffn = 4 * d * k // 12 if row.setting in ("ffn", "both") else 4 * d
        layer = 4 * d_attn * d + 3 * d_attn + d + 2 * d_ffn * d + d_ffn + d
        assert row.n_params == rest + 8 * layer, row


def test_asymptotic_memory_tends_to_a_half(paper):
    for column in zip(*(shares.values() for shares in paper.half.values()), strict=True):
        assert list(column) == sorted(column, reverse=True)
        assert 0.5 < column[-1] < 0.57
    small = paper.half["GPT-2 small"]
    assert list(small.values()) == pytest.approx([0.772, 0.658], abs=5e-4)


def test_the_formula_agrees_with_the_block_map_where_half_is_whole():
    """GPT-2 medium has 16 heads: 8 of them, and 8 of 16 FFN chunks, counted on real shapes."""
    size = families.GPT2_SIZES["GPT-2 medium"]
    model = huggingface.on_meta(huggingface.planned_config(size))
    blocks = config.BlocksConfig(n_ffn=16)
    cut = families.partition(model, blocks)
    counted = count.count(cut, huggingface.shapes(model), {group.name: 8 for group in cut.groups})
    assert counted == count.gpt2_params(24, 1024, 50257, 1024, n_cut=20, share=0.5)
    assert counted == sum(
        t.numel() for t in _half_by_hand(AutoConfig.for_model("gpt2", **size.config))
    )  # fmt: skip


def _half_by_hand(cfg):
    """A stock GPT-2 on the meta device whose 20 middle layers are cut with plain slicing."""
    for name, p in huggingface.on_meta(cfg).named_parameters():
        parts = name.split(".")
        if parts[1] != "h" or not 2 <= int(parts[2]) < 22 or parts[3].startswith("ln"):
            yield p
        elif parts[-2] in ("c_attn", "c_fc"):
            yield p[..., : p.shape[-1] // 2]
        else:
            yield p[: p.shape[0] // 2] if parts[-1] == "weight" else p


def test_the_command_prints_and_writes_it(tmp_path, monkeypatch, capsys):
    target = tmp_path / "plan.json"
    monkeypatch.setattr("sys.argv", ["twistlm", "plan", "paper", "--json", str(target)])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 0
    printed = capsys.readouterr().out
    for word in ("124,439,808", "11,427", "2,856", "45.50", "GPT-2 XL"):
        assert word in printed
    assert json.loads(target.read_text())["n_params"] == 124_439_808


def test_a_plan_for_any_family_and_config():
    made = plan.make(config.load("smollm2", ["train.rounds=10"]))
    assert made.n_params == 134_515_008  # SmolLM2-135M
    assert made.half == {}
    assert ("both", "6/12") not in {(row.setting, row.ratio) for row in made.rows}  # 1.5 kv groups
