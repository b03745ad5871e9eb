"""`python -m shmkv`: the command line."""
from __future__ import annotations

from shmkv.cli import main

if __name__ == "__main__":
    main()
