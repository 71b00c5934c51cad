"""`bench deploy` measures what it says: models, their bytes, the same logits; asserts no time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import THREADS
from families_table import TABLE, build, tiny_model

from twistlm.lab.bench.deploy import (
    RUNTIMES,
    DeployBench,
    _lengths,
    bench,
    in_a_process,
    peak_bytes,
    table,
)
from twistlm.lab.bench.request import DeployRequest
from twistlm.tickets import deploy
from twistlm.tickets.parent import Parent, open_parent

CUT = ("blocks.n_ffn=4", "blocks.shared_first=0", "blocks.shared_last=0")


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Parent:
    folder = tmp_path_factory.mktemp("parent") / "model"
    tiny_model("gpt2").save_pretrained(folder)
    return open_parent(folder, "cpu", CUT)


FEW: dict = {"prefill": (4, 9), "decode": 3, "repeats": 2, "threads": THREADS}


@pytest.fixture(scope="module")
def made(parent, tmp_path_factory) -> tuple[DeployBench, Path]:
    """All runtimes but those that take long to write, in this process."""
    out = tmp_path_factory.mktemp("bench") / "out"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("onnx", "onnx-q8"):
            patch.delitem(RUNTIMES, name)
        patch.setattr("twistlm.lab.bench.deploy.in_a_process", here)
        return bench(parent, DeployRequest(ratio=["attn=2/4,ffn=1/4"], **FEW), out, quiet=True), out


PEAK = 12_345_678


def here(function, name, *args):
    """In this process, which holds too much else for a peak of memory to mean anything."""
    return PEAK if function is peak_bytes else function(name, *args)


def test_a_process_of_its_own(made):
    """Memory is counted where nothing else was loaded; a process that dies is an error."""
    result, out = made
    peak = in_a_process(peak_bytes, "torch", out / "torch/full/model.safetensors", result.plan)
    assert peak is None or peak > 0
    with pytest.raises(OSError, match="the process that ran 1 was killed"):
        in_a_process(os._exit, 1)


def test_rows_are_the_models_it_leaves(made):
    """Warm-up is not counted: repeats times prompts, repeats times tokens."""
    result, out = made
    names = {"full": "full", "attn=2/4,ffn=1/4": "attn=2-4,ffn=1-4"}
    assert [(row.runtime, row.ratio) for row in result.rows] == [("torch", name) for name in names]
    for row in result.rows:
        assert {n: len(ms) for n, ms in row.prefill_ms.items()} == {4: 2, 9: 2}
        assert len(row.decode_ms) == 2 * 3
        assert min(row.minima().values()) > 0
        assert list(row.medians()) == ["prefill 4", "prefill 9", "decode"]
        assert row.medians()["decode"] == pytest.approx(float(np.median(row.decode_ms)))
        assert row.minima()["prefill 9"] == min(row.prefill_ms[9])
        assert (row.peak_bytes, row.delta) == (PEAK, 0)
        file = out / "torch" / names[row.ratio] / "model.safetensors"
        assert row.n_bytes == file.stat().st_size
    assert result.rows[1].n_bytes < result.rows[0].n_bytes
    assert table(result).row_count == 2
    record = json.loads((out / "deploy.json").read_text())
    assert [row["median_ms"] for row in record["rows"]] == [row.medians() for row in result.rows]
    assert record["plan"]["threads"] == THREADS
    assert len(record["load_average"]) == 2
    assert {"command", "git", "versions", "device"} <= set(record["run"])


def test_the_logits_are_those_of_the_ticket(made):
    """What was timed is the prompt's last position of the very model on disk."""
    result, out = made
    ids = torch.tensor([result.plan.ids(9 + 3)[:4]])
    for row, name in zip(result.rows, ("full", "attn=2-4,ffn=1-4"), strict=True):
        with torch.no_grad():
            want = deploy.load_ticket(out / "torch" / name)(input_ids=ids).logits[0, -1]
        assert torch.allclose(torch.from_numpy(row.logits), want, atol=1e-5)
    with torch.no_grad():
        whole = tiny_model("gpt2")(input_ids=ids).logits[0, -1]
    assert torch.allclose(torch.from_numpy(result.rows[0].logits), whole, atol=1e-5)


def test_a_family_without_a_home_is_left_out_with_the_reason(parent, made, tmp_path):
    """llama.cpp takes no narrow GPT-2; asked for by name, that is an error."""
    result, out = made
    assert "llama.cpp" in result.left_out["llama.cpp-q8_0"]
    assert sorted(path.name for path in out.iterdir()) == ["deploy.json", "torch"]
    request = DeployRequest(ratio=[], runtime=["llama.cpp-q8_0"], **FEW)
    with pytest.raises(ValueError, match=r"llama\.cpp"):
        bench(parent, request, tmp_path / "out", quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "close"), [("torch", 1e-5), ("onnx", 1e-4), ("llama.cpp-q8_0", 0.1)]
)
def test_a_runner_remembers_and_forgets(tmp_path, name, close):
    """Decoding after a prompt is a longer prompt; a new prompt starts anew."""
    if name.startswith("llama.cpp"):
        pytest.importorskip("llama_cpp")
    model = build("llama", TABLE["llama"].config | {"num_hidden_layers": 1})
    model.save_pretrained(tmp_path / "model")
    parent = open_parent(tmp_path / "model", "cpu", CUT)
    deploy.save_ticket(parent, parent.block_map.full(), tmp_path / "ticket")
    files = RUNTIMES[name].write(tmp_path / "ticket", tmp_path / "files")
    assert all(path.is_file() for path in files)
    runner = RUNTIMES[name].load(files[0], THREADS, 16)
    ids = [3, 1, 4, 1, 5, 9]
    runner.prefill(ids[:4])
    runner.decode(ids[4])
    stepped = runner.decode(ids[5])
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids])).logits[0, -1].numpy()
    size = np.abs(want).max()
    assert np.abs(stepped - want).max() < close * size
    assert np.abs(runner.prefill(ids)[-1] - want).max() < close * size


def test_prompts_that_fit(parent):
    """40 positions hold neither 128 nor 512."""
    assert _lengths(parent, (), 32) == (8,)
    assert _lengths(parent, (5, 6), 32) == (5, 6)


def test_nothing_is_left_of_a_bench_that_failed(parent, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="legal"):
        bench(parent, DeployRequest(ratio=["5/12"]), tmp_path / "out", quiet=True)
    monkeypatch.setattr(
        deploy, "save_ticket", lambda *a: (_ for _ in ()).throw(OSError(28, "No space"))
    )
    with pytest.raises(OSError, match="Errno 28"):
        bench(parent, DeployRequest(ratio=["2/4"], decode=4), tmp_path / "out", quiet=True)
    assert not list(tmp_path.iterdir())
