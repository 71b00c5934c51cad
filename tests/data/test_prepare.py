"""Text becomes exactly the tokens that the tokenizers library gives, or nothing at all."""

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


MANY = [f"document {i} says {i * i}\n" for i in range(2 * preparing.BATCH + 7)]
CASES = {  # documents -> those that become tokens; batch borders lose none, empty rows are none
    "all kinds": (DOCS, DOCS),
    "empty": (["", "a", "", "b", ""], ["a", "b"]),
    "many": (MANY, MANY),
    **{f"{n} of a batch": (MANY[: preparing.BATCH + n],) * 2 for n in (-1, 0, 1)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_documents_each_closed_by_eos(tmp_path, tok, tok_json, suffix, case):
    docs, kept = CASES[case]
    source = write(tmp_path / f"docs{suffix}", docs)
    file = prepare([source], tmp_path / "out", tok_json, quiet=True)
    want = expected(tok, kept)
    assert file.tokens.tolist() == want
    meta = file.meta
    assert (meta.n_tokens, meta.n_documents, meta.max_id) == (len(want), len(kept), max(want))
    assert (meta.vocab_size, meta.eos_id) == (tok.get_vocab_size(), tok.token_to_id(EOS))
    assert (meta.dtype, meta.sources) == ("uint16", [source])


def test_several_sources_in_order_and_a_text_is_one_document(tmp_path, tok, tok_json):
    sources = [
        write(tmp_path / "c.txt", [PROSE * 3]),
        write(tmp_path / "a.jsonl", DOCS[:3]),
        write(tmp_path / "b.parquet", DOCS[3:]),
        write(tmp_path / "d.raw", ["tail"]),
    ]
    folder = str(Path(tok_json).parent)  # a tokenizer may be named by its folder
    file = prepare(sources, tmp_path / "out", folder, quiet=True)
    assert file.tokens.tolist() == expected(tok, [PROSE * 3, *DOCS, "tail"])
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
    words = ["the", "block,", "(K", "of", "N)", "isn't", "naïve", "42", "—", "日本", "", "\ty"]
    words += ["e\u0301", "👩‍🚀"]
    ends = {
        "lines": ["\n"],
        "paragraphs": ["\n", "\n\n", "\n\n\n"],
        "indented": ["\n", "\n    ", "\n\t", "\n\n  "],
        "trailing": ["\n", " \n", "  \n", " \n ", "\t\n"],
        "crlf": ["\r\n", "\r\n\r\n", "\r\n  "],
        "unicode": ["\n", "\u2028", "\x85", "\n\xa0", "\u2003\n", "\x0b\n", "\x0c", "\x1c\n", "\ń"],
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
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|"
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
        " \n = Title = \n \n Words of an article , with commas . \n Another . \n",
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
    gaps = word_level({"<unk>": 0, "near": 1, "far": n_words})  # ids that the size does not tell
    file = prepare([write(tmp_path / "g.txt", ["far near"])], tmp_path / "out", gaps, quiet=True)
    assert file.tokens.tolist() == [n_words, 1]


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


LINE = b'{"text": "good"}\n'
WHOLE = {"text": ["x"] * 999}

# file name, its content (bytes, columns, or None for no file), options, parts of the message
REFUSED = [
    ("gone.txt", None, {}, ["gone.txt", "no such file"]),
    ("a.txt", b"", {}, ["a.txt", "empty"]),
    ("a.jsonl", b"", {}, ["a.jsonl", "empty"]),
    ("a.jsonl", b"\n\n", {}, ["a.jsonl", "no text"]),
    ("a.jsonl", b'{"text": ""}\n' * 3, {}, ["a.jsonl", "no text"]),
    ("a.parquet", {"text": ["", None, ""]}, {}, ["a.parquet", "no text"]),
    ("a.txt", b"abc\0def" * 50, {}, ["a.txt", "binary"]),
    ("a.txt", b"fine\n" * 400 + b"\0", {}, ["a.txt", "binary"]),
    ("a.txt", b"caf\xe9 \n" * 50, {}, ["a.txt", "UTF-8"]),
    ("a.txt", b"fine\n" * 400 + b"\xff", {}, ["a.txt", "UTF-8"]),
    ("a.txt", "é".encode()[:1], {}, ["a.txt", "UTF-8"]),
    ("a.jsonl", LINE * 299 + b"{oops\n", {}, ["a.jsonl, line 300"]),
    ("a.jsonl", LINE + b"\n\n{", {}, ["a.jsonl, line 4"]),  # blank lines count
    ("a.jsonl", LINE + b'{"text": "\xe9"}', {}, ["line 2"]),
    ("a.jsonl", LINE + b'{"body": "x"}', {}, ["a.jsonl, line 2", "'text'"]),
    ("a.jsonl", LINE, {"column": "body"}, ["line 1", "'body'"]),
    ("a.jsonl", b'{"text": 5}', {}, ["line 1", "int"]),
    ("a.jsonl", b'{"text": null}', {}, ["line 1", "NoneType"]),
    ("a.jsonl", b'["text"]', {}, ["line 1"]),
    (
        "a.parquet",
        {"title": ["x"], "body": ["y"]},
        {},
        ["a.parquet", "'text'", "title, body", "--column"],
    ),
    ("a.parquet", {"text": ["x"], "id": [7]}, {"column": "id"}, ["a.parquet", "'id'"]),
    ("a.parquet", {"text": [["x", "y"]]}, {}, ["a.parquet", "'text'"]),
    ("a.parquet", b"PAR0" * 99, {}, ["a.parquet", "not a Parquet"]),
    ("a.parquet", b"P", {}, ["a.parquet", "not a Parquet"]),
    ("cut.parquet", WHOLE, {}, ["cut.parquet"]),
    ("smudged.parquet", {"text": [f"row {i} " * 20 for i in range(500)]}, {}, ["smudged.parquet"]),
    ("a.docx", b"words", {}, ["a.docx", ".txt", ".jsonl", ".parquet", "hub:"]),
    ("words", b"words", {}, ["words", ".txt"]),
    ("a.txt", b"x", {"eos": "<nope>"}, ["--eos", "'<nope>'"]),
]


def bad_source(path: Path, content: bytes | dict | None) -> str:
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        pq.write_table(pa.table(content), path)
        data = path.read_bytes()
        if path.stem == "cut":
            path.write_bytes(data[:-9])
        elif path.stem == "smudged":  # the footer is whole
            path.write_bytes(data[:200] + b"\xff" * 100 + data[300:])
    return str(path)


@pytest.mark.parametrize("older", [False, True], ids=["fresh", "older"])
@pytest.mark.parametrize(("name", "content", "options", "parts"), REFUSED)
def test_refused_and_nothing_left_behind(
    tmp_path, monkeypatch, tok_json, name, content, options, parts, older
):
    """Also after good documents were written; an older token file must survive."""
    monkeypatch.setattr(preparing, "PIECE", 100)
    out = tmp_path / "out"
    out.mkdir()
    before: dict[str, bytes] = {}
    if older:
        prepare([write(tmp_path / "old.txt", ["older text"])], out / "tokens", tok_json, quiet=True)
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        assert len(before) == 3
    (tmp_path / "in").mkdir()
    source = bad_source(tmp_path / "in" / name, content)
    good = write(tmp_path / "good.jsonl", ["good text"] * 600)
    empty = "no text" in parts
    for sources in ([source],) if options or empty else ([source], [good, source]):
        with pytest.raises(ValueError, match=r".") as caught:
            prepare(sources, out / "tokens", tok_json, quiet=True, **options)
        assert all(part in str(caught.value) for part in parts)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_what_is_no_source(tmp_path, tok_json, monkeypatch):
    """A mistyped file is refused before a tokenizer is asked of the hub."""
    monkeypatch.setattr("twistlm.model.source.get_hf_file_metadata", lambda *a, **k: 1 / 0)
    for sources, said in (([], "at least one"), (["gone.txt"], "no such"), ([tmp_path], "no such")):
        with pytest.raises(ValueError, match=said):
            prepare([str(source) for source in sources], tmp_path / "out", "gpt2", quiet=True)
    if importlib.util.find_spec("datasets") is None:
        with pytest.raises(ValueError, match=r"hub:a/b.*pip install -e '\.\[hub\]'"):
            prepare(["hub:a/b"], tmp_path / "out", tok_json, quiet=True)


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


def test_a_teacher_cache_are_what_the_teacher_predicts(tokens, teacher, monkeypatch):
    """Every window's likeliest tokens and their log-probs are those of Hugging Face."""
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


def test_a_teacher_cache_appear_whole_or_not_at_all(tokens, teacher, tmp_path):
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
    # the zeros are not this teacher's: they are kept for the one that wrote them, and for nobody
    # else
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
    """Killed after 200 of 375 windows: the next process makes 175, with the bytes of one go."""
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
    code = f"import fcntl; file = open({path!r}, 'a+b'); fcntl.lockf(file, fcntl.LOCK_EX); "
    code += "print(); input()"
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


DAMAGES = [  # (what is done to STEM.teacher.bin and STEM.teacher.json, what is said)
    (lambda bin, about: bin.unlink(), r"no teacher's cache .*`twistlm prepare -o"),
    (lambda bin, about: about.unlink(), r"no teacher's cache .* --seq-len 16"),
    (lambda bin, about: about.write_text("{"), r"teacher.json is not the description"),
    (lambda bin, about: reseal(about, top=0), r"top is 0, legal are 1\.\.1024"),
    (lambda bin, about: reseal(about, top=65), r"top is 65, legal are 1\.\.64"),
    (lambda bin, about: reseal(about, top=3), r"needs \d+: both are not of one cache"),
    (lambda bin, about: os.truncate(bin, 999), r"999 bytes instead of 45,000"),
    (lambda bin, about: make_tokens(bin.parent / "tokens", seed=1), r"is for other tokens than"),
    (lambda bin, about: bin.write_bytes(b"\xff" * 45000), r"does not match its sha256"),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES)
def test_a_cache_of_something_else_is_refused(tokens, teacher, damage, sentence):
    write_cache(open_tokens(tokens), str(teacher), 2, 16, "cpu", quiet=True)
    damage(*(Path(f"{tokens}.teacher.{suffix}") for suffix in ("bin", "json")))
    with pytest.raises(ValueError, match=sentence):
        open_teacher_cache(open_tokens(tokens), 16, 64)


def test_a_teacher_cache_of_other_windows_or_vocabularies_are_refused(tokens, teacher, monkeypatch):
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
