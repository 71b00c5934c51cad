"""Tables follow from the points: small ones by hand, stored ones by their lines."""

import json
import re
from pathlib import Path

from paper import report, tables
from paper.tables import Figure, Table, recipe
from twistlm.lab.points import Points

POINTS = Path(report.__file__).parent / "points"
ABOUT = ("experiment", "scale", "parent", "slug", "parent_hash", "setting", "k")


def subnet(parent: str, slug: str, k: int, mean: float, sd: float | None = 1.0, **more) -> dict:
    about = {"experiment": "table1", "scale": "gpu", "parent": parent, "slug": slug}
    about |= {"parent_hash": slug, "setting": "both", "k": k}
    return about | {"values": [mean], "mean": mean, "sd": sd, "n": 1, **more}


def shown(found, kind: type) -> list:
    return [each for each in found if isinstance(each, kind)]


def test_table1_marks_the_lowest_and_puts_the_paper_beside():
    dense, twist = ("data parallel", "dense"), ("TwIST K=6", "twist-6")
    points = [subnet(*dense, 12, 15, None), subnet(*dense, 4, 974), subnet(*twist, 12, 20, None)]
    points += [subnet(*twist, 4, 23), subnet(*dense, 4, 31, None, method="sparsegpt")]
    points += [subnet(*dense, 4, 30, None, method="block:fisher")]
    points += [subnet(*dense, 4, 40, None, method="magnitude")]
    (table,) = shown(tables.table1(points), Table)
    assert table.head == ("both", "whole", "4/12", "activation scale")
    assert {row[:3] for row in table.rows} == {
        ("sparsegpt", "", "**31.00**"),  # zeros and what is really smaller do not compete
        ("magnitude", "", "40.00"),
        ("block:fisher", "", "30.00"),
        ("random blocks of data parallel", "**15.00**", "974.00 ± 1.00"),
        ("random blocks of TwIST K=6", "20.00", "**23.00 ± 1.00**"),
        *(("the paper", "", theirs) for theirs in ("31.64", "617.98", "974.31", "25.53")),
    }


# ---------------------------------------------------------------- the recipe


def way_point(way: str, seed: int, sizes: list[float], nested: list[float], **more) -> dict:
    """A point of the recipe: whole, 6/12 and 3/12 of the blocks at random, then nested."""
    whole, *means = sizes
    some = zip(("6", "3"), means, nested, strict=True)
    found = {"whole": whole} | {k: {"mean": mean, "nested": own} for k, mean, own in some}
    about = {"way": way, "rate": 0.002, "seed": seed, "start": "a start", "test": found}
    return about | {"bytes": 3e9, **more}


def parts(points: list[dict]) -> tuple[list[Table], dict]:
    found = list(recipe(points))
    (figure,) = shown(found, Figure)
    return shown(found, Table), figure.data


def test_an_ablation_is_held_against_the_same_seeds():
    """By hand: 44 against 40 and 22 against 20 of seed 1 are 10%, whatever the other seed has."""
    ours = way_point("TwIST", 1, [40.0, 20.0, 30.0], [10.0, 50.0])
    more = way_point("TwIST", 2, [99.0, 99.0, 99.0], [99.0, 99.0])
    other = way_point("… fp32", 1, [44.0, 22.0, 33.0], [11.0, 55.0])
    (_, changed), curves = parts([ours, more, other])
    assert changed.rows == [("… fp32", *["+10.0%"] * 5)]
    assert list(curves) == ["TwIST", "TwIST, nested"]


def test_points_from_another_start_decide_nothing_here():
    """Better numbers from other weights take no row's place."""
    points = [
        way_point("TwIST", 1, [40.0, 50.0, 60.0], [45.0, 50.0]),
        way_point("dropout K=6", 1, [40.0, 55.0, 75.0], [45.0, 50.0]),
        way_point("TwIST", 1, [20.0, 25.0, 30.0], [24.0, 28.0], rate=0.001, start="other weights"),
    ]
    for some in (points, points[::-1]):
        (here, there), curves = parts(some)
        assert [row[:3] for row in here.rows] == [
            ("dropout K=6", "**0.002**", "1"),
            ("TwIST", "**0.002**", "1"),
        ]
        assert [row[1:5] for row in there.rows] == [("**0.001**", "1", "3.0", "20.00")]
        assert curves["TwIST"] == {12: 40.0, 6: 50.0, 3: 60.0}


def test_the_recipe_by_hand():
    """Rates by text that is not reported, first seed; rows are means over seeds."""
    bad, better, worse = ({"choice": {"whole": v, "6": {"mean": v}}} for v in (99.0, 50.0, 60.0))
    # a higher rate with better tickets would make it an easier opponent as a whole model
    slow = {"choice": {"whole": 40.0, "6": {"mean": 90.0}}}
    fast = {"choice": {"whole": 41.0, "6": {"mean": 70.0}}, "rate": 0.004}
    points = [
        way_point("TwIST", 2, [44.0, 54.0, 104.0], [45.0, 80.0], rate=0.004, **bad),
        way_point("TwIST", 1, [40.0, 50.0, 100.0], [45.0, 80.0], rate=0.004, **better),
        way_point("TwIST", 1, [30.0, 30.0, 30.0], [30.0, 30.0], rate=0.003, **worse),
        way_point("TwIST, dense first", 1, [41.0, 51.0, 101.0], [46.0, 82.0]),
        way_point("TwIST, whole first after dense", 1, [40.5, 61.0, 91.0], [46.5, 82.0]),
        way_point("data parallel", 1, [39.0, 90.0, 900.0], [80.0, 800.0], **slow),
        way_point("data parallel", 1, [38.0, 80.0, 800.0], [70.0, 700.0], **fast),
    ]
    (table,), curves = parts(points)
    rows = {row[:2]: row[2:] for row in table.rows}
    ours = rows["TwIST", "**0.004**"]
    assert ours[:4] == ("2", "3.0", "42.00 ± 2.83", "52.00 ± 2.83")
    assert {("data parallel", "**0.002**"), ("data parallel", "0.004")} < rows.keys()
    assert ours[5:] == ("**45.00 ± 0.00**", "**80.00 ± 0.00**", "")
    assert curves["TwIST"] == {12: 42.0, 6: 52.0, 3: 102.0}
    best = "TwIST, whole first after dense, nested"  # the variant with the best whole model
    assert curves[best] == {12: 40.5, 6: 46.5, 3: 82.0}
    assert list(curves) == ["data parallel", "TwIST", "TwIST, nested", best]


# ---------------------------------------------------------------- sources and pages


def test_parents_of_one_name_are_told_apart(tmp_path):
    found = Points(tmp_path / "lab")
    for word, k in (("aaaa1", 4), ("bbbb2", 6)):
        made = subnet("TwIST K=6", "twist-6", k, 20.0, parent_hash=word)
        found.measure({key: made.pop(key) for key in ABOUT}, lambda made=made: made)
    (points,) = report.load([tmp_path / "lab"]).values()
    # large sizes first
    assert [p["parent"] for p in points] == ["TwIST K=6 [bbbb]", "TwIST K=6 [aaaa]"]


def test_folders_of_one_name_are_told_apart(tmp_path):
    """Each has its chapter and its figure."""
    for place, mean in (("a/lab", 20.25), ("b/lab", 30.5), ("b/lab.jsonl", 40.75)):
        made = subnet("TwIST K=6", "twist-6", 4, mean)
        points = Points(tmp_path / place)
        points.measure({key: made.pop(key) for key in ABOUT}, lambda made=made: made)
    page = report.report([tmp_path / "a/lab", tmp_path / "b/lab", tmp_path / "b/lab.jsonl"])
    assert len(re.findall("^# ", page, re.M)) == 3
    assert all(number in page for number in ("20.25", "30.50", "40.75"))


def test_the_stored_points_by_hand():
    """Numbers counted from the lines themselves, and those that the first pages printed."""
    lines = (POINTS / "lab-gpu.jsonl").read_text().splitlines()
    (point,) = (
        p["result"]
        for p in map(json.loads, lines)
        if p["config"].get("experiment") == "stability"
        and (p["config"]["slug"], p["config"]["k"]) == ("twist-6-attn", 4)
    )
    mean = sum(point["values"]) / 100
    sd = (sum((v - mean) ** 2 for v in point["values"]) / 99) ** 0.5
    page = report.report(sorted(POINTS.glob("*.jsonl")))
    (row,) = (row for row in page.splitlines() if row.startswith("| attn | TwIST K=6 | "))
    assert row.split(" | ")[5].replace("*", "") == f"{mean:.2f} ± {sd:.2f}"
    assert " | 42.25 ± 0.08 | " in page.replace("*", "")
    # a parent for each size: its row, the scales of its tickets, and the paper's own column
    rows = page[page.index("| random blocks of TwIST trained at that size") :].splitlines()
    own, beside = ([cell.split()[:1] for cell in row.split("|")[2:7]] for row in rows[:2])
    assert own == [[], ["47.22"], ["52.41"], ["59.49"], ["63.59"]]
    assert beside == [[], ["19.67"], ["21.32"], ["23.14"], ["24.86"]]
