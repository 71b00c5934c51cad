"""Every knob can be set, read back and got wrong: an error names the field, the value, what is legal."""

from __future__ import annotations

import ast
import dataclasses
import inspect
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
def test_preset_says_what_its_file_says(name):
    """Every key of the TOML arrives, every other one keeps its default."""
    table = tomllib.loads((PRESETS / f"{name}.toml").read_text())
    loaded = config.load(name)
    default = config.Config()
    for section in SECTIONS:
        got, usual = getattr(loaded, section), getattr(default, section)
        for field in dataclasses.fields(got):
            value = getattr(got, field.name)
            if field.name not in table.get(section, {}):
                assert value == getattr(usual, field.name)
                continue
            wrote = table[section][field.name]
            if isinstance(value, tuple):
                wrote = tuple(wrote) if isinstance(wrote, list) else (wrote,)
            assert value == wrote


@pytest.mark.parametrize("name", config.preset_names())
def test_preset_survives_json(name):
    """A checkpoint stores the config as JSON; resume compares it field by field, types included."""
    loaded = config.load(name, ["blocks.k_ffn=[3, 8, 4, 6]", "train.outer=nesterov(0.7, 0.6)"])
    back = config.from_dict(json.loads(json.dumps(config.to_dict(loaded))))
    assert back == loaded
    assert repr(back) == repr(loaded)  # == takes 1 for 1.0 and hides a float that became an int
    assert set(config.to_dict(loaded)) == set(SECTIONS)


def test_a_toml_file_is_as_good_as_a_preset(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text((PRESETS / "demo.toml").read_text())
    assert config.load(str(path)) == config.load("demo")


def test_paper_preset_is_the_paper():
    """The set-up of the paper's experiments."""
    cfg = config.load("paper")
    assert (cfg.train.n_workers, cfg.train.interval, cfg.train.batch, cfg.train.epochs) == (
        4,
        15,
        2,
        3,
    )
    assert (cfg.train.lr, cfg.train.schedule, cfg.data.seq_len) == (1e-4, "constant", 1024)
    assert (cfg.blocks.n_ffn, cfg.blocks.shared_first, cfg.blocks.shared_last) == (12, 2, 2)
    assert cfg.blocks.common_attn == cfg.blocks.common_ffn == ()


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.Config().train.lr = 1.0  # type: ignore[misc]


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.rounds=7", 7),
        ("train.rounds = 7", 7),
        ("train.lr=3e-4", 3e-4),
        ("train.lr=1", 1.0),  # an int stands for a float
        ("train.lr=.5e-3", None),  # not TOML: a bare word, and so no float
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
        ("model.config={n_layer = 4, activation_function = 'relu'}", {"n_layer": 4, "activation_function": "relu"}),
    ],
)  # fmt: skip
def test_override_is_parsed(tmp_path, override, value):
    (tmp_path / "empty.toml").write_text("")
    section, _, key = override.partition("=")[0].strip().partition(".")
    if value is None:
        assert override.partition("=")[2] in refusal(str(tmp_path / "empty.toml"), override)
        return
    loaded = config.load(str(tmp_path / "empty.toml"), [override])
    got = getattr(getattr(loaded, section), key)
    assert got == value
    assert type(got) is type(value)
    if isinstance(value, tuple):
        assert [type(item) for item in got] == [type(item) for item in value]
    # and nothing else moved
    rest = dataclasses.replace(
        getattr(loaded, section), **{key: getattr(getattr(config.Config(), section), key)}
    )
    assert dataclasses.replace(loaded, **{section: rest}) == config.Config()


def test_override_reaches_into_model_config():
    """One attribute changes, its neighbours of the preset stay; a new one is added."""
    before = config.load("demo").model.config
    assert before["n_layer"] != 3
    assert "resid_pdrop" not in before
    overrides = ["model.config.n_layer=3", "model.config.resid_pdrop=0.5"]
    assert config.load("demo", overrides).model.config == before | {
        "n_layer": 3,
        "resid_pdrop": 0.5,
    }


def test_later_override_wins():
    assert config.load("demo", ["train.lr=1e-2", "train.lr=2e-2"]).train.lr == 2e-2


@pytest.mark.parametrize("override", ["train.lr", "lr=3", "=3", "train", "", "train.lr:3"])
def test_malformed_override(override):
    message = refusal("demo", override)
    assert repr(override) in message
    assert "section.key=value" in message


def test_override_below_a_value():
    message = refusal("demo", "train.lr.peak=3")
    assert "train.lr.peak=3" in message
    assert "lr is a value" in message


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.lrr=1", ["train.lrr", "did you mean train.lr?", "interval"]),
        ("trian.lr=1", ["trian", "did you mean train?", "blocks"]),
        ("blocks.k_atn=3", ["blocks.k_atn", "did you mean blocks.k_attn?", "common_ffn"]),
        ("run.zzzzzz=3", ["run.zzzzzz", "eval_every"]),
        ("zzzzzz.lr=3", ["zzzzzz", "model, data, blocks, train, run"]),
    ],
)
def test_unknown_key(override, parts):
    message = refusal("demo", override)
    assert message.startswith("unknown key ")
    assert all(part in message for part in (*parts, "Legal keys: "))
    section = override.partition(".")[0]
    if section in SECTIONS:  # all legal keys are listed, not only the close one
        fields = dataclasses.fields(getattr(config.Config(), section))
        assert all(field.name in message for field in fields)


def test_unknown_key_reads_as_sentences():
    """With no close key there is still a full stop before the list."""
    assert "run.zzzzzz Legal" not in refusal("demo", "run.zzzzzz=3")


def test_unknown_key_of_a_file(tmp_path):
    (tmp_path / "c.toml").write_text("[train]\nlearning_rate = 3\n")
    assert "train.learning_rate" in refusal(str(tmp_path / "c.toml"))
    (tmp_path / "c.toml").write_text("train = 3\n")
    assert "train must be a section, not 3" in refusal(str(tmp_path / "c.toml"))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.rounds=many", ["train.rounds = 'many'", "int"]),
        ("train.rounds=1.5", ["train.rounds = 1.5", "int"]),
        ("train.rounds=true", ["train.rounds = True", "int"]),
        ("train.lr=fast", ["train.lr = 'fast'", "float"]),
        ("train.lr=false", ["train.lr = False", "float"]),
        ("train.lr=[1e-4]", ["train.lr = [0.0001]", "float"]),
        ("run.out=true", ["run.out = True", "str"]),
        ("run.out=[1]", ["run.out = [1]", "str"]),
        ("blocks.k_attn=six", ["blocks.k_attn = 'six'", "int"]),
        ("blocks.k_attn=[3, 4.5]", ["blocks.k_attn = 4.5", "int"]),
        ("blocks.common_attn=[true]", ["blocks.common_attn = True", "int"]),
        ("train.betas=[0.9]", ["train.betas = [0.9]", "2 values"]),
        ("train.betas=0.9", ["train.betas = 0.9", "2 values"]),
        ("train.betas=[0.9, 'b']", ["train.betas = 'b'", "float"]),
        ("model.config=5", ["model.config = 5", "dict"]),
    ],
)
def test_wrong_type(tmp_path, override, parts):
    (tmp_path / "empty.toml").write_text("")
    message = refusal(str(tmp_path / "empty.toml"), override)
    assert all(part in message for part in parts)


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
        loaded = config.load("demo", [f'{field}="{word}"'])
        assert getattr(getattr(loaded, section), key) == word


def test_bare_true_is_a_variant():
    """`run.variant=true` on the command line is the paper's True variant, not TOML's boolean."""
    assert config.load("demo", ["run.variant=true"]).run.variant == "true"


def test_unknown_preset():
    message = refusal("papper")
    assert "'papper'" in message
    assert all(name in message for name in config.preset_names())


def test_broken_toml_names_file_and_line(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("[train]\nlr = \n")
    message = refusal(str(path))
    assert str(path) in message
    assert "line 2" in message


def test_a_toml_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"[train]\nlr = \xff\xfe\n")
    assert str(path) in refusal(str(path))


# ---------------------------------------------------------------- values


POSITIVE = [
    "data.seq_len", "blocks.n_ffn", "train.n_workers", "train.interval", "train.batch", "train.lr",
    "run.eval_n",
]  # fmt: skip
NOT_NEGATIVE = [
    "data.planned_sequences", "train.rounds", "train.epochs", "train.warmup", "train.weight_decay",
    "train.clip", "run.save_every", "run.eval_tokens", "run.threads",
]  # fmt: skip


@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("field", POSITIVE)
def test_must_be_positive(field, value):
    message = refusal("demo", f"{field}={value}")
    assert message.startswith(f"{field} = {value}")
    assert "greater than 0" in message


@pytest.mark.parametrize("field", ["train.n_workers", "train.interval", "train.batch"])
def test_a_round_has_a_size(field):
    """Its sequences are dealt out as a list: a thousand million took 8 GB and ended in a traceback."""
    assert "sequences in a round: legal are at most 16,777,216" in refusal(
        "demo", f"{field}=10_000_000_000"
    )
    assert refusal("demo", "train.lr=1e308") == "train.lr = 1e+308: must be at most 1e+30"
    assert refusal("demo", "train.lr=inf") == "train.lr = inf: must be finite"


@pytest.mark.parametrize("value", [1, 0, -3])
def test_one_checkpoint_is_not_enough(value):
    """The newest may turn out damaged; then there must be another."""
    message = refusal("demo", f"run.keep={value}")
    assert message.startswith(f"run.keep = {value}: must be at least 2")
    assert config.load("demo", ["run.keep=2"]).run.keep == 2


@pytest.mark.parametrize("field", NOT_NEGATIVE)
def test_must_not_be_negative(field):
    message = refusal("demo", f"{field}=-2")
    assert message.startswith(f"{field} = -2")
    assert "negative" in message
    config.load("demo", [f"{field}=0"])


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("field", ["train.lr", "train.epochs", "train.weight_decay"])
def test_must_be_finite(field, value):
    """TOML writes nan and inf; neither can be trained with."""
    assert refusal("demo", f"{field}={value}").startswith(f"{field} = {value}")


def test_no_negative_number_slips_through():
    """Every int or float either refuses -7 by name or is known to be fine with it."""
    fine = {"blocks.shared_first", "blocks.shared_last"}  # checked against the model's layers
    loose = set()
    for section in SECTIONS:
        part = getattr(config.Config(), section)
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if not isinstance(value, int | float) or f"{section}.{field.name}" in fine:
                continue
            try:
                config.load("demo", [f"{section}.{field.name}=-7"])
            except ValueError as error:
                told = str(error)
            else:
                told = "nothing"
            if f"{section}.{field.name} = -7" not in told:
                loose.add(f"{section}.{field.name}")
    assert loose == set()


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("data.seq_len=1", "data.seq_len = 1"),
        ("train.betas=[1.0, 0.9]", "train.betas = [1.0, 0.9]"),
        ("train.betas=[0.9, -0.1]", "train.betas = [0.9, -0.1]"),
        ("run.eval_every=-2", "run.eval_every = -2"),
    ],
)
def test_other_ranges(override, part):
    assert part in refusal("demo", override)


def test_from_dict_checks_too():
    """A config that comes out of a checkpoint is held to the same rules."""
    with pytest.raises(ValueError, match=r"train\.lr = -1"):
        config.from_dict({"train": {"lr": -1}})


# ---------------------------------------------------------------- train.outer


@pytest.mark.parametrize(
    ("outer", "want"),
    [
        ("none", None),
        ("nesterov(0.7, 0.6)", (0.7, 0.6)),
        ("nesterov(0.7,0.6)", (0.7, 0.6)),
        ("nesterov( 1 , 0 )", (1.0, 0.0)),
        ("nesterov(1e-1, .99)", (0.1, 0.99)),
        ("nesterov(2, 0.0)", (2.0, 0.0)),
    ],
)
def test_outer_legal(outer, want):
    assert config.load("demo", [f"train.outer={outer}"]).train.nesterov() == want


@pytest.mark.parametrize(
    "outer",
    [
        "nesterov", "nesterov()", "nesterov(0.7)", "nesterov(0.7, 0.6, 0.5)", "nesterov(0.7; 0.6)",
        "nesterov(0, 0.6)", "nesterov(-0.7, 0.6)", "nesterov(0.7, 1)", "nesterov(0.7, -0.1)",
        "nesterov(0.7, 0.6", "nesterov(a, b)", "nesterov(1e, 0.6)", "nesterov(1e999, 0.6)",
        "Nesterov(0.7, 0.6)", "adam(0.7, 0.6)", "", "None", "none ", "x nesterov(0.7, 0.6)", "nesterov(0.7, 0.6) x",
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
    seen = 0
    for section in SECTIONS:
        cls = type(getattr(config.Config(), section))
        node = classes[cls.__name__]
        assert ast.get_docstring(node)
        described = {}
        for entry, below in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(entry, ast.AnnAssign):
                text = below.value if isinstance(below, ast.Expr) else None
                text = text.value if isinstance(text, ast.Constant) else None
                described[entry.target.id] = text
        assert set(described) == {field.name for field in dataclasses.fields(cls)}
        for name, text in described.items():
            assert isinstance(text, str), f"{cls.__name__}.{name} has no docstring"
            assert text.strip().endswith("."), f"{cls.__name__}.{name}: {text!r}"
            seen += 1
    assert seen > 40
