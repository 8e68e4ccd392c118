/* Compute the page keys of a run in one call. A page key is the SHA-256 of the previous key and the page's tokens.
 *
 * Optional: without this module, or without the SHA instructions of x86-64 (FIPS 180-4), `hicache.keys` calls hashlib
 * for each page. For small pages such a call takes longer than the hash.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define KEY_BYTES 32

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>

#define BLOCK_BYTES 64
#define SHA __attribute__((target("sha,sse4.1")))

static const uint32_t ROUND_CONSTANTS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

/* The words a to h of the state, in the order of the SHA instructions. */
typedef struct {
    __m128i abef, cdgh;
} State;

static int has_sha(void)
{
    unsigned a, b, c, d, features;
    if (!__get_cpuid(1, &a, &b, &features, &d) || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    return (features & bit_SSSE3) && (features & bit_SSE4_1) && (b & bit_SHA);
}

/* Convert four big-endian words in memory to a register, or back. */
SHA static inline __m128i swapped(__m128i words)
{
    return _mm_shuffle_epi8(words, _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203));
}

SHA static inline void compress(State *state, const uint8_t *block)
{
    __m128i abef = state->abef, cdgh = state->cdgh, words[4];
    for (int i = 0; i < 4; i++)
        words[i] = swapped(_mm_loadu_si128((const __m128i *)block + i));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {  /* four rounds each */
        __m128i now = words[i % 4], last = words[(i + 3) % 4];
        __m128i sum = _mm_add_epi32(now, _mm_loadu_si128((const __m128i *)ROUND_CONSTANTS + i));
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
        if (i < 12)
            words[i % 4] = _mm_sha256msg2_epu32(
                _mm_add_epi32(
                    _mm_sha256msg1_epu32(now, words[(i + 1) % 4]), _mm_alignr_epi8(last, words[(i + 2) % 4], 4)),
                last);
    }
    state->abef = _mm_add_epi32(state->abef, abef);
    state->cdgh = _mm_add_epi32(state->cdgh, cdgh);
}

/* Write the hash of `prior` (empty, or a key) and `page` to `key`. */
SHA static void hash_page(uint8_t *key, const uint8_t *prior, size_t prior_bytes, const uint8_t *page, size_t size)
{
    State state = {
        _mm_set_epi32(0x6a09e667, (int)0xbb67ae85, 0x510e527f, (int)0x9b05688c),
        _mm_set_epi32(0x3c6ef372, (int)0xa54ff53a, 0x1f83d9ab, 0x5be0cd19),
    };
    uint8_t block[2 * BLOCK_BYTES];
    size_t filled = prior_bytes, bits = 8 * (prior_bytes + size);
    memcpy(block, prior, prior_bytes);
    if (prior_bytes && prior_bytes + size >= BLOCK_BYTES) {
        memcpy(block + prior_bytes, page, BLOCK_BYTES - prior_bytes);
        compress(&state, block);
        page += BLOCK_BYTES - prior_bytes;
        size -= BLOCK_BYTES - prior_bytes;
        filled = 0;
    }
    if (filled == 0)
        for (; size >= BLOCK_BYTES; page += BLOCK_BYTES, size -= BLOCK_BYTES)
            compress(&state, page);
    memcpy(block + filled, page, size);
    filled += size;
    /* Padding: a one bit, zeros, and the length in bits in the last eight bytes of a block. */
    size_t end = filled + 1 + sizeof(uint64_t) <= BLOCK_BYTES ? BLOCK_BYTES : 2 * BLOCK_BYTES;
    memset(block + filled, 0, end - filled);
    block[filled] = 0x80;
    for (size_t i = 1; i <= sizeof(uint64_t); i++, bits >>= 8)
        block[end - i] = (uint8_t)bits;
    for (size_t done = 0; done < end; done += BLOCK_BYTES)
        compress(&state, block + done);
    __m128i feba = _mm_shuffle_epi32(state.abef, 0x1b), dchg = _mm_shuffle_epi32(state.cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)key, swapped(_mm_blend_epi16(feba, dchg, 0xf0)));
    _mm_storeu_si128((__m128i *)key + 1, swapped(_mm_alignr_epi8(dchg, feba, 8)));
}
#else
static int has_sha(void)
{
    return 0;
}

static void hash_page(uint8_t *key, const uint8_t *prior, size_t prior_bytes, const uint8_t *page, size_t size)
{
    (void)key, (void)prior, (void)prior_bytes, (void)page, (void)size;
}
#endif

/* A shorter run keeps the interpreter's lock: taking it again can take longer than the hash. */
#define UNLOCKED_BYTES_MIN 16384

static void hash_run(uint8_t *keys, const Py_buffer *tokens, Py_ssize_t page_bytes, const Py_buffer *prior)
{
    const uint8_t *before = prior->buf;
    size_t before_bytes = (size_t)prior->len;
    for (Py_ssize_t i = 0; i < tokens->len / page_bytes; i++, before_bytes = KEY_BYTES) {
        uint8_t *key = keys + i * KEY_BYTES;
        hash_page(key, before, before_bytes, (const uint8_t *)tokens->buf + i * page_bytes, (size_t)page_bytes);
        before = key;
    }
}

static PyObject *hashed(const Py_buffer *tokens, Py_ssize_t page_bytes, const Py_buffer *prior)
{
    Py_ssize_t pages = tokens->len / page_bytes;
    uint8_t *keys = PyMem_Malloc((size_t)pages * KEY_BYTES);
    if (keys == NULL)
        return PyErr_NoMemory();
    if (tokens->len < UNLOCKED_BYTES_MIN) {
        hash_run(keys, tokens, page_bytes, prior);
    } else {
        Py_BEGIN_ALLOW_THREADS
        hash_run(keys, tokens, page_bytes, prior);
        Py_END_ALLOW_THREADS
    }
    PyObject *list = PyList_New(pages);
    for (Py_ssize_t i = 0; list != NULL && i < pages; i++) {
        PyObject *key = PyBytes_FromStringAndSize((const char *)keys + i * KEY_BYTES, KEY_BYTES);
        if (key == NULL || PyList_SetItem(list, i, key) != 0)
            Py_CLEAR(list);
    }
    PyMem_Free(keys);
    return list;
}

/* Called with (tokens, page_bytes, prior). */
PyObject *hash_pages(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer tokens, prior;
    Py_ssize_t page_bytes;
    if (!PyArg_ParseTuple(arguments, "y*ny*", &tokens, &page_bytes, &prior))
        return NULL;
    PyObject *keys = NULL;
    if (page_bytes <= 0 || (prior.len != 0 && prior.len != KEY_BYTES))
        PyErr_SetString(PyExc_ValueError, "hash_pages: pass pages of one byte or more, and a prior of 0 or 32 bytes");
    else
        keys = has_sha() ? hashed(&tokens, page_bytes, &prior) : Py_NewRef(Py_None);
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&prior);
    return keys;
}
