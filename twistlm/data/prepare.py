"""Text in, token file out: files, folders, a hub data set or strings -> `STEM.bin` + JSON."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..model.tokenizer import encode, find_eos, load_tokenizer
from ..system.files import file_sha256
from ..system.terminal import console, progress
from .token_file import TokenFile, TokenMeta, check_target, open_tokens, token_draft, write_meta

PIECE = 1 << 20  # characters of one .txt piece handed to the tokenizer
CUT = re.compile(r"\S(?= \S)|\S\n(?=\S)")
STRINGS = "strings"  # how a token file names documents that came from Python
BATCH = 256  # documents per call into the tokenizer, which is parallel inside

Pieces = Iterator[tuple[str, bool]]  # text, and whether a document ends with it
Source = str | Iterable[str]  # a file, a folder or hub:NAME; or the documents themselves


def documents(source: Source, column: str = "text") -> Pieces:
    """The documents of one source, in order."""
    if not isinstance(source, str):
        return _strings(source)
    if source.startswith("hub:"):
        return _hub(source, column)
    path = Path(source)
    return _folder(path, column) if path.is_dir() else READERS[path.suffix](path, column)


def check_source(source: Source) -> None:
    """Refuse a file that is not there, is empty or of a kind that no reader knows."""
    if not isinstance(source, str | Iterable):
        kind = type(source).__name__
        raise ValueError(f"a text is a file, a folder, hub:NAME or documents, not a {kind}")
    if not isinstance(source, str) or source.startswith("hub:"):
        return
    if not source:
        raise ValueError("the name of a text is empty: name a file, a folder or hub:NAME")
    path = Path(source)
    if path.is_dir() and not files_in(path):
        raise ValueError(f"{source}: no file in this folder is {', '.join(READERS)}")
    if not path.exists():
        raise ValueError(f"{source}: no such file")
    if path.is_file() and path.stat().st_size == 0:
        raise ValueError(f"{source} is empty")
    if path.is_file() and path.suffix not in READERS:
        legal = f"{', '.join(READERS)}, a folder of them or hub:NAME"
        raise ValueError(f"{source}: unknown kind of file; use {legal}")


def files_in(folder: Path) -> list[Path]:
    """Files of text below a folder in the order of their names, none of them hidden."""
    found = (path for path in folder.rglob("*") if path.suffix in READERS and path.is_file())
    shown = [p for p in found if not any(part[0] == "." for part in p.relative_to(folder).parts)]
    return sorted(path for path in shown if path.stat().st_size)


def n_bytes(source: Source) -> int | None:
    """Bytes of text in a source; None where they cannot be told without reading it."""
    if not isinstance(source, str) or not (path := Path(source)).exists():
        return None
    files = files_in(path) if path.is_dir() else [path]
    return None if ".parquet" in {f.suffix for f in files} else sum(f.stat().st_size for f in files)


def _strings(texts: Iterable[str]) -> Pieces:
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"a document is {type(text).__name__}, not text")
        if text:
            yield text, True


def _folder(folder: Path, column: str) -> Pieces:
    """All files below a folder; sources that are no UTF-8 text are left out, and counted."""
    n_odd = 0
    for path in files_in(folder):
        if READERS[path.suffix] is not _txt:
            yield from READERS[path.suffix](path, column)
            continue
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            n_odd += 1
        else:
            yield text, True
    if n_odd:
        console.print(f"{folder}: {n_odd} files are no UTF-8 text and were left out")


def _txt(path: Path, column: str) -> Pieces:
    """One document, in pieces of about `PIECE` characters that end at a lone line break.

    A byte-level BPE never merges across such a break, so the pieces give the tokens of the whole.
    """
    pending = ""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            while chunk := file.read(PIECE):
                if "\0" in chunk:
                    raise ValueError(f"{path} holds NUL bytes: it is a binary file, not text")
                pending += chunk
                while len(pending) > PIECE and (cut := CUT.search(pending, PIECE)):
                    yield pending[: cut.end()], False
                    pending = pending[cut.end() :]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    yield pending, True


def _documents(read: Callable[[Any, str], Iterator[str | None]]) -> Callable[[Any, str], Pieces]:
    """A row of a table is a document; rows without text, null or empty, are counted."""

    def pieces(source: Any, column: str) -> Pieces:
        n_without = 0
        for text in read(source, column):
            n_without += not text
            if text:
                yield text, True
        if n_without:
            console.print(f"{source}: {n_without:,} rows hold no text and were left out")

    return pieces


@_documents
def _jsonl(path: Path, column: str) -> Iterator[str | None]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}, is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}, is {type(row).__name__}, no object")
            if column not in row:
                names = ", ".join(row)
                what = f"no column {column!r}; it has {names}: use --column"
                raise ValueError(f"{path}, line {number}: {what}")
            text = row[column]
            if not isinstance(text, str | None):
                kind = type(text).__name__
                raise ValueError(f"{path}, line {number}: {column!r} is {kind}, not text")
            try:
                (text or "").encode()
            except UnicodeEncodeError as error:  # half of a surrogate pair
                raise ValueError(f"{path}, line {number}: {column!r}: {error}") from None
            yield text


@_documents
def _parquet(path: Path, column: str) -> Iterator[str | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        kinds = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
        if column not in kinds:
            names = ", ".join(kinds)
            raise ValueError(f"{path} has no column {column!r}; it has {names}: use --column")
        if (kind := kinds[column]) not in (pa.string(), pa.large_string(), pa.string_view()):
            raise ValueError(f"{path}: column {column!r} is {kind}, not text: use --column")
        for batch in file.iter_batches(batch_size=BATCH, columns=[column]):
            yield from batch.column(0).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a Parquet file, or damaged: {error}") from None


@_documents
def _hub(source: str, column: str) -> Iterator[str | None]:
    """`hub:NAME`, `hub:NAME:CONFIG` or `hub:NAME:CONFIG:SPLIT`, streamed."""
    try:
        from datasets import load_dataset  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise ValueError(f"{source} needs the datasets library: pip install -e '.[hub]'") from None
    name, config, split = ([*source.removeprefix("hub:").split(":"), "", ""])[:3]
    try:
        rows = load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:
        raise ValueError(f"{source}: the hub gave no such data set: {error}") from None
    for row in rows:
        if column not in row:
            raise ValueError(
                f"{source} has no column {column!r}; it has {', '.join(row)}: use --column"
            )
        if not isinstance(text := row[column], str | None):
            kind = type(text).__name__
            raise ValueError(f"{source}: column {column!r} is {kind}, not text: use --column")
        yield text


PLAIN: tuple[str, ...] = (".txt", ".raw", ".md", ".rst", ".py")
PLAIN += (".c", ".h", ".cpp", ".java", ".js", ".ts", ".go", ".rs", ".sh")
READERS = {**dict.fromkeys(PLAIN, _txt), ".jsonl": _jsonl, ".parquet": _parquet}


def prepare(
    sources: Sequence[Source],
    out: str | Path,
    tokenizer: str | Tokenizer,
    *,
    column: str = "text",
    eos: str | None = None,
    quiet: bool = False,
) -> TokenFile:
    """Tokenize `sources` into `out.bin`; what is there and is no token file is refused."""
    if not sources:
        raise ValueError("nothing to prepare: name at least one file")
    if not (stem := Path(str(out).removesuffix(".bin"))).name:
        raise ValueError(f"--out {str(out)!r} names no file: give a stem, such as data/train")
    for source in sources:  # before a tokenizer is asked of the hub
        check_source(source)
    tok = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    tok.no_truncation()
    tok.no_padding()
    check_target(stem, tok.to_str(pretty=True))
    return tokenize(sources, stem, tok, column=column, eos=eos, quiet=quiet)


def tokenize(
    sources: Sequence[Source],
    stem: Path,
    tok: Tokenizer,
    *,
    column: str = "text",
    eos: str | None = None,
    quiet: bool = False,
) -> TokenFile:
    """The same in place of whatever is there, which appears when all of it is written."""
    names = [source if isinstance(source, str) else STRINGS for source in sources]
    eos_id = find_eos(tok, eos)
    eos_ids = [] if eos_id is None else [eos_id]
    vocab_size = 1 + max(tok.get_vocab(with_added_tokens=True).values(), default=0)
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    n_documents, n_tokens, max_id = 0, 0, -1
    with token_draft(stem) as draft:
        with Path(f"{draft}.bin").open("wb") as file, progress(quiet) as bar:
            for source, name in zip(sources, names, strict=True):
                task = bar.add_task(f"tokenize {Path(name).name}", total=n_bytes(source), note="")
                for group in _groups(documents(source, column)):
                    texts, ends = zip(*group, strict=True)
                    encoded = encode(tok, texts, special=False)
                    for encoding, is_end in zip(encoded, ends, strict=True):
                        array = np.array(encoding.ids + eos_ids * is_end, dtype)
                        array.tofile(file)
                        n_tokens += array.size
                        n_documents += is_end
                        max_id = max(max_id, int(array.max(initial=0)))
                    done = sum(len(text.encode()) for text in texts)
                    bar.update(task, advance=done, note=f"{n_tokens:,} tokens")
                bar.update(task, total=bar.tasks[task].completed)  # JSON is more than its texts
        if n_tokens == 0:
            raise ValueError(f"{', '.join(names)}: no text in there")
        tok.save(f"{draft}.tokenizer.json")
        sha256 = file_sha256(Path(f"{draft}.tokenizer.json"))
        counts = n_tokens, n_documents, vocab_size, max_id
        write_meta(draft, TokenMeta(*counts, dtype.name, sha256, eos_id, names))
    return open_tokens(str(stem))


def _groups(pieces: Pieces) -> Iterator[list[tuple[str, bool]]]:
    """As many pieces as the tokenizer takes at once."""
    group, n_chars = [], 0
    for text, is_end in pieces:
        group.append((text, is_end))
        n_chars += len(text)
        if len(group) == BATCH or n_chars > 8 * PIECE:
            yield group
            group, n_chars = [], 0
    if group:
        yield group
