"""Several texts, each with its share, as one token file to train on and one to measure on."""

import math
import random
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ..system.terminal import console
from . import builtin
from .prepare import STRINGS, Source, check_source, tokenize
from .token_file import PARTS, TokenFile, open_tokens, token_draft, write_meta

HELD_OUT = 0.02  # of every source, its end: training never sees it
CHUNK = 1024  # tokens: of a source with more than its share, chunks all over it stay


@dataclass(frozen=True)
class Weighted:
    """A source, and its share of the training tokens; None: all that it has."""

    source: Source
    weight: float | None = None


def parse(texts: Sequence[Source]) -> list[Weighted]:
    """Sources with their weights: `code/:0.7`; all of them are checked before one is read."""
    found = []
    for text in texts:
        name, weight = text, None
        if isinstance(text, str) and ":" in text:
            with suppress(ValueError):
                weight = float(text.rpartition(":")[2])
                name = text.rpartition(":")[0]
        if weight is not None and not 0 < weight < math.inf:
            raise ValueError(f"--text {text}: a weight must be greater than 0")
        if name != builtin.NAME:
            check_source(name)
        found.append(Weighted(name, weight))
    if not found:
        raise ValueError("give --text: files, folders or hub:NAME")
    if len({each.weight is None for each in found}) > 1:
        raise ValueError("give every --text a weight, as in --text code/:0.7, or none")
    return found


def mix(
    texts: Sequence[Weighted], folder: Path, tokenizer: Tokenizer, column: str = "text"
) -> tuple[TokenFile, TokenFile]:
    """`folder/train` and `folder/valid`, or those that an earlier call has made there.

    With weights the training tokens are as many as no source must be repeated for. A call that was
    stopped goes on with the first source that it had not finished.
    """
    stems = [folder / split for split in ("train", "valid")]
    with suppress(ValueError):
        train, valid = (open_tokens(str(stem)) for stem in stems)
        return train, valid
    paths = [folder / f"source-{i}" for i in range(len(texts))]
    files = [_tokens(*pair, tokenizer, column) for pair in zip(texts, paths, strict=True)]
    cuts = [_held_out_from(file) for file in files]
    # of what every source could give alone, the least; 1 without weights: all of it
    weights = [each.weight or n for each, n in zip(texts, cuts, strict=True)]
    most = min(n / weight for n, weight in zip(cuts, weights, strict=True))
    kept, rests = [], []
    for each, file, n, weight in zip(texts, files, cuts, weights, strict=True):
        name = each.source if isinstance(each.source, str) else STRINGS
        keep, held = min(1.0, weight * most / n), file.meta.n_tokens - n
        console.print(f"text: {name}: {n * keep:,.0f} of {n:,} tokens train, {held:,} measure")
        if not (pieces := _spread(file.tokens[:n], keep)):
            raise ValueError(f"--text {name}: its share leaves none of {n:,} tokens; give it more")
        kept += pieces
        rests.append(file.tokens[n:])
    _write(stems[0], files, kept)
    _write(stems[1], files, _in_turn(rests))
    for file, part in product(files, (*PARTS, "json")):
        Path(f"{file.stem}.{part}").unlink()
    return open_tokens(str(stems[0])), open_tokens(str(stems[1]))


def _tokens(text: Weighted, stem: Path, tokenizer: Tokenizer, column: str) -> TokenFile:
    with suppress(ValueError):
        return open_tokens(str(stem))
    source = text.source
    if source == builtin.NAME:
        source = builtin.documents()
        random.Random(0).shuffle(source)  # they are sorted, and the end is held out
    return tokenize([source], stem, tokenizer, column=column)


def _held_out_from(file: TokenFile) -> int:
    """Where the held-out end begins: behind a document, where that leaves at least half of it."""
    n, eos = file.meta.n_tokens, file.meta.eos_id
    first = n - math.ceil(HELD_OUT * n)
    ends = np.flatnonzero(file.tokens[first:] == (-1 if eos is None else eos))
    behind = first + int(ends[0]) + 1 if len(ends) else n
    return behind if n - behind >= (n - first) / 2 else first


def _spread(tokens: np.ndarray, share: float) -> list[np.ndarray]:
    """Chunks from all over the tokens, a share of them."""
    if share == 1:
        return [tokens]
    chunks = [tokens[i : i + CHUNK] for i in range(0, len(tokens), CHUNK)]
    return [c for i, c in enumerate(chunks) if math.floor((i + 1) * share) > math.floor(i * share)]


def _in_turn(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Chunks of all parts, mixed evenly: the first tokens are some of each."""
    places = []
    for part in parts:
        starts = range(0, len(part), CHUNK)
        places += [((i + 0.5) / len(part), part[i : i + CHUNK]) for i in starts]
    return [chunk for _, chunk in sorted(places, key=lambda place: place[0])]


def _write(stem: Path, files: list[TokenFile], pieces: list[np.ndarray]) -> None:
    """One token file of pieces of others, which one tokenizer made."""
    metas = [file.meta for file in files]
    with token_draft(stem) as draft:
        with Path(f"{draft}.bin").open("wb") as file:
            for piece in pieces:
                piece.tofile(file)
        shutil.copyfile(files[0].tokenizer_path, f"{draft}.tokenizer.json")
        ends = (int((piece == metas[0].eos_id).sum()) for piece in pieces)
        meta = replace(
            metas[0],
            n_tokens=sum(map(len, pieces)),
            n_documents=sum(ends),
            max_id=max(meta.max_id for meta in metas),
            sources=[source for meta in metas for source in meta.sources],
        )
        write_meta(draft, meta)
