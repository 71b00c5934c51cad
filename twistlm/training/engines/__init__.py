"""Ways to carry a round: one file each, and the choice between them."""

import importlib.util

from ...config import Config
from ...transport.ranks import Cluster
from ..run import Progress, Run
from .dataparallel import DataParallel
from .engine import Engine
from .local import Local
from .sharded import Sharded


def join(cfg: Config) -> Cluster:
    """This process's place in a run; a cluster that cannot be used is refused."""
    if cfg.run.variant == "ray":
        if cfg.train.method != "twist":
            raise ValueError(f"train.method = {cfg.train.method!r}: use run.variant = 'local'")
        if importlib.util.find_spec("ray") is None:
            raise ValueError(
                "run.variant = 'ray' needs Ray, which is not installed: pip install -e '.[ray]'"
            )
        from ...transport import ray_cluster

        ray_cluster.check(ray_cluster.address_of(cfg), cfg.ray.open)
    return Cluster(
        cfg.run.variant, cfg.train.n_workers, cfg.run.seat, cfg.run.device, cfg.run.silence
    )


def start(run: Run, progress: Progress, quiet: bool, resumes: bool = False) -> Engine:
    """The engine of a run."""
    if run.cfg.train.method != "twist":
        return DataParallel(run, progress)
    if run.cfg.run.variant == "ray":
        from .elastic import Elastic

        return Elastic(run, progress, quiet, resumes)
    return (Local if run.cfg.run.variant == "local" else Sharded)(run, progress)
