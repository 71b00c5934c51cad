"""Where workers connect: a listening socket whose connections become sessions, each in its own thread.

A stranger costs one short-lived thread and a line in the log. The store in which gloo's two ends find
each other listens on the same address; only holders of the secret are told its port.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ..config import Kind
from . import handshake
from .address import address_of, listen
from .events import Events
from .handshake import ProtocolError
from .protocol import Hello, Message, Ready, Refusal, RunDescription, Welcome
from .ranks import Cluster
from .session import Session

MOST_STRANGERS = 32  # connections that may be in their handshake at the same time

Arrival = tuple[str, Session, dict[Kind, int]]  # name, session, its own K


def for_ranks(cluster: Cluster, public: bool) -> tuple[socket.socket, bytes]:
    """A listening socket for torchrun's other ranks, who read its address and secret in torchrun's store."""
    listener = listen(f"{os.environ['MASTER_ADDR']}:0", public)
    secret = secrets.token_hex(16)
    cluster.share(f"{address_of(listener)} {secret}")
    return listener, secret.encode()


class Listener:
    """Lives as long as the hub; sessions that are open wait in it until the hub takes them in."""

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        run: RunDescription,
        check_widths: Callable[[dict[Kind, int]], None],
        events: Events,
        patience: float,
    ):
        self._sock, self._secret, self._run = sock, secret, run
        self._check_widths, self._events, self._patience = check_widths, events, patience
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._barred: dict[str, str] = {}  # name -> why
        self._room = threading.BoundedSemaphore(MOST_STRANGERS)
        self._closed = False
        host = sock.getsockname()[0]
        meeting = socket.create_server((host, 0), family=sock.family)
        self._port = meeting.getsockname()[1]
        self._store = dist.TCPStore(
            host,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=handshake.STEP),
            master_listen_fd=meeting.detach(),
        )
        sock.settimeout(0.2)  # so that the thread sees the end
        threading.Thread(target=self._accept, daemon=True).start()

    def arrivals(self) -> list[Arrival]:
        """Those who have come in since the last call."""
        found = []
        while not self._arrived.empty():
            found.append(self._arrived.get())
        return found

    def bar(self, name: str, why: str) -> None:
        """Refuse whoever comes under this name."""
        self._barred[name] = why

    def close(self) -> None:
        self._closed = True
        self._sock.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, peer = self._sock.accept()
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
            sock.settimeout(handshake.STEP)
            session = Session(sock, handshake.challenge(sock, self._secret))
        except OSError as error:
            self._events.write("stranger", where, why=str(error))
            sock.close()
            return
        finally:
            self._room.release()
        name = where
        try:
            hello = self._introduced(session)
            name = hello.name[:64] or where
            if why := self._objection(hello, name):
                session.tell(Refusal(why))
                raise ProtocolError(why)
            session.tell(Welcome(self._port, self._run))
            if not isinstance(session.hear(self._patience), Ready):
                raise ProtocolError("it did not say that it is ready")
            session.open_((session.host, self._port), 0)
        except (OSError, ValueError) as error:
            self._events.write("turned away", name, why=str(error))
            session.close()
            return
        self._arrived.put((name, session, hello.widths))

    def _introduced(self, session: Session) -> Hello:
        """The worker's hello; one that is wrong is told so."""
        try:
            message: Message = session.hear(handshake.STEP)
            if isinstance(message, Hello):
                return message
            why = "a session begins with a hello"
        except ProtocolError as error:
            why = str(error)
        session.tell(Refusal(why))
        raise ProtocolError(why)

    def _objection(self, hello: Hello, name: str) -> str | None:
        try:
            self._check_widths(hello.widths)
        except ValueError as error:
            return str(error)
        return self._barred.get(name)
