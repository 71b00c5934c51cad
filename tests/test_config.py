"""Every knob can be set, read back and got wrong: errors name field, value and what is legal."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import tomllib
from pathlib import Path

import pytest

from twistlm import config

PRESETS = Path(config.__file__).parent / "presets"
SECTIONS = ("model", "data", "blocks", "train", "run", "ray")


def refusal(source: str, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        config.load(source, overrides)
    message = str(caught.value)
    assert "\n" not in message  # one sentence, whatever it holds
    return message


# ---------------------------------------------------------------- presets and round trips


def test_preset_names_are_the_files():
    assert config.preset_names() == sorted(path.stem for path in PRESETS.glob("*.toml"))
    assert {"demo", "paper"} <= set(config.preset_names())


@pytest.mark.parametrize("name", config.preset_names())
def test_preset_says_what_its_file_says_and_survives_json(name):
    """Every key of the TOML arrives. A checkpoint stores JSON; resume compares types, too."""
    path = PRESETS / f"{name}.toml"
    table, loaded = tomllib.loads(path.read_text()), config.load(name)
    assert config.load(str(path)) == loaded
    for section in SECTIONS:
        got, usual = getattr(loaded, section), getattr(config.Config(), section)
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


def test_paper_preset_is_the_paper():
    """The set-up of the paper's experiments."""
    cfg = config.load("paper")
    train = cfg.train
    assert (train.n_workers, train.interval, train.batch, train.epochs) == (4, 15, 2, 3)
    assert (cfg.train.lr, cfg.train.schedule, cfg.data.seq_len) == (1e-4, "constant", 1024)
    assert (cfg.blocks.n_ffn, cfg.blocks.shared_first, cfg.blocks.shared_last) == (12, 2, 2)
    assert cfg.blocks.common_attn == cfg.blocks.common_ffn == ()


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.rounds=7", 7),
        ("train.rounds = 7", 7),
        ("train.lr=3e-4", 3e-4),
        ("train.lr=1", 1.0),  # an int stands for a float
        ("run.out=runs/a b", "runs/a b"),
        ('run.out="runs/quoted"', "runs/quoted"),
        ("run.out=a=b", "a=b"),  # only the first = separates
        ("run.out=2024", "2024"),  # a number stands for a name
        ("train.schedule=cosine", "cosine"),
        ("train.outer=nesterov(0.7, 0.6)", "nesterov(0.7, 0.6)"),
        ("blocks.k_attn=4", (4,)),  # a number stands for a list of one
        ("blocks.k_attn=[4]", (4,)),
        ("blocks.k_attn=[3, 8, 4, 6]", (3, 8, 4, 6)),
        ("blocks.common_ffn=[]", ()),
        ("train.betas=[0.8, 0]", (0.8, 0.0)),
        ("run.eval_ratios=6/12", ("6/12",)),
        ("run.eval_ratios=attn=2/3,ffn=6/12", ("attn=2/3,ffn=6/12",)),
        ('run.eval_ratios=["8/12", "attn=2/3,ffn=6/12"]', ("8/12", "attn=2/3,ffn=6/12")),
        ("run.eval_ratios=0.5", ("0.5",)),
        ("model.config={n_layer = 4, activation_function = 'relu'}",
         {"n_layer": 4, "activation_function": "relu"}),
    ],
)  # fmt: skip
def test_override_is_parsed(tmp_path, override, value):
    (tmp_path / "empty.toml").write_text("")
    section, _, key = override.partition("=")[0].strip().partition(".")
    loaded = config.load(str(tmp_path / "empty.toml"), [override])
    got = getattr(getattr(loaded, section), key)
    assert got == value
    assert repr(got) == repr(value)  # of the same type
    # and nothing else moved
    rest = dataclasses.replace(
        getattr(loaded, section), **{key: getattr(getattr(config.Config(), section), key)}
    )
    assert dataclasses.replace(loaded, **{section: rest}) == config.Config()


def test_override_reaches_into_model_config_and_the_later_wins():
    """One attribute changes, its neighbours of the preset stay; a new one is added."""
    before = config.load("demo").model.config
    more = ["model.config.n_layer=2", "model.config.n_layer=3", "model.config.resid_pdrop=0.5"]
    wanted = before | {"n_layer": 3, "resid_pdrop": 0.5}
    assert config.load("demo", more).model.config == wanted != before


# ---------------------------------------------------------------- mistakes

POSITIVE = [
    "blocks.n_ffn", "train.n_workers", "train.interval", "train.batch", "train.lr", "run.eval_n",
    "ray.min_workers", "ray.floor", "run.silence",
]  # fmt: skip
NOT_NEGATIVE = [
    "data.planned_sequences", "train.rounds", "train.epochs", "train.warmup", "train.weight_decay",
    "train.clip", "train.eps", "run.seed", "run.save_every", "run.eval_tokens", "run.threads",
    "ray.wait", "ray.patience",
]  # fmt: skip
MISTAKES = [  # override, parts of the sentence; more of them in cli/test_bad_input.py
    *((text, (repr(text), "section.key=value"))
      for text in ("train.lr", "lr=3", "=3", "train", "", "train.lr:3")),
    ("train.lr.peak=3", ("train.lr.peak=3", "lr is a value")),
    # unknown keys
    ("blocks.k_atn=3", ("blocks.k_atn", "did you mean blocks.k_attn?", "common_ffn")),
    ("run.zzzzzz=3", ("run.zzzzzz. Legal keys: ", "eval_every")),
    ("zzzzzz.lr=3", ("zzzzzz", "Legal keys: model, data, blocks, train, run")),
    # wrong types
    ("train.rounds=1.5", ("train.rounds = 1.5", "int")),
    ("train.rounds=true", ("train.rounds = True", "int")),
    ("train.lr=fast", ("train.lr = 'fast'", "float")),
    ("train.lr=.5e-3", ("train.lr = '.5e-3'", "float")),  # not TOML: a bare word
    ("train.lr=false", ("train.lr = False", "float")),
    ("train.lr=[1e-4]", ("train.lr = [0.0001]", "float")),
    ("run.out=true", ("run.out = True", "str")),
    ("run.out=[1]", ("run.out = [1]", "str")),
    ("blocks.k_attn=six", ("blocks.k_attn = 'six'", "int")),
    ("blocks.k_attn=[3, 4.5]", ("blocks.k_attn = 4.5", "int")),
    ("blocks.common_attn=[true]", ("blocks.common_attn = True", "int")),
    ("train.betas=[0.9]", ("train.betas = [0.9]", "2 values")),
    ("train.betas=0.9", ("train.betas = 0.9", "2 values")),
    ("train.betas=[0.9, 'b']", ("train.betas = 'b'", "float")),
    ("model.config=5", ("model.config = 5", "dict")),
    # ranges
    *((f"{field}={value}", (f"{field} = {value}", "greater than 0"))
      for field in POSITIVE for value in (0, -3)),
    *((f"{field}=-2", (f"{field} = -2", "negative")) for field in NOT_NEGATIVE),
    *((f"{field}={value}", (f"{field} = {value}",))  # TOML writes them; none can be trained with
      for field in ("train.lr", "train.epochs", "train.weight_decay") for value in ("nan", "inf")),
    *((f"run.keep={value}", (f"run.keep = {value}: must be at least 2, since",))
      for value in (1, 0, -3)),
    *((f"{field}=10_000_000_000", ("sequences in a round: legal are at most 16,777,216",))
      for field in ("train.n_workers", "train.interval", "train.batch")),  # 8 GB as a list
    *((f"{field}={value}", (f"{field} = {value}: must lie in 0..1",))
      for field in ("blocks.nested", "train.distil") for value in (-0.5, 1.5)),
    ("train.lr=1e308", ("train.lr = 1e+308: must be at most 1e+30",)),
    ("train.lr=inf", ("train.lr = inf: must be finite",)),
    ("data.seq_len=1", ("data.seq_len = 1: must be at least 2",)),
    ("train.betas=[1.0, 0.9]", ("train.betas = [1.0, 0.9]",)),
    ("train.betas=[0.9, -0.1]", ("train.betas = [0.9, -0.1]",)),
    ("run.eval_every=-2", ("run.eval_every = -2",)),
    ("ray.min_workers=9", ("ray.min_workers = 9", "train.n_workers = 4")),
]  # fmt: skip


@pytest.mark.parametrize(("override", "parts"), MISTAKES)
def test_a_mistake_is_named(override, parts):
    message = refusal("demo", override)
    assert not [part for part in parts if part not in message], message


def test_the_edges_of_a_range_are_legal():
    edges = [f"{field}=0" for field in NOT_NEGATIVE]
    for edge in (*edges, "run.keep=2", "blocks.nested=1", "train.betas=[0, 0]", "train.clip=inf"):
        config.load("demo", [edge])


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


@pytest.mark.parametrize(
    ("field", "legal"),
    [
        ("blocks.setting", ["attn", "ffn", "both"]),
        ("blocks.attn_by", ["auto", "head", "group", "query"]),
        ("blocks.widths", ["cycle", "worker"]),
        ("blocks.deal", ["random", "balanced"]),
        ("train.method", ["twist", "dense", "dropout"]),
        ("train.schedule", ["constant", "cosine"]),
        ("train.moments", ["carry", "reset"]),
        ("train.scale", ["sqrt", "none", "inverse", "measured"]),
        ("train.precision", ["auto", "float32", "bf16", "float64"]),
        ("run.variant", ["local", "masked", "true", "hybrid"]),
        ("run.seat", ["physical", "masked"]),
    ],
)
def test_wrong_literal(field, legal):
    """The list of legal words is the annotation's, and each of them is taken."""
    message = refusal("demo", f"{field}=sideways")
    assert f"{field} = 'sideways'" in message
    assert all(repr(word) in message for word in legal)
    section, key = field.split(".")
    for word in legal:
        loaded = config.load("demo", [f"{field}={word}"])  # true, too: the paper's True variant
        assert getattr(getattr(loaded, section), key) == word


def test_no_negative_number_slips_through():
    """Every int or float refuses -7 by name; layers are counted when the model is known."""
    for section in SECTIONS:
        part = getattr(config.Config(), section)
        for field in dataclasses.fields(part):
            name = f"{section}.{field.name}"
            number = isinstance(getattr(part, field.name), int | float)
            if number and not name.startswith("blocks.shared_"):
                assert f"{name} = -7" in refusal("demo", f"{name}=-7")
    with pytest.raises(ValueError, match=r"train\.lr = -1"):
        config.from_dict({"train": {"lr": -1}})  # out of a checkpoint: the same rules


# ---------------------------------------------------------------- train.outer


def test_outer_legal():
    for outer, want in {
        "none": None,
        "nesterov(0.7,0.6)": (0.7, 0.6),
        "nesterov( 1 , 0 )": (1.0, 0.0),
        "nesterov(1e-1, .99)": (0.1, 0.99),
    }.items():
        assert config.load("demo", [f"train.outer={outer}"]).train.nesterov() == want


@pytest.mark.parametrize(
    "outer",
    [
        "nesterov", "nesterov()", "nesterov(0.7)", "nesterov(0.7, 0.6, 0.5)", "nesterov(0, 0.6)",
        "nesterov(-0.7, 0.6)", "nesterov(0.7, 1)", "nesterov(0.7, -0.1)", "nesterov(0.7, 0.6",
        "nesterov(a, b)", "nesterov(1e, 0.6)", "nesterov(1e999, 0.6)", "adam(0.7, 0.6)", "",
        "x nesterov(0.7, 0.6)", "nesterov(0.7, 0.6) x",
    ],
)  # fmt: skip
def test_outer_illegal(outer):
    message = refusal("demo", f'train.outer="{outer}"')
    assert f"train.outer = {outer!r}" in message
    assert "nesterov(lr, momentum)" in message


# ---------------------------------------------------------------- documentation


def test_every_field_has_a_docstring():
    """The string below a field is its documentation: none may be missing or empty."""
    tree = ast.parse(inspect.getsource(config))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for section in SECTIONS:
        node = classes[type(getattr(config.Config(), section)).__name__]
        assert ast.get_docstring(node)
        for entry, below in itertools.pairwise([*node.body, None]):
            if isinstance(entry, ast.AnnAssign):
                text = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else None
                assert text, f"{section}.{entry.target.id} has no docstring"
                assert text.strip().endswith("."), text
