// One decoder step in one call: token ids in, logits out. W8A8 layers, a paged BF16 key/value cache, a BF16 LM head.
//
// The arithmetic is that of kernels/goldens.py. Rows (tokens) are independent but for the cache: all keys and values of a
// layer are written before any row attends. Work is split over output columns, rows or heads, never over a reduction, so
// no result depends on batch size, chunking or thread count.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include "attention.hpp"
#include "bf16_linear.hpp"
#include "decoder_abi.hpp"
#include "int8_linear.hpp"
#include "kv_codec.hpp"
#include "packed_weights.hpp"
#include "row_math.hpp"
#include "thread_pool.hpp"
#include "vector_math.hpp"

namespace decoder {

struct Layer {
    Int8Weight qkv, out, gate_up, down;
    uint16_t* down_bf16 = nullptr;  // packed, when the down projection is BF16
    bool has_bias = false;
};

class Decoder {
  public:
    Decoder(const DecoderShape& shape, const DecoderSlabs& slabs)
        : shape_(shape), slabs_(slabs), pool_(shape.threads), q_size_(shape.num_heads * shape.head_dim),
          kv_size_(shape.num_kv_heads * shape.head_dim), layers_(shape.num_layers) {
        pack();
        const size_t rows = shape.max_rows;
        const int widest = std::max({shape.hidden, shape.intermediate, q_size_, 5 * shape.head_dim});
        residual_.resize(rows * shape.hidden);
        qkv_.resize(rows * (q_size_ + 2 * kv_size_));
        queries_.resize(rows * q_size_);
        context_.resize(rows * q_size_);
        activated_.resize(rows * shape.intermediate);
        codes_.resize(rows * widest);
        scales_.resize(rows);
        normed_.resize(rows * shape.hidden);
        if (slabs.w_down_scale == nullptr) widened_.resize(rows * shape.intermediate);
        thread_rows_.resize(static_cast<size_t>(pool_.threads()) * widest);
    }

    void forward(const DecoderStep& step) {
        const int hidden = shape_.hidden;
        pool_.run(step.rows, [&](int begin, int end, int) {
            for (int r = begin; r < end; ++r) {
                const uint16_t* row = slabs_.embed_weight + static_cast<size_t>(step.token_ids[r]) * hidden;
                for (int i = 0; i < hidden; i += kLanes) L::store(residual_row(r) + i, L::load_bf16(row + i));
            }
        });
        for (int layer = 0; layer < shape_.num_layers; ++layer) run_layer(step, layer);
        run_head(step);
    }

  private:
    float* residual_row(int row) { return residual_.data() + static_cast<size_t>(row) * shape_.hidden; }
    Code* code_row(int row, int size) { return codes_.data() + static_cast<size_t>(row) * size; }
    float* thread_row(int thread) {
        return thread_rows_.data() + thread_rows_.size() / pool_.threads() * static_cast<size_t>(thread);
    }

    void pack() {
        const int hidden = shape_.hidden, intermediate = shape_.intermediate;
        const bool down_int8 = slabs_.w_down_scale != nullptr;
        const auto blocks_of = [](int columns) { return static_cast<size_t>((columns + kBlockColumns - 1) / kBlockColumns); };
        const size_t hidden_blocks = blocks_of(hidden), head_blocks = blocks_of(shape_.real_vocab);
        size_t bytes = Int8Weight::bytes(hidden, blocks_of(q_size_) + 2 * blocks_of(kv_size_)) +
                       Int8Weight::bytes(q_size_, hidden_blocks) + Int8Weight::bytes(hidden, 2 * blocks_of(intermediate));
        const size_t down_bf16_count = hidden_blocks * kBlockColumns * intermediate;
        bytes += down_int8 ? Int8Weight::bytes(intermediate, hidden_blocks) : Arena::aligned(2 * down_bf16_count);
        const size_t head_count = head_blocks * kBlockColumns * hidden;
        arena_ = std::make_unique<Arena>(bytes * shape_.num_layers + Arena::aligned(2 * head_count));
        for (int l = 0; l < shape_.num_layers; ++l) {
            Layer& layer = layers_[l];
            describe(layer, l);
            layer.qkv.allocate(*arena_);
            layer.out.allocate(*arena_);
            layer.gate_up.allocate(*arena_);
            if (down_int8)
                layer.down.allocate(*arena_);
            else
                layer.down_bf16 = arena_->take<uint16_t>(down_bf16_count);
            for (Int8Weight* weight : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
                pool_.run(static_cast<int>(weight->blocks.size()), [&](int begin, int end, int) {
                    for (int b = begin; b < end; ++b) weight->pack(b);
                });
            if (!down_int8) {
                const auto* weight = static_cast<const uint16_t*>(slabs_.w_down) + matrix(l, intermediate, hidden);
                pack_bf16(weight, hidden, 1, intermediate, hidden, layer.down_bf16);
            }
        }
        head_ = arena_->take<uint16_t>(head_count);
        pack_bf16(slabs_.lm_head_weight, 1, hidden, hidden, shape_.real_vocab, head_);
    }

    static size_t matrix(int layer, int rows, int columns) { return static_cast<size_t>(layer) * rows * columns; }

    void describe(Layer& layer, int l) {
        const int hidden = shape_.hidden, intermediate = shape_.intermediate;
        const auto row = [l](const float* slab, int size) { return slab ? slab + static_cast<size_t>(l) * size : nullptr; };
        layer.has_bias = slabs_.q_bias != nullptr;
        layer.qkv.k = layer.gate_up.k = hidden;
        layer.out.k = q_size_;
        layer.down.k = intermediate;
        append_blocks(layer.qkv.blocks, slabs_.wq + matrix(l, hidden, q_size_), q_size_, row(slabs_.wq_scale, q_size_),
            row(slabs_.q_bias, q_size_), 0);
        append_blocks(layer.qkv.blocks, slabs_.wk + matrix(l, hidden, kv_size_), kv_size_,
            row(slabs_.wk_scale, kv_size_), row(slabs_.k_bias, kv_size_), q_size_);
        append_blocks(layer.qkv.blocks, slabs_.wv + matrix(l, hidden, kv_size_), kv_size_,
            row(slabs_.wv_scale, kv_size_), row(slabs_.v_bias, kv_size_), q_size_ + kv_size_);
        append_blocks(layer.out.blocks, slabs_.wo + matrix(l, q_size_, hidden), hidden, row(slabs_.wo_scale, hidden),
            nullptr, 0);
        // Gate and up alternate block by block, so that one thread has both halves of a product at hand.
        const int8_t* gate = slabs_.w_gate + matrix(l, hidden, intermediate);
        const int8_t* up = slabs_.w_up + matrix(l, hidden, intermediate);
        for (int column = 0; column < intermediate; column += kBlockColumns) {
            const float* gate_scale = row(slabs_.w_gate_scale, intermediate);
            const float* up_scale = row(slabs_.w_up_scale, intermediate);
            layer.gate_up.blocks.push_back({gate, intermediate, column, gate_scale, nullptr, column});
            layer.gate_up.blocks.push_back({up, intermediate, column, up_scale, nullptr, column});
        }
        if (slabs_.w_down_scale)
            append_blocks(layer.down.blocks,
                static_cast<const int8_t*>(slabs_.w_down) + matrix(l, intermediate, hidden), hidden,
                row(slabs_.w_down_scale, hidden), nullptr, 0);
    }

    void pack_bf16(const uint16_t* weight, size_t k_stride, size_t column_stride, int k, int columns, uint16_t* target) {
        const int blocks = (columns + kBlockColumns - 1) / kBlockColumns;
        pool_.run(blocks, [&](int begin, int end, int) {
            for (int b = begin; b < end; ++b)
                bf16_pack_block(weight, k_stride, column_stride, k, columns, b * kBlockColumns,
                    target + static_cast<size_t>(b) * kBlockColumns * k);
        });
    }

    // (FP32(acc) * weight scale) * activation scale for sixteen columns.
    static DECODER_INLINE Lanes dequantize(const int32_t* sums, const float* weight_scale, float scale) {
        return L::from_i32(sums) * L::load(weight_scale) * L::splat(scale);
    }

    // store(row, column, values) for every sixteen outputs of the quantized rows times `weight`.
    template <class Store>
    void int8_linear(const Int8Weight& weight, int rows, bool has_bias, const Store& store) {
        pool_.run(static_cast<int>(weight.blocks.size()), [&](int begin, int end, int) {
            alignas(64) int32_t sums[kTileRows * kBlockColumns];
            for (int b = begin; b < end; ++b) {
                const float* scale = weight.scale + b * kBlockColumns;
                const float* bias = weight.bias + b * kBlockColumns;
                for (int first = 0; first < rows; first += kTileRows) {
                    const int count = std::min(kTileRows, rows - first);
                    int8_tile_rows(count, code_row(first, weight.k), weight.k, weight.block_codes(b),
                        weight.start + b * kBlockColumns, weight.k, sums);
                    for (int r = 0; r < count; ++r)
                        for (int c = 0; c < weight.valid(b); c += kLanes) {
                            Lanes v = dequantize(sums + r * kBlockColumns + c, scale + c, scales_[first + r]);
                            if (has_bias) v = v + L::load(bias + c);
                            store(first + r, weight.blocks[b].out_column + c, v);
                        }
                }
            }
        });
    }

    // store(row, column, sums) for every thirty-two outputs of FP32 rows times a packed BF16 weight.
    template <class Store>
    void bf16_linear(const float* values, int rows, const uint16_t* weight, int k, int columns, const Store& store) {
        const int blocks = (columns + kBlockColumns - 1) / kBlockColumns;
        pool_.run(blocks, [&](int begin, int end, int) {
            alignas(64) float sums[kBf16TileRows * kBlockColumns];
            for (int b = begin; b < end; ++b)
                for (int first = 0; first < rows; first += kBf16TileRows) {
                    const int count = std::min(kBf16TileRows, rows - first);
                    bf16_tile_rows(count, values + static_cast<size_t>(first) * k, k,
                        weight + static_cast<size_t>(b) * kBlockColumns * k, k, sums);
                    for (int r = 0; r < count; ++r) store(first + r, b * kBlockColumns, sums + r * kBlockColumns);
                }
        });
    }

    void norm_and_quantize(int rows, const float* gamma) {
        pool_.run(rows, [&](int begin, int end, int thread) {
            for (int r = begin; r < end; ++r) {
                rms_norm_row(residual_row(r), gamma, shape_.hidden, shape_.rms_norm_eps, true, thread_row(thread));
                scales_[r] = quantize_row(thread_row(thread), shape_.hidden, code_row(r, shape_.hidden));
            }
        });
    }

    // Quantize rows of BF16 values, [rows, size].
    void quantize_bf16(int rows, const uint16_t* values, int size) {
        pool_.run(rows, [&](int begin, int end, int thread) {
            for (int r = begin; r < end; ++r) {
                float* row = thread_row(thread);
                for (int i = 0; i < size; i += kLanes)
                    L::store(row + i, L::load_bf16(values + static_cast<size_t>(r) * size + i));
                scales_[r] = quantize_row(row, size, code_row(r, size));
            }
        });
    }

    void run_layer(const DecoderStep& step, int index) {
        const Layer& layer = layers_[index];
        const int hidden = shape_.hidden, rows = step.rows, qkv_size = q_size_ + 2 * kv_size_;
        norm_and_quantize(rows, slabs_.input_rms_weight + static_cast<size_t>(index) * hidden);
        int8_linear(layer.qkv, rows, layer.has_bias, [&](int row, int column, Lanes v) {
            L::store(qkv_.data() + static_cast<size_t>(row) * qkv_size + column, v);
        });
        const size_t cache_base = static_cast<size_t>(index) * shape_.num_pages * kPageTokens * kv_size_;
        pool_.run(rows, [&](int begin, int end, int thread) {
            for (int r = begin; r < end; ++r) finish_qkv_row(step, index, r, cache_base, thread_row(thread));
        });
        run_attention(step, cache_base);
        quantize_bf16(rows, context_.data(), q_size_);
        int8_linear(layer.out, rows, false, [&](int row, int column, Lanes v) {
            float* target = residual_row(row) + column;
            L::store(target, L::load(target) + v);
        });
        norm_and_quantize(rows, slabs_.post_rms_weight + static_cast<size_t>(index) * hidden);
        run_gate_up(layer, rows);
        const auto finish = [&](int row, int column, Lanes v) {
            float* target = residual_row(row) + column;
            L::store(target, L::round_bf16(L::load(target) + v));
        };
        if (layer.down_bf16 == nullptr) {
            quantize_bf16(rows, activated_.data(), shape_.intermediate);
            int8_linear(layer.down, rows, false, finish);
            return;
        }
        for (size_t i = 0; i < static_cast<size_t>(rows) * shape_.intermediate; i += kLanes)
            L::store(widened_.data() + i, L::load_bf16(activated_.data() + i));
        bf16_linear(widened_.data(), rows, layer.down_bf16, shape_.intermediate, hidden,
            [&](int row, int column, const float* sums) {
                for (int c = 0; c < kBlockColumns && column + c < hidden; c += kLanes)
                    finish(row, column + c, L::load(sums + c));
            });
    }

    // QK norm where the family has one, RoPE, and the row's key and value into its cache slot.
    void finish_qkv_row(const DecoderStep& step, int layer, int row, size_t cache_base, float* scratch) {
        const int dim = shape_.head_dim, position = step.positions[row];
        const float* qkv = qkv_.data() + static_cast<size_t>(row) * (q_size_ + 2 * kv_size_);
        const float* cos = slabs_.rope_cos + static_cast<size_t>(position) * dim;
        const float* sin = slabs_.rope_sin + static_cast<size_t>(position) * dim;
        const int32_t* table = step.tables + static_cast<size_t>(step.sequence[row]) * step.table_stride;
        const size_t slot = static_cast<size_t>(table[position / kPageTokens]) * kPageTokens + position % kPageTokens;
        uint16_t* key = slabs_.k_cache + cache_base + slot * kv_size_;
        uint16_t* value = slabs_.v_cache + cache_base + slot * kv_size_;
        const size_t gamma = static_cast<size_t>(layer) * dim;
        for (int h = 0; h < shape_.num_heads; ++h) {
            const float* norm = slabs_.q_norm_weight ? slabs_.q_norm_weight + gamma : nullptr;
            float* target = queries_.data() + static_cast<size_t>(row) * q_size_ + h * dim;
            norm_and_rotate(qkv + h * dim, norm, cos, sin, scratch, target);
        }
        for (int h = 0; h < shape_.num_kv_heads; ++h) {
            const float* norm = slabs_.k_norm_weight ? slabs_.k_norm_weight + gamma : nullptr;
            float* rotated = scratch + dim;
            norm_and_rotate(qkv + q_size_ + h * dim, norm, cos, sin, scratch, rotated);
            if (shape_.key_levels) keep_and_read(key_tables(layer), dim, rotated, scratch + 2 * dim);
            for (int i = 0; i < dim; i += kLanes) L::store_bf16(key + h * dim + i, L::load(rotated + i));
        }
        const float* values = qkv + q_size_ + kv_size_;
        if (shape_.value_levels == 0) {
            for (int i = 0; i < kv_size_; i += kLanes) L::store_bf16(value + i, L::load(values + i));
            return;
        }
        for (int h = 0; h < kv_size_; h += dim) {
            for (int i = 0; i < dim; i += kLanes) L::store(scratch + i, L::round_bf16(L::load(values + h + i)));
            keep_and_read(value_tables(layer), dim, scratch, scratch + 2 * dim);
            for (int i = 0; i < dim; i += kLanes) L::store_bf16(value + h + i, L::load(scratch + i));
        }
    }

    KvTables key_tables(int layer) const {
        const size_t size = static_cast<size_t>(shape_.head_dim) * shape_.head_dim;
        const float* rotation = slabs_.kv_rotations + 4 * size * layer;
        const float* projection = slabs_.key_projections ? slabs_.key_projections + 2 * size * layer : nullptr;
        return {rotation, rotation + size, projection, projection ? projection + size : nullptr, slabs_.key_centroids,
            slabs_.key_boundaries, shape_.key_levels};
    }

    KvTables value_tables(int layer) const {
        const size_t size = static_cast<size_t>(shape_.head_dim) * shape_.head_dim;
        const float* rotation = slabs_.kv_rotations + size * (4 * static_cast<size_t>(layer) + 2);
        return {rotation, rotation + size, nullptr, nullptr, slabs_.value_centroids, slabs_.value_boundaries,
            shape_.value_levels};
    }

    // One head: optional RMS norm, half-split rotation, rounded to BF16 (kept as FP32).
    void norm_and_rotate(const float* head, const float* gamma, const float* cos, const float* sin, float* scratch,
        float* out) const {
        const int dim = shape_.head_dim, half = dim / 2;
        const float* x = head;
        if (gamma) {
            rms_norm_row(head, gamma, dim, shape_.rms_norm_eps, false, scratch);
            x = scratch;
        }
        for (int i = 0; i < half; ++i) {
            const float low = x[i] * cos[i] - x[i + half] * sin[i];
            const float high = x[i + half] * cos[i + half] + x[i] * sin[i + half];
            out[i] = low;
            out[i + half] = high;
        }
        for (int i = 0; i < dim; i += kLanes) L::store(out + i, L::round_bf16(L::load(out + i)));
    }

    void run_attention(const DecoderStep& step, size_t cache_base) {
        const int kv_heads = shape_.num_kv_heads, group = shape_.num_heads / kv_heads, dim = shape_.head_dim;
        pool_.run(step.rows * kv_heads, [&](int begin, int end, int thread) {
            for (int item = begin; item < end; ++item) {
                const int row = item / kv_heads, head = item % kv_heads;
                const AttentionView view{slabs_.k_cache + cache_base, slabs_.v_cache + cache_base,
                    step.tables + static_cast<size_t>(step.sequence[row]) * step.table_stride, step.positions[row] + 1,
                    kv_size_, head * dim, dim, shape_.attention_scale};
                const size_t offset = static_cast<size_t>(row) * q_size_ + static_cast<size_t>(head) * group * dim;
                float* out = thread_row(thread);
                attend_group(view, queries_.data() + offset, out, group);
                for (int i = 0; i < group * dim; i += kLanes)
                    L::store_bf16(context_.data() + offset + i, L::load(out + i));
            }
        });
    }

    // activated = BF16(gate * sigmoid(gate) * up), without storing gate or up.
    void run_gate_up(const Layer& layer, int rows) {
        const Int8Weight& weight = layer.gate_up;
        const int pairs = static_cast<int>(weight.blocks.size() / 2);
        pool_.run(pairs, [&](int begin, int end, int) {
            alignas(64) int32_t gate_sums[kTileRows * kBlockColumns];
            alignas(64) int32_t up_sums[kTileRows * kBlockColumns];
            for (int pair = begin; pair < end; ++pair) {
                const int gate = 2 * pair, up = gate + 1;
                for (int first = 0; first < rows; first += kTileRows) {
                    const int count = std::min(kTileRows, rows - first);
                    int8_tile_rows(count, code_row(first, weight.k), weight.k, weight.block_codes(gate),
                        weight.start + gate * kBlockColumns, weight.k, gate_sums);
                    int8_tile_rows(count, code_row(first, weight.k), weight.k, weight.block_codes(up),
                        weight.start + up * kBlockColumns, weight.k, up_sums);
                    for (int r = 0; r < count; ++r)
                        for (int c = 0; c < weight.valid(gate); c += kLanes) {
                            const float scale = scales_[first + r];
                            const int at = r * kBlockColumns + c;
                            const Lanes g = dequantize(gate_sums + at, weight.scale + gate * kBlockColumns + c, scale);
                            const Lanes u = dequantize(up_sums + at, weight.scale + up * kBlockColumns + c, scale);
                            const Lanes one = L::splat(1.0f);
                            const Lanes sigmoid = one / (one + exponential(L::splat(0.0f) - g));
                            L::store_bf16(activated_.data() + static_cast<size_t>(first + r) * shape_.intermediate +
                                              weight.blocks[gate].out_column + c,
                                g * sigmoid * u);
                        }
                }
            }
        });
    }

    void run_head(const DecoderStep& step) {
        const int hidden = shape_.hidden, vocab = shape_.real_vocab;
        pool_.run(step.logit_count, [&](int begin, int end, int) {
            for (int i = begin; i < end; ++i)
                rms_norm_row(residual_row(step.logit_rows[i]), slabs_.final_norm_weight, hidden, shape_.rms_norm_eps, true,
                    normed_.data() + static_cast<size_t>(i) * hidden);
        });
        if (step.logit_count == 0) return;
        bf16_linear(normed_.data(), step.logit_count, head_, hidden, vocab, [&](int row, int column, const float* sums) {
            const int valid = std::min(kBlockColumns, vocab - column);
            std::memcpy(step.logits + static_cast<size_t>(row) * vocab + column, sums, sizeof(float) * valid);
        });
    }

    DecoderShape shape_;
    DecoderSlabs slabs_;
    ThreadPool pool_;
    int q_size_, kv_size_;
    std::vector<Layer> layers_;
    std::unique_ptr<Arena> arena_;
    uint16_t* head_ = nullptr;
    std::vector<float> residual_, qkv_, queries_, normed_, scales_, thread_rows_, widened_;
    std::vector<uint16_t> context_, activated_;
    std::vector<Code> codes_;
};

extern "C" {

const char* decoder_int8_path() { return DECODER_INT8_PATH; }

// Sizes of the three structures, for the caller to compare with its own idea of them.
void decoder_struct_bytes(int32_t* bytes) {
    bytes[0] = sizeof(DecoderShape);
    bytes[1] = sizeof(DecoderSlabs);
    bytes[2] = sizeof(DecoderStep);
}

// Returns null and a message when memory or threads cannot be had.
void* decoder_create(const DecoderShape* shape, const DecoderSlabs* slabs, char* message, int32_t message_bytes) {
    try {
        return new Decoder(*shape, *slabs);
    } catch (const std::exception& error) {
        std::snprintf(message, message_bytes, "%s", error.what());
        return nullptr;
    }
}

int32_t decoder_forward(void* handle, const DecoderStep* step, char* message, int32_t message_bytes) {
    try {
        static_cast<Decoder*>(handle)->forward(*step);
        return 0;
    } catch (const std::exception& error) {
        std::snprintf(message, message_bytes, "%s", error.what());
        return 1;
    }
}

void decoder_destroy(void* handle) { delete static_cast<Decoder*>(handle); }

// INT8 [rows, k] x INT8 [k, columns] -> INT32 [rows, columns] through the packed kernels; k is a multiple of 16 and the
// activation codes lie in -127..127, weights anywhere in -128..127.
int32_t decoder_int8_matmul(
    const int8_t* codes, const int8_t* weight, int32_t rows, int32_t k, int32_t columns, int32_t* out) {
    try {
        std::vector<Code> stored(static_cast<size_t>(rows) * k);
        for (size_t i = 0; i < stored.size(); ++i) stored[i] = static_cast<Code>(codes[i] + kCodeOffset);
        std::vector<int8_t> block(static_cast<size_t>(k) * kBlockColumns);
        int32_t start[kBlockColumns], sums[kTileRows * kBlockColumns];
        for (int column = 0; column < columns; column += kBlockColumns) {
            int8_pack_block(weight, k, columns, column, block.data(), start);
            const int valid = std::min(kBlockColumns, columns - column);
            for (int first = 0; first < rows; first += kTileRows) {
                const int count = std::min(kTileRows, rows - first);
                int8_tile_rows(
                    count, stored.data() + static_cast<size_t>(first) * k, k, block.data(), start, k, sums);
                for (int r = 0; r < count; ++r)
                    std::memcpy(out + static_cast<size_t>(first + r) * columns + column, sums + r * kBlockColumns,
                        sizeof(int32_t) * valid);
            }
        }
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
}
}

}  // namespace decoder
