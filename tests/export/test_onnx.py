"""ONNX exports against Hugging Face's own logits: prompt, decoding with the cache, greedy text."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from conftest import make_tokens
from families_table import VOCAB, open_parent, tiny_model, tiny_ticket
from typer.testing import CliRunner

from twistlm.cli.options import app
from twistlm.compute.perplexity import Text, perplexity
from twistlm.data.token_file import open_tokens
from twistlm.export import onnx as exporter
from twistlm.export import verify
from twistlm.lab.bench.deploy import open_runner
from twistlm.tickets import deploy

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ONE_LAYER, TWO_LAYERS = ({"num_hidden_layers": n} for n in (1, 2))  # tracing takes seconds for each
IDS = np.random.default_rng(1).integers(VOCAB, size=(3, 24))


@torch.no_grad()
def logits(model, ids) -> np.ndarray:
    return model(input_ids=torch.tensor(ids), use_cache=False).logits.numpy()


def check_text(model, runner) -> None:
    prompt = IDS[:1, :10]
    greedy = model.generate(torch.tensor(prompt), max_new_tokens=20, do_sample=False)[0, 10:]
    assert verify.greedy(runner, prompt[0].tolist(), 20) == greedy.tolist()


@pytest.mark.parametrize(
    ("name", "attn_by", "layers"),
    [
        # a smaller head is folded; of three layers the first is left out
        ("gpt2", "head", {"without": 0, "vocab_size": 1024}),
        ("qwen3", "query", ONE_LAYER),
    ],
    ids=["gpt2", "qwen3"],
)
def test_the_graph_computes_the_ticket(name, attn_by, layers, tmp_path):
    """Another width in every layer; any batch, any length, any split between prompt and cache."""
    model = tiny_ticket(name, attn_by, tmp_path / "parent", **layers)
    exporter.export(model, tmp_path / "out")
    if model.config.tie_word_embeddings:  # one matrix in the file, too
        stored = onnx.load(tmp_path / "out/model.onnx").graph.initializer
        assert sum(model.config.vocab_size in tensor.dims for tensor in stored) == 1
    want, runner = logits(model, IDS), open_runner("onnx", tmp_path / "out/model.onnx", 1, 0)
    for row, n in ((0, 1), (1, 9), (2, 23)):  # a new prompt forgets the one before
        ids = IDS[row].tolist()
        assert np.abs(runner.prefill(ids[:n], n) - want[row, :n]).max() < 1e-4
        found = np.array([runner.decode(token) for token in ids[n:]])
        assert np.abs(found - want[row, n:]).max() < 1e-4
    check_text(model, runner)
    # the bare graph as others call it: three sequences at once, in pieces
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    shapes = {entry.name: entry.shape for entry in session.get_inputs()}
    parts = [f"{i}.{part}" for i in range(len(shapes) // 2 - 1) for part in ("key", "value")]
    first, caches = list(shapes)[:3], [f"past_key_values.{part}" for part in parts]
    assert list(shapes)[3:] == caches
    assert [out.name for out in session.get_outputs()][1:] == [f"present.{p}" for p in parts]
    past = empty = [np.zeros((3, shapes[c][1], 0, shapes[c][3]), np.float32) for c in caches]
    for start, stop in ((0, 7), (7, 12), (12, 24)):
        positions = np.arange(start, stop)[None].repeat(3, 0)
        given = (IDS[:, start:stop], np.ones((3, stop), np.int64), positions)
        feed = dict(zip([*first, *caches], [*given, *past], strict=True))
        out = session.run(None, feed)
        assert np.abs(out[0] - want[:, start:stop]).max() < 1e-4
        last = session.run(["logits"], feed | {"logits_from": np.array([-2])})[0]
        assert np.abs(last - want[:, stop - 2 : stop]).max() < 1e-4
        past = out[1:]
    # a row with padding to its left computes what it computes alone
    mask = np.ones((3, 24), np.int64)
    mask[1, :6] = 0
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    given = (IDS, mask, positions, *empty)
    out = session.run(["logits"], dict(zip([*first, *caches], given, strict=True)))[0]
    assert np.abs(out[0] - want[0]).max() < 1e-4
    assert np.abs(out[1, 6:] - logits(model, IDS[1:2, 6:])[0]).max() < 1e-4


@pytest.mark.runtime
@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_the_graph_of_a_stock_ticket_writes_the_same_text(name, tmp_path):
    """Windows of attention, norms around every projection; the text is longer than a window."""
    config = {**TWO_LAYERS, "sliding_window": 5}
    if name == "gemma3_text":
        config["layer_types"] = ["sliding_attention", "full_attention"]
    opened, blueprint = open_parent(name, "group", tmp_path / "parent", **config)
    deploy.save_ticket(opened, dict.fromkeys(blueprint, (0, 2)), tmp_path / "ticket")
    assert not (tmp_path / "ticket/modeling_ticket.py").exists()  # stock
    model = deploy.load_ticket(tmp_path / "ticket")
    exporter.export(model, tmp_path / "out")
    check_text(model, exporter.OnnxRunner(tmp_path / "out", threads=1))


def test_eight_bits_from_the_command_line(tmp_path):
    """Every matrix becomes a MatMulNBits; perplexities are measured on the same windows as ours."""
    opened, blueprint = open_parent("gpt2", "head", tmp_path / "parent", **ONE_LAYER)
    deploy.save_ticket(opened, blueprint, tmp_path / "ticket")
    data = make_tokens(tmp_path / "tokens", 400)
    (tmp_path / "out").mkdir()  # an earlier export, with a file of the user in it
    for name in ("export.json", "model.onnx", "modeling_ticket.py"):
        (tmp_path / "out" / name).touch()
    (tmp_path / "out/notes.txt").write_text("mine")
    arguments = ["export", str(tmp_path / "ticket"), "--to", "onnx", "-o", str(tmp_path / "out")]
    arguments += ["--type", "q8", "--data", data]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "onnxruntime q8" in result.output
    found = [node.op_type for node in onnx.load(tmp_path / "out/model.onnx").graph.node]
    assert found.count("MatMulNBits") == 4 + 1  # qkv, out, two of the FFN; the head
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    torch_, f32, q8 = record["verified"]
    model = deploy.load_ticket(tmp_path / "ticket")
    want = perplexity(model, Text(open_tokens(data), 40), "float32")
    assert torch_["perplexity"] == pytest.approx(want, rel=1e-6)
    assert f32["perplexity"] == pytest.approx(want, rel=1e-5)
    assert max(f32["prefill_delta"], f32["decode_delta"]) < 1e-4
    assert q8["perplexity"] == pytest.approx(want, rel=0.02)
    assert 1e-4 < q8["prefill_delta"] < 0.5
    assert q8["n_bytes"] < f32["n_bytes"]
    assert (tmp_path / "out/notes.txt").read_text() == "mine"


def test_bad_input(tmp_path, monkeypatch):
    model = tiny_model("gpt2")
    with pytest.raises(ValueError, match="f32, q8"):
        exporter.export(model, tmp_path / "out", "q4")
    kept = tmp_path / "thesis"  # a folder of something else is left alone
    kept.mkdir()
    (kept / "export.json").write_text('{"goods": "wine"}')
    with pytest.raises(ValueError, match="is no ONNX export"):
        exporter.export(model, kept)
    assert [p.name for p in kept.iterdir()] == ["export.json"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"\.\[onnx\]"):
        exporter.export(model, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["thesis"]


def test_a_float32_export_must_compute_what_torch_computes():
    model = tiny_model("gpt2")
    beside = verify.Comparison(model, None, None)
    beside.add("again", verify.TorchRunner(model), 0, exact=True)
    for method in ("prefill", "decode"):
        wrong = verify.TorchRunner(model)
        right = getattr(wrong, method)
        setattr(wrong, method, lambda *args, right=right, **more: right(*args, **more) + 0.5)
        with pytest.raises(ValueError, match="nothing was written"):
            beside.add("wrong", wrong, 0, exact=True)
    forgetful = verify.TorchRunner(model)
    forgetful.decode = lambda token: forgetful.prefill([token])[0]  # every token is its first
    row = beside.add("forgetful", forgetful, 0)
    assert row.prefill_delta < 1e-5 < 0.01 < row.decode_delta
    assert row.n_equal < row.n_tokens
