"""Links lead somewhere, commands and keys exist, README's table is that of the points."""

import json
import re
import runpy
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest
from commands import ROOT, check_override, check_twistlm, code_blocks, is_twistlm, shell_commands

from paper import NAMES as EXPERIMENTS
from paper.scales import SCALES, WAYS
from twistlm import config

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
POINTS = [json.loads(x) for x in (ROOT / "paper/points/gpu-small.jsonl").read_text().splitlines()]


def prose(page: Path) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_page_names_exists(name):
    """Links, modules, make's targets, commands with options and keys."""
    text, page = prose(ROOT / name), (ROOT / name).read_text()
    for link in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    if name == "docs/log.md":
        return  # it names commands and modules of its time
    for path in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
        assert any((ROOT / top / path).is_file() for top in ("", "twistlm")), path
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make (\w+)", page, re.MULTILINE)) <= targets
    inline = re.findall(r"`((?:twistlm|python -m paper) [^`\n]*--[\w-]+ [^`\n]+)`", text)
    for words in shell_commands("\n".join([*code_blocks(page, "sh"), *inline])):
        if is_twistlm(words):
            check_twistlm(words)
        elif words[1:3] == ["-m", "paper"] and words[3] != "report":
            check_experiment(words[3:])
    known = config.to_dict(config.Config())
    for word in " ".join(re.findall(r"`([^`\n]+)`", text)).split():
        if match := re.fullmatch(r"(blocks|train|run|ray)\.(?!py$)([a-z_]+)", word):
            assert match[2] in known[match[1]], word
        elif re.match(rf"({'|'.join(known)})\.[a-z_.]+=", word) and word.count("=") == 1:
            check_override(word)


def check_experiment(words: list[str]) -> None:
    """`NAME... --scale S --only WAY`: names, scales and ways exist, keys are legal."""
    ways = {*WAYS, "both", "attn", "ffn"}
    known = {"--scale": set(SCALES), "--only": ways}
    for option, word in pairwise(["", *words]):
        if option in known:
            assert word in known[option] or re.fullmatch(r"(seed|rate) \d", word), word
        elif "=" in word:
            check_override(word)
        else:
            assert word in {*EXPERIMENTS, *known, "all", "--help"}, word


def test_lists_are_those_of_the_code():
    """The page of keys, the table of presets, and the figures that pages show."""
    page, made = (ROOT / "docs/config.md").read_text(), runpy.run_path(ROOT / "docs/config_page.py")
    assert page == made["page"](), "docs/config.md is out of date: run `make docs`"
    rows = r"^\| `([\w-]+)` \| [^|]* \| [^|]* \|$"
    listed = re.findall(rows, (ROOT / "docs/train.md").read_text(), re.MULTILINE)
    assert sorted(listed) == config.preset_names()
    shown = {name for page in PAGES for name in re.findall(r"figures/([\w.-]+)", page.read_text())}
    assert shown == {path.name for path in (ROOT / "docs/figures").glob("*")}


def test_the_first_table_is_that_of_the_points():
    """Means over three seeds from one start, with chosen scales; parameters by hand."""
    twin = "synchronous twin, one whole, the rest half"
    ways = {  # a row's name, and its way and rate in the points
        "ordinary training (data parallel)": ("data parallel", 5e-4),
        "structured dropout": ("dropout K=6", 5e-4),
        "our recipe, `wiki-gpt2-whole`": ("TwIST, half the decay, beta2 0.98", 2e-3),
        "our recipe, `wiki-gpt2`": ("TwIST, one whole, the rest half", 2e-3),
        "our recipe, `wiki-gpt2-half`": ("TwIST, half workers, few nested", 1.5e-3),
        "`wiki-gpt2` with shared gradients, one seed": (twin, 1e-3),
    }
    measured = [
        ((c["way"], c["rate"], c["start"][:8]), point["result"])
        for point in POINTS
        if (c := point["config"])
    ]
    readme = PAGES[0].read_text()
    shown = re.findall(r"^\| ([^|]+) \| (?:all|half|one all, three half) \| (.*) \|$", readme, re.M)
    assert [name for name, _ in shown] == list(ways)
    for name, cells in shown:
        found = [result for made, result in measured if made == (*ways[name], "1ec41b87")]
        assert len(found) == (1 if "one seed" in name else 3)
        tests = [one["test"] for one in found]
        columns = [f"{found[0]['bytes'] / 1e9:.0f}", f"{mean(one['whole'] for one in tests):.1f}"]
        columns += [f"{mean(one[k]['nested'] for one in tests):.1f}" for k in "8643"]
        assert cells.split(" | ") == columns
    d, cut = 768, 8 * (12 * 768**2 + 7 * 768)  # a layer's blocks hold 12 d^2 weights and 7 d biases
    whole = (50257 + 1024) * d + 12 * (12 * d**2 + 13 * d) + 2 * d
    counts = [f"{(whole - cut * (12 - k) / 12) / 1e6:.1f}" for k in (12, 8, 6, 4, 3)]
    assert " | ".join(["parameters, millions | |", *counts]) in readme
