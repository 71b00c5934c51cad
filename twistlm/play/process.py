"""The model's own process: if it dies, the page and its other users go on."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any


class ModelEnded(Exception):
    """The model's process is gone; the next question starts another."""


class ModelProcess:
    """Asks the model's process one question at a time, and starts it anew when it is gone."""

    def __init__(self, source: str, device: str, overrides: list[str], data: str | None):
        self._arguments = (source, device, overrides, data)
        self._lock = threading.Lock()
        self.process: Any = None

    def ask(self, name: str, **arguments: Any) -> Iterator[Any]:
        """The parts of an answer as they come; users take turns. Closing the iterator ends it."""
        with self._lock:
            try:
                self.start()
                self._stop.clear()
                self._pipe.send((name, arguments))
                kind, value = self._pipe.recv()
                try:
                    while kind == "part":
                        yield value
                        kind, value = self._pipe.recv()
                except GeneratorExit:  # a user who left: the next answer begins after the rest
                    self._stop.set()
                    while kind == "part":
                        kind, value = self._pipe.recv()
                    raise
            except (EOFError, OSError):
                self.close()
                raise ModelEnded(
                    "the model's process ended (killed, or out of memory); ask again and it is "
                    "started anew"
                ) from None
            if kind == "error":
                raise ValueError(value)

    def start(self) -> None:
        """Start the process if there is none: forked off one that has imported torch already."""
        if self.process is not None and self.process.is_alive():
            return
        self.close()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["twistlm.play.models"])
        self._pipe, theirs = context.Pipe()
        self._stop = context.Event()
        arguments = (theirs, self._stop, *self._arguments)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self._pipe.close()
            self.process = None


def _serve(pipe: Connection, stop: Any, *of_models: Any) -> None:
    """Answer questions until the page is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the page's
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from .models import Models

    models = None
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            models = models or Models(*of_models)
            for part in getattr(models, name)(**arguments):
                pipe.send(("part", part))
                if stop.is_set():
                    break
            pipe.send(("end", None))
        except (ValueError, OSError) as error:
            pipe.send(("error", str(error)))
        except Exception as error:  # out of GPU memory and the like: the model stays where it is
            pipe.send(("error", f"the model failed: {type(error).__name__}: {error}"))
