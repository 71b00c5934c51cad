"""docs/python.md: every code block runs, in order, in one process, as a reader would type it."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest
from conftest import make_tokens

PAGE = Path(__file__).parents[1] / "docs/python.md"


@pytest.fixture(scope="module")
def after(tmp_path_factory) -> tuple[Path, dict]:
    """The folder and the variables after the page's last block; its text stands ready, so it is not made."""
    folder = tmp_path_factory.mktemp("page")
    for split, seed in (("train", 0), ("valid", 1)):
        place = folder / f"runs/python-docs-{platform.python_version()}-bpe512" / split
        make_tokens(place, 20_000, seed=seed, vocab=512)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == PAGE.read_text().count("```python") >= 6
    names: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    return folder, names


def test_the_five_lines_train_cut_and_evaluate(after):
    folder, names = after
    assert (folder / "runs/first/checkpoints").is_dir()
    assert names["run"].is_relative_to("runs/first")
    ticket = names["ticket"]
    assert ticket.evaluate(folder / names["ticket"].proof["perplexity"]["data"]).full > 1
    blocks = len(next(iter(ticket._proven.blueprint.values())))
    assert blocks == 6


def test_what_was_measured_is_what_was_saved(after):
    """The saved weights are the measured model's, and every budget was met."""
    import torch
    from safetensors.torch import load_file

    folder, names = after
    small = names["small"]
    saved = load_file(folder / "ticket/model.safetensors")
    measured = dict(small.model.named_parameters())
    assert saved.keys() == measured.keys()
    assert all(torch.equal(saved[name], measured[name].detach()) for name in saved)
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    record = json.loads((folder / "ticket/ticket.json").read_text())
    assert record["perplexity"] == small.proof["perplexity"]
    assert (folder / "ticket/model.safetensors").stat().st_size == record["bytes"] <= 200_000
    assert names["other"].extract(params="110k").proof["n_params"] <= 110_000


def test_mistakes_are_sentences(after):
    import twistlm

    folder, names = after
    with pytest.raises(ValueError, match="exactly one of"):
        names["parent"].extract()
    with pytest.raises(ValueError, match="is a ticket and has no tokens of its own"):
        twistlm.evaluate(folder / "ticket")
    with pytest.raises(ValueError, match="exists and is no ticket"):
        names["ticket"].save(folder / "runs")
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        twistlm.frobnicate  # noqa: B018
