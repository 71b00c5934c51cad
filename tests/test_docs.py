"""Documents say what is true: links lead somewhere, commands parse, tables are those of the code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

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
PRESENT = [page for page in PAGES if page.name != "log.md"]  # the log is history


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def prose(page: Path) -> str:
    """Without code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()).replace(" ", "-") for h in headings}


def test_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


@pytest.mark.parametrize("name", names(PAGES))
def test_links_and_pictures_lead_somewhere(name):
    page, broken = ROOT / name, []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("name", names([page for page in PRESENT if page.name != "results.md"]))
def test_modules_that_are_named_exist(name):
    """`training/rounds.py`, from the package or from the root; results name modules of their time."""
    found = re.findall(r"`((?:\w+/)+\w+\.py)`", prose(ROOT / name))
    gone = [path for path in found if not _exists(path)]
    assert not gone


def _exists(path: str) -> bool:
    return (ROOT / path).is_file() or (ROOT / "twistlm" / path).is_file()


@pytest.mark.parametrize("name", names(PRESENT))
def test_commands_parse(name):
    """Every twistlm line of a code block: command, options, presets and keys exist, values are legal."""
    for block in code_blocks((ROOT / name).read_text(), "sh", "bash", "console"):
        for words in shell_commands(block):
            if is_twistlm(words):
                check_twistlm(words)


def test_examples_of_help_parse():
    """What `--help` shows under every command is held to the same as the pages."""
    commands, seen = [APP], 0
    for command in commands:  # grows by the commands of groups
        commands += getattr(command, "commands", {}).values()
        for words in shell_commands(command.epilog or ""):
            if is_twistlm(words):
                check_twistlm(words)
                seen += 1
    assert seen > 60


def test_the_pages_have_commands():
    """The test above is not blind: it sees most of what there is."""
    blocks = [block for page in PRESENT for block in code_blocks(page.read_text(), "sh")]
    seen = {
        check_twistlm(words)
        for block in blocks
        for words in shell_commands(block)
        if is_twistlm(words)
    }
    assert {"train", "eval", "extract", "export", "compare", "prepare", "plan", "prune"} <= seen
    assert {"experiment", "report", "node", "bench train"} <= seen


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("twistlm trian demo", "no command trian"),
        ("twistlm bench trains demo", "no command trains"),
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
    with pytest.raises(ValueError, match=r"run\.variant = 'shared'"):
        check_override("run.variant=shared")


@pytest.mark.parametrize("name", names(PRESENT))
def test_make_targets_exist(name):
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / name).read_text()
    named = re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE)
    assert set(named) <= targets


@pytest.mark.parametrize("name", names(PRESENT))
def test_keys_in_prose_exist(name):
    """`train.lr`, `ray.open=true`: whatever looks like a key of a section is one."""
    sections = "|".join(config.to_dict(config.Config()))
    for code in re.findall(r"`([^`\n]+)`", prose(ROOT / name)):
        if re.fullmatch(r"(blocks|train|run|ray)\.[a-z_]+", code) and not code.endswith(".py"):
            section, key = code.split(".")
            assert key in config.to_dict(config.Config())[section], code
        for word in code.split():
            if re.match(rf"({sections})\.[a-z_.]+=", word) and word.count("=") == 1:
                check_override(word)


def test_presets_are_listed():
    text = (ROOT / "docs/train.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| [^|]* \| [^|]* \|$", text, re.MULTILINE)
    assert sorted(rows) == config.preset_names()
    for name in rows:
        check_preset(name)


def test_the_table_of_keys_is_that_of_the_code():
    page = ROOT / "docs/config.md"
    assert page.read_text() == config_page.page(), "docs/config.md is out of date: run `make docs`"


def test_the_table_of_keys_is_whole():
    """Every key once, with a meaning, and what its section of config.py says."""
    text = config_page.page()
    for section, keys in config.to_dict(config.Config()).items():
        for key in keys:
            (row,) = re.findall(rf"^\| `{section}\.{key}` \|.*$", text, re.MULTILINE)
            assert len(row.split(" | ")[-1]) > 5, row
    assert (
        '| `run.variant` | `local`, `ray`, `masked`, `true`, `hybrid`, `sharded` | `"local"` |'
        in text
    )
    assert "| `train.betas` | a list of 2: number, number | `[0.9, 0.999]` | AdamW's decay" in text


def test_no_document_points_to_one_that_is_not_here():
    for page in PRESENT:
        assert not re.search(r"\bthe spec\b|\(spec\b", page.read_text()), page


def test_few_files_are_tracked():
    """Measured points and figures are data: one file per lab, the pictures that documents show."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) <= 280


def test_the_page_of_departures_agrees_with_the_code():
    """Every number on docs/paper.md that the code knows."""
    from transformers import AutoConfig

    from twistlm.lab.experiments import paper
    from twistlm.model.count import gpt2_params, layer_params
    from twistlm.pruners import SINGLE_WEIGHTS
    from twistlm.tickets.calibration import MOST_SEQUENCES
    from twistlm.training.engines.dataparallel import ring_bytes

    page = (ROOT / "docs/paper.md").read_text()
    cfg, demo = config.load("paper", []), config.load("demo", [])
    n_layers = AutoConfig.for_model("gpt2").num_hidden_layers
    n_cut = n_layers - cfg.blocks.shared_first - cfg.blocks.shared_last
    assert f"{n_cut} of {n_layers}" in page
    assert config.Config().train.moments == "carry"
    plan = paper.plan()
    assert f"{plan.paper_rounds:,} rounds" in page
    assert f"{plan.true_rounds:,} rounds of {cfg.train.interval} local steps" in page
    ring, star = 2 * ring_bytes(1, 4, 1)[0], 2 * 4
    assert f"{ring} M for S = 4 and not {star} M" in page
    entries, memory = [], []
    for row in plan.rows:
        k = int(row.ratio.split("/")[0])
        printed = paper.TABLE2["both" if row.setting == "full" else row.setting].get(k)
        if printed:
            memory.append(16 * row.n_params / 1e9 / printed[0] - 1)
            entries.append(abs(row.paper_bytes / 1e12 - printed[1]))
    assert f"{len(entries)} entries to {max(entries):.4f} TB" in page
    assert page.count(f"{min(memory):.1%} to {max(memory):.1%}") == 2
    d, vocab = 768, 50257
    printed = vocab * d + 12 * (layer_params(d, d, 4 * d) - 2 * d)  # one layer norm less in each
    assert f"{printed:,}" in page
    assert f"{gpt2_params(12, d, vocab, 1024):,}" in page
    assert f"{MOST_SEQUENCES} sequences" in page
    both = paper.TABLE1["both"][6]
    assert f"({both['sparsegpt']} against {both['twist']})" in page
    assert (demo.blocks.masks, demo.train.weight_decay, demo.train.clip) == ("sequence", 0.1, 1.0)
    assert (demo.train.schedule, demo.train.interval) == ("cosine", 10)
    assert demo.blocks.shared_first == demo.blocks.shared_last == 0
    methods = set(re.findall(r"`(zpruner[\w-]*)`", page))
    assert methods <= set(SINGLE_WEIGHTS), methods
    for word in ("deal = fixed", "moments = carry"):
        section, key = ("blocks" if "deal" in word else "train"), word.split()[0]
        config.load("demo", [f"{section}.{key}={word.split()[-1]}"])
