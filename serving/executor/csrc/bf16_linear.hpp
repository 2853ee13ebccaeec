// BF16 weights x BF16 activations -> FP32, for the LM head and the BF16 variant of the down projection.
//
// Packed like the INT8 weights: blocks of 32 output columns, [k][column]. Each output is one chain of separately rounded
// multiplications and additions over k in order, so a row's result does not depend on how many rows run with it.
#pragma once

#include <cstdint>

#include "int8_linear.hpp"
#include "vector_math.hpp"

namespace decoder {

constexpr int kBf16TileRows = kWidth == 16 ? 8 : kWidth == 8 ? 2 : 1;

// ROWS rows of FP32 values (BF16-representable) against one packed block; writes ROWS x 32 sums to `out`.
template <int ROWS>
inline void bf16_tile(const float* values, size_t stride, const uint16_t* block, int k, float* out) {
    Lanes acc[ROWS][2];
    for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = L::splat(0.0f);
    for (int i = 0; i < k; ++i, block += kBlockColumns) {
        const Lanes w0 = L::load_bf16(block);
        const Lanes w1 = L::load_bf16(block + kLanes);
        for (int r = 0; r < ROWS; ++r) {
            const Lanes x = L::splat(values[r * stride + i]);
            acc[r][0] = acc[r][0] + x * w0;
            acc[r][1] = acc[r][1] + x * w1;
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        L::store(out + r * kBlockColumns, acc[r][0]);
        L::store(out + r * kBlockColumns + kLanes, acc[r][1]);
    }
}

template <int ROWS = kBf16TileRows>
inline void bf16_tile_rows(int rows, const float* values, size_t stride, const uint16_t* block, int k, float* out) {
    if constexpr (ROWS == 1) {
        bf16_tile<1>(values, stride, block, k, out);
    } else {
        if (rows == ROWS)
            bf16_tile<ROWS>(values, stride, block, k, out);
        else
            bf16_tile_rows<ROWS - 1>(rows, values, stride, block, k, out);
    }
}

// Pack one block from a matrix whose element (k, column) is at weight[k * k_stride + column * column_stride].
inline void bf16_pack_block(
    const uint16_t* weight, size_t k_stride, size_t column_stride, int k, int columns, int column, uint16_t* block) {
    for (int c = 0; c < kBlockColumns; ++c) {
        const bool valid = column + c < columns;
        const uint16_t* source = weight + static_cast<size_t>(valid ? column + c : 0) * column_stride;
        for (int i = 0; i < k; ++i)
            block[static_cast<size_t>(i) * kBlockColumns + c] = valid ? source[static_cast<size_t>(i) * k_stride] : 0;
    }
}

}  // namespace decoder
