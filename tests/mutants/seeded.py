"""The seeded mistakes: one edit of a source each, of an offset, a bound, a condition or a piece of arithmetic."""
from __future__ import annotations

from builds import Edit

KERNELS = [
    Edit("_kernels.h", "    if (n >= 16)\n", "    if (n >= 15)\n"),
    Edit("_kernels.h", "memcpy(d + 48, &e, 16);", "memcpy(d + 47, &e, 16);"),
    Edit("_kernels.h", "size_t head = 16 - ((uintptr_t)d & 15);", "size_t head = 17 - ((uintptr_t)d & 15);"),
    Edit("_kernels.h", "shmkv_c_block64(d + n - 64, s + n - 64);", "shmkv_c_block64(d + n - 63, s + n - 63);"),
    Edit("_kernels.h", "    if (n > 64)\n        shmkv_avx2_pair", "    if (n > 96)\n        shmkv_avx2_pair"),
    Edit("_kernels.h", "size_t head = 32 - ((uintptr_t)d & 31);", "size_t head = 33 - ((uintptr_t)d & 31);"),
    Edit("_kernels.h", "_mm256_stream_si256((__m256i *)(d + 96), e);", "_mm256_stream_si256((__m256i *)(d + 96), c);"),
]
COPY = [
    Edit("_copy.pyx", "if plan.nbytes <= job.share_nbytes:", "if plan.nbytes <= 2 * job.share_nbytes:"),
    Edit("_copy.pyx", "(plan.nbytes + job.share_nbytes - 1) // job.share_nbytes", "plan.nbytes // job.share_nbytes"),
    Edit("_copy.pyx", "min(at + job.share_nbytes, job.plan.nbytes)", "at + job.share_nbytes"),
    Edit("_copy.pyx", "at if job.mode == MOVE_GATHER", "at if job.mode == MOVE_SCATTER"),
    Edit("_copy.pyx", "else job.check(job.context)", "else 0"),
    Edit("_copy.pyx", "            number += 1\n", "            number += 2\n"),
]
PLAN = [
    Edit("_plan.pyx", "shape.offset > segment_nbytes - shape.nbytes", "shape.offset >= segment_nbytes - shape.nbytes"),
    Edit("_plan.pyx", "if want.dst_offset >= stride:", "if want.dst_offset > stride:"),
    Edit("_plan.pyx", "nbytes <= stride - offset", "nbytes < stride - offset"),
    Edit("_plan.pyx", "if want.dst_row >= dst[0].rows:", "if want.dst_row > dst[0].rows:"),
    Edit("_plan.pyx", "want.dst_first + want.dst_count > dst_tensors", "want.dst_first + want.dst_count > dst_tensors + 1"),
    Edit("_plan.pyx", "gap[0] = shape.piece_pitch - shape.inner", "gap[0] = shape.piece_pitch"),
    Edit("_plan.pyx", "before.dst + before.nbytes == span.dst", "before.dst + before.nbytes <= span.dst"),
    Edit("_plan.pyx", "return offset <= stride and nbytes", "return nbytes"),
    Edit("_plan.pyx", "plan.spans[middle].before <= offset", "plan.spans[middle].before < offset"),
    Edit("_plan.pyx", "    if nbytes < left[0]:", "    if nbytes <= left[0]:"),
    Edit("_kept_plans.pyx", "memcmp(&kept.want, want, sizeof(Selection))", "memcmp(&kept.want, want, 8)"),
    Edit("_plan.pyx", "want.divisor and src_tensors % want.divisor", "want.divisor and src_tensors < want.divisor"),
]
FUTEX = [
    Edit("_futex.pyx", "            kept = 0                #", "            pass                    #"),
    Edit("_futex.pyx", "            if now_ns() < retake_ns:\n", "            if now_ns() < 0:\n"),
    Edit("_futex.pyx", "            seen |= WORD_WAITERS\n", "            pass\n"),
    Edit("_futex.pyx", "elif swap32_seq(word, seen, WORD_OFFERED + (side ^ 1)):",
         "elif swap32_seq(word, seen, WORD_OFFERED + side):"),
    Edit("_futex.pyx", "            futex_wake_all(word, True)\n", "            futex_wake_all(word, False)\n"),
    Edit("_futex.pyx", "elif not seen & WORD_WAITERS or swap32_seq(word, seen, holder):", "else:"),
    Edit("_futex.pyx", "        queue.tail = before\n", "        queue.tail = NULL\n"),
    Edit("_futex.pyx", "        if queue.head == NULL:\n            queue.tail = NULL\n", ""),
]
LINK = [
    Edit("_link.pyx", "if word_generation(state) != link.serial or word_state(state) == LINK_REMOVED:",
         "if word_state(state) == LINK_REMOVED:"),
    Edit("_link.pyx", "!= link.peer_incarnation:\n        return LINK_PEER_GONE", "!= link.peer_incarnation:\n        return 0"),
    Edit("_link.pyx", "    status = state_of_record(link)\n    if status != 0:\n        link.retake_ns",
         "    status = 0\n    if status != 0:\n        link.retake_ns"),
    Edit("_link.pyx", "    queue_leave(&link.queue)\n    add32_seq(&link.users, <uint32_t>-1)\n", "    queue_leave(&link.queue)\n"),
    Edit("_link_handle.pyx", "and word_generation(load64_seq(&link.record.state)) == link.serial:", "and link.serial:"),
    Edit("_link.pyx", "load32_acquire(&link.is_closing) and not wait.enters_closing",
         "load32_acquire(&link.is_closing) and wait.enters_closing"),
]
LINK_RECORD = [
    Edit("_link_record.pyx", ".incarnation) != incarnation:\n        return False",
         ".incarnation) != incarnation:\n        return True"),
    Edit("_link_record.pyx", "== SIDE_CLOSED and is_idle(side)", "== SIDE_CLOSED"),
    Edit("_link_record.pyx", "    if word_state(seen) != LINK_LIVE:\n", "    if word_state(seen) == LINK_FREE:\n"),
    Edit("_link_record.pyx", "word_generation(load64_seq(&link.state)) + 1\n", "word_generation(load64_seq(&link.state))\n"),
    Edit("_link_record.pyx", "    store32_relaxed(&link.word, 0)\n", ""),
    Edit("_link_record.pyx", "min(have * 2, LINKS_MAX)", "have * 2"),
]
LOOKUP = [
    Edit("_lookup.pyx", "if word_state(found.cache_word) != CACHE_LIVE or load64_seq", "if load64_seq"),
    Edit("_lookup.pyx", "copy.first_row + copy.num_rows > ROWS_MAX", "copy.first_row + copy.num_rows > 2 * ROWS_MAX"),
    Edit("_lookup.pyx", "or words[2] != key.words[2] \\\n", "\\\n"),
    Edit("_lookup.pyx", "            if row == 0:\n", "            if row < 2:\n"),
    Edit("_lookup.pyx", "    if batch_index >= found.copy.num_rows:\n", "    if batch_index > found.copy.num_rows:\n"),
    Edit("_lookup.pyx", "exchange64_seq(&side.hazard, word_generation(found.cache_word))\n    crash_point(b\"hazard-set\")",
         "exchange64_seq(&side.hazard, word_generation(found.cache_word) + 1)"),
    Edit("_lookup.pyx", "and word_state(word) != CACHE_FREE", "and word_state(word) == CACHE_LIVE"),
    Edit("_lookup.pyx", "word_state(word) in (ROW_CONSUMED, ROW_CONSUMED_OUT)",
         "word_state(word) in (ROW_CONSUMED, ROW_REMOVED)"),
    Edit("_coverage.pyx", "begin = first if first > low else low", "begin = low"),
    Edit("_coverage.pyx", "            if seen & 0xFFFFFFFF00000000ULL != tag:\n",
         "            if False:\n"),
    Edit("_coverage.pyx", "(cache.num_tensors + TENSORS_PER_WORD - 1) // TENSORS_PER_WORD",
         "cache.num_tensors // TENSORS_PER_WORD"),
]
DIRECTORY = [
    Edit("_cache_records.pyx", "store32_relaxed(&row.batch_index, batch_index)", "store32_relaxed(&row.batch_index, 0)"),
    Edit("_cache_records.pyx", "        self.index.remove(id_hash(own.cache_id), own.first_row)\n", ""),
    Edit("_cache_records.pyx", "if batch_index >= self.own[slot].num_rows:", "if batch_index > self.own[slot].num_rows:"),
    Edit("_link_record.pyx", "other).address, slot).sides[SIDE_ACCEPTOR]", "other).address, slot).sides[SIDE_INITIATOR]"),
    Edit("_directory.pyx", "range(own.coverage_lines * WORDS_PER_LINE)", "range(1)"),
    Edit("_directory.pyx", "        exchange32_seq(&row.progress, 0)\n", ""),
    Edit("_directory.pyx", "out = ROW_CONSUMED_OUT if word_state(seen) == ROW_CONSUMED else ROW_REMOVED_OUT",
         "out = ROW_REMOVED_OUT"),
    Edit("_directory.pyx", "load32_relaxed(&row.key_kind) == KEY_REQUEST \\\n                    and is_full",
         "load32_relaxed(&row.key_kind) != KEY_REQUEST \\\n                    and is_full"),
]
INDEX = [
    Edit("_index.pyx", "hashed >> 32 << 32 | (row + 2)", "hashed >> 32 << 32 | (row + 1)"),
    Edit("_index.pyx", "            if row_of_entry < 2:\n", "            if row_of_entry <= 2:\n"),
    Edit("_index.pyx", "store64_release(&entries[i], 1)", "store64_release(&entries[i], 0)"),
    Edit("_index.pyx", "store64_relaxed(&entries[(place + step) & mask], entry)", "store64_relaxed(&entries[place], entry)"),
    Edit("_index.pyx", "        if leads_to_blocks(entry >> 32):\n", "        if False:\n"),
    Edit("_index.pyx", "<< 16 | (part ^ 1) << 8 | next_log2", "<< 16 | part << 8 | next_log2"),
]
CORE = [
    Edit("_core.pyx", ">= tensors else FIND_UNPUBLISHED", "> tensors else FIND_UNPUBLISHED"),
    Edit("_core.pyx", "    if want.select.src_count >= 0 and", "    if want.select.src_count > 1 and"),
    Edit("_core.pyx", "if count - link.unlinked_seen >= UNLINKED_RING:", "if count - link.unlinked_seen >= 2 * UNLINKED_RING:"),
    Edit("_carry.pyx", "elif segment[0].nbytes != found.copy.segment_nbytes:",
         "elif segment[0].nbytes > found.copy.segment_nbytes:"),
    Edit("_core.pyx", "    if count < found.copy.num_tensors:\n", "    if count + 1 < found.copy.num_tensors:\n"),
    Edit("_core.pyx", "if not want.consumes or found.key_kind != KEY_REQUEST or", "if not want.consumes or"),
    Edit("_local.pyx", "    local_leave(cache)\n    return False", "    return False"),
    Edit("_within.pyx", "disjoint or not may_share(src, dst)", "True"),
]
MUTANTS = [*KERNELS, *COPY, *PLAN, *FUTEX, *LINK, *LINK_RECORD, *LOOKUP, *DIRECTORY, *INDEX, *CORE]
