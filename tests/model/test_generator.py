"""The subnet generator: the paper's three constraints on the whole feasible grid, and fairness."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product

import pytest

from twistlm.config import BlocksConfig
from twistlm.model import generator
from twistlm.model.blocks import BlockGroup, BlockMap

N_ROUNDS = 1000
GRID = [(n, s, c) for n in range(1, 13) for s in range(1, 7) for c in range(n + 1)]
SHAPES = [(12, 4, 6), (12, 4, 4), (10, 4, 3), (9, 2, 7), (8, 3, 4), (5, 6, 2)]  # N, S, K


def a_map(n_attn: int, n_ffn: int = 0, n_layers: int = 1) -> BlockMap:
    """Groups without parameters: the generator must not look at any."""
    sizes = {"attn": n_attn, "ffn": n_ffn}
    return BlockMap(
        tuple(
            BlockGroup(f"layers.{layer}.{kind}", kind, layer, n, (), ())
            for layer in range(n_layers)
            for kind, n in sizes.items()
            if n
        )
    )


def deals(n: int, s: int, k: int, n_rounds: int = 1, seed: int = 0, **blocks) -> Iterator[list]:
    """The hands of one attention layer, round by round, as training deals them."""
    block_map, cfg = a_map(n), BlocksConfig(**{"k_attn": (k,)} | blocks)
    held = {"layers.0.attn": [0] * n}
    for r in range(n_rounds):
        dealt = generator.for_training(block_map, s, cfg, seed=seed, round=r, held=held)
        held = generator.counted(held, dealt)
        yield [blueprint["layers.0.attn"] for blueprint in dealt]


def check_hands(hands: list, n: int, ks: tuple[int, ...], common: tuple[int, ...] = ()) -> None:
    """The paper's constraints: K blocks each, the common ones among them, all of them held."""
    assert tuple(map(len, hands)) == ks
    for hand in hands:
        assert list(hand) == sorted(set(hand))
        assert set(common) <= set(hand)
    assert set().union(*hands) == set(range(n))


def is_dealt(n: int, ks: tuple[int, ...], common: tuple[int, ...]) -> bool:
    """Whether there are two rounds' deals of these K, with the three constraints."""
    blocks = {"k_attn": ks, "widths": "worker", "common_attn": common}
    try:
        for hands in deals(n, len(ks), 0, 2, seed=n, **blocks):
            check_hands(hands, n, ks, common)
    except AssertionError:  # of what cannot be dealt, something else is
        return False
    return min(ks) > 0


def test_check_refuses_exactly_what_cannot_be_dealt_and_names_the_legal_range():
    for n, s, size in GRID:
        common = tuple(random.Random(f"{n}/{size}").sample(range(n), size))
        legal = [k for k in range(-1, n + 3) if is_dealt(n, (k,) * s, common)]
        for k in range(-1, n + 3):
            cfg = BlocksConfig(k_attn=(k,), common_attn=common)
            if k in legal:
                generator.check(a_map(n), cfg, s)
                continue
            said = rf"blocks\.k_attn = {k} .*legal K are {legal[0]}\.\.{legal[-1]}"
            with pytest.raises(ValueError, match=said):
                generator.check(a_map(n), cfg, s)
    for size, *ks in product(range(5), *[range(6)] * 3):
        common = tuple(range(size))
        cfg = BlocksConfig(k_attn=tuple(ks), widths="worker", common_attn=common)
        if is_dealt(4, tuple(ks), common):
            generator.check(a_map(4), cfg, 3)
        else:
            with pytest.raises(ValueError, match=rf"{max(1, size)}\.\.4"):
                generator.check(a_map(4), cfg, 3)


BAD = {
    r"blocks\.k_attn = 2 .* 3\.\.12": {"k_attn": (6, 2)},  # every K of a cycle is looked at
    r"k_attn is empty.* 1\.\.12": {"k_attn": ()},
    r"one K per worker: 4": {"k_attn": (6, 6), "widths": "worker"},
}


def test_check_names_what_is_wrong():
    for said, settings in BAD.items():
        with pytest.raises(ValueError, match=said):
            generator.check(a_map(12), BlocksConfig(**settings), 4)
    generator.check(a_map(12), BlocksConfig(k_attn=(3, 8), k_ffn=(99,)), 4)  # no FFN is cut


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


@pytest.mark.parametrize(("n", "s", "k"), SHAPES)
def test_the_balanced_deal_is_much_tighter(n, s, k):
    counts, seen = Counter(dict.fromkeys(range(n), 0)), set()
    for hands in deals(n, s, k, 300, seed=7, deal="balanced"):
        check_hands(hands, n, (k,) * s)
        seen.add(tuple(hands))
        for hand in hands:
            counts.update(hand)
        assert max(counts.values()) - min(counts.values()) <= 2
    assert len(seen) > 50  # balanced, and still shuffled


def test_balanced_reads_the_counts():
    """Blocks that were held a lot get no extra slot."""
    cfg = BlocksConfig(k_attn=(4,), deal="balanced")
    held = {"layers.0.attn": (0, 0, 50, 0, 50, 0, 0, 50)}
    dealt = generator.for_training(a_map(8), 4, cfg, seed=0, round=0, held=held)
    after = generator.counted(held, dealt)["layers.0.attn"]
    assert [after[block] for block in (2, 4, 7)] == [51, 51, 51]  # the covering pass only
    assert sum(after) == 150 + 4 * 4


def test_the_fixed_deal_is_the_first_random_one_in_every_round():
    """A control: static subnets, as if nothing were dealt anew."""
    first = next(deals(12, 4, 5, deal="random"))
    assert list(deals(12, 4, 5, 6, deal="fixed")) == [first] * 6
    # at K = N/S the printed algorithm is as fixed: the same blocks to the same workers for ever
    partitions = {frozenset(hands) for hands in deals(12, 4, 3, 200)}
    assert len(partitions) > 190  # of 15,400: 200 draws have about one repetition


@pytest.mark.parametrize("deal", ["random", "balanced"])
def test_worker_widths(deal):
    """Each worker has its own K, down to |C|, and together they still hold everything."""
    for ks in ((8, 2, 5), (1, 1, 10), (12, 1, 1), (4, 4, 4), (2, 11, 3)):
        seen = Counter()
        for hands in deals(12, 3, 0, 200, k_attn=ks, widths="worker", deal=deal):
            check_hands(hands, 12, ks)
            seen.update(hands[0])
        assert all(strays(seen[block], 200, ks[0] / 12) <= 4 for block in range(12)), ks
    for hands in deals(8, 3, 0, 50, k_attn=(8, 3, 1), widths="worker", common_attn=(5,)):
        check_hands(hands, 8, (8, 3, 1), (5,))


def test_a_cycle_of_widths_follows_the_round():
    cfg = BlocksConfig(k_attn=(3, 8, 4, 6), k_ffn=(2, 7))
    for r in range(12):
        for blueprint in generator.for_training(a_map(12, 8, 2), 4, cfg, seed=0, round=r):
            sizes = {name[-4:]: len(kept) for name, kept in blueprint.items()}
            assert sizes == {"attn": (3, 8, 4, 6)[r % 4], ".ffn": (2, 7)[r % 2]}


def test_each_layer_and_kind_draws_its_own_deal():
    """And it hangs on that layer alone: sharing another one must not change it."""
    block_map, cfg = a_map(12, 12, n_layers=8), BlocksConfig(k_attn=(6,), k_ffn=(6,))
    whole = generator.for_training(block_map, 4, cfg, seed=0, round=2)
    ticket = generator.for_deployment(block_map, dict.fromkeys(whole[0], 6), seed=0)
    for blueprint in (*whole, ticket):
        assert len(set(blueprint.values())) > 12  # of 16; C(12, 6) = 924 hands, so few meet
    alone = generator.for_training(a_map(12, n_layers=2), 4, cfg, seed=0, round=2)
    for a, b in zip(whole, alone, strict=True):
        assert {name: a[name] for name in b} == b


def test_deals_hang_on_seed_and_round_alone():
    """Ranks deal without a message: bit for bit, in every process and version."""
    cfg, block_map = BlocksConfig(k_attn=(6,), k_ffn=(5,)), a_map(12, 8, n_layers=6)
    dealt = [
        generator.for_training(block_map, 3, cfg, seed=seed, round=r)
        for seed, r in product(range(3), range(5))
    ]
    assert all(a != b for a, b in combinations(dealt, 2))
    ticket = generator.for_deployment(a_map(12), {"layers.0.attn": 5}, seed=3)
    made = json.dumps([dealt, list(deals(10, 4, 3, 5, deal="balanced")), ticket])
    digest = "3d5e67a2e567d794193cf514b83e60328572b08c9bb756247172e960b8967bbb"
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


@pytest.mark.parametrize("ks", [(6, 6, 6, 6), (12, 6, 6, 6), (3, 3, 3, 3)])
def test_smaller_workers_hold_the_first_of_the_order_in_turn(ks):
    """Every block is held in every round; the others' blocks are as random as ever."""
    order = {"layers.0.attn": tuple(range(11, -1, -1))}
    cfg = BlocksConfig(k_attn=ks, widths="worker", deal="order", nested=0.25)
    small, others = [s for s in range(4) if ks[s] < 12], Counter()
    for r in range(600):
        dealt = generator.for_training(a_map(12), 4, cfg, seed=1, round=r, order=order)
        hands = [blueprint["layers.0.attn"] for blueprint in dealt]
        check_hands(hands, 12, ks)
        first = small[r % len(small)]
        assert set(hands[first]) == set(range(12 - ks[first], 12))
        others.update(block for s in small if s != first for block in hands[s])
    if ks[0] < 12:  # a whole worker holds what is left, so that theirs are uniform
        late = [others[block] for block in range(12 - ks[0])]
        assert max(late) < 1.2 * min(late)
