// TurboQuant on its way through the cache: a head's vector as it reads back once it has been encoded and decoded.
//
// The arithmetic of kernels/turboquant.py with this decoder's sums: products over a row in order, norms by lanes.
#pragma once

#include <cmath>

#include "vector_math.hpp"

namespace decoder {

// Tables of one layer's keys or values; `projection` is null without a sketch. Matrices are [dim, dim], row-major.
struct KvTables {
    const float *rotation, *rotation_back;
    const float *projection, *projection_back;
    const float *centroids, *boundaries;
    int levels;
};

// out[j] = sum over k in order of x[k] * matrix[k][j]. `out` may not overlap `x`.
inline void turn_row(const float* x, const float* matrix, int dim, float* out) {
    for (int j = 0; j < dim; j += kLanes) {
        Lanes sum = L::splat(0.0f);
        for (int k = 0; k < dim; ++k) sum = sum + L::splat(x[k]) * L::load(matrix + static_cast<size_t>(k) * dim + j);
        L::store(out + j, sum);
    }
}

inline float energy(const float* x, int dim) {
    Lanes sum = L::splat(0.0f);
    for (int i = 0; i < dim; i += kLanes) sum = sum + L::load(x + i) * L::load(x + i);
    return lane_sum(sum);
}

// `x` holds BF16 values and gets the decoded ones; `scratch` has room for 3 * dim numbers.
inline void keep_and_read(const KvTables& tables, int dim, float* x, float* scratch) {
    float *turned = scratch, *kept = scratch + dim, *extra = scratch + 2 * dim;
    const float norm = std::sqrt(energy(x, dim) + 1e-6f);
    for (int i = 0; i < dim; i += kLanes) L::store(x + i, L::round_bf16(L::load(x + i) / L::splat(norm)));
    turn_row(x, tables.rotation, dim, turned);
    for (int i = 0; i < dim; ++i) {
        int code = 0;
        for (int level = 0; level + 1 < tables.levels; ++level) code += turned[i] >= tables.boundaries[level];
        kept[i] = tables.centroids[code];
    }
    if (tables.projection) {
        for (int i = 0; i < dim; ++i) turned[i] -= kept[i];
        const float factor = std::sqrt(energy(turned, dim)) *
            static_cast<float>(std::sqrt(1.57079632679489661923) / static_cast<double>(dim));
        for (int i = 0; i < dim; i += kLanes) L::store(turned + i, L::round_bf16(L::load(turned + i)));
        turn_row(turned, tables.projection_back, dim, extra);
        for (int i = 0; i < dim; ++i) turned[i] = extra[i] >= 0.0f ? 1.0f : -1.0f;
        turn_row(turned, tables.projection, dim, extra);
        for (int i = 0; i < dim; ++i) kept[i] = kept[i] + extra[i] * factor;
    }
    for (int i = 0; i < dim; i += kLanes) L::store(kept + i, L::round_bf16(L::load(kept + i) * L::splat(norm)));
    turn_row(kept, tables.rotation_back, dim, x);
    for (int i = 0; i < dim; i += kLanes) L::store(x + i, L::round_bf16(L::load(x + i)));
}

}  // namespace decoder
