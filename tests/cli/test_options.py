"""Help texts speak of what the code can do: their words are those of its tables."""

from __future__ import annotations

import re

import pytest
import typer

from twistlm import cli, config
from twistlm.cli.options import words
from twistlm.export import FORMATS, RUNTIMES
from twistlm.lab.bench import measure
from twistlm.lab.experiments import NAMES
from twistlm.lab.experiments.scales import SCALES
from twistlm.pruners import REPAIRS, SINGLE_WEIGHTS, WHOLE_BLOCKS, methods, repair
from twistlm.tickets import DTYPES, IMPORTANCES, importance

APP = typer.main.get_command(cli.app)


def test_names_without_torch_are_those_of_the_tables():
    assert tuple(methods.METHODS) == SINGLE_WEIGHTS
    assert tuple(repair.METHODS) == REPAIRS
    assert tuple(importance.METHODS) == IMPORTANCES
    assert tuple(measure.RUNTIMES) == RUNTIMES


@pytest.mark.parametrize(
    ("command", "param", "expected"),
    [
        ("train", "preset", config.preset_names()),
        ("prune", "method", (*SINGLE_WEIGHTS, *WHOLE_BLOCKS)),
        ("prune", "repair", REPAIRS),
        ("compare", "methods", (*SINGLE_WEIGHTS, *WHOLE_BLOCKS)),
        ("extract", "pick", IMPORTANCES),
        ("extract", "dtype", DTYPES),
        ("export", "to", FORMATS),
        ("export", "type_", [name for types in FORMATS.values() for name in types]),
        ("experiment", "names", NAMES),
        ("experiment", "scale", SCALES),
        ("bench deploy", "runtime", RUNTIMES),
    ],
)
def test_help_lists_every_word(command, param, expected):
    found = APP
    for name in command.split():
        found = found.commands[name]
    (text,) = (p.help for p in found.params if p.name == param)
    assert set(expected) <= set(re.findall(r"[\w:.-]*\w", text)), text


def test_words():
    assert words(["a"]) == "a"
    assert words(["a", "b", "c"]) == "a, b or c"
