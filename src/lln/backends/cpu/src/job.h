/* What is to be computed: the structs that `binding.py` fills in, and the plan that is made of them. */
#ifndef LLN_JOB_H
#define LLN_JOB_H

#include <stdint.h>

#include "vector.h"

#define TILE 64
/* What tiles and the arrays of a step can hold: `why_not` refuses more. */
#define MAX_WIDTH 256
#define MAX_BLOCK 1024

/* The forms of `lln.forms`. */
enum { PAPER = 0, UNBIASED = 1, DECOMPOSED = 2 };

/* A tensor (B, heads, tokens, features); strides in elements, the last dimension contiguous. */
typedef struct {
    void *data;
    int64_t batch, head, token;
} Tensor;

/* alpha or beta: a float for each (batch, head, token), with strides of 0 where it is the same. */
typedef struct {
    float *data;
    int64_t batch, head, token;
} Scale;

/* Filled by `binding.py`, which packs the fields in this order; 8 bytes each. */
typedef struct {
    int64_t batch, heads, key_heads, queries, keys, width, value_width;
    int64_t type, threads, is_causal, block_size; /* block_size 0: no blocks */
    int64_t with_lln, match_alpha, match_beta;    /* match_*: to be computed here and written to the Scale, if any */
    Tensor query, key, value, output;
    uint8_t *keep_query, *keep_key; /* (B, tokens) bool, contiguous; NULL: all */
    Scale alpha, beta;
    /* (B, H, 2, D): the largest key of each feature, and the log of the sum of exp(beta (k - largest)). Together they
       are the log-mass L, but apart they stay exact where L is large. (B, H, D, Dv): the mean values. For the way back;
       NULL if there is none. With `sample_centers` (B, H, 4, D): also the centres of queries and keys. */
    float *mass, *values;
    /* the matching curve: log s² over log variance, rows for key counts; or the line of `linear` */
    float *curve;
    int64_t curve_rows, curve_columns; /* 0 rows: the line */
    double log_start, log_ratio, log_first_count, log_count_ratio, line_a, line_b;
    /* backward only */
    Tensor grad_output, grad_query, grad_key, grad_value;
    float *grad_alpha, *grad_beta; /* (B, H, tokens) contiguous, or NULL */
    int64_t is_window;             /* `block_size` is that of a window around each token */
    Scale key_weight;   /* log-weights of the keys, added to all features of beta k; NULL: none. Paper's form: not with
                           match_* */
    float *grad_weight; /* (B, H, keys) contiguous, or NULL; backward only */
    int64_t form;
    int64_t sample_centers; /* centres are means of the sample: written forward, differentiated backward; not causal */
    Tensor center_query, center_key; /* (B, H, D) and (B, key heads, D) floats of the decomposed form; NULL with
                                        `sample_centers`: they are not returned */
    float *near_lse; /* (B, H, tokens) contiguous: the log-sum-exp of the scores of softmax attention, 0 in padding;
                        NULL: not wanted. Without LLN attention, or in an Advance with separate outputs */
    float *grad_lse; /* its gradient, or NULL; backward only */
} Job;

/* What a state keeps of its tokens (`lln.LLNState`); all tensors are contiguous. */
typedef struct {
    float *mass, *values;            /* (B, H, D) the log-mass L, (B, H, D, V) the mean values S */
    int64_t *count;                  /* (B) kept tokens */
    double *query_sums, *key_sums;   /* (B, H, 3): PrefixSums */
    void *recent_key, *recent_value; /* (B, H_k, C, near width or V): kept token t at place t % C; NULL without C */
} State;

/* The next tokens of a state. `job` describes the tokens; its `block_size` is C, and where alpha or beta is not to be
   matched its Scale has one for each (batch, head). Its query and key, of `far_type`, are those of LLN attention. */
typedef struct {
    Job job;
    Tensor near;                 /* the attention to neighbours; data NULL: `job.output` is the mean of both */
    Tensor near_query, near_key; /* what it is computed of, `near_width` features of `job.type` */
    int64_t near_width, far_type;
    int64_t output_type; /* of `job.output` and `near` */
    State before, after; /* the same pointers: in place */
} Advance;

typedef struct {
    const Job *job;
    int32_t *query_order, *key_order; /* (B, tokens): kept tokens first, then the others; NULL: as they come */
    int64_t *query_count, *key_count; /* (B): how many are kept */
    int64_t chunks;                   /* pieces that the tokens of each head are cut into */
    float *parts;                     /* the results of the pieces */
    int64_t failed;                   /* out of memory */
    int64_t taken;                    /* pieces of work that some thread has begun */
    long floats;                      /* of scratch memory for each thread; 0: scratch_floats() */
} Plan;

INLINE long padded(long width) { return (width + LANES - 1) / LANES * LANES; }
/* Rows of scratch tiles lie a cache line further apart than needed, or rows would share few sets of the cache. */
INLINE long row_of(long width) { return padded(width) + 16; }
INLINE long at_most(long x, long y) { return x < y ? x : y; }
INLINE long at_least(long x, long y) { return x > y ? x : y; }

INLINE char *head_of(const Tensor *x, long type, long batch, long head) {
    return (char *)x->data + (batch * x->batch + head * x->head) * bytes_of(type);
}

INLINE float scale_of(const Scale *x, long batch, long head, long token) {
    return x->data[batch * x->batch + head * x->head + token * x->token];
}

/* What `mass` has of a head. */
INLINE float *mass_of(const Job *job, long batch, long head) {
    return job->mass + (batch * job->heads + head) * (job->sample_centers ? 4 : 2) * job->width;
}

INLINE long token_at(const int32_t *order, long place) { return order ? order[place] : place; }

/* Tokens that softmax attention needs at once: a block, or the windows of a tile of queries. */
INLINE long near_size(const Job *job) {
    return at_most(job->is_window ? job->block_size - 1 + TILE : job->block_size, job->keys);
}

INLINE int has_form(const Job *job) { return job->form != PAPER; }

INLINE const int32_t *key_order(const Plan *plan, long b) {
    return plan->key_order ? plan->key_order + b * plan->job->keys : NULL;
}

INLINE const int32_t *query_order(const Plan *plan, long b) {
    return plan->query_order ? plan->query_order + b * plan->job->queries : NULL;
}

#define EXPORT __attribute__((visibility("default")))

#endif
