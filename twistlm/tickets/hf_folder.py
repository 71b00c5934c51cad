"""A ticket as a Hugging Face folder: config with a width per layer, modelling file, tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from ..model.tokenizer import find_eos, load_tokenizer
from ..system.files import save_tensors
from . import modeling_ticket
from .parent import Parent
from .stock import stock_config

CODE = Path(modeling_ticket.__file__).stem
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def save(parent: Parent, ticket: PreTrainedModel, folder: Path) -> PretrainedConfig:
    """Write what `from_pretrained` and `AutoTokenizer` read, with and without twistlm.

    Where the family's own config can say it, the folder is a stock model; elsewhere it holds widths
    for each layer and the modelling file.
    """
    kinds = {group.kind for group in parent.block_map.groups}
    config = stock_config(parent.template, huggingface.shapes(ticket))
    if isinstance(config, str):
        config = ticket_config(parent.template, ticket, kinds)
    config.dtype = ticket.dtype
    generation = ticket.generation_config
    tokenizer = parent_tokenizer(parent)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        for settings in (config, generation):
            _stay_in_vocabulary_(settings, config.vocab_size, tokenizer.eos_token_id)
    save_tensors(huggingface.state(ticket), folder / "model.safetensors")
    config.save_pretrained(folder)  # and the modelling file
    if generation is not None:  # as it is: save_pretrained refuses some that from_pretrained takes
        generation.to_json_file(folder / "generation_config.json")
    return config


def ticket_config(
    full: PreTrainedModel, ticket: PreTrainedModel, kinds: set[Kind]
) -> PretrainedConfig:
    """The full model's config, the widths of each layer, and what these are widths of."""
    family = families.family(full)
    subs = {kind: getattr(family, kind) for kind in sorted(kinds)}
    layers = family.layers.removeprefix(f"{full.base_model_prefix}.")
    stock = full.config
    projections: dict[str, tuple[str, str, int]] = {}
    attributes: dict[str, tuple[str | int, ...]] = {}
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
    if "ffn" in subs:
        projections |= dict.fromkeys(subs["ffn"].ins, ("out", subs["ffn"].width, 1))
        projections[subs["ffn"].out] = ("in", subs["ffn"].width, 1)
    fields: dict[str, Any] = {
        **stock.to_dict(),
        **layer_widths(full, huggingface.shapes(full), 0, subs),
        "per_layer_config": {
            i: layer_widths(full, huggingface.shapes(ticket), i, subs)
            for i in range(stock.num_hidden_layers)
        },
        "ticket": {"layers": layers, "projections": projections, "attributes": attributes},
        "architectures": [f"Ticket{type(full).__name__}"],
        "dtype": ticket.dtype,
    }
    if "attn" in subs:  # GPT-2 and OPT have no such field: it would be guessed from the head count
        fields["head_dim"] = families.head_dim(stock)
    config_class = getattr(modeling_ticket, f"Ticket{type(stock).__name__}")
    fields["auto_map"] = {
        "AutoConfig": f"{CODE}.{config_class.__name__}",
        "AutoModel": f"{CODE}.Ticket{type(full.base_model).__name__}",
        "AutoModelForCausalLM": f"{CODE}.Ticket{type(full).__name__}",
    }
    return config_class.from_dict(fields)


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
            path = huggingface.gguf_path(source)
            return AutoTokenizer.from_pretrained(
                str(path.parent), gguf_file=path.name, trust_remote_code=False
            )
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError):  # a base model that is out of reach by now
        return None


def _stay_in_vocabulary_(settings: Any, n_tokens: int, eos: int | None) -> None:
    """Special tokens that the model does not have (GPT-2's 50256 in a small one) become `eos`."""
    for name in SPECIAL:
        token = getattr(settings, name, None)
        if isinstance(token, int) and token >= n_tokens:
            setattr(settings, name, eos)
