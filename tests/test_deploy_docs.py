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


def yaml_documents() -> list[dict]:
    return list(yaml.safe_load_all((FOLDER / "rayjob.yaml").read_text()))


def job() -> dict:
    (found,) = (document for document in yaml_documents() if document["kind"] == "RayJob")
    return found["spec"]


def command_lines() -> list[list[str]]:
    """Every command of the README's blocks, of the script and of the job that runs twistlm."""
    words = shell_commands((FOLDER / "slurm.sh").read_text())
    for block in code_blocks((FOLDER / "README.md").read_text(), "sh"):
        words += shell_commands(block)
    words.append(job()["entrypoint"].split())
    return [line for line in words if is_twistlm(line)]


def test_every_twistlm_command_exists():
    named = [check_twistlm(words) for words in command_lines()]
    assert len(named) >= 8
    assert set(named) == {"train", "node"}


def test_what_ray_is_told_exists():
    """Options of `ray symmetric-run` and of `ray start`, as this Ray knows them."""
    from ray.scripts.scripts import start, symmetric_run

    known = {option for param in symmetric_run.params for option in param.opts}
    (line,) = (line for line in command_lines() if "symmetric-run" in line)
    begin = line.index("symmetric-run") + 1
    given = {word for word in line[begin : line.index("--")] if word.startswith("--")}
    assert given
    assert given <= known
    known = {option for param in start.params for option in param.opts}
    cluster = job()["rayClusterSpec"]
    params = cluster["headGroupSpec"]["rayStartParams"]
    more = [
        word
        for line in command_lines()
        if "node" in line and "--" in line
        for word in line[line.index("--") + 1 :]
    ]
    assert {f"--{name}" for name in params} | {w for w in more if w.startswith("--")} <= known
    assert "--labels" in known  # a machine's own K


def test_every_torchrun_option_exists():
    from torch.distributed.run import get_args_parser

    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    seen = set()
    for words in command_lines():
        if "torchrun" not in words:
            continue
        begin = words.index("torchrun") + 1
        options = {word.split("=")[0] for word in words[begin : words.index("-m", begin)]}
        assert all(option in known for option in options), options - known
        assert "--max-restarts=0" in words
        seen |= options
    assert {"--nnodes", "--rdzv-id", "--rdzv-backend", "--rdzv-endpoint"} <= seen


def test_the_script_is_bash():
    subprocess.run(["bash", "-n", FOLDER / "slurm.sh"], check=True)


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
    for name, body in {
        "srun": f'echo "srun $*" >> {tmp_path}/calls; sleep 0.3',
        "scontrol": "echo node0; echo node1",
        "openssl": "echo 0123456789abcdef",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_NODELIST": "node[0-3]",
    }
    bash = shutil.which("bash")
    done = subprocess.run(
        [bash, FOLDER / "slurm.sh", *args], env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    calls = (tmp_path / "calls").read_text()
    assert all(part in calls for part in ran), calls
    secret = tmp_path / ".ray/auth_token"
    assert secret.stat().st_mode & 0o777 == 0o600
    wrong = subprocess.run(
        [bash, FOLDER / "slurm.sh", "tochrun", "my.toml"], env=env, capture_output=True
    )
    assert wrong.returncode == 2


@pytest.mark.chaos
def test_the_script_trains(tmp_path):
    """Its part for Ray on a job of one node, as SLURM would run it; in a process namespace, because
    `ray symmetric-run` refuses a machine on which it sees another Ray."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("namespaces need root")
    path = toml(
        tmp_path / "my.toml", tiny_table(make_tokens(tmp_path / "tokens"), tmp_path / "run")
    )
    for name, body in {"srun": 'exec "$@"', "scontrol": "echo 127.0.0.1"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = (FOLDER / "slurm.sh").read_text().replace("gpus=8 ", "gpus=2 ")
    (tmp_path / "slurm.sh").write_text(script.replace(":6379", f":{free_port()}"))
    env = environment(
        PATH=f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        HOME=str(tmp_path),
        SLURM_JOB_ID="7",
        SLURM_JOB_NUM_NODES="1",
        SLURM_JOB_NODELIST="node0",
    )
    env.pop("RAY_AUTH_TOKEN")
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "bash", tmp_path / "slurm.sh", "ray", path],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    joined = [
        row for row in (tmp_path / "run/events.jsonl").read_text().splitlines() if "joined" in row
    ]
    assert len(joined) == 2
    assert (tmp_path / "run/checkpoints/round-000004").is_dir()


def test_the_manifests_belong_together():
    """Claims and config maps that are named exist or are made by the comments; the job is KubeRay's."""
    documents = yaml_documents()
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    assert len(names) == len(documents)
    text = (FOLDER / "rayjob.yaml").read_text()
    for claim in re.findall(r"claimName: ([\w-]+)", text):
        assert ("PersistentVolumeClaim", claim) in names
    for made in re.findall(r"configMap: \{name: ([\w-]+)", text):
        assert f"kubectl create configmap {made}" in text
    cluster = job()["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["enableInTreeAutoscaling"] is True
    (group,) = cluster["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert f"train.n_workers={group['maxReplicas']}" in job()["entrypoint"]
    images = {
        part["template"]["spec"]["containers"][0]["image"]
        for part in (cluster["headGroupSpec"], group)
    }
    assert len(images) == 1  # the same Python, Ray and twistlm
    for part in (cluster["headGroupSpec"], group):
        (container,) = part["template"]["spec"]["containers"]
        volumes = {volume["name"] for volume in part["template"]["spec"].get("volumes", [])}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes


def test_it_says_what_a_token_is():
    text = (FOLDER / "README.md").read_text()
    assert "can run code on every machine" in text
    assert "authentication, not encryption" in text
    assert "in the clear" in text
