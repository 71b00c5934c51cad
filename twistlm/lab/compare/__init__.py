"""One table of parents x settings x sizes x methods, each number measured once.

`cells` says what is measured, `sweep` measures a parent, `measure` what a number follows from and
healing, `table` shows it; this is what the command is asked for, without torch.
"""

from dataclasses import dataclass

from ...baselines import COMPARED
from ...config import Method
from ...fields import N_TOKENS, Checked, option, seed_of

RATIOS = "8/12,6/12,4/12,3/12"


@dataclass(frozen=True, kw_only=True)
class CompareRequest(Checked):
    """Which parents are compared, at which sizes, and with which ways to prune after training."""

    parent_dense: str | None = option(
        "Trained by data parallel. A run folder, a checkpoint, a Hugging Face folder or hub id, "
        "or gguf:FILE.",
        None,
    )
    parent_dropout: str | None = option("Trained with structured dropout.", None)
    parent_twist: tuple[str, ...] = option("Trained with TwIST; repeatable.", ())
    ratios: tuple[str, ...] = option(
        "Shares of blocks (or of single weights) that stay: a list of fractions, or one by kinds "
        "of layer, as attn=2/3,ffn=6/12; repeatable.",
        (RATIOS,),
    )
    settings: str = option(
        "Kinds of layer that are cut. A TwIST or dropout parent shows tickets where its training "
        "cut.",
        "attn,ffn,both",
    )
    methods: str = option(
        "Of twistlm lab prune, on the dense parent, with commas: "
        f"{', '.join(COMPARED)}; '' for none.",
        ",".join(COMPARED),
    )
    heal: str = option(
        "Add what users do instead, with so many tokens for all sizes of a setting together: "
        "blocks of the dense parent chosen by score and trained with it as teacher (twistlm heal), "
        "and a model of that shape from random weights. Totals are equal if the dense parent is "
        "the start of the others, and this is what each of them was trained on: 20M. Nested "
        "tickets are trained so, too, on top of that.",
        "",
    )
    n: int = option(
        "Random tickets of each parent and size; 0: none.", 20, "--n", least=0, most=10**6
    )
    data: str | None = option("Token file; default: data.valid of the first parent, a run.", None)
    tokens: int = option(N_TOKENS, 0, least=0)
    calibration: str | None = option(
        "Token file to calibrate on; default: data.train of the first parent, a run.", None
    )
    calibration_sequences: int = option("Sequences of data.seq_len tokens.", 128, least=1)
    seed: int = seed_of("random tickets and calibration")

    @property
    def sources(self) -> list[tuple[Method, str]]:
        """How each parent was trained, and where it lies."""
        given: list[tuple[Method, str | None]]
        given = [("dense", self.parent_dense), ("dropout", self.parent_dropout)]
        given += [("twist", source) for source in self.parent_twist]
        return [(method, source) for method, source in given if source is not None]
