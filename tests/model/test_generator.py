"""The subnet generator: the paper's three constraints on the whole feasible grid, and fairness."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations, product

import pytest

from twistlm.config import BlocksConfig
from twistlm.model import generator
from twistlm.model.blocks import BlockGroup, BlockMap, Blueprint

N_ROUNDS = 2000
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


@cache
def can_cover(n: int, ks: tuple[int, ...], n_common: int) -> bool:
    """Whether workers of these K, all with the first `n_common`, can hold every block: a search."""
    everything, common = (1 << n) - 1, (1 << n_common) - 1
    reached = {0}
    for k in ks:
        hands = {sum(1 << b for b in hand) for hand in combinations(range(n), k)} if k > 0 else ()
        hands = {hand for hand in hands if hand & common == common}
        reached = {union | hand for union in reached for hand in hands}
    return everything in reached


def can_serve(n: int, ks: tuple[int, ...], n_common: int) -> bool:
    """The same where a search takes too long: serve uncovered blocks first."""
    if not all(max(1, n_common) <= k <= n for k in ks):
        return False
    return sum(k - n_common for k in ks) >= n - n_common


def test_serving_uncovered_blocks_first_is_the_search():
    for n, s in product(range(1, 6), range(1, 4)):
        for c, k in product(range(n + 1), range(n + 2)):
            assert can_cover(n, (k,) * s, c) == can_serve(n, (k,) * s, c), (n, s, k, c)


def test_every_deal_of_the_grid_keeps_the_three_constraints():
    for n, s, size in GRID:
        least, most = generator.legal_range(n, s, size)
        for k in range(least, most + 1):
            common = tuple(random.Random(f"{n}/{size}/{k}").sample(range(n), size))
            for hands in deals(n, s, k, 2, seed=n + s, common_attn=common):
                check_hands(hands, n, (k,) * s, common)


@pytest.mark.parametrize("kind", ["attn", "ffn"])
def test_check_refuses_exactly_what_cannot_be_dealt_and_names_the_legal_range(kind):
    maps = {n: a_map(n) if kind == "attn" else a_map(1, n) for n in range(1, 13)}
    for n, s, size in GRID:
        legal = [k for k in range(-1, n + 3) if can_serve(n, (k,) * s, size)]
        assert generator.legal_range(n, s, size) == (legal[0], legal[-1])
        for k in range(-1, n + 3):
            settings = {"k_attn": (1,), f"k_{kind}": (k,), f"common_{kind}": tuple(range(size))}
            cfg = BlocksConfig(**settings)
            if k in legal:
                generator.check(maps[n], cfg, s)
                continue
            said = rf"blocks\.k_{kind} = {k} .*legal K are {legal[0]}\.\.{legal[-1]}"
            with pytest.raises(ValueError, match=said):
                generator.check(maps[n], cfg, s)


def test_check_of_worker_widths():
    """Feasible exactly if each K holds the common blocks and the rest finds room somewhere."""
    for size, *ks in product(range(5), *[range(6)] * 3):
        cfg = BlocksConfig(k_attn=tuple(ks), widths="worker", common_attn=tuple(range(size)))
        if can_serve(4, tuple(ks), size):
            generator.check(a_map(4), cfg, 3)
        else:
            with pytest.raises(ValueError, match=rf"{max(1, size)}\.\.4"):
                generator.check(a_map(4), cfg, 3)


BAD = {
    r"blocks\.k_attn = 2 .* 3\.\.12": {"k_attn": (6, 2)},  # every K of a cycle is looked at
    r"k_attn is empty.* 1\.\.12": {"k_attn": ()},
    r"one K per worker: 4": {"k_attn": (6, 6), "widths": "worker"},
    r"blocks\.common_attn = \[0, 0\].* 0\.\.11": {"k_attn": (6,), "common_attn": (0, 0)},
    r"blocks\.common_attn = \[12\].* 0\.\.11": {"k_attn": (6,), "common_attn": (12,)},
    r"blocks\.common_attn = \[-1\].* 0\.\.11": {"k_attn": (6,), "common_attn": (-1,)},
}


@pytest.mark.parametrize("said", BAD)
def test_check_names_what_is_wrong(said):
    with pytest.raises(ValueError, match=said):
        generator.check(a_map(12), BlocksConfig(**BAD[said]), 4)
    generator.check(a_map(12), BlocksConfig(k_attn=(3, 8), k_ffn=(99,)), 4)  # no FFN is cut


def test_deal_itself_refuses_what_does_not_fit():
    """`check` speaks to users; a deal that leaves a block out must not pass silently either."""
    for n, s, k, common in ((12, 4, 2, ()), (4, 2, 5, ()), (4, 4, 1, (0, 1))):
        with pytest.raises(ValueError, match="covers every block"):
            next(deals(n, s, k, common_attn=common))


def holdings_per_round(n: int, s: int, k: int) -> tuple[float, float]:
    """Mean and variance of the number of workers that hold a given block in one round.

    The first pass gives each block to one worker: h[i] = n // s or one more. Worker i then draws
    k - h[i] of its n - h[i] absent blocks, so it holds a block that it was not dealt with
    probability q[i] = (k - h[i]) / (n - h[i]), independently of the others.
    """
    h = [n // s + (i < n % s) for i in range(s)]
    q = [(k - x) / (n - x) if n > x else 0.0 for x in h]
    mean = second = 0.0
    for dealer in range(s):  # the block lies here with probability h / n
        others = [q[i] for i in range(s) if i != dealer]
        m, v = 1 + sum(others), sum(p * (1 - p) for p in others)
        mean += h[dealer] / n * m
        second += h[dealer] / n * (v + m * m)
    return mean, second - mean * mean


def strays(count: int, trials: int, p: float) -> float:
    """How many standard deviations a count of successes is off."""
    return abs(count - trials * p) / math.sqrt(max(trials * p * (1 - p), 1e-9))


@pytest.mark.parametrize("common", [(), (2, 4)])
@pytest.mark.parametrize(("n", "s", "k"), SHAPES)
def test_every_block_is_held_equally_often(n, s, k, common):
    """Within the exact law's deviations; each draw is fixed by the seed."""
    n, k = n + len(common), k + len(common)
    per_worker, pairs = Counter(), Counter()
    for hands in deals(n, s, k, N_ROUNDS, seed=7, common_attn=common):
        for worker, hand in enumerate(hands):
            per_worker.update((worker, block) for block in hand)
            pairs.update(combinations([block for block in hand if block not in common], 2))
    rest, n, k = [b for b in range(n) if b not in common], n - len(common), k - len(common)
    mean, variance = holdings_per_round(n, s, k)  # beside common blocks, a deal of its own
    assert math.isclose(mean, s * k / n)  # the law adds up
    for block in rest:
        held = sum(per_worker[worker, block] for worker in range(s))
        assert abs(held - N_ROUNDS * mean) <= 3.5 * math.sqrt(N_ROUNDS * variance), block
    # a worker's hand is a uniform K-subset: every worker sees every block, and every pair of
    # blocks. Dealing in index order keeps the counts above equal and fails here.
    for worker in range(s):
        assert all(per_worker[worker, block] == N_ROUNDS for block in common)
        for block in rest:
            assert strays(per_worker[worker, block], N_ROUNDS, k / n) < 4, (worker, block)
    p2 = k * (k - 1) / (n * (n - 1))
    for pair in combinations(rest, 2):
        # workers of one round are only nearly independent: half a sigma of room
        assert strays(pairs[pair], N_ROUNDS * s, p2) < 4.5, pair


@pytest.mark.parametrize(("n", "s", "k"), SHAPES)
def test_the_balanced_deal_is_much_tighter(n, s, k):
    apart = {}
    for deal in ("random", "balanced"):
        counts, seen = Counter(), set()
        for hands in deals(n, s, k, N_ROUNDS, seed=7, deal=deal):
            check_hands(hands, n, (k,) * s)
            for hand in hands:
                counts.update(hand)
            seen.add(tuple(hands))
            apart[deal] = max(counts.values()) - min(counts.values())
            assert deal == "random" or apart[deal] <= 2
        assert len(seen) > min(N_ROUNDS, 100) / 2  # balanced, and still shuffled
    assert apart["random"] > 2 or s * k == n


def test_balanced_reads_the_counts():
    """Blocks that were held a lot get no extra slot."""
    cfg = BlocksConfig(k_attn=(4,), deal="balanced")
    held = {"layers.0.attn": [0, 0, 50, 0, 50, 0, 0, 50]}
    for r in range(20):
        dealt = generator.for_training(a_map(8), 4, cfg, seed=0, round=r, held=held)
        counts = Counter(block for blueprint in dealt for block in blueprint["layers.0.attn"])
        assert [counts[block] for block in (2, 4, 7)] == [1, 1, 1]  # the covering pass only
    assert held == {"layers.0.attn": [0, 0, 50, 0, 50, 0, 0, 50]}  # a deal changes nothing
    after = generator.counted({"a": [0, 1], "b": [0]}, [{"a": (0, 1), "b": ()}, {"a": (1,)}])
    assert after == {"a": (1, 3), "b": (0,)}


@pytest.mark.parametrize("deal", ["random", "balanced"])
def test_the_partition_changes_where_nothing_is_left_to_draw(deal):
    """At K = N/S the printed algorithm deals the same blocks to the same workers for ever."""
    partitions = {frozenset(hands) for hands in deals(12, 4, 3, 200, deal=deal)}
    assert len(partitions) > 190  # of 15,400: 200 draws have about one repetition


def test_the_fixed_deal_is_the_first_random_one_in_every_round():
    """A control: static subnets, as if nothing were dealt anew."""
    first = next(deals(12, 4, 5, deal="random"))
    assert list(deals(12, 4, 5, 6, deal="fixed")) == [first] * 6


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
        assert set(blueprint) == {group.name for group in block_map.groups}
        assert len(set(blueprint.values())) > 12  # of 16; C(12, 6) = 924 hands, so few meet
    alone = generator.for_training(a_map(12, n_layers=2), 4, cfg, seed=0, round=2)
    for a, b in zip(whole, alone, strict=True):
        assert {name: a[name] for name in b} == b


def two_kinds(seed: int, n_rounds: int = 5) -> list[list[Blueprint]]:
    cfg, block_map = BlocksConfig(k_attn=(6,), k_ffn=(5,)), a_map(12, 8, n_layers=6)
    return [generator.for_training(block_map, 3, cfg, seed=seed, round=r) for r in range(n_rounds)]


def a_bit_of_everything() -> list:
    widths = {"layers.0.attn": 5, "layers.0.ffn": 3}
    ticket = generator.for_deployment(a_map(12, 8), widths, seed=3)
    return [two_kinds(4), list(deals(10, 4, 3, 5, deal="balanced")), ticket]


def test_seeds_and_rounds_give_other_deals_and_a_fresh_process_the_same():
    """Ranks deal without a message, so no deal may hang on Python's salted hash."""
    dealt = [round for seed in (0, 1, 2) for round in two_kinds(seed)]
    assert all(a != b for a, b in combinations(dealt, 2))
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "31337"  # another than here
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
    code += "import json, test_generator; print(json.dumps(test_generator.a_bit_of_everything()))"
    env = os.environ | {"PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == json.loads(json.dumps(a_bit_of_everything()))


def test_deployment_draws_uniform_subsets_that_differ_and_repeat():
    block_map, n_draws = a_map(5, 4, n_layers=2), 2000
    widths = {"layers.0.attn": 2, "layers.0.ffn": 3, "layers.1.attn": 5, "layers.1.ffn": 1}
    seen = {name: Counter() for name in widths}
    for ticket in generator.draws(block_map, widths, seed=11, n=n_draws):
        block_map.check_blueprint(ticket)
        assert block_map.widths(ticket) == widths
        for name, kept in ticket.items():
            seen[name][kept] += 1
    for group in block_map.groups:
        subsets = list(combinations(range(group.n_blocks), widths[group.name]))
        for subset in subsets:
            assert strays(seen[group.name][subset], n_draws, 1 / len(subsets)) <= 4
    block_map = a_map(12, 12, n_layers=4)
    widths = dict.fromkeys(block_map.full_widths(), 6)
    draws = list(generator.draws(block_map, widths, seed=0, n=30))
    draws += [generator.for_deployment(block_map, widths, seed=i) for i in (1, 2, 3)]
    assert all(a != b for a, b in combinations(draws, 2))
    assert draws[7] == generator.for_deployment(block_map, widths, seed=0, draw=7)


@pytest.mark.parametrize("ks", [(6, 6, 6, 6), (12, 6, 6, 6), (3, 3, 3, 3)])
def test_smaller_workers_hold_the_first_of_the_order_in_turn(ks):
    """Every block is held in every round; the others' blocks are as random as ever."""
    block_map = a_map(12, 12)
    order = {
        "layers.0.attn": tuple(range(11, -1, -1)),
        "layers.0.ffn": (5, 3, *range(6, 12), 0, 1, 2, 4),
    }
    cfg = BlocksConfig(k_attn=ks, k_ffn=ks, widths="worker", deal="order", nested=0.25)
    small, firsts, others = [s for s in range(4) if ks[s] < 12], Counter(), Counter()
    for r in range(300):
        dealt = generator.for_training(block_map, 4, cfg, seed=1, round=r, order=order)
        for name, ranked in order.items():
            hands = [blueprint[name] for blueprint in dealt]
            assert tuple(map(len, hands)) == ks
            assert set().union(*hands) == set(range(12))
            first = small[r % len(small)]
            assert set(hands[first]) == set(ranked[: ks[first]])
            firsts[first] += 1
            others.update(b for s in small if s != first for b in hands[s] if name.endswith("attn"))
    assert set(firsts.values()) == {600 // len(small)}
    if ks[0] == 12:  # a whole worker holds what is left, so that theirs are uniform
        return
    late = [others[b] for b in range(12) if b not in order["layers.0.attn"][: ks[0]]]
    assert max(late) < 1.2 * min(late)
