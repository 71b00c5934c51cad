"""The hub's fault matrix: real processes, real signals, and always the bits of a run that was planned so.

`replay` trains the same rounds in this process, with the workers that the events say were in and
without those that they say were lost: every test ends by comparing all central state with it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time

import pytest
from checkpoints import FILES
from processes import Scene, same_bits
from safetensors.torch import load_file

from twistlm.data.token_file import open_tokens
from twistlm.model import generator, huggingface
from twistlm.training import rounds
from twistlm.training.engines import remote
from twistlm.transport.address import listen
from twistlm.transport.handshake import MAGIC

TRAIN = {"rounds": 6, "interval": 2, "outer": "nesterov(0.7, 0.6)", "schedule": "cosine"}


def finish(here: Scene, hub, *, replayed: bool = True) -> None:
    """The run ends well, and is bitwise what its events say."""
    assert hub.wait() == 0, hub.text
    if replayed:
        assert same_bits(here.replay(), here.last())


def test_hub_is_the_local_run_bit_for_bit(scene, tmp_path):
    """Carried moments, outer Nesterov, measured scale, balanced deal: three processes and one."""
    here = scene(
        train=TRAIN | {"scale": "measured", "rounds": 4},
        blocks={"deal": "balanced", "k_attn": [2, 3]},
    )
    hub = here.hub()
    workers = [here.worker(name) for name in "abc"]
    assert hub.wait() == 0, hub.text
    assert [worker.wait(10) for worker in workers] == [0, 0, 0]
    local = rounds.train(here.config(tmp_path / "local", run={"variant": "local"}), quiet=True)
    for name in FILES:
        assert (local / name).read_bytes() == (here.last() / name).read_bytes(), name
    assert [row["places"] for row in here.events("round")] == [[0, 1, 2]] * 4


def test_a_killed_worker_costs_its_own_result(scene):
    """Row 1: SIGKILL before receiving, in training and while sending; each time another one is left."""
    here = scene(train=TRAIN | {"n_workers": 4, "rounds": 5})
    hub = here.hub()
    killed = {
        "before": here.worker("before", {"at": "receive", "round": 1}),
        "training": here.worker("training", {"at": "train", "round": 2}),
        "sending": here.worker("sending", {"at": "send", "do": "die", "round": 3}),
    }
    here.worker("survivor")
    finish(here, hub)
    assert [child.wait() for child in killed.values()] == [-signal.SIGKILL] * 3
    lost = {row["worker"]: row["round"] for row in here.events("lost")}
    assert lost == {"before": 1, "training": 2, "sending": 3}
    committed = here.events("round")
    assert [len(row["places"]) for row in committed] == [4, 4, 3, 2, 1]
    assert [len(row["lost"]) for row in committed] == [0, 1, 1, 1, 0]
    # noticed by the closed connection, long before the deadline of 20 s
    for row in committed:
        assert row["took"] < 5
    leases = json.loads((here.last() / "checkpoint.json").read_text())["leases"]
    trained = sum(len(row["places"]) - len(row["lost"]) for row in committed) * 2 * 2
    assert leases["next"] - len(leases["returned"]) == trained


def test_an_epoch_lasts_until_its_data_is_trained(scene, tmp_path):
    """A round is 3 workers x 2 steps x 2 sequences; 60 are five rounds, but one worker dies in the second."""
    data = scene(train=TRAIN).config(tmp_path).data
    n = open_tokens(data.train).n_sequences(data.seq_len)
    here = scene(train=TRAIN | {"rounds": 0, "epochs": 60 / n})
    hub = here.hub()
    for name, faults in (("mortal", [{"at": "train", "round": 1}]), ("b", []), ("c", [])):
        here.worker(name, *faults)
    finish(here, hub, replayed=False)
    # 12, then 8 in each round, until less than a round of three is left: 12 + 5 x 8
    assert [len(row["places"]) - len(row["lost"]) for row in here.events("round")] == [3] + [2] * 5
    leases = json.loads((here.last() / "checkpoint.json").read_text())["leases"]
    assert leases["next"] - len(leases["returned"]) == 52


def test_a_stopped_worker_is_dropped_at_the_deadline_and_comes_back(scene):
    """Rows 2, 3: SIGSTOP, then SIGCONT; a straggler. The old result is refused by the closed session."""
    here = scene(train=TRAIN | {"rounds": 400}, hub={"floor": 1.5})
    hub = here.hub()
    stopped = here.worker("stopped", {"at": "train", "round": 2, "signal": "SIGSTOP"})
    slow = here.worker("slow", {"at": "train", "round": 5, "sleep": 6.0})
    here.worker("steady")
    late = here.until(lambda: here.events("late", worker="stopped"))[0]
    assert late["round"] == 2
    row = here.until(lambda: here.events("round", round=2))[0]
    assert len(row["lost"]) == 1
    assert late["seconds"] >= 1.5  # the floor, or three times the median where that is more
    assert late["seconds"] <= row["took"] < late["seconds"] + 2.5  # 0.1 s on a machine of one's own
    stopped.signal(signal.SIGCONT)
    here.until(lambda: len(here.events("joined", worker="stopped")) == 2)
    here.until(lambda: len(here.events("joined", worker="slow")) == 2)
    again = here.events("joined", worker="slow")[-1]["time"]
    here.until(
        lambda: [e for e in here.events("round") if e["time"] > again and len(e["places"]) == 3]
    )
    hub.signal(signal.SIGTERM)
    assert hub.wait() == 128 + signal.SIGTERM
    assert [stopped.wait(), slow.wait()] == [0, 0]
    done = json.loads((here.last() / "checkpoint.json").read_text())["round"]
    assert done == len(here.events("round"))
    assert same_bits(here.replay(), here.last())


def test_results_that_are_not_believed(scene):
    """Rows 4, 5, 6, 7 (short): late, twice, NaN, Inf, huge, garbage, a wrong checksum, a wrong size."""
    here = scene(train=TRAIN | {"n_workers": 4, "rounds": 12})
    hub = here.hub()
    here.worker(
        "untimely",
        {"at": "send", "do": "wrong round", "round": 2},
        {"at": "send", "do": "twice", "round": 4},
        {"at": "weights", "round": 5},
        {"at": "send", "do": "corrupt", "round": 6},
        {"at": "send", "do": "corrupt", "round": 8, "always": True},
    )
    sick = here.worker(
        "sick",
        *(
            {"at": "result", "do": what, "round": r}
            for r, what in ((1, "nan"), (3, "inf moment"), (5, "nan"))
        ),
    )
    wild = here.worker(
        "wild",
        *({"at": "result", "do": what, "round": r} for r, what in ((1, "huge"), (2, "garbage"))),
        {"at": "send", "do": "short", "round": 4},
    )
    here.worker("sound", {"at": "send", "do": "cut short", "round": 7})
    finish(here, hub)
    whys = {(row["worker"], row["round"]): row["why"] for row in here.events("refused")}
    assert "NaN or Inf" in whys["sick", 1]
    assert "NaN or Inf" in whys["sick", 3]
    assert "most that AdamW" in whys["wild", 1]
    assert ("wild", 2) in whys  # garbage: NaN or a huge norm
    assert "bytes instead of" in whys["wild", 4]
    assert "late or twice" in whys["untimely", 1]
    assert "late or twice" in whys["untimely", 4]
    assert whys["untimely", 8] == "a wrong checksum, twice"
    again = {(row["worker"], row["round"]) for row in here.events("again")}
    assert again == {("untimely", 6), ("untimely", 8), ("sound", 7)}
    committed = {row["round"]: row for row in here.events("round")}
    assert [len(committed[r]["lost"]) for r in range(9)] == [0, 2, 1, 1, 1, 1, 0, 0, 1]
    # three strikes: out, and out for good
    assert {row["worker"] for row in here.events("quarantined")} == {"sick", "wild"}
    assert [sick.wait(), wild.wait()] == [2, 2]
    assert "quarantine" in sick.text
    assert all(len(row["places"]) == 2 for r, row in committed.items() if r > 5)
    barred = here.events("turned away")
    assert not barred or "quarantine" in barred[0]["why"]


def test_a_result_that_never_comes_holds_up_no_other(scene):
    """One that is said to have left: the hub waits for it till the deadline, and takes what comes meanwhile."""
    here = scene(train=TRAIN | {"rounds": 3}, hub={"floor": 2.0})
    hub = here.hub()
    here.worker("liar", {"at": "send", "do": "nothing", "round": 1})
    for name in "ab":  # they answer after the liar
        here.worker(name, {"at": "train", "round": 1, "sleep": 0.8})
    finish(here, hub)
    assert [row["worker"] for row in here.events("lost", round=1)] == ["liar"]
    assert not here.events("late")
    row = here.events("round", round=1)[0]
    assert len(row["places"]) == 3
    assert len(row["lost"]) == 1
    assert sorted(row["seconds"]) == ["a", "b"]


def test_too_few_workers_commit_nothing(scene):
    """Row 8: below hub.min_workers the round is tried again; the hub says so, and gives up in the end."""
    here = scene(train=TRAIN | {"rounds": 400}, hub={"min_workers": 2, "patience": 4.0})
    hub = here.hub()
    here.worker("a")
    here.worker("b", {"at": "train", "round": 2})
    here.worker("c", {"at": "train", "round": 2})
    here.until(lambda: here.events("not committed"))
    assert not here.events("round", round=2)
    helper = here.worker("d")
    here.until(lambda: here.events("round", round=4))
    assert here.events("waiting", n_workers=1, need=2)
    helper.signal(signal.SIGKILL)
    assert hub.wait() == 4
    assert "hub.min_workers" in hub.text
    assert "--resume" in hub.text
    assert same_bits(here.replay(), here.last())


def test_workers_join_leave_and_bring_their_own_width(scene):
    """Any round may be anyone's first or last, and a strong machine takes more blocks than a weak one."""
    here = scene(train=TRAIN | {"rounds": 400}, hub={"wait": 0.0})
    hub = here.hub()
    here.worker("first")
    here.until(lambda: here.events("round"))
    strong = here.worker("strong", widths={"attn": 4, "ffn": 4})
    here.until(lambda: here.events("joined", worker="strong", attn=4))
    here.worker("weak", widths={"attn": 1})
    here.until(lambda: here.events("joined", worker="weak"))
    here.worker("spare")
    here.until(lambda: len([e for e in here.events("round") if len(e["places"]) == 3]) > 1)
    assert {row["worker"] for row in here.events("joined")} == {"first", "strong", "weak"}
    strong.signal(signal.SIGTERM)
    assert strong.wait() == 128 + signal.SIGTERM
    here.until(lambda: here.events("joined", worker="spare"))  # it had waited for a place
    wrong = here.worker("wrong", widths={"ffn": 9})
    assert wrong.wait() == 2
    assert "legal K are 1..4" in wrong.text
    hub.signal(signal.SIGINT)
    assert hub.wait() == 130
    assert same_bits(here.replay(), here.last())


def test_strangers_are_refused_and_nothing_of_theirs_is_read(scene, tmp_path):
    """Row 17: no secret, another secret, garbage, pickle, silence; the run goes on as if alone."""
    here = scene(train=TRAIN | {"rounds": 400})
    hub = here.hub()
    here.worker("a")
    here.worker("b")
    stranger = here.worker("stranger", secret="another secret of enough bytes")
    assert stranger.wait() == 2
    assert "another secret" in stranger.text
    evil = tmp_path / "evil"
    payload = (
        b"cos\nsystem\n(S'touch " + str(evil).encode() + b"'\ntR."
    )  # unpickled, it would touch
    silent = socket.create_connection(("127.0.0.1", here.port))
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 9, payload * 4, bytes(1 << 16)):
        with socket.create_connection(("127.0.0.1", here.port)) as peer:
            assert peer.recv(36).startswith(MAGIC)
            peer.sendall(garbage)
            peer.settimeout(5)
            try:
                told = peer.recv(1 << 10)  # 32 zero bytes instead of the hub's proof
            except ConnectionError:
                told = b""
            assert not told.strip(b"\0")
    here.worker("c")
    here.until(lambda: here.events("round"))
    assert len(here.events("stranger")) >= 4
    assert all("secret" in row["why"] for row in here.events("stranger"))
    silent.close()
    assert not evil.exists()
    hub.signal(signal.SIGTERM)
    hub.wait()
    assert same_bits(here.replay(), here.last())
    assert {len(row["places"]) for row in here.events("round")} == {3}


def test_nobody_answers(scene, nursery, tmp_path):
    """Row 16: a worker without a hub, a hub without a port: an error that names host:port in 10 s."""
    assert remote.FIRST < 10
    here = scene()
    began = time.monotonic()
    lonely = here.worker("lonely", first=2.0)
    assert lonely.wait(25) == 2
    assert f"no hub at 127.0.0.1:{here.port}" in lonely.text
    assert 2 < time.monotonic() - began < 14  # 2 s on a machine that is not busy
    where = f"127.0.0.1:{here.port}"
    with socket.create_server(("127.0.0.1", here.port)), pytest.raises(OSError, match=where):
        listen(where, public=False)


def test_a_result_that_is_longer_than_announced_costs_a_restart(scene, tmp_path):
    """Row 7: gloo aborts a process that gets more bytes than it asked for; no other round is lost."""
    here = scene(train=TRAIN)
    hub = here.hub()
    for name in "ab":
        here.worker(name)
    here.worker("rogue", {"at": "send", "do": "long", "round": 3})
    assert hub.wait() == -signal.SIGABRT
    second = here.hub(resume=True)
    assert second.wait() == 0, second.text
    assert here.events("started")[-1]["round"] in (2, 3)  # the writer may still have been at it
    local = rounds.train(here.config(tmp_path / "local", run={"variant": "local"}), quiet=True)
    for name in FILES:
        assert (local / name).read_bytes() == (here.last() / name).read_bytes(), name


def run_ip(*words: str) -> int:
    return subprocess.run(["ip", *words], capture_output=True).returncode


@pytest.fixture
def island():
    """A network namespace behind a link that can be cut: (its name, the address on this side)."""
    name = f"twist{os.getpid()}"
    outer, inner = f"tw{os.getpid()}a"[:15], f"tw{os.getpid()}b"[:15]
    if shutil.which("ip") is None or run_ip("netns", "add", name):
        pytest.skip("network namespaces are not permitted here")
    ready = not (
        run_ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
        or run_ip("addr", "add", "10.77.33.1/24", "dev", outer)
        or run_ip("link", "set", outer, "up")
        or run_ip("-n", name, "addr", "add", "10.77.33.2/24", "dev", inner)
        or run_ip("-n", name, "link", "set", inner, "up")
    )
    try:
        if not ready:
            pytest.skip("virtual links are not permitted here")
        yield name, "10.77.33.1", outer
    finally:
        run_ip("netns", "del", name)


@pytest.mark.parametrize("cut", [["far1"], ["far1", "far2"]])
def test_a_cut_link_is_a_stopped_worker(scene, island, cut):
    """Row 14: one or half of the workers behind a link that is cut, and mended: only the hub commits."""
    space, host, link = island
    names = [*cut, "near1", "near2", "near3"][:4]
    others = names[len(cut) :]
    here = scene(train=TRAIN | {"n_workers": 4, "rounds": 2000}, hub={"floor": 1.0})
    here.host = host
    hub = here.hub()
    far = [here.worker(name, netns=space) for name in cut]
    near = [here.worker(name) for name in others]
    here.until(lambda: len(here.events("round")) > 2)
    assert run_ip("link", "set", link, "down") == 0
    here.until(lambda: len(here.events("late")) + len(here.events("lost")) >= len(cut))
    gone = here.events("late") + here.events("lost")
    assert {row["worker"] for row in gone} == set(cut)
    assert len({row["round"] for row in gone}) == 1  # one deadline for all
    n = len(here.events("round"))
    here.until(lambda: len(here.events("round")) > n + 2)
    assert here.events("round")[-1]["places"] == [
        row["place"] for row in here.events("joined") if row["worker"] in others
    ]
    assert run_ip("link", "set", link, "up") == 0
    for name in cut:
        here.until(lambda name=name: len(here.events("joined", worker=name)) == 2)
    here.until(lambda: len(here.events("round")[-1]["places"]) == 4)
    hub.signal(signal.SIGTERM)
    assert hub.wait() == 143
    assert [child.wait() for child in (*far, *near)] == [0] * 4
    assert same_bits(here.replay(), here.last())


@pytest.mark.parametrize("at", ["post", "collect", "aggregate", "commit", "save"])
def test_a_killed_hub_goes_on_from_its_last_round(scene, tmp_path, at):
    """Row 9: SIGKILL in every phase; the next hub continues bitwise, with the workers of the first."""
    here = scene(train=TRAIN | {"rounds": 5, "scale": "measured"})
    after = {"post": 7, "collect": 2, "aggregate": 2, "commit": 2, "save": 5}[at]
    hub = here.hub(faults=[{"at": at, "after": after}])
    workers = [here.worker(name) for name in "abc"]
    assert hub.wait() == -signal.SIGKILL
    here.until(lambda: (here.out / "checkpoints").is_dir())
    second = here.hub(resume=True)
    assert second.wait() == 0, second.text
    assert [worker.wait(10) for worker in workers] == [0, 0, 0]
    started = here.events("started")[-1]
    assert started["round"] > 0
    joined = [row for row in here.events("joined") if row["time"] >= started["time"]]
    assert [row["time"] - started["time"] < 10 for row in joined] == [True] * 3
    local = rounds.train(here.config(tmp_path / "local", run={"variant": "local"}), quiet=True)
    for name in FILES:
        assert (local / name).read_bytes() == (here.last() / name).read_bytes(), name


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_smaller_wires_train_nearly_the_same(scene, tmp_path, wire):
    """Changes go up and moments both ways in fewer bytes; weights go down as they are."""
    here = scene(train=TRAIN | {"rounds": 4, "outer": "none"}, run={"wire": wire})
    hub = here.hub()
    for name in "abc":
        here.worker(name)
    assert hub.wait() == 0, hub.text
    local = rounds.train(here.config(tmp_path / "local", run={"variant": "local"}), quiet=True)
    start = huggingface.load(here.config(tmp_path / "x").model, 0)
    exact, found = (load_file(path / "model.safetensors") for path in (local, here.last()))
    begun = {name: param.detach() for name, param in start.named_parameters()}
    moved = sum(float((exact[name] - begun[name]).square().sum()) for name in begun) ** 0.5
    off = sum(float((exact[name] - found[name]).square().sum()) for name in begun) ** 0.5
    assert 0 < off < {"bf16": 0.1, "int8": 0.3}[wire] * moved
    row = json.loads((here.out / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["bytes_wire"] < {"bf16": 0.67, "int8": 0.55}[wire] * _wire_fp32(here)


def _wire_fp32(here: Scene) -> float:
    """Bytes of a round in float32, counted by hand: 3 workers, 3 rows, both ways."""
    run, _ = here.replay()
    blueprint = generator.for_training(run.block_map, 3, run.cfg.blocks, seed=0, round=3)
    return sum(
        2 * 3 * 4 * run.full.narrowed(run.block_map, run.block_map.widths(b)).n_params
        for b in blueprint
    )
