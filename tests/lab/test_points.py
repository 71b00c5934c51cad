"""A finished point is never run again, whoever finished it; a damaged one is named and not used."""

import json
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import damages

from twistlm.lab.points import Points, append_line, name_of
from twistlm.system.provenance import describe_run, git_hash

ROOT = Path(__file__).parents[2]


def never() -> dict:
    raise AssertionError("measured again")


def filled(folder: Path, n: int) -> Path:
    """A file of n points."""
    for a in range(n):
        Points(folder).measure({"a": a}, lambda a=a: {"x": a + 0.5})
    return folder / "points.jsonl"


def test_a_finished_point_is_read_and_not_measured_again(tmp_path: Path) -> None:
    other = Points(tmp_path)  # of another process
    with pytest.raises(TypeError):  # not JSON: found out only while writing
        other.measure({"a": 1}, lambda: {"x": object()})
    assert not list(tmp_path.iterdir())
    first = Points(tmp_path).measure({"a": 1, "b": [2, 3]}, lambda: {"perplexity": 12.5})
    # whatever the order of keys; what another process appended is found as well
    for points in (other, Points(tmp_path)):
        assert points.measure({"b": [2, 3], "a": 1}, never) == first
    assert first["result"] == {"perplexity": 12.5}
    assert {"command", "git", "versions", "device"} <= set(first["run"])
    assert [path.name for path in tmp_path.iterdir()] == ["points.jsonl"]
    # by hand: the first 16 digits of sha256 of `{"a": 1, "b": [2.5, "x"]}`
    assert name_of({"b": [2.5, "x"], "a": 1}) == "d8d7111d14e08d03"


def test_a_number_names_its_command_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for program, said in {"bin/twistlm": "twistlm", "paper/__main__.py": "python -m paper"}.items():
        monkeypatch.setattr(sys, "argv", [f"/x/{program}", "train", "run.out=a b"])
        assert describe_run()["command"] == f"{said} train 'run.out=a b'"

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    if head := git("rev-parse", "HEAD"):  # else this is no clone
        changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        assert git_hash.__wrapped__() == head[:12] + "-dirty" * changed


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_line_that_was_cut_short_is_measured_again(tmp_path: Path, share: float) -> None:
    """Nothing of the line, half of it, or all of it but its end: the lines around stay whole."""
    file = filled(tmp_path, 2)
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + second[: int(share * (len(second) - 1))])
    points = Points(tmp_path)
    assert points.measure({"a": 3}, lambda: {"x": 3})["result"] == {"x": 3}
    assert points.measure({"a": 0}, never)["result"] == {"x": 0.5}
    again = points.measure({"a": 1}, never if share == 1 else lambda: {"x": 4})["result"]
    assert again == {"x": 1.5 if share == 1 else 4}
    assert len(Points(tmp_path).all()) == 3


def test_damage_is_named_once_and_never_used(tmp_path: Path, capsys) -> None:
    file = filled(tmp_path, 3)
    one, two, three = file.read_bytes().splitlines(keepends=True)
    other = two.replace(b"1.5", b"3.5")
    for line in (b'{"config": 1, "result": 1}\n', b"[1]\n", b"[" * 9999 + b"\n", other):
        file.write_bytes(one + line + three)
        points = Points(tmp_path)
        found = {point["config"]["a"]: point["result"]["x"] for point in points.all()}
        assert points.find({"a": 1}) is None
        assert found == {0: 0.5, 2: 2.5}
        assert capsys.readouterr().err == f"{file}, line 2 is damaged and left out\n"


def test_150_damages_are_named(tmp_path: Path, capsys) -> None:
    """Bits, bytes, cuts, inserts and zeros anywhere: a point is as it was, or a word is said."""
    file = filled(tmp_path, 30)
    whole, good = Points(tmp_path).all(), file.read_bytes()
    for told, _, data in damages(tmp_path, 150):
        file.write_bytes(data)
        found = Points(tmp_path).all()
        assert all(point in whole for point in found), told
        said = re.search(r"jsonl.* line( \d+)? is (damaged|cut) .*out\n", capsys.readouterr().err)
        # whole lines are gone, and perhaps the end of the last
        is_shorter = good.startswith(data) and b"\n" in (b"\n" + data)[-1:] + good[len(data) :][:1]
        assert said or found == whole or is_shorter, told
        file.write_bytes(good)


def test_lines_of_before_have_no_hash_and_count(tmp_path: Path, capsys) -> None:
    made = {"config": {"a": 1}, "result": {"x": 1}, "seconds": 0.5, "run": {}}
    (tmp_path / "points.jsonl").write_text(json.dumps(made) + "\n")
    assert Points(tmp_path).measure({"a": 1}, never) == made
    assert not capsys.readouterr().err


def _append(file: Path, who: int) -> None:
    for i in range(60):
        append_line(file, {"who": who, "i": i, "long": "x" * 50000})


def test_processes_append_whole_lines(tmp_path: Path) -> None:
    file, context = tmp_path / "points.jsonl", multiprocessing.get_context("fork")
    workers = [context.Process(target=_append, args=(file, who)) for who in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = [json.loads(line) for line in file.read_text().splitlines()]
    expected = [(who, i) for who in range(3) for i in range(60)]
    assert sorted((line["who"], line["i"]) for line in found) == expected


def test_the_points_of_this_repository_are_sorted_and_whole(capsys) -> None:
    """Sorted as `LC_ALL=C sort -u` does, every line a point or a training, no config twice."""
    files = sorted((ROOT / "paper/points").glob("*.jsonl"))
    assert files
    for file in files:
        lines = file.read_bytes().splitlines(keepends=True)
        assert lines == sorted(set(lines)), f"LC_ALL=C sort -u {file.name} -o {file.name}"
        assert all(b'"sha256": "' in line[-30:] for line in lines)
        assert len(Points(file).all()) == len(lines)
    assert not capsys.readouterr().err
