"""Where workers knock: a listening socket whose guests become sessions, each in a thread of its own.

A stranger costs one short-lived thread and a line in the log. The store in which gloo's two ends find
each other listens on the same address, and is told of to holders of the secret alone.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..config import Kind
from . import session
from .address import address_of, listen
from .events import Events
from .ranks import Cluster
from .session import Garbled, Message, Session
from .session import Kind as Say

MOST_STRANGERS = 32  # connections that may be in their challenge at the same time

Arrival = tuple[str, Session, dict[Kind, int]]  # name, session, its own K


def for_ranks(cluster: Cluster, public: bool) -> tuple[socket.socket, bytes]:
    """A door for torchrun's other ranks, who hear of it and of its secret through torchrun's store."""
    listener = listen(f"{os.environ['MASTER_ADDR']}:0", public)
    secret = secrets.token_hex(16)
    cluster.share(f"{address_of(listener)} {secret}")
    return listener, secret.encode()


class Door:
    """Lives as long as the hub; finished sessions wait in it until the hub lets them in."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        welcome: dict[str, Any],
        check_widths: Callable[[dict[Kind, int]], None],
        events: Events,
        patience: float,
    ):
        self._listener, self._secret, self._welcome = listener, secret, welcome
        self._check_widths, self._events, self._patience = check_widths, events, patience
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._barred: dict[str, str] = {}  # name -> why
        self._room = threading.BoundedSemaphore(MOST_STRANGERS)
        self._closed = False
        host = listener.getsockname()[0]
        meeting = socket.create_server((host, 0), family=listener.family)
        self._port = meeting.getsockname()[1]
        self._store = dist.TCPStore(
            host, self._port, is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=session.HANDSHAKE), master_listen_fd=meeting.detach(),
        )  # fmt: skip
        listener.settimeout(0.2)  # so that the thread sees the end
        threading.Thread(target=self._accept, daemon=True).start()

    def arrivals(self) -> list[Arrival]:
        """Those who have come in since the last call."""
        found = []
        while not self._arrived.empty():
            found.append(self._arrived.get())
        return found

    def bar(self, name: str, why: str) -> None:
        self._barred[name] = why

    def close(self) -> None:
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            if self._room.acquire(blocking=False):
                where = f"{peer[0]}:{peer[1]}"
                threading.Thread(target=self._greet, args=(sock, where), daemon=True).start()
            else:
                sock.close()

    def _greet(self, sock: socket.socket, where: str) -> None:
        try:
            sock.settimeout(session.HANDSHAKE)
            line = Session(sock, session.challenge(sock, self._secret))
        except OSError as error:
            self._events.write("stranger", where, why=str(error))
            sock.close()
            return
        finally:
            self._room.release()
        name = where
        try:
            hello = line.hear(session.HANDSHAKE)
            name = str(hello.body.get("name", where))[:64]
            widths: dict[Kind, int] = hello.body.get("widths", {})
            if why := self._objection(hello, name, widths):
                line.tell(Say.REFUSED, why=why)
                raise Garbled(why)
            line.tell(Say.WELCOME, store=self._port, **self._welcome)
            if line.hear(self._patience).kind != Say.READY:
                raise Garbled("it did not say that it is ready")
            line.open_((line.host, self._port), 0)
        except (OSError, ValueError) as error:
            self._events.write("turned away", name, why=str(error))
            line.close()
            return
        self._arrived.put((name, line, widths))

    def _objection(self, hello: Message, name: str, widths: Any) -> str | None:
        if hello.kind != Say.HELLO or not isinstance(widths, dict):
            return "a session begins with a hello"
        if not all(k in ("attn", "ffn") and isinstance(v, int) for k, v in widths.items()):
            return f"widths {widths!r}: give K for attn, ffn or both"
        try:
            self._check_widths(widths)
        except ValueError as error:
            return str(error)
        return self._barred.get(name)
