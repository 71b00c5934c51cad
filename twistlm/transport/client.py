"""The worker's side of a session: enter a run, receive a round's tensors, send the result."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ..system.device import BufferPool
from . import handshake
from .handshake import ProtocolError
from .protocol import (
    TOKENS,
    UPDATE,
    WEIGHTS,
    Hello,
    Payload,
    Ready,
    Refusal,
    ResultSent,
    RoundOrder,
    RoundResult,
    RunDescription,
    Welcome,
    transfer_tag,
)
from .session import Session, wait

SENDING = 3600.0  # seconds; a hub that is gone is noticed long before

Built = TypeVar("Built")


class Refused(ValueError):
    """The hub does not want this worker, and says why."""


def shake_hands(sock: socket.socket, secret: bytes) -> Session:
    """A session with the hub behind a fresh connection."""
    sock.settimeout(handshake.STEP)
    return Session(sock, handshake.answer(sock, secret))


def enter(session: Session, hello: Hello, build: Callable[[RunDescription], Built]) -> Built:
    """Introduce this worker, build what the run needs, and form the group that carries tensors."""
    session.tell(hello)
    message = session.hear(handshake.STEP)
    if isinstance(message, Refusal):
        raise Refused(message.why)
    if not isinstance(message, Welcome):
        raise ProtocolError("it did not welcome this worker")
    built = build(message.run)
    session.tell(Ready())
    session.open_((session.sock.getpeername()[0], message.store_port), 1)
    return built


def receive(
    session: Session, order: RoundOrder, n_bytes: int, buffers: BufferPool
) -> tuple[Tensor, Tensor] | None:
    """A round's weights (uint8 [n_bytes]) and tokens (int32); None if their checksums are wrong."""
    if order.weights.n_bytes != n_bytes:
        raise ProtocolError(f"it announced {order.weights.n_bytes} bytes of weights, not {n_bytes}")
    weights = buffers.get("down", n_bytes)
    tokens = torch.empty(order.tokens_shape, dtype=torch.int32)
    flat = tokens.view(-1).view(torch.uint8)
    works = [
        session.receive(weights, transfer_tag(order.round, WEIGHTS, order.attempt)),
        session.receive(flat, transfer_tag(order.round, TOKENS, order.attempt)),
    ]
    for work in works:
        wait(work, order.seconds)
    if not (order.weights.matches(weights) and order.tokens.matches(flat)):
        return None
    return weights, tokens


def send_result(session: Session, result: RoundResult, update: Tensor, attempt: int) -> None:
    """Announce a result, send its bytes and say when they have left."""
    session.tell(result)
    wait(session.send(update, transfer_tag(result.round, UPDATE, attempt)), SENDING)
    session.tell(ResultSent(result.round))


def result_of(round: int, update: Tensor, loss_sum: float) -> RoundResult:
    """The announcement of these bytes."""
    return RoundResult(round, Payload.of(update), loss_sum)
