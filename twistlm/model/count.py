"""Parameters, widths, FLOPs and rounds as arithmetic, beside the paper's own formulas."""

from __future__ import annotations

import math
from collections.abc import Iterable

from transformers import PretrainedConfig, PreTrainedModel

from . import families
from .blocks import KINDS, BlockMap, Kind, Shapes, Widths
from .families import Sublayer

FLOAT32 = 4  # bytes


def count(block_map: BlockMap, shapes: Shapes, widths: Widths) -> int:
    """Parameters of a subnet with these widths."""
    return sum(math.prod(shape) for shape in block_map.narrowed(shapes, widths).values())


def flops_per_token(n_products: int, attn_widths: Iterable[int], seq_len: int) -> int:
    """Training FLOPs of a token: 6 per weight in a matrix product, 12 T per channel of attention.

    (Forward 2, backward 4; scores and values over all T positions, causal or not, as is usual.)
    """
    return 6 * n_products + 12 * seq_len * sum(attn_widths)


def layer_params(d: int, d_attn: int, d_ffn: int) -> int:
    """One GPT-2 layer by the paper's appendix: N_attn + N_ffn + two layer norms."""
    n_attn = 4 * d_attn * d + 3 * d_attn + d
    n_ffn = 2 * d_ffn * d + d_ffn + d
    return n_attn + n_ffn + 2 * (2 * d)


def gpt2_params(
    n_layers: int, d: int, vocab: int, positions: int, *, n_cut: int = 0, share: float = 1.0
) -> int:
    """GPT-2 by the appendix's formulas, with `n_cut` layers that keep `share` of their blocks."""
    whole, cut = layer_params(d, d, 4 * d), layer_params(d, int(share * d), int(share * 4 * d))
    return (vocab + positions) * d + (n_layers - n_cut) * whole + n_cut * cut + 2 * d


def paper_rounds(n_sequences: int, epochs: float, batch: int, interval: int) -> int:
    """The paper's count: global batches divided by the interval, whoever computes them."""
    return int(n_sequences * epochs / batch / interval)


def true_rounds(n_sequences: int, epochs: float, batch: int, interval: int, n_workers: int) -> int:
    """Rounds when each of S workers makes `interval` local steps."""
    return int(n_sequences * epochs // (batch * interval * n_workers))


def traffic(n_params: int, n_workers: int, n_rounds: int, rows: int = 1) -> int:
    """Bytes down and up: every worker gets and returns `rows` float32 per parameter each round.

    rows = 1 is weights only (the paper); carried moments make it 3.
    """
    return n_params * FLOAT32 * 2 * n_workers * n_rounds * rows


def layer_widths(
    model: PreTrainedModel, shapes: Shapes, layer: int, subs: dict[Kind, Sublayer]
) -> dict[str, int]:
    """The widths of one layer by their names in the config, read off its weights' shapes."""
    prefix = f"{families.family(model).layers}.{layer}"
    dh, widths = families.head_dim(model.config), {}
    for kind, sub in subs.items():
        unit = dh if kind == "attn" else 1
        out_dim, in_dim = (1, 0) if sub.transposed else (0, 1)
        if kind == "attn" and (kv := kv_name(model.config, sub)) != sub.width:
            widths[kv] = shapes[f"{prefix}.{sub.ins[1]}.weight"][out_dim] // unit
        widths[sub.width] = shapes[f"{prefix}.{sub.out}.weight"][in_dim] // unit
    return widths


def kv_name(config: PretrainedConfig, attn: Sublayer) -> str:
    """The config's name for the number of kv heads: that of heads where each has its own."""
    fields = config.to_dict()  # of a ticket, the attribute itself may differ by layer
    return "num_key_value_heads" if fields.get("num_key_value_heads") else attn.width


def sublayers(model: PreTrainedModel) -> dict[Kind, Sublayer]:
    """The kinds of layer that the family lets us cut."""
    described = families.family(model)
    both = {kind: getattr(described, kind) for kind in KINDS}
    return {kind: sub for kind, sub in both.items() if isinstance(sub, Sublayer)}
