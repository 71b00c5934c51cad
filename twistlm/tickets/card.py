"""The model card of a ticket: README.md with licence, base model, widths, numbers, how to load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PretrainedConfig

from ..model.huggingface import gguf_path
from .parent import Parent

NAME = "README.md"
SAID = ("parent", "n_params", "bytes")  # notes that other lines of the card tell
LOADING = """```python
import twistlm  # pip install twistlm
from transformers import AutoModelForCausalLM, AutoTokenizer

twistlm.register()
model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

Without twistlm, `modeling_ticket.py` in this folder does the same (torch and transformers ≥ 5.14 are all it needs):

```python
model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)
```

vLLM: `vllm serve PATH --model-impl transformers --trust-remote-code` (with twistlm installed, the flag is not needed)."""


def save(
    parent: Parent,
    config: PretrainedConfig,
    record: dict[str, Any],
    notes: dict[str, Any],
    folder: Path,
) -> None:
    """Write README.md: `record` is ticket.json, `notes` are the measurements in it."""
    base = parent.cfg.model.weights
    n_full = parent.central.layout.n_params
    bytes_ = (folder / "model.safetensors").stat().st_size
    numbers = {
        "parameters": f"{record['n_params']:,} of {n_full:,} ({record['n_params'] / n_full:.1%})",
        "weights on disk": f"{bytes_ / 1e6:,.1f} MB",
        **_flat({key: notes[key] for key in notes if key not in SAID}),
        "made by": f"`{record['command']}`, twistlm {record['git']}, {record['device']}",
    }
    data = ModelCardData(
        license=_license(base),
        base_model=base if _is_hub_id(base) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["twistlm", "pruned"],
    )
    name = _name(parent.source)
    start = "random weights" if base == "random" else f"`{_name(base)}`"
    is_run = base != parent.source and os.path.exists(parent.source)
    origin = f"\nThe parent was trained from {start}." if is_run else ""
    text = f"""---
{data.to_yaml()}
---

# A ticket of {name}

A dense {config.model_type} model, cut by twistlm out of a larger one: whole attention heads and whole groups of FFN neurons
were kept, and the activation scale is folded into the weights.{origin}

## Numbers

{_table(("", ""), numbers.items())}

## Loading

{LOADING}

## Widths

Kept out of the parent's, layer by layer (`per_layer_config` in config.json; the blocks themselves are in ticket.json).

{_widths(config)}
"""
    ModelCard(text).save(folder / NAME)


def _name(source: str) -> str:
    """A hub id or gguf:FILE as it is; of a folder, the last parts that say something."""
    if not os.path.exists(source):
        return source
    parts = [part for part in Path(source).parts if part != "checkpoints"]
    return "/".join(parts[-2:] if parts[-1].startswith("round-") else parts[-1:])


def _widths(config: PretrainedConfig) -> str:
    names = sorted({width for _, width, _ in config.ticket["projections"].values()})
    full = config.to_dict()
    rows = [
        (i, *(f"{getattr(layer, name)} / {full[name]}" for name in names))
        for i, layer in enumerate(config.per_layer_config)
    ]
    return _table(("layer", *names), rows)


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _flat(notes: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Names and numbers of the notes, nested ones by `a.b`; lists stay in ticket.json."""
    rows: dict[str, str] = {}
    for key, value in notes.items():
        if isinstance(value, dict):
            rows |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            rows[f"{prefix}{key}"] = f"{value:.4g}"
        elif isinstance(value, int | str):
            rows[f"{prefix}{key}"] = str(value)
    return rows


def _is_hub_id(base: str) -> bool:
    return base != "random" and not base.startswith("gguf:") and not os.path.exists(base)


def _license(base: str) -> str | None:
    """The base model's licence, where it tells one: its own card or its GGUF file."""
    if base.startswith("gguf:"):
        from gguf import GGUFReader

        field = GGUFReader(gguf_path(base)).fields.get("general.license")
        return field.contents() if field is not None else None
    if base == "random" or (os.path.exists(base) and not (Path(base) / NAME).is_file()):
        return None
    try:
        card = ModelCard.load(base if _is_hub_id(base) else Path(base) / NAME)
    except (OSError, ValueError):  # no card, or no network
        return None
    return card.data.get("license")
