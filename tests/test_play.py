"""The page in a real browser: slider, prompt, tabs, two users, a huge prompt, a killed model process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, tiny_table, write_words

from twistlm import config
from twistlm.model import huggingface
from twistlm.play import PICKS
from twistlm.play.host import Host, ModelEnded
from twistlm.play.models import Asked, Models
from twistlm.tickets import deploy
from twistlm.tickets.parent import open_parent
from twistlm.training import rounds

PLENTY = 60  # seconds: machines of tests are busy


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run with a tokenizer and one evaluation."""
    folder = tmp_path_factory.mktemp("play")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_words("tokens", [f"w{i}" for i in range(VOCAB)], 2400)
        table = tiny_table("tokens", Path("run"), train={"rounds": 2}, run={"eval_every": 0})
        table["blocks"] |= {"shared_first": 0, "setting": "ffn"}
        table["run"]["eval_ratios"] = ["3/4"]
        rounds.train(config.from_dict(table), quiet=True)
    return folder / "run"


@pytest.fixture
def host(run) -> Iterator[Host]:
    made = Host(str(run), "cpu", [], None)
    yield made
    made.close()


def cut(host: Host, size: int, pick: str = PICKS[0], seed: int = 0) -> dict:
    *_, last = host.ask("cut", asked={"size": size, "pick": pick, "seed": seed})
    return last["ticket"]


def test_tickets_are_cut_in_memory(host, run):
    """Every size and pick; parameters counted by hand, nested ones inside each other, nothing written."""
    before = sorted(path for path in run.rglob("*"))
    about = next(host.ask("describe"))
    assert about["sizes"] == [f"ffn {k}/4" for k in (1, 2, 3, 4)]
    assert "random tickets" in about["bands"][2]
    assert about["bands"][0] == ""
    n_full = open_parent(run, "cpu").central.layout.n_params
    a_block = 3 * 16 * (16 + 16 + 1)  # three layers: 16 neurons in, out, and their bias
    for pick in PICKS:
        for size in (1, 2, 3, 4):
            found = cut(host, size, pick)
            assert found["parameters"] == n_full - (4 - size) * a_block
            assert found["perplexity"] > 1
            assert found["ms"] > 0
            assert found["stock"]
    assert cut(host, 2, seed=1)["perplexity"] != cut(host, 2, seed=2)["perplexity"]
    assert cut(host, 2, PICKS[2])["perplexity"] <= cut(host, 2)["perplexity"]
    rows = list(host.ask("curve", pick=PICKS[1], seed=0))
    assert [row["size"] for row in rows] == [1, 2, 3, 4]
    assert sorted(path for path in run.rglob("*")) == before


@pytest.mark.parametrize("pick", PICKS)
def test_what_is_cut_in_memory_is_the_ticket_that_extract_writes(run, pick, tmp_path):
    """Every weight, bit for bit, of a folder that is loaded again."""
    models = Models(str(run), "cpu", [], None)
    for asked in (
        Asked(3, pick),
        Asked(1, pick),
        Asked(2, pick),
    ):  # the last one's memory is let go
        deploy.save_ticket(models.parent, models.blueprint(asked), tmp_path / str(asked.size))
        want = huggingface.state(deploy.load_ticket(tmp_path / str(asked.size)))
        found = huggingface.state(models.ticket(asked))
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)
        parts = list(models.cut(asked))
        assert set(parts[0]["ticket"]) < set(parts[1]["ticket"]) < set(parts[2]["ticket"])


def test_a_question_that_is_left_and_a_process_that_is_killed(host):
    asked = {"size": 2, "pick": PICKS[0], "seed": 0}
    words = {"prompt": "w1 w2", "n_new": 8, "temperature": 0.0}
    left = host.ask("write", asked=asked, **words)
    next(left)
    left.close()  # a user who went away: the next answer is not the rest of this one
    *_, last = host.ask("write", asked=asked, **words)
    assert last["whole"]["text"].startswith("w")
    *_, huge = host.ask("write", asked=asked, **words | {"prompt": "w3 " * 100_000})
    assert "tokens were read" in huge["note"]
    with pytest.raises(ValueError, match=r"sizes are 1\.\.4"):
        cut(host, 9)
    answer = host.ask("write", asked=asked, **words)
    next(answer)
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)  # in the middle of an answer
    with pytest.raises(ModelEnded, match="ask again"):
        list(answer)
    assert cut(host, 1)["parameters"] > 0
    os.kill(host.pid, signal.SIGKILL)  # while nobody asks: nobody notices
    assert cut(host, 2)["parameters"] > 0


# in a browser


@pytest.fixture(scope="module")
def served(run) -> Iterator[tuple[str, int]]:
    """The command in a process of its own: its address and process id."""
    pytest.importorskip("gradio")
    pytest.importorskip("selenium")
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("Chromium and its driver are not installed")
    command = [sys.executable, "-u", "-m", "twistlm", "play", str(run), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("http"):
            break
    else:
        raise AssertionError("".join(lines))
    yield line.split()[0], process.pid
    process.send_signal(signal.SIGINT)
    assert process.wait(PLENTY) == 0
    process.stdout.close()


@dataclass(frozen=True)
class Child:
    """A process and what it was started with."""

    pid: int
    cmdline: bytes


def children(pid: int) -> list[Child]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(word) for path in found for word in path.read_text().split()]
    return [Child(each, Path(f"/proc/{each}/cmdline").read_bytes()) for each in pids]


class Reader:
    """A person at a browser that can reach this machine and nothing else."""

    def __init__(self, address: str, width: int):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        rules = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
        for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", rules):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        service = Service(str(shutil.which("chromedriver")))
        self.browser = webdriver.Chrome(options=options, service=service)
        self.browser.set_window_size(width, 1000)
        if width < 500:  # narrower than a headless window can be
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": True}
            self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.browser.get(address)

    def find(self, css: str):
        from selenium.webdriver.common.by import By

        return self.browser.find_element(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        element = self.find(css)
        return element.get_attribute("value") or element.text

    def texts(self, css: str) -> list[str]:
        from selenium.webdriver.common.by import By

        return [each.text for each in self.browser.find_elements(By.CSS_SELECTOR, css)]

    def wait(self, what, css: str) -> str:
        """The text of an element once `what` holds for it."""
        from selenium.common.exceptions import WebDriverException

        end, found = time.monotonic() + PLENTY, ""
        while time.monotonic() < end:
            try:
                found = self.text(css)
                if what(found):
                    return found
            except WebDriverException:
                pass
            time.sleep(0.1)
        raise AssertionError(f"{css} stayed {found!r}")

    def move(self, key: str) -> None:
        self.find("#size input[type=range]").send_keys(key)

    def type(self, prompt: str) -> None:
        box = self.find("#prompt textarea")
        self.browser.execute_script(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))",
            box,
            prompt,
        )

    def tab(self, name: str) -> None:
        from selenium.webdriver.common.by import By

        found = self.browser.find_elements(By.CSS_SELECTOR, "button[role=tab]")
        next(each for each in found if each.text.strip() == name).click()

    def requested(self) -> set[str]:
        """Every host that the page asked for anything."""
        hosts = set()
        for entry in self.browser.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if url.startswith(("http", "ws")):
                    hosts.add(url.split("/")[2].split(":")[0])
        return hosts


@pytest.fixture
def reader(served):
    opened = []

    def start(width: int = 1280) -> Reader:
        opened.append(Reader(served[0], width))
        return opened[-1]

    yield start
    for each in opened:
        each.browser.quit()


@pytest.mark.browser
def test_a_person_plays(reader, run, tmp_path):
    """Slider, prompt, both texts, numbers and tabs, while a training goes on in the same folder."""
    one = reader()
    first = one.wait(lambda text: "perplexity" in text and "…" not in text, "#numbers")
    assert "ffn 2/4" in first
    command = [sys.executable, "-m", "twistlm", "train", "run", "--resume", "train.rounds=400"]
    training = subprocess.Popen(command, cwd=run.parent, stdout=subprocess.DEVNULL)
    try:
        one.move("\ue014")  # right
        second = one.wait(lambda text: "ffn 3/4" in text and "…" not in text, "#numbers")
        assert "random tickets" in second
        tiles = [tile.split("\n") for tile in one.texts("#numbers .tile")]
        names = ["parameters", "weights", "a decoded token", "perplexity"]
        assert [tile[0] for tile in tiles] == names
        assert tiles[0][1:] == ["9,568", "whole model 11,152"]
        assert all(" MB" in text for text in tiles[1][1:])
        assert all(text.endswith(" ms") for text in tiles[2][1:])
        one.type("w1 w2 w3")
        one.find("#write").click()
        for box in ("#whole-text textarea", "#ticket-text textarea"):
            assert one.wait(lambda text: text.count("w") >= 4, box)
        assert one.wait(lambda text: "ms per token" in text, "#note")
        one.browser.save_screenshot(str(tmp_path / "play-1280.png"))
        one.tab("Sizes")
        one.find("#measure").click()
        one.wait(lambda text: text.count("4/4") >= 1 and len(text.split("\n")) >= 5, "#curve table")
        one.wait(lambda text: "perplexity over ms per token" in text, "#curve")
        one.browser.save_screenshot(str(tmp_path / "sizes-1280.png"))
        one.tab("Training")
        before = one.wait(lambda text: "rounds" in text, "#training")
        one.wait(lambda text: text != before and "of 400 rounds" in text, "#training")
        one.browser.save_screenshot(str(tmp_path / "training-1280.png"))
    finally:
        training.terminate()
        training.wait()
    assert one.requested() == {"127.0.0.1"}
    wrong = [e for e in one.browser.get_log("browser") if e["level"] == "SEVERE"]
    assert not wrong, wrong


@pytest.mark.browser
def test_two_people_a_huge_prompt_and_a_killed_model(reader, served, tmp_path):
    one, two = reader(), reader(390)
    for each in (one, two):
        each.wait(lambda text: "ffn 2/4" in text, "#numbers")
    two.move("\ue012")  # left
    two.wait(lambda text: "ffn 1/4" in text, "#numbers")
    one.type("w5 " * 50_000)
    two.type("w6 w7")
    for each in (one, two):
        each.find("#write").click()
    for each in (one, two):
        assert each.wait(lambda text: text.count("w") >= 3, "#ticket-text textarea")
    assert "tokens were read" in one.wait(lambda text: "were read" in text, "#note")
    assert "ffn 2/4" in one.text("#numbers")  # what others do is not mine
    wide = two.browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= 390
    two.browser.save_screenshot(str(tmp_path / "play-390.png"))
    (server,) = (child for child in children(served[1]) if b"forkserver" in child.cmdline)
    (model,) = children(server.pid)
    os.kill(model.pid, signal.SIGKILL)
    one.type("w8 w9")  # the next question finds a new process
    one.find("#write").click()
    one.wait(lambda text: "ms per token" in text and "were read" not in text, "#note")
