"""Lists as they are typed in one option: names, and sizes of tickets or workers."""

from collections.abc import Sequence
from typing import Any


def names(text: str, option: str, legal: Sequence[str], may_be_none: bool = False) -> Any:
    """The parts of `a,b,c`, each once, as a tuple."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in found:
        if name not in legal:
            raise ValueError(f"{option} {name!r}: use some of {', '.join(legal)}")
    if not found and not may_be_none:
        raise ValueError(f"{option} names none of {', '.join(legal)}")
    return found


def sizes(given: Sequence[str], option: str) -> tuple[str, ...]:
    """Each size once: `8/12,6/12` are two, `attn=2/3,ffn=6/12` is one."""
    found = [[text] if "=" in text else text.split(",") for text in given]
    sizes = [size.replace(" ", "") for some in found for size in some if size.strip()]
    if not sizes:
        raise ValueError(f"{option} names no ratio: give some as 8/12,6/12")
    return tuple(dict.fromkeys(sizes))
