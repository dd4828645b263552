#include "heads.h"

#include <string.h>

#include "causal.h"
#include "full.h"
#include "prefix.h"

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
static void match_head(const Job *job, long b, long h, Moments q, Moments k, float *maximum) {
    float *alpha = job->match_alpha ? job->alpha.data + b * job->alpha.batch + h * job->alpha.head : NULL;
    float *beta = job->match_beta ? job->beta.data + b * job->beta.batch + h * job->beta.head : NULL;
    if (job->form == DECOMPOSED && (alpha || beta || job->sample_centers)) {
        long groups = job->heads / job->key_heads;
        center_moments(job, job->center_query, b, h, 1, q);
        center_moments(job, job->center_key, b, h / groups, h % groups == 0, k);
    }
    if (alpha || beta) match(job, q, k, alpha, beta);
    for (long i = 0; i < padded(job->width); i++) maximum[i] = k.maximum[i] + k.nan_marker[i];
}

static void attend_chunk(const Plan *plan, Item at, Memory memory, Scratch scratch) {
    long tokens = plan->job->queries, c = at.chunk, n = plan->chunks, step = step_of(plan->job);
    attend_memory(plan, at.batch, at.head, chunk_start(tokens, c, n, step), chunk_start(tokens, c + 1, n, step), memory,
                  scratch);
}

/* Whether moments are wanted: for alpha, beta or centres. */
INLINE int is_measured(const Job *job) { return job->match_alpha || job->match_beta || job->sample_centers; }

void whole_heads(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    (void)thread, (void)threads;
    if (!scratch) return;
    NEXT(index, plan, job->batch * job->heads) {
        Item at = item_at(index, job->heads, 1);
        if (job->with_lln && job->is_causal) {
            causal_head(plan, at.batch, at.head, *scratch);
            continue;
        }
        Scratch rest = *scratch;
        Memory memory = {0};
        if (job->with_lln) {
            memory = memory_at(take(&rest, memory_floats(job)), job);
            Scratch local = rest;
            Moments q = moments_at(take(&local, moments_floats(job->width)), job->width);
            Moments k = moments_at(take(&local, moments_floats(job->width)), job->width);
            int measured = is_measured(job);
            if (is_weighted(job)) {
                largest_weighted(plan, at.batch, at.head, 0, plan->key_count[at.batch], memory.maximum, local);
            } else {
                if (measured) measure_queries(plan, at, q, local);
                if (measured || !has_form(job)) measure_keys(plan, at, measured, k, local);
                if (measured || !has_form(job)) match_head(job, at.batch, at.head, q, k, memory.maximum);
            }
            sum_keys(plan, at.batch, at.head, 0, plan->key_count[at.batch], memory, local);
            finish_memory(plan, at.batch, at.head, memory, local);
            keep_memory(job, at.batch, at.head, memory);
        }
        attend_chunk(plan, at, memory, rest);
    }
}

/* The largest keys of a chunk, with their weights; and those of all chunks of a head, for each of them. */
static void largest_of_chunk(const Plan *plan, long index, Memory memory, Scratch scratch) {
    Item at = item_at(index, plan->job->heads, plan->chunks);
    long count = plan->key_count[at.batch], C = plan->chunks;
    largest_weighted(plan, at.batch, at.head, chunk_start(count, at.chunk, C, TILE),
                     chunk_start(count, at.chunk + 1, C, TILE), memory.maximum, scratch);
}

static void join_largest(const Job *job, long chunks, float *parts, long each) {
    for (long i = 0; i < padded(job->width); i++) {
        float maximum = parts[i];
        for (long c = 1; c < chunks; c++) {
            float other = parts[c * each + i];
            if (other > maximum || other != other) maximum = other;
        }
        for (long c = 0; c < chunks; c++) parts[c * each + i] = maximum;
    }
}

void chunked_heads(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    long B = job->batch, H = job->heads, Hk = job->key_heads, C = plan->chunks;
    long floats = moments_floats(job->width), each = part_stride(floats), memories = part_stride(memory_floats(job));
    int measured = is_measured(job), by_feature = !is_weighted(job) && (measured || !has_form(job));
    float *parts = NULL; /* memories of the chunks; in the end the first of a head is that of all its keys */
    if (job->with_lln) {
        float *of_queries = plan->parts, *of_keys = after_parts(of_queries, B * H * C, floats);
        parts = after_parts(of_keys, B * Hk * C, floats);
        after_parts(parts, B * H * C, memory_floats(job));
        if (scratch && measured)
            EACH(i, thread, threads, B * H * C)
                measure_queries(plan, item_at(i, H, C), moments_at(of_queries + i * each, job->width), *scratch);
        if (scratch && is_weighted(job))
            EACH(i, thread, threads, B * H * C)
                largest_of_chunk(plan, i, memory_at(parts + i * memories, job), *scratch);
        if (scratch && by_feature)
            EACH(i, thread, threads, B * Hk * C)
                measure_keys(plan, item_at(i, Hk, C), measured, moments_at(of_keys + i * each, job->width), *scratch);
        wait_for_all(threads);
        if (scratch && is_weighted(job))
            EACH(i, thread, threads, B * H) join_largest(job, C, parts + i * C * memories, memories);
        if (scratch && by_feature)
            EACH(i, thread, threads, B * Hk) /* key moments first: several heads read them */
                for (long c = 1; c < C; c++)
                    merge_moments(job->width, moments_at(of_keys + i * C * each, job->width),
                                  moments_at(of_keys + (i * C + c) * each, job->width));
        wait_for_all(threads);
        if (scratch && by_feature)
            EACH(i, thread, threads, B * H) {
                Scratch local = *scratch;
                Moments q = moments_at(of_queries + i * C * each, job->width);
                float *copy = take(&local, floats); /* `match` uses it up */
                memcpy(copy, of_keys + i / (H / Hk) * C * each, floats * sizeof(float));
                if (measured)
                    for (long c = 1; c < C; c++)
                        merge_moments(job->width, q, moments_at(of_queries + (i * C + c) * each, job->width));
                match_head(job, i / H, i % H, q, moments_at(copy, job->width),
                           memory_at(parts + i * C * memories, job).maximum);
                for (long c = 1; c < C; c++)
                    memcpy(parts + (i * C + c) * memories, parts + i * C * memories,
                           padded(job->width) * sizeof(float));
            }
        wait_for_all(threads);
        if (scratch)
            EACH(i, thread, threads, B * H * C) {
                Item at = item_at(i, H, C);
                long count = plan->key_count[at.batch];
                sum_keys(plan, at.batch, at.head, chunk_start(count, at.chunk, C, TILE),
                         chunk_start(count, at.chunk + 1, C, TILE), memory_at(parts + i * memories, job), *scratch);
            }
        wait_for_all(threads);
        if (scratch)
            EACH(i, thread, threads, B * H) {
                float *sum = parts + i * C * memories;
                for (long c = 1; has_form(job) && c < C; c++)
                    join_memories(job, memory_at(sum, job), memory_at(parts + (i * C + c) * memories, job));
                for (long c = 1; !has_form(job) && c < C; c++)
                    for (long j = padded(job->width); j < memory_floats(job); j++)
                        sum[j] += parts[(i * C + c) * memories + j];
                finish_memory(plan, i / H, i % H, memory_at(sum, job), *scratch);
                keep_memory(job, i / H, i % H, memory_at(sum, job));
            }
        wait_for_all(threads);
    }
    if (scratch)
        EACH(i, thread, threads, B * H * C) {
            Memory memory = {0};
            if (job->with_lln) memory = memory_at(parts + i / C * C * memories, job);
            attend_chunk(plan, item_at(i, H, C), memory, *scratch);
        }
}

void causal_sum_chunk(Plan *plan, long index, Scratch scratch) {
    const Job *job = plan->job;
    Item at = item_at(index, job->heads, plan->chunks);
    float *before = plan->parts + index * part_stride(memory_floats(job));
    if (at.chunk == 0) clear_memory(job, memory_at(before, job));
    if (at.chunk + 1 < plan->chunks)
        causal_sum_keys(plan, at.batch, at.head, chunk_of(plan, at.chunk), chunk_of(plan, at.chunk + 1),
                        memory_at(before + part_stride(memory_floats(job)), job), scratch);
}

void causal_join_chunks(Plan *plan, long head) {
    const Job *job = plan->job;
    long each = part_stride(memory_floats(job));
    float *before = plan->parts + head * plan->chunks * each;
    for (long c = 2; c < plan->chunks; c++, before += each)
        causal_precede(job, memory_at(before + each, job), memory_at(before + 2 * each, job));
}

void causal_chunked_heads(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    long H = job->heads, C = plan->chunks, total = job->batch * H, memories = part_stride(memory_floats(job));
    float *before = plan->parts;
    PrefixSums *sums = (PrefixSums *)after_parts(before, total * C, memory_floats(job));
    int matched = job->match_alpha || job->match_beta;
    if (scratch && matched)
        EACH(i, thread, threads, total * C) {
            Item at = item_at(i, H, C);
            sums[i] = (PrefixSums){{0}};
            match_prefixes(plan, at.batch, at.head, chunk_of(plan, at.chunk), chunk_of(plan, at.chunk + 1), 0, sums + i,
                           *scratch);
        }
    wait_for_all(threads);
    if (scratch)
        EACH(i, thread, threads, total * C) {
            Item at = item_at(i, H, C);
            PrefixSums past = {{0}};
            for (long c = 0; matched && c < at.chunk; c++) add_sums(&past, sums + i - at.chunk + c);
            if (matched)
                match_prefixes(plan, at.batch, at.head, chunk_of(plan, at.chunk), chunk_of(plan, at.chunk + 1), 1,
                               &past, *scratch);
            causal_sum_chunk(plan, i, *scratch);
        }
    wait_for_all(threads);
    if (scratch)
        EACH(i, thread, threads, total) causal_join_chunks(plan, i);
    wait_for_all(threads);
    if (scratch)
        EACH(i, thread, threads, total * C) {
            Item at = item_at(i, H, C);
            causal_attend(plan, at.batch, at.head, chunk_of(plan, at.chunk), chunk_of(plan, at.chunk + 1),
                          memory_at(before + i * memories, job), *scratch);
        }
}

long causal_parts(const Plan *plan) {
    long pieces = plan->job->batch * plan->job->heads * plan->chunks;
    return pieces * (part_stride(memory_floats(plan->job)) + (long)(sizeof(PrefixSums) / sizeof(float)));
}
