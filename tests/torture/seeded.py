"""Bugs that are put into a copy of the sources, one at a time, to show that a storm finds them."""
from __future__ import annotations

from pathlib import Path

from builds import Edit, build_edited

# A pull takes the words that it saw before its hazard stood for those that stand now.
PIN = [Edit("_lookup.pyx", """\
    if load64_seq(&found.cache.word) == found.cache_word \\
            and (found.row == NULL or load64_seq(&found.row.word) == found.row_word):
        return True
    unpin(side)
    return False
""", "    return True\n")]

# The owner may use the memory again while it is being copied.
HAZARD = [Edit("_core.pyx", "            status = carry_in(", "            unpin(link.mine)\n            status = carry_in(")]

# The other side may have the link before the copy, its fence, the recheck and the end of the hazard.
WORD = [
    Edit("_core.pyx", "    store64_relaxed,\n", "    store64_relaxed,\n    word_release,\n"),
    Edit("_core.pyx", "            status = carry_in(",
         "            link.retake_ns = word_release(&link.record.word, link.side)\n            status = carry_in("),
]

# The other side may have the link after the copy and before its fence: no copy is fenced where it is made, and a pull gives the
# word back first. Processors of the x86 family do not show it: docs/reliability.md says why.
FENCE = [
    Edit("_copy.pyx", "    if job.streaming:\n        shmkv_copy_fence()\n    return status\n", "    return status\n"),
    Edit("_core.pyx", "    store64_relaxed,\n", "    store64_relaxed,\n    word_release,\n"),
    Edit("_core.pyx", "# -- a pull over a link --", 'cdef extern from "_kernels.h" nogil:\n    void shmkv_copy_fence()\n\n'
                                                     "# -- a pull over a link --"),
    Edit("_core.pyx", '            crash_point(b"copied")\n', """\
            link.retake_ns = word_release(&link.record.word, link.side)
            shmkv_copy_fence()
            crash_point(b"copied")
"""),
]

# Marks of an earlier key of a row count for the next one.
COVERAGE = [
    Edit("_directory.pyx", "store64_release(&words_of_row[i], generation << 32)", "store64_release(&words_of_row[i], 0)"),
    Edit("_coverage.pyx", """\
            if seen & 0xFFFFFFFF00000000ULL != tag:
                return False
""", ""),
    Edit("_coverage.pyx", "!= (row_generation << 32 | word_bits(0, cache.num_tensors, number)):",
         "!= word_bits(0, cache.num_tensors, number):"),
]

# The owner frees what is lent.
LEASE = [Edit("_link_record.pyx", """\
    for i in range(LEASES_MAX):
        if load64_seq(&side.leases[i]) == generation:
            return True
    return False


cdef bint is_named""", "    return False\n\n\ncdef bint is_named")]

BUGS: dict[str, list[Edit]] = {"pin": PIN, "hazard": HAZARD, "word": WORD, "coverage": COVERAGE, "lease": LEASE,
                              "fence": FENCE}
# Bugs of pulls are looked for by pulls alone: pushes and what is lent are the greater part of the usual steps.
PULLS_ALONE = {"push": 0.0, "lend": 0.0}
SHARES = {"pin": PULLS_ALONE, "hazard": PULLS_ALONE, "word": PULLS_ALONE, "coverage": PULLS_ALONE}
# What a run of the bug needs besides.
VARIABLES = {"fence": {"SHMKV_NT_THRESHOLD": "0"}}          # every copy streams


def build_with(bug: str) -> Path:
    """The folder of a build that has this bug."""
    return build_edited("plain", f"seeded-{bug}", BUGS[bug])
