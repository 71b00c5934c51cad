"""A checkpoint gives back every bit, loads in plain transformers, and is refused when damaged."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import CPU, FILES, damages, random_central, random_progress
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


def save_round(folder, cfg, model, r: int, keep: int = 9) -> Path:
    central, progress = random_central(model, cfg, seed=r), random_progress(model, cfg, r, r)
    return checkpoint.save(folder, central, progress, cfg, model, None, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- round trip


@pytest.mark.parametrize(
    ("carry", "outer", "dtype"),
    [
        (True, True, torch.float32),
        (True, False, torch.float64),
        (False, True, torch.float64),
        (False, False, torch.float32),
    ],
)
def test_round_trip_is_exact(tmp_path, cfg, model, carry, outer, dtype):
    before = random_central(model, cfg, carry=carry, outer=outer)
    before.buffer = before.buffer.to(dtype) / 3  # float64 uses its whole mantissa
    if outer:
        before.velocity = before.velocity.to(dtype) / 3
    progress = random_progress(model, cfg)
    path = checkpoint.save(tmp_path, before, progress, cfg, model, None, keep=2)
    assert path == tmp_path / "round-000017"
    assert [(path / name).exists() for name in FILES] == [True, carry, outer]
    saved = checkpoint.verify(path)
    template = checkpoint.template(saved)
    block_map = families.partition(template, cfg.blocks)
    after = checkpoint.restore(saved, template, block_map, CPU)
    assert after.buffer.dtype == dtype
    assert torch.equal(after.buffer, before.buffer)
    assert torch.equal(after.velocity, before.velocity) if outer else after.velocity is None
    assert checkpoint.progress_of(saved, block_map) == progress
    assert (saved.round, saved.config) == (17, cfg)
    after.buffer.zero_()  # training on must not write into the template
    assert all(p.abs().max() > 0 for p in template.parameters())


def test_transformers_loads_the_folder(tmp_path, cfg, model):
    """A plain Hugging Face folder with the central model's logits, a tokenizer and a manifest."""
    (tmp_path / "t.json").write_text('{"any": "bytes"}')
    central, progress = random_central(model, cfg), random_progress(model, cfg)
    tokenizer = tmp_path / "t.json"
    path = checkpoint.save(tmp_path / "c", central, progress, cfg, model, tokenizer, keep=1)
    saved = checkpoint.verify(path)
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
        assert torch.equal(checkpoint.template(saved)(ids).logits, want)
    assert not torch.equal(want, model(ids).logits)  # the start weights would give others
    assert saved.tokenizer_sha256 == file_sha256(path / "tokenizer.json") == file_sha256(tokenizer)
    assert saved.manifest["versions"]["torch"] == torch.__version__
    assert saved.manifest["versions"]["twistlm"] == twistlm.__version__
    assert all(saved.manifest[key] for key in ("git", "command", "device"))


# ---------------------------------------------------------------- which ones stay


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
    assert {path / "model.safetensors", tmp_path / "deep/inner/file"} <= modes.keys()
    assert modes == {file: 0o750 if file.is_dir() else 0o640 for file in modes}


def test_which_ones_stay(tmp_path, cfg, model):
    for r in (1, 2, 3):
        save_round(tmp_path, cfg, model, r, keep=2)
    assert names(tmp_path) == ["round-000002", "round-000003"]
    (tmp_path / "round-000003/model.safetensors").write_bytes(b"damaged")
    save_round(tmp_path, cfg, model, 3)  # a round that is saved again is replaced
    assert checkpoint.verify(tmp_path / "round-000003").round == 3
    for r in (5, 6):  # damaged ones with higher numbers do not crowd out the one just saved
        (save_round(tmp_path, cfg, model, r) / "model.safetensors").write_bytes(b"damaged")
    save_round(tmp_path, cfg, model, 4, keep=1)
    assert checkpoint.newest(tmp_path)[0].round == 4
    for r in (999_999, 1_000_000):  # names sort the other way round
        save_round(tmp_path, cfg, model, r, keep=1 + r % 2)
    assert names(tmp_path) == ["round-1000000"]


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
    before = contents(tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"twistlm.{step}", full)
    with pytest.raises(OSError, match="disk is full"):
        save_round(tmp_path, cfg, model, 2, keep=1)
    assert names(tmp_path) == ["round-000001"]
    assert contents(tmp_path) == before


def test_a_leftover_draft_is_ignored(tmp_path, monkeypatch, cfg, model):
    """What a kill just before the rename leaves has every file and still is no checkpoint."""

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
    save_round(folder, cfg, model, 3)
    assert names(folder) == ["round-000001", "round-000003"]


def test_newest_falls_back_over_damaged_ones(tmp_path, cfg, model):
    folder = tmp_path / "checkpoints"
    paths = [save_round(folder, cfg, model, r) for r in (1, 2, 3, 4)]
    (paths[3] / "checkpoint.json").unlink()
    (paths[2] / "moments.safetensors").unlink()
    found, broken = checkpoint.newest(folder)
    assert found.round == checkpoint.open_(tmp_path).round == 2
    assert str(paths[3]) in broken[0]
    assert str(paths[2]) in broken[1]
    assert "moments.safetensors is missing" in broken[1]
    with pytest.raises(ValueError, match=r"moments\.safetensors is missing"):
        checkpoint.open_(paths[2])  # one that was asked for by name has no stand-in
    # each file is whole, but the weights are of another round
    shutil.copyfile(paths[0] / "model.safetensors", paths[1] / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors does not match"):
        checkpoint.verify(paths[1])
    (paths[0] / "model.safetensors").write_bytes(b"")
    assert checkpoint.newest(folder)[0] is None
    with pytest.raises(ValueError, match=r"holds no valid checkpoint.*round-000004"):
        checkpoint.open_(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere holds no valid checkpoint"):
        checkpoint.open_(tmp_path / "nowhere")


# ---------------------------------------------------------------- damage


def test_no_damage_is_accepted(tmp_path, cfg, model):
    """200 random damages to any file and to the manifest: each is a ValueError and nothing else."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text('{"model": "a tokenizer"}\n')
    central, progress = random_central(model, cfg), random_progress(model, cfg)
    path = checkpoint.save(tmp_path / "c", central, progress, cfg, model, tokenizer, keep=1)
    for only in (None, "checkpoint.json"):  # which vouches for itself, too
        for told, file, data in damages(path, 200, only):
            good = file.read_bytes()
            assert data != good
            file.write_bytes(data)
            with pytest.raises(ValueError, match="checkpoint"):
                print(told, checkpoint.verify(path))
            file.write_bytes(good)
    checkpoint.verify(path)


@pytest.mark.parametrize("n", [50, pytest.param(1000, marks=pytest.mark.chaos)])
def test_damages_fall_back(tmp_path, cfg, model, n):
    """n random damages to the newest of two: the one before serves, and it is said why."""
    first, second = (save_round(tmp_path, cfg, model, r) for r in (1, 2))
    rng = random.Random(n)
    for told, file, data in damages(second, n):
        good = file.read_bytes()
        file.unlink() if rng.random() < 0.1 else file.write_bytes(data)
        found, broken = checkpoint.newest(tmp_path)
        file.write_bytes(good)
        assert found.path == first, told
        (sentence,) = broken
        assert str(second) in sentence, told
    assert checkpoint.newest(tmp_path)[0].round == 2


def test_a_nonsense_manifest_is_a_value_error(tmp_path, cfg, model):
    path = save_round(tmp_path, cfg, model, 1)
    good = json.loads((path / "checkpoint.json").read_text())
    texts = ["", "[]", "null", "{}", '{"format": 1}', '{"files": {}}', '{"format": 1, "files": []}']
    for text in (*texts, "\ud800"):
        (path / "checkpoint.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(ValueError, match="checkpoint"):
            checkpoint.verify(path)
    (path / "checkpoint.json").write_text(json.dumps(good | {"format": 2}))
    with pytest.raises(ValueError, match="format 2"):
        checkpoint.verify(path)


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


# ---------------------------------------------------------------- metrics.jsonl


PROMISED = {"round", "loss", "lr", "n_steps", "n_tokens", "seconds"}
PROMISED |= {"bytes_down", "bytes_up", "bytes_wire"}


def metrics(out: Path) -> list[dict]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=no_constant) for line in lines]


def test_metrics_are_replaced_whole_and_a_full_disk_takes_no_line(tmp_path):
    metrics_file = Metrics(tmp_path, 0)
    for number in (1, 2, 3):
        metrics_file.write({"round": number})
    with (tmp_path / "metrics.jsonl").open() as before:
        metrics_file = Metrics(tmp_path, 2)  # a crash meanwhile must not cost lines that stay
        assert len(before.readlines()) == 3
    assert [row["round"] for row in metrics(tmp_path)] == [1, 2]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (metrics_file.size + 10, limit[1]))
    try:
        metrics_file.write({"round": 3, "loss": 2 / 3})
        metrics_file.write({"round": 4, "loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (tmp_path / "metrics.jsonl").stat().st_size > metrics_file.size  # it was cut in a line
    metrics_file.write({"round": 5, "loss": 4 / 3})
    assert [row["round"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_metrics_after_a_resume(tmp_path, monkeypatch, tokens):
    """Rounds 1..n once each, in order, though some ran twice, and the losses of an unbroken run."""
    n, out, straight = 5, tmp_path / "run", tmp_path / "straight"
    # one subnet has no standard deviation: NaN would break every strict reader of the file
    run = {"save_every": 2, "keep": 9, "eval_every": 3, "eval_tokens": 256, "eval_n": 1}
    rounds.train(tiny(tokens, straight, train=TRAIN | {"rounds": n}, run=run), quiet=True)
    cfg = tiny(tokens, out, train=TRAIN | {"rounds": n}, run=run)
    whole_round = Local.round

    def dying(engine, progress):
        if progress.round == 4:
            raise KeyboardInterrupt
        return whole_round(engine, progress)

    monkeypatch.setattr(Local, "round", dying)
    with pytest.raises(KeyboardInterrupt):
        rounds.train(cfg, quiet=True)
    monkeypatch.undo()
    assert [row["round"] for row in metrics(out)] == [1, 2, 3, 4]
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "los')  # the line that the crash cut short
    # a damaged newest checkpoint: even more rounds run again
    newest = sorted((out / "checkpoints").iterdir())[-1]
    (newest / "model.safetensors").write_bytes(b"damaged")
    last = rounds.train(cfg, resume=True, quiet=True)
    assert last.name == f"round-{n:06d}"
    got, want = metrics(out), metrics(straight)
    assert [row["round"] for row in got] == list(range(1, n + 1))
    n_steps = cfg.train.n_workers * cfg.train.interval
    for mine, reference in zip(got, want, strict=True):
        assert mine.keys() >= PROMISED
        assert ("eval" in mine) == (mine["round"] in (3, n))
        assert mine | {"seconds": 0} == reference | {"seconds": 0}
        assert mine["n_steps"] == n_steps
        assert mine["n_tokens"] == n_steps * cfg.train.batch * cfg.data.seq_len
    for name in FILES:
        assert (last / name).read_bytes() == (
            straight / "checkpoints" / last.name / name
        ).read_bytes()
    before = contents(out)
    assert rounds.train(cfg, resume=True, quiet=True) == last  # a finished run: nothing changes
    assert contents(out) == before
