"""Results over a real line between two threads: judged as they came, several at once, and the bell."""

from __future__ import annotations

import math
import select
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from conftest import tiny

from twistlm.transport import checks
from twistlm.transport.session import Kind, Message, Session, checksum

KEY = bytes(range(32))
SENT = torch.ones(3, 5000)


@pytest.fixture
def line():
    """(hub's end, worker's end) of a session with its gloo group."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near = server.accept()[0]
    ends = Session(near, KEY), Session(far, KEY)
    where = ("127.0.0.1", store.port)
    other = threading.Thread(target=ends[1].open_, args=(where, 1))
    other.start()
    ends[0].open_(where, 0)
    other.join()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def judges():
    made = checks.Judges()
    yield made
    made.close()


def arrive(line, result, tag: int, **body):
    """Send a result; what `judge` is asked about it."""
    hub, worker = line
    up = result.view(-1).view(torch.uint8)
    answer = torch.empty_like(up)
    announced = Message(Kind.RESULT, 0, up.numel(), checksum(up), {"loss_sum": 2.0} | body)
    transfer = hub.receive(answer, tag)
    worker.send(up, tag).wait()
    return [tiny("x", "y"), announced, SENT, answer, transfer, 10.0]


def test_a_sound_result_is_read_where_it_lies(line, judges):
    result = SENT + 1e-4
    case = arrive(line, result, 1)
    found = judges.ask(*case).result(10)
    assert torch.equal(found.result, result)
    assert found.result.data_ptr() == case[3].data_ptr()
    assert (found.loss_sum, found.why) == (2.0, None)


def test_what_is_found_wrong(line, judges):
    bad = SENT.clone()
    bad[0, 7] = math.nan
    cases = {
        "NaN or Inf": arrive(line, bad, 1),
        "AdamW": arrive(line, SENT * 1e6, 2),
        "its loss is nan": arrive(line, SENT + 1e-4, 3, loss_sum="much"),
    }
    for word, case in cases.items():
        assert word in judges.ask(*case).result(10).why
    other, case = arrive(line, SENT + 1e-4, 4), arrive(line, SENT + 2e-4, 5)
    found = judges.ask(case[0], other[1], *case[2:]).result(10)  # not what was announced
    assert (found.result, found.why) == (None, None)


def test_the_bell_rings_once_for_each(line, judges):
    assert not select.select([judges.bell], [], [], 0)[0]
    asked = [judges.ask(*arrive(line, SENT + 1e-4, tag)) for tag in (1, 2)]
    for verdict in asked:
        verdict.result(10)
    assert select.select([judges.bell], [], [], 10)[0]
    judges.silence()
    more = judges.ask(*arrive(line, SENT + 1e-4, 3))
    more.result(10)
    assert select.select([judges.bell], [], [], 10)[0]


def test_one_that_never_comes_fails_in_time_and_alone(line, judges):
    """The transfer is cut off with its session; another result is judged while it is waited for."""
    cfg, announced, sent, came, _, _ = sound = arrive(line, SENT + 1e-4, 1)
    never = torch.empty_like(came)
    began = time.monotonic()
    missing = judges.ask(cfg, announced, sent, never, line[0].receive(never, 2), 6.0)
    # gloo cuts the whole line when one transfer on it times out: the sound one has six seconds
    assert judges.ask(*sound).result(10).why is None
    assert not missing.done()
    with pytest.raises(ConnectionError, match="timed out"):
        missing.result(20)
    assert time.monotonic() - began >= 5.9
