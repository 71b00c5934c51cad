"""Text in, token file out: .txt, .jsonl, .parquet or a hub data set -> `STEM.bin` + JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ..model.tokenizer import find_eos, load_tokenizer
from ..system.files import draft_folder, file_sha256
from ..system.terminal import progress
from .token_file import TokenFile, TokenMeta, open_tokens, write_meta

PIECE = 1 << 20  # characters of one .txt piece handed to the tokenizer
CUT = re.compile(r"\S(?= \S)|\S\n(?=\S)")
BATCH = 256  # documents per call into the tokenizer, which is parallel inside


def documents(source: str, column: str = "text") -> Iterator[str]:
    """The documents of one source, in order."""
    check_source(source)
    if source.startswith("hub:"):
        return _hub(source, column)
    return READERS[Path(source).suffix](Path(source), column)


def check_source(source: str) -> None:
    """Refuse a file that is not there, is empty or of a kind that no reader knows."""
    path = Path(source)
    if source.startswith("hub:"):
        return
    if not path.is_file():
        raise ValueError(f"{source}: no such file")
    if path.stat().st_size == 0:
        raise ValueError(f"{source} is empty")
    if path.suffix not in READERS:
        raise ValueError(f"{source}: unknown kind of file; use {', '.join(READERS)} or hub:NAME")


def _txt(path: Path, column: str) -> Iterator[str]:
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
                    yield pending[: cut.end()]
                    pending = pending[cut.end() :]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    if pending:
        yield pending


def _jsonl(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[column]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a JSON object with {column!r} ({error!r})"
                ) from None
            if not isinstance(text, str):
                raise ValueError(
                    f"{path}, line {number}: {column!r} is {type(text).__name__}, not text"
                )
            if text:
                yield text


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from None
    if column not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        raise ValueError(f"{path} has no column {column!r}; it has {names}: use --column")
    kind = file.schema_arrow.field(column).type
    if kind not in (pa.string(), pa.large_string(), pa.string_view()):
        raise ValueError(f"{path}: column {column!r} is {kind}, not text: use --column")
    try:
        for batch in file.iter_batches(batch_size=BATCH, columns=[column]):
            yield from (text for text in batch.column(0).to_pylist() if text)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _hub(source: str, column: str) -> Iterator[str]:
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
    yield from (row[column] for row in rows if row[column])


WHOLE = (".txt", ".raw")  # a file is one document
READERS = {".txt": _txt, ".raw": _txt, ".jsonl": _jsonl, ".parquet": _parquet}


def prepare(
    sources: list[str],
    out: str | Path,
    tokenizer: str | Tokenizer,
    *,
    column: str = "text",
    eos: str | None = None,
    quiet: bool = False,
) -> TokenFile:
    """Tokenize `sources` into `out.bin`; nothing appears under that name until all is written."""
    if not sources:
        raise ValueError("nothing to prepare: name at least one file")
    for source in sources:  # before a tokenizer is asked of the hub
        check_source(source)
    stem = Path(str(out).removesuffix(".bin"))
    tok = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    tok.no_truncation()
    tok.no_padding()
    eos_id = find_eos(tok, eos)
    vocab_size = 1 + max(tok.get_vocab(with_added_tokens=True).values(), default=0)
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    stem.parent.mkdir(parents=True, exist_ok=True)
    with draft_folder(Path(f"{stem}.bin")) as folder:
        draft = folder / "tokens"
        n_documents = n_tokens = 0
        max_id = -1
        with Path(f"{draft}.bin").open("wb") as file, progress(quiet) as bar:
            for source in sources:
                path = Path(source)
                in_bytes = path.stat().st_size if path.suffix in (*WHOLE, ".jsonl") else None
                task = bar.add_task(f"tokenize {path.name}", total=in_bytes, note="")
                for pieces, ends in _batches(documents(source, column), source):
                    encoded = tok.encode_batch(pieces, add_special_tokens=False)
                    for encoding, end in zip(encoded, ends, strict=True):
                        eos_ids = [eos_id] if end and eos_id is not None else []
                        array = np.array(encoding.ids + eos_ids, dtype)
                        array.tofile(file)
                        n_tokens += array.size
                        n_documents += end
                        max_id = max(max_id, int(array.max())) if array.size else max_id
                    done = sum(len(piece.encode()) for piece in pieces)
                    bar.update(task, advance=done, note=f"{n_tokens:,} tokens")
                bar.update(task, total=bar.tasks[task].completed)  # JSON is more than its texts
        if n_tokens == 0:
            raise ValueError(f"{', '.join(sources)}: no text in there")
        tok.save(f"{draft}.tokenizer.json")
        sha256 = file_sha256(Path(f"{draft}.tokenizer.json"))
        counts = n_tokens, n_documents, vocab_size, max_id
        write_meta(draft, TokenMeta(*counts, dtype.name, sha256, eos_id, sources))
        for suffix in (".tokenizer.json", ".bin", ".json"):  # the last one says "complete"
            os.replace(f"{draft}{suffix}", f"{stem}{suffix}")
    return open_tokens(str(stem))


def _batches(texts: Iterable[str], source: str) -> Iterator[tuple[list[str], list[bool]]]:
    """Pieces in groups, and for each whether a document ends there (.txt is one document)."""
    single = Path(source).suffix in WHOLE
    group: list[str] = []
    for text in texts:
        # the last piece is kept back until it is known whether another one follows
        if len(group) > BATCH or (len(group) > 1 and sum(map(len, group)) > 8 * PIECE):
            yield group[:-1], [not single] * (len(group) - 1)
            group = group[-1:]
        group.append(text)
    if group:
        yield group, [not single] * (len(group) - 1) + [True]
