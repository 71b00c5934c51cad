"""Loading: random weights follow the seed, folders and GGUF files give back what was written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conftest import tiny
from families_table import TABLE, build, tiny_model

from twistlm.config import ModelConfig
from twistlm.model import generator, huggingface
from twistlm.model.blocks import widths_of_ratio
from twistlm.model.tokenizer import load_tokenizer
from twistlm.tickets import deploy
from twistlm.tickets.parent import open_parent
from twistlm.training import rounds


def write_gguf(path: Path, model) -> None:
    """A float32 llama GGUF by the format's rules: q and k rows interleaved as its rotary is."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, param in model.named_parameters():
        array = param.detach().numpy()
        if n := heads.get(name.split(".")[-2]):
            array = array.reshape(n, 2, -1, config.hidden_size).swapaxes(1, 2)
        array = np.ascontiguousarray(array).reshape(param.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    write_gguf(tmp_path / "tiny.gguf", llama)
    loaded = huggingface.load(ModelConfig(weights=f"gguf:{tmp_path}/tiny.gguf", type="llama"), 0)
    assert loaded.config.tie_word_embeddings == (noise == 0.02)
    if loaded.config.tie_word_embeddings:
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        llama.lm_head.weight = llama.model.embed_tokens.weight
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, llama(input_ids=ids).logits)
    assert all(p.dtype == torch.float32 for p in loaded.parameters())


def test_a_damaged_gguf_is_one_sentence(tmp_path, llama):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, llama)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"tiny\.gguf could not be read as GGUF"):
        huggingface.load(ModelConfig(weights=f"gguf:{path}", type="llama"), 0)


def test_random_weights_follow_the_seed():
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16}
    cfg = ModelConfig(type="gpt2", config=sizes)
    a, b, c = (huggingface.load(cfg, seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


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
    "a/b/c": "no such folder",
    "~/nothing": "no such folder",
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
    monkeypatch.setattr("twistlm.model.source.get_hf_file_metadata", lambda *a, **k: 1 / 0)
    for source, said in NAMES.items():
        for open_ in (huggingface.pretrained, load_tokenizer):
            with pytest.raises(ValueError, match=re.escape(said)) as caught:
                open_(source)
            assert source in str(caught.value).replace("\\\\", "\\")


def test_the_hub_is_asked_once_for_what_may_be_a_name(monkeypatch):
    asked = []

    def answer(url, **_):
        asked.append(url)
        raise OSError("no network")

    monkeypatch.setattr("twistlm.model.source.get_hf_file_metadata", answer)
    with pytest.raises(ValueError, match=r"model.weights = 'my/run' .*no such folder.*the hub"):
        huggingface.load(ModelConfig(weights="my/run", type="gpt2"), 0)
    with pytest.raises(ValueError, match=r"tokenizer myrun: there is no such folder here.*the hub"):
        load_tokenizer("myrun")
    assert [url.rsplit("/")[-1] for url in asked] == ["config.json", "tokenizer.json"]


def test_references_to_foreign_code_are_dropped(tmp_path, tokens):
    """Neither a checkpoint nor a stock ticket of a model carries the code that its folder names."""
    folder = tmp_path / "attackers"
    tiny_model("gpt2").save_pretrained(folder)
    evil = {"auto_map": {"AutoConfig": "attacker/repo--evil.EvilConfig"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(evil))
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | evil))
    start = {"weights": str(folder), "config": {}}
    rounds.train(tiny(tokens, tmp_path / "run", model=start, train={"rounds": 1}), quiet=True)
    parent = open_parent(str(folder), "cpu", ["blocks.n_ffn=4", "blocks.shared_first=0"])
    widths = widths_of_ratio(parent.block_map, "attn=4/4,ffn=2/4")
    blueprint = generator.for_deployment(parent.block_map, widths, seed=0)
    deploy.save_ticket(parent, blueprint, tmp_path / "ticket")
    for made in ("run", "ticket"):
        configs = list((tmp_path / made).rglob("*config.json"))
        assert configs
        assert not any("attacker/" in path.read_text() for path in configs)
