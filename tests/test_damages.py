"""200 random damages each to token files and tickets: none is silent. Those of checkpoints stand in
training/test_checkpoint.py. What was written before manifests still loads."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import damages
from conftest import make_tokens, tiny, word_level
from tiny_tickets import open_parent

from twistlm.cli import main
from twistlm.data.prepare import prepare
from twistlm.data.token_file import open_tokens
from twistlm.system import manifest
from twistlm.tickets import deploy
from twistlm.tickets.runnable import verify
from twistlm.training import rounds

N = 200


@pytest.fixture(scope="module")
def token_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "t.txt").write_text(" ".join(f"w{i % 40}" for i in range(3000)))
    words = word_level([f"w{i}" for i in range(40)])
    prepare([str(folder / "t.txt")], folder / "made/t", words, quiet=True)
    return folder / "made"


@pytest.fixture(scope="module")
def ticket(tmp_path_factory) -> Path:
    """A ticket of a parent with a tokenizer: all files that a ticket can have."""
    folder = tmp_path_factory.mktemp("ticket")
    parent, blueprint = open_parent("gpt2", "head", folder / "parent")
    words = word_level([f"w{i}" for i in range(parent.template.config.vocab_size)])
    words.save(str(folder / "tokenizer.json"))
    object.__setattr__(parent, "tokenizer", folder / "tokenizer.json")
    deploy.save_ticket(parent, blueprint, folder / "ticket", {"note": 1})
    return folder / "ticket"


def missed(whole: Path, copy: Path, use, only: str | None = None) -> list[str]:
    """Damages after which `use(copy)` neither raises a ValueError nor says a word."""
    shutil.copytree(whole, copy)
    use(copy)
    passed = []
    for told, file, data in damages(copy, N, only):
        good = file.read_bytes()
        file.write_bytes(data)
        try:
            heard = use(copy)
        except ValueError as error:
            heard = str(error)
        if str(copy) not in (heard or ""):  # a sentence names the file
            passed.append(told)
        file.write_bytes(good)
    use(copy)
    return passed


@pytest.mark.parametrize("only", [None, "t.json"])
def test_no_damage_to_a_token_file_is_silent(tmp_path, token_folder, only):
    def use(folder: Path) -> None:
        open_tokens(str(folder / "t")).sequences([0], 8)

    assert missed(token_folder, tmp_path / "copy", use, only) == []


@pytest.mark.parametrize("only", [None, "ticket.json"])
def test_no_damage_to_a_ticket_is_silent(tmp_path, capsys, ticket, only):
    """A card that was changed is said and loads: people edit cards. Everything else is refused."""

    def use(folder: Path) -> str:
        capsys.readouterr()
        deploy.verify_ticket(folder)  # what load_ticket asks before it loads
        return capsys.readouterr().out

    assert missed(ticket, tmp_path / "copy", use, only) == []


def test_load_ticket_asks_for_the_hash(tmp_path, ticket):
    """One bit of one weight: shapes, counts and widths are as they were."""
    shutil.copytree(ticket, tmp_path / "copy")
    assert deploy.load_ticket(tmp_path / "copy") is not None
    path = tmp_path / "copy/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: .*sha256"):
        deploy.load_ticket(tmp_path / "copy")


def test_a_ticket_without_a_manifest_still_loads(tmp_path, ticket):
    shutil.copytree(ticket, tmp_path / "copy")
    record = json.loads((ticket / "ticket.json").read_text())
    old = {k: v for k, v in record.items() if k not in ("files", "sha256")}
    (tmp_path / "copy/ticket.json").write_text(json.dumps(old, indent=1) + "\n")
    deploy.load_ticket(tmp_path / "copy")
    assert "nothing vouches" in verify(str(tmp_path / "copy"))[0]


def test_a_large_file_is_hashed_in_the_background(tmp_path, monkeypatch):
    """A small one is refused when it is opened, a large one as soon as the damage is known."""
    stem = make_tokens(tmp_path / "large")
    data = bytearray(Path(f"{stem}.bin").read_bytes())
    data[700] ^= 1  # a legal id becomes another legal id
    Path(f"{stem}.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"large\.bin is damaged"):
        open_tokens(stem)
    monkeypatch.setattr(manifest, "AT_ONCE", 100)
    file, until = open_tokens(stem), time.monotonic() + 10

    def use_on() -> None:
        while time.monotonic() < until:
            file.sequences([0, 1], 16)

    with pytest.raises(ValueError, match=r"large\.bin is damaged"):
        use_on()


@pytest.mark.parametrize("dtype", ["O", "int64", "uint8", "<u2", "V8", 16, None])
def test_dtypes_come_from_a_short_list(tmp_path, dtype):
    stem = make_tokens(tmp_path / "t")
    table = json.loads(Path(f"{stem}.json").read_text()) | {"dtype": dtype}
    Path(f"{stem}.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match="legal are uint16 and uint32"):
        open_tokens(stem)


def test_verify_names_what_is_damaged(tmp_path, monkeypatch, capsys, token_folder, ticket):
    """The command: whole files of every kind are told, each damage is named, and the code is 2."""
    run = tmp_path / "run"
    rounds.train(tiny(make_tokens(tmp_path / "walk"), run, train={"rounds": 1}), quiet=True)
    shutil.copytree(token_folder, tmp_path / "tokens")
    shutil.copytree(ticket, tmp_path / "ticket")
    kinds = [str(tmp_path / "tokens/t"), str(tmp_path / "ticket"), str(run)]

    def call() -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["twistlm", "verify", *kinds])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, *capsys.readouterr()

    code, out, _ = call()
    assert code == 0
    assert [out.count(word) for word in ("token file", "ticket /", "checkpoint /")] == [1, 1, 1]
    ids = np.fromfile(tmp_path / "tokens/t.bin", "<u2")
    ids[0] ^= 1
    ids.tofile(tmp_path / "tokens/t.bin")
    with (run / "checkpoints/round-000001/model.safetensors").open("ab") as file:
        file.write(b"x")
    code, out, err = call()
    assert code == 2
    assert "ticket /" in out
    assert "t.bin is damaged" in err
    assert "model.safetensors" in err
    kinds[:] = [str(tmp_path)]
    assert call()[2].count("nothing to verify") == 1
