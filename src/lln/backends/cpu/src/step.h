/* The next token of a state: O(D V) for each head, and no scratch memory.

   LLN attention has queries and keys of its own, `width` features of `far_type`, beside those of the attention among
   neighbours. The last tokens are in a ring: kept token t is at place t % C. The tokens before a new one in its block
   are at the places before count % C, those in its window at all filled places but that one. */
#ifndef LLN_STEP_H
#define LLN_STEP_H

#include <stdint.h>
#include <string.h>

#include "prefix.h"

/* Entries of all heads from which a step is shared by threads: to start them takes about as long as this many. */
#define STEP_FOR_THREADS (1 << 18)

/* Widths are multiples of 8, but not of LANES: rows of tensors, unlike those of tiles, are read 8 floats at a time. */
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));

INLINE PrefixSums read_sums(const Advance *a, long b, long h) {
    PrefixSums sums;
    long at = (b * a->job.heads + h) * 3;
    memcpy(sums.query, a->before.query_sums + at, sizeof(sums.query));
    memcpy(sums.key, a->before.key_sums + at, sizeof(sums.key));
    sums.count = (double)a->before.count[b];
    return sums;
}

INLINE void write_sums(const Advance *a, long b, long h, const PrefixSums *sums) {
    long at = (b * a->job.heads + h) * 3;
    memcpy(a->after.query_sums + at, sums->query, sizeof(sums->query));
    memcpy(a->after.key_sums + at, sums->key, sizeof(sums->key));
}

/* The kept tokens at places first ... end of a key head become the newest of the recent ones. */
void renew_recent(const Advance *a, long b, long group, const int32_t *order, long first, long end);

void step_all(const Advance *a);
void step_heads(Plan *plan, long thread, long threads, Scratch *scratch);

#endif
