"""The command line. Prints, and decodes nothing itself: what it shows comes from the library's own readers.

typer and rich are imported when `main` runs, so that the demo's processes, which live in this package, stay light.
"""
from __future__ import annotations


def main() -> None:
    """Run the command line and end the process with its exit status."""
    from shmkv.cli.app import run

    run()
