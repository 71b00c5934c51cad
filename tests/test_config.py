"""Every knob can be set, read back and got wrong: errors name field, value and what is legal."""

import dataclasses
import json
import math
import tomllib
import typing
from pathlib import Path

import numpy as np
import pytest

import twistlm
from twistlm import config
from twistlm.presets import to_toml

PRESETS = Path(config.__file__).parent / "presets"
SECTIONS = ("model", "data", "blocks", "train", "run", "ray")


def refusal(source: str, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        config.load(source, overrides)
    message = str(caught.value)
    assert "\n" not in message  # one sentence, whatever it holds
    return message


@pytest.mark.parametrize("name", config.preset_names())
def test_preset_says_what_its_file_says_and_survives_json(name):
    """Every key of the TOML arrives. A checkpoint stores JSON; resume compares types, too."""
    path = PRESETS / f"{name}.toml"
    table, loaded = tomllib.loads(path.read_text()), config.load(name)
    assert config.load(str(path)) == loaded
    below = config.load(table["base"]) if "base" in table else config.Config()
    for section in SECTIONS:
        got, usual = getattr(loaded, section), getattr(below, section)
        for field in dataclasses.fields(got):
            value = getattr(got, field.name)
            wrote = table.get(section, {}).get(field.name, getattr(usual, field.name))
            if isinstance(value, tuple):
                wrote = tuple(wrote) if isinstance(wrote, list | tuple) else (wrote,)
            assert value == wrote
    changed = config.load(name, ["blocks.k_ffn=[3, 8, 4, 6]", "train.outer=nesterov(0.7, 0.6)"])
    back = config.from_dict(json.loads(json.dumps(config.to_dict(changed))))
    assert back == changed
    assert repr(back) == repr(changed)  # == takes 1 for 1.0 and hides a float that became an int


def test_a_file_says_what_differs_from_its_base(tmp_path):
    """By hand: two keys changed in two sections, one section of its own, all else the preset's."""
    path = tmp_path / "mine.toml"
    path.write_text('base = "paper"\n[train]\nlr = 0.5\n[ray]\nopen = true\n')
    assert config.load(str(path)) == config.load("paper", ["train.lr=0.5", "ray.open=true"])
    path.write_text('base = "demo"\n[model.config]\nn_layer = 3\n')
    assert config.load(str(path)) == config.load("demo", ["model.config.n_layer=3"])
    path.write_text('base = "demo"\n[model]\ntype = "llama"\n[model.config]\nhidden_size = 8\n')
    other = ["model.type=llama", "model.config={hidden_size = 8}"]  # no n_layer of GPT-2
    assert config.load(str(path)) == config.load("demo", other)
    path.write_text('base = "papers"')
    assert "'papers': a preset is a base: demo, paper" in refusal(str(path))


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.rounds = 7", 7),
        ("train.lr=1", 1.0),  # an int stands for a float
        ('run.out="runs/quoted"', "runs/quoted"),
        ("run.out=a=b", "a=b"),  # only the first = separates
        # a name stays as it was typed, whatever TOML reads in it
        *((f"run.out={name}", name) for name in ("2024", "1e3", "1_0", "0x10", "007", "inf", "on")),
        *((f"run.out={name}", name) for name in ("2026-11-19", "true", "3.50", "[a]", "5 # b")),
        ("blocks.k_attn=4", (4,)),  # a number stands for a list of one
        ("blocks.k_attn=[3, 8, 4, 6]", (3, 8, 4, 6)),
        ("blocks.common_ffn=[]", ()),
        ("train.betas=[0.8, 0]", (0.8, 0.0)),
        ('run.eval_ratios=["8/12", "attn=2/3,ffn=6/12"]', ("8/12", "attn=2/3,ffn=6/12")),
        ("run.eval_ratios=0.50", ("0.50",)),
        ("run.eval_ratios=[0.5, '1/4']", ("0.5", "1/4")),
        ("model.config={n_layer = 4, activation_function = 'relu'}",
         {"n_layer": 4, "activation_function": "relu"}),
    ],
)  # fmt: skip
def test_override_is_parsed(tmp_path, override, value):
    (tmp_path / "empty.toml").write_text("")
    section, _, key = override.partition("=")[0].strip().partition(".")
    loaded = config.to_dict(config.load(str(tmp_path / "empty.toml"), [override]))
    usual = config.to_dict(config.Config())
    assert repr(loaded[section][key]) == repr(value)  # of the same type
    assert loaded == usual | {section: usual[section] | {key: value}}  # and nothing else moved


def test_override_reaches_into_model_config_and_the_later_wins():
    """One attribute changes, its neighbours of the preset stay; a new one is added."""
    before = config.load("demo").model.config
    more = ["model.config.n_layer=2", "model.config.n_layer=3", "model.config.resid_pdrop=0.5"]
    wanted = before | {"n_layer": 3, "resid_pdrop": 0.5}
    assert config.load("demo", more).model.config == wanted != before


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("P2/\U0001f600 \x7f\x01\t\"\\'\n", "P2/\U0001f600 \x7f\x01\t\"\\'\n"),
        (Path("a/b"), "a/b"),
        (math.inf, math.inf),
        ((1, -math.inf, 1e-7, True), [1, -math.inf, 1e-7, True]),
        (range(3), [0, 1, 2]),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.float32(0.5), 0.5),
        ([{"a b": {"c": 1.0}}], [{"a b": {"c": 1.0}}]),
        ({"a": {"b": {"c": []}}}, {"a": {"b": {"c": []}}}),
    ],
)
def test_a_python_value_arrives(tmp_path, monkeypatch, value, read):
    """By a call, and by a file that was written: as it was, of the same type."""
    seen, path = [], tmp_path / "c.toml"
    monkeypatch.setattr("twistlm.training.rounds.train", lambda cfg, **_: seen.append(cfg))
    twistlm.train("demo", {"model.config.x": value})
    path.write_text(to_toml({"model": {"config": {"x": value}}}))
    twistlm.train(path)
    assert [repr(cfg.model.config["x"]) for cfg in seen] == [repr(read)] * 2


@pytest.mark.parametrize("value", [{3, 4}, None, iter("ab"), 1j, b"x", [object()]])
def test_a_python_value_that_no_config_holds_is_named(value):
    with pytest.raises(ValueError, match=r"^blocks\.k_ffn: a config holds text, numbers"):
        twistlm.train("demo", {"blocks": {"k_ffn": value}})


OUTER = ("nesterov(0.7)", "nesterov(0, 0.6)", "nesterov(0.7, 1)", "nesterov(1e, 0.6)", "")
MISTAKES = [  # override, parts of the sentence; more of them in cli/test_bad_input.py
    *((text, (repr(text), "section.key=value")) for text in ("train.lr", "lr=3", "=3")),
    ("train.lr.peak=3", ("train.lr.peak=3", "lr is a value")),
    # unknown keys
    ("blocks.k_atn=3", ("blocks.k_atn", "did you mean blocks.k_attn?", "common_ffn")),
    ("zzzzzz.lr=3", ("zzzzzz", "Legal keys: model, data, blocks, train, run")),
    # wrong types
    ("train.rounds=true", ("train.rounds = True", "int")),
    ("run.out=[1]", ("run.out = [1]: must be str, not list",)),
    ("train.lr=fast", ("train.lr = 'fast'", "float")),
    ("blocks.k_attn=[3, 4.5]", ("blocks.k_attn = 4.5", "int")),
    ("train.betas=[0.9]", ("train.betas = [0.9]", "2 values")),
    ("model.config=5", ("model.config = 5", "dict")),
    # ranges
    *((f"{field}=0", (f"{field} = 0", "legal are > 0"))
      for field in ("blocks.n_ffn", "train.lr", "ray.min_workers", "ray.floor")),
    *((f"train.lr={value}", (f"train.lr = {value}",)) for value in ("nan", "inf")),  # legal TOML
    ("run.keep=1", ("run.keep = 1: legal are >= 2",)),
    ("train.batch=10_000_000_000", ("legal are at most 16,777,216",)),  # 8 GB as a list
    ("run.threads=100000", ("run.threads = 100000: legal are 0..1024",)),  # Python crashes
    ("train.distil=1.5", ("train.distil = 1.5: legal are 0..1",)),
    ("train.lr=1e308", ("train.lr = 1e+308: legal are > 0, at most 1e+30",)),
    ("train.betas=[1.0, 0.9]", ("train.betas = [1.0, 0.9]",)),
    ("train.betas=[0.9, -0.1]", ("train.betas = [0.9, -0.1]",)),
    *((f'train.outer="{outer}"', (f"train.outer = {outer!r}", "nesterov(lr, momentum)"))
      for outer in OUTER),
    ("ray.min_workers=9", ("ray.min_workers = 9", "train.n_workers = 4")),
]  # fmt: skip


@pytest.mark.parametrize(("override", "parts"), MISTAKES)
def test_a_mistake_is_named(override, parts):
    message = refusal("demo", override)
    assert not [part for part in parts if part not in message], message


def test_the_edges_of_a_range_are_legal():
    for edge in ("train.rounds=0", "run.keep=2", "blocks.nested=1", "train.clip=inf"):
        config.load("demo", [edge])
    cfg = config.load("demo", ["train.outer=nesterov( 1e-1 , 0 )"])
    assert cfg.train.nesterov() == (0.1, 0.0)


def test_mistakes_of_a_file(tmp_path):
    path = tmp_path / "c.toml"
    for content, parts in (
        (b"[train]\nlearning_rate = 3\n", ("train.learning_rate",)),
        (b"train = 3\n", ("train must be a section, not 3",)),
        (b"[train]\nlr = \n", (str(path), "line 2")),
        (b"[train]\nlr = \xff\xfe\n", (str(path),)),
    ):
        path.write_bytes(content)
        message = refusal(str(path))
        assert not [part for part in parts if part not in message], message


def test_every_key_refuses_other_words_and_negative_numbers():
    """The legal words are the annotation's; layers are counted when the model is known."""
    for section in SECTIONS:
        part = getattr(config.Config(), section)
        for key, hint in typing.get_type_hints(type(part)).items():
            name = f"{section}.{key}"
            if typing.get_origin(hint) is typing.Literal:
                message = refusal("demo", f"{name}=sideways")
                assert f"{name} = 'sideways'" in message
                for word in typing.get_args(hint):  # true, too: the paper's True variant
                    assert repr(word) in message
                    loaded = config.load("demo", [f"{name}={word}"])
                    assert getattr(getattr(loaded, section), key) == word
            elif hint in (int, float) and key not in ("shared_first", "shared_last"):
                assert f"{name} = -7" in refusal("demo", f"{name}=-7")
    with pytest.raises(ValueError, match=r"train\.lr = -1"):
        config.from_dict({"train": {"lr": -1}})  # out of a checkpoint: the same rules
