"""What hub and workers say to each other: one frozen record per message, checked when it is made.

The order of a session: `Hello`, `Welcome` (or `Refusal`), `Ready`; then for every round `RoundOrder`
down, `RoundResult` and `ResultSent` up; `Resend` in either direction when bytes did not arrive as they
were announced; `Goodbye` at the end. Tensors travel beside the messages, over gloo, and are announced
in them by size and checksum (`Payload`). Nothing here knows of sockets.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

import torch
from torch import Tensor

from ..config import Kind
from .ranks import SeatKind

WEIGHTS, TOKENS, UPDATE = 0, 1, 2  # the transfers of a round
ROW = 64  # words of 8 bytes that a checksum adds up
MOST_ROUNDS = 1 << 32


def transfer_tag(round: int, transfer: int, attempt: int) -> int:
    """gloo's tag of one transfer: what belongs to another round or attempt never meets its receiver."""
    return (round * 8 + transfer * 2 + attempt) % (1 << 31)


def checksum(payload: Tensor) -> str:
    """32 hex digits that change with any bit of `payload` (uint8): sha256 over sums of 512 bytes each."""
    whole = payload.numel() // (8 * ROW) * 8 * ROW
    digest = hashlib.sha256()  # processors have instructions for it
    if whole:
        sums = payload[:whole].view(torch.int64).view(-1, ROW).sum(1)
        digest.update(sums.numpy().data)
    digest.update(payload[whole:].numpy().data)
    return digest.hexdigest()[:32]


def _check(holds: bool, record: object, name: str, wanted: str) -> None:
    if not holds:
        value = repr(getattr(record, name))
        value = value if len(value) < 80 else value[:77] + "..."
        raise ValueError(f"{type(record).__name__}.{name} = {value}: {wanted}")


def _check_counts(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        _check(type(value) is int and value >= 0, record, name, "a whole number >= 0")


def _check_round(record: Any) -> None:
    good = type(record.round) is int and 0 <= record.round < MOST_ROUNDS
    _check(good, record, "round", "a whole number >= 0")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Payload:
    """Bytes that travel beside a message: how many they are, and their checksum."""

    n_bytes: int
    checksum: str

    @staticmethod
    def of(payload: Tensor) -> Payload:
        return Payload(payload.numel(), checksum(payload))

    def __post_init__(self) -> None:
        _check_counts(self, "n_bytes")
        good = isinstance(self.checksum, str) and len(self.checksum) == 32
        _check(good, self, "checksum", "32 hex digits")

    def matches(self, payload: Tensor) -> bool:
        """Whether these are the bytes that were announced."""
        return payload.numel() == self.n_bytes and checksum(payload) == self.checksum


@dataclass(frozen=True)
class RunDescription:
    """All that a worker must know to build its model: it has neither the config nor the data."""

    config: dict[str, Any]  # of the run, as a table
    model: dict[str, Any]  # Hugging Face's config of the full model
    total_steps: int  # of the learning rate's schedule
    rows: int  # of the buffer that travels: weights, or weights, m and v

    def __post_init__(self) -> None:
        for name in ("config", "model"):
            _check(isinstance(getattr(self, name), dict), self, name, "a table")
        _check_counts(self, "total_steps", "rows")


@dataclass(frozen=True)
class Task:
    """What one worker trains in a round."""

    blueprint: dict[str, tuple[int, ...]]  # block group -> the blocks of the subnet
    seat: SeatKind
    scales: dict[str, float]  # block group -> factor of its output

    def __post_init__(self) -> None:
        good = isinstance(self.blueprint, dict) and all(
            isinstance(kept, list | tuple) and all(type(block) is int for block in kept)
            for kept in self.blueprint.values()
        )
        _check(good, self, "blueprint", "block ids by group")
        object.__setattr__(self, "blueprint", {k: tuple(v) for k, v in self.blueprint.items()})
        _check(self.seat in get_args(SeatKind), self, "seat", f"one of {get_args(SeatKind)}")
        good = isinstance(self.scales, dict) and all(map(_is_number, self.scales.values()))
        _check(good, self, "scales", "numbers by group")


@dataclass(frozen=True)
class Hello:
    """Worker: my name, and K where it is my own."""

    name: str
    widths: dict[Kind, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(isinstance(self.name, str), self, "name", "a text")
        good = isinstance(self.widths, dict) and all(
            kind in get_args(Kind) and type(k) is int for kind, k in self.widths.items()
        )
        _check(good, self, "widths", "give K for attn, ffn or both")


@dataclass(frozen=True)
class Welcome:
    """Hub: the run, and the port of the store in which gloo's two ends find each other."""

    store_port: int
    run: RunDescription

    def __post_init__(self) -> None:
        _check_counts(self, "store_port")


@dataclass(frozen=True)
class Ready:
    """Worker: my model is built."""


@dataclass(frozen=True)
class Refusal:
    """Hub: this worker is not wanted, and why."""

    why: str

    def __post_init__(self) -> None:
        _check(isinstance(self.why, str), self, "why", "a text")


@dataclass(frozen=True)
class RoundOrder:
    """Hub: train this; weights and tokens follow over gloo."""

    round: int
    task: Task
    weights: Payload
    tokens: Payload  # int32
    tokens_shape: tuple[int, ...]  # [steps, batch, T]
    seconds: float  # until the hub stops waiting
    attempt: int = 0

    def __post_init__(self) -> None:
        _check_round(self)
        _check_counts(self, "attempt")
        shape = self.tokens_shape
        good = isinstance(shape, list | tuple) and all(type(n) is int and n > 0 for n in shape)
        _check(good, self, "tokens_shape", "numbers > 0")
        _check(4 * math.prod(shape) == self.tokens.n_bytes, self, "tokens_shape", "not its bytes")
        object.__setattr__(self, "tokens_shape", tuple(shape))
        _check(_is_number(self.seconds), self, "seconds", "a number")


@dataclass(frozen=True)
class RoundResult:
    """Worker: a result of so many bytes begins to leave now."""

    round: int
    update: Payload
    loss_sum: float  # over the round's steps; NaN is legal here, and refused by the checks

    def __post_init__(self) -> None:
        _check_round(self)
        _check(_is_number(self.loss_sum), self, "loss_sum", "a number")


@dataclass(frozen=True)
class ResultSent:
    """Worker: all of the result has left."""

    round: int

    def __post_init__(self) -> None:
        _check_round(self)


@dataclass(frozen=True)
class Resend:
    """Either side: the bytes that came are not those that were announced, send them once more."""

    round: int

    def __post_init__(self) -> None:
        _check_round(self)


@dataclass(frozen=True)
class Goodbye:
    """Either side: I am leaving."""


Message = (
    Hello | Welcome | Ready | Refusal | RoundOrder | RoundResult | ResultSent | Resend | Goodbye
)
CODES: dict[type, int] = {kind: code for code, kind in enumerate(get_args(Message), 1)}
KINDS = {code: kind for kind, code in CODES.items()}
PARTS: Mapping[str, type] = {
    "Welcome.run": RunDescription,
    "RoundOrder.task": Task,
    "RoundOrder.weights": Payload,
    "RoundOrder.tokens": Payload,
    "RoundResult.update": Payload,
}


def encode(message: Message) -> bytes:
    """The message as JSON; its code goes in the frame's header."""
    return json.dumps(asdict(message)).encode()


def decode(code: int, body: bytes) -> Message:
    """The message behind a body; a ValueError says what is wrong with one that breaks the rules."""
    if code not in KINDS:
        raise ValueError(f"message {code} does not exist")
    return _made(KINDS[code], json.loads(body))


def _made(kind: type, body: Any) -> Any:
    names = [f.name for f in fields(kind)]
    if not isinstance(body, dict) or set(body) != set(names):
        found = sorted(body) if isinstance(body, dict) else type(body).__name__
        raise ValueError(f"{kind.__name__} has {names}, not {found}")
    parts = {name: PARTS.get(f"{kind.__name__}.{name}") for name in names}
    return kind(
        **{n: body[n] if part is None else _made(part, body[n]) for n, part in parts.items()}
    )
