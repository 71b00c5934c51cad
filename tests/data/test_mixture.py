"""Texts with weights: every source gives its share, and its end is never trained on."""

from pathlib import Path

import numpy as np
import pytest
from conftest import word_level

from twistlm.data import builtin, mixture
from twistlm.data.mixture import mix, parse
from twistlm.data.token_file import open_tokens

WORDS = ["<eos>", *"abcdefg"]


@pytest.fixture
def tok():
    return word_level(WORDS)


def write(path: Path, word: str, n: int) -> str:
    path.write_text(" ".join([word] * n))
    return str(path)


def test_shares_of_tokens_and_the_end_of_every_source(tmp_path, tok, monkeypatch):
    """60,000 a's at 0.75 and 10,000 b's at 0.25: 29,400 of the a's fit to 9,800 b's."""
    monkeypatch.setattr(mixture, "CHUNK", 100)
    texts = [
        f"{write(tmp_path / f'{word}.txt', word, n)}:{share}"
        for word, n, share in (("a", 60_000, 0.75), ("b", 10_000, 0.25))
    ]
    made = mix(parse(texts), tmp_path / "out", tok)
    counts = [np.bincount(file.tokens, minlength=3)[1:3].tolist() for file in made]
    assert counts == [[29_400, 9_800], [1200, 200]]
    assert made[0].meta.n_tokens == 39_200
    parts = ("bin", "json", "tokenizer.json")
    names = {f"{split}.{part}" for split in ("train", "valid") for part in parts}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    # without weights all of it is taken; what is held out begins with some of each
    whole, valid = mix(parse([t.rpartition(":")[0] for t in texts]), tmp_path / "all", tok)
    assert np.bincount(whole.tokens, minlength=3)[1:3].tolist() == [58_800, 9_800]
    assert np.bincount(valid.tokens[:700], minlength=3)[1:3].tolist() == [600, 100]


def test_a_share_that_leaves_nothing_is_refused(tmp_path, tok):
    few = write(tmp_path / "a.txt", "a", 3000)
    many = write(tmp_path / "b.txt", "b", 3000)
    with pytest.raises(ValueError, match=r"--text .*a\.txt: its share leaves none of 2,940 tokens"):
        mix(parse([f"{few}:1e-6", f"{many}:1"]), tmp_path / "out", tok)


def test_chunks_come_from_all_over_a_source():
    kept = mixture._spread(np.arange(10 * mixture.CHUNK), 0.3)
    starts = [int(chunk[0]) // mixture.CHUNK for chunk in kept]
    assert starts == [3, 6, 9]


def test_no_document_is_on_both_sides(tmp_path):
    """The last 20 of 1,000 tokens are held out, and the rest of the document before."""
    from twistlm.model.tokenizer import EOS_NAMES

    tok = word_level([EOS_NAMES[0], *"abcdefg"])
    docs = ["a " * 480, "b " * 489, "c " * 13, "d " * 14]  # and four ends: 1,000 tokens
    train, valid = mix([mixture.Weighted(docs)], tmp_path, tok)
    assert (train.meta.n_tokens, valid.meta.n_tokens) == (985, 15)  # 980 lies inside of the c's
    assert set(train.tokens.tolist()) == {0, 1, 2, 3}
    assert set(valid.tokens.tolist()) == {0, 4}
    assert (train.meta.n_documents, valid.meta.n_documents) == (3, 1)


def test_a_stopped_mixture_goes_on_with_the_sources_that_are_there(tmp_path, tok):
    first, second = (write(tmp_path / f"{w}.txt", w, 500) for w in "ab")
    with pytest.raises(ValueError, match="not text"):
        mix([mixture.Weighted(first), mixture.Weighted([7])], tmp_path / "out", tok)
    Path(first).unlink()  # it must not be read again
    train, _ = mix([mixture.Weighted(first), mixture.Weighted(second)], tmp_path / "out", tok)
    assert np.bincount(train.tokens).tolist() == [0, 490, 490]
    Path(second).unlink()
    again, _ = mix([mixture.Weighted(first)], tmp_path / "out", tok)
    assert again.sha256 == train.sha256 == open_tokens(str(tmp_path / "out/train")).sha256


def test_what_a_disk_has_damaged_is_made_anew(tmp_path, tok, monkeypatch):
    """The files of a mixture and the built-in corpus are ours: nobody is told to move them."""
    out, texts = tmp_path / "out", parse([write(tmp_path / "a.txt", "a", 500)])
    made = mix(texts, out, tok)[0].sha256
    for name in ("train.json", "source-0.json"):
        (out / name).write_text("{")
    assert mix(texts, out, tok)[0].sha256 == made
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtin, "documents", lambda: ["one text", "another one"])
    stem = builtin.resolve(builtin.NAME, "train")
    made = open_tokens(stem).sha256
    Path(f"{stem}.json").write_text("{")
    assert open_tokens(builtin.resolve(builtin.NAME, "train")).sha256 == made
