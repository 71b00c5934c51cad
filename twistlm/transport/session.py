"""One worker's line to the hub: an authenticated socket for words, a 2-rank gloo group for tensors.

Neither torch's store nor gloo knows its peers, and gloo trusts sizes. So a line opens with a
challenge that only a holder of the run's secret can answer, every frame on it is signed with the
session's own key, and no tensor is received that a signed frame has not announced with a size
that the receiver worked out for itself. This is authentication, not encryption.

A frame: magic, kind, session, round, bytes of the JSON body, bytes and checksum of the tensor that
goes over gloo, signature; then the body.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MAGIC = b"TwL2"
HEADER = struct.Struct("!4sB16sIIQ16s16s")
MOST_BODY = 1 << 24  # bytes of JSON; a blueprint of 100 layers has 20 KB
HANDSHAKE = 10.0  # seconds for each step before a session is open
ROW = 64  # words of 8 bytes that a checksum adds up


class Kind(IntEnum):
    """What a frame says."""

    HELLO = 1  # worker: my name, my width
    WELCOME = 2  # hub: the run's config
    READY = 3  # worker: my model is built
    REFUSED = 4  # hub: go away, and why
    ROUND = 5  # hub: a blueprint; weights and tokens follow over gloo
    RESULT = 6  # worker: here comes a result
    SENT = 7  # worker: it has left
    AGAIN = 8  # either: what came does not match its checksum
    BYE = 9  # either: I am leaving


@dataclass(frozen=True)
class Message:
    """One frame, verified."""

    kind: Kind
    round: int = 0
    n_bytes: int = 0
    checksum: bytes = bytes(16)
    body: dict[str, Any] = field(default_factory=dict)


class Garbled(ConnectionError):
    """A peer that does not keep to the protocol."""


def checksum(payload: Tensor) -> bytes:
    """16 bytes that change with any bit of `payload` (uint8): sha256 over sums of 512 bytes each."""
    whole = payload.numel() // (8 * ROW) * 8 * ROW
    digest = hashlib.sha256()  # processors have instructions for it
    if whole:
        sums = payload[:whole].view(torch.int64).view(-1, ROW).sum(1)
        digest.update(sums.numpy().data)
    digest.update(payload[whole:].numpy().data)
    return digest.digest()[:16]


def staged(tensor: Tensor) -> Tensor:
    """The tensor in host memory, pinned when it comes from a GPU: gloo reads nothing else."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def _tag(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), "sha256")


def challenge(sock: socket.socket, secret: bytes) -> bytes:
    """The hub's side: the session's key material, once the peer has shown that it knows the secret."""
    mine = secrets.token_bytes(32)
    sock.sendall(MAGIC + mine)
    answer = _read(sock, 64)
    theirs, proof = answer[:32], answer[32:]
    if not hmac.compare_digest(proof, _tag(secret, b"worker", mine, theirs)):
        sock.sendall(bytes(32))
        raise Garbled("it does not know the run's secret")
    sock.sendall(_tag(secret, b"hub", mine, theirs))
    return _tag(secret, b"session", mine, theirs)


def answer(sock: socket.socket, secret: bytes) -> bytes:
    """The worker's side: it shows that it knows the secret, and wants the same of the hub."""
    opening = _read(sock, 36)
    if opening[:4] != MAGIC:
        raise Garbled("it is no twistlm hub of this version")
    theirs, mine = opening[4:], secrets.token_bytes(32)
    sock.sendall(mine + _tag(secret, b"worker", theirs, mine))
    proof = _read(sock, 32)
    if not hmac.compare_digest(proof, _tag(secret, b"hub", theirs, mine)):
        raise PermissionError("it has another secret")
    return _tag(secret, b"session", theirs, mine)


def _read(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        more = sock.recv(n - len(data))
        if not more:
            raise Garbled("it closed the connection before a session was open")
        data += more
    return data


def keep_alive_(sock: socket.socket) -> None:
    """A peer whose link is cut is noticed in 11 seconds, also while nothing is said."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not everywhere
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Session:
    """A line after its challenge; `open_` adds the gloo group. Closing it refuses whatever is late."""

    def __init__(self, sock: socket.socket, key: bytes):
        self.sock, self.id, self._key = sock, key[:16], key[16:]
        self.host = sock.getsockname()[0]  # the address by which the peer reaches this side
        self.n_sent = self.n_received = 0  # bytes of tensors
        self._unread = b""
        self._group: Any = None
        sock.settimeout(HANDSHAKE)
        keep_alive_(sock)

    def open_(self, store_at: tuple[str, int], rank: int) -> None:
        """Meet in the hub's store and form the group; the hub is rank 0."""
        wait = timedelta(seconds=HANDSHAKE)
        with _as_connection_error():
            store = dist.TCPStore(*store_at, is_master=False, timeout=wait)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.host)]
            options._timeout, options._threads = wait, 1
            mine = dist.PrefixStore(self.id.hex(), store)
            self._group = dist.ProcessGroupGloo(mine, rank, 2, options)
        self._peer = 1 - rank

    def tell(self, kind: Kind, round: int = 0, payload: Tensor | None = None, **body: Any) -> None:
        """Say something; `payload` is only announced."""
        n_bytes, check = 0, bytes(16)
        if payload is not None:
            n_bytes, check = payload.numel(), checksum(payload)
        words = json.dumps(body).encode()
        parts = (MAGIC, kind, self.id, round, len(words), n_bytes, check)
        unsigned = HEADER.pack(*parts, bytes(16))
        signature = _tag(self._key, unsigned, words)[:16]
        self.sock.sendall(unsigned[:-16] + signature + words)

    def heard(self) -> list[Message]:
        """What has come, without waiting for more; the end of the line only after its last words."""
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
            self.sock.settimeout(HANDSHAKE)
        found = list(self._frames())
        if gone is not None and not found:
            raise gone
        return found

    def hear(self, timeout: float | None) -> Message:
        """Wait for one message."""
        self.sock.settimeout(timeout)
        try:
            while (found := self._frame()) is None:
                data = self.sock.recv(1 << 16)
                if not data:
                    raise ConnectionError("it closed the connection")
                self._unread += data
            return found
        finally:
            if not self.closed:
                self.sock.settimeout(HANDSHAKE)

    def _frames(self) -> Iterator[Message]:
        while (found := self._frame()) is not None:
            yield found

    def _frame(self) -> Message | None:
        if len(self._unread) < HEADER.size:
            return None
        header = self._unread[: HEADER.size]
        magic, kind, session, round, n_body, n_bytes, check, signature = HEADER.unpack(header)
        if magic != MAGIC or session != self.id or n_body > MOST_BODY or kind not in set(Kind):
            raise Garbled("it sent something that is no frame of this session")
        end = HEADER.size + n_body
        if len(self._unread) < end:
            return None
        words, self._unread = self._unread[HEADER.size : end], self._unread[end:]
        expected = _tag(self._key, header[:-16] + bytes(16), words)[:16]
        if not hmac.compare_digest(signature, expected):
            raise Garbled("it sent a frame whose signature is wrong")
        try:
            body = json.loads(words)
        except ValueError:
            raise Garbled("it sent a frame that is no JSON") from None
        return Message(Kind(kind), round, n_bytes, check, body if isinstance(body, dict) else {})

    def send(self, payload: Tensor, tag: int) -> Any:
        """Start sending bytes; the tensor must stay as it is until the work is done, and the work be kept."""
        self.n_sent += payload.numel()
        with _as_connection_error():
            return self._group.send([payload], self._peer, tag)

    def receive(self, payload: Tensor, tag: int) -> Any:
        """Start receiving exactly these bytes; gloo cuts the line if the work is let go before its end."""
        self.n_received += payload.numel()
        with _as_connection_error():
            return self._group.recv([payload], self._peer, tag)

    def leave(self) -> None:
        """Say goodbye, and cut short what is on its way."""
        with suppress(OSError):
            self.tell(Kind.BYE)
            self.sock.shutdown(socket.SHUT_WR)
        self._group = None

    def drain(self, seconds: float) -> None:
        """Read until the peer hangs up: a socket that is closed over unread words loses its own."""
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
