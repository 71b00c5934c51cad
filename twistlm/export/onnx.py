"""ONNX for onnxruntime: one graph reads a prompt and writes token by token, with a KV cache.

The signature is the one that optimum and others expect of a decoder:

inputs   input_ids, position_ids [batch, length], attention_mask [batch, past + length],
         past_key_values.I.key, past_key_values.I.value [batch, kv heads of layer I, past, head_dim]
outputs  logits [batch, length, vocab], present.I.key, present.I.value: the past of the next call

One more input has a default and may be left out: `logits_from` [1], the first position whose
logits are computed (0; -1 is the last alone). A prompt's other logits are most of the work of a
small model.
"""

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
from ..system import files, manifest
from . import ONNX_FILES, check_target, check_type, verify

FILE, RECORD = ONNX_FILES
INPUTS = ("input_ids", "attention_mask", "position_ids")  # then the caches
FROM = "logits_from"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def export(
    model: PreTrainedModel,
    folder: Path,
    type_: str = "f32",
    tokenizer: Path | None = None,
    text: Text | None = None,
    prompt: str = verify.PROMPT,
) -> list[verify.Verified]:
    """Write an ONNX folder, compare it with torch on the spot, and return the comparison's rows.

    q8 stores matrices in blocks of 32 (MatMulNBits): plain dynamic int8 costs quality.
    """
    check_type("onnx", type_)
    check_target("onnx", folder)
    beside = verify.Comparison(model, tokenizer, text, prompt)
    ours = {FILE, f"{FILE}.data", RECORD, "config.json", "generation_config.json"}
    ours |= {"tokenizer.json", "modeling_ticket.py", *BESIDE}
    with files.whole_folder(folder, manifest.foreign_files(folder, ours)) as draft:
        with _quiet():
            _write(model, draft / FILE, untie=type_ == "q8")
        beside.add("onnxruntime f32", OnnxRunner(draft), _size(draft), exact=True)
        if type_ == "q8":
            with _quiet():
                _quantize_(draft)
            beside.add("onnxruntime q8", OnnxRunner(draft), _size(draft))
        model.config.save_pretrained(draft)
        if model.generation_config is not None:
            model.generation_config.to_json_file(draft / "generation_config.json")
        if tokenizer is not None:
            for name in ("tokenizer.json", *BESIDE):
                if (tokenizer.parent / name).is_file():
                    shutil.copyfile(tokenizer.parent / name, draft / name)
        beside.write(draft / RECORD, format="onnx", type=type_)
    return beside.rows


class OnnxRunner(verify.Runner):
    """A model in onnxruntime."""

    def __init__(self, folder: Path, threads: int = 0):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors
        providers = ["CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(folder / FILE, options, providers=providers)
        caches = self._session.get_inputs()[len(INPUTS) :]
        self._names = [cache.name for cache in caches]
        self._empty = [np.zeros((1, c.shape[1], 0, c.shape[3]), np.float32) for c in caches]
        self._past = self._empty

    def prefill(self, ids: Sequence[int], n_logits: int = 1, *, after: bool = False) -> np.ndarray:
        past = self._past if after else self._empty
        n_past = past[0].shape[2]
        inputs = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, n_past + len(ids)), np.int64),
            "position_ids": np.arange(n_past, n_past + len(ids))[None],
            FROM: np.array([-n_logits], np.int64),
        }
        inputs |= dict(zip(self._names, past, strict=True))
        logits, *self._past = self._session.run(None, inputs)
        return logits[0]


class _MatMul(nn.Module):
    """x W + b with W as [in, out], so that the graph has one MatMul on a constant."""

    def __init__(self, layer: nn.Linear | Conv1D):
        super().__init__()
        weight = layer.weight if isinstance(layer, Conv1D) else layer.weight.T
        self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, self.weight)
        return y if self.bias is None else y + self.bias


class _HeadFrom(nn.Module):
    """The head on the positions from `logits_from` on: a Slice whose start is an input."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head
        self.start = torch.zeros(1, dtype=torch.int64)  # of each call

    def forward(self, states: Tensor) -> Tensor:
        at = (states, self.start, torch.tensor([2**31 - 1]), torch.tensor([1]))
        cut = torch.onnx.ops.symbolic("Slice", at, dtype=states.dtype, shape=states.shape)
        return self.head(cut)


class _Graph(nn.Module):
    """What is traced: a cache of tensors in, logits and the longer cache out."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.head = _HeadFrom(model.get_output_embeddings())
        model.set_output_embeddings(self.head)

    def forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, past: tuple[Tensor, ...], start: Tensor
    ) -> Any:
        self.head.start = start
        # without the config, so that a sliding layer keeps all of its past and masks it
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        said = dict(zip(INPUTS, (ids, mask, positions), strict=True))
        out: Any = self.model(**said, past_key_values=cache, use_cache=True)
        return out.logits, *_flat(cache)


def _flat(cache: Any) -> tuple[Tensor, ...]:
    return tuple(t for layer in cache.layers for t in (layer.keys, layer.values))


def _names(model: PreTrainedModel, what: str) -> list[str]:
    layers = range(model.config.num_hidden_layers)
    return [f"{what}.{i}.{part}" for i in layers for part in ("key", "value")]


@torch.no_grad()
def _write(model: PreTrainedModel, path: Path, untie: bool) -> None:
    """Trace with example shapes; a tied head shares the embedding unless it is to be quantized."""
    import onnx_ir

    plain = huggingface.clone_structure(model)
    tied = plain.get_input_embeddings().weight
    for name, module in list(plain.named_modules()):
        if isinstance(module, nn.Linear | Conv1D) and (untie or module.weight is not tied):
            plain.set_submodule(name, _MatMul(module))
    ids = torch.arange(10).view(2, 5) % huggingface.vocab_size(model)
    cache = DynamicCache()
    model(input_ids=ids[:, :3], past_key_values=cache, use_cache=True)
    past = _flat(cache)
    mask, positions = torch.ones(2, 8).long(), torch.arange(3, 8).expand(2, -1)
    program: Any = torch.onnx.export(
        _Graph(plain).eval(),
        (ids, mask, positions, past, torch.zeros(1).long()),
        dynamo=True,
        verbose=False,
        input_names=[*INPUTS, *_names(model, "past_key_values"), FROM],
        output_names=["logits", *_names(model, "present")],
        dynamic_shapes={
            "ids": {0: "batch", 1: "length"},
            "mask": {0: "batch", 1: "total"},
            "positions": {0: "batch", 1: "length"},
            "past": tuple({0: "batch", 2: "past"} for _ in past),
            "start": None,
        },
    )
    graph = program.model.graph
    start = graph.inputs[-1]
    cut = {start}  # and what is as short as the wanted logits
    for node in graph:
        node.metadata_props.clear()  # stack traces with the folders of this machine
        if cut.intersection(node.inputs):
            for value in node.outputs:
                cut.add(value)
                value.shape[1] = "kept"
    start.const_value = onnx_ir.tensor(np.zeros(1, np.int64))
    graph.register_initializer(start)  # a default: sessions list it apart from their inputs
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
    where: Any = {"save_as_external_data": True, "location": f"{FILE}.data"}
    onnx.save(quantizer.model.model, folder / FILE, **where)


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
