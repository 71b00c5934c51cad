"""A finished point is never run again, and appears whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twistlm.lab import points


def test_a_finished_point_is_read_and_not_measured_again(tmp_path: Path) -> None:
    calls = []

    def measure() -> dict:
        calls.append(1)
        return {"perplexity": 12.5}

    first = points.point(tmp_path, {"a": 1, "b": [2, 3]}, measure)
    again = points.point(tmp_path, {"b": [2, 3], "a": 1}, measure)  # the order of keys is no matter
    assert len(calls) == 1
    assert first == again
    assert first["result"] == {"perplexity": 12.5}
    assert {"command", "git", "versions", "device"} <= set(first["run"])
    points.point(tmp_path, {"a": 2, "b": [2, 3]}, measure)
    assert len(calls) == 2
    assert len(points.all_in(tmp_path)) == 2


def test_a_failed_point_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> dict:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        points.point(tmp_path, {"a": 1}, fail)
    with pytest.raises(TypeError):  # not JSON: found out only while writing
        points.point(tmp_path, {"a": 1}, lambda: {"x": object()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "config", "list"])
def test_a_damaged_point_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    points.point(tmp_path, {"a": 1}, lambda: {"x": 1})
    path = points.path_of(tmp_path, {"a": 1})
    text = path.read_text()
    changed = json.loads(text) | {"config": {"a": 2}}
    path.write_text(
        {"cut": text[: len(text) // 2], "config": json.dumps(changed), "list": "[]"}[damage]
    )
    with pytest.raises(ValueError, match=path.name):
        points.point(tmp_path, {"a": 1}, lambda: {"x": 1})
