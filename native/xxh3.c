#include "xxh3.h"

static const uint8_t secret[XXH3_SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t word(const uint8_t *from)
{
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void add_stripe(uint64_t *lanes, const uint8_t *from, const uint8_t *key)
{
    for (int i = 0; i < 8; i++) {
        uint64_t value = word(from + 8 * i), keyed = value ^ word(key + 8 * i);
        lanes[i ^ 1] += value;
        lanes[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
    }
}

static inline void scramble(uint64_t *lanes)
{
    for (int i = 0; i < 8; i++)
        lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ word(secret + XXH3_SCRAMBLE_AT + 8 * i)) * XXH32_P1;
}

static size_t add_stripes_plain(uint64_t *lanes, size_t at, const uint8_t *from, size_t stripes)
{
    for (; stripes; stripes--, from += XXH3_STRIPE) {
        add_stripe(lanes, from, secret + 8 * at);
        if (++at == XXH3_STRIPES_PER_BLOCK) {
            scramble(lanes);
            at = 0;
        }
    }
    return at;
}

#ifdef __x86_64__
#include <immintrin.h>

/* From this size on, the bytes are probably not in the processor's cache. Then AVX2 that prefetches takes 0.7 of the time
 * of AVX-512, which gains nothing from prefetching; in the cache, AVX-512 takes half of the time. */
#define COLD_BLOCKS 1280
#define AHEAD_BYTES 4096

__attribute__((target("avx2"))) static inline __m256i stripe2(__m256i lanes, const uint8_t *from, const uint8_t *key)
{
    __m256i value = _mm256_loadu_si256((const __m256i *)from);
    __m256i keyed = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)key));
    lanes = _mm256_add_epi64(lanes, _mm256_shuffle_epi32(value, 0x4E));
    return _mm256_add_epi64(lanes, _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)));
}

__attribute__((target("avx2"))) static inline __m256i scramble2(__m256i lanes, const uint8_t *key)
{
    __m256i prime = _mm256_set1_epi64x(XXH32_P1);
    lanes = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    lanes = _mm256_xor_si256(lanes, _mm256_loadu_si256((const __m256i *)key));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

/* Whole blocks only, as below. */
__attribute__((target("avx2"))) static void add_blocks2(uint64_t *lanes, const uint8_t *from, size_t blocks)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)lanes), high = _mm256_loadu_si256((const __m256i *)lanes + 1);
    for (; blocks; blocks--) {
#pragma GCC unroll 16
        for (int i = 0; i < XXH3_STRIPES_PER_BLOCK; i++, from += XXH3_STRIPE) {
            _mm_prefetch((const char *)from + AHEAD_BYTES, _MM_HINT_T0);
            low = stripe2(low, from, secret + 8 * i);
            high = stripe2(high, from + 32, secret + 8 * i + 32);
        }
        low = scramble2(low, secret + XXH3_SCRAMBLE_AT);
        high = scramble2(high, secret + XXH3_SCRAMBLE_AT + 32);
    }
    _mm256_storeu_si256((__m256i *)lanes, low);
    _mm256_storeu_si256((__m256i *)lanes + 1, high);
}

__attribute__((target("avx512f"))) static void add_blocks5(uint64_t *lanes, const uint8_t *from, size_t blocks)
{
    __m512i sums = _mm512_loadu_si512(lanes), prime = _mm512_set1_epi64(XXH32_P1);
    for (; blocks; blocks--) {
#pragma GCC unroll 16
        for (int i = 0; i < XXH3_STRIPES_PER_BLOCK; i++, from += XXH3_STRIPE) {
            __m512i value = _mm512_loadu_si512(from);
            __m512i keyed = _mm512_xor_si512(value, _mm512_loadu_si512(secret + 8 * i));
            sums = _mm512_add_epi64(sums, _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)0x4E));
            sums = _mm512_add_epi64(sums, _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32)));
        }
        sums = _mm512_xor_si512(sums, _mm512_srli_epi64(sums, 47));
        sums = _mm512_xor_si512(sums, _mm512_loadu_si512(secret + XXH3_SCRAMBLE_AT));
        __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(sums, 32), prime);
        sums = _mm512_add_epi64(_mm512_mul_epu32(sums, prime), _mm512_slli_epi64(high, 32));
    }
    _mm512_storeu_si512(lanes, sums);
}
#endif

/* Add whole stripes after the stripe `at` of a block. Return the next stripe of the block. */
static size_t add_stripes(uint64_t *lanes, size_t at, const uint8_t *from, size_t stripes)
{
#ifdef __x86_64__
    size_t first = at ? XXH3_STRIPES_PER_BLOCK - at : 0;
    size_t blocks = stripes > first ? (stripes - first) / XXH3_STRIPES_PER_BLOCK : 0;
    if (blocks && __builtin_cpu_supports("avx2")) {
        add_stripes_plain(lanes, at, from, first);
        from += first * XXH3_STRIPE;
        int is_cold = blocks >= COLD_BLOCKS;
        (!is_cold && __builtin_cpu_supports("avx512f") ? add_blocks5 : add_blocks2)(lanes, from, blocks);
        from += blocks * XXH3_STRIPES_PER_BLOCK * XXH3_STRIPE;
        stripes -= first + blocks * XXH3_STRIPES_PER_BLOCK;
        at = 0;
    }
#endif
    return add_stripes_plain(lanes, at, from, stripes);
}

void xxh3_begin(Xxh3 *state)
{
    static const uint64_t first[8] = {XXH32_P3, XXH64_P1, XXH64_P2, XXH64_P3, XXH64_P4, XXH32_P2, XXH64_P5, XXH32_P1};
    memset(state, 0, sizeof *state);
    memcpy(state->lanes, first, sizeof first);
}

void xxh3_add(Xxh3 *state, const void *bytes, size_t count)
{
    const uint8_t *from = bytes;
    state->total += count;
    if (state->held + count > XXH3_STRIPE) {
        if (state->held) {
            size_t missing = XXH3_STRIPE - state->held;
            memcpy(state->rest + state->held, from, missing);
            from += missing;
            count -= missing;
            state->stripes = add_stripes(state->lanes, state->stripes, state->rest, 1);
            memcpy(state->before, state->rest, XXH3_STRIPE);
            state->held = 0;
        }
        size_t stripes = (count - 1) / XXH3_STRIPE;
        if (stripes) {
            state->stripes = add_stripes(state->lanes, state->stripes, from, stripes);
            from += stripes * XXH3_STRIPE;
            count -= stripes * XXH3_STRIPE;
            memcpy(state->before, from - XXH3_STRIPE, XXH3_STRIPE);
        }
    }
    memcpy(state->rest + state->held, from, count);
    state->held += count;
}

static uint64_t folded(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merged(const uint64_t *lanes, const uint8_t *key, uint64_t sum)
{
    for (int i = 0; i < 4; i++)
        sum += folded(lanes[2 * i] ^ word(key + 16 * i), lanes[2 * i + 1] ^ word(key + 16 * i + 8));
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9ULL;
    return sum ^ sum >> 32;
}

void xxh3_end(const Xxh3 *state, uint8_t hash[16])
{
    uint64_t lanes[8];
    uint8_t last[XXH3_STRIPE];
    memcpy(lanes, state->lanes, sizeof lanes);
    memcpy(last, state->before + state->held, XXH3_STRIPE - state->held);
    memcpy(last + XXH3_STRIPE - state->held, state->rest, state->held);
    add_stripe(lanes, last, secret + XXH3_SCRAMBLE_AT - 7);
    uint64_t halves[2] = {
        merged(lanes, secret + XXH3_SCRAMBLE_AT - 11, ~(state->total * XXH64_P2)),
        merged(lanes, secret + 11, state->total * XXH64_P1),
    };
    for (int i = 0; i < 2; i++)
        for (int byte = 0; byte < 8; byte++)
            hash[8 * i + byte] = (uint8_t)(halves[i] >> (56 - 8 * byte));
}
