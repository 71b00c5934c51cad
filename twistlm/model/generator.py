"""(2) The subnet generator: Algorithm 1 of the paper, with its three faults repaired.

Every draw is a pure function of (seed, round, layer), so all ranks deal the same blueprints without
a message. Each attention and each FFN layer draws its own deal.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

from ..config import BlocksConfig, Method
from .blocks import KINDS, BlockMap, Blueprint, Kind, Widths

# group name -> all its blocks, those to keep longest first; where masks drop layers, `LAYERS` ->
# all layers that are cut, in the same way
Order = Mapping[str, tuple[int, ...]]
LAYERS = "layers"
ALONG = ("order", "first")  # deals that read it


def legal_range(
    n_blocks: int, n_workers: int, n_common: int, method: Method = "twist"
) -> tuple[int, int]:
    """Legal K: ceil((N + (S-1)|C|)/S) <= K <= N (paper, section 3.1), and at least one block.

    Dropout covers blocks over time: any K >= |C|.
    """
    least = -(-(n_blocks + (n_workers - 1) * n_common) // n_workers)
    return max(1, n_common if method == "dropout" else least), n_blocks


def deal(
    rng: random.Random,
    n_blocks: int,
    widths: Sequence[int],
    common: Sequence[int] = (),
    *,
    fixed: Mapping[int, Sequence[int]] | None = None,
) -> list[tuple[int, ...]]:
    """Deal widths[s] blocks to worker s: all get `common`, and every block that fits to someone.

    Workers in `fixed` hold these blocks. Extra slots are filled uniformly.
    """
    hands: list[list[int]] = [list((fixed or {}).get(s, common)) for s in range(len(widths))]
    dealt = {block for hand in hands for block in hand}
    rest = [block for block in range(n_blocks) if block not in dealt]
    rng.shuffle(rest)  # repair 1: the printed algorithm deals in index order
    order = rng.sample(range(len(widths)), len(widths))  # who is served first changes too
    for _ in range(n_blocks):  # round robin over workers with room left
        for s in order:
            if rest and len(hands[s]) < widths[s]:
                hands[s].append(rest.pop())
    for s in order:
        # repair 2: lists, not a zero matrix that reads as "block 0 is here"
        absent = [block for block in range(n_blocks) if block not in hands[s]]
        n_extra = widths[s] - len(hands[s])  # repair 3: 0 means none, not "the whole row"
        rng.shuffle(absent)
        hands[s] += absent[:n_extra]
    return [tuple(sorted(hand)) for hand in hands]


def check(
    block_map: BlockMap, blocks: BlocksConfig, n_workers: int, method: Method = "twist"
) -> None:
    """Refuse settings that no deal can satisfy."""
    by_worker = blocks.widths == "worker"
    if by_worker and method == "dropout":
        raise ValueError("blocks.widths = 'worker': dropout has one mask for all workers of a step")
    for kind in KINDS:
        n_blocks, ks, n_common = block_map.n_blocks(kind), blocks.k(kind), len(blocks.common(kind))
        if n_blocks == 0:
            continue
        if not ks or (by_worker and len(ks) != n_workers):
            said = f"blocks.k_{kind} = {list(ks)}: give K in 1..{n_blocks}"
            raise ValueError(f"{said}, with blocks.widths = 'worker' one K per worker: {n_workers}")
        least, need = max(1, n_common), n_blocks + (n_workers - 1) * n_common
        if not by_worker:
            least = legal_range(n_blocks, n_workers, n_common, method)[0]
        bad = [k for k in ks if not least <= k <= n_blocks]
        if bad or (by_worker and sum(ks) < need):
            said = f"blocks.k_{kind} = {bad[0] if bad else list(ks)}"
            about = f"N = {n_blocks} {kind} blocks, S = {n_workers} workers, |C| = {n_common}"
            also = f", and their sum at least {need}, or a block is left out" if by_worker else ""
            raise ValueError(f"{said} with {about}: legal K are {least}..{n_blocks}{also}")


def check_own(block_map: BlockMap, blocks: BlocksConfig, own: Mapping[Kind, int]) -> None:
    """Refuse a K that a worker brings along and no subnet can have."""
    for kind, k in own.items():
        n_blocks, least = block_map.n_blocks(kind), max(1, len(blocks.common(kind)))
        if not least <= k <= n_blocks:
            legal = f"legal K are {least}..{n_blocks}" if n_blocks else "this run does not cut it"
            raise ValueError(f"k_{kind} = {k} of a worker: {legal}")


def for_training(
    block_map: BlockMap,
    n_workers: int,
    blocks: BlocksConfig,
    *,
    seed: int,
    round: int,
    present: Sequence[tuple[int, Mapping[Kind, int]]] | None = None,
    order: Order | None = None,
) -> list[Blueprint]:
    """One blueprint per worker for this round.

    `order` is read by the deal along it. `present` are the workers that are there, by their numbers
    in 0..n_workers-1, and K of their own: all, and none.
    """
    if present is None:
        present = [(number, {}) for number in range(n_workers)]
    blueprints: list[Blueprint] = [{} for _ in present]
    for group in block_map.groups:
        dealt = 0 if blocks.deal == "fixed" else round
        rng = random.Random(f"deal/{seed}/{dealt}/{group.name}")
        ks, widths = blocks.k(group.kind), []
        for number, own in present:
            usual = ks[number if blocks.widths == "worker" else round % len(ks)]
            widths.append(own.get(group.kind, usual))
        fixed, common = {}, blocks.common(group.kind)
        small = [s for s, k in enumerate(widths) if k < group.n_blocks]
        if blocks.deal in ALONG and order and small:
            first = small[round % len(small) :] + small[: round % len(small)]  # each in turn
            if blocks.deal == "order":
                first = first[:1]
            elif len(small) == len(widths):  # nobody is whole: some hold what the first K leave
                left = group.n_blocks - widths[first[0]]
                while left > 0 and len(first) > 1:
                    left -= widths[first.pop()] - len(common)  # which all hold
            for s in first:
                fixed[s] = first_blocks(order[group.name], common, widths[s])
        hands = deal(rng, group.n_blocks, widths, common, fixed=fixed)
        for blueprint, hand in zip(blueprints, hands, strict=True):
            blueprint[group.name] = hand
    return blueprints


def first_blocks(order: Sequence[int], common: Sequence[int], k: int) -> tuple[int, ...]:
    """K blocks: the common ones, and the first others of an order."""
    rest = [block for block in order if block not in common]
    return tuple(sorted([*common, *rest[: k - len(common)]]))


def for_deployment(block_map: BlockMap, widths: Widths, *, seed: int, draw: int = 0) -> Blueprint:
    """The common blocks and uniformly random ones: the paper's random extraction (SE)."""
    blueprint = {}
    for group in block_map.groups:
        rng = random.Random(f"ticket/{seed}/{draw}/{group.name}")
        rest = [block for block in range(group.n_blocks) if block not in group.common]
        drawn = rng.sample(rest, widths[group.name] - len(group.common))
        blueprint[group.name] = tuple(sorted([*group.common, *drawn]))
    return blueprint


def draws(block_map: BlockMap, widths: Widths, *, seed: int, n: int) -> Iterator[Blueprint]:
    """n random subnets; each depends on its number alone."""
    for draw in range(n):
        yield for_deployment(block_map, widths, seed=seed, draw=draw)
