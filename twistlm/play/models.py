"""The models behind the page: a parent, and tickets that are cut, measured and write in memory."""

import math
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from ..compute import speed
from ..compute.perplexity import Evaluator, perplexity
from ..model import huggingface
from ..model.blocks import Blueprint, Widths
from ..model.tokenizer import encode, load_tokenizer
from ..tickets import deploy
from ..tickets.importance import NESTED, parse_pick, pick_blocks, pick_for
from ..tickets.parent import Parent, open_parent
from ..tickets.runnable import decoded, generate_tokens
from ..tickets.text import text_of
from ..tickets.widths import uniform_widths, weights_bytes
from . import PICKS, TicketChoice

N_TOKENS = 8192  # of text behind a perplexity, where the run does not say (run.eval_tokens)
MOST_PROMPT = 512  # tokens that are read of a prompt
PROMPT_WORDS = 4  # of the validation text, as the first prompt
TOP_K = 10  # the likeliest tokens, one of which is drawn


class Models:
    """A parent, its whole model and the ticket that was cut last."""

    def __init__(self, source: str, device: str, overrides: list[str], data: str | None):
        self.parent: Parent = open_parent(source, device, overrides)
        self.sizes: list[Widths] = uniform_widths(self.parent.block_map)
        self.whole = deploy.cut_ticket(self.parent, self.parent.block_map.full())
        try:
            self.tokenizer: Any = load_tokenizer(str(self.parent.tokenizer or source))
        except ValueError:
            self.tokenizer = None
        self.evaluator: Evaluator | None = None
        n_tokens = self.parent.cfg.run.eval_tokens or N_TOKENS
        try:
            self.evaluator = self.parent.evaluator(text_of(self.parent, data, n_tokens))
            text, option = self.evaluator.text, f" --data {data}" if data else ""
            self.measured_on = (
                f"perplexity on the first {text.n_tokens:,} tokens of {text.file.stem}, as by "
                f"`twistlm eval {source}{option} --tokens {text.n_tokens}`"
            )
        except ValueError as error:
            if data:
                raise
            self.measured_on = f"no perplexity: {error}"
        self.of_whole: dict[str, Any] = {}  # what was measured
        self.of_tickets: dict[TicketChoice, dict[str, Any]] = {}
        self.last: tuple[TicketChoice, PreTrainedModel] | None = None  # cut last

    def describe(self) -> Iterator[dict[str, Any]]:
        """What the page shows before anything is asked."""
        kinds = {group.kind: group for group in self.parent.block_map.groups}
        yield {
            "source": self.parent.source,
            "family": self.parent.template.config.model_type,
            "sizes": [
                ", ".join(f"{k} {widths[g.name]}/{g.n_blocks}" for k, g in kinds.items())
                for widths in self.sizes
            ],
            "parameters": self.parent.central.layout.n_params,
            "pick": pick_for(self.parent).asked,
            "measured_on": self.measured_on,
            "has_text": self.evaluator is not None,
            "prompt": self._first_words(),
            "has_tokenizer": self.tokenizer is not None,
        }

    def measure(self, choice: TicketChoice) -> Iterator[dict[str, Any]]:
        """Size, speed and perplexity of the whole model and a ticket, each as soon as known."""
        models = {"whole": self.whole, "ticket": self.ticket(choice)}
        found = {"whole": self.of_whole, "ticket": self.of_tickets.setdefault(choice, {})}
        for name, model in models.items():
            found[name]["parameters"] = model.num_parameters()
            found[name]["bytes"] = weights_bytes(huggingface.shapes(model))
        yield found
        if "ms" not in found["ticket"]:  # both in turn: a busy machine slows them alike
            speeds = speed.measure_all(list(models.values()), n_repeats=2, n_prompt=16, n_steps=8)
            for each, measured in zip(found.values(), speeds, strict=True):
                each["ms"] = min(each.get("ms", math.inf), measured.fastest_decode_ms)
        yield found
        for name, model in models.items():
            if self.evaluator is not None and "perplexity" not in found[name]:
                precision = self.parent.cfg.train.precision
                found[name]["perplexity"] = perplexity(model, self.evaluator.text, precision)
        yield found

    def write(
        self, choice: TicketChoice, prompt: str, n_new: int, temperature: float
    ) -> Iterator[dict[str, str]]:
        """What the whole model and the ticket write after a prompt, token by token in turn."""
        if self.tokenizer is None:
            raise ValueError(f"{self.parent.source} has no tokenizer: it can read no text")
        ids = encode(self.tokenizer, [prompt[-100 * MOST_PROMPT :]])[0].ids or [0]
        room = huggingface.n_positions(self.whole)
        n_new = min(n_new, room // 2)
        read = ids[-min(MOST_PROMPT, room - n_new) :]
        note = f"the last {len(read):,} of {len(ids):,} tokens of the prompt were read"
        models = {"whole": self.whole, "ticket": self.ticket(choice)}
        drawn = temperature, TOP_K if temperature else None, choice.seed
        writers = {
            name: decoded(self.tokenizer, generate_tokens(model, read, *drawn), read)
            for name, model in models.items()
        }
        texts = dict.fromkeys(models, "")
        for _ in range(n_new):
            texts = {name: text + next(writers[name], "") for name, text in texts.items()}
            yield {"note": note if len(read) < len(ids) else "", **texts}

    def ticket(self, choice: TicketChoice) -> PreTrainedModel:
        """The chosen ticket, cut if it is not the last one."""
        if self.last is None or self.last[0] != choice:
            self.last = None  # its memory is let go
            self.last = choice, deploy.cut_ticket(self.parent, self.blueprint(choice))
        return self.last[1]

    def blueprint(self, choice: TicketChoice) -> Blueprint:
        """The blocks that `extract` picks; a parent without an order nests by their magnitude."""
        how = parse_pick(PICKS[choice.pick])
        if how == NESTED and not self.parent.progress.order:
            how = parse_pick("importance:magnitude")
        if how.n_draws > 1 and self.evaluator is None:
            raise ValueError(f"the {choice.pick} is chosen by perplexity; {self.measured_on}")
        widths, seed = self.sizes[choice.size - 1], choice.seed
        return pick_blocks(self.parent, widths, how, seed=seed, evaluator=self.evaluator)[0]

    def _first_words(self) -> str:
        """A prompt that fits the parent: how its validation text begins."""
        if self.evaluator is None or self.tokenizer is None:
            return "Once upon a time"
        ids = self.evaluator.text.file.sequences([0], self.evaluator.text.seq_len)[0].tolist()
        return " ".join(self.tokenizer.decode(ids).split()[:PROMPT_WORDS])
