"""The ready-made launch examples: they parse, and every command and option in them exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
from commands import ROOT, check_twistlm, code_blocks, is_twistlm, shell_commands

FOLDER = ROOT / "docs/deploy"


def yaml_documents() -> list[dict]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))


def containers() -> list[dict]:
    found = []
    for document in yaml_documents():
        if document["kind"] in ("Job", "Deployment"):
            found += document["spec"]["template"]["spec"]["containers"]
    return found


def command_lines() -> list[list[str]]:
    """Every command of the README's blocks, of the script and of the manifests that runs twistlm."""
    words = shell_commands((FOLDER / "slurm.sh").read_text())
    for block in code_blocks((FOLDER / "README.md").read_text(), "sh"):
        words += shell_commands(block)
    words += [container["command"] for container in containers()]
    return [line for line in words if is_twistlm(line)]


def test_every_twistlm_command_exists():
    named = [check_twistlm(words) for words in command_lines()]
    assert len(named) >= 8
    assert {"train", "hub", "worker"} <= set(named)


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
        (("hub", "my.toml"), ["twistlm hub my.toml", "hub.bind=node0:29400", "--connect node0:"]),
        (("worker", "node7:29400"), ["twistlm worker --connect node7:29400", "--ntasks=32"]),
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
    secret = tmp_path / ".twistlm-secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    wrong = subprocess.run(
        [bash, FOLDER / "slurm.sh", "tochrun", "my.toml"], env=env, capture_output=True
    )
    assert wrong.returncode == 2


def test_the_manifests_belong_together():
    """Claims, config maps, secrets and services that are named exist or are made by the comments."""
    documents = yaml_documents()
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    assert len(names) == len(documents)
    text = (FOLDER / "kubernetes.yaml").read_text()
    for claim in re.findall(r"claimName: ([\w-]+)", text):
        assert ("PersistentVolumeClaim", claim) in names
    for secret in re.findall(r"secretKeyRef: \{name: ([\w-]+)", text):
        assert f"kubectl create secret generic {secret}" in text
    for made in re.findall(r"configMap: \{name: ([\w-]+)", text):
        assert f"kubectl create configmap {made}" in text
    assert ("Service", "twistlm-hub") in names  # the host that workers connect to
    labels = [
        document["spec"]["template"]["metadata"]["labels"]
        for document in documents
        if "template" in document["spec"]
    ]
    for document in documents:
        if document["kind"] == "Service":
            assert document["spec"]["selector"] in labels


def test_it_says_that_nothing_is_encrypted():
    text = (FOLDER / "README.md").read_text()
    assert "authentication, not encryption" in text
    assert "in the clear" in text
