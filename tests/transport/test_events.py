"""What happened to workers: a table for a person, lines for a program, and the same in both."""

import json

from rich.console import Console

from twistlm.transport.events import Events


def test_the_table_and_the_lines_say_the_same(tmp_path):
    events = Events(tmp_path, quiet=True)
    for place, name in enumerate(("fast", "slow", "sick")):
        events.write("joined", name, place=place)
    events.write(
        "round", round=0, seconds={"fast": 1.0, "slow": 4.0, "sick": 1.5}, places=[0, 1, 2]
    )
    events.write("refused", "sick", round=1, why="NaN or Inf in the update")
    events.write("round", round=1, seconds={"slow": 3.0, "fast": 1.0}, places=[0, 1, 2])
    events.write("lost", "fast", round=2, why="it closed the connection")
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    order = "joined joined joined round refused round lost"
    assert [row["event"] for row in rows] == order.split()
    assert rows[4]["why"] == "NaN or Inf in the update"
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    slow, fast, sick = (events.statuses[name] for name in ("slow", "fast", "sick"))
    # slow came 4.0 - 1.5 and 3.0 - 1.0 seconds after the others
    assert (slow.rounds, slow.seconds, slow.waited) == (2, 3.0, 4.5)
    assert (fast.state, fast.rounds, fast.waited) == ("lost", 2, 0.0)
    assert (sick.state, sick.rounds, sick.refused) == ("in", 1, 1)
    console = Console(width=120, record=True)
    console.print(events)
    lines = console.export_text().splitlines()
    assert len(lines) == 4
    assert lines[-1].split()[:2] == ["fast", "lost"]  # who is in comes first
    assert any("NaN or Inf" in line and line.startswith("sick") for line in lines)
    events.write("joined", "fast", place=0)  # what went wrong is over when the worker is back
    assert (fast.state, fast.why) == ("in", "")


def test_a_full_disk_stops_no_run(tmp_path):
    events = Events(tmp_path / "gone", quiet=True)
    events.write("joined", "a", place=0)
    assert events.statuses["a"].state == "in"
