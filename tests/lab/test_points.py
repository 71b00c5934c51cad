"""A finished point is never run again, whoever finished it; one that was cut short does no harm."""

from __future__ import annotations

import json
import multiprocessing
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
    parse_line,
    place_of,
)
from twistlm.system.provenance import describe_run, git_hash

DOCS = Path(__file__).parents[2] / "docs"


def points_in(folder: Path) -> Points:
    return Points(place_of(folder))


def never() -> dict:
    raise AssertionError("measured again")


def test_a_finished_point_is_read_and_not_measured_again(tmp_path: Path) -> None:
    calls = []

    def measure() -> dict:
        calls.append(1)
        return {"perplexity": 12.5}

    points = points_in(tmp_path)
    first = points.measure({"a": 1, "b": [2, 3]}, measure)
    again = points.measure({"b": [2, 3], "a": 1}, measure)  # the order of keys is no matter
    assert len(calls) == 1
    assert first == again == points_in(tmp_path).measure({"a": 1, "b": [2, 3]}, measure)
    assert first["result"] == {"perplexity": 12.5}
    assert {"command", "git", "versions", "device"} <= set(first["run"])
    points.measure({"a": 2, "b": [2, 3]}, measure)
    assert len(calls) == 2
    assert [p["config"]["a"] for p in points_in(tmp_path).all()] == sorted(
        [1, 2], key=lambda a: name_of({"a": a, "b": [2, 3]})
    )
    assert [path.name for path in tmp_path.iterdir()] == ["points.jsonl"]


def test_a_number_names_its_command_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/twistlm/__main__.py", "train", "run.out=a b"])
    assert describe_run()["command"] == "twistlm train 'run.out=a b'"

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=DOCS.parent, capture_output=True, text=True
        ).stdout.strip()

    if head := git("rev-parse", "HEAD"):  # else this is no clone
        changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        assert git_hash.__wrapped__() == head[:12] + "-dirty" * changed


def test_a_failed_point_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> dict:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        points_in(tmp_path).measure({"a": 1}, fail)
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
    """Nothing of the line, half of it, or all of it but its end: the lines around it stay whole."""
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
    assert {(line["who"], line["i"]) for line in found} == {
        (who, i) for who in range(3) for i in range(50)
    }
    assert len(found) == 150


def test_a_line_that_is_no_point_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "points.jsonl").write_text('{"result": 1}\n')
    with pytest.raises(ValueError, match=r'points.jsonl: the line {"result": 1}.*not a finished'):
        points_in(tmp_path).all()


def old_point(folder: Path, config: dict) -> Path:
    """A point as earlier versions wrote it: a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name_of(config)}.json"
    path.write_text(json.dumps({"config": config, "result": {"x": 1}, "seconds": 0.5, "run": {}}))
    return path


def test_points_in_files_of_their_own_are_still_found(tmp_path: Path) -> None:
    """Those of a lab, and those of Table 1's cells, which lay below it."""
    before = [
        old_point(tmp_path / "points", {"a": 1}),
        old_point(tmp_path / "compare/points", {"a": 2}),
    ]
    texts = [path.read_text() for path in before]
    points = points_in(tmp_path)
    for a in (1, 2):
        assert points.measure({"a": a}, never)["result"] == {"x": 1}
    points.measure({"a": 3}, lambda: {"x": 3})
    assert [path.read_text() for path in before] == texts
    assert len((tmp_path / "points.jsonl").read_text().splitlines()) == 1
    assert len(points_in(tmp_path).all()) == 3


@pytest.mark.parametrize("damage", ["cut", "config", "list"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = old_point(tmp_path / "points", {"a": 1})
    text = path.read_text()
    changed = json.loads(text) | {"config": {"a": 2}}
    path.write_text(
        {"cut": text[: len(text) // 2], "config": json.dumps(changed), "list": "[]"}[damage]
    )
    with pytest.raises(ValueError, match=f"{path.name} is not a finished point: delete it"):
        points_in(tmp_path)


def test_a_training_is_kept_once(tmp_path: Path) -> None:
    file = tmp_path / "lab.metrics.jsonl"
    two = Training("two", {"train": {"rounds": 3}}, {"git": "abc"}, [{"round": 1, "loss": 0.1}])
    one = Training("one", {}, {}, [])
    for training in (two, one, two):
        keep_training(file, training)
    assert kept_trainings(file) == [one, two]
    assert len(file.read_text().splitlines()) == 2


def test_the_points_of_this_repository_are_sorted_and_whole() -> None:
    """Sorted as `LC_ALL=C sort -u` does, every line a point or a training, no config twice."""
    files = sorted((DOCS / "labs").glob("*.jsonl"))
    assert files
    for file in files:
        lines = file.read_bytes().splitlines(keepends=True)
        assert lines == sorted(set(lines)), f"LC_ALL=C sort -u {file.name} -o {file.name}"
        records = [parse_line(line) for line in lines]
        if file.name.endswith(".metrics.jsonl"):
            assert len(kept_trainings(file)) == len(records)
            assert all(training.rows for training in kept_trainings(file))
        else:
            assert len(Points(place_of(file)).all()) == len(records)
            assert all({"experiment", "what"} & set(record["config"]) for record in records)


def test_the_figures_of_the_results_are_there_and_no_others() -> None:
    text = (DOCS / "results.md").read_text()
    shown = {part.split(")")[0] for part in text.split("](figures/")[1:]}
    assert shown == {path.name for path in (DOCS / "figures").iterdir()}
