"""What a number needs beside it: the command, the code and the machine that made it."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch


def describe_run() -> dict[str, Any]:
    packages = ("twistlm", "torch", "transformers", "tokenizers", "safetensors", "numpy")
    versions = {name: version(name) for name in packages}
    versions["python"] = platform.python_version()
    script = Path(sys.argv[0])
    # of `python -m twistlm` it is twistlm/__main__.py
    program = f"python -m {script.parent.name}" if script.stem == "__main__" else script.stem
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": f"{program} {shlex.join(sys.argv[1:])}",
        "git": git_hash(),
        "versions": versions,
        "device": gpu or f"{platform.machine()} cpu, {torch.get_num_threads()} threads",
    }


@cache  # of the code that runs: a clone may change while a long process has its modules in memory
def git_hash() -> str:
    """Commit of the twistlm source, `-dirty` when it was changed; `unknown` outside a clone."""
    here = Path(__file__).parents[2]
    if not (here / ".git").exists():  # an installed wheel, perhaps in somebody else's clone
        return "unknown"
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    how: dict = {"cwd": here, "stderr": subprocess.DEVNULL, "text": True, "timeout": 10}
    try:
        return subprocess.check_output(words, **how).strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


@cache  # a package's metadata takes milliseconds to read, and points ask for every cell
def version(name: str) -> str:
    """The version of an installed package, or `unknown`."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
