"""Sizes as they are typed: `6/12`, or a share for each kind of layer as `attn=2/3,ffn=6/12`."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ...config import Setting
from ...model.blocks import KINDS, SETTINGS

BY_KIND = "one ratio by kinds of layer is attn=2/3,ffn=6/12, others follow in their own --ratios"


def named_shares(ratio: str) -> dict[str, str]:
    """What stays of each kind or single layer that a ratio names; nothing for a plain fraction."""
    pairs = (pair.split("=", 1) for pair in ratio.split(",")) if "=" in ratio else ()
    return dict(pairs)


def in_setting(ratio: str, setting: Setting) -> str:
    """What a ratio says of the kinds that a setting cuts: of `attn=2/3,ffn=6/12` in ffn, `6/12`."""
    kinds = SETTINGS[setting]
    mine = {
        key: text for key, text in named_shares(ratio).items() if key.partition(".")[0] in kinds
    }
    if not mine:
        return ratio
    alone = len(kinds) == 1 and set(mine) == set(kinds)
    return mine[kinds[0]] if alone else ",".join(f"{key}={text}" for key, text in mine.items())


def exact(ratio: str) -> str:
    """The same for all ways to write a ratio: `1/2` for 6/12 and for attn=2/4,ffn=0.5."""
    shares = {key: Fraction(text) for key, text in named_shares(ratio).items()}
    if len(set(shares.values())) < 2:
        return str(next(iter(shares.values()), None) or Fraction(ratio))
    own = {
        key: share
        for key, share in shares.items()
        if share != shares.get(key.partition(".")[0]) or key in KINDS
    }
    return ",".join(f"{key}={own[key]}" for key in sorted(own))


def mean_share(ratio: str) -> Fraction:
    """How large a ratio is, among others: its share, or the mean of those of its kinds of layer."""
    found = [Fraction(text) for key, text in named_shares(ratio).items() if key in KINDS]
    return sum(found, Fraction(0)) / len(found) if found else Fraction(ratio)


def parse_ratios(options: Sequence[str], settings: Sequence[Setting]) -> tuple[str, ...]:
    """Each size once, as it was typed first in one of several --ratios."""
    found: dict[str, str] = {}
    for typed in options:
        pieces = [piece.strip() for piece in typed.split(",") if piece.strip()]
        for ratio in [_by_kind(typed, pieces, settings)] if "=" in typed else pieces:
            for text in named_shares(ratio).values() or [ratio]:
                _check_share(text)
            found.setdefault(exact(ratio), ratio)
    if not found:
        raise ValueError("--ratios names no ratio: give some as 8/12,6/12")
    return tuple(found.values())


def _by_kind(typed: str, pieces: list[str], settings: Sequence[Setting]) -> str:
    """`attn=2/3,ffn=6/12` without spaces; it must name every kind that is cut, each once."""
    found: dict[str, str] = {}
    for piece in pieces:
        key, equals, text = (part.strip() for part in piece.partition("="))
        kind, dot, layer = key.partition(".")
        if not equals or kind not in KINDS or (dot and not layer.isdecimal()) or key in found:
            raise ValueError(f"--ratios {typed!r}: {piece!r} is out of place; {BY_KIND}")
        found[key] = text
    for setting in settings:
        if missing := [kind for kind in SETTINGS[setting] if kind not in found]:
            raise ValueError(
                f"--ratios {typed!r} says nothing about {missing[0]}, which --settings {setting} "
                f"cuts; {BY_KIND}"
            )
    return ",".join(f"{key}={text}" for key, text in found.items())


def _check_share(text: str) -> None:
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--ratios {text!r} is not a fraction such as 6/12 or 0.5") from None
    if not 0 < share <= 1:
        raise ValueError(f"--ratios {text!r}: it must lie in (0, 1]")
