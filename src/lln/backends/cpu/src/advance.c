#include "advance.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "causal.h"
#include "near.h"
#include "step.h"
#include "threads.h"

/* Neighbours of the new tokens of a head. The first ones may have neighbours among the tokens of the state, which are
   put before them in a copy; those of the others are where the new tokens are. */
typedef struct {
    Job first_job, rest_job;
    Plan first, rest;
    int64_t first_count, rest_count;
    long begun, joining; /* tokens of the state in the copy; new ones in it, 0 if there are none of the state */
    long skipped;        /* new tokens that `rest` leaves out: a block begins behind them */
    Near near;
} Neighbours;

static void neighbours_begin(const Plan *plan, long b, long h, Neighbours *to, Scratch *scratch) {
    const Advance *a = (const Advance *)plan->job;
    const Job *job = plan->job;
    long type = job->type, D = a->near_width, V = job->value_width, C = job->block_size, bytes = bytes_of(type);
    long group = h / (job->heads / job->key_heads), head = b * job->key_heads + group, kept = plan->key_count[b];
    long count = a->before.count[b], window = job->is_window;
    const int32_t *order = key_order(plan, b);
    Job one = *job;
    one.batch = one.heads = one.key_heads = 1;
    one.width = D;
    one.keep_query = one.keep_key = NULL;
    one.key = (Tensor){head_of(&a->near_key, type, b, group), 0, 0, a->near_key.token};
    one.value = (Tensor){head_of(&job->value, type, b, group), 0, 0, job->value.token};
    to->begun = window ? at_most(count, C - 1) : count % C;
    to->joining = to->begun ? at_most(window ? C - 1 : C - to->begun, kept) : 0;
    to->skipped = window ? 0 : to->joining;
    to->rest_job = to->first_job = one;
    to->rest_count = to->rest_job.keys = kept - to->skipped;
    to->first_count = to->first_job.keys = to->begun + to->joining;
    to->rest = (Plan){.job = &to->rest_job, .key_count = &to->rest_count};
    to->first = (Plan){.job = &to->first_job, .key_count = &to->first_count};
    if (order) {
        to->rest.key_order = (int32_t *)order + to->skipped;
    } else {
        to->rest_job.key.data = (char *)one.key.data + to->skipped * one.key.token * bytes;
        to->rest_job.value.data = (char *)one.value.data + to->skipped * one.value.token * bytes;
    }
    Job whole = one; /* space for neighbours of a tile, whatever the number of tokens */
    whole.keys = C + TILE;
    to->near = near_begin(&whole, scratch);
    if (!to->begun) return;
    float *keys = take(scratch, to->first_count * row_of(D)), *values = take(scratch, to->first_count * row_of(V));
    for (long r = 0; r < to->begun; r++) {
        long place = (count - to->begun + r) % C;
        read_tile(type, (char *)a->before.recent_key + (head * C + place) * D * bytes, 0, NULL, 0, 1, D,
                  keys + r * row_of(D), 0);
        read_tile(type, (char *)a->before.recent_value + (head * C + place) * V * bytes, 0, NULL, 0, 1, V,
                  values + r * row_of(V), 0);
    }
    read_tile(type, one.key.data, one.key.token, order, 0, to->joining, D, keys + to->begun * row_of(D), row_of(D));
    read_tile(type, one.value.data, one.value.token, order, 0, to->joining, V, values + to->begun * row_of(V),
              row_of(V));
    to->first_job.type = FLOAT32;
    to->first_job.key = (Tensor){keys, 0, 0, row_of(D)};
    to->first_job.value = (Tensor){values, 0, 0, row_of(V)};
}

/* output = weight times the attention of the new kept tokens at places first ... end to their neighbours. */
static void neighbours_attend(Neighbours *all, long first, long end, Rows queries, float weight, Rows output,
                              float *lse, Scratch scratch) {
    if (first < all->joining) {
        long stop = at_most(end, all->joining);
        near_attend(&all->first, 0, 0, all->begun + first, all->begun + stop, queries, weight, output, lse, &all->near,
                    scratch);
        if (lse) lse += stop - first;
        queries.data += (stop - first) * queries.row;
        output.data += (stop - first) * output.row;
        first = stop;
        if (stop == all->joining) all->near.stop = 0; /* the current block is none of the rest */
    }
    if (first < end)
        near_attend(&all->rest, 0, 0, first - all->skipped, end - all->skipped, queries, weight, output, lse,
                    &all->near, scratch);
}

/* The attention to neighbours of a tile of new tokens from `start` on, of whom those from `rank` on are kept: in a
   tensor of its own, or halved and added to half of `far`. */
static long advance_near(const Plan *plan, long b, long h, long start, long rows, long rank, Rows far,
                         Neighbours *neighbours, Scratch scratch) {
    const Advance *a = (const Advance *)plan->job;
    const Job *job = plan->job;
    long V = job->value_width, v_row = row_of(V), wide = padded(V), count = 0;
    const int32_t *order = key_order(plan, b);
    float *spare = take(&scratch, TILE * row_of(at_least(a->near_width, V))), *inside = take(&scratch, TILE * v_row);
    for (long r = 0; r < rows; r++) count += is_kept(job, b, start + r);
    Rows q = view(job->type, head_of(&a->near_query, job->type, b, h), a->near_query.token, order, rank, count,
                  a->near_width, spare);
    float lse[TILE], *to_lse = lse_of(job, job->near_lse, b, h);
    neighbours_attend(neighbours, rank, rank + count, q, a->near.data ? 1.f : 0.5f, (Rows){inside, v_row},
                      to_lse ? lse : NULL, scratch);
    for (long r = 0; to_lse && order && r < rows; r++) to_lse[start + r] = 0.f;
    for (long r = 0; to_lse && r < count; r++) to_lse[token_at(order, rank + r)] = lse[r];
    if (a->near.data) {
        char *head = head_of(&a->near, a->output_type, b, h);
        memset(spare, 0, wide * sizeof(float));
        for (long r = 0; order && r < rows; r++)
            if (!is_kept(job, b, start + r))
                write_tile(a->output_type, head, a->near.token, NULL, start + r, 1, V, spare, 0);
        write_tile(a->output_type, head, a->near.token, order, rank, count, V, inside, v_row);
        return count;
    }
    for (long r = 0; r < rows; r++)
        for (long j = 0; j < wide; j += LANES)
            store(far.data + r * far.row + j, load(far.data + r * far.row + j) * 0.5f);
    for (long r = 0; r < count; r++) {
        float *to = far.data + (token_at(order, rank + r) - start) * far.row;
        for (long j = 0; j < wide; j += LANES) store(to + j, load(to + j) + load(inside + r * v_row + j));
    }
    return count;
}

static void read_memory(const Advance *a, long b, long h, Memory memory) {
    long D = a->job.width, V = a->job.value_width, head = b * a->job.heads + h, vector = padded(D);
    for (long i = 0; i < vector; i++) {
        memory.maximum[i] = i < D ? a->before.mass[head * D + i] : MASKED;
        memory.mass[i] = i < D ? 1.f : 0.f;
    }
    read_tile(FLOAT32, (const char *)(a->before.values + head * D * V), V, NULL, 0, D, V, memory.values, row_of(V));
}

static void write_memory(const Advance *a, long b, long h, Memory memory) {
    long D = a->job.width, V = a->job.value_width, head = b * a->job.heads + h;
    for (long i = 0; i < D; i++) {
        float inverse = 1.f / memory.mass[i], *to = a->after.values + (head * D + i) * V;
        const float *from = memory.values + i * row_of(V);
        a->after.mass[head * D + i] = memory.maximum[i] + logf(memory.mass[i]);
        for (long j = 0; j < V; j += 8) *(v8 *)(to + j) = *(const v8 *)(from + j) * inverse;
    }
}

/* Tokens from `start` on of a head as a tensor of floats: where they are, or copied to `spare`. */
static Tensor tile_tensor(long type, const Tensor *x, long b, long head, long start, long rows, long width,
                          float *spare) {
    char *from = head_of(x, type, b, head) + start * x->token * bytes_of(type);
    if (type == FLOAT32) return (Tensor){from, 0, 0, x->token};
    read_tile(type, from, x->token, NULL, 0, rows, width, spare, row_of(width));
    return (Tensor){spare, 0, 0, row_of(width)};
}

static void advance_head(const Plan *plan, long b, long h, Scratch scratch) {
    const Advance *a = (const Advance *)plan->job;
    const Job *job = plan->job;
    long D = job->width, V = job->value_width, row = row_of(D), v_row = row_of(V), rank = 0;
    long group = h / (job->heads / job->key_heads);
    int direct = a->output_type == FLOAT32 && V == padded(V);
    Memory memory = memory_at(take(&scratch, memory_floats(job)), job);
    float *queries = take(&scratch, TILE * row), *keys = take(&scratch, TILE * row);
    float *values = take(&scratch, TILE * v_row), *output = take(&scratch, TILE * v_row);
    float alpha[TILE], beta[TILE];
    PrefixSums sums = read_sums(a, b, h);
    Neighbours neighbours;
    if (job->block_size) neighbours_begin(plan, b, h, &neighbours, &scratch);
    read_memory(a, b, h, memory);
    Job tile = *job; /* one tile of one head, as a job of its own */
    Plan tiles = {.job = &tile};
    tile.batch = tile.heads = tile.key_heads = 1;
    tile.type = FLOAT32;
    tile.block_size = 0;
    if (job->form == DECOMPOSED) {
        tile.center_query.data = head_of(&job->center_query, FLOAT32, b, h);
        tile.center_key.data = head_of(&job->center_key, FLOAT32, b, group);
    }
    tile.alpha = job->match_alpha ? (Scale){alpha, 0, 0, 1}
                                  : (Scale){job->alpha.data + b * job->alpha.batch + h * job->alpha.head, 0, 0, 0};
    tile.beta = job->match_beta ? (Scale){beta, 0, 0, 1}
                                : (Scale){job->beta.data + b * job->beta.batch + h * job->beta.head, 0, 0, 0};
    for (long start = 0; start < job->keys; start += TILE) {
        long rows = tile.queries = tile.keys = at_most(TILE, job->keys - start);
        if (job->keep_key) tile.keep_query = tile.keep_key = job->keep_key + b * job->keys + start;
        tile.query = tile_tensor(a->far_type, &job->query, b, h, start, rows, D, queries);
        tile.key = tile_tensor(a->far_type, &job->key, b, group, start, rows, D, keys);
        if (job->key_weight.data)
            tile.key_weight = (Scale){job->key_weight.data + b * job->key_weight.batch + h * job->key_weight.head +
                                          start * job->key_weight.token,
                                      0, 0, job->key_weight.token};
        tile.value = tile_tensor(job->type, &job->value, b, group, start, rows, V, values);
        char *head = head_of(&job->output, a->output_type, b, h);
        Rows far = direct ? (Rows){(float *)head + start * job->output.token, job->output.token}
                          : (Rows){output, v_row};
        tile.output = (Tensor){far.data, 0, 0, far.row};
        match_prefixes(&tiles, 0, 0, 0, rows, job->match_alpha || job->match_beta, &sums, scratch);
        causal_attend(&tiles, 0, 0, 0, rows, memory, scratch);
        if (job->block_size) rank += advance_near(plan, b, h, start, rows, rank, far, &neighbours, scratch);
        if (!direct) write_tile(a->output_type, head, job->output.token, NULL, start, rows, V, output, v_row);
    }
    write_sums(a, b, h, &sums);
    write_memory(a, b, h, memory);
}

void advance_heads(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    if (scratch)
        NEXT(i, plan, job->batch * job->heads) advance_head(plan, i / job->heads, i % job->heads, *scratch);
    if (!job->block_size) return;
    wait_for_all(threads);
    EACH(i, thread, threads, job->batch * job->key_heads) {
        long b = i / job->key_heads;
        renew_recent((const Advance *)job, b, i % job->key_heads, key_order(plan, b), 0, plan->key_count[b]);
    }
}

long advance_floats(const Advance *a) {
    Job largest = a->job;
    largest.width = at_least(a->job.width, a->near_width);
    largest.keys = at_least(a->job.keys, a->job.block_size + TILE);
    long wide = row_of(at_least(largest.width, a->job.value_width));
    return scratch_floats(&largest) + 6 * TILE * wide + 4 * (a->job.block_size + 16) * wide;
}
