"""A ticket for a budget: what is promised is counted again from the files that were written."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import in_process, snapshot
from conftest import make_tokens, tiny
from families_table import TABLE, far, logits, tiny_model
from safetensors.torch import load_file, save_file

from twistlm.compute import speed
from twistlm.compute.perplexity import Text, perplexity
from twistlm.data.token_file import open_tokens
from twistlm.model import generator, huggingface
from twistlm.model.blocks import BlockGroup, BlockMap, Partition, widths_of_ratio
from twistlm.model.count import count
from twistlm.model.families import n_cached
from twistlm.model.layout import cut_segments
from twistlm.tickets import budget, certify, deploy, extract, importance, lost_nodes, sensitivity
from twistlm.tickets.budget import Budget, Costs, parse_budget
from twistlm.tickets.calibration import calibrate, calibrate_on_tokens
from twistlm.tickets.parent import Parent, open_parent
from twistlm.tickets.pick import Pick, parse_pick
from twistlm.tickets.requests import CertificateRequest, ScoreRequest, TicketRequest
from twistlm.tickets.score import score_parent
from twistlm.training import rounds

SEQ_LEN = 16
CUT_AS_TRAINED = ("blocks.n_ffn=4", "blocks.shared_first=1", "blocks.shared_last=0")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Hugging Face folders of tiny models, and token files."""
    folder = tmp_path_factory.mktemp("choose")
    for name in ("gpt2", "llama", "llama-gqa", "qwen3"):
        tiny_model(name).save_pretrained(folder / name)
    make_tokens(folder / "text", 2000)
    make_tokens(folder / "other", 2000, seed=7)
    return folder


FIXED = (
    "blocks.n_ffn=6",
    "blocks.shared_first=0",
    "blocks.shared_last=0",
    f"data.seq_len={SEQ_LEN}",
)


def open_(home: Path, name: str, *overrides: str) -> Parent:
    return open_parent(home / name, "cpu", [*FIXED, *overrides])


def ask(home: Path, folder: Path, name: str = "gpt2", *, pick: str = "random", seed: int = 0,
        data: str | None = None, tokens: int = 0, dtype: str = "float32", spend: str = "measured",
        stock: bool = False, overrides: tuple[str, ...] = (), **what: str):  # fmt: skip
    """Write a ticket; returns its parent and its ticket.json."""
    opened = open_(home, name, *overrides)
    request = TicketRequest(
        **what,
        pick=pick,
        seed=seed,
        data=str(home / data) if data else None,
        tokens=tokens,
        dtype=dtype,
        spend=spend,
        stock=stock,
    )
    extract.write(opened, folder, request, quiet=True)
    return opened, json.loads((folder / "ticket.json").read_text())


def recount(folder: Path) -> tuple[int, int]:
    """Parameters in the weights file, and its bytes on disk."""
    file = folder / "model.safetensors"
    return sum(t.numel() for t in load_file(file).values()), os.stat(file).st_size


# ---------------------------------------------------------------- amounts


@pytest.mark.parametrize(
    ("kind", "text", "want"),
    [
        ("params", "85M", 85_000_000),
        ("params", "1.5B", 1_500_000_000),
        ("params", "0.0001M", 100),
        ("params", "123,456", 123_456),
        ("params", "12_345", 12_345),
        ("params", " 7 k ", 7000),
        ("size", "60MB", 60_000_000),
        ("size", "60MiB", 62_914_560),
        ("size", "1.5kb", 1500),
        ("size", "1.9b", 1),
        ("size", "1000", 1000),
        ("latency", "12ms", 12),
        ("latency", "0.5s", 500),
        ("latency", "250us", 0.25),
    ],
)
def test_amounts(kind, text, want):
    assert parse_budget(**{kind: text}) == Budget(kind, text, want)


@pytest.mark.parametrize("text", ["9" * 400, "9223372036854775808", "10000000000G", "9" * 9999])
def test_amounts_that_no_record_holds(text):
    """A ticket's own record is refused when it holds more than 63 bits."""
    with pytest.raises(ValueError, match=r"--params \d+G?: legal are less than 2\^63"):
        parse_budget(params=text)
    assert parse_budget(params="9223372036854775807").limit == 2**63 - 1


@pytest.mark.parametrize(
    ("kind", "text"),
    [("params", "85Q"), ("params", "M"), ("params", "-5M"), ("params", "8 5M"), ("params", "1e6"),
     ("size", "60ms"), ("size", ""), ("size", "6.MB"), ("latency", "12"), ("latency", "12MB"), ("latency", "nan")],
)  # fmt: skip
def test_malformed_amounts(kind, text):
    with pytest.raises(ValueError, match=rf"--{kind} '.*' is no amount such as .* \(units: "):
        parse_budget(**{kind: text})


@pytest.mark.parametrize(
    ("options", "given"),
    [({}, "none"), ({"ratio": "1/2", "params": "1M"}, "--ratio and --params"),
     ({"size": "1MB", "latency": "1ms", "ratio": None}, "--size and --latency")],
)  # fmt: skip
def test_exactly_one_budget(options, given):
    with pytest.raises(ValueError, match=rf"exactly one of .*\(given: {given}\)"):
        parse_budget(**options)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("random", Pick("random")),
        ("best-of:12", Pick("best-of:12", n_draws=12)),
        ("importance", Pick("importance", method="fisher")),
        ("importance:taylor", Pick("importance:taylor", method="taylor")),
    ],
)
def test_picks(text, want):
    assert parse_pick(text) == want


@pytest.mark.parametrize(
    "text", ["", "best", "best-of", "best-of:0", "best-of:-1", "best-of:x", "importance:",
             "importance:hessian", "random:3", "fisher"],
)  # fmt: skip
def test_unknown_picks(text):
    with pytest.raises(ValueError, match="use nested, random, best-of:N, importance"):
        parse_pick(text)


# ---------------------------------------------------------------- how a budget is spent


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
        with pytest.raises(
            ValueError, match=rf"impossible: the smallest .* takes {least} parameters"
        ):
            fit(block_map, shapes, params=str(limit))


def test_the_fit_is_as_even_as_it_can_be():
    """Equal blocks: widths differ by one at most, and the extra ones are spread over the depth."""
    block_map, shapes = a_map(8, 12, 12, attn=1, ffn=1)
    for n_extra in range(16):
        widths = fit(block_map, shapes, params=str(10 + 16 * 5 + n_extra))
        assert sorted(widths.values()) == [5] * (16 - n_extra) + [6] * n_extra
        longer = [layer for layer in range(8) if widths[f"{layer}.attn"] == 6]
        halves = [sum(layer < 4 for layer in longer), sum(layer >= 4 for layer in longer)]
        assert abs(halves[0] - halves[1]) <= 1
        kinds = [sum(widths[f"{layer}.{kind}"] for layer in range(8)) for kind in ("attn", "ffn")]
        assert abs(kinds[0] - kinds[1]) <= 1


def test_shares_stay_together_where_kinds_have_other_counts():
    """3 attention blocks beside 12 FFN blocks: no kind runs ahead by more than a block of its own."""
    block_map, shapes = a_map(4, 3, 12, attn=5, ffn=5)
    for limit in range(60, 330, 7):
        widths = fit(block_map, shapes, params=str(limit))
        shares = [widths[g.name] / g.n_blocks for g in block_map.groups]
        assert max(shares) - min(shares) <= 1 / 3 + 1e-9


def test_the_largest_of_legal_widths_is_the_least_cut():
    """Of (attn, FFN) of 3 and 12 blocks with 20 and 5 parameters each: the kind cut most decides, then all blocks."""
    block_map, shapes = a_map(1, 3, 12, attn=20, ffn=5)
    legal = [{"0.attn": a, "0.ffn": f} for a in (3, 2, 1) for f in (12, 8, 4, 2)]
    costs = Costs(block_map, shapes, "float32", never)
    best = {130: (3, 12), 129: (2, 12), 109: (2, 8), 89: (1, 8), 69: (1, 4), 49: (1, 2)}
    for limit, (attn, ffn) in best.items():
        (found,) = budget.fit(parse_budget(params=str(limit)), costs, legal)
        assert found == {"0.attn": attn, "0.ffn": ffn}, limit
    with pytest.raises(ValueError, match="takes 40 parameters"):
        budget.fit(parse_budget(params="39"), costs, legal)


def test_milliseconds_between_measured_widths_lie_on_a_line():
    """2 ms, 0.5 for an attention block and 0.25 for an FFN block: seen from 3 blocks in every layer."""
    block_map, shapes = a_map(2, 4, 6, attn=1, ffn=1)

    def clock(widths) -> float:
        return 2 + sum(
            (0.5 if g.kind == "attn" else 0.25) * widths[g.name] for g in block_map.groups
        )

    even = {group.name: 3 for group in block_map.groups}
    line = budget.predicted(Costs(block_map, shapes, "float32", clock), even)
    for widths in (
        even,
        even | {"0.attn": 1},
        even | {"0.attn": 4, "1.ffn": 6},
        block_map.full_widths(),
    ):
        assert line(widths) == pytest.approx(clock(widths))


def test_the_ladder_climbs_from_one_block_to_all():
    block_map, _ = a_map(2, 3, 12, attn=1, ffn=1)
    rungs = budget.ladder(block_map)
    assert set(rungs[0].values()) == {1}
    assert rungs[-1] == block_map.full_widths()
    for low, high in itertools.pairwise(rungs):
        steps = {high[name] - low[name] for name in low}
        assert steps <= {0, 1}
        assert 1 in steps
    assert {"0.attn": 2, "0.ffn": 8, "1.attn": 2, "1.ffn": 8} in rungs


def test_latency_climbs_to_the_highest_rung_that_was_measured_to_fit():
    """A stand-in clock: 1 ms per block, and it must be read seldom."""
    block_map, shapes = a_map(4, 12, 12, attn=1, ffn=1)
    read = []

    def clock(widths) -> float:
        read.append(widths)
        return float(sum(widths.values()))

    def fits(text: str):
        read.clear()
        found = budget.fit(parse_budget(latency=text), Costs(block_map, shapes, "float32", clock))
        assert len(read) <= 5
        return [widths["0.attn"] for widths in found]

    assert fits("40ms") == [5, 4, 3, 2, 1]
    assert fits("39.9ms") == [4, 3, 2, 1]
    assert fits("8ms") == [1]
    assert fits("1s")[0] == 12
    with pytest.raises(ValueError, match=r"--latency 7ms is impossible: .* takes 8.00 ms"):
        fits("7ms")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_bytes_are_those_of_the_file(tmp_path, name):
    """Lengths of numbers and padding in the header, over random shapes."""
    rng, dtype = random.Random(0), getattr(torch, name)
    for i in range(40):
        shapes = {
            f"{'x' * rng.randrange(1, 20)}.{j}": tuple(
                rng.choices(range(1, 40), k=rng.randrange(3))
            )
            for j in range(rng.randrange(1, 12))
        }
        file = tmp_path / f"{i}.safetensors"
        tensors = {key: torch.zeros(shape, dtype=dtype) for key, shape in shapes.items()}
        save_file(tensors, file, {"format": "pt"})
        assert budget.weights_bytes(shapes, name) == os.stat(file).st_size


# ---------------------------------------------------------------- written tickets


def one_more(opened: Parent, widths: dict[str, int]):
    """All ways to keep one block more."""
    for g in opened.block_map.groups:
        if widths[g.name] < g.n_blocks:
            yield widths | {g.name: widths[g.name] + 1}


def blocks_of(note) -> dict[str, int]:
    return {name: len(kept) for name, kept in note["blueprint"].items()}


@pytest.mark.parametrize(
    ("name", "share", "kind", "dtype"),
    [
        ("gpt2", 0.1, "params", "float32"),
        ("gpt2", 0.8, "size", "float32"),
        ("gpt2", 0.47, "size", "bfloat16"),
        ("llama-gqa", 0.47, "params", "float32"),
        ("llama-gqa", 0.1, "size", "float32"),
        ("qwen3", 0.8, "params", "float32"),
        ("qwen3", 0.47, "size", "float16"),
    ],
)
def test_a_budget_is_met_to_the_last_block(home, tmp_path, name, share, kind, dtype):
    """The files say: within the budget; a ticket with any further block, written too, is over it."""
    opened = open_(home, name)
    measure = 0 if kind == "params" else 1

    def written(widths: dict[str, int]) -> int:
        blueprint = generator.for_deployment(opened.block_map, widths, seed=1)
        deploy.save_ticket(opened, blueprint, tmp_path / "t", dtype=getattr(torch, dtype))
        return recount(tmp_path / "t")[measure]

    least = written(dict.fromkeys(opened.block_map.full_widths(), 1))
    most = written(opened.block_map.full_widths())
    limit = int(least + share * (most - least))
    opened, note = ask(home, tmp_path / "a", name, dtype=dtype, **{kind: str(limit)})
    counted = recount(tmp_path / "a")
    assert counted[measure] <= limit
    assert (note["n_params"], note["bytes"]) == counted
    assert note["budget"] == {
        "kind": kind,
        "asked": str(limit),
        "limit": limit,
        "spent": counted[measure],
    }
    assert all(written(larger) > limit for larger in one_more(opened, blocks_of(note)))
    assert len(set(blocks_of(note).values())) > 1  # spent unevenly

    opened, note = ask(home, tmp_path / "b", name, dtype=dtype, **{kind: str(counted[measure])})
    assert recount(tmp_path / "b") == counted  # what was spent buys the same again
    unit = "parameters" if kind == "params" else "bytes"
    with pytest.raises(ValueError, match=rf"impossible: .* takes {least:,} {unit}"):
        ask(home, tmp_path / "c", name, dtype=dtype, **{kind: str(least - 1)})
    ask(home, tmp_path / "c", name, dtype=dtype, **{kind: str(least)})
    assert recount(tmp_path / "c")[measure] == least


def test_more_than_enough_is_the_whole_parent(home, tmp_path, monkeypatch, capsys):
    model = tiny_model("llama")
    ids = torch.arange(12)[None]
    for i, what in enumerate(({"params": "1B"}, {"size": "1GB"}, {"latency": "100s"})):
        opened, note = ask(home, tmp_path / str(i), "llama", **what)
        assert note["whole"]
        assert blocks_of(note) == opened.block_map.full_widths()
        assert far(logits(deploy.load_ticket(tmp_path / str(i)), ids), logits(model, ids)) < 1e-5
    monkeypatch.chdir(tmp_path)
    args = ["extract", str(home / "llama"), "-o", "whole", "--params", "1B", "--device", "cpu"]
    code, out, err = in_process(monkeypatch, capsys, *args, *FIXED)
    assert (code, err) == (0, "")
    assert "the whole parent" in out


def test_latency_is_met_by_the_ticket_itself(home, tmp_path):
    """The number in the proof was measured on the ticket and lies within the budget."""
    opened = open_(home, "gpt2")
    slow = speed.measure(deploy.cut_ticket(opened, opened.block_map.full())).decode_ms
    _, note = ask(home, tmp_path / "t", "gpt2", latency=f"{50 * slow:.3f}ms")
    assert note["budget"]["spent"] == note["speed"]["decode_ms"] <= note["budget"]["limit"]
    with pytest.raises(ValueError, match=r"--latency 1us is impossible: .* takes \d+\.\d\d ms"):
        ask(home, tmp_path / "u", "gpt2", latency="1us")
    assert not (tmp_path / "u").exists()


def test_a_ticket_over_the_latency_gives_way_to_a_smaller_one(home, tmp_path, monkeypatch):
    """A clock of our own: 1 ms between readings, and 3 ms while the finished ticket is timed."""
    readings, slow = [0.0], range(0)

    def clock() -> float:
        readings.append(readings[-1] + (0.003 if len(readings) in slow else 0.001))
        return readings[-1]

    monkeypatch.setattr(time, "perf_counter", clock)
    _, note = ask(home, tmp_path / "t", latency="2ms")
    assert note["whole"]
    n_readings = len(readings)
    per_measurement = (
        2 * 4 * (1 + note["speed"]["n_steps"])
    )  # begin and end, 4 runs, prompt and steps
    readings, slow = [0.0], range(n_readings - per_measurement, n_readings)
    opened, note = ask(home, tmp_path / "t", latency="2ms")
    assert blocks_of(note) == budget.ladder(opened.block_map)[-2]
    assert note["speed"]["decode_ms"] == note["budget"]["spent"] == pytest.approx(1)
    readings, slow = [0.0], range(n_readings - per_measurement, 10**6)
    with pytest.raises(ValueError, match=r"impossible: the smallest ticket .* takes 3.00 ms"):
        ask(home, tmp_path / "u", latency="2ms")
    assert not (tmp_path / "u").exists()


@pytest.mark.parametrize("name", list(TABLE))
def test_speed_of_every_family(name):
    """The clock runs prompt and cache of each model, within its positions."""
    took = speed.measure(tiny_model(name), n_repeats=1)
    assert took.decode_ms >= took.fastest_decode_ms > 0
    assert took.prefill_ms > 0
    assert took.n_prompt + took.n_steps <= tiny_model(name).config.max_position_embeddings
    assert (took.device, took.n_threads) == ("cpu", torch.get_num_threads())


def test_speed_on_a_busy_machine_ends_after_one_run(monkeypatch):
    """However slow it is, one run is measured after the one that warms up."""
    monkeypatch.setattr(speed, "LONGEST", 0.0)
    assert speed.measure(tiny_model("gpt2")).n_repeats == 1


# ---------------------------------------------------------------- ratios


def test_a_ratio_may_name_layers(home):
    block_map = open_(home, "gpt2").block_map  # 3 layers, 4 heads, 6 FFN blocks
    widths = widths_of_ratio(block_map, "attn=2/4, ffn=1/6, ffn.0=1, attn.2=0.25")
    assert list(widths.values()) == [2, 6, 2, 1, 1, 1]
    alone = widths_of_ratio(block_map, ",".join(f"attn.{i}={i + 1}/4,ffn.{i}=1" for i in range(3)))
    assert list(alone.values()) == [1, 6, 2, 6, 3, 6]
    for bad, match in {
        "attn=1/2,ffn=1/2,ffn.3=1": "'ffn.3' names nothing",
        "attn=1/2,ffn=1/2,ffn.0=1/5": "no whole number of ffn blocks",
        "attn=1/2,ffn.0=1/2": "nothing about ffn of layer 1",
        "attn=1/2,ffn=1/2,heads=1": "'heads' names nothing",
        "0=1/2": "'0' names nothing",
    }.items():
        with pytest.raises(ValueError, match=match):
            widths_of_ratio(block_map, bad)


def test_a_ratio_by_layer_is_what_is_written(home, tmp_path):
    _, note = ask(home, tmp_path / "t", ratio="attn=2/4,ffn=3/6,ffn.1=1")
    assert list(blocks_of(note).values()) == [2, 3, 2, 6, 2, 3]
    assert note["budget"] == {"kind": "ratio", "asked": "attn=2/4,ffn=3/6,ffn.1=1"}
    weights = load_file(tmp_path / "t/model.safetensors")
    inner = [weights[f"transformer.h.{i}.mlp.c_fc.weight"].shape[1] for i in range(3)]
    assert inner == [24, 48, 24]


# ---------------------------------------------------------------- picks


def test_random_follows_the_seed(home, tmp_path):
    drawn = {}
    for key, seed in (("a", 3), ("b", 3), ("c", 4)):
        opened, note = ask(home, tmp_path / key, ratio="1/2", seed=seed)
        drawn[key] = note["blueprint"]
        assert note["pick"] == {"how": "random", "seed": seed}
    want = generator.for_deployment(
        opened.block_map, widths_of_ratio(opened.block_map, "1/2"), seed=3
    )
    assert drawn["a"] == drawn["b"] == {name: list(kept) for name, kept in want.items()}
    assert drawn["c"] != drawn["a"]


def test_best_of_n_is_the_best_of_n(home, tmp_path):
    """Each draw is extracted on its own and scored with a loop over stock forward passes."""
    _, note = ask(
        home, tmp_path / "t", ratio="1/2", pick="best-of:5", seed=2, data="text", tokens=400
    )
    opened = open_(home, "gpt2")
    widths, found = widths_of_ratio(opened.block_map, "1/2"), []
    text = open_tokens_by_hand(home / "text")
    for draw in range(5):
        blueprint = generator.for_deployment(opened.block_map, widths, seed=2, draw=draw)
        found.append(
            (ppl_by_hand(deploy.cut_ticket(opened, blueprint), text[: 400 // 16 * 16]), blueprint)
        )
    best = min(found, key=lambda pair: pair[0])
    assert note["pick"]["perplexities"] == pytest.approx([ppl for ppl, _ in found], rel=1e-4)
    assert note["blueprint"] == {name: list(kept) for name, kept in best[1].items()}
    assert note["perplexity"]["ticket"] == pytest.approx(best[0], rel=1e-4)
    assert len({round(ppl, 3) for ppl, _ in found}) == 5


def open_tokens_by_hand(stem: Path) -> list[int]:
    raw = Path(f"{stem}.bin").read_bytes()
    return [int.from_bytes(raw[i : i + 2], "little") for i in range(0, len(raw), 2)]


@torch.no_grad()
def ppl_by_hand(model, text: list[int]) -> float:
    losses = []
    for start in range(0, len(text) - SEQ_LEN + 1, SEQ_LEN):
        ids = torch.tensor([text[start : start + SEQ_LEN]])
        logp = model(input_ids=ids).logits[0].log_softmax(-1)
        losses += [-float(logp[t, ids[0, t + 1]]) for t in range(SEQ_LEN - 1)]
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("method", ["fisher", "mask-fisher", "taylor", "magnitude", "random"])
def test_importance_keeps_the_highest_scores(home, tmp_path, method):
    needs = method in ("fisher", "mask-fisher", "taylor")
    pick = "importance" if method == "fisher" else f"importance:{method}"
    opened, note = ask(home, tmp_path / "t", ratio="1/2", pick=pick, seed=1, tokens=64,
                       data="text" if needs else None)  # fmt: skip
    ids = calibrate_on_tokens(opened, str(home / "text"), 64, 1).ids
    assert ids.shape == (4, SEQ_LEN)
    scores = importance.score(opened, method, ids, 1)
    for name, kept in note["blueprint"].items():
        dropped = set(range(len(scores[name]))) - set(kept)
        assert min(scores[name][b] for b in kept) > max(scores[name][b] for b in dropped)
    based_on = {"data": str(home / "text"), "n_sequences": 4, "seq_len": SEQ_LEN} if needs else {}
    assert note["pick"] == {"how": pick, "seed": 1, "method": method, **based_on}


def test_calibration_takes_windows_of_the_named_text_or_the_training_text(home, tmp_path):
    """The same for `extract` (by tokens) and `prune` (by number): one order, one draw."""
    train, other = (open_tokens_by_hand(home / stem) for stem in ("text", "other"))

    def windows(text: list[int]) -> set[tuple[int, ...]]:
        return {tuple(text[i : i + SEQ_LEN]) for i in range(0, len(text), SEQ_LEN)}

    def rows(calibration) -> set[tuple[int, ...]]:
        return {tuple(row) for row in calibration.ids.tolist()}

    stems = (f"data.train={home / 'text'}", f"data.valid={home / 'other'}")
    both = open_(home, "gpt2", *stems)
    taken = calibrate_on_tokens(both, None, 800, 0)
    assert len(rows(taken)) == 50
    assert rows(taken) <= windows(train)
    named = calibrate_on_tokens(both, str(home / "other"), 800, 0)
    assert (named.stem, rows(named) <= windows(other)) == (str(home / "other"), True)
    for data, want in ((None, taken), (str(home / "other"), named)):
        assert torch.equal(calibrate(both, data, 50, 0).ids, want.ids)
    assert not torch.equal(calibrate_on_tokens(both, None, 800, 1).ids, taken.ids)
    assert len(calibrate_on_tokens(both, None, 0, 0).ids) == 2000 // SEQ_LEN  # fewer than the most
    # validation tokens are what results are measured on: nothing is fitted to them unasked
    gone = open_(home, "gpt2", f"data.train={tmp_path / 'gone'}", stems[1])
    for take in (calibrate, calibrate_on_tokens):
        with pytest.raises(ValueError, match="the run's own tokens"):
            take(gone, None, 4, 0)
        with pytest.raises(ValueError, match="no tokens to calibrate on: give --data STEM"):
            take(open_(home, "gpt2"), None, 4, 0)
    assert calibrate_on_tokens(open_(home, "gpt2"), str(home / "text"), 0, 0).stem == str(
        home / "text"
    )


# ---------------------------------------------------------------- the proof


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_the_proof_is_true(home, tmp_path, name):
    _, note = ask(home, tmp_path / "t", name, params="20k", data="text", tokens=480)
    ticket = deploy.load_ticket(tmp_path / "t")
    text = open_tokens_by_hand(home / "text")[:480]
    assert note["perplexity"]["ticket"] == pytest.approx(ppl_by_hand(ticket, text), rel=1e-4)
    assert note["perplexity"]["parent"] == pytest.approx(
        ppl_by_hand(tiny_model(name), text), rel=1e-4
    )
    assert note["perplexity"]["n_tokens"] == 480
    assert note["perplexity"]["data"] == str(home / "text")
    whole = sum(p.numel() for p in tiny_model(name).parameters()) * 4  # and a header
    assert whole < note["parent"].pop("bytes") < whole * 1.2
    assert note["parent"].pop("speed")["decode_ms"] > 0
    assert note["parent"] == {
        "source": str(home / name), "n_params": sum(p.numel() for p in tiny_model(name).parameters())
    }  # fmt: skip
    assert 0 < note["max_logit_difference"] < 1e-5
    assert not note["whole"]
    assert note["speed"]["decode_ms"] > 0
    assert note["speed"]["prefill_ms"] > 0
    assert {"command", "git", "versions", "device"} <= set(note)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_no_tokens_no_perplexity(home, tmp_path, capsys):
    _, note = ask(home, tmp_path / "t", ratio="1/2")
    assert "perplexity" not in note
    assert "no perplexity: " in capsys.readouterr().out
    ask(home, tmp_path / "u", ratio="1/2", overrides=(f"data.valid={tmp_path / 'gone'}",))
    assert "the run's own tokens" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_half_precision(home, tmp_path, name, dtype):
    """Half the bytes; the rounded weights and nothing else differ."""
    ratio = "1/2" if name == "gpt2" else "attn=2/3,ffn=1/2"
    opened, note = ask(
        home, tmp_path / "t", name, ratio=ratio, dtype=dtype, data="text", tokens=160
    )
    saved = load_file(tmp_path / "t/model.safetensors")
    blueprint = {key: tuple(kept) for key, kept in note["blueprint"].items()}
    exact = huggingface.state(deploy.cut_ticket(opened, blueprint))
    assert saved.keys() == exact.keys()
    for key, value in saved.items():
        assert value.dtype == getattr(torch, dtype)
        assert torch.equal(value, exact[key].detach().to(value.dtype))
    assert note["dtype"] == json.loads((tmp_path / "t/config.json").read_text())["dtype"] == dtype
    assert note["bytes"] == os.stat(tmp_path / "t/model.safetensors").st_size
    text = Text(open_tokens(str(home / "text")), SEQ_LEN, 160)
    full = perplexity(deploy.cut_ticket(opened, blueprint), text)
    assert note["perplexity"]["ticket"] == pytest.approx(full, rel=0.05)
    assert note["perplexity"]["ticket"] != full


def test_a_wrong_cut_is_not_written(home, tmp_path):
    """A map that takes q, k and v for one section cuts other columns than the mask hides."""
    good = open_(home, "gpt2")

    def wrong(group: BlockGroup) -> BlockGroup:
        parts = (
            replace(p, sections=1, chunk=p.chunk * 3) if p.sections == 3 else p for p in group.parts
        )
        return replace(group, parts=tuple(parts))

    odd = BlockMap(tuple(wrong(group) for group in good.block_map.groups))
    odd.check(huggingface.shapes(good.template))  # the sizes are fine
    bad = replace(
        good,
        block_map=odd,
        central=replace(
            good.central, segments=cut_segments(good.central.layout, odd, torch.device("cpu"))
        ),
    )
    request = TicketRequest(ratio="1/2", tokens=0)
    with pytest.raises(
        FloatingPointError, match=r"differ from the masked parent's by .* nothing was written"
    ):
        extract.write(bad, tmp_path / "t", request, quiet=True)
    good.central.weights[0] = math.nan
    with pytest.raises(FloatingPointError, match="by nan"):
        extract.write(good, tmp_path / "t", request, quiet=True)
    assert not list(tmp_path.iterdir())


def test_large_logits_round_more(home, tmp_path):
    """The check is relative to the logits: it passes their rounding and still sees a wrong block."""
    big = open_(home, "llama")  # its head is its own
    views = big.central.layout.views(big.central.weights)
    views["lm_head.weight"].mul_(100_000)
    request = TicketRequest(ratio="1/2", tokens=0)
    proof = extract.write(big, tmp_path / "t", request, quiet=True).proof
    blueprint = json.loads((tmp_path / "t/ticket.json").read_text())["blueprint"]
    name, kept = next(iter(blueprint.items()))
    n_blocks = big.block_map[name].n_blocks
    moved = {**blueprint, name: sorted({*range(n_blocks)} - {*kept})[: len(kept)]}
    moved = {key: tuple(value) for key, value in moved.items()}
    blueprint = {key: tuple(value) for key, value in blueprint.items()}
    with pytest.raises(FloatingPointError, match="nothing was written"):
        extract.logit_difference(big, blueprint, deploy.cut_ticket(big, moved))
    assert proof["max_logit_difference"] > 1e-3  # rounding alone


# ---------------------------------------------------------------- folders and disks


def test_only_tickets_are_replaced(home, tmp_path):
    ask(home, tmp_path / "t", ratio="1/2", seed=1)
    (tmp_path / "t/notes.txt").write_text("mine")
    _, note = ask(home, tmp_path / "t", ratio="1/2", seed=2)
    assert note["pick"]["seed"] == 2
    assert (tmp_path / "t/notes.txt").read_text() == "mine"  # no part of the old ticket
    (tmp_path / "empty").mkdir()
    ask(home, tmp_path / "empty", ratio="1/2")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/thesis.tex").write_text("precious")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "travel").mkdir()
    for name in ("ticket.json", "config.json"):  # a name that is ours does not make it ours
        (tmp_path / "travel" / name).write_text('{"from": "A", "to": "B"}')
    before = snapshot(tmp_path)
    for name in ("work", "file", "travel"):
        with pytest.raises(ValueError, match=rf"--out .*{name} exists and is no ticket"):
            ask(home, tmp_path / name, ratio="1/2")
    assert snapshot(tmp_path) == before


def test_a_file_of_another_size_gets_no_name(home, tmp_path, monkeypatch):
    """The bytes that a budget was spent on are compared before the folder appears."""
    monkeypatch.setattr(deploy, "weights_bytes", lambda shapes, dtype: 12_345)
    with pytest.raises(OSError, match=r"has [\d,]+ bytes, not 12,345: nothing was written"):
        ask(home, tmp_path / "t", ratio="1/2")
    assert not list(tmp_path.iterdir())


def test_a_blueprint_that_does_not_fit(home, tmp_path):
    opened, other = open_(home, "gpt2"), open_(home, "llama-gqa")
    for blueprint in (
        other.block_map.full(),
        opened.block_map.full() | {"transformer.h.0.attn": (0, 4)},
    ):
        with pytest.raises(ValueError, match="blueprint"):
            deploy.save_ticket(opened, blueprint, tmp_path / "t")
    assert not list(tmp_path.iterdir())


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import twistlm.tickets.extract  # what it imports may be compiled and cached first
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from twistlm import cli
first, *rest = sys.argv[1:]
for folder in ("new", "earlier"):
    sys.argv = ["twistlm", "extract", first, "-o", folder, *rest]
    try:
        cli.main()
    except SystemExit as stop:
        print(stop.code)
"""


def test_a_disk_that_takes_no_more(home, tmp_path):
    """The system refuses to write on: one sentence, nothing half-written, an earlier ticket stays."""
    ask(home, tmp_path / "earlier", ratio="1/2")
    before = snapshot(tmp_path)
    args = [str(home / "gpt2"), "--ratio", "1/2", "--device", "cpu", *FIXED]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *args],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.stdout.splitlines()[-1:] == ["2"], done.stderr
    assert [line for line in done.stdout.splitlines() if line == "2"] == ["2", "2"]
    sentences = done.stderr.strip().splitlines()
    assert len(sentences) == 2  # one for each folder
    for sentence in sentences:
        assert sentence.startswith("error: ")
        assert "File too large" in sentence
    assert snapshot(tmp_path) == before


def test_a_real_full_disk(home, tmp_path):
    """A file system of 48 KiB, where the machine lets a test mount one."""
    small = tmp_path / "small"
    small.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(small)], capture_output=True
        ).returncode
    ):
        pytest.skip("no permission to mount")
    try:
        with pytest.raises(OSError, match="No space left"):
            ask(home, small / "t", ratio="1/2")
        assert not list(small.iterdir())
    finally:
        subprocess.run(["umount", str(small)], check=True)


# ---------------------------------------------------------------- before the model is loaded


def refused(home: Path, out: Path, words: str, *overrides: str, **asked) -> None:
    """The sentence comes although nothing could be loaded."""
    request = TicketRequest(**asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract, "open_parent", lambda *args: pytest.fail("it was loaded"))
        with pytest.raises(ValueError, match=words):
            list(extract.write_tickets(home, out, request, "cpu", overrides))


def test_mistakes_are_told_before_the_model_is_loaded(home, tmp_path):
    """Of a Hugging Face folder and of a run: text that is missing, shared layers, folders."""
    gpt2, ratio = home / "gpt2", {"ratio": "1/2"}
    make_tokens(tmp_path / "tokens", 400)
    rounds.train(tiny(str(tmp_path / "tokens"), tmp_path / "run", train={"rounds": 1}), quiet=True)
    (tmp_path / "tokens.bin").unlink()
    (tmp_path / "file").write_text("")
    out, by_text = tmp_path / "t", ratio | {"pick": "importance"}
    refused(gpt2, out, "no tokens to calibrate on: give --data STEM", **by_text)
    refused(tmp_path / "run", out, "the run's own tokens", **by_text)
    refused(gpt2, out, "gone", **by_text, data=str(tmp_path / "gone"))
    refused(gpt2, out, "--stock: blocks.shared_first=2 .* leave layers whole", **ratio, stock=True)
    refused(tmp_path / "run", out, "shared_first=1 .* leave layers whole", **ratio, stock=True)
    refused(gpt2, tmp_path / "file/t", "--out .*file is no folder", **ratio)
    refused(gpt2, tmp_path / "file", "exists and is no ticket", **ratio)
    refused(gpt2, out, "give --ratio, --params")
    if os.geteuid():  # root may write everywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        refused(gpt2, tmp_path / "locked/t", "cannot be written to", **ratio)


# ---------------------------------------------------------------- what is measured, and what not


@pytest.fixture
def losses(monkeypatch) -> list[float]:
    """Every loss that sensitivity measures."""
    measured: list[float] = []
    loss = sensitivity.Sensitivity.loss

    def noted(self, widths) -> float:
        measured.append(loss(self, widths))
        return measured[-1]

    monkeypatch.setattr(sensitivity.Sensitivity, "loss", noted)
    return measured


def test_the_time_is_told_before_it_is_spent(home, tmp_path, losses, monkeypatch, capsys):
    """One loss is timed, and multiplied; a short measurement is not worth a word."""
    ask(home, tmp_path / "a", data="text", params="16k", tokens=64)
    assert 1 < len(losses) <= sensitivity.n_losses(open_(home, "gpt2").block_map)
    assert "--spend even" not in capsys.readouterr().out
    monkeypatch.setattr(extract, "LONG", 0.0)
    ask(home, tmp_path / "b", data="text", params="16k", tokens=64)
    said = capsys.readouterr().out
    assert re.search(r"up to 27 losses, about \d+ s;\s+--spend\s+even\s+needs\s+none", said)


@pytest.mark.parametrize(
    "asked",
    [
        {"params": "1B"},
        {"size": "1GB"},
        {"latency": "100s"},
        {"memory": "1GB", "context": "8"},
        {"params": "16k", "spend": "even"},
        {"ratio": "1/2"},
        {"params": "20k", "stock": True},
    ],
    ids=str,
)
def test_what_needs_no_measurement(home, tmp_path, losses, asked):
    """The whole parent within the budget, a ratio, even and stock widths."""
    _, note = ask(home, tmp_path / "t", data="text", tokens=64, **asked)
    assert not losses
    assert note["spend"] == {"how": "even"}


# ---------------------------------------------------------------- the command


def test_the_command(home, tmp_path, monkeypatch, capsys):
    """A table on stdout, a ticket that loads, the command line beside its numbers."""
    monkeypatch.chdir(tmp_path)
    args = (
        "extract", str(home / "gpt2"), "-o", "deep/t", "--params", "22,000", "--pick", "best-of:2",
        "--data", str(home / "text"), "--tokens", "160", "--device", "cpu", "--seed", "5",
        *FIXED,
    )  # fmt: skip
    code, out, err = in_process(monkeypatch, capsys, *args)
    assert (code, err) == (0, "")
    note = json.loads((tmp_path / "deep/t/ticket.json").read_text())
    assert recount(tmp_path / "deep/t")[0] == note["n_params"] <= 22_000
    for part in ("--params 22,000", f"{note['n_params']:,}", f"{note['bytes']:,}", "ms per decoded token",
                 f"{note['perplexity']['ticket']:.2f}", f"{note['perplexity']['parent']:.2f}", "deep/t"):  # fmt: skip
        assert part in out
    assert note["command"].startswith("twistlm extract ")
    assert "--seed 5" in note["command"]
    deploy.load_ticket(tmp_path / "deep/t")


def test_a_ticket_is_no_parent(home, tmp_path):
    """Nor is its model in memory, nor its folder after somebody has removed ticket.json."""
    ask(home, tmp_path / "t", ratio="1/2")
    model = deploy.load_ticket(tmp_path / "t")
    for source in (tmp_path / "t", getattr(model, "model", model)):
        with pytest.raises(ValueError, match="is a ticket, which is cut already: give the parent"):
            open_parent(source)
    (tmp_path / "t/ticket.json").unlink()
    with pytest.raises(ValueError, match="is a ticket, which is cut already: give the parent"):
        open_parent(tmp_path / "t")


# ---------------------------------------------------------------- common blocks

COMMON = ("blocks.common_attn=[1]", "blocks.common_ffn=[5,2]")
KEPT = {"attn": {1}, "ffn": {2, 5}}


def keeps_common(parent: Parent, blueprint) -> bool:
    return all(KEPT[g.kind] <= set(blueprint[g.name]) for g in parent.block_map.groups)


@pytest.mark.parametrize(
    "what",
    [{"ratio": "1/2"}, {"ratio": "attn=1/4,ffn=2/6"}, {"params": "11k"}, {"size": "46kB"}],
    ids=lambda what: next(iter(what)),
)
@pytest.mark.parametrize("pick", ["random", "best-of:4", "importance:magnitude", "importance"])
def test_tickets_keep_the_common_blocks(home, tmp_path, pick, what):
    """Of four heads and six chunks: without C most draws, and every score, miss one of them."""
    for seed in range(1 if pick.startswith("importance") else 3):  # a score has no luck
        parent, ticket = ask(
            home, tmp_path / str(seed), pick=pick, seed=seed, data="text", tokens=64,
            overrides=COMMON, **what,
        )  # fmt: skip
        assert keeps_common(parent, ticket["blueprint"])


def test_random_tickets_of_common_blocks_are_uniform_over_the_rest(home):
    parent = open_(home, "gpt2", *COMMON)
    widths = widths_of_ratio(parent.block_map, "1/2")
    counts = dict.fromkeys(range(6), 0)
    for blueprint in generator.draws(parent.block_map, widths, seed=3, n=400):
        assert parent.block_map.widths(blueprint) == widths
        assert keeps_common(parent, blueprint)
        for block in blueprint["transformer.h.0.ffn"]:
            counts[block] += 1
    assert counts[2] == counts[5] == 400
    for block in (0, 1, 3, 4):  # 100 expected, sd 8.7
        assert 65 <= counts[block] <= 135


def test_sizes_without_room_for_the_common_blocks_are_refused(home, tmp_path):
    parent = open_(home, "gpt2", *COMMON)
    with pytest.raises(ValueError, match=r"no room for the 2 common ffn blocks.*legal: 2/6, 3/6"):
        widths_of_ratio(parent.block_map, "attn=1/4,ffn=1/6")
    least = budget.ladder(parent.block_map)[0]
    assert {least[g.name] for g in parent.block_map.groups if g.kind == "ffn"} == {2}
    shapes = parent.block_map.narrowed(parent.central.layout.shapes, least)
    n_least = sum(math.prod(shape) for shape in shapes.values())
    with pytest.raises(ValueError, match=rf"the common ones.* takes {n_least:,} parameters"):
        ask(home, tmp_path / "t", overrides=COMMON, params=str(n_least - 1))
    bare = {g.name: (0, 1, 3)[: least[g.name]] for g in parent.block_map.groups}
    with pytest.raises(ValueError, match="lacks common blocks"):
        deploy.cut_ticket(parent, bare)
    with pytest.raises(ValueError, match=r"blocks\.common_ffn = \[9\]: .* 0\.\.5"):
        open_(home, "gpt2", "blocks.common_ffn=[9]")


def test_a_parent_with_an_order_gives_nested_tickets(tmp_path):
    """The order is scored before the first round and kept; extract, eval, certify and drop go by it."""
    tokens = make_tokens(tmp_path / "tokens", 400)
    widths = {"masks": "sequence", "mask_attn": [4, 2, 1], "mask_ffn": [4, 1, 2], "nested": 0.5}
    blocks = widths | {"k_attn": 4, "k_ffn": 4}
    cfg = tiny(tokens, tmp_path / "run", blocks=blocks, train={"rounds": 1})
    rounds.train(cfg, quiet=True)
    opened = open_parent(tmp_path / "run", "cpu")
    order = opened.progress.order
    # the start's own scores: the same weights, the same 64 windows
    start = open_parent(huggingface.load(cfg.model, cfg.run.seed), "cpu", CUT_AS_TRAINED)
    file = open_tokens(tokens)
    n = file.n_sequences(16)
    ids = file.sequences(list(range(0, n, max(1, n // 64)))[:64], 16)
    scores = importance.score(start, "mask-fisher", ids)
    for name, values in scores.items():
        assert order[name] == tuple(sorted(range(4), key=lambda b, v=values: -float(v[b])))
    (ranks,) = sensitivity.scores_for(opened, parse_pick("nested"), ids, 0)
    best = importance.keep_best(opened.block_map, ranks, dict.fromkeys(order, 2))
    assert {n: set(kept) for n, kept in best.items()} == {n: set(o[:2]) for n, o in order.items()}
    # half of every layer, without --pick
    request = TicketRequest(ratio="2/4", tokens=160)
    ticket = extract.write(opened, tmp_path / "ticket", request, quiet=True)
    note = json.loads((tmp_path / "ticket/ticket.json").read_text())
    assert note["pick"]["how"] == "nested"
    assert {n: set(kept) for n, kept in note["blueprint"].items()} == {
        n: set(o[:2]) for n, o in order.items()
    }
    scored = score_parent(opened, ScoreRequest(ratios=("2/4",), n=2, tokens=160), "x", quiet=True)
    assert scored.nested[0] == pytest.approx(ticket.proof["perplexity"]["ticket"], rel=1e-5)
    asked = CertificateRequest(ratio="2/4", n=2, tokens=160, coverage=0.5, confidence=0.7)
    made = certify.certify(opened, asked, tmp_path / "certificate", quiet=True)
    assert made.nested == scored.nested[0]
    assert (
        json.loads((tmp_path / "certificate/certificate.json").read_text())["nested"] == made.nested
    )
    # striped over two nodes: each holds every other place of the order
    left = lost_nodes.survivors(opened.block_map, 2, (1,), order)
    assert left == {n: tuple(sorted(o[::2])) for n, o in order.items()}
    plain = open_parent(start.template, "cpu", CUT_AS_TRAINED)
    with pytest.raises(ValueError, match="trained without an order of blocks"):
        extract.write(plain, tmp_path / "no", replace(request, pick="nested"), quiet=True)
    assert not (tmp_path / "no").exists()


# ---------------------------------------------------------------- where it hurts least


def test_the_budget_goes_where_it_hurts_least():
    """Against every combination of widths: losses that fall with the blocks, at another pace in each layer."""
    block_map, shapes = a_map(2, 4, 4, attn=7, ffn=3)
    pace = {"0.attn": 9.0, "0.ffn": 1.0, "1.attn": 2.0, "1.ffn": 4.0}

    def loss(widths) -> float:
        return sum(pace[name] / k for name, k in widths.items())

    costs = Costs(block_map, shapes, "float32", never)
    every = [
        dict(zip(pace, ks, strict=True)) for ks in itertools.product(range(1, 5), repeat=len(pace))
    ]
    gaps = []
    for limit in range(10 + 20, 10 + 80, 3):
        (even,) = budget.fit(parse_budget(params=str(limit)), costs)
        found = sensitivity.measured_widths(block_map, even, limit, costs.parameters, loss)
        assert costs.parameters(found.widths) <= limit
        assert found.loss == pytest.approx(loss(found.widths))
        assert found.loss <= found.even == pytest.approx(loss(even))
        fits = [w for w in every if costs.parameters(w) <= limit]
        best = min(map(loss, fits))
        gaps.append((found.even - best, found.loss - best))
        larger = [found.widths | {n: k + 1} for n, k in found.widths.items() if k < 4]
        assert all(costs.parameters(w) > limit for w in larger)  # to the last block
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


def test_blocks_are_bought_by_loss_per_cost():
    """An attention block saves twice as much loss as an FFN block and costs ten times as much."""
    block_map, shapes = a_map(1, 4, 4, attn=10, ffn=1)
    costs = Costs(block_map, shapes, "float32", never)
    prices = {"0.attn": (range(1, 4), 2.0, 2.0), "0.ffn": (range(1, 4), 1.0, 1.0)}
    centre = {"0.attn": 2, "0.ffn": 2}
    found = sensitivity._greedy(block_map, centre, prices, 32, costs.parameters)
    assert found == {"0.attn": 1, "0.ffn": 4}  # 10 + 10 + 4; with 2 and 2 it would be 32


def test_a_text_that_says_nothing_leaves_even_widths():
    """Noise alone may move blocks; the measured loss decides, and even widths win ties."""
    block_map, shapes = a_map(3, 12, 12, attn=7, ffn=3)
    costs = Costs(block_map, shapes, "float32", never)
    (even,) = budget.fit(parse_budget(params="250"), costs)
    found = sensitivity.measured_widths(block_map, even, 250, costs.parameters, lambda widths: 1.0)
    assert found.widths == even


@pytest.mark.parametrize(
    ("name", "what"),
    [("gpt2", {"params": "16k"}), ("llama", {"size": "70kB"}), ("gpt2", {"latency": "1s"})],
)
def test_the_losses_in_the_record_are_those_of_the_tickets(home, tmp_path, name, what):
    """Both folders loaded from disk, with Hugging Face's own loss on the calibration windows."""
    asked = {"pick": "importance:magnitude", "data": "text", "tokens": 256, **what}
    losses = {}
    for how in ("even", "measured"):
        parent, ticket = ask(home, tmp_path / how, name, spend=how, **asked)
        ids = calibrate_on_tokens(parent, str(home / "text"), 256, 0).ids
        with torch.no_grad():
            losses[how] = float(deploy.load_ticket(tmp_path / how)(ids, labels=ids).loss)
        limit = ticket["budget"]["limit"]
        widths = {g: int(text.split("/")[0]) for g, text in ticket["widths"].items()}
        for group in parent.block_map.groups if "params" in what else ():
            k = widths[group.name]
            more = widths | {group.name: k + 1}
            size = count(parent.block_map, parent.central.layout.shapes, more)
            assert k == group.n_blocks or size > limit  # one more block anywhere is too much
    if "latency" in what:  # room for all blocks: nothing is left to choose
        assert ticket["whole"]
        assert losses["measured"] == losses["even"]
        return
    assert ticket["spend"]["loss"] == pytest.approx(losses["measured"], rel=1e-4)
    assert ticket["spend"]["loss_of_even_widths"] == pytest.approx(losses["even"], rel=1e-4)
    assert losses["measured"] < losses["even"]


def test_without_text_the_budget_is_spent_evenly(home, tmp_path, capsys):
    _, ticket = ask(home, tmp_path / "t", params="16k")
    assert ticket["spend"] == {"how": "even"}
    assert "the budget is spent evenly" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--spend 'much': use one of measured, even"):
        ask(home, tmp_path / "u", params="16k", spend="much")


@torch.no_grad()
def cached_numbers(model, n_tokens: int) -> int:
    """Numbers in Hugging Face's own cache after so many tokens."""
    ids = torch.arange(n_tokens)[None] % 64
    cache = model(input_ids=ids, use_cache=True).past_key_values
    return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-gqa", "qwen3", "opt", "phi", "mistral"])
def test_cached_keys_and_values_are_those_of_hugging_face(name, tmp_path):
    tiny_model(name).save_pretrained(tmp_path / "model")
    parent = open_parent(tmp_path / "model", "cpu", [*FIXED, "blocks.n_ffn=4"])
    shapes = parent.central.layout.shapes
    # of a sliding window Hugging Face stores one token less: the newest is not in the cache yet
    window = getattr(parent.template.config, "sliding_window", None) or 2
    share = (window, window - 1) if name == "mistral" else (1, 1)

    def stored(model) -> int:
        return cached_numbers(model, 20) // share[1] * share[0]

    assert n_cached(parent.template, shapes, 20) == stored(parent.template)
    widths = {g.name: 1 + g.layer % g.n_blocks for g in parent.block_map.groups}
    ticket = deploy.cut_ticket(parent, generator.for_deployment(parent.block_map, widths, seed=0))
    narrow = parent.block_map.narrowed(shapes, widths)
    assert n_cached(parent.template, narrow, 20) == stored(ticket)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_is_weights_and_cache(home, tmp_path, dtype):
    """Counted again from the ticket that was written; one more block anywhere would be too much."""
    itemsize = 4 if dtype == "float32" else 2
    limit = 23_000 * itemsize
    asked = {"memory": f"{limit}", "context": "32", "data": "text", "tokens": 64, "dtype": dtype}
    parent, ticket = ask(home, tmp_path / "t", **asked)
    model = deploy.load_ticket(tmp_path / "t").float()
    n = sum(p.numel() for p in model.parameters()) + cached_numbers(model, 32)
    assert ticket["budget"]["spent"] == n * itemsize <= limit
    assert ticket["budget"]["context"] == 32
    shapes, cut = parent.central.layout.shapes, parent.block_map
    widths = cut.widths({name: tuple(kept) for name, kept in ticket["blueprint"].items()})
    for group in cut.groups:
        if (k := widths[group.name]) < group.n_blocks:
            more = cut.narrowed(shapes, widths | {group.name: k + 1})
            size = sum(map(math.prod, more.values())) + n_cached(parent.template, more, 32)
            assert size * itemsize > limit
    with pytest.raises(ValueError, match=r"--context 64: .* has 40 positions"):
        ask(home, tmp_path / "u", memory="1MB", context="64")
    for wrong in ({"memory": "1MB"}, {"params": "1M", "context": "32"}):
        with pytest.raises(ValueError, match="--memory and --context go together"):
            parse_budget(**wrong)
    with pytest.raises(ValueError, match="--context 0: must be 1 token at least"):
        parse_budget(memory="2GB", context="0")
    assert parse_budget(memory="2GB", context="8k") == Budget("memory", "2GB", 2e9, 8192)


def test_several_budgets_make_several_tickets(home, tmp_path, monkeypatch, capsys):
    args = [str(home / "gpt2"), "-o", str(tmp_path / "all"), *FIXED, "--data", str(home / "text")]
    budgets = ["--params", "16k", "--params", "20k", "--ratio", "1/2"]
    code, out, err = in_process(monkeypatch, capsys, "extract", *args, *budgets, "--tokens", "64")
    assert code == 0, err
    names = ["params-16k", "params-20k", "ratio-1-2"]
    assert sorted(os.listdir(tmp_path / "all")) == names
    found = {name: recount(tmp_path / "all" / name)[0] for name in names}
    assert found["params-16k"] <= 16_000 < found["params-20k"] <= 20_000
    assert all(deploy.load_ticket(tmp_path / "all" / name) for name in names)
    assert all(f"ticket: {tmp_path / 'all' / name}" in out.replace("\n", "") for name in names)
    code, _, err = in_process(
        monkeypatch, capsys, "extract", *args, "--params", "16k", "--params", "16k"
    )
    assert code == 2
    assert "params-16k is asked for twice" in err
