"""A finished point is never run again, whoever finished it; a damaged one is named and not used."""

from __future__ import annotations

import json
import multiprocessing
import random
import subprocess
import sys
from pathlib import Path

import pytest

from twistlm.lab.points import (
    Points,
    Training,
    append_line,
    keep_training,
    kept_trainings,
    name_of,
    place_of,
)
from twistlm.system.provenance import describe_run, git_hash

ROOT = Path(__file__).parents[2]


def points_in(folder: Path) -> Points:
    return Points(place_of(folder))


def never() -> dict:
    raise AssertionError("measured again")


def test_a_finished_point_is_read_and_not_measured_again(tmp_path: Path) -> None:
    first = points_in(tmp_path).measure({"a": 1, "b": [2, 3]}, lambda: {"perplexity": 12.5})
    again = points_in(tmp_path).measure({"b": [2, 3], "a": 1}, never)  # whatever the order of keys
    assert first == again
    assert first["result"] == {"perplexity": 12.5}
    assert {"command", "git", "versions", "device"} <= set(first["run"])
    points_in(tmp_path).measure({"a": 2, "b": [2, 3]}, lambda: {"perplexity": 1.0})
    assert [p["config"]["a"] for p in points_in(tmp_path).all()] == sorted(
        [1, 2], key=lambda a: name_of({"a": a, "b": [2, 3]})
    )
    assert [path.name for path in tmp_path.iterdir()] == ["points.jsonl"]


def test_the_name_of_a_config_is_that_of_before() -> None:
    """By hand: the first 16 digits of sha256 of `{"a": 1, "b": [2.5, "x"]}`."""
    assert name_of({"b": [2.5, "x"], "a": 1}) == "d8d7111d14e08d03"


def test_a_number_names_its_command_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/twistlm/__main__.py", "train", "run.out=a b"])
    assert describe_run()["command"] == "twistlm train 'run.out=a b'"

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    if head := git("rev-parse", "HEAD"):  # else this is no clone
        changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        assert git_hash.__wrapped__() == head[:12] + "-dirty" * changed


def test_a_failed_point_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        points_in(tmp_path).measure({"a": 1}, never)
    with pytest.raises(TypeError):  # not JSON: found out only while writing
        points_in(tmp_path).measure({"a": 1}, lambda: {"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_point_that_another_process_finished_is_found(tmp_path: Path) -> None:
    one, other = points_in(tmp_path), points_in(tmp_path)
    made = one.measure({"a": 1}, lambda: {"x": 1})
    assert other.measure({"a": 1}, never) == made
    other.measure({"a": 2}, lambda: {"x": 2})
    assert one.measure({"a": 2}, never)["result"] == {"x": 2}


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_line_that_was_cut_short_is_measured_again(tmp_path: Path, share: float) -> None:
    """Nothing of the line, half of it, or all of it but its end: the lines around stay whole."""
    points_in(tmp_path).measure({"a": 1}, lambda: {"x": 1})
    points_in(tmp_path).measure({"a": 2}, lambda: {"x": 2})
    file = tmp_path / "points.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + second[: int(share * (len(second) - 1))])
    points = points_in(tmp_path)
    assert points.measure({"a": 3}, lambda: {"x": 3})["result"] == {"x": 3}
    assert points.measure({"a": 1}, never)["result"] == {"x": 1}
    again = points.measure({"a": 2}, never if share == 1 else lambda: {"x": 4})["result"]
    assert again == {"x": 2 if share == 1 else 4}
    assert len(points_in(tmp_path).all()) == 3
    assert points_in(tmp_path).measure({"a": 2}, never)["result"] == again


def test_damage_is_named_once_and_never_used(tmp_path: Path, capsys) -> None:
    """60 random bytes changed, one at a time, in the second of three points."""
    for a in (1, 2, 3):
        points_in(tmp_path).measure({"a": a}, lambda a=a: {"x": a + 0.5})
    file, rng = tmp_path / "points.jsonl", random.Random(0)
    one, two, three = file.read_bytes().splitlines(keepends=True)
    for _ in range(60):
        at = rng.randrange(len(two) - 1)
        byte = bytes([rng.choice([b for b in range(32, 127) if b != two[at]])])
        file.write_bytes(one + two[:at] + byte + two[at + 1 :] + three)
        points = points_in(tmp_path)
        found = {point["config"]["a"]: point["result"]["x"] for point in points.all()}
        assert points.find({"a": 2}) is None
        assert found == {1: 1.5, 3: 3.5}
        assert capsys.readouterr().err == f"{file}, line 2 is damaged and left out\n"


@pytest.mark.parametrize("line", ['{"result": 1}', '{"config": 1, "result": 1}', "[1]", "[" * 9999])
def test_a_line_that_is_no_point_is_named(tmp_path: Path, capsys, line: str) -> None:
    (tmp_path / "points.jsonl").write_text(f"{line}\n")
    assert points_in(tmp_path).all() == []
    assert "points.jsonl, line 1 is damaged" in capsys.readouterr().err


def test_lines_of_before_have_no_hash_and_count(tmp_path: Path, capsys) -> None:
    made = {"config": {"a": 1}, "result": {"x": 1}, "seconds": 0.5, "run": {}}
    (tmp_path / "points.jsonl").write_text(json.dumps(made) + "\n")
    assert points_in(tmp_path).measure({"a": 1}, never) == made
    assert not capsys.readouterr().err


def _append(file: Path, who: int) -> None:
    for i in range(50):
        append_line(file, {"who": who, "i": i, "long": "x" * 5000})


def test_processes_append_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "points.jsonl"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_append, args=(file, who)) for who in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = [json.loads(line) for line in file.read_text().splitlines()]
    expected = {(who, i) for who in range(3) for i in range(50)}
    assert {(line["who"], line["i"]) for line in found} == expected
    assert len(found) == 150


def test_a_training_is_kept_once(tmp_path: Path) -> None:
    file = tmp_path / "lab.metrics.jsonl"
    two = Training("two", {"train": {"rounds": 3}}, {"git": "abc"}, [{"round": 1, "loss": 0.1}])
    one = Training("one", {}, {}, [])
    for training in (two, one, two):
        keep_training(file, training)
    assert kept_trainings(file) == [one, two]
    assert len(file.read_text().splitlines()) == 2


def test_the_points_of_this_repository_are_sorted_and_whole(capsys) -> None:
    """Sorted as `LC_ALL=C sort -u` does, every line a point or a training, no config twice."""
    files = sorted((ROOT / "paper/points").glob("*.jsonl"))
    assert files
    for file in files:
        lines = file.read_bytes().splitlines(keepends=True)
        assert lines == sorted(set(lines)), f"LC_ALL=C sort -u {file.name} -o {file.name}"
        assert all(b'"sha256": "' in line[-30:] for line in lines)
        is_training = file.name.endswith(".metrics.jsonl")
        records = kept_trainings(file) if is_training else Points(place_of(file)).all()
        assert len(records) == len(lines)
    assert not capsys.readouterr().err
