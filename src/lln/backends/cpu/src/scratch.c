#include "scratch.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef GUARDED
void guard_rest(Scratch *scratch, long floats) {
    long whole = (floats + 15) / 16 * 16;
    if (floats > scratch->left || whole + GUARD > scratch->end - scratch->next) {
        fprintf(stderr, "take: %ld floats requested, scratch_floats() leaves %ld, %ld with MAX_GUARDS guard zones\n",
                floats, scratch->left, (long)(scratch->end - scratch->next));
        abort();
    }
    forbid(scratch->next, scratch->end);
    permit(scratch->next, floats);
    scratch->left -= whole;
}
#endif

long scratch_floats(const Job *job) {
    long wide = row_of(at_least(job->width, job->value_width));
    long block = job->block_size ? at_least(near_size(job), TILE) : TILE;
    long block_row = row_of(block);
    return 20 * TILE * wide + 8 * wide * wide + 5 * TILE * block_row + 4 * wide * block_row + 5 * block * wide +
           64 * wide;
}

/* Each thread keeps its scratch memory for the next job: fresh memory costs more than a short job takes. */
static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free); }

float *own_scratch(long floats) {
    pthread_once(&scratch_once, make_scratch_key);
    long *memory = pthread_getspecific(scratch_key); /* its size, and from the next cache line on the floats */
    if (!memory || *memory < floats || GUARD) {      /* guarded: afresh, so that it ends where this job's does */
        free(memory);
        memory = malloc((floats + 32) * sizeof(float));
        if (memory) *memory = floats;
        pthread_setspecific(scratch_key, memory);
    }
    return memory ? (float *)(((uintptr_t)memory + 127) & ~(uintptr_t)63) : NULL;
}

Scratch begin_scratch(float *memory, long floats) {
#ifdef GUARDED
    Scratch scratch = {memory + GUARD, memory + floats + MAX_GUARDS * GUARD, floats};
    forbid(memory, scratch.end);
    return scratch;
#else
    (void)floats;
    return (Scratch){memory};
#endif
}
