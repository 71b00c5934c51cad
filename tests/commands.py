"""The command as a user runs it, what a refusal is, and what a hand may do to files."""

import json
import os
import re
import resource
import shlex
import subprocess
import sys
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import typer

from twistlm import cli, config
from twistlm.presets import to_toml
from twistlm.system import manifest, signals


def toml(path: Path, table: dict) -> str:
    path.write_text(to_toml(table))
    return str(path)


def torchrun(n_ranks: int, *args: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n_ranks)]
    command += ["--standalone", "-m", "twistlm", *args]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


def in_process(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    """The real entry point with this process's imports."""
    monkeypatch.setattr(sys, "argv", ["twistlm", *args])
    monkeypatch.setattr(signals, "apart", lambda sentence: nullcontext())  # not in a child
    capsys.readouterr()
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    out, err = capsys.readouterr()
    return code, out, err


ENV = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "1000", "HF_HUB_OFFLINE": "1"}
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from twistlm.cli import main; main()"


def as_process(*args: str, cwd: Path, without_torch: bool = False) -> tuple[int, str, str]:
    """`python -m twistlm`, or the same in a process that cannot import torch."""
    start = ("-c", WITHOUT_TORCH) if without_torch else ("-m", "twistlm")
    done = subprocess.run(
        [sys.executable, *start, *args],
        cwd=cwd,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def children(pid: int) -> list[int]:
    """Where Linux runs, the processes that a process has started."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for path in found for word in path.read_text().split()]


def check_refusal(code: int, out: str, err: str, parts: tuple[str, ...]) -> None:
    assert "Traceback" not in out + err
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1, err  # one sentence, no stray warnings
    assert code == 2
    missing = [part for part in parts if part not in err]
    assert not missing, f"{missing} not in {err!r}"


def change(record: Path, **values: object) -> None:
    """Give a JSON file other values, as a hand would."""
    record.write_text(json.dumps(json.loads(record.read_text()) | values))


def reseal(record: Path, **values: object) -> None:
    """The same, with a hash that agrees."""
    table = json.loads(record.read_text()) | values
    record.write_text(manifest.written(manifest.sealed(table)))


@contextmanager
def limited(what: int, most: int):
    """A limit of this process, and of what it starts meanwhile."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


ROOT = Path(__file__).parent.parent
APP = typer.main.get_command(cli.app)
OVERRIDE = re.compile(r"(start\.)?(\w+)\.([\w.]+)=(.*)", re.DOTALL)


def code_blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks of a Markdown text in one of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for language, block in found if language in languages]


def shell_commands(script: str) -> list[list[str]]:
    """The words of every command: continued lines joined, no comments, split at `&&` and `;`."""
    found: list[list[str]] = []
    for line in script.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*", "", line)
        for part in re.split(r"&&|\|\||[;|&]", line):
            with suppress(ValueError):  # a quote that ends on another line
                found.append(shlex.split(part))
    return [words for words in found if words]


def is_twistlm(words: list[str]) -> bool:
    """`twistlm ...`, `.venv/bin/twistlm ...` or `... -m twistlm ...`."""
    return any(Path(word).name == "twistlm" for word in words)


def check_twistlm(words: list[str]) -> str:
    """Refuse what the command line would refuse; returns the command's name."""
    begin = next(i for i, word in enumerate(words) if Path(word).name == "twistlm") + 1
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
    mixed = [word for word in params.get("sources") or [] if "=" in word]
    for word in [*(params.get("overrides") or []), *mixed]:
        check_override(word)
    return name.removeprefix("twistlm ")


def check_preset(name: str) -> None:
    """A preset that exists, a TOML file, a run folder, or a place for one: `CONFIG`, `$what`."""
    stands_for_one = name.endswith(".toml") or name.isupper() or "$" in name
    stands_for_one |= name.startswith("runs/")
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
        # a trained start, which some values need
        config.load("demo", ["model.weights=runs/start", f"{section}.{key}={value}"])
