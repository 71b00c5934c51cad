"""A process of its own for the model, so that its death ends neither the page nor what other users do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

PATIENCE = 600  # seconds for an answer: a model may be large


class ModelEnded(Exception):
    """The model's process is gone; the next question starts another."""


class Host:
    """Starts the model's process, asks it one question at a time, and starts it anew when it is gone."""

    def __init__(self, source: str, device: str, overrides: list[str], data: str | None):
        self._arguments = (source, device, overrides, data)
        self._turn = threading.Lock()
        self._process: Any = None
        self._pipe: Any = None
        self._stop: Any = None

    def ask(self, name: str, **arguments: Any) -> Iterator[Any]:
        """The parts of an answer as they come; users take turns. Closing the iterator ends the answer.

        A process that died while nobody asked is started anew and asked again; one that dies while it
        answers is told of.
        """
        with self._turn:
            for last in (False, True):
                n_parts = 0
                try:
                    for part in self._answer(name, arguments):
                        n_parts += 1
                        yield part
                    return
                except (EOFError, OSError):
                    self.close()
                    if last or n_parts:
                        raise ModelEnded(
                            "the model's process ended (killed, or out of memory); ask again and it is "
                            "started anew"
                        ) from None

    def _answer(self, name: str, arguments: dict[str, Any]) -> Iterator[Any]:
        self.start()
        self._stop.clear()
        ended = False
        try:
            self._pipe.send((name, arguments))
            while True:
                if not self._pipe.poll(PATIENCE):
                    raise EOFError
                kind, value = self._pipe.recv()
                ended = kind != "part"
                if kind == "error":
                    raise ValueError(value)
                if ended:
                    return
                yield value
        except (EOFError, OSError):
            ended = True
            raise
        finally:
            if not ended:
                self._drain()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """End the model's process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def start(self) -> None:
        """The model's process, if there is none: forked off one that has torch already and nothing else."""
        if self._process is not None and self._process.is_alive():
            return
        self.close()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["twistlm.play.models"])
        self._pipe, theirs = context.Pipe()
        self._stop = context.Event()
        arguments = (theirs, self._stop, *self._arguments)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def _drain(self) -> None:
        """A user who left: the answer is ended, so that the next one does not begin with its rest."""
        self._stop.set()
        try:
            while self._pipe.poll(PATIENCE):
                if self._pipe.recv()[0] != "part":
                    return
        except (EOFError, OSError):
            pass
        self.close()


def _serve(
    pipe: Connection, stop: Any, source: str, device: str, overrides: list[str], data: str | None
) -> None:
    """Answer questions until the page is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the page's
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from .models import Asked, Models

    models = None
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if models is None:
                models = Models(source, device, overrides, data)
            if "asked" in arguments:
                arguments["asked"] = Asked(**arguments["asked"])
            if name == "write":
                arguments["stops"] = stop.is_set
            for part in getattr(models, name)(**arguments):
                pipe.send(("part", part))
                if stop.is_set():
                    break
            pipe.send(("end", None))
        except (ValueError, OSError, FloatingPointError) as error:
            pipe.send(("error", str(error)))
