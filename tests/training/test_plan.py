"""The paper as arithmetic: parameters, Table 2's communication column, asymptotic memory."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import toml
from conftest import tiny, tiny_table

import paper
from paper.printed import gpt2_params
from twistlm import cli, config
from twistlm.data import builtin
from twistlm.data.token_file import open_tokens
from twistlm.model import huggingface
from twistlm.system.provenance import version
from twistlm.training import checkpoint, plan, rounds
from twistlm.training.teacher import write_cache
from twistlm.transport.protocol import RunDescription

SMOLLM2 = str(Path(paper.__file__).with_name("smollm2.toml"))
TABLE_2 = {  # TB with 10, 8, 6 and 4 of 12 blocks, 4 workers, 3 epochs
    "attn": (44.35, 43.20, 42.05, 40.90),
    "both": (42.05, 38.60, 35.14, 31.69),
    "ffn": (43.20, 40.90, 38.60, 36.29),
}


def test_all_13_communication_entries_of_table_2():
    paper = plan.make(config.load("paper"))
    assert paper["n_params"] == gpt2_params(12, 768) == 124_439_808
    ours = {(row["setting"], row["ratio"]): row for row in paper["rows"]}
    assert paper["paper_rounds"] == 11_427
    for kind, column in TABLE_2.items():
        found = [ours[kind, f"{k}/12"]["paper_bytes"] / 1e12 for k in (10, 8, 6, 4)]
        assert found == pytest.approx(column, abs=0.00501), kind
    assert ours["full", "12/12"]["paper_bytes"] / 1e12 == pytest.approx(45.50, abs=0.00501)
    assert paper["true_rounds"] == 2_856  # of 15 local steps
    for row in paper["rows"]:
        by_hand = row["n_params"] * 4 * 2 * 4 * 2_856
        assert row["true_bytes"] == by_hand
        assert row["carried_bytes"] == 3 * by_hand


GPT2_SIZES = ((12, 768), (24, 1024), (36, 1280), (48, 1600))  # layers and d, small to XL


@pytest.mark.parametrize(("shared", "first"), [(4, 0.772), (0, 0.658)])
def test_asymptotic_memory_tends_to_a_half(shared, first):
    """What a subnet with half the blocks keeps of the parameters, by the appendix."""
    shares = [gpt2_params(n, d, n - shared, 0.5) / gpt2_params(n, d) for n, d in GPT2_SIZES]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(first, abs=5e-4)
    assert 0.5 < shares[-1] < 0.57


def plan_of(tmp_path, *args: str) -> dict:
    """What `twistlm plan` writes."""
    target = tmp_path / "plan.json"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["twistlm", "plan", *args, "--json", str(target)])
        with pytest.raises(SystemExit) as done:
            cli.main()
    assert done.value.code == 0
    return json.loads(target.read_text())


def test_a_teacher_s_parameters_and_bytes(tokens, tmp_path):
    """A teacher with twice the layers is counted as it is; of a cache, what workers are sent."""
    start = tiny(tokens, tmp_path / "run").model
    model = huggingface.load(replace(start, config=start.config | {"n_layer": 6}), 0)
    teacher = str(tmp_path / "teacher")
    model.save_pretrained(teacher)
    n_params = sum(p.numel() for p in model.parameters())
    made = toml(tmp_path / "tiny.toml", tiny_table(tokens, tmp_path / "run"))
    alone, taught = plan_of(tmp_path, made), plan_of(tmp_path, made, f"train.teacher={teacher}")
    assert alone["teacher_params"] == alone["teacher_bytes"] == 0
    assert (taught["teacher_params"], taught["teacher_bytes"]) == (n_params, 0)
    n_logits = 2 * 15 * 64  # batch, predictions, vocabulary
    assert taught["worker_bytes"] - alone["worker_bytes"] == 2 * (n_params + n_logits)
    n_predictions = 3 * 3 * 2 * 15  # workers, steps, batch
    cached = plan_of(tmp_path, made, "train.teacher=cache")
    assert cached["teacher_bytes"] == n_predictions * 64 * 4
    write_cache(open_tokens(tokens), teacher, 5, 16, "cpu", quiet=True)
    cached = plan_of(tmp_path, made, "train.teacher=cache")
    assert cached["teacher_bytes"] == n_predictions * 5 * 4


def test_a_plan_of_a_control_is_one_that_trains(tokens, tmp_path):
    """Dropout's K may be below N / S, data parallel has none; both train the central model itself,
    without an outer optimizer."""
    blocks = {"k_attn": [1], "k_ffn": [1]}
    cfg = tiny(tokens, tmp_path / "run", blocks=blocks, train={"outer": "nesterov(0.7, 0.6)"})
    with pytest.raises(ValueError, match=r"k_attn = 1 .* legal K are 2\.\.4"):
        plan.make(cfg)
    for method in ("dropout", "dense"):
        made = plan.make(config.override(cfg, [f"train.method={method}"]))
        assert made["process_bytes"] == made["worker_bytes"]
        # the engines of rounds refuse it
        assert (made["take"], list(made["link_bytes"])) == ("ddp", ["ddp"])
        assert made["legal_k"] == {} if method == "dense" else {"attn": (1, 4), "ffn": (1, 4)}
        plain = plan.make(config.override(cfg, [f"train.method={method}", "train.outer=none"]))
        assert plain["link_bytes"] == made["link_bytes"]


def test_a_plan_is_of_the_weights_that_are_here(tokens, tmp_path):
    """A folder, and a run that begins with it, whatever `model.config` says; types must agree."""
    start = tiny(tokens, tmp_path / "run").model
    weights, run = str(tmp_path / "start"), str(tmp_path / "run")
    huggingface.load(start, 0).save_pretrained(weights)
    made = toml(tmp_path / "tiny.toml", tiny_table(tokens, run))
    n_params = plan_of(tmp_path, made)["n_params"]
    other = (f"model.weights={weights}", "model.config.n_layer=9")
    assert plan_of(tmp_path, made, *other)["n_params"] == n_params
    with pytest.raises(ValueError, match=r"is a gpt2, but model\.type = 'llama'"):
        plan.make(config.load(made, [f"model.weights={weights}", "model.type=llama"]))


def test_folders_that_are_called_as_words_of_the_config(tokens, tmp_path, monkeypatch):
    """`random` weights and the teacher `start` are no runs of these names, which are larger."""
    monkeypatch.chdir(tmp_path)
    cfg = tiny(tokens, Path("run"))
    n_params = plan.make(cfg)["n_params"]
    huggingface.load(cfg.model, 0).save_pretrained("given")
    larger = {"model": {"config": cfg.model.config | {"n_layer": 6}}, "train": {"rounds": 1}}
    for name in ("random", "start"):
        rounds.train(tiny(tokens, Path(name), **larger), quiet=True)
    assert plan.make(cfg)["n_params"] == n_params
    taught = config.override(cfg, ["model.weights=given", "train.teacher=start"])
    assert plan.make(taught)["teacher_params"] == n_params
    assert checkpoint.resolved(taught) == taught


def test_bytes_of_a_round_with_a_k_for_every_worker():
    """One whole worker and three half ones, each counted once."""
    sizes = [124_439_808] + 3 * [96_106_752]
    asked = ("data.planned_sequences=100000", "train.moments=reset", "run.wire=fp32")
    made = plan.make(config.load("wiki-gpt2", asked))
    assert made["link_bytes"]["sharded"] == 8 * sum(sizes) // 4 * 3 // 4


def test_without_tokens_a_plan_takes_how_many_there_will_be(tmp_path):
    made = plan_of(tmp_path, "paper", "data.train=gone", "data.planned_sequences=12000")
    assert made["true_rounds"] == 3 * 12000 // (15 * 2 * 4)  # epochs, steps, batch, workers


def test_a_plan_does_not_make_the_built_in_corpus(tmp_path, monkeypatch):
    """It counts the sequences of one that a run has made, and until then those that are given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtin, "documents", lambda: ["a text " * 99, "another text " * 99])
    whole = ("train.rounds=0", "train.epochs=1")
    with pytest.raises(ValueError, match=r"made when a run .* give data\.planned_sequences=N"):
        plan.make(config.load("demo", whole))
    whole += ("train.teacher=cache", "data.planned_sequences=12000")
    assert plan_of(tmp_path, "demo", *whole)["n_sequences"] == 12000
    assert not (tmp_path / "runs").exists()
    n_tokens = open_tokens(builtin.resolve(builtin.NAME, "train")).meta.n_tokens
    assert plan_of(tmp_path, "demo", *whole)["n_sequences"] == n_tokens // 64 > 1


def third(*overrides: str, gbit: float = 1, tflops: float = 100) -> dict:
    """GPT-2 small with a third of the blocks."""
    held = ("blocks.k_attn=4", "blocks.k_ffn=4")
    return plan.make(config.load("paper", [*held, *overrides]), gbit, tflops)


@pytest.mark.parametrize(
    ("n_workers", "ray", "sharded", "ddp"), [(4, 0.644, 0.52, 11.2), (64, 0.690, 0.68, 14.7)]
)
def test_gpt2_small_at_a_third_in_float32(n_workers, ray, sharded, ddp):
    made = third("train.moments=reset", f"train.n_workers={n_workers}")
    gigabytes = {engine: n / 1e9 for engine, n in made["link_bytes"].items()}
    assert gigabytes == pytest.approx({"ray": ray, "sharded": sharded, "ddp": ddp}, rel=0.008)
    assert made["link_seconds"]["ray"] == pytest.approx(8 * made["link_bytes"]["ray"] / 1e9)


def test_which_engine_to_take():
    """Ray beside slow workers; shards beside fast ones; a ring where three rows meet one step."""
    assert third(gbit=10, tflops=0.01)["take"] == "ray"
    assert third()["take"] == "sharded"
    fast = third(gbit=100, tflops=1)  # the object store does not keep up
    assert fast["link_seconds"]["ray"] == pytest.approx(8 * fast["link_bytes"]["ray"] / 5e9)
    assert third("train.interval=1")["take"] == "ddp"


def test_carried_moments_triple_the_bytes_and_a_narrow_wire_takes_them_back():
    plain = third("train.moments=reset")["link_bytes"]["sharded"]
    assert third()["link_bytes"]["sharded"] == pytest.approx(3 * plain)
    # down 4 + 2 + 2, up 2 + 2 + 2 bytes of 8; down 4 + 1 + 2, up 1 + 1 + 2, and scales
    assert third("run.wire=bf16")["link_bytes"]["sharded"] == pytest.approx(12 / 8 * plain)
    narrow = third("run.wire=int8")["link_bytes"]["sharded"]
    assert narrow == pytest.approx((7 + 5 * 4 / 256) / 8 * plain, rel=1e-6)


def gpu_bytes(cfg: config.Config) -> tuple[int, int]:
    """Of a worker, and of a process that plays all of them."""
    made = plan.make(config.override(cfg, ["train.rounds=1"]))
    return made["worker_bytes"], made["process_bytes"]


def test_memory_of_a_worker_beside_an_h200():
    """`peak MB` of a whole GPT-2 medium in docs/results.md, by `twistlm bench train paper`."""
    own = [f"model.config.{key}" for key in ("n_layer=24", "n_embd=1024", "n_head=16")]
    own += [f"blocks.{key}=16" for key in ("n_ffn", "k_attn", "k_ffn")]
    cfg = config.load("paper", ["model.weights=random", *own, "train.batch=8"])
    assert gpu_bytes(cfg)[0] == pytest.approx(13_364e6, rel=0.05)


def test_memory_of_the_recipe_beside_an_h200():
    """`peak_bytes` of SmolLM2's 250 rounds with masks and a teacher (docs/results.md)."""
    whole = ["blocks.deal=random", "blocks.widths=cycle", "blocks.k_attn=3", "blocks.k_ffn=12"]
    found = gpu_bytes(config.load(SMOLLM2, whole))
    rows = plan.make(config.load(SMOLLM2, ["train.rounds=1"]))["rows"]
    assert ("both", "6/12") not in {(row["setting"], row["ratio"]) for row in rows}  # 1.5 kv groups
    assert found[1] == pytest.approx(11_926_939_136, rel=0.05)
    alone = gpu_bytes(config.load(SMOLLM2, [*whole, "train.teacher=none"]))
    n_logits, n_params = 8 * 1023 * 49_152, 134_515_008
    assert found[1] - alone[1] == 2 * (n_logits + n_params)  # its weights, its logits
    assert found[1] - found[0] == 2 * 3 * 4 * n_params


def test_memory_of_one_worker_with_a_large_vocabulary_beside_an_h200():
    """`peak_bytes` of Qwen2.5-Coder-0.5B's first round: four chunks of logits in a step."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads")
    shape = dict(zip(names, (151_936, 896, 4864, 24, 14, 2), strict=True))
    table: dict = {"model": {"weights": "Qwen/of-the-hub", "type": "qwen2"}}
    table["model"]["config"] = shape | {"tie_word_embeddings": True}
    table["blocks"] = {"setting": "ffn", "n_ffn": 19, "k_ffn": 19, "sort": True, "nested": 1.0}
    table["blocks"] |= {"shared_first": 0, "shared_last": 0}
    table["blocks"] |= {"masks": "sequence", "mask_ffn": [19, 19, 13, 10, 6, 6, 5, 5]}
    table["train"] = {"n_workers": 1, "batch": 32, "teacher": "start", "rounds": 1}
    assert gpu_bytes(config.from_dict(table))[1] == pytest.approx(46_260_232_192, rel=0.01)


HAND = ["masks=round", "mask_attn=[]", "mask_ffn=[]", "nested=0.0"]
HAND += ["shared_first=1", "shared_last=1"]


def hand_memory(*changes: str) -> tuple[int, int]:
    """Of the demo's GPT-2 (4 layers of d = 48, 12 heads, FFN 192), inner two layers cut."""
    own = [f"blocks.{change}" for change in HAND]
    return gpu_bytes(config.load("demo", [*own, "train.batch=2", *changes]))


BARE = ("blocks.shared_first=0", "blocks.shared_last=0")


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
    assert hand_memory("run.central=host") == (whole[0], whole[0])
    assert hand_memory("train.n_workers=1") == (whole[0], whole[0])  # trains the central model
    assert hand_memory("train.n_workers=1", "run.wire=int8") == whole
    again = hand_memory("train.recompute=true")  # three layers' inputs instead of all they keep
    assert whole[0] - again[0] == 2 * (3 * layer - 4 * 48) * n_tokens
    pieces = hand_memory("train.accumulate=2")  # one of two sequences at a time
    assert whole[0] - pieces[0] == kept // 2
    half = hand_memory("blocks.k_attn=6", "blocks.k_ffn=6")  # gated: a third output of attention
    less = 2 * 2 * n_tokens * (5 * 48 - (3 + 3) * 24 + 192)
    assert whole[0] - half[0] == 16 * (n_full - subnet[6, 6]) + less
    # a trainer for every width that comes up, activations of the largest alone
    both = hand_memory("blocks.k_attn=[6, 3]", "blocks.k_ffn=6")
    assert both[0] - half[0] == 16 * subnet[3, 6]
    four = hand_memory("blocks.k_attn=[6, 3]", "blocks.k_ffn=[6, 4, 4]")  # 6 rounds, 4 pairs
    assert four[0] - half[0] == 16 * (subnet[3, 6] + subnet[6, 4] + subnet[3, 4])
    own = ("blocks.widths=worker", "blocks.k_attn=[6, 6, 3, 3]", "blocks.k_ffn=[6, 6, 4, 4]")
    mixed = hand_memory(*own)
    assert mixed[0] == half[0]  # the largest worker; one process keeps trainers for 2 pairs
    assert mixed[1] - half[1] == 16 * subnet[3, 4]
    bare = hand_memory("blocks.k_attn=6", "blocks.k_ffn=6", *BARE)
    made = plan.make(config.load("demo", [*(f"blocks.{x}" for x in HAND), "train.batch=2"]))
    assert list(made["holding"].values()) == [whole[0], half[0], bare[0]]
    assert hand_memory("train.teacher=cache") == whole  # its predictions come with the tokens
    outer = hand_memory("train.outer=nesterov(0.7, 0.6)")
    assert (outer[0], outer[1]) == (whole[0], whole[1] + 4 * n_full)
    dense = hand_memory("train.method=dense")
    assert dense[1] == dense[0]  # it trains the central model, and nothing is added up


def test_memory_on_a_cpu_by_hand():
    """float32, and what each operation keeps; logits of 126 tokens five times, taught ten."""
    n_full, n_tokens, own = 140_832, 2 * 64, [f"blocks.{change}" for change in HAND]
    layer = 6 * 48 + (3 + 1) * 48 + (1 + 2) * 192  # norms; q, k, v and the output; FFN in, out
    kept, n_logits = (4 * layer + 2 * 48) * n_tokens, 2 * 63 * 512
    cfg = config.load("demo", [*own, "train.batch=2"])
    whole = plan.make(cfg)["cpu_bytes"]
    state, largest = (16 + 24) * n_full, 512 * 48  # the embedding's gradient, a moment twice
    assert whole == state + 4 * (kept + 5 * n_logits + 2 * largest) + plan.CPU_REST
    taught = plan.make(config.override(cfg, ["train.teacher=cache"]))["cpu_bytes"]
    assert taught - whole == 4 * 5 * n_logits


@pytest.mark.parametrize(
    ("shape", "change", "measured"),
    [
        ((384, 1536, 12, 6, 3, 8192), ["train.batch=1", "data.seq_len=64"], 1_684_688_896),
        ((384, 1536, 12, 6, 3, 8192), ["train.batch=4", "data.seq_len=256"], 2_352_717_824),
        ((768, 3072, 10, 12, 4, 16384), ["train.batch=1", "data.seq_len=64"], 4_664_897_536),
    ],
)
def test_memory_of_llamas_beside_a_cpu(shape, change, measured):
    """VmHWM of two rounds by two workers that hold all blocks and mask them (docs/log.md)."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size")
    size = dict(zip(names, shape, strict=True)) | {"tie_word_embeddings": True}
    n_kv = size["num_key_value_heads"]
    table: dict = {"model": {"type": "llama", "config": size}, "train": {"rounds": 1}}
    table["blocks"] = {"k_attn": n_kv, "k_ffn": 12, "shared_first": 0, "shared_last": 0}
    table["blocks"] |= {"masks": "sequence", "mask_attn": [n_kv, 2], "mask_ffn": [12, 6]}
    made = plan.make(config.override(config.from_dict(table), change))
    assert made["cpu_bytes"] == pytest.approx(measured, rel=0.05)


def test_the_largest_k_that_a_machine_s_memory_takes():
    """A worker of K = 6 fits its own bytes, and one byte less is K = 5; too little is refused."""
    own = [f"blocks.{change}" for change in HAND]
    cfg = config.load("demo", [*own, "train.batch=2", "blocks.k_attn=6", "blocks.k_ffn=6"])
    model, takes = huggingface.on_meta(huggingface.planned_config(cfg.model)), gpu_bytes(cfg)[0]
    assert plan.largest_k(cfg, model, False, takes) == {"attn": 6, "ffn": 6}
    assert plan.largest_k(cfg, model, False, takes - 1) == {"attn": 5, "ffn": 5}
    assert plan.largest_k(cfg, model, False, 10**10) == {"attn": 12, "ffn": 12}
    teacher = 2 * (140_832 + 2 * 63 * 512)  # its weights, its logits
    assert plan.largest_k(cfg, model, True, takes + teacher) == {"attn": 6, "ffn": 6}
    assert plan.largest_k(cfg, model, True, takes + teacher - 1) == {"attn": 5, "ffn": 5}
    with pytest.raises(ValueError, match=r"10\.0 MB of memory.*smallest one of this run takes 32"):
        plan.largest_k(cfg, model, False, 10**7)
    two = plan.make(config.override(cfg, ["train.rounds=1"]), memories=[takes - 1, 10**10])
    assert two["machines"] == {takes - 1: {"attn": 5, "ffn": 5}, 10**10: {"attn": 12, "ffn": 12}}


def test_a_worker_on_ray_takes_the_k_that_its_machine_holds(monkeypatch):
    """By the memory in its machine's label, or, where that is 0, by what its GPU has free."""
    pytest.importorskip("ray")
    from twistlm.training.engines import actor

    own = [f"blocks.{change}" for change in HAND]
    half = ["train.batch=2", "blocks.k_attn=6", "blocks.k_ffn=6", "run.device=cpu"]
    cfg = config.load("demo", [*own, *half])
    model = huggingface.planned_config(cfg.model).to_dict()
    asked = RunDescription(version("twistlm"), config.to_dict(cfg), model, 1)
    takes, labels = gpu_bytes(cfg)[0], {}
    context = SimpleNamespace(get_node_labels=lambda: labels, get_node_id=lambda: "here")
    monkeypatch.setattr(actor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (takes - 1, 10**12))
    for memory, k in ((None, {}), (takes, 6), (10**10, 12), (0, 5)):
        labels |= {} if memory is None else {actor.MEMORY_LABEL: str(memory)}
        worker = object.__new__(actor.Worker)  # as it is made, it ends its process when left alone
        assert worker.enter(asked, None).widths == (k and {"attn": k, "ffn": k})
