"""A ticket's model card: licence, base model, what was measured, how it is loaded."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ..model import huggingface
from ..system.terminal import markdown_code, markdown_table, markdown_text
from .parent import Parent

CARD = "README.md"


def save_card(parent: Parent, record: dict[str, Any], folder: Path) -> None:
    """Write README.md, with licence, base model, widths and numbers: `record` is ticket.json."""
    base = parent.cfg.model.weights
    is_hub_id = base != "random" and not base.startswith("gguf:") and not os.path.exists(base)
    data = ModelCardData(
        license=_license(base),
        base_model=base if is_hub_id else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["twistlm", "pruned"],
    )
    ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md")),
        name=markdown_text(name_of(parent.source)),
        family=parent.template.config.model_type,
        numbers=markdown_table([("", "ticket", "parent"), *numbers(record)]),
        made=f"{markdown_code(record['command'])}, twistlm {record['git']}, {record['device']}",
        stock=record["stock"] is True,
        widths=markdown_table([("layer", "blocks kept"), *record["widths"].items()]),
    ).save(folder / CARD)


def numbers(proof: dict[str, Any]) -> Iterable[tuple[str, str, str]]:
    """What was measured, in rows: its name, the ticket's number and the parent's."""
    whole, share = proof["parent"], proof["n_params"] / proof["parent"]["n_params"]
    yield "parameters", f"{proof['n_params']:,} ({share:.1%})", f"{whole['n_params']:,}"
    if "bytes" in proof:
        name = f"bytes of weights ({proof['dtype']})"
        yield name, f"{proof['bytes']:,}", f"{whole['bytes']:,}"
    if found := proof.get("perplexity"):
        name = f"perplexity on {found['n_tokens']:,} tokens of {os.path.basename(found['data'])}"
        yield name, f"{found['ticket']:.2f}", f"{found['parent']:.2f}"
    if took := proof.get("speed"):
        where = f"{took['device']}, {took['n_threads']} threads"
        for key, name in {
            "decode_ms": f"ms per decoded token ({where})",
            "prefill_ms": f"ms for a prompt of {took['n_prompt']} tokens",
        }.items():
            yield name, f"{took[key]:.2f}", f"{whole['speed'][key]:.2f}"
    if (far := proof.get("max_logit_difference")) is not None:
        yield "max_logit_difference to the masked parent", f"{far:.1e}", ""
    for key in ("method", "ratio", "scale"):  # of a baseline
        if key in proof:
            yield key, str(proof[key]), ""


def name_of(source: str) -> str:
    """A hub id or gguf:FILE as it is; of a folder, the last parts that say something."""
    if not os.path.exists(source):
        return source
    parts = [part for part in Path(source).parts if part != "checkpoints"]
    return "/".join(parts[-2:] if parts[-1].startswith("round-") else parts[-1:])


def _license(base: str) -> str | None:
    """The base model's licence, where it tells one: its own card or its GGUF file."""
    if base == "random":
        return None
    if base.startswith("gguf:"):
        from gguf import GGUFReader

        field = GGUFReader(huggingface.gguf_path(base)).fields.get("general.license")
        return field.contents() if field is not None else None
    try:
        return ModelCard.load(Path(base) / CARD if os.path.exists(base) else base).data.license
    except (OSError, ValueError):  # no card, or no network
        return None
