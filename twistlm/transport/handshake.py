"""How two processes find out that both know the run's secret, before either believes the other.

Both sides send a random number, and prove with it that they hold the secret without showing it. The
session's key comes from both numbers, so a recording of one session opens no other. This is
authentication, not encryption.
"""

from __future__ import annotations

import hmac
import secrets
import socket

MAGIC = b"TwL3"  # the version of the protocol: another one is refused here
STEP = 10.0  # seconds for each step before a session is open


class ProtocolError(ConnectionError):
    """A peer that does not keep to the protocol."""


def sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def challenge(sock: socket.socket, secret: bytes) -> bytes:
    """The hub's side: the session's key, once the peer has shown that it knows the secret."""
    mine = secrets.token_bytes(32)
    sock.sendall(MAGIC + mine)
    answer = _read(sock, 64)
    theirs, proof = answer[:32], answer[32:]
    if not hmac.compare_digest(proof, sign(secret, b"worker", mine, theirs)):
        sock.sendall(bytes(32))
        raise ProtocolError("it does not know the run's secret")
    sock.sendall(sign(secret, b"hub", mine, theirs))
    return sign(secret, b"session", mine, theirs)


def answer(sock: socket.socket, secret: bytes) -> bytes:
    """The worker's side: it shows that it knows the secret, and wants the same of the hub."""
    opening = _read(sock, 36)
    if opening[:4] != MAGIC:
        raise ProtocolError("it is no twistlm hub of this version")
    theirs, mine = opening[4:], secrets.token_bytes(32)
    sock.sendall(mine + sign(secret, b"worker", theirs, mine))
    proof = _read(sock, 32)
    if not hmac.compare_digest(proof, sign(secret, b"hub", theirs, mine)):
        raise PermissionError("it has another secret")
    return sign(secret, b"session", theirs, mine)


def _read(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        more = sock.recv(n - len(data))
        if not more:
            raise ProtocolError("it closed the connection before a session was open")
        data += more
    return data
