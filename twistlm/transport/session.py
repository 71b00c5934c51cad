"""One worker's session with the hub: an authenticated socket for messages, a 2-rank gloo group for tensors.

Neither torch's store nor gloo knows its peers, and gloo trusts sizes. So a session opens with a
handshake that only a holder of the run's secret can finish, every frame of it is signed with the
session's own key, and no tensor is received that a signed message has not announced with a size
that the receiver worked out for itself.

A frame: magic, the message's code, session, bytes of the JSON body, signature; then the body.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import handshake, protocol
from .handshake import MAGIC, ProtocolError
from .protocol import CODES, Goodbye, Message

HEADER = struct.Struct("!4sB16sI16s")
MOST_BODY = 1 << 24  # bytes of JSON; a blueprint of 100 layers has 20 KB


def staged(tensor: Tensor) -> Tensor:
    """The tensor in host memory, pinned when it comes from a GPU: gloo reads nothing else."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def keep_alive_(sock: socket.socket) -> None:
    """A peer whose link is cut is noticed in 11 seconds, also while nothing is sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not everywhere
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Session:
    """A connection after its handshake; `open_` adds the gloo group. Closing it refuses whatever is late."""

    def __init__(self, sock: socket.socket, key: bytes):
        self.sock, self.id, self._key = sock, key[:16], key[16:]
        self.host = sock.getsockname()[0]  # the address by which the peer reaches this side
        self.n_sent = self.n_received = 0  # bytes of tensors
        self._unread = b""
        self._group: Any = None
        sock.settimeout(handshake.STEP)
        keep_alive_(sock)

    def open_(self, store_at: tuple[str, int], rank: int) -> None:
        """Meet in the hub's store and form the group; the hub is rank 0."""
        wait = timedelta(seconds=handshake.STEP)
        with _as_connection_error():
            store = dist.TCPStore(*store_at, is_master=False, timeout=wait)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.host)]
            options._timeout, options._threads = wait, 1
            mine = dist.PrefixStore(self.id.hex(), store)
            self._group = dist.ProcessGroupGloo(mine, rank, 2, options)
        self._peer = 1 - rank

    def tell(self, message: Message) -> None:
        """Send one message; the tensors that it announces are sent by `send`."""
        body = protocol.encode(message)
        unsigned = HEADER.pack(MAGIC, CODES[type(message)], self.id, len(body), bytes(16))
        signature = handshake.sign(self._key, unsigned, body)[:16]
        self.sock.sendall(unsigned[:-16] + signature + body)

    def heard(self) -> list[Message]:
        """The messages that have come, without waiting; the end of the connection only after the last."""
        gone: OSError | None = None
        self.sock.settimeout(0)
        try:
            data = self.sock.recv(1 << 20)
            self._unread += data
            gone = None if data else ConnectionError("it closed the connection")
        except BlockingIOError:
            pass
        except OSError as error:
            gone = error
        finally:
            self.sock.settimeout(handshake.STEP)
        found = list(self._messages())
        if gone is not None and not found:
            raise gone
        return found

    def hear(self, timeout: float | None) -> Message:
        """Wait for one message."""
        self.sock.settimeout(timeout)
        try:
            while (found := self._message()) is None:
                data = self.sock.recv(1 << 16)
                if not data:
                    raise ConnectionError("it closed the connection")
                self._unread += data
            return found
        finally:
            if not self.closed:
                self.sock.settimeout(handshake.STEP)

    def _messages(self) -> Iterator[Message]:
        while (found := self._message()) is not None:
            yield found

    def _message(self) -> Message | None:
        if len(self._unread) < HEADER.size:
            return None
        header = self._unread[: HEADER.size]
        magic, code, session, n_body, signature = HEADER.unpack(header)
        if magic != MAGIC or session != self.id or n_body > MOST_BODY:
            raise ProtocolError("it sent something that is no frame of this session")
        end = HEADER.size + n_body
        if len(self._unread) < end:
            return None
        body, self._unread = self._unread[HEADER.size : end], self._unread[end:]
        expected = handshake.sign(self._key, header[:-16] + bytes(16), body)[:16]
        if not hmac.compare_digest(signature, expected):
            raise ProtocolError("it sent a frame whose signature is wrong")
        try:
            return protocol.decode(code, body)
        except ValueError as error:  # also: no JSON
            raise ProtocolError(f"it sent a wrong message: {error}") from None

    def send(self, payload: Tensor, tag: int) -> Any:
        """Start sending bytes; the tensor must stay as it is until the work is done, and the work be kept."""
        self.n_sent += payload.numel()
        with _as_connection_error():
            return self._group.send([payload], self._peer, tag)

    def receive(self, payload: Tensor, tag: int) -> Any:
        """Start receiving exactly these bytes; gloo cuts the connection if the work is let go before its end."""
        self.n_received += payload.numel()
        with _as_connection_error():
            return self._group.recv([payload], self._peer, tag)

    def leave(self) -> None:
        """Say goodbye, and cut short what is on its way."""
        with suppress(OSError):
            self.tell(Goodbye())
            self.sock.shutdown(socket.SHUT_WR)
        self._group = None

    def drain(self, seconds: float) -> None:
        """Read until the peer closes: a socket that is closed over unread bytes loses its own last ones."""
        with suppress(OSError):
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                self.sock.settimeout(left)
                if not self.sock.recv(1 << 16):
                    break

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0

    def close(self) -> None:
        self._group = None  # gloo closes the pair: what is on its way is lost
        self.sock.close()


def wait(work: Any, seconds: float) -> None:
    """Wait for a transfer; a dead, silent or cut-off peer is a ConnectionError."""
    with _as_connection_error():
        work.wait(timedelta(seconds=max(seconds, 0.05)))


@contextmanager
def _as_connection_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what gloo and the store raise
        what = "timed out" if "imed out" in str(error) else "was cut off"
        raise ConnectionError(f"a transfer {what}") from None
