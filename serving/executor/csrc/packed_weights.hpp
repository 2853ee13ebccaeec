// INT8 weights of a whole model, packed once at load into one arena in the order that a step reads them.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "int8_linear.hpp"

namespace decoder {

// Anonymous memory for packed weights, in huge pages where the system offers them: a decode step walks all of it.
class Arena {
  public:
    explicit Arena(size_t bytes) : bytes_((bytes + kHuge - 1) / kHuge * kHuge) {
        void* address = mmap(nullptr, bytes_ + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (address == MAP_FAILED) throw std::bad_alloc();
        mapping_ = address;
        const uintptr_t aligned = (reinterpret_cast<uintptr_t>(address) + kHuge - 1) / kHuge * kHuge;
        next_ = reinterpret_cast<char*>(aligned);
        end_ = next_ + bytes_;
#if defined(MADV_HUGEPAGE)
        madvise(next_, bytes_, MADV_HUGEPAGE);
#endif
    }
    ~Arena() { munmap(mapping_, bytes_ + kHuge); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    template <class T>
    T* take(size_t count) {
        const size_t bytes = aligned(count * sizeof(T));
        if (bytes > static_cast<size_t>(end_ - next_)) throw std::bad_alloc();
        T* result = reinterpret_cast<T*>(next_);
        next_ += bytes;
        return result;
    }
    static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

  private:
    static constexpr size_t kHuge = size_t{1} << 21;
    size_t bytes_;
    void* mapping_;
    char *next_, *end_;
};

// Where a block of 32 packed columns comes from and goes to.
struct Block {
    const void* weight;  // row-major source, [k, columns]
    int columns, column;
    const float *scale, *bias;
    int out_column;
};

// An INT8 weight of k inputs, packed: per block the codes, the accumulators' start, the dequantization scale and bias.
struct Int8Weight {
    int k = 0;
    int8_t* codes = nullptr;
    int32_t* start = nullptr;
    float *scale = nullptr, *bias = nullptr;
    std::vector<Block> blocks;

    static size_t bytes(int k, size_t blocks) {
        return Arena::aligned(blocks * k * kBlockColumns) + 3 * Arena::aligned(blocks * kBlockColumns * 4);
    }
    void allocate(Arena& arena) {
        const size_t columns = blocks.size() * kBlockColumns;
        codes = arena.take<int8_t>(columns * k);
        start = arena.take<int32_t>(columns);
        scale = arena.take<float>(columns);
        bias = arena.take<float>(columns);
    }
    const int8_t* block_codes(int index) const { return codes + static_cast<size_t>(index) * k * kBlockColumns; }
    int valid(int index) const { return std::min(kBlockColumns, blocks[index].columns - blocks[index].column); }

    void pack(int index) {
        const Block& block = blocks[index];
        int8_t* target = codes + static_cast<size_t>(index) * k * kBlockColumns;
        const auto* weight = static_cast<const int8_t*>(block.weight);
        int8_pack_block(weight, k, block.columns, block.column, target, start + index * kBlockColumns);
        for (int c = 0; c < valid(index); ++c) {
            scale[index * kBlockColumns + c] = block.scale ? block.scale[block.column + c] : 1.0f;
            bias[index * kBlockColumns + c] = block.bias ? block.bias[block.column + c] : 0.0f;
        }
    }
};

inline void append_blocks(std::vector<Block>& blocks, const int8_t* weight, int columns, const float* scale, const float* bias,
    int out_column) {
    for (int column = 0; column < columns; column += kBlockColumns)
        blocks.push_back({weight, columns, column, scale, bias, out_column + column});
}

}  // namespace decoder
