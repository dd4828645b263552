/* Causal LLN attention: tile by tile, with what came before a tile in a memory of constant size.

   With phi = exp(alpha q) and psi = exp(beta k), out_i = sum of (phi_i . psi_j) v_j over j <= i, divided by the sum of
   the weights. All that is exponentiated is measured from `most`, the largest beta k so far, the end of the tile
   included: psi' = exp(beta k - most) is at most 1, and phi' = exp(alpha q + most - the largest of that). A query early
   in the tile has seen less than `most`; so a tile ends before a key that exceeds what its first query has seen by more
   than REACH, and no sum of weights is smaller than exp(-REACH). Tiles of one token are the worst case, for keys that
   grow and grow. A token that is not finite is a tile of its own, so that earlier ones do not see it.

   Where heads are too few for the threads, a head is cut into chunks: each begins with the memory of those before it, which
   are read once more for that. */
#ifndef LLN_CAUSAL_H
#define LLN_CAUSAL_H

#include "full.h"
#include "prefix.h"

#define REACH 30.f

/* A tile and what is computed of it. */
typedef struct {
    long rows;
    float *phi, *psi, *psi_T, *weights; /* (rows x D), (rows x D), (D x rows), (rows x rows) */
    float *most, *fade;                 /* (D): the largest beta k up to its end, and exp(most before - most) */
    int fades;                          /* whether any `fade` is not 1 */
    Rows query, key, value;
    uint8_t blanked[TILE]; /* which queries count as zeros */
    float *query_spare, *key_spare, *value_spare;
} Causal;

/* `most`: of what came before; it is kept up to date there. */
static Causal causal_begin(const Job *job, float *most, Scratch *scratch) {
    long row = row_of(job->width), v_row = row_of(job->value_width), square = row_of(TILE);
    Causal tile = {0};
    tile.phi = take(scratch, TILE * row);
    tile.psi = take(scratch, TILE * row);
    tile.psi_T = take(scratch, job->width * square);
    tile.weights = take(scratch, TILE * square);
    tile.most = most;
    tile.fade = take(scratch, padded(job->width));
    tile.query_spare = take(scratch, TILE * row);
    tile.key_spare = take(scratch, TILE * row);
    tile.value_spare = take(scratch, TILE * v_row);
    return tile;
}

INLINE int is_kept(const Job *job, long b, long token) { return !job->keep_key || job->keep_key[b * job->keys + token];
        }

INLINE int exceeds(const float *row, const float *limit, float reach, long vector) {
    vi above = (vi){0};
    for (long i = 0; i < vector; i += LANES) above |= load(row + i) > load(limit + i) + reach;
    int any = 0;
    for (int j = 0; j < LANES; j++) any |= above[j];
    return any;
}

/* Read the keys of the tile from `start` on, up to `end` if it is `known` to be a tile and else as many as fit, and
   weigh them. */
static void causal_keys(const Plan *plan, long b, long h, long start, long end, int known, Causal *t, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, row = row_of(D), vector = padded(D);
    long group = h / (job->heads / job->key_heads), rows = known ? end - start : at_most(TILE, end - start);
    float *seen = take(&scratch, vector), *before = take(&scratch, vector);
    t->key = view(type, head_of(&job->key, type, b, group), job->key.token, NULL, start, rows, D, t->key_spare);
    if (job->keep_key) { /* what is not kept may be anything, and weighs nothing */
        read_tile(type, head_of(&job->value, type, b, group), job->value.token, NULL, start, rows, V, t->value_spare,
                  row_of(V));
        t->value = (Rows){t->value_spare, row_of(V)};
        for (long r = 0; r < rows; r++)
            if (!is_kept(job, b, start + r)) memset(t->value_spare + r * row_of(V), 0, padded(V) * sizeof(float));
    } else {
        t->value = view(type, head_of(&job->value, type, b, group), job->value.token, NULL, start, rows, V,
                        t->value_spare);
    }
    memcpy(before, t->most, vector * sizeof(float));
    memcpy(seen, t->most, vector * sizeof(float));
    int anything = seen[0] != ABSENT;
    long r = 0;
    for (; r < rows; r++) {
        float *psi = t->psi + r * row, *key = t->key.data + r * t->key.row;
        if (!is_kept(job, b, start + r)) continue;
        float beta = scale_of(&job->beta, b, h, start + r);
        float weight = is_weighted(job) ? scale_of(&job->key_weight, b, h, start + r) : 0.f;
        int odd_key = not_finite(key, vector) || weight * 0.f != 0.f;
        int odd = odd_key || not_finite(t->value.data + r * t->value.row, padded(V));
        if (odd && r > 0 && !known) break;
        if (is_weighted(job)) weigh_key(vector, beta, weight, key, psi);
        else
            for (long i = 0; i < vector; i += LANES) store(psi + i, load(key + i) * beta);
        if (odd_key)
            for (long i = 0; i < D; i++) psi[i] = NAN;
        for (long i = D; i < vector; i++) psi[i] = ABSENT;
        if (r == 0 || !anything) {
            for (long i = 0; i < vector; i += LANES) store(seen + i, larger(load(seen + i), load(psi + i)));
            anything = 1;
        } else if (!known && exceeds(psi, seen, REACH, vector)) {
            break;
        }
        if (!known)
            for (long i = 0; i < vector; i += LANES) store(t->most + i, larger(load(t->most + i), load(psi + i)));
        if (odd && !known) {
            r++;
            break;
        }
    }
    rows = t->rows = r;
    t->fades = 0;
    for (long i = 0; i < vector; i++) t->fades |= before[i] != t->most[i];
    for (long i = 0; i < vector; i += LANES) store(t->fade + i, exponential(load(before + i) - load(t->most + i)));
    for (r = 0; r < rows; r++) {
        float *psi = t->psi + r * row;
        if (!is_kept(job, b, start + r)) memset(psi, 0, vector * sizeof(float));
        else if (is_weighted(job)) {
            if (psi[0] == psi[0]) /* else all of it is NaN, and is to stay so */
                key_distances(vector, scale_of(&job->beta, b, h, start + r),
                              scale_of(&job->key_weight, b, h, start + r), t->key.data + r * t->key.row, t->most, psi);
            for (long i = 0; i < vector; i += LANES)
                store(psi + i, exponential(smaller(load(psi + i), same(FARTHEST))));
        } else
            for (long i = 0; i < vector; i += LANES)
                store(psi + i, exponential(smaller(load(psi + i) - load(t->most + i), same(0.1f))));
        for (long i = D; i < vector; i++) psi[i] = 0.f;
    }
}

/* The same, and its queries and the weights of its pairs. */
static void causal_tile(const Plan *plan, long b, long h, long start, long end, int known, Causal *t, Scratch scratch) {
    const Job *job = plan->job;
    long D = job->width, row = row_of(D), square = row_of(TILE), vector = padded(D);
    causal_keys(plan, b, h, start, end, known, t, scratch);
    long rows = t->rows;
    t->query = view(job->type, head_of(&job->query, job->type, b, h), job->query.token, NULL, start, rows, D,
                    t->query_spare);
    t->query = without_odd_padding(job, job->keep_key, b, NULL, start, rows, t->query, t->query_spare, t->blanked);
    float *most = t->most;
    if (is_weighted(job)) { /* weights may be large for all features: what is added to a query is to be small */
        most = take_filled(&scratch, vector, ABSENT);
        float top = t->most[0];
        for (long i = 1; i < D; i++) top = t->most[i] > top ? t->most[i] : top;
        for (long i = 0; i < D; i++) most[i] = t->most[i] - top;
    }
    for (long r = 0; r < rows; r++) {
        float *phi = t->phi + r * row, alpha = scale_of(&job->alpha, b, h, start + r), sum;
        weigh_queries(1, (int)(vector / LANES), &alpha, most, t->query.data + r * t->query.row, 0, phi, 0, &sum);
        for (long i = D; i < vector; i++) phi[i] = 0.f;
    }
    /* the weights of pairs inside the tile, a strip of rows after the other up to the diagonal */
    transpose(rows, D, padded(rows), t->psi, row, t->psi_T, square);
    for (long from = 0; from < rows; from += 16) {
        long count = at_most(16, rows - from), width = padded(from + count);
        multiply(count, width, D, t->phi + from * row, row, t->psi_T, square, t->weights + from * square, square, 0);
        for (long i = from; i < from + count; i++)
            for (long j = i + 1; j < width; j++) t->weights[i * square + j] = 0.f;
    }
}

/* c (+)= w b for the lower triangle w. */
static void multiply_lower(long rows, long width, const float *w, long w_row, Rows b, float *c, long c_row) {
    for (long from = 0; from < rows; from += 16) {
        long count = at_most(16, rows - from);
        multiply(count, width, from + count, w + from * w_row, w_row, b.data, b.row, c + from * c_row, c_row, 1);
    }
}

/* c += wᵀ b for the lower triangle w: row j of c takes rows j ... of b. */
static void multiply_lower_transposed(long rows, long width, const float *w, long w_row, Rows b, float *c, long c_row) {
    for (long from = 0; from < rows; from += 16) {
        long count = at_most(16, rows - from);
        multiply_transposed(count, width, rows - from, w + from * w_row + from, w_row, b.data + from * b.row, b.row,
                            c + from * c_row, c_row, 1);
    }
}

/* The sum of the weights of a query: phi . mass + those inside the tile. */
INLINE float weight_sum(const Causal *t, long r, const float *mass, long row, long square, long vector) {
    vf sum = same(0.f);
    for (long i = 0; i < vector; i += LANES) sum += load(t->phi + r * row + i) * load(mass + i);
    for (long j = 0; j < padded(r + 1); j += LANES) sum += load(t->weights + r * square + j);
    return total_of(sum);
}

INLINE void fade_rows(long rows, const float *fade, float *matrix, long row, long width) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < width; j += LANES) store(matrix + i * row + j, load(matrix + i * row + j) * fade[i]);
}

INLINE void fade_columns(long rows, const float *fade, float *matrix, long row, long vector) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < vector; j += LANES)
            store(matrix + i * row + j, load(matrix + i * row + j) * load(fade + j));
}

INLINE void add_tile_mass(const Causal *t, float *mass, long row, long vector) {
    for (long i = 0; i < vector; i += LANES) {
        vf sum = load(mass + i);
        for (long r = 0; r < t->rows; r++) sum += load(t->psi + r * row + i);
        store(mass + i, sum);
    }
}

INLINE void forget(const Job *job, Memory memory) {
    for (long i = 0; i < padded(job->width); i++) memory.most[i] = ABSENT;
    memset(memory.mass, 0, (padded(job->width) + job->width * row_of(job->value_width)) * sizeof(float));
}

/* Measure what is remembered from the `most` of the tile. */
INLINE void fade_memory(const Job *job, const Causal *t, Memory memory) {
    if (!t->fades) return;
    fade_columns(1, t->fade, memory.mass, 0, padded(job->width));
    fade_rows(job->width, t->fade, memory.values, row_of(job->value_width), padded(job->value_width));
}

INLINE void add_tile(const Job *job, const Causal *t, Memory memory) {
    long row = row_of(job->width), v_row = row_of(job->value_width);
    add_tile_mass(t, memory.mass, row, padded(job->width));
    multiply_transposed(job->width, padded(job->value_width), t->rows, t->psi, row, t->value.data, t->value.row,
                        memory.values, v_row, 1);
}

/* The memory of the tokens first ... end alone. */
static void causal_remember(const Plan *plan, long b, long h, long first, long end, Memory memory, Scratch scratch) {
    forget(plan->job, memory);
    Causal t = causal_begin(plan->job, memory.most, &scratch);
    for (long start = first; start < end; start += t.rows) {
        causal_keys(plan, b, h, start, end, 0, &t, scratch);
        fade_memory(plan->job, &t, memory);
        add_tile(plan->job, &t, memory);
    }
}

/* Put the memory of earlier tokens before that of later ones: both together. */
static void causal_precede(const Job *job, Memory earlier, Memory later) {
    long vector = padded(job->width), v_row = row_of(job->value_width);
    for (long i = 0; i < vector; i++) {
        float most = earlier.most[i] > later.most[i] ? earlier.most[i] : later.most[i];
        float fade = expf(earlier.most[i] - most), own = expf(later.most[i] - most);
        later.most[i] = most;
        later.mass[i] = later.mass[i] * own + earlier.mass[i] * fade;
        if (i < job->width)
            for (long j = 0; j < padded(job->value_width); j++)
                later.values[i * v_row + j] = later.values[i * v_row + j] * own + earlier.values[i * v_row + j] * fade;
    }
}

/* The output of the tokens first ... end, who come after what is in `memory` and are added to it. */
static void causal_attend(const Plan *plan, long b, long h, long first, long end, Memory memory, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, row = row_of(D), v_row = row_of(V),
            square = row_of(TILE);
    long vector = padded(D), wide = padded(V), rank = 0;
    const int32_t *order = key_order(plan, b);
    float weight = job->block_size ? 0.5f : 1.f;
    float *output = take(&scratch, TILE * v_row), *inside = take(&scratch, TILE * v_row), *compact = take(&scratch,
                                                                                                          TILE * row);
    Causal t = causal_begin(job, memory.most, &scratch);
    Near near = near_begin(job, &scratch);
    if (job->block_size)
        for (long token = 0; token < first; token++) rank += is_kept(job, b, token);
    for (long start = first; start < end; start += t.rows) {
        causal_tile(plan, b, h, start, end, 0, &t, scratch);
        fade_memory(job, &t, memory);
        Rows out = room(type, head_of(&job->output, type, b, h), job->output.token, NULL, start, V, output);
        multiply(t.rows, wide, D, t.phi, row, memory.values, v_row, out.data, out.row, 0);
        multiply_lower(t.rows, wide, t.weights, square, t.value, out.data, out.row);
        for (long r = 0; r < t.rows; r++) {
            float sum = weight_sum(&t, r, memory.mass, row, square, vector), share = sum == 0.f ? 0.f : weight / sum;
            for (long j = 0; j < wide; j += LANES) store(out.data + r * out.row + j,
                                                         load(out.data + r * out.row + j) * share);
        }
        if (job->block_size) {
            long count = 0;
            for (long r = 0; r < t.rows; r++) count += is_kept(job, b, start + r);
            Rows q = t.query;
            if (order) {
                read_tile(type, head_of(&job->query, type, b, h), job->query.token, order, rank, count, D, compact,
                          row);
                q = (Rows){compact, row};
            }
            near_attend(plan, b, h, rank, rank + count, q, weight, (Rows){inside, v_row}, &near, scratch);
            for (long r = 0; r < count; r++) {
                float *to = out.data + (order ? order[rank + r] - start : r) * out.row;
                for (long j = 0; j < wide; j += LANES) store(to + j, load(to + j) + load(inside + r * v_row + j));
            }
            rank += count;
        }
        put(type, head_of(&job->output, type, b, h), job->output.token, NULL, start, t.rows, V, out);
        add_tile(job, &t, memory);
    }
}

static void causal_head(const Plan *plan, long b, long h, Scratch scratch) {
    const Job *job = plan->job;
    Memory memory = memory_at(take(&scratch, memory_floats(job)), job);
    PrefixSums none = {{0}};
    if (job->match_alpha || job->match_beta) match_prefixes(plan, b, h, 0, job->keys, 1, &none, scratch);
    forget(job, memory);
    causal_attend(plan, b, h, 0, job->keys, memory, scratch);
}

/* What the way through a chunk leaves for the way back: for each token of the head, and for each tile of the chunk. */
typedef struct {
    float *inverse, *mean; /* 1 / the sum of weights; the mean of the gradient under the weights */
    int64_t *tiles;        /* how many */
    int64_t *starts;       /* of the tiles, and the end */
    float *most;           /* (tiles x padded width) */
} History;

/* Room for tiles of one token; what is not used stays untouched and costs nothing. */
INLINE long history_floats(const Job *job, long chunks) {
    return apart(2 * (job->keys + 2 * chunks)) + 2 * apart(job->keys) + job->keys * padded(job->width);
}

INLINE History history_at(float *room, const Job *job, long first, long chunk, long chunks) {
    int64_t *tiles = (int64_t *)room + first + 2 * chunk;
    float *inverse = behind(room, 1, 2 * (job->keys + 2 * chunks)), *mean = behind(inverse, 1, job->keys);
    return (History){inverse, mean, tiles, tiles + 1, behind(mean, 1, job->keys) + first * padded(job->width)};
}

/* Gradients of the pair weights of a tile: grads (value)ᵀ, less its mean, over the sum of weights; lower triangle. */
static void pair_gradients(const Causal *t, Rows grads, long V, float *value_T, float *pairs) {
    long square = row_of(TILE), rows = t->rows;
    transpose(rows, V, padded(rows), t->value.data, t->value.row, value_T, square);
    for (long from = 0; from < rows; from += 16) {
        long count = at_most(16, rows - from);
        multiply(count, padded(from + count), V, grads.data + from * grads.row, grads.row, value_T, square,
                 pairs + from * square, square, 0);
    }
}

/* dq of the tokens first ... end, their history, and, if there is room in `gives` (else NULL), what their queries hand
   to the keys before `first`: phi times the gradient over the sum of weights, and phi times its mean. */
static void causal_queries_backward(const Plan *plan, long b, long h, long first, long end, Memory before,
                                    const Memory *gives, History past, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, row = row_of(D), v_row = row_of(V),
            square = row_of(TILE);
    long vector = padded(D), wide = padded(V), tiles = 0;
    float weight = job->block_size ? 0.5f : 1.f;
    float *most = take(&scratch, vector), *mass = take(&scratch, vector), *values_T = take(&scratch, V * row);
    float *grads = take(&scratch, TILE * v_row), *value_T = take(&scratch, V * square), *pairs = take(&scratch,
                                                                                                      TILE * square);
    float *grad_phi = take(&scratch, TILE * row);
    memcpy(most, before.most, vector * sizeof(float));
    memcpy(mass, before.mass, vector * sizeof(float));
    transpose(D, V, vector, before.values, v_row, values_T, row);
    if (gives) forget(job, *gives);
    Causal t = causal_begin(job, most, &scratch);
    for (long start = first; start < end; start += t.rows) {
        causal_tile(plan, b, h, start, end, 0, &t, scratch);
        past.starts[tiles] = start;
        memcpy(past.most + tiles * vector, most, vector * sizeof(float));
        tiles++;
        if (t.fades) {
            fade_columns(1, t.fade, mass, 0, vector);
            fade_columns(V, t.fade, values_T, row, vector);
        }
        Rows g = view(type, head_of(&job->grad_output, type, b, h), job->grad_output.token, NULL, start, t.rows, V,
                      grads);
        Rows to = room(type, head_of(&job->grad_query, type, b, h), job->grad_query.token, NULL, start, D, grad_phi);
        multiply(t.rows, vector, V, g.data, g.row, values_T, row, grad_phi, row, 0);
        pair_gradients(&t, g, V, value_T, pairs);
        for (long r = 0; r < t.rows; r++) {
            float sum = weight_sum(&t, r, mass, row, square, vector), inverse = sum == 0.f ? 0.f : weight / sum;
            float *d = grad_phi + r * row, *p = pairs + r * square, *w = t.weights + r * square;
            vf dot = same(0.f);
            for (long i = 0; i < vector; i += LANES) dot += load(t.phi + r * row + i) * load(d + i);
            for (long j = r + 1; j < padded(r + 1); j++) p[j] = 0.f;
            vf inside = same(0.f);
            for (long j = 0; j < padded(r + 1); j += LANES) inside += load(w + j) * load(p + j);
            float mean = sum == 0.f ? 0.f : (total_of(dot) + total_of(inside)) / sum;
            past.inverse[start + r] = inverse;
            past.mean[start + r] = mean;
            for (long i = 0; i < vector; i += LANES) store(d + i, (load(d + i) - load(mass + i) * mean) * inverse);
            for (long j = 0; j <= r; j++) p[j] = (p[j] - mean) * inverse;
            for (long j = r + 1; j < padded(at_most(r / 16 * 16 + 16, t.rows)); j++) p[j] = 0.f;
        }
        multiply_lower(t.rows, vector, pairs, square, (Rows){t.psi, row}, grad_phi, row);
        for (long r = 0; r < t.rows; r++) {
            float alpha = scale_of(&job->alpha, b, h, start + r), *q = t.query.data + r * t.query.row;
            vf with_query = same(0.f);
            for (long i = 0; i < vector; i += LANES) {
                vf grad = load(t.phi + r * row + i) * load(grad_phi + r * row + i);
                with_query += grad * load(q + i);
                store(to.data + r * to.row + i, t.blanked[r] ? same(0.f) : grad * alpha);
            }
            if (job->grad_alpha) job->grad_alpha[(b * job->heads + h) * job->queries + start + r] =
                    total_of(with_query);
        }
        put(type, head_of(&job->grad_query, type, b, h), job->grad_query.token, NULL, start, t.rows, D, to);
        add_tile_mass(&t, mass, row, vector);
        multiply_transposed(V, vector, t.rows, t.value.data, t.value.row, t.psi, row, values_T, row, 1);
        if (!gives) continue;
        for (long i = 0; i < vector; i += LANES) store(t.fade + i, exponential(load(before.most + i) - load(most + i)));
        fade_columns(t.rows, t.fade, t.phi, row, vector);
        for (long r = 0; r < t.rows; r++) {
            float inverse = past.inverse[start + r], mean = past.mean[start + r];
            for (long j = 0; j < wide; j += LANES) store(grads + r * v_row + j, load(g.data + r * g.row + j) * inverse);
            for (long i = 0; i < vector; i += LANES)
                store(gives->mass + i, load(gives->mass + i) + load(t.phi + r * row + i) * (inverse * mean));
        }
        multiply_transposed(D, wide, t.rows, t.phi, row, grads, v_row, gives->values, v_row, 1);
    }
    past.starts[tiles] = end;
    *past.tiles = tiles;
}

/* Where dk and dv of a key head are summed over the heads that share it: in the result, or in `room` if that is not
   made of rows of floats. */
typedef struct {
    Rows keys, values;
} KeyGradients;

INLINE long key_gradients_floats(const Job *job) {
    int direct = is_direct(job->type, NULL, job->width) && is_direct(job->type, NULL, job->value_width);
    return direct ? 0 : job->keys * (padded(job->width) + padded(job->value_width));
}

static KeyGradients key_gradients(const Job *job, long b, long key_head, float *room) {
    long type = job->type, vector = padded(job->width), wide = padded(job->value_width);
    KeyGradients to = {{room, vector}, {room + job->keys * vector, wide}};
    if (is_direct(type, NULL, job->width))
        to.keys = (Rows){(float *)head_of(&job->grad_key, type, b, key_head), job->grad_key.token};
    if (is_direct(type, NULL, job->value_width))
        to.values = (Rows){(float *)head_of(&job->grad_value, type, b, key_head), job->grad_value.token};
    return to;
}

static void put_key_gradients(const Job *job, long b, long key_head, long first, long end, KeyGradients from) {
    Rows keys = {from.keys.data + first * from.keys.row, from.keys.row};
    Rows values = {from.values.data + first * from.values.row, from.values.row};
    put(job->type, head_of(&job->grad_key, job->type, b, key_head), job->grad_key.token, NULL, first, end - first,
        job->width, keys);
    put(job->type, head_of(&job->grad_value, job->type, b, key_head), job->grad_value.token, NULL, first, end - first,
        job->value_width, values);
}

/* dk and dv of a chunk, from the last tile to the first, added to rows of floats; `first`: there is nothing yet. `after`
   is what the queries after the chunk hand to it, or NULL. */
static void causal_keys_backward(const Plan *plan, long b, long h, History past, const Memory *after, KeyGradients sums,
                                 int first, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, row = row_of(D), v_row = row_of(V),
            square = row_of(TILE);
    long vector = padded(D), wide = padded(V);
    /* sums over later queries, over their sums of weights: phi times the gradient, and phi times its mean */
    float *later = take_zeros(&scratch, D * v_row), *later_T = take(&scratch, V * row),
            *later_mean = take_zeros(&scratch, vector), *its_most = take(&scratch, vector);
    float *grads = take(&scratch, TILE * v_row), *value_T = take(&scratch, V * square), *pairs = take(&scratch,
                                                                                                      TILE * square);
    float *grad_psi = take(&scratch, TILE * row), *grad_value = take(&scratch, TILE * v_row);
    if (after) {
        memcpy(later_mean, after->mass, vector * sizeof(float));
        memcpy(later, after->values, D * v_row * sizeof(float));
    }
    Causal t = causal_begin(job, its_most, &scratch);
    for (long tile = *past.tiles - 1; tile >= 0; tile--) {
        long start = past.starts[tile];
        const float *most = past.most + tile * vector;
        if (tile + 1 < *past.tiles) {
            for (long i = 0; i < vector; i += LANES) store(t.fade + i,
                                                           exponential(load(most + i) - load(most + vector + i)));
            fade_columns(1, t.fade, later_mean, 0, vector);
            fade_rows(D, t.fade, later, v_row, wide);
        }
        memcpy(t.most, most, vector * sizeof(float));
        causal_tile(plan, b, h, start, past.starts[tile + 1], 1, &t, scratch);
        transpose(D, V, vector, later, v_row, later_T, row);
        read_tile(type, head_of(&job->grad_output, type, b, h), job->grad_output.token, NULL, start, t.rows, V, grads,
                  v_row);
        Rows g = {grads, v_row};
        multiply(t.rows, vector, V, t.value.data, t.value.row, later_T, row, grad_psi, row, 0);
        multiply(t.rows, wide, D, t.psi, row, later, v_row, grad_value, v_row, 0);
        pair_gradients(&t, g, V, value_T, pairs);
        for (long r = 0; r < t.rows; r++) {
            float inverse = past.inverse[start + r], mean = past.mean[start + r];
            float *p = pairs + r * square, *w = t.weights + r * square, *d = grad_psi + r * row;
            for (long j = 0; j <= r; j++) {
                p[j] = (p[j] - mean) * inverse;
                w[j] *= inverse;
            }
            for (long j = r + 1; j < t.rows; j++) p[j] = w[j] = 0.f;
            for (long i = 0; i < vector; i += LANES) store(d + i, load(d + i) - load(later_mean + i));
        }
        multiply_lower_transposed(t.rows, vector, pairs, square, (Rows){t.phi, row}, grad_psi, row);
        multiply_lower_transposed(t.rows, wide, t.weights, square, g, grad_value, v_row);
        for (long r = 0; r < t.rows; r++) {
            float beta = scale_of(&job->beta, b, h, start + r), *k = t.key.data + r * t.key.row;
            float *to_k = sums.keys.data + (start + r) * sums.keys.row,
                    *to_v = sums.values.data + (start + r) * sums.values.row;
            vf with_key = same(0.f), sum = same(0.f);
            int kept = is_kept(job, b, start + r);
            for (long i = 0; i < vector; i += LANES) {
                vf grad = kept ? load(t.psi + r * row + i) * load(grad_psi + r * row + i) : same(0.f);
                if (kept) with_key += grad * load(k + i);
                sum += grad;
                store(to_k + i, first ? grad * beta : load(to_k + i) + grad * beta);
            }
            for (long j = 0; j < wide; j += LANES) {
                vf grad = kept ? load(grad_value + r * v_row + j) : same(0.f);
                store(to_v + j, first ? grad : load(to_v + j) + grad);
            }
            long at = (b * job->heads + h) * job->keys + start + r;
            if (job->grad_beta) job->grad_beta[at] = total_of(with_key);
            if (job->grad_weight) job->grad_weight[at] = total_of(sum);
            float inverse = past.inverse[start + r], mean = past.mean[start + r];
            for (long j = 0; j < wide; j += LANES) store(grads + r * v_row + j, load(grads + r * v_row + j) * inverse);
            for (long i = 0; i < vector; i += LANES)
                store(later_mean + i, load(later_mean + i) + load(t.phi + r * row + i) * (inverse * mean));
        }
        multiply_transposed(D, wide, t.rows, t.phi, row, grads, v_row, later, v_row, 1);
    }
}

/* What the queries of a chunk and of those after it hand to the keys before it; the latter was measured from the end of
   the chunk. */
static void causal_hand_on(const Job *job, Memory before, Memory before_next, Memory gives, Memory gives_next) {
    long v_row = row_of(job->value_width);
    for (long i = 0; i < job->width; i++) {
        float fade = expf(before.most[i] - before_next.most[i]);
        gives.mass[i] += gives_next.mass[i] * fade;
        for (long j = 0; j < padded(job->value_width); j++)
            gives.values[i * v_row + j] += gives_next.values[i * v_row + j] * fade;
    }
}

/* Gradients of a key head and its query heads; 1 if there was no memory. */
static int causal_backward(const Plan *plan, long b, long key_head, Scratch scratch) {
    const Job *job = plan->job;
    long groups = job->heads / job->key_heads;
    float *room = malloc((apart(history_floats(job, 1)) + key_gradients_floats(job)) * sizeof(float));
    if (!room) return 1;
    Memory nothing = memory_at(take(&scratch, memory_floats(job)), job);
    forget(job, nothing);
    History past = history_at(room, job, 0, 0, 1);
    KeyGradients sums = key_gradients(job, b, key_head, behind(room, 1, history_floats(job, 1)));
    for (long g = 0; g < groups; g++) {
        long h = key_head * groups + g;
        causal_queries_backward(plan, b, h, 0, job->keys, nothing, NULL, past, scratch);
        causal_keys_backward(plan, b, h, past, NULL, sums, g == 0, scratch);
    }
    put_key_gradients(job, b, key_head, 0, job->keys, sums);
    free(room);
    return 0;
}

#endif
