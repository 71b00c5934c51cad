"""Help texts speak of what the code can do: their words are those of its tables."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
from commands import APP, ROOT, check_refusal, check_twistlm, in_process, is_twistlm, shell_commands
from families_table import open_parent
from typer.testing import CliRunner

import twistlm
from twistlm import cli
from twistlm.baselines import SINGLE_WEIGHTS, methods
from twistlm.cli.options import PANELS, app
from twistlm.export import RUNTIMES
from twistlm.tickets import DTYPES, IMPORTANCES, deploy

LIGHT = """
import sys
from typer.testing import CliRunner
from twistlm.cli import app
for name in sys.argv[1:]:
    shown = CliRunner().invoke(app, [*name.split(), "--help"]).output
    assert f"twistlm {name}" in shown, shown
heavy = {"torch", "transformers", "numpy", "tokenizers", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_is_light_and_has_examples():
    """Of every command: they parse, one is of the command itself, and nothing imports torch."""
    commands = [("", APP)]
    for name, command in commands:  # grows by the commands of groups
        inner = getattr(command, "commands", {})
        commands += [(f"{name} {word}".strip(), each) for word, each in inner.items()]
        examples = filter(is_twistlm, shell_commands(command.epilog or ""))
        assert inner or name in {check_twistlm(words) for words in examples}
    assert len(commands) > 20
    subprocess.run([sys.executable, "-c", LIGHT, *(name for name, _ in commands)], check=True)


def test_names_without_torch_are_those_of_the_tables():
    assert tuple(methods.METHODS) == SINGLE_WEIGHTS
    bench = APP.commands["lab"].commands["bench"].commands["deploy"]
    for command, name, expected in (  # what help does not make of the tables itself
        (APP.commands["extract"], "pick", IMPORTANCES),
        (APP.commands["extract"], "dtype", DTYPES),
        (bench, "runtime", RUNTIMES),
    ):
        (text,) = (param.help for param in command.params if param.name == name)
        assert set(expected) <= set(re.findall(r"[\w:.-]*\w", text)), text


def test_version_doctor_and_groups():
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output.strip() == f"twistlm {twistlm.__version__}"
    said = runner.invoke(app, ["doctor"]).output
    words = ("python", "torch", "transformers", "cores", "extras", "twistlm play")
    assert all(word in said for word in words)
    assert set(APP.commands) == {name for names in PANELS.values() for name in names}


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
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (wanted,) = (line for line in needs if line.startswith("transformers"))
    said = f"twistlm needs {wanted}, and transformers 4.57.6 is installed"
    for words, code, last in (
        (("-m", "twistlm", "train", "demo"), 2, f"error: {said}"),
        (("-c", "import twistlm; twistlm.register()"), 1, f"ValueError: {said}"),
        (("-m", "twistlm", "train", "--help"), 0, ""),
    ):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env)
        assert done.returncode == code
        assert done.stderr.strip().rpartition("\n")[2].startswith(last)


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
    assert "Repo id must" in str(done.exception)
