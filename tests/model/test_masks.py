"""Masks inside a round: what they keep, how often, and what they hang on."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import combinations

import torch
from families_table import tiny_model
from torch import Tensor

from twistlm.config import BlocksConfig
from twistlm.model import families, masks
from twistlm.model.masks import WorkerRound

MAP = families.block_map(tiny_model("gpt2"), "both").coarsen("ffn", 4)
HELD = {group.name: (0, 2, 3) for group in MAP.groups}
ORDER = {group.name: (3, 1, 0, 2) for group in MAP.groups}
BLOCKS = BlocksConfig(
    n_ffn=4, masks="sequence", mask_attn=(1, 2, 4), mask_ffn=(3, 1, 2), nested=0.25
)


def scale(group, k: int) -> float:
    return 10.0 * k


def draw(turn: WorkerRound, blocks: BlocksConfig = BLOCKS, held=HELD) -> dict[str, Tensor]:
    """Group -> factors [steps, rows, held]."""
    drawn = masks.draw(MAP, held, blocks, turn, ORDER, "twist", scale)
    pieces = drawn.split([len(held[group.name]) for group in MAP.groups], -1)
    return dict(zip(held, pieces, strict=True))


def test_widths_are_taken_in_turn_and_a_factor_goes_with_each():
    """Sequence j of a worker takes pair j of the lists; who holds fewer blocks uses all."""
    # 20 sequences are no multiple of 3
    for turn in (WorkerRound(1, 0, 0, 5, 2), WorkerRound(1, 2, 1, 5, 2)):
        found = draw(turn)
        for group in MAP.groups:
            sizes = (1, 2, 3) if group.kind == "attn" else (3, 1, 2)  # 4 of 3 held is 3
            for i in range(5):
                for row in range(2):
                    k = sizes[((turn.round * 5 + i + turn.place) * 2 + row) % 3]
                    values = sorted(found[group.name][i, row].tolist())
                    assert values == [0.0] * (3 - k) + [10.0 * k] * k


def test_kept_blocks_are_uniform_but_for_the_nested_ones():
    """Of held (0, 2, 3) the order keeps 3, then 0: a quarter of the masks. The rest is uniform."""
    found = draw(WorkerRound(5, 1, 0, 600, 3))
    for group in MAP.groups:
        width = 1 if group.kind == "attn" else 2
        row = 0 if group.kind == "attn" else 2
        kept = (found[group.name][:, row] > 0).double()
        assert (kept.sum(-1) == width).all()
        shares = kept.mean(0).tolist()
        first = {1: (0.0, 0.0, 1.0), 2: (1.0, 0.0, 1.0)}[width]
        for share, nested in zip(shares, first, strict=True):
            assert abs(share - (0.25 * nested + 0.75 * width / 3)) < 0.06  # 3 standard deviations


def test_a_nested_mask_is_one_in_all_layers():
    """A prefix in one layer alone is a subnet that no ticket will be."""
    blocks = BlocksConfig(n_ffn=4, masks="sequence", mask_attn=(2,), mask_ffn=(2,), nested=0.5)
    full = MAP.full()
    found = draw(WorkerRound(2, 0, 0, 400, 1), blocks, full)
    prefix = torch.stack([(found[g.name][:, 0, [1, 3]] > 0).all(-1) for g in MAP.groups], 1)
    assert 160 < int(prefix.all(1).sum()) < 240  # a random one is in all 6 layers once in 6^6


def test_common_blocks_are_always_kept():
    common = MAP.with_common({"ffn": (2,)})
    blocks = BlocksConfig(n_ffn=4, masks="step", mask_attn=(1,), mask_ffn=(2,), nested=0.5)
    drawn = masks.draw(common, HELD, blocks, WorkerRound(0, 0, 0, 200, 1), ORDER, "twist", scale)
    for group, kept in zip(common.groups, drawn[:, 0].split(3, -1), strict=True):
        assert bool((kept[:, 1] > 0).all()) == (group.kind == "ffn")
    two = {group.name: 2 for group in common.groups}
    for name, kept in masks.prefixes(common, ORDER, two).items():
        assert kept == ((2, 3) if common[name].kind == "ffn" else (1, 3))
    first = MAP.with_common({"ffn": (3,)})  # also the first of the order: it counts once
    three = {group.name: 3 for group in first.groups}
    assert set(masks.prefixes(first, ORDER, three).values()) == {(0, 1, 3)}


def test_masks_hang_on_seed_round_and_place_alone():
    alike = replace(BLOCKS, mask_attn=(2,), mask_ffn=(2,))  # widths in turn would differ anyway
    places = [(1, 4, 2, 5, 2), (2, 4, 2, 5, 2), (1, 5, 2, 5, 2), (1, 4, 1, 5, 2)]
    drawn = [torch.cat(list(draw(WorkerRound(*p), alike).values())) for p in places]
    assert all(not torch.equal(a, b) for a, b in combinations(drawn, 2))
    # bit for bit, in every process and version
    digest = "34e4bd963d9ea5efc44683c08be33efbbe63f3cd28aa35b308b50b58308ba4d4"
    assert hashlib.sha256(drawn[0].numpy().tobytes()).hexdigest() == digest


def test_a_deal_along_the_order_gives_masks_to_those_who_can_train_them():
    """The holder of the first K takes 3 of 4 masks along the order, a whole worker wide ones."""
    blocks = replace(BLOCKS, deal="order", k_attn=(4, 2, 2), k_ffn=(4, 2, 2), widths="worker")
    blocks = replace(blocks, mask_attn=(4, 3, 2, 1), mask_ffn=(4, 3, 2, 1))
    turn = WorkerRound(3, 0, 0, 2000, 1)
    whole = draw(turn, blocks, MAP.full())
    for factors in whole.values():
        assert set((factors > 0).sum(-1).flatten().tolist()) == {3, 4}
    first = {group.name: (1, 3) for group in MAP.groups}  # of the order 3, 1, 0, 2
    other = {group.name: (0, 1) for group in MAP.groups}
    for held, share in ((first, 0.75), (other, 0.25)):
        for factors in draw(turn, blocks, held).values():
            alone = factors[(factors > 0).sum(-1) == 1] > 0  # masks of one block
            leads = alone[:, 1].double().mean()  # of (1, 3): 3; of (0, 1): 1, which leads 0
            assert abs(float(leads) - (share + (1 - share) / 2)) < 0.06
