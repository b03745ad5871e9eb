"""Every call in the sources that orders memory: "<file>:<function>:<call>#<n>", n counted within the function."""
from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "shmkv"
FUNCTION = re.compile(r"^ *(?:cpdef|cdef|def)\b[^=]*?\b(\w+)\(.*$")
# A relaxed load or store orders nothing.
CALL = re.compile(r"\b((?:load|store)(?:32|64)_(?:acquire|release|seq)|(?:exchange|swap|add)(?:32|64)_(?:relaxed|seq)|"
                  r"fence_(?:acquire|release))\(")


def sites(package: Path = PACKAGE) -> list[str]:
    """In the order of the sources; `_futex.pxd` declares the calls and makes none."""
    return [site for path in sorted(package.glob("*.pyx")) for site in _sites_of(path)]


def _sites_of(path: Path) -> list[str]:
    found: list[str] = []
    function, seen = "", Counter[str]()
    for line in re.sub(r'"""[\s\S]*?"""', lambda text: "\n" * text[0].count("\n"), path.read_text()).splitlines():
        if name := FUNCTION.match(line):
            function, seen = name[1], Counter()
        for call in CALL.findall(line.split("#")[0]):
            seen[call] += 1
            found.append(f"{path.stem}:{function}:{call}#{seen[call]}")
    return found
