/* hash.c - chained XXH64: the digest after each block, without resetting the state.
 *
 * XXH64 eats stripes of 32 bytes into four lanes; a digest folds the lanes and then what is left of
 * the last, unfinished stripe.  Everything here but rs_xxh64() feeds whole 64-bit words, so that
 * rest is 0..3 words.
 */
#include "radixshm.h"

#include <string.h>
#if defined(__x86_64__) && !defined(RS_HASH_NARROW)
#include <immintrin.h>
#endif

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
static inline uint64_t fold(uint64_t h, uint64_t mixed) { return (h ^ mixed) * P1 + P4; }
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

/* at: four lanes; mixed: lane(0, of each). */
static inline uint64_t fold_mixed(const uint64_t *at, const uint64_t *mixed)
{
    uint64_t h = rotl(at[0], 1) + rotl(at[1], 7) + rotl(at[2], 12) + rotl(at[3], 18);
    return fold(fold(fold(fold(h, mixed[0]), mixed[1]), mixed[2]), mixed[3]);
}

static inline uint64_t fold_lanes(lanes l)
{
    const uint64_t at[] = { l.a, l.b, l.c, l.d };
    const uint64_t mixed[] = { lane(0, l.a), lane(0, l.b), lane(0, l.c), lane(0, l.d) };
    return fold_mixed(at, mixed);
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

/* -- blocks of whole stripes -----------------------------------------------------------------
 *
 * A prefix of p words leaves p % 4 of them for the next stripe, and as many words are left at the end
 * of every block: its own last ones.  Digests overlap with the stripes of the blocks after them, for
 * nothing there depends on a digest. */

typedef struct blocks {
    const int64_t *tokens;
    uint64_t num_blocks;
    uint32_t block_size;             /* a multiple of STRIPE_WORDS */
    unsigned num_rest;
    uint64_t num_bytes;              /* of the prefix */
    lanes at;                        /* after the stripe that prefix and tokens share, if any */
    const int64_t *next;             /* the first whole stripe behind it */
} blocks;

static blocks start_blocks(const stream *s, const int64_t *tokens, uint64_t num_blocks, uint32_t block_size)
{
    blocks b = { tokens, num_blocks, block_size, s->num_rest, s->num_bytes, s->at, tokens };
    if (num_blocks != 0 && s->num_rest != 0) {
        uint64_t first[STRIPE_WORDS];
        memcpy(first, s->rest, s->num_rest * sizeof(*first));
        memcpy(first + s->num_rest, tokens, (STRIPE_WORDS - s->num_rest) * sizeof(*first));
        b.at = stripe(s->at, first);
        b.next += STRIPE_WORDS - s->num_rest;
    }
    return b;
}

/* Where the stripes of block i end. */
static inline const int64_t *end_of(const blocks *b, uint64_t i)
{
    return b->tokens + (i + 1) * b->block_size - b->num_rest;
}

static inline uint64_t end_digest(const blocks *b, uint64_t i, uint64_t folded)
{
    uint64_t h = folded + b->num_bytes + 8 * (i + 1) * b->block_size;
    for (unsigned j = 0; j < b->num_rest; j++)
        h = mix_word(h, (uint64_t)end_of(b, i)[j]);
    return avalanche(h);
}

/* At the speed of the multiplier: 46 multiplications for a block of 16 tokens. */
static void hash_narrow(const blocks *b, uint64_t *out)
{
    lanes at = b->at;
    const int64_t *p = b->next;
    for (uint64_t i = 0; i < b->num_blocks; i++) {
        for (; p != end_of(b, i); p += STRIPE_WORDS)
            at = stripe(at, p);
        out[i] = end_digest(b, i, fold_lanes(at));
    }
}

#if defined(__x86_64__) && !defined(RS_HASH_NARROW)
#define AVX2 __attribute__((target("avx2")))
enum { CHUNK_BLOCKS = 16 };

AVX2 static inline __m256i load256(const void *p) { return _mm256_loadu_si256((const void *)p); }

/* x * p of 64 bits from products of 32, of x's low half and of its high half, which may have other bits above it. */
AVX2 static inline __m256i times(__m256i x, __m256i high_of_x, uint64_t p)
{
    const __m256i low = _mm256_set1_epi64x((int64_t)(p & 0xffffffff));
    const __m256i high = _mm256_set1_epi64x((int64_t)(p >> 32));
    __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(high_of_x, low), _mm256_mul_epu32(x, high));
    return _mm256_add_epi64(_mm256_mul_epu32(x, low), _mm256_slli_epi64(cross, 32));
}

/* rotl(x, 31) * P1; the high half of the rotation is bits 1..32 of x. */
AVX2 static inline __m256i rotate_times_p1(__m256i x)
{
    __m256i rotated = _mm256_or_si256(_mm256_slli_epi64(x, 31), _mm256_srli_epi64(x, 33));
    return times(rotated, _mm256_srli_epi64(x, 1), P1);
}

AVX2 static inline __m256i times_p2(__m256i x) { return times(x, _mm256_srli_epi64(x, 32), P2); }

/* x in a register of the scalar unit: compilers would rather do all of a stripe in the vector unit, whose chain of
 * emulated multiplications takes twice as long. */
static inline uint64_t scalar(uint64_t x)
{
    __asm__("" : "+r"(x));
    return x;
}

AVX2 static inline lanes wide_stripe(lanes l, const void *words)
{
    uint64_t products[STRIPE_WORDS];
    _mm256_storeu_si256((void *)products, times_p2(load256(words)));
    l.a = rotl(l.a + scalar(products[0]), 31) * P1;
    l.b = rotl(l.b + scalar(products[1]), 31) * P1;
    l.c = rotl(l.c + scalar(products[2]), 31) * P1;
    l.d = rotl(l.d + scalar(products[3]), 31) * P1;
    return l;
}

/* lane(0, at) of four lanes. */
AVX2 static inline void mix_wide(uint64_t *mixed, const uint64_t *at)
{
    _mm256_storeu_si256((void *)mixed, rotate_times_p1(times_p2(load256(at))));
}

/* The vector unit does the words' multiplications and those that mix the lanes of a digest, which leaves 22 of 46 for
 * the multiplier.  It mixes some blocks at a time: it cannot load at once what the scalar unit stored. */
AVX2 static void hash_wide(const blocks *b, uint64_t *out)
{
    uint64_t ends[CHUNK_BLOCKS * STRIPE_WORDS], mixed[CHUNK_BLOCKS * STRIPE_WORDS];
    lanes at = b->at;
    const int64_t *p = b->next;
    for (uint64_t first = 0; first < b->num_blocks; first += CHUNK_BLOCKS) {
        uint64_t n = b->num_blocks - first < CHUNK_BLOCKS ? b->num_blocks - first : CHUNK_BLOCKS;
        for (uint64_t i = 0; i < n; i++) {
            for (const int64_t *end = end_of(b, first + i); p != end; p += STRIPE_WORDS)
                at = wide_stripe(at, p);
            uint64_t *e = ends + i * STRIPE_WORDS;
            e[0] = at.a, e[1] = at.b, e[2] = at.c, e[3] = at.d;
        }
        for (uint64_t i = 0; i < n; i++)
            mix_wide(mixed + i * STRIPE_WORDS, ends + i * STRIPE_WORDS);
        for (uint64_t i = 0; i < n; i++)
            out[first + i] = end_digest(b, first + i, fold_mixed(ends + i * STRIPE_WORDS, mixed + i * STRIPE_WORDS));
    }
}
#endif

static void hash_stripes(const blocks *b, uint64_t *out)
{
#if defined(__x86_64__) && !defined(RS_HASH_NARROW)
    if (__builtin_cpu_supports("avx2")) {
        hash_wide(b, out);
        return;
    }
#endif
    hash_narrow(b, out);
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
        blocks b = start_blocks(&s, tokens, num_blocks, block_size);
        hash_stripes(&b, out);
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
