"""`python -m twistlm`, and so `torchrun -m twistlm`."""

from .cli import main

main()
