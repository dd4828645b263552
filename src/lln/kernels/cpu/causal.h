/* Causal LLN attention: tile by tile, with what came before a tile in a memory of constant size.

   With phi = exp(alpha q) and psi = exp(beta k), out_i = sum of (phi_i . psi_j) v_j over j <= i, divided by the sum of
   the weights. All that is exponentiated is measured from `most`, the largest beta k so far, the end of the tile
   included: psi' = exp(beta k - most) is at most 1, and phi' = exp(alpha q + most - the largest of that). A query early
   in the tile has seen less than `most`; so a tile ends before a key that exceeds what its first query has seen by more
   than REACH, and no sum of weights is smaller than exp(-REACH). Tiles of one token are the worst case, for keys that
   grow and grow. A token that is not finite is a tile of its own, so that earlier ones do not see it. */
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
    float *query_spare, *key_spare, *value_spare;
} Causal;

static Causal causal_begin(const Job *job, Scratch *scratch) {
    long row = row_of(job->width), v_row = row_of(job->value_width), square = row_of(TILE);
    Causal tile = {0};
    tile.phi = take(scratch, TILE * row);
    tile.psi = take(scratch, TILE * row);
    tile.psi_T = take(scratch, job->width * square);
    tile.weights = take(scratch, TILE * square);
    tile.most = take_filled(scratch, padded(job->width), ABSENT);
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

INLINE int not_finite(const float *row, long vector) {
    vf shows = same(0.f);
    for (long i = 0; i < vector; i += LANES) shows += load(row + i) * 0.f;
    return !(total_of(shows) == 0.f);
}

/* Read the tile at `start`, of `rows` tokens if that is known and else of as many as fit, and weigh its tokens. */
static void causal_tile(const Plan *plan, long b, long h, long start, long rows, Causal *t, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, row = row_of(D), square = row_of(TILE),
            vector = padded(D);
    long group = h / (job->heads / job->key_heads), known = rows;
    float *seen = take(&scratch, vector), *before = take(&scratch, vector);
    if (!known) rows = at_most(TILE, job->keys - start);
    t->query = view(type, head_of(&job->query, type, b, h), job->query.token, NULL, start, rows, D, t->query_spare);
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
        int odd = not_finite(key, vector) || not_finite(t->value.data + r * t->value.row, padded(V));
        if (odd && r > 0 && !known) break;
        for (long i = 0; i < vector; i += LANES) store(psi + i, load(key + i) * beta);
        if (odd && not_finite(key, vector))
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
        float *psi = t->psi + r * row, *phi = t->phi + r * row;
        if (!is_kept(job, b, start + r)) memset(psi, 0, vector * sizeof(float));
        else
            for (long i = 0; i < vector; i += LANES)
                store(psi + i, exponential(smaller(load(psi + i) - load(t->most + i), same(0.1f))));
        for (long i = D; i < vector; i++) psi[i] = 0.f;
        float alpha = scale_of(&job->alpha, b, h, start + r), sum;
        weigh_queries(1, (int)(vector / LANES), &alpha, t->most, t->query.data + r * t->query.row, 0, phi, 0, &sum);
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

static void causal_head(const Plan *plan, long b, long h, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, row = row_of(D), v_row = row_of(V),
            square = row_of(TILE);
    long vector = padded(D), wide = padded(V), rank = 0;
    const int32_t *order = key_order(plan, b);
    float weight = job->block_size ? 0.5f : 1.f;
    if (job->match_alpha || job->match_beta) match_prefixes(plan, b, h, scratch);
    float *mass = take_zeros(&scratch, vector), *values = take_zeros(&scratch, D * v_row);
    float *output = take(&scratch, TILE * v_row), *inside = take(&scratch, TILE * v_row), *compact = take(&scratch,
                                                                                                          TILE * row);
    Causal t = causal_begin(job, &scratch);
    Near near = near_begin(job, &scratch);
    for (long start = 0; start < job->keys; start += t.rows) {
        causal_tile(plan, b, h, start, 0, &t, scratch);
        if (t.fades) {
            fade_columns(1, t.fade, mass, 0, vector);
            fade_rows(D, t.fade, values, v_row, wide);
        }
        Rows out = room(type, head_of(&job->output, type, b, h), job->output.token, NULL, start, V, output);
        multiply(t.rows, wide, D, t.phi, row, values, v_row, out.data, out.row, 0);
        multiply_lower(t.rows, wide, t.weights, square, t.value, out.data, out.row);
        for (long r = 0; r < t.rows; r++) {
            float sum = weight_sum(&t, r, mass, row, square, vector), share = sum == 0.f ? 0.f : weight / sum;
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
        add_tile_mass(&t, mass, row, vector);
        multiply_transposed(D, wide, t.rows, t.psi, row, t.value.data, t.value.row, values, v_row, 1);
    }
}

/* What the first way through a head leaves for the way back: for each token, and for each tile. */
typedef struct {
    float *inverse, *mean; /* 1 / the sum of weights; the mean of the gradient under the weights */
    int64_t *starts;       /* of the tiles, and the end */
    float *most;           /* (tiles x padded width) */
    long tiles;
} History;

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

/* dq of a head, and its history. */
static void causal_queries_backward(const Plan *plan, long b, long h, History *past, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, row = row_of(D), v_row = row_of(V),
            square = row_of(TILE);
    long vector = padded(D);
    float weight = job->block_size ? 0.5f : 1.f;
    float *mass = take_zeros(&scratch, vector), *values_T = take_zeros(&scratch, V * row);
    float *grads = take(&scratch, TILE * v_row), *value_T = take(&scratch, V * square), *pairs = take(&scratch,
                                                                                                      TILE * square);
    float *grad_phi = take(&scratch, TILE * row);
    Causal t = causal_begin(job, &scratch);
    past->tiles = 0;
    for (long start = 0; start < job->keys; start += t.rows) {
        causal_tile(plan, b, h, start, 0, &t, scratch);
        past->starts[past->tiles] = start;
        memcpy(past->most + past->tiles * vector, t.most, vector * sizeof(float));
        past->tiles++;
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
            past->inverse[start + r] = inverse;
            past->mean[start + r] = mean;
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
                store(to.data + r * to.row + i, grad * alpha);
            }
            if (job->grad_alpha) job->grad_alpha[(b * job->heads + h) * job->queries + start + r] =
                    total_of(with_query);
        }
        put(type, head_of(&job->grad_query, type, b, h), job->grad_query.token, NULL, start, t.rows, D, to);
        add_tile_mass(&t, mass, row, vector);
        multiply_transposed(V, vector, t.rows, t.value.data, t.value.row, t.psi, row, values_T, row, 1);
    }
    past->starts[past->tiles] = job->keys;
}

/* dk and dv of a head, from the last tile to the first, added to rows of floats; `first`: there is nothing yet. */
static void causal_keys_backward(const Plan *plan, long b, long h, const History *past, Rows grad_keys,
                                 Rows grad_values, int first, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, row = row_of(D), v_row = row_of(V),
            square = row_of(TILE);
    long vector = padded(D), wide = padded(V);
    /* sums over later queries, over their sums of weights: phi times the gradient, and phi times its mean */
    float *later = take_zeros(&scratch, D * v_row), *later_T = take(&scratch, V * row),
            *later_mean = take_zeros(&scratch, vector);
    float *grads = take(&scratch, TILE * v_row), *value_T = take(&scratch, V * square), *pairs = take(&scratch,
                                                                                                      TILE * square);
    float *grad_psi = take(&scratch, TILE * row), *grad_value = take(&scratch, TILE * v_row);
    Causal t = causal_begin(job, &scratch);
    for (long tile = past->tiles - 1; tile >= 0; tile--) {
        long start = past->starts[tile];
        const float *most = past->most + tile * vector;
        if (tile + 1 < past->tiles) {
            for (long i = 0; i < vector; i += LANES) store(t.fade + i,
                                                           exponential(load(most + i) - load(most + vector + i)));
            fade_columns(1, t.fade, later_mean, 0, vector);
            fade_rows(D, t.fade, later, v_row, wide);
        }
        memcpy(t.most, most, vector * sizeof(float));
        causal_tile(plan, b, h, start, past->starts[tile + 1] - start, &t, scratch);
        transpose(D, V, vector, later, v_row, later_T, row);
        read_tile(type, head_of(&job->grad_output, type, b, h), job->grad_output.token, NULL, start, t.rows, V, grads,
                  v_row);
        Rows g = {grads, v_row};
        multiply(t.rows, vector, V, t.value.data, t.value.row, later_T, row, grad_psi, row, 0);
        multiply(t.rows, wide, D, t.psi, row, later, v_row, grad_value, v_row, 0);
        pair_gradients(&t, g, V, value_T, pairs);
        for (long r = 0; r < t.rows; r++) {
            float inverse = past->inverse[start + r], mean = past->mean[start + r];
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
            float *to_k = grad_keys.data + (start + r) * grad_keys.row,
                    *to_v = grad_values.data + (start + r) * grad_values.row;
            vf with_key = same(0.f);
            int kept = is_kept(job, b, start + r);
            for (long i = 0; i < vector; i += LANES) {
                vf grad = kept ? load(t.psi + r * row + i) * load(grad_psi + r * row + i) : same(0.f);
                if (kept) with_key += grad * load(k + i);
                store(to_k + i, first ? grad * beta : load(to_k + i) + grad * beta);
            }
            for (long j = 0; j < wide; j += LANES) {
                vf grad = kept ? load(grad_value + r * v_row + j) : same(0.f);
                store(to_v + j, first ? grad : load(to_v + j) + grad);
            }
            if (job->grad_beta) job->grad_beta[(b * job->heads + h) * job->keys + start + r] = total_of(with_key);
            float inverse = past->inverse[start + r], mean = past->mean[start + r];
            for (long j = 0; j < wide; j += LANES) store(grads + r * v_row + j, load(grads + r * v_row + j) * inverse);
            for (long i = 0; i < vector; i += LANES)
                store(later_mean + i, load(later_mean + i) + load(t.phi + r * row + i) * (inverse * mean));
        }
        multiply_transposed(D, wide, t.rows, t.phi, row, grads, v_row, later, v_row, 1);
    }
}

/* Gradients of a key head and its query heads; 1 if there was no memory. */
static int causal_backward(const Plan *plan, long b, long key_head, Scratch scratch) {
    const Job *job = plan->job;
    long groups = job->heads / job->key_heads, tokens = job->keys, vector = padded(job->width),
            wide = padded(job->value_width);
    long type = job->type;
    char *to_k = head_of(&job->grad_key, type, b, key_head), *to_v = head_of(&job->grad_value, type, b, key_head);
    int direct_k = is_direct(type, NULL, job->width), direct_v = is_direct(type, NULL, job->value_width);
    /* room for tiles of one token; what is not used stays untouched and costs nothing */
    float *memory = malloc((tokens * (vector + 2)) * sizeof(float)), *sums = NULL;
    int64_t *starts = malloc((tokens + 1) * sizeof(int64_t));
    if (!direct_k || !direct_v) sums = malloc(tokens * (vector + wide) * sizeof(float));
    int failed = !memory || !starts || (!sums && (!direct_k || !direct_v));
    if (!failed) {
        History past = {memory, memory + tokens, starts, memory + 2 * tokens, 0};
        Rows keys = direct_k ? (Rows){(float *)to_k, job->grad_key.token} : (Rows){sums, vector};
        Rows values = direct_v ? (Rows){(float *)to_v, job->grad_value.token} : (Rows){sums + tokens * vector, wide};
        for (long g = 0; g < groups; g++) {
            causal_queries_backward(plan, b, key_head * groups + g, &past, scratch);
            causal_keys_backward(plan, b, key_head * groups + g, &past, keys, values, g == 0, scratch);
        }
        if (!direct_k) write_tile(type, to_k, job->grad_key.token, NULL, 0, tokens, job->width, sums, vector);
        if (!direct_v) write_tile(type, to_v, job->grad_value.token, NULL, 0, tokens, job->value_width,
                                  sums + tokens * vector, wide);
    }
    free(memory);
    free(starts);
    free(sums);
    return failed;
}

#endif
