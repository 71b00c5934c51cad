"""The typer application that every command joins."""

import typer

app = typer.Typer(
    name="twistlm",
    help="Train a language model once, deploy it at any size (TwIST).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
