"""Results are read where they lie, and refused when they are not what they must be."""

import math

import pytest
import torch
from conftest import tiny

from twistlm.transport.protocol import (
    Piece,
    RejectedResult,
    checksum,
    measured,
    read_result,
    reason_to_reject,
)

SENT = torch.ones(3, 5000)
CFG = tiny("x", "y")


def read(result: torch.Tensor, *, announced: torch.Tensor | None = None, loss_sum: float = 2.0):
    """What becomes of a result in one piece, whose checksum is that of `announced`."""
    up = result.reshape(-1).view(torch.uint8)
    told = checksum(up if announced is None else announced.view(-1).view(torch.uint8))
    found = read_result("fp32", Piece(up.numpy(), told), SENT.shape, SENT[0])
    judge(found, SENT, loss_sum)
    return found


def judge(result: torch.Tensor, sent: torch.Tensor, loss_sum: float, n: int = 1) -> None:
    """By the norms of n pieces."""
    pairs = zip(result.chunk(n, 1), sent[0].chunk(n), strict=True)
    why = reason_to_reject(CFG.train, [measured(*pair) for pair in pairs], sent.shape[1], loss_sum)
    if why:
        raise RejectedResult(why)


def test_a_sound_result_is_read_where_it_lies():
    result = SENT + 1e-4
    found = read(result)
    assert torch.equal(found, result)
    assert found.data_ptr() == result.data_ptr()


NAN, MOMENT, NEGATIVE = SENT.clone(), SENT.clone(), SENT.clone()
NAN[0, 7], MOMENT[1, 8], NEGATIVE[2, 9] = math.nan, math.inf, -1e-9


@pytest.mark.parametrize(
    ("word", "result", "more"),
    [
        ("NaN or Inf", NAN, {}),
        ("NaN or Inf", MOMENT, {}),
        ("AdamW", SENT * 1e6, {}),
        ("negative second moment", NEGATIVE, {}),
        ("its loss is nan", SENT + 1e-4, {"loss_sum": math.nan}),
        ("its loss is 3000001", SENT + 1e-4, {"loss_sum": 3e6 + 1}),  # 1e6 nats in each of 3 steps
        ("a wrong checksum", SENT + 1e-4, {"announced": SENT + 2e-4}),
        ("59992 bytes instead of 60000", (SENT + 1e-4).view(-1)[:-2], {}),
    ],
)
def test_what_is_found_wrong(word, result, more):
    with pytest.raises(RejectedResult, match=word):
        read(result, **more)


@pytest.mark.parametrize("n", [1, 3])
def test_as_far_as_adamw_can_move_and_no_farther(n):
    """By hand: 3 steps of 0.01, each 2 sqrt(0.1 / 0.05) and twice the decay of 0.1 on ones.

    One piece that has moved too far for itself is no reason: the norm is that of all of them.
    """
    sent = torch.ones(1, 300_000)  # in two chunks
    farthest = 3 * 0.01 * (2 * math.sqrt(2) + 2 * 0.1)
    judge(sent + 0.999 * farthest, sent, 2.0, n)
    with pytest.raises(RejectedResult, match=r"49\.8 is the most"):
        judge(sent + 1.001 * farthest, sent, 2.0, n)
    moved = sent.clone()
    moved[:, :100_000] += 1.7 * farthest
    judge(moved, sent, 2.0, n)


def test_a_checksum_changes_with_every_bit():
    bits = torch.arange(1200, dtype=torch.int16).view(torch.uint8)
    told = checksum(bits)
    for at in (0, 511, 512, 2399):
        bits[at] ^= 4
        assert checksum(bits) != told
        bits[at] ^= 4
    assert checksum(bits) == told
    assert checksum(bits[:-8]) != told
