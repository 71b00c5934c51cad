"""Loading: random weights follow the seed, folders and GGUF files give back what was written."""

import json
import re
import shutil

import pytest
import torch
from commands import change
from conftest import tiny
from families_table import TABLE, build, tiny_model

from twistlm.baselines import PruneRequest
from twistlm.baselines.write import write
from twistlm.config import ModelConfig
from twistlm.export import gguf as exporter
from twistlm.model import generator, huggingface
from twistlm.model.blocks import widths_of_ratio
from twistlm.model.tokenizer import load_tokenizer
from twistlm.tickets import deploy
from twistlm.tickets.healing import heal
from twistlm.tickets.parent import open_parent
from twistlm.tickets.requests import HealRequest
from twistlm.training import rounds


@pytest.fixture
def llama():
    """A grouped-query llama whose head_dim is hidden/heads, as GGUF's llama has it."""
    config = TABLE["llama"].config | {"num_key_value_heads": 2, "tie_word_embeddings": False}
    return build("llama", config)


@pytest.mark.parametrize("noise", [None, 0.02, 0.5])
def test_gguf_gives_back_the_logits(tmp_path, llama, noise):
    """Two copies of one matrix (up to rounding) are tied again."""
    if noise is not None:
        table = llama.model.embed_tokens.weight.detach()
        llama.lm_head.weight.data = table + noise * table.std() * torch.randn_like(table)
    exporter.export(llama, tmp_path / "tiny.gguf", "f32")
    loaded = huggingface.load(ModelConfig(weights=f"gguf:{tmp_path}/tiny.gguf", type="llama"), 0)
    assert loaded.config.tie_word_embeddings == (noise == 0.02)
    if loaded.config.tie_word_embeddings:
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        llama.lm_head.weight = llama.model.embed_tokens.weight
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, llama(input_ids=ids).logits)
    assert all(p.dtype == torch.float32 for p in loaded.parameters())
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"cut\.gguf could not be read as GGUF"):
        huggingface.pretrained(f"gguf:{tmp_path}/cut.gguf")


def test_a_matrix_that_gguf_holds_twice_is_its_better_copy(tmp_path, monkeypatch):
    """As published models are: the embedding in 5 bits, the same as the head in 8; parsed once."""
    gguf = pytest.importorskip("gguf")
    kinds, add, init = gguf.GGMLQuantizationType, gguf.GGUFWriter.add_tensor, gguf.GGUFReader
    model = build("llama", TABLE["llama"].config | {"hidden_size": 64, "head_dim": 16})
    table, parsed = model.get_input_embeddings().weight.detach().numpy(), []
    model.lm_head.weight.data = model.get_input_embeddings().weight.detach().clone()

    def add_coarse(self, name, tensor, raw_dtype):
        if name == "token_embd.weight":
            tensor, raw_dtype = gguf.quants.quantize(table, kinds.Q5_0), kinds.Q5_0
        add(self, name, tensor, raw_dtype=raw_dtype)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_coarse)
    path = tmp_path / "twice.gguf"
    exporter.export(model, path, "q8_0")
    entries = {e.name: e for e in init(path).tensors}
    assert entries["token_embd.weight"].n_bytes < entries["output.weight"].n_bytes
    monkeypatch.setattr(
        "gguf.gguf_reader.GGUFReader", lambda path: parsed.append(path) or init(path)
    )
    for _ in range(2):
        loaded = huggingface.pretrained(f"gguf:{path}")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    n_params = sum(p.numel() for p in model.parameters()) - table.size
    assert sum(p.numel() for p in loaded.parameters()) == n_params
    best = gguf.quants.dequantize(gguf.quants.quantize(table, kinds.Q8_0), kinds.Q8_0)
    assert (loaded.lm_head.weight.detach().numpy() == best).all()
    assert parsed == [str(path)]


def test_a_folder_loads_in_float32_and_as_its_own_type(tmp_path):
    model = tiny_model("qwen3").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = huggingface.load(ModelConfig(weights=str(tmp_path), type="qwen3"), 0)
    for (key, a), b in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float()), key
    with pytest.raises(ValueError, match=r"is a qwen3, but model\.type = 'gpt2'"):
        huggingface.load(ModelConfig(weights=str(tmp_path), type="gpt2"), 0)


NAMES = {  # what a user may write -> what is said about it
    "/no/such/folder": "no such folder",
    "runs/mistyped": "no such folder",
    "C:\\models\\llama": "no such folder",
    "gone.gguf": "no such file",
    "here.gguf": "write gguf:here.gguf",
    "gguf:gone.gguf": "no such file",
    "gguf:nowhere/x.gguf": "no installed package 'nowhere'",
}


def test_a_mistyped_path_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "here.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("twistlm.model.huggingface.get_hf_file_metadata", lambda *a, **k: 1 / 0)
    for source, said in NAMES.items():
        for open_ in (huggingface.pretrained, load_tokenizer):
            with pytest.raises(ValueError, match=re.escape(said)) as caught:
                open_(source)
            assert source in str(caught.value).replace("\\\\", "\\")


def test_references_to_foreign_code_are_dropped(tmp_path, tokens):
    """No checkpoint, stock ticket, pruned or healed model carries the code that a folder names."""
    folder = tmp_path / "attackers"
    tiny_model("gpt2").save_pretrained(folder)
    evil = {"auto_map": {"AutoConfig": "attacker/repo--evil.EvilConfig"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(evil))
    change(folder / "config.json", **evil)
    start = {"weights": str(folder), "config": {}}
    rounds.train(tiny(tokens, tmp_path / "run", model=start, train={"rounds": 1}), quiet=True)
    parent = open_parent(str(folder), "cpu", ["blocks.n_ffn=4", "blocks.shared_first=0"])
    widths = widths_of_ratio(parent.block_map, "attn=4/4,ffn=2/4")
    blueprint = generator.for_deployment(parent.block_map, widths, seed=0)
    deploy.save_ticket(parent, blueprint, tmp_path / "ticket")
    write(parent, tmp_path / "pruned", PruneRequest(method="magnitude", ratio="0.5"), quiet=True)
    forged = shutil.copytree(tmp_path / "ticket", tmp_path / "forged")  # with hashes that agree
    change(forged / "config.json", **evil)
    (forged / "modeling_ticket.py").write_text("# attacker/\n")
    (forged / "ticket.json").unlink()
    deploy.seal(forged, json.loads((tmp_path / "ticket/ticket.json").read_text()))
    short = {"out": tmp_path / "healed", "data": tokens, "tokens": 64, "teacher": "none"}
    heal(HealRequest(ticket=forged, **short), ["data.seq_len=16", "run.device=cpu"], quiet=True)
    for made in ("run", "ticket", "pruned", "healed"):
        found = [p for p in (tmp_path / made).rglob("*") if p.name.endswith((".py", "config.json"))]
        assert found
        assert not any("attacker/" in path.read_text() for path in found)


def test_a_librarys_error_is_one_line_and_ends():
    """For a model type that it does not know transformers lists all that it knows."""
    words = ", ".join(f"model{i}" for i in range(2000))
    said = huggingface.one_line(OSError(f"unknown model;\n  known are {words}"))
    assert said.startswith("OSError: unknown model; known are model0, model1, ")
    assert said.endswith(" ...")
    assert len(said) < 450
