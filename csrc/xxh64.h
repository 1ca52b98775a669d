/* xxh64.h - the steps of XXH64, and a chain of digests in the middle of its work. */
#ifndef RADIXSHM_XXH64_H
#define RADIXSHM_XXH64_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define P1 0x9E3779B185EBCA87ull
#define P2 0xC2B2AE3D27D4EB4Full
#define P3 0x165667B19E3779F9ull
#define P4 0x85EBCA77C2B2AE63ull
#define P5 0x27D4EB2F165667C5ull

enum { STRIPE_BYTES = 32, STRIPE_WORDS = 4 };

typedef struct lanes { uint64_t a, b, c, d; } lanes;

/* Between two blocks of whole stripes.  A prefix of n words leaves n % 4 of them for the stripe after
 * it, and as many words are left behind every block: its own last ones. */
typedef struct chain {
    lanes at;                        /* after the last whole stripe */
    uint64_t num_bytes;              /* the rest counts */
    const int64_t *next;             /* the first word behind that stripe: the rest comes first */
    uint64_t block_size;             /* tokens, a multiple of STRIPE_WORDS */
    unsigned num_rest;
} chain;

static inline uint64_t rotl(uint64_t x, int r) { return x << r | x >> (64 - r); }

static inline uint64_t load64(const void *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

static inline uint64_t lane(uint64_t acc, uint64_t word) { return rotl(acc + word * P2, 31) * P1; }
static inline uint64_t fold(uint64_t h, uint64_t mixed) { return (h ^ mixed) * P1 + P4; }
static inline uint64_t mix_word(uint64_t h, uint64_t word) { return rotl(h ^ lane(0, word), 27) * P1 + P4; }

static inline uint64_t mix_rest(uint64_t h, const int64_t *rest, unsigned num_rest)
{
    for (unsigned i = 0; i < num_rest; i++)
        h = mix_word(h, (uint64_t)rest[i]);
    return h;
}

static inline uint64_t sum_lanes(lanes l) { return rotl(l.a, 1) + rotl(l.b, 7) + rotl(l.c, 12) + rotl(l.d, 18); }

static inline uint64_t fold_lanes(lanes l)
{
    return fold(fold(fold(fold(sum_lanes(l), lane(0, l.a)), lane(0, l.b)), lane(0, l.c)), lane(0, l.d));
}

static inline uint64_t avalanche(uint64_t h)
{
    h = (h ^ h >> 33) * P2;
    h = (h ^ h >> 29) * P3;
    return h ^ h >> 32;
}

static inline uint64_t digest_of(const chain *c)
{
    return avalanche(mix_rest(fold_lanes(c->at) + c->num_bytes, c->next, c->num_rest));
}

#pragma GCC visibility push(hidden)

/* Goes on by num_blocks and writes their digests. */
void rs_hash_narrow(chain *c, uint64_t num_blocks, uint64_t *out);

/* The same, faster; out[-1] has the digest of c.  False, and nothing was done: this CPU has no suitable
 * vector unit, or blocks are too short. */
bool rs_hash_fast(chain *c, uint64_t num_blocks, uint64_t *out);

#pragma GCC visibility pop

#endif
