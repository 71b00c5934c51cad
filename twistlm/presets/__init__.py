"""Configs as text: the TOML files beside this one, a user's own, and `section.key=value` words.

Nothing here knows a key by name: `build` reads any dataclass, and says what is legal where a value
is not.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")


def preset_names() -> list[str]:
    """The presets that ship with the package."""
    return sorted(
        Path(entry.name).stem
        for entry in resources.files(__name__).iterdir()
        if entry.name.endswith(".toml")
    )


def read_table(source: str) -> dict[str, Any]:
    """The table of a preset, of a TOML file, or of a run folder: what its newest checkpoint was
    trained with.
    """
    if source not in preset_names() and Path(source).is_dir():
        return _run_table(Path(source))
    if source in preset_names():
        data = (resources.files(__name__) / f"{source}.toml").read_bytes()
    elif Path(source).is_file():
        data = Path(source).read_bytes()
    else:
        raise ValueError(
            f"{source!r} is neither a TOML file nor a preset, nor a run folder; presets: "
            f"{', '.join(preset_names())}"
        )
    try:
        return _parse(data.decode(), source)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{source} is not valid TOML: {error}") from None


def _parse(text: str, what: str) -> dict[str, Any]:
    """TOML whose values can be reckoned with: no deeper than Python reaches, no longer than 63
    bits.
    """
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{what}: nested too deeply") from None
    _check_numbers(table, what)
    return table


def _check_numbers(value: Any, what: str) -> None:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        _check_numbers(each, what)
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError(f"{what}: a number of {len(str(value))} digits is more than 63 bits hold")


def _run_table(folder: Path) -> dict[str, Any]:
    newest = sorted(folder.glob("checkpoints/round-*/checkpoint.json"), reverse=True)
    for path in (*newest, folder / "run.json"):
        try:
            table = json.loads(path.read_text())["config"]
            table["run"]["out"] = str(folder)  # as it is seen from here
            return table
        except (OSError, ValueError, KeyError, TypeError):  # a damaged one: resuming skips it too
            continue
    raise ValueError(f"{folder} is a folder, but holds no run (no run.json of `twistlm train`)")


def overridden(table: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The table with `section.key=value` words written into it; a value is TOML, or a string."""
    for override in overrides:
        path, equals, value = override.partition("=")
        keys = path.strip().split(".")
        if not equals or len(keys) < 2:
            raise ValueError(
                f"{override!r}: overrides look like section.key=value, as in train.lr=3e-4"
            )
        spot = table
        for key in keys[:-1]:
            spot = spot.setdefault(key, {})
            if not isinstance(spot, dict):
                raise ValueError(f"{override!r}: {key} is a value, not a section")
        spot[keys[-1]] = _parse_value(value.strip())
    return table


def _parse_value(text: str) -> Any:
    try:
        return _parse(f"value = {text}", text[:40])["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string


def build(cls: type[T], table: Any, where: str = "") -> T:
    """A dataclass of nested tables; `where` is the section that an error names: `train.`."""
    if not isinstance(table, dict):
        raise ValueError(f"{where.rstrip('.')} must be a section, not {table!r}")
    hints = typing.get_type_hints(cls)
    for key in table:
        if key not in hints:
            close = difflib.get_close_matches(key, hints, n=1)
            hint = f"; did you mean {where}{close[0]}?" if close else "."
            raise ValueError(f"unknown key {where}{key}{hint} Legal keys: {', '.join(hints)}")
    values: dict[str, Any] = {}
    for key, value in table.items():
        if dataclasses.is_dataclass(hints[key]):
            values[key] = build(typing.cast(type, hints[key]), value, f"{where}{key}.")
        else:
            values[key] = _coerce(value, hints[key], f"{where}{key}")
    return cls(**values)


def _coerce(value: Any, hint: Any, name: str) -> Any:
    """Check one value against its annotation; a number stands for a list of one."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if isinstance(value, bool):  # `run.variant=true` is a word, not TOML's boolean
            value = str(value).lower()
        if value not in args:
            raise ValueError(f"{name} = {value!r}: use one of {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        items = list(value) if isinstance(value, list | tuple) else [value]
        inner = [args[0]] * len(items) if args[-1] is Ellipsis else list(args)
        if len(items) != len(inner):
            raise ValueError(f"{name} = {value!r}: needs {len(inner)} values")
        return tuple(_coerce(item, kind, name) for item, kind in zip(items, inner, strict=True))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    plain = dict if origin is dict else hint
    if not isinstance(value, plain) or (hint is int and isinstance(value, bool)):
        expected = plain.__name__ if isinstance(plain, type | types.GenericAlias) else str(hint)
        raise ValueError(f"{name} = {value!r}: must be {expected}, not {type(value).__name__}")
    return value
