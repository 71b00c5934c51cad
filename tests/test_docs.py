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
    check_preset,
    check_twistlm,
    code_blocks,
    is_twistlm,
    shell_commands,
)

from twistlm import config
from twistlm.cli import config_page

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRESENT = [page for page in PAGES if page.name != "log.md"]  # the log names commands of its time


def page_names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def prose(text: str) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()).replace(" ", "-") for h in headings}


def commands(text: str) -> list[list[str]]:
    """The words of every command in shell blocks, and of those in prose that have options."""
    inline = re.findall(r"`((?:twistlm|python -m paper) [^`\n]*--[\w-]+ [^`\n]+)`", prose(text))
    return [
        words for block in (*code_blocks(text, "sh"), *inline) for words in shell_commands(block)
    ]


def twistlm_commands(text: str) -> list[list[str]]:
    return [words for words in commands(text) if is_twistlm(words)]


@pytest.mark.parametrize("name", page_names(PAGES))
def test_links_and_pictures_lead_somewhere(name):
    page, broken = ROOT / name, []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        is_page = target.suffix == ".md"
        if not target.exists() or (anchor and is_page and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_figure_is_shown():
    shown = {name for page in PAGES for name in re.findall(r"figures/([\w.-]+)", page.read_text())}
    assert shown == {path.name for path in (ROOT / "docs/figures").glob("*")}


@pytest.mark.parametrize("name", page_names(PRESENT))
def test_what_a_page_names_exists(name):
    """Modules, make's targets, commands with their options and keys, and keys in prose."""
    text, known = (ROOT / name).read_text(), config.to_dict(config.Config())
    for path in re.findall(r"`((?:\w+/)+\w+\.py)`", prose(text)):
        assert any((ROOT / top / path).is_file() for top in ("", "twistlm")), path
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE)) <= targets
    for words in twistlm_commands(text):
        check_twistlm(words)
    for code in re.findall(r"`([^`\n]+)`", prose(text)):
        if match := re.fullmatch(r"(blocks|train|run|ray)\.(?!py$)([a-z_]+)", code):
            assert match[2] in known[match[1]], code
        for word in code.split():
            if re.match(rf"({'|'.join(known)})\.[a-z_.]+=", word) and word.count("=") == 1:
                check_override(word)


def test_experiments_that_are_named_exist():
    """`python -m paper NAME... --scale S --only WAY` on pages: names, scales, keys, and ways."""
    from paper import NAMES
    from paper.scales import SCALES

    lines = "".join(path.read_text() for path in (ROOT / "paper/points").glob("*recipe.jsonl"))
    ways = set(re.findall(r'"way": "(.*?)"', lines.encode().decode("unicode_escape")))
    seen = set()
    for words in (words for page in PRESENT for words in commands(page.read_text())):
        if words[1:3] != ["-m", "paper"] or words[3] in ("report", "--help", "--list"):
            continue
        options, given = ("--scale", "--only", "--minutes"), iter(words[3:])
        for word in given:
            value = next(given) if word in options else word
            if word == "--only":
                assert value in ways or re.fullmatch(r"(seed|rate) \d|both|attn|ffn", value), value
            elif word == "--scale":
                assert value in SCALES, value
            elif "=" in word:
                check_override(word)
            elif word not in options:
                seen.add(value)
    assert {"recipe", "table1"} <= seen <= {*NAMES, "all"}


def test_examples_of_help_parse():
    """What `--help` shows under every command is held to the same as the pages."""
    commands, seen = [APP], 0
    for command in commands:  # grows by the commands of groups
        commands += getattr(command, "commands", {}).values()
        for words in shell_commands(command.epilog or ""):
            if is_twistlm(words):
                check_twistlm(words)
                seen += 1
    assert seen > 20


def test_the_pages_show_the_commands():
    """The check of commands is not blind: it sees most of what there is."""
    seen = {
        check_twistlm(words) for page in PRESENT for words in twistlm_commands(page.read_text())
    }
    assert {"train", "eval", "extract", "export", "prepare", "plan", "node"} <= seen


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("twistlm trian demo", "no command trian"),
        (".venv/bin/twistlm train demo --resum", "--resum"),
        ("twistlm train demoo", "no preset demoo"),
        ("twistlm train demo train.n_worker=3", "no key train.n_worker"),
        ("twistlm train demo trian.lr=3", "no section trian"),
        ("twistlm train demo resume", "no section.key=value"),
        ("twistlm export ticket -o x", "Missing parameter: to"),
    ],
)
def test_checking_is_not_blind(line, wrong):
    (words,) = shell_commands(line)
    assert is_twistlm(words)
    with pytest.raises(AssertionError, match=re.escape(wrong)):
        check_twistlm(words)


def test_presets_are_listed():
    text = (ROOT / "docs/train.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| [^|]* \| [^|]* \|$", text, re.MULTILINE)
    assert sorted(rows) == config.preset_names()
    for name in rows:
        check_preset(name)


def test_the_table_of_keys_is_that_of_the_code():
    page, text = ROOT / "docs/config.md", config_page.page()
    assert page.read_text() == text, "docs/config.md is out of date: run `make docs`"
    for section, keys in config.to_dict(config.Config()).items():
        for key in keys:
            (row,) = re.findall(rf"^\| `{section}\.{key}` \|.*$", text, re.MULTILINE)
            assert len(row.split(" | ")[-1]) > 5, row


SIZES = ("8", "6", "4", "3")
ROWS = {  # README's row -> its way and rate in the points, and whether its tickets are nested
    "data parallel, random tickets": ("data parallel", 5e-4, False),
    "structured dropout K=6, random tickets": ("dropout K=6", 5e-4, False),
    "TwIST, random tickets": ("TwIST", 2e-3, False),
    "TwIST, nested tickets": ("TwIST", 2e-3, True),
    "TwIST whole first, nested tickets": ("TwIST, whole first", 1e-3, True),
}


def test_the_first_table_is_that_of_the_points():
    """Means over three seeds from the second start, with chosen scales; parameters by hand."""
    lines = (ROOT / "paper/points/gpu-recipe.jsonl").read_text().splitlines()
    points = [json.loads(line) for line in lines]
    text = (ROOT / "README.md").read_text()
    for name, (way, rate, nested) in ROWS.items():
        found = [
            point["result"]["test"]
            for point in points
            if (point["config"]["way"], point["config"]["rate"]) == (way, rate)
            and point["config"]["start"].startswith("186d7a80")
            and point["config"].get("treatment", point["config"].get("scales"))
        ]
        assert len(found) == 3
        columns = [[one["whole"] for one in found]]
        columns += [[one[k]["nested" if nested else "mean"] for one in found] for k in SIZES]
        (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", text, re.MULTILINE)[:1]
        assert row.replace("*", "").split(" | ") == [f"{mean(column):.1f}" for column in columns]
    d, cut = 768, 8 * (12 * 768**2 + 7 * 768)  # a layer's blocks hold 12 d^2 weights and 7 d biases
    whole = (50257 + 1024) * d + 12 * (12 * d**2 + 13 * d) + 2 * d
    sizes = [whole - cut * (12 - k) / 12 for k in (12, *map(int, SIZES))]
    assert " | ".join(["parameters, millions", *(f"{n / 1e6:.1f}" for n in sizes)]) in text
