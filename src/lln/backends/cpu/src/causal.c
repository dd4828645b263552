#include "causal.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "full.h"
#include "near.h"
#include "prefix.h"

#define REACH 30.f

/* `maximum`: of what came before; it is kept up to date there. */
static Causal causal_begin(const Job *job, float *maximum, Scratch *scratch) {
    long row = row_of(job->width), v_row = row_of(job->value_width), square = row_of(TILE);
    Causal tile = {0};
    tile.phi = take(scratch, TILE * row);
    tile.psi = take(scratch, TILE * row);
    tile.psi_T = take(scratch, job->width * square);
    tile.weights = take(scratch, TILE * square);
    tile.maximum = maximum;
    tile.fade = take(scratch, padded(job->width));
    tile.query_spare = take(scratch, TILE * row);
    tile.key_spare = take(scratch, TILE * row);
    tile.value_spare = take(scratch, TILE * v_row);
    return tile;
}

INLINE int exceeds(const float *row, const float *limit, float reach, long vector) {
    vi above = (vi){0};
    for (long i = 0; i < vector; i += LANES) above |= load(row + i) > load(limit + i) + reach;
    int any = 0;
    for (int j = 0; j < LANES; j++) any |= above[j];
    return any;
}

Causal causal_begin_head(const Job *job, long b, long h, float *maximum, int shares, Scratch *scratch) {
    Causal tile = causal_begin(job, maximum, scratch);
    tile.form = read_form(job, b, h, scratch);
    tile.keys.logs = tile.psi;
    tile.keys.row = row_of(job->width);
    if (has_form(job) && shares) tile.keys.shares = take(scratch, TILE * row_of(job->width));
    return tile;
}

/* Keys of a form are weighed a few at a time: the tile may end early. */
#define FORM_ROWS 16

/* Read the keys of a tile (see `causal_tile`) and weigh them. */
static void causal_keys(const Plan *plan, long b, long h, long start, long end, int is_fixed, Causal *t,
                        Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, row = row_of(D), vector = padded(D);
    long group = h / (job->heads / job->key_heads), rows = is_fixed ? end - start : at_most(TILE, end - start);
    float *seen = take(&scratch, vector), *before = take(&scratch, vector);
    t->key = view(type, head_of(&job->key, type, b, group), job->key.token, NULL, start, rows, D, t->key_spare);
    if (job->keep_key) { /* what is not kept may be anything, and weighs nothing */
        read_tile(type, head_of(&job->value, type, b, group), job->value.token, NULL, start, rows, V, t->value_spare,
                  row_of(V));
        t->value = (Rows){t->value_spare, row_of(V)};
        for (long r = 0; r < rows; r++)
            if (!is_kept(job, b, start + r)) memset(t->value_spare + r * row_of(V), 0, padded(V) * sizeof(float));
    } else {
        t->value =
            view(type, head_of(&job->value, type, b, group), job->value.token, NULL, start, rows, V, t->value_spare);
    }
    memcpy(before, t->maximum, vector * sizeof(float));
    memcpy(seen, t->maximum, vector * sizeof(float));
    int anything = seen[0] != MASKED;
    long r = 0;
    for (; r < rows; r++) {
        float *psi = t->psi + r * row, *key = t->key.data + r * t->key.row;
        if (has_form(job) && r % FORM_ROWS == 0)
            weigh_form_keys(plan, &t->form, b, h, NULL, start, r, at_most(r + FORM_ROWS, rows), t->key, &t->keys);
        if (!is_kept(job, b, start + r)) continue;
        float beta = scale_of(&job->beta, b, h, start + r);
        float weight = has_form(job) ? t->keys.weight[r] : 0.f;
        if (is_weighted(job)) weight = scale_of(&job->key_weight, b, h, start + r);
        int nonfinite_key = has_form(job) ? t->keys.total[r] * 0.f + weight * 0.f != 0.f /* as totals are then */
                                          : not_finite(key, vector) || weight * 0.f != 0.f;
        int nonfinite = nonfinite_key || not_finite(t->value.data + r * t->value.row, padded(V));
        if (nonfinite && r > 0 && !is_fixed) break;
        if (is_weighted(job)) weigh_key(vector, beta, weight, key, psi);
        else if (!has_form(job))
            for (long i = 0; i < vector; i += LANES) store(psi + i, load(key + i) * beta);
        if (nonfinite_key)
            for (long i = 0; i < D; i++) psi[i] = NAN;
        for (long i = D; i < vector; i++) psi[i] = MASKED;
        if (has_form(job) && is_fixed) continue;
        float shift = has_form(job) ? weight - t->keys.log_total[r] : 0.f; /* b - psi, which stays ln p + ln(total) */
        if (r == 0 || !anything) {
            for (long i = 0; i < vector; i += LANES) store(seen + i, larger(load(seen + i), load(psi + i) + shift));
            anything = 1;
        } else if (!is_fixed && exceeds(psi, seen, REACH - shift, vector)) {
            break;
        }
        if (!is_fixed)
            for (long i = 0; i < vector; i += LANES)
                store(t->maximum + i, larger(load(t->maximum + i), load(psi + i) + shift));
        if (nonfinite && !is_fixed) {
            r++;
            break;
        }
    }
    rows = t->rows = r;
    t->fades = 0;
    for (long i = 0; i < vector; i++) t->fades |= before[i] != t->maximum[i];
    for (long i = 0; i < vector; i += LANES) store(t->fade + i, exponential(load(before + i) - load(t->maximum + i)));
    for (r = 0; r < rows; r++) {
        float *psi = t->psi + r * row;
        if (!is_kept(job, b, start + r)) memset(psi, 0, vector * sizeof(float));
        else if (is_weighted(job)) {
            if (psi[0] == psi[0]) /* else all of it is NaN, and is to stay so */
                key_distances(vector, scale_of(&job->beta, b, h, start + r),
                              scale_of(&job->key_weight, b, h, start + r), t->key.data + r * t->key.row, t->maximum,
                              psi);
            for (long i = 0; i < vector; i += LANES)
                store(psi + i, exponential(smaller(load(psi + i), broadcast(FARTHEST))));
        } else if (has_form(job)) form_distances(vector, &t->keys, r, t->maximum, NULL, psi);
        else
            for (long i = 0; i < vector; i += LANES)
                store(psi + i, exponential(smaller(load(psi + i) - load(t->maximum + i), broadcast(0.1f))));
        for (long i = D; i < vector; i++) psi[i] = 0.f;
    }
}

void causal_tile(const Plan *plan, long b, long h, long start, long end, int is_fixed, Causal *t, Scratch scratch) {
    const Job *job = plan->job;
    long D = job->width, row = row_of(D), square = row_of(TILE), vector = padded(D);
    causal_keys(plan, b, h, start, end, is_fixed, t, scratch);
    long rows = t->rows;
    t->query =
        view(job->type, head_of(&job->query, job->type, b, h), job->query.token, NULL, start, rows, D, t->query_spare);
    t->query = without_unusable_padding(job, job->keep_key, b, NULL, start, rows, t->query, t->query_spare, t->blanked);
    float *maximum = t->maximum;
    if (is_weighted(job) ||
        has_form(job)) { /* weights may be large for all features: what is added to a query is to be small */
        maximum = take_filled(&scratch, vector, MASKED);
        float top = t->maximum[0];
        for (long i = 1; i < D; i++) top = t->maximum[i] > top ? t->maximum[i] : top;
        for (long i = 0; i < D; i++) maximum[i] = t->maximum[i] - top;
    }
    for (long r = 0; has_form(job) && r < rows; r += 2) {
        float alphas[2], sums[2], *phi = t->phi + r * row, *query = t->query.data + r * t->query.row;
        for (long i = 0; i < at_most(2, rows - r); i++) alphas[i] = scale_of(&job->alpha, b, h, start + r + i);
        int vectors = (int)(vector / LANES);
        if (r + 1 < rows && vectors == 64 / LANES)
            weigh_centered(2, 64 / LANES, alphas, t->form.query, maximum, query, t->query.row, phi, row, sums);
        else if (r + 1 < rows)
            weigh_centered(2, vectors, alphas, t->form.query, maximum, query, t->query.row, phi, row, sums);
        else weigh_centered(1, vectors, alphas, t->form.query, maximum, query, 0, phi, 0, sums);
        for (long i = D; i < vector; i++) phi[i] = phi[row + i] = 0.f;
    }
    for (long r = 0; !has_form(job) && r < rows; r++) {
        float *phi = t->phi + r * row, alpha = scale_of(&job->alpha, b, h, start + r), sum;
        weigh_queries(1, (int)(vector / LANES), &alpha, maximum, t->query.data + r * t->query.row, 0, phi, 0, &sum);
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

void multiply_lower(long rows, long width, const float *w, long w_row, Rows b, float *c, long c_row) {
    for (long from = 0; from < rows; from += 16) {
        long count = at_most(16, rows - from);
        multiply(count, width, from + count, w + from * w_row, w_row, b.data, b.row, c + from * c_row, c_row, 1);
    }
}

void multiply_lower_transposed(long rows, long width, const float *w, long w_row, Rows b, float *c, long c_row) {
    for (long from = 0; from < rows; from += 16) {
        long count = at_most(16, rows - from);
        multiply_transposed(count, width, rows - from, w + from * w_row + from, w_row, b.data + from * b.row, b.row,
                            c + from * c_row, c_row, 1);
    }
}

/* Measure a memory from the `maximum` of the tile. */
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

void causal_sum_keys(const Plan *plan, long b, long h, long first, long end, Memory memory, Scratch scratch) {
    clear_memory(plan->job, memory);
    Causal t = causal_begin_head(plan->job, b, h, memory.maximum, 0, &scratch);
    for (long start = first; start < end; start += t.rows) {
        causal_keys(plan, b, h, start, end, 0, &t, scratch);
        fade_memory(plan->job, &t, memory);
        add_tile(plan->job, &t, memory);
    }
}

void causal_precede(const Job *job, Memory earlier, Memory later) {
    long vector = padded(job->width), v_row = row_of(job->value_width);
    for (long i = 0; i < vector; i++) {
        float maximum = earlier.maximum[i] > later.maximum[i] ? earlier.maximum[i] : later.maximum[i];
        float fade = expf(earlier.maximum[i] - maximum), own = expf(later.maximum[i] - maximum);
        later.maximum[i] = maximum;
        later.mass[i] = later.mass[i] * own + earlier.mass[i] * fade;
        if (i < job->width)
            for (long j = 0; j < padded(job->value_width); j++)
                later.values[i * v_row + j] = later.values[i * v_row + j] * own + earlier.values[i * v_row + j] * fade;
    }
}

void causal_attend(const Plan *plan, long b, long h, long first, long end, Memory memory, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, row = row_of(D), v_row = row_of(V),
         square = row_of(TILE);
    long vector = padded(D), wide = padded(V), rank = 0;
    const int32_t *order = key_order(plan, b);
    float weight = job->block_size ? 0.5f : 1.f;
    float *output = take(&scratch, TILE * v_row), *inside = take(&scratch, TILE * v_row),
          *compact = take(&scratch, TILE * row);
    Causal t = causal_begin_head(job, b, h, memory.maximum, 0, &scratch);
    Near near = near_begin(job, &scratch);
    if (job->block_size)
        for (long token = 0; token < first; token++) rank += is_kept(job, b, token);
    for (long start = first; start < end; start += t.rows) {
        causal_tile(plan, b, h, start, end, 0, &t, scratch);
        fade_memory(job, &t, memory);
        Rows out = output_rows(type, head_of(&job->output, type, b, h), job->output.token, NULL, start, V, output);
        multiply(t.rows, wide, D, t.phi, row, memory.values, v_row, out.data, out.row, 0);
        multiply_lower(t.rows, wide, t.weights, square, t.value, out.data, out.row);
        for (long r = 0; r < t.rows; r++) {
            float sum = weight_sum(&t, r, memory.mass, row, square, vector), share = sum == 0.f ? 0.f : weight / sum;
            for (long j = 0; j < wide; j += LANES)
                store(out.data + r * out.row + j, load(out.data + r * out.row + j) * share);
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
            near_attend(plan, b, h, rank, rank + count, q, weight, (Rows){inside, v_row}, NULL, &near, scratch);
            for (long r = 0; r < count; r++) {
                float *to = out.data + (order ? order[rank + r] - start : r) * out.row;
                for (long j = 0; j < wide; j += LANES) store(to + j, load(to + j) + load(inside + r * v_row + j));
            }
            rank += count;
        }
        store_rows(type, head_of(&job->output, type, b, h), job->output.token, NULL, start, t.rows, V, out);
        add_tile(job, &t, memory);
    }
}

void causal_head(const Plan *plan, long b, long h, Scratch scratch) {
    const Job *job = plan->job;
    Memory memory = memory_at(take(&scratch, memory_floats(job)), job);
    PrefixSums none = {{0}};
    if (job->match_alpha || job->match_beta) match_prefixes(plan, b, h, 0, job->keys, 1, &none, scratch);
    clear_memory(job, memory);
    causal_attend(plan, b, h, 0, job->keys, memory, scratch);
}
