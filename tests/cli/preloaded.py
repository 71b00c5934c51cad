"""`python -m twistlm ...` in fresh processes, without waiting for torch and transformers each time.

Run as a script it imports those two, and nothing of twistlm, then forks a child for every line of JSON on
its standard input: (arguments, working directory, files for stdout and stderr). The child imports twistlm and
runs it as `__main__`; its exit code is the answer.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path


class Preloaded:
    """The forking process, for tests to call."""

    def __init__(self, env: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, cwd: Path, logs: Path) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of one command; `logs` is a folder outside of `cwd`."""
        out, err = logs / "stdout", logs / "stderr"
        request = [args, str(cwd), str(out), str(err)]
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        return code, out.read_text(), err.read_text()

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


def leave(code: int) -> None:
    """End this process as Python does, but let torch's thousands of objects be."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    import torch
    import transformers.generation
    import transformers.modeling_utils
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    torch.set_num_threads(1)
    assert "twistlm" not in sys.modules
    gc.freeze()  # children need not look at what stands already
    for line in sys.stdin:
        args, cwd, *files = json.loads(line)
        if (pid := os.fork()) == 0:
            for descriptor, file in zip((1, 2), files, strict=True):
                opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(opened, descriptor)
            os.chdir(cwd)
            sys.argv = ["twistlm", *args]
            leave(run())
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    leave(0)


if __name__ == "__main__":
    serve()
