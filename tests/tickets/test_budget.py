"""From a budget to widths, on maps whose costs are counted by hand; nothing is cut."""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
from safetensors.torch import save_file

from twistlm.model.blocks import BlockGroup, BlockMap, Partition
from twistlm.tickets import budget, sensitivity
from twistlm.tickets.budget import Budget, Costs, parse_budget
from twistlm.tickets.pick import Pick, parse_pick


@pytest.mark.parametrize(
    ("kind", "text", "want"),
    [("params", "85M", 85_000_000), ("params", "1.5B", 1_500_000_000), ("params", "0.0001M", 100),
     ("params", "123,456", 123_456), ("params", "12_345", 12_345), ("params", " 7 k ", 7000),
     ("size", "60MB", 60_000_000), ("size", "60MiB", 62_914_560), ("size", "1.5kb", 1500),
     ("size", "1.9b", 1), ("size", "1000", 1000), ("latency", "12ms", 12), ("latency", "0.5s", 500),
     ("latency", "250us", 0.25), ("params", "9223372036854775807", 2**63 - 1)],
)  # fmt: skip
def test_amounts(kind, text, want):
    assert parse_budget(**{kind: text}) == Budget(kind, text, want)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"params": text}, r"--params '.*' is no amount such as .* \(units: ")
          for text in ("85Q", "M", "-5M", "8 5M", "1e6")),
        *(({"size": text}, "--size '.*' is no amount") for text in ("60ms", "", "6.MB")),
        *(({"latency": text}, "--latency '.*' is no amount") for text in ("12", "12MB", "nan")),
        *(({"params": text}, r"--params \d+G?: legal are less than 2\^63")  # no record holds it
          for text in ("9" * 400, "9223372036854775808", "10000000000G", "9" * 9999)),
        ({}, r"exactly one of .*\(given: none\)"),
        ({"ratio": "1/2", "params": "1M"}, r"\(given: --ratio and --params\)"),
        ({"size": "1MB", "latency": "1ms", "ratio": None}, r"\(given: --size and --latency\)"),
        ({"memory": "1MB"}, "--memory and --context go together"),
        ({"params": "1M", "context": "32"}, "--memory and --context go together"),
        ({"memory": "2GB", "context": "0"}, "--context 0: must be 1 token at least"),
    ],
)  # fmt: skip
def test_no_budgets(options, words):
    with pytest.raises(ValueError, match=words):
        parse_budget(**options)


def test_picks():
    for text, want in {
        "random": Pick("random"),
        "best-of:12": Pick("best-of:12", n_draws=12),
        "importance": Pick("importance", method="fisher"),
        "importance:taylor": Pick("importance:taylor", method="taylor"),
    }.items():
        assert parse_pick(text) == want
    wrong = ("", "best", "best-of", "best-of:0", "best-of:-1", "best-of:x", "importance:",
             "importance:hessian", "random:3", "fisher")  # fmt: skip
    for text in wrong:
        with pytest.raises(ValueError, match="use nested, random, best-of:N, importance"):
            parse_pick(text)


def a_map(n_layers: int, n_attn: int, n_ffn: int, attn: int, ffn: int):
    """A map whose blocks have `attn` and `ffn` parameters each, and 10 shared parameters."""
    groups = []
    for layer, kind in itertools.product(range(n_layers), ("attn", "ffn")):
        n, chunk = (n_attn, attn) if kind == "attn" else (n_ffn, ffn)
        name = f"{layer}.{kind}"
        groups.append(BlockGroup(name, kind, layer, n, (Partition(name, 0, chunk),), (name,)))
    shapes = {g.name: (g.n_blocks * g.parts[0].chunk,) for g in groups}
    return BlockMap(tuple(groups)), shapes | {"shared": (10,)}


def never(widths) -> float:
    raise AssertionError("nothing is measured for this budget")


def fit(block_map, shapes, **what: str):
    (widths,) = budget.fit(parse_budget(**what), Costs(block_map, shapes, "float32", never))
    return widths


def test_the_fit_is_exact_for_every_budget():
    """Every number of parameters from the least to beyond all, counted by hand."""
    block_map, shapes = a_map(3, 4, 6, attn=7, ffn=3)
    groups = block_map.groups

    def n_params(widths):
        return 10 + sum(widths[g.name] * (7 if g.kind == "attn" else 3) for g in groups)

    least, most = 10 + 3 * (7 + 3), 10 + 3 * (4 * 7 + 6 * 3)
    seen = []
    for limit in range(least, most + 5):
        widths = fit(block_map, shapes, params=str(limit))
        seen.append(n_params(widths))
        assert seen[-1] <= limit
        for g in groups:
            assert 1 <= widths[g.name] <= g.n_blocks
            larger = widths | {g.name: widths[g.name] + 1}
            assert widths[g.name] == g.n_blocks or n_params(larger) > limit
    assert seen == sorted(seen)
    assert seen[-1] == most
    for limit in (0, least - 1):
        with pytest.raises(ValueError, match=rf"impossible: .* takes {least} parameters"):
            fit(block_map, shapes, params=str(limit))


def test_the_fit_is_as_even_as_it_can_be():
    """Widths of equal blocks differ by one at most, spread over depth; of others, so do shares."""
    block_map, shapes = a_map(8, 12, 12, attn=1, ffn=1)
    for n_extra in range(16):
        widths = fit(block_map, shapes, params=str(10 + 16 * 5 + n_extra))
        assert sorted(widths.values()) == [5] * (16 - n_extra) + [6] * n_extra
        longer = [layer for layer in range(8) if widths[f"{layer}.attn"] == 6]
        assert abs(sum(layer < 4 for layer in longer) - sum(layer >= 4 for layer in longer)) <= 1
        kinds = [sum(widths[f"{layer}.{kind}"] for layer in range(8)) for kind in ("attn", "ffn")]
        assert abs(kinds[0] - kinds[1]) <= 1
    block_map, shapes = a_map(4, 3, 12, attn=5, ffn=5)
    for limit in range(60, 330, 7):
        widths = fit(block_map, shapes, params=str(limit))
        shares = [widths[g.name] / g.n_blocks for g in block_map.groups]
        assert max(shares) - min(shares) <= 1 / 3 + 1e-9
    rungs = budget.ladder(block_map)
    assert set(rungs[0].values()) == {1}
    assert rungs[-1] == block_map.full_widths()
    for low, high in itertools.pairwise(rungs):
        assert {high[name] - low[name] for name in low} in ({0, 1}, {1})


def test_the_largest_of_legal_widths_is_the_least_cut():
    """Blocks of 20 and 5 parameters: the kind that is cut most decides, then all blocks."""
    block_map, shapes = a_map(1, 3, 12, attn=20, ffn=5)
    legal = [{"0.attn": a, "0.ffn": f} for a in (3, 2, 1) for f in (12, 8, 4, 2)]
    costs = Costs(block_map, shapes, "float32", never)
    best = {130: (3, 12), 129: (2, 12), 109: (2, 8), 89: (1, 8), 69: (1, 4), 49: (1, 2)}
    for limit, (attn, ffn) in best.items():
        (found,) = budget.fit(parse_budget(params=str(limit)), costs, legal)
        assert found == {"0.attn": attn, "0.ffn": ffn}, limit
    with pytest.raises(ValueError, match="takes 40 parameters"):
        budget.fit(parse_budget(params="39"), costs, legal)


def test_latency_climbs_to_the_highest_rung_that_was_measured_to_fit():
    """A clock of 1 ms per block that is read seldom; between two rungs it lies on a line."""
    block_map, shapes = a_map(4, 12, 12, attn=1, ffn=1)
    read = []

    def clock(widths) -> float:
        read.append(widths)
        return float(sum(widths.values()))

    costs = Costs(block_map, shapes, "float32", clock)
    wanted = {"40ms": [5, 4, 3, 2, 1], "39.9ms": [4, 3, 2, 1], "8ms": [1]}
    for text, want in wanted.items():
        read.clear()
        found = budget.fit(parse_budget(latency=text), costs)
        assert [widths["0.attn"] for widths in found] == want
        assert len(read) <= 5
    with pytest.raises(ValueError, match=r"--latency 7ms is impossible: .* takes 8.00 ms"):
        budget.fit(parse_budget(latency="7ms"), costs)
    even = {group.name: 3 for group in block_map.groups}
    line = budget.predicted(costs, even)
    for widths in (even, even | {"0.attn": 1}, even | {"0.attn": 4, "1.ffn": 6}):
        assert line(widths) == pytest.approx(clock(widths))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_bytes_are_those_of_the_file(tmp_path, name):
    """Lengths of numbers and padding in the header, over random shapes."""
    rng = random.Random(0)
    for i in range(40):
        shapes = {
            f"{'x' * rng.randrange(1, 20)}.{j}": tuple(
                rng.choices(range(1, 40), k=rng.randrange(3))
            )
            for j in range(rng.randrange(1, 12))
        }
        tensors = {key: torch.zeros(s, dtype=getattr(torch, name)) for key, s in shapes.items()}
        save_file(tensors, tmp_path / f"{i}.safetensors", {"format": "pt"})
        size = os.stat(tmp_path / f"{i}.safetensors").st_size
        assert budget.weights_bytes(shapes, name) == size


def test_the_budget_goes_where_it_hurts_least():
    """Against every combination of widths: losses that fall with the blocks, at other paces."""
    block_map, shapes = a_map(2, 4, 4, attn=7, ffn=3)
    pace = {"0.attn": 9.0, "0.ffn": 1.0, "1.attn": 2.0, "1.ffn": 4.0}

    def loss(widths) -> float:
        return sum(pace[name] / k for name, k in widths.items())

    costs = Costs(block_map, shapes, "float32", never)
    every = [dict(zip(pace, ks, strict=True)) for ks in itertools.product(range(1, 5), repeat=4)]
    gaps = []
    for limit in range(10 + 20, 10 + 80, 3):
        (even,) = budget.fit(parse_budget(params=str(limit)), costs)
        found = sensitivity.measured_widths(block_map, even, limit, costs.parameters, loss)
        assert costs.parameters(found.widths) <= limit
        assert found.loss == pytest.approx(loss(found.widths))
        assert found.loss <= found.even == pytest.approx(loss(even))
        best = min(loss(w) for w in every if costs.parameters(w) <= limit)
        gaps.append((found.even - best, found.loss - best))
        larger = [found.widths | {n: k + 1} for n, k in found.widths.items() if k < 4]
        assert all(costs.parameters(w) > limit for w in larger)  # to the last block
        flat = sensitivity.measured_widths(block_map, even, limit, costs.parameters, lambda _: 1.0)
        assert flat.widths == even  # a text that says nothing: even widths win ties
    evens, ours = (sum(gap) for gap in zip(*gaps, strict=True))
    assert ours < 0.25 * evens


@pytest.mark.parametrize(
    ("k", "below", "above", "want"),
    [
        (6, 2.0, 0.5, (range(3, 10), 2.0, 0.5)),
        (6, 0.5, 2.0, (range(3, 10), 1.25, 1.25)),  # noise: one price for all
        (2, 2.0, 0.5, (range(1, 6), 2.0, 0.5)),  # one block below, three above
        (12, 2.0, 0.5, (range(9, 13), 2.0, 0.0)),
    ],
)
def test_what_a_block_of_a_layer_is_worth(k, below, above, want):
    """A loss that falls by `below` for each block up to k and by `above` for each beyond it."""
    block_map, _ = a_map(1, 4, 12, attn=1, ffn=1)

    def loss(widths) -> float:
        n = widths["0.ffn"]
        return 9 - below * min(n - k, 0) - above * max(n - k, 0)

    found = sensitivity._slopes(block_map["0.ffn"], {"0.attn": 4, "0.ffn": k}, 9.0, 4, loss)
    assert found == want
