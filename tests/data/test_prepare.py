"""Text becomes exactly the tokens that the tokenizers library gives, or nothing at all."""

import hashlib
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers

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


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[EOS, "<s>"], **BYTES)
    # runs of white space occur, so that merges like "\n\n" and "    " exist
    tok.train_from_iterator([PROSE, "\n\n\n\n", "        ", "\r\n\r\n", " \n \n"] * 5, trainer)
    return tok


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


DOCS = [PROSE, "x", "one line\n", "  indented\n\n\n\nand spaced   ", "a\r\nb\r\n\r\nc"]
DOCS += [f"in {EOS} out"]
MANY = [f"document {i} says {i * i}\n" for i in range(2 * preparing.BATCH + 7)]
# batch borders lose no document, empty rows are none
CASES = [["", *DOCS, None, "a", ""], MANY, *(MANY[: preparing.BATCH + n] for n in (-1, 0, 1))]


@pytest.mark.parametrize("docs", CASES, ids=len)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_documents_each_closed_by_eos(tmp_path, tok, tok_json, capsys, suffix, docs):
    kept = [doc for doc in docs if doc]
    source = write(tmp_path / f"docs{suffix}", docs)
    file = prepare([source], tmp_path / "out", tok_json, quiet=True)
    said = f"{len(docs) - len(kept)} rows hold no text" if len(kept) < len(docs) else ""
    assert said in " ".join(capsys.readouterr().out.split())
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
    for part in ("json", "bin"):  # killed, it leaves both parts or the tokenizer alone
        (tmp_path / "out.json").unlink()
        (tmp_path / f"out.{part}").unlink(missing_ok=True)
        file = prepare([*map(str, other)], f"{tmp_path}/out.bin", tok, column="body", eos="<s>")
        want = expected(tok, ["right", "right"], "<s>")
        assert file.tokens.tolist() == want  # the older file is replaced
        assert len(list(tmp_path.glob("out*"))) == 3


ENDS = {
    "indented": ["\n", "\n\n", "\n\n\n", "\n    ", "\n\t", "\n\n  "],
    "trailing": ["\n", " \n", "  \n", " \n ", "\t\n"],
    "crlf": ["\r\n", "\r\n\r\n", "\r\n  "],
    "unicode": ["\n", "\u2028", "\x85", "\n\xa0", "\u2003\n", "\x0b\n", "\x0c", "\x1c\n", "\ń"],
    "mixed": ["\n", "\r", "\r\n", "\n\r", "\n\n", " \n", "\n ", f"{EOS}\n", f"\n{EOS}"],
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
    pieces = [text for text, _ in documents(source)]
    assert "".join(pieces) == text
    if kind in ("indented", "trailing"):
        assert len(pieces) > 10  # else this test would test nothing
    for tokenizer, eos in ((tok, EOS), (llama3, None)):
        file = prepare([source], tmp_path / "out", tokenizer, quiet=True)
        assert file.tokens.tolist() == expected(tokenizer, [text], eos)
        assert file.meta.n_documents == 1


def test_pieces_stay_small(tmp_path, monkeypatch):
    """Half a gigabyte of text must not become one piece, in memory and searched again and again."""
    monkeypatch.setattr(preparing, "PIECE", 200)
    wiki = " \n = Title = \n \n Words of an article , with commas . \n Another . \n"
    for text in (wiki, "On one line.\n\n", "A Windows file.\r\n", "No break. "):
        source = write(tmp_path / "a.txt", [text * 500])
        assert max(len(text) for text, _ in documents(source)) < 20 * 200


def test_a_tokenizers_own_settings_are_ignored_and_its_copy_is_kept(tmp_path, tok):
    """Published tokenizer.json files truncate, pad and begin texts; none may touch a corpus."""
    changed = Tokenizer.from_str(tok.to_str())
    changed.enable_truncation(max_length=4)
    changed.enable_padding(length=32)
    begin = [("<s>", tok.token_to_id("<s>"))]
    changed.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    changed.save(str(tmp_path / "tokenizer.json"))
    source = write(tmp_path / "d.jsonl", DOCS)
    file = prepare([source], tmp_path / "a", str(tmp_path / "tokenizer.json"), quiet=True)
    assert file.tokens.tolist() == expected(tok, DOCS)
    copied = file.tokenizer_path.read_bytes()
    assert file.meta.tokenizer_sha256 == hashlib.sha256(copied).hexdigest()
    assert load_tokenizer(str(file.tokenizer_path)).get_vocab() == tok.get_vocab()


def word_level(vocab: dict[str, int]) -> Tokenizer:
    tok = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tok


@pytest.mark.parametrize(("last", "dtype"), [(65_535, "uint16"), (65_536, "uint32")])
def test_wide_vocabularies_are_uint32(tmp_path, last, dtype):
    tok = word_level({"<unk>": 0, "near": 1, "far": last})  # ids that the size does not tell
    file = prepare([write(tmp_path / "w.txt", ["far no near"])], tmp_path / "out", tok, quiet=True)
    assert (file.meta.dtype, file.meta.max_id, file.meta.eos_id) == (dtype, last, None)
    assert file.tokens.tolist() == [last, 0, 1]
    assert Path(f"{file.stem}.bin").stat().st_size == 3 * np.dtype(dtype).itemsize


LINE = b'{"text": "good"}\n'

# file name, its content (bytes or columns), options, parts of the message; others in
# tests/cli/test_bad_input.py
REFUSED = [
    ("a.jsonl", b'\n\n{"text": ""}\n', {}, ["a.jsonl", "no text"]),
    ("a.txt", b"fine\n" * 400 + b"\xff", {}, ["a.txt", "UTF-8"]),
    ("a.jsonl", LINE * 299 + b"\n{oops\n", {}, ["a.jsonl, line 301"]),  # blank lines count
    ("a.jsonl", LINE + b'{"body": "x"}', {}, ["a.jsonl, line 2", "'text'"]),
    ("a.jsonl", b'{"text": 7}', {}, ["line 1", "int"]),
    ("a.jsonl", b'{"text": null}', {}, ["a.jsonl", "no text"]),
    ("a.parquet", {"title": ["x"]}, {}, ["a.parquet", "'text'", "title", "--column"]),
    ("a.parquet", {"text": ["x"], "id": [7]}, {"column": "id"}, ["a.parquet", "'id'"]),
    ("smudged.parquet", {"text": [f"row {i} " * 20 for i in range(500)]}, {}, ["smudged.parquet"]),
]


@pytest.mark.parametrize(("name", "content", "options", "parts"), REFUSED)
def test_refused_and_nothing_left_behind(
    tmp_path, monkeypatch, tok_json, name, content, options, parts
):
    """Also after good documents were written; an older token file must survive."""
    monkeypatch.setattr(preparing, "PIECE", 100)
    out, source = tmp_path / "out", tmp_path / name
    if isinstance(content, dict):
        pq.write_table(pa.table(content), source)
        content = source.read_bytes()
        if source.stem == "smudged":  # the footer is whole
            content = content[:200] + b"\xff" * 100 + content[300:]
    source.write_bytes(content)
    sources = [str(source)]
    if not options and "no text" not in parts:
        sources.insert(0, write(tmp_path / "good.jsonl", ["good text"] * 600))
    before: dict[str, bytes] = {}
    for older in (False, True):
        with pytest.raises(ValueError, match=r".") as caught:
            prepare(sources, out / "tokens", tok_json, quiet=True, **options)
        assert all(part in str(caught.value) for part in parts)
        assert {path.name: path.read_bytes() for path in out.glob("*")} == before
        if not older:
            prepare([write(tmp_path / "old.txt", ["old"])], out / "tokens", tok_json, quiet=True)
            before = {path.name: path.read_bytes() for path in out.iterdir()}


def test_what_is_no_source(tmp_path, monkeypatch):
    """A mistyped file is refused before a tokenizer is asked of the hub."""
    monkeypatch.setattr("twistlm.model.huggingface.get_hf_file_metadata", lambda *a, **k: 1 / 0)
    with pytest.raises(ValueError, match="no such file"):
        prepare([str(tmp_path / "none.txt")], tmp_path / "out", "gpt2", quiet=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/hidden.txt").write_text("hidden")
    (tmp_path / "a.png").write_text("no text")
    with pytest.raises(ValueError, match="no file in this folder"):
        prepare([str(tmp_path)], tmp_path / "out", "gpt2", quiet=True)


def test_a_folder_of_sources_and_strings(tmp_path, tok, tok_json):
    """Files in the order of their names, one document each; what is no text is left out."""
    code = tmp_path / "code"
    (code / "b").mkdir(parents=True)
    for name, text in {"b/z.py": "def f(): pass\n", "a.md": "# A\n", "b/a.jsonl": ""}.items():
        (code / name).write_text(text)
    write(code / "b/two.jsonl", ["one", "two"])
    (code / "latin.py").write_bytes(b"caf\xe9")
    (code / "nul.c").write_bytes(b"a\0b")
    strings = (text for text in ["from", "", "Python"])
    file = prepare([str(code), strings], tmp_path / "out", tok_json, quiet=True)
    docs = ["# A\n", "one", "two", "def f(): pass\n", "from", "Python"]
    assert file.tokens.tolist() == expected(tok, docs)
    assert file.meta.sources == [str(code), "strings"]
    with pytest.raises(ValueError, match="a document is int"):
        prepare([["a", 7]], tmp_path / "out", tok_json, quiet=True)


def test_a_data_set_of_the_hub(tmp_path, tok, tok_json, monkeypatch):
    """Streamed rows, by a stand-in for the library; a column that is not there or no text."""
    rows = [{"title": "a", "body": "one two", "n": 1}, {"title": "b", "body": None, "n": 2}]
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return iter(rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    source, out = ["hub:some/set:en:test"], tmp_path / "out"
    file = prepare(source, out, tok_json, column="body", quiet=True)
    assert file.tokens.tolist() == expected(tok, ["one two"])
    assert asked == [(("some/set", "en"), {"split": "test", "streaming": True})]
    for column, said in {"typo": "no column 'typo'; it has title, body, n", "n": "is int"}.items():
        with pytest.raises(ValueError, match=rf"hub:some/set:en:test.*{said}.*--column"):
            prepare(source, out, tok_json, column=column, quiet=True)
