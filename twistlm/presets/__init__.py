"""Configs as text: TOML files and `section.key=value` words, read into any dataclass."""

import dataclasses
import json
import os
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..fields import WHOLE, check_key

T = TypeVar("T")
PRESETS = Path(__file__).parent


def preset_names() -> list[str]:
    """The presets that ship with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def read_table(source: str) -> dict[str, Any]:
    """The table of a preset, of a TOML file, or of a run folder's newest checkpoint.

    A file with `base = "PRESET"` says only what differs from that preset; with another `model.type`
    nothing is left of the preset's `model.config`.
    """
    path = Path(source)
    if source in preset_names():
        path = PRESETS / f"{source}.toml"
    elif path.is_dir():
        return _run_table(path)
    elif not path.is_file():
        known = ", ".join(preset_names())
        raise ValueError(f"{source!r} is no TOML file, no run folder and no preset ({known})")
    try:
        table = tomllib.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, nested too deeply
        raise ValueError(f"{source} is not valid TOML: {error}") from None
    if (base := table.pop("base", None)) is None:
        return table
    if base == source or base not in preset_names():
        legal = ", ".join(name for name in preset_names() if name != source)
        raise ValueError(f"{source}: base = {base!r}: a preset is a base: {legal}")
    both = _merged(below := read_table(base), table)
    if isinstance(both["model"], dict) and both["model"]["type"] != below["model"]["type"]:
        both["model"]["config"] = table["model"].get("config", {})
    return both


def _merged(below: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """What a table says, in tables within it too, and all else from below."""
    both = below | table
    for key in below.keys() & table.keys():
        if isinstance(below[key], dict) and isinstance(table[key], dict):
            both[key] = _merged(below[key], table[key])
    return both


def _run_table(folder: Path) -> dict[str, Any]:
    newest = sorted(folder.glob("checkpoints/round-*/checkpoint.json"), reverse=True)
    for path in (*newest, folder / "run.json"):
        try:
            table = json.loads(path.read_text())["config"]
            table["run"]["out"] = str(folder)  # as it is seen from here
        except (OSError, ValueError, KeyError, TypeError):  # a damaged one: resuming skips it too
            continue
        return of_today(table)
    raise ValueError(f"{folder} is a folder, but holds no run (no run.json of `twistlm train`)")


def of_today(table: dict[str, Any]) -> dict[str, Any]:
    """A table of a run's record without what there is no more; nothing else would read it alike."""
    table = {name: values for name, values in table.items() if name != "hub"}
    blocks = dict(table.get("blocks", {}))
    by_rank = blocks.pop("common_by", "index") == "rank"
    if by_rank and (blocks.get("common_attn") or blocks.get("common_ffn")):
        raise ValueError("blocks.common_by = 'rank' is no more: use a commit of 2026-11-18")
    if blocks.get("deal") == "balanced":  # as fair over many rounds
        blocks["deal"] = "random"
    return table | {"blocks": blocks}


def overridden(table: dict[str, Any], overrides: Sequence[str], cls: type) -> dict[str, Any]:
    """The table of a dataclass with `section.key=value` words written into it.

    A value is TOML, or a string; where the key is text, what TOML reads as a number is, too.
    """
    for override in overrides:
        path, equals, value = override.partition("=")
        keys = path.strip().split(".")
        if not equals or len(keys) < 2:
            raise ValueError(f"{override!r}: give section.key=value, as in train.lr=3e-4")
        spot, hint = table, _hint(cls, keys)
        for key in keys[:-1]:
            spot = spot.setdefault(key, {})
            if not isinstance(spot, dict):
                raise ValueError(f"{override!r}: {key} is a value, not a section")
        spot[keys[-1]] = _parse_value(value.strip(), hint in (str, tuple[str, ...]))
    return table


def _hint(cls: Any, keys: Sequence[str]) -> Any:
    """The annotation of a key of nested dataclasses; None below them."""
    for key in keys:
        cls = typing.get_type_hints(cls).get(key) if dataclasses.is_dataclass(cls) else None
    return cls


def to_toml(table: dict[str, Any], header: str = "") -> str:
    """A config's table as a TOML file: its sections, and in them values and one level of tables."""
    lines, parts = [f"# {line}" for line in header.splitlines()], {}
    for section, values in table.items():
        parts[section] = {k: v for k, v in values.items() if not isinstance(v, dict)}
        parts |= {f"{section}.{k}": v for k, v in values.items() if isinstance(v, dict)}
    for name, values in parts.items():
        if values:
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {as_toml(value, f'{name}.{key}')}" for key, value in values.items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def as_toml(value: Any, key: str) -> str:
    """A value as TOML; numbers and arrays of numpy and torch, and paths, as their plain values."""
    value = value.tolist() if hasattr(value, "tolist") else value
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    match value:
        case str() | int():  # JSON writes them alike, but for DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case float():  # inf and nan are JSON's other words
            return repr(float(value))
        case list() | tuple() | range():
            return f"[{', '.join(as_toml(each, key) for each in value)}]"
        case Mapping():
            said = (
                f"{as_toml(str(k), key)} = {as_toml(v, f'{key}.{k}')}" for k, v in value.items()
            )
            return f"{{{', '.join(said)}}}"
    legal = "text, numbers, True, False, and lists and tables of them"
    raise ValueError(f"{key}: a config holds {legal}, but no {type(value).__name__}")


def _parse_value(text: str, is_text: bool) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise ValueError(f"{text[:40]}: nested too deeply") from None
    except ValueError:
        return text  # a bare word is a string
    return text if is_text and not isinstance(value, str | list | dict) else value


def build(cls: type[T], table: Any, where: str = "") -> T:
    """A dataclass of nested tables; `where` is the section that an error names: `train.`."""
    if not isinstance(table, dict):
        raise ValueError(f"{where.rstrip('.')} must be a section, not {table!r}")
    hints = typing.get_type_hints(cls)
    for key in table:
        check_key(key, hints, where)
    return cls(**{k: _coerce(value, hints[k], f"{where}{k}") for k, value in table.items()})


def _coerce(value: Any, hint: Any, name: str) -> Any:
    """Check one value against its annotation; a number stands for a list of one."""
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, f"{name}.")
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
    if hint in (float, str) and isinstance(value, int | float) and not isinstance(value, bool):
        return hint(value)
    plain = origin or hint
    if not isinstance(value, plain) or (hint is int and isinstance(value, bool)):
        kind = type(value).__name__
        raise ValueError(f"{name} = {value!r}: must be {plain.__name__}, not {kind}")
    if hint is int and abs(value) > WHOLE:
        raise ValueError(f"{name}: a number of {len(str(value))} digits, legal are 63 bits")
    return value
