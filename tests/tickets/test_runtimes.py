"""Tickets in other programs, in processes that know nothing of twistlm: docs/tickets.md's table."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import word_level
from families_table import case, far, logits, open_parent, stock_ticket, tokens
from transformers import PreTrainedTokenizerFast

import twistlm
from twistlm.export import onnx
from twistlm.tickets import deploy

pytestmark = pytest.mark.runtime
IDS = tokens(2, 12)
AS_WORDS = json.dumps(IDS.tolist())
GROUPED = ("llama-gqa", "group", "both")


def greedy(model: Any) -> torch.Tensor:
    return model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)


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


def test_vllm_writes_the_same_text_without_the_plugin(tmp_path):
    """With heads of 32, the smallest that its attention on CPUs knows."""
    parent, kept = open_parent("llama-gqa", "group", tmp_path / "parent", head_dim=32)
    deploy.save_ticket(parent, dict.fromkeys(kept, (0, 2)), tmp_path / "ticket")
    found = elsewhere("vllm", VLLM, tmp_path / "ticket", AS_WORDS)
    want = greedy(deploy.load_ticket(tmp_path / "ticket"))
    assert found == want[:, IDS.shape[1] :].tolist()


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("key", [("gpt2", "head", "both"), GROUPED], ids="/".join)
def test_vllm_writes_the_same_text_with_layers_of_different_width(key, trust, tmp_path):
    vllm = pytest.importorskip("vllm")
    twistlm.register()
    deploy.save_ticket(case(key).parent(), case(key).blueprint, tmp_path)
    engine = vllm.LLM(
        str(tmp_path), model_impl="transformers", trust_remote_code=trust,
        skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=40,
    )  # fmt: skip
    settings = vllm.SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    made = engine.generate([{"prompt_token_ids": row.tolist()} for row in IDS], settings)
    text = greedy(case(key).reference)[:, IDS.shape[1] :]
    assert [list(out.outputs[0].token_ids) for out in made] == text.tolist()


def test_peft_trains_merges_and_saves(tmp_path):
    want = stock_ticket(GROUPED, tmp_path / "ticket")
    found = elsewhere("peft", LORA, tmp_path / "ticket", AS_WORDS, tmp_path / "merged")
    assert far(torch.tensor(found["start"]), logits(want, IDS)) < 1e-5
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert found["far"] < 1e-5


def test_torchao_stores_eight_bits(tmp_path):
    """As far from the exact logits as rows rounded by hand to 255 steps, within a factor of two."""
    want = logits(stock_ticket(GROUPED, tmp_path), IDS)
    found = torch.tensor(elsewhere("torchao", INT8, tmp_path, AS_WORDS))
    rounded = deploy.load_ticket(tmp_path)
    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.detach()
            step = weight.abs().amax(1, keepdim=True) / 127
            module.weight = torch.nn.Parameter((weight / step).round() * step)
    allowed = far(logits(rounded, IDS), want)
    assert 0 < far(found, want) < 2 * allowed < float(want.abs().max())


def test_lm_eval_scores_words(tmp_path):
    """A task of local data; its log-likelihoods are the masked parent's."""
    folder = tmp_path / "ticket"
    model = stock_ticket(("llama", "head", "both"), folder)
    words = word_level([f"w{i}" for i in range(64)])
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w62", pad_token="w63"
    ).save_pretrained(folder)
    rows = [{"text": f"w{i} w{i + 1}", "choices": ["w5", "w9"], "answer": 0} for i in range(10, 18)]
    (tmp_path / "words.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = elsewhere("lm_eval", LM_EVAL, folder, tmp_path / "words.jsonl")
    for i, pair in zip(range(10, 18), found, strict=True):
        want = logits(model, torch.tensor([[i, i + 1]]))[0, -1].log_softmax(-1)[[5, 9]]
        assert far(torch.tensor(pair), want) < 1e-4


@pytest.mark.parametrize("key", [("llama", "head", "ffn"), ("gpt2", "head", "ffn")], ids="/".join)
def test_optimum_runs_the_onnx_folder_of_a_ticket_with_all_heads(key, tmp_path):
    pytest.importorskip("onnxscript")
    want = stock_ticket(key, tmp_path / "ticket")
    onnx.export(deploy.load_ticket(tmp_path / "ticket"), tmp_path / "onnx")
    assert elsewhere("optimum", OPTIMUM, tmp_path / "onnx", AS_WORDS) == greedy(want).tolist()
