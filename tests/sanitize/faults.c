/* Faults that `make sanitize` must find, or it would pass whatever the code does. */
#include <limits.h>

#include "scratch.h"

static Scratch small_scratch(void) {
    Job job = {.width = 8, .value_width = 8, .keys = 8};
    long floats = scratch_floats(&job);
    return begin_scratch(own_scratch(floats + MAX_GUARDS * GUARD), floats);
}

/* 20 floats are rounded up to 32 in memory, but the vector is beyond those that were requested. */
EXPORT void vector_behind_a_part(void) {
    Scratch scratch = small_scratch();
    float *part = take(&scratch, 20);
    take(&scratch, 64);
    store(part + 20, broadcast(1.f));
}

EXPORT void vector_before_a_part(void) {
    Scratch scratch = small_scratch();
    store(take(&scratch, 64) - LANES, broadcast(1.f));
}

static float *taken_inside(Scratch scratch) { return take(&scratch, 64); }

EXPORT void part_of_a_function_that_returned(void) {
    Scratch scratch = small_scratch();
    float *part = taken_inside(scratch);
    take(&scratch, 16);
    part[40] = 1.f;
}

EXPORT void more_than_the_scratch_has(void) {
    Scratch scratch = small_scratch();
    for (;;) take(&scratch, 1024);
}

EXPORT long signed_overflow(void) {
    volatile long maximum = LONG_MAX;
    return maximum + 1;
}
