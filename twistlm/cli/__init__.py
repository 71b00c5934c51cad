"""The command line: commands, nothing else. `--help` imports no torch."""

import sys
from collections.abc import Callable

from ..system.compat import quiet_transformers
from ..system.signals import Ended, Told

from . import training, tickets, look, measure  # isort: skip  # noqa: F401 (they join the app)
from .options import app

AGAIN = "; the same command goes on where it stopped"
RESUMES = dict.fromkeys(("shrink", "demo", "lab compare", "heal"), AGAIN)
RESUMES["train"] = "; resume with --resume"
MOVED = {  # commands of before -> how they are called now
    "certify": "twistlm eval --certify",
    **{name: f"twistlm lab {name}" for name in ("compare", "prune", "bench", "drop", "draft")},
    "experiment": "python -m paper NAME --scale SCALE",
    "report": "python -m paper report",
}
SMALLER = ": lower train.batch or data.seq_len (`twistlm plan` counts what a training takes)"


def main(command: Callable[[], object] = app, advice: str = "") -> None:
    """Run a command; a user's mistake is one sentence and exit code 2; `advice` is to go on."""
    quiet_transformers()
    advice = advice or RESUMES.get(_command(), "")
    try:
        if command is app and (now := MOVED.get(_command())):
            raise ValueError(f"`twistlm {_command()}` is called `{now}` now")
        command()
    except ValueError as error:
        _fail(str(error), 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", 2)
    except FloatingPointError as error:
        _fail(str(error), 1)
    except (MemoryError, RuntimeError) as error:
        from ..system.device import out_of_memory

        if not (said := out_of_memory(error)):
            raise
        _fail(said + (SMALLER if _command() in ("train", "shrink") else "") + advice, 1)
    except Ended as end:
        _fail(str(end) + (advice if end.code > 128 else ""), end.code)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, Told) or getattr(stop, "code", 130) != 130:  # typer's word for Ctrl-C
            raise
        _fail("interrupted" + advice, 130)


def _command() -> str:
    """`train`, or `lab compare`."""
    return " ".join(sys.argv[1 : 3 if sys.argv[1:2] == ["lab"] else 2])


def _fail(sentence: str, code: int) -> None:
    from ..system.terminal import clean

    print(f"error: {clean(sentence)}", file=sys.stderr)
    sys.exit(code)
