/* Read bandwidth from DRAM: N threads each sum their own part of a buffer far larger than any cache here.
 *
 * For: the ceiling of decode, measured in the same run as the engines; dram.py compiles and runs it.
 * Not for: cache bandwidth, or writes.
 *
 * Usage: dram_read THREADS MEBIBYTES PASSES; prints one line with GB/s for each pass. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    const uint64_t *data;
    size_t words;
    uint64_t sum;
} Part;

static void *read_part(void *argument) {
    Part *part = argument;
    /* Eight sums: one alone would wait for its own addition. */
    uint64_t sums[8] = {0};
    for (size_t i = 0; i + 8 <= part->words; i += 8)
        for (size_t lane = 0; lane < 8; lane++) sums[lane] += part->data[i + lane];
    for (size_t lane = 0; lane < 8; lane++) part->sum += sums[lane];
    return NULL;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    int threads = atoi(argv[1]), passes = atoi(argv[3]);
    size_t words = (size_t)atol(argv[2]) * 1024 * 1024 / 8;
    uint64_t *data = aligned_alloc(64, words * 8);
    Part *parts = calloc((size_t)threads, sizeof *parts);
    pthread_t *handles = calloc((size_t)threads, sizeof *handles);
    if (!data || !parts || !handles) return 1;
    memset(data, 1, words * 8); /* touched, so that pages are there */
    uint64_t check = 0;
    for (int pass = 0; pass < passes; pass++) {
        size_t share = words / (size_t)threads;
        double start = now();
        for (int i = 0; i < threads; i++) {
            parts[i] = (Part){data + (size_t)i * share, share, 0};
            if (pthread_create(&handles[i], NULL, read_part, &parts[i])) return 1;
        }
        for (int i = 0; i < threads; i++) {
            pthread_join(handles[i], NULL);
            check += parts[i].sum;
        }
        printf("%.2f\n", (double)share * (double)threads * 8 / (now() - start) / 1e9);
    }
    return check == 0; /* used, so that the sums are not optimised away */
}
