"""What a model is trained with: a config out of its shapes, its sizes and a text's length."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from transformers import AutoConfig, PreTrainedModel

from . import config
from .config import BlocksConfig, Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from .model import families, huggingface
from .model.blocks import BlockMap, Kind, Widths, count
from .presets import to_toml
from .tickets.parent import default_seq_len
from .tickets.requests import Budget
from .tickets.stock import all_widths, refuse_shared, stock_ks
from .tickets.widths import Cost, cost_of, fit
from .training import plan

N_WORKERS = 1  # one process plays all: several would cost memory and a percent or two of quality
INTERVAL = 10
BATCHES = (32, 16, 8, 4)  # sequences in a step: the most that leave
STEPS = 300  # steps
N_FFN = 12  # blocks in an FFN layer, about; as in the measured presets
FEWEST, MOST = 8, 64
UNIT = 64  # neurons: a block of so many, or half, is whole in kernels and quantised rows
WHOLE, CUT = 2, 6  # of eight masks: the whole model, and the sizes in turn
SHARES = (2 / 3, 1 / 2, 1 / 3, 1 / 4)  # of the blocks: sizes where none are asked for
RATES = {15e6: 3e-3, 135e6: 1e-3, 494e6: 1e-4}  # by parameters; the last two were measured


@dataclass(frozen=True)
class Size:
    """A size that was asked for, and the widths that it buys: one K for each kind."""

    budget: Budget
    ratio: str  # attn=2/3,ffn=8/12
    ks: dict[Kind, int]
    n_params: int


@dataclass(frozen=True)
class Cut:
    """The blocks of a model, and the widths of its stock tickets."""

    blocks: BlocksConfig
    block_map: BlockMap
    legal: list[Widths]


def blocks_in(n_neurons: int) -> int:
    """How many blocks an FFN layer is cut into: whole units first, then about a dozen."""

    def badness(n: int) -> tuple[bool, int, float]:
        return n < FEWEST, -math.gcd(n_neurons // n, UNIT), abs(math.log(n / N_FFN))

    most = min(MOST, n_neurons)
    return min((n for n in range(1, most + 1) if n_neurons % n == 0), key=badness)


def cut_for(model: PreTrainedModel, overrides: Sequence[str] = ()) -> Cut:
    """How a model is cut: all layers, in the way that has most widths of attention.

    Widths count that make plain models of the family. Of kv groups and query heads with as many,
    groups are cut: the cache shrinks, too.
    """
    asked = [word for word in overrides if word.startswith("blocks.")]
    one = BlocksConfig(setting="ffn", n_ffn=1, shared_first=0, shared_last=0)
    n_ffn = blocks_in(families.partition(model, one).groups[0].out_part.chunk)
    usual = BlocksConfig(
        n_ffn=n_ffn, sort=True, shared_first=0, shared_last=0, masks="sequence", nested=1.0
    )

    def legal_ks(kind: Kind, attn_by: Any) -> tuple[list[int], BlocksConfig]:
        """Every K of a kind that makes plain models, and the blocks that it counts."""
        blocks = config.override(Config(blocks=replace(usual, attn_by=attn_by)), asked).blocks
        refuse_shared(blocks)
        if blocks.setting not in ("both", kind):
            return [], blocks
        block_map = families.partition(model, replace(blocks, setting=kind))
        return stock_ks(model, block_map)[kind], blocks

    ffn_ks, blocks = legal_ks("ffn", "auto")
    legal: dict[Kind, list[int]] = {}
    for attn_by in ("auto", "query"):
        with suppress(ValueError):  # a family whose attention cannot be cut, or not in this way
            ks, with_attn = legal_ks("attn", attn_by)
            if len(ks) > max(1, len(legal.get("attn", ()))):
                legal["attn"], blocks = ks, with_attn
    if len(ffn_ks) > 1:
        legal["ffn"] = ffn_ks
    if not legal:
        family = model.config.model_type
        what = f"no cut of this {family} is a plain {family}"
        raise ValueError(f"{what}: its widths have no divisors")
    setting: Any = "both" if len(legal) > 1 else next(iter(legal))
    blocks = replace(blocks, setting=setting)
    block_map = families.partition(model, blocks)
    return Cut(blocks, block_map, all_widths(block_map, legal))


def sizes_for(
    model: PreTrainedModel,
    cut: Cut,
    budgets: Sequence[Budget],
    dtype: str = "float32",
    decode_ms: Cost | None = None,
) -> list[Size]:
    """The stock ticket that each budget buys, the largest first."""
    found: list[Size] = []
    for budget in budgets:
        cost = cost_of(budget, model, cut.block_map, dtype, decode_ms)
        widths = fit(budget, cut.block_map, cost, cut.legal)[0]
        size = _size(model, cut.block_map, widths, budget)
        if widths == cut.block_map.full_widths():
            whole = f"the whole model of {size.n_params:,} parameters"
            raise ValueError(f"{budget.said} has room for {whole}: ask for less")
        for other in (each for each in found if each.ratio == size.ratio):
            raise ValueError(
                f"{other.budget.said} and {budget.said} buy the same ticket, "
                f"{size.ratio} with {size.n_params:,} parameters: ask for sizes further apart"
            )
        found.append(size)
    return sorted(found, key=lambda size: -size.n_params)


def usual_sizes(model: PreTrainedModel, cut: Cut) -> list[Size]:
    """Stock tickets near the usual shares of the blocks, the largest first."""
    most = cut.block_map.full_widths()
    smaller, found = [widths for widths in cut.legal if widths != most], {}
    for share in SHARES:
        near = min(smaller, key=lambda w: sum(abs(w[name] / most[name] - share) for name in w))
        size = _size(model, cut.block_map, near)
        found[size.ratio] = size
    return sorted(found.values(), key=lambda size: -size.n_params)


def _size(
    model: PreTrainedModel, block_map: BlockMap, widths: Widths, budget: Budget | None = None
) -> Size:
    ks = {group.kind: widths[group.name] for group in block_map.groups}
    ratio = ",".join(f"{kind}={k}/{block_map.n_blocks(kind)}" for kind, k in ks.items())
    n_params = count(block_map, huggingface.shapes(model), widths)
    return Size(budget or Budget("ratio", ratio), ratio, ks, n_params)


def config_for(
    model: PreTrainedModel,
    weights: str,
    cut: Cut,
    sizes: Sequence[Size],
    *,
    out: str,
    n_text: int,
    n_tokens: int,
    room: float = math.inf,
    device: str = "cuda",
    overrides: Sequence[str] = (),
) -> Config:
    """The training of `n_tokens` out of a text of `n_text`, in at most `room` bytes of memory."""
    n_blocks = {kind: cut.block_map.n_blocks(kind) for kind in cut.block_map.kinds}
    # the sizes in turn, so that the smaller ones come once more where they do not divide evenly
    smaller = [sizes[-1 - i % len(sizes)].ks for i in range(max(CUT, len(sizes)))]
    smaller.sort(key=lambda ks: [-k for k in ks.values()])
    ks: dict[str, Any] = {f"k_{kind}": (n,) for kind, n in n_blocks.items()}
    for kind, n in n_blocks.items():
        ks[f"mask_{kind}"] = (n,) * WHOLE + tuple(each[kind] for each in smaller)
    at, rates = np.log(list(RATES)), np.log(list(RATES.values()))
    rate = math.exp(np.interp(math.log(model.num_parameters()), at, rates))
    given = ModelConfig(weights, model.config.model_type, numbers_of(model))
    text = DataConfig(
        train=f"{out}/text/train", valid=f"{out}/text/valid", seq_len=default_seq_len(model)
    )
    train = TrainConfig(
        n_workers=N_WORKERS, interval=INTERVAL, lr=float(f"{rate:.1e}"), schedule="cosine",
        betas=(0.9, 0.95), weight_decay=0.1, clip=1.0, scale="none",
        # predicting a token and storing it costs more than one prediction beside a step
        teacher="cache" if n_tokens >= 2 * n_text > 0 else "start",
    )  # fmt: skip
    run = RunConfig(
        out=f"{out}/parent", eval_every=-1, eval_ratios=tuple(size.ratio for size in sizes)
    )
    cfg = Config(given, text, replace(cut.blocks, **ks), train, run)
    for batch in BATCHES:
        cfg = replace(cfg, train=replace(train, batch=batch))
        asked = config.override(cfg, overrides)
        t = asked.train
        n_steps = n_tokens // (t.n_workers * t.batch * asked.data.seq_len)
        if n_steps >= STEPS:
            break
    n = t.rounds or max(1, n_steps // t.interval)
    train = replace(cfg.train, rounds=n, warmup=min(100, n))
    cfg = replace(cfg, train=train, run=replace(run, save_every=max(1, min(50, n // 20))))
    for pieces in (n for n in range(1, t.batch + 1) if t.batch % n == 0):
        whole = replace(cfg, train=replace(cfg.train, accumulate=pieces))
        chosen = config.override(whole, overrides)
        if plan.memory(chosen, model, device)[1] <= room:
            break
    return chosen


def numbers_of(model: PreTrainedModel) -> dict[str, Any]:
    """What a model's config says in numbers and differs from its type's defaults."""
    usual = AutoConfig.for_model(model.config.model_type)
    return {
        key: value
        for key, value in model.config.to_dict().items()
        if isinstance(value, int) and hasattr(usual, key) and getattr(usual, key) != value
    }


def written(cfg: Config, header: str) -> str:
    """The config as a file for `twistlm train`: all that differs from the defaults."""
    usual, mine = asdict(Config()), asdict(cfg)
    changed = {
        section: {key: value for key, value in keys.items() if value != usual[section][key]}
        for section, keys in mine.items()
    }
    return to_toml(changed, header)
