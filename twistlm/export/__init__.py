"""Other programs' formats: GGUF and ONNX."""

import importlib.util

GGUF_TYPES = ("q8_0", "f32", "f16", "q4_k_m")
ONNX_TYPES = ("f32", "q8")
FORMATS = {"gguf": GGUF_TYPES, "onnx": ONNX_TYPES}  # of `export --to`
RUNTIMES = (  # of `bench deploy --runtime`
    "torch", "onnx", "onnx-q8", "llama.cpp-f16", "llama.cpp-q8_0", "llama.cpp-q4_k_m",
)  # fmt: skip


def installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in modules)


def need(what: str, extra: str, *modules: str) -> None:
    """Refuse what libraries of an extra are missing for."""
    if not installed(*modules):
        names = ", ".join(modules)
        raise ValueError(f"{what} needs {names}: pip install -e '.[{extra}]'")
