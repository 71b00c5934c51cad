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
from itertools import combinations

import pytest

from twistlm.config import BlocksConfig
from twistlm.model import generator
from twistlm.model.blocks import BlockGroup, BlockMap, Blueprint

N_ROUNDS = 2000


def a_map(n_attn: int, n_ffn: int = 0, n_layers: int = 1) -> BlockMap:
    """Groups without parameters: the generator must not look at any."""
    groups = []
    for layer in range(n_layers):
        groups.append(BlockGroup(f"layers.{layer}.attn", "attn", layer, n_attn, (), ()))
        if n_ffn:
            groups.append(BlockGroup(f"layers.{layer}.ffn", "ffn", layer, n_ffn, (), ()))
    return BlockMap(tuple(groups))


def deals(n: int, s: int, k: int, n_rounds: int = 1, seed: int = 0, **blocks) -> Iterator[list]:
    """The hands of one attention layer, round by round, as training deals them."""
    block_map, cfg = a_map(n), BlocksConfig(k_attn=(k,), **blocks)
    held = {"layers.0.attn": [0] * n}
    for r in range(n_rounds):
        dealt = generator.for_training(block_map, s, cfg, seed=seed, round=r, held=held)
        held = generator.counted(held, dealt)
        yield [blueprint["layers.0.attn"] for blueprint in dealt]


def some_common(n: int, size: int, turn: int) -> tuple[int, ...]:
    """A few blocks, in any order."""
    return tuple(random.Random(f"{n}/{size}/{turn}").sample(range(n), size))


@cache
def can_cover(n: int, s: int, k: int, n_common: int) -> bool:
    """Whether s workers of k blocks, all with the first `n_common`, can hold every block."""
    everything, common = (1 << n) - 1, (1 << n_common) - 1
    hands = {sum(1 << b for b in hand) for hand in combinations(range(n), k)} if k else set()
    hands = {hand for hand in hands if hand & common == common}
    reached = {0}
    for _ in range(s):
        reached = {union | hand for union in reached for hand in hands}
    return everything in reached


def can_cover_by_serving(n: int, s: int, k: int, n_common: int) -> bool:
    """The same for sizes where the search takes too long: serve uncovered blocks first."""
    if not max(1, n_common) <= k <= n:
        return False
    missing = n - n_common
    for _ in range(s):
        missing -= min(missing, k - n_common)
    return missing == 0


GRID = [(n, s, c) for n in range(1, 13) for s in range(1, 7) for c in range(n + 1)]


def test_serving_uncovered_blocks_first_is_the_search():
    for n in range(1, 6):
        for s in range(1, 4):
            for c in range(n + 1):
                for k in range(n + 2):
                    assert can_cover(n, s, k, c) == can_cover_by_serving(n, s, k, c), (n, s, k, c)


def test_every_deal_of_the_grid_keeps_the_three_constraints():
    n_deals = 0
    for n, s, size in GRID:
        least, most = generator.legal_range(n, s, size)
        for k in range(least, most + 1):
            common = some_common(n, size, turn=k)
            assert len(set(common)) == size
            for hands in deals(n, s, k, 2, seed=n + s, common_attn=common):
                assert len(hands) == s
                for hand in hands:
                    assert len(hand) == k
                    assert list(hand) == sorted(set(hand))
                    assert set(common) <= set(hand)
                assert set().union(*hands) == set(range(n))  # every block is somewhere
                n_deals += 1
    assert n_deals > 2000


@pytest.mark.parametrize("kind", ["attn", "ffn"])
def test_check_refuses_exactly_what_cannot_be_dealt_and_names_the_legal_range(kind):
    block_maps = {n: a_map(n) if kind == "attn" else a_map(1, n) for n in range(1, 13)}
    for n, s, size in GRID:
        legal = [k for k in range(-1, n + 3) if can_cover_by_serving(n, s, k, size)]
        assert generator.legal_range(n, s, size) == (legal[0], legal[-1])
        for k in range(-1, n + 3):
            settings = {f"k_{kind}": (k,), f"common_{kind}": tuple(range(size))}
            if kind == "ffn":
                settings["k_attn"] = (1,)
            cfg = BlocksConfig(**settings)
            if k in legal:
                generator.check(block_maps[n], cfg, s)
            else:
                with pytest.raises(ValueError, match=rf"blocks\.k_{kind} = {k} ") as caught:
                    generator.check(block_maps[n], cfg, s)
                assert f"legal K are {legal[0]}..{legal[-1]}" in str(caught.value)


def test_check_looks_at_every_k_of_a_cycle():
    block_map = a_map(12)
    generator.check(block_map, BlocksConfig(k_attn=(3, 8, 4, 6)), 4)
    with pytest.raises(ValueError, match=r"blocks\.k_attn = 2 .* 3\.\.12"):
        generator.check(block_map, BlocksConfig(k_attn=(6, 2)), 4)
    with pytest.raises(ValueError, match=r"k_attn is empty.* 1\.\.12"):
        generator.check(block_map, BlocksConfig(k_attn=()), 4)


def test_check_does_not_ask_about_a_kind_that_is_shared():
    generator.check(a_map(4), BlocksConfig(k_attn=(2,), k_ffn=(99,)), 2)


@pytest.mark.parametrize("common", [(0, 0), (12,), (-1,)])
def test_common_blocks_must_exist(common):
    with pytest.raises(ValueError, match=r"blocks\.common_attn = .* 0\.\.11"):
        generator.check(a_map(12), BlocksConfig(k_attn=(6,), common_attn=common), 4)


def test_check_of_worker_widths():
    """Feasible exactly if each K holds the common blocks and the rest finds room somewhere."""
    n, s = 4, 3
    for size in range(n + 1):
        for k0 in range(n + 2):
            for k1 in range(n + 2):
                for k2 in range(n + 2):
                    ks = (k0, k1, k2)
                    fits = all(max(1, size) <= k <= n for k in ks)
                    missing = n - size
                    for k in ks:
                        missing -= min(missing, max(0, k - size))
                    cfg = BlocksConfig(k_attn=ks, widths="worker", common_attn=tuple(range(size)))
                    if fits and not missing:
                        generator.check(a_map(n), cfg, s)
                    else:
                        with pytest.raises(ValueError, match=rf"{max(1, size)}\.\.{n}"):
                            generator.check(a_map(n), cfg, s)
    with pytest.raises(ValueError, match=r"one K per worker: 3"):
        generator.check(a_map(n), BlocksConfig(k_attn=(2, 2), widths="worker"), s)


def test_deal_itself_refuses_what_does_not_fit():
    """`check` speaks to users; a deal that leaves a block out must not pass silently either."""
    for n, s, k in ((12, 4, 2), (4, 2, 5)):
        with pytest.raises(ValueError, match="covers every block"):
            next(deals(n, s, k))
    with pytest.raises(ValueError, match="covers every block"):
        next(deals(4, 4, 1, common_attn=(0, 1)))


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


SHAPES = [(12, 4, 6), (12, 4, 4), (10, 4, 3), (9, 2, 7), (8, 3, 4), (5, 6, 2)]


@pytest.mark.parametrize(("n", "s", "k"), SHAPES)
def test_every_block_is_held_equally_often(n, s, k):
    """Within three standard deviations of the exact law; each draw is fixed by the seed."""
    per_block, per_seat, pairs = Counter(), Counter(), Counter()
    for hands in deals(n, s, k, N_ROUNDS, seed=7):
        for worker, hand in enumerate(hands):
            per_block.update(hand)
            per_seat.update((worker, block) for block in hand)
            pairs.update(combinations(hand, 2))
    mean, variance = holdings_per_round(n, s, k)
    assert math.isclose(mean, s * k / n)  # the law adds up
    sigma = math.sqrt(N_ROUNDS * variance)
    for block in range(n):
        assert abs(per_block[block] - N_ROUNDS * mean) <= 3 * sigma, block

    # a worker's hand is a uniform K-subset: every seat sees every block, and every pair of blocks.
    # Dealing in index order keeps the counts above equal and fails here.
    def strays(count: int, trials: int, p: float) -> float:
        return abs(count - trials * p) / math.sqrt(trials * p * (1 - p))

    for worker in range(s):
        for block in range(n):
            assert strays(per_seat[worker, block], N_ROUNDS, k / n) < 4, (worker, block)
    p2 = k * (k - 1) / (n * (n - 1))
    for pair in combinations(range(n), 2):
        # workers of one round are only nearly independent: half a sigma of room
        assert strays(pairs[pair], N_ROUNDS * s, p2) < 4.5, pair


def test_common_blocks_are_held_always_and_the_others_equally():
    n, s, k, common = 9, 3, 5, (2, 7)
    counts = Counter()
    for hands in deals(n, s, k, N_ROUNDS, seed=1, common_attn=common):
        for hand in hands:
            counts.update(hand)
    assert all(counts[block] == s * N_ROUNDS for block in common)
    mean, variance = holdings_per_round(n - 2, s, k - 2)  # the rest is a deal of its own
    for block in set(range(n)) - set(common):
        assert abs(counts[block] - N_ROUNDS * mean) <= 3 * math.sqrt(N_ROUNDS * variance), block


@pytest.mark.parametrize(("n", "s", "k"), SHAPES)
def test_the_balanced_deal_is_much_tighter(n, s, k):
    counts, last = Counter(), set()
    for r, hands in enumerate(deals(n, s, k, N_ROUNDS, seed=7, deal="balanced")):
        assert set().union(*hands) == set(range(n))
        assert all(len(set(hand)) == k for hand in hands)
        for hand in hands:
            counts.update(hand)
        last.add(tuple(hands))
        assert max(counts.values()) - min(counts.values()) <= 2, r
    assert sum(counts.values()) == N_ROUNDS * s * k
    assert len(last) > min(N_ROUNDS, 100) / 2  # balanced, and still shuffled


def test_the_random_deal_is_not_balanced():
    """Otherwise the test above would not tell the two apart."""
    counts = Counter()
    for hands in deals(12, 4, 6, N_ROUNDS, seed=7):
        for hand in hands:
            counts.update(hand)
    assert max(counts.values()) - min(counts.values()) > 20


@pytest.mark.parametrize("deal", ["random", "balanced"])
def test_the_partition_changes_where_nothing_is_left_to_draw(deal):
    """At K = N/S the printed algorithm deals the same blocks to the same workers for ever."""
    partitions = set()
    for hands in deals(12, 4, 3, 200, deal=deal):
        assert sorted(block for hand in hands for block in hand) == list(range(12))
        partitions.add(frozenset(hands))
    # 12!/(3!^4 4!) = 15,400 partitions: 200 draws have about one repetition
    assert len(partitions) > 190


def two_kinds(seed: int, n_rounds: int = 5) -> list[list[Blueprint]]:
    cfg = BlocksConfig(k_attn=(6,), k_ffn=(5,))
    block_map = a_map(12, 8, n_layers=6)
    return [generator.for_training(block_map, 3, cfg, seed=seed, round=r) for r in range(n_rounds)]


def test_seeds_give_other_deals_and_the_same_seed_the_same():
    assert two_kinds(0) == two_kinds(0)
    runs = [two_kinds(seed) for seed in (0, 1, 2)]
    for a, b in combinations(runs, 2):
        assert all(x != y for x, y in zip(a, b, strict=True))
    for run in runs:
        assert all(a != b for a, b in combinations(run, 2))  # and so do rounds


def a_bit_of_everything() -> list:
    widths = {"layers.0.attn": 5, "layers.0.ffn": 3}
    ticket = generator.for_deployment(a_map(12, 8), widths, seed=3)
    return [two_kinds(4), list(deals(10, 4, 3, 5, deal="balanced")), ticket]


def test_a_fresh_process_deals_the_same():
    """Ranks deal without a message, so no deal may hang on Python's salted hash."""
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "31337"  # another than here
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
    code += "import json, test_generator; print(json.dumps(test_generator.a_bit_of_everything()))"
    env = os.environ | {"PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == json.loads(json.dumps(a_bit_of_everything()))


@pytest.mark.parametrize("deal", ["random", "balanced"])
def test_worker_widths(deal):
    """Each worker has its own K, down to |C|, and together they still hold everything."""
    for ks in ((8, 2, 5), (1, 1, 10), (12, 1, 1), (4, 4, 4), (2, 11, 3)):
        cfg = BlocksConfig(k_attn=ks, k_ffn=(8, 3, 1), widths="worker", common_ffn=(5,), deal=deal)
        block_map = a_map(12, 8)
        generator.check(block_map, cfg, 3)
        seen = Counter()
        for r in range(200):
            dealt = generator.for_training(block_map, 3, cfg, seed=0, round=r)
            attn = [blueprint["layers.0.attn"] for blueprint in dealt]
            ffn = [blueprint["layers.0.ffn"] for blueprint in dealt]
            assert tuple(map(len, attn)) == ks
            assert tuple(map(len, ffn)) == (8, 3, 1)
            assert set().union(*attn) == set(range(12))
            assert set().union(*ffn) == set(range(8))
            assert all(5 in hand for hand in ffn)
            seen.update(attn[0])
        p = ks[0] / 12
        sigma = math.sqrt(200 * p * (1 - p))
        assert all(abs(seen[block] - 200 * p) <= 4 * sigma for block in range(12)), ks


def test_a_cycle_of_widths_follows_the_round():
    cfg = BlocksConfig(k_attn=(3, 8, 4, 6), k_ffn=(2, 7))
    for r in range(12):
        dealt = generator.for_training(a_map(12, 8, n_layers=2), 4, cfg, seed=0, round=r)
        for blueprint in dealt:
            for name, kept in blueprint.items():
                assert len(kept) == (
                    (3, 8, 4, 6)[r % 4] if name.endswith("attn") else (2, 7)[r % 2]
                )
        assert generator.widths_in_round(cfg, "attn", 4, r) == [(3, 8, 4, 6)[r % 4]] * 4


def test_each_layer_and_kind_draws_its_own_deal():
    block_map = a_map(12, 12, n_layers=8)
    cfg = BlocksConfig(k_attn=(6,), k_ffn=(6,))
    for blueprint in generator.for_training(block_map, 4, cfg, seed=0, round=0):
        assert set(blueprint) == {group.name for group in block_map.groups}
        assert len(set(blueprint.values())) > 12  # of 16; C(12, 6) = 924 hands, so few meet
    ticket = generator.for_deployment(block_map, dict.fromkeys(blueprint, 6), seed=0)
    assert len(set(ticket.values())) > 12


def test_a_deal_hangs_on_its_own_layer_alone():
    """Sharing another layer, or cutting attention only, must not change what a layer is dealt."""
    cfg = BlocksConfig(k_attn=(6,), k_ffn=(6,))
    whole = generator.for_training(a_map(12, 12, n_layers=3), 4, cfg, seed=0, round=2)
    alone = generator.for_training(a_map(12, n_layers=2), 4, cfg, seed=0, round=2)
    for a, b in zip(whole, alone, strict=True):
        assert {name: a[name] for name in b} == b


def test_balanced_reads_the_counts():
    """Blocks that were held a lot get no extra slot."""
    cfg = BlocksConfig(k_attn=(4,), deal="balanced")
    held = {"layers.0.attn": [0, 0, 50, 0, 50, 0, 0, 50]}
    for r in range(20):
        dealt = generator.for_training(a_map(8), 4, cfg, seed=0, round=r, held=held)
        counts = Counter(block for blueprint in dealt for block in blueprint["layers.0.attn"])
        assert [counts[block] for block in (2, 4, 7)] == [1, 1, 1]  # the covering pass only
    assert held == {"layers.0.attn": [0, 0, 50, 0, 50, 0, 0, 50]}  # a deal changes nothing


def test_count_adds_one_round():
    held = {"a": [0, 1, 0], "b": [0, 0]}
    after = generator.counted(held, [{"a": (0, 2), "b": (1,)}, {"a": (1, 2), "b": (1,)}])
    assert after == {"a": (1, 2, 2), "b": (0, 2)}
    assert held == {"a": [0, 1, 0], "b": [0, 0]}


def test_deployment_draws_uniform_subsets():
    block_map = a_map(5, 4, n_layers=2)
    widths = {"layers.0.attn": 2, "layers.0.ffn": 3, "layers.1.attn": 5, "layers.1.ffn": 1}
    seen = {name: Counter() for name in widths}
    n_draws = 2000
    for draw in range(n_draws):
        ticket = generator.for_deployment(block_map, widths, seed=11, draw=draw)
        block_map.check_blueprint(ticket)
        assert block_map.widths(ticket) == widths
        for name, kept in ticket.items():
            seen[name][kept] += 1
    for group in block_map.groups:
        subsets = list(combinations(range(group.n_blocks), widths[group.name]))
        p = 1 / len(subsets)
        for subset in subsets:
            off = abs(seen[group.name][subset] - n_draws * p)
            assert off <= 4 * math.sqrt(n_draws * p * (1 - p)), (group.name, subset)


def test_deployment_draws_differ_and_repeat():
    block_map = a_map(12, 12, n_layers=4)
    widths = dict.fromkeys((group.name for group in block_map.groups), 6)
    draws = [generator.for_deployment(block_map, widths, seed=0, draw=i) for i in range(30)]
    draws += [generator.for_deployment(block_map, widths, seed=i) for i in (1, 2, 3)]
    assert all(a != b for a, b in combinations(draws, 2))
    assert draws[7] == generator.for_deployment(block_map, widths, seed=0, draw=7)


def test_the_fixed_deal_is_the_first_random_one_in_every_round():
    """A control: static subnets, as if nothing were dealt anew."""
    first, *others = deals(12, 4, 5, n_rounds=6, deal="fixed")
    assert all(deal == first for deal in others)
    assert first == next(iter(deals(12, 4, 5, deal="random")))
    assert len({str(deal) for deal in deals(12, 4, 5, n_rounds=6, deal="random")}) == 6
