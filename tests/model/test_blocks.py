"""The block algebra and the flat buffer, against slices taken by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from itertools import product

import pytest
import torch
from torch import Tensor

from twistlm.model import layout
from twistlm.model.blocks import (
    BlockGroup,
    BlockMap,
    Partition,
    parse_ratio,
    positions,
    widths_of_ratio,
)

CPU = torch.device("cpu")
N_HEADS, HEAD_DIM, WIDTH, N_NEURONS, N_LAYERS = 4, 3, 12, 20, 3

SHAPES: dict[str, tuple[int, ...]] = {"wte": (7, WIDTH), "wpe": (5, WIDTH)}
for _i in range(N_LAYERS):
    SHAPES |= {
        f"h.{_i}.ln.weight": (WIDTH,),
        f"h.{_i}.ln.bias": (WIDTH,),
        f"h.{_i}.c_attn.weight": (WIDTH, 3 * WIDTH),  # [in, out], q | k | v
        f"h.{_i}.c_attn.bias": (3 * WIDTH,),
        f"h.{_i}.c_proj.weight": (WIDTH, WIDTH),
        f"h.{_i}.c_proj.bias": (WIDTH,),
        f"h.{_i}.fc.weight": (WIDTH, N_NEURONS),
        f"h.{_i}.fc.bias": (N_NEURONS,),
        f"h.{_i}.proj.weight": (N_NEURONS, WIDTH),
        f"h.{_i}.proj.bias": (WIDTH,),
    }


def gpt2_like() -> BlockMap:
    """A fused q, k, v with the heads inside each of its three sections, and neurons one by one."""
    groups = []
    for i in range(N_LAYERS):
        attn = (
            Partition(f"h.{i}.c_attn.weight", 1, HEAD_DIM, 3),
            Partition(f"h.{i}.c_attn.bias", 0, HEAD_DIM, 3),
            Partition(f"h.{i}.c_proj.weight", 0, HEAD_DIM),
        )
        ffn = (
            Partition(f"h.{i}.fc.weight", 1, 1),
            Partition(f"h.{i}.fc.bias", 0, 1),
            Partition(f"h.{i}.proj.weight", 0, 1),
        )
        out = (f"h.{i}.c_proj.weight", f"h.{i}.c_proj.bias")
        groups.append(BlockGroup(f"h.{i}.attn", "attn", i, N_HEADS, attn, out))
        out = (f"h.{i}.proj.weight", f"h.{i}.proj.bias")
        groups.append(BlockGroup(f"h.{i}.ffn", "ffn", i, N_NEURONS, ffn, out))
    return BlockMap(tuple(groups))


def cut_map() -> BlockMap:
    """Layers 1 and 2, four FFN blocks of five neurons."""
    return gpt2_like().select("both", shared_first=1).coarsen("ffn", 4)


BLUEPRINT = {"h.1.attn": (0, 2), "h.1.ffn": (1, 2, 3), "h.2.attn": (3,), "h.2.ffn": (0, 3)}


def kept_by_hand(name: str) -> tuple[int, list[int]] | None:
    """Dimension and kept positions of a parameter under BLUEPRINT, None for a shared one."""
    _, layer, leaf = name.split(".", 2) if name.startswith("h.") else ("", "", name)
    if layer not in ("1", "2"):
        return None
    heads = BLUEPRINT[f"h.{layer}.attn"]
    rows = [head * HEAD_DIM + d for head in heads for d in range(HEAD_DIM)]
    neurons = [5 * block + j for block in BLUEPRINT[f"h.{layer}.ffn"] for j in range(5)]
    fused = rows + [WIDTH + r for r in rows] + [2 * WIDTH + r for r in rows]
    return {
        "c_attn.weight": (1, fused),
        "c_attn.bias": (0, fused),
        "c_proj.weight": (0, rows),
        "fc.weight": (1, neurons),
        "fc.bias": (0, neurons),
        "proj.weight": (0, neurons),
    }.get(leaf)


def take(tensor: Tensor, where: tuple[int, list[int]] | None) -> Tensor:
    """Row by row and column by column, with Python lists."""
    if where is None:
        return tensor
    dim, kept = where
    if dim == 0:
        return torch.stack([tensor[i] for i in kept])
    return torch.stack([tensor[:, i] for i in kept], dim=1)


def numbered() -> dict[str, Tensor]:
    """Parameters in which no two elements are alike."""
    params, first = {}, 1.0
    for name, shape in SHAPES.items():
        size = math.prod(shape)
        params[name] = torch.arange(first, first + size, dtype=torch.float64).view(shape)
        first += size
    return params


# positions, select, coarsen


def test_positions_against_a_loop():
    for sections, n_blocks, chunk in product((1, 3), (1, 4), (1, 7)):
        group = BlockGroup("g", "attn", 0, n_blocks, (), ())
        kept = sorted(random.Random(chunk).sample(range(n_blocks), -(-n_blocks // 2)))
        want = [
            section * n_blocks * chunk + block * chunk + offset
            for section, block, offset in product(range(sections), kept, range(chunk))
        ]
        assert positions(group, Partition("p", 0, chunk, sections), kept).tolist() == want


SELECTED = {
    ("attn", 0, 0): ["h.0.attn", "h.1.attn", "h.2.attn"],
    ("ffn", 0, 0): ["h.0.ffn", "h.1.ffn", "h.2.ffn"],
    ("both", 1, 1): ["h.1.attn", "h.1.ffn"],
    ("ffn", 2, 0): ["h.2.ffn"],
    ("ffn", 0, 2): ["h.0.ffn"],
}


def test_select_keeps_kinds_and_middle_layers():
    for arguments, names in SELECTED.items():
        assert [group.name for group in gpt2_like().select(*arguments).groups] == names
    assert gpt2_like().select("both") == gpt2_like()
    assert gpt2_like().select("ffn").n_blocks("attn") == 0  # shared


def test_coarsen_merges_neighbours():
    """R blocks of N/R neurons: the same slices as the neurons one by one, in each section."""
    fine, coarse = gpt2_like(), gpt2_like().coarsen("ffn", 5).coarsen("attn", 2)
    coarse.check(SHAPES)
    assert (coarse.n_blocks("ffn"), coarse.n_blocks("attn")) == (5, 2)
    for before, after in zip(fine.groups, coarse.groups, strict=True):
        assert (before.name, before.layer, before.out) == (after.name, after.layer, after.out)
        factor = before.n_blocks // after.n_blocks
        for part, merged in zip(before.parts, after.parts, strict=True):
            small = [factor * block + j for block in (0, 1) for j in range(factor)]
            assert torch.equal(positions(after, merged, (0, 1)), positions(before, part, small))


def with_parts(*parts: Partition, n_blocks: int = N_HEADS) -> BlockMap:
    return BlockMap((BlockGroup("h.0.attn", "attn", 0, n_blocks, parts, ()),))


SHARED = r"shared_first = {} and blocks.shared_last = {} .*0\.\.2 .*3 layers"
BLOCKS_OF = r"blueprint\['h\.1\.attn'\] = .*1\.\.4 .*0\.\.3"
TEN = gpt2_like().select("both", 1).coarsen("ffn", 10)
REFUSED = [  # a call, and what is said about it
    (lambda: gpt2_like().select("all"), r"blocks\.setting = 'all': use one of attn, ffn, both"),
    *(
        (lambda f=f, n=n: gpt2_like().select("both", f, n), SHARED.format(f, n))
        for f, n in ((3, 0), (2, 1), (-1, 0), (0, -1))
    ),
    *(
        (lambda n=n: gpt2_like().coarsen("ffn", n), rf"20 ffn .* {n} .*legal: 1, 2, 4, 5, 10, 20")
        for n in (0, -4, 3, 40)
    ),
    # a wrong map would cut wrong weights
    (
        lambda: with_parts(Partition("h.0.c_attn.weight", 1, HEAD_DIM)).check(SHAPES),
        r"1 is 36, but 1 sections .* 3 make 12",
    ),
    (
        lambda: with_parts(Partition("h.0.c_attn.weight", 0, HEAD_DIM, 3)).check(SHAPES),
        r"0 is 12, but 3 sections .* make 36",
    ),
    (
        lambda: with_parts(Partition("h.0.q_proj.weight", 0, HEAD_DIM)).check(SHAPES),
        r"no parameter 'h\.0\.q_proj\.weight'",
    ),
    (lambda: with_parts(*gpt2_like()["h.0.attn"].parts, n_blocks=3).check(SHAPES), "3 blocks"),
    # blueprints
    *(
        (lambda k=k: cut_map().check_blueprint(BLUEPRINT | {"h.1.attn": k}), BLOCKS_OF)
        for k in ((), (2, 0), (1, 1), (0, 4), (-1, 2), (4,))
    ),
    (lambda: cut_map().check_blueprint({}), "does not fit this model.*h.1.attn"),
    (
        lambda: cut_map().check_blueprint(BLUEPRINT | {"h.0.attn": (1,)}),
        "does not fit this model.*h.0.attn",
    ),
    # ratios
    *(
        (lambda t=t: parse_ratio(t, 4, "ffn"), r"ffn blocks; legal: 1/4, 2/4, 3/4, 4/4")
        for t in ("5/12", "0.33", "0", "-1/4", "5/4")
    ),
    *(
        (lambda t=t: parse_ratio(t, 4, "ffn"), rf"{t!r} is not a fraction such as 6/12")
        for t in ("half", "", "1/0", "1/2/3", "nan")
    ),
    (lambda: widths_of_ratio(TEN, "3/4"), r"ffn blocks; legal: 1/10"),  # fits attention alone
    (lambda: widths_of_ratio(TEN, "attn=3/4"), "says nothing about ffn"),
    (lambda: widths_of_ratio(TEN, "attn=3/4,mlp=1/2"), "kinds are attn and ffn"),
    (lambda: widths_of_ratio(TEN, "attn=1/3,ffn=1/2"), r"attn blocks; legal: 1/4"),
    (lambda: widths_of_ratio(TEN, "attn=3/4,"), "attn and ffn|attn=2/3,ffn=6/12"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_refused_with_the_legal_values(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_widths_and_narrowed_shapes():
    block_map = cut_map()
    block_map.check(SHAPES)
    for blueprint in (BLUEPRINT, block_map.full()):
        block_map.check_blueprint(blueprint)
    assert block_map.widths(BLUEPRINT) == {"h.1.attn": 2, "h.1.ffn": 3, "h.2.attn": 1, "h.2.ffn": 2}
    assert block_map.full_widths() == block_map.widths(block_map.full())
    assert block_map.narrowed(SHAPES, block_map.full_widths()) == SHAPES
    narrow = block_map.narrowed(SHAPES, block_map.widths(BLUEPRINT))
    for name, tensor in numbered().items():
        assert narrow[name] == tuple(take(tensor, kept_by_hand(name)).shape), name
    assert SHAPES["h.1.c_attn.weight"] == (12, 36)  # not changed in place
    assert block_map["h.1.attn"].out_part == Partition("h.1.c_proj.weight", 0, HEAD_DIM)
    assert block_map["h.1.ffn"].out_part == Partition("h.1.proj.weight", 0, 5)


RATIOS = {("6/12", 12): 6, ("0.5", 12): 6, ("1", 12): 12, ("1/3", 12): 4, (" 2/4 ", 4): 2}


def test_ratios():
    for (text, n_blocks), k in RATIOS.items():
        assert parse_ratio(text, n_blocks, "ffn") == k
    half = {"h.1.attn": 2, "h.1.ffn": 5, "h.2.attn": 2, "h.2.ffn": 5}
    assert widths_of_ratio(TEN, "1/2") == half
    by_kind = {"h.1.attn": 3, "h.1.ffn": 1, "h.2.attn": 3, "h.2.ffn": 1}
    for ratio in ("attn=3/4,ffn=0.1", "ffn=0.1,attn=3/4"):
        assert widths_of_ratio(TEN, ratio) == by_kind
    assert widths_of_ratio(TEN, "attn=3/4,ffn=0.1,ffn.2=1") == by_kind | {"h.2.ffn": 10}
    only = TEN.select("ffn")
    assert widths_of_ratio(only, "3/10") == {"h.1.ffn": 3, "h.2.ffn": 3}  # no attention is cut


# the flat buffer


def spans_of(where: layout.Layout, names: Iterable[str]) -> set[int]:
    """Positions of these parameters, read off marks in the buffer."""
    buffer = torch.zeros(where.n_params)
    views = where.views(buffer)
    for name in names:
        views[name].add_(1.0)
    assert buffer.max() == 1.0  # no two share a place
    return set(buffer.nonzero().flatten().tolist())


@pytest.mark.parametrize("n_cut", [0, 1, 3])
def test_shared_first_and_matrices_apart_from_vectors(n_cut):
    """The optimizer decays `decayed` only, and the dispatcher copies the first `n_shared`."""
    block_map = gpt2_like().select("both", N_LAYERS - n_cut) if n_cut else BlockMap(())
    where = layout.layout(block_map, SHAPES)
    assert {
        name: tuple(v.shape) for name, v in where.views(torch.zeros(where.n_params)).items()
    } == SHAPES
    assert spans_of(where, SHAPES) == set(range(where.n_params))
    shared = [name for name in SHAPES if name not in block_map.partitioned()]
    assert spans_of(where, shared) == set(range(where.n_shared))
    for spans, n_dims in ((where.decayed, 2), (where.plain, 1)):
        inside = [i for start, end in spans for i in range(start, end)]
        assert len(inside) == len(set(inside))
        names = [name for name, shape in SHAPES.items() if len(shape) == n_dims]
        assert set(inside) == spans_of(where, names)
        assert len(spans) <= 2


def test_gather_takes_the_blocks_and_scatter_writes_nothing_else():
    """Against slices by hand, and back into a buffer in which nothing else moves."""
    block_map, params = cut_map(), numbered()
    full = layout.layout(block_map, SHAPES)
    narrow = layout.layout(block_map, block_map.narrowed(SHAPES, block_map.widths(BLUEPRINT)))
    segments = layout.cut_segments(full, block_map, CPU)
    index = segments.index(BLUEPRINT)
    # a subnet's shared part is one slice of the central buffer, so both agree on it
    assert (list(narrow.shapes), narrow.n_shared) == (list(full.shapes), full.n_shared)
    assert index.unique().numel() == index.numel()
    whole = torch.full((1, full.n_params), math.nan, dtype=torch.float64)
    for name, view in full.views(whole).items():
        view.copy_(params[name])
    part = torch.full((1, narrow.n_params), math.nan, dtype=torch.float64)
    layout.gather_(part, whole, segments, index)
    for name, view in narrow.views(part).items():
        assert torch.equal(view, take(params[name], kept_by_hand(name))), name
    layout.scatter_(whole, -part, segments, index)
    for name, view in full.views(whole).items():
        want = params[name].clone()
        dim, kept = kept_by_hand(name) or (0, range(len(want)))
        want.index_copy_(dim, torch.tensor(kept), -want.index_select(dim, torch.tensor(kept)))
        assert torch.equal(view, want), name
