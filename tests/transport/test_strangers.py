"""Behind `make chaos`: what a stranger in another network namespace gets from Ray, and from us."""

import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from commands import check_refusal, toml
from conftest import make_tokens, tiny_table
from processes import environment, signal_host
from ranks import wait_for

from twistlm.lab.bench import comm

PORT = 6379
SLOW = 180.0
pytestmark = pytest.mark.chaos
# every port is asked for what Ray's agents and metrics would tell; 200 is an answer
STRANGER = """
import http.client, sys
for port in map(int, sys.argv[2:]):
    for how, path in ("GET", "/metrics"), ("GET", "/logs"), ("POST", "/get_or_create_runtime_env"):
        try:
            asked = http.client.HTTPConnection(sys.argv[1], port, timeout=2)
            asked.request(how, path)
            if asked.getresponse().status == 200:
                print(port, how, path)
        except (OSError, http.client.HTTPException):
            pass
"""


class Scene:
    """A host with processes of ours, in a home folder of its own, and a stranger's host."""

    def __init__(self, hosts: list[comm.NetworkHost], folder: Path):
        (self.host, self.stranger), self.folder = hosts, folder
        self.log, self.started = folder / "log.txt", []
        # `auto` looks for clusters there; a longer name is too long for Ray's sockets
        self.env = environment(HOME=str(folder / "home"), RAY_TMPDIR=tempfile.mkdtemp(prefix="tw"))
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            del self.env[name]
        table = tiny_table(
            make_tokens(folder / "tokens"), folder / "run", train={"n_workers": 1, "rounds": 99999},
            run={"variant": "ray"}, blocks={"k_attn": 4, "k_ffn": 4}, ray={"floor": 60.0},
        )  # fmt: skip
        self.config = toml(folder / "c.toml", table)

    def start(self, *words: str, **env: str) -> None:
        with self.log.open("w") as log:
            streams = {"stdout": log, "stderr": log, "start_new_session": True}
            command = [*self.host.prefix, sys.executable, "-m", *words]
            self.started.append(subprocess.Popen(command, env=self.env | env, **streams))

    def until(self, seen) -> None:
        alive = self.started[-1].poll
        wait_for(lambda: seen() or alive() is not None, SLOW, self.log.read_text)
        assert alive() is None, self.log.read_text()

    def refused(self, *words: str, parts: tuple[str, ...], **env: str) -> None:
        command = [*self.host.prefix, sys.executable, "-m", "twistlm", "train", self.config]
        own = {"env": self.env | env, "capture_output": True, "text": True, "timeout": SLOW}
        done = subprocess.run([*command, *words], **own)
        said = done.stderr.splitlines()[-1]  # Ray itself misses a route to elsewhere
        check_refusal(done.returncode, done.stdout, said, parts)

    def listening(self) -> list[tuple[str, str]]:
        """Address and port of every socket on the host that waits for somebody."""
        done = subprocess.run(
            [*self.host.prefix, "ss", "-tlnH"], capture_output=True, text=True, check=True
        )
        return [tuple(line.split()[3].rsplit(":", 1)) for line in done.stdout.splitlines()]

    def told(self) -> str:
        """What a stranger is told."""
        ports = sorted({port for _, port in self.listening()})
        assert ports
        command = [*self.stranger.prefix, sys.executable, "-c", STRANGER, self.host.address, *ports]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal_host(self.host, number)
            for process in self.started:
                process.wait(SLOW)


@pytest.fixture
def scene(tmp_path):
    if why := comm.why_not():
        pytest.skip(why)
    (tmp_path / "home").mkdir()
    with comm.slow_hosts(2, 10.0) as hosts:
        made = Scene(hosts, tmp_path)
        yield made
        made.close()


def test_a_ray_of_one_machine_is_alone(scene):
    """It listens on loopback, and the token that it makes is for its owner."""
    file = scene.folder / "home/.ray/auth_token"
    scene.start("twistlm", "train", scene.config)
    scene.until(lambda: list((scene.folder / "run/checkpoints").glob("round-*")))
    found = scene.listening()
    print(found)
    assert len(found) > 4
    assert {re.sub(r"\[(::ffff:)?|\]", "", host) for host, _ in found} == {"127.0.0.1"}
    assert file.stat().st_mode & 0o777 == 0o600
    assert scene.told() == ""


def test_an_open_cluster_is_refused_however_it_is_called(scene):
    """Its head asks for no token; a variable that promises TLS makes it no safer."""
    scene.start(
        "ray.scripts.scripts", "start", "--head", f"--node-ip-address={scene.host.address}",
        f"--port={PORT}", "--block", "--include-dashboard=false", "--num-cpus=1",
        RAY_AUTH_MODE="disabled",
    )  # fmt: skip
    scene.until(lambda: "Ray runtime started" in scene.log.read_text())
    parts = (f"the Ray cluster at {scene.host.address}:{PORT} asks for no token", "ray.open=true")
    for address in ("auto", f"127.0.0.1:{PORT}", f"{scene.host.address}:{PORT}"):
        scene.refused(f"ray.address={address}", parts=parts)
    without = (f"ray.address={scene.host.address}:{PORT}",)
    scene.refused(*without, parts=("RAY_USE_TLS = '1'", "RAY_TLS_SERVER_CERT"), RAY_USE_TLS="1")
    more = ("ray.address=auto", "ray.open=true", "train.rounds=1")
    scene.start("twistlm", "train", scene.config, *more)
    assert scene.started[-1].wait(SLOW) == 0, scene.log.read_text()


def test_a_head_tells_a_stranger_nothing(scene):
    """`twistlm node --head` closes a token that others can read; its agents ask for it."""
    file = scene.folder / "home/.ray/auth_token"
    file.parent.mkdir()
    file.write_text("0123456789abcdef" * 4)
    file.chmod(0o644)
    words = ["--host", scene.host.address, "--", "--num-cpus=1"]
    scene.start("twistlm", "node", "--head", *words)
    scene.until(lambda: "Ray runtime started" in scene.log.read_text())
    assert file.stat().st_mode & 0o777 == 0o600
    assert "others could read the token (mode 644)" in scene.log.read_text()
    print(scene.listening())
    assert scene.told() == ""
