"""The frozen teacher of a run: which model it is, and that it speaks of the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..compute import graphs
from ..compute.attention import causal_
from ..compute.loss import Teacher
from ..config import Config
from ..data.token_file import TokenFile
from ..model import huggingface
from ..model.layout import CutModel
from ..system.device import is_bf16
from ..system.files import file_sha256


def load(cfg: Config, cut: CutModel, tokens: TokenFile) -> Teacher | None:
    """The model that `train.teacher` names, ready on the device of the run; None where there is none."""
    t = cfg.train
    if t.teacher == "none" or t.distil == t.distil_whole == 0:
        return None
    is_start = t.teacher == "start"
    model = (
        huggingface.load(cfg.model, cfg.run.seed) if is_start else huggingface.pretrained(t.teacher)
    )
    mine, its = (huggingface.vocab_size(m) for m in (cut.template, model))
    if mine != its:
        raise ValueError(
            f"train.teacher = {t.teacher!r} knows {its} tokens, the model {mine}: a teacher needs the "
            f"same tokenizer"
        )
    folder = Path(cfg.model.weights if is_start else t.teacher)
    tokenizer, wanted = folder / "tokenizer.json", tokens.meta.tokenizer_sha256
    if tokenizer.is_file() and wanted and file_sha256(tokenizer) != wanted:
        raise ValueError(
            f"train.teacher = {t.teacher!r}: {tokenizer} is not the tokenizer of {tokens.stem} "
            f"(data.train): a teacher needs the same one"
        )
    return _teacher(model, cfg, cut)


Packed = tuple[
    dict[str, Any], bytes
]  # a model's Hugging Face config, and its weights as safetensors


def pack(teacher: Teacher | None) -> Packed | None:
    """A teacher on its way to workers in other processes."""
    if teacher is None:
        return None
    weights = {name: param.detach().cpu() for name, param in teacher.model.named_parameters()}
    return teacher.model.config.to_dict(), save(weights)


def unpack(packed: Packed | None, cfg: Config, cut: CutModel) -> Teacher | None:
    """The teacher that was packed, ready on this process's device."""
    if packed is None:
        return None
    described, weights = AutoConfig.for_model(**packed[0]), load_tensors(packed[1])
    model = AutoModelForCausalLM.from_config(described, dtype=cut.dtype)
    for name, param in model.named_parameters():
        param.data.copy_(weights[name])
    return _teacher(model, cfg, cut)


def _teacher(model: PreTrainedModel, cfg: Config, cut: CutModel) -> Teacher:
    return Teacher(_ready(model, cfg, cut), torch.ones(1, dtype=cut.dtype, device=cut.device))


def _ready(model: PreTrainedModel, cfg: Config, cut: CutModel) -> PreTrainedModel:
    """Frozen, in the precision of the local steps, compiled as they are."""
    device = cut.device
    dtype = torch.bfloat16 if is_bf16(cfg.train.precision, device) else cut.dtype
    model.eval().requires_grad_(False)
    for param in model.parameters():  # buffers such as rotary frequencies stay exact
        param.data = param.data.to(device, dtype)
    nn.Module.to(model, device)
    causal_(model)
    if graphs.is_on(cfg.train.compile, device):
        graphs.compile_layers_(model)
    return model
