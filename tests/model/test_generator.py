"""The generator: the paper's three constraints on the whole feasible grid, fairness, and masks."""

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from families_table import cut, tiny_model
from torch import Tensor

from twistlm.config import BlocksConfig
from twistlm.model import generator, masks
from twistlm.model.blocks import BlockGroup, BlockMap
from twistlm.model.masks import WorkerRound

N_ROUNDS = 1000
GRID = [(n, s, c) for n in range(1, 7) for s in range(1, 6) for c in range(n + 1)]
SHAPES = [(12, 4, 6), (10, 4, 3), (5, 6, 2)]  # N, S, K


def a_map(n_attn: int, n_ffn: int = 0, n_layers: int = 1) -> BlockMap:
    """Groups without parameters: the generator must not look at any."""
    sizes = {"attn": n_attn, "ffn": n_ffn}
    each = product(range(n_layers), [(kind, n) for kind, n in sizes.items() if n])
    groups = (BlockGroup(f"layers.{i}.{kind}", kind, i, n, (), ()) for i, (kind, n) in each)
    return BlockMap(tuple(groups))


def deals(
    n: int, s: int, k: int, n_rounds: int = 1, seed: int = 0, falls: bool = False, **blocks
) -> Iterator[list]:
    """The hands of one attention layer, round by round, as training deals them.

    `falls`: the order of blocks is that of falling numbers.
    """
    order = {"layers.0.attn": tuple(range(n - 1, -1, -1))} if falls else None
    block_map, cfg = a_map(n), BlocksConfig(**{"k_attn": (k,)} | blocks)
    for r in range(n_rounds):
        dealt = generator.for_training(block_map, s, cfg, seed=seed, round=r, order=order)
        yield [blueprint["layers.0.attn"] for blueprint in dealt]


def check_hands(hands: list, n: int, ks: tuple[int, ...], common: tuple[int, ...] = ()) -> None:
    """The paper's constraints: K blocks each, the common ones among them, all of them held."""
    assert tuple(map(len, hands)) == ks
    for hand in hands:
        assert list(hand) == sorted(set(hand))
        assert set(common) <= set(hand)
    assert set().union(*hands) == set(range(n))


def is_dealt(n: int, ks: tuple[int, ...], common: tuple[int, ...]) -> bool:
    """Whether there are two rounds' deals of these K in every way, with the three constraints."""
    blocks = {"k_attn": ks, "widths": "worker", "common_attn": common}
    try:
        for way in ("random", "order", "first"):
            for hands in deals(n, len(ks), 0, 2, seed=n, falls=True, deal=way, **blocks):
                check_hands(hands, n, ks, common)
    except AssertionError:  # of what cannot be dealt, something else is
        return False
    return min(ks) > 0


def test_check_refuses_exactly_what_cannot_be_dealt_and_names_the_legal_range():
    for n, s, size in GRID:
        common = tuple(random.Random(f"{n}/{size}").sample(range(n), size))
        legal = [k for k in range(-1, n + 3) if is_dealt(n, (k,) * s, common)]
        for k in range(-1, n + 3):
            said = rf"blocks\.k_attn = {k} .*legal K are {legal[0]}\.\.{legal[-1]}"
            with nullcontext() if k in legal else pytest.raises(ValueError, match=said):
                generator.check(a_map(n), BlocksConfig(k_attn=(k,), common_attn=common), s)
    for size, *ks in product(range(5), *[range(6)] * 3):
        common = tuple(range(size))
        cfg = BlocksConfig(k_attn=tuple(ks), widths="worker", common_attn=common)
        refused = pytest.raises(ValueError, match=rf"{max(1, size)}\.\.4")
        with nullcontext() if is_dealt(4, tuple(ks), common) else refused:
            generator.check(a_map(4), cfg, 3)
    for said, settings in {
        r"blocks\.k_attn = 2 .* 3\.\.12": {"k_attn": (6, 2)},  # every K of a cycle is looked at
        r"k_attn = \[\]: .* 1\.\.12": {"k_attn": ()},
        r"one K per worker: 4": {"k_attn": (6, 6), "widths": "worker"},
    }.items():
        with pytest.raises(ValueError, match=said):
            generator.check(a_map(12), BlocksConfig(**settings), 4)


def strays(count: int, trials: int, p: float) -> float:
    """How many standard deviations a count of successes is off."""
    return abs(count - trials * p) / math.sqrt(max(trials * p * (1 - p), 1e-9))


@pytest.mark.parametrize("common", [(), (2, 4)])
@pytest.mark.parametrize(("n", "s", "k"), SHAPES)
def test_a_workers_hand_is_a_uniform_subset(n, s, k, common):
    """Every worker sees every block and every pair of blocks equally often, beside common ones."""
    per_worker, pairs, n_common = Counter(), Counter(), len(common)
    for hands in deals(n + n_common, s, k + n_common, N_ROUNDS, seed=7, common_attn=common):
        for worker, hand in enumerate(hands):
            assert set(common) <= set(hand)
            per_worker.update((worker, block) for block in hand)
            pairs.update(combinations([block for block in hand if block not in common], 2))
    rest = [block for block in range(n + n_common) if block not in common]
    for worker, block in product(range(s), rest):
        assert strays(per_worker[worker, block], N_ROUNDS, k / n) < 4, (worker, block)
    p2 = k * (k - 1) / (n * (n - 1))
    for pair in combinations(rest, 2):  # dealing in index order fails here
        # workers of one round are only nearly independent: half a sigma of room
        assert strays(pairs[pair], N_ROUNDS * s, p2) < 4.5, pair


def test_widths_are_cycled_over_rounds_and_a_fixed_deal_is_the_first_one():
    first = next(deals(12, 4, 5, deal="random"))
    assert list(deals(12, 4, 5, 6, deal="fixed")) == [first] * 6
    cfg = BlocksConfig(k_attn=(3, 8, 4, 6), k_ffn=(2, 7))
    for r in range(12):
        for blueprint in generator.for_training(a_map(12, 8, 2), 4, cfg, seed=0, round=r):
            sizes = {name[-4:]: len(kept) for name, kept in blueprint.items()}
            assert sizes == {"attn": (3, 8, 4, 6)[r % 4], ".ffn": (2, 7)[r % 2]}


def test_deals_hang_on_seed_and_round_alone():
    """Ranks deal without a message: bit for bit, in every process and version."""
    cfg, block_map = BlocksConfig(k_attn=(6,), k_ffn=(5,)), a_map(12, 8, n_layers=6)
    dealt = [
        generator.for_training(block_map, 3, cfg, seed=seed, round=r)
        for seed, r in product(range(3), range(5))
    ]
    assert all(a != b for a, b in combinations(dealt, 2))
    ticket = generator.for_deployment(a_map(12), {"layers.0.attn": 5}, seed=3)
    made = json.dumps([dealt, list(deals(10, 4, 3, 5)), ticket])
    digest = "07d2a88595a312c536f415214a0e33f585bb981ec07b2498aeb00594327ea47c"
    assert hashlib.sha256(made.encode()).hexdigest() == digest


def test_deployment_draws_uniform_subsets():
    block_map, n_draws = a_map(5, 4, n_layers=2), 1000
    widths = {"layers.0.attn": 2, "layers.0.ffn": 3, "layers.1.attn": 5, "layers.1.ffn": 1}
    seen = {name: Counter() for name in widths}
    draws = list(generator.draws(block_map, widths, seed=11, n=n_draws))
    assert draws[7] == generator.for_deployment(block_map, widths, seed=11, draw=7)
    for ticket in draws:
        assert block_map.widths(ticket) == widths
        for name, kept in ticket.items():
            seen[name][kept] += 1
    for group in block_map.groups:
        subsets = list(combinations(range(group.n_blocks), widths[group.name]))
        for subset in subsets:
            assert strays(seen[group.name][subset], n_draws, 1 / len(subsets)) <= 4


@pytest.mark.parametrize("ks", [(6, 6, 6, 6), (12, 6, 6, 6)])
def test_smaller_workers_hold_the_first_of_the_order_in_turn(ks):
    """Every block is held in every round; the others' blocks are as random as ever."""
    small, others = [s for s in range(4) if ks[s] < 12], Counter()
    along = {"k_attn": ks, "widths": "worker", "deal": "order", "nested": 0.25}
    for r, hands in enumerate(deals(12, 4, 0, 600, seed=1, falls=True, **along)):
        check_hands(hands, 12, ks)
        first = small[r % len(small)]
        assert set(hands[first]) == set(range(12 - ks[first], 12))
        others.update(block for s in small if s != first for block in hands[s])
    if ks[0] < 12:  # a whole worker holds what is left, so that theirs are uniform
        late = [others[block] for block in range(12 - ks[0])]
        assert max(late) < 1.2 * min(late)


@pytest.mark.parametrize(
    ("ks", "n_first"),
    [((6, 6, 6, 6), 3), ((12, 6, 6, 6), 3), ((3, 3, 3, 3), 1), ((12, 4, 6, 3), 3)],
)
def test_all_smaller_workers_hold_the_first_but_those_who_must_hold_the_rest(ks, n_first):
    small, free = [s for s in range(4) if ks[s] < 12], Counter()
    along = {"k_attn": ks, "widths": "worker", "deal": "first", "nested": 1.0}
    for hands in deals(12, 4, 0, 12, seed=1, falls=True, **along):
        check_hands(hands, 12, ks)
        first = [s for s in small if set(hands[s]) == set(range(12 - ks[s], 12))]
        assert len(first) == n_first
        free.update(set(small) - set(first))
    assert len(free) in (0, len(small))
    assert len(set(free.values())) <= 1  # in turn


MAP = cut(tiny_model("gpt2"), n_ffn=4)
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
    turn = WorkerRound(1, 2, 1, 5, 2)  # 20 sequences are no multiple of 3
    found = draw(turn)
    for group, (i, row) in product(MAP.groups, product(range(5), range(2))):
        sizes = (1, 2, 3) if group.kind == "attn" else (3, 1, 2)  # 4 of 3 held is 3
        k = sizes[((turn.round * 5 + i + turn.number) * 2 + row) % 3]
        values = sorted(found[group.name][i, row].tolist())
        assert values == [0.0] * (3 - k) + [10.0 * k] * k


def test_kept_blocks_are_uniform_but_for_the_nested_ones():
    """Of held (0, 2, 3) the order keeps 3, then 0: a quarter of the masks. The rest is uniform."""
    found = draw(WorkerRound(5, 1, 0, 600, 3))
    for group in MAP.groups:
        row, width, first = (0, 1, (0, 0, 1)) if group.kind == "attn" else (2, 2, (1, 0, 1))
        kept = (found[group.name][:, row] > 0).double()
        assert (kept.sum(-1) == width).all()
        for share, nested in zip(kept.mean(0).tolist(), first, strict=True):
            assert abs(share - (0.25 * nested + 0.75 * width / 3)) < 0.06  # 3 standard deviations


def test_a_nested_mask_is_one_in_all_layers():
    """A prefix in one layer alone is a subnet that no ticket will be."""
    blocks = BlocksConfig(n_ffn=4, masks="sequence", mask_attn=(2,), mask_ffn=(2,), nested=0.5)
    found = draw(WorkerRound(2, 0, 0, 400, 1), blocks, MAP.full())
    prefix = torch.stack([(found[g.name][:, 0, [1, 3]] > 0).all(-1) for g in MAP.groups], 1)
    assert 160 < int(prefix.all(1).sum()) < 240  # a random one is in all 6 layers once in 6^6


def test_masks_of_depth_drop_layers_and_leave_the_other_masks_as_they_are():
    """In turn 0, 1 and 2 of three layers, with both kinds; a quarter along the order 2, 0, 1."""
    order, full, turn = ORDER | {"layers": (2, 0, 1)}, MAP.full(), WorkerRound(5, 1, 0, 600, 3)

    def drawn(**more) -> Tensor:
        blocks = replace(BLOCKS, **more)
        made = masks.draw(MAP, full, blocks, turn, order, "twist", scale)
        return made.unflatten(-1, (3, 8))  # [steps, rows, layers, blocks of both kinds]

    plain, found = drawn(), drawn(mask_depth=(0, 1, 2))
    assert torch.equal(drawn(mask_depth=(0, 0, 0)), plain)
    stays = (found > 0).any(-1)
    assert torch.equal(found, plain * stays[..., None])
    assert torch.equal(3 - stays.sum(-1), torch.tensor([0, 1, 2]).expand(600, 3))
    for row, first in ((1, (1.0, 0.0, 1.0)), (2, (0.0, 0.0, 1.0))):
        for share, nested in zip(stays[:, row].double().mean(0).tolist(), first, strict=True):
            assert abs(share - (0.25 * nested + 0.75 * (3 - row) / 3)) < 0.06


def test_common_blocks_are_always_kept():
    common = MAP.with_common(BlocksConfig(common_ffn=(2,)))
    blocks = BlocksConfig(n_ffn=4, masks="step", mask_attn=(1,), mask_ffn=(2,), nested=0.5)
    drawn = masks.draw(common, HELD, blocks, WorkerRound(0, 0, 0, 200, 1), ORDER, "twist", scale)
    for group, kept in zip(common.groups, drawn[:, 0].split(3, -1), strict=True):
        assert bool((kept[:, 1] > 0).all()) == (group.kind == "ffn")
    two = {group.name: 2 for group in common.groups}
    for name, kept in masks.prefixes(common, ORDER, two).items():
        assert kept == ((2, 3) if common[name].kind == "ffn" else (1, 3))
    # also the first of the order: it counts once
    first = MAP.with_common(BlocksConfig(common_ffn=(3,)))
    three = {group.name: 3 for group in first.groups}
    assert set(masks.prefixes(first, ORDER, three).values()) == {(0, 1, 3)}


def test_masks_hang_on_seed_round_and_worker_alone():
    alike = replace(BLOCKS, mask_attn=(2,), mask_ffn=(2,))  # widths in turn would differ anyway
    places = [(1, 4, 2, 5, 2), (2, 4, 2, 5, 2), (1, 5, 2, 5, 2), (1, 4, 1, 5, 2)]
    drawn = [torch.cat(list(draw(WorkerRound(*p), alike).values())) for p in places]
    assert all(not torch.equal(a, b) for a, b in combinations(drawn, 2))
    # bit for bit, in every process and version
    digest = "34e4bd963d9ea5efc44683c08be33efbbe63f3cd28aa35b308b50b58308ba4d4"
    assert hashlib.sha256(drawn[0].numpy().tobytes()).hexdigest() == digest


def test_a_deal_along_the_order_gives_masks_to_those_who_can_train_them():
    """The holder of the first K takes 3 times the share along the order, a whole one wide masks."""
    blocks = replace(BLOCKS, deal="order", k_attn=(4, 2, 2), k_ffn=(4, 2, 2), widths="worker")
    blocks = replace(blocks, mask_attn=(4, 3, 2, 1), mask_ffn=(4, 3, 2, 1))
    turn = WorkerRound(3, 0, 0, 2000, 1)
    whole = draw(turn, blocks, MAP.full())
    for factors in whole.values():
        assert set((factors > 0).sum(-1).flatten().tolist()) == {3, 4}
    first = {group.name: (1, 3) for group in MAP.groups}  # of the order 3, 1, 0, 2
    other = {group.name: (0, 1) for group in MAP.groups}
    fewer = replace(blocks, nested=0.1)
    for held, share, some in ((first, 0.75, blocks), (first, 0.3, fewer), (other, 0.25, blocks)):
        for factors in draw(turn, some, held).values():
            alone = factors[(factors > 0).sum(-1) == 1] > 0  # masks of one block
            leads = alone[:, 1].double().mean()  # of (1, 3): 3; of (0, 1): 1, which leads 0
            assert abs(float(leads) - (share + (1 - share) / 2)) < 0.06


def test_a_whole_worker_takes_pairs_that_smaller_ones_cannot_train():
    """Too wide in either kind; attention, FFN and layers are of one place in the lists."""
    blocks = replace(BLOCKS, deal="order", k_attn=(4, 2, 2), k_ffn=(4, 2, 2), widths="worker")
    pairs = {"mask_attn": (1, 3, 2, 4), "mask_ffn": (3, 1, 2, 4), "mask_depth": (2, 1, 2, 0)}
    found = draw(WorkerRound(3, 0, 0, 9, 1), replace(blocks, **pairs), MAP.full())
    for step in range(9):
        n_attn, n_ffn, n_dropped = ((1, 3, 2), (3, 1, 1), (4, 4, 0))[step % 3]
        sizes = {name: int((values[step] > 0).sum()) for name, values in found.items()}
        attn, ffn = ([n for name, n in sizes.items() if name.endswith(k)] for k in ("attn", "ffn"))
        assert sorted(attn) == [0] * n_dropped + [n_attn] * (3 - n_dropped)
        assert [n > 0 for n in attn] == [n > 0 for n in ffn]
        assert max(ffn) == n_ffn


@pytest.mark.parametrize("nested", [0.75, 0.9, 1.0])
def test_the_holder_of_the_first_k_never_takes_fewer_nested_masks(nested):
    blocks = replace(BLOCKS, deal="order", k_attn=(2,), k_ffn=(2,), nested=nested)
    blocks = replace(blocks, mask_attn=(1,), mask_ffn=(1,))
    first = {group.name: (1, 3) for group in MAP.groups}  # of the order 3, 1, 0, 2
    for factors in draw(WorkerRound(3, 0, 0, 2000, 1), blocks, first).values():
        leads = (factors[..., 1] > 0).double().mean()
        assert abs(float(leads) - (nested + (1 - nested) / 2)) < 0.03
