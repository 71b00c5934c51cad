"""Ollama's Modelfile beside a GGUF file: its name, the chat format, where an answer ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

ROLES = ("system", "user", "assistant")
ELSEWHERE = (
    "# the tokenizer's chat template says more than a TEMPLATE can: Ollama looks for it in its own "
    "list"
)


def modelfile(gguf: str, tokenizer: Path | None) -> str:
    """The Modelfile of a GGUF file, with a chat format if it can say what the tokenizer's says."""
    lines = [f"FROM ./{gguf}"]
    if tokenizer is not None and (tokenizer.parent / "chat_template.jinja").is_file():
        lines += _chat(PreTrainedTokenizerFast.from_pretrained(tokenizer.parent))
    return "\n".join(lines) + "\n"


def _chat(tokenizer: Any) -> list[str]:
    """TEMPLATE, SYSTEM and the stop word, found by rendering a talk whose words are known.

    Ollama writes a turn as system, prompt and answer, each between two strings. They are read off
    the rendered talk; a template that does more than that is left to Ollama's own list.
    """
    adds = tokenizer("a").input_ids[0] != tokenizer("a", add_special_tokens=False).input_ids[0]
    added = (adds and tokenizer.bos_token) or ""  # the runtime puts it before a text by itself

    def render(*talk: tuple[str, str], ask: bool = False) -> str:
        messages = [{"role": role, "content": words} for role, words in talk]
        made = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        return made.removeprefix(added)

    talk = [("system", "@S@"), ("user", "@U@"), ("assistant", "@A@"), ("user", "@V@")]
    try:
        pieces = _split(render(*talk), [words for _, words in talk])
        first, alone = render(*talk[:2], ask=True), render(talk[1], ask=True)
    except (TemplateError, ValueError, TypeError):
        return [ELSEWHERE]
    before = {role: pieces[0].replace("system", role) for role in ROLES}
    after = {role: pieces[i + 1] for i, role in enumerate(ROLES)}
    for role, following in zip(ROLES, ("user", "assistant", "user"), strict=True):
        after[role] = after[role].removesuffix(before[following])
    made = "".join(before[role] + words + after[role] for role, words in talk)
    head = before["system"] + "@S@" + after["system"]
    turn = before["user"] + "@U@" + after["user"] + before["assistant"]
    default = alone.removesuffix(turn).removeprefix(before["system"]).removesuffix(after["system"])
    whole = before["system"] + default + after["system"] if default else ""
    if (made, first, alone) != (render(*talk), head + turn, whole + turn) or '"""' in made:
        return [ELSEWHERE]
    parts = [
        f"{{{{ if {field} }}}}{before[role]}{{{{ {field} }}}}{after[role]}{{{{ end }}}}"
        for role, field in (("system", ".System"), ("user", ".Prompt"))
    ]
    answer = f"{before['assistant']}{{{{ .Response }}}}{after['assistant']}"
    lines = [f'TEMPLATE """{"".join(parts)}{answer}"""']
    if default:
        lines.append(f'SYSTEM """{default}"""')
    if stop := after["assistant"].strip():
        lines.append(f"PARAMETER stop {json.dumps(stop)}")
    return lines


def _split(text: str, words: list[str]) -> list[str]:
    """The strings around known words, in order."""
    pieces = []
    for word in words:
        before, text = text.split(word, 1)  # ValueError where it is not written as it is
        pieces.append(before)
    return [*pieces, text]
