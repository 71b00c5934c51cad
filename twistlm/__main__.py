"""`python -m twistlm`, and so `torchrun -m twistlm`."""

from .cli import main

if __name__ == "__main__":  # the demo's spawned processes import this module again
    main()
