"""Every message survives its bytes; one that breaks the rules is named with its field and value."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import get_args

import pytest
import torch
from rich.console import Console

from twistlm.system.terminal import progress
from twistlm.transport import protocol
from twistlm.transport.events import Events
from twistlm.transport.protocol import (
    CODES,
    TOKENS,
    UPDATE,
    WEIGHTS,
    Goodbye,
    Hello,
    Payload,
    Ready,
    Refusal,
    Resend,
    ResultSent,
    RoundOrder,
    RoundResult,
    RunDescription,
    Task,
    Welcome,
    transfer_tag,
)

BYTES = Payload.of(torch.arange(24, dtype=torch.uint8))
TASK = Task({"layers.0.attn": (0, 2)}, "physical", {"layers.0.attn": 2**0.5})
MESSAGES = [
    Hello("ü", {"attn": 3}),
    Welcome(29400, RunDescription({"run": {"seed": 1}}, {"model_type": "gpt2"}, 12, 3)),
    Ready(),
    Refusal("too wide"),
    RoundOrder(7, TASK, BYTES, BYTES, (1, 2, 3), 30.0),
    RoundResult(7, BYTES, 0.1 + 0.2),
    ResultSent(7),
    Resend(7),
    Goodbye(),
]


def test_all_messages_have_a_sample():
    assert {type(message) for message in MESSAGES} == set(get_args(protocol.Message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_what_its_bytes_say(message):
    code, body = CODES[type(message)], protocol.encode(message)
    assert protocol.decode(code, body) == message
    told = json.loads(body)
    for name in told:  # every field is needed, and no other is known
        with pytest.raises(ValueError, match=type(message).__name__):
            protocol.decode(code, json.dumps({k: v for k, v in told.items() if k != name}).encode())
    with pytest.raises(ValueError, match="more"):
        protocol.decode(code, json.dumps(told | {"more": 1}).encode())
    for other in (b"[]", b"7", b"{", b"\xff"):
        with pytest.raises(ValueError, match=r"."):
            protocol.decode(code, other)


ORDER, RESULT = asdict(MESSAGES[4]), asdict(MESSAGES[5])
WRONG = [
    (Hello, {"name": 3, "widths": {}}, "Hello.name = 3"),
    (Hello, {"name": "a", "widths": {"head": 3}}, "give K for attn, ffn or both"),
    (Hello, {"name": "a", "widths": {"ffn": True}}, "give K for attn, ffn or both"),
    (Hello, {"name": "a", "widths": [3]}, "give K for attn, ffn or both"),
    (Welcome, {"store_port": -1, "run": asdict(MESSAGES[1])["run"]}, "Welcome.store_port = -1"),
    (Welcome, {"store_port": 1, "run": {}}, "RunDescription has"),
    (Refusal, {"why": None}, "Refusal.why = None"),
    (RoundOrder, ORDER | {"round": -1}, "RoundOrder.round = -1"),
    (RoundOrder, ORDER | {"round": 1 << 32}, "RoundOrder.round = 4294967296"),
    (RoundOrder, ORDER | {"tokens_shape": [1, 2, 4]}, "RoundOrder.tokens_shape"),
    (RoundOrder, ORDER | {"tokens_shape": [-1, 2, -3]}, "RoundOrder.tokens_shape"),
    (RoundOrder, ORDER | {"seconds": "long"}, "RoundOrder.seconds = 'long'"),
    (RoundOrder, ORDER | {"weights": {"n_bytes": 1.5, "checksum": "0" * 32}}, "Payload.n_bytes"),
    (RoundOrder, ORDER | {"weights": {"n_bytes": 1, "checksum": "0"}}, "Payload.checksum = '0'"),
    (RoundOrder, ORDER | {"task": asdict(TASK) | {"seat": "sofa"}}, "Task.seat = 'sofa'"),
    (RoundOrder, ORDER | {"task": asdict(TASK) | {"scales": {"a": None}}}, "Task.scales"),
    (RoundOrder, ORDER | {"task": asdict(TASK) | {"blueprint": {"a": ["0"]}}}, "Task.blueprint"),
    (RoundResult, RESULT | {"loss_sum": "much"}, "RoundResult.loss_sum = 'much'"),
    (RoundResult, RESULT | {"loss_sum": True}, "RoundResult.loss_sum = True"),
]


@pytest.mark.parametrize(("kind", "body", "sentence"), WRONG, ids=lambda value: str(value)[:40])
def test_a_message_that_breaks_the_rules(kind, body, sentence):
    with pytest.raises(ValueError, match=r"^\w+") as caught:
        protocol.decode(CODES[kind], json.dumps(body).encode())
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 300  # also of a huge body


def test_an_unknown_message():
    with pytest.raises(ValueError, match="message 99"):
        protocol.decode(99, b"{}")


def test_a_payload_is_known_by_size_and_bits():
    bits = torch.arange(24, dtype=torch.uint8)
    assert BYTES.matches(bits)
    assert not BYTES.matches(bits[:-1])
    bits[3] ^= 1
    assert not BYTES.matches(bits)


def test_no_two_transfers_of_neighbouring_rounds_share_a_tag():
    tags = [
        transfer_tag(round, transfer, attempt)
        for round in (*range(50), (1 << 28) - 2, (1 << 28) - 1)
        for transfer in (WEIGHTS, TOKENS, UPDATE)
        for attempt in (0, 1)
    ]
    assert len(set(tags)) == len(tags)
    assert all(0 <= tag < 1 << 31 for tag in tags)


def test_the_table_and_the_lines_say_the_same(tmp_path):
    events = Events(tmp_path, quiet=True)
    for place, name in enumerate(("fast", "slow", "sick")):
        events.write("joined", name, place=place)
    events.write(
        "round", round=0, seconds={"fast": 1.0, "slow": 4.0, "sick": 1.5}, places=[0, 1, 2]
    )
    events.write("refused", "sick", round=1, why="NaN or Inf in the update")
    events.write("round", round=1, seconds={"slow": 3.0, "fast": 1.0}, places=[0, 1, 2])
    events.write("stranger", "10.0.0.9:1", why="it does not know the run's secret")
    events.write("lost", "fast", round=2, why="it closed the connection")
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == [
        "joined",
        "joined",
        "joined",
        "round",
        "refused",
        "round",
        "stranger",
        "lost",
    ]
    assert rows[4]["why"] == "NaN or Inf in the update"
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    slow, fast, sick = (events.standings[name] for name in ("slow", "fast", "sick"))
    # slow came 4.0 - 1.5 and 3.0 - 1.0 seconds after the others
    assert (slow.rounds, slow.seconds, slow.waited) == (2, 3.0, 4.5)
    assert (fast.state, fast.rounds, fast.waited) == ("lost", 2, 0.0)
    assert (sick.state, sick.rounds, sick.refused) == ("in", 1, 1)
    assert "10.0.0.9:1" not in events.standings
    console = Console(width=120, record=True)
    console.print(events)
    lines = console.export_text().splitlines()
    assert len(lines) == 4
    assert lines[-1].split()[:2] == ["fast", "lost"]  # who is in comes first
    assert any("NaN or Inf" in line and line.startswith("sick") for line in lines)


def test_the_table_stands_below_the_bar(tmp_path):
    events = Events(tmp_path, quiet=True)
    events.write("joined", "somebody", place=0)
    bar = progress(True, events)
    bar.add_task("twist rounds", total=3, note="")
    console = Console(width=120, record=True)
    console.print(bar.get_renderable())
    text = console.export_text()
    assert text.index("twist rounds") < text.index("somebody")


def test_a_full_disk_stops_no_hub(tmp_path):
    events = Events(tmp_path / "gone", quiet=True)
    events.write("joined", "a", place=0)
    assert events.standings["a"].state == "in"
