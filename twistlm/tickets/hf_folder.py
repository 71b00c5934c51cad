"""A ticket as a Hugging Face folder: config, modelling file, tokenizer and model card.

With the same widths in every layer a ticket is a plain ("stock") model of its family, which any
program loads: the family's own class decides, built without memory from the narrowed config.
"""

import os
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ..config import BlocksConfig
from ..model import families, huggingface
from ..model.blocks import BlockMap, Kind, Shapes, Widths
from ..model.families import kv_name, layer_widths, sublayers
from ..model.tokenizer import find_eos, load_tokenizer
from ..system.files import save_tensors
from ..system.terminal import markdown_code, markdown_table, markdown_text
from . import modeling_ticket
from .parent import Parent

CODE = Path(modeling_ticket.__file__).stem
CARD = "README.md"


def save(parent: Parent, full: PreTrainedModel, ticket: PreTrainedModel, folder: Path) -> str:
    """Write what `from_pretrained` and `AutoTokenizer` read; returns why it is no stock model.

    `full` is the parent with the ticket's layers. Where the family's own config can say it, the
    folder is a stock model; elsewhere it holds widths for each layer and the modelling file.
    """
    found = stock_config(full, huggingface.shapes(ticket))
    why = found if isinstance(found, str) else ""
    kinds = {group.kind for group in parent.block_map.groups}
    config = _ticket_config(full, ticket, kinds) if isinstance(found, str) else found
    config.dtype = ticket.dtype
    generation = ticket.generation_config
    tokenizer = parent_tokenizer(parent)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        for settings in (config, generation):
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                token = getattr(settings, name, None)
                if isinstance(token, int) and token >= config.vocab_size:
                    setattr(settings, name, tokenizer.eos_token_id)  # GPT-2's 50256 in a small one
    save_tensors(huggingface.state(ticket), folder / "model.safetensors")
    config.save_pretrained(folder)  # and the modelling file
    if generation is not None:  # as it is: save_pretrained refuses some that from_pretrained takes
        generation.to_json_file(folder / "generation_config.json")
    return why


def _ticket_config(
    full: PreTrainedModel, ticket: PreTrainedModel, kinds: set[Kind]
) -> PretrainedConfig:
    """The full model's config, the widths of each layer, and what these are widths of."""
    family, stock = families.family(full), full.config
    subs = {kind: getattr(family, kind) for kind in sorted(kinds)}
    projections: dict[str, tuple[str, str, int]] = {}
    attributes: dict[str, tuple[str | int, ...]] = {}
    fields: dict[str, Any] = stock.to_dict()
    if "attn" in subs:
        sub, dh, kv = subs["attn"], families.head_dim(stock), kv_name(stock, subs["attn"])
        projections |= dict.fromkeys(sub.ins, ("out", kv, dh))
        projections[sub.ins[0]] = ("out", sub.width, sub.fused * dh)
        projections[sub.out] = ("in", sub.width, dh)
        counts: dict[str, tuple[str | int, ...]] = {
            "heads": (sub.width, 1),
            "features": (sub.width, dh),
            "queries_per_kv": (sub.width, 1, kv),
        }
        attributes |= {name: counts[what] for name, what in sub.follows}
        fields["head_dim"] = dh  # GPT-2 and OPT have no such field: it would be guessed from heads
    if "ffn" in subs:
        projections |= dict.fromkeys(subs["ffn"].ins, ("out", subs["ffn"].width, 1))
        projections[subs["ffn"].out] = ("in", subs["ffn"].width, 1)
    shapes, layers = huggingface.shapes(ticket), range(stock.num_hidden_layers)
    model_class, config_class = f"Ticket{type(full).__name__}", f"Ticket{type(stock).__name__}"
    fields |= {
        **layer_widths(full, huggingface.shapes(full), 0, subs),
        "per_layer_config": {i: layer_widths(full, shapes, i, subs) for i in layers},
        "ticket": {
            "layers": family.layers.removeprefix(f"{full.base_model_prefix}."),
            "projections": projections,
            "attributes": attributes,
        },
        "architectures": [model_class],
        "auto_map": {
            "AutoConfig": f"{CODE}.{config_class}",
            "AutoModel": f"{CODE}.Ticket{type(full.base_model).__name__}",
            "AutoModelForCausalLM": f"{CODE}.{model_class}",
        },
    }
    return getattr(modeling_ticket, config_class).from_dict(fields)


def parent_tokenizer(parent: Parent) -> PreTrainedTokenizerBase | None:
    """The parent's tokenizer with its chat template and special tokens, if it has any."""
    config = parent.template.config
    bare = load_tokenizer(str(parent.tokenizer)) if parent.tokenizer else None
    whole = _whole_tokenizer(parent.cfg.model.weights)
    if whole is not None and (bare is None or whole.get_vocab() == bare.get_vocab()):
        whole.model_max_length = min(whole.model_max_length, config.max_position_embeddings)
        whole.init_kwargs.pop("auto_map", None)  # somebody's code, beside ours that users trust
        return whole
    if bare is None:
        return None
    known = config.eos_token_id if isinstance(config.eos_token_id, int) else -1
    eos = known if 0 <= known < bare.get_vocab_size() else find_eos(bare)
    return PreTrainedTokenizerFast(
        tokenizer_object=bare,
        eos_token=bare.id_to_token(eos) if eos is not None else None,
        model_max_length=config.max_position_embeddings,
    )


def _whole_tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a Hugging Face folder, a hub id or gguf:FILE; None where there is none."""
    folder = Path(source)
    if source == "random" or (folder.is_dir() and not (folder / "tokenizer_config.json").is_file()):
        return None  # a family's own class would add its special tokens to a bare tokenizer.json
    try:
        if source.startswith("gguf:"):
            return huggingface.gguf_tokenizer(source)
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError):  # a base model that is out of reach by now
        return None


def stock_config(full: PreTrainedModel, shapes: Shapes) -> PretrainedConfig | str:
    """The family's own config of a model with these shapes, or the reason why there is none."""
    name, subs = full.config.model_type, sublayers(full)
    layers = range(full.config.num_hidden_layers)
    widths = [layer_widths(full, shapes, i, subs) for i in layers]
    for key in widths[0]:
        if len(found := sorted({layer[key] for layer in widths})) > 1:
            sizes = ", ".join(map(str, found))
            return f"its layers differ in {key} ({sizes}), and {name} has one for all layers"
    fields = full.config.to_dict() | widths[0]
    if "attn" in subs and fields[heads := subs["attn"].width] != getattr(full.config, heads):
        fields["head_dim"] = families.head_dim(full.config)  # or it is guessed from the heads
    try:
        config = type(full.config).from_dict(fields)
        with torch.device("meta"):
            made = huggingface.shapes(type(full)(config))
    except (StrictDataclassError, ValueError, TypeError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1].strip().removeprefix("ValueError: ").rstrip(".")
        return f"{name}'s config refuses it: {why}"
    for key, shape in shapes.items():
        if made.get(key) != shape:
            return f"{name}'s config cannot say it: {key} would be {made.get(key)}, not {shape}"
    config.architectures = [type(full).__name__]
    return config


def refuse_shared(blocks: BlocksConfig) -> None:
    """A parent with shared layers has no stock tickets."""
    if blocks.shared_first or blocks.shared_last:
        raise ValueError(
            f"--stock: blocks.shared_first={blocks.shared_first} "
            f"blocks.shared_last={blocks.shared_last} leave layers whole: train a parent with both "
            "at 0, or cut this one so by giving both here"
        )


def stock_ks(model: PreTrainedModel, block_map: BlockMap) -> dict[Kind, list[int]]:
    """Every K of each cut kind with which, in all layers, a ticket is a plain model."""
    full, shapes = block_map.full_widths(), huggingface.shapes(model)
    legal: dict[Kind, list[int]] = {}  # kinds do not disturb each other: n + m looks, not n * m
    for kind in dict.fromkeys(group.kind for group in block_map.groups):
        names = [group.name for group in block_map.groups if group.kind == kind]
        tried = {k: full | dict.fromkeys(names, k) for k in range(1, block_map.n_blocks(kind) + 1)}
        made = {k: stock_config(model, block_map.narrowed(shapes, w)) for k, w in tried.items()}
        legal[kind] = [k for k, config in made.items() if not isinstance(config, str)]
    return legal


def all_widths(block_map: BlockMap, legal: dict[Kind, list[int]]) -> list[Widths]:
    """One of the legal K for each kind, in all layers."""
    each = (dict(zip(legal, ks, strict=True)) for ks in product(*legal.values()))
    return [{group.name: k[group.kind] for group in block_map.groups} for k in each]


def stock_widths(parent: Parent, asked: Widths | None) -> list[Widths]:
    """All widths of this parent's stock tickets.

    An error says what would do if those that were `asked` for, or all, are none.
    """
    refuse_shared(parent.cfg.blocks)
    block_map, full, why = parent.block_map, parent.template, ""
    legal = stock_ks(full, block_map)
    can_be = any(len(ks) > 1 for ks in legal.values())
    if asked is not None:
        found = stock_config(full, block_map.narrowed(huggingface.shapes(full), asked))
        if isinstance(found, str):
            why = f"this ratio makes no stock ticket, for {found}; "
    if can_be and not why:
        return all_widths(block_map, legal)
    ratios = (
        f"{kind}=K/{block_map.n_blocks(kind)} with K in {', '.join(map(str, ks))}"
        for kind, ks in legal.items()
    )
    would_do = f"--ratio {' and '.join(ratios)} would do"
    if not can_be:
        other = "; blocks.setting=ffn may be" if "attn" in legal else ""
        would_do = f"no cut of this parent is stock{other}"
    raise ValueError(f"--stock: {why}{would_do}")


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
