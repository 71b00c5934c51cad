"""What a field of a config or a request may hold stands beside it; one loop checks it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

WHOLE = 2**63 - 1  # the largest whole number that a record of ours holds


def option(
    help: str,
    default: Any = dataclasses.MISSING,
    *names: str,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    shown: str | None = None,
    argument: bool = False,
) -> Any:
    """A field of a request: an option of a command, and a keyword of the Python method.

    `names` replace `--field-name`; `shown` replaces the default in the help text; an `argument` has
    no name on the command line; a field of type `tuple[..., ...]` is repeatable.
    """
    about = {
        "help": help,
        "names": names,
        "least": least,
        "most": most,
        "choices": choices,
        "metavar": metavar,
        "shown": shown,
        "argument": argument,
    }
    return dataclasses.field(default=default, metadata=about)


def seed_of(what: str) -> Any:
    """The field `seed` of a request that draws `what`."""
    return option(f"Seed of {what}.", 0, least=0, most=WHOLE)


def words(names: Any) -> str:
    """`a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def as_option(name: str, value: Any) -> str:
    """`--max-size 3`: how a value of a request is named in a message."""
    return f"--{name.replace('_', '-')} {value!r}"


def check(values: Any, say: Callable[[str, Any], str] = as_option) -> None:
    """Refuse the first field of a dataclass that is out of its range; `say` names it."""
    for field in dataclasses.fields(values):
        value, about = getattr(values, field.name), field.metadata
        if about.get("choices") and value not in about["choices"]:
            raise ValueError(f"{say(field.name, value)}: use one of {', '.join(about['choices'])}")
        if value is None or not about:
            continue
        for each in value if isinstance(value, tuple) else (value,):
            if (least := about.get("least")) is not None and not each >= least:
                raise ValueError(f"{say(field.name, each)}: must be at least {least}")
            if (most := about.get("most")) is not None and not each <= most:
                raise ValueError(f"{say(field.name, each)}: must be at most {most}")


def fill_tuples_(values: Any) -> None:
    """Let a lone word stand for a tuple of one, as `ratio="6/12"`; a list becomes a tuple."""
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if str(field.type).startswith("tuple") and not isinstance(value, tuple):
            several = tuple(value) if isinstance(value, list) else (value,)
            object.__setattr__(values, field.name, several)
