"""`python -m lln.cli`, which torchrun can start."""

from lln.cli import main

if __name__ == "__main__":
    main()
