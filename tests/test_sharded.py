"""The sharded engine with real processes: bitwise the local run, in both directions of a resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import make_tokens, tiny, tiny_table
from safetensors.torch import load_file
from test_variants import FILES, toml

from twistlm import rounds, sharded
from twistlm.cluster import Cluster
from twistlm.startup import set_up

TRAIN = {
    "outer": "nesterov(0.7, 0.6)",
    "scale": "measured",
    "schedule": "cosine",
    "warmup": 4,
    "n_workers": 3,
    "rounds": 4,
}
BLOCKS = {"deal": "balanced", "k_attn": [2, 3], "k_ffn": [3, 2]}
RUN = {"keep": 4, "eval_every": 2}
PIECE = 2000  # bytes: the tiny model then has several chunks, and tiles that some worker holds nothing of


def start(folder: Path, n_ranks: int, *args: str) -> subprocess.Popen:
    """twistlm under torchrun, with small pieces."""
    script = folder / "small_pieces.py"
    script.write_text(
        f"from twistlm import cli, sharded\nsharded.PIECE = {PIECE}\ncli.main()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(n_ranks), str(script), *args]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True
    )


def finish(process: subprocess.Popen) -> str:
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output[-3000:]
    return output


def same(a: Path, b: Path) -> None:
    for name in FILES:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, str]:
    """The same four rounds: `local` in this process, `sharded` on three ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    tokens = make_tokens(folder / "tokens")
    table = tiny_table(
        tokens, folder / "sharded", train=TRAIN, blocks=BLOCKS, run=RUN | {"variant": "sharded"}
    )
    process = start(folder, 3, "train", toml(folder / "sharded.toml", table))
    rounds.train(tiny(tokens, folder / "local", train=TRAIN, blocks=BLOCKS, run=RUN), quiet=True)
    finish(process)
    return folder, tokens


def test_sharded_is_bitwise_local(runs):
    """Carried moments, outer momentum, measured scale, balanced deals, widths that change."""
    folder, _ = runs
    for r in (1, 4):
        same(*(folder / name / f"checkpoints/round-00000{r}" for name in ("local", "sharded")))
    ours, reference = lines(folder / "sharded"), lines(folder / "local")
    assert [row["loss"] for row in ours] == [row["loss"] for row in reference]
    assert [row.get("eval") for row in ours] == [row.get("eval") for row in reference]
    assert ours[1]["eval"]


def test_a_sharded_run_resumes_as_local_and_the_other_way_round(runs, tmp_path):
    folder, tokens = runs
    for name, origin in (("to_sharded", "local"), ("to_local", "sharded")):
        shutil.copytree(folder / origin, tmp_path / name)
        for r in (3, 4):
            shutil.rmtree(tmp_path / name / f"checkpoints/round-00000{r}")
    table = tiny_table(
        tokens, tmp_path / "to_sharded", train=TRAIN, blocks=BLOCKS,
        run=RUN | {"variant": "sharded"},
    )  # fmt: skip
    process = start(tmp_path, 3, "train", toml(tmp_path / "config.toml", table), "--resume")
    local = tiny(tokens, tmp_path / "to_local", train=TRAIN, blocks=BLOCKS, run=RUN)
    rounds.train(local, resume=True, quiet=True)
    assert "resuming" in finish(process)
    for name in ("to_sharded", "to_local"):
        same(*(at / "checkpoints/round-000004" for at in (folder / "local", tmp_path / name)))


def test_int8_changes_little_and_costs_a_third(runs, tmp_path):
    """The wire is a choice of bytes, not of results: weights stay near, the moments too."""
    folder, tokens = runs
    train = TRAIN | {"scale": "sqrt", "rounds": 2}
    table = tiny_table(
        tokens, tmp_path / "int8", train=train, blocks=BLOCKS,
        run={"variant": "sharded", "wire": "int8"},
    )  # fmt: skip
    process = start(tmp_path, 3, "train", toml(tmp_path / "config.toml", table))
    exact = rounds.train(tiny(tokens, tmp_path / "exact", train=train, blocks=BLOCKS), quiet=True)
    finish(process)
    for name in FILES[:2]:
        a, b = (load_file(at / name) for at in (exact, tmp_path / "int8/checkpoints/round-000002"))
        whole = np.sqrt(sum(float(t.double().square().sum()) for t in a.values()))
        apart = np.sqrt(sum(float((a[k] - b[k]).double().square().sum()) for k in a))
        assert 0 < apart < 0.02 * whole, name


def test_a_death_ends_the_run_with_a_sentence_and_resume_is_bitwise(runs, tmp_path):
    """A killed rank takes its shard with it: the others say so, and the checkpoint carries on."""
    folder, tokens = runs
    table = tiny_table(
        tokens, tmp_path / "run", train=TRAIN | {"rounds": 400}, blocks=BLOCKS,
        run=RUN | {"variant": "sharded"},
    )  # fmt: skip
    config = toml(tmp_path / "config.toml", table)
    ranks = []
    for rank in range(3):  # without torchrun, which would end the others before they could speak
        env = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_PORT": str(20000 + os.getpid() % 20000)}
        command = [sys.executable, "-m", "twistlm", "train", config]
        ranks.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | env, text=True
            )
        )  # fmt: skip
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.time() + 120
    while time.time() < deadline and not (metrics.is_file() and len(lines(tmp_path / "run")) > 4):
        time.sleep(0.02)
    ranks[1].send_signal(signal.SIGKILL)
    for rank in (0, 2):
        output = ranks[rank].communicate(timeout=60)[0]
        assert ranks[rank].returncode == 2, output[-3000:]
        assert "another rank of this run is gone" in output
        assert "--resume" in output
    ranks[1].communicate()
    done = sorted((tmp_path / "run/checkpoints").glob("round-*"))
    local = tiny(
        tokens, tmp_path / "local", train=TRAIN | {"rounds": 400}, blocks=BLOCKS, run=RUN
    )
    assert done
