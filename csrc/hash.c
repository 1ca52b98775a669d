/* hash.c - chained XXH64: the digest after each block, without resetting the state.
 *
 * XXH64 eats stripes of 32 bytes into four lanes; a digest folds the lanes and then what is left of
 * the last, unfinished stripe.  Everything here but rs_xxh64() feeds whole 64-bit words, so that
 * rest is 0..3 words.
 */
#include "radixshm.h"
#include "xxh64.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are hashed as they lie in memory: little-endian hosts only"
#endif

typedef struct stream {
    lanes at;                        /* after the last whole stripe */
    uint64_t num_bytes;
    uint64_t rest[STRIPE_WORDS];     /* words of the unfinished stripe */
    unsigned num_rest;
} stream;

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

/* Of everything but the rest of the last stripe, which is the caller's to mix in. */
static inline uint64_t begin_digest(lanes l, uint64_t num_bytes, uint64_t seed)
{
    return (num_bytes >= STRIPE_BYTES ? fold_lanes(l) : seed + P5) + num_bytes;
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
    return avalanche(mix_rest(h, (const int64_t *)s->rest, s->num_rest));
}

void rs_hash_narrow(chain *c, uint64_t num_blocks, uint64_t *out)
{
    for (uint64_t i = 0; i < num_blocks; i++) {
        for (const int64_t *end = c->next + c->block_size; c->next != end; c->next += STRIPE_WORDS)
            c->at = stripe(c->at, c->next);
        c->num_bytes += 8 * c->block_size;
        out[i] = digest_of(c);
    }
}

int rs_hash_blocks(const int64_t *tokens, uint64_t num_tokens, uint32_t block_size,
                   const int64_t *prefix, uint64_t num_prefix, uint64_t *out)
{
    if (block_size == 0)
        return RS_EINVAL;
    uint64_t num_blocks = num_tokens / block_size, i = 0;
    stream s = { .at = seeded(0) };
    feed(&s, prefix, num_prefix);
    for (; i < num_blocks && (i == 0 || block_size % STRIPE_WORDS != 0); i++) {
        feed(&s, tokens + i * block_size, block_size);
        out[i] = digest(&s);
    }
    if (i < num_blocks) {
        chain c = { s.at, s.num_bytes, tokens + block_size - s.num_rest, block_size, s.num_rest };
        if (!rs_hash_fast(&c, num_blocks - 1, out + 1))
            rs_hash_narrow(&c, num_blocks - 1, out + 1);
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
