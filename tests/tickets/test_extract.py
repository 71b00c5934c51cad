"""A ticket for a budget: what is promised is counted again from the files that were written."""

import contextlib
import copy
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import in_process, snapshot
from conftest import make_tokens, tiny
from families_table import far, logits, perplexity, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from twistlm.compute import speed
from twistlm.data.token_file import TokenMeta, open_tokens, write_meta
from twistlm.lab import lost_nodes
from twistlm.model import generator, huggingface
from twistlm.model.blocks import BlockGroup, BlockMap, widths_of_ratio
from twistlm.model.layout import cut_segments
from twistlm.tickets import deploy, extract, importance
from twistlm.tickets.parent import Parent, open_parent
from twistlm.tickets.requests import ScoreRequest, TicketRequest
from twistlm.tickets.score import score_parent
from twistlm.tickets.text import calibrate, calibrate_on_tokens
from twistlm.tickets.widths import uniform_widths
from twistlm.training import rounds

SEQ_LEN = 16
FIXED = ("blocks.n_ffn=6", "blocks.shared_first=0", "blocks.shared_last=0", "data.seq_len=16")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Hugging Face folders of tiny models, and token files."""
    folder = tmp_path_factory.mktemp("choose")
    for name in ("gpt2", "llama", "llama-gqa", "mistral"):
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
    extract.make_ticket(opened, request, quiet=True).save(folder)
    return opened, json.loads((folder / "ticket.json").read_text())


def recount(folder: Path) -> tuple[int, int]:
    """Parameters in the weights file, and its bytes on disk."""
    file = folder / "model.safetensors"
    return sum(t.numel() for t in load_file(file).values()), os.stat(file).st_size


@pytest.mark.parametrize(
    ("name", "share", "kind", "dtype"),
    [("gpt2", 0.1, "params", "float32"), ("llama-gqa", 0.47, "size", "bfloat16")],
)
def test_a_budget_is_what_the_files_have(home, tmp_path, name, share, kind, dtype):
    """To the last block: test_budget.py. The least ticket that is told, written, has that much."""
    opened = open_(home, name)
    measure, unit = (0, "parameters") if kind == "params" else (1, "bytes")

    def written(widths: dict[str, int]) -> int:
        blueprint = generator.for_deployment(opened.block_map, widths, seed=1)
        model = deploy.cut_ticket(opened, blueprint).to(getattr(torch, dtype))
        deploy.save_ticket(opened, blueprint, tmp_path / "t", model=model)
        return recount(tmp_path / "t")[measure]

    least = written(dict.fromkeys(opened.block_map.full_widths(), 1))
    limit = int(least + share * (written(opened.block_map.full_widths()) - least))
    _, note = ask(home, tmp_path / "a", name, dtype=dtype, **{kind: str(limit)})
    counted = recount(tmp_path / "a")
    assert (note["n_params"], note["bytes"]) == counted
    spent = {"kind": kind, "asked": str(limit), "limit": limit, "spent": counted[measure]}
    assert note["budget"] == spent
    assert counted[measure] <= limit
    with pytest.raises(ValueError, match=rf"impossible: .* takes {least:,} {unit}"):
        ask(home, tmp_path / "c", name, dtype=dtype, **{kind: str(least - 1)})


def test_mistakes_are_told_before_the_model_is_loaded(home, tmp_path, monkeypatch):
    monkeypatch.setattr(extract, "open_parent", lambda *args: pytest.fail("it was loaded"))
    (tmp_path / "file").write_text("")
    gone = str(tmp_path / "gone")
    for out, words, asked in (
        ("t", "no tokens to calibrate on: give --data STEM", {"pick": "importance"}),
        ("t", "gone", {"pick": "importance", "data": gone}),
        ("t", "--stock: blocks.shared_first=2 .* leave layers whole", {"stock": True}),
        ("file", "exists and is no ticket", {}),
    ):
        request = TicketRequest(ratio="1/2", **asked)
        with pytest.raises(ValueError, match=words):
            list(extract.write_tickets(home / "gpt2", tmp_path / out, request, "cpu"))


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
    # begin and end; runs, one more to warm up; prompt and steps
    took = note["speed"]
    per_measurement = 2 * (1 + took["n_repeats"]) * (1 + took["n_steps"])
    readings, slow = [0.0], range(n_readings - per_measurement, n_readings)
    opened, note = ask(home, tmp_path / "t", latency="2ms")
    widths = {name: len(kept) for name, kept in note["blueprint"].items()}
    assert widths == uniform_widths(opened.block_map)[-2]
    assert note["speed"]["decode_ms"] == note["budget"]["spent"] == pytest.approx(1)
    readings, slow = [0.0], range(n_readings - per_measurement, 10**6)
    with pytest.raises(ValueError, match=r"impossible: the smallest ticket .* takes 3.00 ms"):
        ask(home, tmp_path / "u", latency="2ms")
    assert not (tmp_path / "u").exists()


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "mistral"])
def test_memory_is_weights_and_hugging_faces_own_cache(home, tmp_path, name):
    """Counted again from the ticket that was written."""
    asked = {"memory": "60_000", "context": "32", "dtype": "float16"}
    _, note = ask(home, tmp_path / "t", name, **asked)
    model = deploy.load_ticket(tmp_path / "t").float()
    ids = torch.arange(32)[None]
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    n_cached = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    if name == "mistral":  # of a window of 5 it stores 4: the newest is not in the cache yet
        n_cached = n_cached // 4 * 5
    n = sum(p.numel() for p in model.parameters()) + n_cached
    assert note["budget"]["spent"] == n * 2 <= 60_000
    assert not note["whole"]
    with pytest.raises(ValueError, match=r"--context 64: .* has 40 positions"):
        ask(home, tmp_path / "u", name, memory="1MB", context="64")


def text_of(model, stem: Path) -> str:
    """What a model writes itself: no other one has a smaller loss on it."""
    torch.manual_seed(0)
    first = torch.arange(120)[:, None] % 64
    ids = model.generate(first, max_new_tokens=15, min_new_tokens=15, do_sample=True, top_k=0)
    ids.numpy().astype("<u2").tofile(f"{stem}.bin")
    write_meta(stem, TokenMeta(ids.numel(), 1, 64, 63, "uint16", "none", None, ["own"]))
    return str(stem)


def test_a_layer_that_adds_nothing_is_the_first_to_go(tmp_path):
    """Of every budget; the loss of a ticket without it is that of the parent."""
    model = tiny_model("gpt2")
    for name in ("attn.c_proj.weight", "attn.c_proj.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"):
        model.get_parameter(f"transformer.h.1.{name}").data.zero_()
    opened, whole = open_parent(model, "cpu", FIXED), huggingface.shapes(model)
    n_layer = sum(math.prod(shape) for name, shape in whole.items() if ".1." in name)
    n_left = sum(map(math.prod, whole.values())) - n_layer
    text, kept = text_of(model, tmp_path / "text"), {1: 0}
    for asked in ({"params": str(n_left)}, {"layers": 2}, {"layers": 2, "params": str(n_left)}):
        request = TicketRequest(**asked, pick="random", data=text, tokens=480)
        ticket = extract.make_ticket(opened, request, quiet=True)
        ticket.save(tmp_path / "t")
        for group in opened.block_map.groups:
            assert len(ticket.blueprint[group.name]) == kept.get(group.layer, group.n_blocks)
        scores = ticket.proof["perplexity"]
        assert scores["ticket"] == pytest.approx(scores["parent"], rel=1e-5)
        assert recount(tmp_path / "t")[0] == ticket.proof["n_params"] == n_left
        assert json.loads((tmp_path / "t/config.json").read_text())["n_layer"] == 2
    half = TicketRequest(layers=2, ratio="1/2", pick="random", data=text, tokens=480)
    ticket = extract.make_ticket(opened, half, quiet=True)
    assert [len(blocks) for blocks in ticket.blueprint.values()] == [2, 3, 0, 0, 2, 3]
    text = {"pick": "random", "data": text, "tokens": 480}
    asked = [TicketRequest(params="18k", layers=layers, **text) for layers in (None, 3)]
    free, wide = (extract.make_ticket(opened, each, quiet=True).proof for each in asked)
    assert free["spend"]["loss"] <= wide["spend"]["loss"]
    # bytes and the cache of a budget are those of the file
    for asked in ({"size": "70kB"}, {"memory": "70kB", "context": "32"}):
        ticket = extract.make_ticket(opened, TicketRequest(**asked, layers=2, **text), quiet=True)
        ticket.save(tmp_path / "t")
        spent, (n_params, n_bytes) = ticket.proof["budget"]["spent"], recount(tmp_path / "t")
        n_heads = sum(len(ticket.blueprint[f"transformer.h.{i}.attn"]) for i in range(3))
        assert spent == (n_bytes if "size" in asked else 4 * (n_params + 2 * 32 * 8 * n_heads))


def test_latency_is_bought_with_layers(home, tmp_path, monkeypatch):
    """A clock of 10 ms a layer: only without one of three is a ticket fast enough."""

    def clock(models, *args):
        ms = [10.0 * m.config.num_hidden_layers for m in models]
        return [speed.Speed(one, one, one, 8, 8, 1, "cpu", 1) for one in ms]

    monkeypatch.setattr(speed, "measure_all", clock)
    text_of(tiny_model("gpt2"), home / "own")
    _, note = ask(home, tmp_path / "t", latency="20ms", data="own")
    widths = [len(kept) for kept in note["blueprint"].values()]
    assert sorted(widths) == [0, 0, 4, 4, 6, 6]  # 10 ms for all that is in a layer
    with pytest.raises(ValueError, match=r"impossible: the smallest .* takes 10\.00 ms"):
        ask(home, tmp_path / "u", latency="9ms", data="own")


def test_random_and_best_of_n_follow_the_seed(home, tmp_path):
    """Each draw is cut on its own and scored with a loop over stock forward passes."""
    opened = open_(home, "gpt2")
    widths, found = widths_of_ratio(opened.block_map, "1/2"), []
    for draw in range(5):
        kept = generator.for_deployment(opened.block_map, widths, seed=2, draw=draw)
        value = perplexity(deploy.cut_ticket(opened, kept), home / "text", SEQ_LEN, 400)
        found.append((value, {name: list(blocks) for name, blocks in kept.items()}))
    assert len({round(ppl, 3) for ppl, _ in found}) == 5
    _, one = ask(home, tmp_path / "a", ratio="1/2", seed=2)
    assert one["blueprint"] == found[0][1]
    text = {"data": "text", "tokens": 400}
    _, note = ask(home, tmp_path / "t", ratio="1/2", pick="best-of:5", seed=2, **text)
    assert note["pick"]["perplexities"] == pytest.approx([ppl for ppl, _ in found], rel=1e-4)
    best = min(found, key=lambda pair: pair[0])
    assert note["blueprint"] == best[1]
    found, whole = note["perplexity"], perplexity(tiny_model("gpt2"), home / "text", SEQ_LEN, 400)
    assert (found["ticket"], found["parent"]) == pytest.approx((best[0], whole), rel=1e-4)
    assert 0 <= note["max_logit_difference"] < 1e-5
    assert {"command", "git", "versions", "device", "speed"} <= set(note)


def test_calibration_takes_windows_of_the_named_text_or_the_training_text(home, tmp_path):
    """The same for `extract` (by tokens) and `prune` (by number): one order, one draw."""
    stems = (f"data.train={home / 'text'}", f"data.valid={home / 'other'}")
    both = open_(home, "gpt2", *stems)
    for data, stem in ((None, "text"), (str(home / "other"), "other")):
        text = np.fromfile(home / f"{stem}.bin", "<u2").reshape(-1, SEQ_LEN)
        taken = calibrate_on_tokens(both, data, 800, 0).ids
        rows = set(map(tuple, taken.tolist()))
        assert (len(rows), rows <= set(map(tuple, text.tolist()))) == (50, True)
        assert torch.equal(calibrate(both, data, 50, 0).ids, taken)
        assert not torch.equal(calibrate(both, data, 50, 1).ids, taken)
    # validation tokens are what results are measured on: nothing is fitted to them unasked
    gone = open_(home, "gpt2", f"data.train={tmp_path / 'gone'}", stems[1])
    with pytest.raises(ValueError, match="the run's own tokens"):
        calibrate(gone, None, 4, 0)


def test_a_ticket_of_the_best_neurons_keeps_those_that_matter_most(home, tmp_path):
    """By |dl/dm|^2 over the tokens of the calibration text, with a mask for every neuron."""
    cut = ("blocks.setting=ffn",)
    asked = {"ratio": "2/6", "pick": "neurons", "data": "text", "tokens": 64}
    parent, ticket = ask(home, tmp_path / "t", "llama", cut, **asked)
    assert ticket["pick"]["how"] == "neurons"
    assert ticket["pick"]["n_sequences"] == 64 // SEQ_LEN
    model, kept = parent.template, load_file(tmp_path / "t/model.safetensors")
    ids = calibrate_on_tokens(parent, str(home / "text"), 64, 0).ids
    for group in parent.block_map.groups:
        name = group.out[0]
        module = model.get_submodule(name.removesuffix(".weight"))
        gate = torch.ones(ids.shape[1], module.weight.shape[1], requires_grad=True)
        hook = module.register_forward_pre_hook(lambda _, args, gate=gate: (args[0] * gate,))
        losses = (model(input_ids=row[None], labels=row[None]).loss for row in ids)
        square = sum(torch.autograd.grad(loss, gate)[0].square().sum(0) for loss in losses)
        hook.remove()
        best = square.topk(2 * len(square) // 6).indices
        want = module.weight.detach()[:, best] * math.sqrt(6 / 2)  # train.scale
        columns = sorted(kept[name].float().T.tolist())
        torch.testing.assert_close(torch.tensor(columns), torch.tensor(sorted(want.T.tolist())))


def test_tickets_keep_the_common_blocks(home, tmp_path):
    """Of four heads and six chunks: without C most draws, and every score, miss one of them."""
    asked = {"overrides": ("blocks.common_attn=[1]", "blocks.common_ffn=[5,2]")}
    asked |= {"data": "text", "tokens": 64}
    kept = {"attn": {1}, "ffn": {2, 5}}
    for pick, what in (
        ("best-of:4", {"ratio": "attn=1/4,ffn=2/6"}),
        ("importance:magnitude", {"size": "46kB"}),
    ):
        parent, ticket = ask(home, tmp_path / "t", pick=pick, **asked, **what)
        for group in parent.block_map.groups:
            assert kept[group.kind] <= set(ticket["blueprint"][group.name])
    with pytest.raises(ValueError, match=r"no room for the 2 common ffn blocks.*legal: 2/6, 3/6"):
        widths_of_ratio(parent.block_map, "attn=1/4,ffn=1/6")
    bare = {g.name: (0,) if g.kind == "attn" else (0, 1) for g in parent.block_map.groups}
    with pytest.raises(ValueError, match="lacks common blocks"):
        deploy.cut_ticket(parent, bare)


def test_a_parent_with_an_order_gives_nested_tickets(home, tmp_path):
    """Scored before the first round and kept; extract, eval and drop go by it."""
    tokens = make_tokens(tmp_path / "tokens", 400)
    widths = {"masks": "sequence", "mask_attn": [4, 2, 1], "mask_ffn": [4, 1, 2], "nested": 0.5}
    blocks = widths | {"k_attn": 4, "k_ffn": 4, "mask_depth": [0, 1, 0]}
    cfg = tiny(tokens, tmp_path / "run", blocks=blocks, train={"rounds": 1})
    rounds.train(cfg, quiet=True)
    opened = open_parent(tmp_path / "run", "cpu")
    order = dict(opened.progress.order)
    layers = order.pop("layers")
    # the start's own scores: the same weights, the same windows
    cut = ("blocks.n_ffn=4", "blocks.shared_first=1", "blocks.shared_last=0")
    start = open_parent(huggingface.load(cfg.model, cfg.run.seed), "cpu", cut)
    ids = open_tokens(tokens).sequences(list(range(25)), 16)
    for name, values in importance.score(start, "mask-fisher", ids).items():
        assert order[name] == tuple(sorted(range(4), key=lambda b, v=values: -float(v[b])))
    # of layers: the loss of the start without each
    losses = {}
    for layer in (1, 2):
        model = copy.deepcopy(start.template)
        for name in ("attn.c_proj", "mlp.c_proj"):
            model.get_parameter(f"transformer.h.{layer}.{name}.weight").data.zero_()
        with torch.no_grad():
            losses[layer] = float(model(input_ids=ids, labels=ids).loss)
    assert layers == tuple(sorted(losses, key=losses.__getitem__, reverse=True))
    shallow = extract.make_ticket(opened, TicketRequest(layers=2, tokens=160), quiet=True)
    assert {n for n, kept in shallow.blueprint.items() if kept} == {
        f"transformer.h.{layers[0]}.{kind}" for kind in ("attn", "ffn")
    }
    # half of every layer, without --pick
    request = TicketRequest(ratio="2/4", tokens=160)
    ticket = extract.make_ticket(opened, request, quiet=True)
    assert ticket.proof["pick"]["how"] == "nested"
    halves = {n: set(o[:2]) for n, o in order.items()}
    assert {n: set(kept) for n, kept in ticket.blueprint.items()} == halves
    asked = ScoreRequest(ratios=("2/4",), n=2, tokens=160)
    scored = score_parent(opened, asked, "x", quiet=True)
    assert scored.nested[0] == pytest.approx(ticket.proof["perplexity"]["ticket"], rel=1e-5)
    # striped over two nodes: each holds every other place of the order
    left = lost_nodes.survivors(opened.block_map, 2, (1,), order)
    assert left == {n: tuple(sorted(o[::2])) for n, o in order.items()}
    with pytest.raises(ValueError, match="trained without an order of blocks"):
        ask(home, tmp_path / "no", ratio="1/2", pick="nested")


def test_a_wrong_cut_is_not_written(home, tmp_path):
    """A map that takes q, k and v for one section cuts other columns than the mask hides."""
    good = open_(home, "gpt2")

    def wrong(group: BlockGroup) -> BlockGroup:
        parts = (
            replace(p, sections=1, chunk=p.chunk * 3) if p.sections == 3 else p for p in group.parts
        )
        return replace(group, parts=tuple(parts))

    odd = BlockMap(tuple(wrong(group) for group in good.block_map.groups))
    segments = cut_segments(good.central.layout, odd, torch.device("cpu"))
    bad = replace(good, block_map=odd, central=replace(good.central, segments=segments))
    request = TicketRequest(ratio="1/2")
    words = r"differ from the masked parent's by .* nothing was written"
    with pytest.raises(FloatingPointError, match=words):
        extract.make_ticket(bad, request, quiet=True).save(tmp_path / "t")
    good.central.weights[0] = math.nan
    with pytest.raises(FloatingPointError, match="by nan"):
        extract.make_ticket(good, request, quiet=True).save(tmp_path / "t")
    assert not list(tmp_path.iterdir())
    # large logits round more: the check passes that
    big = open_(home, "llama")  # its head is its own
    big.central.layout.views(big.central.weights)["lm_head.weight"].mul_(100_000)
    ticket = extract.make_ticket(big, request, quiet=True)
    assert ticket.proof["max_logit_difference"] > 1e-3  # rounding alone


def test_the_proof_is_of_the_rounded_ticket(home, tmp_path):
    """Measured again from the files; the float32 ticket stands for the masked parent."""
    text, models = {"data": "text", "tokens": 400}, {}
    for dtype in ("float32", "bfloat16"):
        _, note = ask(home, tmp_path / dtype, "llama", ratio="1/2", dtype=dtype, **text)
        models[dtype] = deploy.load_ticket(tmp_path / dtype)
    ids = torch.randint(64, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    rounded = far(*(logits(model, ids).float() for model in models.values()))
    assert note["max_logit_difference"] == pytest.approx(rounded, rel=1e-3)
    assert rounded > 1e-5
    whole = AutoModelForCausalLM.from_pretrained(home / "llama", dtype="bfloat16")
    for who, model in {"ticket": models["bfloat16"], "parent": whole}.items():
        want = perplexity(model, home / "text", SEQ_LEN, 400)
        assert note["perplexity"][who] == pytest.approx(want, rel=1e-5), who


@pytest.mark.parametrize("weight", ["lm_head", "model.embed_tokens"])
def test_a_ticket_that_overflows_in_its_dtype_is_not_written(home, tmp_path, weight):
    """All logits do, or those after one token of the text, which is not among the random ones."""
    big, words = open_(home, "llama"), "--dtype float16: the ticket's logits are not finite"
    drawn = torch.randint(64, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    unseen = min(set(range(64)) - set(drawn.flatten().tolist()))
    rows = slice(None) if weight == "lm_head" else unseen
    big.central.layout.views(big.central.weights)[f"{weight}.weight"][rows] *= 1e8
    asked = {"ratio": "1/2", "pick": "random"}
    if weight != "lm_head":
        asked |= {"data": str(home / "text"), "tokens": 400}
    for dtype in ("bfloat16", "float16"):
        caught = pytest.raises(ValueError, match=words)
        with caught if dtype == "float16" else contextlib.nullcontext():
            extract.make_ticket(big, TicketRequest(**asked, dtype=dtype), quiet=True)


def test_only_tickets_are_replaced(home, tmp_path, monkeypatch):
    """What is left in a ticket's folder: tests/test_files.py."""
    (tmp_path / "travel").mkdir()
    for file in ("ticket.json", "config.json"):  # a name that is ours does not make it ours
        (tmp_path / "travel" / file).write_text('{"from": "A", "to": "B"}')
    before, opened = snapshot(tmp_path), open_(home, "gpt2")
    with pytest.raises(ValueError, match=r"^out .*travel exists and is no ticket"):
        ask(home, tmp_path / "travel", ratio="1/2")
    for odd in ({"other": (0,)}, {"transformer.h.0.attn": (0, 4)}):
        with pytest.raises(ValueError, match="blueprint"):
            deploy.save_ticket(opened, opened.block_map.full() | odd, tmp_path / "new")
    # the bytes that a budget was spent on are compared before the folder appears
    monkeypatch.setattr(deploy, "weights_bytes", lambda shapes, dtype: 12_345)
    with pytest.raises(OSError, match=r"have [\d,]+ bytes, not 12,345: nothing was written"):
        ask(home, tmp_path / "new", ratio="1/2")
    assert snapshot(tmp_path) == before


def test_what_needs_no_measurement(home, tmp_path, capsys):
    """The whole parent within the budget, which it then is; stock widths; no text at all."""
    text, even = {"data": "text", "tokens": 64}, {"how": "even"}
    _, note = ask(home, tmp_path / "whole", "llama", size="1GB", **text)
    assert (note["spend"], note["whole"]) == (even, True)
    ids = torch.arange(12)[None]
    ours = logits(deploy.load_ticket(tmp_path / "whole"), ids)
    assert far(ours, logits(tiny_model("llama"), ids)) < 1e-5
    # heads are 1, 2 or 4 and of 1,024 parameters in each of 3 layers, FFN blocks of 768
    _, note = ask(home, tmp_path / "stock", "llama", params="20k", stock=True, **text)
    assert (note["spend"], note["n_params"]) == (even, 2 * 64 * 32 + 7 * 32 + 3 * (2048 + 4 * 768))
    capsys.readouterr()
    _, note = ask(home, tmp_path / "t", params="16k")
    assert (note["spend"], note.get("perplexity")) == (even, None)
    said = capsys.readouterr().out
    assert "the budget is spent evenly" in said
    assert "no perplexity: " in said


def test_the_losses_in_the_record_are_those_of_the_tickets(home, tmp_path):
    """Both folders loaded from disk, with Hugging Face's own loss on the calibration windows."""
    asked = {"pick": "importance:magnitude", "data": "text", "tokens": 256, "params": "16k"}
    losses = {}
    for how in ("even", "measured"):
        parent, ticket = ask(home, tmp_path / how, spend=how, **asked)
        ids = calibrate_on_tokens(parent, str(home / "text"), 256, 0).ids
        with torch.no_grad():
            losses[how] = float(deploy.load_ticket(tmp_path / how)(ids, labels=ids).loss)
    assert ticket["spend"]["loss"] == pytest.approx(losses["measured"], rel=1e-4)
    assert ticket["spend"]["loss_of_even_widths"] == pytest.approx(losses["even"], rel=1e-4)
    assert losses["measured"] < losses["even"]


def test_several_budgets_make_several_tickets(home, tmp_path, monkeypatch, capsys):
    """A table for each on stdout, tickets that load, the command line beside their numbers."""
    text = ("--data", str(home / "text"), "--tokens", "64", "--seed", "5")
    args = ("extract", str(home / "gpt2"), *FIXED, *text, "-o", str(tmp_path / "all"))
    budgets = {"params-16k": "--params=16k", "ratio-1-2": "--ratio=1/2"}
    code, out, err = in_process(monkeypatch, capsys, *args, *budgets.values())
    assert (code, err, sorted(os.listdir(tmp_path / "all"))) == (0, "", list(budgets))
    assert recount(tmp_path / "all/params-16k")[0] <= 16_000
    for name in budgets:
        model = deploy.load_ticket(tmp_path / "all" / name)
        note = json.loads((tmp_path / "all" / name / "ticket.json").read_text())
        assert note["command"].startswith("twistlm extract ")
        assert f"ticket: {tmp_path / 'all' / name}" in out.replace("\n", "")
        for part in (f"{note['n_params']:,}", f"{note['perplexity']['ticket']:.2f}"):
            assert part in out
    # nor is a ticket's model in memory a parent, or its folder without its ticket.json
    (tmp_path / "all/ratio-1-2/ticket.json").unlink()
    for source in (model, tmp_path / "all/ratio-1-2"):
        with pytest.raises(ValueError, match="is a ticket, which is cut already: give the parent"):
            open_parent(source)
