// SHA-256 (FIPS 180-4) of two streams at a time with the x86 SHA extensions.
//
// One stream is bound by the latency of its rounds: each waits for the one before it. Rounds of a second, independent
// stream fit into the gaps, so that two cost little more than one. Only built to be used where the CPU has the extensions
// (see sha256_pair_available); everything else hashes with OpenSSL.

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

extern "C" {

struct Sha256 {
    uint32_t state[8];
    uint64_t total_bytes;
    uint8_t rest[64];  // bytes that do not fill a block yet
};

}  // extern "C"

#if defined(__x86_64__)
#define WITH_SHA __attribute__((target("sha,ssse3,sse4.1")))
#define INLINE_SHA WITH_SHA inline __attribute__((always_inline))

namespace {

alignas(16) constexpr uint32_t kRoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The state in the order that the instructions want: a, b, e, f and c, d, g, h.
struct Lane {
    __m128i abef, cdgh, saved_abef, saved_cdgh;
    __m128i words[4];  // the last sixteen words of the message schedule
};

INLINE_SHA void load_state(Lane& lane, const uint32_t* state) {
    const __m128i dcba = _mm_loadu_si128((const __m128i*)state);
    const __m128i hgfe = _mm_loadu_si128((const __m128i*)(state + 4));
    const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
    lane.abef = _mm_alignr_epi8(cdab, efgh, 8);
    lane.cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
}

INLINE_SHA void store_state(const Lane& lane, uint32_t* state) {
    const __m128i feba = _mm_shuffle_epi32(lane.abef, 0x1b), dchg = _mm_shuffle_epi32(lane.cdgh, 0xb1);
    _mm_storeu_si128((__m128i*)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i*)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

INLINE_SHA void begin_block(Lane& lane, const uint8_t* block) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    for (int i = 0; i < 4; ++i)
        lane.words[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(block + 16 * i)), big_endian);
    lane.saved_abef = lane.abef;
    lane.saved_cdgh = lane.cdgh;
}

// Four rounds, and (up to round 48) the four words of the schedule that sixteen rounds later need.
template <int kGroup>
INLINE_SHA void four_rounds(Lane& lane) {
    __m128i& now = lane.words[kGroup % 4];
    const __m128i last = lane.words[(kGroup + 3) % 4];
    __m128i sum = _mm_add_epi32(now, _mm_load_si128((const __m128i*)(kRoundConstants + 4 * kGroup)));
    lane.cdgh = _mm_sha256rnds2_epu32(lane.cdgh, lane.abef, sum);
    lane.abef = _mm_sha256rnds2_epu32(lane.abef, lane.cdgh, _mm_shuffle_epi32(sum, 0x0e));
    if (kGroup < 12) {
        const __m128i next = lane.words[(kGroup + 1) % 4], third = lane.words[(kGroup + 2) % 4];
        now = _mm_add_epi32(_mm_sha256msg1_epu32(now, next), _mm_alignr_epi8(last, third, 4));
        now = _mm_sha256msg2_epu32(now, last);
    }
}

INLINE_SHA void end_block(Lane& lane) {
    lane.abef = _mm_add_epi32(lane.abef, lane.saved_abef);
    lane.cdgh = _mm_add_epi32(lane.cdgh, lane.saved_cdgh);
}

template <int kLanes, int kGroup>
INLINE_SHA void all_rounds(Lane* lanes) {
    for (int i = 0; i < kLanes; ++i) four_rounds<kGroup>(lanes[i]);
    if constexpr (kGroup < 15) all_rounds<kLanes, kGroup + 1>(lanes);
}

template <int kLanes>
WITH_SHA void compress(Sha256* const* hashes, const uint8_t* const* data, uint64_t blocks) {
    Lane lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) load_state(lanes[i], hashes[i]->state);
    for (uint64_t block = 0; block < blocks; ++block) {
        for (int i = 0; i < kLanes; ++i) begin_block(lanes[i], data[i] + 64 * block);
        all_rounds<kLanes, 0>(lanes);
        for (int i = 0; i < kLanes; ++i) end_block(lanes[i]);
    }
    for (int i = 0; i < kLanes; ++i) store_state(lanes[i], hashes[i]->state);
}

// Completes a block that was begun, and counts the bytes; what is left are whole blocks and a rest.
struct Piece {
    const uint8_t* data;
    uint64_t bytes;
};

WITH_SHA void fill_rest(Sha256& hash, Piece& piece) {
    const uint64_t held = hash.total_bytes % 64;
    hash.total_bytes += piece.bytes;
    if (held == 0) return;
    const uint64_t taken = piece.bytes < 64 - held ? piece.bytes : 64 - held;
    std::memcpy(hash.rest + held, piece.data, taken);
    piece.data += taken;
    piece.bytes -= taken;
    if (held + taken == 64) {
        Sha256* const hashes[] = {&hash};
        const uint8_t* const blocks[] = {hash.rest};
        compress<1>(hashes, blocks, 1);
    }
}

WITH_SHA void finish_piece(Sha256& hash, Piece piece) {
    const uint64_t blocks = piece.bytes / 64;
    if (blocks) {
        Sha256* const hashes[] = {&hash};
        const uint8_t* const data[] = {piece.data};
        compress<1>(hashes, data, blocks);
    }
    if (piece.bytes % 64) std::memcpy(hash.rest, piece.data + 64 * blocks, piece.bytes % 64);
}

}  // namespace

extern "C" {

int32_t sha256_pair_available() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_SSSE3) || !(ecx & bit_SSE4_1)) return 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx >> 29 & 1);
}

void sha256_start(Sha256* hash) {
    static const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::memset(hash, 0, sizeof *hash);
    std::memcpy(hash->state, initial, sizeof initial);
}

WITH_SHA void sha256_update(Sha256* hash, const void* data, uint64_t bytes) {
    Piece piece{(const uint8_t*)data, bytes};
    fill_rest(*hash, piece);
    finish_piece(*hash, piece);
}

WITH_SHA void sha256_update_pair(
    Sha256* first, const void* first_data, uint64_t first_bytes, Sha256* second, const void* second_data,
    uint64_t second_bytes) {
    Piece left{(const uint8_t*)first_data, first_bytes}, right{(const uint8_t*)second_data, second_bytes};
    fill_rest(*first, left);
    fill_rest(*second, right);
    const uint64_t blocks = (left.bytes < right.bytes ? left.bytes : right.bytes) / 64;
    Sha256* const hashes[] = {first, second};
    const uint8_t* const data[] = {left.data, right.data};
    compress<2>(hashes, data, blocks);
    finish_piece(*first, Piece{left.data + 64 * blocks, left.bytes - 64 * blocks});
    finish_piece(*second, Piece{right.data + 64 * blocks, right.bytes - 64 * blocks});
}

WITH_SHA void sha256_finish(Sha256* hash, uint8_t* digest) {
    const uint64_t bits = hash->total_bytes * 8;
    uint8_t padding[72] = {0x80};
    const uint64_t pad_bytes = 1 + (119 - hash->total_bytes % 64) % 64;
    for (int i = 0; i < 8; ++i) padding[pad_bytes + i] = (uint8_t)(bits >> (56 - 8 * i));
    sha256_update(hash, padding, pad_bytes + 8);
    for (int i = 0; i < 32; ++i) digest[i] = (uint8_t)(hash->state[i / 4] >> (24 - 8 * (i % 4)));
}

}  // extern "C"

#else

extern "C" int32_t sha256_pair_available() { return 0; }

#endif
