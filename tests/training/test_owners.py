"""The central model in ranges on Ray: bitwise the local run, whichever owner dies and when."""

import os

import pytest
import torch
from checkpoints import joined, metrics, same
from conftest import tiny
from processes import SLOW, same_bits
from test_ray import TRAIN
from transformers import AutoModelForCausalLM

from twistlm import config
from twistlm.model import generator
from twistlm.model.ranges import Ranges
from twistlm.system.provenance import version
from twistlm.system.signals import TOO_FEW, Ended
from twistlm.training import rounds
from twistlm.training.engines import elastic, owners
from twistlm.training.startup import set_up
from twistlm.transport import ray_cluster
from twistlm.transport.events import Events
from twistlm.transport.protocol import RunDescription
from twistlm.transport.ranks import Cluster


def test_any_number_of_owners_is_the_local_run_bit_for_bit(scene, tmp_path, monkeypatch):
    """With all that a round can have: one process, then three owners, then one again; evaluations,
    too, which a worker makes."""
    monkeypatch.setattr(owners, "PART", 1000)  # several for each owner
    blocks = {"k_attn": [2, 3], "masks": "sequence", "nested": 0.5}
    blocks |= {"mask_attn": [1, 2], "mask_ffn": [2, 3], "mask_depth": [0, 1]}
    train = TRAIN | {"schedule": "constant", "scale": "measured", "rounds": 2}
    run = {"eval_every": 2, "wire": "bf16", "keep": 9}
    here = scene(train=train, run=run, blocks=blocks)
    taught = rounds.train(tiny(here.tokens, tmp_path / "teacher"), quiet=True)
    here.sections["train"]["teacher"] = str(taught)
    first = here.config(here.out, run={"variant": "local"})
    rounds.train(first, quiet=True)
    here.sections["train"]["rounds"], here.sections["ray"]["owners"] = 4, 3
    here.train(resume=True)
    here.train(resume=True)  # a finished run: nothing is left to do
    assert [row["places"] for row in here.events("round")] == [[0, 1, 2]] * 2
    files = {path.name for path in here.last().glob("model*")}
    assert files >= {"model-00001-of-00003.safetensors", "model.safetensors.index.json"}
    model = AutoModelForCausalLM.from_pretrained(here.last())
    held = joined(here.last(), "model")
    assert all(torch.equal(p, held[name]) for name, p in model.named_parameters())
    more = {"train": {"rounds": 6}, "run": {"variant": "local"}}
    straight = rounds.train(here.config(tmp_path / "straight", **more), quiet=True)
    resumed = rounds.train(here.config(here.out, **more), resume=True, quiet=True)
    for r in (1, 2, 3, 4):
        same(straight.parent / f"round-{r:06d}", resumed.parent / f"round-{r:06d}")
    same(straight, resumed)
    ours, theirs = metrics(here.out), metrics(tmp_path / "straight")
    for key in ("loss", "eval"):
        assert [row.get(key) for row in ours] == [row.get(key) for row in theirs]
    assert ours[1]["eval"]["full"] > 1


PHASES = {"cut": 0, "add": 1, "prepare": 2, "keep": 0}


@pytest.mark.parametrize(
    "phases", [("prepare", "keep"), pytest.param(tuple(PHASES), marks=pytest.mark.chaos)]
)
def test_an_owner_killed_in_any_phase_costs_at_most_the_round(scene, tmp_path, phases):
    """Each comes back from its neighbour's copy, and the round is done again: bit for bit."""
    n = len(phases)
    here = scene(train=TRAIN | {"rounds": n + 1}, ray={"owners": 3})
    kill = {"do": "SIGKILL"}
    here.suffers(
        *(kill | {"owner": PHASES[p], "round": 1 + r, "at": p} for r, p in enumerate(phases))
    )
    here.train()
    back = [(row["worker"], row["round"]) for row in here.events("restored")]
    # once all have prepared a round, everything of it is kept by somebody: it is not done again
    assert back == [(f"owner {PHASES[p]}", 1 + r + (p == "keep")) for r, p in enumerate(phases)]
    again = [1 + r for r, p in enumerate(phases) if p != "keep"]
    assert [row["round"] for row in here.events("not committed")] == again
    assert not [row for row in here.events("round") if row["lost"]]
    here.same_as_local(tmp_path / "local")


def test_an_owner_with_a_bug_is_not_a_ray_that_is_gone(scene, tmp_path):
    """Its traceback is told, also by way of a worker, and the next process goes on from the owners'
    round."""
    here = scene(train=TRAIN | {"rounds": 3}, ray={"owners": 2})
    phases = {"prepare": "prepare", "add": "check"}
    here.suffers(
        *({"owner": 1, "round": 1 + r, "at": at, "do": "bug"} for r, at in enumerate(phases))
    )
    for i, name in enumerate(phases.values()):
        with pytest.raises(RuntimeError, match=rf"{name}\(\)(.|\n)*OSError: a bug of an owner"):
            here.train(resume=i > 0)
        assert here.events("giving up")[i]["why"].endswith("OSError: a bug of an owner")
    here.train(resume=True)
    here.same_as_local(tmp_path / "local")


@pytest.mark.chaos
def test_workers_who_wait_for_a_frozen_owner_are_not_lost_with_it(scene, tmp_path):
    here = scene(train=TRAIN | {"rounds": 3}, ray={"owners": 2, "floor": 4.0})
    here.suffers({"owner": 1, "round": 1, "at": "add", "do": "SIGSTOP"})
    here.train()
    assert [row["worker"] for row in here.events("restored")] == ["owner 1"]
    assert not [row for row in here.events("round") if row["lost"]]
    here.same_as_local(tmp_path / "local")


@pytest.mark.chaos
def test_a_frozen_owner_is_replaced_and_workers_lost_beside_it(scene):
    """SIGSTOP is silence; workers killed in the same rounds cost their results, as ever."""
    here = scene(train=TRAIN | {"rounds": 5}, ray={"owners": 2, "floor": 4.0})
    here.suffers(
        {"owner": 1, "round": 1, "at": "prepare", "do": "SIGSTOP"},
        {"owner": 0, "round": 4, "at": "keep", "do": "SIGSTOP"},
        {"place": 0, "round": 2, "at": "send", "do": "SIGKILL"},
        {"place": 2, "round": 3, "at": "send", "do": "nan"},
    )
    here.train()
    for i in range(2):  # in the round, and when all are asked where they stand
        lost = here.events("lost", worker=f"owner {i}")
        assert [row["why"] for row in lost] == ["silent for 4 s"] * 2
    rows = {row["round"]: row["lost"] for row in here.events("round")}  # one is noted twice
    assert [rows[r] for r in range(4)] == [[], [], [0], [2]]
    assert same_bits(here.replay(), here.last())


@pytest.mark.chaos
def test_an_owner_frozen_while_a_checkpoint_is_written(scene, tmp_path):
    """The others' files wait for what it lends: that checkpoint is given up, and the next is right;
    after the last round nobody asks for another, so the run ends and `--resume` writes it."""
    patient = {"floor": 4.0, "patience": 15.0}  # seconds, the second for a frozen one that is found
    here = scene(train=TRAIN | {"rounds": 4}, ray={"owners": 2} | patient)
    here.suffers(*({"owner": 1, "round": r, "at": "lend", "do": "SIGSTOP"} for r in (2, 4)))
    driver = here.start()
    driver.join(SLOW)
    assert driver.exitcode == 2, here.text
    assert "round-000004 (" in here.text.splitlines()[-1]
    assert "could not be written: owners are lost: {1: 'silent for 4 s'}" in here.text
    saved = sorted(path.name for path in (here.out / "checkpoints").glob("round-*"))
    assert saved == ["round-000001", "round-000003"]
    assert [row["worker"] for row in here.events("restored")] == ["owner 1"]
    here.train(resume=True)
    here.same_as_local(tmp_path / "local")


@pytest.mark.chaos
@pytest.mark.parametrize(
    "second", [{"at": "prepare", "do": "SIGKILL"}, {"at": "give", "do": "SIGSTOP"}]
)
def test_two_neighbours_at_once_mean_the_last_checkpoint(scene, tmp_path, second):
    """The second with the first, or while it gives the new one its range."""
    owners = {"owners": 3, "floor": 4.0}
    here = scene(train=TRAIN | {"rounds": 5}, ray=owners, run={"save_every": 2})
    first = {"owner": 1, "round": 3, "at": "prepare", "do": "SIGKILL"}
    here.suffers(first, {"owner": 2, "round": 3} | second)
    sentence = "owners 1 and 2 of the central model are lost together: .*--resume"
    with pytest.raises(Ended, match=sentence) as end:
        here.train()
    assert end.value.code == TOO_FEW
    here.train(resume=True)
    assert [row["round"] for row in here.events("started")] == [0, 2]
    here.same_as_local(tmp_path / "local")


def test_a_killed_driver_finds_owners_and_their_round(scene, tmp_path):
    """Killed before any owner has prepared a round, and after all have: no round that all results
    of were there is lost, and no checkpoint is needed."""
    here = scene(train=TRAIN | {"rounds": 5}, ray={"owners": 2}, run={"save_every": 3})
    phases = ("owners.Owners.prepare", 2), ("elastic.Elastic._gather", 2), ("checkpoint.save", 0)
    for i, (at, n) in enumerate(phases):
        here.start_and_die(at, n, resume=i > 0)
    here.train(resume=True)
    assert [row["round"] for row in here.events("started")] == [0, 2, 4, 5]
    assert len({tuple(row["owners"]) for row in here.events("started")}) == 1
    assert all(os.path.exists(f"/proc/{pid}") for pid in here.events("started")[0]["owners"])
    here.same_as_local(tmp_path / "local")


def test_a_piece_for_a_driver_that_was_killed_comes_too_late(ray_address, tokens, tmp_path):
    """Its workers still send, and number themselves among others than those of the next driver."""
    ray = {"address": ray_address, "owners": 1}
    cfg = tiny(tokens, tmp_path, run={"variant": "ray"}, ray=ray)
    run, progress = set_up(cfg, Cluster("ray", 3, "physical", "cpu"), False, quiet=True)
    everyone = generator.for_training(run.cut.block_map, 3, cfg.blocks, seed=0, round=0)
    ray_cluster.enter(cfg, 0)
    pulse, tries = owners.Pulse(60.0), []
    try:
        about = RunDescription(version("twistlm"), config.to_dict(cfg), {}, 1)
        name, events = f"late-{os.getpid()}", Events(tmp_path, quiet=True)
        for resumes in (False, True):  # the second finds the owner of the first
            ranges = Ranges(run.cut.segments, 1)
            driver = owners.Owners(cfg, ranges, about, name, pulse, events)
            driver.begin(run.central, progress, resumes)
            ((piece,), *_) = driver.cut(0, everyone[:: -1 if resumes else 1])
            tries.append(driver.attempt)
        said = [driver.actors[0].check.remote(each, 0, piece) for each in tries]
        # a resumed run takes as many owners as it had, where the first of them is still there
        for known, n_left in ((name, 3), ("nobody", 0)):
            (tmp_path / "ray-id.txt").write_text(f"{known} 3\n")
            assert elastic._actors_of(tmp_path) == (known, n_left)
        late, (moved, _) = ray_cluster.ray.get(said)
        assert late == "late"
        assert moved == 0
        ray_cluster.ray.kill(old := driver.actors[0])
        while driver.actors[0] is old:  # it may answer once more
            driver.everyone()
        # the new one is not mended: no checkpoint, but no bug either
        with pytest.raises(OSError, match="owner 0 has no range yet"):
            driver.snapshot(0)(tmp_path)
    finally:
        pulse.close(leave=False)
        ray_cluster.leave()
