"""Ways to carry a round: one file each behind one protocol, and the choice between them."""

from __future__ import annotations

from ...config import Config
from ...transport.ranks import Cluster
from ..progress import Progress
from ..run import Run
from .dataparallel import DataParallel
from .elastic import Elastic, Opened
from .local import Local
from .protocol import Engine
from .sharded import Sharded


def is_together(cfg: Config) -> bool:
    """Whether the ranks of torchrun form one group; else they are workers of the central one's hub."""
    return cfg.train.method != "twist" or cfg.run.variant == "sharded"


def join(cfg: Config, opened: Opened | None) -> Cluster:
    """This process's place in the run that a config describes."""
    return Cluster(
        cfg.run.variant,
        cfg.train.n_workers,
        cfg.run.seat,
        cfg.run.device,
        together=is_together(cfg),
        hub=opened is not None,
    )


def start(run: Run, progress: Progress, opened: Opened | None, quiet: bool) -> Engine:
    """The engine of a run."""
    if run.cfg.train.method != "twist":
        return DataParallel(run, progress)
    if run.cfg.run.variant == "sharded":
        return Sharded(run)
    if opened is None:
        return Local(run)
    if run.cfg.blocks.masks != "round" or run.teacher is not None:
        raise ValueError(
            "blocks.masks and train.teacher are not sent to workers of a hub: use run.variant local or "
            "sharded"
        )
    return Elastic(run, progress.round, opened, quiet)
