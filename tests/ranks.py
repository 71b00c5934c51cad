"""Ranks as real processes that start in a second: forked from a server that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from twistlm.system.signals import Ended

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["twistlm.training.rounds"])


def start(n: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[BaseProcess]:
    """`function(*args)` on n ranks; what it raises is the last line of `folder/rank-N.txt`, exit code 2."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        SERVER.Process(target=_rank, args=(i, n, port, folder, function, args)) for i in range(n)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def finish(ranks: list[BaseProcess], folder: Path, timeout: float = 240) -> None:
    for i, rank in enumerate(ranks):
        rank.join(timeout)
        assert rank.exitcode == 0, said(folder, i)


def said(folder: Path, rank: int) -> str:
    return (folder / f"rank-{rank}.txt").read_text()


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
