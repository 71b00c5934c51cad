"""GGUF files read back by gguf itself, and run by llama.cpp where it is installed."""

import importlib.util
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from families_table import TABLE, open_parent, tiny_model, tiny_ticket
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from twistlm.export import architectures
from twistlm.export import gguf as exporter
from twistlm.model.tokenizer import covers, vocabulary_of
from twistlm.tickets import deploy

gguf = pytest.importorskip("gguf")

TIED = {"tie_word_embeddings": True}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
SIZES = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


@dataclass(frozen=True)
class Row:
    """A ticket: another width in every layer, or (`stock`) the same two blocks of three in all."""

    name: str
    attn_by: str
    arch: str  # llama.cpp's name
    config: dict = field(default_factory=dict)  # changes
    stock: str = ""  # the setting that is cut alike
    without: int = -1  # a layer that is left out

    def make(self, folder: Path):
        config = {**self.config, "without": self.without}
        if not self.stock:
            return tiny_ticket(self.name, self.attn_by, folder, **config)
        words = [f"blocks.setting={self.stock}"]
        opened, blueprint = open_parent(self.name, self.attn_by, folder, *words, **config)
        alike = {name: kept and (0, 2) for name, kept in blueprint.items()}
        deploy.save_ticket(opened, alike, folder / "ticket")
        return deploy.load_ticket(folder / "ticket")


ROWS = [
    Row("llama", "head", "deci", {"rope_parameters": LLAMA3_ROPE}),
    Row("llama-mqa", "query", "deci", without=1),
    Row("mistral", "group", "deci", {"sliding_window": None}),
    Row("qwen2", "query", "deci", TIED),
    Row("qwen3", "group", "openelm", TIED),
    Row("llama-biases", "head", "llama", TIED, stock="both", without=2),
    Row("qwen2", "group", "qwen2", TIED, stock="ffn"),
    Row("qwen2", "group", "deci", TIED, stock="both"),  # llama.cpp's qwen2 takes all heads
    Row("qwen3", "group", "qwen3", stock="both"),
    Row("gemma3_text", "group", "gemma3", {"layer_types": ["sliding_attention"] * 3}, "both"),
    Row("smollm3", "group", "smollm3", {"no_rope_layers": [1, 1, 1]}, "both"),
    Row("gpt2", "head", "gpt2", stock="ffn"),
]


def fields(path: Path) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def as_llamacpp(model, arch: str, dh: int, n_layers: int) -> dict[str, np.ndarray]:
    """Tensors by the names of gguf's own table, with values as llama.cpp's converter makes them."""
    names, made = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], n_layers), {}
    for name, param in model.named_parameters():
        value = param.detach().numpy()
        if arch == "gpt2" and ".c_" in name:
            value = value.T
        elif arch == "gemma3" and "norm" in name:
            value = 1 + value
        elif arch in ("deci", "llama", "smollm3") and re.search(r"\.[qk]_proj\.", name):
            halves = value.reshape(-1, 2, dh // 2, *value.shape[1:])  # each head's, as neighbours
            value = halves.swapaxes(1, 2).reshape(value.shape)
        if arch == "openelm" and re.search(r"\.[qkv]_proj\.", name):
            name = re.sub(r"[qkv]_proj", "qkv_proj", name)
        target = names.get_name(name, (".weight", ".bias"))
        made[target] = np.concatenate([made[target], value]) if target in made else value
    return made


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.name}-{r.attn_by}-{r.arch}")
def test_the_file_holds_the_ticket(row, tmp_path):
    """What gguf's reader finds is the model; llama.cpp, where it is installed, runs it, too."""
    model, path = row.make(tmp_path / "parent"), tmp_path / "ticket.gguf"
    for ran in exporter.export(model, path, "f32"):
        assert ran.n_equal == ran.n_tokens
    meta, tensors = fields(path), gguf.GGUFReader(path).tensors
    assert meta["general.architecture"] == row.arch
    found = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors}
    rope, dh = model.config.to_dict().get("rope_parameters", {}), TABLE[row.name].head_dim
    if rope.get("rope_type") == "llama3":
        scaled = 10000.0 ** -(np.arange(0, dh, 2) / dh) / found.pop("rope_freqs.weight")
        assert scaled == pytest.approx(model.model.rotary_emb.inv_freq.numpy(), rel=1e-5)
    n_layers = 3 - (row.without >= 0)
    want = as_llamacpp(model, row.arch, dh, n_layers)
    assert found.keys() == want.keys()
    assert all(np.array_equal(found[name], value) for name, value in want.items())
    sizes = [meta[f"{row.arch}.{key}"] for key in SIZES]
    per_layer = row.arch in ("deci", "openelm")
    for i in range(n_layers):
        heads, n_kv, n_ffn = (n[i] for n in sizes) if per_layer else sizes
        parts = [want.get(f"blk.{i}.attn_{part}.weight", ()) for part in ("q", "k", "v", "qkv")]
        assert sum(map(len, parts)) == (heads + 2 * n_kv) * dh
        assert want[f"blk.{i}.attn_output.weight"].shape[1] == heads * dh
        assert len(want[f"blk.{i}.ffn_up.weight"]) == n_ffn
    values = {"attention.key_length": dh, "context_length": model.config.max_position_embeddings}
    values["block_count"] = n_layers
    if row.arch == "gemma3":  # the first five layers of six have a window and a base of their own
        values |= {"rope.freq_base_swa": 10000.0, "attention.sliding_window": 5}
    elif row.arch != "gpt2":
        values["rope.freq_base"] = rope["rope_theta"]
    rms, eps = ("", 1e-5) if row.arch == "gpt2" else ("rms_", model.config.rms_norm_eps)
    values[f"attention.layer_norm_{rms}epsilon"] = pytest.approx(eps)
    assert {key: meta[f"{row.arch}.{key}"] for key in values} == values
    assert json.loads(Path(f"{path}.json").read_text())["max_weight_delta"] == 0.0
    names = ["parent", "ticket.gguf", "ticket.gguf.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_types(tmp_path):
    """q8_0 within half a step of every block of 32; rows that do not fit are f16; vectors f32."""
    model = tiny_ticket("llama", "head", tmp_path / "parent")
    exporter.export(model, tmp_path / "t.gguf", "q8_0")
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "t.gguf").tensors}
    entry = tensors["blk.0.ffn_down.weight"]  # 32 of 48 neurons are left: one block a row
    want = model.model.layers[0].mlp.down_proj.weight.detach().numpy()
    delta = np.abs(gguf.quants.dequantize(entry.data, entry.tensor_type) - want)
    step = np.abs(want).max(axis=1, keepdims=True) / 127
    assert (delta <= 0.51 * step + 1e-3 * np.abs(want)).all()
    record = json.loads((tmp_path / "t.gguf.json").read_text())
    assert 0 < delta.max() <= record["max_weight_delta"] < 0.01
    seen = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert seen["token_embd.weight"] == seen["blk.0.ffn_down.weight"] == "Q8_0"
    assert seen["blk.1.ffn_down.weight"] == seen["blk.1.attn_output.weight"] == "F16"  # 48, 8
    assert seen["blk.0.attn_norm.weight"] == "F32"
    exporter.export(model, tmp_path / "t.gguf", "f16")
    found = {e.name: e.tensor_type.name for e in gguf.GGUFReader(tmp_path / "t.gguf").tensors}
    assert {name: "F16" if kind == "Q8_0" else kind for name, kind in seen.items()} == found


REFUSED = [  # a model, changes to its config, what the sentence says
    (tiny_model, "opt", {}, "--to onnx"),
    (tiny_model, "gemma3_text", {}, "every sixth"),
    (tiny_model, "smollm3", {}, "every fourth"),
    (tiny_model, "mistral", {}, "sliding_window = 5"),
    (tiny_model, "llama", {"hidden_act": "gelu"}, "gelu"),
    (tiny_model, "llama", {"rope_parameters": YARN}, "rope_type 'yarn'"),
    (tiny_model, "qwen3", {"rope_parameters": LLAMA3_ROPE}, "llama.cpp's qwen3 scales no RoPE"),
    (tiny_model, "gpt2", {"scale_attn_by_inverse_layer_idx": True}, "root of the head"),
    (Row("gpt2", "head", ""), "", {}, "extract --stock"),  # one width for all layers
    (Row("gpt2", "head", "", stock="attn"), "", {}, "this ticket lost some"),
    (Row("qwen3", "group", ""), "", {}, "no place for lm_head"),  # tied embeddings alone
]


@pytest.mark.parametrize(("make", "name", "config", "what"), REFUSED)
def test_models_without_an_architecture_are_refused(make, name, config, what, tmp_path):
    model = make.make(tmp_path / "parent") if isinstance(make, Row) else make(name)
    for key, value in config.items():
        setattr(model.config, key, value)
    with pytest.raises(ValueError, match=f"no GGUF for.*{what}"):
        architectures.architecture_of(model)


TEXT = "In 1984, the city's 12,345 people weren't\n\n  there:   naïve 東京 days."
QWEN2 = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES, BARE = pre_tokenizers.ByteLevel(False), pre_tokenizers.ByteLevel(False, use_regex=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
SPLITS = {
    "gpt-2": BYTES,
    "smollm": pre_tokenizers.Sequence([DIGITS, BYTES]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(QWEN2, "isolated"), BARE]),
}


def make_tokenizer(path: Path, split, *added: str) -> Tokenizer:
    """A byte-level BPE of 320 tokens, with one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    if split is SPLITS["qwen2"]:
        tokenizer.normalizer = normalizers.NFC()  # as Qwen's own files have it
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(path))
    return tokenizer


def word_ticket(tmp_path: Path):
    return tiny_ticket("llama", "head", tmp_path / "parent", vocab_size=330, eos_token_id=0)


@pytest.mark.parametrize("name", SPLITS)
def test_tokenizer(name, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json", SPLITS[name], "<mark>")
    path = tmp_path / "tokenizer.json"  # llama.cpp, where it is installed, splits TEXT as this does
    exporter.export(word_ticket(tmp_path), tmp_path / "t.gguf", "f16", path, prompt=TEXT)
    meta = fields(tmp_path / "t.gguf")
    assert meta["tokenizer.ggml.pre"] == name
    n = tokenizer.get_vocab_size()
    assert meta["tokenizer.ggml.tokens"][:n] == [tokenizer.id_to_token(i) for i in range(n)]
    assert len(meta["tokenizer.ggml.tokens"]) == len(meta["tokenizer.ggml.token_type"]) == 330
    assert meta["tokenizer.ggml.token_type"][:2] == [3, 1]  # control, normal
    assert meta["tokenizer.ggml.token_type"][n - 1 : n + 1] == [4, 5]  # user defined, unused
    assert meta["tokenizer.ggml.eos_token_id"] == 0
    assert meta["tokenizer.ggml.add_bos_token"] is False
    # a GGUF file as a teacher: of its own tokens, and of ones that mean something else
    its = vocabulary_of(f"gguf:{tmp_path / 't.gguf'}")
    assert its is not None
    assert covers(its, tokenizer)
    assert not covers(its | {"<mark>": 3}, tokenizer)
    # a model too short for the usual prompt: as much of it as it takes
    made = tmp_path / "short.gguf"
    more = {"vocab_size": 330, "eos_token_id": 0, "max_position_embeddings": 8}
    short = tiny_ticket("llama", "head", tmp_path / "short", **more)
    exporter.export(short, made, "f16", path)
    with pytest.raises(ValueError, match=r"--prompt has 9 tokens; legal are 1\.\.6"):
        exporter.export(short, tmp_path / "long.gguf", "f16", path, prompt="!" * 9)
    merges = json.loads(path.read_text())["model"]["merges"]
    assert [m.split(" ") for m in meta["tokenizer.ggml.merges"]] == merges


def test_a_tokenizer_that_llama_cpp_would_split_otherwise(tmp_path):
    path = tmp_path / "tokenizer.json"
    make_tokenizer(path, pre_tokenizers.Whitespace())
    with pytest.raises(ValueError, match="Whitespace"):
        exporter.export(word_ticket(tmp_path), tmp_path / "t.gguf", "f16", path)
    assert not list(tmp_path.glob("*gguf*"))


def test_bad_input(tmp_path, monkeypatch):
    model, path = tiny_model("llama"), tmp_path / "t.gguf"
    with pytest.raises(ValueError, match=r"--type q4_0: .*q8_0"):
        exporter.export(model, path, "q4_0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[gguf\]'"):
        exporter.export(model, path)
    with pytest.raises(ValueError, match=r"\.\[llama\]"):
        exporter.LlamaRunner(path, 8)
    assert not list(tmp_path.iterdir())
