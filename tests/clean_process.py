# ruff: noqa: E402
"""Loads every ticket under a folder with transformers alone, and writes down what it does.

Run by test_hf_folder.py as a process of its own: `clean_process.py FOLDER`.
twistlm cannot be imported here.
"""

import sys
from pathlib import Path

sys.modules["twistlm"] = None

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
root = Path(sys.argv[1])
inputs = load_file(root / "inputs.safetensors")
for folder in sorted(path for path in root.iterdir() if path.is_dir()):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        found = {
            "logits": model(input_ids=inputs["ids"]).logits,
            "states": AutoModel.from_pretrained(folder, trust_remote_code=True)(
                input_ids=inputs["ids"]
            ).last_hidden_state,
        }
    common = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for cache in ("dynamic", "static"):
        found[cache] = model.generate(
            inputs["ids"], cache_implementation=cache, disable_compile=True, **common
        )
    found["padded"] = model.generate(
        inputs["padded"], attention_mask=inputs["padded"].ne(0).long(), **common
    )
    model.save_pretrained(folder / "again")
    again = AutoModelForCausalLM.from_pretrained(folder / "again", trust_remote_code=True)
    with torch.no_grad():
        found["again"] = again(input_ids=inputs["ids"]).logits
    if (folder / "tokenizer.json").is_file():
        found["words"] = torch.tensor(AutoTokenizer.from_pretrained(folder)("w5 w9").input_ids)
    save_file(found, folder / "found.safetensors")
# without trust, transformers refuses a ticket by itself: never half loaded
try:
    AutoModelForCausalLM.from_pretrained(folder)
    refused = ""
except Exception as error:
    refused = str(error)
assert "per-layer attribute" in refused, refused
