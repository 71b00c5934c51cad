"""Wire formats against numpy, a loop over groups, and what Adam needs."""

from functools import lru_cache

import numpy as np
import pytest
import torch

from twistlm.transport import wire

KINDS = ("fp32", "bf16", "int8", "int4")
CODES = (*KINDS, "log8")
SIZES = (0, 1, 256, 999)


def values(n: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.normal(size=n) * 10.0 ** rng.integers(-9, 3, n)).astype("<f4"))


def reference(kind: str, x: np.ndarray) -> np.ndarray:
    """What must come out, in plain numpy."""
    if kind == "fp32":
        return x
    if kind == "bf16":  # the upper half of the bits, rounded to even
        bits = x.view("<u4").astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        return bits.astype("<u4").view("<f4")
    out, size = np.zeros_like(x), 64 if kind == "int4" else 256
    for first in range(0, len(x), size):
        group = x[first : first + size]
        if kind == "log8":  # 255 steps in 24 octaves below the largest
            top = float(np.abs(group).max()) or 1e-300
            y = np.maximum(group.astype(np.float64), top * 2.0**-24)
            steps = np.floor((np.log2(y / top) + 24) * 255 / 24 + 0.5)
            out[first : first + 256] = top * 2 ** (steps * 24 / 255 - 24)
            continue
        scale = np.float32(np.abs(group).max() / np.float32(7 if kind == "int4" else 127))
        out[first : first + size] = np.rint(group / scale) * scale if scale else 0
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_a_round_trip_is_the_reference_bit_for_bit(kind, n):
    x = values(n)
    payload = wire.encode(kind, x)
    assert payload.dtype == torch.uint8
    assert payload.numel() == wire.n_bytes(kind, n)
    back = wire.decode(kind, payload, (n,))
    assert back.dtype == torch.float32
    assert np.array_equal(back.numpy(), reference(kind, x.numpy()))
    assert torch.equal(payload, wire.encode(kind, x))


@pytest.mark.parametrize("n", SIZES)
def test_a_logarithm_in_8_bits_keeps_what_is_small(n):
    """Against float64: within 3.4%, and what is too small is raised to the last octave."""
    x = values(n).square()
    x[::7] = 0
    back = wire.decode("log8", wire.encode("log8", x), (n,)).numpy()
    np.testing.assert_allclose(back, reference("log8", x.numpy()), rtol=1e-5, atol=0)
    near = x.numpy() > 2.0**-24 * np.abs(x.numpy()).max(initial=0)
    np.testing.assert_allclose(back[near], x.numpy()[near], rtol=0.034)


def test_bytes_by_hand():
    assert [wire.n_bytes(kind, 1000) for kind in KINDS] == [4000, 2000, 1016, 568]  # 4, 16 scales
    assert [wire.n_bytes(kind, 3) for kind in KINDS] == [16, 8, 8, 8]  # whole multiples of 8
    assert wire.n_bytes("fp32", 10, torch.float64) == 80
    assert wire.down_bytes("int8", (3, 1000)) == 2000 + 1016 + 1016
    assert wire.up_bytes("int4", (3, 1000)) == 568 + 568 + 1016


def test_zeros_stay_zero_what_is_not_finite_stays_seen_and_another_size_is_refused():
    for kind in CODES:
        assert not wire.decode(kind, wire.encode(kind, torch.zeros(300)), (300,)).any()
    for kind in KINDS:  # Adam's moments before the first step, and an m that has lost its v
        for m in (0.0, 0.5):
            buffer = torch.tensor([[0.0], [m], [0.0]]).repeat(1, 300)
            got = wire.read_down(kind, wire.down(kind, buffer), (3, 300))
            torch.testing.assert_close(got, buffer)
    for kind in CODES:
        for bad in (float("nan"), -float("inf")):
            x = values(600)
            x[300] = bad
            back = wire.decode(kind, wire.encode(kind, x), (600,))
            assert not back[300].isfinite()
            assert back[:256].isfinite().all()
        with pytest.raises(ValueError, match=f"{kind} payload of 900 values"):
            wire.decode(kind, wire.encode(kind, values(1000)), (900,))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_goes_down_and_comes_back(kind, rows):
    """Weights go down in bf16, their change comes up; moments are rounded."""
    sent = torch.stack([values(999, seed) for seed in range(rows)])
    if rows == 3:
        sent[2] = sent[2].square()
    shape = (rows, 999)
    payload = wire.down(kind, sent)
    assert payload.numel() == wire.down_bytes(kind, shape)
    got = wire.read_down(kind, payload, shape)
    rounded = reference("fp32" if kind == "fp32" else "bf16", sent[0].numpy())
    assert np.array_equal(got[0].numpy(), rounded)
    trained = got * 1.01 + 1e-3
    payload = wire.up(kind, trained, got[0])
    assert payload.numel() == wire.up_bytes(kind, shape)
    back = wire.read_up(kind, payload, shape, sent[0])
    if kind == "fp32":
        assert torch.equal(back, trained)
        return
    change = reference(kind, (trained[0] - got[0]).numpy())
    assert np.array_equal(back[0].numpy(), sent[0].numpy() + change)
    for mine, of in ((got, sent), (back, trained)) if rows == 3 else ():
        m, v = of[1].numpy(), of[2].numpy()
        if kind.startswith("int"):  # m in steps of the largest share of sqrt(v) in its group
            root = np.sqrt(reference("log8", v))
            m, v = reference(kind, m / root) * root, reference("log8", v)
        else:
            m, v = reference(kind, m), reference(kind, v)
        close = 1e-5 if kind.startswith("int") else 0
        np.testing.assert_allclose(mine[1], m, rtol=close)
        np.testing.assert_allclose(mine[2], v, rtol=close)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.chaos)]
)
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize(("kind", "n"), [("int8", 1024), ("int8", 100_003), ("int4", 100_003)])
def test_fused_kernels_write_the_same_bytes(backend, kind, n, monkeypatch):
    """A GPU's path, compiled for the CPU; whole groups, and a last one that is not full."""
    m, v = values(n, 1), values(n, 2).square()
    sent = torch.stack([values(n), m, v])
    trained = sent + 1e-3 * sent.roll(1, dims=1).abs()

    def both_ways():
        down, up = wire.down(kind, sent), wire.up(kind, trained, sent[0])
        shape = (3, n)
        back = wire.read_down(kind, down, shape), wire.read_up(kind, up, shape, sent[0])
        return down, up, *back

    torch._dynamo.reset()  # each size is compiled for itself, not for any size after the first
    plain = both_ways()
    compiled = []
    monkeypatch.setattr(wire, "_fused", lambda f, near: compiled.append(f) or fast(f))
    fast = lru_cache(lambda f: torch.compile(f, backend=backend))
    for mine, its in zip(plain, both_ways(), strict=True):
        assert torch.equal(mine, its)
    assert len(set(compiled)) == 4
