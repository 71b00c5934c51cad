"""The fault matrix on Ray: real processes, real signals, and the bits of a run that was planned so.

`replay` trains the same rounds in this process, with the workers that the events say were in and
without those that they say were lost: every test ends by comparing all central state with it.
"""

import json
import os
import signal
import time

import pytest
from conftest import tiny
from processes import same_bits

from twistlm.data.token_file import open_tokens
from twistlm.system.signals import TOO_FEW, Ended
from twistlm.training import rounds
from twistlm.training.engines import owners
from twistlm.training.teacher import write_cache

TRAIN = {"n_workers": 3, "interval": 2, "outer": "nesterov(0.7, 0.6)", "schedule": "cosine"}


def test_a_driver_that_is_killed_or_crashes_finds_its_workers_again(scene, tmp_path, monkeypatch):
    """Row 7, once: SIGKILL before a commit, then an exception. The same workers go on, bit for
    bit, with a K for each, masks of blocks and layers, a teacher's cache and a wire by which
    `local` rounds, too."""
    train = TRAIN | {"rounds": 7, "scale": "measured", "teacher": "cache"}
    blocks = {"widths": "worker", "k_attn": [4, 2, 3], "k_ffn": [1, 4, 2], "deal": "order"}
    blocks |= {"masks": "sequence", "mask_attn": [4, 1], "mask_ffn": [2, 3]}
    blocks |= {"mask_depth": [0, 1], "nested": 0.5, "sort": True}
    here = scene(train=train, blocks=blocks, run={"wire": "int8"})
    teacher = rounds.train(tiny(here.tokens, tmp_path / "teacher"), quiet=True)
    write_cache(open_tokens(here.tokens), str(teacher), 8, 16, "cpu", quiet=True)
    here.start_and_die("owners.Owners.prepare", 3)
    prepare, calls = owners.Owners.prepare, []

    def fails(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a bug")
        return prepare(*args)

    monkeypatch.setattr(owners.Owners, "prepare", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        here.train(resume=True, keep=False)
    here.train(resume=True)
    # where the owner stands, whatever is on disk
    assert [row["round"] for row in here.events("started")] == [0, 3, 4]
    for place in range(3):
        assert len(here.workers(place)) == 3
        assert len(set(here.workers(place))) == 1
    here.same_as_local(tmp_path / "local")


def test_killed_stopped_and_slow_workers_and_sigterm(scene):
    """Rows 1, 2, 13: each costs its own result; late ones come back; a signal ends it in order."""
    here = scene(train=TRAIN | {"rounds": 2000}, ray={"floor": 4.0})
    here.suffers(
        {"place": 1, "round": 3, "at": "train", "do": "SIGSTOP"},
        {"place": 2, "round": 3, "at": "train", "do": "sleep"},
    )
    here.start()
    late = here.until(lambda: len(here.events("late", round=3)) == 2 and here.events("late"))
    row = here.until(lambda: here.events("round", round=3))[0]
    assert row["lost"] == [1, 2]
    assert 4.0 <= late[0]["seconds"] <= row["took"] < late[0]["seconds"] + 2.5  # 0.1 s
    os.kill(here.workers(1)[0], signal.SIGCONT)
    for place in (1, 2):  # kept, and its old result refused
        here.until(lambda place=place: len(here.workers(place)) == 2)
        assert len(set(here.workers(place))) == 1
    before, began = len(here.events("round")), time.time()
    os.kill(here.workers(0)[0], signal.SIGKILL)
    here.until(lambda: here.events("lost"))
    rows = here.until(lambda: len(here.events("round")) > before + 1 and here.events("round"))
    assert rows[before + 1]["time"] < began + 5  # 0.1 s on a machine of one's own
    here.until(lambda: len(here.workers(0)) == 2)
    here.until(lambda: here.events("round")[-1]["places"] == [0, 1, 2])
    here.stop()
    saved = json.loads((here.last() / "checkpoint.json").read_text())
    assert saved["round"] == len(here.events("round"))
    leases = saved["leases"]
    trained = sum(len(r["places"]) - len(r["lost"]) for r in here.events("round")) * 2 * 2
    assert leases["next"] - len(leases["returned"]) == trained
    assert same_bits(here.replay(), here.last())


def test_results_that_are_not_believed_and_nobody_left(scene):
    """Rows 5 and 6: wrong results are refused, the third bars the machine; then nobody is left."""
    here = scene(train=TRAIN | {"rounds": 9}, ray={"patience": 4.0})
    wrong = {1: "nan", 2: "huge", 3: "corrupt"}
    here.suffers(
        *({"place": 0, "round": r, "at": "send", "do": what} for r, what in wrong.items()),
        {"place": 1, "round": 4, "at": "send", "do": "short"},
        {"place": 2, "round": 6, "at": "receive", "do": "flip"},
    )
    with pytest.raises(Ended, match=r"round 6 needs 1 workers .* 0 are in after \d+ s") as end:
        here.train(keep=False)
    assert end.value.code == TOO_FEW
    whys = {row["round"]: row["why"] for row in here.events("refused")}
    said = ("NaN", "AdamW", "a wrong checksum", "bytes instead of", "not arrive")
    assert [word in whys[r] for word, r in zip(said, (1, 2, 3, 4, 6), strict=True)] == [True] * 5
    assert [row["round"] for row in here.events("quarantined")] == [3, 4, 6]
    assert len(here.events("joined")) == 3  # nobody new on a machine that is barred
    assert [len(row["places"]) for row in here.events("round")] == [3, 3, 3, 3, 2, 1]
    assert [row["lost"] for row in here.events("round")] == [[], [0], [0], [0], [1], []]
    assert same_bits(here.replay(), here.last())
