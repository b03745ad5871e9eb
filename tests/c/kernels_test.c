/*
 * Every copy kernel that this processor supports, against memcmp.
 *
 * Prints one line per kernel ("supported NAME" or "unsupported NAME"), one per form that was run
 * ("tested NAME FORM CASES"), and "all kernels agree" at the end. Exits 1 at the first difference.
 */
#define _GNU_SOURCE
#include "_kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGNMENTS = 64, LONGEST = 4096, GUARD = 64, ALL_ALIGNMENTS_UP_TO = 320, CANARY = 0xA5, APART = 1024 };

/* These meet all 64 x 64 alignments besides every length up to ALL_ALIGNMENTS_UP_TO. */
static const size_t long_lengths[] = {383, 384, 385, 511, 512, 513, 767,
                                      1023, 1024, 1025, 2048, 4033, 4095, 4096};
/* These meet every length up to LONGEST. */
static const size_t some_alignments[] = {0, 1, 16, 31, 33, 63};
#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])

/* Modulo 4096 the target begins GUARD bytes after the first source, and as many less APART after the second:
 * which way a kernel runs may follow from that. */
static _Alignas(4096) unsigned char source[APART + LONGEST + 2 * ALIGNMENTS];
static const size_t sources[] = {0, APART};
static _Alignas(4096) unsigned char target[GUARD + ALIGNMENTS + LONGEST + GUARD];
static unsigned char canaries[GUARD];
static long cases;

/* No period that a wrong offset could hide behind, and never the canary's value. */
static void fill_source(void)
{
    uint32_t state = 12345;
    for (size_t i = 0; i < sizeof source; i++) {
        state = state * 1664525u + 1013904223u;
        source[i] = (unsigned char)(state >> 24);
        if (source[i] == CANARY)
            source[i] = 0;
    }
}

static void fail(const char *what, size_t src_offset, size_t dst_offset, size_t n)
{
    printf("FAILED: %s: src offset %zu, dst offset %zu, %zu bytes\n", what, src_offset, dst_offset, n);
    exit(1);
}

static void check_one(shmkv_copy_fn copy, size_t src_offset, size_t dst_offset, size_t n)
{
    unsigned char *dst = target + GUARD + dst_offset;
    memset(dst - GUARD, CANARY, n + 2 * GUARD);
    copy(dst, source + src_offset, n);
    shmkv_copy_fence();
    if (memcmp(dst, source + src_offset, n) != 0)
        fail("bytes differ", src_offset, dst_offset, n);
    if (memcmp(dst - GUARD, canaries, GUARD) != 0)
        fail("written before the range", src_offset, dst_offset, n);
    if (memcmp(dst + n, canaries, GUARD) != 0)
        fail("written after the range", src_offset, dst_offset, n);
    cases++;
}

static void check_all_alignments(shmkv_copy_fn copy, size_t n)
{
    for (size_t i = 0; i < COUNT_OF(sources); i++)
        for (size_t src_offset = 0; src_offset < ALIGNMENTS; src_offset++)
            for (size_t dst_offset = 0; dst_offset < ALIGNMENTS; dst_offset++)
                check_one(copy, sources[i] + src_offset, dst_offset, n);
}

static void check_some_alignments(shmkv_copy_fn copy, size_t n)
{
    for (size_t k = 0; k < COUNT_OF(sources); k++)
        for (size_t i = 0; i < COUNT_OF(some_alignments); i++)
            for (size_t j = 0; j < COUNT_OF(some_alignments); j++)
                check_one(copy, sources[k] + some_alignments[i], some_alignments[j], n);
}

/* Two readable pages between two that fault. */
static unsigned char *fenced_pages(size_t page)
{
    unsigned char *base = mmap(NULL, 4 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + page, 2 * page, PROT_READ | PROT_WRITE) != 0) {
        perror("fenced pages");
        exit(1);
    }
    return base + page;
}

/* A read or write outside the ranges would end the program with SIGSEGV. */
static void check_against_fences(shmkv_copy_fn copy, unsigned char *src, unsigned char *dst, size_t room)
{
    for (size_t n = 0; n <= LONGEST; n++) {
        copy(dst, src + room - n, n);
        copy(dst + room - n, src, n);
        shmkv_copy_fence();
        if (memcmp(dst + room - n, src, n) != 0)
            fail("bytes differ at a fence", 0, room - n, n);
        cases++;
    }
}

static void check_kernel(const char *name, const char *form, shmkv_copy_fn copy)
{
    size_t room = 2 * (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *src = fenced_pages(room / 2), *dst = fenced_pages(room / 2);
    cases = 0;
    printf("testing %s %s\n", name, form); /* names the culprit, should a fence end the program */
    fflush(stdout);
    memcpy(src, source, LONGEST);
    for (size_t n = 0; n <= ALL_ALIGNMENTS_UP_TO; n++)
        check_all_alignments(copy, n);
    for (size_t i = 0; i < COUNT_OF(long_lengths); i++)
        check_all_alignments(copy, long_lengths[i]);
    for (size_t n = 0; n <= LONGEST; n++)
        check_some_alignments(copy, n);
    check_against_fences(copy, src, dst, room);
    munmap(src - room / 2, 2 * room);
    munmap(dst - room / 2, 2 * room);
    printf("tested %s %s %ld\n", name, form, cases);
}

static int check_table(void)
{
    const struct shmkv_kernel *best = shmkv_kernel_best();
    for (size_t i = 0; i < shmkv_kernel_count(); i++) {
        const struct shmkv_kernel *kernel = shmkv_kernel_at(i);
        const struct shmkv_kernel *found = shmkv_kernel_find(kernel->name);
        if (found != (kernel->supported() ? kernel : NULL))
            return 0;
    }
    return shmkv_kernel_at(shmkv_kernel_count()) == NULL && shmkv_kernel_find("no such kernel") == NULL
           && shmkv_kernel_find(best->name) == best;
}

int main(void)
{
    fill_source();
    memset(canaries, CANARY, sizeof canaries);
    if (!check_table()) {
        printf("FAILED: the table does not agree with itself\n");
        return 1;
    }
    printf("best %s\n", shmkv_kernel_best()->name);
    for (size_t i = 0; i < shmkv_kernel_count(); i++) {
        const struct shmkv_kernel *kernel = shmkv_kernel_at(i);
        printf("%s %s\n", kernel->supported() ? "supported" : "unsupported", kernel->name);
        if (!kernel->supported())
            continue;
        check_kernel(kernel->name, "ordinary", kernel->ordinary);
        check_kernel(kernel->name, "streaming", kernel->streaming);
    }
    printf("all kernels agree\n");
    return 0;
}
