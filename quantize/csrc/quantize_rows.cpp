// Quantizes rows of a weight to INT8: largest magnitude, finite check, scale, codes and error of each row in one visit.
//
// Bit for bit what quantize/numerics.py and quantize/clipping.py state in torch; tests compare the two. Rows are read as
// BF16, FP16 or FP32 (little-endian, as in safetensors) and widened to FP32, which is exact. A row is visited twice at
// most while it lies in the core's cache: once for its largest magnitude, which also shows NaN and infinity, and once for
// its codes. The translation unit is compiled with -ffp-contract=off, and every sum runs over sixteen lanes (or, where
// it decides something, through one fixed tree), so results do not depend on the instruction set.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

constexpr float kRoundingBias = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, half to even
constexpr int kClipSteps = 400;               // a clip of k shrinks the scale to (400 - k) / 400
constexpr int kClipLast = 120;                // 0.7
constexpr int kClipStride = 8;

#define INLINE inline __attribute__((always_inline))

template <class V>
INLINE V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
INLINE void store(void* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

INLINE Ints widen_halves(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu16_epi32((__m256i)load<Halves>(from));  // GCC 12 makes four instructions of it
#else
    return __builtin_convertvector(load<Halves>(from), Ints);
#endif
}

INLINE Floats splat(float x) { return x - Floats{}; }

INLINE Ints clamp(Ints x, int32_t low, int32_t high) {
    Ints bound = low - Ints{};
    x = x < bound ? bound : x;
    bound = high - Ints{};
    return x > bound ? bound : x;
}

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// One type of source element: how it widens, what its magnitude's bits mean, how FP32 narrows to it.
struct BFloat16 {
    typedef uint16_t Element;
    static constexpr uint32_t kMagnitude = 0x7fff, kInfinity = 0x7f80;
    static constexpr bool kCoarse = false;
    static constexpr float kEps = 0x1p-7f, kSmallest = 0x1p-126f;
    static INLINE Floats widen(const Element* p) {
        return (Floats)(widen_halves(p) << 16);
    }
    static float widen_one(uint32_t bits) { return float_of(bits << 16); }
    static uint32_t narrow(float x) {  // finite
        const uint32_t bits = bits_of(x);
        return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    }
    // Rounds to this type's precision; exact for results of normal size, and smaller quotients become code 0 anyway.
    static INLINE Floats round(Floats x) {
        const Ints bits = (Ints)x;
        return (Floats)((bits + 0x7fff + ((bits >> 16) & 1)) & ~0xffff);
    }
    // Multiplying by the inverse, a fraction of a division's cost, decides as the division does. With significands a and
    // b of eight bits, a quotient that is no tie between two codes is at least 1 / (4 b) > 2^-10 away from it, and the
    // product is off by less than 2^-15: on a grid of 2^-12 ties are ties again and everything else keeps its side.
    // Rounded to BF16, a quotient is never a tie (2^8 would divide b) and at least 2^-17 of itself away from one.
    static constexpr bool kByInverse = true;
    static constexpr float kGrid = 3072.0f;  // 1.5 * 2^11: adding it rounds to a multiple of 2^-12
};

struct Float16 {
    typedef uint16_t Element;
    static constexpr uint32_t kMagnitude = 0x7fff, kInfinity = 0x7c00;
    static constexpr bool kCoarse = true;  // whether its least scales are far apart
    static constexpr float kEps = 0x1p-10f, kSmallest = 0x1p-24f;
    static INLINE Floats widen(const Element* p) {
        const Ints bits = widen_halves(p);
        const Floats magnitude = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
        return (Floats)((Ints)magnitude | ((bits & 0x8000) << 16));
    }
    static float widen_one(uint32_t bits) {
        const float magnitude = float_of((bits & 0x7fff) << 13) * 0x1p112f;
        return float_of(bits_of(magnitude) | ((bits & 0x8000) << 16));
    }
    static uint32_t narrow(float x) {  // not negative, below FP16's largest number
        const uint32_t bits = bits_of(x);
        if (x < 0x1p-14f) return (uint32_t)std::nearbyint(x * 0x1p24f);  // subnormal: a multiple of 2^-24
        return ((bits + 0xfff + ((bits >> 13) & 1)) - (112u << 23)) >> 13;
    }
    static INLINE Floats round(Floats x) {
        const Ints bits = (Ints)x;
        return (Floats)((bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fff);
    }
    static constexpr bool kByInverse = false;
    static constexpr float kGrid = 0;
};

struct Float32 {
    typedef uint32_t Element;
    static constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
    static constexpr bool kCoarse = false;
    static constexpr float kEps = 0x1p-23f, kSmallest = 0x1p-126f;
    static INLINE Floats widen(const Element* p) { return load<Floats>(p); }
    static float widen_one(uint32_t bits) { return float_of(bits); }
    static uint32_t narrow(float x) { return bits_of(x); }
    static INLINE Floats round(Floats x) { return x; }
    static constexpr bool kByInverse = false;
    static constexpr float kGrid = 0;
};

// A row's tail is copied into a block of zeros: they change neither a maximum nor a sum.
template <class T>
struct Tail {
    typename T::Element padded[kLanes] = {};
    Tail(const typename T::Element* row, int64_t columns) {
        const int64_t whole = columns - columns % kLanes;
        std::memcpy(padded, row + whole, (columns - whole) * sizeof padded[0]);
    }
};

// Calls visit(first column, pointer to sixteen elements, how many of them are real) along a row.
template <class T, class Visit>
INLINE void walk(const typename T::Element* row, int64_t columns, Visit visit) {
    int64_t column = 0;
    for (; column + kLanes <= columns; column += kLanes) visit(column, row + column, kLanes);
    if (column < columns) {
        const Tail<T> tail(row, columns);
        visit(column, tail.padded, (int)(columns - column));
    }
}

// The largest magnitude of a run of elements, as bits: bits of magnitudes are ordered as the magnitudes are.
template <class T>
uint32_t largest_bits(const typename T::Element* elements, int64_t count) {
    typename T::Element largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const typename T::Element magnitude = elements[i] & (typename T::Element)T::kMagnitude;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

template <class T>
int64_t first_non_finite(const typename T::Element* elements, int64_t count) {
    constexpr int64_t kRun = 4096;
    for (int64_t start = 0; start < count; start += kRun) {
        const int64_t run = count - start < kRun ? count - start : kRun;
        if (largest_bits<T>(elements + start, run) < T::kInfinity) continue;
        for (int64_t i = start;; ++i)
            if ((elements[i] & T::kMagnitude) >= T::kInfinity) return i;
    }
    return -1;
}

struct Row {
    float scale;          // as stored, widened
    float unit;           // a power of two that brings the row near 1: no square overflows or vanishes
    float inverse;        // 1 / (scale * unit)
    int32_t low, high;    // bounds of codes
    int64_t columns;
};

// The power of two whose product with a positive scale lies in [1, 2), kept within FP32's normal range.
float unit_of(float scale) {
    int exponent;
    std::frexp(scale, &exponent);
    exponent = 1 - exponent;
    return std::ldexp(1.0f, exponent > 127 ? 127 : exponent < -126 ? -126 : exponent);
}

void set_scale(Row& row, float scale, float unit) {
    row.scale = scale;
    row.unit = unit;
    row.inverse = 1.0f / (scale * unit);
}

// `scaled` is x * unit.
template <class T, bool kCompat>
INLINE Ints code_of(Floats x, Floats scaled, const Row& row) {
    Floats quotient = T::kByInverse ? scaled * row.inverse : x / splat(row.scale);
    if (kCompat) quotient = T::round(quotient);
    const Floats biased = T::kByInverse && !kCompat ? (quotient + T::kGrid) + (kRoundingBias - T::kGrid)
                                                    : quotient + kRoundingBias;
    return clamp((Ints)biased - (int32_t)bits_of(kRoundingBias), row.low, row.high);
}

INLINE Floats error_of(Floats scaled, Ints code, const Row& row) {
    return __builtin_convertvector(code, Floats) * (row.scale * row.unit) - scaled;
}

struct Sums {
    double signal, noise;
    bool any_code;
};

double sum_lanes(Floats lanes) {
    double total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += (double)lanes[lane];
    return total;
}

template <class T, bool kCompat>
Sums encode(const typename T::Element* elements, const Row& shared, int8_t* codes) {
    const Row row = shared;  // a copy that no store of codes can be taken to change
    Floats signal{}, noise{};
    Ints any{};
    walk<T>(elements, row.columns, [&](int64_t column, const typename T::Element* at, int real) {
        const Floats x = T::widen(at), scaled = x * row.unit;
        const Ints code = code_of<T, kCompat>(x, scaled, row);
        any |= code;
        const Bytes bytes = __builtin_convertvector(code, Bytes);
        if (real == kLanes)
            store(codes + column, bytes);
        else
            std::memcpy(codes + column, &bytes, real);
        const Floats error = error_of(scaled, code, row);
        signal += scaled * scaled;
        noise += error * error;
    });
    int32_t seen = 0;
    for (int lane = 0; lane < kLanes; ++lane) seen |= any[lane];
    return {sum_lanes(signal), sum_lanes(noise), seen != 0};
}

// The squared error of one candidate scale in units of `unit`: a tree that halves the row until one number is left, the
// form that torch can follow bit for bit. `room` holds for the columns rounded up to a power of two.
template <class T>
float tree_error(const typename T::Element* elements, const Row& shared, std::vector<float>& room) {
    const Row row = shared;
    float* const squares = room.data();
    walk<T>(elements, row.columns, [&](int64_t column, const typename T::Element* at, int) {
        const Floats x = T::widen(at), scaled = x * row.unit;
        const Floats error = error_of(scaled, code_of<T, false>(x, scaled, row), row);
        store(squares + column, error * error);
    });
    const int64_t padded = ((row.columns + kLanes - 1) / kLanes) * kLanes;
    int64_t width = 1;
    while (width < row.columns) width *= 2;
    // The first halving meets the zeros behind the row: they are not stored, only left out.
    int64_t filled = padded < width ? padded : width;
    while (width > 1) {
        width /= 2;
        const int64_t pairs = filled > width ? filled - width : 0;
        float* low = squares;
        const float* high = low + width;
        for (int64_t i = 0; i < pairs; ++i) low[i] += high[i];
        filled = filled < width ? filled : width;
    }
    return squares[0];
}

template <class T>
float stored_scale(float amax, float wanted) {
    if (amax == 0) return T::kEps;
    const float narrowed = T::widen_one(T::narrow(wanted));
    return narrowed < T::kSmallest ? T::kSmallest : narrowed;
}

// FP16's coarse smallest steps: a scale rounded down so far that it would clip the row is taken one step up.
template <class T>
float unclipped_scale(float amax) {
    const float scale = stored_scale<T>(amax, amax / 127.0f);
    if (T::kCoarse && amax > scale * 127.5f)
        return T::widen_one(T::narrow(scale) + 1);
    return scale;
}

template <class T>
float clipped_scale(float amax, int clip) {
    if (clip == 0) return unclipped_scale<T>(amax);
    return stored_scale<T>(amax, (amax / 127.0f) * ((float)(kClipSteps - clip) / (float)kClipSteps));
}

struct Choice {
    float scale;
    float error, unclipped_error;  // in units of 1 / unit^2
};

// Searches the scale of least squared error: a grid of shrunken scales, then finer steps around the best one. The
// unclipped scale comes first and only a smaller error replaces it, so a row never gets worse.
template <class T>
Choice search_clip(const typename T::Element* elements, float amax, Row row, std::vector<float>& squares) {
    const float unclipped_step = unclipped_scale<T>(amax), unit = unit_of(unclipped_step);
    set_scale(row, unclipped_step, unit);
    const float unclipped = tree_error<T>(elements, row, squares);
    Choice best{row.scale, unclipped, unclipped};
    int best_clip = 0;
    const auto consider = [&](int clip) {
        if (clip <= 0 || clip > kClipLast) return;
        set_scale(row, clipped_scale<T>(amax, clip), unit);
        const float error = tree_error<T>(elements, row, squares);
        if (error < best.error) {
            best.scale = row.scale;
            best.error = error;
            best_clip = clip;
        }
    };
    for (int clip = kClipStride; clip <= kClipLast; clip += kClipStride) consider(clip);
    for (int step = kClipStride / 2; step >= 1; step /= 2) {
        const int centre = best_clip;
        consider(centre - step);
        consider(centre + step);
    }
    return best;
}

}  // namespace

extern "C" {

struct QuantizeRows {
    const void* rows;
    int8_t* codes;
    void* scales;
    int64_t row_count, columns;
    int32_t dtype;   // 0 BF16, 1 FP16, 2 FP32
    int32_t compat;  // compressed-tensors' arithmetic
    int32_t clip;    // search for the clip of least squared error (not with compat)
    int32_t reserved;
    double signal, noise, unclipped_noise;  // added up over rows; unclipped_noise with clip only
    int64_t vanished_rows;                  // rows that are not zero and whose codes all are
    int64_t first_bad;                      // index of the first NaN or infinity, or -1; nothing after its row is done
};

int32_t quantize_rows_struct_bytes() { return (int32_t)sizeof(QuantizeRows); }

}  // extern "C"

namespace {

template <class T, bool kCompat>
void run(QuantizeRows& job) {
    typedef typename T::Element Element;
    const Element* elements = (const Element*)job.rows;
    Element* scales = (Element*)job.scales;
    std::vector<float> squares;
    if (job.clip) {
        size_t width = kLanes;
        while ((int64_t)width < job.columns) width *= 2;
        squares.resize(width);
    }
    for (int64_t number = 0; number < job.row_count; ++number) {
        const Element* row_elements = elements + number * job.columns;
        int8_t* codes = job.codes + number * job.columns;
        const uint32_t largest = largest_bits<T>(row_elements, job.columns);
        if (largest >= T::kInfinity) {
            job.first_bad = number * job.columns + first_non_finite<T>(row_elements, job.columns);
            return;
        }
        const float amax = T::widen_one(largest);
        Row row{0.0f, 0.0f, 0.0f, kCompat ? -128 : -127, 127, job.columns};
        double chosen_error = -1;
        if (kCompat) {
            row.scale = T::widen_one(T::narrow(amax / 127.5f));
            if (row.scale == 0) row.scale = T::kEps;
        } else if (job.clip && amax != 0) {
            const Choice choice = search_clip<T>(row_elements, amax, row, squares);
            const double unit = (double)unit_of(unclipped_scale<T>(amax));
            row.scale = choice.scale;
            chosen_error = (double)choice.error / (unit * unit);
            job.unclipped_noise += (double)choice.unclipped_error / (unit * unit);
        } else {
            row.scale = unclipped_scale<T>(amax);
        }
        // By the largest weight, not by the scale: compat's can be far above a row whose own would vanish.
        set_scale(row, row.scale, unit_of(amax != 0 ? amax : row.scale));
        scales[number] = (Element)T::narrow(row.scale);
        const Sums sums = encode<T, kCompat>(row_elements, row, codes);
        const double unit = (double)row.unit;
        job.signal += sums.signal / (unit * unit);
        job.noise += chosen_error >= 0 ? chosen_error : sums.noise / (unit * unit);
        job.vanished_rows += !sums.any_code && amax != 0;
    }
}

template <class T>
void run(QuantizeRows& job) {
    if (job.compat)
        run<T, true>(job);
    else
        run<T, false>(job);
}

}  // namespace

extern "C" {

void quantize_rows(QuantizeRows* job) {
    job->first_bad = -1;
    if (job->dtype == 0) run<BFloat16>(*job);
    if (job->dtype == 1) run<Float16>(*job);
    if (job->dtype == 2) run<Float32>(*job);
}

// Index of the first NaN or infinity among `count` elements, or -1.
int64_t quantize_first_non_finite(const void* elements, int64_t count, int32_t dtype) {
    if (dtype == 0) return first_non_finite<BFloat16>((const uint16_t*)elements, count);
    if (dtype == 1) return first_non_finite<Float16>((const uint16_t*)elements, count);
    return first_non_finite<Float32>((const uint32_t*)elements, count);
}

}  // extern "C"
