/* LLN attention, block-diagonal attention and their mean on a CPU, forward and backward: the entry points.

   `binding.py` fills in a Job (job.h). Nothing here depends on torch. Heads go to threads; where heads are too few for
   that, tokens are cut into chunks as well, and the results of the chunks are merged in their order, so that the same
   job with the same number of threads gives the same bits. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "advance.h"
#include "full.h"
#include "heads.h"
#include "step.h"

/* Places of kept tokens and then of the others; NULL where all are kept. */
static int32_t *read_order(const uint8_t *keep, long batch, long tokens, int64_t *count, int64_t *failed) {
    for (long b = 0; b < batch; b++) count[b] = tokens;
    if (!keep) return NULL;
    int32_t *order = malloc(at_least(batch * tokens, 1) * sizeof(int32_t));
    if (!order) {
        *failed = 1;
        return NULL;
    }
    for (long b = 0; b < batch; b++) {
        long place = 0;
        for (int kept = 1; kept >= 0; kept--) {
            for (long t = 0; t < tokens; t++)
                if ((keep[b * tokens + t] != 0) == kept) order[b * tokens + place++] = (int32_t)t;
            if (kept) count[b] = place;
        }
    }
    return order;
}

/* Request large pages where a result is so large that the C library maps it again for every call: touching it page by
   page for the first time would take as long as computing it. */
static void in_large_pages(const Job *job, const Tensor *x, long heads, long tokens, long width) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = 2 << 20;
    long floats = (job->batch - 1) * x->batch + (heads - 1) * x->head + (tokens - 1) * x->token + width;
    uintptr_t first = ((uintptr_t)x->data + page - 1) & ~(page - 1);
    uintptr_t end = ((uintptr_t)x->data + floats * bytes_of(job->type)) & ~(page - 1);
    if (x->data && floats * bytes_of(job->type) >= 32 << 20) madvise((void *)first, end - first, MADV_HUGEPAGE);
#else
    (void)job, (void)x, (void)heads, (void)tokens, (void)width;
#endif
}

/* Multiplications, about, below which a job stays in one thread: to start the others takes as long. */
#define JOB_FOR_THREADS (1 << 19)

static int is_small(const Job *job) {
    double tokens = (double)job->batch * job->heads * at_least(job->queries, job->keys);
    long seen = at_most(job->block_size, job->keys) + (job->with_lln ? at_least(job->width, job->value_width) : 0);
    return tokens * (job->width + job->value_width) * seen < JOB_FOR_THREADS;
}

static int64_t execute(Job copy, int is_backward) {
    const Job *job = &copy;
    if (is_small(job)) copy.threads = 1;
    Plan plan = {.job = job};
    long heads = job->batch * job->heads, scales = job->is_causal ? job->queries : 1;
    long centers = job->sample_centers && !job->center_query.data ? job->width : 0;
    /* behind the counts: alpha, beta and centres that are not returned */
    int64_t *counts =
        malloc(2 * at_least(job->batch, 1) * sizeof(int64_t) + 2 * heads * (scales + centers) * sizeof(float));
    if (!counts) return 1;
    float *not_returned = (float *)(counts + 2 * job->batch);
    Scale own = {not_returned, job->heads * scales, scales, job->is_causal ? 1 : 0};
    if (job->match_alpha && !job->alpha.data) copy.alpha = own;
    own.data += heads * scales;
    if (job->match_beta && !job->beta.data) copy.beta = own;
    if (centers) {
        float *at = not_returned + 2 * heads * scales;
        copy.center_query = (Tensor){at, job->heads * centers, centers, 0};
        copy.center_key = (Tensor){at + heads * centers, job->key_heads * centers, centers, 0};
    }
    plan.query_count = counts;
    plan.key_count = counts + job->batch;
    plan.key_order = read_order(job->keep_key, job->batch, job->keys, plan.key_count, &plan.failed);
    plan.query_order = read_order(job->keep_query, job->batch, job->queries, plan.query_count, &plan.failed);
    int in_sequence = job->is_causal && job->with_lln;              /* a token needs what comes before it */
    long units = is_backward ? job->batch * job->key_heads : heads; /* what a thread can take whole */
    plan.chunks = choose_chunks(units, at_least(job->queries, job->keys), job->threads, in_sequence ? 1.5 : 1.);
    int cut = plan.chunks > 1, shared = !in_sequence && job->heads != job->key_heads;
    long floats = 0;
    if (job->with_lln && in_sequence && cut) floats = is_backward ? causal_parts_backward(&plan) : causal_parts(&plan);
    else if (job->with_lln && !in_sequence && is_backward)
        floats = heads * plan.chunks * part_stride(memory_grad_floats(job));
    else if (job->with_lln && (shared || cut))
        floats = heads * plan.chunks * (2 * part_stride(moments_floats(job->width)) + part_stride(memory_floats(job)));
    if (floats) plan.parts = malloc(floats * sizeof(float));
    if (floats && !plan.parts) plan.failed = 1;
    Work forward = !cut && !shared ? whole_heads : in_sequence ? causal_chunked_heads : chunked_heads;
    Work backward = !cut ? whole_heads_backward : in_sequence ? causal_chunked_heads_backward : chunked_heads_backward;
    if (is_backward) {
        in_large_pages(job, &job->grad_query, job->heads, job->queries, job->width);
        in_large_pages(job, &job->grad_key, job->key_heads, job->keys, job->width);
        in_large_pages(job, &job->grad_value, job->key_heads, job->keys, job->value_width);
    } else {
        in_large_pages(job, &job->output, job->heads, job->queries, job->value_width);
    }
    if (!plan.failed) run(&plan, is_backward ? backward : forward);
    free(plan.parts);
    free(plan.key_order);
    free(plan.query_order);
    free(counts);
    return plan.failed;
}

/* All give 0, or 1 if there was no memory. */
EXPORT int64_t lln_forward(const Job *job) { return execute(*job, 0); }

/* Whether gradients of keys are not all finite, judged by few of them: a token that is not finite spoils those of all
   keys before it, in blocks and windows of those next to it. */
static int is_spoiled(const Job *job) {
    long step = job->keep_key ? 1 : job->with_lln ? at_least(job->keys, 1) : job->block_size, W = padded(job->width);
    float row[MAX_WIDTH + LANES] = {0};
    for (long i = 0; i < job->batch * job->key_heads; i++) {
        const char *head = head_of(&job->grad_key, job->type, i / job->key_heads, i % job->key_heads);
        for (long t = 0; t < job->keys; t += step) {
            read_row(job->type, head + t * job->grad_key.token * bytes_of(job->type), job->width, row);
            if (not_finite(row, W)) return 1;
        }
    }
    return 0;
}

/* Also 2: gradients are there, but those of the past may be spoiled by later tokens (`future.py`). */
EXPORT int64_t lln_backward(const Job *job) {
    int64_t failed = execute(*job, 1);
    return failed ? failed : job->is_causal && is_spoiled(job) ? 2 : 0;
}

/* Where a job keeps what its backward pass needs: mass, values, alpha and beta, one after the other. */
static void keep_in(Job *job, float *kept) {
    if (!kept || !job->with_lln) return;
    long H = job->heads, D = job->width, heads = job->batch * H, scales = job->is_causal ? job->queries : 1;
    if (!job->is_causal) {
        long rows = (job->sample_centers ? 4 : 2) * D;
        job->mass = kept;
        job->values = kept + heads * rows;
        kept = job->values + heads * D * job->value_width;
        if (job->sample_centers) {
            job->center_query = (Tensor){job->mass + 2 * D, H * rows, rows, 0};
            job->center_key = (Tensor){job->mass + 3 * D, H * rows, H / job->key_heads * rows, 0};
        }
    }
    job->alpha = (Scale){kept, H * scales, scales, job->is_causal};
    job->beta = (Scale){kept + heads * scales, H * scales, scales, job->is_causal};
}

/* A job like another one, with tensors of its own; `kept` may be NULL. */
EXPORT int64_t lln_forward_like(const Job *like, void *query, void *key, void *value, void *output, float *kept,
                                int64_t threads) {
    Job job = *like;
    job.query.data = query;
    job.key.data = key;
    job.value.data = value;
    job.output.data = output;
    job.threads = threads;
    keep_in(&job, kept);
    return execute(job, 0);
}

EXPORT int64_t lln_backward_like(const Job *like, void *query, void *key, void *value, void *grad, float *kept,
                                 void *grad_query, void *grad_key, void *grad_value, int64_t threads) {
    Job job = *like;
    job.query.data = query;
    job.key.data = key;
    job.value.data = value;
    job.output.data = job.grad_output.data = grad;
    job.grad_query.data = grad_query;
    job.grad_key.data = grad_key;
    job.grad_value.data = grad_value;
    job.threads = threads;
    keep_in(&job, kept);
    return lln_backward(&job);
}

/* The same for the next tokens of a state. */
EXPORT int64_t lln_advance(const Advance *advance) {
    const Job *job = &advance->job;
    Plan plan = {.job = job};
    if (job->keys == 1) {
        long work = job->batch * job->heads * job->width * (job->value_width + job->block_size);
        if (work < STEP_FOR_THREADS || job->threads < 2) step_all(advance);
        else run(&plan, step_heads);
        return plan.failed;
    }
    int64_t *counts = malloc(job->batch * sizeof(int64_t));
    if (!counts) return 1;
    plan.key_count = counts;
    plan.key_order = read_order(job->keep_key, job->batch, job->keys, counts, &plan.failed);
    plan.floats = advance_floats(advance);
    in_large_pages(job, &job->output, job->heads, job->queries, job->value_width);
    if (!plan.failed) run(&plan, advance_heads);
    for (long b = 0; b < job->batch; b++) advance->after.count[b] = advance->before.count[b] + counts[b];
    free(plan.key_order);
    free(counts);
    return plan.failed;
}

/* A step like another one of the same state, in place, with tokens of its own. */
EXPORT int64_t lln_step_like(const Advance *like, void *query, void *key, void *value, void *output, int64_t threads) {
    Advance step = *like;
    step.job.query.data = step.near_query.data = query;
    step.job.key.data = step.near_key.data = key;
    step.job.value.data = value;
    step.job.output.data = output;
    step.job.threads = threads;
    return lln_advance(&step);
}

/* What `layout.py` states, too; the two are compared when the library is loaded. */
typedef struct {
    const char *name;
    int64_t value;
} Fact;

#define FACT(constant) {#constant, constant}
#define SIZE(type) {#type, sizeof(type)}
#define PLACE(type, field) {#type "." #field, offsetof(type, field)}

EXPORT const Fact lln_facts[] = {
    FACT(MAX_WIDTH),
    FACT(MAX_BLOCK),
    FACT(FLOAT32),
    FACT(BFLOAT16),
    FACT(FLOAT16),
    FACT(PAPER),
    FACT(UNBIASED),
    FACT(DECOMPOSED),
    SIZE(Tensor),
    SIZE(Scale),
    SIZE(Job),
    SIZE(State),
    SIZE(Advance),
    PLACE(Tensor, data),
    PLACE(Tensor, batch),
    PLACE(Tensor, head),
    PLACE(Tensor, token),
    PLACE(Scale, data),
    PLACE(Scale, batch),
    PLACE(Scale, head),
    PLACE(Scale, token),
    PLACE(Job, batch),
    PLACE(Job, heads),
    PLACE(Job, key_heads),
    PLACE(Job, queries),
    PLACE(Job, keys),
    PLACE(Job, width),
    PLACE(Job, value_width),
    PLACE(Job, type),
    PLACE(Job, threads),
    PLACE(Job, is_causal),
    PLACE(Job, block_size),
    PLACE(Job, with_lln),
    PLACE(Job, match_alpha),
    PLACE(Job, match_beta),
    PLACE(Job, query),
    PLACE(Job, key),
    PLACE(Job, value),
    PLACE(Job, output),
    PLACE(Job, keep_query),
    PLACE(Job, keep_key),
    PLACE(Job, alpha),
    PLACE(Job, beta),
    PLACE(Job, mass),
    PLACE(Job, values),
    PLACE(Job, curve),
    PLACE(Job, curve_rows),
    PLACE(Job, curve_columns),
    PLACE(Job, log_start),
    PLACE(Job, log_ratio),
    PLACE(Job, log_first_count),
    PLACE(Job, log_count_ratio),
    PLACE(Job, line_a),
    PLACE(Job, line_b),
    PLACE(Job, grad_output),
    PLACE(Job, grad_query),
    PLACE(Job, grad_key),
    PLACE(Job, grad_value),
    PLACE(Job, grad_alpha),
    PLACE(Job, grad_beta),
    PLACE(Job, is_window),
    PLACE(Job, key_weight),
    PLACE(Job, grad_weight),
    PLACE(Job, form),
    PLACE(Job, sample_centers),
    PLACE(Job, center_query),
    PLACE(Job, center_key),
    PLACE(Job, near_lse),
    PLACE(Job, grad_lse),
    PLACE(State, mass),
    PLACE(State, values),
    PLACE(State, count),
    PLACE(State, query_sums),
    PLACE(State, key_sums),
    PLACE(State, recent_key),
    PLACE(State, recent_value),
    PLACE(Advance, job),
    PLACE(Advance, near),
    PLACE(Advance, near_query),
    PLACE(Advance, near_key),
    PLACE(Advance, near_width),
    PLACE(Advance, far_type),
    PLACE(Advance, output_type),
    PLACE(Advance, before),
    PLACE(Advance, after),
    {NULL, 0},
};
