/* Softmax attention inside blocks of kept tokens, or in a window around each: what is near, beside LLN attention. */
#ifndef LLN_NEAR_H
#define LLN_NEAR_H

#include <stdint.h>

#include "scratch.h"
#include "tile.h"

/* The current block: its keys transposed and its values, and the weights of a tile of queries. */
typedef struct {
    long stop; /* the place after its last token; 0: none yet */
    float *keys_T, *weights, *spare;
    Rows values;
    uint8_t *nonfinite; /* causal: which values are not finite */
    int any_nonfinite;
    float *keys, *queries_T; /* windows */
} Near;

/* Windows: how many queries are computed together, and the row length of their transpose and of their scores, which
   have a row for each key. So neither keys nor values are copied where they are rows of floats, and there are few pairs
   that are computed though they lie outside the windows: for windows of 64 and vectors of 16 floats, one in three. */
#define STRIP (2 * LANES)
#define STRIP_ROW (STRIP + 16)

/* Chunks begin at multiples of this many tokens. */
INLINE long near_step(const Job *job) { return job->is_window ? TILE : job->block_size; }

Near near_begin(const Job *job, Scratch *scratch);

/* Rows of softmax(scores / sqrt(D)) times `weight`, in place; row r has `seen`, or with `step` 1 `seen + r` keys.
   `lse` (or NULL) gets the log-sum-exp of each row. */
void near_softmax(long rows, long keys, long seen, long step, float scale, float weight, float *scores, long row,
                  float *lse);

/* How many tokens before and after itself a token attends to. */
INLINE long window_before(const Job *job) { return job->is_causal ? job->block_size - 1 : (job->block_size - 1) / 2; }
INLINE long window_after(const Job *job) { return job->is_causal ? 0 : job->block_size / 2; }

/* The window of some queries: the places of all keys that they attend to. */
typedef struct {
    long first, end;
} Window;

INLINE Window window_of(const Plan *plan, long b, long first, long end) {
    return (Window){at_least(first - window_before(plan->job), 0),
                    at_most(end + window_after(plan->job), plan->key_count[b])};
}

/* Weights of all pairs of the keys of a window and the queries at places first ..., a row for each key. `lse` (or NULL)
   gets the log-sum-exp of each query, and has space for a strip. */
void window_weights(const Job *job, Window window, long first, long rows, Rows keys, Rows queries, float weight,
                    float *queries_T, float *weights, float *lse);

INLINE int any_not_finite(long count, Rows rows, long vector) {
    int any = 0;
    for (long r = 0; r < count; r++) any |= not_finite(rows.data + r * rows.row, vector);
    return any;
}

/* output = weight times the attention of the queries at places first ... end; `lse` (or NULL) gets the log-sum-exp of
   their scores. */
void near_attend(const Plan *plan, long b, long h, long first, long end, Rows queries, float weight, Rows output,
                 float *lse, Near *near, Scratch scratch);

/* What `near_lse` or `grad_lse` has of a head. */
INLINE float *lse_of(const Job *job, float *lse, long b, long h) {
    return lse ? lse + (b * job->heads + h) * job->queries : NULL;
}

/* Gradients of the blocks at places first ... end of a key head, for all of its query heads; `add`: added to what is
   there. */
void near_backward(const Plan *plan, long b, long key_head, long first, long end, float weight, int add,
                   Scratch scratch);

#endif
