# ruff: noqa: E402
"""Loads every ticket under a folder with transformers alone, and writes down what it does.

Run by test_hf_folder.py as a process of its own: `clean_process.py FOLDER TO_CLASSIFY...`.
twistlm cannot be imported here, and what stock tickets bring is not trusted.
"""

import sys
from pathlib import Path

sys.modules["twistlm"] = None

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

torch.set_num_threads(1)
root = Path(sys.argv[1])
inputs = load_file(root / "inputs.safetensors")
ids = inputs["ids"]


def refusal(folder: Path) -> str:
    try:
        AutoModelForCausalLM.from_pretrained(folder)
    except Exception as error:
        return str(error)
    return ""


def classify(folder: Path) -> dict[str, torch.Tensor]:
    """A head learns to tell two texts apart."""
    torch.manual_seed(0)
    classes = {"num_labels": 2, "pad_token_id": 1}
    two = AutoModelForSequenceClassification.from_pretrained(folder, **classes)
    with torch.no_grad():
        hidden = two.base_model(input_ids=ids).last_hidden_state
    optimizer, losses = torch.optim.AdamW(two.parameters(), 3e-3), []
    for _ in range(30):
        loss = two(input_ids=ids, labels=torch.arange(len(ids)) % 2).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"hidden": hidden, "losses": torch.stack(losses)}


for folder in sorted(path for path in root.iterdir() if path.is_dir()):
    trust = {"trust_remote_code": (folder / "modeling_ticket.py").is_file()}
    if trust["trust_remote_code"]:  # without it transformers refuses by itself: never half loaded
        assert "per-layer attribute" in refusal(folder), folder
    model = AutoModelForCausalLM.from_pretrained(folder, **trust)
    base = AutoModel.from_pretrained(folder, **trust)
    with torch.no_grad():
        found = {
            "logits": model(input_ids=ids).logits,
            "states": base(input_ids=ids).last_hidden_state,
        }
    common = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for cache in ("dynamic", "static"):
        found[cache] = model.generate(
            ids, cache_implementation=cache, disable_compile=True, **common
        )
    found["padded"] = model.generate(
        inputs["padded"], attention_mask=inputs["padded"].ne(0).long(), **common
    )
    model.save_pretrained(folder / "again")
    again = AutoModelForCausalLM.from_pretrained(folder / "again", **trust)
    with torch.no_grad():
        found["again"] = again(input_ids=ids).logits
    if (folder / "tokenizer.json").is_file():
        found["words"] = torch.tensor(AutoTokenizer.from_pretrained(folder)("w5 w9").input_ids)
    if folder.name in sys.argv[2:]:
        found |= classify(folder)
    save_file(found, folder / "found.safetensors")
