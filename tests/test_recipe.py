"""What shrink chooses, against hand counts of the shapes that people have."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from twistlm import config, recipe
from twistlm.config import override
from twistlm.model import huggingface
from twistlm.tickets.requests import parse_budgets
from twistlm.training import plan

GQA = ("num_attention_heads", "num_key_value_heads")
NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", *GQA)


def llama_like(kind: str, *sizes: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return kind, dict(zip(NAMES, sizes, strict=True)) | {"tie_word_embeddings": True} | more


MODELS = {
    "gpt2": ("gpt2", {}),
    "smollm2": llama_like("llama", 49152, 576, 1536, 30, 9, 3),
    "qwen2": llama_like("qwen2", 151936, 896, 4864, 24, 14, 2),
    "llama-1b": llama_like("llama", 128256, 2048, 8192, 16, 32, 8, head_dim=64),
}
# setting, by, FFN blocks; parameters of all, of an attention and of an FFN block in all layers;
# a size, the K that fit into it (max-min share), and what the family's config calls them
QWEN_QUERY = 24 * (2 * 896 * 128 + 128)  # one query head of each of two kv heads: q, its bias, o
CHOSEN: dict[str, tuple] = {
    "gpt2": ("ffn", "auto", 12, 124_439_808, 0, 12 * (2 * 768 * 256 + 256), "100M", 0, 6,
             {"n_inner": 1536}),
    "smollm2": ("both", "auto", 12, 134_515_008, 30 * 576 * 512, 30 * 3 * 576 * 128, "107M", 2, 9,
                {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 1152,
                 "head_dim": 64}),
    "qwen2": ("both", "query", 19, 494_032_768, QWEN_QUERY, 24 * 3 * 896 * 256, "346M", 4, 11,
              {"num_attention_heads": 8, "intermediate_size": 2816, "head_dim": 64}),
    "llama-1b": ("both", "auto", 16, 1_235_814_400, 16 * 2048 * 640, 16 * 3 * 2048 * 512, "700M",
                 4, 7, {"num_attention_heads": 16, "num_key_value_heads": 4,
                        "intermediate_size": 3584}),
}  # fmt: skip


@cache
def outline(name: str) -> PreTrainedModel:
    kind, shape = MODELS[name]
    return huggingface.on_meta(AutoConfig.for_model(kind, **shape))


@cache
def cut(name: str, *overrides: str) -> recipe.Cut:
    return recipe.cut_for(outline(name), overrides)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_and_sizes_by_hand(name):
    setting, by, n_ffn, n_all, attn, ffn, asked, k_attn, k_ffn, stock = CHOSEN[name]
    model = outline(name)
    blocks = cut(name).blocks
    assert (blocks.setting, blocks.attn_by, blocks.n_ffn) == (setting, by, n_ffn)
    assert (blocks.shared_first, blocks.shared_last) == (0, 0)
    (size,) = recipe.sizes_for(model, cut(name), parse_budgets(None, [("params", asked)]))
    n_attn = {"smollm2": 3, "qwen2": 7, "llama-1b": 8}.get(name, 0)
    by_hand = n_all - (n_attn - k_attn) * attn - (n_ffn - k_ffn) * ffn
    assert size.n_params == by_hand <= float(asked[:-1]) * 1e6
    assert size.ks == ({"attn": k_attn} if n_attn else {}) | {"ffn": k_ffn}
    # a plain model of the family with these widths has as many parameters
    kind, shape = MODELS[name]
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape | stock))
    assert sum(param.numel() for param in plain.parameters()) == by_hand


@pytest.mark.parametrize(
    ("n_neurons", "n_blocks"),
    [(1536, 12), (3072, 12), (4864, 19), (8192, 16), (8960, 14), (11008, 43), (14336, 14),
     (128, 8), (96, 12), (47, 47), (22, 11), (6, 3), (1009, 1)],
)  # fmt: skip
def test_ffn_blocks_are_whole_units_and_about_a_dozen(n_neurons, n_blocks):
    assert recipe.blocks_in(n_neurons) == n_blocks


def chosen(name: str = "smollm2", asked: tuple[str, ...] = ("107M", "80M"), **given: Any):
    model, made = outline(name), cut(name, *given.get("overrides", ()))
    sizes = recipe.sizes_for(model, made, parse_budgets(None, [("params", a) for a in asked]))
    usual = {"out": "o", "n_text": 10**8, "n_tokens": 5 * 10**7}
    return recipe.config_for(model, "w", made, sizes, **usual | given)


def test_masks_hold_the_whole_model_and_every_size():
    blocks = chosen().blocks
    assert (blocks.k_attn, blocks.k_ffn, blocks.masks) == ((3,), (12,), "sequence")
    assert (blocks.sort, blocks.nested) == (True, 1.0)  # only nested tickets are cut
    assert blocks.mask_attn == (3, 3, 2, 2, 2, 2, 2, 2)
    assert blocks.mask_ffn == (12, 12, 9, 9, 9, 5, 5, 5)
    # six turns for four sizes: the smaller ones get the extra turns
    own = {"overrides": ["blocks.setting=ffn"]}  # 6.6M parameters for a K
    sizes = ("122M", "108M", "95M", "82M")
    assert chosen(asked=sizes, **own).blocks.mask_ffn == (12, 12, 10, 8, 6, 6, 4, 4)
    sizes = tuple(f"{n}M" for n in (128, 122, 115, 108, 102, 95, 82))
    assert chosen(asked=sizes, **own).blocks.mask_ffn == (12, 12, 11, 10, 9, 8, 7, 6, 4)
    only = chosen("gpt2", ("100M",)).blocks
    assert (only.mask_attn, only.mask_ffn) == ((), (12, 12) + 6 * (6,))


def test_rounds_rate_and_teacher_follow_from_tokens_and_size():
    t = chosen().train
    assert (t.n_workers, t.interval, t.batch, t.accumulate) == (1, 10, 32, 1)
    assert t.rounds == 5 * 10**7 // (10 * 32 * 1024) == 152
    assert (t.lr, t.warmup, t.teacher, t.distil) == (1e-3, 100, "start", 0.9)
    # 300 steps of 8 x 1,024 tokens, not of 16 x 1,024
    assert chosen(n_tokens=4_000_000).train.batch == 8
    few = chosen(n_tokens=1000).train
    assert (few.batch, few.rounds, few.warmup) == (4, 1, 1)
    assert chosen(n_text=0, n_tokens=0).train.teacher == "start"  # both unknown yet
    assert chosen(n_text=10**7).train.teacher == "cache"  # read five times
    assert chosen(n_text=4 * 10**7).train.teacher == "start"  # a quarter of it twice
    sizes = {"smollm2": "107M", "qwen2": "346M", "llama-1b": "700M"}
    rates = [chosen(name, (size,)).train.lr for name, size in sizes.items()]
    assert rates == [1e-3, 1e-4, 1e-4]  # measured, measured, no model as large was tried
    takes = {n: plan.make(override(chosen(), [f"train.accumulate={n}"])) for n in (4, 8)}
    t = chosen(room=sum(each["process_bytes"] for each in takes.values()) / 2).train
    assert (t.batch, t.accumulate) == (32, 8)  # the same steps in smaller pieces
    own = chosen(room=0, overrides=["train.batch=12"]).train
    assert (own.batch, own.accumulate) == (12, 12)
    # as many tokens whatever the batch, the interval and the sequences' length
    own = chosen(n_tokens=4_000_000, overrides=["train.batch=8", "train.interval=5"])
    assert own.train.rounds == 4_000_000 // (5 * 8 * 1024)
    own = chosen(n_tokens=4_000_000, overrides=["train.batch=8", "data.seq_len=256"])
    assert own.train.rounds == 4_000_000 // (10 * 8 * 256)
    own = chosen(overrides=["train.rounds=7"]).train
    assert (own.rounds, own.warmup) == (7, 7)
    own = chosen(overrides=["train.lr=1e-4", "blocks.attn_by=query"])
    assert (own.train.lr, own.blocks.attn_by) == (1e-4, "query")


def test_the_file_is_the_config(tmp_path: Path):
    cfg = chosen("qwen2", ("346M",), overrides=["train.clip=inf"])
    (tmp_path / "train.toml").write_text(recipe.written(cfg, "chosen"))
    assert config.load(str(tmp_path / "train.toml")) == cfg
    assert huggingface.shapes(
        huggingface.on_meta(huggingface.planned_config(cfg.model))
    ) == huggingface.shapes(outline("qwen2"))


def test_a_size_of_memory_counts_the_cache():
    """Keys and values of 8,192 tokens in 30 layers, 64 numbers of a kv head, 4 bytes each."""
    budgets = parse_budgets("8k", [("memory", "700MB")])
    (size,) = recipe.sizes_for(outline("smollm2"), cut("smollm2"), budgets)
    n_cached = 2 * size.ks["attn"] * 64 * 30 * 8192
    one_more = 30 * 3 * 576 * 128
    takes = 4 * (size.n_params + n_cached)
    assert takes <= 700e6 < takes + 4 * one_more
