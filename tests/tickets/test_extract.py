"""A ticket for a budget: what is promised is counted again from the files that were written."""

from __future__ import annotations

import json
import math
import os
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
from safetensors.torch import load_file

from twistlm.compute import speed
from twistlm.compute.perplexity import Text, perplexity
from twistlm.data.token_file import open_tokens
from twistlm.model import generator, huggingface
from twistlm.model.blocks import BlockGroup, BlockMap, widths_of_ratio
from twistlm.model.families import n_cached
from twistlm.model.layout import cut_segments
from twistlm.tickets import budget, certify, deploy, extract, importance, lost_nodes, sensitivity
from twistlm.tickets.calibration import calibrate, calibrate_on_tokens
from twistlm.tickets.parent import Parent, open_parent
from twistlm.tickets.pick import parse_pick
from twistlm.tickets.requests import CertificateRequest, ScoreRequest, TicketRequest
from twistlm.tickets.score import score_parent
from twistlm.training import rounds

SEQ_LEN = 16
FIXED = (
    "blocks.n_ffn=6",
    "blocks.shared_first=0",
    "blocks.shared_last=0",
    f"data.seq_len={SEQ_LEN}",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Hugging Face folders of tiny models, and token files."""
    folder = tmp_path_factory.mktemp("choose")
    for name in ("gpt2", "llama", "llama-gqa", "qwen3"):
        tiny_model(name).save_pretrained(folder / name)
    make_tokens(folder / "text", 2000)
    make_tokens(folder / "other", 2000, seed=7)
    return folder


def open_(home: Path, name: str, *overrides: str) -> Parent:
    return open_parent(home / name, "cpu", [*FIXED, *overrides])


def ask(home: Path, folder: Path, name: str = "gpt2", overrides: tuple[str, ...] = (), **asked):
    """Write a ticket; returns its parent and its ticket.json."""
    opened = open_(home, name, *overrides)
    if "data" in asked:
        asked["data"] = str(home / asked["data"])
    request = TicketRequest(**{"pick": "random", "tokens": 0} | asked)
    extract.write(opened, folder, request, quiet=True)
    return opened, json.loads((folder / "ticket.json").read_text())


def recount(folder: Path) -> tuple[int, int]:
    """Parameters in the weights file, and its bytes on disk."""
    file = folder / "model.safetensors"
    return sum(t.numel() for t in load_file(file).values()), os.stat(file).st_size


def blocks_of(note) -> dict[str, int]:
    return {name: len(kept) for name, kept in note["blueprint"].items()}


def tokens_by_hand(stem: Path) -> list[int]:
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


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("name", "share", "kind", "dtype"),
    [
        ("gpt2", 0.1, "params", "float32"),
        ("gpt2", 0.47, "size", "bfloat16"),
        ("llama-gqa", 0.1, "size", "float32"),
        ("qwen3", 0.8, "params", "float32"),
        ("qwen3", 0.47, "size", "float16"),
    ],
)
def test_a_budget_is_met_to_the_last_block(home, tmp_path, name, share, kind, dtype):
    """The files say: within the budget; a ticket with any further block, written too, is over."""
    opened = open_(home, name)
    measure = 0 if kind == "params" else 1

    def written(widths: dict[str, int]) -> int:
        blueprint = generator.for_deployment(opened.block_map, widths, seed=1)
        deploy.save_ticket(opened, blueprint, tmp_path / "t", dtype=getattr(torch, dtype))
        return recount(tmp_path / "t")[measure]

    least = written(dict.fromkeys(opened.block_map.full_widths(), 1))
    most = written(opened.block_map.full_widths())
    limit = int(least + share * (most - least))
    _, note = ask(home, tmp_path / "a", name, dtype=dtype, **{kind: str(limit)})
    counted, widths = recount(tmp_path / "a"), blocks_of(note)
    assert (note["n_params"], note["bytes"]) == counted
    spent = {"kind": kind, "asked": str(limit), "limit": limit, "spent": counted[measure]}
    assert note["budget"] == spent
    assert counted[measure] <= limit
    for group in opened.block_map.groups:
        if widths[group.name] < group.n_blocks:
            assert written(widths | {group.name: widths[group.name] + 1}) > limit
    unit = "parameters" if kind == "params" else "bytes"
    with pytest.raises(ValueError, match=rf"impossible: .* takes {least:,} {unit}"):
        ask(home, tmp_path / "c", name, dtype=dtype, **{kind: str(least - 1)})
    ask(home, tmp_path / "c", name, dtype=dtype, **{kind: str(least)})
    assert recount(tmp_path / "c")[measure] == least


def test_a_ticket_over_the_latency_gives_way_to_a_smaller_one(home, tmp_path, monkeypatch):
    """A clock of our own: 1 ms between readings, and 3 ms while the finished ticket is timed."""
    readings, slow = [0.0], range(0)

    def clock() -> float:
        readings.append(readings[-1] + (0.003 if len(readings) in slow else 0.001))
        return readings[-1]

    monkeypatch.setattr(time, "perf_counter", clock)
    _, note = ask(home, tmp_path / "t", latency="2ms")
    assert note["whole"]
    assert note["budget"]["spent"] == note["speed"]["decode_ms"] <= note["budget"]["limit"]
    n_readings = len(readings)
    # begin and end, 4 runs, prompt and steps
    per_measurement = 2 * 4 * (1 + note["speed"]["n_steps"])
    readings, slow = [0.0], range(n_readings - per_measurement, n_readings)
    opened, note = ask(home, tmp_path / "t", latency="2ms")
    assert blocks_of(note) == budget.ladder(opened.block_map)[-2]
    assert note["speed"]["decode_ms"] == note["budget"]["spent"] == pytest.approx(1)
    readings, slow = [0.0], range(n_readings - per_measurement, 10**6)
    with pytest.raises(ValueError, match=r"impossible: the smallest ticket .* takes 3.00 ms"):
        ask(home, tmp_path / "u", latency="2ms")
    assert not (tmp_path / "u").exists()


@pytest.mark.parametrize("name", list(TABLE))
def test_speed_of_every_family(name, monkeypatch):
    """Prompt and cache of each model, within its positions; however slow, one run is measured."""
    monkeypatch.setattr(speed, "LONGEST", 0.0)
    took = speed.measure_all([tiny_model(name)])[0]
    assert took.decode_ms >= took.fastest_decode_ms > 0
    assert took.prefill_ms > 0
    assert took.n_prompt + took.n_steps <= tiny_model(name).config.max_position_embeddings
    assert (took.device, took.n_threads, took.n_repeats) == ("cpu", torch.get_num_threads(), 1)


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
    widths = {g.name: 1 + g.layer % g.n_blocks for g in parent.block_map.groups}
    ticket = deploy.cut_ticket(parent, generator.for_deployment(parent.block_map, widths, seed=0))
    narrow = parent.block_map.narrowed(shapes, widths)
    for model, these in ((parent.template, shapes), (ticket, narrow)):
        stored = cached_numbers(model, 20) // share[1] * share[0]
        assert n_cached(parent.template, these, 20) == stored


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float16", 2)])
def test_memory_is_weights_and_cache(home, tmp_path, dtype, itemsize):
    """Counted again from the ticket that was written; one more block anywhere would be too much."""
    limit = 23_000 * itemsize
    asked = {"memory": f"{limit}", "context": "32", "data": "text", "tokens": 64, "dtype": dtype}
    parent, ticket = ask(home, tmp_path / "t", **asked)
    model = deploy.load_ticket(tmp_path / "t").float()
    n = sum(p.numel() for p in model.parameters()) + cached_numbers(model, 32)
    assert ticket["budget"]["spent"] == n * itemsize <= limit
    assert ticket["budget"]["context"] == 32
    shapes, cut, widths = parent.central.layout.shapes, parent.block_map, blocks_of(ticket)
    for group in cut.groups:
        if (k := widths[group.name]) < group.n_blocks:
            more = cut.narrowed(shapes, widths | {group.name: k + 1})
            size = sum(map(math.prod, more.values())) + n_cached(parent.template, more, 32)
            assert size * itemsize > limit
    with pytest.raises(ValueError, match=r"--context 64: .* has 40 positions"):
        ask(home, tmp_path / "u", memory="1MB", context="64")


def test_a_ratio_may_name_layers(home, tmp_path):
    block_map = open_(home, "gpt2").block_map  # 3 layers, 4 heads, 6 FFN blocks
    widths = widths_of_ratio(block_map, "attn=2/4, ffn=1/6, ffn.0=1, attn.2=0.25")
    assert list(widths.values()) == [2, 6, 2, 1, 1, 1]
    for bad, match in {
        "attn=1/2,ffn=1/2,ffn.3=1": "'ffn.3' names nothing",
        "attn=1/2,ffn=1/2,ffn.0=1/5": "no whole number of ffn blocks",
        "attn=1/2,ffn.0=1/2": "nothing about ffn of layer 1",
        "attn=1/2,ffn=1/2,heads=1": "'heads' names nothing",
        "0=1/2": "'0' names nothing",
    }.items():
        with pytest.raises(ValueError, match=match):
            widths_of_ratio(block_map, bad)
    _, note = ask(home, tmp_path / "t", ratio="attn=2/4,ffn=3/6,ffn.1=1")
    assert note["budget"] == {"kind": "ratio", "asked": "attn=2/4,ffn=3/6,ffn.1=1"}
    weights = load_file(tmp_path / "t/model.safetensors")
    inner = [weights[f"transformer.h.{i}.mlp.c_fc.weight"].shape[1] for i in range(3)]
    assert inner == [24, 48, 24]


# ---------------------------------------------------------------- picks


def test_random_and_best_of_n_follow_the_seed(home, tmp_path):
    """Each draw is cut on its own and scored with a loop over stock forward passes."""
    opened = open_(home, "gpt2")
    widths, found = widths_of_ratio(opened.block_map, "1/2"), []
    for draw in range(5):
        kept = generator.for_deployment(opened.block_map, widths, seed=2, draw=draw)
        value = ppl_by_hand(deploy.cut_ticket(opened, kept), tokens_by_hand(home / "text")[:400])
        found.append((value, {name: list(blocks) for name, blocks in kept.items()}))
    assert len({round(ppl, 3) for ppl, _ in found}) == 5
    _, one = ask(home, tmp_path / "a", ratio="1/2", seed=2)
    assert one["blueprint"] == found[0][1]
    assert one["pick"] == {"how": "random", "seed": 2}
    text = {"data": "text", "tokens": 400}
    _, note = ask(home, tmp_path / "t", ratio="1/2", pick="best-of:5", seed=2, **text)
    best = min(found, key=lambda pair: pair[0])
    assert note["pick"]["perplexities"] == pytest.approx([ppl for ppl, _ in found], rel=1e-4)
    assert note["blueprint"] == best[1]
    assert note["perplexity"]["ticket"] == pytest.approx(best[0], rel=1e-4)


@pytest.mark.parametrize("method", ["fisher", "mask-fisher", "taylor", "magnitude", "random"])
def test_importance_keeps_the_highest_scores(home, tmp_path, method):
    text = {"data": "text"} if method in ("fisher", "mask-fisher", "taylor") else {}
    pick = "importance" if method == "fisher" else f"importance:{method}"
    opened, note = ask(home, tmp_path / "t", ratio="1/2", pick=pick, seed=1, tokens=64, **text)
    ids = calibrate_on_tokens(opened, str(home / "text"), 64, 1).ids
    assert ids.shape == (4, SEQ_LEN)
    scores = importance.score(opened, method, ids, 1)
    for name, kept in note["blueprint"].items():
        dropped = set(range(len(scores[name]))) - set(kept)
        assert min(scores[name][b] for b in kept) > max(scores[name][b] for b in dropped)
    based_on = {"data": str(home / "text"), "n_sequences": 4, "seq_len": SEQ_LEN} if text else {}
    assert note["pick"] == {"how": pick, "seed": 1, "method": method, **based_on}


def test_calibration_takes_windows_of_the_named_text_or_the_training_text(home, tmp_path):
    """The same for `extract` (by tokens) and `prune` (by number): one order, one draw."""
    stems = (f"data.train={home / 'text'}", f"data.valid={home / 'other'}")
    both = open_(home, "gpt2", *stems)
    for data, stem in ((None, "text"), (str(home / "other"), "other")):
        text = tokens_by_hand(home / stem)
        windows = {tuple(text[i : i + SEQ_LEN]) for i in range(0, len(text), SEQ_LEN)}
        taken = calibrate_on_tokens(both, data, 800, 0)
        rows = {tuple(row) for row in taken.ids.tolist()}
        assert (len(rows), rows <= windows, taken.stem) == (50, True, str(home / stem))
        assert torch.equal(calibrate(both, data, 50, 0).ids, taken.ids)
        assert not torch.equal(calibrate_on_tokens(both, data, 800, 1).ids, taken.ids)
    assert len(calibrate_on_tokens(both, None, 0, 0).ids) == 2000 // SEQ_LEN  # fewer than the most
    # validation tokens are what results are measured on: nothing is fitted to them unasked
    gone = open_(home, "gpt2", f"data.train={tmp_path / 'gone'}", stems[1])
    for take in (calibrate, calibrate_on_tokens):
        with pytest.raises(ValueError, match="the run's own tokens"):
            take(gone, None, 4, 0)
        with pytest.raises(ValueError, match="no tokens to calibrate on: give --data STEM"):
            take(open_(home, "gpt2"), None, 4, 0)


COMMON = ("blocks.common_attn=[1]", "blocks.common_ffn=[5,2]")
KEPT = {"attn": {1}, "ffn": {2, 5}}


@pytest.mark.parametrize(
    ("pick", "what"),
    [
        ("random", {"ratio": "1/2"}),
        ("best-of:4", {"ratio": "attn=1/4,ffn=2/6"}),
        ("importance:magnitude", {"params": "11k"}),
        ("importance", {"size": "46kB"}),
        ("random", {"params": "11k"}),
    ],
)
def test_tickets_keep_the_common_blocks(home, tmp_path, pick, what):
    """Of four heads and six chunks: without C most draws, and every score, miss one of them."""
    for seed in range(1 if pick.startswith("importance") else 3):  # a score has no luck
        parent, ticket = ask(
            home, tmp_path / str(seed), pick=pick, seed=seed, data="text", tokens=64,
            overrides=COMMON, **what,
        )  # fmt: skip
        for group in parent.block_map.groups:
            assert KEPT[group.kind] <= set(ticket["blueprint"][group.name])


def test_common_blocks_leave_the_rest_to_chance(home, tmp_path):
    """Random tickets are uniform over the others; sizes without room for C are refused."""
    parent = open_(home, "gpt2", *COMMON)
    widths = widths_of_ratio(parent.block_map, "1/2")
    counts = dict.fromkeys(range(6), 0)
    for blueprint in generator.draws(parent.block_map, widths, seed=3, n=400):
        assert parent.block_map.widths(blueprint) == widths
        for block in blueprint["transformer.h.0.ffn"]:
            counts[block] += 1
    assert counts[2] == counts[5] == 400
    assert all(65 <= counts[block] <= 135 for block in (0, 1, 3, 4))  # 100 expected, sd 8.7
    with pytest.raises(ValueError, match=r"no room for the 2 common ffn blocks.*legal: 2/6, 3/6"):
        widths_of_ratio(parent.block_map, "attn=1/4,ffn=1/6")
    least = budget.ladder(parent.block_map)[0]
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
    """Scored before the first round and kept; extract, eval, its certificate and drop go by it."""
    tokens = make_tokens(tmp_path / "tokens", 400)
    widths = {"masks": "sequence", "mask_attn": [4, 2, 1], "mask_ffn": [4, 1, 2], "nested": 0.5}
    blocks = widths | {"k_attn": 4, "k_ffn": 4}
    cfg = tiny(tokens, tmp_path / "run", blocks=blocks, train={"rounds": 1})
    rounds.train(cfg, quiet=True)
    opened = open_parent(tmp_path / "run", "cpu")
    order = opened.progress.order
    # the start's own scores: the same weights, the same 64 windows
    cut = ("blocks.n_ffn=4", "blocks.shared_first=1", "blocks.shared_last=0")
    start = open_parent(huggingface.load(cfg.model, cfg.run.seed), "cpu", cut)
    file = open_tokens(tokens)
    n = file.n_sequences(16)
    ids = file.sequences(list(range(0, n, max(1, n // 64)))[:64], 16)
    for name, values in importance.score(start, "mask-fisher", ids).items():
        assert order[name] == tuple(sorted(range(4), key=lambda b, v=values: -float(v[b])))
    (ranks,) = sensitivity.scores_for(opened, parse_pick("nested"), ids, 0)
    best = importance.keep_best(opened.block_map, ranks, dict.fromkeys(order, 2))
    halves = {n: set(o[:2]) for n, o in order.items()}
    assert {n: set(kept) for n, kept in best.items()} == halves
    # half of every layer, without --pick
    request = TicketRequest(ratio="2/4", tokens=160)
    ticket = extract.write(opened, tmp_path / "ticket", request, quiet=True)
    assert ticket.proof["pick"]["how"] == "nested"
    assert {n: set(kept) for n, kept in ticket.blueprint.items()} == halves
    scored = score_parent(opened, ScoreRequest(ratios=("2/4",), n=2, tokens=160), "x", quiet=True)
    assert scored.nested[0] == pytest.approx(ticket.proof["perplexity"]["ticket"], rel=1e-5)
    asked = CertificateRequest(ratio="2/4", n=2, tokens=160, coverage=0.5, confidence=0.7)
    made = certify.certify(opened, asked, quiet=True)
    assert made.nested == scored.nested[0]
    # striped over two nodes: each holds every other place of the order
    left = lost_nodes.survivors(opened.block_map, 2, (1,), order)
    assert left == {n: tuple(sorted(o[::2])) for n, o in order.items()}
    plain = open_parent(start.template, "cpu", cut)
    with pytest.raises(ValueError, match="trained without an order of blocks"):
        extract.write(plain, tmp_path / "no", replace(request, pick="nested"), quiet=True)
    assert not (tmp_path / "no").exists()


# ---------------------------------------------------------------- the proof


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_the_proof_is_true(home, tmp_path, name):
    _, note = ask(home, tmp_path / "t", name, params="20k", data="text", tokens=480)
    text = tokens_by_hand(home / "text")[:480]
    n_params = sum(p.numel() for p in tiny_model(name).parameters())
    for who, model in (
        ("ticket", deploy.load_ticket(tmp_path / "t")),
        ("parent", tiny_model(name)),
    ):
        assert note["perplexity"][who] == pytest.approx(ppl_by_hand(model, text), rel=1e-4)
    assert note["perplexity"]["n_tokens"] == 480
    assert note["perplexity"]["data"] == str(home / "text")
    whole = note["parent"]
    assert 4 * n_params < whole["bytes"] < 4.8 * n_params  # and a header
    assert (whole["source"], whole["n_params"]) == (str(home / name), n_params)
    assert whole["speed"]["decode_ms"] > 0 < note["speed"]["prefill_ms"]
    assert 0 < note["max_logit_difference"] < 1e-5
    assert not note["whole"]
    assert {"command", "git", "versions", "device"} <= set(note)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "bfloat16"), ("qwen3", "float16")])
def test_half_precision(home, tmp_path, name, dtype):
    """Half the bytes; the rounded weights and nothing else differ."""
    text = {"data": "text", "tokens": 160}
    ratio = "1/2" if name == "gpt2" else "attn=2/3,ffn=1/2"
    opened, note = ask(home, tmp_path / "t", name, ratio=ratio, dtype=dtype, **text)
    saved = load_file(tmp_path / "t/model.safetensors")
    blueprint = {key: tuple(kept) for key, kept in note["blueprint"].items()}
    exact = deploy.cut_ticket(opened, blueprint)
    assert saved.keys() == huggingface.state(exact).keys()
    for key, value in huggingface.state(exact).items():
        assert saved[key].dtype == getattr(torch, dtype)
        assert torch.equal(saved[key], value.detach().to(saved[key].dtype))
    assert note["dtype"] == json.loads((tmp_path / "t/config.json").read_text())["dtype"] == dtype
    full = perplexity(exact, Text(open_tokens(str(home / "text")), SEQ_LEN, 160))
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
    segments = cut_segments(good.central.layout, odd, torch.device("cpu"))
    bad = replace(good, block_map=odd, central=replace(good.central, segments=segments))
    request = TicketRequest(ratio="1/2")
    words = r"differ from the masked parent's by .* nothing was written"
    with pytest.raises(FloatingPointError, match=words):
        extract.write(bad, tmp_path / "t", request, quiet=True)
    good.central.weights[0] = math.nan
    with pytest.raises(FloatingPointError, match="by nan"):
        extract.write(good, tmp_path / "t", request, quiet=True)
    assert not list(tmp_path.iterdir())
    # large logits round more: the check passes that, and still sees a wrong block
    big = open_(home, "llama")  # its head is its own
    big.central.layout.views(big.central.weights)["lm_head.weight"].mul_(100_000)
    ticket = extract.write(big, tmp_path / "t", request, quiet=True)
    name, kept = next(iter(ticket.blueprint.items()))
    others = sorted({*range(big.block_map[name].n_blocks)} - {*kept})[: len(kept)]
    moved = deploy.cut_ticket(big, ticket.blueprint | {name: tuple(others)})
    with pytest.raises(FloatingPointError, match="nothing was written"):
        extract.logit_difference(big, ticket.blueprint, moved)
    assert ticket.proof["max_logit_difference"] > 1e-3  # rounding alone


# ---------------------------------------------------------------- folders and disks


def test_only_tickets_are_replaced(home, tmp_path, monkeypatch):
    ask(home, tmp_path / "t", ratio="1/2", seed=1)
    (tmp_path / "t/notes.txt").write_text("mine")
    _, note = ask(home, tmp_path / "t", ratio="1/2", seed=2)
    assert note["pick"]["seed"] == 2
    assert (tmp_path / "t/notes.txt").read_text() == "mine"  # no part of the old ticket
    (tmp_path / "empty").mkdir()
    ask(home, tmp_path / "empty", ratio="1/2")
    (tmp_path / "file").write_text("precious")
    for name, files in {"work": ["thesis.tex"], "travel": ["ticket.json", "config.json"]}.items():
        (tmp_path / name).mkdir()
        for file in files:  # a name that is ours does not make it ours
            (tmp_path / name / file).write_text('{"from": "A", "to": "B"}')
    before = snapshot(tmp_path)
    for name in ("work", "file", "travel"):
        with pytest.raises(ValueError, match=rf"--out .*{name} exists and is no ticket"):
            ask(home, tmp_path / name, ratio="1/2")
    opened, other = open_(home, "gpt2"), open_(home, "llama-gqa")
    odd = opened.block_map.full() | {"transformer.h.0.attn": (0, 4)}
    for blueprint in (other.block_map.full(), odd):
        with pytest.raises(ValueError, match="blueprint"):
            deploy.save_ticket(opened, blueprint, tmp_path / "new")
    # the bytes that a budget was spent on are compared before the folder appears
    monkeypatch.setattr(deploy, "weights_bytes", lambda shapes, dtype: 12_345)
    with pytest.raises(OSError, match=r"has [\d,]+ bytes, not 12,345: nothing was written"):
        ask(home, tmp_path / "new", ratio="1/2")
    assert snapshot(tmp_path) == before


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
    """The system refuses to write on: one sentence, nothing half-written, an earlier one stays."""
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
    assert [line for line in done.stdout.splitlines() if line == "2"] == ["2", "2"], done.stderr
    sentences = done.stderr.strip().splitlines()
    assert len(sentences) == 2  # one for each folder
    for sentence in sentences:
        assert re.match("error: .*File too large", sentence)
    assert snapshot(tmp_path) == before


# ---------------------------------------------------------------- before the model is loaded


def refused(source: Path, out: Path, words: str, **asked) -> None:
    """The sentence comes although nothing could be loaded."""
    request = TicketRequest(**asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract, "open_parent", lambda *args: pytest.fail("it was loaded"))
        with pytest.raises(ValueError, match=words):
            list(extract.write_tickets(source, out, request, "cpu"))


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
    with pytest.raises(ValueError, match="--spend 'much': use one of measured, even"):
        TicketRequest(params="16k", spend="much")
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
    """The whole parent within the budget, which it then is; a ratio, even and stock widths."""
    opened, note = ask(home, tmp_path / "t", "llama", data="text", tokens=64, **asked)
    assert not losses
    assert note["spend"] == {"how": "even"}
    assert note["whole"] == (blocks_of(note) == opened.block_map.full_widths())
    if note["whole"]:
        ids = torch.arange(12)[None]
        ours = logits(deploy.load_ticket(tmp_path / "t"), ids)
        assert far(ours, logits(tiny_model("llama"), ids)) < 1e-5
    assert note["whole"] == ((len(asked) == 1 and "ratio" not in asked) or "memory" in asked)


@pytest.mark.parametrize(
    ("name", "what"), [("gpt2", {"params": "16k"}), ("llama", {"size": "70kB"})]
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
    assert ticket["spend"]["loss"] == pytest.approx(losses["measured"], rel=1e-4)
    assert ticket["spend"]["loss_of_even_widths"] == pytest.approx(losses["even"], rel=1e-4)
    assert losses["measured"] < losses["even"]


def test_without_text_nothing_is_measured_on_it(home, tmp_path, capsys):
    _, ticket = ask(home, tmp_path / "t", params="16k")
    assert ticket["spend"] == {"how": "even"}
    assert "perplexity" not in ticket
    said = capsys.readouterr().out
    assert "the budget is spent evenly" in said
    assert "no perplexity: " in said
    ask(home, tmp_path / "u", ratio="1/2", overrides=(f"data.valid={tmp_path / 'gone'}",))
    assert "the run's own tokens" in capsys.readouterr().out


# ---------------------------------------------------------------- the command


def test_several_budgets_make_several_tickets(home, tmp_path, monkeypatch, capsys):
    """A table for each on stdout, tickets that load, the command line beside their numbers."""
    text = ("--data", str(home / "text"), "--tokens", "64", "--seed", "5")
    args = ("extract", str(home / "gpt2"), *FIXED, *text, "-o", str(tmp_path / "deep/all"))
    budgets = ["--params", "16k", "--params", "20,000", "--ratio", "1/2", "--size", "1GB"]
    code, out, err = in_process(monkeypatch, capsys, *args, *budgets, "--pick", "best-of:2")
    assert (code, err) == (0, "")
    names = ["params-16k", "params-20-000", "ratio-1-2", "size-1GB"]
    assert sorted(os.listdir(tmp_path / "deep/all")) == names
    found = {name: recount(tmp_path / "deep/all" / name)[0] for name in names}
    assert found["params-16k"] <= 16_000 < found["params-20-000"] <= 20_000
    for name in names:
        deploy.load_ticket(tmp_path / "deep/all" / name)
        note = json.loads((tmp_path / "deep/all" / name / "ticket.json").read_text())
        assert note["command"].startswith("twistlm extract ")
        assert f"ticket: {tmp_path / 'deep/all' / name}" in out.replace("\n", "")
        for part in (f"{note['n_params']:,}", f"{note['bytes']:,}", "ms per decoded token",
                     f"{note['perplexity']['ticket']:.2f}"):  # fmt: skip
            assert part in out
    assert "the whole parent" in out
    twice = ("--params", "16k", "--params", "16k")
    code, _, err = in_process(monkeypatch, capsys, *args, *twice)
    assert (code, "params-16k is asked for twice" in err) == (2, True)


def test_a_ticket_is_no_parent(home, tmp_path):
    """Nor is its model in memory, nor its folder after somebody has removed ticket.json."""
    ask(home, tmp_path / "t", ratio="1/2")
    model = deploy.load_ticket(tmp_path / "t")
    shutil.copytree(tmp_path / "t", tmp_path / "bare")
    (tmp_path / "bare/ticket.json").unlink()
    for source in (tmp_path / "t", getattr(model, "model", model), tmp_path / "bare"):
        with pytest.raises(ValueError, match="is a ticket, which is cut already: give the parent"):
            open_parent(source)
