/* Guard zones between parts of one allocation, for a build with the address sanitizer (`make sanitize`): by itself it
   detects accesses beyond the end of an allocation, not beyond the end of a part of it. Every other build gets none of
   this. */
#ifndef LLN_GUARD_H
#define LLN_GUARD_H

#if defined(__SANITIZE_ADDRESS__)
#define GUARDED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GUARDED
#endif
#endif

#ifdef GUARDED
#include <sanitizer/asan_interface.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Floats of a guard zone: more than the longest row of a tile, row_of(1024), so that an access one row too far is found
   whatever its column. */
#define GUARD 2048
/* Guard zones that the scratch memory of a thread has space for; the deepest chain of calls takes 20 parts. */
#define MAX_GUARDS 32

/* No access to these floats, until `permit`. */
static inline void forbid(float *from, float *end) {
    __asan_poison_memory_region(from, (uintptr_t)end - (uintptr_t)from);
}

/* Access to exactly these floats. They become NaN, so that what is read before it is written shows in the results. */
static inline void permit(float *from, long floats) {
    __asan_unpoison_memory_region(from, floats * sizeof(float));
    for (long i = 0; i < floats; i++) from[i] = __builtin_nanf("");
}
#else
#define GUARD 0
#define MAX_GUARDS 0
#endif

#endif
