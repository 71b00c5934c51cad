"""Engines: every variant over ranks equals the local run; dropout against a loop by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import ranks
import torch
from checkpoints import FILES, FLOAT64_TRAIN, distance, metrics, same
from commands import toml, torchrun
from conftest import batch_of, make_tokens, tiny, tiny_table

from twistlm.data.stream import Batches
from twistlm.data.token_file import open_tokens
from twistlm.model import families, huggingface, masks
from twistlm.training import rounds
from twistlm.training.checkpoint import open_, template
from twistlm.training.teacher import write_cache

DROPOUT = {"method": "dropout", "precision": "float64", "clip": 0.5, "outer": "none"}


def test_dropout_is_adamw_on_the_joint_batch_behind_masks(tokens, tmp_path):
    """Stock Hugging Face and torch's AdamW; masks and scales are hooks of this test."""
    blocks = {"k_attn": [2, 4], "k_ffn": [3, 1, 2]}  # K cycles over steps
    cfg = tiny(tokens, tmp_path / "run", train=DROPOUT | {"scale": "inverse"}, blocks=blocks)
    last = rounds.train(cfg, quiet=True)
    model = huggingface.load(cfg.model, cfg.run.seed).double()
    block_map = families.partition(model, cfg.blocks)
    batches = Batches(open_tokens(tokens), 16, cfg.train.batch, cfg.run.seed)
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
    for step in range(cfg.train.rounds * cfg.train.interval):
        r, i = divmod(step, cfg.train.interval)
        turn = masks.WorkerRound(cfg.run.seed, r, 0, cfg.train.interval, 1)
        how = (block_map, block_map.full(), cfg.blocks, turn, {}, "dropout")
        drawn = masks.draw(*how, lambda group, k: 1.0)[i, 0].split(4)
        for group, kept in zip(block_map.groups, drawn, strict=True):
            key = (group.layer, "attn" if group.kind == "attn" else "mlp")
            k = [2, 4][step % 2] if group.kind == "attn" else [3, 1, 2][step % 3]
            assert kept.count_nonzero() == k
            kept_blocks[key].copy_(kept[:, None])
            factors[key] = 4 / k
        ids = torch.cat([batch_of(batches, 3, worker, step) for worker in range(3)])
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


MASKS = {"masks": "sequence", "mask_attn": [4, 2, 1], "mask_ffn": [4, 1, 3], "nested": 0.5}
MASKS["mask_depth"] = [0, 1, 2]
RECIPE = {
    "blocks": MASKS
    | {"k_attn": [4, 3, 2], "k_ffn": [4, 2, 3], "widths": "worker", "deal": "first", "sort": True},
    "train": FLOAT64_TRAIN | {"teacher": "start", "distil": 0.7},
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> tuple[dict, str]:
    """The config of a mask for every sequence, an order, unlike workers and a teacher; tokens."""
    folder = tmp_path_factory.mktemp("recipe")
    tokens = make_tokens(folder / "tokens", 400)
    start = rounds.train(tiny(tokens, folder / "start", train={"rounds": 1}), quiet=True)
    return RECIPE | {"model": {"weights": str(start), "config": {}}}, tokens


@pytest.fixture(scope="module")
def cached(recipe, tmp_path_factory) -> tuple[Path, dict, str]:
    """A run whose teacher's 8 likeliest tokens of 64 are stored beside the tokens."""
    config, tokens = recipe
    write_cache(open_tokens(tokens), config["model"]["weights"], 8, 16, "cpu", quiet=True)
    config = config | {"train": config["train"] | {"teacher": "cache"}}
    cfg = tiny(tokens, tmp_path_factory.mktemp("cached"), **config)
    return rounds.train(cfg, quiet=True), config, tokens


def test_the_command_under_torchrun_equals_local(tokens, tmp_path):
    """The one test that starts torchrun itself: its store, its environment, all imports."""
    train = FLOAT64_TRAIN | {"n_workers": 2}
    reference = rounds.train(tiny(tokens, tmp_path / "local", train=train), quiet=True)
    table = tiny_table(tokens, tmp_path / "run", train=train, run={"variant": "hybrid"})
    torchrun(2, "train", toml(tmp_path / "config.toml", table))
    assert distance(reference, tmp_path / "run/checkpoints/round-000004") < 1e-10


CONTROL = {"outer": "none"}
FLOAT32 = {"precision": "float32"}
# what runs over ranks: variant, number of ranks, changes of `train` and `run`, the reference's
# `run`, and whether the bits are the same
OVER_RANKS = {
    "masked": ("masked", 3, FLOAT32, {}, {"seat": "masked"}, True),
    "true": ("true", 4, FLOAT32, {}, {}, True),
    "true, int8": ("true", 4, FLOAT32, {"wire": "int8"}, {"wire": "int8"}, True),
    "dense": ("hybrid", 3, CONTROL | {"method": "dense"}, {}, {}, False),
    "dropout": (
        "hybrid", 3, CONTROL | {"method": "dropout", "scale": "measured"}, {}, {}, False,
    ),
    # with a K for each worker, masks of blocks and of layers
    "cached teacher": ("sharded", 3, FLOAT32 | {"teacher": "cache"}, {}, {}, True),
}  # fmt: skip


@pytest.fixture(scope="module")
def over_ranks(cached, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Name -> the checkpoints of the local run and of the ranks; one job per number of ranks."""
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
    """To 1e-10 in float64; in float32, or by a narrow wire, bit for bit if trainers are alike."""
    local, ours = over_ranks[name]
    if "teacher" in name:
        n_predictions = 3 * 3 * 2 * 15  # workers, steps, batch, tokens
        assert metrics(local.parents[1])[0]["bytes_teacher"] == n_predictions * 8 * 4
    if OVER_RANKS[name][-1]:
        same(local, ours)
    else:
        assert distance(local, ours, FILES if (local / FILES[2]).exists() else FILES[:2]) < 1e-10


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
    same(whole, parts)
    assert open_(whole).manifest["order"] == open_(parts).manifest["order"] != {}


@pytest.mark.parametrize(
    ("method", "teacher", "seat"),
    [
        ("twist", "cache", "physical"),
        ("twist", "start", "masked"),
        ("dropout", "start", "physical"),
    ],
)
def test_a_batch_in_pieces_is_the_same_step(cached, tmp_path, method, teacher, seat):
    """Each sequence takes its masks and its teacher's predictions with it."""
    _, config, tokens = cached
    blocks = config["blocks"] | ({"widths": "cycle"} if method == "dropout" else {})
    train = FLOAT64_TRAIN | {"teacher": teacher, "method": method, "batch": 4, "rounds": 2}
    made = []
    for n in (1, 2):
        own = {"blocks": blocks, "run": {"seat": seat}, "train": train | {"accumulate": n}}
        made.append(rounds.train(tiny(tokens, tmp_path / str(n), **config | own), quiet=True))
    assert 0 < distance(*made, FILES[:2]) < 1e-10


@pytest.mark.parametrize(("wire", "n"), [("fp32", 3), ("int8", 3), ("fp32", 1)])
def test_a_central_model_on_the_host_changes_no_bit(cached, tmp_path, wire, n):
    """Everything that goes between it, the trainers and the evaluator is copied, here as well; on
    the device one worker trains it in place."""
    _, config, tokens = cached
    blocks = config["blocks"] | {"k_attn": [4, 4, 2][:n], "k_ffn": [4, 2, 3][:n]}
    made, evals = [], []
    for place in ("device", "host"):
        own = {"central": place, "wire": wire, "eval_every": 2}
        own = {"blocks": blocks, "run": own, "train": config["train"] | {"n_workers": n}}
        cfg = tiny(tokens, tmp_path / place, **config | own)
        own: list = []
        made.append(rounds.train(cfg, quiet=True, on_round=own.append))
        evals.append([(row["loss"], row.get("eval")) for row in own])
    same(*made)
    assert evals[0] == evals[1]
    cfg = replace(cfg, train=replace(cfg.train, method="dense"))
    with pytest.raises(ValueError, match=r"run\.central = 'host': only for run\.variant = 'local'"):
        rounds.train(replace(cfg, run=replace(cfg.run, out=str(tmp_path / "no"))), quiet=True)


def test_workers_that_hold_all_blocks_draw_the_masks_of_their_twin(cached, tmp_path):
    """One local step in a round and plain SGD: the workers' mean is the synchronous twin's step."""
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


@pytest.mark.parametrize("kind", ["folder", "cache"])
def test_a_run_goes_on_with_the_teacher_it_began_with(recipe, tmp_path, kind):
    """Another teacher of the same name would change what is learned half-way."""
    config, _ = recipe
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


def test_a_run_goes_on_with_the_text_it_began_with(recipe, tmp_path):
    """Its ledger counts sequences of that text; another of the same name has others."""
    config, _ = recipe
    train = config["train"] | {"rounds": 1}
    tokens = make_tokens(tmp_path / "tokens")
    rounds.train(tiny(tokens, tmp_path / "run", **config | {"train": train}), quiet=True)
    make_tokens(tmp_path / "tokens", n_tokens=4000)
    longer = tiny(tokens, tmp_path / "run", **config | {"train": train | {"rounds": 2}})
    with pytest.raises(ValueError, match=r"cannot resume .* holds other tokens than when"):
        rounds.train(longer, resume=True, quiet=True)
    make_tokens(tmp_path / "tokens")
    assert rounds.train(longer, resume=True, quiet=True).name == "round-000002"
