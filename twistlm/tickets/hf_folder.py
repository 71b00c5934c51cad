"""A ticket as a Hugging Face folder: weights, config, modelling file, tokenizer, model card."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ..model import families, huggingface
from ..model.blocks import Kind
from ..model.families import kv_name, layer_widths
from ..model.tokenizer import find_eos, load_tokenizer, same_ids
from ..system.files import save_tensors
from ..system.terminal import console, markdown_code, markdown_table, markdown_text
from . import modeling_ticket
from .parent import Parent
from .stock import stock_config

CARD = "README.md"
CODE = Path(modeling_ticket.__file__).stem
# of a tokenizer, beside its named special tokens, that no tokenizer.json holds
SETTINGS = (
    "chat_template", "model_max_length", "padding_side", "truncation_side",
    "clean_up_tokenization_spaces", "extra_special_tokens",
)  # fmt: skip


def save(parent: Parent, full: PreTrainedModel, ticket: PreTrainedModel, folder: Path) -> str:
    """Write what `from_pretrained` and `AutoTokenizer` read; returns why it is no stock model.

    `full` is the parent with the ticket's layers. Where the family's own config can say it, the
    folder is a stock model; elsewhere it holds widths for each layer and the modelling file.
    """
    config, why = stock_config(full, huggingface.shapes(ticket)), ""
    if isinstance(config, str):
        why, config = config, _ticket_config(full, ticket, parent.block_map.kinds)
    config.dtype = ticket.dtype
    generation = ticket.generation_config
    if (tokenizer := parent_tokenizer(parent)) is not None:
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
    full: PreTrainedModel, ticket: PreTrainedModel, kinds: Sequence[Kind]
) -> PretrainedConfig:
    """The full model's config, the widths of each layer, and what these are widths of."""
    family, stock = families.family(full), full.config
    subs = {kind: getattr(family, kind) for kind in kinds}
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
    model_class, config_class = f"Ticket{type(full).__name__}", f"Ticket{type(stock).__name__}"
    fields |= {
        **layer_widths(full, huggingface.shapes(full), subs)[0],
        "per_layer_config": layer_widths(full, huggingface.shapes(ticket), subs),
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
        if bare is not None and not (whole.is_fast and same_ids(whole.backend_tokenizer, bare)):
            # transformers makes some tokenizers anew or in Python, whatever their file says
            settings = {name: getattr(whole, name) for name in SETTINGS} | whole.special_tokens_map
            whole = PreTrainedTokenizerFast(tokenizer_object=bare, **settings)
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


def _whole_tokenizer(source: str, **known: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a Hugging Face folder, a hub id or gguf:FILE; None where there is none."""
    folder = Path(source)
    if source == "random" or (folder.is_dir() and not (folder / "tokenizer_config.json").is_file()):
        return None  # a family's own class would add its special tokens to a bare tokenizer.json
    try:
        if source.startswith("gguf:"):
            return huggingface.gguf_tokenizer(source)
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **known)
    except (OSError, ValueError):  # a base model that is out of reach by now
        return None


def save_card(parent: Parent, record: dict[str, Any], folder: Path) -> None:
    """Write README.md, with licence, base model, widths and numbers: `record` is ticket.json."""
    base, tokenizer = parent.cfg.model.weights, tokenizer_class(folder, parent.template.config)
    if tokenizer != "AutoTokenizer":
        console.print(
            "transformers' AutoTokenizer makes other tokens of a text than this tokenizer.json: "
            f"read it with {tokenizer}",
            style="yellow",
        )
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
        tokenizer=tokenizer,
        widths=markdown_table([("layer", "blocks kept"), *record["widths"].items()]),
    ).save(folder / CARD)


def tokenizer_class(folder: Path, config: PretrainedConfig) -> str:
    """The class of transformers that makes the ids of a folder's tokenizer.json.

    `config` is the parent's: an uneven ticket's own is read by none but our classes.
    """
    if not (folder / "tokenizer.json").is_file():  # of a class in Python, such as ByT5's
        return "AutoTokenizer"
    auto = _whole_tokenizer(str(folder), config=config)
    if auto is None or same_ids(auto.backend_tokenizer, load_tokenizer(str(folder))):
        return "AutoTokenizer"
    return "PreTrainedTokenizerFast"  # of Qwen2, whatever its tokenizer_config.json asks for


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
        yield "max_logit_difference to the masked parent in float32", f"{far:.1e}", ""
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
