// Sixteen FP32 lanes, whatever the width of the machine's registers.
//
// Every floating-point reduction of the decoder runs over these sixteen lanes and then through one fixed tree, so that
// the same tokens give the same bits on AVX-512, AVX2, NEON and plain C, for any batch size and thread count. The
// translation unit is compiled with -ffp-contract=off: a fused multiply-add would round differently where it exists.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace decoder {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float LeafF __attribute__((vector_size(kWidth * 4)));
typedef int32_t LeafI __attribute__((vector_size(kWidth * 4)));
typedef uint32_t LeafU __attribute__((vector_size(kWidth * 4)));
typedef uint16_t LeafH __attribute__((vector_size(kWidth * 2)));
typedef int16_t LeafS __attribute__((vector_size(kWidth * 2)));
typedef int8_t LeafB __attribute__((vector_size(kWidth)));

#define DECODER_INLINE inline __attribute__((always_inline))

// Operations on one register; a Pair of registers applies them to both halves.
template <class V>
struct Ops;

template <>
struct Ops<LeafF> {
    static constexpr int kCount = kWidth;
    static DECODER_INLINE LeafF load(const float* p) {
        LeafF v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static DECODER_INLINE void store(float* p, LeafF v) { std::memcpy(p, &v, sizeof v); }
    static DECODER_INLINE LeafF splat(float x) { return x - LeafF{}; }
    static DECODER_INLINE LeafF max(LeafF a, LeafF b) { return a > b ? a : b; }
    static DECODER_INLINE LeafF min(LeafF a, LeafF b) { return a < b ? a : b; }
    static DECODER_INLINE LeafF abs(LeafF a) { return (LeafF)((LeafI)a & 0x7fffffff); }
    static DECODER_INLINE LeafF from_i32(const int32_t* p) {
        LeafI v;
        std::memcpy(&v, p, sizeof v);
        return __builtin_convertvector(v, LeafF);
    }
    static DECODER_INLINE LeafF load_bf16(const uint16_t* p) {
        LeafH h;
        std::memcpy(&h, p, sizeof h);
        return (LeafF)(__builtin_convertvector(h, LeafU) << 16);
    }
    // The bits of the value rounded to BF16, half to even, in the upper half of each lane; NaN stays NaN.
    static DECODER_INLINE LeafU bf16_bits(LeafF v) {
        LeafU u = (LeafU)v;
        LeafU rounded = u + 0x7fff + ((u >> 16) & 1);
        return (LeafU)(v == v ? (LeafI)rounded : LeafI{} + 0x7fc00000) & 0xffff0000u;
    }
    static DECODER_INLINE void store_bf16(uint16_t* p, LeafF v) {
        LeafH h = __builtin_convertvector(bf16_bits(v) >> 16, LeafH);
        std::memcpy(p, &h, sizeof h);
    }
    static DECODER_INLINE LeafF round_bf16(LeafF v) { return (LeafF)bf16_bits(v); }
    // Nearest integer, half to even, for |v| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
    static DECODER_INLINE LeafF round_even(LeafF v) { return (v + 12582912.0f) - 12582912.0f; }
    static DECODER_INLINE void store_i8(int8_t* p, LeafF v) {
        LeafB b = __builtin_convertvector(__builtin_convertvector(v, LeafI), LeafB);
        std::memcpy(p, &b, sizeof b);
    }
    static DECODER_INLINE void store_i16(int16_t* p, LeafF v) {
        LeafS s = __builtin_convertvector(__builtin_convertvector(v, LeafI), LeafS);
        std::memcpy(p, &s, sizeof s);
    }
    // 2^n for integral n in -150..128, in two factors so that neither leaves the normal range.
    static DECODER_INLINE LeafF scale_by_power(LeafF v, LeafF n) {
        LeafI whole = __builtin_convertvector(n, LeafI);
        LeafI first = whole >> 1;
        LeafI second = whole - first;
        return v * (LeafF)((first + 127) << 23) * (LeafF)((second + 127) << 23);
    }
};

template <class L>
struct Pair {
    L lo, hi;
    friend DECODER_INLINE Pair operator+(Pair a, Pair b) { return {a.lo + b.lo, a.hi + b.hi}; }
    friend DECODER_INLINE Pair operator-(Pair a, Pair b) { return {a.lo - b.lo, a.hi - b.hi}; }
    friend DECODER_INLINE Pair operator*(Pair a, Pair b) { return {a.lo * b.lo, a.hi * b.hi}; }
    friend DECODER_INLINE Pair operator/(Pair a, Pair b) { return {a.lo / b.lo, a.hi / b.hi}; }
};

template <class L>
struct Ops<Pair<L>> {
    using P = Pair<L>;
    using O = Ops<L>;
    static constexpr int kCount = 2 * O::kCount;
    static constexpr int kHalf = O::kCount;
    static DECODER_INLINE P load(const float* p) { return {O::load(p), O::load(p + kHalf)}; }
    static DECODER_INLINE void store(float* p, P v) { O::store(p, v.lo), O::store(p + kHalf, v.hi); }
    static DECODER_INLINE P splat(float x) { return {O::splat(x), O::splat(x)}; }
    static DECODER_INLINE P max(P a, P b) { return {O::max(a.lo, b.lo), O::max(a.hi, b.hi)}; }
    static DECODER_INLINE P min(P a, P b) { return {O::min(a.lo, b.lo), O::min(a.hi, b.hi)}; }
    static DECODER_INLINE P abs(P a) { return {O::abs(a.lo), O::abs(a.hi)}; }
    static DECODER_INLINE P from_i32(const int32_t* p) { return {O::from_i32(p), O::from_i32(p + kHalf)}; }
    static DECODER_INLINE P load_bf16(const uint16_t* p) { return {O::load_bf16(p), O::load_bf16(p + kHalf)}; }
    static DECODER_INLINE void store_bf16(uint16_t* p, P v) { O::store_bf16(p, v.lo), O::store_bf16(p + kHalf, v.hi); }
    static DECODER_INLINE P round_bf16(P v) { return {O::round_bf16(v.lo), O::round_bf16(v.hi)}; }
    static DECODER_INLINE P round_even(P v) { return {O::round_even(v.lo), O::round_even(v.hi)}; }
    static DECODER_INLINE void store_i8(int8_t* p, P v) { O::store_i8(p, v.lo), O::store_i8(p + kHalf, v.hi); }
    static DECODER_INLINE void store_i16(int16_t* p, P v) { O::store_i16(p, v.lo), O::store_i16(p + kHalf, v.hi); }
    static DECODER_INLINE P scale_by_power(P v, P n) {
        return {O::scale_by_power(v.lo, n.lo), O::scale_by_power(v.hi, n.hi)};
    }
};

template <int N>
struct LanesOf {
    using type = Pair<typename LanesOf<N / 2>::type>;
};
template <>
struct LanesOf<kWidth> {
    using type = LeafF;
};

using Lanes = LanesOf<kLanes>::type;
using L = Ops<Lanes>;
static_assert(L::kCount == kLanes, "a lane vector holds sixteen values");

// Fixed tree over four lanes: (0 + 2) + (1 + 3).
DECODER_INLINE float tree4(float a, float b, float c, float d) { return (a + c) + (b + d); }

// Sum of the lanes: halves are added until four remain, then tree4; the same order at every register width.
DECODER_INLINE float lane_sum(const Lanes& v) {
    float t[kLanes];
    L::store(t, v);
    float e[8];
    for (int i = 0; i < 8; ++i) e[i] = t[i] + t[i + 8];
    return tree4(e[0] + e[4], e[1] + e[5], e[2] + e[6], e[3] + e[7]);
}

DECODER_INLINE float lane_max(const Lanes& v) {
    float t[kLanes];
    L::store(t, v);
    float m = t[0];
    for (int i = 1; i < kLanes; ++i) m = t[i] > m ? t[i] : m;
    return m;
}

// One level of the summation tree for two registers at once. Lanes stand in groups of GROUP, one group a value; each
// group is folded (lane i + lane i + GROUP / 2), the left register's groups first.
template <int GROUP, int HALF>
constexpr int fold_source(int lane) {
    const int within = lane % (kWidth / 2);
    const int source = within / (GROUP / 2) * GROUP + within % (GROUP / 2) + HALF * (GROUP / 2);
    return lane < kWidth / 2 ? source : source + kWidth;
}

template <int GROUP, int... LANE>
DECODER_INLINE LeafF fold_pair(LeafF a, LeafF b, std::integer_sequence<int, LANE...>) {
    return __builtin_shufflevector(a, b, fold_source<GROUP, 0>(LANE)...) +
           __builtin_shufflevector(a, b, fold_source<GROUP, 1>(LANE)...);
}

DECODER_INLINE LeafF to_register(LeafF v) { return v; }
template <class P>
DECODER_INLINE LeafF to_register(Pair<P> v) {
    return to_register(v.lo + v.hi);
}

// lane_sum of kWidth vectors at once, in the same order of additions: out[i] = lane_sum(values[i]).
DECODER_INLINE LeafF lane_sums(const Lanes* values) {
    LeafF level[kWidth];
    for (int i = 0; i < kWidth; ++i) level[i] = to_register(values[i]);
    constexpr auto kAll = std::make_integer_sequence<int, kWidth>{};
    if constexpr (kWidth >= 16)
        for (int i = 0; i < 8; ++i) level[i] = fold_pair<16>(level[2 * i], level[2 * i + 1], kAll);
    if constexpr (kWidth >= 8)
        for (int i = 0; i < 4; ++i) level[i] = fold_pair<8>(level[2 * i], level[2 * i + 1], kAll);
    for (int i = 0; i < 2; ++i) level[i] = fold_pair<4>(level[2 * i], level[2 * i + 1], kAll);
    return fold_pair<2>(level[0], level[1], kAll);
}

// e^x: x = n ln2 + r with |r| <= ln2 / 2, a Taylor polynomial of degree 7 in r (relative error under 6e-9 before
// rounding), then the power of two. Saturates to 0 below -104 and to infinity above 89.
DECODER_INLINE Lanes exponential(Lanes x) {
    x = L::min(L::max(x, L::splat(-104.0f)), L::splat(89.0f));
    const Lanes n = L::round_even(x * L::splat(1.44269504088896341f));
    // The high part of ln2 has 15 significant bits, so n * high is exact.
    const Lanes r = (x - n * L::splat(0.693145751953125f)) - n * L::splat(1.428606820309417e-6f);
    Lanes p = L::splat(1.0f / 5040.0f);
    p = p * r + L::splat(1.0f / 720.0f);
    p = p * r + L::splat(1.0f / 120.0f);
    p = p * r + L::splat(1.0f / 24.0f);
    p = p * r + L::splat(1.0f / 6.0f);
    p = p * r + L::splat(0.5f);
    p = p * r + L::splat(1.0f);
    p = p * r + L::splat(1.0f);
    return L::scale_by_power(p, n);
}

}  // namespace decoder
