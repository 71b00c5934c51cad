"""Tickets in Hugging Face's own hands: with twistlm, without it, saved again, generated from.

The reference is the stock model with zeros in its output projections (`test_families.by_hand`).
"""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
import torch
from commands import as_process, change
from conftest import word_level
from families_table import (
    CUT,
    N_FFN,
    TABLE,
    VOCAB,
    as_parent,
    build,
    by_hand,
    case,
    far,
    logits,
    sentence,
    stock_ticket,
    tiny_model,
    tokens,
)
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

import twistlm
from twistlm.model import huggingface
from twistlm.model.blocks import widths_of_ratio
from twistlm.tickets import deploy
from twistlm.tickets.parent import Parent, open_parent
from twistlm.tickets.stock import stock_widths

# every family in one way to cut it, and a family in both; all ways: tests/model/test_families.py
KEYS = [(name, TABLE[name].ways[0], "both") for name in TABLE] + [("llama-gqa", "query", "both")]
STOCK = [(name, TABLE[name].ways[0], "both") for name in TABLE if name in (
    "llama", "llama-gqa", "qwen3", "mistral", "gemma3_text", "qwen2", "smollm3", "phi"
)]  # fmt: skip
STOCK += [("llama-gqa", "query", "both"), ("gpt2", "head", "ffn"), ("opt", "head", "ffn")]
CLASSIFIED = ("stock-llama-gqa-group-both", "stock-gpt2-head-ffn")
IDS = tokens(2, 12)

# two prompts of different lengths, zeros to their left
ALONE_10, ALONE_4 = tokens(1, 10, seed=10), tokens(1, 4, seed=4)
PADDED = torch.cat([ALONE_10, torch.nn.functional.pad(ALONE_4, (6, 0))])


def greedy(model: PreTrainedModel, ids: Tensor, **more) -> Tensor:
    made = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, **more)
    assert isinstance(made, Tensor)
    return made


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Every ticket of the table, and what a process without twistlm made of it."""
    twistlm.register()
    folder = tmp_path_factory.mktemp("tickets") / "all"
    folder.mkdir()
    save_file({"ids": IDS, "padded": PADDED}, folder / "inputs.safetensors")
    for key in KEYS:
        deploy.save_ticket(case(key).parent(), case(key).blueprint, folder / "-".join(key))
    deploy.save_ticket(bare_parent(folder.parent), case(KEYS[0]).blueprint, folder / "bare")
    for key in STOCK:
        stock_ticket(key, folder / f"stock-{'-'.join(key)}")
    command = [sys.executable, Path(__file__).parents[1] / "clean_process.py", folder, *CLASSIFIED]
    env = os.environ | {"HF_MODULES_CACHE": str(folder.parent / "modules")}
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=env)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("key", KEYS, ids="/".join)
def test_reloaded_with_and_without_twistlm_it_is_the_masked_parent(key, root):
    """vLLM builds AutoModel and puts its own head on it: the base model is narrow, too."""
    c, folder = case(key), root / "-".join(key)
    found, loaded = load_file(folder / "found.safetensors"), deploy.load_ticket(folder)
    want, text = logits(c.reference, IDS), greedy(c.reference, IDS)
    for made in (logits(loaded, IDS), found["logits"], found["again"]):
        assert far(made, want) < 1e-5
    for made in (greedy(loaded, IDS), found["dynamic"], found["static"]):
        assert torch.equal(made, text)
    base = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        want = c.reference.base_model(input_ids=IDS).last_hidden_state
        assert far(base(input_ids=IDS).last_hidden_state, want) < 1e-5
    assert far(found["states"], want) < 1e-5
    config = AutoConfig.from_pretrained(folder)
    assert huggingface.shapes(AutoModel.from_config(config)) == huggingface.shapes(base)
    assert config.model_type == TABLE[key[0]].type  # a ticket keeps its family's
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(twin) is type(config)
        assert twin.to_dict() == config.to_dict()


@pytest.mark.parametrize("key", [("gpt2", "head", "both"), ("llama-gqa", "query", "both")])
def test_generation_and_saving_again(key, root, tmp_path):
    """Caches, left padding, beams, kinds of attention: as stock models go on."""
    c, folder = case(key), root / "-".join(key)
    ticket: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    for name in ("eager", "sdpa"):
        ticket.set_attn_implementation(name)
        held = {m.config._attn_implementation for m in ticket.modules() if hasattr(m, "config")}
        assert held == {name}
        assert far(logits(ticket, IDS), logits(c.reference, IDS)) < 1e-5
    static = {"cache_implementation": "static", "disable_compile": True}
    for more in ({"use_cache": False}, static, {"num_beams": 3}):
        want = {} if more is static else more
        assert torch.equal(greedy(ticket, IDS, **more), greedy(c.reference, IDS, **want))
    together = greedy(ticket, PADDED, attention_mask=PADDED.ne(0).long())
    assert torch.equal(load_file(folder / "found.safetensors")["padded"], together)
    for row, alone in zip(together, (ALONE_10, ALONE_4), strict=True):
        assert torch.equal(row[10:], greedy(c.reference, alone)[0, alone.shape[1] :])
    # with the modelling file: the copy of a copy is as portable as the original
    ticket.save_pretrained(tmp_path / "a")
    AutoModelForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert far(logits(again, IDS), logits(c.reference, IDS)) < 1e-5
    for name in ("config.json", "modeling_ticket.py"):
        assert (tmp_path / "b" / name).read_bytes() == (folder / name).read_bytes()


def test_register_is_enough(root, tmp_path):
    """Before it transformers refuses a ticket; after it, what vLLM does works, and stock models.

    vLLM loads the plugin, unpickles a config in another process and looks the architecture up.
    """
    config = AutoConfig.from_pretrained(root / "gpt2-head-both")
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
print(type(AutoModelForCausalLM.from_pretrained(folder)).__name__)

import transformers
config = pickle.load(open(pickled, "rb"))
found = getattr(transformers, config.architectures[0])
assert found.is_backend_compatible()
assert found._keys_to_ignore_on_load_unexpected is None
base = transformers.AutoModel.from_config(config)
print(type(base).__name__, base.h[1].attn.c_attn.weight.shape[1])
"""
    args = (root / "llama-head-both", tmp_path / "config.pickle")
    assert ranks.script(tmp_path, code, *args)[1].splitlines() == [
        "TicketLlamaForCausalLM",
        f"TicketGPT2Model {3 * 3 * 8}",
    ]
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "plain")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")) is type(model)
    assert not (tmp_path / "plain/modeling_ticket.py").exists()


WORDS = word_level(["<unk>", "<|endoftext|>", *(f"w{i}" for i in range(2, VOCAB))])


def bare_parent(folder: Path) -> Parent:
    """A parent with nothing but a tokenizer.json, as checkpoints have it; its config says 50256."""
    model = build("gpt2", {**TABLE["gpt2"].config, "bos_token_id": 50256, "eos_token_id": 50256})
    c = case(KEYS[0])
    WORDS.save(str(folder / "tokenizer.json"))
    plain = as_parent(model, c.block_map, c.central, "sqrt")
    return replace(plain, tokenizer=folder / "tokenizer.json")


def test_a_bare_tokenizer_becomes_one_that_auto_tokenizer_reads(root):
    folder = root / "bare"
    tok = AutoTokenizer.from_pretrained(folder)
    assert tok("w5 w9 nothing").input_ids == [5, 9, 0]
    assert len(tok) == VOCAB
    assert (tok.eos_token, tok.eos_token_id) == ("<|endoftext|>", 1)
    assert tok.model_max_length == 40
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        assert (settings["bos_token_id"], settings["eos_token_id"]) == (1, 1), name
    writer = pipeline("text-generation", model=str(folder), device="cpu")
    made = writer("w5 w9 w20", max_new_tokens=5, do_sample=False, return_full_text=False)
    want = greedy(case(KEYS[0]).reference, torch.tensor([[5, 9, 20]]))[0, 3:8]
    assert made[0]["generated_text"] == tok.decode(want)
    assert load_file(folder / "found.safetensors")["words"].tolist() == [5, 9]  # without twistlm


def test_a_hugging_face_parents_tokenizer_and_settings_come_along_whole(tmp_path):
    """With chat template, generation settings and a licence."""
    source, folder = tmp_path / "tiny-llama", tmp_path / "ticket"
    build("llama", {**TABLE["llama-gqa"].config, "eos_token_id": 1}).save_pretrained(source)
    settings = {"eos_token_id": 1, "repetition_penalty": 1.25, "temperature": 0.5}  # do_sample: off
    (source / "generation_config.json").write_text(json.dumps(settings))
    tok = PreTrainedTokenizerFast(
        tokenizer_object=WORDS, eos_token="<|endoftext|>", pad_token="<unk>"
    )
    tok.chat_template = "{% for m in messages %}w7 {{ m.content }}{% endfor %}"
    tok.save_pretrained(source)
    (source / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n# tiny\n")
    # a card says trust_remote_code for our own code: somebody's may not be found by it
    evil = {"AutoTokenizer": [None, "somebody/else--evil.Tokenizer"]}
    change(source / "tokenizer_config.json", auto_map=evil)
    cut = ["blocks.n_ffn=4", "blocks.shared_first=1", "blocks.shared_last=0"]
    full = open_parent(source, "cpu", cut)
    kept = {group.name: (0, group.n_blocks - 1) for group in full.block_map.groups}
    found = {"ticket": 12.3456, "parent": 9.0, "n_tokens": 64, "data": "some/text"}
    deploy.save_ticket(full, kept, folder, {"perplexity": found, "method": "block:taylor"})
    assert "auto_map" not in json.loads((folder / "tokenizer_config.json").read_text())
    twistlm.register()
    tok = AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": "w9"}]
    assert tok.apply_chat_template(talk, return_dict=False) == [7, 9]
    assert (tok.eos_token_id, tok.pad_token_id) == (1, 0)
    settings = deploy.load_ticket(folder).generation_config
    assert (settings.repetition_penalty, settings.temperature) == (1.25, 0.5)
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "cc-by-4.0"
    for text in (
        "# A ticket of tiny-llama",
        "| perplexity on 64 tokens of text | 12.35 | 9.00 |",
        "trust_remote_code=True",
        "| model.layers.1.ffn | 2/4 |",
    ):
        assert text in card.content, text
    assert str(tmp_path) not in card.content  # a card is read elsewhere


def test_an_uneven_ticket_is_written_where_nothing_is_registered(tmp_path):
    """The stock class of its family cannot read its config, whose layers differ in heads."""
    build("llama", TABLE["llama-gqa"].config).save_pretrained(tmp_path / "llama")
    tok = PreTrainedTokenizerFast(tokenizer_object=WORDS, eos_token="<|endoftext|>")
    tok.save_pretrained(tmp_path / "llama")
    asked = ("blocks.n_ffn=4", "blocks.shared_first=1", "blocks.shared_last=0", "--pick", "random")
    more = ("--ratio", "attn=1/3,ffn=2/4", "-o", "ticket")
    code, _, err = as_process("extract", "llama", *asked, *more, cwd=tmp_path)
    assert code == 0, err
    assert json.loads((tmp_path / "ticket/ticket.json").read_text())["stock"] is not True
    assert 'AutoTokenizer.from_pretrained("PATH")' in (tmp_path / "ticket/README.md").read_text()


def test_a_tokenizer_that_transformers_makes_anew_stays_the_parents(tmp_path, capsys):
    """transformers reads every Qwen2's text as Qwen's own tokenizer does: digits one by one."""
    bare = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=270, special_tokens=["<|endoftext|>", "<|im_end|>"])
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    bare.train_from_iterator(["1234 1234 1234"], trainer)
    source, folder = tmp_path / "qwen", tmp_path / "ticket"
    build("qwen2", {**TABLE["qwen2"].config, "vocab_size": 270}).save_pretrained(source)
    settings = {"chat_template": "{{ messages }}", "eos_token": "<|endoftext|>"}
    settings |= {"padding_side": "left", "truncation_side": "left", "model_max_length": 20}
    settings |= {"clean_up_tokenization_spaces": True, "extra_special_tokens": ["<|im_end|>"]}
    tok = PreTrainedTokenizerFast(tokenizer_object=bare, **settings)
    tok.save_pretrained(source)
    want = bare.encode("1234").ids
    assert AutoTokenizer.from_pretrained(source)("1234").input_ids != want  # the reason
    opened = open_parent(source, "cpu", CUT)
    deploy.save_ticket(opened, opened.block_map.full(), folder)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("1234").ids == want
    written = PreTrainedTokenizerFast.from_pretrained(folder)
    assert written("1234").input_ids == want
    assert "PreTrainedTokenizerFast.from_pretrained" in (folder / "README.md").read_text()
    assert "AutoTokenizer makes other tokens" in " ".join(capsys.readouterr().out.split())
    assert {name: getattr(written, name) for name in settings} == settings


@pytest.mark.parametrize("has_file", [False, True])
def test_a_tokenizer_in_python_comes_along(has_file, tmp_path):
    """ByT5 has no tokenizer.json; beside one of the same tokens, as runs have it, that one wins."""
    source, folder, tok = tmp_path / "bytes", tmp_path / "ticket", ByT5Tokenizer(extra_ids=0)
    build("gpt2", {**TABLE["gpt2"].config, "vocab_size": len(tok)}).save_pretrained(source)
    tok.save_pretrained(source)
    if has_file:
        Tokenizer(models.WordLevel(tok.get_vocab(), "<unk>")).save(f"{source}/tokenizer.json")
    opened = open_parent(source, "cpu", CUT)
    deploy.save_ticket(opened, opened.block_map.full(), folder)
    ids = AutoTokenizer.from_pretrained(folder)("ab").input_ids
    assert ids == ([2] if has_file else [100, 101, 1])
    assert 'AutoTokenizer.from_pretrained("PATH")' in (folder / "README.md").read_text()


@pytest.mark.parametrize(("name", "attn_by", "setting"), KEYS)
def test_a_ticket_without_layers_is_the_masked_parent(name, attn_by, setting, tmp_path):
    """Constants of layers that are left out are kept: inside and as the first, cut and stock."""
    opened = open_parent(tiny_model(name), "cpu", [*CUT, f"blocks.attn_by={attn_by}"])
    row = TABLE[name]
    n_blocks = {"attn": row.n_attn(attn_by), "ffn": N_FFN}
    for out, widths in (((1,), (1, 2)), ((0, 2), (0, 0))):
        kept = {
            (layer, kind): () if layer in out else tuple(range(widths[layer == 2], n))
            for layer in range(3)
            for kind, n in n_blocks.items()
        }
        blueprint = {g.name: kept[g.layer, g.kind] for g in opened.block_map.groups}
        deploy.save_ticket(opened, blueprint, tmp_path / "t")
        loaded = deploy.load_ticket(tmp_path / "t")
        want = by_hand(tiny_model(name), row, attn_by, kept)
        assert far(logits(loaded, IDS), logits(want, IDS)) < 1e-5
        for model in (loaded, deploy.cut_ticket(opened, blueprint)):
            assert torch.equal(greedy(model, IDS), greedy(want, IDS))
        config, stays = json.loads((tmp_path / "t/config.json").read_text()), 3 - len(out)
        assert config.get("num_hidden_layers", config.get("n_layer")) == stays
        lists = [config[key] for key in ("layer_types", "no_rope_layers") if key in config]
        assert {len(each) for each in lists} <= {stays}
        if widths == (0, 0):  # whole layers: a plain model of the family
            assert type(loaded) is type(want)
            assert not list((tmp_path / "t").glob("*.py"))


FORBIDDEN = [
    ("opt", {"do_layer_norm_before": False}, (1,), "no layer of this opt.*norms follow the sums"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, (1,), "a layer's number scales"),
    ("llama", {"attention_bias": True}, (1,), "o_proj.bias would have to join .*down_proj.bias"),
    ("llama-biases", {"tie_word_embeddings": True}, (0,), "join untied embeddings"),
    ("llama", {}, (0, 1, 2), "all 3 layers would be left out"),
]


@pytest.mark.parametrize(("name", "config", "out", "words"), FORBIDDEN)
def test_what_forbids_to_leave_layers_out(name, config, out, words, tmp_path):
    model = build(TABLE[name].type, TABLE[name].config | config)
    opened = open_parent(model, "cpu", CUT)
    groups = opened.block_map.groups
    kept = {g.name: () if g.layer in out else tuple(range(g.n_blocks)) for g in groups}
    with pytest.raises(ValueError, match=words):
        deploy.save_ticket(opened, kept, tmp_path / "t")


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("key", STOCK, ids="/".join)
def test_a_stock_ticket_is_a_plain_model_of_its_family(key, root, tmp_path):
    """No code, no foreign keys in its config; a classification head on it learns."""
    folder, want = root / f"stock-{'-'.join(key)}", stock_ticket(key, tmp_path / "again")
    found = load_file(folder / "found.safetensors")
    assert far(found["logits"], logits(want, IDS)) < 1e-5
    assert torch.equal(found["dynamic"], greedy(want, IDS))
    assert far(logits(deploy.load_ticket(folder), IDS), logits(want, IDS)) < 1e-5
    assert not list(folder.glob("*.py"))
    unknown = set(json.loads((folder / "config.json").read_text())) - set(want.config.to_dict())
    # these classes read head_dim, but do not declare it
    assert unknown == ({"head_dim"} if key[0] in ("qwen2", "smollm3", "phi") else set())
    assert type(AutoConfig.from_pretrained(folder)) is type(want.config)
    if folder.name in CLASSIFIED:
        with torch.no_grad():
            hidden = want.base_model(input_ids=IDS).last_hidden_state
        assert far(found["hidden"], hidden) < 1e-5
        assert found["losses"][-1] < 0.05 < 0.3 < found["losses"][0]


def test_what_no_stock_config_can_say_keeps_widths_per_layer(tmp_path):
    """GPT-2 has no name for fewer heads of that size; Llama refuses heads that do not divide."""
    cut = ("blocks.setting=attn", "blocks.shared_first=0", "blocks.shared_last=0")
    for name, ratio, reason in (
        ("gpt2", "2/4", "gpt2's config cannot say it"),
        ("llama", "3/4", "not a multiple of the number of attention"),
    ):
        parent = open_parent(tiny_model(name), "cpu", cut)
        widths = widths_of_ratio(parent.block_map, ratio)
        kept = {each: tuple(range(k)) for each, k in widths.items()}
        deploy.save_ticket(parent, kept, tmp_path / name)
        assert reason in json.loads((tmp_path / name / "ticket.json").read_text())["stock"]
        deploy.load_ticket(tmp_path / name)
    assert "--ratio attn=K/4 with K in 1, 2, 4 would do" in sentence(stock_widths, parent, widths)


def widened(size: int):
    return lambda config: config["per_layer_config"]["1"].update(intermediate_size=size)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("weights", lambda w: w.update(more=w.pop(UP)), f"no weights for {UP}"),
        ("weights", lambda w: w.update({UP: w[UP].T.contiguous()}), f"no weights for {UP}"),
        ("model.safetensors", lambda _: b"short", "could not be loaded"),
        ("config.json", widened(36), "no weights for model.layers.1.mlp"),
        ("config.json", widened(96), "the full model has 48"),
        ("ticket.json", lambda t: t.update(n_params=7), "tells of 7 parameters"),
        ("ticket.json", lambda t: t.pop("blueprint"), "damaged"),
        ("ticket.json", lambda _: b"{", "damaged"),
    ],
)
def test_what_does_not_fit_is_refused(root, tmp_path, file, change, words):
    """Of a ticket from before manifests: what is in its files is all there is to go by."""
    folder = shutil.copytree(root / "llama-gqa-group-both", tmp_path / "ticket")
    ticket = json.loads((folder / "ticket.json").read_text())
    del ticket["files"], ticket["sha256"]
    (folder / "ticket.json").write_text(json.dumps(ticket))
    if file == "weights":
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    else:
        value = json.loads((folder / file).read_text()) if file.endswith(".json") else {}
        made = change(value)
        data = made if isinstance(made, bytes) else json.dumps(value).encode()
        (folder / file).write_bytes(data)
    assert words in sentence(deploy.load_ticket, folder)
