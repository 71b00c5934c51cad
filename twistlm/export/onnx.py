"""ONNX for onnxruntime: one graph reads a prompt and writes token by token, with a KV cache.

inputs   input_ids [batch, length], wanted [n] (positions in input_ids whose logits are computed),
         past.I.key, past.I.value [batch, kv heads of layer I, past, head_dim]
outputs  logits [batch, n, vocab], present.I.key, present.I.value: the past of the next call
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..compute.perplexity import Text
from ..model import huggingface
from ..system import files
from . import ONNX_TYPES, verify

FILE, RECORD = "model.onnx", "export.json"


def export(
    model: PreTrainedModel,
    folder: Path,
    type_: str = "f32",
    tokenizer: Path | None = None,
    text: Text | None = None,
    prompt: str = verify.PROMPT,
) -> list[verify.Verified]:
    """Write an ONNX folder, compare it with torch on the spot, and return the comparison's rows.

    q8 stores matrices as 8-bit integers in blocks of 32 (MatMulNBits): plain dynamic int8 costs quality.
    """
    _need("onnx", "onnxscript", "onnxruntime")
    if type_ not in ONNX_TYPES:
        raise ValueError(f"--type {type_}: ONNX is written as {', '.join(ONNX_TYPES)}")
    is_ours = (folder / RECORD).is_file() or (folder.is_dir() and not any(folder.iterdir()))
    if folder.exists() and not is_ours:
        raise ValueError(f"--out {folder} exists and is no ONNX export: choose another folder")
    goal = verify.reference(model, tokenizer, prompt)
    rows = [verify.torch_row(model, goal, text)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with files.whole_folder(folder) as draft:
        with _quiet():
            _write(model, draft / FILE, untie=type_ == "q8")
        rows.append(verify.check("onnxruntime f32", OnnxTicket(draft), goal, text, _size(draft)))
        verify.demand_equal(rows[-1], goal)
        if type_ == "q8":
            with _quiet():
                _quantize_(draft)
            rows.append(verify.check("onnxruntime q8", OnnxTicket(draft), goal, text, _size(draft)))
        if tokenizer is not None:
            shutil.copyfile(tokenizer, draft / "tokenizer.json")
        names = {"inputs": _names(model, "past"), "outputs": _names(model, "present")}
        record = {"format": "onnx", "type": type_, **names, **verify.record(rows)}
        (draft / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return rows


def load(folder: Path, threads: int = 0) -> OnnxTicket:
    """The runner of an exported folder; 0 threads leave onnxruntime's choice."""
    _need("onnxruntime")
    if not (folder / FILE).is_file():
        raise ValueError(f"{folder} is no ONNX export: it has no {FILE}")
    return OnnxTicket(folder, threads)


class OnnxTicket:
    """A model in onnxruntime with the cache of one sequence."""

    def __init__(self, folder: Path, threads: int = 0):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors
        self._session = onnxruntime.InferenceSession(
            folder / FILE, options, providers=["CPUExecutionProvider"]
        )
        caches = self._session.get_inputs()[2:]
        self._names = [cache.name for cache in caches]
        self._empty = [np.zeros((1, c.shape[1], 0, c.shape[3]), np.float32) for c in caches]
        self._past = self._empty

    def prefill(self, ids: Sequence[int], n_logits: int = 1) -> np.ndarray:
        """Forget everything and read `ids`: logits of the last positions, [n_logits, vocab]."""
        self._past = self._empty
        return self._step(ids, n_logits)

    def decode(self, token: int) -> np.ndarray:
        """Read one more token: [vocab]."""
        return self._step([token], 1)[0]

    def _step(self, ids: Sequence[int], n_logits: int) -> np.ndarray:
        wanted = np.arange(len(ids) - n_logits, len(ids))
        inputs = {"input_ids": np.array([ids], np.int64), "wanted": wanted}
        logits, *self._past = self._session.run(
            None, inputs | dict(zip(self._names, self._past, strict=True))
        )
        return logits[0]


class _Times(nn.Module):
    """x W + b with W as [in, out], so that the graph has one MatMul on a constant."""

    def __init__(self, layer: nn.Linear | Conv1D):
        super().__init__()
        weight = layer.weight if isinstance(layer, Conv1D) else layer.weight.T
        self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, self.weight)
        return y if self.bias is None else y + self.bias


class _Graph(nn.Module):
    """What is traced: a cache of tensors in, logits and the longer cache out."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, wanted: Tensor, past: tuple[Tensor, ...]) -> Any:
        # without the config, so that a sliding layer keeps all of its past and masks it
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        out: Any = self.model(
            input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=wanted
        )
        return out.logits, *_flat(cache)


def _flat(cache: Any) -> tuple[Tensor, ...]:
    return tuple(t for layer in cache.layers for t in (layer.keys, layer.values))


def _names(model: PreTrainedModel, what: str) -> list[str]:
    first = ["input_ids", "wanted"] if what == "past" else ["logits"]
    layers = range(model.config.num_hidden_layers)
    return first + [f"{what}.{i}.{part}" for i in layers for part in ("key", "value")]


@torch.no_grad()
def _write(model: PreTrainedModel, path: Path, untie: bool) -> None:
    """Trace with example shapes; a tied head shares the embedding unless it is to be quantized."""
    plain = huggingface.clone_structure(model)
    tied = plain.get_input_embeddings().weight
    for name, module in list(plain.named_modules()):
        if isinstance(module, nn.Linear | Conv1D) and (untie or module.weight is not tied):
            plain.set_submodule(name, _Times(module))
    ids = torch.arange(10).view(2, 5) % huggingface.vocab_size(model)
    cache = DynamicCache()
    model(input_ids=ids[:, :3], past_key_values=cache, use_cache=True)
    past = _flat(cache)
    program = torch.onnx.export(
        _Graph(plain).eval(),
        (ids, torch.tensor([3, 4]), past),
        dynamo=True,
        verbose=False,
        input_names=_names(model, "past"),
        output_names=_names(model, "present"),
        dynamic_shapes={
            "input_ids": {0: "batch", 1: "length"},
            "wanted": {0: "n"},
            "past": tuple({0: "batch", 2: "past"} for _ in past),
        },
    )
    assert program is not None
    program.save(path, external_data=True)


def _quantize_(folder: Path) -> None:
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(
        onnx.load(folder / FILE), bits=8, block_size=32, is_symmetric=True, accuracy_level=4
    )
    quantizer.process()
    for old in folder.glob(f"{FILE}*"):
        old.unlink()
    onnx.save(
        quantizer.model.model, folder / FILE, save_as_external_data=True, location=f"{FILE}.data"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """No remarks of the exporters on their own internals; one of them also opens the root log."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        root.level, root.handlers = level, handlers


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"{FILE}*"))


def _need(*libraries: str) -> None:
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"ONNX needs the {name} library: pip install 'twistlm[onnx]'")
