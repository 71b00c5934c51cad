"""The block algebra and the flat buffer, against slices taken by hand."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from families_table import CPU, all_cuts, case, tiny_model

from twistlm.model import families, huggingface, layout
from twistlm.model.blocks import (
    BlockGroup,
    BlockMap,
    Partition,
    parse_ratio,
    positions,
    widths_of_ratio,
)

# a fused q, k, v with 4 heads of 8 inside each of its three sections, and 48 neurons one by one
FINE = families.block_map(tiny_model("gpt2"), "both")
SHAPES = huggingface.shapes(tiny_model("gpt2"))
CASE = case(("gpt2", "head", "both"))  # layers 1 and 2, four FFN blocks
H1 = "transformer.h.1"

SELECTED = {
    ("attn", 0, 0): ["0.attn", "1.attn", "2.attn"],
    ("ffn", 0, 0): ["0.ffn", "1.ffn", "2.ffn"],
    ("both", 1, 1): ["1.attn", "1.ffn"],
    ("ffn", 2, 0): ["2.ffn"],
    ("ffn", 0, 2): ["0.ffn"],
}


def test_select_keeps_kinds_and_middle_layers():
    for arguments, names in SELECTED.items():
        chosen = FINE.select(*arguments).groups
        assert [group.name for group in chosen] == [f"transformer.h.{name}" for name in names]
    assert FINE.select("both") == FINE
    assert FINE.select("ffn").n_blocks("attn") == 0  # shared


def test_coarsen_merges_neighbours():
    """R blocks of N/R neurons: the same slices as the neurons one by one, in each section."""
    coarse = FINE.coarsen("ffn", 6).coarsen("attn", 2)
    coarse.check(SHAPES)
    assert (coarse.n_blocks("ffn"), coarse.n_blocks("attn")) == (6, 2)
    for before, after in zip(FINE.groups, coarse.groups, strict=True):
        assert (before.name, before.layer, before.out) == (after.name, after.layer, after.out)
        factor = before.n_blocks // after.n_blocks
        for part, merged in zip(before.parts, after.parts, strict=True):
            small = [factor * block + j for block in (0, 1) for j in range(factor)]
            assert torch.equal(positions(after, merged, (0, 1)), positions(before, part, small))


def check(*parts: Partition, n_blocks: int = 4) -> None:
    BlockMap((BlockGroup("h.0.attn", "attn", 0, n_blocks, parts, ()),)).check(SHAPES)


SHARED = r"shared_first = {} and blocks.shared_last = {} .*0\.\.2 .*3 layers"
BLOCKS_OF = r"blueprint\['transformer\.h\.1\.attn'\] = .*1\.\.4 .*0\.\.3"
FUSED = "transformer.h.0.attn.c_attn.weight"
TWELVE = FINE.select("both", 1).coarsen("ffn", 12)
REFUSED = [  # a call, and what is said about it
    *(
        (lambda f=f, n=n: FINE.select("both", f, n), SHARED.format(f, n))
        for f, n in ((3, 0), (2, 1), (-1, 0), (0, -1))
    ),
    *(
        (lambda n=n: FINE.coarsen("ffn", n), rf"48 ffn .* {n} .*legal: 1, 2, 3, 4, 6, 8, 12")
        for n in (0, -4, 5, 96)
    ),
    # a wrong map would cut wrong weights
    (lambda: check(Partition(FUSED, 1, 8)), r"1 is 96, but 1 sections .* 8 make 32"),
    (lambda: check(Partition(FUSED, 0, 8, 3)), r"0 is 32, but 3 sections .* make 96"),
    (lambda: check(Partition("h.0.q_proj.weight", 0, 8)), r"no parameter 'h\.0\.q_proj\.weight'"),
    (lambda: check(*FINE.groups[0].parts, n_blocks=3), "3 blocks"),
    # blueprints
    *(
        (
            lambda k=k: CASE.block_map.check_blueprint(CASE.blueprint | {f"{H1}.attn": k}),
            BLOCKS_OF,
        )
        for k in ((), (2, 0), (1, 1), (0, 4), (-1, 2))
    ),
    (lambda: CASE.block_map.check_blueprint({}), "does not fit this model.*h.1.attn"),
    (
        lambda: CASE.block_map.check_blueprint(CASE.blueprint | {"transformer.h.0.attn": (1,)}),
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
    (lambda: widths_of_ratio(TWELVE, "2/3"), r"attn blocks; legal: 1/4"),  # fits FFN alone
    (lambda: widths_of_ratio(TWELVE, "attn=3/4"), "says nothing about ffn"),
    (lambda: widths_of_ratio(TWELVE, "attn=3/4,mlp=1/2"), "kinds are attn and ffn"),
    (lambda: widths_of_ratio(TWELVE, "attn=1/3,ffn=1/2"), r"attn blocks; legal: 1/4"),
    (lambda: widths_of_ratio(TWELVE, "attn=3/4,"), "attn and ffn|attn=2/3,ffn=6/12"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_refused_with_the_legal_values(call, said):
    with pytest.raises(ValueError, match=said):
        call()


RATIOS = {("6/12", 12): 6, ("0.5", 12): 6, ("1", 12): 12, ("1/3", 12): 4, (" 2/4 ", 4): 2}


def test_ratios():
    for (text, n_blocks), k in RATIOS.items():
        assert parse_ratio(text, n_blocks, "ffn") == k
    for ratio, widths in {  # of layer 1's attention and FFN, then of layer 2's
        "1/2": (2, 6, 2, 6),
        "attn=3/4,ffn=1/12": (3, 1, 3, 1),
        "ffn=1/12,attn=3/4": (3, 1, 3, 1),
        "attn=3/4,ffn=1/12,ffn.2=1": (3, 1, 3, 12),
    }.items():
        assert tuple(widths_of_ratio(TWELVE, ratio).values()) == widths
    only = TWELVE.select("ffn")
    assert tuple(widths_of_ratio(only, "5/12").values()) == (5, 5)  # no attention is cut


# the flat buffer


def spans_of(where: layout.Layout, names: Iterable[str]) -> set[int]:
    """Positions of these parameters, read off marks in the buffer."""
    buffer = torch.zeros(where.n_params)
    views = where.views(buffer)
    for name in names:
        assert tuple(views[name].shape) == SHAPES[name]
        views[name].add_(1.0)
    assert buffer.max() == 1.0  # no two share a place
    return set(buffer.nonzero().flatten().tolist())


@pytest.mark.parametrize("n_cut", [0, 1, 3])
def test_shared_first_and_matrices_apart_from_vectors(n_cut):
    """The optimizer decays `decayed` only, and the dispatcher copies the first `n_shared`."""
    block_map = FINE.select("both", 3 - n_cut) if n_cut else BlockMap(())
    where = layout.layout(block_map, SHAPES)
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
    block_map, cuts, params = CASE.block_map, all_cuts(CASE), dict(CASE.model.named_parameters())
    assert block_map.narrowed(SHAPES, block_map.full_widths()) == SHAPES
    shapes = block_map.narrowed(SHAPES, block_map.widths(CASE.blueprint))
    full, narrow = layout.layout(block_map, SHAPES), layout.layout(block_map, shapes)
    # a subnet's shared part is one slice of the central buffer, so both agree on it
    assert (list(narrow.shapes), narrow.n_shared) == (list(full.shapes), full.n_shared)
    segments = layout.cut_segments(full, block_map, CPU)
    index = segments.index(CASE.blueprint)
    whole = torch.full((1, full.n_params), torch.nan)
    for name, view in full.views(whole).items():
        view.copy_(params[name].detach())
    part = torch.full((1, narrow.n_params), torch.nan)
    layout.gather_(part, whole, segments, index)
    views = narrow.views(part)
    layout.scatter_(whole, -part, segments, index)
    for name, view in full.views(whole).items():
        want = params[name].detach().clone()
        dim, kept = cuts.get(name, (0, range(len(want))))
        kept = torch.tensor(kept)
        assert torch.equal(views[name], want.index_select(dim, kept)), name
        want.index_copy_(dim, kept, -want.index_select(dim, kept))
        assert torch.equal(view, want), name
