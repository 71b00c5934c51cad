"""What `twistlm compare` is asked for: checked in full before any parent is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import cast

from ...compute.perplexity import Text
from ...config import Method, Setting
from ...data.builtin import resolve
from ...data.token_file import open_tokens
from ...model import huggingface
from ...model.blocks import SETTINGS
from ...pruners import repair
from ...pruners.methods import METHODS
from ...pruners.write import NAMES, STRUCTURED
from ...tickets import importance
from ...tickets.calibration import calibrate
from .cells import Asked
from .rivals import LABELS, Rival

RANDOM = f"{STRUCTURED}random"  # every parent's random tickets are in the table anyway
DEFAULT = tuple(name for name in NAMES if name != RANDOM)
TOKENS = 32768  # evaluated at once on a GPU


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """A comparison as it is typed; lists are separated by commas, as in `8/12,6/12`."""

    sources: Sequence[tuple[Method, str]]  # how each parent was trained, and where it lies
    out: Path  # a folder, or a file of points
    ratios: str
    settings: str
    methods: str | None = None  # None: all that are known
    on: str = "dense"  # the kinds of parent that these methods prune
    repair: str = ""
    n: int = 20  # random tickets of each parent and size
    data: str | None = None  # None: the validation tokens of the first parent's run
    tokens: int = 0  # of them; 0: all
    calibration: str | None = None  # None: the training tokens of the first parent's run
    n_calibration: int = 128  # sequences
    seed: int = 0
    device: str = "auto"
    overrides: Sequence[str] = ()
    quiet: bool = False

    def chosen_settings(self) -> tuple[Setting, ...]:
        chosen = names(self.settings, "--settings", list(SETTINGS))
        if not chosen:
            raise ValueError(f"--settings names none of {', '.join(SETTINGS)}")
        return cast(tuple[Setting, ...], chosen)

    def chosen_ratios(self) -> tuple[str, ...]:
        """Each share once, as it was typed first."""
        found: dict[Fraction, str] = {}
        for part in (part.strip() for part in self.ratios.split(",") if part.strip()):
            try:
                share = Fraction(part)
            except (ValueError, ZeroDivisionError):
                raise ValueError(
                    f"--ratios {part!r} is not a fraction such as 6/12 or 0.5"
                ) from None
            if not 0 < share <= 1:
                raise ValueError(f"--ratios {part!r}: it must lie in (0, 1]")
            found.setdefault(share, part)
        if not found:
            raise ValueError("--ratios names no ratio: give some as 8/12,6/12")
        return tuple(found.values())

    def chosen_methods(self) -> tuple[str, ...]:
        return DEFAULT if self.methods is None else names(self.methods, "--methods", DEFAULT)

    def chosen_kinds(self) -> tuple[str, ...]:
        """The kinds of parent that are pruned; each of them must be among the sources."""
        kinds = names(self.on, "--on", list(LABELS)) if self.chosen_methods() else ()
        for kind in kinds if self.sources else ():
            if kind not in dict(self.sources):
                raise ValueError(
                    f"--on {kind!r}: give --parent-{kind}, other parents to prune, or --methods ''"
                )
        return kinds

    def chosen_repairs(self) -> tuple[str, ...]:
        return names(self.repair, "--repair", list(repair.METHODS))

    def check(self) -> None:
        """Refuse what can be refused before a parent is opened."""
        self.chosen_settings()
        self.chosen_ratios()
        self.chosen_kinds()
        self.chosen_repairs()


def read(request: CompareRequest, rivals: list[Rival]) -> Asked:
    """The request with its text and calibration sequences, which must fit all parents."""
    first, methods, repairs = rivals[0].parent, request.chosen_methods(), request.chosen_repairs()
    for how in repairs:
        repair.check_repair(first, how)
    ids = None
    if repairs or any(_needs_text(method) for method in methods):
        options = ("--calibration", "--calibration-sequences")
        n, seed = request.n_calibration, request.seed
        ids = calibrate(first, request.calibration, n, seed, options).ids
    return Asked(
        settings=request.chosen_settings(),
        ratios=request.chosen_ratios(),
        methods=methods,
        on=request.chosen_kinds(),
        repairs=repairs,
        n=request.n,
        seed=request.seed,
        text=_text(rivals, request.data, request.tokens),
        ids=ids,
    )


def names(text: str, option: str, legal: Sequence[str]) -> tuple[str, ...]:
    """The parts of `a,b,c`, each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in found:
        if name not in legal:
            raise ValueError(f"{option} {name!r}: use some of {', '.join(legal)}")
    return found


def _needs_text(method: str) -> bool:
    if method.startswith(STRUCTURED):
        return method.removeprefix(STRUCTURED) in importance.NEEDS_TEXT
    return METHODS[method].observe is not None


def _text(rivals: list[Rival], data: str | None, tokens: int) -> Text:
    """The text of the first parent, checked against all of them."""
    first = rivals[0].parent
    stem = data or first.cfg.data.valid
    if not stem:
        raise ValueError(f"{first.source} has no validation tokens of its own: give --data STEM")
    file, seq_len = open_tokens(resolve(stem, "valid")), first.cfg.data.seq_len
    for rival in rivals:
        parent = rival.parent
        file.check(seq_len, huggingface.vocab_size(parent.template), parent.tokenizer_sha256)
    gpu = first.central.weights.device.type == "cuda"
    return Text(file, seq_len, tokens, max(1, TOKENS // seq_len) if gpu else 16)
