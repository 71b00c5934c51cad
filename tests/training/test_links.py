"""The busiest link against numbers worked out by hand, and what a round's ledger says."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from fractions import Fraction

import pytest
from conftest import tiny
from rich.console import Console

from twistlm import config
from twistlm.system import terminal
from twistlm.training import links, rounds
from twistlm.transport import traffic

THIRD = Fraction(1, 3)


@pytest.fixture(scope="module")
def sizes() -> dict[str, links.Size]:
    return {of.name: of for of in links.sizes(config.load("paper"), THIRD)}


@pytest.mark.parametrize(
    ("n_workers", "hub", "sharded", "ddp"),
    [(4, 2.77, 0.52, 11.2), (16, 11.1, 0.65, 14.0), (64, 44.4, 0.68, 14.7)],
)
def test_gpt2_small_at_a_third_in_float32(sizes, n_workers, hub, sharded, ddp):
    cfg = config.load("paper", ["train.moments=reset"])
    made = links.forecast(cfg, sizes["GPT-2 small"], n_workers, gbit=1, tflops=100)
    gigabytes = {engine: n / 1e9 for engine, n in made.n_bytes.items()}
    assert gigabytes == pytest.approx({"hub": hub, "sharded": sharded, "ddp": ddp}, rel=0.008)
    assert made.seconds["hub"] == pytest.approx(8 * made.n_bytes["hub"] / 1e9)


def test_llama_7b_in_bf16(sizes):
    of = sizes["Llama 7B"]
    assert of.n_params == 6_738_415_616
    made = [
        links.busiest(e, 64, 4 * of.n_subnet, 2 * of.n_params, 15)
        for e in ("hub", "sharded", "ddp")
    ]
    assert [n / 1e9 for n in made] == pytest.approx([758, 11.7, 398], rel=0.004)  # fmt: skip


def test_llama_70b_has_its_parameters(sizes):
    assert sizes["Llama 70B"].n_params == 68_976_648_192


def test_a_whole_number_of_blocks_is_counted_as_the_plan_counts_it(sizes):
    from twistlm.training import plan

    rows = {(row.setting, row.ratio): row for row in plan.make(config.load("paper")).rows}
    assert sizes["GPT-2 small"].n_subnet == rows["both", "4/12"].n_params


def test_which_engine_to_take(sizes):
    """A hub beside slow workers; shards beside fast ones; a ring where three rows meet one step."""
    cfg, of = config.load("paper"), sizes["GPT-2 small"]
    assert links.forecast(cfg, of, 4, gbit=10, tflops=0.01).take == "hub"
    assert links.forecast(cfg, of, 4, gbit=1, tflops=100).take == "sharded"
    every_step = replace(cfg, train=replace(cfg.train, interval=1))
    assert links.forecast(every_step, of, 4, gbit=1, tflops=100).take == "ddp"


def test_carried_moments_triple_the_bytes_and_a_narrow_wire_takes_them_back(sizes):
    of = sizes["GPT-2 small"]

    def sharded(*overrides: str) -> int:
        cfg = config.load("paper", overrides)
        return links.forecast(cfg, of, 4, gbit=1, tflops=100).n_bytes["sharded"]

    plain = sharded("train.moments=reset")
    assert sharded() == pytest.approx(3 * plain)
    # down 4 + 2 + 2, up 2 + 2 + 2 bytes of 8; down 4 + 1 + 2, up 1 + 1 + 2, and scales
    assert sharded("run.wire=bf16") == pytest.approx(14 / 8 * plain)
    assert sharded("run.wire=int8") == pytest.approx((11 + 3 * 4 / 256) / 8 * plain, rel=1e-6)


@pytest.mark.parametrize("ratio", ["0", "5/4", "x", "1/0"])
def test_a_share_that_is_none_is_refused(ratio):
    with pytest.raises(ValueError, match="--ratio"):
        links.parse_share(ratio)


def test_subnet_bytes_by_kind():
    down, up = traffic.subnet_bytes(100, 1000, 3, "fp32")
    assert down == up == traffic.Bytes(400, 3600, 8000)
    down, up = traffic.subnet_bytes(512, 1024, 3, "int8")
    assert down == traffic.Bytes(2048, 2048, 1024 + 16 + 2048)
    assert up == traffic.Bytes(520, 520, 1024 + 16 + 2048)


def test_other_counts_by_hand():
    assert traffic.other_counts(100, [60, 70], interval=3) == {
        "paper": 8 * 130, "ddp": 8 * 300, "least": 8 * 30,
    }  # fmt: skip


def test_a_round_writes_its_bytes(tokens, tmp_path):
    rounds.train(tiny(tokens, tmp_path / "run", train={"rounds": 1}), quiet=True)
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    down = row["bytes"]["down"]
    assert down == row["bytes"]["up"]
    assert sum(down.values()) == row["bytes_down"]
    assert down["moments"] == 2 * (down["shared"] + down["blocks"])
    assert row["bytes"]["paper"] == 2 * (down["shared"] + down["blocks"])
    assert 0 < row["bytes"]["least"] < row["bytes"]["paper"] < row["bytes"]["ddp"]
    assert row["bytes_wire"] == 0


def test_the_table_is_whole_in_80_characters(monkeypatch):
    monkeypatch.setattr(terminal, "console", Console(width=80, file=io.StringIO()))
    made = links.forecasts(config.load("paper", []), Fraction(1, 2), 1.0, 100.0)
    terminal.console.print(links.table(made, "links"))
    shown = terminal.console.file.getvalue()
    for row in made:
        numbers = (
            *(n / 1e9 for n in row.n_bytes.values()),
            *row.seconds.values(),
            row.train_seconds,
        )
        line = {f"{v:,.2f}" if v < 100 else f"{v:,.0f}" for v in numbers}
        line |= {str(row.n_workers), row.take}
        assert any(line <= set(text.split()) for text in shown.splitlines()), row
