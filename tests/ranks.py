"""Runs as real processes that start in a second: forked from a server with all imports."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from twistlm.system.signals import Ended

SERVER = multiprocessing.get_context("forkserver")  # one for each pytest process
PRELOADED = ["twistlm.training.rounds", "twistlm.cli", "conftest", "checkpoints"]
PRELOADED += ["transformers.models.gpt2.modeling_gpt2"]  # which the first model would import
SERVER.set_forkserver_preload(PRELOADED)

# 400 ports for each of pytest's processes, beyond those of Ray's workers (10002 to 19999)
_SHARE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 30
_PORTS = iter(range(20000 + 400 * _SHARE, 20400 + 400 * _SHARE))


def start(n: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[BaseProcess]:
    """`function(*args)` on n ranks; an error is the last line of `folder/rank-N.txt`, code 2."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    ranks = [
        SERVER.Process(target=_rank, args=(i, n, port, folder, function, args)) for i in range(n)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def launch(n: int, folder: Path, table: dict) -> BaseProcess:
    """One training whose ranks are children of one process, as torchrun has them."""
    port = free_port()
    args = ([{"table": table}], [port])
    launcher = SERVER.Process(target=_launch, args=(n, port, folder, _train_all, args))
    launcher.start()
    return launcher


def free_port() -> int:
    """A port below those that the kernel gives to connections, never the same one twice.

    A port that was asked of the kernel and closed again may be some connection's a moment later.
    """
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("every port of this process's share was used")


def wait_for(seen: Callable[[], Any], seconds: float = 120.0, why: Callable[[], Any] = str) -> Any:
    """Until `seen()` is true, with its value."""
    end = time.monotonic() + seconds
    while not (found := seen()):
        assert time.monotonic() < end, f"waited {seconds} s in vain: {why()}"
        time.sleep(0.01)
    return found


def finish(ranks: list[BaseProcess], folder: Path, timeout: float = 240) -> None:
    for i, rank in enumerate(ranks):
        rank.join(timeout)
        assert rank.exitcode == 0, said(folder, i)


def said(folder: Path, rank: int) -> str:
    return (folder / f"rank-{rank}.txt").read_text()


def train_all(n: int, folder: Path, jobs: list[dict[str, Any]]) -> list[BaseProcess]:
    """Several trainings in turn on the same n ranks, each a `table` with `piece`, `resume`."""
    return start(n, folder, _train_all, jobs, [free_port() for _ in jobs])


def _train_all(jobs: list[dict[str, Any]], ports: list[int]) -> None:
    from twistlm import config
    from twistlm.training import rounds
    from twistlm.training.engines import sharded

    for job, port in zip(jobs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        sharded.PIECE = job.get("piece", sharded.PIECE)
        rounds.train(config.from_dict(job["table"]), resume=job.get("resume", False), quiet=True)


def twistlm(output: Path, *args: str) -> BaseProcess:
    """The command `twistlm ARGS` in a process of its own, which writes to a file or a pipe."""
    process = SERVER.Process(target=_command, args=(output, args))
    process.start()
    return process


def script(folder: Path, code: str, *args: object) -> tuple[int, str]:
    """The exit code and the output of a script, in a process that has imported torch and twistlm
    and done nothing with them."""
    process = SERVER.Process(target=_script, args=(folder, code, [*map(str, args)]))
    process.start()
    process.join(240)
    assert process.exitcode in (0, -signal.SIGKILL), (folder / "script.err").read_text()
    return process.exitcode, (folder / "script.txt").read_text()


def _script(folder: Path, code: str, args: list[str]) -> None:
    for number, name in ((1, "script.txt"), (2, "script.err")):
        with (folder / name).open("w") as file:
            os.dup2(file.fileno(), number)
    sys.argv = ["-c", *args]
    exec(code, {"__name__": "__main__"})


def _launch(n: int, port: int, folder: Path, function: Callable, args: tuple) -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    for i in range(n):
        if not os.fork():
            try:
                _rank(i, n, port, folder, function, args)
            finally:
                os._exit(0)
    os.wait()


def _rank(rank: int, n: int, port: int, folder: Path, function: Callable, args: tuple) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    log = (folder / f"rank-{rank}.txt").open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        function(*args)
    except (ValueError, OSError, Ended) as error:  # what the command turns into a sentence
        print(error, file=log)
        sys.exit(getattr(error, "code", 2))


def _command(output: Path, args: tuple[str, ...]) -> None:
    from twistlm import cli

    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["twistlm", *args]
    cli.main()
