"""hub, worker: training on machines that come and go."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..config import Kind
from .options import Device, Overrides, Preset, Resume, app

Secret = Annotated[
    Path | None,
    typer.Option(
        "--secret-file", help="File with the run's secret; default: the variable TWISTLM_SECRET."
    ),
]


@app.command(
    epilog="Examples:\n\n"
    "export TWISTLM_SECRET=$(openssl rand -hex 32)\n\n"
    "twistlm hub demo\n\n"
    "twistlm hub wiki-gpt2 hub.bind=10.0.0.1:29400 hub.min_workers=2 --secret-file secret\n\n"
    "twistlm hub wiki-gpt2 hub.bind=10.0.0.1:29400 --resume"
)
def hub(
    preset: Preset,
    overrides: Overrides = None,
    resume: Resume = False,
    secret_file: Secret = None,
    supervise: Annotated[
        bool,
        typer.Option(
            "--supervise/--no-supervise",
            help="Restart a hub that crashed from its last checkpoint.",
        ),
    ] = True,
) -> None:
    """Train a parent with workers that connect, leave and come back at any round.

    Exit codes: 0 done, 2 a mistake in the call, 4 too few workers for too long, 130 and 143 stopped.
    """
    from .. import config
    from ..transport import supervisor
    from ..transport.address import listen, read_secret

    cfg = config.load(preset, overrides or [])
    if cfg.run.variant == "local":
        cfg = config.override(cfg, ["run.variant=true"])
    if cfg.train.method != "twist":
        raise ValueError(f"train.method = {cfg.train.method!r}: a hub trains in TwIST rounds")
    secret = read_secret(secret_file)
    if "TWISTLM_LISTENER" in os.environ:  # a supervisor holds it
        listener = socket.socket(fileno=int(os.environ["TWISTLM_LISTENER"]))
    else:
        listener = listen(cfg.hub.bind, cfg.hub.public)
        if supervise:
            raise typer.Exit(supervisor.supervise(listener, sys.argv[1:], Path(cfg.run.out)))
    from ..system.terminal import console
    from ..training import rounds

    last = rounds.train(cfg, resume=resume, opened=(listener, secret))
    console.print(f"checkpoint: {last}")


@app.command(
    epilog="Examples:\n\n"
    "twistlm worker --connect 10.0.0.1:29400 --secret-file secret\n\n"
    "twistlm worker --connect 10.0.0.1:29400 --k-attn 3 --k-ffn 3 --device cuda:1"
)
def worker(
    connect: Annotated[str, typer.Option(help="host:port of the hub.")],
    secret_file: Secret = None,
    name: Annotated[str, typer.Option(help="What the hub calls it; default: host and pid.")] = "",
    k_attn: Annotated[
        int, typer.Option(min=0, help="This worker's own K of attention blocks; 0: the run's.")
    ] = 0,
    k_ffn: Annotated[int, typer.Option(min=0, help="Its own K of FFN blocks; 0: the run's.")] = 0,
    device: Device = "auto",
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to try to reach a hub that has gone away.")
    ] = 600.0,
    public: Annotated[
        bool, typer.Option("--public", help="Allow a hub beyond loopback and private addresses.")
    ] = False,
) -> None:
    """Train for a hub: config, weights and tokens come from there. Nothing is encrypted."""
    from ..transport.address import check_address, parse_address, read_secret

    secret = read_secret(secret_file)  # mistakes are told before torch is imported
    check_address(parse_address(connect)[0], public, "--public")
    from ..training.engines import remote

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    own: dict[Kind, int] = {"attn": k_attn, "ffn": k_ffn}
    widths = {kind: k for kind, k in own.items() if k}
    remote.work(remote.WorkerOptions(connect, secret, name, widths, device, public, patience))
