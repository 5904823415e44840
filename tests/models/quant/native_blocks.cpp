// Checks the kernels of blocks without Python, so that they can also be run where only an emulator is (NEON).
//
// For every kind: products of blocks have the bits of products of their expansion, for 1 to 30 rows. Prints a checksum of
// the products with rounded activations, which must be the same from every build, and ends with 1 where bits differ.

#include <cstdio>
#include <vector>

#include "layers.h"

static uint32_t state = 1;
static uint32_t draw() { return state = state * 1664525u + 1013904223u, state >> 8; }

template <class F>
bool check(Kind kind, std::initializer_list<long> halves) {
    const long N = 70, K = F::SUPER * 2 + (F::SUPER == 32 ? 96 : 0), M = 30, row = K / F::SUPER * F::RAW;
    std::vector<uint8_t> raw(N * row);
    for (auto& byte : raw) byte = draw();
    for (size_t at = 0; at < raw.size(); at += F::RAW)
        for (long half : halves) raw[at + half] = draw(), raw[at + half + 1] = 0x20 | (draw() & 0x87);  // about 0.01
    std::vector<uint8_t> panels(panel_bytes(kind, N, K)), wide(panel_bytes(Kind::FLOAT32, N, K));
    pack(kind, raw.data(), panels.data(), N, K, 1);
    std::vector<float> numbers(N * K), x(M * K), out(M * N), expected(M * N);
    std::vector<int64_t> ids(N);
    for (long i = 0; i < N; i++) ids[i] = i;
    Product blocks{kind, panels.data(), nullptr, K, N, N, 0, nullptr};
    const Product floats{Kind::FLOAT32, wide.data(), nullptr, K, N, N, 0, nullptr};
    gather(blocks, ids.data(), numbers.data(), N, 1);
    pack(Kind::FLOAT32, numbers.data(), wide.data(), N, K, 1);
    for (auto& value : x) value = (float)((int)(draw() % 2001) - 1000) / 512;
    bool same = true;
    multiply(x.data(), floats, expected.data(), M, 1);
    for (long rows = 1; rows <= M; rows++) {
        multiply(x.data(), blocks, out.data(), rows, 2);
        same = same && !memcmp(out.data(), expected.data(), rows * N * sizeof(float));
    }
    blocks.rounds = 1;
    uint64_t sum = 1469598103934665603u;
    for (long rows : {M, 1L, 3L}) {
        multiply(x.data(), blocks, out.data(), rows, 2);
        for (long i = 0; i < rows * N; i++) {
            uint32_t bits;
            memcpy(&bits, &out[i], 4);
            sum = (sum ^ bits) * 1099511628211u;
        }
    }
    std::printf("%d %016llx\n", (int)kind, (unsigned long long)sum);
    return same;
}

int main() {
    bool same = check<Q4_0>(Kind::Q4_0, {0}) & check<Q4_1>(Kind::Q4_1, {0, 2}) & check<Q5_0>(Kind::Q5_0, {0});
    same &= check<Q5_1>(Kind::Q5_1, {0, 2}) & check<Q8_0>(Kind::Q8_0, {0}) & check<Q4_K>(Kind::Q4_K, {0, 2});
    same &= check<Q5_K>(Kind::Q5_K, {0, 2}) & check<Q6_K>(Kind::Q6_K, {208});
    return !same;
}
