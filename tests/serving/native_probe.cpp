// Runs the native step outside Python, so that it can be built for other machines and under sanitizers.
//
// Prints the INT8 path, the number of INT8 products that differ from exact integers, and a checksum over the bits of all
// logits of a small random model: the same number on every instruction set and architecture.
#include <cstdio>
#include <deque>
#include <random>
#include <vector>

#include "decoder.cpp"

namespace {

std::mt19937 generator(1);

int draw(int low, int high) { return low + static_cast<int>(generator() % static_cast<unsigned>(high - low + 1)); }

// Tensors that live as long as the program, filled from the generator.
std::deque<std::vector<int8_t>> int8_tensors;
std::deque<std::vector<float>> fp32_tensors;
std::deque<std::vector<uint16_t>> bf16_tensors;

const int8_t* int8_tensor(int count) {
    std::vector<int8_t> values(count);
    for (auto& value : values) value = static_cast<int8_t>(draw(-128, 127));
    int8_tensors.push_back(std::move(values));
    return int8_tensors.back().data();
}

const float* fp32_tensor(int count, float low, float step) {
    std::vector<float> values(count);
    for (auto& value : values) value = low + step * static_cast<float>(draw(0, 1023));
    fp32_tensors.push_back(std::move(values));
    return fp32_tensors.back().data();
}

const uint16_t* bf16_tensor(int count) {
    std::vector<uint16_t> values(count);
    for (auto& value : values) {
        const float number = static_cast<float>(draw(-127, 127)) / 128.0f;
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        value = static_cast<uint16_t>(bits >> 16);
    }
    bf16_tensors.push_back(std::move(values));
    return bf16_tensors.back().data();
}

int wrong_products() {
    const int shapes[][3] = {{1, 16, 32}, {3, 576, 40}, {17, 4096, 96}, {8, 1040, 33}, {1, 65536, 1}};
    int wrong = 0;
    for (const auto& [rows, k, columns] : shapes) {
        std::vector<int8_t> codes(rows * k), weight(k * columns);
        for (auto& value : weight) value = static_cast<int8_t>(draw(-128, 127));
        std::vector<int32_t> out(rows * columns);
        for (auto& code : codes) code = static_cast<int8_t>(draw(-127, 127));
        for (int i = 0; i < k; ++i) codes[i] = 127, weight[i * columns] = -128;
        decoder::decoder_int8_matmul(codes.data(), weight.data(), rows, k, columns, out.data());
        for (int row = 0; row < rows; ++row)
            for (int column = 0; column < columns; ++column) {
                int64_t sum = 0;
                for (int i = 0; i < k; ++i) sum += codes[row * k + i] * weight[i * columns + column];
                wrong += sum != out[row * columns + column];
            }
    }
    return wrong;
}

uint64_t logits_checksum() {
    constexpr int kTokens = 200, kVocab = 320, kPages = 4;
    const decoder::DecoderShape shape{2, 64, 96, 4, 2, 32, kVocab, kPages, 512, 4, 0, 0, 1e-6f, 0.17677669f};
    decoder::DecoderSlabs slabs{};
    const float low = 0.001f, step = 1e-6f;
    slabs.embed_weight = bf16_tensor(512 * 64);
    slabs.input_rms_weight = fp32_tensor(2 * 64, 0.5f, 0.001f);
    slabs.wq = int8_tensor(2 * 64 * 128), slabs.wk = int8_tensor(2 * 64 * 64), slabs.wv = int8_tensor(2 * 64 * 64);
    slabs.wq_scale = fp32_tensor(2 * 128, low, step);
    slabs.wk_scale = fp32_tensor(2 * 64, low, step);
    slabs.wv_scale = fp32_tensor(2 * 64, low, step);
    slabs.q_bias = fp32_tensor(2 * 128, -0.5f, 0.001f);
    slabs.k_bias = fp32_tensor(2 * 64, -0.5f, 0.001f);
    slabs.v_bias = fp32_tensor(2 * 64, -0.5f, 0.001f);
    slabs.q_norm_weight = fp32_tensor(2 * 32, 0.5f, 0.001f);
    slabs.k_norm_weight = fp32_tensor(2 * 32, 0.5f, 0.001f);
    slabs.wo = int8_tensor(2 * 128 * 64), slabs.wo_scale = fp32_tensor(2 * 64, low, step);
    slabs.post_rms_weight = fp32_tensor(2 * 64, 0.5f, 0.001f);
    slabs.w_gate = int8_tensor(2 * 64 * 96), slabs.w_up = int8_tensor(2 * 64 * 96);
    slabs.w_gate_scale = fp32_tensor(2 * 96, low, step);
    slabs.w_up_scale = fp32_tensor(2 * 96, low, step);
    slabs.w_down = int8_tensor(2 * 96 * 64), slabs.w_down_scale = fp32_tensor(2 * 64, low, step);
    slabs.final_norm_weight = fp32_tensor(64, 0.5f, 0.001f);
    slabs.lm_head_weight = bf16_tensor(512 * 64);
    slabs.rope_cos = fp32_tensor(512 * 32, -1.0f, 0.00195f);
    slabs.rope_sin = fp32_tensor(512 * 32, -1.0f, 0.00195f);
    std::vector<uint16_t> keys(2 * kPages * 128 * 64), values(keys.size());
    slabs.k_cache = keys.data(), slabs.v_cache = values.data();
    std::vector<int32_t> ids(kTokens), positions(kTokens), sequence(kTokens, 0), rows(kTokens);
    for (int i = 0; i < kTokens; ++i) ids[i] = draw(0, kVocab - 1), positions[i] = rows[i] = i;
    const int32_t table[2] = {3, 1};
    std::vector<float> logits(kTokens * kVocab);
    const decoder::DecoderStep run{kTokens, 2, kTokens, ids.data(), positions.data(), sequence.data(), table, rows.data(),
        logits.data()};
    char message[256];
    void* handle = decoder::decoder_create(&shape, &slabs, message, sizeof message);
    if (handle == nullptr || decoder::decoder_forward(handle, &run, message, sizeof message)) return 0;
    decoder::decoder_destroy(handle);
    uint64_t checksum = 1469598103934665603u;  // FNV-1a over 32-bit words
    for (const float logit : logits) {
        uint32_t bits;
        std::memcpy(&bits, &logit, sizeof bits);
        checksum = (checksum ^ bits) * 1099511628211u;
    }
    return checksum;
}

}  // namespace

int main() {
    const int wrong = wrong_products();
    std::printf("%s %d %016llx\n", decoder::decoder_int8_path(), wrong,
        static_cast<unsigned long long>(logits_checksum()));
    return 0;
}
