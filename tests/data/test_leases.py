"""Every sequence is trained exactly once, whoever dies, joins or changes the batch."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tokens, tiny

from twistlm.data import stream
from twistlm.data.stream import Batches, Leases
from twistlm.data.token_file import open_tokens, verify_tokens
from twistlm.training import checkpoint, rounds, startup
from twistlm.training.progress import Progress
from twistlm.training.run import Run
from twistlm.training.worker import LocalTrainer
from twistlm.transport.ranks import Cluster


def test_without_faults_slots_are_the_batches_of_the_formula(tokens):
    batches = Batches(open_tokens(tokens), 16, n_workers=3, batch=2, seed=3)
    ledger = Leases()
    for r in range(5):
        slots, ledger = stream.take(ledger, 4 * 3, 2)
        for w, j in product(range(3), range(4)):
            mine = stream.of_worker(slots, w, 3)
            assert mine[j] == slots[j * 3 + w]
            assert torch.equal(batches.slot(mine[j]), batches(w, r * 4 + j))
    assert ledger == Leases(5 * 4 * 3 * 2)


def test_returned_go_out_first_and_in_order():
    slots, ledger = stream.take(Leases(), 6, 2)
    assert slots == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
    ledger = stream.give_back(ledger, (slots[4], slots[1]))
    assert ledger == Leases(12, (2, 3, 8, 9))
    again, ledger = stream.take(ledger, 1, 2)
    assert (again, ledger) == (((2, 3),), Leases(12, (8, 9)))
    again, ledger = stream.take(ledger, 2, 3)  # another batch: cut anew, old ones first
    assert (again, ledger) == (((8, 9, 12), (13, 14, 15)), Leases(16))
    with pytest.raises(AssertionError, match="never taken"):
        stream.give_back(ledger, ((16, 17),))
    ledger = stream.give_back(ledger, slots[:1])
    with pytest.raises(AssertionError, match="twice"):
        stream.give_back(ledger, slots[:1])


@pytest.mark.parametrize("seed", range(5))
def test_exactly_once_by_counting(seed):
    """200 rounds of random deaths and joins, the batch and the interval changing now and then."""
    rng = random.Random(seed)
    ledger, trained, batch, interval = Leases(), Counter(), 4, 3
    for _ in range(200):
        if rng.random() < 0.1:
            batch, interval = rng.randint(1, 7), rng.randint(1, 5)
            ledger = stream.from_dict(json.loads(json.dumps(stream.to_dict(ledger))))
        n = rng.randint(1, 8)
        slots, after = stream.take(ledger, interval * n, batch)
        assert [len(slot) for slot in slots] == [batch] * (interval * n)
        for w in range(n):
            mine = stream.of_worker(slots, w, n)
            if rng.random() < 0.3:
                after = stream.give_back(after, mine)
            else:
                trained.update(place for slot in mine for place in slot)
        if rng.random() < 0.05:  # the run dies before it commits: the old ledger holds
            for slot in slots:
                trained.subtract(set(slot) - set(after.returned))
            continue
        ledger = after
    assert {count for count in trained.values() if count} == {1}
    done = {place for place, count in trained.items() if count}
    assert done | set(ledger.returned) == set(range(ledger.next))
    assert not done & set(ledger.returned)
    assert len(ledger.returned) < 8 * 7 * 5  # never more than one round's worth piles up


def setup(tokens: str, out: Path, resume: bool = False, **sections: dict) -> tuple[Run, Progress]:
    cfg = tiny(tokens, out, **sections)
    cluster = Cluster(cfg.run.variant, cfg.train.n_workers, cfg.run.seat, "cpu")
    return startup.set_up(cfg, cluster, resume, quiet=True)


def trained_rows(tokens: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the sequences that trainers read from now on, by their ids."""
    file, seen, place = open_tokens(tokens), [], LocalTrainer._place
    windows = file.tokens[: file.n_sequences(16) * 16].reshape(-1, 16).tolist()
    row_of = {tuple(ids): row for row, ids in enumerate(windows)}
    assert len(row_of) == len(windows)

    def spied(self, ids, *rest):
        seen.extend(row_of[tuple(row)] for row in ids.tolist())
        place(self, ids, *rest)

    monkeypatch.setattr(LocalTrainer, "_place", spied)
    return seen


@pytest.mark.parametrize("method", ["twist", "dense"])
def test_a_run_that_changes_s_and_batch_trains_every_sequence_once(tmp_path, monkeypatch, method):
    """One epoch of 126 sequences: S = 3, batch 2; then S = 2, batch 3; then S = 4, batch 1."""
    tokens = make_tokens(tmp_path / "tokens", 126 * 16)
    seen = trained_rows(tokens, monkeypatch)
    counts = []
    for until, n_workers, batch in ((2, 3, 2), (5, 2, 3), (8, 4, 1)):
        train = {"method": method, "rounds": until, "n_workers": n_workers, "batch": batch}
        rounds.train(tiny(tokens, tmp_path / "run", train=train), resume=until > 2, quiet=True)
        counts.append(len(seen))
    assert counts == [36, 90, 126]  # rounds of 18, 18 and 12 sequences
    assert Counter(seen) == Counter(range(126))
    saved = checkpoint.open_(tmp_path / "run")
    assert saved.manifest.pop("leases") == {"next": 126, "returned": []}
    assert saved.leases == Leases(8 * 3 * 4 * 1)  # an old one: rounds, interval, S, batch of today


def test_returned_leases_survive_a_checkpoint(tmp_path, tokens):
    """What a lost worker gave back is the first data of the resumed run."""
    run, progress = setup(tokens, tmp_path / "run")
    slots, after = stream.take(progress.leases, 9, 2)
    lost = stream.of_worker(slots, 1, 3)
    progress = replace(progress, round=1, leases=stream.give_back(after, lost))
    folder = tmp_path / "run/checkpoints"
    checkpoint.save(folder, run.central, progress, run.cfg, run.template, None, keep=2)
    _, resumed = setup(tokens, tmp_path / "run", resume=True)
    assert resumed == progress
    assert stream.take(resumed.leases, 9, 2)[0][:3] == lost


def spoil(stem: str, rows: list[int]) -> None:
    """Give these sequences the first illegal id, in a file that no manifest vouches for."""
    tokens = np.fromfile(f"{stem}.bin", "<u2")
    tokens[np.array(rows) * 16 + 5] = 64
    tokens.tofile(f"{stem}.bin")
    table = json.loads(Path(f"{stem}.json").read_text())
    Path(f"{stem}.json").write_text(
        json.dumps({k: v for k, v in table.items() if k not in ("files", "sha256")})
    )


@pytest.mark.parametrize("method", ["twist", "dense"])
def test_a_sequence_with_an_illegal_id_never_goes_out(tmp_path, monkeypatch, capsys, method):
    """The run goes on with the next legal ones and says which it left out; the ledger, too."""
    tokens = make_tokens(tmp_path / "tokens", 126 * 16)
    spoil(tokens, [7, 90])
    seen = trained_rows(tokens, monkeypatch)
    valid = make_tokens(tmp_path / "valid")
    cfg = tiny(tokens, tmp_path / "run", data={"valid": valid}, train={"method": method})
    rounds.train(replace(cfg, train=replace(cfg.train, rounds=6)), quiet=True)
    assert Counter(seen) == Counter(set(seen))
    assert len(seen) == 6 * 18
    assert not {7, 90} & set(seen)
    saved = checkpoint.open_(tmp_path / "run")
    batches = Batches(open_tokens(tokens), 16, 3, 2, cfg.run.seed)
    skipped = batches.rows_at(saved.leases.skipped).tolist()
    assert set(skipped) == set(batches.rows_at(range(saved.leases.next)).tolist()) & {7, 90}
    assert saved.leases.next == 6 * 18 + len(skipped)
    told = capsys.readouterr().out
    named = re.findall(r"set aside: .*tokens\.bin: sequence (\d+) .* id 64", told)
    assert sorted(map(int, named)) == sorted(skipped) != []


def test_a_file_without_a_legal_sequence_is_refused(tmp_path):
    tokens = make_tokens(tmp_path / "tokens", 20 * 16)
    spoil(tokens, list(range(20)))
    with pytest.raises(ValueError, match="no sequence is legal") as caught:
        stream.take_legal(Batches(open_tokens(tokens), 16, 2, 3, 0), Leases(), 4)
    told = r"tokens\.bin: sequence (\d+) \(tokens (\d+)\.\.(\d+)\) holds id 64, .* one is 63"
    row, first, last = map(int, re.search(told, str(caught.value)).groups())
    assert (first, last) == (row * 16, row * 16 + 15)
    with pytest.raises(ValueError, match=r"tokens\.bin is damaged: it holds id 64, .* is 63"):
        verify_tokens(tokens)


def test_what_fails_with_two_workers_is_set_aside_and_what_is_only_lost_is_not():
    slots, ledger = stream.take(Leases(), 4, 2)
    for _ in range(5):  # a worker that is gone says nothing about its sequences
        ledger = stream.give_back(ledger, slots[1:2])
        (again,), ledger = stream.take(ledger, 1, 2)
        assert again == slots[1]
    for _ in range(3):  # nor does one that fails always
        ledger = stream.fail(ledger, slots[1:3], worker=0)
        assert (ledger.returned, ledger.skipped) == ((2, 3, 4, 5), ())
        _, ledger = stream.take(ledger, 2, 2)
    ledger = stream.give_back(ledger, ((4, 5),))
    ledger = stream.fail(ledger, ((2, 6),), worker=1)  # 2 with a second one, 6 with its first
    assert (ledger.returned, ledger.skipped) == ((4, 5, 6), (2,))
    assert ledger.failed == ((3, 0), (4, 0), (5, 0), (6, 1))
    assert stream.from_dict(json.loads(json.dumps(stream.to_dict(ledger)))) == ledger
    assert 2 not in {place for slot in stream.take(ledger, 4, 3)[0] for place in slot}
