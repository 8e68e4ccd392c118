/* XXH3-128 of more than 240 bytes that arrive in pieces, without a seed. The algorithm is that of
 * https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md: stripes of 64 bytes are added to eight lanes, which are
 * scrambled after each 16 stripes; the last 64 bytes are one more stripe.
 *
 * Invariant: of the bytes so far, all but the last 1 to 64 are in the lanes; these are in `rest`, the 64 bytes before
 * them in `before`. A state belongs to one thread.
 */
#ifndef HICACHE_XXH3_H
#define HICACHE_XXH3_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the words of XXH3 are little endian"
#endif

#define XXH3_MIN_BYTES 241
#define XXH3_STRIPE 64
#define XXH3_STRIPES_PER_BLOCK 16
#define XXH3_SECRET_BYTES 192
#define XXH3_SCRAMBLE_AT (XXH3_SECRET_BYTES - XXH3_STRIPE)

#define XXH32_P1 0x9E3779B1U
#define XXH32_P2 0x85EBCA77U
#define XXH32_P3 0xC2B2AE3DU
#define XXH64_P1 0x9E3779B185EBCA87ULL
#define XXH64_P2 0xC2B2AE3D27D4EB4FULL
#define XXH64_P3 0x165667B19E3779F9ULL
#define XXH64_P4 0x85EBCA77C2B2AE63ULL
#define XXH64_P5 0x27D4EB2F165667C5ULL

typedef struct {
    uint64_t lanes[8];
    uint64_t total;
    size_t stripes; /* of the present block */
    size_t held;    /* bytes in `rest` */
    uint8_t before[XXH3_STRIPE];
    uint8_t rest[XXH3_STRIPE];
} Xxh3;

void xxh3_begin(Xxh3 *state);
void xxh3_add(Xxh3 *state, const void *bytes, size_t count);
/* Write the 16 bytes of the hash, most significant first. REQUIRES: at least XXH3_MIN_BYTES were added. */
void xxh3_end(const Xxh3 *state, uint8_t hash[16]);
#endif
