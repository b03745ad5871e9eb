/*
 * The leaf loops of a copy: one family of functions per instruction set, chosen at run time.
 *
 * Owns: moving nbytes from src to dst. Must not know: plans, segments, locks, threads, thresholds.
 *
 * Rules of every kernel:
 *   - The two ranges never overlap; the caller guarantees it. A kernel may run in either direction, and may
 *     store a byte twice (always with the same value): ends are done by blocks that overlap each other.
 *   - Any alignment of either end, any length, zero included. Nothing outside the two ranges is read or
 *     written. (A prefetch may name an address past the end of src: it loads nothing and cannot fault.)
 *   - All of a block is loaded before any of it is stored, so that a store never holds up a load whose
 *     address agrees with it in the low twelve bits. Storing line by line instead cost streaming a fifth.
 *   - "streaming" kernels write whole cache lines past the cache. Such stores are weakly ordered, even
 *     on x86: a later ordinary store may be seen before them. The kernels do not fence. Whoever used one
 *     calls shmkv_copy_fence() once, after the last run and before anything is published.
 *
 * Why not memcpy alone: from about 4 KiB on glibc uses `rep movsb`, which falls to a twentieth of its
 * speed when dst lies a few bytes after src modulo 4096. A numpy buffer starts at page offset 16 and
 * a segment at 0, so the ordinary case of a pull is that case.
 *
 * Header only and static, so that a C program can test it; SHMKV_PORTABLE_ONLY leaves out what needs
 * an instruction set of its own.
 */
#ifndef SHMKV_KERNELS_H
#define SHMKV_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && !defined(SHMKV_PORTABLE_ONLY)
#define SHMKV_X86 1
#include <immintrin.h>
#else
#define SHMKV_X86 0
#endif

typedef void (*shmkv_copy_fn)(void *dst, const void *src, size_t nbytes);

struct shmkv_kernel {
    const char *name;
    shmkv_copy_fn ordinary;   /* through the cache: short pulls, data that is read again at once */
    shmkv_copy_fn streaming;  /* past the cache: large pulls; needs shmkv_copy_fence() at the end */
    int (*supported)(void);   /* 1 if this processor and this kernel can run it */
};

static inline int shmkv_always(void) { return 1; }

/* ---- any processor ---------------------------------------------------------------------------- */

/* A vector type only says "16 bytes in one register"; fixed-size memcpy is how C loads it unaligned. */
typedef unsigned char shmkv_v16 __attribute__((vector_size(16)));

#define SHMKV_COPY_ENDS(type)                                                                          \
    do {                                                                                               \
        type first_, last_;                                                                            \
        memcpy(&first_, s, sizeof(type));                                                              \
        memcpy(&last_, s + n - sizeof(type), sizeof(type));                                            \
        memcpy(d, &first_, sizeof(type));                                                              \
        memcpy(d + n - sizeof(type), &last_, sizeof(type));                                            \
    } while (0)

/* n <= 32: two blocks that may overlap, of the largest size that fits. */
static inline void shmkv_copy_tiny(unsigned char *d, const unsigned char *s, size_t n)
{
    if (n >= 16)
        SHMKV_COPY_ENDS(shmkv_v16);
    else if (n >= 8)
        SHMKV_COPY_ENDS(uint64_t);
    else if (n >= 4)
        SHMKV_COPY_ENDS(uint32_t);
    else if (n >= 2)
        SHMKV_COPY_ENDS(uint16_t);
    else if (n == 1)
        *d = *s;
}

static inline void shmkv_c_block64(unsigned char *d, const unsigned char *s)
{
    shmkv_v16 a, b, c, e;
    memcpy(&a, s, 16);
    memcpy(&b, s + 16, 16);
    memcpy(&c, s + 32, 16);
    memcpy(&e, s + 48, 16);
    memcpy(d, &a, 16);
    memcpy(d + 16, &b, 16);
    memcpy(d + 32, &c, 16);
    memcpy(d + 48, &e, 16);
}

/* n <= 64 */
static inline void shmkv_c_short(unsigned char *d, const unsigned char *s, size_t n)
{
    if (n <= 32) {
        shmkv_copy_tiny(d, s, n);
        return;
    }
    shmkv_copy_tiny(d, s, 32);
    shmkv_copy_tiny(d + n - 32, s + n - 32, 32);
}

static inline void shmkv_copy_c(void *dst, const void *src, size_t n)
{
    unsigned char *d = dst;
    const unsigned char *s = src;
    if (n <= 64) {
        shmkv_c_short(d, s, n);
        return;
    }
    size_t head = 16 - ((uintptr_t)d & 15);
    shmkv_copy_tiny(d, s, 16);
    for (d += head, s += head, n -= head; n > 64; d += 64, s += 64, n -= 64) {
        shmkv_c_block64(d, s);
        /* Hides the pointers' steps: the compiler must not recognise the loop as a memcpy. */
        __asm__ volatile("" : "+r"(d), "+r"(s));
    }
    /* Reaches back over bytes already written; there are more than 64 behind the end. */
    shmkv_c_block64(d + n - 64, s + n - 64);
}

static inline void shmkv_copy_memcpy(void *dst, const void *src, size_t n)
{
    if (n) /* a null pointer is no argument of memcpy, not even for nothing */
        memcpy(dst, src, n);
}

/* ---- x86-64 ----------------------------------------------------------------------------------- */

#if SHMKV_X86

#define SHMKV_AVX2 __attribute__((target("avx2"))) static inline
#define SHMKV_AVX512 __attribute__((target("avx512f"))) static inline

/* How far ahead a streaming kernel asks for its source. The hardware's own prefetch stops at each 4 KiB
 * page; 1 to 2 KiB of lead gave 5 to 10 % from DRAM, and cost nothing when the source was in cache. The
 * ordinary kernels got slower by it. */
#define SHMKV_PREFETCH_AHEAD 2048

static inline int shmkv_has_avx2(void) { return __builtin_cpu_supports("avx2") != 0; }
static inline int shmkv_has_avx512(void) { return __builtin_cpu_supports("avx512f") != 0; }

static inline void shmkv_prefetch(const unsigned char *s)
{
    _mm_prefetch((const char *)s + SHMKV_PREFETCH_AHEAD, _MM_HINT_T0);
    _mm_prefetch((const char *)s + SHMKV_PREFETCH_AHEAD + 64, _MM_HINT_T0);
}

/* Two blocks of 32 bytes each: a at the front, b at the back of what is to be copied. */
SHMKV_AVX2 void shmkv_avx2_pair(unsigned char *da, unsigned char *db, const unsigned char *sa,
                                const unsigned char *sb)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)sa);
    __m256i b = _mm256_loadu_si256((const __m256i *)sb);
    _mm256_storeu_si256((__m256i *)da, a);
    _mm256_storeu_si256((__m256i *)db, b);
}

SHMKV_AVX2 void shmkv_avx2_block128(unsigned char *d, const unsigned char *s)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)s);
    __m256i b = _mm256_loadu_si256((const __m256i *)(s + 32));
    __m256i c = _mm256_loadu_si256((const __m256i *)(s + 64));
    __m256i e = _mm256_loadu_si256((const __m256i *)(s + 96));
    _mm256_storeu_si256((__m256i *)d, a);
    _mm256_storeu_si256((__m256i *)(d + 32), b);
    _mm256_storeu_si256((__m256i *)(d + 64), c);
    _mm256_storeu_si256((__m256i *)(d + 96), e);
}

/* n <= 128 */
SHMKV_AVX2 void shmkv_avx2_short(unsigned char *d, const unsigned char *s, size_t n)
{
    if (n <= 32) {
        shmkv_copy_tiny(d, s, n);
        return;
    }
    if (n > 64)
        shmkv_avx2_pair(d + 32, d + n - 64, s + 32, s + n - 64);
    shmkv_avx2_pair(d, d + n - 32, s, s + n - 32);
}

/* 1 if a copy that runs forward would load, block by block, what agrees in the low twelve bits with what
 * it has just stored: dst lies up to 512 bytes after src modulo 4096. Backward it does not. In cache that
 * takes 5 to 18 % less from 16 bytes on, and up to 20 % more at other distances (AMD, family 17h). */
static inline int shmkv_trails(const unsigned char *d, const unsigned char *s)
{
    return (((uintptr_t)d - (uintptr_t)s - 1) & 4095) < 512;
}

/* n > 128. The mirror image of the loop below. */
SHMKV_AVX2 void shmkv_avx2_backward(unsigned char *d, const unsigned char *s, size_t n)
{
    size_t tail = (uintptr_t)(d + n) & 31;
    _mm256_storeu_si256((__m256i *)(d + n - 32), _mm256_loadu_si256((const __m256i *)(s + n - 32)));
    for (n -= tail; n > 128; n -= 128)
        shmkv_avx2_block128(d + n - 128, s + n - 128);
    shmkv_avx2_block128(d, s);
}

/* Stores are aligned to their own width by the head; 128 bytes a turn were as fast as 256. */
SHMKV_AVX2 void shmkv_copy_avx2(void *dst, const void *src, size_t n)
{
    unsigned char *d = dst;
    const unsigned char *s = src;
    if (n <= 128) {
        shmkv_avx2_short(d, s, n);
        return;
    }
    if (shmkv_trails(d, s)) {
        shmkv_avx2_backward(d, s, n);
        return;
    }
    size_t head = 32 - ((uintptr_t)d & 31);
    _mm256_storeu_si256((__m256i *)d, _mm256_loadu_si256((const __m256i *)s));
    for (d += head, s += head, n -= head; n > 128; d += 128, s += 128, n -= 128)
        shmkv_avx2_block128(d, s);
    shmkv_avx2_block128(d + n - 128, s + n - 128);
}

/* d on a 64-byte boundary */
SHMKV_AVX2 void shmkv_avx2_stream_line(unsigned char *d, const unsigned char *s)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)s);
    __m256i b = _mm256_loadu_si256((const __m256i *)(s + 32));
    _mm256_stream_si256((__m256i *)d, a);
    _mm256_stream_si256((__m256i *)(d + 32), b);
}

/* The same for two lines, all of both loaded first. */
SHMKV_AVX2 void shmkv_avx2_stream_pair(unsigned char *d, const unsigned char *s)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)s);
    __m256i b = _mm256_loadu_si256((const __m256i *)(s + 32));
    __m256i c = _mm256_loadu_si256((const __m256i *)(s + 64));
    __m256i e = _mm256_loadu_si256((const __m256i *)(s + 96));
    _mm256_stream_si256((__m256i *)d, a);
    _mm256_stream_si256((__m256i *)(d + 32), b);
    _mm256_stream_si256((__m256i *)(d + 64), c);
    _mm256_stream_si256((__m256i *)(d + 96), e);
}

/* Does not fence. Lines shared with a neighbour (head, tail) are written by ordinary stores, exactly and
 * not by overlap: an ordinary store to a line that is streamed next would throw the line out twice. */
SHMKV_AVX2 void shmkv_stream_avx2(void *dst, const void *src, size_t n)
{
    unsigned char *d = dst;
    const unsigned char *s = src;
    size_t head = (0 - (uintptr_t)d) & 63;
    if (n < head + 64) {
        shmkv_avx2_short(d, s, n);
        return;
    }
    shmkv_avx2_short(d, s, head);
    for (d += head, s += head, n -= head; n >= 128; d += 128, s += 128, n -= 128) {
        shmkv_prefetch(s);
        shmkv_avx2_stream_pair(d, s);
    }
    if (n >= 64) {
        shmkv_avx2_stream_line(d, s);
        d += 64, s += 64, n -= 64;
    }
    shmkv_avx2_short(d, s, n);
}

SHMKV_AVX512 void shmkv_avx512_pair(unsigned char *da, unsigned char *db, const unsigned char *sa,
                                    const unsigned char *sb)
{
    __m512i a = _mm512_loadu_si512(sa);
    __m512i b = _mm512_loadu_si512(sb);
    _mm512_storeu_si512(da, a);
    _mm512_storeu_si512(db, b);
}

SHMKV_AVX512 void shmkv_avx512_block256(unsigned char *d, const unsigned char *s)
{
    __m512i a = _mm512_loadu_si512(s);
    __m512i b = _mm512_loadu_si512(s + 64);
    __m512i c = _mm512_loadu_si512(s + 128);
    __m512i e = _mm512_loadu_si512(s + 192);
    _mm512_storeu_si512(d, a);
    _mm512_storeu_si512(d + 64, b);
    _mm512_storeu_si512(d + 128, c);
    _mm512_storeu_si512(d + 192, e);
}

/* n <= 256 */
SHMKV_AVX512 void shmkv_avx512_short(unsigned char *d, const unsigned char *s, size_t n)
{
    if (n <= 64) {
        shmkv_c_short(d, s, n);
        return;
    }
    if (n > 128)
        shmkv_avx512_pair(d + 64, d + n - 128, s + 64, s + n - 128);
    shmkv_avx512_pair(d, d + n - 64, s, s + n - 64);
}

SHMKV_AVX512 void shmkv_copy_avx512(void *dst, const void *src, size_t n)
{
    unsigned char *d = dst;
    const unsigned char *s = src;
    if (n <= 256) {
        shmkv_avx512_short(d, s, n);
        return;
    }
    size_t head = 64 - ((uintptr_t)d & 63);
    _mm512_storeu_si512(d, _mm512_loadu_si512(s));
    for (d += head, s += head, n -= head; n > 256; d += 256, s += 256, n -= 256)
        shmkv_avx512_block256(d, s);
    shmkv_avx512_block256(d + n - 256, s + n - 256);
}

/* Does not fence. One register is one line. */
SHMKV_AVX512 void shmkv_stream_avx512(void *dst, const void *src, size_t n)
{
    unsigned char *d = dst;
    const unsigned char *s = src;
    size_t head = (0 - (uintptr_t)d) & 63;
    if (n < head + 64) {
        shmkv_avx512_short(d, s, n);
        return;
    }
    shmkv_c_short(d, s, head);
    for (d += head, s += head, n -= head; n >= 128; d += 128, s += 128, n -= 128) {
        __m512i a = _mm512_loadu_si512(s);
        __m512i b = _mm512_loadu_si512(s + 64);
        shmkv_prefetch(s);
        _mm512_stream_si512((void *)d, a);
        _mm512_stream_si512((void *)(d + 64), b);
    }
    if (n >= 64) {
        _mm512_stream_si512((void *)d, _mm512_loadu_si512(s));
        d += 64, s += 64, n -= 64;
    }
    shmkv_c_short(d, s, n);
}

#endif /* SHMKV_X86 */

/* ---- the table -------------------------------------------------------------------------------- */

/* Orders what was copied before what is published. The stores of an ordinary kernel need no more than
 * the release store that publishes; those of a streaming one need sfence on x86. */
static inline void shmkv_copy_fence(void)
{
#if SHMKV_X86
    _mm_sfence();
#endif
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

/* In order of preference: shmkv_kernel_best() is the first that this processor supports.
 * avx2 stands before avx512 because wider registers won little on a processor with both: up to 6 % slower in
 * cache, 3 to 4 % from DRAM through it, streaming 2 % slower to 7 % faster by alignment (docs/bench-avx512.json).
 * That was when avx2 still streamed line by line; not measured again. And some processors lower their clock
 * for them. c stands before memcpy for the reason at the top of this file. */
static const struct shmkv_kernel shmkv_kernels[] = {
#if SHMKV_X86
    {"avx2", shmkv_copy_avx2, shmkv_stream_avx2, shmkv_has_avx2},
    {"avx512", shmkv_copy_avx512, shmkv_stream_avx512, shmkv_has_avx512},
#endif
    {"c", shmkv_copy_c, shmkv_copy_c, shmkv_always},
    {"memcpy", shmkv_copy_memcpy, shmkv_copy_memcpy, shmkv_always},
};

static inline size_t shmkv_kernel_count(void)
{
    return sizeof shmkv_kernels / sizeof shmkv_kernels[0];
}

/* NULL past the end. What it returns may be unsupported here: ask ->supported() before a call. */
static inline const struct shmkv_kernel *shmkv_kernel_at(size_t index)
{
    return index < shmkv_kernel_count() ? &shmkv_kernels[index] : NULL;
}

/* NULL if the name is unknown or the processor lacks the instructions. */
static inline const struct shmkv_kernel *shmkv_kernel_find(const char *name)
{
    for (size_t i = 0; i < shmkv_kernel_count(); i++)
        if (strcmp(shmkv_kernels[i].name, name) == 0)
            return shmkv_kernels[i].supported() ? &shmkv_kernels[i] : NULL;
    return NULL;
}

/* Never NULL: the last entry runs anywhere. */
static inline const struct shmkv_kernel *shmkv_kernel_best(void)
{
    size_t i = 0;
    while (!shmkv_kernels[i].supported())
        i++;
    return &shmkv_kernels[i];
}

#endif /* SHMKV_KERNELS_H */
