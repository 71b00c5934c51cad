"""Ray that is missing, unreachable, open, another version, too small or gone: one sentence."""

import json
import os
import platform
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import ranks
from commands import check_refusal, in_process, toml
from conftest import make_tokens, tiny_table

from twistlm.system.signals import TOO_FEW
from twistlm.transport import ray_cluster


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """`refused(*overrides, parts=...)`: what `twistlm train` with Ray says."""

    def call(*overrides: str, parts: tuple[str, ...], **sections: dict) -> None:
        sections["run"] = {"variant": "ray"} | sections.get("run", {})
        table = tiny_table(make_tokens(tmp_path / "tokens"), tmp_path / "run", **sections)
        path = toml(tmp_path / "c.toml", table)
        check_refusal(*in_process(monkeypatch, capsys, "train", path, *overrides), parts)

    return call


@contextmanager
def head(host: str, wanted: str = "", **versions: str):
    """What a run asks a head first, answered as a Ray of some versions and token would."""
    import ray

    own = {"ray_version": ray.__version__, "python_version": platform.python_version()}

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        given = dict(context.invocation_metadata()).get("authorization", "")
        if wanted and given != f"Bearer {wanted}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        said = json.dumps(own | versions).encode()
        return b"\x0a\x00\x12" + bytes([len(said)]) + said

    handler = grpc.unary_unary_rpc_method_handler(answer)
    service = grpc.method_handlers_generic_handler(
        "ray.rpc.InternalKVGcsService", {"InternalKVGet": handler}
    )
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    yield f"{host}:{port}"
    server.stop(None).wait()


def own_address() -> str:
    """An address of this machine beyond loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has no network")
        return probe.getsockname()[0]


def test_no_ray(refused, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(parts=("run.variant = 'ray'", "pip install -e '.[ray]'"))
    check_refusal(*in_process(monkeypatch, capsys, "node", "--head"), ("pip install -e '.[ray]'",))


def test_heads_that_cannot_be_used(refused, monkeypatch, capsys, tmp_path):
    for kind, said in (
        ({"wanted": "another"}, "does not accept this token"),
        ({"ray_version": "2.9.3"}, "has version 2.9.3 of Ray, this process"),
        ({"python_version": "3.99.1"}, "has version 3.99.1 of Python, this process"),
    ):
        with head("127.0.0.1", **kind) as address:
            refused(f"ray.address={address}", parts=(address, said))
            joined = in_process(monkeypatch, capsys, "node", "--join", address)
            check_refusal(*joined, (said.partition(",")[0],))
    with head(own_address()) as address:
        refused(f"ray.address={address}", parts=(address, "asks for no token", "ray.open=true"))
        monkeypatch.setenv("RAY_USE_TLS", "1")  # promised, and there are no certificates
        refused(f"ray.address={address}", parts=("RAY_USE_TLS = '1'", "RAY_TLS_SERVER_CERT"))
        monkeypatch.delenv("RAY_USE_TLS")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with head("127.0.0.1", wanted="another") as address:
        refused(f"ray.address={address}", parts=(address, "asks for a token", "RAY_AUTH_TOKEN"))


def test_a_token_is_for_its_owner(tmp_path, monkeypatch, capsys):
    """Ours is made so; one that others can read is closed, or else refused."""
    file = tmp_path / "ray/token"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    assert (ray_cluster.make_token(), ray_cluster.make_token()) == (True, False)
    for mode, said in ((0o600, ""), (0o644, f"{file}: others could read the token (mode 644)")):
        file.chmod(mode)
        assert len(ray_cluster.token()) == 64
        assert capsys.readouterr().err.startswith(said)
        assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    monkeypatch.setattr(Path, "chmod", lambda *_: os.kill(1 << 22, 0))  # an OSError: of another
    with pytest.raises(ValueError, match=r"token: others can read .*mode 640.*use chmod 600"):
        ray_cluster.token()


def test_a_port_that_is_in_use(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ("node", "--head", "--host", "127.0.0.1", "--port", port)
        refused = in_process(monkeypatch, capsys, *words)
    check_refusal(*refused, (f"cannot listen on 127.0.0.1:{port}", "in use"))


def test_a_store_that_is_too_small(refused, ray_address):
    size = {"vocab_size": 64, "n_positions": 16, "n_embd": 256, "n_head": 4, "n_layer": 6}
    parts = ("train.n_workers = 3", "MB in Ray's object store", "--object-store-memory=")
    refused(f"ray.address={ray_address}", model={"config": size}, parts=parts)


def test_workers_that_find_no_place(ray_address, tmp_path, monkeypatch, capsys):
    """Each asks for more cores than any machine has."""
    table = tiny_table(
        make_tokens(tmp_path / "tokens"), tmp_path / "run",
        run={"variant": "ray", "threads": 13},
        ray={"address": ray_address, "wait": 0.5, "patience": 1.5},
    )  # fmt: skip
    path = toml(tmp_path / "c.toml", table)
    code, _, err = in_process(monkeypatch, capsys, "train", path)
    assert code == TOO_FEW
    assert len(err.strip().splitlines()) == 1, err
    assert "0 are in after" in err
    assert "1 machines with 12 cores and 0 GPUs" in err
    rows = list(map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines()))
    assert "12 cores" in next(row for row in rows if row["event"] == "waiting")["why"]


ENDS = """
import os, signal, sys, time
from twistlm import cli
from twistlm.system.signals import Ended, apart

def command():
    with apart("Ray is gone"):
        print("begun", os.getpid(), flush=True)
        {does}


cli.main(command)
"""


def ends(does: str) -> subprocess.Popen:
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", ENDS.format(does=does)], **pipes)


@pytest.mark.parametrize(
    ("does", "code", "said"),
    [
        ("raise ValueError('a mistake')", 2, "error: a mistake"),
        ("raise Ended('stopped by SIGINT', 130)", 130, "error: stopped by SIGINT"),  # once
        ("os._exit(1)", TOO_FEW, "error: Ray is gone"),  # what Ray does
        ("os.abort()", TOO_FEW, "error: Ray is gone"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "error: the run was ended by SIGKILL"),
    ],
)
def test_a_process_that_ray_ends(does, code, said):
    """It has a parent that says why; whatever ends in order speaks for itself."""
    process = ends(does)
    assert process.communicate(timeout=60)[1].strip() == said
    assert process.returncode == code


def test_signals_reach_the_child_and_its_parent_takes_it_along():
    # in many short sleeps: a signal just before a long one is handled at its end
    long = "[time.sleep(0.05) for _ in range(1000)]"
    with ends(f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); {long}") as process:
        process.stdout.readline()
        process.terminate()
        assert process.wait(30) in (9, 143)  # 143: before it had its handler
    with ends("time.sleep(60)") as process:
        pid = int(process.stdout.readline().split()[1])
        process.kill()
    ranks.wait_for(lambda: not Path(f"/proc/{pid}").exists(), 10)
