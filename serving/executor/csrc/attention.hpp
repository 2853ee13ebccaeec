// Attention of one token row and one key/value head over the paged BF16 cache.
//
// The softmax runs online over pages of 128 tokens (Milakov and Gimelshein, 2018). Page boundaries are absolute
// positions, so a token's result does not depend on the chunk it came in.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "vector_math.hpp"

namespace decoder {

constexpr int kPageTokens = 128;
constexpr int kHeadTile = 4;
constexpr int kLineElements = 32;    // BF16 elements in a cache line
constexpr int kPrefetchTokens = 16;  // how far ahead keys are fetched

struct AttentionView {
    const uint16_t* keys;    // this layer's cache, [slots, kv_size]
    const uint16_t* values;  // likewise
    const int32_t* pages;    // pages of the row's sequence, in order
    int context;             // tokens to attend to: position + 1
    int kv_size;             // elements per slot
    int head_offset;         // first element of the key/value head in a slot
    int head_dim;            // multiple of 16
    float scale;             // head_dim^-0.5
};

// Add p[h][t] * V[t] over the page's tokens to HEADS x BLOCKS accumulators that cover 16 * BLOCKS columns.
template <int HEADS, int BLOCKS>
DECODER_INLINE void weigh_values(
    const float (*p)[kPageTokens], const uint16_t* values, int kv_size, int tokens, Lanes (*sums)[BLOCKS]) {
    for (int h = 0; h < HEADS; ++h)
        for (int b = 0; b < BLOCKS; ++b) sums[h][b] = L::splat(0.0f);
    for (int t = 0; t < tokens; ++t) {
        const uint16_t* row = values + static_cast<size_t>(t) * kv_size;
        Lanes v[BLOCKS];
        for (int b = 0; b < BLOCKS; ++b) v[b] = L::load_bf16(row + b * kLanes);
        for (int h = 0; h < HEADS; ++h) {
            const Lanes weight = L::splat(p[h][t]);
            for (int b = 0; b < BLOCKS; ++b) sums[h][b] = sums[h][b] + weight * v[b];
        }
    }
}

template <int HEADS, int BLOCKS>
DECODER_INLINE void fold_values(const float (*p)[kPageTokens], const float* rescale, const uint16_t* values, int kv_size,
    int tokens, float* const* out, int column) {
    Lanes sums[HEADS][BLOCKS];
    weigh_values<HEADS, BLOCKS>(p, values + column, kv_size, tokens, sums);
    for (int h = 0; h < HEADS; ++h)
        for (int b = 0; b < BLOCKS; ++b) {
            float* target = out[h] + column + b * kLanes;
            L::store(target, L::load(target) * L::splat(rescale[h]) + sums[h][b]);
        }
}

// p[h][t] = scale * (query h . key t) over the page's tokens, kWidth tokens at a time.
template <int HEADS>
DECODER_INLINE void score_keys(
    const AttentionView& view, size_t base, int tokens, const float* const* queries, float (*p)[kPageTokens]) {
    const uint16_t* keys = view.keys + base;
    const uint16_t* values = view.values + base;
    for (int first = 0; first < tokens; first += kWidth) {
        const int count = tokens - first < kWidth ? tokens - first : kWidth;
        Lanes dots[HEADS][kWidth];
        for (int i = 0; i < kWidth; ++i) {
            // The tail repeats its last token; the caller overwrites those scores.
            const size_t row = static_cast<size_t>(first + (i < count ? i : count - 1)) * view.kv_size;
            const uint16_t* key = keys + row;
            Lanes dot[HEADS];
            for (int h = 0; h < HEADS; ++h) dot[h] = L::splat(0.0f);
            for (int d = 0; d < view.head_dim; d += kLanes) {
                // One head's slices lie a whole cache row apart, where the hardware does not look ahead.
                if (d % kLineElements == 0) {
                    __builtin_prefetch(key + d + static_cast<size_t>(kPrefetchTokens) * view.kv_size);
                    __builtin_prefetch(values + row + d);
                }
                const Lanes k = L::load_bf16(key + d);
                for (int h = 0; h < HEADS; ++h) dot[h] = dot[h] + L::load(queries[h] + d) * k;
            }
            for (int h = 0; h < HEADS; ++h) dots[h][i] = dot[h];
        }
        for (int h = 0; h < HEADS; ++h)
            Ops<LeafF>::store(p[h] + first, lane_sums(dots[h]) * Ops<LeafF>::splat(view.scale));
    }
}

// HEADS query heads (FP32 values, BF16-representable) that share one key/value head; writes HEADS x head_dim to `out`.
template <int HEADS>
inline void attend(const AttentionView& view, const float* const* queries, float* const* out) {
    alignas(64) float p[HEADS][kPageTokens];
    float running_max[HEADS], total[HEADS], rescale[HEADS];
    for (int h = 0; h < HEADS; ++h) {
        running_max[h] = -std::numeric_limits<float>::infinity();
        total[h] = 0.0f;
        std::memset(out[h], 0, sizeof(float) * view.head_dim);
    }
    for (int first = 0; first < view.context; first += kPageTokens) {
        const int tokens = view.context - first < kPageTokens ? view.context - first : kPageTokens;
        const int padded = (tokens + kLanes - 1) / kLanes * kLanes;
        const size_t base = static_cast<size_t>(view.pages[first / kPageTokens]) * kPageTokens * view.kv_size +
                            view.head_offset;
        score_keys<HEADS>(view, base, tokens, queries, p);
        for (int h = 0; h < HEADS; ++h) {
            for (int t = tokens; t < padded; ++t) p[h][t] = -std::numeric_limits<float>::infinity();
            Lanes largest = L::splat(running_max[h]);
            for (int t = 0; t < padded; t += kLanes) largest = L::max(largest, L::load(p[h] + t));
            const float page_max = lane_max(largest);
            Lanes sum = L::splat(0.0f);
            for (int t = 0; t < padded; t += kLanes) {
                const Lanes e = L::round_bf16(exponential(L::load(p[h] + t) - L::splat(page_max)));
                L::store(p[h] + t, e);
                sum = sum + e;
            }
            float factor[kLanes];
            L::store(factor, exponential(L::splat(running_max[h] - page_max)));
            rescale[h] = factor[0];
            total[h] = total[h] * rescale[h] + lane_sum(sum);
            running_max[h] = page_max;
        }
        int d = 0;
        for (; d + 2 * kLanes <= view.head_dim; d += 2 * kLanes)
            fold_values<HEADS, 2>(p, rescale, view.values + base, view.kv_size, tokens, out, d);
        for (; d < view.head_dim; d += kLanes)
            fold_values<HEADS, 1>(p, rescale, view.values + base, view.kv_size, tokens, out, d);
    }
    for (int h = 0; h < HEADS; ++h) {
        const Lanes divisor = L::splat(total[h]);
        for (int d = 0; d < view.head_dim; d += kLanes) L::store(out[h] + d, L::load(out[h] + d) / divisor);
    }
}

// All `group` query heads of one key/value head: queries and out are [group, head_dim], contiguous.
inline void attend_group(const AttentionView& view, const float* queries, float* out, int group) {
    for (int first = 0; first < group; first += kHeadTile) {
        const float* q[kHeadTile];
        float* o[kHeadTile];
        const int heads = group - first < kHeadTile ? group - first : kHeadTile;
        for (int h = 0; h < heads; ++h) {
            q[h] = queries + static_cast<size_t>(first + h) * view.head_dim;
            o[h] = out + static_cast<size_t>(first + h) * view.head_dim;
        }
        switch (heads) {
            case 1: attend<1>(view, q, o); break;
            case 2: attend<2>(view, q, o); break;
            case 3: attend<3>(view, q, o); break;
            default: attend<4>(view, q, o); break;
        }
    }
}

}  // namespace decoder
