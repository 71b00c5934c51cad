"""(4) A worker on another machine: it needs an address and the run's secret, no config and no data.

Model, config, blueprint, weights and tokens come from the hub. When the hub is gone it knocks again
until its patience ends; what it has built stays.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ... import config as configs
from ...config import Config, Kind
from ...model.blocks import BlockMap, Blueprint
from ...model.cut import cut_model
from ...model.layout import Runs
from ...system.buffers import Rooms
from ...system.device import pick_device
from ...system.terminal import console
from ...transport import session, wire
from ...transport.address import check_address, parse_address
from ...transport.hub import DOWN, IDS, UP, tag
from ...transport.session import Garbled, Message, Session
from ...transport.session import Kind as Say
from .. import dispatcher
from ..worker import Seats

FIRST = 8.0  # seconds to reach a hub that was never reached before
PAUSE = 0.3  # seconds between two knocks
SENDING = 3600.0  # seconds; a hub that is gone is noticed long before


class Refused(ValueError):
    """The hub does not want this worker, and says why."""


@dataclass
class Desk:
    """What a worker has built for a run; it outlives sessions."""

    words: str  # the welcome that it was built for
    cfg: Config
    block_map: BlockMap
    runs: Runs
    seats: Seats
    total_steps: int
    rows: int
    rooms: Rooms = field(default_factory=Rooms)


@dataclass(frozen=True)
class Knock:
    """Who knocks where."""

    address: str
    secret: bytes
    name: str = ""
    widths: dict[Kind, int] | None = None
    device: str = "auto"
    public: bool = False
    patience: float = 600.0
    quiet: bool = False


def work(knock: Knock) -> None:
    """Train whatever the hub sends until it says goodbye."""
    host, port = parse_address(knock.address)
    check_address(host, knock.public, "--public")
    name = knock.name or f"{socket.gethostname()}-{os.getpid()}"
    desk, until, why = None, time.monotonic() + FIRST, ""
    while True:
        line, sock = None, None
        try:
            sock = socket.create_connection((host, port), timeout=2.0)
            sock.settimeout(session.HANDSHAKE)
            line = Session(sock, session.answer(sock, knock.secret))
            desk = _enter(line, knock, name, desk)
            if not knock.quiet:
                console.print(f"{name} is in at {knock.address}")
            until = 0.0
            _serve(line, desk)
            return
        except PermissionError as error:
            raise ValueError(f"the hub at {host}:{port} refused this worker: {error}") from None
        except (KeyboardInterrupt, SystemExit):
            if line is not None:
                with suppress(OSError):
                    line.tell(Say.BYE)
            raise
        except OSError as error:
            if line is not None and _said_goodbye(line):
                return
            why = str(error) or type(error).__name__
            if not until and not knock.quiet:
                console.print(f"lost {knock.address} ({why}), knocking again", style="yellow")
            until = until or time.monotonic() + knock.patience
        finally:  # not earlier: a goodbye may still lie in the socket
            if line is not None:
                line.close()
            if sock is not None:
                sock.close()
        if time.monotonic() > until:
            raise ConnectionError(f"no hub at {host}:{port}: {why}")
        time.sleep(PAUSE)


def _said_goodbye(line: Session) -> bool:
    """Whether the hub left in good order while a transfer was under way."""
    with suppress(OSError):
        return any(message.kind == Say.BYE for message in line.heard())
    return False


def _enter(line: Session, knock: Knock, name: str, desk: Desk | None) -> Desk:
    line.tell(Say.HELLO, name=name, widths=knock.widths or {}, torch=torch.__version__)
    message = line.hear(session.HANDSHAKE)
    if message.kind == Say.REFUSED:
        raise Refused(f"the hub at {knock.address} refused this worker: {message.body['why']}")
    if message.kind != Say.WELCOME:
        raise Garbled("it did not welcome this worker")
    store = message.body.pop("store")
    words = json.dumps(message.body, sort_keys=True)
    if desk is None or desk.words != words:
        desk = _build(words, message.body, knock.device)
    line.tell(Say.READY)
    line.open_((line.sock.getpeername()[0], store), 1)
    return desk


def _build(words: str, body: dict[str, Any], device_name: str) -> Desk:
    cfg = configs.from_dict(body["config"])
    if cfg.run.threads:
        torch.set_num_threads(cfg.run.threads)
    device = pick_device(device_name, int(os.environ.get("LOCAL_RANK", 0)))
    dtype = torch.float64 if cfg.train.precision == "float64" else torch.float32
    described = AutoConfig.for_model(**body["model"])
    template = AutoModelForCausalLM.from_config(described, dtype=dtype).eval()
    cut = cut_model(template, cfg.blocks, device, dtype)
    seats = Seats(cut, cfg.train)
    return Desk(words, cfg, cut.block_map, cut.segments, seats, body["total_steps"], body["rows"])


def _serve(line: Session, desk: Desk) -> None:
    """Answer rounds until the hub says goodbye."""
    last: tuple[int, Tensor, float] | None = None
    while True:
        message = line.hear(None)
        if message.kind == Say.BYE:
            return
        if message.kind == Say.REFUSED:
            raise Refused(f"the hub refused this worker: {message.body['why']}")
        if message.kind == Say.ROUND:
            parcel = _receive(line, desk, message)
            if parcel is None:
                line.tell(Say.AGAIN, message.round)
                continue
            last = (message.round, *_train(desk, message, *parcel))
            _send(line, *last, 0)
        elif message.kind == Say.AGAIN and last is not None and last[0] == message.round:
            _send(line, *last, 1)


def _receive(line: Session, desk: Desk, message: Message) -> tuple[Tensor, Tensor] | None:
    """Weights [rows, n] and tokens of a round; None if they do not match their checksums."""
    body = message.body
    blueprint: Blueprint = {name: tuple(kept) for name, kept in body["blueprint"].items()}
    desk.block_map.check_blueprint(blueprint)
    where = desk.runs.full.narrowed(desk.block_map, desk.block_map.widths(blueprint))
    shape, kind = (desk.rows, where.n_params), desk.cfg.run.wire
    if message.n_bytes != wire.down_bytes(kind, shape, desk.seats.cut.dtype):
        raise Garbled(f"it announced {message.n_bytes} bytes for a subnet of {list(shape)}")
    down = desk.rooms.get("down", message.n_bytes)
    ids = torch.empty(body["ids"], dtype=torch.int32)
    flat = ids.view(-1).view(torch.uint8)
    attempt, seconds = body["attempt"], body["seconds"]
    works = [
        line.receive(down, tag(message.round, DOWN, attempt)),
        line.receive(flat, tag(message.round, IDS, attempt)),
    ]
    for work in works:
        session.wait(work, seconds)
    found = (session.checksum(down), session.checksum(flat).hex())
    if found != (message.checksum, body["ids_checksum"]):
        return None
    return wire.read_down(kind, down, shape, desk.seats.cut.dtype), ids.long()


def _train(desk: Desk, message: Message, sent: Tensor, ids: Tensor) -> tuple[Tensor, float]:
    """The result as bytes, and the sum of its losses."""
    body, cfg = message.body, desk.cfg
    blueprint: Blueprint = {name: tuple(kept) for name, kept in body["blueprint"].items()}
    deal = dispatcher.prepare(desk.runs, message.round, [blueprint])
    parcel = dispatcher.parcel(deal, 0, desk.runs, sent.to(desk.seats.cut.device))
    result = desk.seats.train(
        body["seat"], parcel, body["scales"], ids, message.round, desk.total_steps
    )
    up = wire.up(cfg.run.wire, session.staged(result.buffer), sent[0])
    return up, float(result.stats.loss_sum)


def _send(line: Session, round: int, up: Tensor, loss_sum: float, attempt: int) -> None:
    line.tell(Say.RESULT, round, up, loss_sum=loss_sum)
    session.wait(line.send(up, tag(round, UP, attempt)), SENDING)
    line.tell(Say.SENT, round)
