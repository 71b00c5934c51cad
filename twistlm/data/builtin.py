"""English text that ships with every Python: the reference manual's topics and stdlib docstrings.

It lets the first command train on real sentences with no download. The text is the Python Software
Foundation's (PSF licence); nothing of it is stored in this project.
"""

import ast
import platform
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ..system.terminal import console
from .prepare import tokenize
from .token_file import TokenFile, open_tokens

NAME = "builtin:python-docs"
EOS = "<|endoftext|>"
VOCAB_SIZE = 512
VALID_SHARE = 0.05  # of the documents
SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}


def documents() -> list[str]:
    """All documents once, in an order that depends on nothing but the text."""
    texts = [text for text in topics.topics.values() if text.strip()]
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not SKIP & set(path.relative_to(root).parts):
            texts += _docstrings(path)
    return sorted(set(texts))


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > 40:
                yield text


def train_bpe(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE like GPT-2's, trained on these texts."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    return tok


def build(folder: Path, quiet: bool = False) -> dict[str, TokenFile]:
    """Token files `train` and `valid` of the built-in corpus, and the BPE behind them."""
    texts = documents()
    random.Random(0).shuffle(texts)
    n_valid = max(1, int(len(texts) * VALID_SHARE))
    splits = {"valid": texts[:n_valid], "train": texts[n_valid:]}
    n_bytes = sum(len(text.encode()) for text in texts)
    if not quiet:
        console.print(
            f"text: the reference-manual topics and standard-library docstrings of Python "
            f"{platform.python_version()}: {len(texts):,} documents, {n_bytes / 1e6:.1f} MB"
        )
    tok = train_bpe(splits["train"], VOCAB_SIZE)
    return {k: tokenize([some], folder / k, tok, quiet=quiet) for k, some in splits.items()}


def resolve(stem: str, split: str, near: Path | None = None) -> str:
    """A token file's stem; the built-in corpus is made on first use."""
    found = find(stem, split, near)
    if stem == NAME:
        try:
            open_tokens(found)
        except ValueError:
            build(Path(found).parent)
    return found


def find(stem: str, split: str, near: Path | None = None) -> str:
    """A token file's stem; of the built-in corpus, where `resolve` makes it.

    A run names its tokens as they were seen from the folder it was started in. `near` is the run's
    own folder: what is not found from here is looked for from each folder above the run.
    """
    if not stem.startswith("builtin:"):
        folders = (Path(), *near.resolve().parents) if near is not None else ()
        return next((str(f / stem) for f in folders if (f / f"{stem}.bin").is_file()), stem)
    if stem != NAME:
        raise ValueError(f"data.{split} = {stem!r}: the only built-in corpus is {NAME}")
    return str(Path("runs", f"python-docs-{platform.python_version()}-bpe{VOCAB_SIZE}", split))
