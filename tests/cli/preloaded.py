"""`python -m twistlm ...` in fresh processes, without waiting for torch and transformers each time.

Run as a script it imports those two, and nothing of twistlm, then forks a child for every line of
JSON on its standard input and answers with its process id. The child imports twistlm and runs it as
`__main__`.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path


class Forked:
    """One command; in a folder of its own are `stdout`, `stderr`, and at the end `code`."""

    def __init__(self, pid: int, logs: Path):
        self.pid, self.logs = pid, logs

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        path = self.logs / "code"
        return int(path.read_text()) if path.is_file() else None

    def wait(self, seconds: float) -> int:
        until = time.monotonic() + seconds
        while (code := self.poll()) is None:
            assert time.monotonic() < until, f"{self.pid} still runs: {self.output}"
            time.sleep(0.02)
        return code

    def communicate(self, seconds: float) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command that ends by itself."""
        code = self.wait(seconds)
        return code, (self.logs / "stdout").read_text(), (self.logs / "stderr").read_text()

    @property
    def output(self) -> str:
        return (self.logs / "stdout").read_text() + (self.logs / "stderr").read_text()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """No process outlives its test."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Preloaded:
    """The forking process, for tests to call."""

    def __init__(self, folder: Path):
        env = {"OMP_NUM_THREADS": "1", "COLUMNS": "1000", "HF_HUB_OFFLINE": "1"}
        self.folder, self.numbers = folder, itertools.count()
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *args: str, cwd: Path, **env: str) -> Forked:
        """Run `twistlm args` in a folder, with these variables added to the environment."""
        logs = self.folder / str(next(self.numbers))
        logs.mkdir()
        self.process.stdin.write(json.dumps([args, str(cwd), str(logs), env]) + "\n")
        self.process.stdin.flush()
        return Forked(int(self.process.stdout.readline()), logs)

    def close(self) -> None:
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0


def run() -> int:
    """Run twistlm as a script; its exit code."""
    try:
        runpy.run_module("twistlm", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def child(args: list[str], cwd: str, logs: str, env: dict[str, str]) -> None:
    """End as Python does, but let torch's thousands of objects be."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{logs}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = ["twistlm", *args]
    code = run()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    Path(logs, "unfinished").write_text(str(code))
    Path(logs, "unfinished").rename(Path(logs, "code"))
    os._exit(code)


def serve() -> None:
    import torch
    import transformers.generation
    import transformers.modeling_utils
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    torch.set_num_threads(1)
    assert "twistlm" not in sys.modules
    gc.freeze()  # children need not look at what stands already
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they leave nothing to wait for
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            child(*json.loads(line))
        print(pid, flush=True)
    os._exit(0)


if __name__ == "__main__":
    serve()
