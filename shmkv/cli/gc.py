"""`shmkv gc`: remove what dead members left.

While anybody lives in the namespace, only files of members that were found dead go, under the cold lock. When nobody does, the
namespace goes altogether: joining it under an unused cluster id clears it, leaving it as the last one takes its files away, so
that the one place that may do so, `membership.py`, does it here too.
"""
from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from rich.table import Table
from rich.text import Text

from shmkv import segment
from shmkv.cli import console
from shmkv.errors import LLMException
from shmkv.membership import JOIN_TIMEOUT_MS, Namespace
from shmkv.types import LLMRole


@dataclass(frozen=True)
class Leftover:
    """A file that goes, or went."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Cleaned:
    """What a cleaning came to."""

    namespace: str
    dry_run: bool
    whole_namespace: bool
    files: list[Leftover] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(file.bytes for file in self.files)


def clean(namespace: str, *, dry: bool = False) -> Cleaned:
    """Remove the leftovers of a namespace, or only list them. LLMException if its table cannot be read while somebody lives, or if
    the system refuses something."""
    try:
        return _clean(namespace, dry=dry)
    except OSError as error:
        raise LLMException(f"cannot clean namespace {namespace!r}: {error}") from error


def _clean(namespace: str, *, dry: bool) -> Cleaned:
    if not Namespace.anybody_lives(namespace):
        return Cleaned(namespace, dry, True, _remove_namespace(namespace, dry=dry))
    try:
        found = Namespace.peek(namespace)
    except LLMException as error:
        raise LLMException(f"nothing was removed from namespace {namespace!r}, where somebody lives: {error}") from error
    if found is None:                       # those who live have another layout version, or are just joining
        return Cleaned(namespace, dry, False)
    if dry:
        return Cleaned(namespace, dry, False, _leftovers(found.sweep(dry=True)))
    with found.cold(JOIN_TIMEOUT_MS):
        return Cleaned(namespace, dry, False, _leftovers(found.sweep()))


def _remove_namespace(namespace: str, *, dry: bool) -> list[Leftover]:
    """Nobody lives. Somebody may join at any moment: then the join here is one more join, and the newcomer's files stay."""
    before = _leftovers(segment.starting_with(f"{namespace}."))
    if dry or not before:
        return before
    joined, member = Namespace.join(namespace, secrets.randbits(64), int(LLMRole.MIX))
    with joined.cold_even_unnamed(JOIN_TIMEOUT_MS):
        joined.leave(member)
    there = set(segment.names(f"{namespace}."))
    return [file for file in before if file.name not in there]


def _leftovers(files: Iterable[tuple[str, int]]) -> list[Leftover]:
    return [Leftover(name, nbytes) for name, nbytes in files]


def show(namespace: str, *, dry: bool, json: bool) -> None:
    """Clean and print what went."""
    cleaned = clean(namespace, dry=dry)
    if json:
        console.print_json({**asdict(cleaned), "bytes": cleaned.nbytes})
        return
    out = console.out()
    if not cleaned.files:
        out.print(f"nothing to remove in namespace {namespace}")
        return
    table = Table("file", "bytes", title="would be removed" if dry else "removed", title_justify="left")
    table.columns[1].justify = "right"
    for file in cleaned.files:
        table.add_row(Text(file.name), str(file.bytes))
    out.print(table)
    verb = "would go" if dry else "are gone"
    out.print(f"{len(cleaned.files)} files, {console.size(cleaned.nbytes)} {verb}"
              + (f"; nobody lives in namespace {namespace}" if cleaned.whole_namespace else ""))
