"""Zero-shot tasks against single passes without padding, counts by hand, and lm-eval's own."""

import gzip
import json
import math

import pytest
import torch
from conftest import tiny, word_level, write_words
from families_table import build, logits, tiny_model
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from twistlm.tickets import tasks
from twistlm.tickets.tasks import (
    Question,
    loglikelihoods,
    metrics,
    models_of,
    open_tasks,
    score_tasks,
)
from twistlm.training import rounds

WORDS = [f"w{i}" for i in range(64)]
PAIRS = [
    ("w1 w2", " w5"),
    ("w9", " w5 w7 w30 w31"),
    ("w1 w2 w3 ", "w5 w6"),  # the space is the continuation's
    ("", "w8 w9"),
    (" ".join(WORDS[:40]), " w50 w51"),  # longer than the model's positions
]


def line(document, label, context, *texts: str) -> str:
    """A document's lines."""
    about = {"doc_id": document, "label": label}
    rows = [{**about, "request": {"context": context, "continuation": text}} for text in texts]
    return "".join(json.dumps(row) + "\n" for row in rows)


FILE = (
    line(0, 1, "w1 w2", " w5", " w9 w4")
    + line(1, 0, "w1 w3", " w5", " w9 w4", " w7")
    + line(2, 1, "w4 w2", " w6", " w11 w12")
    + line(1_000_000, 1, "w0", " w5", " w9")  # without its question
)


@pytest.mark.parametrize("limit", [1 << 14, 24], ids=["one batch", "several"])
def test_log_likelihoods_are_those_of_single_passes(monkeypatch, limit):
    monkeypatch.setattr(tasks, "BATCH", limit)
    size = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_head": 4, "n_layer": 2}
    model = build("gpt2", size | {"bos_token_id": 3}).double()
    found, tok = loglikelihoods(model, word_level(WORDS), PAIRS), word_level(WORDS)
    for (context, text), (log_p, greedy) in zip(PAIRS, found, strict=True):
        start, end = tok.encode(context).ids or [3], tok.encode(text).ids
        ids = torch.tensor((start + end)[-17:])
        rows = logits(model, ids[None, :-1])[0, -len(end) :].log_softmax(-1)
        assert math.isclose(log_p, float(rows.gather(1, ids[-len(end) :, None]).sum()))
        assert greedy == (rows.argmax(-1).tolist() == end)
    likeliest = int(logits(model, torch.tensor([[1, 2]]))[0, -1].argmax())
    assert loglikelihoods(model, tok, [("w1 w2", f" w{likeliest}")])[0][1]
    with pytest.raises(ValueError, match="makes token 64, and the model has 64"):
        loglikelihoods(model, word_level([*WORDS, "more"]), [("w1", " more")])
    model.lm_head.weight.data[5] = math.nan
    with pytest.raises(ValueError, match="the model has no score: its logits are not finite"):
        loglikelihoods(model, tok, PAIRS)
    with pytest.raises(ValueError, match="' ' adds no token to 'w1'"):  # it would always win
        loglikelihoods(model, tok, [("w1", " ")])


def test_spaces_at_the_end_of_a_context_are_predicted():
    letters = word_level(["?", "a", "b", " ", "c"])
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    model = tiny_model("llama").double()
    ((log_p, _),) = loglikelihoods(model, letters, [("ab ", "c")])
    rows = logits(model, torch.tensor([[1, 2, 3]]))[0].log_softmax(-1)
    assert math.isclose(log_p, float(rows[1, 3] + rows[2, 4]))


def test_metrics_are_counted_by_hand():
    """Two questions are right by log p alone, one also by log p per character, one never."""
    by_length = Question((("a", " b"), ("a", " cccc")), 0)
    questions = [by_length, by_length, Question((("a", " b"), ("a", " c")), 1)]
    questions.append(Question((("a", " b"), ("a", " c")), 0))
    given = [-2.0, -6.0, -2.0, -6.0, -4.0, -2.0, -4.0, -2.0]
    found = metrics(questions, lambda pairs: [(log_p, False) for log_p in given])
    error = math.sqrt(0.25 * 0.75 / 3)  # sqrt(p (1 - p) / (n - 1))
    for name, value in (("acc", 0.75), ("acc_norm", 0.25)):
        assert (found[name].value, found[name].n) == (value, 4)
        assert math.isclose(found[name].error, error)
    bits = [2 / 2, 2 / 2, 2 / 2, 4 / 2]  # with the space that is predicted, too
    assert math.isclose(found["bits per byte"].value, sum(bits) / 4 / math.log(2))
    alone = metrics([Question((("é\n", "ab"),))], lambda pairs: [(-6 * math.log(2), True)])
    assert (alone["greedy"].value, alone["bits per byte"].value) == (1.0, 2.0)  # of "\nab"
    assert alone["greedy"].error is None


def test_one_command_scores_a_run_its_tickets_and_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_words("tokens", WORDS, 800)
    rounds.train(tiny("tokens", tmp_path / "run", train={"rounds": 1}), quiet=True)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/one.jsonl").write_text(FILE)
    (tmp_path / "tasks/two.rc.jsonl.gz").write_bytes(
        gzip.compress(line(7, None, "w1", " w2").encode())
    )
    opened = open_tasks("tasks")
    assert [len(q.pairs) for q in opened[0]["one"]] == [2, 3, 2]
    whole, small = score_tasks(models_of(["run"], ["2/4"], device="cpu"), opened)
    (plain,) = score_tasks(models_of(["run"], device="cpu"), opened)
    assert (whole.name, small.name) == ("run", "run 2/4 random")
    assert plain.n_params == whole.n_params > small.n_params
    for task, found in plain.tasks.items():
        for metric, value in found.items():
            assert math.isclose(value.value, whole.tasks[task][metric].value, rel_tol=1e-5)
    assert small.tasks["two"]["bits per byte"] != whole.tasks["two"]["bits per byte"]
    assert set(whole.tasks["one"]) == {"acc", "acc_norm", "bits per byte"}
    assert tasks.table([whole, small]).row_count == 5
    assert tasks.record([whole])["models"][0]["tasks"]["one"]["acc"]["n"] == 3


@pytest.mark.runtime
@pytest.mark.filterwarnings("default")
def test_lm_eval_finds_the_same(tmp_path):
    """Its own model class on its own task, that task through us, and the same as a local file."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")  # of its own model class
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model, words = tiny_model("llama"), word_level(WORDS)
    rows = [
        {"text": f"w{i} w{i + 1}", "choices": ["w5 w6", "w9", "w7 w8 w30"], "answer": i % 3}
        for i in range(10, 40)
    ]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = [
        line(i, row["answer"], row["text"], *(f" {c}" for c in row["choices"]))
        for i, row in enumerate(rows)
    ]
    (tmp_path / "local.jsonl").write_text("".join(made))
    scored = [{"metric": name, "aggregation": "mean"} for name in ("acc", "acc_norm")]
    task = {
        "task": "words", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "words.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}", "metric_list": scored,
    }  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w62", pad_token="w63")
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=4)
    want = lm_eval.simple_evaluate(model=theirs, tasks=[task])["results"]["words"]
    ask = lambda pairs: loglikelihoods(model, words, pairs)  # noqa: E731
    loaded = dict(TaskManager().load([task]))
    through, again = (tasks._ask_lm_eval(loaded, ask)["words"] for _ in range(2))
    local = metrics(tasks.read_task(tmp_path / "local.jsonl"), ask)
    assert through == again
    for name in ("acc", "acc_norm"):
        for found in (through[name], local[name]):
            assert math.isclose(found.value, want[f"{name},none"])
            assert math.isclose(found.error, want[f"{name}_stderr,none"])
            assert found.n == 30
    assert 0 < want["acc,none"] != want["acc_norm,none"]
