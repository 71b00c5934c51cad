"""Text becomes exactly the tokens that the tokenizers library gives, or nothing becomes of it at all."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import make_tokens
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel

from twistlm.data import prepare as preparing
from twistlm.data import teacher_cache
from twistlm.data.prepare import documents, prepare
from twistlm.data.teacher_cache import (
    open_teacher_cache,
    unpack,
    verify_teacher_cache,
    write_teacher_cache,
)
from twistlm.data.token_file import open_tokens
from twistlm.model.tokenizer import load_tokenizer
from twistlm.system import manifest
from twistlm.training.teacher import AT_ONCE, write_cache

EOS = "<|endoftext|>"
PROSE = (
    "The workers train their subnets, and the aggregator takes the mean.\n"
    "Every block is held by someone; nobody's update is lost.\n"
    "def round(s):\n    for step in range(15):\n        s.train()  \n\n    return s\n"
    "naïve café — „Grüße“, 日本語のテキスト, emoji 👩‍🚀, e\u0301 and \u00a0 odd\u2003spaces\n"
)


def train_bpe(special: list[str], vocab_size: int = 400) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # runs of white space occur, so that merges like "\n\n" and "    " exist
    tok.train_from_iterator([PROSE, "\n\n\n\n", "        ", "\r\n\r\n", " \n \n"] * 5, trainer)
    return tok


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return train_bpe([EOS])


@pytest.fixture(scope="module")
def tok_json(tok, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tok.save(str(path))
    return str(path)


def expected(tok: Tokenizer, docs: list[str], eos: str | None = EOS) -> list[int]:
    """One document after another, each closed by eos."""
    ids: list[int] = []
    for doc in docs:
        ids += tok.encode(doc, add_special_tokens=False).ids
        ids += [tok.token_to_id(eos)] if eos else []
    return ids


def write(path: Path, docs: list[str]) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"id": 1, "text": doc}) + "\n" for doc in docs))
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"id": range(len(docs)), "text": docs}), path, row_group_size=3)
    else:
        path.write_bytes("".join(docs).encode())
    return str(path)


DOCS = [
    PROSE,
    "x",
    "one line\n",
    "  indented\n\n\n\nand spaced   ",
    "a\r\nb\r\n\r\nc",
    f"inside {EOS} out",
]


# ---------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_documents_each_closed_by_eos(tmp_path, tok, tok_json, suffix):
    source = write(tmp_path / f"docs{suffix}", DOCS)
    file = prepare([source], tmp_path / "out", tok_json, quiet=True)
    want = expected(tok, DOCS)
    assert file.tokens.tolist() == want
    assert file.meta.n_tokens == len(want)
    assert file.meta.n_documents == len(DOCS)
    assert file.meta.max_id == max(want)
    assert file.meta.vocab_size == tok.get_vocab_size()
    assert file.meta.eos_id == tok.token_to_id(EOS)
    assert file.meta.dtype == "uint16"
    assert file.meta.sources == [source]


@pytest.mark.parametrize("suffix", [".txt", ".raw"])
def test_text_file_is_one_document(tmp_path, tok, tok_json, suffix):
    source = write(tmp_path / f"book{suffix}", [PROSE * 3])
    file = prepare([source], tmp_path / "out", tok_json, quiet=True)
    assert file.tokens.tolist() == expected(tok, [PROSE * 3])
    assert file.meta.n_documents == 1


def test_many_documents_over_batch_borders(tmp_path, tok, tok_json):
    """More documents than one call into the tokenizer takes; none is lost at a border."""
    docs = [f"document {i} says {i * i}\n" for i in range(2 * preparing.BATCH + 7)]
    for suffix in (".jsonl", ".parquet"):
        source = write(tmp_path / f"docs{suffix}", docs)
        file = prepare([source], tmp_path / "out", tok_json, quiet=True)
        assert file.tokens.tolist() == expected(tok, docs)
        assert file.meta.n_documents == len(docs)


def test_exactly_one_batch_of_documents(tmp_path, tok, tok_json):
    for n in (preparing.BATCH - 1, preparing.BATCH, preparing.BATCH + 1):
        docs = [f"number {i}" for i in range(n)]
        file = prepare([write(tmp_path / "d.jsonl", docs)], tmp_path / "out", tok_json, quiet=True)
        assert file.tokens.tolist() == expected(tok, docs)


def test_several_sources_in_order(tmp_path, tok, tok_json):
    sources = [
        write(tmp_path / "c.txt", [PROSE]),
        write(tmp_path / "a.jsonl", DOCS[:3]),
        write(tmp_path / "b.parquet", DOCS[3:]),
        write(tmp_path / "d.txt", ["tail"]),
    ]
    file = prepare(sources, tmp_path / "out", tok_json, quiet=True)
    assert file.tokens.tolist() == expected(tok, [PROSE, *DOCS, "tail"])
    assert file.meta.n_documents == 2 + len(DOCS)
    assert file.meta.sources == sources


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_another_column(tmp_path, tok, tok_json, suffix):
    path = tmp_path / f"d{suffix}"
    rows = {"text": ["wrong"], "body": ["right"]}
    if suffix == ".jsonl":
        path.write_text(json.dumps({name: values[0] for name, values in rows.items()}))
    else:
        pq.write_table(pa.table(rows), path)
    file = prepare([str(path)], tmp_path / "out", tok_json, column="body", quiet=True)
    assert file.tokens.tolist() == expected(tok, ["right"])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_empty_documents_are_skipped(tmp_path, tok, tok_json, suffix):
    """An empty row is no document: both kinds of file drop it, or eos would follow eos."""
    source = write(tmp_path / f"d{suffix}", ["", "a", "", "b", ""])
    file = prepare([source], tmp_path / "out", tok_json, quiet=True)
    assert file.tokens.tolist() == expected(tok, ["a", "b"])
    assert file.meta.n_documents == 2


def test_a_bar_counts_bytes_of_text_and_documents_of_the_rest(tmp_path):
    assert preparing._amount(write(tmp_path / "a.txt", ["déjà vu"])) == (True, 9)
    for suffix in (".jsonl", ".parquet"):
        assert preparing._amount(write(tmp_path / f"a{suffix}", ["one", "two", "three"])) == (
            False,
            3,
        )
    assert preparing._amount("hub:some/text") == (False, None)


def test_blank_lines_and_unicode_in_jsonl(tmp_path, tok, tok_json):
    path = tmp_path / "d.jsonl"
    lines = [json.dumps({"text": doc}, ensure_ascii=False) for doc in (PROSE, "z\u2028y\x85x")]
    path.write_text(f"\n{lines[0]}\r\n  \n{lines[1]}", encoding="utf-8")
    file = prepare([str(path)], tmp_path / "out", tok_json, quiet=True)
    assert file.tokens.tolist() == expected(tok, [PROSE, "z\u2028y\x85x"])


# ---------------------------------------------------------------- long text in pieces


def long_text(kind: str) -> str:
    """About 6,000 characters, 30 pieces, with every white-space trap of a byte-level BPE."""
    rng = random.Random(kind)
    words = [
        "the",
        "block,",
        "(K",
        "of",
        "N)",
        "isn't",
        "naïve",
        "42",
        "—",
        "日本",
        "",
        "\ty",
        "e\u0301",
        "👩‍🚀",
    ]
    ends = {
        "lines": ["\n"],
        "paragraphs": ["\n", "\n\n", "\n\n\n"],
        "indented": ["\n", "\n    ", "\n\t", "\n\n  "],
        "trailing": ["\n", " \n", "  \n", " \n ", "\t\n"],
        "crlf": ["\r\n", "\r\n\r\n", "\r\n  "],
        "unicode": [
            "\n",
            "\u2028",
            "\x85",
            "\n\u00a0",
            "\u2003\n",
            "\x0b\n",
            "\x0c",
            "\x1c\n",
            "\n\u0301",
        ],
        "mixed": ["\n", "\r", "\r\n", "\n\r", "\n\n", " \n", "\n ", f"{EOS}\n", f"\n{EOS}"],
        "one line": [" "],
    }[kind]
    parts = []
    while sum(map(len, parts)) < 6000:
        parts += [" ".join(rng.choices(words, k=rng.randint(1, 9))), rng.choice(ends)]
    return "".join(parts)


KINDS = ["lines", "paragraphs", "indented", "trailing", "crlf", "unicode", "mixed", "one line"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piece", [1, 37, 200])
def test_pieces_give_the_tokens_of_the_whole(tmp_path, monkeypatch, tok, tok_json, kind, piece):
    """A cut in the middle of white space would give other tokens than the text in one go."""
    monkeypatch.setattr(preparing, "PIECE", piece)
    text = long_text(kind)
    source = write(tmp_path / "long.txt", [text])
    pieces = list(documents(source))
    assert "".join(pieces) == text
    if kind in ("lines", "paragraphs", "indented", "trailing"):
        assert len(pieces) > 10  # else this test would test nothing
    file = prepare([source], tmp_path / "out", tok_json, quiet=True)
    assert file.tokens.tolist() == expected(tok, [text])
    assert file.meta.n_documents == 1


@pytest.mark.parametrize("piece", [50, 200])
def test_pieces_with_a_llama3_style_splitter(tmp_path, monkeypatch, piece):
    """Newer BPEs split by another pattern, which glues line breaks to punctuation."""
    from tokenizers import Regex

    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [long_text(kind) for kind in KINDS]
    tok.train_from_iterator([*texts, ".\n\n.\n"], trainer)
    monkeypatch.setattr(preparing, "PIECE", piece)
    for text in texts:
        file = prepare([write(tmp_path / "l.txt", [text])], tmp_path / "out", tok, quiet=True)
        assert file.tokens.tolist() == expected(tok, [text], eos=None)


@pytest.mark.parametrize(
    "text",
    [
        " \n = Title = \n \n Words of an article , with commas . \n Another line . \n",  # WikiText's own
        "A paragraph on a single line.\n\n",
        "A line of a Windows file.\r\n",
        "No line break at all. ",
    ],
    ids=["wikitext", "paragraphs", "crlf", "one line"],
)
def test_pieces_stay_small(tmp_path, monkeypatch, text):
    """Half a gigabyte of text must not become one piece, in memory and searched again and again."""
    monkeypatch.setattr(preparing, "PIECE", 200)
    source = write(tmp_path / "a.txt", [text * 500])
    assert max(map(len, documents(source))) < 20 * 200


# ---------------------------------------------------------------- the tokenizer


def test_tokenizer_copy_and_hash(tmp_path, tok, tok_json):
    """Train and test split agree on the tokenizer if it was the same, and only then."""
    first = prepare([write(tmp_path / "a.txt", ["train"])], tmp_path / "a", tok_json, quiet=True)
    second = prepare([write(tmp_path / "b.txt", ["test"])], tmp_path / "b", tok_json, quiet=True)
    copied = first.tokenizer_path.read_bytes()
    assert first.meta.tokenizer_sha256 == hashlib.sha256(copied).hexdigest()
    assert first.meta.tokenizer_sha256 == second.meta.tokenizer_sha256
    copy = Tokenizer.from_file(str(first.tokenizer_path))
    assert copy.encode(PROSE).ids == tok.encode(PROSE).ids
    other = train_bpe([EOS], vocab_size=300)
    third = prepare([write(tmp_path / "c.txt", ["test"])], tmp_path / "c", other, quiet=True)
    assert third.meta.tokenizer_sha256 != first.meta.tokenizer_sha256


def test_tokenizer_from_a_folder(tmp_path, tok, tok_json):
    source = write(tmp_path / "a.txt", [PROSE])
    file = prepare([source], tmp_path / "out", str(Path(tok_json).parent), quiet=True)
    assert file.tokens.tolist() == expected(tok, [PROSE])


def test_truncation_padding_and_bos_of_the_tokenizer_are_ignored(tmp_path):
    """Published tokenizer.json files carry such settings; none may touch a corpus."""
    tok = train_bpe(["<s>", EOS])
    plain = expected(tok, DOCS)
    tok.enable_truncation(max_length=4)
    tok.enable_padding(length=32)
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tok.token_to_id("<s>"))]
    )
    tok.save(str(tmp_path / "tokenizer.json"))
    source = write(tmp_path / "d.jsonl", DOCS)
    file = prepare([source], tmp_path / "out", str(tmp_path / "tokenizer.json"), quiet=True)
    assert file.tokens.tolist() == plain


def word_level(vocab: dict[str, int]) -> Tokenizer:
    tok = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tok


@pytest.mark.parametrize(("n_words", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_wide_vocabularies_are_uint32(tmp_path, n_words, dtype):
    tok = word_level({"<unk>": 0} | {f"w{i}": i for i in range(1, n_words)})
    last = n_words - 1
    source = write(tmp_path / "w.txt", [f"w5 w{last} nothing w65535"])
    file = prepare([source], tmp_path / "out", tok, quiet=True)
    assert file.meta.dtype == dtype
    assert file.tokens.tolist() == [5, last, 0, 65_535]
    assert Path(f"{file.stem}.bin").stat().st_size == 4 * np.dtype(dtype).itemsize
    assert file.meta.max_id == last
    assert file.meta.eos_id is None


def test_ids_beyond_the_count_of_tokens(tmp_path):
    """A vocabulary with gaps has ids that its size does not tell."""
    tok = word_level({"<unk>": 0, "near": 1, "far": 70_000})
    file = prepare([write(tmp_path / "w.txt", ["far near"])], tmp_path / "out", tok, quiet=True)
    assert file.tokens.tolist() == [70_000, 1]


@pytest.mark.parametrize(
    ("special", "asked", "chosen"),
    [
        ([EOS, "</s>"], None, EOS),  # the first of the usual names
        (["</s>", "<pad>"], None, "</s>"),
        (["<pad>"], None, None),  # none of them: documents just follow one another
        ([EOS, "<sep>"], "<sep>", "<sep>"),  # --eos wins
    ],
)
def test_eos(tmp_path, special, asked, chosen):
    tok = train_bpe(special, vocab_size=300)
    source = write(tmp_path / "d.jsonl", ["one", "two"])
    file = prepare([source], tmp_path / "out", tok, eos=asked, quiet=True)
    assert file.tokens.tolist() == expected(tok, ["one", "two"], chosen)
    assert file.meta.eos_id == (tok.token_to_id(chosen) if chosen else None)
    assert file.meta.n_documents == 2


def test_added_tokens_count(tmp_path):
    """An eos that was added to the vocabulary has an id beyond the model's own words."""
    tok = word_level({"<unk>": 0, "a": 1})
    tok.add_special_tokens([AddedToken("<eos>", special=True)])
    file = prepare([write(tmp_path / "w.txt", ["a a"])], tmp_path / "out", tok, quiet=True)
    assert file.tokens.tolist() == [1, 1, 2]
    assert (file.meta.vocab_size, file.meta.max_id) == (3, 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "is not a tokenizer.json"),
        ("tokenizer.json", "not JSON", "is not a tokenizer.json"),
        ("missing.json", None, "there is no such file"),
    ],
)
def test_bad_tokenizer(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(str(tmp_path / name))
    assert name in str(caught.value)


def test_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer at"):
        load_tokenizer(str(tmp_path))


# ---------------------------------------------------------------- refusals


def parquet(path: Path, **columns) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def raw(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def smudged(path: Path) -> str:
    """A Parquet file whose footer is whole and whose data is not."""
    parquet(path, text=[f"row {i} " * 20 for i in range(500)])
    content = bytearray(path.read_bytes())
    content[200:300] = b"\xff" * 100
    return raw(path, bytes(content))


LINE = b'{"text": "good"}\n'

# name: (source for a folder, keyword arguments, parts of the message)
REFUSED = {
    "no such file": (lambda d: str(d / "gone.txt"), {}, ["gone.txt", "no such file"]),
    "a folder": (lambda d: str(d), {}, ["no such file"]),
    "empty txt": (lambda d: raw(d / "a.txt", b""), {}, ["a.txt", "empty"]),
    "empty jsonl": (lambda d: raw(d / "a.jsonl", b""), {}, ["a.jsonl", "empty"]),
    "blank jsonl": (lambda d: raw(d / "a.jsonl", b"\n\n"), {}, ["a.jsonl", "no text"]),
    "NUL bytes": (lambda d: raw(d / "a.txt", b"abc\0def" * 50), {}, ["a.txt", "binary"]),
    "late NUL byte": (lambda d: raw(d / "a.txt", b"fine\n" * 400 + b"\0"), {}, ["a.txt", "binary"]),
    "not UTF-8": (lambda d: raw(d / "a.txt", b"caf\xe9 \n" * 50), {}, ["a.txt", "UTF-8"]),
    "late bad byte": (
        lambda d: raw(d / "a.txt", b"fine\n" * 400 + b"\xff"),
        {},
        ["a.txt", "UTF-8"],
    ),
    "half a character": (lambda d: raw(d / "a.txt", "é".encode()[:1]), {}, ["a.txt", "UTF-8"]),
    "bad JSON": (lambda d: raw(d / "a.jsonl", LINE * 299 + b"{oops\n"), {}, ["a.jsonl, line 300"]),
    "blank lines count": (lambda d: raw(d / "a.jsonl", LINE + b"\n\n{"), {}, ["a.jsonl, line 4"]),
    "JSON bad bytes": (lambda d: raw(d / "a.jsonl", LINE + b'{"text": "\xe9"}'), {}, ["line 2"]),
    "JSON without column": (
        lambda d: raw(d / "a.jsonl", LINE + b'{"body": "x"}'),
        {},
        ["a.jsonl, line 2", "'text'"],
    ),
    "JSON column": (lambda d: raw(d / "a.jsonl", LINE), {"column": "body"}, ["line 1", "'body'"]),
    "JSON number": (lambda d: raw(d / "a.jsonl", b'{"text": 5}'), {}, ["line 1", "int"]),
    "JSON null": (lambda d: raw(d / "a.jsonl", b'{"text": null}'), {}, ["line 1", "NoneType"]),
    "JSON list": (lambda d: raw(d / "a.jsonl", b'["text"]'), {}, ["line 1"]),
    "parquet column": (
        lambda d: parquet(d / "a.parquet", title=["x"], body=["y"]),
        {},
        ["a.parquet", "'text'", "title, body", "--column"],
    ),
    "parquet numbers": (
        lambda d: parquet(d / "a.parquet", text=["x"], id=[7]),
        {"column": "id"},
        ["a.parquet", "'id'"],
    ),
    "parquet lists": (
        lambda d: parquet(d / "a.parquet", text=[["x", "y"]]),
        {},
        ["a.parquet", "'text'"],
    ),
    "no parquet": (
        lambda d: raw(d / "a.parquet", b"PAR0" * 99),
        {},
        ["a.parquet", "not a Parquet"],
    ),
    "tiny parquet": (lambda d: raw(d / "a.parquet", b"P"), {}, ["a.parquet", "not a Parquet"]),
    "cut parquet": (
        lambda d: raw(
            d / "a.parquet", Path(parquet(d / "b.parquet", text=["x"] * 999)).read_bytes()[:-9]
        ),
        {},
        ["a.parquet"],
    ),
    "damaged parquet": (lambda d: smudged(d / "a.parquet"), {}, ["a.parquet"]),
    "unknown suffix": (
        lambda d: raw(d / "a.docx", b"words"),
        {},
        ["a.docx", ".txt", ".jsonl", ".parquet", "hub:"],
    ),
    "no suffix": (lambda d: raw(d / "words", b"words"), {}, ["words", ".txt"]),
    "empty rows, jsonl": (
        lambda d: raw(d / "a.jsonl", b'{"text": ""}\n' * 3),
        {},
        ["a.jsonl", "no text"],
    ),
    "empty rows, parquet": (
        lambda d: parquet(d / "a.parquet", text=["", None, ""]),
        {},
        ["a.parquet", "no text"],
    ),
    "no such eos": (lambda d: raw(d / "a.txt", b"x"), {"eos": "<nope>"}, ["--eos", "'<nope>'"]),
}
if importlib.util.find_spec("datasets") is None:
    REFUSED["hub without datasets"] = (
        lambda d: "hub:Salesforce/wikitext",
        {},
        ["hub:Salesforce/wikitext", "pip install -e '.[hub]'"],
    )


@pytest.mark.parametrize("older", [False, True], ids=["fresh", "older"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_nothing_left_behind(tmp_path, monkeypatch, tok_json, case, older):
    """The bad source comes last, after tokens were written; an older token file must survive."""
    monkeypatch.setattr(preparing, "PIECE", 100)
    make, options, parts = REFUSED[case]
    out = tmp_path / "out"
    out.mkdir()
    before: dict[str, bytes] = {}
    if older:
        prepare([write(tmp_path / "old.txt", ["older text"])], out / "tokens", tok_json, quiet=True)
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        assert len(before) == 3
    (tmp_path / "in").mkdir()
    source = make(tmp_path / "in")
    with pytest.raises(ValueError, match=r".") as caught:
        prepare([source], out / "tokens", tok_json, quiet=True, **options)
    assert all(part in str(caught.value) for part in parts)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    if not options and case != "blank jsonl" and "rows" not in case:
        good = write(tmp_path / "good.jsonl", ["good text"] * 600)
        with pytest.raises(ValueError, match=r"."):  # and with good documents written before it
            prepare([good, source], out / "tokens", tok_json, quiet=True, **options)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    if older:
        assert open_tokens(str(out / "tokens")).meta.n_documents == 1


def test_no_sources(tmp_path, tok_json):
    with pytest.raises(ValueError, match="at least one file"):
        prepare([], tmp_path / "out", tok_json, quiet=True)


def test_a_new_token_file_replaces_the_old(tmp_path, tok, tok_json):
    prepare([write(tmp_path / "a.txt", [PROSE])], tmp_path / "out", tok_json, quiet=True)
    file = prepare(
        [write(tmp_path / "b.txt", ["new"])], f"{tmp_path}/out.bin", tok_json, quiet=True
    )
    assert file.tokens.tolist() == expected(tok, ["new"])
    names = {path.name for path in tmp_path.iterdir()} - {"a.txt", "b.txt"}
    assert names == {"out.bin", "out.json", "out.tokenizer.json"}


def test_out_below_a_file_is_an_oserror(tmp_path, tok_json):
    """The command line turns it into one sentence."""
    source = write(tmp_path / "a.txt", ["x"])
    with pytest.raises(OSError, match=r"."):
        prepare([source], tmp_path / "a.txt" / "out", tok_json, quiet=True)
    assert Path(source).read_text() == "x"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """A random GPT-2 of 64 tokens and 16 positions as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(0)
    small = {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 64}
    model = GPT2LMHeadModel(GPT2Config(**small))
    model.transformer.wte.weight.data *= 20  # opinions of its own
    model.save_pretrained(folder)
    return folder


def test_lessons_are_what_the_teacher_predicts(tokens, teacher, monkeypatch):
    """The likeliest tokens of every window and their log-probs, as Hugging Face gives them; some at a time."""
    monkeypatch.setitem(AT_ONCE, "cpu", 64 * 16 * 7)
    file = open_tokens(tokens)
    told = write_cache(file, str(teacher), 5, 16, "cpu", quiet=True)
    assert told.meta.n_sequences == 375
    assert Path(f"{tokens}.teacher.bin").stat().st_size == 375 * 15 * 5 * 4
    rows = [374, 0, 130]
    ids, log_probs = unpack(told.sequences(rows), 64)
    model = GPT2LMHeadModel.from_pretrained(teacher).eval()
    windows = np.stack([file.tokens[row * 16 : row * 16 + 16].astype(np.int64) for row in rows])
    with torch.no_grad():
        logits = model(torch.from_numpy(windows)).logits[:, :-1]
    expected, order = logits.log_softmax(-1).sort(descending=True)
    assert torch.equal(ids, order[..., :5])
    torch.testing.assert_close(log_probs.float(), expected[..., :5], rtol=1e-3, atol=1e-6)


def test_lessons_appear_whole_or_not_at_all(tokens, teacher, tmp_path):
    """Stopped half-way, an earlier cache is still there; re-made, it is the new one."""
    file = open_tokens(tokens)
    first = write_cache(file, str(teacher), 2, 16, "cpu", quiet=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    with pytest.raises(ZeroDivisionError):  # before the first window: nothing is left
        write_teacher_cache(file, replace(first.meta, top=3), lambda n_done: [1 / n_done])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def stopped(n_done):
        assert n_done == 0
        yield torch.zeros(8, 15, 12, dtype=torch.uint8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_teacher_cache(file, replace(first.meta, top=3), stopped)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: after.pop(name) for name in before} == before
    assert sorted(after) == ["tokens.teacher.part", "tokens.teacher.part.json"]
    assert (
        verify_teacher_cache(file)
        == f"teacher's cache {tokens}.teacher.bin: 375 sequences match their sha256"
    )
    # the zeros are not this teacher's: they are kept for the one that wrote them, and for nobody else
    other = GPT2LMHeadModel.from_pretrained(teacher)
    other.lm_head.weight.data += 1
    other.save_pretrained(tmp_path / "other")
    assert write_cache(file, str(tmp_path / "other"), 3, 16, "cpu", quiet=True).meta.top == 3
    told = open_teacher_cache(file, 16, 64)
    assert told.meta.top == 3
    assert told.sequences(range(8)).any()
    assert not list(tmp_path.glob("*.part*"))


KILLED = """
import os, signal, sys
from twistlm.data import teacher_cache
from twistlm.data.token_file import open_tokens
from twistlm.training import teacher
teacher_cache.SAVE = 1  # byte
teacher.AT_ONCE["cpu"] = 64 * 16 * 100
real, n = teacher_cache.pack, 0
def pack(*args):
    global n
    n += 1
    if n == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
teacher_cache.pack = pack
teacher.write_cache(open_tokens(sys.argv[1]), sys.argv[2], 5, 16, "cpu", quiet=True)
"""


def test_a_killed_cache_is_gone_on_with(tokens, teacher, tmp_path, monkeypatch):
    """By SIGKILL after 200 of 375 windows: the next process makes 175, and all bytes are those of one go."""
    done = subprocess.run([sys.executable, "-c", KILLED, tokens, str(teacher)], check=False)
    assert done.returncode == -signal.SIGKILL
    part, made = Path(f"{tokens}.teacher.part"), Path(f"{tokens}.teacher.bin")
    left, told = part.read_bytes(), Path(f"{part}.json").read_bytes()
    assert len(left) == 200 * 15 * 20
    monkeypatch.setitem(AT_ONCE, "cpu", 64 * 16 * 100)
    seen, real = [], teacher_cache.pack

    def counted(ids, *args):
        seen.append(len(ids))
        return real(ids, *args)

    monkeypatch.setattr(teacher_cache, "pack", counted)
    anew, found = [100, 100, 100, 75], set()
    for bytes_, record, wanted in (
        (left, told, [100, 75]),
        (left + b"half a window", told, [100, 75]),  # written, but not yet said to be safe
        (b"?" + left[1:], told, anew),
        (left[:-1], told, anew),
        (left, b"{", anew),
        (left, told.replace(b'"n_done": 200', b'"n_done": 400'), anew),
    ):
        part.write_bytes(bytes_)
        Path(f"{part}.json").write_bytes(record)
        write_cache(open_tokens(tokens), str(teacher), 5, 16, "cpu", quiet=True)
        assert seen == wanted
        seen.clear()
        found.add(made.read_bytes())
        assert not list(tmp_path.glob("*.part*"))
    assert len(found) == 1


def test_two_processes_do_not_make_one_cache(tokens, teacher):
    told = write_cache(open_tokens(tokens), str(teacher), 2, 16, "cpu", quiet=True)
    path = f"{tokens}.teacher.part"
    code = f"import fcntl; file = open({path!r}, 'a+b'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        assert other.stdout.readline() == b"\n"
        with pytest.raises(ValueError, match=r"teacher.bin: another process makes this cache"):
            write_teacher_cache(open_tokens(tokens), told.meta, lambda _: ())
        other.communicate(b"\n")
    assert verify_teacher_cache(open_tokens(tokens))


def reseal(about: Path, **changes: object) -> None:
    record = json.loads(about.read_text()) | changes
    about.write_text(manifest.written(manifest.sealed(record)))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda stem: Path(f"{stem}.teacher.bin").unlink(), r"no teacher's cache .*`twistlm prepare -o"),
        (lambda stem: Path(f"{stem}.teacher.json").unlink(), r"no teacher's cache .* --seq-len 16"),
        (lambda stem: Path(f"{stem}.teacher.json").write_text("{"), r"teacher.json is not the description"),
        (lambda stem: reseal(Path(f"{stem}.teacher.json"), top=0), r"top is 0, legal are 1\.\.1024"),
        (lambda stem: reseal(Path(f"{stem}.teacher.json"), top=65), r"top is 65, legal are 1\.\.64"),
        (lambda stem: reseal(Path(f"{stem}.teacher.json"), top=3), r"needs \d+: both are not of one cache"),
        (lambda stem: os.truncate(f"{stem}.teacher.bin", 999), r"999 bytes instead of 45,000"),
        (lambda stem: make_tokens(Path(stem), seed=1), r"is for other tokens than those in"),
        (lambda stem: Path(f"{stem}.teacher.bin").write_bytes(b"\xff" * 45000), r"does not match its sha256"),
    ],
)  # fmt: skip
def test_lessons_of_something_else_are_refused(tokens, teacher, damage, sentence):
    write_cache(open_tokens(tokens), str(teacher), 2, 16, "cpu", quiet=True)
    damage(tokens)
    with pytest.raises(ValueError, match=sentence):
        open_teacher_cache(open_tokens(tokens), 16, 64)


def test_lessons_of_other_windows_or_vocabularies_are_refused(tokens, teacher, monkeypatch):
    file = open_tokens(tokens)
    told = write_cache(file, str(teacher), 2, 16, "cpu", quiet=True)
    with pytest.raises(ValueError, match=r"sequences of 16 tokens, data.seq_len is 8"):
        open_teacher_cache(file, 8, 64)
    with pytest.raises(ValueError, match=r"knows 64 tokens, the model 72"):
        open_teacher_cache(file, 16, 72)
    records = np.array(told.records)
    records[0, 3, :2] = 64, 0  # as if a byte changed after opening
    with pytest.raises(ValueError, match=r"holds token 64 of a vocabulary of 64"):
        replace(told, records=records).sequences([0])
    monkeypatch.setattr(manifest, "AT_ONCE", 100)  # a large one is opened before it is hashed
    Path(f"{tokens}.teacher.bin").write_bytes(records.tobytes())
    with pytest.raises(ValueError, match=r"teacher.bin is damaged: it does not match its sha256"):
        verify_teacher_cache(file)
