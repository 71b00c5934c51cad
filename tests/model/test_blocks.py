"""What the block algebra refuses, and ratios; its slices are tested in test_families.py."""

import pytest
from families_table import case, cut, tiny_model

from twistlm.config import BlocksConfig
from twistlm.model import families, huggingface
from twistlm.model.blocks import BlockGroup, BlockMap, Partition, parse_ratio, widths_of_ratio

# a fused q, k, v with 4 heads of 8 inside each of its three sections, and 48 neurons one by one
MODEL = tiny_model("gpt2")
FINE = cut(MODEL, n_ffn=48)
SHAPES = huggingface.shapes(MODEL)
CASE = case(("gpt2", "head", "both"))  # layers 1 and 2, four FFN blocks
H1 = "transformer.h.1"


def check(*parts: Partition, n_blocks: int = 4) -> None:
    BlockMap((BlockGroup("h.0.attn", "attn", 0, n_blocks, parts, ()),)).check(SHAPES)


SHARED = r"shared_first = 2 and blocks.shared_last = 1 .*3 layers.*0\.\.2"
BLOCKS_OF = r"blueprint\['transformer\.h\.1\.attn'\] = .*at most 4 .*0\.\.3"
HALF = "layer 1 keeps no blocks of one kind"
FUSED = "transformer.h.0.attn.c_attn.weight"
TWELVE, NO_HEADS = cut(MODEL, n_ffn=12, first=1), cut(MODEL, "ffn", n_ffn=12, first=1)
REFUSED = [  # a call, and what is said about it
    (lambda: families.partition(MODEL, BlocksConfig(shared_first=2, shared_last=1)), SHARED),
    (lambda: cut(MODEL, n_ffn=5), r"= 5: 48 ffn .*legal: 1, 2, 3, 4, 6, 8, 12"),
    # a wrong map would cut wrong weights
    (lambda: check(Partition(FUSED, 1, 8)), r"1 of \(32, 96\) is not 1 sections .* 8"),
    (lambda: check(Partition("h.0.q_proj.weight", 0, 8)), r"h\.0\.q_proj\.weight: .* of \(\)"),
    (lambda: check(*FINE.groups[0].parts, n_blocks=3), "3 blocks"),
    # blueprints
    *(
        (lambda k=k: CASE.block_map.check_blueprint(CASE.blueprint | {f"{H1}.attn": k}), BLOCKS_OF)
        for k in ((2, 0), (1, 1), (0, 4), (-1, 2))
    ),
    (lambda: CASE.block_map.check_blueprint(CASE.blueprint | {f"{H1}.attn": ()}), HALF),
    (lambda: CASE.block_map.check_blueprint({}), "does not fit this model.*h.1.attn"),
    # ratios
    *(
        (lambda t=t: parse_ratio(t, 4, "ffn"), rf"{t!r} is not a fraction such as 6/12")
        for t in ("half", "1/0", "nan")
    ),
    (lambda: widths_of_ratio(TWELVE, "0"), "keeps no blocks at all"),
    (lambda: widths_of_ratio(TWELVE, "attn=0,ffn=1/2"), HALF),
    (lambda: widths_of_ratio(NO_HEADS, "ffn=1/2,ffn.1=0"), HALF),
    (lambda: widths_of_ratio(TWELVE, "2/3"), r"attn blocks; legal: 1/4"),  # fits FFN alone
]


def test_refused_with_the_legal_values():
    for call, said in REFUSED:
        with pytest.raises(ValueError, match=said):
            call()


def test_ratios():
    for text, k in {"6/12": 6, "0.5": 6, "1": 12, " 1/3 ": 4}.items():
        assert parse_ratio(text, 12, "ffn") == k
    for ratio, widths in {  # of layer 1's attention and FFN, then of layer 2's
        "1/2": (2, 6, 2, 6),
        "attn=3/4,ffn=1/12": (3, 1, 3, 1),
        "ffn=1/12,attn=3/4": (3, 1, 3, 1),
        "attn=3/4,ffn=1/12,ffn.2=1": (3, 1, 3, 12),
        "attn=3/4,ffn=1/12,attn.1=0,ffn.1=0": (0, 0, 3, 1),
    }.items():
        assert tuple(widths_of_ratio(TWELVE, ratio).values()) == widths
    assert tuple(widths_of_ratio(NO_HEADS, "5/12").values()) == (5, 5)  # no attention is cut
    last = families.partition(MODEL, BlocksConfig(setting="ffn", shared_first=0, shared_last=2))
    assert [group.layer for group in last.groups] == [0]
