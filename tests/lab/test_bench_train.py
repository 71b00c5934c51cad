"""What `bench train` prints is what it measured: counts by hand, no times."""

import json

import pytest
import ranks
from commands import ROOT, in_process, toml
from conftest import tiny_table

from twistlm import config
from twistlm.lab.bench import peer, train
from twistlm.model import families, huggingface, layout
from twistlm.model.blocks import widths_of_ratio
from twistlm.training import rounds


def test_flops_of_gpt2_by_hand():
    """6 FLOPs per weight in a product (12 d^2 a layer, and the head) and 12 T d for attention."""
    model = huggingface.on_meta(huggingface.planned_config(config.ModelConfig()))
    block_map = families.partition(model, config.BlocksConfig())
    full = layout.layout(block_map, huggingface.shapes(model))
    where = full.narrowed(block_map, widths_of_ratio(block_map, "4/12"))
    d, layers = 768, 4 + 8 / 3  # four layers are never cut
    by_hand = 6 * (layers * 12 * d * d + 50257 * d) + 12 * 1024 * d * layers
    assert train._flops(model, where, 1024) == pytest.approx(by_hand)
    assert by_hand / 1e6 == pytest.approx(577.6, abs=0.1)


@pytest.mark.parametrize("whole", ["12/12", "attn=1.0,ffn=1"])
def test_bench_train(tmp_path, monkeypatch, capsys, whole):
    monkeypatch.setattr(train, "REPEATS", 1)  # no time is asserted
    out = tmp_path / "bench.json"
    words = (
        "lab bench train demo run.device=cpu train.interval=1 data.seq_len=16 "
        f"model.config.n_layer=2 model.config.vocab_size=64 --sizes {whole} --sizes 6/12 "
        f"--settings both,ffn --steps 1 --no-references --json {out}"
    )
    code, shown, err = in_process(monkeypatch, capsys, *words.split())
    assert code == 0, err
    made = json.loads(out.read_text())
    rows = {(row["setting"], row["ratio"]): row for row in made["rows"]}
    assert list(rows) == [("both", whole), ("both", "6/12"), ("ffn", "6/12")]
    d, vocab, positions = 48, 64, 64
    layer = 12 * d * d + 13 * d
    full = (vocab + positions) * d + 2 * layer + 2 * d
    assert rows["both", whole]["n_params"] == full
    # what half of two FFN layers takes away: fc, its bias, proj
    ffn = 2 * (d * 2 * d + 2 * d + d * 2 * d)
    assert rows["ffn", "6/12"]["n_params"] == full - ffn
    for row in rows.values():
        # weight, gradient and two moments in float32
        assert row["state_bytes"] == 16 * row["n_params"]
        assert row["tokens_per_s"] == pytest.approx(16e3 / row["ms"])
        assert row["overhead"] == pytest.approx(1 - row["ms"] / row["round_ms"])
    assert whole in shown
    assert "1.00x" in shown


def test_a_run_to_start_from_tells_the_shape(tokens, tmp_path, monkeypatch, capsys):
    """The presets' own way: `model.weights` is a run folder, here of a model of four layers."""
    run = tiny_table(tokens, tmp_path / "run")
    run["model"]["config"]["n_layer"], run["train"]["rounds"] = 4, 1
    rounds.train(config.from_dict(run), quiet=True)
    made = toml(tmp_path / "more.toml", tiny_table(tokens, tmp_path / "more"))
    words = f"model.weights={tmp_path / 'run'} --sizes 1 --settings both --steps 1 --no-references"
    words += f" --json {tmp_path / 'bench.json'}"
    code, _, err = in_process(monkeypatch, capsys, "lab", "bench", "train", made, *words.split())
    assert code == 0, err
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    d = 16
    assert row["n_params"] == (64 + 16) * d + 4 * (12 * d * d + 13 * d) + 2 * d


KEYS = "run.device=cpu train.interval=1 train.batch=1 data.seq_len=16 model.config.vocab_size=64"
GPT2 = {"n_positions": 32, "n_embd": 48, "n_layer": 5, "n_head": 12}
LLAMA = {"hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 5}  # 3 kv groups
CASES = [  # workers of other widths; kinds of layer with sizes of their own
    ("wiki-gpt2", GPT2, ["12/12,6/12"]),
    (str(ROOT / "paper/smollm2.toml"), LLAMA, ["attn=2/3,ffn=6/12", "3/3,1/3"]),
]


@pytest.mark.parametrize(("preset", "model", "sizes"), CASES)
def test_sizes_of_any_preset_and_family(tmp_path, monkeypatch, capsys, preset, model, sizes):
    """All workers hold the size that is measured."""
    monkeypatch.setattr(train, "REPEATS", 1)
    words = [*KEYS.split(), *(f"model.config.{key}={value}" for key, value in model.items())]
    words += [word for size in sizes for word in ("--sizes", size)]
    words += f"--settings both --steps 1 --no-references --json {tmp_path}/bench.json".split()
    code, _, err = in_process(monkeypatch, capsys, "lab", "bench", "train", preset, *words)
    assert code == 0, err
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["ratio"] for row in rows] == [*sizes[:-1], *sizes[-1].split(",")]


@pytest.mark.parametrize("engines", [["bare", "star"], ["sharded"]])
def test_all_engines_exchange(tmp_path, engines):
    """Four processes: a centre and three workers, or four shards."""
    job = {"megabytes": 4, "repeats": 2, "wire": "bf16", "interface": "lo", "engines": engines}
    job["n_workers"] = 4
    ranks.finish(ranks.start(4, tmp_path, peer.main, job), tmp_path)
    said = json.loads(ranks.said(tmp_path, 0).splitlines()[-1])
    assert said["n_subnet"] * 4 == pytest.approx(4e6, rel=0.05)
    # at least what the formula says has crossed the loopback, counted twice there
    n_bytes = {"bare": 3 * (4 + 4), "star": 3 * (2 + 2), "sharded": 2 * (2 + 2)}
    for engine in engines:
        assert len(said["seconds"][engine]) == 2
        assert min(said["link"][engine]) >= 2 * n_bytes[engine] * said["n_subnet"]


@pytest.mark.chaos  # three processes import torch
def test_ray_exchanges(ray_address, capfd):
    job = {"megabytes": 0.5, "n_workers": 3, "repeats": 1, "wire": "int8", "interface": "lo"}
    peer.main(job | {"engines": ["ray"], "address": ray_address, "owners": 2, "gbit": 0})
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert len(said["seconds"]["ray"]) == 1
