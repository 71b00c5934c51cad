"""GGUF files against llama.cpp's graph written down here, and llama.cpp where it is installed."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from families_table import (
    CUT_FFN,
    KEPT_ATTN,
    KEPT_FFN,
    N_NEURONS,
    TABLE,
    VOCAB,
    open_parent,
    tiny_model,
    tiny_ticket,
)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from twistlm.cli.options import app
from twistlm.export import architectures, llamacpp, ollama
from twistlm.export import gguf as exporter
from twistlm.model.tokenizer import covers, vocabulary_of
from twistlm.tickets import deploy

gguf = pytest.importorskip("gguf")

IDS = [int(i) for i in np.random.default_rng(1).integers(VOCAB, size=16)]
TIED = {"tie_word_embeddings": True}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
SIZES = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


@dataclass(frozen=True)
class Row:
    """A ticket: another width in every layer, or (`stock`) the same two blocks of three in all."""

    name: str
    attn_by: str
    arch: str  # llama.cpp's name
    config: dict = field(default_factory=dict)  # changes
    stock: str = ""  # the setting that is cut alike

    def make(self, folder: Path):
        if not self.stock:
            return tiny_ticket(self.name, self.attn_by, folder, **self.config)
        words = [f"blocks.setting={self.stock}"]
        opened, blueprint = open_parent(self.name, self.attn_by, folder, *words, **self.config)
        deploy.save_ticket(opened, dict.fromkeys(blueprint, (0, 2)), folder / "ticket")
        return deploy.load_ticket(folder / "ticket")

    def sizes(self) -> list:
        """Heads, kv heads and neurons in the file, counted by hand."""
        row = TABLE[self.name]
        if self.stock:
            both = self.stock == "both"
            heads = 2 * row.n_query // row.n_attn(self.attn_by) if both else row.n_query
            n_kv = 2 if both and self.attn_by != "query" else row.n_kv
            return [heads, n_kv, 2 * N_NEURONS // CUT_FFN]
        kept, by_query = [len(blocks) for blocks in KEPT_ATTN], self.attn_by == "query"
        heads = [k * (row.n_kv if by_query else row.n_query // row.n_kv) for k in kept]
        ffn = [len(blocks) * N_NEURONS // CUT_FFN for blocks in KEPT_FFN]
        return [heads, [row.n_kv] * 3 if by_query else kept, ffn]


ROWS = [
    Row("llama", "head", "deci"),
    Row("llama", "head", "deci", {"rope_parameters": LLAMA3_ROPE}),
    Row("llama-biases", "head", "deci", TIED),
    Row("llama-gqa", "group", "deci", TIED),
    Row("llama-gqa", "query", "deci"),
    Row("llama-mqa", "query", "deci"),
    Row("mistral", "group", "deci", {"sliding_window": None}),
    Row("qwen2", "group", "deci", TIED),
    Row("qwen2", "query", "deci", TIED),
    Row("qwen3", "group", "openelm", TIED),
    Row("qwen3", "query", "openelm", TIED),
    Row("llama", "head", "llama", stock="both"),
    Row("llama-biases", "head", "llama", TIED, stock="both"),
    Row("llama-gqa", "group", "llama", TIED, stock="both"),
    Row("mistral", "query", "llama", {"sliding_window": None}, stock="both"),
    Row("qwen2", "group", "qwen2", TIED, stock="ffn"),
    Row("qwen2", "group", "deci", TIED, stock="both"),  # llama.cpp's qwen2 takes all heads
    Row("qwen3", "group", "qwen3", stock="both"),
    Row("gemma3_text", "group", "gemma3", {"layer_types": ["sliding_attention"] * 3}, "both"),
    Row("smollm3", "group", "smollm3", {"no_rope_layers": [1, 1, 1]}, "both"),
    Row("gpt2", "head", "gpt2", stock="ffn"),
]


def fields(path: Path) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def run_graph(path: Path, ids: list[int]) -> np.ndarray:
    """What llama.cpp computes, in float64: logits [len(ids), vocab]."""
    reader, meta = gguf.GGUFReader(path), fields(path)
    w = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(float) for t in reader.tensors
    }
    arch = meta["general.architecture"]
    rms = "" if arch == "gpt2" else "rms_"
    eps, dh = (meta[f"{arch}.attention.{k}"] for k in (f"layer_norm_{rms}epsilon", "key_length"))
    apart = np.arange(len(ids))[:, None] - np.arange(len(ids))
    base, unseen = meta.get(f"{arch}.rope.freq_base"), apart < 0
    if arch == "gemma3":  # the first five layers of six have a window and a base of their own
        assert meta["gemma3.block_count"] < 6
        base = meta["gemma3.rope.freq_base_swa"]
        unseen = unseen | (apart >= meta["gemma3.attention.sliding_window"])

    def norm(x, name):
        x = x if rms else x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
        return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def activated(x):
        if arch in ("gemma3", "gpt2"):
            return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return x / (1 + np.exp(-x))

    neighbours = arch in ("deci", "llama", "smollm3")

    def rope(x):  # Llama's graphs turn neighbours, the others the two halves
        frequency = base ** -(np.arange(0, dh, 2) / dh) / w.get("rope_freqs.weight", 1.0)
        turn = np.exp(1j * np.arange(len(ids))[:, None, None] * frequency)  # [T, 1, dh/2]
        if neighbours:
            pairs = (x[..., ::2] + 1j * x[..., 1::2]) * turn
            return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)
        pairs = (x[..., : dh // 2] + 1j * x[..., dh // 2 :]) * turn
        return np.concatenate([pairs.real, pairs.imag], -1)

    x = w["token_embd.weight"][ids]
    if arch == "gemma3":
        x = x * np.sqrt(x.shape[1])
    if arch == "gpt2":
        x = x + w["position_embd.weight"][: len(ids)]
    for i in range(meta[f"{arch}.block_count"]):
        at = f"blk.{i}"
        sizes = [meta[f"{arch}.{k}"] for k in SIZES]
        n_head, n_kv, n_ffn = (n[i] if isinstance(n, list) else n for n in sizes)
        y = norm(x, f"{at}.attn_norm")
        if arch not in ("openelm", "gpt2"):
            q, k, v = (linear(y, f"{at}.attn_{part}") for part in "qkv")
        else:
            q, k, v = np.split(
                linear(y, f"{at}.attn_qkv"), [n_head * dh, (n_head + n_kv) * dh], axis=1
            )
        q, k, v = (t.reshape(len(ids), -1, dh) for t in (q, k, v))
        assert q.shape[1] == n_head
        assert k.shape[1] == v.shape[1] == n_kv
        if f"{at}.attn_q_norm.weight" in w:
            q, k = norm(q, f"{at}.attn_q_norm"), norm(k, f"{at}.attn_k_norm")
        if base is not None:
            q, k = rope(q), rope(k)
        k, v = (np.repeat(t, n_head // n_kv, axis=1) for t in (k, v))
        score = np.einsum("thd,shd->hts", q, k) / np.sqrt(dh)
        score[:, unseen] = -np.inf
        share = np.exp(score - score.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        y = linear(np.einsum("hts,shd->thd", share, v).reshape(len(ids), -1), f"{at}.attn_output")
        x = x + (norm(y, f"{at}.post_attention_norm") if arch == "gemma3" else y)
        y = norm(x, f"{at}.ffn_norm")
        up = linear(y, f"{at}.ffn_up")
        assert up.shape[1] == n_ffn
        y = activated(up) if arch == "gpt2" else activated(linear(y, f"{at}.ffn_gate")) * up
        y = linear(y, f"{at}.ffn_down")
        x = x + (norm(y, f"{at}.post_ffw_norm") if arch == "gemma3" else y)
    head = w.get("output.weight", w["token_embd.weight"])
    return norm(x, "output_norm") @ head.T


@torch.no_grad()
def logits(model, ids=IDS) -> np.ndarray:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.name}-{r.attn_by}-{r.arch}")
def test_the_file_holds_the_ticket(row, tmp_path):
    """Sizes are those counted by hand, logits of the graph are torch's."""
    model, path = row.make(tmp_path / "parent"), tmp_path / "ticket.gguf"
    for ran in exporter.export(model, path, "f32"):  # llama.cpp, too, where it is installed
        assert ran.n_equal == ran.n_tokens
    meta = fields(path)
    assert meta["general.architecture"] == row.arch
    want = row.sizes()
    if row.arch == "deci" and row.stock:
        want = [[n] * 3 for n in want]
    assert [meta[f"{row.arch}.{key}"] for key in SIZES] == want
    assert meta[f"{row.arch}.attention.key_length"] == TABLE[row.name].head_dim
    assert meta[f"{row.arch}.context_length"] == model.config.max_position_embeddings
    assert np.abs(run_graph(path, IDS) - logits(model)).max() < 1e-4
    assert json.loads(Path(f"{path}.json").read_text())["max_weight_delta"] == 0.0
    names = ["parent", "ticket.gguf", "ticket.gguf.Modelfile", "ticket.gguf.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_types(tmp_path):
    """q8_0 within half a step of every block of 32; rows that do not fit are f16; vectors f32."""
    model = tiny_ticket("llama", "head", tmp_path / "parent")
    exporter.export(model, tmp_path / "t.gguf", "q8_0")
    state = dict(model.named_parameters())
    seen = {}
    for entry in gguf.GGUFReader(tmp_path / "t.gguf").tensors:
        seen[entry.name] = entry.tensor_type.name
        if entry.name == "blk.0.ffn_down.weight":  # 32 of 48 neurons are left: one block a row
            want = state["model.layers.0.mlp.down_proj.weight"].detach().numpy()
            step = np.abs(want).max(axis=1, keepdims=True) / 127
            found = gguf.quants.dequantize(entry.data, entry.tensor_type)
            assert np.abs(found - want).max() > 0
            assert (np.abs(found - want) <= 0.51 * step + 1e-3 * np.abs(want)).all()
            record = json.loads((tmp_path / "t.gguf.json").read_text())
            assert np.abs(found - want).max() <= record["max_weight_delta"] < 0.01
    assert seen["token_embd.weight"] == seen["blk.0.ffn_down.weight"] == "Q8_0"
    assert seen["blk.1.ffn_down.weight"] == seen["blk.1.attn_output.weight"] == "F16"  # 48, 8
    assert seen["blk.0.attn_norm.weight"] == "F32"
    exporter.export(model, tmp_path / "t.gguf", "f16")
    found = {e.name: e.tensor_type.name for e in gguf.GGUFReader(tmp_path / "t.gguf").tensors}
    assert {name: "F16" if kind == "Q8_0" else kind for name, kind in seen.items()} == found


REFUSED = [  # a model, changes to its config, what the sentence says
    (tiny_model, "opt", {}, "--to onnx"),
    (tiny_model, "phi", {}, "--to onnx"),
    (tiny_model, "gemma3_text", {}, "--to onnx"),
    (tiny_model, "smollm3", {}, "--to onnx"),
    (tiny_model, "mistral", {}, "sliding_window = 5"),
    (tiny_model, "llama", {"hidden_act": "gelu"}, "gelu"),
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
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    ),
    "qwen2": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    ),
}


def make_tokenizer(path: Path, split, *added: str) -> Tokenizer:
    """A byte-level BPE of 320 tokens, with one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
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
    merges = json.loads(path.read_text())["model"]["merges"]
    assert [m.split(" ") for m in meta["tokenizer.ggml.merges"]] == merges


CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind"
    "<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ZEPHYR = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
    "<s>{{ m.role }}\n{{ m.content | trim }}</s>{% endfor %}"
)


def as_ollama(text: str, system: str, turns: list[tuple[str, str]]) -> str:
    """What Ollama sends for a talk: the template once per turn, the last one without an answer."""
    (template,) = re.findall(r'TEMPLATE """(.*?)"""', text, re.DOTALL)
    system = system or (re.findall(r'SYSTEM """(.*?)"""', text, re.DOTALL) or [""])[0]
    made = ""
    for i, (prompt, answer) in enumerate(turns):
        turn = {"System": system if i == 0 else "", "Prompt": prompt}
        filled = re.sub(
            r"{{ if \.(\w+) }}(.*?){{ end }}",
            lambda m, turn=turn: m[2].replace(f"{{{{ .{m[1]} }}}}", turn[m[1]]) * bool(turn[m[1]]),
            template,
            flags=re.DOTALL,
        )
        head, tail = filled.split("{{ .Response }}")
        made += head + (answer + tail if answer else "")
    return made


@pytest.mark.parametrize(
    ("template", "bos", "stop"), [(CHATML, "", "<|im_end|>"), (ZEPHYR, "<eos>", "<eos>")]
)
def test_ollama_says_what_the_chat_template_says(template, bos, stop, tmp_path):
    """Two turns, with and without a system's words, against Hugging Face's own rendering."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(tmp_path / "t.json", SPLITS["gpt-2"]),
        bos_token="<eos>",
        eos_token="<eos>",
    )
    if bos:  # it is added to every text: a runtime does that by itself
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<eos> $A", special_tokens=[("<eos>", 0)]
        )
    made.chat_template = template
    made.save_pretrained(tmp_path / "t")
    text = ollama.modelfile("t.gguf", tmp_path / "t/tokenizer.json")
    assert text.startswith("FROM ./t.gguf\n")
    assert f'PARAMETER stop "{stop}"' in text
    for system in ("", "Speak plainly"):
        talk = [{"role": "system", "content": system}] * bool(system) + [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three"},
        ]
        want = made.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        found = as_ollama(text, system, [("one", "two"), ("three", "")])
        assert bos + found == want


def test_tokenizers_that_others_would_misread(tmp_path):
    """Ollama gets no chat format that a TEMPLATE cannot say, llama.cpp no split it has not."""
    path = tmp_path / "tokenizer.json"
    make_tokenizer(path, SPLITS["gpt-2"])
    assert ollama.modelfile("t.gguf", None) == "FROM ./t.gguf\n"
    assert ollama.modelfile("t.gguf", path) == "FROM ./t.gguf\n"
    (tmp_path / "chat_template.jinja").write_text(GEMMA)
    text = ollama.modelfile("t.gguf", path)
    assert 'TEMPLATE "' not in text
    assert "own list" in text
    make_tokenizer(path, pre_tokenizers.Whitespace())
    with pytest.raises(ValueError, match="Whitespace"):
        exporter.export(word_ticket(tmp_path), tmp_path / "t.gguf", "f16", path)
    assert not list(tmp_path.glob("*gguf*"))


def test_bad_input(tmp_path, monkeypatch):
    opened, blueprint = open_parent("llama", "head", tmp_path / "parent")
    deploy.save_ticket(opened, blueprint, tmp_path / "ticket")
    words = ["export", str(tmp_path / "ticket"), "-o", str(tmp_path / "t.gguf"), "--to", "gguf"]
    result = CliRunner().invoke(app, [*words, "--type", "q4_0"])
    assert isinstance(result.exception, ValueError)
    assert "q8_0" in str(result.exception)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, words)
    assert "pip install -e '.[gguf]'" in str(result.exception)
    with pytest.raises(ValueError, match=r"\.\[llama\]"):
        llamacpp.LlamaRunner(tmp_path / "t.gguf", 8)
    assert not list(tmp_path.glob("*gguf*"))
