"""Links lead somewhere, commands and keys exist, README's table is that of the points."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean

import pytest
from commands import (
    APP,
    ROOT,
    check_override,
    check_twistlm,
    code_blocks,
    is_twistlm,
    shell_commands,
)

from twistlm import config
from twistlm.cli import config_page

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
POINTS = ROOT / "paper/points/gpu-recipe.jsonl"


def prose(page: Path) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()).replace(" ", "-") for h in headings}


def commands(page: Path) -> list[list[str]]:
    """The words of every command in shell blocks, and of those in prose that have options."""
    inline = re.findall(r"`((?:twistlm|python -m paper) [^`\n]*--[\w-]+ [^`\n]+)`", prose(page))
    blocks = (*code_blocks(page.read_text(), "sh"), *inline)
    return [words for block in blocks for words in shell_commands(block)]


@pytest.mark.parametrize("name", NAMES)
def test_links_and_pictures_lead_somewhere(name):
    page, broken = ROOT / name, []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("name", [name for name in NAMES if name != "docs/log.md"])
def test_what_a_page_names_exists(name):
    """Modules, make's targets, commands with options and keys; the log names those of its time."""
    page, known = ROOT / name, config.to_dict(config.Config())
    for path in re.findall(r"`((?:\w+/)+\w+\.py)`", prose(page)):
        assert any((ROOT / top / path).is_file() for top in ("", "twistlm")), path
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make (\w+)", page.read_text(), re.MULTILINE)) <= targets
    for words in commands(page):
        if is_twistlm(words):
            check_twistlm(words)
        elif words[1:3] == ["-m", "paper"] and words[3] != "report":
            check_experiment(words[3:])
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        if match := re.fullmatch(r"(blocks|train|run|ray)\.(?!py$)([a-z_]+)", code):
            assert match[2] in known[match[1]], code
        for word in code.split():
            if re.match(rf"({'|'.join(known)})\.[a-z_.]+=", word) and word.count("=") == 1:
                check_override(word)


def check_experiment(words: list[str]) -> None:
    """`NAME... --scale S --only WAY`: names and scales exist, ways have points, keys are legal."""
    from paper import NAMES as experiments
    from paper.scales import SCALES

    ways = {json.loads(line)["config"]["way"] for line in POINTS.read_text().splitlines()}
    known = {"--scale": set(SCALES), "--only": {*ways, "both", "attn", "ffn"}, "--minutes": {"9"}}
    given = iter(words)
    for word in given:
        if word in known:
            value = next(given)
            assert value in known[word] or re.fullmatch(r"(seed|rate) \d", value), value
        elif "=" in word:
            check_override(word)
        else:
            assert word in {*experiments, "all", "--help"}, word


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("twistlm trian demo", "no command trian"),
        (".venv/bin/twistlm train demo --resum", "--resum"),
        ("twistlm train demoo", "no preset demoo"),
        ("twistlm train demo train.n_worker=3", "no key train.n_worker"),
        ("twistlm train demo resume", "no section.key=value"),
        ("twistlm export ticket -o x", "Missing parameter: to"),
    ],
)
def test_checking_is_not_blind(line, wrong):
    (words,) = shell_commands(line)
    with pytest.raises(AssertionError, match=re.escape(wrong)):
        check_twistlm(words)


def test_examples_of_help_parse():
    groups, seen = [APP], 0
    for command in groups:  # grows by the commands of groups
        groups += getattr(command, "commands", {}).values()
        for words in filter(is_twistlm, shell_commands(command.epilog or "")):
            seen += bool(check_twistlm(words))
    assert seen > 20


def test_lists_are_those_of_the_code():
    """The page of keys, the table of presets, and the figures that pages show."""
    page = (ROOT / "docs/config.md").read_text()
    assert page == config_page.page(), "docs/config.md is out of date: run `make docs`"
    rows = r"^\| `([\w-]+)` \| [^|]* \| [^|]* \|$"
    listed = re.findall(rows, (ROOT / "docs/train.md").read_text(), re.MULTILINE)
    assert sorted(listed) == config.preset_names()
    shown = {name for page in PAGES for name in re.findall(r"figures/([\w.-]+)", page.read_text())}
    assert shown == {path.name for path in (ROOT / "docs/figures").glob("*")}


ROWS = {  # README's row -> its way and rate in the points, and whether its tickets are nested
    "data parallel, random tickets": ("data parallel", 5e-4, "mean"),
    "structured dropout K=6, random tickets": ("dropout K=6", 5e-4, "mean"),
    "TwIST, random tickets": ("TwIST", 2e-3, "mean"),
    "TwIST, nested tickets": ("TwIST", 2e-3, "nested"),
    "TwIST whole first, nested tickets": ("TwIST, whole first", 1e-3, "nested"),
}


def test_the_first_table_is_that_of_the_points():
    """Means over three seeds from the second start, with chosen scales; parameters by hand."""
    points = [json.loads(line) for line in POINTS.read_text().splitlines()]
    text, sizes = (ROOT / "README.md").read_text(), ("8", "6", "4", "3")
    for name, (way, rate, kind) in ROWS.items():
        found = [
            point["result"]["test"]
            for point in points
            if (point["config"]["way"], point["config"]["rate"]) == (way, rate)
            and point["config"]["start"].startswith("186d7a80")
            and "treatment" in point["config"]
        ]
        assert len(found) == 3
        columns = [[one["whole"] for one in found]]
        columns += [[one[k][kind] for one in found] for k in sizes]
        row = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", text, re.MULTILINE)[0]
        assert row.replace("*", "").split(" | ") == [f"{mean(column):.1f}" for column in columns]
    d, cut = 768, 8 * (12 * 768**2 + 7 * 768)  # a layer's blocks hold 12 d^2 weights and 7 d biases
    whole = (50257 + 1024) * d + 12 * (12 * d**2 + 13 * d) + 2 * d
    counts = [f"{(whole - cut * (12 - int(k)) / 12) / 1e6:.1f}" for k in ("12", *sizes)]
    assert " | ".join(["parameters, millions", *counts]) in text
