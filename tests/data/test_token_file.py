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


def numbered(folder: Path, n_sequences: int, rest: int = 0, dtype: str = "uint16") -> TokenFile:
    """Token i is i: a batch shows which places of the file it was cut from."""
    n_tokens = n_sequences * SEQ_LEN + rest
    np.arange(n_tokens).astype(np.dtype(dtype).newbyteorder("<")).tofile(folder / "numbered.bin")
    meta = TokenMeta(n_tokens, 1, n_tokens, n_tokens - 1, dtype, "none", None, ["numbers"])
    write_meta(folder / "numbered", meta)
    return open_tokens(str(folder / "numbered"))


def simple_loop(seed: int, n: int, n_workers: int, batch: int, n_steps: int) -> dict:
    """The docstring's promise, with a queue: step by step, worker by worker draws a batch."""
    queue: list[int] = []
    epoch = 0
    drawn = {}
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
SIZES = [(24, 3, 2), (23, 3, 2), (17, 4, 3), (5, 1, 1), (7, 2, 5), (3, 2, 4)]


@pytest.mark.parametrize(("n", "n_workers", "batch"), SIZES)
def test_rows_follow_the_simple_loop(tmp_path, n, n_workers, batch):
    n_steps = 4 * n // (n_workers * batch) + 3  # four epochs and a bit
    want = simple_loop(11, n, n_workers, batch, n_steps)
    batches = Batches(numbered(tmp_path, n, rest=3), SEQ_LEN, n_workers, batch, seed=11)
    assert {key: batches.rows(*key).tolist() for key in want} == want


@pytest.mark.parametrize(("n", "n_workers", "batch"), SIZES)
def test_every_sequence_once_per_epoch(tmp_path, n, n_workers, batch):
    """Also where an epoch ends inside a batch: the stream is cut every n draws."""
    batches = Batches(numbered(tmp_path, n, rest=1), SEQ_LEN, n_workers, batch, seed=2)
    n_steps = -(-3 * n // (n_workers * batch))
    stream = [
        row
        for step in range(n_steps)
        for s in range(n_workers)
        for row in batches.rows(s, step).tolist()
    ]
    for epoch in range(3):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))
    if n > 4:  # three of 120 orders or more are all different, and none is the file's
        orders = {tuple(stream[epoch * n : (epoch + 1) * n]) for epoch in range(3)}
        assert len(orders | {tuple(range(n))}) == 4


def test_batch_is_pure(tmp_path):
    """The order of the calls, other files and a second instance change nothing."""
    file = numbered(tmp_path, 37)
    keys = [(worker, step) for worker in range(3) for step in range(40)]
    first = Batches(file, SEQ_LEN, 3, 2, seed=8)
    reference = {key: first(*key) for key in keys}
    random.Random(0).shuffle(keys)
    torch.manual_seed(1)
    np.random.seed(1)
    again = Batches(file, SEQ_LEN, 3, 2, seed=8)
    for key in keys:
        Batches(file, SEQ_LEN, 2, 5, seed=9)(1, key[1])  # a stranger between two calls
        got = again(*key)
        assert torch.equal(got, reference[key])
        got += 1  # and a caller may do what it likes with its batch
        assert torch.equal(first(*key), reference[key])


def test_seed_matters(tmp_path):
    file = numbered(tmp_path, 50)
    orders = {tuple(Batches(file, SEQ_LEN, 1, 50, seed).rows(0, 0).tolist()) for seed in range(5)}
    assert len(orders) == 5
    # no seed repeats another's order one epoch later, as seed + epoch would
    assert tuple(Batches(file, SEQ_LEN, 1, 50, 0).rows(0, 1).tolist()) not in orders


def test_batch_holds_the_tokens_of_its_rows(tmp_path):
    batches = Batches(numbered(tmp_path, 20), SEQ_LEN, 2, 3, seed=0)
    ids = batches(1, 4)
    assert ids.shape == (3, SEQ_LEN)
    assert ids.dtype == torch.int64
    starts = [row * SEQ_LEN for row in batches.rows(1, 4).tolist()]
    assert ids.tolist() == [list(range(start, start + SEQ_LEN)) for start in starts]
    first = batches.rows(1, 4).tolist()[0]  # the 4 * 2 + 1 batches of 3 before it fill 27 places
    assert batches.name(27) == f"{batches.file.stem}.bin, sequence {first}"


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_sequences_equal_slices_of_the_file(tmp_path, dtype):
    """Compared with the raw little-endian bytes, read without numpy's help."""
    size = np.dtype(dtype).itemsize
    n_tokens = 9 * SEQ_LEN + 2
    rng = np.random.default_rng(3)
    values = rng.integers(0, 2 ** (8 * size), n_tokens, dtype=np.uint64)
    raw = b"".join(int(v).to_bytes(size, "little") for v in values)
    (tmp_path / "t.bin").write_bytes(raw)
    write_meta(
        tmp_path / "t", TokenMeta(n_tokens, 1, 2**32, int(values.max()), dtype, "none", None)
    )
    file = open_tokens(str(tmp_path / "t"))
    assert file.n_sequences(SEQ_LEN) == 9
    got = file.sequences([8, 0, 3, 3], SEQ_LEN)
    assert got.dtype == torch.int64
    for row, place in zip(got.tolist(), (8, 0, 3, 3), strict=True):
        cut = raw[place * SEQ_LEN * size : (place + 1) * SEQ_LEN * size]
        assert row == [
            int.from_bytes(cut[i : i + size], "little") for i in range(0, len(cut), size)
        ]


@pytest.mark.parametrize(
    ("n", "n_workers", "batch", "interval", "epochs", "rounds"),
    [
        (120, 4, 2, 15, 1.0, 1),  # exactly one round
        (119, 4, 2, 15, 1.0, 0),  # one sequence short of it
        (119, 4, 2, 15, 2.0, 1),  # 238 sequences, 120 in a round
        (121, 4, 2, 15, 3.0, 3),  # 363 / 120
        (100, 3, 2, 5, 0.5, 1),  # 50 / 30
        (100, 1, 1, 1, 0.0, 0),
        (10, 1, 1, 1, 2.5, 25),
        (114_250, 4, 2, 15, 3.0, 2856),  # the paper's set-up
    ],
)
def test_n_rounds_by_hand(n, n_workers, batch, interval, epochs, rounds):
    meta = TokenMeta(n * SEQ_LEN + 5, 1, 64, 63, "uint16", "none", None)
    file = TokenFile("counted", meta, np.zeros(0, "<u2"))
    assert Batches(file, SEQ_LEN, n_workers, batch, 0).n_rounds(epochs, interval) == rounds


@pytest.mark.parametrize("suffix", ["", ".bin", ".json"])
def test_open_tokens_by_stem_or_either_file(tmp_path, suffix):
    stem = make_tokens(tmp_path / "walk", 100)
    file = open_tokens(stem + suffix)
    assert file.stem == stem
    assert file.meta.n_tokens == len(file.tokens) == 100
    assert file.meta.max_id == int(file.tokens.max())
    assert str(file.tokenizer_path) == f"{stem}.tokenizer.json"


def spoil_meta(stem: str, **changes) -> None:
    path = Path(f"{stem}.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_meta(stem: str, **changes) -> TokenFile:
    """The same ids, described otherwise by a hand that seals what it writes."""
    write_meta(Path(stem), replace(open_tokens(stem).meta, **changes))
    return open_tokens(stem)


def resize(path: str, n_bytes: int) -> None:
    """Truncate a file, or make it grow."""
    Path(path).write_bytes(Path(path).read_bytes().ljust(n_bytes, b"x")[:n_bytes])


SPOILT = {
    "no .bin": (lambda stem: Path(f"{stem}.bin").unlink(), "no token file .*twistlm prepare"),
    "no .json": (lambda stem: Path(f"{stem}.json").unlink(), "no token file .*twistlm prepare"),
    "one byte short": (
        lambda stem: resize(f"{stem}.bin", 199),
        "has 199 bytes, .* 100 tokens of 2 bytes",
    ),
    "half": (lambda stem: resize(f"{stem}.bin", 100), "has 100 bytes, .* 100 tokens .*truncated"),
    "empty .bin": (lambda stem: resize(f"{stem}.bin", 0), "has 0 bytes.*empty"),
    "empty pair": (
        lambda stem: (resize(f"{stem}.bin", 0), spoil_meta(stem, n_tokens=0)),
        "has 0 bytes.*empty",
    ),
    "grown": (lambda stem: resize(f"{stem}.bin", 202), "has 202 bytes"),
    "another count": (lambda stem: spoil_meta(stem, n_tokens=101), "says 101 tokens"),
    "another dtype": (lambda stem: spoil_meta(stem, dtype="uint32"), "100 tokens of 4 bytes"),
    "no dtype": (
        lambda stem: spoil_meta(stem, dtype="words"),
        "not a token file's description.*words",
    ),
    "unknown field": (lambda stem: spoil_meta(stem, colour="red"), "description.*colour"),
    "not JSON": (lambda stem: resize(f"{stem}.json", 40), "not a token file's description"),
    "a list": (
        lambda stem: Path(f"{stem}.json").write_text("[1]"),
        "not a token file's description",
    ),
    "not UTF-8": (
        lambda stem: Path(f"{stem}.json").write_bytes(b"\xff\xfe{"),
        "not a token file's",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_open_tokens_refuses(tmp_path, case):
    stem = make_tokens(tmp_path / "walk", 100)
    spoil, message = SPOILT[case]
    spoil(stem)
    with pytest.raises(ValueError, match=message) as caught:
        open_tokens(stem)
    assert stem in str(caught.value)  # the file is named


def test_check_names_what_does_not_fit(tmp_path):
    stem = make_tokens(tmp_path / "walk", 100, vocab=64)
    file = with_meta(stem, tokenizer_sha256="a" * 64)
    file.check(100, 64, "a" * 64)  # exactly one sequence, exactly the vocabulary
    file.check(100, 64, None)
    with pytest.raises(ValueError, match=r"walk: 100 tokens are shorter .*data\.seq_len = 101"):
        file.check(101, 64)
    with pytest.raises(
        ValueError, match=r"walk: token id 63 .*vocabulary of 63: the tokenizer does not"
    ):
        file.check(100, 63)
    with pytest.raises(
        ValueError, match=r"walk was made with another tokenizer .*aaaaaaaaaaaa.*bbbbbbbbbbbb"
    ):
        file.check(100, 64, "b" * 64)
