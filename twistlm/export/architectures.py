"""llama.cpp's graphs: which of them computes what a model computes, and its names of tensors.

Where all layers have the same widths, that is the family's own. Two others take other widths in
every layer: `deci` is Llama's graph and `openelm` is Qwen3's with tied embeddings.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model import families, huggingface
from ..model.families import layer_widths, sublayers


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's graphs; gguf's own table names its tensors."""

    name: str
    activation: str = "silu"
    fused: bool = False  # q, k and v are rows of one tensor
    interleaved: bool = False  # RoPE turns neighbouring pairs: rows of q and k are reordered
    per_layer: bool = False  # arrays for heads, kv heads and FFN
    biases: bool = True
    scales_rope: bool = False  # it reads `rope_freqs`
    all_heads: bool = False  # it takes as many heads as fill the embedding
    one_plus: bool = False  # norms are stored as the factor itself, not as what is added to 1

    def places(self, model: PreTrainedModel) -> dict[str, str | None]:
        """Parameter -> its tensor in the file, None where the graph has no place for it."""
        import gguf

        kind, n_layers = gguf.MODEL_ARCH[self.name.upper()], model.config.num_hidden_layers
        names, found = gguf.get_tensor_name_map(kind, n_layers), {}
        for name in huggingface.state(model):
            asked = re.sub(r"[qkv]_proj", "qkv_proj", name) if self.fused else name
            place = names.get_name(asked, (".weight", ".bias"))
            found[name] = None if name.endswith(".bias") and not self.biases else place
        return found


LLAMA = Architecture("llama", interleaved=True, scales_rope=True)
QWEN2 = Architecture("qwen2", all_heads=True)
QWEN3 = Architecture("qwen3", biases=False)
SMOLLM3 = replace(LLAMA, name="smollm3", biases=False, scales_rope=False)
GEMMA3 = Architecture("gemma3", activation="gelu_pytorch_tanh", biases=False, one_plus=True)
GPT2 = Architecture("gpt2", activation="gelu_new", all_heads=True)
OWN = {
    "llama": LLAMA, "mistral": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "smollm3": SMOLLM3,
    "gemma3_text": GEMMA3, "gpt2": GPT2,
}  # fmt: skip
DECI = replace(LLAMA, name="deci", per_layer=True)
OPENELM = Architecture("openelm", fused=True, per_layer=True, biases=False)
UNEVEN = {"llama": DECI, "mistral": DECI, "qwen2": DECI, "qwen3": OPENELM}


def _refusal(model: PreTrainedModel, reason: str) -> ValueError:
    return ValueError(
        f"no GGUF for this {model.config.model_type}: {reason}; use `--to onnx`, or the folder "
        "with transformers"
    )


def architecture_of(model: PreTrainedModel) -> Architecture:
    """The architecture that computes what this model computes, or the reason why none does."""
    config = model.config
    family = config.model_type
    if family not in OWN:
        raise _refusal(model, f"twistlm writes it for {', '.join(OWN)} models")
    first, *others = layer_widths(model, huggingface.shapes(model)).values()
    is_even = all(layer == first for layer in others)
    if not is_even and family not in UNEVEN:
        known = f"{', '.join(UNEVEN)} models only; cut all layers alike (`extract --stock`)"
        raise _refusal(model, f"its layers have different widths, as llama.cpp takes of {known}")
    found = (OWN if is_even else UNEVEN)[family]
    heads = first[sublayers(model)["attn"].width]
    if found.all_heads and heads * families.head_dim(config) != config.hidden_size:
        if family not in UNEVEN:
            why = "and this ticket lost some (blocks.setting=ffn leaves them alone)"
            raise _refusal(model, f"llama.cpp takes all of its heads, {why}")
        found = UNEVEN[family]
    if reason := _other_graph(found, model):
        raise _refusal(model, f"llama.cpp's {found.name} {reason}")
    for name, place in found.places(model).items():
        if place is None:
            raise _refusal(model, f"llama.cpp's {found.name} has no place for {name}")
    _rope_factors(found, model)
    return found


def _other_graph(found: Architecture, model: PreTrainedModel) -> str | None:
    """What llama.cpp's graph does otherwise than this model, if anything."""
    config, layers = model.config, range(model.config.num_hidden_layers)
    names = ("hidden_act", "hidden_activation", "activation_function")
    used = next(getattr(config, name) for name in names if getattr(config, name, None))
    if used != found.activation:
        return f"knows {found.activation} alone, not {used}"
    if found is GPT2:
        plain = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
        return None if plain else "divides attention by the root of the head's size in every layer"
    if found is GEMMA3:
        expected = ["sliding_attention" if i % 6 < 5 else "full_attention" for i in layers]
        if list(config.layer_types) != expected:
            return "has a window in all layers but every sixth, and this model in others"
        if config.query_pre_attn_scalar != families.head_dim(config) or len(layers) == 62:
            return "divides attention by the root of the head's size, and this model does not"
        if config.final_logit_softcapping or config.attn_logit_softcapping:
            return "caps no logits, and this model does"
        return None
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if config.model_type == "mistral" and config.sliding_window is not None:
        windows = {f"sliding_window = {config.sliding_window}"}
    if windows:
        return f"attends to everything, and this model has {', '.join(sorted(windows))}"
    if found is SMOLLM3 and list(config.no_rope_layers) != [int(i % 4 != 3) for i in layers]:
        return "leaves RoPE out in every fourth layer, and this model in others"
    return None


def add_rope_(writer: Any, found: Architecture, model: PreTrainedModel) -> Tensor | None:
    """Write how heads are turned; returns `rope_freqs` if llama.cpp is to divide by them."""
    if found is GPT2:  # it adds position embeddings
        return None
    config, rope = model.config, model.config.rope_parameters
    writer.add_rope_dimension_count(families.head_dim(config))
    if found is GEMMA3:
        full, sliding = rope["full_attention"], rope["sliding_attention"]
        writer.add_rope_freq_base(float(full["rope_theta"]))
        writer.add_float32(f"{found.name}.rope.freq_base_swa", float(sliding["rope_theta"]))
        writer.add_sliding_window(config.sliding_window)
    else:
        writer.add_rope_freq_base(float(rope["rope_theta"]))
    return _rope_factors(found, model)


def _rope_factors(found: Architecture, model: PreTrainedModel) -> Tensor | None:
    """Divisors of theta^(-2i/dh) where RoPE is scaled; refuse what llama.cpp cannot do."""
    if found is GPT2:
        return None
    rope, dh = model.config.rope_parameters, families.head_dim(model.config)
    if found is GEMMA3:
        kinds = (rope["full_attention"], rope["sliding_attention"])
        if any(kind.get("rope_type", "default") != "default" for kind in kinds):
            raise _refusal(model, f"its RoPE is scaled ({rope})")
        return None
    base, kind = float(rope["rope_theta"]), rope.get("rope_type", "default")
    # made anew: a model without storage has no frequencies
    made: Any = type(model.get_submodule("model.rotary_emb"))
    frequencies = made(model.config).inv_freq
    if kind not in ("default", "linear", "llama3") or 2 * len(frequencies) != dh:
        turned = f"rope_type {kind!r} with {2 * len(frequencies)} of {dh} head dimensions turned"
        raise _refusal(model, f"{turned} is not default, linear or llama3 of all dimensions")
    plain = base ** -(torch.arange(0, dh, 2, dtype=torch.float64) / dh)
    factors = (plain / frequencies.double()).float()
    if torch.allclose(factors, torch.ones_like(factors), rtol=1e-6):
        return None
    if not found.scales_rope:
        raise _refusal(model, f"llama.cpp's {found.name} scales no RoPE")
    return factors
