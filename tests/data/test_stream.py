"""Every sequence is trained exactly once, whoever dies, joins or changes the batch.

Batches are a pure function of (seed, worker, step), and token files that lie are refused.
"""

import json
import os
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import batch_of, make_tokens, tiny

from twistlm.data import stream
from twistlm.data.stream import Batches, Leases
from twistlm.data.token_file import TokenFile, TokenMeta, open_tokens, verify_tokens, write_meta
from twistlm.training import checkpoint, rounds
from twistlm.training.worker import LocalTrainer

SEQ_LEN = 7


def numbered(folder: Path, n_sequences: int, rest: int = 0) -> TokenFile:
    """Token i is 65,000 + i: a batch shows which places of the file it was cut from."""
    n_tokens = n_sequences * SEQ_LEN + rest
    np.arange(65_000, 65_000 + n_tokens).astype("<u4").tofile(folder / "numbered.bin")
    meta = TokenMeta(n_tokens, 1, 1 << 17, (1 << 17) - 1, "uint32", "none", None)
    write_meta(folder / "numbered", meta)
    return open_tokens(str(folder / "numbered.bin"))


def simple_loop(seed: int, n: int, n_workers: int, batch: int, n_steps: int) -> dict:
    """Step by step, worker by worker draws from a queue that each epoch fills in its own order."""
    queue: list[int] = []
    epoch, drawn = 0, {}
    for step in range(n_steps):
        for worker in range(n_workers):
            taken = []
            while len(taken) < batch:
                if not queue:
                    queue = list(np.random.default_rng([seed, epoch]).permutation(n))
                    epoch += 1
                taken.append(int(queue.pop(0)))
            drawn[worker, step] = taken
    return drawn


# S * batch divides n, does not divide it, and exceeds it
@pytest.mark.parametrize(("n", "n_workers", "batch"), [(240, 3, 2), (23, 3, 2), (7, 2, 5)])
def test_rows_follow_the_simple_loop(tmp_path, n, n_workers, batch):
    """In any order of the calls, also where an epoch ends inside a batch."""
    n_steps = 4 * n // (n_workers * batch) + 3  # four epochs and a bit
    want = simple_loop(11, n, n_workers, batch, n_steps)
    batches = Batches(numbered(tmp_path, n, rest=3), SEQ_LEN, batch, seed=11)
    keys = list(want)
    random.Random(0).shuffle(keys)
    for key in keys:
        starts = [65_000 + row * SEQ_LEN for row in want[key]]
        found = batch_of(batches, n_workers, *key)
        assert found.tolist() == [list(range(at, at + SEQ_LEN)) for at in starts]


def spoil_meta(stem: str, **changes) -> None:
    path = Path(f"{stem}.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


NONE, NO_META = "no token file .*twistlm prepare", "not a token file's description"
SPOILT = [
    (lambda stem: Path(f"{stem}.json").unlink(), NONE),
    (lambda stem: (os.truncate(f"{stem}.bin", 0), spoil_meta(stem, n_tokens=0)), "0 bytes.*empty"),
    (lambda stem: spoil_meta(stem, dtype="words"), f"{NO_META}.*words"),
    (lambda stem: Path(f"{stem}.json").write_bytes(b"\xff\xfe{"), NO_META),
]


def test_open_tokens_refuses(tmp_path):
    for spoil, message in SPOILT:
        stem = make_tokens(tmp_path / "walk", 100)
        spoil(stem)
        with pytest.raises(ValueError, match=message) as caught:
            open_tokens(stem)
        assert stem in str(caught.value)  # the file is named


@pytest.mark.parametrize("seed", range(3))
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
            mine = slots[w::n]
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


def trained_rows(tokens: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the sequences that trainers read from now on, by their ids."""
    file, seen, place = open_tokens(tokens), [], LocalTrainer._set_batch
    windows = file.tokens[: file.n_sequences(16) * 16].reshape(-1, 16).tolist()
    row_of = {tuple(ids): row for row, ids in enumerate(windows)}
    assert len(row_of) == len(windows)

    def spied(self, ids, *rest):
        seen.extend(row_of[tuple(row)] for row in ids.tolist())
        place(self, ids, *rest)

    monkeypatch.setattr(LocalTrainer, "_set_batch", spied)
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
    batches = Batches(open_tokens(tokens), 16, 2, cfg.run.seed)
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
        stream.take_legal(Batches(open_tokens(tokens), 16, 3, 0), Leases(), 4)
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
