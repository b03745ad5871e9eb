"""Faults put into the library on purpose, one at a time: what the fuzzer and the flipping loads must find."""
from __future__ import annotations

from builds import Edit

# Without one check of a number that an owner would never write.
UNCHECKED: dict[str, list[Edit]] = {
    "tensor-beyond-segment": [Edit("_plan.pyx", " or shape.offset > segment_nbytes - shape.nbytes:", ":")],
    "rows-of-tensor": [Edit("_kept_plans.pyx", " or shapes[i].rows != rows:", ":")],
    "tensors-of-cache": [Edit("_lookup.pyx", "    if <uint64_t>copy.first_tensor + copy.num_tensors > TENSORS_MAX:\n"
                                             "        return FIND_DAMAGED\n", "")],
    "coverage-of-cache": [Edit("_lookup.pyx", "    if copy.first_coverage + <uint64_t>copy.num_rows * copy.coverage_lines > "
                                              "COVERAGE_LINES_MAX:\n        return FIND_DAMAGED\n", "")],
    "log2-of-index": [Edit("_lookup.pyx", " or log2 > INDEX_LOG2_MAX:", ":")],
    "slot-of-side": [Edit("_link_record.pyx", "    if slot >= MEMBERS_MAX:\n        return False\n", "")],
    "slot-of-entry": [Edit("_index.pyx", "        if entry >> 32 & 1 and slot >= CACHES_MAX:\n            return 0",
                           "        if False:\n            return 0")],
    "block-beyond-cache": [Edit("_core.pyx", "        if want.blocks.src_max >= found.copy.num_rows:\n"
                                             "            return PLAN_SRC_BLOCK\n", "")],
    "links-reserved": [Edit("_link_record.pyx", ".links_reserved), LINKS_MAX)", ".links_reserved), 1 << 30)")],
}
# With a second load after the check.
READ_TWICE: dict[str, list[Edit]] = {
    "slot-of-side": [Edit("_link_record.pyx", "    if slot >= MEMBERS_MAX:\n        return False\n",
                          "    if slot >= MEMBERS_MAX:\n        return False\n    slot = load32_relaxed(&side.slot)\n")],
    "first-tensor": [Edit("_lookup.pyx", "    if <uint64_t>copy.first_row + copy.num_rows > ROWS_MAX:\n",
                          "    copy.first_tensor = load32_relaxed(&shared.first_tensor)\n"
                          "    if <uint64_t>copy.first_row + copy.num_rows > ROWS_MAX:\n")],
}
# Looks again for as long as a peer likes.
ENDLESS: dict[str, list[Edit]] = {
    "looks-at-row": [Edit("_lookup.pyx", "    for _look in range(ROW_LOOKS):", "    for _look in range(1 << 30):")],
    "looks-at-index": [Edit("_lookup.pyx", "    for _look in range(INDEX_LOOKS):", "    for _look in range(1 << 30):")],
}
