"""Both ways to the same gradient, for every family."""

import pytest
import torch
from families_table import TABLE, tiny_model
from torch._dynamo.utils import counters

from twistlm.compute import gradient
from twistlm.compute.attention import causal_
from twistlm.compute.loss import chunked_loss, loss_for, next_token_loss


@pytest.mark.parametrize("name", TABLE)
def test_direct_equals_autograd(name, monkeypatch):
    """The head straight into the buffer, several chunks, a share of the loss."""
    monkeypatch.setattr("twistlm.compute.loss.CHUNK", 5)  # 3 x 11 tokens are seven chunks
    model = tiny_model(name).double().eval()
    assert loss_for(model) is chunked_loss
    model.requires_grad_()
    ids = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(1))
    params = dict(model.named_parameters())
    value = next_token_loss(model, ids)
    expected = torch.autograd.grad(0.25 * value, list(params.values()))
    causal_(model)  # no mask from here on
    assert model.config._attn_implementation == "causal"

    def plain(model, grads):
        return gradient.plain(model, chunked_loss, grads)

    def hooked(model, grads):
        return gradient.hooked(model, chunked_loss, grads)

    # no logits are few enough for torch's own loss, or all are; the hooks of the last one stay
    ways = ((0, plain), (1 << 24, plain), (1 << 24, gradient.direct), (1 << 24, hooked))
    for small, make in ways:
        monkeypatch.setattr("twistlm.compute.loss.SMALL", small)
        grads = {n: torch.full_like(p, torch.nan) for n, p in params.items()}  # all is overwritten
        run = make(model, grads)
        for many in (ids.split(3), ids.split(1)):  # nothing is left over from the call before
            found = [run(each, 0.25 / len(many), None, i > 0) for i, each in enumerate(many)]
            torch.testing.assert_close(torch.stack(found).mean(), value.detach())
            for (param, got), want in zip(grads.items(), expected, strict=True):
                torch.testing.assert_close(got, want, msg=lambda text, at=param: f"{at}: {text}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_recomputed_layers_keep_less_and_give_the_same_gradient(name, compile, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, backend="aot_eager"))
    ids = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(1))
    found = {}
    for recompute in (False, True):
        model, kept = tiny_model(name).double().eval().requires_grad_(), []
        grads = {n: torch.full_like(p, torch.nan) for n, p in model.named_parameters()}
        run = gradient.gradient_of(model, chunked_loss, grads, compile, None, recompute)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(t, kept=kept, weights=weights):
            kept.append(t.numel() * (t.untyped_storage().data_ptr() not in weights))
            return t

        counters.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = run(ids, 0.25, None, False)
        assert (counters["stats"]["unique_graphs"] > 0) == compile  # in neither case passed by
        found[recompute] = loss, grads, sum(kept)
    (loss, grads, kept), (its_loss, its_grads, its_kept) = found.values()
    torch.testing.assert_close(its_loss, loss)
    torch.testing.assert_close(its_grads, grads)
    assert its_kept < 0.6 * kept
