"""Tickets in Hugging Face's own hands: with twistlm, without it, saved again, generated from.

The reference is the stock model with zeros in its output projections (`test_families.by_hand`).
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families_table import (
    ALONE,
    BOTH,
    TABLE,
    VOCAB,
    as_parent,
    build,
    case,
    far,
    logits,
    sentence,
    tiny_model,
    tokens,
)
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

import twistlm
from twistlm.model import huggingface
from twistlm.tickets import deploy
from twistlm.tickets.parent import Parent, open_parent
from twistlm.training import checkpoint
from twistlm.training.run import beginning

KEYS = BOTH + ALONE
every_key = pytest.mark.parametrize("key", KEYS, ids="/".join)
four = pytest.mark.parametrize(
    "key",
    [
        ("gpt2", "head", "both"),
        ("llama", "head", "both"),
        ("llama-gqa", "group", "both"),
        ("llama-gqa", "query", "both"),
        ("qwen3", "group", "both"),
    ],
    ids="/".join,
)
IDS = tokens(2, 12)
LENGTHS = (10, 4)


def padded() -> Tensor:
    """Two prompts of different lengths, zeros to their left."""
    rows = [tokens(1, n, seed=n)[0] for n in LENGTHS]
    return torch.stack([torch.cat([torch.zeros(10 - len(r), dtype=r.dtype), r]) for r in rows])


def greedy(model: PreTrainedModel, ids: Tensor, **more) -> Tensor:
    made = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, **more)
    assert isinstance(made, Tensor)
    return made


def python(code: str, *args: str) -> str:
    """What a new process prints; it starts elsewhere, with nothing of this one but the path."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(Path(twistlm.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Every ticket of the table, and what a process without twistlm made of it."""
    twistlm.register()
    folder = tmp_path_factory.mktemp("tickets") / "all"
    folder.mkdir()
    save_file({"ids": IDS, "padded": padded()}, folder / "inputs.safetensors")
    for key in KEYS:
        deploy.save_ticket(case(key).parent(), case(key).blueprint, folder / "-".join(key))
    deploy.save_ticket(bare_parent(folder.parent), case(BOTH[0]).blueprint, folder / "bare")
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[1] / "clean_process.py", folder],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "HF_MODULES_CACHE": str(folder.parent / "modules")},
    )
    assert done.returncode == 0, done.stderr
    return folder


def ticket_of(root: Path, key: tuple[str, str, str]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(root / "-".join(key))


@every_key
def test_masked_extracted_and_reloaded_with_and_without_twistlm_are_one(key, root):
    c, found = case(key), load_file(root / "-".join(key) / "found.safetensors")
    want = logits(c.reference, IDS)
    loaded = ticket_of(root, key)
    for model in (c.masked().model, c.ticket(), loaded):
        assert far(logits(model, IDS), want) < 1e-5
    assert far(found["logits"], want) < 1e-5
    assert far(found["again"], want) < 1e-5
    text = greedy(c.reference, IDS)
    assert torch.equal(greedy(loaded, IDS), text)
    assert torch.equal(found["dynamic"], text)
    assert torch.equal(found["static"], text)


@every_key
def test_the_base_model_is_narrow_too(key, root):
    """vLLM builds AutoModel and puts its own head on it."""
    base = AutoModel.from_pretrained(root / "-".join(key))
    with torch.no_grad():
        want = case(key).reference.base_model(input_ids=IDS).last_hidden_state
        assert far(base(input_ids=IDS).last_hidden_state, want) < 1e-5
    found = load_file(root / "-".join(key) / "found.safetensors")["states"]
    assert far(found, want) < 1e-5
    config = AutoConfig.from_pretrained(root / "-".join(key))
    assert huggingface.shapes(AutoModel.from_config(config)) == huggingface.shapes(base)
    assert config.model_type == TABLE[key[0]].type  # a ticket keeps its family's
    assert type(config).__name__ == f"Ticket{type(case(key).model.config).__name__}"
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(twin) is type(config)
        assert twin.to_dict() == config.to_dict()


@four
def test_generation(key, root):
    """Caches, left padding, beams, kinds of attention: as stock models go on."""
    c, ticket = case(key), ticket_of(root, key)
    for name in ("eager", "sdpa"):
        ticket.set_attn_implementation(name)
        held = {m.config._attn_implementation for m in ticket.modules() if hasattr(m, "config")}
        assert held == {name}
        assert far(logits(ticket, IDS), logits(c.reference, IDS)) < 1e-5
    static = {"cache_implementation": "static", "disable_compile": True}
    text = greedy(c.reference, IDS)
    for more in ({"use_cache": False}, {"use_cache": True}, static):
        assert torch.equal(greedy(ticket, IDS, **more), text)
    beams = {"num_beams": 3}
    assert torch.equal(greedy(ticket, IDS, **beams), greedy(c.reference, IDS, **beams))
    mask = padded().ne(0).long()
    together = greedy(ticket, padded(), attention_mask=mask)
    found = load_file(root / "-".join(key) / "found.safetensors")["padded"]
    assert torch.equal(found, together)
    for row, n in enumerate(LENGTHS):  # each row goes on as if it were alone
        alone = greedy(c.reference, tokens(1, n, seed=n))
        assert torch.equal(together[row, 10:], alone[0, n:])


@four
def test_save_pretrained_round_trip(key, root, tmp_path):
    """With the modelling file, so that the copy is as portable as the original."""
    want = logits(case(key).reference, IDS)
    ticket_of(root, key).save_pretrained(tmp_path / "a")
    AutoModelForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert far(logits(again, IDS), want) < 1e-5
    first = json.loads((root / "-".join(key) / "config.json").read_text())
    assert json.loads((tmp_path / "b/config.json").read_text()) == first
    for name in ("a", "b"):
        assert (tmp_path / name / "modeling_ticket.py").is_file()
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    assert {param.dtype for param in half.parameters()} == {torch.bfloat16}


def test_the_widths_stand_in_per_layer_config(root):
    """By their names in each family, counted by hand from `draw_kept`."""

    def widths(*key: str) -> dict:
        return json.loads((root / "-".join(key) / "config.json").read_text())["per_layer_config"]

    ffn = {"1": 24, "2": 36}  # 2/4 and 3/4 of 48 neurons; layer 0 is shared and full
    assert widths("gpt2", "head", "both") == {
        "1": {"n_head": 3, "n_inner": ffn["1"]},
        "2": {"n_head": 2, "n_inner": ffn["2"]},
    }
    assert widths("opt", "head", "both")["1"] == {"num_attention_heads": 3, "ffn_dim": ffn["1"]}
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    for key, heads in {  # (query, kv) heads of layers 1 and 2
        ("llama", "head"): [(3, 3), (2, 2)],
        ("llama-gqa", "group"): [(6, 2), (3, 1)],
        ("llama-gqa", "query"): [(6, 3), (3, 3)],
        ("llama-mqa", "query"): [(3, 1), (2, 1)],
    }.items():
        found = widths(*key, "both")
        full = {"num_attention_heads": 0, "num_key_value_heads": TABLE[key[0]].n_kv}
        got = [tuple((full | found[layer])[name] for name in names) for layer in ("1", "2")]
        assert got == [(*pair, ffn[layer]) for pair, layer in zip(heads, ("1", "2"), strict=True)]
        assert set(found) == {"1", "2"}
    assert widths("gpt2", "head", "attn") == {"1": {"n_head": 3}, "2": {"n_head": 2}}
    assert widths("gpt2", "head", "ffn") == {"1": {"n_inner": 24}, "2": {"n_inner": 36}}


def test_stock_models_stay_stock(tmp_path):
    for name in ("gpt2", "llama", "qwen3"):
        model = tiny_model(name)
        assert not type(model).__name__.startswith("Ticket")
        model.save_pretrained(tmp_path / name)
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path / name)) is type(model)
        assert type(AutoConfig.from_pretrained(tmp_path / name)) is type(model.config)
        assert {path.suffix for path in (tmp_path / name).iterdir()} == {".json", ".safetensors"}


def test_register_is_enough(root, tmp_path):
    """Before it transformers refuses a ticket; after it, what vLLM does works too.

    vLLM loads the plugin, unpickles a config in another process and looks the architecture up.
    """
    keys = [("llama", "head", "both"), ("gpt2", "head", "both")]
    config = AutoConfig.from_pretrained(root / "-".join(keys[1]))
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(config))
    code = """
import pickle, sys, twistlm
from transformers import AutoModelForCausalLM
folder, pickled = sys.argv[1:]
try:
    AutoModelForCausalLM.from_pretrained(folder)
except Exception as error:
    assert "per-layer attribute" in str(error), error
else:
    raise AssertionError("a ticket was loaded as a stock model")
twistlm.register(); twistlm.register()
model = AutoModelForCausalLM.from_pretrained(folder)
print(type(model).__name__, sum(p.numel() for p in model.parameters()))

import transformers
config = pickle.load(open(pickled, "rb"))
found = getattr(transformers, config.architectures[0])
assert found.is_backend_compatible()
assert found._keys_to_ignore_on_load_unexpected is None
base = transformers.AutoModel.from_config(config)
print(found.__name__, type(base).__name__, base.h[1].attn.c_attn.weight.shape[1])
"""
    n_params = sum(param.numel() for param in case(keys[0]).ticket().parameters())
    made = python(code, str(root / "-".join(keys[0])), str(tmp_path / "config.pickle"))
    assert made.splitlines() == [
        f"TicketLlamaForCausalLM {n_params}",
        f"TicketGPT2LMHeadModel TicketGPT2Model {3 * 3 * 8}",
    ]


# tokenizer, generation settings, card


def small_tokenizer() -> Tokenizer:
    words = {"<|endoftext|>": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    tok = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tok.pre_tokenizer = Whitespace()
    return tok


def bare_parent(folder: Path) -> Parent:
    """A parent with nothing but a tokenizer.json, as checkpoints have it; its config says 50256."""
    model = build("gpt2", {**TABLE["gpt2"].config, "bos_token_id": 50256, "eos_token_id": 50256})
    c = case(BOTH[0])
    small_tokenizer().save(str(folder / "tokenizer.json"))
    plain = as_parent(model, c.block_map, c.central, "sqrt")
    return Parent(**{**vars(plain), "tokenizer": folder / "tokenizer.json"})


@pytest.fixture
def bare(tmp_path) -> Parent:
    return bare_parent(tmp_path)


def test_a_bare_tokenizer_becomes_one_that_auto_tokenizer_reads(root):
    folder = root / "bare"
    tok = AutoTokenizer.from_pretrained(folder)
    assert tok("w5 w9 nothing").input_ids == [5, 9, 1]
    assert len(tok) == VOCAB
    assert (tok.eos_token, tok.eos_token_id) == ("<|endoftext|>", 0)
    assert tok.model_max_length == 40
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        assert (settings["bos_token_id"], settings["eos_token_id"]) == (0, 0), name
    writer = pipeline("text-generation", model=str(folder), device="cpu")
    made = writer("w5 w9 w20", max_new_tokens=5, do_sample=False, return_full_text=False)
    want = greedy(case(BOTH[0]).reference, torch.tensor([[5, 9, 20]]))[0, 3:8]
    assert made[0]["generated_text"] == tok.decode(want)
    assert load_file(folder / "found.safetensors")["words"].tolist() == [5, 9]  # without twistlm


@pytest.fixture
def hf_folder(tmp_path) -> Path:
    """A Llama folder with chat template, generation settings and a licence."""
    folder = tmp_path / "tiny-llama"
    model = build("llama", {**TABLE["llama-gqa"].config, "eos_token_id": 0})
    model.save_pretrained(folder)
    settings = {"eos_token_id": 0, "repetition_penalty": 1.25, "temperature": 0.5}  # do_sample: off
    (folder / "generation_config.json").write_text(json.dumps(settings))
    tok = PreTrainedTokenizerFast(
        tokenizer_object=small_tokenizer(), eos_token="<|endoftext|>", pad_token="<unk>"
    )
    tok.chat_template = "{% for m in messages %}w7 {{ m.content }}{% endfor %}"
    tok.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n# tiny\n")
    return folder


def test_code_that_a_parents_tokenizer_names_does_not_come_along(hf_folder, tmp_path):
    """A ticket's card says trust_remote_code for our own code: nothing else may be found by it."""
    path = hf_folder / "tokenizer_config.json"
    named = {"auto_map": {"AutoTokenizer": [None, "somebody/else--evil.Tokenizer"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    full = open_parent(hf_folder, "cpu", ["blocks.n_ffn=4", "blocks.shared_last=0"])
    kept = {group.name: (0,) for group in full.block_map.groups}
    deploy.save_ticket(full, kept, tmp_path / "ticket", {})
    said = json.loads((tmp_path / "ticket" / "tokenizer_config.json").read_text())
    assert "auto_map" not in said
    assert said["eos_token"] == "<|endoftext|>"


def test_a_hugging_face_parents_tokenizer_and_settings_come_along_whole(hf_folder, tmp_path):
    full = open_parent(
        hf_folder, "cpu", ["blocks.n_ffn=4", "blocks.shared_first=1", "blocks.shared_last=0"]
    )
    kept = {group.name: (0, group.n_blocks - 1) for group in full.block_map.groups}
    folder = tmp_path / "ticket"
    deploy.save_ticket(full, kept, folder, {"perplexity": 12.3456, "proof": {"logit": 1.5e-6}})
    settings = deploy.load_ticket(folder).generation_config
    tok = AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": "w9"}]
    assert tok.apply_chat_template(talk, return_dict=False) == [7, 9]
    assert (tok.eos_token_id, tok.pad_token_id) == (0, 1)
    assert (settings.repetition_penalty, settings.temperature) == (1.25, 0.5)
    narrow = deploy.cut_ticket(full, kept)
    assert far(logits(deploy.load_ticket(folder), IDS), logits(narrow, IDS)) < 1e-6

    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "cc-by-4.0"
    assert card.data.library_name == "transformers"
    record = json.loads((folder / "ticket.json").read_text())
    assert record["perplexity"] == 12.3456
    n_full = sum(param.numel() for param in full.template.parameters())
    for text in (
        "# A ticket of tiny-llama",
        "| perplexity | 12.35 |  |",
        "| proof.logit | 1.5e-06 |  |",
        f"{record['n_params']:,} of {n_full:,}",
        "trust_remote_code=True",
        "| layer | intermediate_size | num_attention_heads | num_key_value_heads |",
        "| 0 | 48 / 48 | 9 / 9 | 3 / 3 |",
        "| 1 | 24 / 48 | 6 / 9 | 2 / 3 |",
    ):
        assert text in card.content, text
    assert str(tmp_path) not in card.content  # a card is read elsewhere


def test_a_broken_tokenizer_leaves_nothing_behind(bare, tmp_path):
    bare.tokenizer.write_text("{")
    text = sentence(deploy.save_ticket, bare, case(BOTH[0]).blueprint, tmp_path / "out/ticket")
    assert "tokenizer.json" in text
    assert list((tmp_path / "out").iterdir()) == []


# what load_ticket refuses


@pytest.fixture
def folder(root, tmp_path) -> Path:
    return shutil.copytree(root / "llama-gqa-group-both", tmp_path / "ticket")


def test_load_ticket_says_what_a_folder_is_instead(tmp_path, folder):
    assert "no ticket.json" in sentence(deploy.load_ticket, tmp_path / "nowhere")
    tiny_model("gpt2").save_pretrained(tmp_path / "plain")
    assert "Hugging Face model" in sentence(deploy.load_ticket, tmp_path / "plain")
    c, where = case(BOTH[0]), tmp_path / "checkpoints"
    start = beginning(c.block_map)
    saved = checkpoint.save(where, c.central, start, c.parent().cfg, c.model, None, keep=1)
    assert "is a checkpoint" in sentence(deploy.load_ticket, saved)
    assert "is a checkpoint" in sentence(deploy.load_ticket, tmp_path)
    assert "is a ticket" in sentence(open_parent, folder)


FFN, UP = "model.layers.1.ffn", "model.layers.1.mlp.up_proj.weight"


def swapped(ticket: dict) -> None:
    """The same number of parameters in other layers."""
    for field in ("widths", "blueprint"):
        one, two = FFN, "model.layers.2.ffn"
        ticket[field][one], ticket[field][two] = ticket[field][two], ticket[field][one]


def widened(size: int):
    return lambda config: config["per_layer_config"]["1"].update(intermediate_size=size)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("weights", lambda w: w.pop(UP), "its config promises"),
        ("weights", lambda w: w.update({UP: w[UP][:-1].clone()}), "its config promises"),
        ("weights", lambda w: w.update(more=w.pop(UP)), f"missing_keys: {UP}"),
        ("weights", lambda w: w.update({UP: w[UP].T.contiguous()}), UP),
        ("model.safetensors", b"short", "cannot be loaded"),
        ("model.safetensors", None, "cannot be loaded"),
        ("config.json", widened(36), "its config promises"),
        ("config.json", widened(96), "the full model has 48"),
        ("ticket.json", swapped, f"{FFN} 3/4"),
        ("ticket.json", lambda t: t.update(n_params=7), "tells of 7 parameters"),
        ("ticket.json", lambda t: t["blueprint"][FFN].pop(), "does not fit its width"),
        ("ticket.json", b"{", "damaged"),
    ],
)
def test_what_does_not_fit_is_refused(folder, file, change, words):
    """Of a ticket from before manifests: what is in its files is all there is to go by."""
    ticket = json.loads((folder / "ticket.json").read_text())
    del ticket["files"], ticket["sha256"]
    (folder / "ticket.json").write_text(json.dumps(ticket))
    deploy.load_ticket(folder)
    if file == "weights":
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    elif change is None:
        (folder / file).unlink()
    elif isinstance(change, bytes):
        (folder / file).write_bytes(change)
    else:
        value = json.loads((folder / file).read_text())
        change(value)
        (folder / file).write_text(json.dumps(value))
    assert words in sentence(deploy.load_ticket, folder)


# other programs


@pytest.mark.runtime
@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_vllm_writes_the_same_text(name, trust, root):
    vllm = pytest.importorskip("vllm")
    key = (name, TABLE[name].ways[0], "both")
    engine = vllm.LLM(
        str(root / "-".join(key)), model_impl="transformers", trust_remote_code=trust,
        skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=40,
    )  # fmt: skip
    settings = vllm.SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    made = engine.generate([{"prompt_token_ids": row.tolist()} for row in IDS], settings)
    text = greedy(case(key).reference, IDS)[:, IDS.shape[1] :]
    assert [list(out.outputs[0].token_ids) for out in made] == text.tolist()
