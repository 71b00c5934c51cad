"""From a budget to widths, on maps whose costs are counted by hand; nothing is cut."""

import itertools

import pytest

from twistlm.model.blocks import BlockGroup, BlockMap, Partition, count
from twistlm.tickets.requests import Budget, TicketRequest
from twistlm.tickets.widths import fit as fit_budget
from twistlm.tickets.widths import linear_latency, measured_widths


def test_amounts():
    for kind, text, want in (
        ("params", "1.5B", 1_500_000_000), ("params", "123,456", 123_456),
        ("params", "12_345", 12_345), ("params", " 7 k ", 7000),
        ("params", "9223372036854775807", 2**63 - 1), ("size", "60MiB", 62_914_560),
        ("size", "1.9b", 1), ("latency", "0.5s", 500), ("latency", "250us", 0.25),
    ):  # fmt: skip
        assert TicketRequest(**{kind: text}).budget == Budget(kind, text, want)


def test_no_budgets():
    for options, words in (
        *(({"params": t}, "--params '.*' is no amount") for t in ("M", "-5M", "8 5M", "1e6")),
        *(({"latency": text}, "--latency '.*' is no amount") for text in ("12", "12MB", "nan")),
        ({"params": "10000000000G"}, r"legal are less than 2\^63"),  # no record holds it
        ({"ratio": "1/2", "params": "1M"}, r"one budget .*\(given: --ratio and --params\)"),
        ({"params": ("1M", "1M")}, "params-1M is asked for twice"),
        ({"memory": "1MB"}, "--memory and --context go together"),
    ):
        with pytest.raises(ValueError, match=words):
            print(TicketRequest(**options).budget)


def a_map(n_layers: int, n_attn: int, n_ffn: int, attn: int, ffn: int):
    """A map whose blocks have `attn` and `ffn` parameters each and 10 are shared; its price."""
    groups = []
    for layer, kind in itertools.product(range(n_layers), ("attn", "ffn")):
        n, chunk = (n_attn, attn) if kind == "attn" else (n_ffn, ffn)
        name = f"{layer}.{kind}"
        groups.append(BlockGroup(name, kind, layer, n, (Partition(name, 0, chunk),), (name,)))
    shapes = {g.name: (g.n_blocks * g.parts[0].chunk,) for g in groups}
    block_map = BlockMap(tuple(groups))
    return block_map, lambda widths: count(block_map, shapes | {"shared": (10,)}, widths)


def fit(block_map, cost, legal=None, **what: str):
    (widths,) = fit_budget(TicketRequest(**what).budget, block_map, cost, legal)
    return widths


def test_the_fit_is_exact_for_every_budget():
    """Every number of parameters from the least to beyond all, counted by hand."""
    block_map, cost = a_map(3, 4, 6, attn=7, ffn=3)
    groups = block_map.groups

    def n_params(widths):
        return 10 + sum(widths[g.name] * (7 if g.kind == "attn" else 3) for g in groups)

    least, most = 10 + 3 * (7 + 3), 10 + 3 * (4 * 7 + 6 * 3)
    seen = []
    for limit in range(least, most + 5):
        widths = fit(block_map, cost, params=str(limit))
        seen.append(n_params(widths))
        assert seen[-1] <= limit
        for g in groups:
            assert 1 <= widths[g.name] <= g.n_blocks
            larger = widths | {g.name: widths[g.name] + 1}
            assert widths[g.name] == g.n_blocks or n_params(larger) > limit
    assert seen == sorted(seen)
    assert seen[-1] == most


def test_the_fit_is_as_even_as_it_can_be():
    """Widths of equal blocks differ by one at most, spread over depth; of others, so do shares."""
    block_map, cost = a_map(8, 12, 12, attn=1, ffn=1)
    for n_extra in range(16):
        widths = fit(block_map, cost, params=str(10 + 16 * 5 + n_extra))
        assert sorted(widths.values()) == [5] * (16 - n_extra) + [6] * n_extra
        longer = [layer for layer in range(8) if widths[f"{layer}.attn"] == 6]
        assert abs(sum(layer < 4 for layer in longer) - sum(layer >= 4 for layer in longer)) <= 1
        kinds = [sum(widths[f"{layer}.{kind}"] for layer in range(8)) for kind in ("attn", "ffn")]
        assert abs(kinds[0] - kinds[1]) <= 1
    block_map, cost = a_map(4, 3, 12, attn=5, ffn=5)
    for limit in range(60, 330, 7):
        widths = fit(block_map, cost, params=str(limit))
        shares = [widths[g.name] / g.n_blocks for g in block_map.groups]
        assert max(shares) - min(shares) <= 1 / 3 + 1e-9


def test_the_largest_of_legal_widths_is_the_least_cut():
    """Blocks of 20 and 5 parameters: the kind that is cut most decides, then all blocks."""
    block_map, cost = a_map(1, 3, 12, attn=20, ffn=5)
    legal = [{"0.attn": a, "0.ffn": f} for a in (3, 2, 1) for f in (12, 8, 4, 2)]
    best = {130: (3, 12), 129: (2, 12), 109: (2, 8), 89: (1, 8), 69: (1, 4), 49: (1, 2)}
    for limit, (attn, ffn) in best.items():
        found = fit(block_map, cost, legal, params=str(limit))
        assert found == {"0.attn": attn, "0.ffn": ffn}, limit


def test_latency_takes_the_largest_uniform_widths_that_were_measured_to_fit():
    """A clock of 1 ms per block that is read seldom; between two sizes it lies on a line."""
    block_map, _ = a_map(4, 12, 12, attn=1, ffn=1)
    read = []

    def clock(widths) -> float:
        read.append(widths)
        return float(sum(widths.values()))

    wanted = {"40ms": [5, 4, 3, 2, 1], "39.9ms": [4, 3, 2, 1], "8ms": [1]}
    for text, want in wanted.items():
        read.clear()
        found = fit_budget(TicketRequest(latency=text).budget, block_map, clock)
        assert [widths["0.attn"] for widths in found] == want
        assert len(read) <= 5
    even = {group.name: 3 for group in block_map.groups}
    line = linear_latency(block_map, clock, even)
    for widths in (even, even | {"0.attn": 1}, even | {"0.attn": 4, "1.ffn": 6}):
        assert line(widths) == pytest.approx(clock(widths))


def test_latency_of_stock_widths_takes_the_least_cut_that_fits():
    """Among all legal widths, by the share of the kind that is cut most, in few readings."""
    block_map, _ = a_map(2, 4, 12, attn=1, ffn=1)
    full, read = block_map.full_widths(), []

    def clock(widths) -> float:
        read.append(widths)
        return float(sum(widths.values()))

    def least(widths) -> float:
        return min(k / full[name] for name, k in widths.items())

    legal = [
        {g.name: attn if g.kind == "attn" else ffn for g in block_map.groups}
        for attn in (1, 4) for ffn in range(1, 13)
    ]  # fmt: skip
    for limit in range(4, 34):
        read.clear()
        budget = TicketRequest(latency=f"{limit}ms").budget
        best, *smaller = fit_budget(budget, block_map, clock, legal)
        assert best in legal
        assert least(best) == max(least(w) for w in legal if sum(w.values()) <= limit)
        assert all(sum(w.values()) < sum(best.values()) for w in smaller)
        assert len(read) <= 6


def test_the_budget_goes_where_it_hurts_least():
    """Against every combination of widths: losses that fall with the blocks, at other paces."""
    block_map, cost = a_map(2, 4, 4, attn=7, ffn=3)
    pace = {"0.attn": 9.0, "0.ffn": 1.0, "1.attn": 2.0, "1.ffn": 4.0}

    def loss(widths) -> float:
        return sum(pace[name] / k for name, k in widths.items())

    every = [dict(zip(pace, ks, strict=True)) for ks in itertools.product(range(1, 5), repeat=4)]
    gaps = []
    for limit in range(10 + 20, 10 + 80, 3):
        even = fit(block_map, cost, params=str(limit))
        found = measured_widths(block_map, even, limit, cost, loss)
        assert cost(found) <= limit
        assert loss(found) <= loss(even)
        best = min(loss(w) for w in every if cost(w) <= limit)
        gaps.append((loss(even) - best, loss(found) - best))
        larger = [found | {n: k + 1} for n, k in found.items() if k < 4]
        assert all(cost(w) > limit for w in larger)  # to the last block
        flat = measured_widths(block_map, even, limit, cost, lambda _: 1.0)
        assert flat == even  # a text that says nothing: even widths win ties
    evens, ours = (sum(gap) for gap in zip(*gaps, strict=True))
    assert ours < 0.25 * evens
