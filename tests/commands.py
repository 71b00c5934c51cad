"""The command as a user runs it: a config file, a process or its entry point, and what a refusal looks like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from twistlm import cli


def toml(path: Path, table: dict) -> str:
    lines = []
    for section, values in table.items():
        nested = {k: v for k, v in values.items() if isinstance(v, dict)}
        lines += [f"[{section}]"] + [
            f"{k} = {json.dumps(v)}" for k, v in values.items() if k not in nested
        ]
        for name, inner in nested.items():
            lines += [f"[{section}.{name}]"] + [f"{k} = {json.dumps(v)}" for k, v in inner.items()]
    path.write_text("\n".join(lines))
    return str(path)


def torchrun(n_ranks: int, *args: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n_ranks)]
    command += [
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        "0",
        "--standalone",
        "-m",
        "twistlm",
        *args,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


def in_process(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    """The real entry point with this process's imports."""
    monkeypatch.setattr(sys, "argv", ["twistlm", *args])
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


def check_refusal(code: int, out: str, err: str, parts: tuple[str, ...]) -> None:
    assert "Traceback" not in out + err
    assert err.count("error:") == 1
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1, err  # one sentence, no stray warnings
    assert code == 2
    missing = [part for part in parts if part not in err]
    assert not missing, f"{missing} not in {err!r}"


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }
