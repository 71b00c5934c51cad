"""The model card of a ticket: README.md with licence, base model, widths, numbers, how to load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PretrainedConfig

from ..model.huggingface import gguf_path
from ..system.manifest import parse_json
from ..system.terminal import markdown_cell, markdown_code, markdown_text
from .parent import Parent

NAME = "README.md"
SAID = (  # notes that lines of the card tell in words, or that its loading section does
    "parent", "n_params", "bytes", "stock", "speed", "budget", "pick", "spend", "whole", "dtype", "max_logit_difference",
)  # fmt: skip
STOCK = """This is a stock FAMILY model: transformers, vLLM, llama.cpp's converter, PEFT and other programs load it as they load
any FAMILY model, without twistlm and without code of its own.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer  # transformers 5

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```"""
LOADING = """The layers have widths of their own, which no stock class of transformers builds. With twistlm:

```python
import twistlm  # pip install twistlm
from transformers import AutoModelForCausalLM, AutoTokenizer

twistlm.register()
model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

Without twistlm, `modeling_ticket.py` in this folder does the same (torch and transformers ≥ 5.14 are all it needs).
Both calls need the flag:

```python
model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("PATH", trust_remote_code=True)
```"""


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
    numbers = [
        ("parameters", f"{record['n_params']:,} of {n_full:,} ({record['n_params'] / n_full:.1%})", f"{n_full:,}"),
        ("weights on disk", f"{bytes_ / 1e6:,.1f} MB", ""),
        *_measured(notes),
    ]  # fmt: skip
    made = f"{markdown_code(record['command'])}, twistlm {record['git']}, {record['device']}"
    data = ModelCardData(
        license=_license(base),
        base_model=base if _is_hub_id(base) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["twistlm", "pruned"],
    )
    name = markdown_text(_name(parent.source))
    start = "random weights" if base == "random" else markdown_code(_name(base))
    is_run = base != parent.source and os.path.exists(parent.source)
    is_stock = isinstance(record["stock"], dict)
    origin = f"\nThe parent was trained from {start}." if is_run else ""
    text = f"""---
{data.to_yaml()}
---

# A ticket of {name}

A dense {config.model_type} model, cut by twistlm out of a larger one: whole attention heads and whole groups of FFN neurons
were kept, and the activation scale is folded into the weights.{origin}

## Numbers

{_table(("", "ticket", "parent"), numbers)}

{_chosen(notes)}Made by {made}.

## Loading

{STOCK.replace("FAMILY", config.model_type) if is_stock else LOADING}
{_curve(parent.source)}
## Widths

Kept out of the parent's (the blocks themselves are in ticket.json).

{_stock_widths(record["stock"]) if is_stock else _widths(config)}
"""
    ModelCard(text).save(folder / NAME)


def _measured(notes: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows of the card's table out of what was measured, the parent's beside the ticket's."""
    whole, rows = notes.get("parent", {}), list[tuple[str, ...]]()
    if isinstance(found := notes.get("perplexity"), dict) and "n_tokens" in found:
        name = f"perplexity on {found['n_tokens']:,} tokens"
        name += f" of {os.path.basename(found['data'])}" if "data" in found else ""
        both = (f"{found[who]:.2f}" if who in found else "" for who in ("ticket", "parent"))
        rows.append((name, *both))
    elif found is not None:
        rows += [(name, text, "") for name, text in _flat({"perplexity": found}).items()]
    if took := notes.get("speed"):
        where = f"{took['device']}, {took['n_threads']} threads"
        for name, key in (
            (f"ms per decoded token ({where})", "decode_ms"),
            (f"ms for a prompt of {took['n_prompt']} tokens", "prefill_ms"),
        ):
            full = whole.get("speed", {}).get(key)
            rows.append((name, f"{took[key]:.1f}", f"{full:.1f}" if full else ""))
    if (far := notes.get("max_logit_difference")) is not None:
        rows.append(("max_logit_difference to the masked parent", f"{far:.1e}", ""))
    rest = {key: notes[key] for key in notes if key not in (*SAID, "perplexity")}
    return rows + [(name, text, "") for name, text in _flat(rest).items()]


def _chosen(notes: dict[str, Any]) -> str:
    """How its blocks were chosen, in a sentence."""
    if "budget" not in notes or "pick" not in notes:
        return ""
    asked, pick = notes["budget"], notes["pick"]
    how = pick["how"] + (f", seed {pick['seed']}" if pick["how"] == "random" else "")
    return f"Asked for: {asked['kind']} {asked['asked']}; blocks chosen by: {how}. "


def _name(source: str) -> str:
    """A hub id or gguf:FILE as it is; of a folder, the last parts that say something."""
    if not os.path.exists(source):
        return source
    parts = [part for part in Path(source).parts if part != "checkpoints"]
    return "/".join(parts[-2:] if parts[-1].startswith("round-") else parts[-1:])


def _curve(source: str) -> str:
    """A section with the perplexities of random tickets by size, as the parent's run last measured them."""
    metrics = Path(source).parents[1] / "metrics.jsonl" if len(Path(source).parts) > 2 else None
    rows = last_evaluation(metrics) if metrics is not None and metrics.is_file() else None
    if rows is None:
        return ""
    lines = [("all (no ticket)", f"{rows['full']:.2f}", "")]
    for size, found in rows.items():
        if size != "full":
            lines.append(
                (size, f"{found['mean']:.2f} ± {found['sd']:.2f}", f"{found['worst']:.2f}")
            )
    head = ("blocks that stay", "perplexity of random tickets", "worst")
    return f"""
## The parent's other sizes

As the training measured them on its validation text:

{_table(head, lines)}
"""


def last_evaluation(metrics: Path) -> dict[str, Any] | None:
    """The perplexities in the last line of a run's metrics that has any."""
    for line in reversed(metrics.read_text().splitlines()):
        try:
            row = parse_json(line, metrics)
        except ValueError:  # a line that is being written
            continue
        if isinstance(row, dict) and row.get("eval"):
            return row["eval"]
    return None


def _stock_widths(widths: dict[str, str]) -> str:
    rows = ((name, *text.split("/")) for name, text in widths.items())
    return _table(("in every layer", "ticket", "parent"), rows)


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
    return "\n".join(
        "| " + " | ".join(markdown_cell(str(cell)) for cell in line) + " |" for line in lines
    )


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
