"""A checkpoint gives back every bit, loads in plain transformers, and is refused when damaged."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import CPU, damages, random_central, random_progress
from conftest import VOCAB, make_tokens, tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import twistlm
from twistlm.model import families, huggingface
from twistlm.system import files
from twistlm.system.files import file_sha256
from twistlm.training import checkpoint, rounds
from twistlm.training.engines.local import Local
from twistlm.training.metrics import Metrics

TRAIN = {"outer": "nesterov(0.7, 0.6)", "scale": "measured"}


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return tiny(make_tokens(folder / "tokens"), folder / "run", train=TRAIN)


@pytest.fixture(scope="module")
def model(cfg):
    return huggingface.load(cfg.model, seed=3)


# ---------------------------------------------------------------- round trip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("carry", "outer"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_round_trip_is_exact(tmp_path, cfg, model, carry, outer, dtype):
    before = random_central(model, cfg, carry=carry, outer=outer)
    before.buffer = before.buffer.to(dtype) / 3  # float64 uses its whole mantissa
    if before.velocity is not None:
        before.velocity = before.velocity.to(dtype) / 3
    progress = random_progress(model, cfg)
    path = checkpoint.save(tmp_path, before, progress, cfg, model, None, keep=2)
    assert path == tmp_path / "round-000017"
    names = {"model.safetensors", "config.json", "checkpoint.json"}
    names |= {"moments.safetensors"} if carry else set()
    names |= {"outer.safetensors"} if outer else set()
    assert {p.name for p in path.iterdir()} >= names
    assert (path / "moments.safetensors").exists() == carry
    assert (path / "outer.safetensors").exists() == outer

    saved = checkpoint.verify(path)
    template = checkpoint.template(saved)
    block_map = families.partition(template, cfg.blocks)
    after = checkpoint.restore(saved, template, block_map, CPU)
    assert after.buffer.dtype == dtype
    assert torch.equal(after.buffer, before.buffer)
    assert (after.velocity is None) == (before.velocity is None)
    if after.velocity is not None:
        assert torch.equal(after.velocity, before.velocity)
    assert checkpoint.progress_of(saved, block_map) == progress
    assert progress.round == saved.round == 17
    assert saved.config == cfg


def test_restored_central_shares_nothing_with_the_template(tmp_path, cfg, model):
    """Training on after a resume must not write into the template that seats are cloned from."""
    path = checkpoint.save(
        tmp_path, random_central(model, cfg), random_progress(model, cfg), cfg, model, None, keep=1
    )
    saved = checkpoint.verify(path)
    template = checkpoint.template(saved)
    central = checkpoint.restore(saved, template, families.partition(template, cfg.blocks), CPU)
    central.buffer.zero_()
    assert all(p.abs().max() > 0 for p in template.parameters())


def test_transformers_loads_the_folder(tmp_path, cfg, model):
    """The weights and config.json are a plain Hugging Face folder with the central model's logits."""
    central = random_central(model, cfg)
    path = checkpoint.save(tmp_path, central, random_progress(model, cfg), cfg, model, None, keep=1)
    views = central.layout.views(central.weights)
    with torch.no_grad():
        reference = huggingface.load(cfg.model, seed=9)
        for name, param in reference.named_parameters():
            param.copy_(views[name])
        ids = torch.arange(30).view(2, 15) % VOCAB
        want = reference.eval()(ids).logits
        loaded = AutoModelForCausalLM.from_pretrained(path).eval()
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded(ids).logits, want)
        assert torch.equal(checkpoint.template(checkpoint.verify(path))(ids).logits, want)
    assert not torch.equal(want, model(ids).logits)  # the start weights would give others


def test_tokenizer_travels_with_the_weights(tmp_path, cfg, model):
    (tmp_path / "t.json").write_text('{"any": "bytes"}')
    path = checkpoint.save(
        tmp_path / "c",
        random_central(model, cfg),
        random_progress(model, cfg),
        cfg,
        model,
        tmp_path / "t.json",
        keep=1,
    )
    assert (path / "tokenizer.json").read_text() == '{"any": "bytes"}'
    saved = checkpoint.verify(path)
    assert saved.tokenizer_sha256 == file_sha256(tmp_path / "t.json")
    (path / "tokenizer.json").write_text('{"any": "thing"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json does not match"):
        checkpoint.verify(path)


def test_manifest_describes_the_run(tmp_path, cfg, model):
    path = checkpoint.save(
        tmp_path, random_central(model, cfg), random_progress(model, cfg), cfg, model, None, keep=1
    )
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["versions"]["twistlm"] == twistlm.__version__
    assert manifest["git"]
    assert manifest["command"]
    assert manifest["device"]
    for name, sha256 in manifest["files"].items():
        assert file_sha256(path / name) == sha256


# ---------------------------------------------------------------- which ones stay


def save_round(folder, cfg, model, r: int, keep: int = 9) -> Path:
    central, progress = random_central(model, cfg, seed=r), random_progress(model, cfg, r, r)
    return checkpoint.save(folder, central, progress, cfg, model, None, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_are_as_readable_as_any_other(tmp_path, cfg, model):
    """safetensors and mkdtemp make private ones; the umask alone decides here."""
    before = os.umask(0o027)
    try:
        path = save_round(tmp_path, cfg, model, 1, keep=1)
        with files.whole_folder(tmp_path / "deep") as draft:
            (draft / "inner").mkdir(mode=0o700)
            (draft / "inner/file").touch(0o600)
    finally:
        os.umask(before)
    modes = {file: file.stat().st_mode & 0o777 for file in tmp_path.rglob("*")}
    assert path / "model.safetensors" in modes
    assert tmp_path / "deep/inner/file" in modes
    assert modes == {file: 0o750 if file.is_dir() else 0o640 for file in modes}


def test_keep(tmp_path, cfg, model):
    for r in (1, 2, 3):
        save_round(tmp_path, cfg, model, r, keep=2)
    assert names(tmp_path) == ["round-000002", "round-000003"]
    save_round(tmp_path, cfg, model, 10, keep=1)
    assert names(tmp_path) == ["round-000010"]


@pytest.mark.parametrize(
    "step",
    [
        "system.files.save_file",
        "training.checkpoint.describe_run",
        "system.files._fsync",
        "system.files.os.rename",
    ],
)
def test_old_ones_go_only_after_the_new_one_is_complete(tmp_path, monkeypatch, cfg, model, step):
    """A disk that fills up at any moment of a save leaves what was there, and no debris."""
    save_round(tmp_path, cfg, model, 1, keep=1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"twistlm.{step}", full)
    with pytest.raises(OSError, match="No space left"):
        save_round(tmp_path, cfg, model, 2, keep=1)
    monkeypatch.undo()
    assert names(tmp_path) == ["round-000001"]
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert checkpoint.verify(tmp_path / "round-000001").round == 1


def test_saving_a_round_again_replaces_it(tmp_path, cfg, model):
    path = save_round(tmp_path, cfg, model, 4)
    (path / "model.safetensors").write_bytes(b"damaged")
    assert save_round(tmp_path, cfg, model, 4) == path
    assert checkpoint.verify(path).round == 4


def test_the_one_just_saved_is_never_removed(tmp_path, cfg, model):
    """After a fall-back, damaged checkpoints with higher numbers must not crowd out the good one."""
    for r in (2, 4, 6):
        save_round(tmp_path, cfg, model, r)
    for r in (4, 6):
        (tmp_path / f"round-00000{r}" / "model.safetensors").write_bytes(b"damaged")
    assert checkpoint.newest(tmp_path)[0].round == 2
    save_round(tmp_path, cfg, model, 3, keep=2)
    found, _ = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.round == 3


def test_a_leftover_draft_is_ignored(tmp_path, monkeypatch, cfg, model):
    """What a process killed just before the rename leaves has every file and still is no checkpoint."""

    def killed(*args):
        raise KeyboardInterrupt

    folder = tmp_path / "checkpoints"
    path = save_round(folder, cfg, model, 1)
    monkeypatch.setattr("twistlm.system.files.os.rename", killed)
    monkeypatch.setattr("twistlm.system.files.shutil.rmtree", lambda *args, **kwargs: None)
    with pytest.raises(KeyboardInterrupt):
        save_round(folder, cfg, model, 2)
    monkeypatch.undo()
    (leftover,) = set(folder.iterdir()) - {path}
    assert checkpoint.verify(leftover / "new").round == 2  # whole, but under no name that counts
    found, broken = checkpoint.newest(folder)
    assert (found.path, broken) == (path, [])
    save_round(folder, cfg, model, 3, keep=2)
    assert {path.name for path in folder.glob("round-*")} == {"round-000001", "round-000003"}
    assert checkpoint.open_(tmp_path).round == 3


def test_newest_falls_back_over_damaged_ones(tmp_path, cfg, model):
    folder = tmp_path / "checkpoints"
    paths = [save_round(folder, cfg, model, r) for r in (1, 2, 3, 4)]
    (paths[3] / "checkpoint.json").unlink()
    (paths[2] / "moments.safetensors").unlink()
    found, broken = checkpoint.newest(folder)
    assert found.round == 2
    assert [str(paths[3]) in broken[0], str(paths[2]) in broken[1]] == [True, True]
    assert "moments.safetensors is missing" in broken[1]
    assert checkpoint.open_(tmp_path).round == 2
    with pytest.raises(ValueError, match=r"moments\.safetensors is missing"):
        checkpoint.open_(paths[2])  # one that was asked for by name has no stand-in
    for path in paths[:2]:
        (path / "model.safetensors").write_bytes(b"")
    assert checkpoint.newest(folder)[0] is None
    with pytest.raises(ValueError, match=r"holds no valid checkpoint.*round-000004"):
        checkpoint.open_(tmp_path)


def test_newest_counts_in_numbers(tmp_path, cfg, model):
    """Round 1,000,000 comes after round 999,999 although its name sorts before."""
    for r in (999_999, 1_000_000):
        save_round(tmp_path, cfg, model, r)
    assert checkpoint.newest(tmp_path)[0].round == 1_000_000


def test_open_of_nothing(tmp_path):
    with pytest.raises(ValueError, match="holds no valid checkpoint") as caught:
        checkpoint.open_(tmp_path / "nowhere")
    assert "nowhere" in str(caught.value)


# ---------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cfg, model) -> Path:
    tokenizer = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.write_text('{"model": "a tokenizer"}\n')
    central = random_central(model, cfg)
    return checkpoint.save(
        tmp_path_factory.mktemp("whole"),
        central,
        random_progress(model, cfg),
        cfg,
        model,
        tokenizer,
        keep=1,
    )


def accepted(whole: Path, copy: Path, n: int, only: str | None = None) -> list[str]:
    """Damages that verify lets pass."""
    shutil.copytree(whole, copy)
    checkpoint.verify(copy)  # whole, it is fine
    missed = []
    for told, file, data in damages(copy, n, only):
        good = file.read_bytes()
        assert data != good
        file.write_bytes(data)
        try:
            checkpoint.verify(copy)
            missed.append(told)
        except ValueError:
            pass
        file.write_bytes(good)
    checkpoint.verify(copy)
    return missed


def test_no_damage_is_accepted(tmp_path, whole):
    """200 random damages to random files, each of them refused as a ValueError and nothing else."""
    assert accepted(whole, tmp_path / "copy", 200) == []


def test_no_damage_to_the_manifest_is_accepted(tmp_path, whole):
    """The manifest holds the round, the config and the counts: it must vouch for itself too."""
    assert accepted(whole, tmp_path / "copy", 200, "checkpoint.json") == []


def falls_back(folder: Path, cfg, model, n: int) -> None:
    """n random damages to the newest of two: each time the one before serves, and it is said why."""
    first, second = (save_round(folder, cfg, model, r) for r in (1, 2))
    rng = random.Random(n)
    for told, file, data in damages(second, n):
        good = file.read_bytes()
        file.unlink() if rng.random() < 0.1 else file.write_bytes(data)
        found, broken = checkpoint.newest(folder)
        file.write_bytes(good)
        assert found.path == first, told
        (sentence,) = broken
        assert str(second) in sentence, told
    assert checkpoint.newest(folder)[0].round == 2


def test_damages_fall_back(tmp_path, cfg, model):
    falls_back(tmp_path, cfg, model, 50)


@pytest.mark.chaos
def test_1000_damages_fall_back(tmp_path, cfg, model):
    falls_back(tmp_path, cfg, model, 1000)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"format": 1}',
        '{"files": {}}',
        '{"format": 1, "files": []}',
        "\ud800",
    ],
)
def test_a_nonsense_manifest_is_a_value_error(tmp_path, whole, text):
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "copy" / "checkpoint.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match="checkpoint"):
        checkpoint.verify(tmp_path / "copy")


def test_a_later_format_is_refused(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "copy")
    manifest = json.loads((whole / "checkpoint.json").read_text()) | {"format": 2}
    (tmp_path / "copy" / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="format 2"):
        checkpoint.verify(tmp_path / "copy")


def test_files_of_two_checkpoints_do_not_mix(tmp_path, cfg, model):
    """Each file is whole, but the weights are of another round."""
    first, second = (save_round(tmp_path, cfg, model, r) for r in (1, 2))
    shutil.copyfile(first / "model.safetensors", second / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors does not match"):
        checkpoint.verify(second)


def test_template_refuses_weights_that_do_not_fit_their_config(tmp_path, cfg, model):
    """Not reached by damage, which the hashes catch: by a hand that updates them."""
    path = save_round(tmp_path, cfg, model, 1)
    tensors = load_file(path / "model.safetensors")
    tensors["transformer.ln_f.bias"] = torch.zeros(5)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    saved = checkpoint.Checkpoint(path, {})
    with pytest.raises(ValueError, match=r"ln_f\.bias has shape \(5,\)"):
        checkpoint.template(saved)
    del tensors["transformer.ln_f.bias"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"disagree about transformer\.ln_f\.bias"):
        checkpoint.template(saved)


# ---------------------------------------------------------------- no pickle


PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
OBJECTS = re.compile(r"_object(_list)?$")  # torch.distributed's gather_object and its like


def runs_code(node: ast.AST) -> bool:
    """Whether this piece of source can turn bytes from a file or a peer into running code."""
    if isinstance(node, ast.Import):
        return bool({a.name.split(".")[0] for a in node.names} & PICKLES)
    if isinstance(node, ast.ImportFrom):
        module, taken = (node.module or "").split(".")[0], {a.name for a in node.names}
        loads = module == "torch" and taken & {"load", "save"}
        return module in PICKLES or bool(loads) or any(map(OBJECTS.search, taken))
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        loads = re.search(r"^torch$|serialization$", owner) and node.attr in ("load", "save")
        return bool(loads) or bool(OBJECTS.search(node.attr))
    if isinstance(node, ast.keyword):
        return node.arg in ("allow_pickle", "weights_only")
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in ("eval", "exec", "__import__")


def test_no_pickle_anywhere():
    """Neither a checkpoint nor a peer may ever run code: no module may even name the means."""
    root = Path(twistlm.__file__).parent
    sources = sorted(root.rglob("*.py"))
    assert len(sources) > 20
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(root)}, line {getattr(node, 'lineno', 0)}"
            assert not runs_code(node), where


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import shelve as s", "torch.load(f)", "torch.save(x, f)",
        "from torch import load", "torch.serialization.load(f)", "numpy.load(f, allow_pickle=True)",
        "dist.gather_object(x)", "dist.all_gather_object(a, b)", "dist.broadcast_object_list(x)",
        "from torch.distributed import scatter_object_list", "eval(text)",
    ],
)  # fmt: skip
def test_the_walk_sees_the_means(source):
    assert any(runs_code(node) for node in ast.walk(ast.parse(source)))


# ---------------------------------------------------------------- metrics.jsonl


PROMISED = {
    "round", "loss", "lr", "n_steps", "n_tokens", "seconds", "bytes_down", "bytes_up", "bytes_wire",
}  # fmt: skip


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def metrics(out: Path) -> list[dict]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=no_constant) for line in lines]


def test_metrics_of_a_single_subnet_are_json(tmp_path, tokens):
    """One subnet has no standard deviation; NaN would break every strict reader of the file."""
    run = {"eval_every": 0, "eval_n": 1, "eval_tokens": 64, "save_every": 0}
    rounds.train(tiny(tokens, tmp_path / "run", train={"rounds": 1}, run=run), quiet=True)
    (row,) = metrics(tmp_path / "run")
    assert row["eval"]["2/4"]["n"] == 1


def test_metrics_of_a_resumed_run_are_replaced_whole(tmp_path):
    """A crash while lines are dropped must not cost those that stay: they are not written over."""
    metrics_file = Metrics(tmp_path, 0)
    for number in (1, 2, 3):
        metrics_file.write({"round": number})
    with (tmp_path / "metrics.jsonl").open() as before:
        Metrics(tmp_path, 2)
        assert len(before.readlines()) == 3
    assert [row["round"] for row in metrics(tmp_path)] == [1, 2]


def test_metrics_that_a_full_disk_took_in_part(tmp_path):
    """The limit falls inside a line: what was taken of it does not stay, and no line is lost."""
    metrics_file = Metrics(tmp_path, 0)
    metrics_file.write({"round": 1, "loss": 1 / 3})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (metrics_file.size + 10, before[1]))
    try:
        metrics_file.write({"round": 2, "loss": 2 / 3})
        metrics_file.write({"round": 3, "loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "metrics.jsonl").stat().st_size > metrics_file.size  # it was cut inside
    metrics_file.write({"round": 4, "loss": 4 / 3})
    assert [row["round"] for row in metrics(tmp_path)] == [1, 2, 3, 4]


def interrupted(cfg, at: int, monkeypatch) -> None:
    """Train until round `at`, then die before its metrics and checkpoint are written."""
    whole_round = Local.round

    def dying(engine, progress):
        if progress.round == at:
            raise KeyboardInterrupt
        return whole_round(engine, progress)

    monkeypatch.setattr(Local, "round", dying)
    with pytest.raises(KeyboardInterrupt):
        rounds.train(cfg, quiet=True)
    monkeypatch.undo()


@pytest.mark.parametrize("save_every", [1, 2])
def test_metrics_after_a_resume(tmp_path, monkeypatch, tokens, save_every):
    """Rounds 1..n once each, in order, though some ran twice, and the losses of an unbroken run."""
    n = 5
    run = {"save_every": save_every, "keep": 9, "eval_every": 3, "eval_tokens": 256}
    straight = tiny(tokens, tmp_path / "straight", train=TRAIN | {"rounds": n}, run=run)
    rounds.train(straight, quiet=True)
    cfg = tiny(tokens, tmp_path / "run", train=TRAIN | {"rounds": n}, run=run)
    interrupted(cfg, 4, monkeypatch)
    out = tmp_path / "run"
    assert [row["round"] for row in metrics(out)] == [1, 2, 3, 4]
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "los')  # the line that the crash cut short
    # a damaged newest checkpoint: even more rounds run again
    newest = sorted((out / "checkpoints").iterdir())[-1]
    (newest / "model.safetensors").write_bytes(b"damaged")
    last = rounds.train(cfg, resume=True, quiet=True)
    assert last.name == f"round-{n:06d}"
    got, want = metrics(out), metrics(tmp_path / "straight")
    assert [row["round"] for row in got] == list(range(1, n + 1))
    for mine, reference in zip(got, want, strict=True):
        assert mine.keys() >= PROMISED
        assert ("eval" in mine) == (mine["round"] in (3, n))
        assert {k: v for k, v in mine.items() if k != "seconds"} == {
            k: v for k, v in reference.items() if k != "seconds"
        }
    t = cfg.train
    assert all(row["n_steps"] == t.n_workers * t.interval for row in got)
    assert all(
        row["n_tokens"] == t.n_workers * t.interval * t.batch * cfg.data.seq_len for row in got
    )
    for name in ("model", "moments", "outer"):
        paths = [
            p / f"checkpoints/round-{n:06d}/{name}.safetensors"
            for p in (out, tmp_path / "straight")
        ]
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_resuming_a_finished_run_changes_nothing(tmp_path, tokens):
    cfg = tiny(tokens, tmp_path / "run", train={"rounds": 2})
    last = rounds.train(cfg, quiet=True)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert rounds.train(cfg, resume=True, quiet=True) == last
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
