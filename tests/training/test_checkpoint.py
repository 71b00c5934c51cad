"""A checkpoint gives back every bit, loads in plain transformers, is refused when damaged, and is
written by a thread that a full disk or a kill does not make lie; a run goes on from it."""

import copy
import json
import os
import random
import re
import resource
import shutil
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from checkpoints import CPU, FILES, damages, metrics, random_central, random_progress, same
from commands import limited, reseal, toml
from conftest import THREADS, VOCAB, make_tokens, tiny, tiny_table
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import twistlm
from twistlm import config
from twistlm.data.stream import Leases
from twistlm.model import families, huggingface
from twistlm.model.layout import cut_model
from twistlm.system import files
from twistlm.system.files import file_sha256
from twistlm.system.signals import SIGNALS, Ended, Stop, on_signals
from twistlm.tickets.parent import open_parent
from twistlm.training import checkpoint, rounds
from twistlm.training.checkpoint import Writer, snapshot
from twistlm.training.metrics import Metrics
from twistlm.training.run import Progress

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
    return checkpoint.save(folder, snapshot(central), progress, cfg, model, None, keep=keep)


def full(*args, **kwargs):
    raise OSError(28, "No space left on device")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("carry", "outer", "dtype"), [(True, False, torch.float32), (False, True, torch.float64)]
)
def test_round_trip_is_exact(tmp_path, cfg, model, carry, outer, dtype):
    before = random_central(model, cfg, carry=carry, outer=outer)
    before.state = before.state.to(dtype) / 3  # float64 uses its whole mantissa
    progress = random_progress(model, cfg)
    model = copy.deepcopy(model).to(dtype)
    path = checkpoint.save(tmp_path, snapshot(before), progress, cfg, model, None, keep=2)
    assert [(path / name).exists() for name in FILES] == [True, carry, outer]
    saved = checkpoint.verify(path)
    template = checkpoint.template(saved)
    cut = cut_model(template, cfg.blocks, CPU, dtype)
    after = checkpoint.restore(saved, cut)
    assert (after.state.dtype, after.outer) == (dtype, outer)
    assert torch.equal(after.state, before.state)
    assert checkpoint.progress_of(saved, cut.block_map) == progress
    assert (saved.round, saved.config) == (17, cfg)
    after.buffer.zero_()  # training on must not write into the template
    assert all(p.abs().max() > 0 for p in template.parameters())


def test_transformers_loads_the_folder(tmp_path, cfg, model):
    """A plain Hugging Face folder with the central model's logits, a tokenizer and a manifest."""
    (tmp_path / "t.json").write_text('{"any": "bytes"}')
    central, progress = random_central(model, cfg), random_progress(model, cfg)
    tokenizer = tmp_path / "t.json"
    how = (progress, cfg, model, tokenizer)
    path = checkpoint.save(tmp_path / "c", snapshot(central), *how, keep=1)
    saved = checkpoint.verify(path)
    reference = huggingface.load(cfg.model, seed=9)
    reference.load_state_dict(central.layout.views(central.weights), strict=False)
    with torch.no_grad():
        ids = torch.arange(30).view(2, 15) % VOCAB
        want = reference.eval()(ids).logits
        loaded = AutoModelForCausalLM.from_pretrained(path).eval()
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded(ids).logits, want)
        assert torch.equal(checkpoint.template(saved)(ids).logits, want)
    assert not torch.equal(want, model(ids).logits)  # the start weights would give others
    sha256 = saved.manifest["tokenizer_sha256"]
    assert sha256 == file_sha256(path / "tokenizer.json") == file_sha256(tokenizer)
    assert saved.manifest["versions"]["torch"] == torch.__version__
    assert all(saved.manifest[key] for key in ("git", "command", "device"))


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
    "step", ["system.files.save_file", "system.files._fsync", "system.files.os.rename"]
)
def test_old_ones_go_only_after_the_new_one_is_complete(tmp_path, monkeypatch, cfg, model, step):
    """A disk that fills up at any moment of a save leaves what was there, and no debris."""
    save_round(tmp_path, cfg, model, 1, keep=1)
    before = contents(tmp_path)
    monkeypatch.setattr(f"twistlm.{step}", full)
    with pytest.raises(OSError, match="disk is full"):
        save_round(tmp_path, cfg, model, 2, keep=1)
    assert contents(tmp_path) == before


def test_newest_falls_back_over_damaged_ones(tmp_path, cfg, model):
    folder = tmp_path / "checkpoints"
    paths = [save_round(folder, cfg, model, r) for r in (1, 2, 3)]
    (paths[2] / "moments.safetensors").unlink()
    found, broken = checkpoint.newest(folder)
    assert found.round == checkpoint.open_(tmp_path).round == 2
    assert str(paths[2]) in broken[0]
    with pytest.raises(ValueError, match=r"moments\.safetensors is missing"):
        checkpoint.open_(paths[2])  # one that was asked for by name has no stand-in
    # each file is whole, but the weights are of another round
    shutil.copyfile(paths[0] / "model.safetensors", paths[1] / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        checkpoint.verify(paths[1])
    (paths[0] / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds no valid checkpoint.*round-000003"):
        checkpoint.open_(tmp_path)


@pytest.mark.parametrize("n", [50, pytest.param(1000, marks=pytest.mark.chaos)])
def test_damages_fall_back(tmp_path, cfg, model, n):
    """n random damages to any file, and to the manifest, of the newest of two: it is said why, and
    the one before serves."""
    first, second = (save_round(tmp_path, cfg, model, r) for r in (1, 2))
    rng = random.Random(n)
    for told, file, data in (*damages(second, n), *damages(second, n, "checkpoint.json")):
        good = file.read_bytes()
        file.unlink() if rng.random() < 0.1 else file.write_bytes(data)
        found, broken = checkpoint.newest(tmp_path)
        file.write_bytes(good)
        assert found.path == first, told
        (sentence,) = broken
        assert str(second) in sentence, told
    assert checkpoint.newest(tmp_path)[0].round == 2


def test_nonsense_behind_right_hashes_is_a_value_error(tmp_path, cfg, model):
    path = save_round(tmp_path, cfg, model, 1)
    good = json.loads((path / "checkpoint.json").read_text())
    tensors = load_file(path / "model.safetensors")
    texts = ["", "null", "{}", '{"files": {}}', '{"format": 1, "files": []}', "\ud800"]
    for text in (*texts, json.dumps(good | {"format": 2})):
        (path / "checkpoint.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(ValueError, match=r"damaged|is no checkpoint|format"):
            checkpoint.verify(path)
    name = "transformer.ln_f.bias"
    without = {key: tensor for key, tensor in tensors.items() if key != name}
    for wrong in (tensors | {name: torch.zeros(5)}, without):
        save_file(wrong, path / "model.safetensors", {"format": "pt"})
        hashes = {file: file_sha256(path / file) for file in good["files"]}
        reseal(path / "checkpoint.json", **good | {"files": hashes})
        with pytest.raises(ValueError, match=rf"no weights for {name} that fit"):
            checkpoint.template(checkpoint.verify(path))


def test_what_changes_after_save_is_not_in_it(tmp_path, cfg, model, monkeypatch):
    """The very bits of the call, though all has changed when they are written; one in flight."""
    open_, reached = threading.Event(), threading.Event()
    whole = files.save_tensors

    def waiting(*args):
        reached.set()
        assert open_.wait(30)
        whole(*args)

    monkeypatch.setattr(checkpoint, "save_tensors", waiting)
    central, progress = random_central(model, cfg), random_progress(model, cfg)
    before = central.state.clone()
    with Writer(tmp_path, cfg, model, None, 99) as writer:
        now = partial(snapshot, central)
        writer.save(now, progress)
        assert reached.wait(30)
        central.state.zero_()
        central.wait_for_readers = writer.wait
        both = [
            threading.Thread(target=writer.save, args=(now, replace(progress, round=18))),
            threading.Thread(target=central.scratch),  # what is written lies there
        ]
        for thread in both:
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()  # waits for the first
        assert central.host is None  # the copy lies in the scratch
        open_.set()
        for thread in both:
            thread.join(30)
    assert names(tmp_path) == ["round-000017", "round-000018"]
    saved = checkpoint.verify(tmp_path / "round-000017")
    cut = cut_model(checkpoint.template(saved), cfg.blocks, CPU, torch.float32)
    after = checkpoint.restore(saved, cut)
    assert torch.equal(after.state, before)
    assert checkpoint.progress_of(saved, cut.block_map) == progress


def test_a_full_disk_is_an_error_at_the_end(tmp_path, cfg, model, monkeypatch):
    central, progress = random_central(model, cfg), random_progress(model, cfg)
    writer = Writer(tmp_path, cfg, model, None, 99)
    monkeypatch.setattr(checkpoint, "save_tensors", full)
    with pytest.raises(OSError, match=r"round-000019 .* bytes.*disk is full"), writer:
        writer.save(partial(snapshot, central), replace(progress, round=19))
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt), writer:  # another reason to stop is not hidden
        raise KeyboardInterrupt


def test_a_run_outlives_a_full_disk(tmp_path):
    """A real process whose files may not grow past 2 KiB for a while: it trains on, retries."""
    n, every = 60, 20
    tokens = make_tokens(tmp_path / "tokens")
    train = {"rounds": n, "interval": 1}
    straight = tiny(tokens, tmp_path / "straight", train=train, run={"save_every": 0})
    rounds.train(straight, quiet=True)
    table = tiny_table(tokens, tmp_path / "run", train=train, run={"save_every": every})
    file = toml(tmp_path / "c.toml", table)
    folder, told = tmp_path / "run/checkpoints", []
    os.mkfifo(tmp_path / "output")  # a file of its own would not grow either
    process = ranks.twistlm(tmp_path / "output", "train", file)
    with (tmp_path / "output").open() as output:
        ranks.wait_for(lambda: list(folder.glob("round-*")))
        endless = resource.RLIM_INFINITY
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2048, endless))
        while len(told) < 3:
            line = output.readline()
            assert line, "the run ended"
            told += [line] if "could not be written" in line else []
        before = {path.name for path in folder.iterdir()}
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (endless, endless))
        rest = output.read()
    process.join(120)
    assert process.exitcode == 0, rest
    rows = [re.search(r"round-(\d+) \(([\d,]+) bytes, [\d,]+ free\)", line) for line in told]
    failed = [int(row[1]) for row in rows]
    assert failed[0] == 2 * every
    assert failed[0] < failed[1] < failed[2] < 3 * every  # it did not wait for the next 20
    assert all(str(folder) in line and "File too large" in line for line in told)
    assert before == {f"round-{every:06d}"}  # nothing half-written
    same(*(tmp_path / name / f"checkpoints/round-{n:06d}" for name in ("straight", "run")))
    assert [row["round"] for row in metrics(tmp_path / "run")] == list(range(1, n + 1))


def victim(folder: str, table: dict) -> None:
    """Saves one checkpoint after another; every number in it is the round's."""
    torch.set_num_threads(1)
    cfg = config.from_dict(table)
    model = huggingface.load(cfg.model, seed=3)
    found, _ = checkpoint.newest(Path(folder))
    central, progress = random_central(model, cfg), random_progress(model, cfg)
    first = found.round + 1 if found else 1
    with Writer(Path(folder), cfg, model, None, 99) as writer:
        for r in range(first, first + 10_000):
            central.state.fill_(r)
            rho = dict.fromkeys(progress.rho, float(r))
            writer.save(partial(snapshot, central), Progress(r, Leases(r), rho))


@pytest.mark.parametrize("n", [3, pytest.param(100, marks=pytest.mark.chaos)])
def test_killed_while_writing(tmp_path, cfg, model, n):
    """Kill n processes, and more until one was writing; the newest valid one is of one round."""
    folder = tmp_path / "checkpoints"
    rng, block_map, done, n_broken = random.Random(n), families.partition(model, cfg.blocks), 0, 0
    for i in range(10 * n):
        if i >= n and n_broken:
            break
        process = ranks.SERVER.Process(target=victim, args=(str(folder), config.to_dict(cfg)))
        process.start()
        target = folder / checkpoint.folder_name(done + 1)
        ranks.wait_for(lambda: target.exists() or not process.is_alive())  # noqa: B023
        time.sleep(rng.uniform(0, 0.15))
        assert process.is_alive()
        process.kill()
        process.join(30)
        found, broken = checkpoint.newest(folder)
        assert found.round > done
        assert broken == []
        done = found.round
        cut = cut_model(checkpoint.template(found), cfg.blocks, CPU, torch.float32)
        assert (checkpoint.restore(found, cut).state == done).all()
        progress = checkpoint.progress_of(found, block_map)
        assert set(progress.rho.values()) == {done}
        assert (progress.round, progress.leases) == (done, Leases(done))
        n_broken += len(list(folder.glob(".draft-*")))
    assert n_broken > 0, "no kill fell into a write"
    assert len(list(folder.glob(".draft-*"))) <= 1


def test_metrics_are_replaced_whole_and_a_full_disk_takes_no_line(tmp_path):
    metrics_file = Metrics(tmp_path, 0)
    for number in (1, 2, 3):
        metrics_file.write({"round": number})
    with (tmp_path / "metrics.jsonl").open() as before:
        metrics_file = Metrics(tmp_path, 2)  # a crash meanwhile must not cost lines that stay
        assert len(before.readlines()) == 3
    assert [row["round"] for row in metrics(tmp_path)] == [1, 2]
    with limited(resource.RLIMIT_FSIZE, metrics_file.size + 10):
        metrics_file.write({"round": 3, "loss": 2 / 3})
        metrics_file.write({"round": 4, "loss": 1.0})
    assert (tmp_path / "metrics.jsonl").stat().st_size > metrics_file.size  # it was cut in a line
    metrics_file.write({"round": 5, "loss": 4 / 3})
    assert [row["round"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_s_k_and_threads_may_change(tmp_path: Path, capsys):
    """Said on the console and in `resumes.jsonl`; the data goes on where it was."""
    tokens = make_tokens(tmp_path / "tokens")
    rounds.train(tiny(tokens, tmp_path / "run", train={"rounds": 2}), quiet=True)
    train = {"rounds": 3, "n_workers": 4, "batch": 1}
    cfg = tiny(
        tokens, tmp_path / "run", train=train, blocks={"k_ffn": 2}, run={"threads": THREADS + 1}
    )
    rounds.train(cfg, resume=True)
    assert torch.get_num_threads() == THREADS  # as before: what computes next is not this run's
    out = " ".join(capsys.readouterr().out.split())
    assert "train.n_workers was 3 and is now 4" in out
    assert "blocks.k_ffn was (3,) and is now (2,)" in out
    assert f"cpu, {THREADS} threads' and is now" in out
    (line,) = (tmp_path / "run/resumes.jsonl").read_text().splitlines()
    told = json.loads(line)
    assert told["round"] == 2
    assert told["changed"] == {
        "train.n_workers": [3, 4], "train.batch": [2, 1],
        "train.rounds": [2, 3], "blocks.k_ffn": [[3], [2]],
    }  # fmt: skip
    assert told["device"].endswith(f"cpu, {THREADS + 1} threads")
    saved = checkpoint.open_(tmp_path / "run")
    assert (saved.config.train.n_workers, saved.config.blocks.k_ffn) == (4, (2,))
    # also from the writing thread
    assert saved.manifest["device"].endswith(f"cpu, {THREADS + 1} threads")
    assert saved.leases == Leases(2 * 3 * 3 * 2 + 3 * 4 * 1)
    rounds.train(cfg, resume=True)  # nothing left to do
    said = " ".join(capsys.readouterr().out.split())
    assert "finished after round 3: nothing was trained; to train more, say train.rounds=N" in said
    assert len((tmp_path / "run/resumes.jsonl").read_text().splitlines()) == 1


def test_a_checkpoint_of_before_goes_on(tmp_path: Path):
    """It names keys that are no more, and counts how often each block was dealt."""
    tokens = make_tokens(tmp_path / "tokens")
    cfg = tiny(tokens, tmp_path / "run", train={"rounds": 2})
    whole = rounds.train(tiny(tokens, tmp_path / "whole", train={"rounds": 2}), quiet=True)
    path = rounds.train(replace(cfg, train=replace(cfg.train, rounds=1)), quiet=True)
    record = json.loads((path / "checkpoint.json").read_text())
    record["held"] = {"transformer.h.1.attn": [2, 1, 1, 2]}
    record["config"] |= {"hub": {"port": 1}}
    record["config"]["blocks"] |= {"common_by": "rank", "deal": "balanced"}
    reseal(path / "checkpoint.json", **record)
    assert config.load(str(tmp_path / "run")) == replace(cfg, train=replace(cfg.train, rounds=1))
    same(rounds.train(cfg, resume=True, quiet=True), whole)
    shutil.rmtree(tmp_path / "run/checkpoints/round-000002")
    record["config"]["blocks"]["common_attn"] = [1]  # other blocks in every layer
    reseal(path / "checkpoint.json", **record)
    for read in (lambda: config.load(str(tmp_path / "run")), lambda: open_parent(path, "cpu")):
        with pytest.raises(ValueError, match=r"blocks\.common_by = 'rank' is no more"):
            read()


NESTED = {"masks": "sequence", "mask_attn": [4, 2], "mask_ffn": [4, 3], "k_attn": 4, "k_ffn": 4}
NESTED |= {"nested": 0.5}


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, NESTED),  # masks are newly nested
        (NESTED, NESTED | {"n_ffn": 8, "k_ffn": 8}),  # blocks are cut otherwise
        (NESTED, NESTED | {"shared_first": 0}),  # one more layer is cut
        (NESTED, NESTED | {"mask_depth": [0, 1]}),  # masks newly drop layers
    ],
)
def test_a_resume_scores_an_order_that_it_newly_needs(tmp_path: Path, before, now):
    """On the weights it goes on from, as a run from that checkpoint; what it has, it keeps."""
    tokens = make_tokens(tmp_path / "tokens")
    first = tiny(tokens, tmp_path / "run", blocks=before, train={"rounds": 1})
    start = rounds.train(first, quiet=True)
    cfg = tiny(tokens, tmp_path / "run", blocks=now, train={"rounds": 2})
    order = checkpoint.open_(rounds.train(cfg, resume=True, quiet=True)).manifest["order"]
    model = {"weights": str(start), "config": {}}
    anew = tiny(tokens, tmp_path / "anew", blocks=now, train={"rounds": 1}, model=model)
    expected = checkpoint.open_(rounds.train(anew, quiet=True)).manifest["order"]
    if "mask_depth" in now:
        expected = checkpoint.open_(start).manifest["order"] | {"layers": expected["layers"]}
    assert order == expected != {}


def test_neurons_are_sorted_once_before_the_first_round(tmp_path: Path):
    """A run that goes on leaves them where they are, and cannot begin to sort."""
    tokens = make_tokens(tmp_path / "tokens")
    blocks = NESTED | {"sort": True, "nested": 1.0}
    once = rounds.train(tiny(tokens, tmp_path / "once", blocks=blocks), quiet=True)
    cfg = tiny(tokens, tmp_path / "twice", blocks=blocks)
    first = replace(cfg, train=replace(cfg.train, rounds=2))
    rounds.train(first, quiet=True)
    same(rounds.train(cfg, resume=True, quiet=True), once)
    order = checkpoint.open_(once).manifest["order"]
    assert all(order[name] == [0, 1, 2, 3] for name in order if name.endswith("ffn"))
    plain = rounds.train(tiny(tokens, tmp_path / "plain", blocks=NESTED), quiet=True)
    with pytest.raises(ValueError, match=r"blocks\.sort was False and is now True"):
        rounds.train(tiny(tokens, plain.parent.parent, blocks=blocks), resume=True, quiet=True)


def test_a_signal_after_the_round_loses_nothing_either(tmp_path: Path):
    """During an evaluation, say: whether to save was decided before, and the run ended without."""
    tokens = make_tokens(tmp_path / "tokens")
    cfg = tiny(tokens, tmp_path / "run", run={"save_every": 0})

    def on_round(row: dict) -> None:
        if (row["round"], row["n_rounds"]) == (2, 4):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Ended, match="SIGTERM after round 2"):
        rounds.train(cfg, quiet=True, on_round=on_round)
    assert checkpoint.open_(tmp_path / "run").round == 2


def test_a_signal_in_an_evaluation_saves_its_round(tokens: str, tmp_path: Path):
    run = {"save_every": 0, "eval_every": 2, "eval_n": 2000}  # seconds
    cfg = tiny(tokens, tmp_path / "run", run=run)
    begins = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Ended, match="SIGTERM after round 2"):
        rounds.train(cfg, quiet=True, on_round=lambda row: row["round"] == 1 and begins.start())
    assert checkpoint.open_(tmp_path / "run").round == 2
    assert "eval" not in metrics(tmp_path / "run")[1]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_callback_that_raises_loses_nothing_either(tmp_path: Path, error: type[BaseException]):
    cfg, rows = tiny(make_tokens(tmp_path / "tokens"), tmp_path / "run", run={"save_every": 0}), []

    def on_round(row: dict) -> None:
        rows.append(row["round"])
        if rows == [1, 2]:
            raise error("mine")

    with pytest.raises(error, match="mine"):
        twistlm.train(cfg, on_round=on_round)
    again = twistlm.train(cfg, resume=True, on_round=on_round)
    assert rows == [1, 2, 3, 4]
    straight = rounds.train(replace(cfg, run=replace(cfg.run, out=str(tmp_path / "s"))), quiet=True)
    same(again, straight)


def test_killed_and_resumed_is_bitwise_the_straight_run(tmp_path: Path):
    """At any moment, with a line cut short and a damaged checkpoint: every round once, in order."""
    tokens, n = make_tokens(tmp_path / "tokens"), 30
    train = TRAIN | {"rounds": n, "interval": 2, "schedule": "cosine"}
    blocks = {"k_attn": [2, 3], "k_ffn": [3, 2]}
    # one subnet has no standard deviation: NaN would break every strict reader of the file
    run = {"save_every": 3, "keep": 99, "eval_every": 20, "eval_tokens": 256, "eval_n": 1}
    sections = {"train": train, "blocks": blocks, "run": run}
    straight = rounds.train(tiny(tokens, tmp_path / "straight", **sections), quiet=True)
    out, log = tmp_path / "killed", tmp_path / "killed.txt"
    path = toml(tmp_path / "killed.toml", tiny_table(tokens, out, **sections))
    rng, file = random.Random(1), out / "metrics.jsonl"

    def n_done() -> int:
        return len(file.read_text().splitlines()) if file.is_file() else 0

    for attempt in range(3):
        # wait until it trains, then any moment: in a round, while saving, between the two
        victim = ranks.twistlm(log, "train", path, "--auto-resume")
        before = n_done()
        ranks.wait_for(lambda n=before, now=victim: n_done() > n or not now.is_alive())
        time.sleep(rng.uniform(0, 0.4))
        assert attempt or victim.is_alive(), "the run ended before it could be killed"
        victim.kill()
        victim.join()
    with file.open("a") as lines:
        lines.write('{"round": 99, "los')
    saved = sorted((out / "checkpoints").glob("round-*"))
    if len(saved) > 1:  # more rounds run again
        (saved[-1] / "model.safetensors").write_bytes(b"damaged")
    cfg = config.load(path)
    last = rounds.train(cfg, resume=True, quiet=True)
    same(straight, last)
    got, want = metrics(out), metrics(tmp_path / "straight")
    assert [row["round"] for row in got] == list(range(1, n + 1))
    for mine, reference in zip(got, want, strict=True):
        assert mine.keys() >= {"lr", "bytes_down", "bytes_up", "bytes_wire"}
        assert ("eval" in mine) == (mine["round"] in (20, n))
        assert mine | {"seconds": 0} == reference | {"seconds": 0}
        assert (mine["n_steps"], mine["n_tokens"]) == (3 * 2, 3 * 2 * 2 * 16)
    assert not list((out / "checkpoints").glob(".draft-*"))  # dead ones are removed
    before = contents(out)
    assert rounds.train(cfg, resume=True, quiet=True) == last  # a finished run: nothing changes
    assert contents(out) == before


def test_one_signal_is_a_request_and_a_later_one_stops_at_once():
    """Schedulers send one twice within a second; afterwards the handlers are as they were."""
    before = [signal.getsignal(number) for number in SIGNALS]
    with on_signals(Stop(), quiet=True) as stop:
        signal.raise_signal(signal.SIGTERM)
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:  # it would end all tests
            pytest.fail("the same signal, passed on by a parent, stopped at once")
        assert stop.signal == signal.SIGTERM
        stop.since -= 1.1  # seconds
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before
