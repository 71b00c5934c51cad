"""node: this machine in a Ray cluster, for `run.variant=ray`."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import app

WORKER_PORTS = range(10002, 20000)  # Ray's own choice
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]


@app.command(
    epilog="Examples:\n\n"
    "twistlm node --head --host 10.0.0.1\n\n"
    "twistlm node --join 10.0.0.1:6379\n\n"
    "twistlm node --join 10.0.0.1:6379 --k-attn 3 --k-ffn 3\n\n"
    "twistlm node --join 10.0.0.1:6379 -- --num-gpus 2 --object-store-memory 8000000000"
)
def node(
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTION...]", help="Options of `ray start`.")
    ] = None,
    head: Annotated[bool, typer.Option("--head", help="Begin a cluster on this machine.")] = False,
    join: Annotated[str, typer.Option(help="host:port of the head of a cluster.")] = "",
    host: Annotated[
        str, typer.Option(help="This machine's address; default: the one that Ray finds.")
    ] = "",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of a head.")] = 6379,
    k_attn: Annotated[
        int, typer.Option(min=0, help="K of attention blocks of its workers; 0: the run's.")
    ] = 0,
    k_ffn: Annotated[int, typer.Option(min=0, help="K of FFN blocks; 0: the run's.")] = 0,
) -> None:
    """Put this machine in a Ray cluster, and back into it whenever Ray lets it fall.

    Ctrl-C or SIGTERM takes it out. Machines share a token (~/.ray/auth_token, or the variable
    RAY_AUTH_TOKEN); whoever has it can run code on all of them. Nothing is encrypted.
    """
    if head == bool(join):
        raise ValueError("say either --head or --join HOST:PORT")
    if importlib.util.find_spec("ray") is None:
        raise ValueError("twistlm node needs Ray: pip install -e '.[ray]'")
    from ..system.terminal import console
    from ..transport import ray_cluster

    labels = {"attn": k_attn, "ffn": k_ffn}
    words = [f"{ray_cluster.K_LABELS[kind]}={k}" for kind, k in labels.items() if k]
    command = RAY + ([f"--labels={','.join(words)}"] if words else [])
    command += [f"--node-ip-address={host}"] if host else []
    if head:
        if port in WORKER_PORTS and not any("worker-port" in word for word in more or []):
            raise ValueError(
                f"--port {port}: Ray's workers listen on 10002 to 19999; take another, such as 6379"
            )
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            raise OSError(f"cannot listen on {host or '*'}:{port}: {error.strerror}") from None
        if not ray_cluster.token() and os.environ.get("RAY_AUTH_MODE") != "disabled":
            path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray/auth_token"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(32))
            console.print(f"a new token is in {path}: put a copy of it in the same place elsewhere")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        where = host or socket.gethostname()
        console.print(f"on other machines: twistlm node --join {where}:{port}", soft_wrap=True)
        command += ["--head", f"--port={port}"]
    else:
        ray_cluster.host_and_port(join, "--join ")
        ray_cluster.check(join, is_open=os.environ.get("RAY_AUTH_MODE") == "disabled")
        command.append(f"--address={join}")
    raise typer.Exit(ray_cluster.keep_node([*command, *(more or [])], join))
