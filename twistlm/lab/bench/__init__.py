"""What `twistlm lab bench` is asked for; imports no torch."""

from dataclasses import dataclass
from typing import get_args

from ...config import Setting, Wire
from ...export import RUNTIMES
from ...fields import VALID_TEXT, Checked, option, seed_of, words


@dataclass(frozen=True, kw_only=True)
class TrainBenchRequest(Checked):
    """Which sizes of worker are measured, and how often."""

    sizes: tuple[str, ...] = option(
        "Shares of the blocks that workers hold: a list of fractions, or one by kinds of layer, as "
        "attn=2/3,ffn=6/12; repeatable.",
        ("12/12,10/12,8/12,6/12,4/12,3/12",),
    )
    settings: str = option(f"{words(get_args(Setting))}; several with commas.", "both,attn,ffn")
    steps: int = option("Steps behind one time; 0: enough.", 0, least=0)
    references: bool = option(
        "Measure Hugging Face's own step too.", True, "--references/--no-references"
    )


@dataclass(frozen=True, kw_only=True)
class DeployRequest(Checked):
    """Which tickets are measured beside the full parent, where, and how often."""

    ratio: tuple[str, ...] = option(
        "Size of a random ticket, as 6/12 or attn=2/3,ffn=6/12; repeatable.",
        ("8/12", "6/12", "4/12", "3/12"),
    )
    runtime: tuple[str, ...] = option(
        f"{words(RUNTIMES)}; repeatable; default: all that are installed and can run this model.",
        (),
    )
    prefill: tuple[int, ...] = option(
        "Prompt length; repeatable; default: 128 and 512, if they fit.", ()
    )
    decode: int = option("Tokens to decode after the prompt.", 32, least=1)
    repeats: int = option("Runs behind each number.", 5, least=1)
    threads: int = option("CPU threads; 0: torch's choice.", 0, least=0, most=1024)
    seed: int = seed_of("the random tickets")

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := set(self.runtime) - set(RUNTIMES):
            raise ValueError(f"--runtime {unknown.pop()}: use {', '.join(RUNTIMES)}")


@dataclass(frozen=True, kw_only=True)
class DepthRequest(Checked):
    """How many layers tickets keep, and what they are measured on."""

    layers: tuple[int, ...] = option(
        "Layers of a ticket; repeatable; default: three quarters of the parent's, and half.", ()
    )
    data: str | None = option(VALID_TEXT, None)
    tokens: int = option("Tokens for each perplexity; 0 takes all.", 0, least=0)
    seed: int = seed_of("the pick")


@dataclass(frozen=True, kw_only=True)
class CommRequest(Checked):
    """How many workers exchange how much, over what."""

    workers: int = option("S on this machine's loopback.", 4, least=2)
    mb: float = option("MB of a subnet there.", 250.0, least=0.1)
    slow: tuple[int, ...] = option(
        "S on slow links, repeatable. Needs root, ip and tc.", (4, 8), least=2
    )
    slow_mb: float = option("MB of a subnet there.", 64.0, least=0.1)
    gbit: float = option("Speed of a slow link, Gbit/s.", 1.0, least=0.01)
    repeats: int = option("Exchanges behind a number.", 3, least=1)
    wire: str = option(f"{words(get_args(Wire))}.", "fp32", choices=get_args(Wire))
