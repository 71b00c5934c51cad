"""One-shot repair: closed forms against least squares in float64 over all calibration tokens."""

import pytest
import torch
from families_table import TABLE, VOCAB, central_of, fed, tiny_model
from torch import Tensor

from twistlm.baselines import repair
from twistlm.config import BlocksConfig, Config, TrainConfig
from twistlm.model import families, huggingface
from twistlm.tickets import deploy
from twistlm.tickets.parent import Parent

IDS = torch.randint(VOCAB, (6, 20), generator=torch.Generator().manual_seed(3))
FAMILIES = [("gpt2", "head"), ("llama", "head"), ("llama-gqa", "query"), ("llama-biases", "head")]


def parent_of(name: str, attn_by: str = "auto") -> Parent:
    """A tiny model in float64 that cuts layers 1 and 2."""
    model = tiny_model(name).double()
    blocks = BlocksConfig(n_ffn=4, attn_by=attn_by, shared_first=1, shared_last=0)
    block_map = families.partition(model, blocks)
    cfg = Config(blocks=blocks, train=TrainConfig(scale="sqrt"))
    return Parent(name, cfg, model, block_map, central_of(model, block_map), None, None)


def two_blocks(parent: Parent) -> dict[str, tuple[int, ...]]:
    return {g.name: (0, g.n_blocks - 1) for g in parent.block_map.groups}


def weight_and_bias(model, name: str, module: str) -> tuple[Tensor, Tensor | None]:
    """[out, in], [out]."""
    found = model.get_submodule(module)
    weight, bias = found.weight.detach(), getattr(found, "bias", None)
    return weight.T if TABLE[name].transposed else weight, None if bias is None else bias.detach()


@pytest.mark.parametrize("kind", ["attn", "ffn"])
@pytest.mark.parametrize(("name", "attn_by"), FAMILIES)
def test_against_least_squares_over_all_tokens(name, attn_by, kind):
    parent, row = parent_of(name, attn_by), TABLE[name]
    out = f"{row.layers}.1.{row.attn_out if kind == 'attn' else row.ffn_out}"
    (x,) = fed(parent.template, out, IDS)
    weight, bias = weight_and_bias(parent.template, name, out)
    group = next(g for g in parent.block_map.groups if g.layer == 1 and g.kind == kind)
    owner = [row.block_of_input(kind, attn_by, i, 4) for i in range(weight.shape[1])]
    kept = [[i for i, b in enumerate(owner) if b == mine] for mine in (0, group.n_blocks - 1)]
    at = sorted(kept[0] + kept[1])  # the order of the ticket's inputs
    scale = (group.n_blocks / 2) ** 0.5
    start, zero = scale * weight[:, at], torch.zeros(len(weight), dtype=torch.float64)
    target = x @ weight.T + (zero if bias is None else bias)

    def error(w: Tensor, b: Tensor | None) -> float:
        return float((x[:, at] @ w.T + (zero if b is None else b) - target).square().sum())

    errors = {"none": error(start, None if bias is None else scale * bias)}
    for how in repair.METHODS:
        if how == "bias" and bias is None:
            continue
        made = repair.repair_parent(parent, two_blocks(parent), how, IDS)
        w, b = weight_and_bias(deploy.cut_ticket(made, two_blocks(parent)), name, out)
        errors[how] = error(w, b)
        if bias is not None:  # the best constant
            torch.testing.assert_close(b, (target - x[:, at] @ w.T).mean(0))
        if how == "bias":
            torch.testing.assert_close(w, start)
        elif how == "rescale":
            # one unknown per kept block over [tokens * out] equations, one per output for the bias
            columns = [(x[:, block] @ weight[:, block].T).flatten() for block in kept]
            design, goal = torch.stack(columns, 1), target.flatten()
            if bias is not None:
                eye = torch.eye(len(weight), dtype=torch.float64).repeat(len(x), 1)
                design = torch.cat([design, eye], 1)
            best = torch.linalg.lstsq(design, goal).solution
            for block, factor in zip(kept, best, strict=False):
                mine = [at.index(i) for i in block]
                torch.testing.assert_close(w[:, mine], factor * weight[:, block])
        else:
            # the damping is one more row per input that pulls towards the ticket as it was
            mean_x = x.mean(0) if bias is not None else torch.zeros_like(x[0])
            centred = (x - mean_x)[:, at]
            damp = repair.DAMP * centred.square().mean()
            pull = (damp * len(x)).sqrt() * torch.eye(len(at), dtype=torch.float64)
            design = torch.cat([centred, pull])
            goal = torch.cat([(x - mean_x) @ weight.T, pull @ start.T])
            best = torch.linalg.lstsq(design, goal).solution.T
            torch.testing.assert_close(w, best, rtol=1e-6, atol=1e-8)
    assert errors["lstsq"] < errors["rescale"] < errors.get("bias", errors["none"])
    assert max(errors.values()) == errors["none"]


@pytest.mark.parametrize("how", repair.METHODS)
def test_later_layers_are_fitted_to_repaired_ones(how):
    """Layer 2 is fitted in a model whose layer 1 is the repaired ticket's, layer 2 whole."""
    parent = parent_of("gpt2")
    made = repair.repair_parent(parent, two_blocks(parent), how, IDS)
    # the repaired layer 1 inside the whole parent, by hand: zeros where blocks are gone
    half = huggingface.clone_structure(parent.template)
    params = {n: p.detach().clone() for n, p in parent.template.named_parameters()}
    for n, value in made.central.layout.views(made.central.weights).items():
        if ".h.1." in n:
            params[n] = value
    huggingface.bind_(half, params)
    (x,) = fed(half, "transformer.h.2.mlp.c_proj", IDS)
    old = parent.template.get_submodule("transformer.h.2.mlp.c_proj")
    new = deploy.cut_ticket(made, two_blocks(parent)).get_submodule("transformer.h.2.mlp.c_proj")
    at = [*range(12), *range(36, 48)]
    target, ours = x @ old.weight + old.bias, x[:, at] @ new.weight + new.bias
    # the best constant leaves no mean error: only where x are the very inputs it was fitted to
    torch.testing.assert_close(ours.mean(0), target.mean(0))


def test_what_is_whole_stays_and_so_does_the_parent():
    parent = parent_of("gpt2")
    before = parent.central.weights.clone()
    full = parent.block_map.full()
    some = full | {parent.block_map.groups[0].name: (1,)}
    made = repair.repair_parent(parent, some, "lstsq", IDS)
    assert torch.equal(parent.central.weights, before)
    assert made.scale == "none"
    changed = {
        name
        for name, value in made.central.layout.views(made.central.weights).items()
        if not torch.equal(value, parent.central.layout.views(before)[name])
    }
    assert changed == set(parent.block_map.groups[0].out)


def test_inputs_that_are_dead_or_not_finite():
    """A block whose neurons never fire leaves every normal matrix singular; NaN is refused."""
    parent = parent_of("llama")
    views = parent.central.layout.views(parent.central.weights)
    views["model.layers.1.mlp.up_proj.weight"][:12] = 0
    for how in ("rescale", "lstsq"):
        made = repair.repair_parent(parent, two_blocks(parent), how, IDS)
        assert made.central.weights.isfinite().all()
    parent.central.weights.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"feeds into .*o_proj.weight is not finite"):
        repair.repair_parent(parent, two_blocks(parent), "lstsq", IDS)
