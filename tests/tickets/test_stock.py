"""Stock tickets in a process that has transformers and nothing of ours, against parents cut by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families_table import N_FFN, N_LAYERS, TABLE, build, by_hand, far, logits, sentence, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel
from typer.testing import CliRunner

from twistlm.cli.options import app
from twistlm.model.blocks import Blueprint, widths_of_ratio
from twistlm.system.terminal import progress
from twistlm.tickets import deploy, stock
from twistlm.tickets.budget import parse_budget
from twistlm.tickets.extract import TicketRequest, choose
from twistlm.tickets.parent import Parent, open_parent

IDS = tokens(2, 12)
UNIFORM = {"attn": (0, 2), "ffn": (0, 1, 3)}  # kept in every layer
STOCK = [  # row, blocks.attn_by, blocks.setting
    ("llama", "head", "both"),
    ("llama-gqa", "group", "both"),
    ("llama-gqa", "query", "both"),
    ("qwen3", "group", "both"),
    ("mistral", "group", "both"),
    ("gemma3_text", "group", "both"),
    ("qwen2", "group", "both"),
    ("smollm3", "group", "both"),
    ("phi", "head", "both"),
    ("gpt2", "head", "ffn"),
    ("opt", "head", "ffn"),
]
CLEAN = """
import sys
sys.modules["twistlm"] = None
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
root = Path(sys.argv[1])
ids = load_file(root / "ids.safetensors")["ids"]
for folder in sorted(path for path in root.iterdir() if (path / "ticket.json").is_file()):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        found = {"logits": model(input_ids=ids).logits}
    found["text"] = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    save_file(found, root / f"{folder.name}.safetensors")
"""


def parent_of(folder: Path, key: tuple[str, str, str], *more: str) -> Parent:
    name, attn_by, setting = key
    if not folder.exists():
        build(TABLE[name].type, TABLE[name].config).save_pretrained(folder)
    cut = [f"blocks.attn_by={attn_by}", f"blocks.setting={setting}", f"blocks.n_ffn={N_FFN}"]
    cut += ["blocks.shared_first=0", "blocks.shared_last=0", "train.scale=sqrt", *more]
    return open_parent(folder, "cpu", cut)


def uniform(parent: Parent) -> Blueprint:
    return {group.name: UNIFORM[group.kind] for group in parent.block_map.groups}


def reference(key: tuple[str, str, str]) -> PreTrainedModel:
    name, attn_by, setting = key
    kinds = ("attn", "ffn") if setting == "both" else (setting,)
    kept = {(i, kind): UNIFORM[kind] for i in range(N_LAYERS) for kind in kinds}
    return by_hand(build(TABLE[name].type, TABLE[name].config), TABLE[name], attn_by, kept)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """All stock tickets, and what one process without twistlm made of them."""
    folder = tmp_path_factory.mktemp("stock")
    save_file({"ids": IDS}, folder / "ids.safetensors")
    for key in STOCK:
        parent = parent_of(folder / "parents" / "-".join(key), key)
        deploy.save_ticket(parent, uniform(parent), folder / "-".join(key))
    done = subprocess.run(
        [sys.executable, "-c", CLEAN, str(folder)],
        capture_output=True,
        text=True,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("key", STOCK, ids="/".join)
def test_stock_transformers_computes_the_masked_parent(key, root):
    want, found = reference(key), load_file(root / f"{'-'.join(key)}.safetensors")
    assert far(found["logits"], logits(want, IDS)) < 1e-5
    text = want.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(found["text"], text)
    assert far(logits(deploy.load_ticket(root / "-".join(key)), IDS), logits(want, IDS)) < 1e-5


@pytest.mark.parametrize("key", STOCK, ids="/".join)
def test_the_folder_is_a_plain_model_of_the_family(key, root):
    folder = root / "-".join(key)
    names = {path.name for path in folder.iterdir()}
    assert not [name for name in names if name.endswith(".py")]
    config, plain = (
        json.loads((folder / "config.json").read_text()),
        build(TABLE[key[0]].type, TABLE[key[0]].config).config,
    )
    plain.save_pretrained(folder.parent / "plain")
    known = set(json.loads((folder.parent / "plain" / "config.json").read_text()))
    unknown = set(config) - known - {"architectures", "dtype"}
    undeclared = {"head_dim"} if key[0] in ("qwen2", "smollm3", "phi") else set()
    assert unknown == undeclared  # these classes read head_dim, but do not declare it
    assert type(AutoConfig.from_pretrained(folder)) is type(plain)
    record = json.loads((folder / "ticket.json").read_text())
    width = {"gpt2": "n_inner", "opt": "ffn_dim"}.get(key[0], "intermediate_size")
    assert record["stock"][width] == "36/48"
    assert config[width] == 36
    card = (folder / "README.md").read_text()
    assert "stock" in card
    assert "trust_remote_code" not in card


def test_what_no_stock_config_can_say_keeps_widths_per_layer(tmp_path):
    """GPT-2 has no name for fewer heads of the same size; Llama's refuses heads that do not divide."""
    for key, ratio, reason in (
        (("gpt2", "head", "attn"), "2/4", "gpt2's config cannot say it"),
        (("llama", "head", "attn"), "3/4", "not a multiple of the number of attention"),
    ):
        parent = parent_of(tmp_path / key[0], key)
        widths = widths_of_ratio(parent.block_map, ratio)
        kept = {name: tuple(range(k)) for name, k in widths.items()}
        deploy.save_ticket(parent, kept, tmp_path / f"ticket-{key[0]}")
        record = json.loads((tmp_path / f"ticket-{key[0]}" / "ticket.json").read_text())
        assert reason in record["stock"]
        assert (tmp_path / f"ticket-{key[0]}" / "modeling_ticket.py").is_file()
        deploy.load_ticket(tmp_path / f"ticket-{key[0]}")
        assert reason.split()[0] in sentence(stock.demand, parent, widths)
    assert "--ratio attn=K/4 with K in 1, 2, 4 would do" in sentence(stock.demand, parent, widths)


def test_a_parent_with_whole_layers_says_what_to_do(tmp_path):
    parent = parent_of(tmp_path / "p", STOCK[0], "blocks.shared_first=1")
    widths = widths_of_ratio(parent.block_map, "2/4")
    said = sentence(stock.demand, parent, widths)
    assert "its layers differ in num_key_value_heads (2, 4)" in said
    assert "blocks.shared_first=1 blocks.shared_last=0" in said


@pytest.mark.parametrize("amount", [11_000, 14_000, 17_000, 10**9])
def test_a_budget_with_stock_takes_the_largest_that_fits(tmp_path, amount):
    """Every pair of widths is counted by hand; none that fits is cut less in both kinds."""
    parent = parent_of(tmp_path / "p", STOCK[0])
    request = TicketRequest(budget=parse_budget(params=str(amount)), stock=True)
    with progress(quiet=True) as bar:
        made = choose(parent, request, bar)
    heads, neurons = (made.model.get_submodule("model.layers.0") for _ in range(2))
    k_attn, k_ffn = (
        len(made.blueprint["model.layers.0.attn"]),
        len(made.blueprint["model.layers.0.ffn"]),
    )
    assert heads.self_attn.q_proj.weight.shape[0] == 8 * k_attn
    assert neurons.mlp.up_proj.weight.shape[0] == 12 * k_ffn
    assert isinstance(made.proof["stock"], dict)
    shared = 2 * 64 * 32 + 32 + 3 * 2 * 32  # embedding, head, norms

    def count(a: int, f: int) -> int:
        return shared + 3 * (4 * 32 * 8 * a + 3 * 32 * 12 * f)

    assert made.proof["n_params"] == count(k_attn, k_ffn) <= amount
    for a in (1, 2, 4):  # 3 heads do not divide 32
        for f in range(1, 5):
            if a >= k_attn and f >= k_ffn and (a, f) != (k_attn, k_ffn):
                assert count(a, f) > amount


def test_the_command_says_what_kind_of_ticket_it_wrote(tmp_path):
    name, attn_by, _ = STOCK[0]
    build(TABLE[name].type, TABLE[name].config).save_pretrained(tmp_path / "p")
    words = ["blocks.n_ffn=4", "blocks.shared_last=0", f"blocks.attn_by={attn_by}"]
    common = ["extract", str(tmp_path / "p"), "-o", str(tmp_path / "t"), "--device", "cpu", *words]
    done = CliRunner().invoke(app, [*common, "--ratio", "2/4", "blocks.shared_first=0"])
    assert "a stock llama model" in done.output
    assert not (tmp_path / "t" / "modeling_ticket.py").exists()
    done = CliRunner().invoke(app, [*common, "--ratio", "2/4", "blocks.shared_first=1"])
    assert "not a stock llama model: its layers differ" in done.output.replace("\n", " ")
    done = CliRunner().invoke(app, [*common, "--params", "1", "--stock", "blocks.shared_first=0"])
    assert "is impossible: the smallest" in str(done.exception)
