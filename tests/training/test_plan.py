"""The paper as arithmetic: parameters, Table 2's communication column, asymptotic memory."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from commands import toml
from conftest import tiny, tiny_table

from paper.printed import gpt2_params, half_shares
from twistlm import cli, config
from twistlm.data.token_file import open_tokens
from twistlm.model import families, huggingface
from twistlm.model.blocks import count
from twistlm.training import plan
from twistlm.training.teacher import write_cache

TABLE_2 = {  # TB with 10, 8, 6 and 4 of 12 blocks, 4 workers, 3 epochs
    "attn": (44.35, 43.20, 42.05, 40.90),
    "both": (42.05, 38.60, 35.14, 31.69),
    "ffn": (43.20, 40.90, 38.60, 36.29),
}


@pytest.fixture(scope="module")
def paper() -> plan.Plan:
    return plan.make(config.load("paper"))


def test_all_13_communication_entries_of_table_2(paper):
    assert paper.n_params == gpt2_params(12, 768) == 124_439_808
    ours = {(row.setting, row.ratio): row for row in paper.rows}
    assert paper.paper_rounds == 11_427
    for kind, column in TABLE_2.items():
        found = [ours[kind, f"{k}/12"].paper_bytes / 1e12 for k in (10, 8, 6, 4)]
        assert found == pytest.approx(column, abs=0.00501), kind
    assert ours["full", "12/12"].paper_bytes / 1e12 == pytest.approx(45.50, abs=0.00501)
    assert paper.true_rounds == 2_856  # of 15 local steps
    for row in paper.rows:
        by_hand = row.n_params * 4 * 2 * 4 * 2_856
        assert row.true_bytes == by_hand
        assert row.carried_bytes == 3 * by_hand


def test_asymptotic_memory_tends_to_a_half():
    found = half_shares()
    for column in zip(*(shares.values() for shares in found.values()), strict=True):
        assert list(column) == sorted(column, reverse=True)
        assert 0.5 < column[-1] < 0.57
    assert list(found["GPT-2 small"].values()) == pytest.approx([0.772, 0.658], abs=5e-4)


def test_the_formula_agrees_with_the_block_map_where_half_is_whole():
    """GPT-2 medium has 16 heads: 8 of them, and 8 of 16 FFN chunks, counted on real shapes."""
    size = config.ModelConfig(config={"n_layer": 24, "n_embd": 1024, "n_head": 16})
    model = huggingface.on_meta(huggingface.planned_config(size))
    blocks = config.BlocksConfig(n_ffn=16)
    cut = families.partition(model, blocks)
    counted = count(cut, huggingface.shapes(model), {group.name: 8 for group in cut.groups})
    assert counted == gpt2_params(24, 1024, n_cut=20, share=0.5)


def plan_of(tmp_path, capsys, *args: str) -> tuple[dict, str]:
    """What `twistlm plan` writes and prints."""
    target = tmp_path / "plan.json"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["twistlm", "plan", *args, "--json", str(target)])
        with pytest.raises(SystemExit) as done:
            cli.main()
    assert done.value.code == 0
    return json.loads(target.read_text()), " ".join(capsys.readouterr().out.split())


def test_a_teacher_s_parameters_bytes_and_share_of_the_time(tokens, tmp_path, capsys):
    """A teacher with twice the layers is counted as it is; of a cache, what workers are sent."""
    start = tiny(tokens, tmp_path / "run").model
    deep = replace(start, config=start.config | {"n_layer": 6})
    model = huggingface.load(deep, 0)
    model.save_pretrained(tmp_path / "teacher")
    n_params = sum(p.numel() for p in model.parameters())
    table = tiny_table(tokens, tmp_path / "run", train={"moments": "reset"})
    made = toml(tmp_path / "tiny.toml", table)
    alone, printed = plan_of(tmp_path, capsys, made)
    assert alone["teacher_params"] == alone["teacher_bytes"] == 0
    assert "teacher" not in printed
    taught, printed = plan_of(tmp_path, capsys, made, f"train.teacher={tmp_path / 'teacher'}")
    assert (taught["teacher_params"], taught["teacher_bytes"]) == (n_params, 0)
    assert f"{n_params:,} parameters beside every worker" in printed
    cfg = config.load(str(made))
    n_logits = cfg.train.batch * 15 * 64
    added = taught["worker_bytes"] - alone["worker_bytes"]
    assert added == 2 * (n_params + n_logits)
    t = cfg.train
    n_predictions = t.n_workers * t.interval * t.batch * 15  # predictions
    cached, _ = plan_of(tmp_path, capsys, made, "train.teacher=cache")
    assert cached["teacher_bytes"] == n_predictions * 64 * 4
    write_cache(open_tokens(tokens), str(tmp_path / "teacher"), 5, 16, "cpu", quiet=True)
    cached, printed = plan_of(tmp_path, capsys, made, "train.teacher=cache")
    assert cached["teacher_bytes"] == n_predictions * 5 * 4
    assert "the teacher's cache: " in printed


def test_without_tokens_a_plan_asks_how_many_there_will_be(tmp_path, capsys, monkeypatch):
    args = ["paper", "data.train=gone", "data.planned_sequences=0"]
    monkeypatch.setattr("sys.argv", ["twistlm", "plan", *args])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 2
    assert "no token file gone.bin" in (said := capsys.readouterr().err)
    assert "without tokens, give data.planned_sequences=N" in said
    made, _ = plan_of(tmp_path, capsys, *args[:2], "data.planned_sequences=12000")
    assert made["true_rounds"] == 3 * 12000 // (15 * 2 * 4)  # epochs, steps, batch, workers


def test_a_plan_for_any_family_and_config():
    made = plan.make(config.load("smollm2", ["train.rounds=10"]))
    assert made.n_params == 134_515_008  # SmolLM2-135M
    assert ("both", "6/12") not in {(row.setting, row.ratio) for row in made.rows}  # 1.5 kv groups


def third(*overrides: str, gbit: float = 1, tflops: float = 100) -> plan.Plan:
    """GPT-2 small with a third of the blocks."""
    held = ("blocks.k_attn=4", "blocks.k_ffn=4")
    return plan.make(config.load("paper", [*held, *overrides]), gbit, tflops)


@pytest.mark.parametrize(
    ("n_workers", "ray", "sharded", "ddp"),
    [(4, 2.77, 0.52, 11.2), (16, 11.1, 0.65, 14.0), (64, 44.4, 0.68, 14.7)],
)
def test_gpt2_small_at_a_third_in_float32(n_workers, ray, sharded, ddp):
    made = third("train.moments=reset", f"train.n_workers={n_workers}")
    gigabytes = {engine: n / 1e9 for engine, n in made.link_bytes.items()}
    assert gigabytes == pytest.approx({"ray": ray, "sharded": sharded, "ddp": ddp}, rel=0.008)
    assert made.link_seconds["ray"] == pytest.approx(8 * made.link_bytes["ray"] / 1e9)


def test_which_engine_to_take():
    """Ray beside slow workers; shards beside fast ones; a ring where three rows meet one step."""
    assert third(gbit=10, tflops=0.01).take == "ray"
    assert third().take == "sharded"
    fast = third(gbit=100, tflops=1)  # the object store does not keep up
    assert fast.link_seconds["ray"] == pytest.approx(8 * fast.link_bytes["ray"] / 5e9)
    assert third("train.interval=1").take == "ddp"


def test_carried_moments_triple_the_bytes_and_a_narrow_wire_takes_them_back():
    plain = third("train.moments=reset").link_bytes["sharded"]
    assert third().link_bytes["sharded"] == pytest.approx(3 * plain)
    # down 4 + 2 + 2, up 2 + 2 + 2 bytes of 8; down 4 + 1 + 2, up 1 + 1 + 2, and scales
    assert third("run.wire=bf16").link_bytes["sharded"] == pytest.approx(12 / 8 * plain)
    narrow = third("run.wire=int8").link_bytes["sharded"]
    assert narrow == pytest.approx((7 + 5 * 4 / 256) / 8 * plain, rel=1e-6)


SHAPES = {
    "small": (),
    "medium": ("n_layer=24", "n_embd=1024", "n_head=16"),
}


def gpu_bytes(cfg: config.Config) -> tuple[int, int]:
    """Of a worker, and of a process that plays all of them."""
    run = plan.counted(cfg)
    return plan.gpu_bytes(run, plan.teacher_cost(run)[0])


@pytest.mark.parametrize(
    ("shape", "batch", "n_ffn", "measured"),
    [("small", 2, 12, 3_091e6), ("medium", 8, 16, 13_364e6)],
)
def test_memory_of_a_worker_beside_an_h200(shape, batch, n_ffn, measured):
    """`peak MB` of whole models in docs/results.md, by `twistlm bench train paper`."""
    own = [f"model.config.{key}" for key in SHAPES[shape]] + [f"blocks.n_ffn={n_ffn}"]
    whole = [f"blocks.k_attn={n_ffn}", f"blocks.k_ffn={n_ffn}", f"train.batch={batch}"]
    cfg = config.load("paper", ["model.weights=random", *own, *whole])
    assert gpu_bytes(cfg)[0] == pytest.approx(measured, rel=0.05)


def test_memory_of_the_recipe_beside_an_h200():
    """`peak_bytes` of SmolLM2's 250 rounds with masks and a teacher (docs/results.md)."""
    found = gpu_bytes(config.load("smollm2"))
    assert found[1] == pytest.approx(11_926_939_136, rel=0.05)
    alone = gpu_bytes(config.load("smollm2", ["train.teacher=none"]))
    n_logits, n_params = 8 * 1023 * 49_152, 134_515_008
    assert found[1] - alone[1] == 2 * (n_logits + n_params)  # its weights, its logits
    assert found[1] - found[0] == 2 * 3 * 4 * n_params


HAND = ["masks=round", "mask_attn=[]", "mask_ffn=[]", "nested=0.0"]
HAND += ["shared_first=1", "shared_last=1"]


def hand_memory(*changes: str) -> tuple[int, int]:
    """Of the demo's GPT-2 (4 layers of d = 48, 12 heads, FFN 192), inner two layers cut."""
    own = [f"blocks.{change}" for change in HAND]
    return gpu_bytes(config.load("demo", [*own, "train.batch=2", *changes]))


def test_memory_by_hand():
    """Every term of a worker's and of a process's bytes, counted by hand."""
    n_full, n_tokens = 140_832, 2 * 64
    # a head is 48 x 12 + 12 numbers in, 4 x 48 out; 16 neurons are 48 x 16 + 16 in, 16 x 48 out
    subnet = {
        (a, f): n_full - 2 * (12 - a) * 780 - 2 * (12 - f) * 1552 for a in (3, 6) for f in (4, 6)
    }
    # norms and residual; q, k, v and 2 outputs; FFN in, out
    layer = 3 * 48 + (3 + 2) * 48 + 2 * 192
    whole = hand_memory()
    n_logits = 2 * 63 * 512
    kept = 2 * ((4 * layer + 2 * 48) * n_tokens + n_logits)
    assert whole[0] == 16 * n_full + plan.REST + kept
    assert whole[1] - whole[0] == 2 * 3 * 4 * n_full  # the central buffer and its sums
    half = hand_memory("blocks.k_attn=6", "blocks.k_ffn=6")  # gated: a third output of attention
    less = 2 * 2 * n_tokens * (5 * 48 - (3 + 3) * 24 + 192)
    assert whole[0] - half[0] == 16 * (n_full - subnet[6, 6]) + less
    # a trainer for every width that comes up, activations of the largest alone
    both = hand_memory("blocks.k_attn=[6, 3]", "blocks.k_ffn=6")
    assert both[0] - half[0] == 16 * subnet[3, 6]
    four = hand_memory("blocks.k_attn=[6, 3]", "blocks.k_ffn=[6, 4, 4]")  # 6 rounds, 4 pairs
    assert four[0] - half[0] == 16 * (subnet[3, 6] + subnet[6, 4] + subnet[3, 4])
    own = ("blocks.widths=worker", "blocks.k_attn=[6, 6, 3, 3]", "blocks.k_ffn=[6, 6, 4, 4]")
    assert hand_memory(*own)[0] - half[0] == 16 * subnet[3, 4]  # 2 pairs
    assert hand_memory("train.teacher=cache") == whole  # its predictions come with the tokens
    outer = hand_memory("train.outer=nesterov(0.7, 0.6)")
    assert (outer[0], outer[1]) == (whole[0], whole[1] + 4 * n_full)
    dense = hand_memory("train.method=dense")
    assert dense[1] - dense[0] == 3 * 4 * n_full  # nothing is added up
