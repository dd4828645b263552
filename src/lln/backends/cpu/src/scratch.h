/* Scratch memory of a thread. */
#ifndef LLN_SCRATCH_H
#define LLN_SCRATCH_H

#include <string.h>

#include "guard.h"
#include "job.h"

/* Scratch memory of a thread. It is passed by value: what a function takes of it is free again when it returns. */
typedef struct {
    float *next;
#ifdef GUARDED
    float *end; /* of the memory, guard zones included */
    long left;  /* floats that an ordinary build has left, which has no guard zones */
#endif
} Scratch;

#ifdef GUARDED
/* Leave access to the floats that are taken now and to none behind them: there are a guard zone and the parts of
   functions that have returned. The extent is what was requested, not what it is rounded up to: callers that load and
   store whole vectors request whole vectors. */
void guard_rest(Scratch *scratch, long floats);
#endif

INLINE float *take(Scratch *scratch, long floats) {
    float *taken = scratch->next;
#ifdef GUARDED
    guard_rest(scratch, floats);
#endif
    scratch->next += (floats + 15) / 16 * 16 + GUARD;
    return taken;
}

/* Floats from one of several equal parts of an allocation to the next. */
INLINE long part_stride(long floats) { return floats + GUARD; }

/* What follows `count` parts in memory; guarded, no access to the guard zones between them. */
INLINE float *after_parts(float *parts, long count, long floats) {
#ifdef GUARDED
    for (long i = 0; i < count; i++)
        forbid(parts + i * part_stride(floats) + floats, parts + (i + 1) * part_stride(floats));
#endif
    return parts + count * part_stride(floats);
}

INLINE float *take_zeros(Scratch *scratch, long floats) {
    float *taken = take(scratch, floats);
    memset(taken, 0, floats * sizeof(float));
    return taken;
}

INLINE float *take_filled(Scratch *scratch, long floats, float value) {
    float *taken = take(scratch, floats);
    for (long i = 0; i < floats; i++) taken[i] = value;
    return taken;
}

/* Scratch of one thread, enough for every step: tiles, blocks of softmax attention, and matrices of a head. */
long scratch_floats(const Job *job);

float *own_scratch(long floats);
Scratch begin_scratch(float *memory, long floats);

#endif
