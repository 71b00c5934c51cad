"""The model's own process: if it dies, the page and its other users go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

PATIENCE = 600  # seconds for the next part of an answer: a model may be large


class ModelEnded(Exception):
    """The model's process is gone; the next question starts another."""


class ModelProcess:
    """Asks the model's process one question at a time, and starts it anew when it is gone."""

    def __init__(self, source: str, device: str, overrides: list[str], data: str | None):
        self._arguments = (source, device, overrides, data)
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Any = None
        self._stop: Any = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def ask(self, name: str, **arguments: Any) -> Iterator[Any]:
        """The parts of an answer as they come; users take turns. Closing the iterator ends it.

        A process that died while nobody asked is started anew without a word; one that dies while
        it answers raises ModelEnded.
        """
        with self._lock:
            for is_last in (False, True):
                begun = False
                try:
                    for part in self._answer(name, arguments):
                        begun = True
                        yield part
                    return
                except (EOFError, OSError):
                    self.close()
                    if begun or is_last:
                        raise ModelEnded(
                            "the model's process ended (killed, or out of memory); ask again and "
                            "it is started anew"
                        ) from None

    def start(self) -> None:
        """Start the process if there is none: forked off one that has imported torch already."""
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

    def close(self) -> None:
        """End the model's process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def _answer(self, name: str, arguments: dict[str, Any]) -> Iterator[Any]:
        self.start()
        self._stop.clear()
        self._pipe.send((name, arguments))
        kind = "part"
        try:
            while True:
                kind, value = self._receive()
                if kind == "error":
                    raise ValueError(value)
                if kind == "end":
                    return
                yield value
        except (
            GeneratorExit
        ):  # a user who left: the next answer must not begin with this one's rest
            self._stop.set()
            try:
                while kind == "part":
                    kind, _ = self._receive()
            except (EOFError, OSError):
                self.close()
            raise

    def _receive(self) -> tuple[str, Any]:
        if not self._pipe.poll(PATIENCE):
            raise EOFError
        return self._pipe.recv()


def _serve(
    pipe: Connection, stop: Any, source: str, device: str, overrides: list[str], data: str | None
) -> None:
    """Answer questions until the page is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the page's
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from .models import Models, TicketChoice

    models = None
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if models is None:
                models = Models(source, device, overrides, data)
            if "choice" in arguments:
                arguments["choice"] = TicketChoice(**arguments["choice"])
            for part in getattr(models, name)(**arguments):
                pipe.send(("part", part))
                if stop.is_set():
                    break
            pipe.send(("end", None))
        except (ValueError, OSError, FloatingPointError) as error:
            pipe.send(("error", str(error)))
        except Exception as error:  # out of GPU memory and the like: the model stays where it is
            pipe.send(("error", f"the model failed: {type(error).__name__}: {error}"))
