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
BLOCKS = [SCRIPT, JOB["entrypoint"], *code_blocks((FOLDER / "README.md").read_text(), "sh")]
COMMANDS = [words for block in BLOCKS for words in shell_commands(block) if is_twistlm(words)]


def options(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words if word.startswith("--") and word != "--"}


def test_every_twistlm_command_exists():
    assert {check_twistlm(words) for words in COMMANDS} == {"train", "node"}


def test_every_option_of_ray_and_torchrun_exists():
    from ray.scripts.scripts import start, symmetric_run
    from torch.distributed.run import get_args_parser

    known = {option for param in symmetric_run.params for option in param.opts}
    (line,) = (words for words in COMMANDS if "symmetric-run" in words)
    assert set() < options(line[line.index("symmetric-run") : line.index("--")]) <= known
    known = {option for param in start.params for option in param.opts}
    given = {f"--{name}" for name in JOB["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]}
    for words in COMMANDS:
        if "node" in words and "--" in words:
            given |= options(words[words.index("--") :])
    assert given | {"--labels"} <= known  # a label: a machine's own K
    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    seen = set()
    for words in (words for words in COMMANDS if "torchrun" in words):
        begin = words.index("torchrun")
        seen |= options(words[begin : words.index("-m", begin)])
        assert "--max-restarts=0" in words
    assert {"--nnodes", "--rdzv-id", "--rdzv-backend", "--rdzv-endpoint"} <= seen <= known


def fake_programs(folder: Path, **bodies: str) -> None:
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)


def slurm(folder: Path, n_nodes: int, nodes: str) -> dict[str, str]:
    return {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(n_nodes),
        "SLURM_JOB_NODELIST": nodes,
    }


@pytest.mark.parametrize(
    ("args", "ran"),
    [
        (("torchrun", "my.toml"), ["srun torchrun", "--nnodes=4", "train.n_workers=32"]),
        (("ray", "my.toml"), ["symmetric-run --address node0:6379 --min-nodes 4 -- twistlm train"]),
        (("join", "node7:6379"), ["twistlm node --join node7:6379"]),
    ],
)
def test_the_script_runs(tmp_path, args, ran):
    """With srun and scontrol that only note how they were called."""
    fake_programs(
        tmp_path,
        srun=f'echo "srun $*" >> {tmp_path}/calls; sleep 0.3',
        scontrol="echo node0; echo node1",
        openssl="echo 0123456789abcdef",
    )
    env = os.environ | slurm(tmp_path, 4, "node[0-3]")
    command = [shutil.which("bash"), FOLDER / "slurm.sh"]
    done = subprocess.run([*command, *args], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    calls = (tmp_path / "calls").read_text()
    assert all(part in calls for part in ran), calls
    assert (tmp_path / ".ray/auth_token").stat().st_mode & 0o777 == 0o600
    wrong = subprocess.run([*command, "tochrun", "my.toml"], env=env, capture_output=True)
    assert wrong.returncode == 2


@pytest.mark.chaos
def test_the_script_trains(tmp_path):
    """Its part for Ray on a job of one node, as SLURM would run it; in a process namespace, because
    `ray symmetric-run` refuses a machine on which it sees another Ray."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("namespaces need root")
    table = tiny_table(make_tokens(tmp_path / "tokens"), tmp_path / "run")
    path = toml(tmp_path / "my.toml", table)
    fake_programs(tmp_path, srun='exec "$@"', scontrol="echo 127.0.0.1")
    script = SCRIPT.replace("gpus=8 ", "gpus=2 ").replace(":6379", f":{free_port()}")
    (tmp_path / "slurm.sh").write_text(script)
    env = environment(**slurm(tmp_path, 1, "node0"))
    env.pop("RAY_AUTH_TOKEN")
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "bash"]
    command = [*inside, tmp_path / "slurm.sh", "ray", path]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    events = (tmp_path / "run/events.jsonl").read_text().splitlines()
    assert len([row for row in events if "joined" in row]) == 2
    assert (tmp_path / "run/checkpoints/round-000004").is_dir()


def test_the_manifests_belong_together():
    """Claims and config maps that are named exist or are made by the comments."""
    names = {(document["kind"], document["metadata"]["name"]) for document in DOCUMENTS}
    assert len(names) == len(DOCUMENTS)
    for claim in re.findall(r"claimName: ([\w-]+)", MANIFEST):
        assert ("PersistentVolumeClaim", claim) in names
    for made in re.findall(r"configMap: \{name: ([\w-]+)", MANIFEST):
        assert f"kubectl create configmap {made}" in MANIFEST
    cluster = JOB["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["enableInTreeAutoscaling"] is True
    (group,) = cluster["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert f"train.n_workers={group['maxReplicas']}" in JOB["entrypoint"]
    pods = [part["template"]["spec"] for part in (cluster["headGroupSpec"], group)]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1  # the same Python and Ray
    for pod in pods:
        (container,) = pod["containers"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
