"""A Ray cluster: whether it may be trusted, how this process enters it, its room."""

import gc
import ipaddress
import logging
import math
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from ..config import Config
from ..system.signals import TOO_FEW, Ended, Stop, end_with_parent, on_signals


def token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray/auth_token"))


def token() -> str:
    """The cluster's token: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token; or none.

    A file that others can read is closed first, or else refused.
    """
    if word := os.environ.get("RAY_AUTH_TOKEN"):
        return word.strip()
    path = token_file()
    if not path.is_file():
        return ""
    if (mode := path.stat().st_mode & 0o777) & 0o077:
        try:
            path.chmod(0o600)
        except OSError as error:
            raise ValueError(
                f"{path}: others can read the token (mode {mode:o}), and whoever has it can run "
                f"code here: use chmod 600 ({error.strerror})"
            ) from None
        print(f"{path}: others could read the token (mode {mode:o}); now only you", file=sys.stderr)
    return path.read_text().strip()


def make_token() -> bool:
    """Write a token that only its owner can read (Ray's own is for all), unless there is one."""
    if token() or os.environ.get("RAY_AUTH_MODE") == "disabled":
        return False
    path = token_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return True


for name, value in {
    "RAY_USAGE_STATS_ENABLED": 0,
    "AUTOSCALER_METRIC_PORT": -1,  # none: metrics would answer anyone who asks
    "DASHBOARD_METRIC_PORT": -1,
    "RAY_enable_metrics_collection": 0,
    "RAY_enable_infeasible_task_early_exit": 0,  # workers wait for a machine
    "RAY_task_events_report_interval_ms": 0,  # the head would keep every call of every round
    "RAY_free_objects_batch_size": 1,  # a store's room is free at once; own: 100, or after 1 s
    "RAY_health_check_period_ms": 1000,  # silent for 5 x (1 + 3) s is dead; own: 5 x (3 + 10)
    "RAY_health_check_timeout_ms": 3000,
    "RAY_raylet_liveness_self_check_interval_ms": 10000,  # who was taken for dead ends; own: 60 s
    "RAY_gcs_rpc_server_reconnect_timeout_s": 20,  # processes that lost their head end; own: 60
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": 0,  # SIGTERM ends a node at once; own: 30 s
}.items():
    os.environ.setdefault(name, str(value))
if token():  # Ray reads this once, when it is imported: others import it from here
    os.environ.setdefault("RAY_AUTH_MODE", "token")

import grpc  # noqa: E402
import ray  # noqa: E402
from ray import exceptions  # noqa: E402
from ray._common.tls_utils import load_certs_from_env  # noqa: E402
from ray._private import ray_constants  # noqa: E402
from ray.core.generated.gcs_service_pb2 import InternalKVGetRequest  # noqa: E402
from ray.core.generated.gcs_service_pb2_grpc import InternalKVGcsServiceStub  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

NAMESPACE = "twistlm"
PROBE = 10.0  # seconds for a head to answer
EVERY = 1.0  # seconds between two looks at a head
CUT = 10.0  # seconds without a head after which a machine begins anew
GONE = 15.0  # seconds without a head after which a run ends
USAGE = 2  # the exit code of `ray start` for an option that does not exist
LEAST_STORE = 80_000_000  # bytes: Ray's own lower limit
K_LABELS = {"attn": "twistlm-k-attn", "ffn": "twistlm-k-ffn"}  # of a node: K of its workers
MEMORY_LABEL = "twistlm-memory"  # bytes for each of its workers, instead of K; 0: what is free


def address_of(cfg: Config) -> str:
    """host:port of the cluster to use; empty for a Ray of this machine alone."""
    found = cfg.ray.address or os.environ.get("RAY_ADDRESS", "")
    return found if found in ("", "auto") else host_and_port(found, "ray.address = ")


def host_and_port(address: str, key: str) -> str:
    """The address of a head as given; `key` begins the sentence that refuses it."""
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{key}{address!r}: use host:port of the head, as in 10.0.0.1:6379")
    return address


def is_near(address: str) -> bool:
    """Whether nobody but this machine reaches an address."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except socket.gaierror as error:
        what = f"the head's address {address!r}: {host} is unknown"
        raise ValueError(f"{what}: {error.strerror}") from None
    return all(ipaddress.ip_address(str(text).partition("%")[0]).is_loopback for text in found)


def check(address: str, is_open: bool, where: str = "") -> None:
    """Refuse a silent head, another version, a wrong token, or an open door.

    A door is judged by `where` its head listens, if that is known already.
    """
    if address in ("", "auto"):  # known after ray.init
        return
    where, mine, cluster = where or address, token(), f"the Ray cluster at {address}"
    near = is_near(where) or uses_tls()
    code, said = _ask(address, "")
    if code == grpc.StatusCode.UNAUTHENTICATED:
        if not mine:
            raise ValueError(
                f"{cluster} asks for a token: put it in ~/.ray/auth_token or RAY_AUTH_TOKEN"
            )
        code, said = _ask(address, mine)
        if code == grpc.StatusCode.UNAUTHENTICATED:
            raise ValueError(
                f"{cluster} does not accept this token: it must be the head's own, in "
                f"~/.ray/auth_token or RAY_AUTH_TOKEN"
            )
    elif code is None and not near and not is_open:
        raise ValueError(
            f"the Ray cluster at {where} asks for no token, so whoever reaches it can run code "
            f"on it: start its head with `twistlm node --head`, or say ray.open=true"
        )
    if code is not None:
        raise ValueError(f"no Ray head answers at {address} within {PROBE:g} s: {said}")
    theirs = dict(re.findall(r'"(\w+)_version": "([^"]+)"', said.decode(errors="replace")))
    ours = {"ray": ray.__version__, "python": platform.python_version()}
    if os.environ.get("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL") == "minor":
        del ours["python"]  # Ray looks itself
    for name, version in ours.items():
        if theirs.get(name, version) != version:
            raise ValueError(
                f"{cluster} has version {theirs[name]} of {name.capitalize()}, this process "
                f"{version}: install the same on all machines"
            )


def uses_tls() -> bool:
    """Whether Ray speaks TLS, in which both sides show certificates."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _channel(address: str) -> grpc.Channel:
    fresh = [("grpc.use_local_subchannel_pool", 1)]  # no earlier failure delays this question
    if not uses_tls():
        return grpc.insecure_channel(address, fresh)
    try:
        chain, key, root = load_certs_from_env()
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(root, key, chain), fresh)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"RAY_USE_TLS = {os.environ['RAY_USE_TLS']!r}: {error}") from None


def _ask(address: str, mine: str, seconds: float = PROBE) -> tuple[grpc.StatusCode | None, Any]:
    """(None, the head's record of its versions as JSON), or gRPC's code and words."""
    metadata = [("authorization", f"Bearer {mine}")] if mine else []
    with _channel(address) as channel:
        try:
            asked = InternalKVGetRequest(key=b"CLUSTER_METADATA", namespace=b"cluster")
            stub = InternalKVGcsServiceStub(channel)
            return None, stub.InternalKVGet(asked, timeout=seconds, metadata=metadata).value
        except grpc.RpcError as error:
            words = str(error.details()).rpartition("Failed to connect to remote host: ")[2]
            return error.code(), words


@dataclass
class Head:
    """Whether a head still answers: without it Ray ends this process after some seconds."""

    address: str
    asked: float = 0.0  # when it was asked last
    since: float = 0.0  # the first question that it did not answer; 0: it does

    def answers(self) -> bool:
        """Ask it now; it has two seconds."""
        asked = time.monotonic()
        code, _ = _ask(self.address, token(), seconds=2.0)
        lost = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        self.since = (self.since or asked) if lost else 0.0
        self.asked = time.monotonic()
        return not lost

    def silence(self) -> float:
        """Seconds for which it has not answered; it is asked once a second."""
        if time.monotonic() - self.asked > EVERY:
            self.answers()
        return time.monotonic() - self.since if self.since else 0.0

    def check(self) -> None:
        """Raise `Ended` after a silence that is no pause."""
        if self.silence() > GONE:
            raise self.gone()

    def gone(self) -> Ended:
        return Ended(
            f"Ray at {self.address} is gone (its head does not answer): start its head again, and "
            f"the run with --resume; the last checkpoint is unharmed",
            TOO_FEW,
        )

    def wait(self) -> None:
        """Until it answers: what asks it for more meanwhile would hang."""
        while not self.answers():
            self.check()
            time.sleep(EVERY)


def enter(cfg: Config, n_bytes: int, state: int = 0) -> dict[str, Any]:
    """Connect this process, or start a Ray here; a round puts `n_bytes` in its stores, and at times
    copies of the central model's ranges of `state` bytes lie beside them.

    Returns what Ray says of the place: `address`, `node_id`, `webui_url`.
    """
    address, is_cpu = address_of(cfg), cfg.run.device == "cpu"
    settings: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False}
    settings |= {"logging_level": "ERROR", "configure_logging": False}
    if not address:
        store = max(LEAST_STORE, (n_bytes + state) * 5 // 4)
        settings |= {"object_store_memory": store, "include_dashboard": False}
        settings |= {"num_cpus": cfg.train.n_workers * max(1, cfg.run.threads)}
        settings |= {"num_gpus": 0} if is_cpu else {}
        make_token()
        free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else sys.maxsize
        if store > free:
            raise ValueError(_too_small(cfg, n_bytes, "/dev/shm of this machine", free))
    logging.getLogger("ray").setLevel(logging.ERROR)  # it says at length that it asks for a token
    # a thread that prints a lost node's last log lines and stack; `events.jsonl` has what it costs
    ray._private.worker.listen_error_messages = lambda *_: None
    # a Ray that may be no cluster has the address of loopback, and all of it listens there
    may = bool(address) and ray_constants.ENABLE_RAY_CLUSTER
    try:
        with mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", may):
            said = ray.init(address or "local", **settings).address_info
    except Exception as error:  # one that does not start within 30 s is a bare Exception
        words = " ".join(str(error).split())[:300]
        raise ValueError(f"Ray at {address or 'this machine'}: {words}") from None
    try:
        port = said["address"].rpartition(":")[2]
        for node in ray.nodes():  # of 127.0.0.1 and `auto`, too: Ray listens on all interfaces
            if "node:__internal_head__" in node["Resources"]:
                check(said["address"], cfg.ray.open, f"{node['NodeManagerAddress']}:{port}")
        rooms = [int(node["Resources"].get("object_store_memory", 0)) for node in machines()]
        n_bytes = (n_bytes + state) // min(cfg.ray.owners or len(rooms), len(rooms))
        if address and n_bytes > min(rooms):
            raise ValueError(_too_small(cfg, n_bytes, "the store of a machine", min(rooms)))
    except ValueError:
        leave()
        raise
    return said


def leave() -> None:
    """Disconnect. A reference that another thread lets go meanwhile would end this process, and
    whichever thread runs into it collects Python's garbage."""
    gc.collect()
    gc.disable()
    try:
        ray.shutdown()
    finally:
        gc.enable()


def _too_small(cfg: Config, n_bytes: int, where: str, room: int) -> str:
    return (
        f"a round of train.n_workers = {cfg.train.n_workers} puts {n_bytes / 1e6:,.0f} MB in Ray's "
        f"object store, and {where} has {room / 1e6:,.0f} MB: start Ray with "
        f"--object-store-memory={n_bytes * 5 // 4}, or take run.wire=int8, train.moments=reset or "
        f"run.variant=sharded"
    )


def gpus(cfg: Config) -> float:
    """GPUs of a worker: one where the cluster has any; workers of one machine share what it has."""
    n = ray.cluster_resources().get("GPU", 0.0) if cfg.run.device != "cpu" else 0.0
    return min(1.0, n if address_of(cfg) else n / cfg.train.n_workers)


def detached(kind: Any, name: str, machine: str = "", **options: Any) -> Any:
    """How to start an actor that outlives its driver; one of that name that is there is taken,
    for it belongs to an earlier process of the same run.

    It starts on `machine` alone: where Ray may choose another, it does so while that one lives.
    """
    at = NodeAffinitySchedulingStrategy(machine, soft=False) if machine else "SPREAD"
    options |= {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}
    options |= {"get_if_exists": True, "max_restarts": 0, "scheduling_strategy": at}
    return kind.options(**options)


def is_there(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])


def answer(ref: Any) -> tuple[Any, Literal["", "bug", "input", "gone"]]:
    """What an actor's method returned, or an error: a bug of its own, an input that is lost, or an
    actor that is gone or silent."""
    try:
        return ray.get(ref, timeout=None if is_there(ref) else 0), ""
    except exceptions.RayTaskError as error:
        return error, "input" if isinstance(error.cause, exceptions.RayError) else "bug"
    except exceptions.RayError as error:
        return error, "gone"


def words(error: exceptions.RayError) -> str:
    """What went wrong, in one line: the last one of a traceback, else Ray's first."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [""]
    said = lines[-1] if isinstance(error, exceptions.RayTaskError) else lines[0]
    return f"{type(error).__name__}: {said}"[:200]


def machines() -> list[dict[str, Any]]:
    """Those of the cluster that have cores for workers; else all."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [node for node in alive if node["Resources"].get("CPU")] or alive


def room() -> str:
    """What the cluster has, in words."""
    has, n = ray.cluster_resources(), sum(node["Alive"] for node in ray.nodes())
    return f"{n} machines with {has.get('CPU', 0):.0f} cores and {has.get('GPU', 0):.0f} GPUs"


def keep_node(command: Sequence[str], head: str = "") -> int:
    """Run `ray start --block ...` until a signal comes; start it anew whenever it ends by itself.

    A node that does not hear `head` for some seconds is ended, and begun anew as soon as it does:
    Ray's own connections take a minute or more to break, and may never come back.
    """
    stop, pause, silence = Stop(), 1.0, Head(head).silence if head else float

    def wait(done: Callable[..., bool], seconds: float = math.inf) -> None:
        end = time.monotonic() + seconds
        while not done() and not stop.requested and time.monotonic() < end:
            time.sleep(0.1)

    with on_signals(stop, quiet=True):
        while not stop.requested:
            began = time.monotonic()
            process = subprocess.Popen(command, process_group=0, preexec_fn=end_with_parent)
            ended = process.poll
            wait(lambda ended=ended: ended() is not None or silence() > CUT)
            if cut := process.poll() is None:
                process.terminate()
            if process.wait() == USAGE:
                return USAGE
            wait(lambda: not silence())
            pause = 1.0 if cut or time.monotonic() > began + 60 else min(30.0, 2 * pause)
            wait(lambda: False, pause)
    return 128 + stop.signal
