"""The runtimes that `bench deploy` drives: how each gets its files from a ticket, and loads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...export import gguf, llamacpp, onnx
from ...export.verify import Runner, TorchTicket
from ...tickets import deploy


@dataclass(frozen=True)
class Runtime:
    """One row of the table; `write` raises ValueError where library or family do not permit."""

    name: str
    write: Callable[[Path, Path], tuple[Path, ...]]  # (ticket, its own folder) -> files of weights
    load: Callable[[Path, int, int], Runner]  # (first of the files, threads, tokens to hold)


def _ticket_itself(ticket: Path, folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(ticket.glob("*.safetensors")))


def _load_ticket(path: Path, threads: int, n_context: int) -> Runner:
    torch.set_num_threads(threads)
    return TorchTicket(deploy.load_ticket(path.parent))


def _as_onnx(type_: str) -> Callable[[Path, Path], tuple[Path, ...]]:
    def write(ticket: Path, folder: Path) -> tuple[Path, ...]:
        onnx.export(deploy.load_ticket(ticket), folder, type_)
        return tuple(sorted(folder.glob(f"{onnx.FILE}*")))  # the graph, then its weights

    return write


def _load_onnx(path: Path, threads: int, n_context: int) -> Runner:
    return onnx.load(path.parent, threads)


def _as_gguf(ticket: Path, folder: Path) -> tuple[Path, ...]:
    if not llamacpp.installed():
        raise ValueError("llama.cpp is not installed: pip install 'twistlm[llama]' (it compiles)")
    path = folder / "ticket.gguf"
    gguf.export(deploy.load_ticket(ticket), path, "q8_0")
    return (path,)


def _load_gguf(path: Path, threads: int, n_context: int) -> Runner:
    return llamacpp.load(path, n_context, threads=threads)


RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        Runtime("torch", _ticket_itself, _load_ticket),
        Runtime("onnx", _as_onnx("f32"), _load_onnx),
        Runtime("onnx-q8", _as_onnx("q8"), _load_onnx),
        Runtime("llama.cpp-q8_0", _as_gguf, _load_gguf),
    )
}
