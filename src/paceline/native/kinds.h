// Packing, products and gathering by kind of weight: the one switch over kinds.

#pragma once

#include "blocks.h"
#include "rounded.h"

namespace {

template <class Use>
auto with_format(Kind kind, const Use& use) {
    switch (kind) {
        case Kind::Q4_0: return use(Q4_0{});
        case Kind::Q4_1: return use(Q4_1{});
        case Kind::Q5_0: return use(Q5_0{});
        case Kind::Q5_1: return use(Q5_1{});
        case Kind::Q8_0: return use(Q8_0{});
        case Kind::Q4_K: return use(Q4_K{});
        case Kind::Q5_K: return use(Q5_K{});
        default: return use(Q6_K{});
    }
}

// Returns the bytes of a weight's panels.
long panel_bytes(Kind kind, long N, long K) {
    const long panels = (N + NT - 1) / NT;
    switch (kind) {
        case Kind::FLOAT32: return panels * NT * K * 4;
        case Kind::BFLOAT16:
        case Kind::FLOAT16: return panels * NT * K * 2;
        default: return with_format(kind, [=](auto f) { return panels * (K / f.SUPER) * f.UNIT; });
    }
}

void pack(Kind kind, const void* rows, void* panels, long N, long K, int threads) {
    switch (kind) {
        case Kind::FLOAT32: return pack((const float*)rows, (float*)panels, N, K, threads);
        case Kind::BFLOAT16:
        case Kind::FLOAT16: return pack((const uint16_t*)rows, (uint16_t*)panels, N, K, threads);
        default:
            return with_format(kind, [=](auto f) {
                pack_blocks<decltype(f)>((const uint8_t*)rows, (uint8_t*)panels, N, K, threads);
            });
    }
}

int multiply_part(const float* x, const Product& p, float* out, long M, int threads) {
    switch (p.kind) {
        case Kind::FLOAT32: linear<float>(x, p, out, M, threads); return 0;
        case Kind::BFLOAT16: linear<uint16_t>(x, p, out, M, threads); return 0;
        case Kind::FLOAT16: linear<half>(x, p, out, M, threads); return 0;
        default:
            return with_format(p.kind, [&](auto f) {
                if (p.rounds) return linear_rounded<decltype(f)>(x, p, out, M, threads);
                linear_blocks<decltype(f)>(x, p, out, M, threads);
                return 0;
            });
    }
}

// Returns 0, or 1 when out of memory.
int multiply(const float* x, const Product& product, float* out, long M, int threads) {
    int status = 0;
    for (const Product* part = &product; part; out += part->outputs, part = part->next)
        status |= multiply_part(x, *part, out, M, threads);
    return status;
}

// Reads rows `ids` of a weight of blocks, in fp32.
void gather(const Product& p, const int64_t* ids, float* out, long count, int threads) {
    with_format(p.kind, [&](auto f) { gather_blocks<decltype(f)>(p, ids, out, count, threads); });
}

}  // namespace
