"""Zero-shot tasks: which continuation a model finds likelier, of local files or of lm-eval.

Every log-likelihood is made here, in one way for models, parents and tickets; lm-eval, where a task
is one of its own, asks the questions and makes the metrics.
"""

import gzip
import importlib.util
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from rich.table import Table
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..model import huggingface
from ..model.blocks import widths_of_ratio
from ..model.tokenizer import encode, find_eos
from ..system import provenance, terminal
from ..system.device import autocast
from ..system.terminal import progress
from .deploy import cut_ticket
from .importance import pick_blocks, pick_for
from .parent import open_parent
from .runnable import Runnable, open_runnable

SUFFIXES = (".jsonl", ".jsonl.gz")
WITHOUT_QUESTION = 1_000_000  # doc_ids from here on repeat the answers without their question
BATCH = 1 << 14  # tokens in a pass
LOGITS = 1 << 28  # numbers of a pass: 1 GB in float32
ON_CPU = 1 << 24  # of them on a CPU, whose caches make 64 MB twice as fast as 1 GB
SCORED = ("multiple_choice", "loglikelihood")  # kinds of lm-eval's tasks
Pair = tuple[str, str]  # context, continuation
Found = tuple[float, bool]  # log p of a continuation, and whether greedy decoding writes it
Ask = Callable[[Sequence[Pair]], list[Found]]


@dataclass(frozen=True)
class Question:
    """Continuations of which one is right; a single one is only predicted."""

    pairs: tuple[Pair, ...]
    gold: int = 0


@dataclass(frozen=True)
class Measured:
    """A mean over questions and its standard error."""

    value: float
    error: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.value:.4f}" + (f" ± {self.error:.4f}" if self.error is not None else "")


Tasks = tuple[dict[str, list[Question]], dict[str, Any]]  # by name; lm-eval's, as it loads them
Results = dict[str, dict[str, Measured]]  # task -> metric -> number


@dataclass(frozen=True)
class TaskScores:
    """What one model reaches in every task."""

    name: str
    n_params: int
    tasks: Results

    @property
    def means(self) -> dict[str, float]:
        """Accuracies, averaged over the tasks that have them."""
        accuracies = {
            name: [found[name].value for found in self.tasks.values() if name in found]
            for name in ("acc", "acc_norm")
        }
        return {f"mean {n}": statistics.fmean(v) for n, v in accuracies.items() if len(v) > 1}


def open_tasks(asked: str) -> Tasks:
    """Tasks by comma: files, folders of them, or names of lm-eval's; refused before any model."""
    paths, names = [], []
    for each in filter(None, map(str.strip, asked.split(","))):
        path = Path(each).expanduser()
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
            if not inside:
                raise ValueError(f"--tasks {each}: the folder holds no {' or '.join(SUFFIXES)}")
            paths += inside
        elif path.exists():
            paths.append(path)
        else:
            names.append(each)
    if not paths and not names:
        raise ValueError("--tasks names no task")
    files = {path.name.split(".")[0]: read_task(path) for path in paths}
    if len(files) < len(paths):
        raise ValueError(f"--tasks {asked}: two files have one name")
    return files, _of_lm_eval(names) if names else {}


def read_task(path: Path) -> list[Question]:
    """A file with one JSON line for each continuation: `request`, `doc_id` and `label`.

    `request` holds `context` and `continuation`; `label` is the right one's number among those of
    a `doc_id`. Answers that are repeated without their question are left out.
    """
    documents: dict[Any, list[tuple[int, Pair, Any]]] = {}  # line, pair, label
    number = 0
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                row = json.loads(line)
                document, request = row["doc_id"], row["request"]
                pair = request["context"], request["continuation"]
                if not all(isinstance(text, str) for text in pair):
                    raise TypeError
                if not (isinstance(document, int) and document >= WITHOUT_QUESTION):
                    documents.setdefault(document, []).append((number, pair, row.get("label")))
    except (OSError, EOFError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} could not be read: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path}, line {number}, is no line of a task: it needs doc_id, and request with the "
            "texts context and continuation"
        ) from None
    made = []
    for document, rows in documents.items():
        gold = rows[0][2] if len(rows) > 1 else 0
        if type(gold) is not int or not 0 <= gold < len(rows):
            raise ValueError(
                f"{path}: label = {gold!r} of doc_id {document} is no number from 0 to "
                f"{len(rows) - 1}"
            )
        for number, (_, continuation), _ in rows:
            if not continuation:  # its log p would be 0, the highest there is
                raise ValueError(f"{path}, line {number}: the continuation is empty")
        made.append(Question(tuple(pair for _, pair, _ in rows), gold))
    if not made:
        raise ValueError(f"{path} holds no question")
    return made


def _of_lm_eval(names: Sequence[str]) -> dict[str, Any]:
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            f"--tasks {names[0]}: no such file, and lm-eval, which may know a task of this name, "
            "is not installed: pip install -e '.[tasks]'"
        )
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(f"--tasks {name}: no such file, and lm-eval knows no such task")
    try:
        loaded: dict[str, Any] = dict(manager.load(list(names)))
    except Exception as error:  # a data set that is out of reach fails in many ways
        why = huggingface.one_line(error)
        raise ValueError(f"--tasks {','.join(names)}: no data for them: {why}") from None
    for name, task in loaded["tasks"].items():
        if task.OUTPUT_TYPE not in SCORED:
            raise ValueError(
                f"--tasks {name}: lm-eval asks for {task.OUTPUT_TYPE}; legal are tasks that choose "
                f"between given continuations ({', '.join(SCORED)})"
            )
    return loaded


def score_tasks(models: Iterable[tuple[str, Runnable]], tasks: Tasks) -> Iterator[TaskScores]:
    """Every model, by its name, on every task."""
    files, of_lm_eval = tasks
    with progress() as bar:
        for name, runnable in models:
            ask = partial(loglikelihoods, runnable.model, runnable.tokenizer(), bar=bar, what=name)
            found = {each: metrics(asked, ask) for each, asked in files.items()}
            found |= _ask_lm_eval(of_lm_eval, ask) if of_lm_eval else {}
            yield TaskScores(name, runnable.model.num_parameters(), found)


def models_of(
    sources: Sequence[str],
    ratios: Sequence[str] = (),
    seed: int = 0,
    device: str = "auto",
    overrides: Sequence[str] = (),
) -> Iterator[tuple[str, Runnable]]:
    """Each source, and its tickets at `ratios`, by name; each is let go before the next.

    Those are nested where the parent has an order of blocks; else one random ticket for each ratio.
    """
    for source in sources:
        name = Path(source).name
        if not ratios:
            yield name, open_runnable(source, device)
            continue
        parent = open_parent(source, device, overrides)
        how, blocks = pick_for(parent), parent.block_map
        asked = {f" {ratio} {how.asked}": widths_of_ratio(blocks, ratio) for ratio in ratios}
        for label, widths in {"": blocks.full_widths(), **asked}.items():
            kept, _ = pick_blocks(parent, widths, how, seed)
            yield name + label, Runnable(parent.source, cut_ticket(parent, kept).eval())


@torch.no_grad()
def loglikelihoods(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    pairs: Sequence[Pair],
    bar: Progress | None = None,
    what: str = "",
) -> list[Found]:
    """log p of each continuation after its context, and whether greedy decoding would write it.

    As lm-eval has it: a continuation's tokens are those that it adds to its context's, spaces at
    the context's end are part of it, and a text too long for the model loses its beginning.
    """
    bar, vocab_size = bar or Progress(disable=True), huggingface.vocab_size(model)
    texts = list(_encoded(model, tokenizer, pairs))
    if texts and (largest := max(max(text.ids) for text in texts)) >= vocab_size:
        raise ValueError(f"the tokenizer makes token {largest}, and the model has {vocab_size}")
    most = (LOGITS if model.device.type == "cuda" else ON_CPU) // vocab_size
    found: list[Any] = [None] * len(texts)
    task = bar.add_task(f"score {what}", total=len(texts), note="")
    with autocast("auto", model.device):  # around all passes: weights are rounded once
        for batch in _batches(texts, most):  # the longest first: memory ends at once, or never
            log_p, n_greedy = _scored(model, [texts[i] for i in batch])
            if not all(map(math.isfinite, log_p)):
                raise ValueError(f"{what or 'the model'} has no score: its logits are not finite")
            for i, each, n in zip(batch, log_p, n_greedy, strict=True):
                found[i] = each, n == len(texts[i].ids) - texts[i].n_context
            bar.advance(task, len(batch))
    bar.remove_task(task)
    return found


class Encoded(NamedTuple):
    """The tokens of a context and its continuation."""

    ids: list[int]
    n_context: int  # of them; the others are predicted


def _encoded(
    model: PreTrainedModel, tokenizer: Tokenizer, pairs: Sequence[Pair]
) -> Iterator[Encoded]:
    """The tokens of each pair, as many of the last ones as the model has positions for."""
    config, most = model.config, huggingface.n_positions(model) + 1  # the last one is not read
    known = (config.bos_token_id, config.eos_token_id, find_eos(tokenizer), 0)
    before = next(token for token in known if isinstance(token, int))
    contexts = encode(tokenizer, [context.rstrip() for context, _ in pairs])
    whole = encode(tokenizer, [context + text for context, text in pairs])
    for pair, context, both in zip(pairs, contexts, whole, strict=True):
        start = [] if context.ids else [before]
        ids, n_context = start + both.ids, len(start + context.ids)
        if n_context >= len(ids):  # its log p would be 0, the highest there is
            raise ValueError(f"the continuation {pair[1]!r} adds no token to {pair[0][-40:]!r}")
        n_lost = max(0, len(ids) - most)
        yield Encoded(ids[n_lost:], max(1, n_context - n_lost))


def _scored(model: PreTrainedModel, texts: Sequence[Encoded]) -> tuple[list[float], list[float]]:
    """Each text's log p of what is predicted, and how many tokens of it are the likeliest."""
    # what is behind a text's end cannot be seen from before it
    ids = pad_sequence([torch.tensor(text.ids) for text in texts], batch_first=True)
    n_predicted = torch.tensor([len(text.ids) - text.n_context for text in texts])
    rows = torch.arange(len(texts)).repeat_interleave(n_predicted).to(model.device)
    places = [torch.arange(text.n_context, len(text.ids)) for text in texts]
    columns, ids = torch.cat(places).to(model.device), ids.to(model.device)

    def pick(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        return (args[0][rows, columns - 1][None],)  # a vocabulary's logits of no other token

    head: Any = model.get_output_embeddings()
    with head.register_forward_pre_hook(pick):
        (logits,) = model(input_ids=ids[:, :-1], use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = ids[rows, columns]
    log_p = -cross_entropy(logits, targets, reduction="none").double()
    each = torch.stack([log_p, (logits.argmax(-1) == targets).double()])
    sums = each.new_zeros(2, len(texts)).index_add_(1, rows, each)
    return sums[0].tolist(), sums[1].tolist()


def _batches(texts: Sequence[Encoded], most: int) -> Iterator[list[int]]:
    """Numbers of texts of like length: as many as `BATCH` allows, with `most` predictions."""
    left = sorted(range(len(texts)), key=lambda i: -len(texts[i].ids))
    while left:
        batch = left[: max(1, BATCH // len(texts[left[0]].ids))]
        n_predicted = accumulate(len(texts[i].ids) - texts[i].n_context for i in batch)
        batch = batch[: max(1, sum(n <= most for n in n_predicted))]
        yield batch
        left = left[len(batch) :]


def metrics(questions: Sequence[Question], score: Ask) -> dict[str, Measured]:
    """Accuracy by log p and by log p per character, and bits per byte of the right continuation.

    Where there is one continuation alone: how often greedy decoding writes it, and its bits.
    """
    found = iter(score([pair for question in questions for pair in question.pairs]))
    values: dict[str, list[float]] = {}
    for question in questions:
        scored = [next(found) for _ in question.pairs]
        context, right = question.pairs[question.gold]
        if len(scored) > 1:
            lengths = [len(text.removeprefix(" ")) or 1 for _, text in question.pairs]
            by_length = [log_p / n for (log_p, _), n in zip(scored, lengths, strict=True)]
            plain = [log_p for log_p, _ in scored]
            for name, each in (("acc", plain), ("acc_norm", by_length)):
                values.setdefault(name, []).append(float(each.index(max(each)) == question.gold))
        else:
            values.setdefault("greedy", []).append(float(scored[0][1]))
        n_bytes = len((context[len(context.rstrip()) :] + right).encode())
        bits = -scored[question.gold][0] / math.log(2)
        values.setdefault("bits per byte", []).append(bits / max(1, n_bytes))
    return {
        name: Measured(
            value=statistics.fmean(each),
            error=statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None,
            n=len(each),
        )
        for name, each in values.items()
    }


def _ask_lm_eval(loaded: dict[str, Any], score: Ask) -> Results:
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate

    class Ours(LM):
        """lm-eval's view of a model: what it asks is answered here."""

        def loglikelihood(self, requests: list[Any]) -> list[Found]:
            return score([request.args for request in requests])

        # lm-eval wants both; tasks that would call them were refused (`SCORED`)
        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise NotImplementedError

        def generate_until(self, requests: list[Any]) -> list[str]:
            raise NotImplementedError

    made = evaluate(Ours(), loaded, log_samples=False, bootstrap_iters=1000)
    results: Results = {}
    for task, numbers in made["results"].items():
        n = made.get("n-samples", {}).get(task, {}).get("effective", 0)
        for key, value in numbers.items():
            metric, _, how = key.partition(",")
            if how and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = numbers.get(f"{metric}_stderr,{how}")
                error = float(error) if isinstance(error, int | float) else None
                name = metric if how == "none" else f"{metric}, {how}"
                results.setdefault(task, {})[name] = Measured(float(value), error, n)
    return results


def table(rows: Sequence[TaskScores]) -> Table:
    """One line for each task and metric, one column for each model."""
    names = [f"{row.name}\n{row.n_params:,}" for row in rows]
    title = "zero-shot tasks: mean ± standard error"
    made = terminal.table(title, "task", "metric", "questions", *names, words=2)
    for task, found in rows[0].tasks.items():
        for i, (metric, first) in enumerate(found.items()):
            cells = (str(row.tasks[task][metric]) for row in rows)
            last = i == len(found) - 1
            made.add_row("" if i else task, metric, f"{first.n:,}", *cells, end_section=last)
    for name in rows[0].means:
        made.add_row(name, "", "", *(f"{row.means[name]:.4f}" for row in rows))
    return made


def record(rows: Sequence[TaskScores]) -> dict[str, Any]:
    """All numbers, and what made them."""
    models = [{**asdict(row), "means": row.means} for row in rows]
    return {"models": models, "run": provenance.describe_run()}
