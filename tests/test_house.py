"""The architecture holds itself: import direction, where model names may stand, light imports."""

import ast
import re
from pathlib import Path

import twistlm

PACKAGE = Path(twistlm.__file__).parent
SOURCES = {  # "cli.training" -> its source; a folder's __init__ goes by the folder's name
    str(path)[len(f"{PACKAGE}/") : -3].replace("/", ".").removesuffix(".__init__"): path.read_text()
    for path in PACKAGE.rglob("*.py")
}

# a room imports from rooms before its own; two rooms without a bar between them are strangers
ORDER = "fields | presets | config system | model transport | data | compute | training"
ORDER += " | tickets export | recipe | shrinking | api | baselines demo | lab | play | cli"
ORDER += " | __main__"
FLOOR = {name: i for i, names in enumerate(ORDER.split("|")) for name in names.split()}


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
    assert {room(name) for name in SOURCES} - {"__init__"} == set(FLOOR)
    wrong = [
        f"{name} imports {other}"
        for name, source in SOURCES.items()
        for other in imports(name, source)
        if name != "__init__"
        and room(name) != room(other)
        and not FLOOR[room(other)] < FLOOR[room(name)]
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_form_no_circle():
    """Inside a room, too, modules stand above each other."""
    rest = {name: imports(name, source) & SOURCES.keys() for name, source in SOURCES.items()}
    while free := [name for name, others in rest.items() if not others & rest.keys()]:
        for name in free:
            del rest[name]
    assert not rest, {name: others & rest.keys() for name, others in rest.items()}


def test_module_names_stand_in_families_and_exports_alone():
    """Other programs' formats have names of their own: export/ knows both."""
    for name, source in SOURCES.items():
        if name != "model.families" and room(name) != "export":
            modules = r"[qkvo]_proj|out_proj|c_attn|c_proj|c_fc"
            assert not re.findall(modules, without_comments(source)), name


def without_comments(source: str) -> str:
    return re.sub(r'"""(.|\n)*?"""|#.*', "", source)


def test_processes_meet_in_few_modules_and_ray_is_an_extra():
    """One module imports it, and is itself imported by what needs it, or inside functions."""
    meet = {"transport.ranks", "lab.bench.peer"}  # the second beside bare gloo
    assert {name for name, source in SOURCES.items() if "torch.distributed" in source} == meet
    needs = {f"training.engines.{name}" for name in ("actor", "elastic", "owner", "owners")}
    needs |= {"transport.ray_cluster"}
    for name, source in SOURCES.items():
        tops = [node for node in ast.parse(source).body if isinstance(node, ast.Import)]
        named = {alias.name for node in tops for alias in node.names}
        assert ("ray" in named) == (name == "transport.ray_cluster"), name
        if name not in needs:
            lines = [line for line in source.splitlines() if line.startswith(("from", "import"))]
            banned = r"\b(ray_cluster|elastic|actor|owners?)\b"
            assert not [line for line in lines if re.search(banned, line)], name


def test_a_process_without_a_model_imports_none():
    """`from transformers import X` imports torch's compilers: seconds, which an owner of a range
    has no use for.
    """
    for name, source in SOURCES.items():
        if name != "__init__" and FLOOR[room(name)] <= FLOOR["training"]:
            tops = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
            named = [node.module for node in tops if node.module and node.level == 0]
            assert not [module for module in named if module.startswith("transformers")], name


def test_nothing_runs_code_of_others_and_nothing_imports_the_paper():
    """What unpickles does: torch's object collectives, torch.load, pickle itself. So does an Auto
    class that is not told otherwise: it asks, and a piped `y` answers.
    """
    words = r"pickle|(send|recv|gather|scatter|broadcast)_object|torch\.(load|save)\b"
    words += r"|\bmarshal\b|shelve|joblib|\b(from|import) paper\b"  # paper/ is not in the wheel
    auto = r"\bAuto\w+\.from_(?:pretrained|config)(\((?:[^()]|\([^()]*\))*\))"
    seen = []
    for name, source in SOURCES.items():
        code = without_comments(source)
        assert not re.findall(words, code), name
        called = re.findall(auto, code)
        called += re.findall(r"\bload(\([^()]*\))", code) if name == "tickets.deploy" else []
        assert all("trust_remote_code=False" in call for call in called), name
        seen += called
    assert len(seen) >= 8
