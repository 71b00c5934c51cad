"""Other programs' formats: GGUF and ONNX."""

import importlib.util
import json
from pathlib import Path

FORMATS = {"gguf": ("q8_0", "f32", "f16", "q4_k_m"), "onnx": ("f32", "q8")}  # of `export --to`
RUNTIMES = (  # of `bench deploy --runtime`
    "torch", "onnx", "onnx-q8", "llama.cpp-f16", "llama.cpp-q8_0", "llama.cpp-q4_k_m",
)  # fmt: skip
QUANTIZES = ("q4_k_m",)  # types that llama.cpp itself makes, out of float32
ONNX_FILES = ("model.onnx", "export.json")  # in the folder of every ONNX export


def check_type(to: str, type_: str, option: str = "--type") -> None:
    """Refuse a type that a format has not, or whose libraries are missing."""
    if type_ not in FORMATS[to]:
        raise ValueError(f"{option} {type_}: {to.upper()} is written as {', '.join(FORMATS[to])}")
    if to == "onnx":
        need("ONNX", "onnx", "onnx", "onnxscript", "onnxruntime")
    else:
        need("a GGUF file", "gguf", "gguf")
    if type_ in QUANTIZES:
        need(f"{option} {type_}, which llama.cpp makes,", "llama", "llama_cpp")


def check_target(to: str, out: Path) -> None:
    """An earlier export of the same format is replaced; anything else is left alone."""
    if to == "onnx":
        held = {path.name for path in out.iterdir()} if out.is_dir() else set()
        if out.is_file() or (held and not held.issuperset(ONNX_FILES)):
            raise ValueError(f"--out {out} exists and is no ONNX export: choose another folder")
    elif out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file in it, such as {out}/ticket.gguf")
    else:
        if out.exists():
            with out.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise ValueError(f"--out {out} exists and is no GGUF file: choose another name")
        if (record := Path(f"{out}.json")).exists() and not _describes_gguf(record):
            raise ValueError(f"--out {out}: {record} exists and is not ours: choose another name")


def _describes_gguf(record: Path) -> bool:
    try:
        return bool(json.loads(record.read_bytes())["format"] == "gguf")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in modules)


def need(what: str, extra: str, *modules: str) -> None:
    """Refuse what libraries of an extra are missing for."""
    if not installed(*modules):
        names = ", ".join(modules)
        raise ValueError(f"{what} needs {names}: pip install -e '.[{extra}]'")
