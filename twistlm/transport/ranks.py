"""Which rank of torchrun plays which worker, and what these ranks exchange as one group.

`run.variant` chooses which rank hosts which worker, and whether that worker trains a physical
subnet, a masked copy of the full model, or the central weights themselves behind a mask.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..system.device import pick_device
from ..system.signals import end_with_launcher

TrainerKind = Literal["physical", "masked", "central"]


def place_workers(
    variant: str, n_workers: int, world_size: int, kind: TrainerKind
) -> tuple[tuple[int, ...], tuple[TrainerKind, ...]]:
    """Each worker's rank, and its kind of trainer; a wrong number of ranks is refused."""
    if variant in ("local", "ray"):
        if world_size != 1:
            raise ValueError(
                f"run.variant = {variant!r} is one process, but torchrun started {world_size}: "
                f"use masked, true, hybrid or sharded"
            )
        return (0,) * n_workers, (kind,) * n_workers
    need = n_workers + (variant == "true")
    if world_size != need:
        raise ValueError(
            f"run.variant = {variant!r} with train.n_workers = {n_workers} needs {need} ranks, but "
            f"there {'is' if world_size == 1 else 'are'} {world_size}: start it with torchrun "
            f"--nproc-per-node {need} -m twistlm train ..."
        )
    others: TrainerKind = "masked" if variant == "masked" else "physical"
    first: TrainerKind = "central" if variant == "hybrid" else others
    return tuple(range(need - n_workers, need)), (first,) + (others,) * (n_workers - 1)


def on_central_rank() -> bool:
    """Whether this process speaks for the run (always, without torchrun)."""
    return int(os.environ.get("RANK", 0)) == 0


LONGEST = timedelta(days=1)  # of a wait: whoever gives signs of life may take its time
BEAT = 0.5  # seconds
LAST = 1 << 40  # more beats than a run can have
LEAVE = 5.0  # seconds for the last beat


@contextmanager
def _alive(peer: int | None = None) -> Iterator[None]:
    """Turn what gloo and NCCL raise when a peer is gone into a sentence."""
    try:
        yield
    except RuntimeError as error:
        who = "another rank" if peer is None else f"rank {peer}"
        raise ConnectionError(
            f"{who} of this run is gone: start the run again with --resume, its newest checkpoint "
            f"is unharmed ({str(error).splitlines()[0].split('. ')[0]})"
        ) from None


class Heartbeat:
    """Signs of life in torchrun's store: a stopped rank says nothing, and gloo would wait for it.

    A rank may take as long as it likes for its set-up or its steps: this thread goes on beside
    them. When a rank has been silent for too long, the others name it and end, since no wait for
    it can be broken off. Silence is counted in seconds that this process has lived: one that was
    itself stopped, as all ranks of a suspended job, accuses nobody when it goes on.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, silence: float):
        self.store, self.rank, self.silence = store, rank, silence
        store.set(f"pid/{rank}", str(os.getpid()))
        self.lived = 0.0  # seconds
        # another rank -> its beats, and when they changed
        self.seen = {peer: (0, self.lived) for peer in range(world_size) if peer != rank}
        self.answered = self.lived  # the store
        self.ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _beat(self) -> None:
        # without its store the host is gone, too: a signal or an exchange says so
        with suppress(RuntimeError):
            while not self.ended.wait(BEAT):
                self.store.add(f"beat/{self.rank}", 1)
                for rank, (before, _) in self.seen.items():
                    if (beats := self.store.add(f"beat/{rank}", 0)) != before:
                        self.seen[rank] = (beats, self.lived)
                self.answered = self.lived
            self.store.add(f"beat/{self.rank}", LAST)
        self.ended.set()

    def _watch(self) -> None:
        woke = time.monotonic()
        while not self.ended.wait(BEAT):
            slept, woke = time.monotonic() - woke, time.monotonic()
            self.lived += min(slept, 2 * BEAT)
            first = self.answered - self.silence  # who has given no sign since then is silent
            silent = [r for r, (beats, at) in self.seen.items() if beats < LAST and at < first]
            late = " and ".join(f"rank {rank}" for rank in silent)
            if self.lived - self.answered > self.silence:
                # a store that is silent itself says nothing of the others: who keeps it is late
                by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
                late = "torchrun on the machine of rank 0" if by_torchrun else "rank 0"
                silent = []
            if late and not self.ended.is_set():
                print(
                    f"error: no sign of life from {late} for {self.silence:g} s (run.silence): "
                    f"start the run again with --resume, its newest checkpoint is unharmed",
                    file=sys.stderr,
                    flush=True,
                )
                for rank in silent:
                    self._end_stopped(rank)
                os._exit(2)

    def _end_stopped(self, rank: int) -> None:
        """torchrun waits 30 s for its ranks to obey SIGTERM, which one that is stopped does not."""
        if "TORCHELASTIC_RUN_ID" in os.environ:
            with suppress(OSError, RuntimeError):
                pid = int(self.store.get(f"pid/{rank}"))
                about = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if int(about[1]) == os.getppid():  # on this machine, and torchrun's
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Leave in good order: nobody waits for another beat or a stopped store."""
        self.ended.set()
        self._beating.join(LEAVE)


class Cluster:
    """This process's place in the run; torchrun's ranks are one process group."""

    def __init__(
        self, variant: str, n_workers: int, kind: TrainerKind, device: str, silence: float = 60.0
    ):
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.ranks, self.kinds = place_workers(variant, n_workers, self.world_size, kind)
        self.device = pick_device(device, int(os.environ.get("LOCAL_RANK", 0)))
        self.nothing = torch.empty(0, dtype=torch.uint8, device=self.device)  # to send
        self.n_bytes = 0  # of exchanges, sent and received
        self._n_exchanges = 0
        self._heartbeat: Heartbeat | None = None
        if self.world_size > 1:
            end_with_launcher()
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            with _alive():
                rank, n = self.rank, self.world_size
                store, _, _ = next(iter(dist.rendezvous("env://", rank, n)))
                self._heartbeat = Heartbeat(store.clone(), rank, n, silence)
                ours = dist.PrefixStore("twistlm", store)
                dist.init_process_group(backend, None, LONGEST, n, rank, store=ours)

    @property
    def is_central(self) -> bool:
        return self.rank == 0

    @property
    def workers(self) -> list[int]:
        """The workers that this rank plays."""
        return [worker for worker, at in enumerate(self.ranks) if at == self.rank]

    def exchange(self, parts: list[Tensor], sizes: list[int]) -> Callable[[], list[Tensor]]:
        """Start sending part i (bytes) to rank i; the call returned waits for theirs."""
        if self._heartbeat is None:
            return lambda: parts
        got = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        got[self.rank] = parts[self.rank]
        self._n_exchanges += 1  # a tag: every rank counts the same
        # not an all-to-all: gloo has no more than two of them under way, and each waits for its
        # slowest link
        moves, peers = [], []
        for peer in range(self.world_size):
            if peer != self.rank:
                self.n_bytes += parts[peer].numel() + sizes[peer]
                for move, tensor in ((dist.isend, parts[peer]), (dist.irecv, got[peer])):
                    if tensor.numel():
                        moves.append(dist.P2POp(move, tensor, peer, tag=self._n_exchanges))
                        peers.append(peer)
        with _alive():
            works = dist.batch_isend_irecv(moves) if moves else []

        def wait() -> list[Tensor]:
            for i, work in enumerate(works):  # NCCL has one for all of them
                with _alive(peers[i] if len(works) == len(peers) else None):
                    work.wait()
            assert parts is not None  # kept until here
            return got

        return wait

    def broadcast(self, values: Sequence[float]) -> list[float]:
        """The central rank's numbers on every rank."""
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self.broadcast_(numbers).tolist()

    def broadcast_(self, tensor: Tensor) -> Tensor:
        self._together(dist.broadcast, tensor, 0)
        return tensor

    def barrier(self) -> None:
        self._together(dist.barrier)

    def sum_(self, tensor: Tensor) -> Tensor:
        self._together(dist.all_reduce, tensor)
        return tensor

    def _together(self, function: Callable, *args: Any) -> None:
        if self._heartbeat is not None:
            with _alive():
                function(*args)

    def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
            dist.destroy_process_group()
