"""A teacher's cache is what the teacher predicts, whole or not at all, and of these tokens."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from commands import reseal
from conftest import make_tokens
from transformers import GPT2Config, GPT2LMHeadModel

from twistlm.data import teacher_cache
from twistlm.data.teacher_cache import (
    open_teacher_cache,
    unpack,
    verify_teacher_cache,
    write_teacher_cache,
)
from twistlm.data.token_file import open_tokens
from twistlm.training.teacher import AT_ONCE, write_cache


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    """A random GPT-2 of 64 tokens and 16 positions as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(0)
    small = {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 64}
    model = GPT2LMHeadModel(GPT2Config(**small))
    model.transformer.wte.weight.data *= 20  # opinions of its own
    model.save_pretrained(folder)
    return str(folder)


def test_a_cache_is_what_the_teacher_predicts(tokens, teacher, monkeypatch):
    """Every window's likeliest tokens and their log-probs are those of Hugging Face."""
    monkeypatch.setitem(AT_ONCE, "cpu", 64 * 16 * 7)
    file = open_tokens(tokens)
    cache = write_cache(file, teacher, 5, 16, "cpu", quiet=True)
    assert Path(f"{tokens}.teacher.bin").stat().st_size == 375 * 15 * 5 * 4
    rows = [374, 0, 130]
    ids, log_probs = unpack(cache.sequences(rows), 64)
    with torch.no_grad():
        model = GPT2LMHeadModel.from_pretrained(teacher).eval()
        logits = model(file.sequences(rows, 16)).logits[:, :-1]
    expected, order = logits.log_softmax(-1).sort(descending=True)
    assert torch.equal(ids, order[..., :5])
    torch.testing.assert_close(log_probs.float(), expected[..., :5], rtol=1e-3, atol=1e-6)


KILLED = """
import os, signal, sys
from twistlm.data import teacher_cache
from twistlm.data.token_file import open_tokens
from twistlm.training import teacher
teacher_cache.SAVE = 1  # byte
teacher.AT_ONCE["cpu"] = 64 * 16 * 100
real, n = teacher_cache.pack, 0
def pack(*args):
    global n
    n += 1
    if n == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
teacher_cache.pack = pack
teacher.write_cache(open_tokens(sys.argv[1]), sys.argv[2], 5, 16, "cpu", quiet=True)
"""


def test_a_killed_cache_is_gone_on_with(tokens, teacher, tmp_path, monkeypatch):
    """Killed after 200 of 375 windows: the next process makes 175, with the bytes of one go."""
    file = open_tokens(tokens)
    older = write_cache(file, teacher, 2, 16, "cpu", quiet=True)
    assert ranks.script(tmp_path, KILLED, tokens, teacher)[0] == -signal.SIGKILL
    part, made = Path(f"{tokens}.teacher.part"), Path(f"{tokens}.teacher.bin")
    left, about = part.read_bytes(), Path(f"{part}.json").read_bytes()
    assert len(left) == 200 * 15 * 20
    assert "375 sequences match their sha256" in verify_teacher_cache(file)  # the older one stays
    monkeypatch.setitem(AT_ONCE, "cpu", 64 * 16 * 100)
    seen, real = [], teacher_cache.pack

    def counted(ids, *args):
        seen.append(len(ids))
        return real(ids, *args)

    monkeypatch.setattr(teacher_cache, "pack", counted)
    anew, found = [100, 100, 100, 75], set()
    for bytes_, record, wanted in (
        (left + b"half a window", about, [100, 75]),  # written, but not yet said to be safe
        (b"?" + left[1:], about, anew),
        (left, b"{", anew),
        (left, about.replace(b'"n_done": 200', b'"n_done": 400'), anew),
        (left, about.replace(older.meta.weights_sha256.encode(), b"0" * 64), anew),
    ):
        part.write_bytes(bytes_)
        Path(f"{part}.json").write_bytes(record)
        write_cache(file, teacher, 5, 16, "cpu", quiet=True)
        assert seen == wanted
        seen.clear()
        found.add(made.read_bytes())
        assert not list(tmp_path.glob("*.part*"))
    assert len(found) == 1

    def interrupted(n_done):
        yield torch.zeros(8, 15, 8, dtype=torch.uint8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_teacher_cache(file, older.meta, interrupted)
    assert len(part.read_bytes()) == 8 * 15 * 8  # goes on, too
    assert found == {made.read_bytes()}


def test_two_processes_do_not_make_one_cache(tokens, teacher):
    cache = write_cache(open_tokens(tokens), teacher, 2, 16, "cpu", quiet=True)
    path = f"{tokens}.teacher.part"
    code = f"import fcntl; file = open({path!r}, 'a+b'); fcntl.lockf(file, fcntl.LOCK_EX); "
    code += "print(); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        assert other.stdout.readline() == b"\n"
        with pytest.raises(ValueError, match=r"teacher.bin: another process makes this cache"):
            write_teacher_cache(open_tokens(tokens), cache.meta, lambda _: ())
        other.communicate(b"\n")
    assert verify_teacher_cache(open_tokens(tokens))


DAMAGES = [  # (what is done to STEM.teacher.bin and STEM.teacher.json, what is said)
    (lambda bin, about: about.write_text("{"), r"teacher.json is not the description"),
    (lambda bin, about: reseal(about, top=65), r"top is 65, legal are 1\.\.64"),
    (lambda bin, about: reseal(about, top=3), r"45,000 bytes instead of 67,500"),
    (lambda bin, about: make_tokens(bin.parent / "tokens", seed=1), r"is for other tokens than"),
    (lambda bin, about: bin.write_bytes(b"\xff" * 45000), r"does not match its sha256"),
]


def test_a_cache_of_something_else_is_refused(tokens, teacher):
    write_cache(open_tokens(tokens), teacher, 2, 16, "cpu", quiet=True)
    paths = [Path(f"{tokens}.{suffix}") for suffix in ("teacher.bin", "teacher.json")]
    whole = {path: path.read_bytes() for path in Path(tokens).parent.glob("tokens.*")}
    for damage, sentence in DAMAGES:
        damage(*paths)
        with pytest.raises(ValueError, match=sentence):
            open_teacher_cache(open_tokens(tokens), 16, 64)
        for path, content in whole.items():
            path.write_bytes(content)
    with pytest.raises(ValueError, match=r"knows 64 tokens, the model 72"):
        open_teacher_cache(open_tokens(tokens), 16, 72)
    open_teacher_cache(open_tokens(tokens), 16, 64)


def test_a_byte_that_changed_after_opening_is_found(tokens, teacher):
    file = open_tokens(tokens)
    cache = write_cache(file, teacher, 2, 16, "cpu", quiet=True)
    records = np.array(cache.records)
    records[0, 3, :2] = 64, 0
    with pytest.raises(ValueError, match=r"holds token 64 of a vocabulary of 64"):
        replace(cache, records=records).sequences([0])
