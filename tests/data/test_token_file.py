"""Batches are a pure function of (seed, worker, step), and token files that lie are refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tokens

from twistlm.data.stream import Batches
from twistlm.data.token_file import TokenFile, TokenMeta, open_tokens, write_meta

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
    for (n, n_workers, batch, interval, epochs), rounds in ROUNDS.items():
        meta = TokenMeta(n * SEQ_LEN + 5, 1, 64, 63, "uint16", "none", None)
        file = TokenFile("counted", meta, np.zeros(0, "<u2"))
        assert Batches(file, SEQ_LEN, n_workers, batch, 0).n_rounds(epochs, interval) == rounds


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
