/* hash.c - chained XXH64: the digest after each block, without resetting the state.
 *
 * XXH64 eats stripes of 32 bytes into four lanes; a digest folds the lanes and then what is left of
 * the last, unfinished stripe.  Everything here but rs_xxh64() feeds whole 64-bit words, so that
 * rest is 0..3 words.
 */
#include "radixshm.h"

#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are hashed as they lie in memory: little-endian hosts only"
#endif

#define P1 0x9E3779B185EBCA87ull
#define P2 0xC2B2AE3D27D4EB4Full
#define P3 0x165667B19E3779F9ull
#define P4 0x85EBCA77C2B2AE63ull
#define P5 0x27D4EB2F165667C5ull

enum { STRIPE_BYTES = 32, STRIPE_WORDS = 4 };

typedef struct lanes { uint64_t a, b, c, d; } lanes;

typedef struct stream {
    lanes at;                        /* after the last whole stripe */
    uint64_t num_bytes;
    uint64_t rest[STRIPE_WORDS];     /* words of the unfinished stripe */
    unsigned num_rest;
} stream;

static inline uint64_t rotl(uint64_t x, int r) { return x << r | x >> (64 - r); }

static inline uint64_t load64(const void *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

static inline uint64_t lane(uint64_t acc, uint64_t word) { return rotl(acc + word * P2, 31) * P1; }
static inline uint64_t fold(uint64_t h, uint64_t acc) { return (h ^ lane(0, acc)) * P1 + P4; }
static inline uint64_t mix_word(uint64_t h, uint64_t word) { return rotl(h ^ lane(0, word), 27) * P1 + P4; }

static inline lanes seeded(uint64_t seed)
{
    return (lanes){ seed + P1 + P2, seed + P2, seed, seed - P1 };
}

static inline lanes stripe(lanes l, const void *words)
{
    const unsigned char *p = words;
    l.a = lane(l.a, load64(p));
    l.b = lane(l.b, load64(p + 8));
    l.c = lane(l.c, load64(p + 16));
    l.d = lane(l.d, load64(p + 24));
    return l;
}

static inline uint64_t fold_lanes(lanes l)
{
    uint64_t h = rotl(l.a, 1) + rotl(l.b, 7) + rotl(l.c, 12) + rotl(l.d, 18);
    return fold(fold(fold(fold(h, l.a), l.b), l.c), l.d);
}

/* Of everything but the rest of the last stripe, which is the caller's to mix in. */
static inline uint64_t begin_digest(lanes l, uint64_t num_bytes, uint64_t seed)
{
    return (num_bytes >= STRIPE_BYTES ? fold_lanes(l) : seed + P5) + num_bytes;
}

static inline uint64_t avalanche(uint64_t h)
{
    h = (h ^ h >> 33) * P2;
    h = (h ^ h >> 29) * P3;
    return h ^ h >> 32;
}

static void feed(stream *s, const int64_t *words, uint64_t n)
{
    s->num_bytes += n * 8;
    for (; n != 0; n--) {
        s->rest[s->num_rest++] = (uint64_t)*words++;
        if (s->num_rest == STRIPE_WORDS) {
            s->at = stripe(s->at, s->rest);
            s->num_rest = 0;
        }
    }
}

static uint64_t digest(const stream *s)
{
    uint64_t h = begin_digest(s->at, s->num_bytes, 0);
    for (unsigned i = 0; i < s->num_rest; i++)
        h = mix_word(h, s->rest[i]);
    return avalanche(h);
}

/* Blocks of whole stripes.  The rest is as long after every block as it was after the prefix: the
 * tail of the block itself.  Digests overlap with the stripes of the blocks after them (nothing there
 * depends on a digest), so this runs at the speed of the multiplier. */
static void hash_stripes(const stream *s, const int64_t *tokens, uint64_t num_blocks,
                         uint32_t block_size, uint64_t *out)
{
    lanes at = s->at;
    uint64_t num_bytes = s->num_bytes;
    unsigned num_rest = s->num_rest;
    const int64_t *p = tokens;

    if (num_blocks != 0 && num_rest != 0) {
        uint64_t first[STRIPE_WORDS];
        memcpy(first, s->rest, num_rest * sizeof(*first));
        memcpy(first + num_rest, tokens, (STRIPE_WORDS - num_rest) * sizeof(*first));
        at = stripe(at, first);
        p += STRIPE_WORDS - num_rest;
    }
    for (uint64_t i = 0; i < num_blocks; i++) {
        const int64_t *rest = tokens + (i + 1) * block_size - num_rest;
        for (; p != rest; p += STRIPE_WORDS)
            at = stripe(at, p);
        num_bytes += 8ull * block_size;
        uint64_t h = fold_lanes(at) + num_bytes;
        for (unsigned j = 0; j < num_rest; j++)
            h = mix_word(h, (uint64_t)rest[j]);
        out[i] = avalanche(h);
    }
}

int rs_hash_blocks(const int64_t *tokens, uint64_t num_tokens, uint32_t block_size,
                   const int64_t *prefix, uint64_t num_prefix, uint64_t *out)
{
    if (block_size == 0)
        return RS_EINVAL;
    uint64_t num_blocks = num_tokens / block_size;
    stream s = { .at = seeded(0) };
    feed(&s, prefix, num_prefix);
    if (block_size % STRIPE_WORDS == 0) {
        hash_stripes(&s, tokens, num_blocks, block_size, out);
        return RS_OK;
    }
    for (uint64_t i = 0; i < num_blocks; i++) {
        feed(&s, tokens + i * block_size, block_size);
        out[i] = digest(&s);
    }
    return RS_OK;
}

uint64_t rs_xxh64(const void *data, uint64_t num_bytes, uint64_t seed)
{
    const unsigned char *p = data;
    uint64_t left = num_bytes;
    lanes at = seeded(seed);
    for (; left >= STRIPE_BYTES; left -= STRIPE_BYTES, p += STRIPE_BYTES)
        at = stripe(at, p);
    uint64_t h = begin_digest(at, num_bytes, seed);
    for (; left >= 8; left -= 8, p += 8)
        h = mix_word(h, load64(p));
    if (left >= 4) {
        uint32_t word;
        memcpy(&word, p, sizeof(word));
        h = rotl(h ^ word * P1, 23) * P2 + P3;
        left -= 4;
        p += 4;
    }
    for (; left != 0; left--, p++)
        h = rotl(h ^ *p * P5, 11) * P1;
    return avalanche(h);
}
