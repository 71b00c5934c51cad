"""(4) A worker on another machine: it needs an address and the run's secret, no config and no data.

Model, config, blueprint, weights and tokens come from the hub. When the hub is gone the worker tries to
reach it again until its patience ends; what it has built stays.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ... import config
from ...config import Config, Kind
from ...model.layout import cut_model
from ...model.subnet import gate_values
from ...system.device import BufferPool, pick_device
from ...system.terminal import console
from ...transport import client, wire
from ...transport.address import check_address, parse_address
from ...transport.client import Refused
from ...transport.protocol import Goodbye, Hello, Refusal, Resend, RoundOrder, RunDescription
from ...transport.session import Session, staged
from .. import dispatcher
from ..worker import Seats

FIRST = 8.0  # seconds to reach a hub that was never reached before
PAUSE = 0.3  # seconds between two attempts


@dataclass(frozen=True)
class WorkerOptions:
    """Where a worker finds its hub, and as who it comes."""

    address: str
    secret: bytes
    name: str = ""
    widths: dict[Kind, int] | None = None
    device: str = "auto"
    public: bool = False
    patience: float = 600.0
    quiet: bool = False


@dataclass
class Workplace:
    """What a worker has built for a run; it outlives sessions."""

    run: RunDescription  # that it was built for
    cfg: Config
    seats: Seats
    buffers: BufferPool = field(default_factory=BufferPool)


def work(options: WorkerOptions) -> None:
    """Train whatever the hub sends until it says goodbye."""
    host, port = parse_address(options.address)
    check_address(host, options.public, "--public")
    hello = Hello(options.name or f"{socket.gethostname()}-{os.getpid()}", options.widths or {})
    place: Workplace | None = None
    until, why = time.monotonic() + FIRST, ""

    def build(run: RunDescription) -> Workplace:
        return place if place is not None and place.run == run else _build(run, options.device)

    while True:
        session, sock = None, None
        try:
            sock = socket.create_connection((host, port), timeout=2.0)
            session = client.shake_hands(sock, options.secret)
            place = client.enter(session, hello, build)
            if not options.quiet:
                console.print(f"{hello.name} is in at {options.address}")
            until = 0.0
            _serve(session, place)
            return
        except (PermissionError, Refused) as error:
            raise Refused(f"the hub at {host}:{port} refused this worker: {error}") from None
        except (KeyboardInterrupt, SystemExit):
            if session is not None:
                with suppress(OSError):
                    session.tell(Goodbye())
            raise
        except OSError as error:
            if session is not None and _said_goodbye(session):
                return
            why = str(error) or type(error).__name__
            if not until and not options.quiet:
                console.print(f"lost {options.address} ({why}), trying again", style="yellow")
            until = until or time.monotonic() + options.patience
        finally:  # not earlier: a goodbye may still lie in the socket
            if session is not None:
                session.close()
            if sock is not None:
                sock.close()
        if time.monotonic() > until:
            raise ConnectionError(f"no hub at {host}:{port}: {why}")
        time.sleep(PAUSE)


def _said_goodbye(session: Session) -> bool:
    """Whether the hub left in good order while a transfer was under way."""
    with suppress(OSError):
        return any(isinstance(message, Goodbye) for message in session.heard())
    return False


def _build(run: RunDescription, device_name: str) -> Workplace:
    cfg = config.from_dict(run.config)
    if cfg.run.threads:
        torch.set_num_threads(cfg.run.threads)
    device = pick_device(device_name, int(os.environ.get("LOCAL_RANK", 0)))
    dtype = torch.float64 if cfg.train.precision == "float64" else torch.float32
    described = AutoConfig.for_model(**run.model)
    template = AutoModelForCausalLM.from_config(described, dtype=dtype).eval()
    return Workplace(run, cfg, Seats(cut_model(template, cfg.blocks, device, dtype), cfg))


def _serve(session: Session, place: Workplace) -> None:
    """Answer rounds until the hub says goodbye."""
    last: tuple[int, Tensor, float] | None = None
    while True:
        message = session.hear(None)
        if isinstance(message, Goodbye):
            return
        if isinstance(message, Refusal):
            raise Refused(message.why)
        if isinstance(message, RoundOrder):
            received = _receive(session, place, message)
            if received is None:
                session.tell(Resend(message.round))
                continue
            last = (message.round, *_train(place, message, *received))
            _send(session, *last, 0)
        elif isinstance(message, Resend) and last is not None and last[0] == message.round:
            _send(session, *last, 1)


def _receive(session: Session, place: Workplace, order: RoundOrder) -> tuple[Tensor, Tensor] | None:
    """Weights [rows, n] and tokens of a round; None if they do not match their checksums."""
    cut, blueprint, kind = place.seats.cut, order.task.blueprint, place.cfg.run.wire
    cut.block_map.check_blueprint(blueprint)
    where = cut.full.narrowed(cut.block_map, cut.block_map.widths(blueprint))
    shape = (place.run.rows, where.n_params)
    n_bytes = wire.down_bytes(kind, shape, cut.dtype)
    found = client.receive(session, order, n_bytes, place.buffers)
    if found is None:
        return None
    return wire.read_down(kind, found[0], shape, cut.dtype), found[1].long()


def _train(place: Workplace, order: RoundOrder, sent: Tensor, ids: Tensor) -> tuple[Tensor, float]:
    """The result as bytes, and the sum of its losses."""
    cut, task, round = place.seats.cut, order.task, order.round
    deal = dispatcher.prepare(cut.segments, round, [task.blueprint])
    parcel = dispatcher.parcel(deal, 0, cut.segments, sent.to(cut.device))
    gates = gate_values(cut.block_map, task.blueprint, task.scales)[None]
    result = place.seats.train(task.seat, parcel, gates, ids, round, place.run.total_steps)
    update = wire.up(place.cfg.run.wire, staged(result.buffer), sent[0])
    return update, float(result.stats.loss_sum)


def _send(session: Session, round: int, update: Tensor, loss_sum: float, attempt: int) -> None:
    client.send_result(session, client.result_of(round, update, loss_sum), update, attempt)
