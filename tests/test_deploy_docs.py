"""The ready-made launch examples: they parse, and every command and option in them exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import ROOT, check_twistlm, code_blocks, is_twistlm, shell_commands

FOLDER = ROOT / "docs/deploy"
SCRIPT = (FOLDER / "slurm.sh").read_text()
MANIFEST = (FOLDER / "rayjob.yaml").read_text()
DOCUMENTS = list(yaml.safe_load_all(MANIFEST))
(JOB,) = (document["spec"] for document in DOCUMENTS if document["kind"] == "RayJob")
CLUSTER = JOB["rayClusterSpec"]
BLOCKS = [SCRIPT, JOB["entrypoint"], *code_blocks((FOLDER / "README.md").read_text(), "sh")]
LINES = [words for block in BLOCKS for words in shell_commands(block) if is_twistlm(words)]


def test_every_command_and_option_exists():
    from ray.scripts.scripts import start, symmetric_run
    from torch.distributed.run import get_args_parser

    assert {check_twistlm(words) for words in LINES} == {"train", "node"}
    torchrun = {option for action in get_args_parser()._actions for option in action.option_strings}
    symmetric = {option for param in symmetric_run.params for option in param.opts}
    ray_start = {option for param in start.params for option in param.opts}
    assert {f"--{name}" for name in CLUSTER["headGroupSpec"]["rayStartParams"]} <= ray_start
    for begin, end, known in [  # the part of a line that is another program's
        ("torchrun", "-m", torchrun),
        ("symmetric-run", "--", symmetric),
        ("--", None, ray_start | {"--auto-resume", "--"}),  # or twistlm's own, checked above
    ]:
        for words in (words for words in LINES if begin in words):
            part = words[words.index(begin) :]
            part = part[: part.index(end) if end else None]
            given = {word.split("=")[0] for word in part if word.startswith("--")}
            assert given <= known, given - known
            assert begin != "torchrun" or "--max-restarts=0" in part


@pytest.mark.parametrize(
    ("args", "ran"),
    [
        (("torchrun", "my.toml"), "srun torchrun --nnodes=4 .* train.n_workers=32"),
        (("ray", "my.toml"), "symmetric-run --address node0:6379 --min-nodes 4 -- twistlm train"),
        (("join", "node7:6379"), "twistlm node --join node7:6379"),
        (("tochrun", "my.toml"), None),
    ],
)
def test_the_script_runs(tmp_path, args, ran):
    """With srun and scontrol that only note how they were called."""
    programs = {
        "srun": f'echo "srun $*" >> {tmp_path}/calls; sleep 0.3',
        "scontrol": "echo node0; echo node1",
        "openssl": "echo 0123456789abcdef",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    env |= {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "node[0-3]"}
    command = ["bash", FOLDER / "slurm.sh", *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == (0 if ran else 2), done.stderr
    assert (tmp_path / ".ray/auth_token").stat().st_mode & 0o777 == 0o600
    if ran:
        assert done.stderr == ""
        assert re.search(ran, (tmp_path / "calls").read_text())


def test_the_manifests_belong_together():
    """What is named exists or is made by the comments; images agree."""
    names = {document["metadata"]["name"] for document in DOCUMENTS}
    assert set(re.findall(r"claimName: ([\w-]+)", MANIFEST)) <= names
    assert (CLUSTER["authOptions"], CLUSTER["enableInTreeAutoscaling"]) == ({"mode": "token"}, True)
    (group,) = CLUSTER["workerGroupSpecs"]
    assert f"train.n_workers={group['maxReplicas']}" in JOB["entrypoint"]
    pods = [part["template"]["spec"] for part in (CLUSTER["headGroupSpec"], group)]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1  # the same Python and Ray
