"""Triton kernels for GPUs; their torch twins are in `compute/loss.py` and `model/layout.py`."""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

TILE = 1024  # elements of a program
LEAST = 1e-30  # of the probability of all tokens that a teacher's cache does not name


def usable(tensor: Tensor) -> bool:
    return triton is not None and (tensor.is_cuda or triton.knobs.runtime.interpret)


def softmax_(
    logits: Tensor,
    targets: Tensor,
    vocab: int,
    n_tokens: float,
    wanted: bool,
    teacher: Tensor | None = None,
    share: float = 0.0,
) -> Tensor:
    """Each row's loss over its first `vocab` columns, `share` of it KL; see `loss._losses_`."""
    losses = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
    theirs = logits if teacher is None else teacher
    _softmax[(len(targets),)](
        logits, theirs, targets, losses, logits.stride(0), theirs.stride(0), vocab,
        logits.shape[1], 1 / n_tokens, float(share),
        TAUGHT=teacher is not None, WANTED=wanted, BLOCK=2048, num_warps=4,
    )  # fmt: skip
    return losses


def distil_topk_(
    logits: Tensor,
    ids: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    vocab: int,
    n_tokens: float,
    share: float,
) -> Tensor:
    """As `softmax_`, with KL to a teacher's k tokens [tokens, k] and the rest as one."""
    n, top = ids.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    mine, chosen = logits.gather(1, ids).float(), logits.gather(1, targets[:, None]).float()
    logits.scatter_(1, ids, -float("inf"))  # what is left of a row is the rest
    _distil_topk[(n,)](
        logits, ids, log_probs, mine, chosen, targets, losses, logits.stride(0), top, vocab,
        logits.shape[1], 1 / n_tokens, share, LEAST,
        TOP=triton.next_power_of_2(top), BLOCK=2048, num_warps=4,
    )  # fmt: skip
    logits.scatter_(1, ids, mine.to(logits.dtype))  # by now their gradient
    return losses


def take_(
    out: Tensor, full: Tensor, n_shared: int, index: Tensor, grain: int, low: Tensor | None
) -> None:
    """`out` [rows, n] = shared part and segments at `index` of `full`; `low` = row 0, rounded."""
    n_segments = out.shape[1] // grain
    _take[_grid(n_segments, grain)](
        out, full, out if low is None else low, index, n_segments, n_shared // grain,
        out.stride(0), full.stride(0),
        LOW=low is not None, ROWS=out.shape[0], GRAIN=grain, RUNS=max(1, TILE // grain),
    )  # fmt: skip


def mean_(
    central: Tensor,
    total: Tensor,
    part: Tensor,
    n_shared: int,
    grain: int,
    index: Tensor,
    block_of: Tensor,
    holders: Tensor,
    worker: int,
) -> None:
    """Add one worker's `part` to `total`, or finish the mean in `central`; see `layout.mean_`."""
    n_segments = part.shape[1] // grain
    _mean[_grid(n_segments, grain)](
        central, total, part, index, block_of, holders, worker, n_segments, n_shared // grain,
        central.stride(0), total.stride(0), part.stride(0),
        ROWS=part.shape[0], GRAIN=grain, RUNS=max(1, TILE // grain),
    )  # fmt: skip


def _grid(n_segments: int, grain: int) -> tuple[int]:
    return (triton.cdiv(n_segments, max(1, TILE // grain)),)


if triton is not None:

    @triton.jit
    def _softmax(
        logits, teacher, targets, losses, stride, teacher_stride, vocab, width, scale, share,
        TAUGHT: tl.constexpr, WANTED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        # one program per row: read once for max and sum (and <p, t - s>, p the teacher's
        # probabilities), then (from cache) once for the gradient
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        teacher += row * teacher_stride
        target = tl.load(targets + row)
        lanes = tl.arange(0, BLOCK)
        top = -float("inf")
        total = 0.0
        teacher_top = -float("inf")
        teacher_total = 0.0
        cross = 0.0  # sum of exp(t - teacher_top) (t - s)
        for start in range(0, vocab, BLOCK):
            at = start + lanes
            real = at < vocab
            x = tl.load(logits + at, mask=real, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
            if TAUGHT:
                t = tl.load(teacher + at, mask=real, other=-float("inf")).to(tl.float32)
                higher = tl.maximum(teacher_top, tl.max(t, 0))
                shrink = tl.exp(teacher_top - higher)
                weights = tl.exp(t - higher)
                teacher_total = teacher_total * shrink + tl.sum(weights, 0)
                cross = cross * shrink + tl.sum(tl.where(real, weights * (t - x), 0.0), 0)
                teacher_top = higher
        chosen = tl.load(logits + target).to(tl.float32)
        log_total = top + tl.log(total)
        loss = log_total - chosen
        if TAUGHT:
            kl = cross / teacher_total + log_total - teacher_top - tl.log(teacher_total)
            loss = (1.0 - share) * loss + share * kl
        tl.store(losses + row, loss)
        if WANTED:
            mine = scale / total
            for start in range(0, width, BLOCK):
                at = start + lanes
                x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
                grad = tl.exp(x - top) * mine
                if TAUGHT:
                    t = tl.load(teacher + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
                    grad -= tl.exp(t - teacher_top) * (share * scale / teacher_total)
                grad = tl.where(at == target, grad - scale * (1.0 - share), grad)
                tl.store(logits + at, grad.to(logits.dtype.element_ty), mask=at < width)

    @triton.jit
    def _distil_topk(
        logits, ids, log_probs, mine, chosen, targets, losses, stride, top, vocab, width, scale,
        share, LEAST, TOP: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        # one program per row: the rest's logits twice, the k tokens' once; s is the model's
        # softmax, p the teacher's probabilities
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        target = tl.load(targets + row)
        lanes = tl.arange(0, BLOCK)
        high = -1e30  # finite: a tile may hold none of the rest
        total = 0.0
        for start in range(0, vocab, BLOCK):
            at = start + lanes
            x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(high, tl.max(x, 0))
            total = total * tl.exp(high - higher) + tl.sum(tl.exp(x - higher), 0)
            high = higher
        spot = tl.arange(0, TOP)
        real = spot < top
        here = row * top + spot
        own = tl.load(mine + here, mask=real, other=-float("inf"))
        t = tl.load(log_probs + here, mask=real, other=-float("inf")).to(tl.float32)
        peak = tl.maximum(high, tl.max(own, 0))
        log_total = peak + tl.log(total * tl.exp(high - peak) + tl.sum(tl.exp(own - peak), 0))
        p = tl.exp(t)
        named = tl.sum(p, 0)
        left = tl.where(top < vocab, tl.maximum(1.0 - named, LEAST), 0.0)
        norm = named + left
        p = p / norm
        left = left / norm
        kl = tl.sum(tl.where(real, p * (t - tl.log(norm) - own + log_total), 0.0), 0)
        if top < vocab:
            kl += left * (tl.log(left) - high - tl.log(total) + log_total)
        plain = log_total - tl.load(chosen + row)
        tl.store(losses + row, (1.0 - share) * plain + share * kl)
        which = tl.load(ids + here, mask=real, other=-1)
        slope = tl.exp(own - log_total) - share * p
        slope = tl.where(which == target, slope - (1.0 - share), slope)
        tl.store(mine + here, slope * scale, mask=real)
        # for the others s - share p_rest s / s_rest, in units of exp(x - high)
        factor = tl.exp(high - log_total)
        if top < vocab:
            factor -= share * left / total
        factor *= scale
        for start in range(0, width, BLOCK):
            at = start + lanes
            x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            grad = tl.exp(x - high) * factor
            grad = tl.where(at == target, grad - scale * (1.0 - share), grad)
            tl.store(logits + at, grad.to(logits.dtype.element_ty), mask=at < width)

    @triton.jit
    def _segments_at(index, n_segments, n_shared, GRAIN: tl.constexpr, RUNS: tl.constexpr):
        # segments of a subnet, the same segments in the central buffer, and which lanes are real
        run = tl.program_id(0) * RUNS + tl.arange(0, RUNS)
        real = run < n_segments
        block = real & (run >= n_shared)
        there = n_shared + tl.load(index + (run - n_shared), mask=block, other=0)
        there = tl.where(run < n_shared, run, there)
        return run.to(tl.int64), there.to(tl.int64), real

    @triton.jit
    def _take(
        out, full, low, index, n_segments, n_shared, out_stride, full_stride,
        LOW: tl.constexpr, ROWS: tl.constexpr, GRAIN: tl.constexpr, RUNS: tl.constexpr,
    ):  # fmt: skip
        segment, there, real = _segments_at(index, n_segments, n_shared, GRAIN, RUNS)
        lanes = tl.arange(0, GRAIN)[None, :]
        mask = real[:, None] & (lanes < GRAIN)
        for row in tl.static_range(ROWS):
            from_ = full + row * full_stride.to(tl.int64) + there[:, None] * GRAIN + lanes
            to = out + row * out_stride.to(tl.int64) + segment[:, None] * GRAIN + lanes
            value = tl.load(from_, mask=mask)
            tl.store(to, value, mask=mask)
            if LOW and row == 0:
                at = low + segment[:, None] * GRAIN + lanes
                tl.store(at, value.to(low.dtype.element_ty), mask=mask)

    @triton.jit
    def _mean(
        central, total, part, index, block_of, holders, worker, n_segments, n_shared,
        central_stride, total_stride, part_stride,
        ROWS: tl.constexpr, GRAIN: tl.constexpr, RUNS: tl.constexpr,
    ):  # fmt: skip
        segment, there, real = _segments_at(index, n_segments, n_shared, GRAIN, RUNS)
        block = tl.load(block_of + there, mask=real, other=0)
        first = tl.load(holders + block * 3) == worker
        last = tl.load(holders + block * 3 + 1) == worker
        count = tl.load(holders + block * 3 + 2).to(tl.float32)
        lanes = tl.arange(0, GRAIN)[None, :]
        mask = real[:, None] & (lanes < GRAIN)
        for row in tl.static_range(ROWS):
            place = there[:, None] * GRAIN + lanes
            sums = total + row * total_stride.to(tl.int64) + place
            x = tl.load(
                part + row * part_stride.to(tl.int64) + segment[:, None] * GRAIN + lanes, mask=mask
            )
            x += tl.load(sums, mask=mask & ~first[:, None], other=0.0)
            tl.store(sums, x, mask=mask & ~last[:, None])
            mean = tl.div_rn(x, tl.broadcast_to(count[:, None], x.shape))
            to = central + row * central_stride.to(tl.int64) + place
            tl.store(to, mean, mask=mask & last[:, None])
