"""docs/python.md: every code block runs, in order, in one process, as a reader would type it."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from conftest import make_tokens
from safetensors.torch import load_file

import twistlm
from twistlm.tickets.requests import ShrinkRequest

PAGE = Path(__file__).parents[1] / "docs/python.md"


@pytest.fixture(scope="module")
def after(tmp_path_factory) -> tuple[Path, dict]:
    """The folder and the variables after the page's last block; its text stands ready."""
    q = torch.ones(1, 1, 1024, 16, dtype=torch.bfloat16)
    try:  # torch 2.13 on a CPU with AMX fails here under ATEN_CPU_CAPABILITY=default or avx2
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    except RuntimeError as error:
        pytest.skip(f"torch's attention in bfloat16: {error}")
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


def test_what_was_measured_is_what_was_saved(after):
    """The saved weights are the measured model's, and every budget was met."""
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
    for each in (small, names["parent"]):  # no repr prints a whole model
        assert len(repr(each).splitlines()) == 1


def test_numbers_and_tables_are_natural(after, monkeypatch):
    """params=90000, ratio=0.5 and {"train.lr": 1e-3}: the same as their words."""
    parent, seen = after[1]["parent"], []
    for asked in (
        ({"params": 90_000.0, "spend": "even"}, {"params": "90k", "spend": "even"}),
        ({"ratio": 0.5}, {"ratio": "6/12"}),
    ):
        one, other = (parent.extract(**each, tokens=64) for each in asked)
        assert one.blueprint == other.blueprint
    note = lambda cfg, **_: seen.append(cfg)  # noqa: E731
    monkeypatch.setattr("twistlm.training.rounds.train", note)
    twistlm.train("demo", {"train.lr": 1e-3, "run": {"out": "x", "eval_every": -1}}, "run.seed=3")
    twistlm.train("demo", "train.lr=1e-3", "run.out=x", "run.eval_every=-1", {"run.seed": 3})
    where = {"run.out": Path("x"), "run.seed": 3, "run.eval_every": -1}
    twistlm.train("demo", where, "train.lr=1e-3")
    assert seen[0] == seen[1] == seen[2]
    assert (seen[0].train.lr, seen[0].run.out, seen[0].run.seed) == (1e-3, "x", 3)
    with pytest.raises(ValueError, match="a GPT2LMHeadModel came alone"):
        twistlm.train(after[1]["plain"])


def test_a_saved_ticket_is_loaded_by_transformers(tmp_path):
    """In the process that saved it, nobody has to think of `register`."""
    code = """
import sys, torch, twistlm
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
shape = GPT2Config(n_layer=3, n_embd=24, n_head=4, n_positions=32, vocab_size=64)
cut = {"blocks": {"n_ffn": 4, "shared_first": 1, "shared_last": 0}}
parent = twistlm.open_parent(GPT2LMHeadModel(shape), cut)
folder = parent.extract(ratio="1/2").save(sys.argv[1])
print(type(AutoModelForCausalLM.from_pretrained(folder)).__name__)
"""
    _, said = ranks.script(tmp_path, code, tmp_path / "small")
    assert said.splitlines()[-1] == "TicketGPT2LMHeadModel"


def test_mistakes_are_sentences(after):
    folder, names = after
    with pytest.raises(ValueError, match="give ratio, params, size"):
        names["parent"].extract()
    with pytest.raises(ValueError, match=r"^params 'x' is no amount") as error:
        names["parent"].extract(params="x")
    assert "--" not in str(error.value)
    with pytest.raises(ValueError, match=r"x--y/--z\.bin.*`twistlm prepare FILE... -o .*x--y/--z`"):
        names["parent"].extract(ratio="6/12", data=folder / "x--y/--z")
    with pytest.raises(ValueError, match=r"^out .* exists and is no ticket"):
        names["ticket"].save(folder)
    with pytest.raises(ValueError, match=r"is a ticket and has no tokens of its own.*: give data"):
        twistlm.evaluate(folder / "ticket")  # from another folder than the run's
    with pytest.raises(AttributeError, match=r"no attribute 'frobnicate'$"):
        twistlm.frobnicate  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'extract': open_parent"):
        twistlm.extract  # noqa: B018
    with pytest.raises(ValueError, match=r"^unknown key param; did you mean params\? Legal keys"):
        names["parent"].extract(param="1M")
    with pytest.raises(ValueError, match=r"^model takes a str, not a Ticket: A Hugging Face"):
        twistlm.shrink(names["ticket"], PAGE, out=folder / "small", to="1M")
    with pytest.raises(ValueError, match=r"^hours takes a float, not a str"):
        twistlm.shrink("nowhere", PAGE, out=folder / "small", to="1M", hours="2")
    with pytest.raises(ValueError, match=r"^hours 0: legal are > 0, <= 8784$"):
        twistlm.shrink("nowhere", PAGE, out=folder / "small", to="1M", hours=0)
    with pytest.raises(ValueError, match=r"^layers takes an int, not a bool"):
        names["parent"].extract(ratio="6/12", layers=True)
    with pytest.raises(ValueError, match=r"^on_round = 5: must be a function"):
        twistlm.train("demo", on_round=5)
    with pytest.raises(ValueError, match=r"^7"):
        twistlm.load_ticket(7)
    with pytest.raises(ValueError, match=r"^a text is a file, .* or documents, not a object"):
        twistlm.shrink("nowhere", object(), out=folder / "small", to="1M")
    with pytest.raises(ValueError, match=r"^a Ticket is no folder"):
        twistlm.open_parent(names["ticket"])
    with pytest.raises(ValueError, match=r"ratios: Ticket.* is a ticket, which is cut already"):
        twistlm.evaluate(names["ticket"], "6/12")


def test_numbers_of_numpy_and_nothing_are_natural_values(after, monkeypatch):
    """Also in what is written of a request: JSON knows none of them."""
    monkeypatch.chdir(after[0])
    parent, how = after[1]["parent"], {"seed": np.int64(1), "stock": np.False_}
    asked = parent.extract(params=np.int64(100_000), ratio=None, tokens=np.int64(64), **how)
    other = parent.extract(params="100k", tokens=64, seed=1)
    assert asked.model.num_parameters() == other.model.num_parameters()
    assert json.dumps(asked.proof["pick"]) == json.dumps(other.proof["pick"])
    asked.save("numpy")
    request = ShrinkRequest(model="nowhere", out="x", hours=np.float32(0.5))
    assert repr(request.hours) == "0.5"
    other = twistlm.open_parent(
        parent.template,
        {"blocks.shared_first": 1, "blocks.shared_last": 1},
        {"data.seq_len": np.int64(32)},
    )
    assert other.cfg.data.seq_len == 32
    with pytest.raises(ValueError, match=r"^n takes an int, not a str: Random subnets"):
        parent.evaluate("6/12", n="3")
    with pytest.raises(ValueError, match=r"^stock takes a bool, not a str"):
        parent.extract(ratio="6/12", stock="no")


def test_evaluate_takes_what_is_in_memory(after, monkeypatch):
    monkeypatch.chdir(after[0])
    parent, ticket = after[1]["parent"], after[1]["ticket"]
    for words in ({}, {"tokens": 64}):
        assert twistlm.evaluate(ticket, **words).full == ticket.evaluate(**words).full
        scores = twistlm.evaluate(parent, "6/12", n=2, **words)
        assert scores.subnets == parent.evaluate("6/12", n=2, **words).subnets
    for source in (parent, ticket, after[0] / "ticket"):
        with pytest.raises(ValueError, match=r"^tokens 5: fewer than data\.seq_len = "):
            twistlm.evaluate(source, tokens=5)
    with pytest.raises(ValueError, match=r"^tokens takes an int, not a str"):
        ticket.evaluate(tokens="x")
    with pytest.raises(ValueError, match=r"^tokens -1: legal are >= 0"):
        ticket.evaluate(tokens=-1)


BEFORE = """
import os, sys
modules, environment = set(sys.modules), dict(os.environ)
import twistlm
twistlm.__version__, dir(twistlm)
new = {name.partition(".")[0] for name in set(sys.modules) - modules}
assert not new - {"twistlm"} - set(sys.stdlib_module_names), new
assert dict(os.environ) == environment
twistlm.Config()
assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
"""

AFTER = """
import importlib, logging, pkgutil, sys, warnings
import torch, torch._dynamo, transformers
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging as hf_logging

def state():
    backends = torch.backends
    loggers = [logging.getLogger(name) for name in (None, "transformers", "torch")]
    return {
        "import hooks": list(sys.meta_path),
        "from_dict": PreTrainedConfig.__dict__["from_dict"],
        "filters": list(warnings.filters),
        "loggers": repr([(log.level, log.handlers) for log in loggers]),
        "transformers": (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()),
        "ticket classes": [name for name in dir(transformers) if name.startswith("Ticket")],
        "torch": (
            torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
            torch.initial_seed(), torch.get_float32_matmul_precision(), backends.mkldnn.enabled,
            backends.cuda.matmul.allow_tf32, torch._dynamo.config.recompile_limit,
        ),
    }

before = state()
extras = "datasets pydantic tensorboard gguf matplotlib onnx onnxruntime onnxscript"
for extra in extras.split():
    sys.modules[extra] = None  # as if it were not installed
import twistlm
assert state() == before, (before, state())
for module in pkgutil.walk_packages(twistlm.__path__, "twistlm."):
    if module.name != "twistlm.__main__":
        importlib.import_module(module.name)
now = state()
for what in before:
    if what != "filters":  # libraries behind some modules add their own
        assert now[what] == before[what], (what, before[what], now[what])
"""


@pytest.mark.parametrize("code", [BEFORE, AFTER], ids=["before", "after"])
def test_import_before_and_after_torch_and_transformers(code):
    """Before, nothing but the standard library is loaded; after, no module of the package changes
    anything when it is imported, or needs an extra.
    """
    # what the command line sets for itself, in tests that ran it in this process
    quiet = ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS")
    env = {name: value for name, value in os.environ.items() if name not in quiet}
    env |= {"PYTHONPATH": str(Path(twistlm.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], cwd="/", env=env, check=True)
