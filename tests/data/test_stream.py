"""Every sequence is trained exactly once, whoever dies, joins or changes the batch.

Batches are a pure function of (seed, worker, step), and token files that lie are refused.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tokens, tiny

from twistlm.data import stream
from twistlm.data.stream import Batches, Leases
from twistlm.data.token_file import TokenFile, TokenMeta, open_tokens, verify_tokens, write_meta
from twistlm.training import checkpoint, rounds
from twistlm.training.worker import LocalTrainer

SEQ_LEN = 7


def numbered(folder: Path, n_sequences: int, rest: int = 0) -> TokenFile:
    """Token i is i: a batch shows which places of the file it was cut from."""
    n_tokens = n_sequences * SEQ_LEN + rest
    np.arange(n_tokens).astype("<u2").tofile(folder / "numbered.bin")
    meta = TokenMeta(n_tokens, 1, n_tokens, n_tokens - 1, "uint16", "none", None, ["numbers"])
    write_meta(folder / "numbered", meta)
    return open_tokens(str(folder / "numbered"))


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


# (sequences, workers, batch): S * batch divides n, does not divide it, and exceeds it
@pytest.mark.parametrize(
    ("n", "n_workers", "batch"), [(24, 3, 2), (23, 3, 2), (5, 1, 1), (7, 2, 5), (3, 2, 4)]
)
def test_rows_follow_the_simple_loop(tmp_path, n, n_workers, batch):
    """In any order of the calls, also where an epoch ends inside a batch."""
    n_steps = 4 * n // (n_workers * batch) + 3  # four epochs and a bit
    want = simple_loop(11, n, n_workers, batch, n_steps)
    batches = Batches(numbered(tmp_path, n, rest=3), SEQ_LEN, n_workers, batch, seed=11)
    keys = list(want)
    random.Random(0).shuffle(keys)
    for key in keys:
        assert batches.rows(*key).tolist() == want[key]
        ids = [list(range(row * SEQ_LEN, (row + 1) * SEQ_LEN)) for row in want[key]]
        assert batches(*key).tolist() == ids
    first = want[0, 1][0]
    assert batches.name(n_workers * batch) == f"{batches.file.stem}.bin, sequence {first}"


def test_seed_matters(tmp_path):
    file = numbered(tmp_path, 50)
    orders = {tuple(Batches(file, SEQ_LEN, 1, 50, seed).rows(0, 0).tolist()) for seed in range(5)}
    assert len(orders) == 5
    # no seed repeats another's order one epoch later, as seed + epoch would
    assert tuple(Batches(file, SEQ_LEN, 1, 50, 0).rows(0, 1).tolist()) not in orders


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_sequences_equal_slices_of_the_file(tmp_path, dtype):
    """Compared with the raw little-endian bytes, read without numpy's help."""
    size, n_tokens = np.dtype(dtype).itemsize, 9 * SEQ_LEN + 2
    values = np.random.default_rng(3).integers(0, 2 ** (8 * size), n_tokens, dtype=np.uint64)
    ids = [int(v) for v in values]
    (tmp_path / "t.bin").write_bytes(b"".join(v.to_bytes(size, "little") for v in ids))
    write_meta(tmp_path / "t", TokenMeta(n_tokens, 1, 2**32, max(ids), dtype, "none", None))
    for suffix in ("", ".bin", ".json"):  # by its stem or either file
        file = open_tokens(f"{tmp_path}/t{suffix}")
        assert file.n_sequences(SEQ_LEN) == 9
        got = file.sequences([8, 0, 3, 3], SEQ_LEN)
        assert got.dtype == torch.int64
        assert got.tolist() == [ids[row * SEQ_LEN :][:SEQ_LEN] for row in (8, 0, 3, 3)]


ROUNDS = {  # sequences, S, batch, interval, epochs -> rounds
    (120, 4, 2, 15, 1.0): 1,
    (119, 4, 2, 15, 1.0): 0,  # one sequence short of it
    (121, 4, 2, 15, 3.0): 3,  # 363 / 120
    (100, 3, 2, 5, 0.5): 1,  # 50 / 30
    (114_250, 4, 2, 15, 3.0): 2856,  # the paper's set-up
}


def test_n_rounds_by_hand():
    for (n, n_workers, batch, interval, epochs), n_rounds in ROUNDS.items():
        meta = TokenMeta(n * SEQ_LEN + 5, 1, 64, 63, "uint16", "none", None)
        file = TokenFile("counted", meta, np.zeros(0, "<u2"))
        assert Batches(file, SEQ_LEN, n_workers, batch, 0).n_rounds(epochs, interval) == n_rounds


def spoil_meta(stem: str, **changes) -> None:
    path = Path(f"{stem}.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def resize(path: str, n_bytes: int) -> None:
    """Truncate a file, or make it grow."""
    Path(path).write_bytes(Path(path).read_bytes().ljust(n_bytes, b"x")[:n_bytes])


NONE, NO_META = "no token file .*twistlm prepare", "not a token file's description"
SPOILT = [
    (lambda stem: Path(f"{stem}.bin").unlink(), NONE),
    (lambda stem: Path(f"{stem}.json").unlink(), NONE),
    (lambda stem: resize(f"{stem}.bin", 199), "has 199 bytes, .* 100 tokens of 2 bytes.*truncated"),
    (lambda stem: resize(f"{stem}.bin", 202), "has 202 bytes"),
    (
        lambda stem: (resize(f"{stem}.bin", 0), spoil_meta(stem, n_tokens=0)),
        "has 0 bytes.*empty",
    ),
    (lambda stem: spoil_meta(stem, n_tokens=101), "says 101 tokens"),
    (lambda stem: spoil_meta(stem, dtype="uint32"), "100 tokens of 4 bytes"),
    (lambda stem: spoil_meta(stem, dtype="words"), f"{NO_META}.*words"),
    (lambda stem: spoil_meta(stem, colour="red"), f"{NO_META}.*colour"),
    (lambda stem: resize(f"{stem}.json", 40), NO_META),
    (lambda stem: Path(f"{stem}.json").write_text("[1]"), NO_META),
    (lambda stem: Path(f"{stem}.json").write_bytes(b"\xff\xfe{"), NO_META),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILT)
def test_open_tokens_refuses(tmp_path, spoil, message):
    stem = make_tokens(tmp_path / "walk", 100)
    spoil(stem)
    with pytest.raises(ValueError, match=message) as caught:
        open_tokens(stem)
    assert stem in str(caught.value)  # the file is named


def test_check_names_what_does_not_fit(tmp_path):
    stem = make_tokens(tmp_path / "walk", 100, vocab=64)
    write_meta(Path(stem), replace(open_tokens(stem).meta, tokenizer_sha256="a" * 64))
    file = open_tokens(stem)
    file.check(100, 64, "a" * 64)  # exactly one sequence, exactly the vocabulary
    for arguments, said in {
        (101, 64): r"walk: 100 tokens are shorter .*data\.seq_len = 101",
        (100, 63): r"walk: token id 63 .*vocabulary of 63: the tokenizer does not",
        (100, 64, "b" * 64): r"walk was made with another tokenizer .*aaaaaaaaaaaa.*bbbbbbbbbbbb",
    }.items():
        with pytest.raises(ValueError, match=said):
            file.check(*arguments)


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
