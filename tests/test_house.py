"""The architecture holds itself: import direction, where model names may stand, light imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import twistlm

PACKAGE = Path(twistlm.__file__).parent
SOURCES = {  # "cli.training" -> its source; a folder's __init__ goes by the folder's name
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path.read_text()
    for path in PACKAGE.rglob("*.py")
}

FLOORS = [  # a room imports from rooms on lines above its own; two rooms on a line are strangers
    {"fields"},
    {"presets"},
    {"config", "system"},
    {"model", "transport"},
    {"data"},
    {"compute"},
    {"training"},
    {"tickets", "export"},
    {"api"},
    {"baselines", "demo"},
    {"lab"},
    {"play"},
    {"cli"},
    {"__main__"},
]


def imports(name: str, source: str) -> set[str]:
    """Our modules that a module imports, by `from .x import y` or `from . import x`."""
    package = name.split(".")
    if not any(other.startswith(f"{name}.") for other in SOURCES):  # not a folder's __init__
        package = package[:-1]
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


def room(module: str) -> str:
    return module.split(".")[0]


def test_no_room_imports_upwards_or_its_neighbour():
    assert {room(name) for name in SOURCES} - {"__init__"} == set().union(*FLOORS)
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    wrong = [
        f"{name} imports {other}"
        for name, source in SOURCES.items()
        for other in imports(name, source)
        if name != "__init__"
        and room(name) != room(other)
        and not floor[room(other)] < floor[room(name)]
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_form_no_circle():
    """Inside a room, too, modules stand above each other."""
    rest = {name: imports(name, source) & SOURCES.keys() for name, source in SOURCES.items()}
    while free := [name for name, others in rest.items() if not others & rest.keys()]:
        for name in free:
            del rest[name]
    assert not rest, {name: others & rest.keys() for name, others in rest.items()}


def test_model_names_stand_in_families_and_exports_alone():
    """A model type may be named in help, defaults, formulas and messages; a module name never.

    Other programs' formats have names of their own: export/ knows both.
    """
    types = r"gpt2|llama|mistral|qwen|gemma|smollm|\bopt\b|\bphi\b"
    modules = r"[qkvo]_proj|out_proj|c_attn|c_proj|c_fc"
    may_name_types = {
        "cli.training", "cli.tickets", "cli.measure",
        "cli.look", "lab.bench.deploy", "config",
        "model.huggingface", "training.plan",
    }  # fmt: skip
    for name, source in SOURCES.items():
        if name == "model.families" or room(name) == "export":
            continue
        code = re.sub(r'"""(.|\n)*?"""|#.*', "", source)
        assert not re.findall(modules, code), name
        assert name in may_name_types or not re.findall(types, code), name


MEET = {"transport.ranks", "lab.bench.peer"}  # the second beside bare gloo


def test_torch_distributed_is_imported_where_processes_meet():
    for name, source in SOURCES.items():
        assert ("torch.distributed" in source) == (name in MEET), name


def test_ray_is_an_extra():
    """One module imports it, and is itself imported by what needs it, or inside functions."""
    needs = {"transport.ray_cluster", "training.engines.actor", "training.engines.worker_pool"}
    needs |= {"training.engines.elastic", "lab.bench.peer_ray"}
    for name, source in SOURCES.items():
        tops = [node for node in ast.parse(source).body if isinstance(node, ast.Import)]
        named = {alias.name for node in tops for alias in node.names}
        assert ("ray" in named) == (name == "transport.ray_cluster"), name
        if name not in needs:
            lines = [line for line in source.splitlines() if line.startswith(("from", "import"))]
            banned = r"\b(ray_cluster|elastic|actor|places|peer_ray)\b"
            assert not [line for line in lines if re.search(banned, line)], name


def test_no_pickle_on_wire_or_disk_and_nothing_of_the_paper():
    """What unpickles runs code: torch's object collectives, torch.load and pickle itself."""
    words = r"pickle|(send|recv|gather|scatter|broadcast)_object|torch\.(load|save)\b"
    words += r"|\bmarshal\b|shelve|joblib|\b(from|import) paper\b"  # paper/ is not in the wheel
    for name, source in SOURCES.items():
        code = re.sub(r'"""(.|\n)*?"""|#.*', "", source)
        assert not re.findall(words, code), name
