"""The ready-made launch examples: they parse, and every command and option in them exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import ROOT, check_twistlm, code_blocks, is_twistlm, shell_commands, toml
from conftest import make_tokens, tiny_table
from processes import environment, free_port

FOLDER = ROOT / "docs/deploy"
SCRIPT = (FOLDER / "slurm.sh").read_text()
MANIFEST = (FOLDER / "rayjob.yaml").read_text()
DOCUMENTS = list(yaml.safe_load_all(MANIFEST))
(JOB,) = (document["spec"] for document in DOCUMENTS if document["kind"] == "RayJob")
CLUSTER = JOB["rayClusterSpec"]
BLOCKS = [SCRIPT, JOB["entrypoint"], *code_blocks((FOLDER / "README.md").read_text(), "sh")]
COMMANDS = [words for block in BLOCKS for words in shell_commands(block) if is_twistlm(words)]


def options(begin: str, end: str) -> set[str]:
    """Every `--option` between these two words, in all commands that have both, in this order."""
    found = set()
    for words in COMMANDS:
        if begin in words and end in words[words.index(begin) :]:
            first = words.index(begin)
            found |= set(words[first : words.index(end, first)])
    return {word.split("=")[0] for word in found if word.startswith("--")} - {"--"}


def test_every_command_and_option_exists():
    from ray.scripts.scripts import start, symmetric_run
    from torch.distributed.run import get_args_parser

    assert {check_twistlm(words) for words in COMMANDS} == {"train", "node"}
    known = {option for param in symmetric_run.params for option in param.opts}
    assert set() < options("symmetric-run", "--") <= known
    after = [words[words.index("--") :] for words in COMMANDS if {"node", "--"} <= set(words)]
    given = {word for words in after for word in words[1:] if word.startswith("--")}
    given |= {f"--{name}" for name in CLUSTER["headGroupSpec"]["rayStartParams"]}
    known = {option for param in start.params for option in param.opts}
    assert given | {"--labels"} <= known  # a label: a machine's own K
    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    rendezvous = {"--nnodes", "--rdzv-id", "--rdzv-backend", "--rdzv-endpoint"}
    assert rendezvous <= options("torchrun", "-m") <= known
    assert all("--max-restarts=0" in words for words in COMMANDS if "torchrun" in words)


def run_script(folder: Path, script: str, args: tuple, env: dict, *, inside=(), **programs: str):
    """slurm.sh as SLURM would run it, with these programs in front of the real ones."""
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / "slurm.sh").write_text(script)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = env | {"PATH": path, "HOME": str(folder), "SLURM_JOB_ID": "7"}
    command = [*inside, shutil.which("bash"), folder / "slurm.sh", *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("args", "ran"),
    [
        (("torchrun", "my.toml"), ["srun torchrun", "--nnodes=4", "train.n_workers=32"]),
        (("ray", "my.toml"), ["symmetric-run --address node0:6379 --min-nodes 4 -- twistlm train"]),
        (("join", "node7:6379"), ["twistlm node --join node7:6379"]),
        (("tochrun", "my.toml"), None),
    ],
)
def test_the_script_runs(tmp_path, args, ran):
    """With srun and scontrol that only note how they were called."""
    env = os.environ | {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "node[0-3]"}
    srun = f'echo "srun $*" >> {tmp_path}/calls; sleep 0.3'
    fakes = {"srun": srun, "scontrol": "echo node0; echo node1", "openssl": "echo 0123456789abcdef"}
    done = run_script(tmp_path, SCRIPT, args, env, **fakes)
    if ran is None:
        assert done.returncode == 2
        return
    assert (done.returncode, done.stderr) == (0, "")
    calls = (tmp_path / "calls").read_text()
    assert all(part in calls for part in ran), calls
    assert (tmp_path / ".ray/auth_token").stat().st_mode & 0o777 == 0o600


@pytest.mark.chaos
def test_the_script_trains(tmp_path):
    """Its part for Ray on a job of one node, as SLURM would run it; in a process namespace, because
    `ray symmetric-run` refuses a machine on which it sees another Ray."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("namespaces need root")
    table = tiny_table(make_tokens(tmp_path / "tokens"), tmp_path / "run")
    args = ("ray", toml(tmp_path / "my.toml", table))
    script = SCRIPT.replace("gpus=8 ", "gpus=2 ").replace(":6379", f":{free_port()}")
    env = environment(SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="node0")
    env.pop("RAY_AUTH_TOKEN")
    fakes = {"srun": 'exec "$@"', "scontrol": "echo 127.0.0.1"}
    inside = ("unshare", "--pid", "--fork", "--mount-proc")
    done = run_script(tmp_path, script, args, env, inside=inside, **fakes)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    events = (tmp_path / "run/events.jsonl").read_text().splitlines()
    assert len([row for row in events if "joined" in row]) == 2
    assert (tmp_path / "run/checkpoints/round-000004").is_dir()


def test_the_manifests_belong_together():
    """Claims and config maps that are named exist or are made by the comments."""
    names = [(document["kind"], document["metadata"]["name"]) for document in DOCUMENTS]
    assert len(set(names)) == len(names)
    claims = re.findall(r"claimName: ([\w-]+)", MANIFEST)
    assert {("PersistentVolumeClaim", claim) for claim in claims} <= set(names)
    for made in re.findall(r"configMap: \{name: ([\w-]+)", MANIFEST):
        assert f"kubectl create configmap {made}" in MANIFEST
    assert CLUSTER["authOptions"] == {"mode": "token"}
    assert CLUSTER["enableInTreeAutoscaling"] is True
    (group,) = CLUSTER["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert f"train.n_workers={group['maxReplicas']}" in JOB["entrypoint"]
    pods = [part["template"]["spec"] for part in (CLUSTER["headGroupSpec"], group)]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1  # the same Python and Ray
    for pod in pods:
        mounts = {mount["name"] for mount in pod["containers"][0].get("volumeMounts", [])}
        assert mounts == {volume["name"] for volume in pod.get("volumes", [])}
