"""A session's handshake, frames and checksums over a real socket pair; the guard against torch's AdamW."""

from __future__ import annotations

import math
import socket
import threading

import pytest
import torch
from conftest import tiny

from twistlm.system.device import BufferPool
from twistlm.transport import handshake
from twistlm.transport.checks import CHUNK, distance, length, longest_step, suspicion
from twistlm.transport.handshake import ProtocolError
from twistlm.transport.protocol import Goodbye, Payload, Refusal, Resend, RoundResult, checksum
from twistlm.transport.session import HEADER, Session

SECRET = b"0123456789abcdef"


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        return a, server.accept()[0]


def shake_hands(hub_secret: bytes, worker_secret: bytes) -> tuple:
    """Both sides of the handshake; what each got, or the error that it raised."""
    a, b = tcp_pair()
    got: dict[str, object] = {}

    def side(name, function, sock, secret):
        try:
            got[name] = function(sock, secret)
        except OSError as error:
            got[name] = error

    hub = threading.Thread(target=side, args=("hub", handshake.challenge, a, hub_secret))
    hub.start()
    side("worker", handshake.answer, b, worker_secret)
    hub.join(10)
    return a, b, got["hub"], got["worker"]


@pytest.fixture
def pair():
    a, b = tcp_pair()
    key = bytes(range(32))
    yield Session(a, key), Session(b, key)
    a.close()
    b.close()


def test_only_equal_secrets_make_a_session():
    a, b, hub, worker = shake_hands(SECRET, SECRET)
    assert hub == worker
    assert len(hub) == 32
    c, d, other, _ = shake_hands(SECRET, SECRET)
    assert other != hub  # a recording of one session opens no other
    e, f, hub, worker = shake_hands(SECRET, b"another secret")
    assert isinstance(hub, ProtocolError)
    assert isinstance(worker, PermissionError)
    for sock in (a, b, c, d, e, f):
        sock.close()


def test_frames_arrive_as_they_were_sent(pair):
    here, there = pair
    payload = torch.arange(1000, dtype=torch.uint8)
    result = RoundResult(7, Payload(1000, checksum(payload)), 0.1 + 0.2)
    said = [result, Refusal("ü"), Goodbye()]
    for message in said:
        here.tell(message)
    assert [there.hear(5) for _ in said] == said
    assert there.heard() == []
    here.sock.close()
    with pytest.raises(ConnectionError):
        there.hear(5)


def test_the_last_messages_are_heard_after_the_end_of_the_connection(pair):
    """A goodbye that came together with another frame, and then the end of the connection."""
    here, there = pair
    here.tell(Resend(1))
    here.tell(Goodbye())
    here.sock.close()
    assert there.hear(5) == Resend(1)
    assert there.heard() == [Goodbye()]
    with pytest.raises(ConnectionError):
        there.heard()


@pytest.mark.parametrize("at", [0, 4, 5, 21, 24, 25, HEADER.size - 1, HEADER.size])
def test_a_changed_byte_makes_no_message(pair, at):
    """Magic, code, session, bytes of the body, signature, body: each is held by the signature."""
    here, there = pair
    here.tell(RoundResult(3, Payload.of(torch.zeros(8, dtype=torch.uint8)), 1.0))
    frame = bytearray(there.sock.recv(1 << 16))
    frame[at] ^= 1
    here.sock.sendall(bytes(frame))
    if at == 24:  # a body that is one byte longer: nothing but its end is missing
        here.sock.sendall(b" ")
    with pytest.raises(ProtocolError):
        there.hear(5)


def test_a_frame_in_pieces_and_one_of_another_session(pair):
    here, there = pair
    here.tell(Refusal("x" * 1000))
    frame = there.sock.recv(1 << 16)
    here.sock.sendall(frame[:50])
    with pytest.raises(TimeoutError):
        there.hear(0.2)
    here.sock.sendall(frame[50:])
    assert there.hear(5) == Refusal("x" * 1000)
    a, b = tcp_pair()
    with a, b:
        other = Session(b, bytes(32))
        a.sendall(frame)
        with pytest.raises(ProtocolError):
            other.hear(5)


@pytest.mark.parametrize("n", [0, 1, 511, 512, 513, 5000])
def test_a_checksum_changes_with_every_bit(n):
    torch.manual_seed(0)
    payload = torch.randint(0, 256, (n,), dtype=torch.uint8)
    before = checksum(payload)
    assert checksum(payload.clone()) == before
    for at in {0, n // 2, n - 1} if n else ():
        for bit in (1, 128):
            payload[at] ^= bit
            assert checksum(payload) != before
            payload[at] ^= bit
    if n >= 1024:  # blocks that change places, and an end that is missing
        swapped = torch.cat([payload[512:1024], payload[:512], payload[1024:]])
        assert checksum(swapped) != before
        assert checksum(payload[:-1]) != before


def test_buffers_are_reused_and_grow():
    pool = BufferPool()
    first = pool.get("up", 100)
    assert pool.get("up", 40).data_ptr() == first.data_ptr()
    assert pool.get("up", 40).numel() == 40
    assert pool.get("up", 200).numel() == 200
    assert pool.get("down", 100).data_ptr() != first.data_ptr()


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.5, 0.9)])
def test_no_adamw_makes_a_longer_step(betas):
    """torch's own AdamW on gradients that are made to move it far: silence, then a burst."""
    cfg = tiny(
        "x", "y", train={"betas": list(betas), "interval": 12, "lr": 0.1, "weight_decay": 0.1}
    ).train
    for silence in (0, 1, 50, 400):
        weights = torch.nn.Parameter(torch.ones(64, dtype=torch.float64))
        adam = torch.optim.AdamW([weights], lr=cfg.lr, betas=betas, weight_decay=0.1, eps=1e-8)
        for _ in range(silence):
            weights.grad = torch.full_like(weights, 1e-6)
            adam.step()
        before = weights.detach().clone()
        for i in range(cfg.interval):
            weights.grad = torch.full_like(weights, 10.0**i)
            adam.step()
        moved = float((weights.detach() - before).norm())
        assert moved < longest_step(cfg, before.numel(), float(before.norm()))
        assert moved > 0.01 * longest_step(
            cfg, before.numel(), float(before.norm())
        )  # the bound is no formality
        result = torch.stack([weights.detach(), before, before.abs()])
        assert suspicion(cfg, result, torch.stack([before] * 3), 1.0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, CHUNK, 3 * CHUNK + 5])
def test_a_distance_in_pieces(n, dtype):
    torch.manual_seed(0)
    a, b = torch.randn(2, n, dtype=dtype)
    a[-1:] += 1e4  # what the last piece holds counts
    expected = float((a.double() - b.double()).norm())
    assert distance(a, b) == pytest.approx(expected, rel=1e-5)
    assert length(a.split(CHUNK)) == pytest.approx(float(a.double().norm()), rel=1e-5)


def test_what_is_suspicious():
    cfg = tiny("x", "y").train
    sent = torch.ones(3, 500)
    assert suspicion(cfg, sent.clone(), sent, 2.0) is None
    for row, value, word in (
        (0, math.nan, "NaN"),
        (1, math.inf, "NaN"),
        (2, math.nan, "NaN"),
        (0, 1e30, "NaN"),
        (0, 1e4, "AdamW"),
        (2, -1.0, "negative"),
    ):
        result = sent.clone()
        result[row, 7] = value
        assert word in suspicion(cfg, result, sent, 2.0), (row, value)
    assert "loss" in suspicion(cfg, sent.clone(), sent, math.nan)
    # large weights may decay farther than an update moves: between the two bounds, and beyond both
    heavy, decays = torch.full((1, 500), 1e3), tiny("x", "y", train={"weight_decay": 0.5}).train
    least = longest_step(decays, 500, 0.0) / math.sqrt(500)
    most = longest_step(decays, 500, 1e3 * math.sqrt(500)) / math.sqrt(500)
    assert 2 * least < most
    assert suspicion(decays, heavy + (least + most) / 2, heavy, 2.0) is None
    assert "AdamW" in suspicion(decays, heavy + 1.1 * most, heavy, 2.0)
    assert suspicion(cfg, sent[:1].clone(), sent[:1], 2.0) is None  # moments that do not travel
