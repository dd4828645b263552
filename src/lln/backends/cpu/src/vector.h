/* Vectors of LANES floats in the compiler's vector extension, their exponential, and rows of tensors as floats. */
#ifndef LLN_VECTOR_H
#define LLN_VECTOR_H

#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#ifndef LANES
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef float vf_anywhere __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* The log-mass of masked tokens: below every other, yet finite. */
#define MASKED (-1.7014117e38f)

INLINE vf load(const float *p) { return *(const vf_anywhere *)p; }
INLINE void store(float *p, vf x) { *(vf_anywhere *)p = x; }
INLINE vf broadcast(float x) { return x - (vf){0}; }

/* larger, smaller: a NaN in y is lost, one in x kept. */
#if LANES == 8 && defined(__AVX__)
INLINE vf larger(vf x, vf y) { return (vf)_mm256_max_ps((__m256)y, (__m256)x); }
INLINE vf smaller(vf x, vf y) { return (vf)_mm256_min_ps((__m256)y, (__m256)x); }
INLINE float largest_of(vf x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
INLINE float total_of(vf x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
#else
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
#if LANES == 16 && defined(__AVX512F__)
INLINE vf larger(vf x, vf y) { return (vf)_mm512_max_ps((__m512)y, (__m512)x); }
INLINE vf smaller(vf x, vf y) { return (vf)_mm512_min_ps((__m512)y, (__m512)x); }
#else
INLINE vf larger(vf x, vf y) { return choose(x < y, y, x); }
INLINE vf smaller(vf x, vf y) { return choose(x > y, y, x); }
#endif
INLINE float largest_of(vf x) {
    float maximum = x[0];
    for (int i = 1; i < LANES; i++) maximum = x[i] > maximum ? x[i] : maximum;
    return maximum;
}
INLINE float total_of(vf x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}
#endif

/* Whether any of `vector` floats, a multiple of LANES, is NaN or infinite. */
INLINE int not_finite(const float *row, long vector) {
    vf nan_marker = broadcast(0.f);
    for (long i = 0; i < vector; i += LANES) nan_marker += load(row + i) * 0.f;
    return !(total_of(nan_marker) == 0.f);
}

/* Whether any of `vector` floats is NaN, infinite or larger than any sensible padding (`lln.masks.LARGEST_PADDING`). */
#define LARGEST_PADDING 1e15f
INLINE int is_unusable(const float *row, long vector) {
    vi unusable = (vi){0};
    for (long i = 0; i < vector; i += LANES)
        unusable |= ~((load(row + i) <= LARGEST_PADDING) & (load(row + i) >= -LARGEST_PADDING));
    int any = 0;
    for (int j = 0; j < LANES; j++) any |= unusable[j];
    return any;
}

/* exp(x) for x up to 88; 0 below -87, NaN for NaN. The relative error is 1e-7, and 2e-9 |x| where that is more: what is
   so far below the largest term weighs nothing. The polynomial is the best one for exp between -log(2)/2 and log(2)/2.
   */
INLINE vf exponential(vf x) {
    const float shift = 12582912.f + 127.f; /* 1.5 * 2^23: its sum with n has n + 127 in the lowest bits */
    vf n = x * 1.44269504088896341f + shift;
    vf power = (vf)((vi)n << 23);
    n -= shift;
    vf r = x - n * 0.693147180559945309f;
    vf y = r * 0.00829031439f + 0.0418979295f;
    y = y * r + 0.166676362f;
    y = y * r + 0.499991495f;
    y = y * r + 0.999999707f;
    y = y * r + 1.f;
    return (vf)((vi)(y * power) & ~(x < -87.f));
}

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

INLINE long bytes_of(long type) { return type == FLOAT32 ? 4 : 2; }

#ifndef __F16C__
static inline float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13, bits;
    float value;
    if (rest >= 0x0f800000) { /* infinite, NaN */
        bits = sign | 0x7f800000 | (rest & 0x007fffff);
        memcpy(&value, &bits, 4);
        return value;
    }
    memcpy(&value, &rest, 4);
    value *= 5.192296858534828e33f; /* 2^112 */
    return sign ? -value : value;
}

static inline uint16_t float_to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00; /* rounds to 65536 and above */
    if (bits < 0x38800000) {                      /* below the smallest normal: adding 0.5 rounds at 2^-24 */
        float small;
        memcpy(&small, &bits, 4);
        small += 0.5f;
        memcpy(&bits, &small, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((bits - 0x38000000) >> 13);
}
#endif

/* A row of `width` elements (a multiple of 8) as floats. */
INLINE void read_row(long type, const void *from, long width, float *to) {
    if (type == FLOAT32) {
        typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
        for (long i = 0; i < width; i += 8) *(v8 *)(to + i) = *(const v8 *)((const float *)from + i);
    } else if (type == BFLOAT16) {
        const uint16_t *half = from;
        for (long i = 0; i < width; i++) {
            uint32_t bits = (uint32_t)half[i] << 16;
            memcpy(to + i, &bits, 4);
        }
    } else {
        const uint16_t *half = from;
#ifdef __F16C__
        for (long i = 0; i < width; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(half + i))));
#else
        for (long i = 0; i < width; i++) to[i] = half_to_float(half[i]);
#endif
    }
}

INLINE void write_row(long type, const float *from, long width, void *to) {
    if (type == FLOAT32) {
        typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
        for (long i = 0; i < width; i += 8) *(v8 *)((float *)to + i) = *(const v8 *)(from + i);
    } else if (type == BFLOAT16) {
        uint16_t *half = to;
        for (long i = 0; i < width; i++) {
            uint32_t bits;
            memcpy(&bits, from + i, 4);
            uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            half[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
        }
    } else {
        uint16_t *half = to;
#ifdef __F16C__
        for (long i = 0; i < width; i += 8)
            _mm_storeu_si128((__m128i *)(half + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#else
        for (long i = 0; i < width; i++) half[i] = float_to_half(from[i]);
#endif
    }
}

#endif
