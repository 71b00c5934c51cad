"""host:port, who may be reached there, and the secret that both ends of a run share. No torch here."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

LEAST_SECRET = 16  # characters


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """`host:port`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address {text!r}: use host:port, as in 10.0.0.1:29400")
    return host.strip("[]"), int(port)


def check_address(host: str, public: bool, word: str) -> None:
    """Refuse addresses beyond loopback and private ranges unless asked for with `word`."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except socket.gaierror as error:
        raise ValueError(f"host {host!r} has no address: {error.strerror}") from None
    for text in found:
        address = ipaddress.ip_address(str(text).partition("%")[0])
        near = address.is_private and not address.is_unspecified
        if not near and not public:
            raise ValueError(
                f"{host} ({address}) is neither a loopback nor a private address, and the weights "
                f"travel unencrypted: tunnel them, or say {word}"
            )


def listen(address: str, public: bool) -> socket.socket:
    """A bound and listening socket; an error names host:port."""
    host, port = parse_address(address)
    check_address(host, public, "hub.public=true")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def read_secret(path: Path | None) -> bytes:
    """The run's secret out of a file, or of TWISTLM_SECRET."""
    text = path.read_text() if path is not None else os.environ.get("TWISTLM_SECRET", "")
    secret = text.strip().encode()
    if len(secret) < LEAST_SECRET:
        where = path or "TWISTLM_SECRET"
        raise ValueError(
            f"{where} holds {len(secret)} characters: a run's secret has at least {LEAST_SECRET}. "
            f"Make one with `openssl rand -hex 32`, and give hub and workers the same"
        )
    return secret
