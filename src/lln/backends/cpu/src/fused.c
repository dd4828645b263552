/* LLN attention, block-diagonal attention and their mean on a CPU, forward and backward: the entry points.

   `binding.py` fills in a Job (job.h). Nothing here knows torch. Heads go to threads; where heads are too few for that,
   tokens are cut into chunks as well, and what the chunks measure, remember and hand back is merged in their order, so
   that the same job with the same number of threads gives the same bits. */

#include <stddef.h>
#include <sys/mman.h>

#include "advance.h"
#include "causal.h"

typedef struct {
    long batch, head, chunk;
} Item;

INLINE Item item_at(long index, long heads, long chunks) {
    return (Item){index / chunks / heads, index / chunks % heads, index % chunks};
}

static void measure_queries(Plan *plan, Item at, Moments m, Scratch scratch) {
    const Job *job = plan->job;
    long count = plan->query_count[at.batch], c = at.chunk, n = plan->chunks;
    measure(job, head_of(&job->query, job->type, at.batch, at.head), job->query.token, query_order(plan, at.batch),
            chunk_start(count, c, n, TILE), chunk_start(count, c + 1, n, TILE), 1, m, scratch);
}

static void measure_keys(Plan *plan, Item at, int covariance, Moments m, Scratch scratch) {
    const Job *job = plan->job;
    long count = plan->key_count[at.batch], c = at.chunk, n = plan->chunks;
    measure(job, head_of(&job->key, job->type, at.batch, at.head), job->key.token, key_order(plan, at.batch),
            chunk_start(count, c, n, TILE), chunk_start(count, c + 1, n, TILE), covariance, m, scratch);
}

/* alpha and beta of a head where they are wanted, and the largest key of each feature. */
static void decide(const Job *job, long b, long h, Moments q, Moments k, float *most) {
    float *alpha = job->match_alpha ? job->alpha.data + b * job->alpha.batch + h * job->alpha.head : NULL;
    float *beta = job->match_beta ? job->beta.data + b * job->beta.batch + h * job->beta.head : NULL;
    if (alpha || beta) match(job, q, k, alpha, beta);
    for (long i = 0; i < padded(job->width); i++) most[i] = k.most[i] + k.shows[i];
}

static void recall_chunk(const Plan *plan, Item at, Scratch scratch) {
    long tokens = plan->job->queries, c = at.chunk, n = plan->chunks, step = step_of(plan->job);
    recall(plan, at.batch, at.head, chunk_start(tokens, c, n, step), chunk_start(tokens, c + 1, n, step), scratch);
}

/* A head at a time: nothing is shared. */
static void whole_heads(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    (void)thread, (void)threads;
    if (!scratch) return;
    NEXT(index, plan, job->batch * job->heads) {
        Item at = item_at(index, job->heads, 1);
        Scratch local = *scratch;
        if (job->with_lln && job->is_causal) {
            causal_head(plan, at.batch, at.head, local);
            continue;
        }
        if (job->with_lln) {
            Moments q = moments_at(take(&local, moments_floats(job->width)), job->width);
            Moments k = moments_at(take(&local, moments_floats(job->width)), job->width);
            Memory memory = memory_at(take(&local, memory_floats(job)), job);
            int matched = job->match_alpha || job->match_beta;
            if (is_weighted(job)) {
                largest_weighted(plan, at.batch, at.head, 0, plan->key_count[at.batch], memory.most, local);
            } else {
                if (matched) measure_queries(plan, at, q, local);
                measure_keys(plan, at, matched, k, local);
                decide(job, at.batch, at.head, q, k, memory.most);
            }
            remember(plan, at.batch, at.head, 0, plan->key_count[at.batch], memory, local);
            keep_memory(job, at.batch, at.head, plan->key_count[at.batch], memory);
        }
        recall_chunk(plan, at, *scratch);
    }
}

/* The largest keys of a chunk, with their weights; and those of all chunks of a head, for each of them. */
static void largest_of_chunk(const Plan *plan, long index, Memory memory, Scratch scratch) {
    Item at = item_at(index, plan->job->heads, plan->chunks);
    long count = plan->key_count[at.batch], C = plan->chunks;
    largest_weighted(plan, at.batch, at.head, chunk_start(count, at.chunk, C, TILE),
                     chunk_start(count, at.chunk + 1, C, TILE), memory.most, scratch);
}

static void join_largest(const Job *job, long chunks, float *parts, long each) {
    for (long i = 0; i < padded(job->width); i++) {
        float most = parts[i];
        for (long c = 1; c < chunks; c++) {
            float other = parts[c * each + i];
            if (other > most || other != other) most = other;
        }
        for (long c = 0; c < chunks; c++) parts[c * each + i] = most;
    }
}

/* Where heads share keys or are cut into chunks: step by step, all together. */
static void together(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    long B = job->batch, H = job->heads, Hk = job->key_heads, C = plan->chunks;
    long floats = moments_floats(job->width), each = apart(floats), memories = apart(memory_floats(job));
    int matched = job->match_alpha || job->match_beta;
    if (job->with_lln) {
        float *of_queries = plan->parts, *of_keys = behind(of_queries, B * H * C, floats);
        float *parts = behind(of_keys, B * Hk * C, floats);
        behind(parts, B * H * C, memory_floats(job));
        if (scratch && matched) EACH(i, thread, threads, B * H * C)
            measure_queries(plan, item_at(i, H, C), moments_at(of_queries + i * each, job->width), *scratch);
        if (scratch && is_weighted(job)) EACH(i, thread, threads, B * H * C)
            largest_of_chunk(plan, i, memory_at(parts + i * memories, job), *scratch);
        if (scratch && !is_weighted(job)) EACH(i, thread, threads, B * Hk * C)
            measure_keys(plan, item_at(i, Hk, C), matched, moments_at(of_keys + i * each, job->width), *scratch);
        wait_for_all(threads);
        if (scratch && is_weighted(job)) EACH(i, thread, threads, B * H)
            join_largest(job, C, parts + i * C * memories, memories);
        if (scratch && !is_weighted(job)) EACH(i, thread, threads, B * Hk) /* key moments first: several heads read them */
            for (long c = 1; c < C; c++)
                merge_moments(job->width, moments_at(of_keys + i * C * each, job->width),
                              moments_at(of_keys + (i * C + c) * each, job->width));
        wait_for_all(threads);
        if (scratch && !is_weighted(job)) EACH(i, thread, threads, B * H) {
            Scratch local = *scratch;
            Moments q = moments_at(of_queries + i * C * each, job->width);
            float *copy = take(&local, floats); /* `match` uses it up */
            memcpy(copy, of_keys + i / (H / Hk) * C * each, floats * sizeof(float));
            if (matched)
                for (long c = 1; c < C; c++)
                    merge_moments(job->width, q, moments_at(of_queries + (i * C + c) * each, job->width));
            decide(job, i / H, i % H, q, moments_at(copy, job->width), memory_at(parts + i * C * memories, job).most);
            for (long c = 1; c < C; c++)
                memcpy(parts + (i * C + c) * memories, parts + i * C * memories, padded(job->width) * sizeof(float));
        }
        wait_for_all(threads);
        if (scratch) EACH(i, thread, threads, B * H * C) {
            Item at = item_at(i, H, C);
            long count = plan->key_count[at.batch];
            remember(plan, at.batch, at.head, chunk_start(count, at.chunk, C, TILE), chunk_start(count, at.chunk + 1, C,
                                                                                                 TILE),
                    memory_at(parts + i * memories, job), *scratch);
        }
        wait_for_all(threads);
        if (scratch) EACH(i, thread, threads, B * H) {
            float *sum = parts + i * C * memories;
            for (long c = 1; c < C; c++)
                for (long j = padded(job->width); j < memory_floats(job); j++)
                    sum[j] += parts[(i * C + c) * memories + j];
            keep_memory(job, i / H, i % H, plan->key_count[i / H], memory_at(sum, job));
        }
        wait_for_all(threads);
    }
    if (scratch) EACH(i, thread, threads, B * H * C) recall_chunk(plan, item_at(i, H, C), *scratch);
}

INLINE long chunk_of(const Plan *plan, long chunk) { return chunk_start(plan->job->keys, chunk, plan->chunks, TILE); }

/* Every chunk of a head but the last leaves its memory to the next, ... */
static void causal_remember_chunk(Plan *plan, long index, Scratch scratch) {
    const Job *job = plan->job;
    Item at = item_at(index, job->heads, plan->chunks);
    float *before = plan->parts + index * apart(memory_floats(job));
    if (at.chunk == 0) forget(job, memory_at(before, job));
    if (at.chunk + 1 < plan->chunks)
        causal_remember(plan, at.batch, at.head, chunk_of(plan, at.chunk), chunk_of(plan, at.chunk + 1),
                        memory_at(before + apart(memory_floats(job)), job), scratch);
}

/* ... and then the memories are joined, so that each chunk has that of all before it. */
static void causal_join_chunks(Plan *plan, long head) {
    const Job *job = plan->job;
    long each = apart(memory_floats(job));
    float *before = plan->parts + head * plan->chunks * each;
    for (long c = 2; c < plan->chunks; c++, before += each)
        causal_precede(job, memory_at(before + each, job), memory_at(before + 2 * each, job));
}

/* Causal attention where heads are too few for the threads: every chunk after the first needs the memory of those before. */
static void causal_together(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    long H = job->heads, C = plan->chunks, total = job->batch * H, memories = apart(memory_floats(job));
    float *before = plan->parts;
    PrefixSums *sums = (PrefixSums *)behind(before, total * C, memory_floats(job));
    int matched = job->match_alpha || job->match_beta;
    if (scratch && matched) EACH(i, thread, threads, total * C) {
        Item at = item_at(i, H, C);
        sums[i] = (PrefixSums){{0}};
        match_prefixes(plan, at.batch, at.head, chunk_of(plan, at.chunk), chunk_of(plan, at.chunk + 1), 0, sums + i,
                       *scratch);
    }
    wait_for_all(threads);
    if (scratch) EACH(i, thread, threads, total * C) {
        Item at = item_at(i, H, C);
        PrefixSums past = {{0}};
        for (long c = 0; matched && c < at.chunk; c++) add_sums(&past, sums + i - at.chunk + c);
        if (matched) match_prefixes(plan, at.batch, at.head, chunk_of(plan, at.chunk), chunk_of(plan, at.chunk + 1), 1,
                                    &past, *scratch);
        causal_remember_chunk(plan, i, *scratch);
    }
    wait_for_all(threads);
    if (scratch) EACH(i, thread, threads, total) causal_join_chunks(plan, i);
    wait_for_all(threads);
    if (scratch) EACH(i, thread, threads, total * C) {
        Item at = item_at(i, H, C);
        causal_attend(plan, at.batch, at.head, chunk_of(plan, at.chunk), chunk_of(plan, at.chunk + 1),
                      memory_at(before + i * memories, job), *scratch);
    }
}

static void near_chunk_backward(const Plan *plan, Item at, Scratch scratch) {
    long count = plan->key_count[at.batch], c = at.chunk, n = plan->chunks, size = near_step(plan->job);
    near_backward(plan, at.batch, at.head, chunk_start(count, c, n, size), chunk_start(count, c + 1, n, size),
                  plan->job->with_lln ? 0.5f : 1.f, plan->job->with_lln != 0, scratch);
}

/* Gradients of whole key heads and the query heads that share them: first of the queries, who hand dL and dS to the
   keys;
   blocks last, added to what is there. */
static void whole_heads_backward(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    long H = job->heads, Hk = job->key_heads, groups = H / Hk, each = apart(handed_floats(job));
    (void)thread, (void)threads;
    if (!scratch) return;
    if (plan->parts) behind(plan->parts, job->batch * H, handed_floats(job));
    NEXT(i, plan, job->batch * Hk) {
        Item at = item_at(i, Hk, 1);
        float *handed = plan->parts + (at.batch * H + at.head * groups) * each;
        if (job->with_lln && job->is_causal) {
            if (causal_backward(plan, at.batch, at.head, *scratch)) plan->failed = 1;
        } else if (job->with_lln) {
            for (long g = 0; g < groups; g++)
                recall_backward(plan, at.batch, at.head * groups + g, 0, job->queries, handed + g * each, *scratch);
            remember_backward(plan, at.batch, at.head, 0, plan->key_count[at.batch], handed, *scratch);
        }
        if (job->block_size) near_chunk_backward(plan, at, *scratch);
    }
}

/* The same step by step, all together, where heads are cut into chunks. */
static void together_backward(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    long B = job->batch, H = job->heads, Hk = job->key_heads, C = plan->chunks, each = apart(handed_floats(job));
    if (job->with_lln) {
        behind(plan->parts, C * B * H, handed_floats(job));
        if (scratch) EACH(i, thread, threads, B * H * C) {
            Item at = item_at(i, H, C);
            recall_backward(plan, at.batch, at.head, chunk_start(job->queries, at.chunk, C, TILE),
                            chunk_start(job->queries, at.chunk + 1, C, TILE),
                    plan->parts + (at.chunk * B * H + at.batch * H + at.head) * each, *scratch);
        }
        wait_for_all(threads);
        if (scratch) EACH(i, thread, threads, B * H)
            for (long c = 1; c < C; c++)
                for (long j = 0; j < handed_floats(job); j++)
                    plan->parts[i * each + j] += plan->parts[(c * B * H + i) * each + j];
        wait_for_all(threads);
        if (scratch) EACH(i, thread, threads, B * Hk * C) {
            Item at = item_at(i, Hk, C);
            long count = plan->key_count[at.batch];
            remember_backward(plan, at.batch, at.head, chunk_start(count, at.chunk, C, TILE), chunk_start(count,
                                                                                                          at.chunk + 1,
                    C, TILE), plan->parts + (at.batch * H + at.head * (H / Hk)) * each, *scratch);
        }
        wait_for_all(threads);
    }
    if (job->block_size && scratch) EACH(i, thread, threads, B * Hk * C) near_chunk_backward(plan, item_at(i, Hk, C),
                                                                                             *scratch);
}

static void causal_together_backward(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    long H = job->heads, Hk = job->key_heads, C = plan->chunks, total = job->batch * H, groups = H / Hk;
    long memories = apart(memory_floats(job)), history = apart(history_floats(job, C));
    float *before = plan->parts, *gives = behind(before, total * C, memory_floats(job));
    float *histories = behind(gives, total * C, memory_floats(job));
    float *sums = behind(histories, total, history_floats(job, C));
    behind(sums, job->batch * Hk, key_gradients_floats(job));
    if (scratch) EACH(i, thread, threads, total * C) causal_remember_chunk(plan, i, *scratch);
    wait_for_all(threads);
    if (scratch) EACH(i, thread, threads, total) causal_join_chunks(plan, i);
    wait_for_all(threads);
    if (scratch) EACH(i, thread, threads, total * C) {
        Item at = item_at(i, H, C);
        long first = chunk_of(plan, at.chunk);
        Memory to = memory_at(gives + i * memories, job);
        causal_queries_backward(plan, at.batch, at.head, first, chunk_of(plan, at.chunk + 1),
                                memory_at(before + i * memories, job), at.chunk ? &to : NULL,
                                history_at(histories + i / C * history, job, first, at.chunk, C), *scratch);
    }
    wait_for_all(threads);
    if (scratch) EACH(i, thread, threads, total)
        for (long c = C - 2; c > 0; c--) {
            long at = (i * C + c) * memories, next = at + memories;
            causal_hand_on(job, memory_at(before + at, job), memory_at(before + next, job), memory_at(gives + at, job),
                           memory_at(gives + next, job));
        }
    wait_for_all(threads);
    if (scratch) EACH(i, thread, threads, job->batch * Hk * C) {
        Item at = item_at(i, Hk, C);
        long first = chunk_of(plan, at.chunk);
        KeyGradients to = key_gradients(job, at.batch, at.head, sums + i / C * apart(key_gradients_floats(job)));
        for (long g = 0; g < groups; g++) {
            long h = at.head * groups + g, head = at.batch * H + h;
            History past = history_at(histories + head * history, job, first, at.chunk, C);
            Memory after = memory_at(gives + (head * C + at.chunk + 1) * memories, job);
            causal_keys_backward(plan, at.batch, h, past, at.chunk + 1 < C ? &after : NULL, to, g == 0, *scratch);
        }
        put_key_gradients(job, at.batch, at.head, first, chunk_of(plan, at.chunk + 1), to);
    }
    wait_for_all(threads);
    if (job->block_size && scratch) EACH(i, thread, threads, job->batch * Hk * C)
        near_chunk_backward(plan, item_at(i, Hk, C), *scratch);
}

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

/* Ask for large pages where a result is so large that the C library maps it anew for every call: touching it page by page
   for the first time would take as long as computing it. */
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

/* Floats that the chunks hand over. */
static long causal_parts(const Plan *plan) {
    long pieces = plan->job->batch * plan->job->heads * plan->chunks;
    return pieces * (apart(memory_floats(plan->job)) + (long)(sizeof(PrefixSums) / sizeof(float)));
}

static long causal_parts_backward(const Plan *plan) {
    const Job *job = plan->job;
    long heads = job->batch * job->heads, pieces = heads * plan->chunks;
    return 2 * pieces * apart(memory_floats(job)) + heads * apart(history_floats(job, plan->chunks)) +
            job->batch * job->key_heads * apart(key_gradients_floats(job));
}

/* Multiplications, about, below which a job stays in one thread: to start the others takes as long. */
#define JOB_FOR_THREADS (1 << 19)

static int is_small(const Job *job) {
    double tokens = (double)job->batch * job->heads * at_least(job->queries, job->keys);
    long seen = at_most(job->block_size, job->keys) + (job->with_lln ? at_least(job->width, job->value_width) : 0);
    return tokens * (job->width + job->value_width) * seen < JOB_FOR_THREADS;
}

static int64_t execute(const Job *given, int is_backward) {
    Job copy = *given;
    const Job *job = &copy;
    if (is_small(given)) copy.threads = 1;
    Plan plan = {.job = job};
    long heads = job->batch * job->heads;
    int64_t *counts = malloc(2 * at_least(job->batch, 1) * sizeof(int64_t));
    if (!counts) return 1;
    plan.query_count = counts;
    plan.key_count = counts + job->batch;
    plan.key_order = read_order(job->keep_key, job->batch, job->keys, plan.key_count, &plan.failed);
    plan.query_order = read_order(job->keep_query, job->batch, job->queries, plan.query_count, &plan.failed);
    int in_sequence = job->is_causal && job->with_lln; /* a token needs what comes before it */
    long units = is_backward ? job->batch * job->key_heads : heads; /* what a thread can take whole */
    plan.chunks = choose_chunks(units, at_least(job->queries, job->keys), job->threads, in_sequence ? 1.5 : 1.);
    int cut = plan.chunks > 1, shared = !in_sequence && job->heads != job->key_heads;
    long floats = 0;
    if (job->with_lln && in_sequence && cut) floats = is_backward ? causal_parts_backward(&plan) : causal_parts(&plan);
    else if (job->with_lln && !in_sequence && is_backward) floats = heads * plan.chunks * apart(handed_floats(job));
    else if (job->with_lln && (shared || cut))
        floats = heads * plan.chunks * (2 * apart(moments_floats(job->width)) + apart(memory_floats(job)));
    if (floats) plan.parts = malloc(floats * sizeof(float));
    if (floats && !plan.parts) plan.failed = 1;
    Work forward = !cut && !shared ? whole_heads : in_sequence ? causal_together : together;
    Work backward = !cut ? whole_heads_backward : in_sequence ? causal_together_backward : together_backward;
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

#define EXPORT __attribute__((visibility("default")))

EXPORT void lln_use_threads(Parallel parallel, void (*barrier)(void), int (*thread)(void), int (*team)(void)) {
    omp_parallel = parallel;
    omp_barrier = barrier;
    omp_thread = thread;
    omp_team = team;
}

/* All give 0, or 1 if there was no memory. */
EXPORT int64_t lln_forward(const Job *job) { return execute(job, 0); }

EXPORT int64_t lln_backward(const Job *job) { return execute(job, 1); }

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
    plan.floats = advance_floats(job);
    in_large_pages(job, &job->output, job->heads, job->queries, job->value_width);
    if (!plan.failed) run(&plan, advance_heads);
    for (long b = 0; b < job->batch; b++) advance->after.count[b] = advance->before.count[b] + counts[b];
    free(plan.key_order);
    free(counts);
    return plan.failed;
}

/* What `binding.py` knows of this code as well; it compares the two when it loads the library. */
typedef struct {
    const char *name;
    int64_t value;
} Fact;

#define FACT(constant) {#constant, constant}
#define SIZE(type) {#type, sizeof(type)}
#define PLACE(type, field) {#type "." #field, offsetof(type, field)}

EXPORT const Fact lln_facts[] = {
        FACT(MAX_WIDTH), FACT(MAX_BLOCK), FACT(FLOAT32), FACT(BFLOAT16), FACT(FLOAT16), SIZE(Tensor), SIZE(Scale),
        SIZE(Job), SIZE(State), SIZE(Advance), PLACE(Tensor, data), PLACE(Tensor, batch), PLACE(Tensor, head),
        PLACE(Tensor, token), PLACE(Scale, data), PLACE(Scale, batch), PLACE(Scale, head), PLACE(Scale, token),
        PLACE(Job, batch), PLACE(Job, heads), PLACE(Job, key_heads), PLACE(Job, queries), PLACE(Job, keys),
        PLACE(Job, width), PLACE(Job, value_width), PLACE(Job, type), PLACE(Job, threads), PLACE(Job, is_causal),
        PLACE(Job, block_size), PLACE(Job, with_lln), PLACE(Job, match_alpha), PLACE(Job, match_beta),
        PLACE(Job, query), PLACE(Job, key), PLACE(Job, value), PLACE(Job, output), PLACE(Job, keep_query),
        PLACE(Job, keep_key), PLACE(Job, alpha), PLACE(Job, beta), PLACE(Job, mass), PLACE(Job, values),
        PLACE(Job, curve), PLACE(Job, curve_rows), PLACE(Job, curve_columns), PLACE(Job, log_start),
        PLACE(Job, log_ratio), PLACE(Job, log_first_count), PLACE(Job, log_count_ratio), PLACE(Job, line_a),
        PLACE(Job, line_b), PLACE(Job, grad_output), PLACE(Job, grad_query), PLACE(Job, grad_key),
        PLACE(Job, grad_value), PLACE(Job, grad_alpha), PLACE(Job, grad_beta), PLACE(Job, is_window), PLACE(Job, key_weight),
        PLACE(Job, grad_weight), PLACE(State, mass),
        PLACE(State, values), PLACE(State, count), PLACE(State, query_sums), PLACE(State, key_sums),
        PLACE(State, recent_key), PLACE(State, recent_value), PLACE(Advance, job), PLACE(Advance, near),
        PLACE(Advance, output_type), PLACE(Advance, before), PLACE(Advance, after), {NULL, 0},
};
