// The C structures that the caller fills; serving/executor/native.py declares the same ones and compares sizes.
#pragma once

#include <cstdint>

namespace decoder {

extern "C" {

struct DecoderShape {
    int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, real_vocab, num_pages, max_rows, threads;
    int32_t key_levels, value_levels;  // of the cache's codebooks; 0 keeps BF16
    float rms_norm_eps;
    float attention_scale;
};

// Slabs of the contract; absent ones (biases, QK norms, the scale of a BF16 down projection) are null.
struct DecoderSlabs {
    const uint16_t* embed_weight;
    const float* input_rms_weight;
    const int8_t *wq, *wk, *wv;
    const float *wq_scale, *wk_scale, *wv_scale;
    const float *q_bias, *k_bias, *v_bias;
    const float *q_norm_weight, *k_norm_weight;
    const int8_t* wo;
    const float* wo_scale;
    const float* post_rms_weight;
    const int8_t *w_gate, *w_up;
    const float *w_gate_scale, *w_up_scale;
    const void* w_down;
    const float* w_down_scale;
    const float* final_norm_weight;
    const uint16_t* lm_head_weight;
    const float *rope_cos, *rope_sin;
    uint16_t *k_cache, *v_cache;  // [layers * pages * 128, kv_size]
    // Null while the cache keeps BF16. Each matrix is followed by its transpose: rotations [layers, keys and values, 2, d, d],
    // projections [layers, 2, d, d] (null without a sketch).
    const float *kv_rotations, *key_projections, *key_centroids, *key_boundaries, *value_centroids, *value_boundaries;
};

// `tables` is [sequences, table_stride]; `sequence` names a row's table; `logit_rows` names the rows to return.
struct DecoderStep {
    int32_t rows, table_stride, logit_count;
    const int32_t *token_ids, *positions, *sequence, *tables, *logit_rows;
    float* logits;  // [logit_count, real_vocab]
};
}

}  // namespace decoder
