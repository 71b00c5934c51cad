"""The page and its model: tickets in memory, bad questions, a killed process, a real browser."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from conftest import VOCAB, tiny_table, write_words

from twistlm import config
from twistlm.model import huggingface
from twistlm.play import PICKS, TicketChoice, page
from twistlm.play.models import PROMPT_WORDS, Models
from twistlm.play.process import ModelEnded, ModelProcess
from twistlm.tickets import deploy
from twistlm.tickets.parent import open_parent
from twistlm.tickets.requests import ScoreRequest
from twistlm.tickets.score import score_parent
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
def model(run) -> Iterator[ModelProcess]:
    made = ModelProcess(str(run), "cpu", [], None)
    yield made
    made.close()


CHOICE = TicketChoice(2, "random")
WORDS = {"prompt": "w1 w2", "n_new": 8, "temperature": 0.7}


def measure(model: ModelProcess, size: int, pick: str = "random", seed: int = 0) -> dict:
    *_, last = model.ask("measure", choice=TicketChoice(size, pick, seed))
    return last["ticket"]


def test_tickets_are_cut_in_memory(model, run):
    """Every size and pick; parameters counted by hand, perplexity of `eval`, nothing written."""
    before = sorted(path for path in run.rglob("*"))
    about = next(model.ask("describe"))
    assert about["sizes"] == [f"ffn {k}/4" for k in (1, 2, 3, 4)]
    assert "random tickets" in about["known"][2]
    assert about["known"][0] == ""
    parent = open_parent(run, "cpu")
    n_full, a_block = parent.central.layout.n_params, 3 * 16 * (16 + 16 + 1)  # three layers
    for pick, size in itertools.product(PICKS, (1, 2, 3, 4)):
        found = measure(model, size, pick)
        assert found["parameters"] == n_full - (4 - size) * a_block
        assert found["ms"] > 0
        assert found["stock"]
    assert measure(model, 2, seed=1)["perplexity"] != measure(model, 2, seed=2)["perplexity"]
    assert measure(model, 2, "best of 4")["perplexity"] <= measure(model, 2)["perplexity"]
    n_tokens = int(about["measured_on"].rstrip("`").rpartition(" ")[2])
    request = ScoreRequest(ratios=("2/4",), n=1, tokens=n_tokens)
    want = score_parent(parent, request, "run", quiet=True)
    assert want.n_tokens == n_tokens
    assert measure(model, 4)["perplexity"] == pytest.approx(want.full, rel=1e-5)
    assert measure(model, 2)["perplexity"] == pytest.approx(want.subnets[0].mean, rel=1e-5)
    assert sorted(path for path in run.rglob("*")) == before


@pytest.mark.parametrize("has_order", [True, False])
def test_the_page_opens_with_what_fits_the_parent(run, has_order):
    """Nested blocks where the training ordered them, and the first words of its own text."""
    models = Models(str(run), "cpu", [], None)
    if has_order:
        order = {g.name: tuple(range(g.n_blocks)) for g in models.parent.block_map.groups}
        progress = replace(models.parent.progress, order=order)
        models.parent = replace(models.parent, progress=progress)
    about = next(models.describe())
    assert about["pick"] == ("nested" if has_order else "random")
    text = models.evaluator.text
    first = text.file.sequences([0], text.seq_len)[0].tolist()
    assert models.tokenizer.decode(first).startswith(about["prompt"])
    assert about["prompt"].count("w") == PROMPT_WORDS
    kept = [models.blueprint(TicketChoice(size, "nested")) for size in (1, 2, 3, 4)]
    for small, large in itertools.pairwise(kept):
        assert all(set(small[name]) < set(large[name]) for name in small)
    if has_order:
        assert all(blocks == (0, 1) for blocks in kept[1].values())


def test_a_ticket_in_memory_is_the_one_that_extract_writes(run, tmp_path):
    """Every weight, bit for bit, of a folder that is loaded again; its greedy text is generate's,
    and drawn text depends on the seed alone.
    """
    models = Models(str(run), "cpu", [], None)
    for pick, size in itertools.product(PICKS, (3, 1, 2)):
        choice, folder = TicketChoice(size, pick), tmp_path / f"{pick}-{size}"
        deploy.save_ticket(models.parent, models.blueprint(choice), folder)
        saved = deploy.load_ticket(folder)
        want, found = huggingface.state(saved), huggingface.state(models.ticket(choice))
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)

    def text(temperature: float, seed: int) -> str:
        *_, last = models.write(replace(choice, seed=seed), "w1 w2", 8, temperature)
        return last["ticket" if temperature == 0 else "whole"]

    ids = torch.tensor([models.tokenizer.encode("w1 w2").ids])
    greedy = saved.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert text(0, 0).split() == models.tokenizer.decode(greedy.tolist()).split()
    assert text(0.7, 0) == text(0.7, 0)
    assert len({text(0.7, seed) for seed in range(4)}) > 1


def test_a_model_process_outlives_bad_questions_and_users_who_leave(model):
    for bad in ({"prompt": "a \ud800 b"}, {"temperature": 1e-300}):
        with pytest.raises(ValueError, match="the model failed"):
            list(model.ask("write", choice=CHOICE, **WORDS | bad))
    pid = model.process.pid
    left = model.ask("write", choice=CHOICE, **WORDS)
    next(left)
    left.close()  # the next answer is not the rest of this one
    *_, huge = model.ask("write", choice=CHOICE, **WORDS | {"prompt": "w3 " * 100_000})
    assert "tokens of the prompt were read" in huge["note"]
    assert huge["whole"].startswith(" w")
    assert model.process.pid == pid
    answer = model.ask("write", choice=CHOICE, **WORDS)
    next(answer)
    os.kill(pid, signal.SIGKILL)  # in the middle of an answer
    with pytest.raises(ModelEnded, match="ask again"):
        list(answer)
    assert measure(model, 1)["parameters"] > 0
    model.process.kill()  # while nobody asks: nobody notices
    model.process.join()
    assert measure(model, 2)["parameters"] > 0


def test_the_training_tab_follows_a_run(run, tmp_path):
    html, losses, evaluations = page.training(run)
    assert "2 of 2 rounds" in html
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses == [{"round": r["round"], "loss": r["loss"]} for r in rows]
    assert evaluations[-1][1].startswith(f"full: {rows[-1]['eval']['full']:.2f}, 3/4: ")
    assert page.training(tmp_path)[1:] == ([], [])


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


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for path in found for word in path.read_text().split()]


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
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.browser.get(address)

    def find(self, css: str) -> Any:
        return self.browser.find_element("css selector", css)

    def wait(self, what: Callable[[str], bool], css: str) -> str:
        """The text of an element once `what` holds for it."""
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver.support.ui import WebDriverWait

        def text() -> str:
            return self.find(css).get_attribute("value") or self.find(css).text

        ready = WebDriverWait(self.browser, PLENTY, 0.1, [WebDriverException])
        ready.until(lambda _: what(text()), css)
        return text()

    def write(self, prompt: str) -> None:
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
        self.browser.execute_script(script, self.find("#prompt textarea"), prompt)
        self.find("#write").click()

    def move(self, key: str) -> None:
        self.find("#size input[type=range]").send_keys(key)

    def tab(self, name: str) -> None:
        tabs = self.browser.find_elements("css selector", "button[role=tab]")
        next(each for each in tabs if each.text.strip() == name).click()

    def hosts(self) -> set[str]:
        """Every host that the page asked for anything."""
        log = [json.loads(entry["message"]) for entry in self.browser.get_log("performance")]
        sent = [e["message"] for e in log if "requestWillBeSent" in e["message"]["method"]]
        urls = [e["params"]["request"]["url"] for e in sent if "request" in e["params"]]
        return {urlsplit(url).hostname for url in urls if url.startswith(("http", "ws"))}


@pytest.fixture
def reader(served):
    with ExitStack() as opened:

        def start(width: int = 1280) -> Reader:
            made = Reader(served[0], width)
            opened.callback(made.browser.quit)
            return made

        yield start


@pytest.mark.browser
def test_a_person_plays(reader, run):
    """Text, numbers and sizes are there when the page opens; a training goes on beside it."""
    one = reader()
    first = one.wait(lambda text: "perplexity" in text and "…" not in text, "#numbers")
    assert "ffn 2/4" in first
    assert "twistlm eval" in first
    for box in ("#whole-text textarea", "#ticket-text textarea"):
        assert one.wait(lambda text: text.count("w") >= 6, box)
    command = [sys.executable, "-m", "twistlm", "train", "run", "--resume", "train.rounds=400"]
    training = subprocess.Popen(command, cwd=run.parent, stdout=subprocess.DEVNULL)
    try:
        one.move("\ue014")  # right
        second = one.wait(lambda text: "ffn 3/4" in text and "…" not in text, "#numbers")
        assert "random tickets" in second
        assert "parameters\n9,568\n86% of 11,152\nweights\n" in second
        assert re.search(r"time per token\n[\d.]+ ms\nwhole model [\d.]+ ms", second)
        one.write("w1 w2 w3")
        assert one.wait(lambda text: text.startswith("w1 w2 w3 "), "#ticket-text textarea")
        one.tab("Sizes")
        one.wait(lambda text: text.count(" ms") >= 4 and "4/4" in text, "#sizes")
        one.tab("Training")
        before = one.wait(lambda text: "rounds" in text, "#training")
        one.wait(lambda text: text != before and "of 400 rounds" in text, "#training")
    finally:
        training.terminate()
        training.wait()
    assert one.hosts() == {"127.0.0.1"}
    wrong = [e for e in one.browser.get_log("browser") if e["level"] == "SEVERE"]
    assert not wrong, wrong


@pytest.mark.browser
def test_two_people_a_huge_prompt_and_a_killed_model(reader, served):
    one, two = reader(), reader(390)
    for each in (one, two):
        each.wait(lambda text: "ffn 2/4" in text, "#numbers")
    two.move("\ue012")  # left
    two.wait(lambda text: "ffn 1/4" in text, "#numbers")
    one.write("w5 " * 50_000)
    two.write("w6 w7")
    for each, begin in ((one, "…"), (two, "w6 w7 ")):
        assert each.wait(lambda text, b=begin: text.startswith(b), "#ticket-text textarea")
    assert one.wait(lambda text: "were read" in text, "#note")
    assert "ffn 2/4" in one.find("#numbers").text  # what others do is not mine
    assert two.browser.execute_script("return document.documentElement.scrollWidth") <= 390
    for server in children(served[1]):
        if b"forkserver" in Path(f"/proc/{server}/cmdline").read_bytes():
            (process,) = children(server)
    os.kill(process, signal.SIGKILL)
    one.write("w8 w9")  # the next question finds a new process
    one.wait(lambda text: text.startswith("w8 w9 "), "#ticket-text textarea")
