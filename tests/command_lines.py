"""Command lines in documents: found in code blocks, parsed as the command line would, not run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import typer

from twistlm import cli, config

ROOT = Path(__file__).parent.parent
APP = typer.main.get_command(cli.app)
OVERRIDE = re.compile(r"(start\.)?(\w+)\.([\w.]+)=(.*)", re.DOTALL)


def code_blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks of a Markdown text in one of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for language, block in found if language in languages]


def shell_commands(script: str) -> list[list[str]]:
    """The words of every single command: continued lines joined, comments gone, `&&` and `;` split."""
    found: list[list[str]] = []
    for line in script.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*", "", line)
        for part in re.split(r"&&|\|\||[;|&]", line):
            if words := _split(part):
                found.append(words)
    return found


def _split(part: str) -> list[str]:
    try:
        return shlex.split(part)
    except ValueError:  # a quote that ends on another line
        return []


def is_twistlm(words: list[str]) -> bool:
    """`twistlm ...`, `.venv/bin/twistlm ...` or `... -m twistlm ...`."""
    return any(_is_program(words, i) for i in range(len(words)))


def _is_program(words: list[str], i: int) -> bool:
    return Path(words[i]).name == "twistlm"


def check_twistlm(words: list[str]) -> str:
    """Refuse what the command line would refuse; returns the command's name."""
    begin = next(i for i in range(len(words)) if _is_program(words, i)) + 1
    rest, command, name = words[begin:], APP, "twistlm"
    while hasattr(command, "commands"):
        assert rest, f"{name}: of what?"
        assert rest[0] in command.commands, f"{name} has no command {rest[0]}"
        name, command, rest = f"{name} {rest[0]}", command.commands[rest[0]], rest[1:]
    try:
        params = command.make_context(name, list(rest)).params
    except Exception as error:
        raise AssertionError(f"{name}: {error} in: {' '.join(words)}") from None
    if "preset" in params:
        check_preset(params["preset"])
    given = [word for key in ("overrides", "names", "sources") for word in params.get(key) or []]
    for word in given:
        if "=" in word:
            check_override(word)
        else:
            assert "overrides" not in params, (
                f"{word} is no section.key=value in: {' '.join(words)}"
            )
    return name.removeprefix("twistlm ")


def check_preset(name: str) -> None:
    """A preset that exists, a TOML file, or a place for one: `CONFIG`, `$what`."""
    stands_for_one = name.endswith(".toml") or name.isupper() or "$" in name
    assert stands_for_one or name in config.preset_names(), f"there is no preset {name}"


def check_override(word: str) -> None:
    """A key that exists and, where it is given, a legal value."""
    match = OVERRIDE.fullmatch(word)
    assert match, f"{word} is no section.key=value"
    _, section, key, value = match.groups()
    known = config.to_dict(config.Config())
    assert section in known, f"there is no section {section} ({word})"
    assert key.split(".")[0] in known[section], f"there is no key {section}.{key}"
    if not ("$" in value or value.isupper()):
        config.load("demo", [f"{section}.{key}={value}"])
