"""Results over a real session between two threads: checked as they came, several at once."""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import tiny

from twistlm.transport.checks import Checkers, CheckRequest
from twistlm.transport.protocol import Payload, RoundResult
from twistlm.transport.session import Session

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
def checkers():
    made = Checkers()
    yield made
    made.close()


def arrive(line, result, tag: int, loss_sum: float = 2.0) -> CheckRequest:
    """Send a result; what the checkers are asked about it."""
    hub, worker = line
    up = result.view(-1).view(torch.uint8)
    answer = torch.empty_like(up)
    announced = RoundResult(0, Payload.of(up), loss_sum)
    transfer = hub.receive(answer, tag)
    worker.send(up, tag).wait()
    return CheckRequest(tiny("x", "y"), announced, SENT, answer, transfer, 10.0)


def test_a_sound_result_is_read_where_it_lies(line, checkers):
    result = SENT + 1e-4
    case = arrive(line, result, 1)
    found = checkers.start(case).result(10)
    assert torch.equal(found.result, result)
    assert found.result.data_ptr() == case.answer.data_ptr()
    assert (found.loss_sum, found.why) == (2.0, None)


def test_what_is_found_wrong(line, checkers):
    bad = SENT.clone()
    bad[0, 7] = math.nan
    cases = {
        "NaN or Inf": arrive(line, bad, 1),
        "AdamW": arrive(line, SENT * 1e6, 2),
        "its loss is nan": arrive(line, SENT + 1e-4, 3, loss_sum=math.nan),
    }
    for word, case in cases.items():
        assert word in checkers.start(case).result(10).why
    other, case = arrive(line, SENT + 1e-4, 4), arrive(line, SENT + 2e-4, 5)
    found = checkers.start(replace(case, announced=other.announced)).result(
        10
    )  # not what was announced
    assert (found.result, found.why) == (None, None)


def test_finished_can_be_read_after_each(line, checkers):
    assert not select.select([checkers.finished], [], [], 0)[0]
    asked = [checkers.start(arrive(line, SENT + 1e-4, tag)) for tag in (1, 2)]
    for finding in asked:
        finding.result(10)
    assert select.select([checkers.finished], [], [], 10)[0]
    checkers.clear()
    more = checkers.start(arrive(line, SENT + 1e-4, 3))
    more.result(10)
    assert select.select([checkers.finished], [], [], 10)[0]


def test_one_that_never_comes_fails_in_time_and_alone(line, checkers):
    """The transfer is cut off with its session; another result is checked while it is waited for."""
    sound = arrive(line, SENT + 1e-4, 1)
    never = torch.empty_like(sound.answer)
    began = time.monotonic()
    transfer = line[0].receive(never, 2)
    missing = checkers.start(replace(sound, answer=never, transfer=transfer, seconds=3.0))
    # gloo cuts the whole session when one transfer on it times out: the sound one has three seconds
    assert checkers.start(sound).result(10).why is None
    assert not missing.done()
    with pytest.raises(ConnectionError, match="timed out"):
        missing.result(20)
    assert time.monotonic() - began >= 2.9
