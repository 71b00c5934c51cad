"""The sharded engine with real processes: bitwise the local run, in both directions of a resume."""

import os
import re
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import ranks
from checkpoints import metrics, same
from conftest import make_tokens, tiny, tiny_table

from twistlm import config
from twistlm.training import rounds

TRAIN = {"n_workers": 3, "rounds": 4, "outer": "nesterov(0.7, 0.6)", "scale": "measured"}
TRAIN |= {"schedule": "cosine", "warmup": 4}
BLOCKS = {"k_attn": [2, 3], "k_ffn": [3, 2]}
RUN = {"keep": 4, "eval_every": 2}
PIECE = 2000  # bytes: the tiny model then has several chunks


def train_after_long_set_up(table: dict, seconds: float) -> None:
    """The central rank takes longer than a silent one would be waited for."""
    set_up_ = rounds.set_up

    def slow(cfg, cluster, *args):
        if cluster.is_central:
            time.sleep(seconds)
        return set_up_(cfg, cluster, *args)

    rounds.set_up = slow
    rounds.train(config.from_dict(table), quiet=True)


def sharded_table(tokens: str, out: Path, **sections: dict) -> dict:
    own = {"train": TRAIN, "blocks": BLOCKS, "run": RUN | {"variant": "sharded"}}
    return tiny_table(tokens, out, **{k: own[k] | sections.get(k, {}) for k in own})


def start(tokens: str, out: Path, n_rounds: int, **sections: dict) -> list[BaseProcess]:
    """A long run on three ranks, once it has done so many rounds."""
    table = sharded_table(
        tokens, out, train={"rounds": 1000} | sections.pop("train", {}), **sections
    )
    started = ranks.train_all(3, out.parent, [{"table": table, "piece": PIECE}])
    until_it_trains(out, n_rounds)
    return started


def until_it_trains(run: Path, n_rounds: int) -> None:
    ranks.wait_for(lambda: len(metrics(run)) >= n_rounds, 240)


def last_words(started: list[BaseProcess], folder: Path, *which: int, code: int = 2) -> list[str]:
    """What these ranks said before they ended, all with this code."""
    for rank in which:
        started[rank].join(120)
        assert started[rank].exitcode == code, ranks.said(folder, rank)
    return [ranks.said(folder, rank) for rank in which]


def by_formula(rows: list[dict]) -> None:
    """In S shards (S - 1) / S of all subnets cross a link, rank 0 has an S-th of that.

    A tile of the tiny model is uneven: 10%.
    """
    for row in rows:
        expected = (row["bytes_down"] + row["bytes_up"]) * 2 / 3 * 2 / 3
        assert row["bytes_wire"] == pytest.approx(expected, rel=0.1)


NARROW = {"bf16": 0.51, "int8": 0.27, "int4": 0.2}  # at most this share of fp32's bytes up


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, str]:
    """The same four rounds in this process and on three ranks, by every wire and size of tiles."""
    folder = tmp_path_factory.mktemp("sharded")
    tokens = make_tokens(folder / "tokens")
    few = {"eval_every": -1, "save_every": 0}
    jobs = [{"table": sharded_table(tokens, folder / "one tile", run=few)}]
    narrow = [(wire, {"wire": wire}) for wire in NARROW]
    for name, own in (("sharded", {}), *narrow):
        jobs += [{"table": sharded_table(tokens, folder / name, run=own), "piece": PIECE}]
    started = ranks.train_all(3, folder, jobs)
    for name, own in (("local", {}), *narrow):
        out = folder / (f"{name}-local" if own else name)
        rounds.train(tiny(tokens, out, train=TRAIN, blocks=BLOCKS, run=RUN | own), quiet=True)
    ranks.finish(started, folder)
    return folder, tokens


def test_sharded_is_bitwise_local(runs):
    """Carried moments, outer momentum, measured scale, widths that change."""
    folder, _ = runs
    for r in (1, 4):
        same(*(folder / name / f"checkpoints/round-00000{r}" for name in ("local", "sharded")))
    same(*(folder / name / "checkpoints/round-000004" for name in ("local", "one tile")))
    ours, reference = metrics(folder / "sharded"), metrics(folder / "local")
    assert [row["loss"] for row in ours] == [row["loss"] for row in reference]
    assert [row.get("eval") for row in ours] == [row.get("eval") for row in reference]
    assert ours[1]["eval"]
    by_formula(ours)


def test_a_sharded_run_resumes_as_local_and_the_other_way_round(runs, tmp_path):
    folder, tokens = runs
    for name, origin in (("to_sharded", "local"), ("to_local", "sharded")):
        shutil.copytree(folder / origin, tmp_path / name)
        for r in (3, 4):
            shutil.rmtree(tmp_path / name / f"checkpoints/round-00000{r}")
    table = sharded_table(tokens, tmp_path / "to_sharded")
    job = {"table": table, "piece": PIECE, "resume": True}
    started = ranks.train_all(3, tmp_path, [job])
    local = tiny(tokens, tmp_path / "to_local", train=TRAIN, blocks=BLOCKS, run=RUN)
    rounds.train(local, resume=True, quiet=True)
    ranks.finish(started, tmp_path)
    for name in ("to_sharded", "to_local"):
        same(*(at / "checkpoints/round-000004" for at in (folder / "local", tmp_path / name)))


@pytest.mark.parametrize("wire", NARROW)
def test_a_narrow_wire_changes_little_and_local_rounds_alike(runs, wire):
    """Bit for bit with bf16; groups of 8 or 4 bits end with a tile, so these differ a little."""
    folder, _ = runs
    ours, exact = metrics(folder / wire), metrics(folder / "local")
    assert ours[-1]["loss"] != exact[-1]["loss"]
    if wire == "bf16":
        same(*(folder / name / "checkpoints/round-000004" for name in (wire, f"{wire}-local")))
    for mine, other in zip(ours, metrics(folder / f"{wire}-local"), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=0.003)
    for mine, reference in zip(ours, exact, strict=True):
        assert mine["loss"] == pytest.approx(reference["loss"], rel=0.01)
        assert mine["bytes_up"] < NARROW[wire] * reference["bytes_up"]
    by_formula(ours)


def test_a_death_ends_the_run_with_a_sentence_and_resume_is_bitwise(runs, tmp_path):
    """A killed rank takes its shard with it: the others say so, and the checkpoint carries on."""
    _, tokens = runs
    few, constant = {"eval_every": -1, "save_every": 3}, {"schedule": "constant", "scale": "sqrt"}
    started = start(tokens, tmp_path / "run", 4, train=constant, run=few)
    os.kill(started[1].pid, signal.SIGKILL)
    for said in last_words(started, tmp_path, 0, 2):
        assert re.search(r"(another )?rank .*of this run is gone.*--resume", said)
    done = len(metrics(tmp_path / "run"))
    rest = constant | {"rounds": done + 2}
    shorter = sharded_table(tokens, tmp_path / "run", train=rest, run=few)
    job = {"table": shorter, "piece": PIECE, "resume": True}
    # twice: in a finished run nothing is left to do, and that is no error
    ranks.finish(ranks.train_all(3, tmp_path, [job, job]), tmp_path)
    own = {"out": str(tmp_path / "local"), "variant": "local"}
    straight = config.from_dict(shorter | {"run": shorter["run"] | own})
    last = rounds.train(straight, quiet=True)
    same(last, tmp_path / "run/checkpoints" / last.name)


def test_a_stopped_rank_is_named_in_time(runs, tmp_path):
    """SIGSTOP closes no connection: gloo would wait for ever. Whoever is busy beats on."""
    _, tokens = runs
    quiet = {"eval_every": -1, "save_every": 1, "variant": "hybrid", "silence": 3.0}
    long = sharded_table(tokens, tmp_path / "run", train={"rounds": 1000}, run=quiet)
    started = ranks.start(3, tmp_path, train_after_long_set_up, long, 5.0)
    until_it_trains(tmp_path / "run", 2)
    for number in (signal.SIGSTOP, signal.SIGCONT):  # a job that is suspended goes on
        for rank in started:
            os.kill(rank.pid, number)
        time.sleep(4 if number == signal.SIGSTOP else 1)
    until_it_trains(tmp_path / "run", len(metrics(tmp_path / "run")) + 1)
    os.kill(started[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    assert "no sign of life from rank 1 for 3 s" in last_words(started, tmp_path, 0, 2)[0]
    assert time.monotonic() - began < 15  # 4 s on a machine of one's own
    os.kill(started[1].pid, signal.SIGCONT)  # it finds nobody, which is no silence of theirs
    (said,) = last_words(started, tmp_path, 1)
    assert "of this run is gone" in said
    assert "no sign of life" not in said


def test_a_silent_store_is_named_not_the_other_ranks(runs, tmp_path):
    """Nothing is known of them without it; and nobody waits for it when leaving."""
    _, tokens = runs
    quiet = {"eval_every": -1, "save_every": 1, "variant": "hybrid", "silence": 2.0}
    started = start(tokens, tmp_path / "run", 2, run=quiet)
    os.kill(started[0].pid, signal.SIGSTOP)  # it keeps the store
    said = "".join(last_words(started, tmp_path, 1, 2))
    assert "no sign of life from rank 0 for 2 s" in said
    assert not re.search(r"no sign of life from .*rank [12]", said)
    started[0].kill()
    started[0].join()


def test_ranks_end_with_their_launcher(runs, tmp_path):
    """They trained on, with nobody above them: ports, memory and the run's folder stayed theirs.

    An evaluation that is given up saves its round at once, and all end after the next one.
    """
    _, tokens = runs
    run = {"save_every": 0, "eval_n": 2000}  # seconds, after every second round
    table = sharded_table(tokens, tmp_path / "run", train={"rounds": 1000}, run=run)
    launcher = ranks.launch(3, tmp_path, table)
    until_it_trains(tmp_path / "run", 1)
    time.sleep(0.5)
    launcher.kill()
    launcher.join()
    ended = lambda rank: "stopped by SIGTERM" in ranks.said(tmp_path, rank)  # noqa: E731
    ranks.wait_for(lambda: all(map(ended, range(3))), 20, lambda: ranks.said(tmp_path, 0))
    rows = metrics(tmp_path / "run")
    given_up = {row["round"] for row in rows if row["round"] % 2 == 0 and "eval" not in row}
    assert given_up
    saved = {path.name for path in (tmp_path / "run/checkpoints").glob("round-*")}
    assert saved == {f"round-{r:06d}" for r in {*given_up, len(rows)}}


def test_sigterm_on_one_rank_stops_all_after_the_same_round(runs, tmp_path):
    """The round is finished and saved, though only one rank was told."""
    _, tokens = runs
    own, run = {"method": "dense", "outer": "none"}, {"save_every": 0, "variant": "hybrid"}
    started = start(tokens, tmp_path / "run", 1, train=own, run=run)
    os.kill(started[2].pid, signal.SIGTERM)
    said = last_words(started, tmp_path, 0, 1, 2, code=128 + signal.SIGTERM)
    assert "stopped by SIGTERM after round" in said[0]
    (saved,) = (tmp_path / "run/checkpoints").glob("round-*")
    assert saved.name == f"round-{len(metrics(tmp_path / 'run')):06d}"
