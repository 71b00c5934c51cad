"""`bench deploy` measures what it says: models, their bytes, the same logits; asserts no time."""

import os
from dataclasses import replace

import numpy as np
import pytest
from conftest import THREADS, make_tokens, tiny
from families_table import CUT, tiny_model

from twistlm.lab.bench import DeployRequest, DepthRequest
from twistlm.lab.bench import deploy as bench_deploy
from twistlm.lab.bench import depth as bench_depth
from twistlm.lab.bench.deploy import bench, in_a_process
from twistlm.model import generator
from twistlm.model.blocks import widths_of_ratio
from twistlm.tickets import deploy
from twistlm.tickets.parent import Parent, open_parent

FEW: dict = {"prefill": (4, 9), "decode": 3, "repeats": 2, "threads": THREADS}


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Parent:
    folder = tmp_path_factory.mktemp("parent") / "model"
    tiny_model("gpt2").save_pretrained(folder)
    return open_parent(folder, "cpu", CUT)


def test_tickets_by_depth_and_by_width_have_the_same_parameters(parent, tmp_path):
    """Counted by hand: a layer, and the largest block that one more would be."""
    tokens = make_tokens(tmp_path / "text", 2000)
    asked = DepthRequest(layers=(2,), data=tokens, tokens=160)
    rows = bench_depth.bench(replace(parent, cfg=tiny(tokens, tmp_path)), asked, quiet=True)["rows"]
    whole, deep, wide, both = rows
    assert [row["cut"] for row in rows] == ["whole", "depth", "width", "both"]
    assert [row["n_layers"] for row in rows[:3]] == [3, 2, 3]
    layer = 4 * 32 + 4 * 32 * 32 + 4 * 32 + 2 * 48 * 32 + 48 + 32  # norms, attention, FFN
    assert whole["n_params"] - deep["n_params"] == layer
    assert 0 <= deep["n_params"] - wide["n_params"] < 4 * 8 * 32 + 3 * 8
    assert both["n_params"] <= deep["n_params"]
    assert all(row["perplexity"] > 1 and row["speed"]["decode_ms"] > 0 for row in rows)


@pytest.fixture(scope="module")
def made(parent) -> dict:
    """All runtimes but those that take long to write, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_deploy, "RUNTIMES", ("torch", "llama.cpp-q8_0"))
        patch.setattr(bench_deploy, "in_a_process", lambda function, *args: function(*args))
        return bench(parent, DeployRequest(ratio=["attn=2/4,ffn=1/4"], **FEW), quiet=True)


def test_a_process_of_its_own_that_dies_is_an_error():
    with pytest.raises(OSError, match="the process that ran 1 was killed"):
        in_a_process(os._exit, 1)


def test_rows_are_the_models_that_were_measured(parent, made, tmp_path):
    """Warm-up is not counted: repeats times prompts, repeats times tokens."""
    rows, widths = made["rows"], {"full": "1", "attn=2/4,ffn=1/4": "attn=2/4,ffn=1/4"}
    assert [(row["runtime"], row["ratio"]) for row in rows] == [("torch", name) for name in widths]
    for row in rows:
        counts = {"prefill 4": 2, "prefill 9": 2, "decode": 2 * 3}
        assert {key: len(ms) for key, ms in row["ms"].items()} == counts
        for key, ms in row["ms"].items():
            assert row["median_ms"][key] == pytest.approx(float(np.median(ms)))
            assert row["min_ms"][key] == min(ms) > 0
        assert row["delta"] == 0
        kept = widths_of_ratio(parent.block_map, widths[row["ratio"]])
        ticket = generator.for_deployment(parent.block_map, kept, seed=0)
        deploy.save_ticket(parent, ticket, tmp_path / "ticket")
        assert row["n_bytes"] == (tmp_path / "ticket/model.safetensors").stat().st_size
    assert {"command", "git", "versions", "device"} <= set(made["run"])


def test_a_family_without_a_home_is_left_out_with_the_reason(parent, made):
    """llama.cpp takes no narrow GPT-2; asked for by name, that is an error."""
    assert "llama.cpp" in made["left_out"]["llama.cpp-q8_0"]
    request = DeployRequest(ratio=["attn=2/4,ffn=1/4"], runtime=["llama.cpp-q8_0"], **FEW)
    with pytest.raises(ValueError, match=r"llama\.cpp"):
        bench(parent, request, quiet=True)


def test_threads_have_a_limit():
    """With so many of them Python crashes."""
    with pytest.raises(ValueError, match=r"^--threads 100000: legal are 0\.\.1024"):
        DeployRequest(threads=100_000)
