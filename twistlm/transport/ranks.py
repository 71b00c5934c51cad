"""Which rank of torchrun plays which worker, and what these ranks exchange as one group.

`run.variant` chooses a seating table: which rank hosts which worker, and whether that worker trains a
physical subnet, a masked copy of the full model, or the central weights themselves behind a mask.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..system.device import pick_device

SeatKind = Literal["physical", "masked", "central"]


@dataclass(frozen=True)
class Seating:
    """Worker -> rank and kind of seat. Rank 0 hosts the central model (or speaks for its shards)."""

    ranks: tuple[int, ...]
    kinds: tuple[SeatKind, ...]

    @property
    def n_workers(self) -> int:
        return len(self.ranks)

    def workers_of(self, rank: int) -> list[int]:
        return [worker for worker, at in enumerate(self.ranks) if at == rank]


def seat(variant: str, n_workers: int, world_size: int, kind: SeatKind = "physical") -> Seating:
    """The seating table of a variant; a wrong number of ranks is refused."""
    if variant == "local":
        if world_size != 1:
            raise ValueError(
                f"run.variant = 'local' is one process, but torchrun started {world_size}: "
                f"use masked, true, hybrid or sharded"
            )
        return Seating((0,) * n_workers, (kind,) * n_workers)
    seats = world_size - 1 if variant == "true" else world_size
    if n_workers != seats:
        need = n_workers + 1 if variant == "true" else n_workers
        raise ValueError(
            f"run.variant = {variant!r} with train.n_workers = {n_workers} needs {need} ranks, but there "
            f"{'is' if world_size == 1 else 'are'} {world_size}: start it with "
            f"torchrun --nproc-per-node {need} -m twistlm train ..."
        )
    alike = variant in ("true", "sharded")
    first: SeatKind = "physical" if alike else "masked" if variant == "masked" else "central"
    others: SeatKind = "masked" if variant == "masked" else "physical"
    ranks = range(1, world_size) if variant == "true" else range(world_size)
    return Seating(tuple(ranks), (first,) + (others,) * (n_workers - 1))


def on_central_rank() -> bool:
    """Whether this process speaks for the run (always, without torchrun)."""
    return int(os.environ.get("RANK", 0)) == 0


@contextmanager
def _peers_alive() -> Iterator[None]:
    """Turn what gloo and NCCL raise when a peer is gone into a sentence."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(
            f"another rank of this run is gone: start the run again with --resume, its newest checkpoint is "
            f"unharmed ({str(error).splitlines()[0]})"
        ) from None


class Cluster:
    """This process's place in the run.

    TwIST's rounds go through a hub (`hub`), over sessions; torchrun's ranks only have to find it. Shards
    are exchanged between all ranks, and the controls sum gradients in every step: these ranks form one
    process group (`together`), which ends when one of them dies.
    """

    def __init__(
        self,
        variant: str,
        n_workers: int,
        kind: SeatKind,
        device: str,
        *,
        together: bool = False,
        hub: bool = False,
    ):
        self.rank = 0 if hub else int(os.environ.get("RANK", 0))
        self.world_size = 1 if hub else int(os.environ.get("WORLD_SIZE", 1))
        # the workers of a hub sit where torchrun's other ranks would
        n_ranks = n_workers + (variant == "true") if hub else self.world_size
        self.seating = seat(variant, n_workers, n_ranks, kind)
        self.device = pick_device(device, int(os.environ.get("LOCAL_RANK", 0)))
        self.n_sent = self.n_received = 0  # bytes of exchanges
        self._n_exchanges = 0
        self._group = together and self.world_size > 1
        if self.world_size > 1 and self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self._group:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def is_central(self) -> bool:
        return self.rank == 0

    @property
    def workers(self) -> list[int]:
        """The workers that this rank plays."""
        return self.seating.workers_of(self.rank)

    def share(self, word: str | None = None) -> str:
        """The central rank's word on every rank, through torchrun's own store."""
        store, _, _ = next(iter(dist.rendezvous("env://", self.rank, self.world_size)))
        self._store = store  # where this rank hosts it, it must live on
        if word is not None:
            store.set("twistlm", word)
        return store.get("twistlm").decode()

    def exchange(self, parts: list[Tensor], sizes: list[int]) -> Callable[[], list[Tensor]]:
        """Start sending part i (bytes) to rank i; the call returned waits for theirs, of these sizes."""
        if not self._group:
            return lambda: parts
        got = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        got[self.rank] = parts[self.rank]
        self._n_exchanges += 1  # a tag: every rank counts the same
        # not an all-to-all: gloo has no more than two of them under way, and each waits for its slowest link
        moves = []
        for peer in range(self.world_size):
            if peer != self.rank:
                self.n_sent += parts[peer].numel()
                self.n_received += sizes[peer]
                for move, tensor in ((dist.isend, parts[peer]), (dist.irecv, got[peer])):
                    if tensor.numel():
                        moves.append(dist.P2POp(move, tensor, peer, tag=self._n_exchanges))
        with _peers_alive():
            works = dist.batch_isend_irecv(moves) if moves else []

        def wait() -> list[Tensor]:
            with _peers_alive():
                for work in works:
                    work.wait()
            assert parts is not None  # kept until here
            return got

        return wait

    def broadcast(self, values: list[float]) -> list[float]:
        """The central rank's numbers on every rank."""
        return self.broadcast_(
            torch.tensor(values, dtype=torch.float64, device=self.device)
        ).tolist()

    def broadcast_(self, tensor: Tensor) -> Tensor:
        if self._group:
            with _peers_alive():
                dist.broadcast(tensor, 0)
        return tensor

    def barrier(self) -> None:
        if self._group:
            dist.barrier()

    def sum_(self, tensor: Tensor) -> Tensor:
        if self._group:
            dist.all_reduce(tensor)
        return tensor

    def close(self) -> None:
        if self._group and dist.is_initialized():
            dist.destroy_process_group()
