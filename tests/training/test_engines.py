"""Engines: every variant over ranks equals the local run; structured dropout against a loop by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
import torch
from checkpoints import FILES, FLOAT64_TRAIN, distance
from commands import toml, torchrun
from conftest import make_tokens, tiny, tiny_table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from twistlm.config import Config, override
from twistlm.data.stream import Batches
from twistlm.data.token_file import open_tokens, write_meta
from twistlm.model import families, huggingface, masks
from twistlm.model.blocks import BlockMap, Blueprint
from twistlm.model.tokenizer import vocabulary_of
from twistlm.training import rounds
from twistlm.training.checkpoint import open_, template
from twistlm.training.teacher import write_cache

DROPOUT = {"method": "dropout", "precision": "float64", "clip": 0.5, "outer": "none"}


def drawn(block_map: BlockMap, cfg: Config, round: int, i: int) -> Blueprint:
    """Structured dropout's mask in step i of a round."""
    turn = masks.WorkerRound(cfg.run.seed, round, 0, cfg.train.interval, 1)
    values = masks.draw(
        block_map, block_map.full(), cfg.blocks, turn, {}, "dropout", lambda group, k: 1.0
    )[i, 0]
    kept = values.split([group.n_blocks for group in block_map.groups])
    return {
        group.name: tuple(piece.nonzero().flatten().tolist())
        for group, piece in zip(block_map.groups, kept, strict=True)
    }


@pytest.mark.parametrize("scale", ["sqrt", "inverse", "none"])
def test_dropout_is_adamw_on_the_joint_batch_behind_masks(tokens, tmp_path, scale):
    """Stock Hugging Face and torch's AdamW; masks and scales are hooks of this test."""
    blocks = {"k_attn": [2, 4], "k_ffn": [3, 1, 2]}  # K cycles over steps
    cfg = tiny(tokens, tmp_path / "run", train=DROPOUT | {"scale": scale}, blocks=blocks)
    last = rounds.train(cfg, quiet=True)
    model = huggingface.load(cfg.model, cfg.run.seed).double()
    block_map = families.partition(model, cfg.blocks)
    batches = Batches(open_tokens(tokens), 16, 3, cfg.train.batch, cfg.run.seed)
    kept_blocks, factors = {}, {}
    for layer in (1, 2):  # layer 0 is shared; 4 heads of 4 features, 4 chunks of 16 neurons
        for name, chunk in (("attn", 4), ("mlp", 16)):
            key, module = (layer, name), model.transformer.h[layer].get_submodule(f"{name}.c_proj")
            kept_blocks[key] = torch.ones(4, chunk, dtype=torch.float64)
            module.register_forward_pre_hook(
                lambda _, args, key=key: (args[0] * factors[key] * kept_blocks[key].flatten(),)
            )
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=cfg.train.lr, betas=cfg.train.betas,
    )  # fmt: skip
    formula = {
        "sqrt": lambda k: math.sqrt(4 / k),
        "inverse": lambda k: 4 / k,
        "none": lambda k: 1.0,
    }
    for step in range(cfg.train.rounds * cfg.train.interval):
        kept = drawn(block_map, cfg, *divmod(step, cfg.train.interval))
        for group in block_map.groups:
            key = (group.layer, "attn" if group.kind == "attn" else "mlp")
            k = [2, 4][step % 2] if group.kind == "attn" else [3, 1, 2][step % 3]
            assert len(kept[group.name]) == k
            kept_blocks[key].zero_()
            kept_blocks[key][list(kept[group.name])] = 1
            factors[key] = formula[scale](k)
        ids = torch.cat([batches(worker, step) for worker in range(3)])
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        adam.zero_grad()
        torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
    trained = template(open_(last))
    for (name, a), b in zip(trained.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=name)


def test_all_blocks_kept_is_plain_data_parallel(tokens, tmp_path):
    """K = N masks nothing: weights and moments are those of the other control."""
    made = {}
    for method in ("dense", "dropout"):
        cfg = tiny(
            tokens, tmp_path / method, train=DROPOUT | {"method": method},
            blocks={"k_attn": 4, "k_ffn": 4},
        )  # fmt: skip
        made[method] = rounds.train(cfg, quiet=True)
    assert distance(made["dense"], made["dropout"], FILES[:2]) < 1e-12


@pytest.mark.parametrize("scale", ["sqrt", "measured"])
def test_stop_and_resume_is_the_uninterrupted_run(tokens, tmp_path, scale):
    train = {"method": "dropout", "scale": scale, "moments": "reset"}  # a control has one optimizer
    whole = rounds.train(tiny(tokens, tmp_path / "whole", train=train), quiet=True)
    rounds.train(tiny(tokens, tmp_path / "parts", train=train | {"rounds": 2}), quiet=True)
    parts = rounds.train(tiny(tokens, tmp_path / "parts", train=train), resume=True, quiet=True)
    for name in FILES[:2]:
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name


def test_masks_are_fresh_uniform_and_keep_common_blocks(tokens, tmp_path):
    cfg = tiny(tokens, tmp_path / "run", blocks={"k_attn": 2, "k_ffn": 3, "common_ffn": [1]})
    block_map = families.partition(huggingface.load(cfg.model, 0), cfg.blocks)
    steps = [divmod(step, cfg.train.interval) for step in range(600)]
    all_drawn = [drawn(block_map, cfg, *step) for step in steps]
    other = override(cfg, ["run.seed=8"])
    assert drawn(block_map, cfg, *steps[-1]) == all_drawn[-1] != drawn(block_map, other, *steps[-1])
    for group in block_map.groups:
        kept = [blueprint[group.name] for blueprint in all_drawn]
        counts = [sum(block in hand for hand in kept) for block in range(4)]
        share = 1 / 2 if group.kind == "attn" else 2 / 3
        common = 600 if group.kind == "ffn" else counts[1]
        assert counts[1] == common
        assert all(abs(counts[b] - 600 * share) < 60 for b in (0, 2, 3))  # 5 standard deviations
    several = [len({blueprint[g.name] for g in block_map.groups}) for blueprint in all_drawn]
    assert max(several) > 2


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ({"k_attn": 5}, r"blocks.k_attn = 5 .* legal K are 1..4"),
        ({"k_ffn": 1, "common_ffn": [0, 2]}, r"blocks.k_ffn = 1 .* legal K are 2..4"),
        ({"common_ffn": [9]}, r"blocks.common_ffn = \[9\]"),
        ({"widths": "worker", "k_attn": [2, 2, 2]}, r"blocks.widths = 'worker'"),
    ],
)
def test_what_no_mask_can_keep_is_refused(tokens, tmp_path, blocks, sentence):
    cfg = tiny(tokens, tmp_path / "run", train={"method": "dropout"}, blocks=blocks)
    with pytest.raises(ValueError, match=sentence):
        rounds.train(cfg, quiet=True)
    assert not Path(cfg.run.out).exists()


def test_fewer_blocks_than_workers_can_cover_are_fine(tokens, tmp_path):
    """TwIST's 3 workers must cover 4 blocks between them; a mask need not."""
    blocks = {"k_attn": 1, "k_ffn": 1}
    rounds.train(
        tiny(tokens, tmp_path / "run", train={"method": "dropout"}, blocks=blocks), quiet=True
    )
    with pytest.raises(ValueError, match="infeasible"):
        rounds.train(tiny(tokens, tmp_path / "other", blocks=blocks), quiet=True)


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("local")
    tokens = make_tokens(folder / "tokens")
    return rounds.train(tiny(tokens, folder / "run", train=FLOAT64_TRAIN), quiet=True), tokens


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> tuple[Path, dict, str]:
    """A run with masks of every sequence, an order of blocks, unlike workers and a teacher; its config."""
    folder = tmp_path_factory.mktemp("recipe")
    tokens = make_tokens(folder / "tokens")
    start = rounds.train(tiny(tokens, folder / "start", train={"rounds": 1}), quiet=True)
    config = RECIPE | {"model": {"weights": str(start), "config": {}}}
    return rounds.train(tiny(tokens, folder / "run", **config), quiet=True), config, tokens


@pytest.fixture(scope="module")
def cached(recipe) -> tuple[Path, dict, str]:
    """The same run, whose teacher's 8 likeliest tokens of 64 are stored beside the tokens."""
    reference, config, tokens = recipe
    write_cache(open_tokens(tokens), config["model"]["weights"], 8, 16, "cpu", quiet=True)
    config = config | {"train": config["train"] | {"teacher": "cache"}}
    cfg = tiny(tokens, reference.parents[2] / "cached", **config)
    return rounds.train(cfg, quiet=True), config, tokens


def test_the_command_under_torchrun_equals_local(local, tmp_path):
    """The one test that starts torchrun itself: its store and its environment, with the command's own imports."""
    reference, tokens = local
    table = tiny_table(tokens, tmp_path / "run", train=FLOAT64_TRAIN, run={"variant": "hybrid"})
    torchrun(3, "train", toml(tmp_path / "config.toml", table))
    assert distance(reference, tmp_path / "run/checkpoints/round-000004") < 1e-10


RECIPE = {
    "blocks": {
        "masks": "sequence",
        "mask_attn": [4, 2, 1],
        "mask_ffn": [4, 1, 3],
        "nested": 0.5,
        "k_attn": [4, 3, 2],
        "k_ffn": [4, 2, 3],
        "widths": "worker",
    },
    "train": FLOAT64_TRAIN | {"teacher": "start", "distil": 0.7},
}


CONTROL = {"outer": "none"}
FLOAT32 = {"precision": "float32"}
# what runs over ranks: variant, number of ranks, changes of `train` and `run`, the local reference's
# `run`, and whether the bits are the same
OVER_RANKS = {
    "masked": ("masked", 3, {}, {}, {}, False),
    "masked, float32": ("masked", 3, FLOAT32, {}, {"seat": "masked"}, True),
    "true": ("true", 4, {}, {}, {}, False),
    "true, float32": ("true", 4, FLOAT32, {}, {}, True),
    "true, int8": ("true", 4, FLOAT32, {"wire": "int8"}, {"wire": "int8"}, True),
    "dense": ("hybrid", 3, CONTROL | {"method": "dense"}, {}, {}, False),
    "dropout": (
        "hybrid", 3, CONTROL | {"method": "dropout", "scale": "measured"}, {}, {}, False,
    ),
    "recipe": ("sharded", 3, {"teacher": "start"}, {}, {}, False),
    "cached teacher": ("sharded", 3, {"teacher": "cache"}, {}, {}, False),
}  # fmt: skip


@pytest.fixture(scope="module")
def over_ranks(cached, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Name -> the checkpoint of the local run and that of the ranks; one job for each number of ranks."""
    _, config, tokens = cached
    folder, made = tmp_path_factory.mktemp("ranks"), {}
    jobs: dict[int, list[dict]] = {3: [], 4: []}
    for name, (variant, n, train, run, own, _) in OVER_RANKS.items():
        sections = {"train": FLOAT64_TRAIN | train}
        if "teacher" in train:
            sections = config | {"train": config["train"] | train}
        made[name] = (folder / f"{name}-local", folder / name)
        over = tiny_table(tokens, made[name][1], **sections, run=run | {"variant": variant})
        jobs[n].append({"table": over})
        rounds.train(tiny(tokens, made[name][0], **sections, run=own), quiet=True)
    started = {n: ranks.train_all(n, folder / str(n), tables) for n, tables in jobs.items()}
    for n, processes in started.items():
        ranks.finish(processes, folder / str(n))
    last = "checkpoints/round-000004"
    return {name: (a / last, b / last) for name, (a, b) in made.items()}


@pytest.mark.parametrize("name", OVER_RANKS)
def test_ranks_equal_local(over_ranks, name):
    """To 1e-10 in float64; in float32, or rounded by a wire, bit for bit where trainers are alike."""
    local, ours = over_ranks[name]
    files = FILES if (local / FILES[2]).exists() else FILES[:2]
    if OVER_RANKS[name][-1]:
        assert all((ours / f).read_bytes() == (local / f).read_bytes() for f in files)
    else:
        assert distance(local, ours, files) < 1e-10


@pytest.mark.parametrize("which", ["local", "recipe", "cached"])
def test_masked_equals_physical(request, tmp_path, which):
    """In one process: the full model behind a mask, or the subnet itself."""
    found = request.getfixturevalue(which)
    reference, tokens, config = found[0], found[-1], found[1] if which != "local" else {}
    config = config or {"train": FLOAT64_TRAIN}
    cfg = tiny(tokens, tmp_path / "run", **config, run={"seat": "masked"})
    assert distance(reference, rounds.train(cfg, quiet=True)) < 1e-10
    if which == "cached":
        row = json.loads((reference.parents[1] / "metrics.jsonl").read_text().splitlines()[0])
        # workers, steps, batch, predictions
        assert row["bytes_teacher"] == 3 * 3 * 2 * 15 * 8 * 4


@pytest.mark.parametrize(("method", "teacher"), [("twist", "cache"), ("dropout", "start")])
def test_the_recipe_stopped_and_resumed_is_the_uninterrupted_run(cached, tmp_path, method, teacher):
    """The teacher is loaded again, the order is the checkpoint's: bit for bit."""
    _, config, tokens = cached
    blocks = config["blocks"] | ({"widths": "cycle"} if method == "dropout" else {})
    train = {"teacher": teacher, "method": method}
    config = config | {"blocks": blocks, "train": train}
    whole = rounds.train(tiny(tokens, tmp_path / "whole", **config), quiet=True)
    short = config | {"train": train | {"rounds": 2}}
    rounds.train(tiny(tokens, tmp_path / "parts", **short), quiet=True)
    parts = rounds.train(tiny(tokens, tmp_path / "parts", **config), resume=True, quiet=True)
    for name in FILES[:2]:
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    assert open_(whole).manifest["order"] == open_(parts).manifest["order"] != {}


def test_workers_that_hold_all_blocks_draw_the_masks_of_their_twin(cached, tmp_path):
    """One local step in a round and plain SGD: the mean of workers is the synchronous twin's step."""
    _, config, tokens = cached
    blocks = config["blocks"] | {"widths": "cycle", "k_attn": 4, "k_ffn": 4}
    # Adam's second moment swamped by eps: a step is a multiple of the first moment, which is linear
    train = FLOAT64_TRAIN | {"teacher": "cache", "interval": 1, "outer": "none", "clip": 0.0,
                             "eps": 1e6, "lr": 1e4, "weight_decay": 0.0, "warmup": 0}  # fmt: skip
    made = {}
    for method in ("twist", "dropout"):
        settings = config | {"blocks": blocks, "train": train | {"method": method}}
        made[method] = rounds.train(tiny(tokens, tmp_path / method, **settings), quiet=True)
    assert distance(made["twist"], made["dropout"], FILES[:1]) < 1e-8


def test_a_cache_of_everything_is_the_live_teacher(recipe, cached, tmp_path):
    """All 64 tokens of the vocabulary; what is left is float16's rounding."""
    live, config, tokens = recipe
    meta = open_tokens(tokens).meta
    stem = tmp_path / "tokens"
    Path(f"{stem}.bin").write_bytes(Path(f"{tokens}.bin").read_bytes())
    write_meta(stem, meta)
    weights = config["model"]["weights"]
    write_cache(open_tokens(str(stem)), weights, 64, 16, "cpu", quiet=True)
    config = config | {"train": config["train"] | {"teacher": "cache"}}
    made = rounds.train(tiny(str(stem), tmp_path / "run", **config), quiet=True)
    near, far = (distance(live, other, FILES[:1]) for other in (made, cached[0]))
    assert near < 0.1 * far


@pytest.mark.parametrize(
    ("section", "key", "value", "sentence"),
    [
        ("blocks", "mask_ffn", [5, 1, 1], r"blocks.mask_ffn = 5: a mask keeps 1..4 ffn blocks"),
        ("blocks", "mask_ffn", [1, 1], r"blocks.mask_attn = \[4, 2, 1\] and blocks.mask_ffn = \[1, 1\]"),
        ("blocks", "masks", "round", r"blocks.mask_attn = .* needs blocks.masks = 'step' or 'sequence'"),
        ("blocks", "nested", 1.5, r"blocks.nested = 1.5: must lie in 0..1"),
        ("train", "distil", -0.1, r"train.distil = -0.1: must lie in 0..1"),
        ("train", "teacher", "no/such-folder", r"train.teacher = 'no/such-folder' could not be"),
        ("model", "weights", "random", r"train.teacher = 'start' with model.weights = 'random'"),
    ],
)  # fmt: skip
def test_what_the_recipe_cannot_do_is_refused(recipe, tmp_path, section, key, value, sentence):
    _, config, tokens = recipe
    wrong = config | {section: config[section] | {key: value}}
    with pytest.raises(ValueError, match=sentence):
        rounds.train(tiny(tokens, tmp_path / "run", **wrong), quiet=True)
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize("kind", ["folder", "cache"])
def test_a_run_goes_on_with_the_teacher_it_began_with(recipe, tmp_path, kind):
    """Another teacher of the same name would change what is learned half-way, and nobody would see it."""
    _, config, _ = recipe
    tokens, folder = make_tokens(tmp_path / "tokens"), tmp_path / "teacher"
    teacher = "cache" if kind == "cache" else str(folder)
    train = config["train"] | {"teacher": teacher, "rounds": 1}

    def write(seed: int) -> None:
        huggingface.load(tiny(tokens, tmp_path / "other").model, seed).save_pretrained(folder)
        if kind == "cache":
            write_cache(open_tokens(tokens), str(folder), 8, 16, "cpu", quiet=True)

    write(0)
    rounds.train(tiny(tokens, tmp_path / "run", **config | {"train": train}), quiet=True)
    longer = tiny(tokens, tmp_path / "run", **config | {"train": train | {"rounds": 2}})
    write(1)
    with pytest.raises(ValueError, match=r"cannot resume .* its teacher has other weights"):
        rounds.train(longer, resume=True, quiet=True)
    write(0)
    assert rounds.train(longer, resume=True, quiet=True).name == "round-000002"


def test_a_teacher_has_one_name_in_every_precision(recipe, tmp_path):
    """On a GPU it is rounded to bf16: a run that moves between devices has the same teacher all the while."""
    _, config, tokens = recipe
    names = set()
    for precision in ("float32", "bf16"):
        train = config["train"] | {"rounds": 1, "precision": precision}
        cfg = tiny(tokens, tmp_path / precision, **config | {"train": train})
        made = json.loads((rounds.train(cfg, quiet=True) / "checkpoint.json").read_text())
        names.add(made["teacher"])
    assert len(names) == 1
    assert all(names)


def test_a_teacher_of_other_tokens_is_refused(recipe, tmp_path):
    _, config, tokens = recipe
    other = tiny(tokens, tmp_path / "other").model
    larger = {**other.config, "vocab_size": other.config["vocab_size"] + 8}
    folder = tmp_path / "teacher"
    huggingface.load(replace(other, config=larger), 0).save_pretrained(folder)
    wrong = config | {"train": config["train"] | {"teacher": str(folder)}}
    with pytest.raises(ValueError, match=r"knows \d+ tokens, the model \d+"):
        rounds.train(tiny(tokens, tmp_path / "run", **wrong), quiet=True)
    short = tmp_path / "short"
    fewer = {**other.config, "n_positions": 8}
    huggingface.load(replace(other, config=fewer), 0).save_pretrained(short)
    wrong = config | {"train": config["train"] | {"teacher": str(short)}}
    with pytest.raises(
        ValueError, match=r"data\.seq_len = 16: train\.teacher = .* has 8 positions"
    ):
        rounds.train(tiny(tokens, tmp_path / "run", **wrong), quiet=True)


def test_a_teacher_has_the_tokenizer_of_the_tokens(recipe, tmp_path, monkeypatch):
    """Files of one tokenizer differ in spacing, truncation and templates: what counts is that ids mean the same."""
    _, config, _ = recipe
    tokens, folder = make_tokens(tmp_path / "tokens"), tmp_path / "teacher"
    words = {f"w{i}": i for i in range(64)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(f"{tokens}.tokenizer.json")
    huggingface.load(tiny(tokens, tmp_path).model, 0).save_pretrained(folder)
    same = Tokenizer(WordLevel(words, unk_token="w0"))
    same.enable_truncation(8)
    same.post_processor = TemplateProcessing(single="$A w1", special_tokens=[("w1", 1)])
    same.save(str(folder / "tokenizer.json"), pretty=False)
    taught = config | {"train": config["train"] | {"teacher": str(folder), "rounds": 1}}
    rounds.train(tiny(tokens, tmp_path / "run", **taught), quiet=True)
    Tokenizer(WordLevel(words | {"w5": 6, "w6": 5}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )
    with pytest.raises(ValueError, match="its tokenizer is not that of"):
        rounds.train(tiny(tokens, tmp_path / "other", **taught), quiet=True)
    # of a hub id, from the hub's cache
    snapshot = tmp_path / "hub/models--me--teacher/snapshots/abc"
    snapshot.mkdir(parents=True)
    (folder / "tokenizer.json").rename(snapshot / "tokenizer.json")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    of_hub = vocabulary_of("me/teacher")
    assert of_hub is not None
    assert of_hub["w5"] == 6
    assert vocabulary_of("me/other") is vocabulary_of(str(folder)) is None
