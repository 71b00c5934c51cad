"""The Triton kernels against torch, on a GPU or in Triton's own interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TWINS = """
import random
import torch
import torch.nn.functional as F
from families_table import cut, tiny_model
from twistlm.compute import loss
from twistlm.model import huggingface, kernels, layout

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
assert kernels.usable(torch.zeros(1))
generator = torch.Generator(torch.get_default_device()).manual_seed(0)

# rows of 101 columns in a buffer of 128, gradient of the mean over 9 tokens
logits, targets = torch.randn(7, 128, generator=generator), torch.tensor([0, 100, 3, 5, 5, 64, 99])
teacher, share = torch.randn(7, 128, generator=generator), 0.7

def compare(call, predict=None):
    exact = logits[:, :101].double().requires_grad_()
    mine = exact.log_softmax(-1)
    losses = F.nll_loss(mine, targets, reduction="none")
    if predict is not None:
        log_p = predict(exact).log_softmax(-1)
        losses = (1 - share) * losses + share * (log_p.exp() * (log_p - mine)).sum(-1)
    (losses.sum() / 9).backward()
    got = logits.clone()
    torch.testing.assert_close(call(got), losses.detach().float())
    torch.testing.assert_close(got[:, :101], exact.grad.float(), rtol=1e-5, atol=1e-7)
    assert (got[:, 101:] == 0).all()

compare(lambda got: kernels.softmax_(got, targets, 101, 9, True))
kept = logits.clone()
kernels.softmax_(kept, targets, 101, 9, False)
assert torch.equal(kept, logits)
compare(
    lambda got: kernels.softmax_(got, targets, 101, 9, True, teacher, share),
    lambda exact: teacher[:, :101].double(),
)
# a teacher of whom k tokens and the rest as one are known, also where the k are all there are
for k in (1, 6, 101):
    log_probs, ids = teacher[:, :101].log_softmax(-1).topk(k)
    log_probs[0] += 0.01 * (k == 6)  # as if rounding had made more than 1 of them
    log_probs[0, :k - 1] -= log_probs[0, :k - 1].logsumexp(-1) * (k == 6)
    prediction = loss.topk_prediction(ids, log_probs.half(), share)
    compare(
        lambda got: loss._losses_(got, prediction, slice(None), targets, 101, 9, True),
        lambda exact: prediction.logits(slice(None), exact),
    )

# gather and mean: every row of three workers' buffers, blocks that one, several or nobody holds
for name in ("gpt2", "llama-gqa"):
    model = tiny_model(name)
    block_map = cut(model, n_ffn=4, first=1)
    where = layout.layout(block_map, huggingface.shapes(model))
    segments = layout.cut_segments(where, block_map, torch.get_default_device())
    rng = random.Random(1)
    blueprints = [
        {
            g.name: tuple(sorted(rng.sample(range(g.n_blocks), rng.randint(1, g.n_blocks))))
            for g in block_map.groups
        }
        for _ in range(3)
    ]
    whole = torch.randn(3, segments.full.n_params, generator=generator)
    table = layout.holders(segments, blueprints)
    assert (table[:, 2] == 0).any() or name != "gpt2"  # a block that nobody holds is in the test
    results = {}
    for fast in (True, False):
        layout._fast = lambda buffer, fast=fast: fast
        central, total = whole.clone(), torch.full_like(whole, torch.nan)
        for worker, blueprint in enumerate(blueprints):
            index = segments.index(blueprint)
            n = segments.full.n_shared + index.numel() * segments.grain
            part, low = torch.empty(3, n), torch.empty(n, dtype=torch.bfloat16)
            layout.gather_(part, whole, segments, index, low)
            results[fast, worker] = (part.clone(), low)
            layout.mean_(central, total, part * (worker + 2), segments, index, table, worker)
        results[fast, "mean"] = (central,)
    for key in (0, 1, 2, "mean"):
        for mine, twin in zip(results[True, key], results[False, key], strict=True):
            # the interpreter cuts float32 down to bf16 where a GPU rounds, and a GPU adds up its
            # products with one rounding: a unit or two in the last place
            within = 2**-7 if mine.dtype == torch.bfloat16 else 2**-22 * mine.is_cuda
            torch.testing.assert_close(mine, twin, rtol=within, atol=0)
    assert not torch.equal(results[True, "mean"][0], whole)
"""


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from twistlm.model import kernels

types = {"logits": "*bf16", "teacher": "*bf16", "ids": "*i64", "log_probs": "*fp16",
         "mine": "*fp32", "chosen": "*fp32", "targets": "*i64", "losses": "*fp32",
         "scale": "fp32", "share": "fp32", "LEAST": "fp32"}
for kernel, constants in (
    (kernels._softmax, {"TAUGHT": True, "WANTED": True, "BLOCK": 2048}),
    (kernels._softmax, {"TAUGHT": False, "WANTED": True, "BLOCK": 2048}),
    (kernels._distil_topk, {"TOP": 64, "BLOCK": 2048}),
):
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    assert "ptx" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
"""


@pytest.mark.runtime
@pytest.mark.parametrize("script", [TWINS, COMPILED], ids=["twins", "compiled"])
def test_kernels_equal_their_twins_and_compile_for_a_gpu(script):
    """The interpreter lets pass what the compiler refuses: a variable of two shapes."""
    pytest.importorskip("triton")
    here = Path(__file__).parents[1]
    # Triton 3.6 interprets no loop with NumPy 2.4 (torch 2.11 brings the first): a GPU needs no
    # interpreter
    interpret = script is TWINS and not torch.cuda.is_available()
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    env |= {"TRITON_INTERPRET": str(int(interpret))}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
