"""The central model: weights, moments and outer momentum as flat buffers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .blocks import Blueprint, State
from .layout import Layout, Segments, cut_segments, gather_

ROWS = ("weights", "m", "v")


@dataclass
class Central:
    """Lives as long as the run; `aggregator` alone changes `state`."""

    segments: Segments
    state: Tensor  # [.., n_params]: the rows of `buffer`, and with `outer` that of `velocity`
    outer: bool = False
    sums: Tensor | None = None  # see `scratch`
    host: Tensor | None = None  # see `copied`
    in_place: bool = False  # the only trainer works on this very state, and nobody copies it
    wait_for_readers: Callable[[], None] = lambda: None  # before a change: a checkpoint's writer

    @property
    def buffer(self) -> Tensor:
        """[rows, n_params]: weights, and with carried moments Adam's m and v."""
        return self.state[: len(self.state) - self.outer]

    @property
    def velocity(self) -> Tensor:
        """[n_params]: the outer optimizer's momentum, where there is one."""
        assert self.outer
        return self.state[-1]

    @property
    def layout(self) -> Layout:
        return self.segments.full

    @property
    def weights(self) -> Tensor:
        return self.state[0]

    def scratch(self) -> Tensor:
        """For the aggregator's sums [rows, n_params]; on a CPU also for a checkpoint's copy."""
        self.wait_for_readers()
        if self.sums is None:
            self.sums = torch.empty_like(self.buffer if self.state.is_cuda else self.state)
        return self.sums

    def before_change(self) -> None:
        """Wait for a checkpoint's writer where it reads the state itself."""
        if self.in_place and not self.state.is_cuda:
            self.wait_for_readers()

    def copied(self) -> Tensor:
        """A copy of the state in the memory of the host, which the next call overwrites; on a CPU
        the state itself where it is trained in place, until `before_change`."""
        if not self.state.is_cuda:
            return self.state if self.in_place else self.scratch().copy_(self.state)
        if self.host is None:  # kept: the first touch of its pages is slow
            self.host = torch.empty_like(self.state, device="cpu", pin_memory=True)
        return self.host.copy_(self.state)


def create(segments: Segments, params: State, *, carry: bool, outer: bool) -> Central:
    """A central model that starts from `params`, with zero moments."""
    shape = (len(ROWS) if carry else 1) + outer, segments.full.n_params
    like = next(iter(params.values()))
    state = torch.zeros(shape, dtype=like.dtype, device=segments.block_of.device)
    for name, view in segments.full.views(state[0]).items():
        view.copy_(params[name].detach())
    return Central(segments, state, outer)


def on_host(central: Central) -> Central:
    """The same model in the memory of the host."""
    state = central.state.to("cpu", copy=True)
    segments = cut_segments(central.layout, central.segments.block_map, state.device)
    return Central(segments, state, central.outer)


def cut_subnet(central: Central, blueprint: Blueprint, rows: int | None = None) -> Tensor:
    """A subnet's buffer out of the central one (its first `rows` rows)."""
    return gathered(central, central.segments.index(blueprint), rows)


def gathered(central: Central, index: Tensor, rows: int | None = None) -> Tensor:
    """The shared part and these segments of the central buffer."""
    source, segments = central.buffer[:rows], central.segments
    n = segments.full.n_shared + index.numel() * segments.grain
    out = torch.empty(len(source), n, dtype=source.dtype, device=source.device)
    return gather_(out, source, segments, index)


@dataclass(frozen=True)
class SubnetBuffer:
    """A worker's weights and moments on their way to its trainer."""

    segments: Segments
    blueprint: Blueprint
    source: Tensor  # [rows, n_subnet] off a wire, or the central [rows, n_params]

    @property
    def layout(self) -> Layout:
        return self.segments.layout_of(self.blueprint)

    @cached_property
    def index(self) -> Tensor:
        """Its blocks' segments in the central buffer."""
        return self.segments.index(self.blueprint)

    @property
    def rows(self) -> int:
        return self.source.shape[0]

    def copy_to_(self, out: Tensor, low: Tensor | None = None) -> None:
        """Fill `out` [rows, n_subnet], and `low` [n_subnet] with its weights, rounded."""
        if self.source.data_ptr() == out.data_ptr():  # it is trained in place
            if low is not None:
                low.copy_(out[0])
            return
        is_central = self.source.shape[1] == self.segments.full.n_params
        if is_central and self.source.device == out.device:
            gather_(out, self.source, self.segments, self.index, low)
            return
        rows = self.source.split(1)
        if is_central:  # on the host, which so has one row twice instead of all
            index = self.index.to(self.source.device)
            short = torch.empty(1, out.shape[1], dtype=out.dtype)
            rows = (gather_(short, row, self.segments, index) for row in rows)
        for to, row in zip(out.split(1), rows, strict=True):
            to.copy_(row)
        if low is not None:
            low.copy_(out[0])
