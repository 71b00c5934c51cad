"""The page: well-formed, self-contained, every figure drawn; its sentences follow from the numbers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest
from commands import check_page
from conftest import tiny

from paper import nodeloss, ranking, robustness, stability, table1, table2
from paper.page import draw
from paper.page.html import Chapter, page
from paper.page.markdown import BEGIN, END, markdown, replace_part
from paper.page.section import Claim, Figure, Section, Table, count, lowest, number
from paper.report import load, training, write
from paper.report.write import chapter, report
from twistlm.baselines import COMPARED
from twistlm.baselines.methods import METHODS
from twistlm.lab.compare.run import CompareRequest, compare
from twistlm.lab.points import Points, Training, keep_training, place_of, read_training
from twistlm.training import rounds

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def subnet(parent: str, slug: str, k: int, mean: float, sd: float | None = 1.0, **more) -> dict:
    config = {
        "experiment": more.pop("experiment", "table1"),
        "scale": "gpu",
        "parent": parent,
        "slug": slug,
        "parent_hash": slug,
        "setting": "both",
        "k": k,
        **more,
    }
    values = [mean] if sd is None else [mean - sd, mean, mean + sd]
    result = {"values": values, "mean": mean, "sd": sd, "worst": max(values), "n": len(values)}
    return {
        "config": config,
        "result": result,
        "run": {"command": "twistlm", "git": "abc", "device": "x"},
    }


def grid(twist: dict[int, float], dense: dict[int, float], gpt: dict[int, float]) -> list[dict]:
    parents = {("data parallel", "dense"): dense, ("TwIST K=6", "twist-6"): twist}
    made = [
        subnet(*names, k, mean, None if k == 12 else 1.0)
        for names, means in parents.items()
        for k, mean in means.items()
    ]
    return made + [
        subnet("data parallel", "dense", k, v, None, method="sparsegpt") for k, v in gpt.items()
    ]


def verdicts(section) -> dict[str, bool | None]:
    return {claim.says.split(": ", 1)[-1]: claim.holds for claim in section.claims}


def test_claims_of_table1_follow_from_the_numbers():
    twist, gpt = {12: 20, 8: 20, 6: 21, 4: 23, 3: 25}, {8: 16, 6: 19, 4: 31, 3: 58}
    dense = {12: 15, 8: 54, 6: 176, 4: 974, 3: 2587}
    beats, flat = (
        "TwIST's random subnets beat data parallel's at every size",
        "TwIST's curve over the size is flatter than data parallel's",
    )
    cross = "SparseGPT is ahead at 6/12 and above, TwIST K=6 at 4/12 and below (crossover)"
    at_size = cross.replace("TwIST K=6", "TwIST trained at that size")
    whole = "the whole TwIST model is as good as the whole data-parallel one"
    found = verdicts(table1.section(grid(twist, dense, gpt)))
    # trained at 6, extracted at 6 is one of both rows; the other sizes have no parent of their own yet
    assert found == {beats: True, flat: True, cross: True, whole: False}
    lost = verdicts(table1.section(grid(twist | {8: 60, 12: 14}, dense, gpt | {6: 22})))
    assert lost == {beats: False, flat: True, cross: False, whole: True}
    own = [subnet(f"TwIST K={k}", f"twist-{k}", k, v) for k, v in {8: 18, 4: 22, 3: 24}.items()]
    found = verdicts(table1.section([*grid(twist, dense, gpt), *own]))
    assert found[at_size] is True
    own[1]["result"]["mean"] = 32  # its own parent at 4/12 loses: the paper's column decides
    found = verdicts(table1.section([*grid(twist, dense, gpt), *own]))
    assert (found[cross], found[at_size]) == (True, False)
    steep = verdicts(table1.section(grid(twist | {3: 2580}, dense | {3: 2587, 8: 2000}, gpt)))
    assert steep[flat] is False


def test_table1_knows_every_pruner():
    """Zeros must not pass for models that are really smaller."""
    assert set(COMPARED) == set(ranking.NAMES)
    assert {name for name in COMPARED if ranking.is_zeros(ranking.NAMES[name][0])} == set(METHODS)


def test_table1_marks_the_lowest_and_puts_the_paper_beside():
    chosen = subnet("data parallel", "dense", 4, 30, None, method="block:fisher")
    points = [
        *grid({12: 20, 4: 23}, {12: 15, 4: 974}, {4: 31}),
        chosen,
        subnet("data parallel", "dense", 4, 40, None, method="magnitude"),
    ]
    made = table1.section(points)
    (table,) = made.tables
    assert table.head == ("both", "whole", "4/12")  # of earlier points no scale is known
    names = [row[0] for row in table.rows]
    assert names == [
        "SparseGPT",
        "the paper",
        "magnitude",
        "blocks by Fisher",
        "the paper",
        "random blocks of data parallel",
        "the paper",
        "random blocks of TwIST K=6",
        "the paper",
    ]
    # zeros and what is really smaller do not compete
    assert {(names[i], j) for i, j in table.best} == {
        ("random blocks of data parallel", 1),
        ("random blocks of TwIST K=6", 2),
        ("SparseGPT", 2),
    }
    assert [table.rows[i][2] for i in sorted(table.small)] == ["31.64", "617.98", "974.31", "25.53"]
    assert made.headlines[0] == (
        "4/12 of the blocks: TwIST K=6 23.00, then blocks by Fisher 30.00; random blocks of data parallel "
        "974.00; as many zeros instead, no smaller and no faster: SparseGPT 31.00."
    )
    assert made.headlines[1] == "Whole models: data parallel 15.00, TwIST K=6 20.00."
    chosen_by = (
        "TwIST's random blocks beat blocks that a score chooses from data parallel, at every size"
    )
    assert verdicts(made)[chosen_by] is True
    chosen["result"]["mean"] = 22
    assert verdicts(table1.section(points))[chosen_by] is False
    for point in points:
        point["config"]["scale"] = "gpu-smollm2"  # another model than the paper's
    (table,) = table1.section(points).tables
    assert not table.small


@pytest.mark.parametrize("setting", ["both", "attn", "ffn"])
def test_parents_trained_at_the_size_have_a_row_and_the_papers_column(setting):
    ending = "" if setting == "both" else f"-{setting}"
    means = {8: 18.0, 6: 21.0, 4: 22.0, 3: 24.0}
    points = [
        subnet(f"TwIST K={k}", f"twist-{k}{ending}", k, v, setting=setting)
        for k, v in means.items()
    ]
    points.append(subnet("TwIST K=6", f"twist-6{ending}", 4, 23.5, setting=setting))
    for point, scale in zip(
        points, ("sqrt(N/K)", "no scale", "no scale", "measured"), strict=False
    ):
        point["result"]["treatment"] = {"chosen": scale}
    (table,) = table1.section(points).tables
    rows = {row[0]: row[1:] for row in table.rows if row[0] != "the paper"}
    assert list(rows) == [
        "random blocks of TwIST trained at that size",
        "random blocks of TwIST K=6",
    ]
    *own, scales = rows["random blocks of TwIST trained at that size"]
    assert [text.split()[0] for text in own] == ["18.00", "21.00", "22.00", "24.00"]
    assert scales == "sqrt(N/K); no scale; no scale; measured"
    *other, scales = rows["random blocks of TwIST K=6"]
    assert [text.split()[:1] for text in other] == [[], ["21.00"], ["23.50"], []]
    assert scales == "no scale; ?"  # the last point was measured before scales were chosen
    theirs = {
        "both": ("19.67", "21.32", "23.14", "24.86"),
        "attn": ("17.35", "17.74", "18.25", "18.49"),
        "ffn": ("18.06", "18.90", "19.69", "20.51"),
    }
    assert table.rows[1] == ("the paper", *theirs[setting], "")


def heat(values: dict[int, dict[int, float]]) -> list[dict]:
    return [
        subnet(f"TwIST K={x}", f"twist-{x}", y, v, experiment="robustness", widths=[x], tokens=64)
        for x, row in values.items()
        for y, v in row.items()
    ]


def test_claims_of_robustness():
    good = {3: {3: 25, 6: 25, 10: 25}, 6: {3: 24, 6: 21, 10: 20}, 10: {3: 60, 6: 25, 10: 18}}
    found = robustness.section(heat(good))
    assert [claim.holds for claim in found.claims] == [True, True, True]
    assert "X=3: 25.00, X=6: 24.00, X=10: 60.00; lowest at X=6" in found.claims[2].because
    (table,) = found.tables
    assert table.rows[1] == ("both", "6/12", "24.00", "21.00", "20.00")
    assert table.best == {(1, 2), (1, 3), (2, 4)}
    edge = good | {3: {3: 22, 6: 22, 10: 30}, 10: {3: 26, 6: 20, 10: 18}}
    assert [claim.holds for claim in robustness.section(heat(edge)).claims] == [False, False, True]
    edge = good | {3: {3: 22, 6: 22, 10: 22}}
    assert [claim.holds for claim in robustness.section(heat(edge)).claims] == [True, True, False]
    half = {8 if x == 10 else x: row for x, row in good.items()}  # an unfinished map has no middle
    assert not any("sweet spot" in c.says for c in robustness.section(heat(half)).claims)


@pytest.mark.parametrize(
    ("setting", "theirs"),
    [
        ("both", "the paper's both, 10 to 4: 3.34 times"),
        ("ffn", "the paper's ffn, 10 to 4: 2.15 times"),
        ("attn", "the paper prints no such number for attn"),
    ],
)
def test_the_heat_map_claim_compares_the_papers_pair(setting, theirs):
    """10 to 4 is 1.2 times here, though 10 to 3 is 3 times: like is compared with like."""
    points = heat({3: {3: 25, 4: 25, 10: 25}, 10: {3: 54, 4: 21.6, 10: 18, 12: 17}})
    for point in points:
        point["config"]["setting"] = setting
    claim = robustness.section(points).claims[0]
    assert claim.holds is False
    assert "perplexity at 4/12 is 1.20 times that at 10/12" in claim.because
    assert theirs in claim.because


def test_claims_of_stability_and_node_loss():
    def sd(twist: float, dense: dict[int, float]) -> list[dict]:
        made = [subnet("TwIST K=6", "twist-6", k, 20, twist, experiment="stability") for k in dense]
        return made + [
            subnet("data parallel", "dense", k, 50, s, experiment="stability")
            for k, s in dense.items()
        ]

    assert [c.holds for c in stability.section(sd(0.5, {4: 9, 8: 2})).claims] == [True, True]
    assert [c.holds for c in stability.section(sd(3.0, {4: 1, 8: 2})).claims] == [False, False]
    assert "4.0 to 18.0 times smaller" in stability.section(sd(0.5, {4: 9, 8: 2})).claims[0].because

    def lost(twist: float) -> list[dict]:
        about = {"experiment": "nodeloss", "nodes": 4, "lost": 1}
        both = {"TwIST K=6": (20.0, twist), "data parallel": (15.0, 30.0)}
        return [
            {
                "config": {"parent": p, **about},
                "result": {"full": f, "mean": w, "worst": w, "values": [w]},
            }
            for p, (f, w) in both.items()
        ]

    assert nodeloss.section(lost(22.0)).claims[0].holds is True
    assert nodeloss.section(lost(44.0)).claims[0].holds is False


def test_a_running_folder_and_plain_runs(tmp_path, tokens):
    """Two plain runs, one of them cut off in the middle of a line."""
    for method in ("twist", "dense"):
        rounds.train(
            tiny(tokens, tmp_path / method, train={"method": method}, run={"eval_every": 2}),
            quiet=True,
        )
    path = tmp_path / "twist/metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:2]) + "\n" + lines[2][:25])
    assert [row["round"] for row in read_training(tmp_path / "twist").rows] == [1, 2]
    out = tmp_path / "page.html"
    report([tmp_path / "twist", tmp_path / "dense"], out)
    folder = out.with_suffix("")
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    report([tmp_path / "twist", tmp_path / "dense"], out)
    assert first == {path.name: path.read_bytes() for path in folder.iterdir()}
    figures = check_page(out)
    assert figures == {f"runs-training-{name}" for name in ("loss", "eval", "coverage", "bytes")}
    text = out.read_text()
    assert "1 trainings are not finished yet" in text
    assert "<td>2 of 4</td>" in text
    assert "k_ffn" in text  # the config
    with pytest.raises(ValueError, match="holds nothing to report"):
        report([folder], out)


def test_training_by_hand():
    """300 rounds are drawn as 150 points; bytes are those of the round in the middle."""

    def rounds_of(n: int, loss: float) -> list[dict]:
        found = {"n_tokens": 100, "seconds": 2.0, "bytes_down": 1e6, "bytes_up": 3e6}
        made = [{"round": i + 1, "loss": loss + i % 2, **found} for i in range(n)]
        made[0] |= {"bytes_up": 1e9, "eval": {"full": 20.0, "2/4": {"mean": 30.0}}}
        return made

    some = [
        Training("long", {"train": {"rounds": 300}}, {}, rounds_of(300, 3.0)),
        Training("short", {"train": {"rounds": 4}}, {}, rounds_of(3, 3.2)),
    ]
    made = training.section(some)
    (table,) = made.tables
    assert table.rows == (
        ("long", "300 of 300", "30,000", "600.0", "50", "4.000"),
        ("short", "3 of 4", "300", "6.0", "50", "3.200"),
    )
    assert table.note == "not finished: short"
    loss, scores, moved = made.figures
    assert loss.data["long"] == {i / 5000: 3.5 for i in range(1, 151)}
    assert loss.data["short"] == {0.0001: 3.2, 0.0002: 4.2, 0.0003: 3.2}
    assert loss.reading == "Lowest at its end: short with 3.200."
    pupil = Training("pupil", {"train": {"rounds": 1, "teacher": "start"}}, {}, rounds_of(1, 0.5))
    (loss, *_) = training.section([*some, pupil]).figures
    assert loss.reading.startswith("Lowest at its end: short with 3.200. ")  # 0.5 is no such loss
    assert loss.reading.endswith(" teacher: pupil.")
    assert scores.data["short full"] == {1: 20.0}
    assert scores.data["short 2/4"] == {1: 30.0}
    assert scores.reading == "Lowest at the last evaluation: long full with 20.00."
    assert moved.data["long"] == moved.data["short"] == {"down": 1.0, "up": 3.0}


def test_a_comparison(tmp_path, tokens):
    """A folder of `twistlm compare`, as it is."""
    cut = {"k_attn": 2, "k_ffn": 2, "n_ffn": 4, "shared_first": 0}
    cfg = tiny(tokens, tmp_path / "dense", train={"method": "dense", "rounds": 1}, blocks=cut)
    rounds.train(cfg, quiet=True)
    compare(
        CompareRequest(
            sources=[("dense", str(tmp_path / "dense"))],
            out=tmp_path / "table",
            ratios=["2/4,1/4", "attn=2/4,ffn=1/4"],
            settings="ffn,both",
            methods="magnitude",
            n=2,
            tokens=64,
            device="cpu",
            quiet=True,
        )
    )
    out = tmp_path / "page.html"
    report([tmp_path / "table"], out)
    assert {"table-compare-both", "table-compare-ffn"} <= check_page(out)
    rows = json.loads((tmp_path / "table/compare.json").read_text())["rows"]
    shown = f"{next(r['perplexity'] for r in rows if r['method'] == 'magnitude'):.2f}"
    text = out.read_text()
    assert f"<td>{shown}</td>" in text
    both = {r["method"]: r for r in rows if (r["setting"], r["ratio"]) == ("both", "1/4")}
    random, zeros = both["random"], both["magnitude"]["perplexity"]
    assert (
        f"both, 1/4 of the blocks: dense, random {random['perplexity']:.2f} ± {random['sd']:.2f}; "
        f"zeros, no smaller and no faster: magnitude {zeros:.2f}." in text
    )
    assert "both, attn=2/4 ffn=1/4 of the blocks: dense, random" in text
    assert "ffn, attn" not in text  # of a kind alone it is 1/4 once more
    # magnitude only puts zeros: the reading names a model that is really smaller
    assert "At the smallest size dense, random is lowest" in text
    assert "dashed: zeros" in text


def test_a_comparison_says_what_won():
    """The lowest two that are really smaller, then the lowest zeros; rivals in any order."""
    costs = {"setting": "both", "ratio": "6/12", "repair": "", "n": 1, "seconds": 1.0, "values": []}
    costs |= {"sd": None, "calibration_tokens": 0, "bytes": 8_000_000, "speedup": 1.25}
    found = {
        ("dense", "block:fisher"): 70.0,
        ("dense", "sparsegpt"): 38.0,
        ("dense", "random"): 80.0,
        ("dense", "wanda"): 37.0,
        ("TwIST", "random"): 50.0,
        ("dense", "block:taylor"): 60.0,
    }
    rows = [{"parent": p, "method": m, "perplexity": v, **costs} for (p, m), v in found.items()]
    costs |= {"ratio": "3/12", "seconds": 0.5, "bytes": 4_200_000, "speedup": 2.0}
    for (parent, method), value in {("TwIST", "random"): 90.0, ("dense", "wanda"): 85.0}.items():
        rows.append({"parent": parent, "method": method, "perplexity": value, **costs})
    record = {"rows": rows, "text": {"n_tokens": 64}, "parents": {"dense": {}, "TwIST": {}}}
    made = write.section(record)
    assert made.headlines == (
        "both, 6/12 of the blocks: TwIST, random 50.00, then block:taylor 60.00; "
        "zeros, no smaller and no faster: wanda 37.00.",
        "both, 3/12 of the blocks: TwIST, random 90.00; zeros, no smaller and no faster: wanda 85.00.",
    )
    # costs belong to a line's smallest size, and some are not measured at the smallest of all yet
    lines = {row[0]: row[1:] for row in made.tables[0].rows}
    assert lines["TwIST, random"] == ("", "50.00", "90.00", "0.5", "0", "4.2", "2.00x")
    assert lines["sparsegpt"] == ("", "38.00", "", "1", "0", "8.0", "1.25x")
    shares, parameters, times = made.figures
    assert shares.data["TwIST, random"] == {0.5: 50.0, 0.25: 90.0}
    assert shares.reading.startswith("At the smallest size TwIST, random is lowest with 90.00 of")
    assert parameters.data["TwIST, random"] == {2.0: 50.0, 1.05: 90.0}  # four bytes each
    assert times.data["TwIST, random"] == {0.8: 50.0, 0.5: 90.0}
    whole = record | {"command": "", "git": "", "versions": {}, "device": "cpu"}
    assert chapter(load.Source("table", comparison=whole)).title == "Comparison of dense, TwIST"


def test_table2_shows_what_a_worker_holds():
    """The state, not the peak, on a GPU too: as the paper's memory allocated."""
    plan = {
        "setting": "both",
        "ratio": "4/12",
        "n_params": 10,
        "paper_bytes": 31.69e12,
        "carried_bytes": 1,
    }
    size = {
        "state_bytes": 1_386_600_000,
        "peak_bytes": 2_788_400_000,
        "round_bytes": 1,
        "round_ms": 1.0,
    }
    made = table2.section(
        [
            {
                "config": {"experiment": "table2"},
                "result": {"paper_rounds": 1, "true_rounds": 1, "rows": [plan]},
            },
            {"config": {"experiment": "latency", "setting": "both", "k": 4}, "result": size},
        ]
    )
    (row,) = made.tables[0].rows
    assert row[3:5] == ("1.387", "1.34")  # ours, and the paper's


@pytest.mark.parametrize("high", [60.0, 200.0, 3_000.0, 1_000_000.0])
def test_a_logarithmic_axis_can_be_read(high):
    """Three to ten labels however many decades there are, and a band that stays above zero."""
    from matplotlib.figure import Figure as Canvas

    axes = Canvas(figsize=(5, 3.6)).subplots()
    series = {"TwIST K=6": {3: high, 8: 30.0}}
    style = draw.LineStyle(log=True, sd={"TwIST K=6": {3: 2 * high, 8: 3.0}})
    draw.lines(axes, series, x="", y="", style=style)
    low, top = axes.get_ylim()
    assert 3 <= sum(low <= tick <= top for tick in axes.get_yticks()) <= 10
    (band,) = axes.collections
    assert band.get_paths()[0].vertices[:, 1].min() > 0


def test_what_is_drawn_is_where_it_belongs():
    """The whole model on the left, the median across a violin, the lowest perplexity brightest."""
    from matplotlib.figure import Figure as Canvas

    one, two, three = Canvas().subplots(3)
    draw.ladder(one, {"TwIST": {3: 90.0, 12: 40.0, 6: 50.0}}, ours="TwIST", x="")
    assert list(one.lines[0].get_ydata()) == [40.0, 50.0, 90.0]
    assert [tick.get_text() for tick in one.get_xticklabels()] == ["whole", "6/12", "3/12"]
    assert [text.get_text() for text in one.texts] == ["TwIST 90.0"]
    draw.violins(two, {"6/12": {"TwIST": [5.0, 9.0, 4.0, 6.0, 7.0]}}, y="perplexity")
    assert list(two.lines[0].get_ydata()) == [6.0, 6.0]
    draw.heatmap(three, ["a"], ["x", "y"], [[20.0, 60.0]], x="", y="")
    light = [sum(patch.get_facecolor()[:3]) for patch in three.patches]
    assert light[0] > light[1]
    assert [text.get_text() for text in three.texts] == ["20.0", "60.0"]


def test_lines_of_many_rivals_look_different():
    from matplotlib.figure import Figure as Canvas

    axes = Canvas().subplots()
    names = [f"rival {i}" for i in range(12)]
    style = draw.LineStyle(dashed=names[1:6])
    draw.lines(axes, {n: {1: 2.0} for n in names}, x="", y="", style=style)
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}
    assert len(looks) == len(names)


def test_a_legend_of_long_names_stays_inside_its_figure():
    names = ["structured dropout K=6", "TwIST, fresh masks and teacher, nested"]
    series = {n: {1: 1e5, 2: 10.0} for n in names}
    style = draw.LineStyle(log=True)
    figure = Figure("f", "", "", series, lambda a: draw.lines(a, series, x="x", y="y", style=style))
    canvas, _ = draw.render(figure)
    canvas.draw_without_rendering()
    legend = canvas.axes[0].get_legend()
    assert legend.get_window_extent().x0 >= 0
    assert max(t.get_window_extent().x1 for t in legend.get_texts()) <= canvas.bbox.width


def test_what_one_command_made_stands_together(tmp_path, tokens):
    for name in ("one", "two"):
        rounds.train(tiny(tokens, tmp_path / "runs" / name, train={"rounds": 1}), quiet=True)
    report([tmp_path / "runs"], tmp_path / "page.html")
    ran = (tmp_path / "page.html").read_text().split("What was run</h3>")[1].split("<footer>")[0]
    assert ran.count("<code>") == 1
    assert "<summary>training one</summary>" in ran
    assert "<summary>training two</summary>" in ran


@pytest.mark.parametrize("deal", ["random", "balanced"])
def test_coverage_is_what_the_loop_deals(tmp_path, tokens, deal):
    cfg = tiny(tokens, tmp_path / "run", blocks={"deal": deal, "k_ffn": 2})
    last = rounds.train(cfg, quiet=True)
    held = json.loads((last / "checkpoint.json").read_text())["held"]
    low, high, covered = training.dealt(cfg, 4)[-1]
    ratios = [n * len(c) / sum(c) for c in held.values() for n in c]
    assert (low, high) == pytest.approx((min(ratios), max(ratios)))
    assert covered == 1.0


def test_two_parents_of_one_name_are_told_apart(tmp_path):
    """The one with most points keeps the name."""
    found = Points(place_of(tmp_path))
    for word, k in (("aaaa1", 4), ("bbbb2", 4), ("bbbb2", 6)):
        made = subnet("TwIST K=6", "twist-6", k, 20.0)
        made["config"]["parent_hash"] = word
        found.measure(made["config"], lambda made=made: made["result"])
    (source,) = load.load([tmp_path])
    names = {p["config"]["parent_hash"]: p["config"]["parent"] for p in source.points}
    assert names == {"aaaa1": "TwIST K=6 [aaaa]", "bbbb2": "TwIST K=6"}
    assert source.points[0]["config"]["k"] == 6  # large sizes first


def test_a_lab_is_a_folder_or_two_files(tmp_path, tokens):
    """Points and metrics that were copied away give the same source; a running parent is seen too."""
    folder = tmp_path / "lab"
    made = subnet("TwIST K=6", "twist-6", 4, 20.0)
    Points(place_of(folder)).measure(made["config"], lambda: made["result"])
    rounds.train(tiny(tokens, folder / "parents/one", train={"rounds": 1}), quiet=True)
    keep_training(place_of(folder).trainings, read_training(folder / "parents/one"))
    shutil.copy(folder / "points.jsonl", tmp_path / "lab.jsonl")
    shutil.copy(folder / "points.metrics.jsonl", tmp_path / "lab.metrics.jsonl")
    files = sorted(tmp_path.glob("*.jsonl"))
    (whole,), (kept,) = load.load([folder]), load.load(files)
    assert whole == kept
    assert [t.name for t in kept.trainings] == ["one"]
    shutil.copytree(folder / "parents/one", folder / "parents/two")
    assert [t.name for t in load.load([folder])[0].trainings] == ["one", "two"]
    record = {"rows": [], "parents": {}}
    (folder / "compare.json").write_text(json.dumps(record))
    both = load.load([folder, folder / "compare.json"])
    assert [source.comparison for source in both] == [None, record, record]


def test_what_is_kept_by_hand_stays():
    text = "# Results\n\nBy hand.\n"
    once = replace_part(text, "one")
    assert once.startswith(text)
    assert once.endswith(f"{BEGIN}\none\n{END}\n")
    twice = replace_part(once + "\nMore by hand.\n", "two")
    assert twice == f"{text}\n{BEGIN}\ntwo\n{END}\n\nMore by hand.\n"
    assert replace_part(twice, "two") == twice


def test_numbers_are_readable():
    assert [number(x) for x in (3.14159, 2587.42, None)] == ["3.14", "2,587", ""]
    assert [count(x) for x in (23040, 30e6, 1.24e9)] == ["23,040", "30.0M", "1.2B"]
    assert lowest([[3.0, None], [2.0, 1.0]]) == {(1, 0)}
    assert "<script" not in page([], {})


def test_claims_stand_as_the_numbers_decided_them():
    claims = [
        Claim("a", True, "1 < 2"),
        Claim("b", False, "2 > 1"),
        Claim("c", True, "3 | 3", "ours"),
        Claim("d", None, "nothing"),
    ]
    best = Table(("", "x"), (("one", "3"), ("two", "2")), best=frozenset({(1, 1)}))
    some = Chapter("lab", "Lab", (), (Section("s", "S", "", (best,), claims=tuple(claims)),), ())
    text = page([some], {})
    assert "1 of 2 statements of the paper hold here." in text
    for mark, says in (("✓ holds", "a"), ("✗ no", "b"), ("✓ holds", "c")):
        assert f'<span class="mark">{mark}</span>{says}<' in text
    assert '<tr><td class="word">two</td><td class="best">2</td></tr>' in text
    lines = markdown([some]).splitlines()
    assert [line for line in lines if line.startswith(("| a ", "| b ", "| c ", "| d "))] == [
        "| a | paper | yes | 1 &lt; 2 |",
        "| b | paper | **no** | 2 &gt; 1 |",
        "| c | ours | yes | 3 \\| 3 |",
    ]
    assert "| two | **2** |" in lines


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [500, 1280])
def test_a_browser_shows_every_figure_and_logs_nothing(tmp_path, tokens, width):
    """In headless Chromium: no console message, every figure has a size, nothing is wider than the page."""
    rounds.train(tiny(tokens, tmp_path / "run"), quiet=True)
    out = tmp_path / "page.html"
    report([tmp_path / "run"], out)
    measure = (
        "<script>const seen = [...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect());"
        "document.body.dataset.seen = JSON.stringify({n: seen.filter(r => r.width > 200 && r.height > 100).length,"
        "wide: document.documentElement.scrollWidth - document.documentElement.clientWidth});</script></body>"
    )
    out.write_text(out.read_text().replace("</body>", measure))
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            f"--window-size={width},900",
            "--dump-dom",
            out.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr
    seen = json.loads(re.search(r'data-seen="([^"]*)"', done.stdout)[1].replace("&quot;", '"'))
    assert seen == {"n": len(re.findall("<figure ", out.read_text())), "wide": 0}
