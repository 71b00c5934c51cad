"""The model card of a ticket: README.md with licence, base model, widths, numbers, how to load."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PretrainedConfig

from ..model.huggingface import gguf_path
from ..system.terminal import markdown_cell, markdown_code, markdown_text
from .parent import Parent

NAME = "README.md"
TEMPLATE = Path(__file__).with_name("card.md")
SAID = {  # notes that the card tells in words or in rows of their own
    "parent", "n_params", "bytes", "stock", "speed", "budget", "pick", "spend", "whole", "dtype",
    "max_logit_difference", "perplexity",
}  # fmt: skip


def save(
    parent: Parent,
    config: PretrainedConfig,
    record: dict[str, Any],
    notes: dict[str, Any],
    folder: Path,
) -> None:
    """Write README.md: `record` is ticket.json, `notes` are the measurements in it."""
    base, n_full = parent.cfg.model.weights, parent.central.layout.n_params
    n_bytes = (folder / "model.safetensors").stat().st_size
    share = f"{record['n_params']:,} of {n_full:,} ({record['n_params'] / n_full:.1%})"
    numbers = [
        ("parameters", share, f"{n_full:,}"),
        ("weights on disk", f"{n_bytes / 1e6:,.1f} MB", ""),
        *_measured(notes),
    ]
    chosen = ""
    if "budget" in notes and "pick" in notes:
        asked, pick = notes["budget"], notes["pick"]
        how = pick["how"] + (f", seed {pick['seed']}" if pick["how"] == "random" else "")
        chosen = f"Asked for: {asked['kind']} {asked['asked']}; blocks chosen by: {how}. "
    is_run = base != parent.source and os.path.exists(parent.source)
    start = "random weights" if base == "random" else markdown_code(_name(base))
    stock = isinstance(record["stock"], dict)
    made = f"{markdown_code(record['command'])}, twistlm {record['git']}, {record['device']}"
    data = ModelCardData(
        license=_license(base),
        base_model=base if _is_hub_id(base) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["twistlm", "pruned"],
    )
    ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=markdown_text(_name(parent.source)),
        family=config.model_type,
        start=start if is_run else "",
        numbers=_table(("", "ticket", "parent"), numbers),
        chosen=chosen,
        made=made,
        stock=stock,
        widths=_stock_widths(record["stock"]) if stock else _widths(config),
    ).save(folder / NAME)


def _measured(notes: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    """Rows of the card's table out of what was measured, the parent's beside the ticket's."""
    whole, found = notes.get("parent", {}), notes.get("perplexity")
    if isinstance(found, dict) and "n_tokens" in found:
        name = f"perplexity on {found['n_tokens']:,} tokens"
        name += f" of {os.path.basename(found['data'])}" if "data" in found else ""
        yield name, *(f"{found[who]:.2f}" if who in found else "" for who in ("ticket", "parent"))
    elif found is not None:
        yield from _flat({"perplexity": found})
    if took := notes.get("speed"):
        for name, key in (
            (f"ms per decoded token ({took['device']}, {took['n_threads']} threads)", "decode_ms"),
            (f"ms for a prompt of {took['n_prompt']} tokens", "prefill_ms"),
        ):
            full = whole.get("speed", {}).get(key)
            yield name, f"{took[key]:.1f}", f"{full:.1f}" if full else ""
    if (far := notes.get("max_logit_difference")) is not None:
        yield "max_logit_difference to the masked parent", f"{far:.1e}", ""
    yield from _flat({key: notes[key] for key in notes if key not in SAID})


def _flat(notes: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, ...]]:
    """Names and numbers of the notes, nested ones by `a.b`; lists stay in ticket.json."""
    for key, value in notes.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, int | float | str):
            yield prefix + key, f"{value:.4g}" if isinstance(value, float) else str(value), ""


def _name(source: str) -> str:
    """A hub id or gguf:FILE as it is; of a folder, the last parts that say something."""
    if not os.path.exists(source):
        return source
    parts = [part for part in Path(source).parts if part != "checkpoints"]
    return "/".join(parts[-2:] if parts[-1].startswith("round-") else parts[-1:])


def _stock_widths(widths: dict[str, str]) -> str:
    rows = ((name, *text.split("/")) for name, text in widths.items())
    return _table(("in every layer", "ticket", "parent"), rows)


def _widths(config: PretrainedConfig) -> str:
    names = sorted({width for _, width, _ in config.ticket["projections"].values()})
    full = config.to_dict()
    rows = (
        (i, *(f"{getattr(layer, name)} / {full[name]}" for name in names))
        for i, layer in enumerate(config.per_layer_config)
    )
    return _table(("layer", *names), rows)


def _table(head: tuple[str, ...], rows: Iterable[Any]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = (" | ".join(markdown_cell(str(cell)) for cell in line) for line in lines)
    return "\n".join(f"| {each} |" for each in cells)


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
