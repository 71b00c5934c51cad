"""Stock tickets in a process that has transformers alone, against parents cut by hand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import word_level
from families_table import N_FFN, N_LAYERS, TABLE, build, by_hand, far, logits, sentence, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from twistlm.cli.options import app
from twistlm.export import onnx
from twistlm.model.blocks import Blueprint, widths_of_ratio
from twistlm.system.terminal import progress
from twistlm.tickets import deploy, stock
from twistlm.tickets.extract import choose
from twistlm.tickets.parent import Parent, open_parent
from twistlm.tickets.requests import TicketRequest

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
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
torch.set_num_threads(1)
root = Path(sys.argv[1])
ids = load_file(root / "ids.safetensors")["ids"]
for folder in sorted(path for path in root.iterdir() if (path / "ticket.json").is_file()):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        found = {"logits": model(input_ids=ids).logits}
    found["text"] = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    if folder.name in sys.argv[2:]:  # a classification head learns to tell two texts apart
        torch.manual_seed(0)
        classes = {"num_labels": 2, "pad_token_id": 1}
        two = AutoModelForSequenceClassification.from_pretrained(folder, **classes)
        with torch.no_grad():
            found["hidden"] = two.base_model(input_ids=ids).last_hidden_state
        optimizer, losses = torch.optim.AdamW(two.parameters(), 3e-3), []
        for _ in range(30):
            loss = two(input_ids=ids, labels=torch.arange(len(ids)) % 2).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found["losses"] = torch.stack(losses)
    save_file(found, root / f"{folder.name}.safetensors")
"""
CLASSIFIED = [("llama-gqa", "group", "both"), ("gpt2", "head", "ffn")]


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
        [sys.executable, "-c", CLEAN, str(folder), *map("-".join, CLASSIFIED)],
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


@pytest.mark.parametrize("key", CLASSIFIED, ids="/".join)
def test_a_stock_ticket_takes_a_classification_head(key, root):
    """The head sits on the masked parent's last hidden states, and both are trained."""
    found = load_file(root / f"{'-'.join(key)}.safetensors")
    with torch.no_grad():
        hidden = reference(key).base_model(input_ids=IDS).last_hidden_state
    assert far(found["hidden"], hidden) < 1e-5
    assert found["losses"][-1] < 0.05 < 0.3 < found["losses"][0]


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
    """GPT-2 has no name for fewer heads of that size; Llama refuses heads that do not divide."""
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


@pytest.mark.parametrize("amount", [11_000, 14_000, 17_000, 10**9])
def test_a_budget_with_stock_takes_the_largest_that_fits(tmp_path, amount):
    """Every pair of widths is counted by hand; none that fits is cut less in both kinds."""
    parent = parent_of(tmp_path / "p", STOCK[0])
    request = TicketRequest(params=str(amount), stock=True)
    with progress(quiet=True) as bar:
        made = choose(parent, request, bar)
    layer = made.model.get_submodule("model.layers.0")
    k_attn, k_ffn = (len(made.blueprint[f"model.layers.0.{kind}"]) for kind in ("attn", "ffn"))
    assert layer.self_attn.q_proj.weight.shape[0] == 8 * k_attn
    assert layer.mlp.up_proj.weight.shape[0] == 12 * k_ffn
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


# other programs, in processes that know nothing of twistlm


def elsewhere(module: str, code: str, *args: Path | str) -> Any:
    """What a program prints as JSON; TWISTLM_PYTHON_<MODULE> may name a Python that has it."""
    python = os.environ.get(f"TWISTLM_PYTHON_{module.upper()}")
    if python is None:
        pytest.importorskip(module)
    done = subprocess.run(
        [python or sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=args[0],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in done.stdout.splitlines() if line.startswith(("[", "{"))]
    return json.loads(said[-1])  # some log to stdout, too


VLLM = """
import json, sys, vllm
if __name__ == "__main__":
    ids = json.loads(sys.argv[2])
    small = {"dtype": "float32", "enforce_eager": True, "max_model_len": 40}
    engine = vllm.LLM(sys.argv[1], skip_tokenizer_init=True, **small)
    settings = vllm.SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    made = engine.generate([{"prompt_token_ids": row} for row in ids], settings)
    print()
    print(json.dumps([list(out.outputs[0].token_ids) for out in made]))
"""
LORA = """
import json, sys, torch, peft
from transformers import AutoModelForCausalLM
torch.manual_seed(0)
ids = torch.tensor(json.loads(sys.argv[2]))
model = peft.get_peft_model(
    AutoModelForCausalLM.from_pretrained(sys.argv[1]),
    peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
)
start = model(input_ids=ids).logits.tolist()
adam, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), []
for _ in range(30):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    adam.step()
    adam.zero_grad()
    losses.append(float(loss))
merged = model.merge_and_unload()
merged.save_pretrained(sys.argv[3])
again = AutoModelForCausalLM.from_pretrained(sys.argv[3])
far = float((again(input_ids=ids).logits - merged(input_ids=ids).logits).abs().max())
print(json.dumps({"start": start, "losses": losses, "far": far}))
"""
INT8 = """
import json, sys, torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
quantize_(model, Int8WeightOnlyConfig())
with torch.no_grad():
    print(json.dumps(model(input_ids=torch.tensor(json.loads(sys.argv[2]))).logits.tolist()))
"""
LM_EVAL = """
import json, sys, lm_eval
task = {
    "task": "words", "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": sys.argv[2]}},
    "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
done = lm_eval.simple_evaluate(
    model="hf", model_args=f"pretrained={sys.argv[1]}", tasks=[task], device="cpu", batch_size=4
)
rows = done["samples"]["words"]
print(json.dumps([[found[0] for found in row["filtered_resps"]] for row in rows]))
"""
OPTIMUM = """
import json, sys, torch
from optimum.onnxruntime import ORTModelForCausalLM
model, ids = ORTModelForCausalLM.from_pretrained(sys.argv[1]), torch.tensor(json.loads(sys.argv[2]))
text = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
print(json.dumps(text.tolist()))
"""
OTHERS = [STOCK[0], STOCK[1]]
AS_WORDS = json.dumps(IDS.tolist())


@pytest.mark.runtime
@pytest.mark.parametrize("key", OTHERS, ids="/".join)
def test_vllm_writes_the_same_text_without_the_plugin(key, tmp_path):
    """With heads of 32, the smallest that its attention on CPUs knows."""
    build(TABLE[key[0]].type, TABLE[key[0]].config | {"head_dim": 32}).save_pretrained(
        tmp_path / "p"
    )
    parent = parent_of(tmp_path / "p", key)
    deploy.save_ticket(parent, uniform(parent), tmp_path / "ticket")
    found = elsewhere("vllm", VLLM, tmp_path / "ticket", AS_WORDS)
    ticket: Any = deploy.load_ticket(tmp_path / "ticket")
    want = ticket.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert found == want[:, IDS.shape[1] :].tolist()


@pytest.mark.runtime
@pytest.mark.parametrize("key", OTHERS, ids="/".join)
def test_peft_trains_merges_and_saves(key, root, tmp_path):
    found = elsewhere("peft", LORA, root / "-".join(key), AS_WORDS, tmp_path / "merged")
    assert far(torch.tensor(found["start"]), logits(reference(key), IDS)) < 1e-5
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert found["far"] < 1e-5


@pytest.mark.runtime
@pytest.mark.parametrize("key", OTHERS, ids="/".join)
def test_torchao_stores_eight_bits(key, root):
    """As far from the exact logits as rows rounded by hand to 255 steps, within a factor of two."""
    found = torch.tensor(elsewhere("torchao", INT8, root / "-".join(key), AS_WORDS))
    want, rounded = logits(reference(key), IDS), deploy.load_ticket(root / "-".join(key))
    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.detach()
            step = weight.abs().amax(1, keepdim=True) / 127
            module.weight = torch.nn.Parameter((weight / step).round() * step)
    allowed = far(logits(rounded, IDS), want)
    assert 0 < far(found, want) < 2 * allowed < float(want.abs().max())


@pytest.mark.runtime
def test_lm_eval_scores_words(root, tmp_path):
    """A task of local data; its log-likelihoods are the masked parent's."""
    key, folder = STOCK[0], tmp_path / "ticket"
    shutil.copytree(root / "-".join(key), folder)
    names = [f"w{i}" for i in range(64)]
    words = PreTrainedTokenizerFast(
        tokenizer_object=word_level(names), eos_token="w62", pad_token="w63"
    )
    words.save_pretrained(folder)
    rows = [{"text": f"w{i} w{i + 1}", "choices": ["w5", "w9"], "answer": 0} for i in range(10, 18)]
    (tmp_path / "words.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = elsewhere("lm_eval", LM_EVAL, folder, tmp_path / "words.jsonl")
    for i, pair in zip(range(10, 18), found, strict=True):
        want = logits(reference(key), torch.tensor([[i, i + 1]]))[0, -1].log_softmax(-1)[[5, 9]]
        assert far(torch.tensor(pair), want) < 1e-4


@pytest.mark.runtime
@pytest.mark.parametrize("key", [("llama", "head", "ffn"), ("gpt2", "head", "ffn")], ids="/".join)
def test_optimum_runs_the_onnx_folder_of_a_ticket_with_all_heads(key, tmp_path):
    pytest.importorskip("onnxscript")
    parent = parent_of(tmp_path / "parent", key)
    deploy.save_ticket(parent, uniform(parent), tmp_path / "ticket")
    onnx.export(deploy.load_ticket(tmp_path / "ticket"), tmp_path / "onnx")
    found = elsewhere("optimum", OPTIMUM, tmp_path / "onnx", AS_WORDS)
    text = reference(key).generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert found == text.tolist()
