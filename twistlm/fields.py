"""What a field of a config or a request may hold stands beside it; one loop checks it."""

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Self

WHOLE = 2**63 - 1  # the largest whole number that a record of ours holds
LARGEST = 1e30  # of any number in a config: float32 ends at 3.4e38
KINDS: dict[type, Any] = {str: str, int: int, float: int | float, bool: bool}  # what is taken
# help of options that many commands have
VALID_TEXT = "Token file; default: the run's data.valid."
N_TOKENS = "Use this many tokens; 0 takes all."
OPTION = re.compile(r"`[^`]*`|(?<![\w/.-])--([a-z][a-z-]*)")


@contextmanager
def python_words() -> Iterator[None]:
    """Errors that speak of --data STEM speak of data in Python; paths and `commands` stay."""
    try:
        yield
    except ValueError as error:
        said = OPTION.sub(lambda m: m[1].replace("-", "_") if m[1] else m[0], str(error))
        raise ValueError(said) from None


@dataclass(frozen=True)
class Range:
    """The numbers that a field may hold; `above` and `below` leave the bound itself out."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        """`> 0`, `>= 2`, `0..1`, `> 0, <= 9`; nothing where only the largest number limits it."""
        low = f"> {self.above}" if self.above is not None else ""
        low = f">= {self.least}" if self.least is not None else low
        if self.below is not None:
            return f"{low}, < {self.below}"
        if self.is_open:
            return low
        return f"{low}, <= {self.most}" if self.above is not None else f"{self.least}..{self.most}"

    @property
    def is_open(self) -> bool:
        """Whether only the largest number of all limits it, of which nobody need be told."""
        return self.most in (None, LARGEST, WHOLE, math.inf)

    def holds(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )


def limited(default: Any, **limits: float) -> Any:
    """A number of a config, or a tuple of them, with its range."""
    return dataclasses.field(
        default=default, metadata={"range": Range(**{"most": LARGEST} | limits)}
    )


def option(
    help: str,
    default: Any = dataclasses.MISSING,
    *names: str,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    argument: bool = False,
    **limits: float,
) -> Any:
    """A field of a request: an option of a command, and a keyword of the Python method.

    `names` replace `--field-name`; an `argument` has no name on the command line; a field of type
    `tuple[..., ...]` is repeatable.
    """
    about: dict[str, Any] = {"help": help, "names": names, "metavar": metavar, "argument": argument}
    about |= {"range": Range(**limits), "choices": choices}
    return dataclasses.field(default=default, metadata=about)


def seed_of(what: str) -> Any:
    """The field `seed` of a request that draws `what`."""
    return option(f"Seed of {what}.", 0, least=0, most=WHOLE)


def words(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def check_key(key: str, legal: Collection[str], section: str = "") -> None:
    """Refuse a key that a config's section, `train.`, or a request has not."""
    if key not in legal:
        close = difflib.get_close_matches(key, legal, n=1)
        hint = f"; did you mean {section}{close[0]}?" if close else "."
        raise ValueError(f"unknown key {section}{key}{hint} Legal keys: {', '.join(legal)}")


def check(values: Any, section: str = "") -> None:
    """Refuse the first field of a request, or of a config's section, that holds what it may not."""
    for field in dataclasses.fields(values):
        value, choices = getattr(values, field.name), field.metadata.get("choices")
        several = value if isinstance(value, tuple) else (value,)
        said = f"--{field.name.replace('_', '-')} {value!r}"
        if section:
            said = f"{section}.{field.name} = {list(value) if value is several else value}"
        if choices and value not in choices:
            raise ValueError(f"{said}: use one of {', '.join(choices)}")
        limits = field.metadata.get("range", Range())
        for each in several:
            if isinstance(each, int | float) and not limits.holds(each):
                beyond = limits.is_open and each > (limits.most or math.inf)
                over = f", at most {limits.most:.4g}" if beyond else ""
                raise ValueError(f"{said}: legal are {limits}{over}")


class Checked:
    """A request whose fields are held to their ranges.

    What is natural in Python is taken for its words: `params=90_000`, `data=Path("text")`; a lone
    value for a tuple of one.
    """

    def __new__(cls, **given: Any) -> Self:
        for key in given:
            check_key(key, cls.__dataclass_fields__)  # type: ignore[attr-defined]
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if str(field.type).startswith("tuple"):
                value = () if value is None else value
                value = tuple(value) if isinstance(value, list | tuple) else (value,)
            for kind, legal in KINDS.items():
                if field.type in (kind, kind | None):
                    value = _word(value) if kind is str else _plain(value)
                    legal = legal if field.type is kind else legal | None
                    is_truth = isinstance(value, bool) and kind is not bool  # an int, too
                    if is_truth or not isinstance(value, legal):
                        what = f"{'an' if kind is int else 'a'} {kind.__name__}"
                        said = f"--{field.name.replace('_', '-')} takes {what}"
                        said += f", not a {type(value).__name__}"
                        raise ValueError(f"{said}: {field.metadata['help']}")
            if field.type == tuple[str, ...]:
                value = tuple(map(_word, value))
            object.__setattr__(self, field.name, value)
        check(self)


def _plain(value: Any) -> Any:
    """A number of numpy or torch as Python's own, which JSON can write."""
    return value.tolist() if hasattr(value, "tolist") else value


def _word(value: Any) -> Any:
    return str(value) if isinstance(value, Real | Path) else value
