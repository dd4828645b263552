/* The recurrence of a state: the outputs of the next tokens, and the state after them.

   One token takes O(D V) for each head and no scratch memory. Several go tile by tile through `causal_attend`, with the
   state as the memory of what came before. The block of softmax attention is that of the last tokens: kept token t is at
   place t % C, so that the current block is at the places before count % C. */
#ifndef LLN_ADVANCE_H
#define LLN_ADVANCE_H

#include "causal.h"

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
static void renew_recent(const Advance *a, long b, long group, const int32_t *order, long first, long end) {
    const Job *job = &a->job;
    long C = job->block_size, bytes = bytes_of(job->type), head = b * job->key_heads + group;
    const Tensor *tokens[2] = {&job->key, &job->value};
    const void *before[2] = {a->before.recent_key, a->before.recent_value};
    void *after[2] = {a->after.recent_key, a->after.recent_value};
    for (int i = 0; i < 2; i++) {
        long row = (i ? job->value_width : job->width) * bytes;
        char *to = (char *)after[i] + head * C * row;
        if (before[i] != after[i]) memcpy(to, (const char *)before[i] + head * C * row, C * row);
        const char *from = head_of(tokens[i], job->type, b, group);
        for (long place = at_least(first, end - C); place < end; place++)
            memcpy(to + (a->before.count[b] + place) % C * row, from + token_at(order, place) * tokens[i]->token * bytes,
                   row);
    }
}

/* `vectors` columns of S: S = S (1 - share) + share v, and out = sum over features of weight S. */
INLINE void step_columns(const int vectors, long D, long V, const float *before, float *after, const float *share,
                         const float *weight, const float *value, float *out) {
    v8 v[4], sum[4];
#pragma GCC unroll 4
    for (int c = 0; c < vectors; c++) {
        v[c] = *(const v8 *)(value + 8 * c);
        sum[c] = (v8){0};
    }
    for (long i = 0; i < D; i++) {
        float old = 1.f - share[i], new = share[i], w = weight[i];
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            v8 s = *(const v8 *)(before + i * V + 8 * c) * old + v[c] * new;
            *(v8 *)(after + i * V + 8 * c) = s;
            sum[c] += s * w;
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < vectors; c++) *(v8 *)(out + 8 * c) = sum[c];
}

/* exp(x - the largest) for `vector` floats, a multiple of LANES, in place; returns the sum. */
INLINE float weigh_row(float *row, long vector) {
    vf most = same(2.f * ABSENT), sum = same(0.f);
    for (long i = 0; i < vector; i += LANES) most = larger(most, load(row + i));
    float top = largest_of(most);
    for (long i = 0; i < vector; i += LANES) {
        vf e = exponential(load(row + i) - top);
        store(row + i, e);
        sum += e;
    }
    return total_of(sum);
}

/* L = log(exp(L) + exp(beta k)) in place, and the share that the key has of it. */
INLINE void step_mass(long D, const float *key, float beta, float *mass, float *share) {
    float total[MAX_WIDTH];
    long vector = padded(D);
    if (not_finite(key, vector)) beta = NAN; /* a key of -inf would weigh nothing */
    for (long i = 0; i < vector; i += LANES) {
        vf b = load(key + i) * beta, old = load(mass + i), most = larger(b, old);
        vf new = exponential(b - most), sum = new + exponential(old - most);
        store(share + i, new / sum);
        store(total + i, sum);
        store(mass + i, most);
    }
    for (long i = 0; i < D; i++) mass[i] += logf(total[i]);
}

INLINE const float *recent_row(const void *head, long type, long place, long width, float *spare) {
    if (type == FLOAT32) return (const float *)head + place * width;
    read_tile(type, head, width, NULL, place, 1, width, spare, 0);
    return spare;
}

/* Softmax attention of a token to its block: the places before `begun`, and its own key and value. */
static void step_near(const Advance *a, long b, long group, long begun, const float *query, const float *key,
                      const float *value, float *out) {
    const Job *job = &a->job;
    long D = job->width, V = job->value_width, C = job->block_size, head = b * job->key_heads + group;
    const char *keys = (const char *)a->before.recent_key + head * C * D * bytes_of(job->type);
    const char *values = (const char *)a->before.recent_value + head * C * V * bytes_of(job->type);
    float weights[MAX_BLOCK], spare[MAX_WIDTH], scale = 1.f / sqrtf(D);
    for (long j = 0; j <= begun; j++) {
        const float *k = j < begun ? recent_row(keys, job->type, j, D, spare) : key;
        v8 sum = {0};
        for (long i = 0; i < D; i += 8) sum += *(const v8 *)(query + i) * *(const v8 *)(k + i);
        weights[j] = (sum[0] + sum[4] + (sum[1] + sum[5]) + (sum[2] + sum[6] + (sum[3] + sum[7]))) * scale;
    }
    for (long j = begun + 1; j < padded(begun + 1); j++) weights[j] = ABSENT;
    float share = 1.f / weigh_row(weights, padded(begun + 1));
    memset(out, 0, V * sizeof(float));
    for (long j = 0; j <= begun; j++) {
        const float *v = j < begun ? recent_row(values, job->type, j, V, spare) : value;
        for (long i = 0; i < V; i += 8) *(v8 *)(out + i) += *(const v8 *)(v + i) * (weights[j] * share);
    }
}

/* One token of a head. */
static void step_head(const Advance *a, long b, long h) {
    const Job *job = &a->job;
    long type = job->type, D = job->width, V = job->value_width, head = b * job->heads + h, vector = padded(D);
    long groups = job->heads / job->key_heads, group = h / groups;
    int kept = !job->keep_key || job->keep_key[b];
    float q[MAX_WIDTH], k[MAX_WIDTH], v[MAX_WIDTH], mass[MAX_WIDTH], share[MAX_WIDTH] = {0}, weight[MAX_WIDTH];
    float far[MAX_WIDTH], near[MAX_WIDTH] = {0}, alpha, beta;
    read_tile(type, head_of(&job->query, type, b, h), 0, NULL, 0, 1, D, q, 0);
    read_tile(type, head_of(&job->key, type, b, group), 0, NULL, 0, 1, D, k, 0);
    read_tile(type, head_of(&job->value, type, b, group), 0, NULL, 0, 1, V, v, 0);
    int odd = not_finite(q, vector);
    if (!kept) { /* whatever it holds leaves no trace */
        memset(v, 0, sizeof(v));
        if (odd) memset(q, 0, sizeof(q));
    }
    PrefixSums sums = read_sums(a, b, h);
    if (kept) {
        sums.count += 1;
        add_entries(q, D, sums.query);
        add_entries(k, D, sums.key);
    }
    write_sums(a, b, h, &sums);
    if (job->match_alpha || job->match_beta) match_sums(job, &sums, &alpha, &beta);
    if (!job->match_alpha) alpha = scale_of(&job->alpha, b, h, 0);
    if (!job->match_beta) beta = scale_of(&job->beta, b, h, 0);
    if (odd && kept) alpha = NAN; /* an entry of -inf would weigh nothing */

    memcpy(mass, a->before.mass + head * D, D * sizeof(float));
    for (long i = D; i < vector; i++) mass[i] = ABSENT;
    if (kept) step_mass(D, k, beta, mass, share);
    memcpy(a->after.mass + head * D, mass, D * sizeof(float));
    for (long i = 0; i < vector; i += LANES) store(weight + i, load(q + i) * alpha + load(mass + i));
    for (long i = D; i < vector; i++) weight[i] = 2.f * ABSENT;
    float inverse = 1.f / weigh_row(weight, vector);
    for (long i = 0; i < vector; i += LANES) store(weight + i, load(weight + i) * inverse);
    const float *before = a->before.values + head * D * V;
    float *after = a->after.values + head * D * V;
    long j = 0;
    for (; j + 32 <= V; j += 32) step_columns(4, D, V, before + j, after + j, share, weight, v + j, far + j);
    for (; j < V; j += 8) step_columns(1, D, V, before + j, after + j, share, weight, v + j, far + j);

    if (job->block_size) {
        if (kept) step_near(a, b, group, a->before.count[b] % job->block_size, q, k, v, near);
        if (h % groups == 0) renew_recent(a, b, group, NULL, 0, kept); /* nobody reads the place of the new token */
        if (!a->near.data)
            for (long i = 0; i < V; i += 8) *(v8 *)(far + i) = (*(v8 *)(far + i) + *(v8 *)(near + i)) * 0.5f;
        else
            write_tile(a->output_type, head_of(&a->near, a->output_type, b, h), 0, NULL, 0, 1, V, near, 0);
    }
    write_tile(a->output_type, head_of(&job->output, a->output_type, b, h), 0, NULL, 0, 1, V, far, 0);
}

/* Counts come last: until then every head reads how many tokens there were. */
static void step_counts(const Advance *a) {
    for (long b = 0; b < a->job.batch; b++)
        a->after.count[b] = a->before.count[b] + (!a->job.keep_key || a->job.keep_key[b]);
}

static void step_all(const Advance *a) {
    for (long i = 0; i < a->job.batch * a->job.heads; i++) step_head(a, i / a->job.heads, i % a->job.heads);
    step_counts(a);
}

static void step_heads(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Advance *a = (const Advance *)plan->job;
    (void)scratch;
    EACH(i, thread, threads, a->job.batch * a->job.heads) step_head(a, i / a->job.heads, i % a->job.heads);
    wait_for_all(threads);
    if (thread == 0) step_counts(a);
}

/* Blocks of the new tokens of a head. The first may have begun with tokens of the state, which are put before the new
   ones in a copy; the others are where the new tokens are. */
typedef struct {
    Job first_job, rest_job;
    Plan first, rest;
    int64_t first_count, rest_count;
    long begun, joining; /* tokens of the state in the first block; new ones in it, 0 if none had begun */
    Near near;
} Blocks;

static void blocks_begin(const Plan *plan, long b, long h, Blocks *to, Scratch *scratch) {
    const Advance *a = (const Advance *)plan->job;
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, C = job->block_size, bytes = bytes_of(type);
    long group = h / (job->heads / job->key_heads), head = b * job->key_heads + group, kept = plan->key_count[b];
    const int32_t *order = key_order(plan, b);
    Job one = *job;
    one.batch = one.heads = one.key_heads = 1;
    one.keep_query = one.keep_key = NULL;
    one.key = (Tensor){head_of(&job->key, type, b, group), 0, 0, job->key.token};
    one.value = (Tensor){head_of(&job->value, type, b, group), 0, 0, job->value.token};
    to->begun = a->before.count[b] % C;
    to->joining = to->begun ? at_most(C - to->begun, kept) : 0;
    to->rest_job = to->first_job = one;
    to->rest_count = to->rest_job.keys = kept - to->joining;
    to->first_count = to->first_job.keys = to->begun + to->joining;
    to->rest = (Plan){.job = &to->rest_job, .key_count = &to->rest_count};
    to->first = (Plan){.job = &to->first_job, .key_count = &to->first_count};
    if (order) {
        to->rest.key_order = (int32_t *)order + to->joining;
    } else {
        to->rest_job.key.data = (char *)one.key.data + to->joining * one.key.token * bytes;
        to->rest_job.value.data = (char *)one.value.data + to->joining * one.value.token * bytes;
    }
    Job whole = one; /* space for a block of full size, whatever the number of tokens */
    whole.keys = C;
    to->near = near_begin(&whole, scratch);
    if (!to->begun) return;
    float *keys = take(scratch, C * row_of(D)), *values = take(scratch, C * row_of(V));
    read_tile(type, (char *)a->before.recent_key + head * C * D * bytes, D, NULL, 0, to->begun, D, keys, row_of(D));
    read_tile(type, (char *)a->before.recent_value + head * C * V * bytes, V, NULL, 0, to->begun, V, values, row_of(V));
    read_tile(type, one.key.data, one.key.token, order, 0, to->joining, D, keys + to->begun * row_of(D), row_of(D));
    read_tile(type, one.value.data, one.value.token, order, 0, to->joining, V, values + to->begun * row_of(V),
              row_of(V));
    to->first_job.type = FLOAT32;
    to->first_job.key = (Tensor){keys, 0, 0, row_of(D)};
    to->first_job.value = (Tensor){values, 0, 0, row_of(V)};
}

/* output = weight times the attention inside blocks of the new kept tokens at places first ... end. */
static void blocks_attend(Blocks *blocks, long first, long end, Rows queries, float weight, Rows output,
                          Scratch scratch) {
    if (first < blocks->joining) {
        long stop = at_most(end, blocks->joining);
        near_attend(&blocks->first, 0, 0, blocks->begun + first, blocks->begun + stop, queries, weight, output,
                    &blocks->near, scratch);
        queries.data += (stop - first) * queries.row;
        output.data += (stop - first) * output.row;
        first = stop;
        if (stop == blocks->joining) blocks->near.stop = 0; /* the block at hand is none of the rest */
    }
    if (first < end)
        near_attend(&blocks->rest, 0, 0, first - blocks->joining, end - blocks->joining, queries, weight, output,
                    &blocks->near, scratch);
}

/* The block-diagonal part of a tile of new tokens from `start` on, of whom those from `rank` on are kept: in a tensor of
   its own, or halved and added to half of `far`. */
static long advance_near(const Plan *plan, long b, long h, long start, long rows, long rank, Rows far, Blocks *blocks,
                         Scratch scratch) {
    const Advance *a = (const Advance *)plan->job;
    const Job *job = plan->job;
    long V = job->value_width, v_row = row_of(V), wide = padded(V), count = 0;
    const int32_t *order = key_order(plan, b);
    float *spare = take(&scratch, TILE * row_of(job->width)), *inside = take(&scratch, TILE * v_row);
    for (long r = 0; r < rows; r++) count += is_kept(job, b, start + r);
    Rows q = view(job->type, head_of(&job->query, job->type, b, h), job->query.token, order, rank, count, job->width,
                  spare);
    blocks_attend(blocks, rank, rank + count, q, a->near.data ? 1.f : 0.5f, (Rows){inside, v_row}, scratch);
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
        memory.most[i] = i < D ? a->before.mass[head * D + i] : ABSENT;
        memory.mass[i] = i < D ? 1.f : 0.f;
    }
    read_tile(FLOAT32, (const char *)(a->before.values + head * D * V), V, NULL, 0, D, V, memory.values, row_of(V));
}

static void write_memory(const Advance *a, long b, long h, Memory memory) {
    long D = a->job.width, V = a->job.value_width, head = b * a->job.heads + h;
    for (long i = 0; i < D; i++) {
        float inverse = 1.f / memory.mass[i], *to = a->after.values + (head * D + i) * V;
        const float *from = memory.values + i * row_of(V);
        a->after.mass[head * D + i] = memory.most[i] + logf(memory.mass[i]);
        for (long j = 0; j < V; j += 8) *(v8 *)(to + j) = *(const v8 *)(from + j) * inverse;
    }
}

/* Tokens from `start` on of a head as a tensor of floats: where they are, or copied to `spare`. */
static Tensor tile_tensor(const Job *job, const Tensor *x, long b, long head, long start, long rows, long width,
                          float *spare) {
    char *from = head_of(x, job->type, b, head) + start * x->token * bytes_of(job->type);
    if (job->type == FLOAT32) return (Tensor){from, 0, 0, x->token};
    read_tile(job->type, from, x->token, NULL, 0, rows, width, spare, row_of(width));
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
    Blocks blocks;
    if (job->block_size) blocks_begin(plan, b, h, &blocks, &scratch);
    read_memory(a, b, h, memory);
    Job tile = *job; /* one tile of one head, as a job of its own */
    Plan tiles = {.job = &tile};
    tile.batch = tile.heads = tile.key_heads = 1;
    tile.type = FLOAT32;
    tile.block_size = 0;
    tile.alpha = job->match_alpha ? (Scale){alpha, 0, 0, 1}
                                  : (Scale){job->alpha.data + b * job->alpha.batch + h * job->alpha.head, 0, 0, 0};
    tile.beta = job->match_beta ? (Scale){beta, 0, 0, 1}
                                : (Scale){job->beta.data + b * job->beta.batch + h * job->beta.head, 0, 0, 0};
    for (long start = 0; start < job->keys; start += TILE) {
        long rows = tile.queries = tile.keys = at_most(TILE, job->keys - start);
        if (job->keep_key) tile.keep_query = tile.keep_key = job->keep_key + b * job->keys + start;
        tile.query = tile_tensor(job, &job->query, b, h, start, rows, D, queries);
        tile.key = tile_tensor(job, &job->key, b, group, start, rows, D, keys);
        tile.value = tile_tensor(job, &job->value, b, group, start, rows, V, values);
        char *head = head_of(&job->output, a->output_type, b, h);
        Rows far = direct ? (Rows){(float *)head + start * job->output.token, job->output.token}
                          : (Rows){output, v_row};
        tile.output = (Tensor){far.data, 0, 0, far.row};
        match_prefixes(&tiles, 0, 0, 0, rows, job->match_alpha || job->match_beta, &sums, scratch);
        causal_attend(&tiles, 0, 0, 0, rows, memory, scratch);
        if (job->block_size) rank += advance_near(plan, b, h, start, rows, rank, far, &blocks, scratch);
        if (!direct) write_tile(a->output_type, head, job->output.token, NULL, start, rows, V, output, v_row);
    }
    write_sums(a, b, h, &sums);
    write_memory(a, b, h, memory);
}

/* Several tokens. Recent ones are replaced when no head needs the old ones any more. */
static void advance_heads(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Job *job = plan->job;
    if (scratch) NEXT(i, plan, job->batch * job->heads) advance_head(plan, i / job->heads, i % job->heads, *scratch);
    if (!job->block_size) return;
    wait_for_all(threads);
    EACH(i, thread, threads, job->batch * job->key_heads) {
        long b = i / job->key_heads;
        renew_recent((const Advance *)job, b, i % job->key_heads, key_order(plan, b), 0, plan->key_count[b]);
    }
}

/* Scratch of one thread: that of causal attention, the tiles of the new tokens and the first block. */
static long advance_floats(const Job *job) {
    long wide = row_of(at_least(job->width, job->value_width));
    Job largest = *job;
    largest.keys = at_least(job->keys, job->block_size);
    return scratch_floats(&largest) + 6 * TILE * wide + 2 * job->block_size * wide;
}

#endif
