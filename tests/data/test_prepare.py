"""Text becomes exactly the tokens that the tokenizers library gives, or nothing at all."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors, trainers

from twistlm.data import prepare as preparing
from twistlm.data.prepare import documents, prepare
from twistlm.model.tokenizer import load_tokenizer

EOS = "<|endoftext|>"
PROSE = (
    "The workers train their subnets, and the aggregator takes the mean.\n"
    "def round(s):\n    for step in range(15):\n        s.train()  \n\n    return s\n"
    "naïve café — „Grüße“, 日本語のテキスト, emoji 👩‍🚀, e\u0301 and \u00a0 odd\u2003spaces\n"
)
BYTES = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}


def train_bpe(special: list[str], vocab_size: int = 400) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, **BYTES)
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
    end = [tok.token_to_id(eos)] if eos else []
    return [i for doc in docs for i in [*tok.encode(doc, add_special_tokens=False).ids, *end]]


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
    f"in {EOS} out",
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
    odd = tmp_path / "odd.jsonl"  # blank lines, and breaks that only str.splitlines() sees
    lines = [json.dumps({"text": doc}, ensure_ascii=False) for doc in (PROSE, "z\u2028y\x85x")]
    odd.write_text(f"\n{lines[0]}\r\n  \n{lines[1]}", encoding="utf-8")
    sources = [
        write(tmp_path / "c.txt", [PROSE * 3]),
        write(tmp_path / "a.jsonl", DOCS[:3]),
        write(tmp_path / "b.parquet", DOCS[3:]),
        write(tmp_path / "d.raw", ["tail"]),
        str(odd),
    ]
    folder = str(Path(tok_json).parent)  # a tokenizer may be named by its folder
    file = prepare(sources, tmp_path / "out", folder, quiet=True)
    docs = [PROSE * 3, *DOCS, "tail", PROSE, "z\u2028y\x85x"]
    assert file.tokens.tolist() == expected(tok, docs)
    assert (file.meta.n_documents, file.meta.sources) == (len(docs), sources)
    other = [tmp_path / "other.jsonl", tmp_path / "other.parquet"]
    other[0].write_text('{"text": "wrong", "body": "right"}')
    pq.write_table(pa.table({"text": ["wrong"], "body": ["right"]}), other[1])
    file = prepare([*map(str, other)], f"{tmp_path}/out.bin", tok_json, column="body", quiet=True)
    assert file.tokens.tolist() == expected(tok, ["right", "right"])  # the older file is replaced
    assert len(list(tmp_path.glob("out*"))) == 3


# ---------------------------------------------------------------- long text in pieces


ENDS = {
    "lines": ["\n"],
    "paragraphs": ["\n", "\n\n", "\n\n\n"],
    "indented": ["\n", "\n    ", "\n\t", "\n\n  "],
    "trailing": ["\n", " \n", "  \n", " \n ", "\t\n"],
    "crlf": ["\r\n", "\r\n\r\n", "\r\n  "],
    "unicode": ["\n", "\u2028", "\x85", "\n\xa0", "\u2003\n", "\x0b\n", "\x0c", "\x1c\n", "\ń"],
    "mixed": ["\n", "\r", "\r\n", "\n\r", "\n\n", " \n", "\n ", f"{EOS}\n", f"\n{EOS}"],
    "one line": [" "],
}
# newer BPEs split by another pattern, which glues line breaks to punctuation
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def long_text(kind: str) -> str:
    """About 6,000 characters, 30 pieces, with every white-space trap of a byte-level BPE."""
    rng = random.Random(kind)
    words = ["the", "block,", "(K", "of", "N)", "isn't", "naïve", "42", "—", "日本", "", "\ty"]
    words += ["e\u0301", "👩‍🚀"]
    parts = []
    while sum(map(len, parts)) < 6000:
        parts += [" ".join(rng.choices(words, k=rng.randint(1, 9))), rng.choice(ENDS[kind])]
    return "".join(parts)


@pytest.fixture(scope="module")
def llama3() -> Tokenizer:
    tok = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    trainer = trainers.BpeTrainer(vocab_size=500, **BYTES)
    tok.train_from_iterator([*map(long_text, ENDS), ".\n\n.\n"], trainer)
    return tok


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("piece", [1, 37, 200])
def test_pieces_give_the_tokens_of_the_whole(tmp_path, monkeypatch, tok, llama3, kind, piece):
    """A cut in the middle of white space would give other tokens than the text in one go."""
    monkeypatch.setattr(preparing, "PIECE", piece)
    text = long_text(kind)
    source = write(tmp_path / "long.txt", [text])
    pieces = list(documents(source))
    assert "".join(pieces) == text
    if kind in ("lines", "paragraphs", "indented", "trailing"):
        assert len(pieces) > 10  # else this test would test nothing
    for tokenizer, eos in ((tok, EOS), (llama3, None)):
        file = prepare([source], tmp_path / "out", tokenizer, quiet=True)
        assert file.tokens.tolist() == expected(tokenizer, [text], eos)
        assert file.meta.n_documents == 1


WIKI = " \n = Title = \n \n Words of an article , with commas . \n Another . \n"


@pytest.mark.parametrize("text", [WIKI, "On one line.\n\n", "A Windows file.\r\n", "No break. "])
def test_pieces_stay_small(tmp_path, monkeypatch, text):
    """Half a gigabyte of text must not become one piece, in memory and searched again and again."""
    monkeypatch.setattr(preparing, "PIECE", 200)
    source = write(tmp_path / "a.txt", [text * 500])
    assert max(map(len, documents(source))) < 20 * 200


# ---------------------------------------------------------------- the tokenizer


def test_a_tokenizers_own_settings_are_ignored_and_its_copy_is_kept(tmp_path):
    """Published tokenizer.json files truncate, pad and begin texts; none may touch a corpus."""
    tok = train_bpe(["<s>", EOS])
    plain = expected(tok, DOCS)
    tok.enable_truncation(max_length=4)
    tok.enable_padding(length=32)
    begin = [("<s>", tok.token_to_id("<s>"))]
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    tok.save(str(tmp_path / "tokenizer.json"))
    source = write(tmp_path / "d.jsonl", DOCS)
    first, second = (
        prepare([source], tmp_path / name, str(tmp_path / "tokenizer.json"), quiet=True)
        for name in ("a", "b")
    )
    assert first.tokens.tolist() == plain
    copied = first.tokenizer_path.read_bytes()
    assert first.meta.tokenizer_sha256 == hashlib.sha256(copied).hexdigest()
    assert first.meta.tokenizer_sha256 == second.meta.tokenizer_sha256
    assert load_tokenizer(str(first.tokenizer_path)).get_vocab() == tok.get_vocab()


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
    assert (file.meta.dtype, file.meta.max_id, file.meta.eos_id) == (dtype, last, None)
    assert file.tokens.tolist() == [5, last, 0, 65_535]
    assert Path(f"{file.stem}.bin").stat().st_size == 4 * np.dtype(dtype).itemsize
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
    tok = word_level({"<unk>": 0, "one": 1, "two": 2})
    tok.add_special_tokens([AddedToken(name, special=True) for name in special])  # ids 3, ...
    source = write(tmp_path / "d.jsonl", ["one", "two"])
    file = prepare([source], tmp_path / "out", tok, eos=asked, quiet=True)
    assert file.tokens.tolist() == expected(tok, ["one", "two"], chosen)
    assert file.meta.eos_id == (tok.token_to_id(chosen) if chosen else None)
    assert (file.meta.n_documents, file.meta.vocab_size) == (2, 3 + len(special))


def test_bad_tokenizers(tmp_path):
    for name, content, message in (
        ("empty.json", "{}", "empty.json is not a tokenizer.json"),
        ("text.json", "not JSON", "text.json is not a tokenizer.json"),
        ("missing.json", None, "there is no such file"),
        ("", None, "no tokenizer at"),  # a folder without one
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            load_tokenizer(str(tmp_path / name))


# ---------------------------------------------------------------- refusals


LINE = b'{"text": "good"}\n'

# file name, its content (bytes, columns, or None for no file), options, parts of the message
REFUSED = [
    ("gone.txt", None, {}, ["gone.txt", "no such file"]),
    ("a.txt", b"", {}, ["a.txt", "empty"]),
    ("a.jsonl", b'\n\n{"text": ""}\n', {}, ["a.jsonl", "no text"]),
    ("a.parquet", {"text": ["", None, ""]}, {}, ["a.parquet", "no text"]),
    ("a.txt", b"fine\n" * 400 + b"\0", {}, ["a.txt", "binary"]),
    ("a.txt", b"fine\n" * 400 + b"\xff", {}, ["a.txt", "UTF-8"]),
    ("a.txt", "é".encode()[:1], {}, ["a.txt", "UTF-8"]),
    ("a.jsonl", LINE * 299 + b"\n{oops\n", {}, ["a.jsonl, line 301"]),  # blank lines count
    ("a.jsonl", LINE + b'{"text": "\xe9"}', {}, ["line 2"]),
    ("a.jsonl", LINE + b'{"body": "x"}', {}, ["a.jsonl, line 2", "'text'"]),
    ("a.jsonl", LINE, {"column": "body"}, ["line 1", "'body'"]),
    ("a.jsonl", b'{"text": null}', {}, ["line 1", "NoneType"]),
    ("a.jsonl", b'["text"]', {}, ["line 1"]),
    ("a.parquet", {"title": ["x"]}, {}, ["a.parquet", "'text'", "title", "--column"]),
    ("a.parquet", {"text": ["x"], "id": [7]}, {"column": "id"}, ["a.parquet", "'id'"]),
    ("a.parquet", {"text": [["x", "y"]]}, {}, ["a.parquet", "'text'"]),
    ("a.parquet", b"PAR0" * 99, {}, ["a.parquet", "not a Parquet"]),
    ("cut.parquet", {"text": ["x"] * 999}, {}, ["cut.parquet"]),
    ("smudged.parquet", {"text": [f"row {i} " * 20 for i in range(500)]}, {}, ["smudged.parquet"]),
    ("a.docx", b"words", {}, ["a.docx", ".txt", ".jsonl", ".parquet", "hub:"]),
    ("a.txt", b"x", {"eos": "<nope>"}, ["--eos", "'<nope>'"]),
]


def bad_source(path: Path, content: bytes | dict | None) -> str:
    path.parent.mkdir()
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


@pytest.mark.parametrize(("name", "content", "options", "parts"), REFUSED)
def test_refused_and_nothing_left_behind(
    tmp_path, monkeypatch, tok_json, name, content, options, parts
):
    """Also after good documents were written; an older token file must survive."""
    monkeypatch.setattr(preparing, "PIECE", 100)
    out, source = tmp_path / "out", bad_source(tmp_path / "in" / name, content)
    good = write(tmp_path / "good.jsonl", ["good text"] * 600)
    before: dict[str, bytes] = {}
    for older in (False, True):
        for sources in ([source],) if options or "no text" in parts else ([source], [good, source]):
            with pytest.raises(ValueError, match=r".") as caught:
                prepare(sources, out / "tokens", tok_json, quiet=True, **options)
            assert all(part in str(caught.value) for part in parts)
            assert {path.name: path.read_bytes() for path in out.glob("*")} == before
        if not older:
            prepare([write(tmp_path / "old.txt", ["old"])], out / "tokens", tok_json, quiet=True)
            before = {path.name: path.read_bytes() for path in out.iterdir()}


def test_what_is_no_source(tmp_path, tok_json, monkeypatch):
    """A mistyped file is refused before a tokenizer is asked of the hub."""
    monkeypatch.setattr("twistlm.model.source.get_hf_file_metadata", lambda *a, **k: 1 / 0)
    for sources, said in (([], "at least one"), (["gone.txt"], "no such"), ([tmp_path], "no such")):
        with pytest.raises(ValueError, match=said):
            prepare([str(source) for source in sources], tmp_path / "out", "gpt2", quiet=True)
    if importlib.util.find_spec("datasets") is None:
        with pytest.raises(ValueError, match=r"hub:a/b.*pip install -e '\.\[hub\]'"):
            prepare(["hub:a/b"], tmp_path / "out", tok_json, quiet=True)
