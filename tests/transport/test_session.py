"""A session's frames, checksums and secrets over a real socket pair; the guard against torch's AdamW."""

from __future__ import annotations

import math
import socket
import threading

import pytest
import torch
from conftest import tiny

from twistlm.system.buffers import Rooms
from twistlm.transport import session
from twistlm.transport.guard import CHUNK, distance, length, longest_step, suspicion
from twistlm.transport.session import HEADER, Garbled, Kind, Session, checksum

SECRET = b"0123456789abcdef"


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        return a, server.accept()[0]


def handshake(hub_secret: bytes, worker_secret: bytes) -> tuple:
    """Both sides of the challenge; what each got, or the error that it raised."""
    a, b = tcp_pair()
    got: dict[str, object] = {}

    def side(name, function, sock, secret):
        try:
            got[name] = function(sock, secret)
        except OSError as error:
            got[name] = error

    hub = threading.Thread(target=side, args=("hub", session.challenge, a, hub_secret))
    hub.start()
    side("worker", session.answer, b, worker_secret)
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
    a, b, hub, worker = handshake(SECRET, SECRET)
    assert hub == worker
    assert len(hub) == 32
    c, d, other, _ = handshake(SECRET, SECRET)
    assert other != hub  # a recording of one session opens no other
    e, f, hub, worker = handshake(SECRET, b"another secret")
    assert isinstance(hub, Garbled)
    assert isinstance(worker, PermissionError)
    for sock in (a, b, c, d, e, f):
        sock.close()


def test_frames_arrive_as_they_were_sent(pair):
    here, there = pair
    payload = torch.arange(1000, dtype=torch.uint8)
    here.tell(Kind.RESULT, 7, payload, loss_sum=0.1 + 0.2, name="ü")
    here.tell(Kind.BYE)
    message, bye = there.hear(5), there.hear(5)
    assert (message.kind, message.round, message.n_bytes) == (Kind.RESULT, 7, 1000)
    assert message.checksum == checksum(payload)
    assert message.body == {"loss_sum": 0.1 + 0.2, "name": "ü"}
    assert bye.kind == Kind.BYE
    assert there.heard() == []
    here.sock.close()
    with pytest.raises(ConnectionError):
        there.hear(5)


def test_the_last_words_are_heard_after_the_line_is_cut(pair):
    """A goodbye that came together with another frame, and then the end of the connection."""
    here, there = pair
    here.tell(Kind.ROUND, 1)
    here.tell(Kind.BYE)
    here.sock.close()
    assert there.hear(5).kind == Kind.ROUND
    assert [message.kind for message in there.heard()] == [Kind.BYE]
    with pytest.raises(ConnectionError):
        there.heard()


@pytest.mark.parametrize("at", [0, 4, 5, 21, 29, 37, HEADER.size - 1, HEADER.size])
def test_a_changed_byte_makes_no_message(pair, at):
    """Magic, kind, session, round, bytes, checksum, signature, body: each is held by the signature."""
    here, there = pair
    here.tell(Kind.ROUND, 3, torch.zeros(8, dtype=torch.uint8), x=1)
    frame = bytearray(there.sock.recv(1 << 16))
    frame[at] ^= 1
    here.sock.sendall(bytes(frame))
    with pytest.raises(Garbled):
        there.hear(5)


def test_a_frame_in_pieces_and_one_of_another_session(pair):
    here, there = pair
    here.tell(Kind.ROUND, 3, words="x" * 1000)
    frame = there.sock.recv(1 << 16)
    here.sock.sendall(frame[:50])
    with pytest.raises(TimeoutError):
        there.hear(0.2)
    here.sock.sendall(frame[50:])
    assert there.hear(5).body == {"words": "x" * 1000}
    a, b = tcp_pair()
    with a, b:
        other = Session(b, bytes(32))
        a.sendall(frame)
        with pytest.raises(Garbled):
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


def test_rooms_are_reused_and_grow():
    rooms = Rooms()
    first = rooms.get("up", 100)
    assert rooms.get("up", 40).data_ptr() == first.data_ptr()
    assert rooms.get("up", 40).numel() == 40
    assert rooms.get("up", 200).numel() == 200
    assert rooms.get("down", 100).data_ptr() != first.data_ptr()


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.5, 0.9)])
def test_no_adamw_makes_a_longer_step(betas):
    """torch's own AdamW on gradients that are made to move it far: silence, then a burst."""
    cfg = tiny("x", "y", train={"betas": list(betas), "interval": 12, "lr": 0.1, "weight_decay": 0.1}).train  # fmt: skip
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
        (0, math.nan, "NaN"), (1, math.inf, "NaN"), (2, math.nan, "NaN"), (0, 1e30, "NaN"),
        (0, 1e4, "AdamW"), (2, -1.0, "negative"),
    ):  # fmt: skip
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
