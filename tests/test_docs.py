"""Documents say what is true: links lead somewhere, commands parse, tables are those of the code."""

from __future__ import annotations

import json
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

    from paper import paper
    from paper.scales import SCALES
    from twistlm.baselines import SINGLE_WEIGHTS
    from twistlm.model.count import gpt2_params, layer_params
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
    drawn = {scale.n_subnets for name, scale in SCALES.items() if name != "smoke"}
    assert drawn == {config.Config().run.eval_n}
    assert f"perplexities of {config.Config().run.eval_n} random subnets" in page
    assert f"({SCALES['gpu'].n_ways} for each seed in the recipe's tables" in page
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


@pytest.fixture(scope="module")
def labs() -> list:
    """The chapters of docs/results.md, computed anew from the points in paper/points."""
    from paper.report.load import load
    from paper.report.write import chapter

    return [chapter(source) for source in load(sorted((ROOT / "paper/points").glob("*.jsonl")))]


def test_the_tables_of_the_results_are_those_of_the_points(labs):
    from paper.page.markdown import markdown, replace_part

    text = (ROOT / "docs/results.md").read_text()
    assert replace_part(text, markdown(labs)) == text, "run `twistlm report` (docs/reproduce.md)"


def test_the_page_of_departures_says_what_the_points_say(labs):
    """Which of the paper's claims hold, and every number beside them."""
    page = (ROOT / "docs/paper.md").read_text()
    items = dict(re.findall(r"^\| ([^|]+) \| `[^|]+ \| ([^|]+) \|$", page, re.MULTILINE))
    gpt2, smollm2 = (
        {c.says: c for s in lab.sections for c in s.claims}
        for lab in labs
        if lab.id in ("lab-gpu", "lab-smollm2")
    )
    kinds = ("both", "attn", "ffn")

    def holds(says: str) -> list[bool]:
        return [gpt2[f"{kind}{says}"].holds for kind in kinds]

    def number(says: str, pattern: str) -> list[str]:
        return re.findall(pattern, gpt2[says].because)

    table1 = items["Table 1: random subnets beside pruners"]
    assert all(holds(": TwIST's random subnets beat data parallel's at every size"))
    assert "beats random blocks of data parallel at every size" in table1
    by_score = (
        ": TwIST's random blocks beat blocks that a score chooses from data parallel, at every size"
    )
    assert holds(by_score) == [True, False, True]
    pairs = number(f"attn{by_score}", r"(\d+/12): ([\d.]+) against ([\d.]+)")
    lost = [size for size, ours, theirs in pairs if float(ours) > float(theirs)]
    assert f"but for attn at {' and '.join(lost)};" in table1
    for parent in ("TwIST K=6", "TwIST trained at that size"):
        says = f": SparseGPT is ahead at 6/12 and above, {parent} at 4/12 and below (crossover)"
        assert not any(holds(says))
        assert all("ahead at no size" in gpt2[f"{kind}{says}"].because for kind in kinds)
    assert "SparseGPT's zeros at none, nor do parents trained at the size" in table1

    says = ": TwIST's subnets vary less than data parallel's at every size"
    assert all(holds(says))
    times = [float(x) for kind in kinds for x in number(f"{kind}{says}", r"[\d.]+\d")]
    assert items["Figure: stability"] == f"yes: sd {min(times)} to {max(times)} times smaller"

    shown = items["Figure: robustness"]
    down = ", downward: trained on wide subnets, lean ones degrade sharply"
    assert holds(down) == [True, True, False]
    both, ffn = (number(f"{kind}{down}", r"is ([\d.]+) times")[0] for kind in ("both", "ffn"))
    assert f"downward yes in both ({both} times from 10 to 4) and attn, no in ffn ({ffn});" in shown
    up = ", upward: trained on lean subnets, wider ones keep the perplexity or improve it"
    assert holds(up) == [True, False, True]
    ((worse, k),) = number(f"attn{up}", r"at most ([\d.]+) times .* from (\d+)/12 to 12/12")
    assert (
        f"no in attn (trained on {k}, the whole model is {worse} times worse than {k}/12)" in shown
    )
    spot = ", sweet spot: a mid-level training width has the lowest worst case over all sizes"
    assert holds(spot) == [False, True, True]
    three, four, also = (number(f"{kind}{spot}", r"lowest at X=(\d+)")[0] for kind in kinds)
    assert four == also
    assert f"yes in attn and ffn ({four}), no in both ({three})" in shown

    order = gpt2["4/12 blocks: both is fastest (1.46x), then attn (1.21x), then ffn (1.15x)"]
    assert not order.holds
    assert "the order both, attn, ffn no" in items["Table 2 and figure: wall clock, latency"]
    lost_nodes = "a TwIST parent handles lost nodes more gracefully than a data-parallel one"
    for lab in (gpt2, smollm2):
        assert lab[lost_nodes].holds
    shift = "a layer's norm shrinks by sqrt(K/N) when K of N blocks stay: after training "
    parents = ("(start)", "(data parallel)", "(TwIST K=6)")
    off = {
        lab: [re.findall(r"[\d.]+%", claims[f"{shift}{parent}"].because)[0] for parent in parents]
        for lab, claims in (("gpt2", gpt2), ("smollm2", smollm2))
    }
    assert [smollm2[f"{shift}{parent}"].holds for parent in parents] == [True, True, False]
    assert not any(gpt2[f"{shift}{parent}"].holds for parent in parents)
    told = items["sqrt(K/N) shift of activations"]
    assert f"no on GPT-2 ({off['gpt2'][0]} to {off['gpt2'][2]} off)" in told
    assert "after data parallel ({} and {}), after TwIST no ({})".format(*off["smollm2"]) in told


def test_the_first_page_has_the_recipes_numbers(labs):
    """README's table, row by row, and what a scale of its own is worth to a control."""
    (lab,) = (lab for lab in labs if lab.id == "gpu-recipe")
    (table,) = (s.tables[0] for s in lab.sections if s.id == "recipe")
    found = {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (data parallel|structured dropout|TwIST)(.*?) \| (.*) \|$", text, re.M)
    assert len(rows) == 5
    for name, more, cells in rows:
        way = "TwIST, whole first" if "whole model first" in more else name
        way = way.replace("structured dropout", "dropout K=6")
        which = "nested " if "nested" in more else ""
        sizes = ["whole", *(f"{which}{k}/12" for k in (8, 6, 4, 3))]
        for size, cell in zip(sizes, cells.replace("*", "").split(" | "), strict=True):
            assert f"{float(found[way][size].split()[0]):.1f}" == cell, (way, size)
        assert found[way]["seeds"] == "3"
        assert (found[way]["scale"] == "sqrt(N/K)") is (name == "TwIST")  # what it trains with
    gaps: dict[tuple[str, bool], list[float]] = {}
    for claim in (c for s in lab.sections for c in s.claims):
        if found_way := re.match("TwIST, interval 4(.*?): .* tickets of independent", claim.says):
            key = (found_way[1], "(from start" in claim.says)
            gaps.setdefault(key, []).extend(
                map(float, re.findall(r"([+-][\d.]+)% at", claim.because))
            )
    slow_v = ", half the decay, beta2 0.98"
    keys = ((slow_v, False), ("", False), ("", True))
    slow, here, other = (f"{min(gaps[key])} to {max(gaps[key])}%" for key in keys)
    assert f"**Independence costs {slow}** at every size" in text
    said = f"({here} with the presets' decay and beta2, {other} from another start)"
    assert f"{said}, for 0.44 of the bytes" in text
    sums: dict[str, list[float]] = {}  # of all seeds: the whole model, then each size's tickets
    for line in (ROOT / "paper/points/gpu-recipe.jsonl").read_text().splitlines():
        point = json.loads(line)
        if (way := point["config"]["way"]).endswith(slow_v):
            test = point["result"]["test"]
            tickets = (test[k][which] for which in ("mean", "nested") for k in "8643")
            before = sums.get(way, [0.0] * 9)
            sums[way] = [a + b for a, b in zip(before, (test["whole"], *tickets), strict=True)]
    ours, twin = (sums[f"{way}{slow_v}"] for way in ("TwIST, interval 4", "synchronous twin"))
    whole, *rest = (100 * (a / b - 1) for a, b in zip(ours, twin, strict=True))
    said = (
        f"{whole:.2f}% ahead as a whole model and {min(rest):.1f} to {max(rest):.1f}% with tickets"
    )
    assert f"A twin with beta2 0.98, too, is {said}." in text
    seeds: dict[tuple[str, float, bool], list[tuple[float, float, float]]] = {}
    for line in (ROOT / "paper/points/gpu-60m.jsonl").read_text().splitlines():
        point = json.loads(line)
        about, test = point["config"], point["result"]["test"]
        key = (about["way"], about["rate"], "treatment" in about)
        seeds.setdefault(key, []).append((test["whole"], test["3"]["mean"], test["3"]["nested"]))
    long = {
        key: [f"{sum(column) / len(some):.1f}" for column in zip(*some, strict=True)]
        for key, some in seeds.items()
    }
    keys = (
        ("TwIST", 2e-3),
        ("TwIST, 0.35 nested", 2e-3),
        ("dropout K=6", 5e-4),
        ("dropout K=6", 1e-3),
    )
    said = "TwIST has {} whole and, at 3/12, {} random and **{}** nested ({}, {} and {} with more nested masks, "
    said += (
        "`blocks.nested=0.35`; dropout {}, {} and {}; at its second rate, one seed, {}, {} and {})"
    )
    assert said.format(*(cell for key in keys for cell in long[*key, True])) in text
    first, dense = "TwIST, whole first after 2/3 dense", "data parallel"
    whole = long[first, 1e-3, True][0], long[dense, 5e-4, True][0]
    said = "with 60M tokens, the first 40M by data parallel ({} against {}, and"
    assert said.format(*whole) in text
    assert f"{long[first, 1e-3, True][2]} at 3/12 nested)" in text
    costs: dict[str, list[float]] = {"data parallel": [], "structured dropout K=6": []}
    for line in (ROOT / "paper/points/lab-gpu.jsonl").read_text().splitlines():
        point = json.loads(line)
        about, tried = point["config"], point["result"].get("treatment", {}).get("tried", {})
        mine = about.get("experiment") == "table1" and about.get("setting") == "both"
        if mine and "method" not in about and about.get("parent") in costs and tried:
            cost = tried["sqrt(N/K)"] / min(tried.values()) - 1
            costs[about["parent"]].append((about["k"], 100 * cost))
    dense, dropout = (
        [f"{cost:.1f}" for _, cost in sorted(some, reverse=True)] for some in costs.values()
    )
    results = (ROOT / "docs/results.md").read_text()
    listed = "loses {}, {}, {} and {}% by it at 8, 6, 4 and 3 of 12 (random blocks), dropout's {}, {}, {} and {}%"
    assert listed.format(*dense, *dropout) in results
    worth: dict[str, list[float]] = {}
    for line in (ROOT / "paper/points/gpu-recipe.jsonl").read_text().splitlines():
        point = json.loads(line)
        sizes = point["result"]["test"].values() if "treatment" in point["config"] else ()
        tried = [size["treatment"]["tried"] for size in sizes if not isinstance(size, float)]
        worth.setdefault(point["config"]["way"], []).extend(
            100 * (some["sqrt(N/K)"] / min(some.values()) - 1) for some in tried
        )
    assert not any(worth["TwIST"] + worth["TwIST, whole first"])
    assert max(worth["dropout K=6"] + [cost for _, cost in costs["structured dropout K=6"]]) < 2
    dense = worth["data parallel"] + [cost for _, cost in costs["data parallel"]]
    assert 2.5 < min(dense) < max(dense) < 10.5
    assert (
        "worth 3 to 10% to data parallel's random blocks, at most 2% to dropout's, nothing to TwIST's"
        in text
    )
