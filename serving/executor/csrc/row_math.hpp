// What happens to one token row between the linears: RMS norm and activation quantization.
#pragma once

#include <cmath>

#include "int8_linear.hpp"
#include "vector_math.hpp"

namespace decoder {

// One row: RMS norm in FP32, sixteen lanes, narrowed to BF16. `out` may not overlap `x`.
inline void rms_norm_row(const float* x, const float* gamma, int size, float eps, bool narrow, float* out) {
    Lanes sum = L::splat(0.0f);
    for (int i = 0; i < size; i += kLanes) {
        const Lanes v = L::load(x + i);
        sum = sum + v * v;
    }
    const float inverse = 1.0f / std::sqrt(lane_sum(sum) / static_cast<float>(size) + eps);
    for (int i = 0; i < size; i += kLanes) {
        const Lanes v = L::load(x + i) * L::splat(inverse) * L::load(gamma + i);
        L::store(out + i, narrow ? L::round_bf16(v) : v);
    }
}

// One row of BF16-representable values to INT8 codes; returns the activation scale amax / 127.
inline float quantize_row(const float* x, int size, Code* codes) {
    Lanes largest = L::splat(1e-4f);
    for (int i = 0; i < size; i += kLanes) largest = L::max(L::abs(L::load(x + i)), largest);
    const float amax = lane_max(largest);
    const Lanes factor = L::splat(127.0f / amax);
    for (int i = 0; i < size; i += kLanes) {
        const Lanes code = L::round_even(L::load(x + i) * factor);
        store_codes(codes + i, L::min(L::max(code, L::splat(-127.0f)), L::splat(127.0f)));
    }
    return amax / 127.0f;
}

}  // namespace decoder
