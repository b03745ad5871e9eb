/*
 * A hostile peer: maps files that it was given writable and changes numbers in them as fast as it can.
 *
 * Arguments: a seed. Standard input: one line "FD OFFSET WIDTH" for each number that it may change, then "go". It says "ready", and
 * changes one after the other to an edge, a neighbour or anything, and soon back to what stood there at first, until standard
 * input ends. Then it says how often it wrote.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>

enum { PLACES = 65536, FILES = 1024, TURNS = 4096, PAUSE = 256 };

struct place {
    void *at;
    int width;
    uint64_t kept;
};

static struct place places[PLACES];
static char *files[FILES];
static const uint64_t edges[] = {0, 1, 2, 3, 63, 64, 255, 256, 4095, 4096, 4097, 1u << 16, 1u << 21, 1u << 31, UINT32_MAX,
                                 1ull << 32, 1ull << 40, 1ull << 63, UINT64_MAX - 4096, UINT64_MAX};
#define EDGES (sizeof edges / sizeof edges[0])

static uint64_t state;

static uint64_t next_random(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static char *map_once(int fd)
{
    struct stat found;
    if (fd < 0 || fd >= FILES)
        exit(2);
    if (files[fd] == NULL) {
        if (fstat(fd, &found) != 0)
            exit(2);
        files[fd] = mmap(NULL, (size_t)found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (files[fd] == MAP_FAILED)
            exit(2);
    }
    return files[fd];
}

static void put(const struct place *place, uint64_t value)
{
    if (place->width == 4)
        *(volatile uint32_t *)place->at = (uint32_t)value;
    else
        *(volatile uint64_t *)place->at = value;
}

static size_t read_places(void)
{
    size_t count = 0, offset;
    int fd, width;
    char line[64];
    while (count < PLACES && scanf("%d %zu %d", &fd, &offset, &width) == 3) {
        places[count].at = map_once(fd) + offset;
        places[count].width = width;
        places[count].kept = width == 4 ? *(uint32_t *)places[count].at : *(uint64_t *)places[count].at;
        count++;
    }
    if (fgets(line, sizeof line, stdin) == NULL)
        exit(2);
    return count;
}

static uint64_t bad_value(const struct place *place)
{
    uint64_t random = next_random();
    switch (random & 3) {
    case 0:
        return edges[(random >> 8) % EDGES];
    case 1:
        return place->kept + (random >> 8 & 15) - 8;
    case 2:
        return (place->kept & ~(uint64_t)255) | (random >> 8 & 7);
    default:
        return next_random();
    }
}

static void scribble_once(size_t count)
{
    const struct place *place = &places[next_random() % count];
    unsigned turns = next_random() % 8 + 1, pause = next_random() % PAUSE;
    while (turns--)
        put(place, bad_value(place));
    for (volatile unsigned i = 0; i < pause; i++)
        ;
    put(place, place->kept);
    for (volatile unsigned i = 0; i < 4 * pause; i++)
        ;
}

int main(int argc, char **argv)
{
    struct pollfd input = {0, POLLIN | POLLHUP, 0};
    unsigned long long rounds = 0;
    size_t count;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    state = argc > 1 ? strtoull(argv[1], NULL, 10) | 1 : 1;
    setvbuf(stdin, NULL, _IONBF, 0);        /* the end of input must be seen by poll */
    count = read_places();
    if (count == 0)
        return 2;
    printf("ready %zu\n", count);
    fflush(stdout);
    do {
        for (int i = 0; i < TURNS; i++)
            scribble_once(count);
        rounds += TURNS;
    } while (poll(&input, 1, 0) == 0);
    printf("scribbled %llu\n", rounds);
    return 0;
}
