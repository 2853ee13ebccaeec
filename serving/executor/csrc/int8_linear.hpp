// INT8 x INT8 -> INT32, exact on every instruction set, from weights packed once.
//
// Weights are packed in blocks of 32 output columns, each block contiguous over the whole reduction, so that a decode
// step reads them as one stream. Inside a block the order is [k / kGroup][column][kGroup]; kGroup and the type of the
// activation codes belong to the instruction set:
//
//   AVX512-VNNI, AVX-VNNI   u8 x s8 dot products of four: codes are stored + 128, and -128 * (column sum) is the
//                           accumulator's start; the sums wrap modulo 2^32 and so end exact
//   NEON dot product        s8 x s8 dot products of four
//   AVX2                    weights widened to INT16, pairwise multiply-add (never the saturating INT8 form)
//   portable                INT16 products widened to INT32
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "vector_math.hpp"

namespace decoder {

constexpr int kBlockColumns = 32;

#if defined(__AVX512VNNI__)
#define DECODER_INT8_PATH "avx512vnni"
using Code = uint8_t;
constexpr int kGroup = 4;
constexpr int kCodeOffset = 128;
constexpr int kTileRows = 8;
#elif defined(__AVXVNNI__)
#define DECODER_INT8_PATH "avxvnni"
using Code = uint8_t;
constexpr int kGroup = 4;
constexpr int kCodeOffset = 128;
constexpr int kTileRows = 3;
#elif defined(__AVX2__)
#define DECODER_INT8_PATH "avx2"
using Code = int16_t;
constexpr int kGroup = 2;
constexpr int kCodeOffset = 0;
constexpr int kTileRows = 3;
#elif defined(__ARM_FEATURE_DOTPROD)
#define DECODER_INT8_PATH "neon"
using Code = int8_t;
constexpr int kGroup = 4;
constexpr int kCodeOffset = 0;
constexpr int kTileRows = 2;
#else
#define DECODER_INT8_PATH "portable"
using Code = int8_t;
constexpr int kGroup = 1;
constexpr int kCodeOffset = 0;
constexpr int kTileRows = 2;
#endif

// Accumulate ROWS rows of codes against one block of columns; `start` is the accumulators' first value (32 columns),
// `out` receives ROWS x 32 sums. `k` is a multiple of kGroup.
template <int ROWS>
inline void int8_tile(const Code* codes, size_t stride, const int8_t* block, const int32_t* start, int k, int32_t* out);

#if defined(__AVX512VNNI__)

template <int ROWS>
inline void int8_tile(const Code* codes, size_t stride, const int8_t* block, const int32_t* start, int k, int32_t* out) {
    __m512i acc[ROWS][2];
    for (int r = 0; r < ROWS; ++r) {
        acc[r][0] = _mm512_loadu_si512(start);
        acc[r][1] = _mm512_loadu_si512(start + 16);
    }
    for (int g = 0; g < k; g += kGroup, block += kGroup * kBlockColumns) {
        const __m512i w0 = _mm512_loadu_si512(block);
        const __m512i w1 = _mm512_loadu_si512(block + 64);
        for (int r = 0; r < ROWS; ++r) {
            int32_t four;
            std::memcpy(&four, codes + r * stride + g, 4);
            const __m512i a = _mm512_set1_epi32(four);
            acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], a, w0);
            acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], a, w1);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        _mm512_storeu_si512(out + r * kBlockColumns, acc[r][0]);
        _mm512_storeu_si512(out + r * kBlockColumns + 16, acc[r][1]);
    }
}

#elif defined(__AVX2__)

template <int ROWS>
inline void int8_tile(const Code* codes, size_t stride, const int8_t* block, const int32_t* start, int k, int32_t* out) {
    __m256i acc[ROWS][4];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < 4; ++c)
            acc[r][c] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(start + 8 * c));
    for (int g = 0; g < k; g += kGroup, block += kGroup * kBlockColumns) {
        __m256i a[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            int32_t group;
            std::memcpy(&group, codes + r * stride + g, 4);
            a[r] = _mm256_set1_epi32(group);
        }
        for (int c = 0; c < 4; ++c) {
#if defined(__AVXVNNI__)
            const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 32 * c));
            for (int r = 0; r < ROWS; ++r) acc[r][c] = _mm256_dpbusd_avx_epi32(acc[r][c], a[r], w);
#else
            const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 16 * c)));
            for (int r = 0; r < ROWS; ++r) acc[r][c] = _mm256_add_epi32(acc[r][c], _mm256_madd_epi16(a[r], w));
#endif
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < 4; ++c)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + r * kBlockColumns + 8 * c), acc[r][c]);
}

#elif defined(__ARM_FEATURE_DOTPROD)

template <int ROWS>
inline void int8_tile(const Code* codes, size_t stride, const int8_t* block, const int32_t* start, int k, int32_t* out) {
    int32x4_t acc[ROWS][8];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < 8; ++c) acc[r][c] = vld1q_s32(start + 4 * c);
    for (int g = 0; g < k; g += kGroup, block += kGroup * kBlockColumns) {
        int8x16_t a[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            int32_t four;
            std::memcpy(&four, codes + r * stride + g, 4);
            a[r] = vreinterpretq_s8_s32(vdupq_n_s32(four));
        }
        for (int c = 0; c < 8; ++c) {
            const int8x16_t w = vld1q_s8(block + 16 * c);
            for (int r = 0; r < ROWS; ++r) acc[r][c] = vdotq_s32(acc[r][c], w, a[r]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < 8; ++c) vst1q_s32(out + r * kBlockColumns + 4 * c, acc[r][c]);
}

#else

template <int ROWS>
inline void int8_tile(const Code* codes, size_t stride, const int8_t* block, const int32_t* start, int k, int32_t* out) {
    int32_t acc[ROWS][kBlockColumns];
    for (int r = 0; r < ROWS; ++r) std::memcpy(acc[r], start, sizeof acc[r]);
    for (int g = 0; g < k; ++g, block += kBlockColumns) {
        for (int r = 0; r < ROWS; ++r) {
            const int16_t a = codes[r * stride + g];
            // |a * w| <= 127 * 128 fits INT16, which old machines multiply faster than INT32.
            for (int c = 0; c < kBlockColumns; ++c) acc[r][c] += static_cast<int16_t>(a * block[c]);
        }
    }
    for (int r = 0; r < ROWS; ++r) std::memcpy(out + r * kBlockColumns, acc[r], sizeof acc[r]);
}

#endif

// int8_tile for a row count known only at run time, 1 .. kTileRows.
template <int ROWS = kTileRows>
inline void int8_tile_rows(
    int rows, const Code* codes, size_t stride, const int8_t* block, const int32_t* start, int k, int32_t* out) {
    if constexpr (ROWS == 1) {
        int8_tile<1>(codes, stride, block, start, k, out);
    } else {
        if (rows == ROWS)
            int8_tile<ROWS>(codes, stride, block, start, k, out);
        else
            int8_tile_rows<ROWS - 1>(rows, codes, stride, block, start, k, out);
    }
}

// Pack columns [column, column + kBlockColumns) of a row-major [k, columns] matrix; columns past the end become zero.
// `start` receives what the accumulators of this block begin with.
inline void int8_pack_block(const int8_t* weight, int k, int columns, int column, int8_t* block, int32_t* start) {
    const int valid = columns - column < kBlockColumns ? columns - column : kBlockColumns;
    int32_t sums[kBlockColumns] = {};
    std::memset(block, 0, static_cast<size_t>(k) * kBlockColumns);
    for (int row = 0; row < k; ++row) {
        const int8_t* source = weight + static_cast<size_t>(row) * columns + column;
        int8_t* target = block + static_cast<size_t>(row / kGroup) * kGroup * kBlockColumns + row % kGroup;
        for (int c = 0; c < valid; ++c) {
            target[c * kGroup] = source[c];
            sums[c] += source[c];
        }
    }
    for (int c = 0; c < kBlockColumns; ++c) start[c] = -kCodeOffset * sums[c];
}

// Store sixteen integral values in -127..127 as activation codes of this instruction set.
DECODER_INLINE void store_codes(Code* target, Lanes values) {
    if constexpr (sizeof(Code) == 2) {
        L::store_i16(reinterpret_cast<int16_t*>(target), values);
    } else {
        L::store_i8(reinterpret_cast<int8_t*>(target), values);
        if constexpr (kCodeOffset == 128)
            for (int i = 0; i < kLanes; ++i) target[i] ^= 0x80;
    }
}

}  // namespace decoder
