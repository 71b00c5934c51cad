"""What a ticket costs before it is cut: parameters, bytes of its file, bytes of memory."""

import json
import math
from collections.abc import Callable

from transformers import PreTrainedModel

from ..model import depth, huggingface
from ..model.blocks import BlockMap, Shapes, Widths
from ..model.families import n_cached
from .budget import Budget

Cost = Callable[[Widths], float]

# in a safetensors file: name and bytes
STORED = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


def count_of(budget: Budget, model: PreTrainedModel, block_map: BlockMap, dtype: str) -> Cost:
    """What a budget of parameters or bytes counts, of a ticket of any widths."""
    shapes, n_bytes = huggingface.shapes(model), STORED[dtype][1]

    def cost(widths: Widths) -> int:
        narrow = block_map.narrowed(shapes, widths)
        if budget.kind == "size":  # a file holds names, too
            return weights_bytes(depth.renumbered(model, narrow), dtype)
        n_params = sum(map(math.prod, narrow.values()))
        if budget.kind == "params":
            return n_params
        return n_bytes * (n_params + n_cached(model, narrow, budget.context))

    return cost


def weights_bytes(shapes: Shapes, dtype: str = "float32") -> int:
    """Bytes of a safetensors file of these tensors: 8 + JSON header, padded to 8, + the numbers."""
    name_in_file, itemsize = STORED[dtype]
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):  # the file's own order: it decides how long the offsets are
        start, end = end, end + math.prod(shapes[name]) * itemsize
        about = {"dtype": name_in_file, "shape": shapes[name], "data_offsets": [start, end]}
        header[name] = about
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + math.ceil(len(text) / 8) * 8 + end
