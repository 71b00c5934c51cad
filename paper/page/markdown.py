"""The same sections as markdown: a marked part of a file whose other parts are kept by hand."""

from __future__ import annotations

from collections.abc import Sequence

from twistlm.system.terminal import clean, markdown_cell, markdown_text

from .html import Chapter
from .section import Claim, Section, Table

BEGIN = "<!-- written by `twistlm report`: from here -->"
END = "<!-- written by `twistlm report`: up to here -->"
FIGURES = "figures"  # a folder beside the file


def replace_part(text: str, part: str) -> str:
    """`text` with `part` between the marks; without marks it is added at the end."""
    marked = f"{BEGIN}\n{part.strip()}\n{END}\n"
    if BEGIN in text and END in text:
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        return before + marked + after.removeprefix("\n")
    return f"{text.rstrip()}\n\n{marked}" if text.strip() else marked


def shown_figures(chapters: Sequence[Chapter]) -> list[str]:
    """The drawings that `markdown` shows: a chapter's first, and where no table says the same."""
    found = []
    for chapter in chapters:
        drawn = [section for section in chapter.sections if section.figures]
        for section in drawn:
            n = len(section.figures) if not section.tables else int(section is drawn[0])
            found += [f"{chapter.id}-{figure.id}" for figure in section.figures[:n]]
    return found


def markdown(chapters: Sequence[Chapter]) -> str:
    """Every chapter; its drawings are expected in the folder `FIGURES` beside the file."""
    parts, shown = [], set(shown_figures(chapters))
    for chapter in chapters:
        parts += [f"## Experiments: {markdown_text(chapter.title)}", ""]
        parts += [f"- {markdown_text(fact)}" for fact in chapter.facts]
        parts += [
            f"- {markdown_text(line)}" for section in chapter.sections for line in section.headlines
        ]
        commands = dict.fromkeys(str(run.get("command", "")) for _, run in chapter.made_by)
        parts += ["", "```sh", *(clean(c).replace("```", "") for c in commands if c), "```", ""]
        parts += _claims(chapter.claims)
        for section in chapter.sections:
            parts += _section(section, chapter.id, shown)
    return "\n".join(parts)


def _claims(claims: Sequence[Claim]) -> list[str]:
    decided = [claim for claim in claims if claim.holds is not None]
    if not decided:
        return []
    rows = [
        "### Which claims hold here",
        "",
        "| claim | whose | holds | numbers |",
        "|---|---|---|---|",
    ]
    rows += [
        f"| {markdown_cell(c.says)} | {c.whose} | {'yes' if c.holds else '**no**'} | {markdown_cell(c.because)} |"
        for c in decided
    ]
    return [*rows, ""]


def _section(section: Section, at: str, shown: set[str]) -> list[str]:
    parts = [f"### {markdown_text(section.title)}", "", markdown_text(section.what), ""]
    for table in section.tables:
        parts += [_table(table), ""]
        parts += [markdown_text(table.note), ""] if table.note else []
    for figure in section.figures:
        if f"{at}-{figure.id}" in shown:
            parts += [f"![{markdown_text(figure.title)}]({FIGURES}/{at}-{figure.id}.png)", ""]
            parts += [markdown_text(figure.reading), ""]
        elif figure.reading:
            parts += [f"{markdown_text(figure.title)}: {markdown_text(figure.reading)}", ""]
    return parts


def _table(table: Table) -> str:
    def cell(i: int, j: int, text: str) -> str:
        text = markdown_cell(text)
        return (
            f"**{text}**"
            if (i, j) in table.best
            else f"*{text}*"
            if i in table.small and text
            else text
        )

    head = f"| {' | '.join(markdown_cell(text) for text in table.head)} |"
    rows = [
        f"| {' | '.join(cell(i, j, text) for j, text in enumerate(row))} |"
        for i, row in enumerate(table.rows)
    ]
    return "\n".join([head, "|---" * len(table.head) + "|", *rows])
