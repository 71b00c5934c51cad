"""Small things to train on: tiny random models of every family, token files made on the spot."""

import functools
import os
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from twistlm.data.prepare import prepare
from twistlm.data.token_file import TokenMeta, write_meta

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
# a machine that stalls for half a minute must not end Ray's drivers, which are pytest's own
# processes, nor the shared cluster; Ray reads this once, when it is imported
os.environ |= {"RAY_gcs_rpc_server_reconnect_timeout_s": "300"}
os.environ |= {"RAY_health_check_timeout_ms": "60000"}

import pytest
import torch
import typer.main
from xdist.scheduler import LoadScopeScheduling

from twistlm import config
from twistlm.compute import speed
from twistlm.data.stream import Batches

# bitwise comparisons need equal threads; CI has two cores and two workers, so one is the default
THREADS = int(os.environ.get("TWISTLM_TEST_THREADS", "1"))
torch.set_num_threads(THREADS)

# a process calls the app once; tests do hundreds of times, and it would build every command anew
typer.main.get_command = functools.cache(typer.main.get_command)
# every ticket is timed, and no test asks how fast it is: one run of a few tokens
speed.measure_all.__wrapped__.__defaults__ = (1, 8, 3)

VOCAB = 64
PATIENT = {key: os.environ[key] for key in os.environ if key.startswith(("RAY_gcs", "RAY_health"))}


# for one process, whose actors serve one test after another: each takes seconds to import torch
ON_RAY = ["owners", "ray", "node", "strangers"]
# files that take longest: none of them is left to the end
LONG = ["sharded", "engines", "python_page", "onnx", "experiments", "compare", "files", "hf_folder"]
LONG += ["extract", "compiled", "recipe", "play", "shrink", "checkpoint"]


class ByFile(LoadScopeScheduling):
    """A process has a file for itself, or what it makes for a module would be made twice."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0]).stem.removeprefix("test_")
        return "ray" if file in ON_RAY else file


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)


def pytest_collection_modifyitems(items):
    first = [*ON_RAY, *LONG]
    names = {item: item.path.stem.removeprefix("test_") for item in items}
    items.sort(key=lambda item: ([*first, names[item]]).index(names[item]))


@pytest.fixture(autouse=True)
def same_threads():
    """A test that leaves another number of threads fails, not the one after it."""
    yield
    left = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    assert left == THREADS, f"{left} threads are left"


def make_tokens(stem: Path, n_tokens: int = 6000, seed: int = 0, vocab: int = VOCAB) -> str:
    """A token file of a noisy walk: learnable, with no tokenizer behind it."""
    rng = np.random.default_rng(seed)
    steps = rng.choice([1, 2, 3, 11], size=n_tokens)
    tokens = (np.cumsum(steps) % vocab).astype("<u2")
    stem.parent.mkdir(parents=True, exist_ok=True)
    tokens.tofile(f"{stem}.bin")
    largest = int(tokens.max())
    write_meta(stem, TokenMeta(n_tokens, 1, vocab, largest, "uint16", "none", None, ["walk"]))
    return str(stem)


def batch_of(batches: Batches, n_workers: int, worker: int, step: int) -> torch.Tensor:
    """The batch of a worker's step when nobody is lost: int64 [batch, seq_len]."""
    first = (step * n_workers + worker) * batches.batch
    rows = batches.rows_at(range(first, first + batches.batch))
    return batches.file.sequences(rows, batches.seq_len)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return make_tokens(tmp_path / "tokens")


def tiny_table(tokens: str, out: Path, **sections: dict) -> dict:
    """A config table of a 3-layer GPT-2 with 4 heads that trains in a second."""
    size = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": 16, "n_head": 4, "n_layer": 3}
    table: dict = {
        "model": {"type": "gpt2", "config": size},
        "data": {"train": tokens, "valid": tokens, "seq_len": 16},
        "blocks": {"n_ffn": 4, "k_attn": 2, "k_ffn": 3, "shared_first": 1, "shared_last": 0},
        "train": {"n_workers": 3, "rounds": 4, "interval": 3, "batch": 2, "lr": 1e-2},
        "run": {"out": str(out), "device": "cpu", "threads": THREADS, "save_every": 1},
    }
    table["train"] |= {"betas": [0.9, 0.95], "weight_decay": 0.1, "clip": 1.0}
    table["run"] |= {"eval_every": -1, "eval_tokens": 512, "eval_ratios": ["2/4"], "eval_n": 2}
    for section, values in sections.items():
        table[section] = table.get(section, {}) | values
    return table


def tiny(tokens: str, out: Path, **sections: dict) -> config.Config:
    return config.from_dict(tiny_table(tokens, out, **sections))


@pytest.fixture(scope="session")
def ray_address(tmp_path_factory):
    """One Ray cluster for the whole session (processes.py)."""
    from processes import shared_head

    folder = tmp_path_factory.getbasetemp()
    with shared_head(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) as address:
        yield address


@pytest.fixture
def scene(ray_address, tmp_path):
    """`scene(train={...})`: a run on Ray in a folder; none of its processes outlives the test."""
    from processes import Scene

    tokens, made = make_tokens(tmp_path / "tokens"), []

    def make(**sections: dict) -> Scene:
        made.append(Scene(ray_address, tmp_path, tokens, **sections))
        return made[-1]

    yield make
    for here in made:
        here.close()


def word_level(names: list[str]) -> Tokenizer:
    tok = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tok


def write_words(name: str, names: list[str], n: int) -> None:
    """A real token file, with a tokenizer behind it: every word once, then random ones."""
    words = (names + random.Random(n).choices(names, k=n))[:n]
    Path(f"{name}.txt").write_text(" ".join(words))
    prepare([f"{name}.txt"], name, word_level(names), quiet=True)
