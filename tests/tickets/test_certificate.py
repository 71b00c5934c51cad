"""The certificate's promise: the bound holds at its stated rate, for any shape of distribution."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tokens
from families_table import tiny_model

from twistlm.model import generator
from twistlm.tickets import bounds, certify, deploy, score
from twistlm.tickets.certify import Certificate, reading, table
from twistlm.tickets.parent import Parent, open_parent
from twistlm.tickets.requests import CertificateRequest

SEQ_LEN = 16
CUT = ("blocks.n_ffn=4", "blocks.shared_first=1", "blocks.shared_last=0", f"data.seq_len={SEQ_LEN}")


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.95, 0.99])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_rank_is_that_of_the_binomial_sum(coverage, confidence):
    """The smallest r for which fewer than r of n draws below the quantile are likely enough."""
    for n in (1, 2, 7, 59, 90, 200, 500):
        mass = [math.comb(n, i) * coverage**i * (1 - coverage) ** (n - i) for i in range(n + 1)]
        legal = [r for r in range(1, n + 1) if math.fsum(mass[:r]) >= confidence - 1e-12]
        if legal:
            assert bounds.rank(n, coverage, confidence) == min(legal), n
        else:
            with pytest.raises(
                ValueError, match=f"n = {n} .* at least {fewest(coverage, confidence)}"
            ):
                bounds.rank(n, coverage, confidence)


def fewest(coverage: float, confidence: float) -> int:
    n = 1
    while 1 - coverage**n < confidence - 1e-12:
        n += 1
    return n


def test_published_sample_sizes():
    """One-sided, distribution-free: 59 for 95/95, 90 for 95/99, 299 for 99/95, 22 for 90/90."""
    cases = {(0.95, 0.95): 59, (0.95, 0.99): 90, (0.99, 0.95): 299, (0.9, 0.9): 22}
    assert {case: bounds.smallest_n(*case) for case in cases} == cases
    assert bounds.smallest_n(0.5, 0.75) == 2  # 1 - 0.5 ** 2 is 0.75 to the last bit
    assert bounds.rank(2, 0.5, 0.75) == 2
    for n in (20, 100, 200):  # the share below the worst: its n-th power is 1 - confidence
        assert bounds.covered_by_worst(n, 0.99) ** n == pytest.approx(0.01)
    for bad in (0.0, 1.0, -0.1, 95.0):
        for name, shares in (("coverage", (bad, 0.99)), ("confidence", (0.95, bad))):
            with pytest.raises(ValueError, match=f"{name} = {bad}"):
                bounds.rank(100, *shares)


POPULATIONS = {
    "normal": lambda rng, n: rng.normal(50, 1, n),
    "uniform": lambda rng, n: rng.uniform(0, 1, n),
    "heavy tail": lambda rng, n: 1 + rng.pareto(0.7, n),
    "two modes": lambda rng, n: rng.normal(0, 1, n) + 90 * (rng.random(n) < 0.1),
    "left tail": lambda rng, n: -rng.lognormal(0, 2, n),
    "few values": lambda rng, n: rng.poisson(2.0, n).astype(float),
    "coin": lambda rng, n: (rng.random(n) < 0.1).astype(float),
    "constant": lambda rng, n: np.full(n, 7.0),
}  # fmt: skip
CONTINUOUS = {"normal", "uniform", "heavy tail", "two modes", "left tail"}


@pytest.mark.parametrize("name", POPULATIONS)
@pytest.mark.parametrize(("n", "coverage", "confidence"), [(40, 0.9, 0.95), (200, 0.95, 0.99)])
def test_the_bound_holds_at_its_stated_rate(name, n, coverage, confidence):
    """Many certificates from one population of tickets: count how often the bound is true."""
    n_certificates = 3000
    rng = np.random.default_rng(sum(map(ord, name)) + n)
    population = np.sort(POPULATIONS[name](rng, 100_001))
    held = 0
    for _ in range(n_certificates):
        values = population[rng.integers(population.size, size=n)].tolist()
        bound = bounds.bound(values, coverage, confidence)
        assert bound.value in values
        below = np.searchsorted(population, bound.value, side="right") / population.size
        held += below >= coverage
    rate = held / n_certificates
    assert rate >= confidence - 4 * math.sqrt(confidence * (1 - confidence) / n_certificates)
    if name in CONTINUOUS:  # without ties the rate is known, and one rank lower would break it
        mass = [math.comb(n, i) * coverage**i * (1 - coverage) ** (n - i) for i in range(n + 1)]
        exact = math.fsum(mass[: bound.rank])
        assert rate == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / n_certificates))
        assert math.fsum(mass[: bound.rank - 1]) < confidence <= exact


# ---------------------------------------------------------------- a model's certificate


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Parent:
    folder = tmp_path_factory.mktemp("parent")
    tiny_model("llama").save_pretrained(folder / "model")
    make_tokens(folder / "tokens", 400)
    return open_parent(folder / "model", "cpu", CUT)


def tokens_of(parent: Parent) -> str:
    return str(Path(parent.source).parent / "tokens")


def make(parent: Parent, folder: Path | None = None, n: int = 12, **more) -> Certificate:
    options = {"data": tokens_of(parent), "tokens": 64, "coverage": 0.8, "confidence": 0.9}
    request = CertificateRequest(ratio="2/4", n=n, **options | more)
    return certify.certify(parent, request, folder, quiet=True)


def test_values_are_the_perplexities_of_extracted_tickets(parent):
    """Against Hugging Face's own loss of the ticket, cut by another path."""
    made = make(parent)
    ids = torch.from_numpy(np.fromfile(f"{tokens_of(parent)}.bin", "<u2")[:64].astype(np.int64))
    widths = {group.name: 2 for group in parent.block_map.groups}
    for draw, value in enumerate(made.spread.values):
        blueprint = generator.for_deployment(parent.block_map, widths, seed=0, draw=draw)
        ticket = deploy.cut_ticket(parent, blueprint)
        with torch.no_grad():
            rows = ids.view(-1, SEQ_LEN)
            loss = ticket(input_ids=rows, labels=rows).loss
        assert value == pytest.approx(math.exp(loss), rel=1e-5)
    assert len(set(made.spread.values)) == 12
    assert made.bound.value == sorted(made.spread.values)[made.bound.rank - 1]
    assert made.full == pytest.approx(make(parent, n=15).full)


def test_record_and_table(parent, tmp_path, monkeypatch, capsys):
    made = make(parent, tmp_path / "out", n=15)
    record = json.loads((tmp_path / "out/certificate.json").read_text())
    values = record["spread"]["values"]
    assert values == list(made.spread.values)
    assert record["spread"]["mean"] == pytest.approx(statistics.fmean(values))
    assert record["spread"]["sd"] == pytest.approx(statistics.stdev(values))
    assert record["spread"]["worst"] == max(values)
    assert record["quantiles"]["50%"] == pytest.approx(statistics.median(values))
    assert record["bound"]["rank"] == made.bound.rank
    assert sum(record["histogram"]["counts"]) == 15
    assert {"command", "git", "versions", "device"} <= set(record["run"])
    assert (tmp_path / "out/histogram.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "certificate.json", "draws.jsonl", "histogram.png",
    ]  # fmt: skip
    assert f"80% of tickets are at or below {made.bound.value:.2f}, with 90% confidence" in reading(
        made
    )
    assert table(made).row_count == 1
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    make(parent, tmp_path / "bare")
    assert "pip install -e '.[plot]'" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "bare").iterdir()}
    assert names == {"certificate.json", "draws.jsonl"}  # only the picture is missing


def test_goes_on_where_it_stopped(parent, tmp_path):
    """Half a line of a killed process is dropped; draws that were kept are not measured again."""
    whole = make(parent, n=15)
    folder = tmp_path / "out"
    make(parent, folder, n=11)
    path = folder / "draws.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    marked = json.loads(lines[1]) | {"perplexity": 1.5}  # a value no model gives
    path.write_text("".join([lines[0], json.dumps(marked) + "\n", *lines[2:6], lines[6][:9]]))
    made = make(parent, folder, n=15)
    assert made.spread.values == (1.5, *whole.spread.values[1:])
    assert len(path.read_text().splitlines()) == 1 + 15
    assert make(parent, folder, n=11).spread.values == made.spread.values[:11]
    path.write_text('{"weights')  # killed in the first line: a beginning
    assert make(parent, folder, n=15).spread.values == whole.spread.values
    assert len(path.read_text().splitlines()) == 1 + 15


def test_refusals(parent, tmp_path):
    """Draws of something else stay as they are; too few promise nothing; NaN is no number."""
    make(parent, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for more in ({"seed": 1}, {"tokens": 32}):
        with pytest.raises(ValueError, match=r"something else .*choose another folder"):
            make(parent, tmp_path, **more)
    other = open_parent(parent.source, "cpu", CUT)
    other.central.weights[0] += 1e-6
    with pytest.raises(ValueError, match="weights_sha256"):
        make(other, tmp_path, data=tokens_of(parent))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(ValueError, match=r"n = 10 .*95%.*99%.* at least 90"):
        make(parent, tmp_path / "out", n=10, coverage=0.95, confidence=0.99)
    other.central.weights.fill_(math.nan)
    with pytest.raises(ValueError, match="ticket 0 has no perplexity"):
        make(other, tmp_path / "nan", data=tokens_of(parent))
    assert not (tmp_path / "out").exists()


def test_tickets_with_common_blocks_are_other_tickets(parent, tmp_path):
    """They are not mixed with draws that may lack C, and every one of them holds it."""
    cut = ["blocks.common_attn=[3]", "blocks.common_ffn=[0]"]
    mine = open_parent(parent.source, "cpu", [*CUT, *cut])
    make(parent, tmp_path / "out")
    with pytest.raises(ValueError, match=r"something else \(tickets differ\)"):
        make(mine, tmp_path / "out")
    ready = score.evaluator(mine, tokens_of(parent), 64)
    pairs = {"attn": [(b, 3) for b in (0, 1, 2)], "ffn": [(0, b) for b in (1, 2, 3)]}
    names = [group.name for group in mine.block_map.groups]
    hands = itertools.product(*(pairs[name.rpartition(".")[2]] for name in names))
    every = [ready.subnet_perplexity(dict(zip(names, hand, strict=True))) for hand in hands]
    assert len(every) == 3**4
    for value in make(mine).spread.values:
        assert min(abs(value / other - 1) for other in every) < 1e-6
