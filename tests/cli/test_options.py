"""Help texts speak of what the code can do: their words are those of its tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from commands import check_refusal, in_process
from families_table import open_parent
from typer.testing import CliRunner

from twistlm import cli, config
from twistlm.baselines import REPAIRS, SINGLE_WEIGHTS, WHOLE_BLOCKS, methods, repair
from twistlm.cli.options import PANELS, app
from twistlm.export import FORMATS, RUNTIMES
from twistlm.lab.bench import deploy as bench_deploy
from twistlm.tickets import DTYPES, IMPORTANCES, deploy, importance

REPO = Path(__file__).parents[2]
APP = typer.main.get_command(cli.app)


def test_names_without_torch_are_those_of_the_tables():
    assert tuple(methods.METHODS) == SINGLE_WEIGHTS
    assert tuple(repair.METHODS) == REPAIRS
    assert tuple(importance.METHODS) == IMPORTANCES
    assert tuple(bench_deploy.RUNTIMES) == RUNTIMES


@pytest.mark.parametrize(
    ("command", "param", "expected"),
    [
        ("train", "preset", config.preset_names()),
        ("lab prune", "method", (*SINGLE_WEIGHTS, *WHOLE_BLOCKS)),
        ("lab prune", "repair", REPAIRS),
        ("lab compare", "methods", {*SINGLE_WEIGHTS, *WHOLE_BLOCKS} - {"block:random"}),
        ("extract", "pick", IMPORTANCES),
        ("extract", "dtype", DTYPES),
        ("export", "to", FORMATS),
        ("export", "type_", [name for types in FORMATS.values() for name in types]),
        ("lab bench deploy", "runtime", RUNTIMES),
    ],
)
def test_help_lists_every_word(command, param, expected):
    found = APP
    for name in command.split():
        found = found.commands[name]
    (text,) = (p.help for p in found.params if p.name == param)
    assert set(expected) <= set(re.findall(r"[\w:.-]*\w", text)), text


def test_version_doctor_and_groups():
    import twistlm

    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output.strip() == f"twistlm {twistlm.__version__}"
    said = runner.invoke(app, ["doctor"]).output
    words = ("python", "torch", "transformers", "cores", "extras", "twistlm play")
    assert all(word in said for word in words)
    shown = runner.invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    assert all(f" {panel} " in shown for panel in PANELS)
    assert "--install-completion" in shown
    commands = {entry.name or entry.callback.__name__ for entry in app.registered_commands}
    assert commands | {"lab"} == {name for names in PANELS.values() for name in names}


@pytest.mark.parametrize("old", cli.MOVED)
def test_old_spellings_name_the_new_one(monkeypatch, capsys, old):
    check_refusal(*in_process(monkeypatch, capsys, old, "x"), (f"`{cli.MOVED[old]}`",))
    if (new := cli.MOVED[old]).startswith("twistlm"):
        found = APP
        for word in new.split()[1:]:
            found = found.commands[word] if not word.startswith("--") else found
        assert found is not APP


def test_another_transformers_is_one_sentence(tmp_path):
    """The version that is installed is read, not imported; help, version and doctor still work."""
    about = tmp_path / "transformers-4.57.6.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.6\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])

    def run(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, *words]
        env = os.environ | {"PYTHONPATH": path}
        return subprocess.run(command, capture_output=True, text=True, env=env)

    wanted = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
    (wanted,) = (line for line in wanted if line.startswith("transformers"))
    said = f"twistlm needs {wanted}, and transformers 4.57.6 is installed"
    done = run("-m", "twistlm", "train", "demo")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {said}")
    assert "Traceback" not in done.stderr
    done = run("-c", "import twistlm; twistlm.register()")
    assert done.stderr.strip().splitlines()[-1].startswith(f"ValueError: {said}")
    assert run("-m", "twistlm", "train", "--help").returncode == 0


def test_push_says_what_would_be_sent(tmp_path):
    opened, blueprint = open_parent("llama", "head", tmp_path / "parent")
    deploy.save_ticket(opened, blueprint, tmp_path / "ticket")
    words = ["push", str(tmp_path / "ticket"), "me/mine", "--dry-run"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "nothing was sent" in done.output
    for path in (tmp_path / "ticket").iterdir():
        assert path.name in done.output
        assert f"{path.stat().st_size:,}" in done.output
    done = CliRunner().invoke(app, [*words[:2], "not a repo!", "--dry-run"])
    assert "names no repository" in str(done.exception)
