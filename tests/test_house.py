"""The architecture holds itself: import direction, where model names may stand, light imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import twistlm

PACKAGE = Path(twistlm.__file__).parent
SOURCES = {  # "cli.training" -> its source; a folder's __init__ goes by the folder's name
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path.read_text()
    for path in PACKAGE.rglob("*.py")
}

LAYERS = [  # a module imports only from layers above its own
    {"export", "export.modeling_ticket"},
    {"export.register"},
    {
        "__init__",
        "config",
        "terminal",
        "certificate",
        "bench",
        "compare",
        "experiments",
        "report",
        "report.section",
        "report.paper",
        "leases",
        "address",
        "alone",
    },
    {"report.draw", "events", "stop", "session", "guard", "bench.profile"},
    {"supervisor"},
    {"blocks", "fast", "kernels", "attention", "lookup", "wire", "prune", "prune.pattern"},
    {"prune.magnitude", "prune.sparsegpt", "prune.wanda", "prune.zpruner"},
    {"generator", "flat", "data", "cluster", "families", "models", "ledger", "loss"},
    {"prepare", "subnet", "adamw", "budget", "speed", "gradient", "links"},
    {"central", "corpus"},
    {"dispatcher", "aggregator", "checkpoint", "door", "judge"},
    {"roster"},
    {"hub"},
    {"worker", "writer", "resume", "parent", "points", "sharded"},
    {"export.card", "export.hf", "prune.calibrate"},
    {"remote", "evaluate", "dense", "deploy", "prune.importance", "prune.methods", "prune.repair"},
    {"startup", "plan", "pick", "export.verify", "export.gguf_vocab", "export.llamacpp"},
    {"team"},
    {"rounds", "score", "runnable", "export.gguf", "export.onnx", "prune.write"},
    {
        "demo",
        "choose",
        "certify",
        "drop",
        "generate",
        "draft",
        "bench.train",
        "bench.curve",
        "bench.save",
        "bench.runtimes",
        "compare.rivals",
    },
    {"bench.measure", "bench.namespaces", "bench.peer", "compare.measure", "experiments.scales"},
    {"compare.cells"},
    {"compare.table"},
    {"compare.run"},
    {"bench.deploy", "bench.comm", "experiments.lab"},
    {"experiments.subnets", "experiments.latency", "experiments.memory", "experiments.nodeloss"},
    {"experiments.parents", "experiments.shift", "experiments.table2"},
    {"experiments.stability", "experiments.robustness", "experiments.ranking"},
    {"experiments.table1"},
    {"experiments.run", "report.load"},
    {"report.training", "report.page", "report.comparison"},
    {"report.markdown"},
    {"report.write"},
    {"cli.app"},
    {"cli.training"},
    {"cli.tickets"},
    {
        "cli.bench",
        "cli.compare",
        "cli.experiments",
        "cli.export",
        "cli.extract",
        "cli.hub",
        "cli.prune",
    },
    {"cli"},
    {"__main__"},
]


def imports(name: str, source: str) -> set[str]:
    """Our own modules that a module imports: `from .x import y`, `from ..x import y`, `from . import x`."""
    package = name.split(".")[:-1]
    if name in {".".join(other.split(".")[:-1]) for other in SOURCES}:  # a folder's __init__
        package = name.split(".")
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            base = package[: len(package) + 1 - node.level]
            named = [*base, *node.module.split(".")] if node.module else base
            if node.module and ".".join(named) in SOURCES:
                found.add(".".join(named))
            else:
                found |= {".".join([*named, alias.name]) for alias in node.names}
    return found


def test_every_module_has_its_layer():
    assert set(SOURCES) == set().union(*LAYERS)


def test_import_direction():
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    for name, source in SOURCES.items():
        for other in imports(name, source):
            assert level[other] < level[name], f"{name} imports {other}"


def test_model_names_stand_in_families_and_exports_alone():
    """A model type may be named in help, defaults, formulas and messages; a module name never.

    Other programs' formats have names of their own: export/ knows both.
    """
    types = r"gpt2|llama|mistral|qwen|gemma|smollm|\bopt\b|\bphi\b"
    modules = r"[qkvo]_proj|out_proj|c_attn|c_proj|c_fc"
    may_name_types = {
        "cli.training", "cli.tickets", "cli.extract", "cli.export", "cli.bench", "cli.prune", "cli.compare",
        "cli.experiments", "cli.hub", "bench.runtimes", "config", "experiments.scales", "ledger", "models", "plan",
    }  # fmt: skip
    for name, source in SOURCES.items():
        if name == "families" or name.startswith("export."):
            continue
        code = re.sub(r'"""(.|\n)*?"""|#.*', "", source)
        assert not re.findall(modules, code), name
        assert name in may_name_types or not re.findall(types, code), name


MEET = {"cluster", "door", "session", "bench.peer"}  # the last beside bare gloo


def test_torch_distributed_is_imported_where_processes_meet():
    """cluster: torchrun's ranks; door and session: the hub's store and its 2-rank groups."""
    for name, source in SOURCES.items():
        assert ("torch.distributed" in source) == (name in MEET), name


def test_no_pickle_on_wire_or_disk():
    """What unpickles runs code: torch's object collectives, torch.load and pickle itself."""
    words = r"pickle|(send|recv|gather|scatter|broadcast)_object|torch\.load\b|torch\.save\b|\bmarshal\b|shelve|joblib"
    for name, source in SOURCES.items():
        code = re.sub(r'"""(.|\n)*?"""|#.*', "", source)
        assert not re.findall(words, code), name


def test_the_training_path_needs_no_extra():
    """datasets, tensorboard, gguf, onnx and the like are optional: importing must work without them."""
    code = (
        "import sys\n"
        "for name in ('datasets', 'pydantic', 'tensorboard', 'gguf', 'matplotlib', 'onnx', 'onnxruntime'): sys.modules[name] = None\n"
        "import twistlm.rounds, twistlm.score, twistlm.demo, twistlm.prepare\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
