/* Gradients: which thread computes what. */
#include "heads.h"

#include "causal.h"
#include "full.h"
#include "near.h"

static void near_chunk_backward(const Plan *plan, Item at, Scratch scratch) {
    long count = plan->key_count[at.batch], c = at.chunk, n = plan->chunks, size = near_step(plan->job);
    near_backward(plan, at.batch, at.head, chunk_start(count, c, n, size), chunk_start(count, c + 1, n, size),
                  plan->job->with_lln ? 0.5f : 1.f, plan->job->with_lln != 0, scratch);
}

void whole_heads_backward(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    long H = job->heads, Hk = job->key_heads, groups = H / Hk, each = part_stride(memory_grad_floats(job));
    (void)thread, (void)threads;
    if (!scratch) return;
    if (plan->parts) after_parts(plan->parts, job->batch * H, memory_grad_floats(job));
    NEXT(i, plan, job->batch * Hk) {
        Item at = item_at(i, Hk, 1);
        float *memory_grad = plan->parts + (at.batch * H + at.head * groups) * each;
        if (job->with_lln && job->is_causal) {
            if (causal_backward(plan, at.batch, at.head, *scratch)) plan->failed = 1;
        } else if (job->with_lln) {
            for (long g = 0; g < groups; g++)
                attend_memory_backward(plan, at.batch, at.head * groups + g, 0, job->queries, memory_grad + g * each,
                                       *scratch);
            sum_keys_backward(plan, at.batch, at.head, 0, plan->key_count[at.batch], memory_grad, memory_grad,
                              *scratch);
            if (job->sample_centers) spread_centers(plan, at.batch, at.head, 0, memory_grad, 0, *scratch);
        }
        if (job->block_size) near_chunk_backward(plan, at, *scratch);
    }
}

void chunked_heads_backward(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    long B = job->batch, H = job->heads, Hk = job->key_heads, C = plan->chunks,
         each = part_stride(memory_grad_floats(job));
    if (job->with_lln) {
        after_parts(plan->parts, C * B * H, memory_grad_floats(job));
        if (scratch)
            EACH(i, thread, threads, B * H * C) {
                Item at = item_at(i, H, C);
                attend_memory_backward(plan, at.batch, at.head, chunk_start(job->queries, at.chunk, C, TILE),
                                       chunk_start(job->queries, at.chunk + 1, C, TILE),
                                       plan->parts + (at.chunk * B * H + at.batch * H + at.head) * each, *scratch);
            }
        wait_for_all(threads);
        if (scratch)
            EACH(i, thread, threads, B * H)
                for (long c = 1; c < C; c++)
                    for (long j = 0; j < memory_grad_floats(job); j++)
                        plan->parts[i * each + j] += plan->parts[(c * B * H + i) * each + j];
        wait_for_all(threads);
        if (scratch)
            EACH(i, thread, threads, B * Hk * C) {
                Item at = item_at(i, Hk, C);
                long count = plan->key_count[at.batch];
                sum_keys_backward(
                    plan, at.batch, at.head, chunk_start(count, at.chunk, C, TILE),
                    chunk_start(count, at.chunk + 1, C, TILE), plan->parts + (at.batch * H + at.head * (H / Hk)) * each,
                    plan->parts + (at.chunk * B * H + at.batch * H + at.head * (H / Hk)) * each, *scratch);
            }
        wait_for_all(threads);
        if (scratch && job->sample_centers)
            EACH(i, thread, threads, B * Hk * C) {
                Item at = item_at(i, Hk, C);
                spread_centers(plan, at.batch, at.head, at.chunk,
                               plan->parts + (at.batch * H + at.head * (H / Hk)) * each, B * H * each, *scratch);
            }
        if (job->sample_centers) wait_for_all(threads);
    }
    if (job->block_size && scratch)
        EACH(i, thread, threads, B * Hk * C) near_chunk_backward(plan, item_at(i, Hk, C), *scratch);
}

void causal_chunked_heads_backward(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    long H = job->heads, Hk = job->key_heads, C = plan->chunks, total = job->batch * H, groups = H / Hk;
    long memories = part_stride(memory_floats(job)), history = part_stride(history_floats(job, C));
    float *before = plan->parts, *memory_grad = after_parts(before, total * C, memory_floats(job));
    float *histories = after_parts(memory_grad, total * C, memory_floats(job));
    float *sums = after_parts(histories, total, history_floats(job, C));
    after_parts(sums, job->batch * Hk, key_gradients_floats(job));
    if (scratch)
        EACH(i, thread, threads, total * C) causal_sum_chunk(plan, i, *scratch);
    wait_for_all(threads);
    if (scratch)
        EACH(i, thread, threads, total) causal_join_chunks(plan, i);
    wait_for_all(threads);
    if (scratch)
        EACH(i, thread, threads, total * C) {
            Item at = item_at(i, H, C);
            long first = chunk_of(plan, at.chunk);
            Memory to = memory_at(memory_grad + i * memories, job);
            causal_queries_backward(plan, at.batch, at.head, first, chunk_of(plan, at.chunk + 1),
                                    memory_at(before + i * memories, job), at.chunk ? &to : NULL,
                                    history_at(histories + i / C * history, job, first, at.chunk, C), *scratch);
        }
    wait_for_all(threads);
    if (scratch)
        EACH(i, thread, threads, total)
            for (long c = C - 2; c > 0; c--) {
                long at = (i * C + c) * memories, next = at + memories;
                causal_add_later_gradients(job, memory_at(before + at, job), memory_at(before + next, job),
                                           memory_at(memory_grad + at, job), memory_at(memory_grad + next, job));
            }
    wait_for_all(threads);
    if (scratch)
        EACH(i, thread, threads, job->batch * Hk * C) {
            Item at = item_at(i, Hk, C);
            long first = chunk_of(plan, at.chunk);
            KeyGradients to =
                key_gradients(job, at.batch, at.head, sums + i / C * part_stride(key_gradients_floats(job)));
            for (long g = 0; g < groups; g++) {
                long h = at.head * groups + g, head = at.batch * H + h;
                History past = history_at(histories + head * history, job, first, at.chunk, C);
                Memory after = memory_at(memory_grad + (head * C + at.chunk + 1) * memories, job);
                causal_keys_backward(plan, at.batch, h, past, at.chunk + 1 < C ? &after : NULL, to, g == 0, *scratch);
            }
            store_key_gradients(job, at.batch, at.head, first, chunk_of(plan, at.chunk + 1), to);
        }
    wait_for_all(threads);
    if (job->block_size && scratch)
        EACH(i, thread, threads, job->batch * Hk * C) near_chunk_backward(plan, item_at(i, Hk, C), *scratch);
}

long causal_parts_backward(const Plan *plan) {
    const Job *job = plan->job;
    long heads = job->batch * job->heads, pieces = heads * plan->chunks;
    return 2 * pieces * part_stride(memory_floats(job)) + heads * part_stride(history_floats(job, plan->chunks)) +
           job->batch * job->key_heads * part_stride(key_gradients_floats(job));
}
