"""Loading: random weights follow the seed, folders and GGUF files give back what was written."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from families_table import tiny_model

from twistlm.config import ModelConfig
from twistlm.model import huggingface


def write_gguf(path: Path, model) -> None:
    """A float32 llama GGUF by the format's own rules: q and k rows interleaved for its rotary order."""
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
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, param in model.named_parameters():
        array = param.detach().numpy().astype(np.float32)
        stem = name.removesuffix(".weight")
        if stem in top:
            target = top[stem]
        else:
            _, _, layer, rest = stem.split(".", 3)
            target = f"blk.{layer}.{names[rest]}"
            if n := heads.get(rest.split(".")[-1]):
                rows, width = array.shape
                array = (
                    array.reshape(n, 2, rows // n // 2, width).swapaxes(1, 2).reshape(rows, width)
                )
        writer.add_tensor(f"{target}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def llama():
    """A grouped-query llama whose head_dim is hidden/heads, as GGUF's llama has it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def test_gguf_gives_back_the_logits(tmp_path, llama):
    write_gguf(tmp_path / "tiny.gguf", llama)
    loaded = huggingface.load(ModelConfig(weights=f"gguf:{tmp_path}/tiny.gguf", type="llama"), 0)
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, llama(input_ids=ids).logits)
    assert all(p.dtype == torch.float32 for p in loaded.parameters())


def test_a_damaged_or_missing_gguf_is_one_sentence(tmp_path, llama):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, llama)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"tiny\.gguf could not be read as GGUF"):
        huggingface.load(ModelConfig(weights=f"gguf:{path}", type="llama"), 0)
    with pytest.raises(ValueError, match="no installed package 'nowhere'"):
        huggingface.load(ModelConfig(weights="gguf:nowhere/x.gguf", type="llama"), 0)


def test_random_weights_follow_the_seed():
    cfg = ModelConfig(
        type="gpt2", config={"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16}
    )
    a, b, c = (huggingface.load(cfg, seed) for seed in (1, 1, 2))
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma3_text"])
def test_a_folder_loads_in_float32_whatever_it_was_saved_in(tmp_path, name):
    model = tiny_model(name).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    cfg = ModelConfig(weights=str(tmp_path), type=model.config.model_type)
    loaded = huggingface.load(cfg, 0)
    for (key, a), b in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float()), key


def test_a_folder_of_another_type_is_refused(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a qwen3, but model\.type = 'gpt2'"):
        huggingface.load(ModelConfig(weights=str(tmp_path), type="gpt2"), 0)


def test_no_such_folder_and_no_hub():
    with pytest.raises(ValueError, match=r"model\.weights = 'nobody/nothing' could not be loaded"):
        huggingface.load(ModelConfig(weights="nobody/nothing", type="gpt2"), 0)


def test_binding_keeps_ties_and_clones_share_nothing_but_weights():
    model = tiny_model("gpt2")
    clone = huggingface.clone_structure(model)
    assert clone.transformer.h[0] is not model.transformer.h[0]
    fresh = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    huggingface.bind_(clone, fresh)
    assert clone.lm_head.weight is clone.transformer.wte.weight
    assert clone.lm_head.weight.data_ptr() == fresh["transformer.wte.weight"].data_ptr()
    assert model.lm_head.weight.data_ptr() != fresh["transformer.wte.weight"].data_ptr()


@pytest.mark.parametrize("source", ["/no/such/folder", "./nothing", "runs/mistyped", "a/b/c"])
def test_a_mistyped_folder_is_not_looked_up_on_the_hub(source, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        huggingface.from_folder_or_hub(source)
