"""The page and its model: tickets in memory, bad questions, a killed process, a real browser."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from conftest import VOCAB, tiny_table, write_words

from twistlm import config
from twistlm.model import huggingface
from twistlm.play import PICKS, TicketChoice
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
    """Parameters counted by hand, perplexity of `eval`, nothing written."""
    before = sorted(path for path in run.rglob("*"))
    about = next(model.ask("describe"))
    assert about["sizes"] == [f"ffn {k}/4" for k in (1, 2, 3, 4)]
    parent = open_parent(run, "cpu")
    n_full, a_block = parent.central.layout.n_params, 3 * 16 * (16 + 16 + 1)  # three layers
    found = {size: measure(model, size) for size in (1, 2, 3, 4)}
    for size, ticket in found.items():
        assert ticket["parameters"] == n_full - (4 - size) * a_block
        assert ticket["ms"] > 0
    assert measure(model, 2, seed=1)["perplexity"] != found[2]["perplexity"]
    assert measure(model, 2, "best of 4")["perplexity"] <= found[2]["perplexity"]
    n_tokens = int(about["measured_on"].rstrip("`").rpartition(" ")[2])
    request = ScoreRequest(ratios=("2/4",), n=1, tokens=n_tokens)
    want = score_parent(parent, request, "run", quiet=True)
    assert want.n_tokens == n_tokens
    assert found[4]["perplexity"] == pytest.approx(want.full, rel=1e-5)
    assert found[2]["perplexity"] == pytest.approx(want.subnets[0].mean, rel=1e-5)
    assert sorted(path for path in run.rglob("*")) == before


def test_the_page_opens_with_what_fits_the_parent(run):
    """Nested blocks where the training ordered them, and the first words of its own text."""
    models = Models(str(run), "cpu", [], None)
    about = next(models.describe())
    assert about["pick"] == "random"
    text = models.evaluator.text
    first = text.file.sequences([0], text.seq_len)[0].tolist()
    assert models.tokenizer.decode(first).startswith(about["prompt"])
    assert about["prompt"].count("w") == PROMPT_WORDS
    order = {g.name: (2, 0, 3, 1) for g in models.parent.block_map.groups}
    progress = replace(models.parent.progress, order=order)
    models.parent = replace(models.parent, progress=progress)
    assert next(models.describe())["pick"] == "nested"
    kept = models.blueprint(TicketChoice(2, "nested"))
    assert all(set(blocks) == {0, 2} for blocks in kept.values())


def test_a_ticket_in_memory_is_the_one_that_extract_writes(run, tmp_path):
    """Every weight, bit for bit, of a folder that is loaded again; its greedy text is generate's,
    and drawn text depends on the seed alone.
    """
    models = Models(str(run), "cpu", [], None)
    for pick, size in zip(PICKS, itertools.cycle((3, 1, 2)), strict=False):
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
        with pytest.raises(ValueError, match=r"the model failed|surrogates not allowed"):
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


UPLOAD = """
import gradio, httpx
from twistlm.play import page
with gradio.Blocks(analytics_enabled=False) as made:
    gradio.Textbox()
address = page.launch(made, "127.0.0.1", None)
sent = httpx.post(address + "gradio_api/upload", files={"files": b"x"})
print(httpx.get(address).status_code, sent.status_code)
"""


def test_files_are_not_taken():
    """The page itself answers, its door for uploads does not."""
    pytest.importorskip("gradio")
    done = subprocess.run([sys.executable, "-c", UPLOAD], capture_output=True, text=True)
    assert done.stdout.split() == ["200", "404"], done.stderr


# in a browser


@pytest.fixture(scope="module")
def served(run) -> Iterator[str]:
    """The command in a process of its own: its address."""
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
    yield line.split()[0]
    process.send_signal(signal.SIGINT)
    assert process.wait(PLENTY) == 0
    process.stdout.close()


@pytest.fixture
def browser() -> Iterator[Any]:
    """A browser that can reach this machine and nothing else."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    rules = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", rules):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    service = webdriver.ChromeService(str(shutil.which("chromedriver")))
    made = webdriver.Chrome(options=options, service=service)
    yield made
    made.quit()


@pytest.mark.browser
def test_a_person_plays(served, browser):
    """Text, numbers and sizes are there when the page opens; it asks nobody else for anything."""
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.support.ui import WebDriverWait

    def find(css: str) -> Any:
        return browser.find_element("css selector", css)

    def wait(what: Callable[[str], bool], css: str) -> str:
        """The text of an element once `what` holds for it."""

        def text() -> str:
            return find(css).get_attribute("value") or find(css).text

        ready = WebDriverWait(browser, PLENTY, 0.1, [WebDriverException])
        ready.until(lambda _: what(text()), css)
        return text()

    browser.get(served)
    first = wait(lambda text: "perplexity" in text and "…" not in text, "#numbers")
    assert "ffn 2/4" in first
    assert "twistlm eval" in first
    for box in ("#whole-text textarea", "#ticket-text textarea"):
        assert wait(lambda text: text.count("w") >= 6, box)
    find("#size input[type=range]").send_keys("\ue014")  # right
    second = wait(lambda text: "ffn 3/4" in text and "…" not in text, "#numbers")
    assert "parameters\n9,568\n86% of 11,152\nweights\n" in second
    assert re.search(r"time per token\n[\d.]+ ms\nwhole model [\d.]+ ms", second)
    script = "arguments[0].value = 'w1 w2 w3'; arguments[0].dispatchEvent(new Event('input'))"
    browser.execute_script(script, find("#prompt textarea"))
    find("#write").click()
    assert wait(lambda text: text.startswith("w1 w2 w3 "), "#ticket-text textarea")
    tabs = browser.find_elements("css selector", "button[role=tab]")
    next(each for each in tabs if each.text.strip() == "Sizes").click()
    wait(lambda text: text.count("ffn ") >= 4 and "4/4" in text, "#sizes")
    log = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"] for e in log if "requestWillBeSent" in e["method"]]
    urls = [each["request"]["url"] for each in sent if "request" in each]
    hosts = {urlsplit(url).hostname for url in urls if url.startswith(("http", "ws"))}
    assert hosts == {"127.0.0.1"}
    wrong = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert not wrong, wrong
