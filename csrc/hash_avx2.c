/* hash_avx2.c - digests of blocks with the vector unit of an x86-64.
 *
 * A block of 16 tokens takes 46 multiplications, and a core does one of 64 bits a cycle.  The vector
 * unit makes those of a stripe four at a time, from products of 32 bits.  Two ways:
 *
 *   split   it multiplies the words by P2, the lanes are turned by the multiplier: 30 are left.
 *   wide    it does all of a stripe: 14 are left, those of a digest.  For tokens of 32 bits.  Best on
 *           AMD's cores, above all beside a busy sibling; on Intel's, where both units share a port,
 *           it is slower than none.
 *
 * A digest depends on the stripes before it and nothing depends on it, but it takes as long as a
 * block's stripes: left behind them, it fills the window in which a core looks for work.  So its
 * steps stand between the stripes of a later block, and KEEP() holds them there.
 */
#include "xxh64.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,bmi2")))
#define INLINE AVX2 static inline __attribute__((always_inline))
#define KEEP(x) __asm__ volatile("" : "+r"(x))
#define KEEP4(x) __asm__ volatile("" : "+x"(x))

enum { SPREAD_WORDS = 4 * STRIPE_WORDS }; /* a digest is spread over the stripes of so many words */

typedef __m256i four;                /* of 64 bits */

INLINE four all(uint64_t x) { return _mm256_set1_epi64x((long long)x); }
INLINE four low(uint64_t x) { return all(x & 0xffffffff); }
INLINE four high(uint64_t x) { return all(x >> 32); }
INLINE four load(const void *p) { return _mm256_loadu_si256((const four *)p); }
INLINE void store(void *p, four x) { _mm256_storeu_si256((four *)p, x); }
INLINE four add(four x, four y) { return _mm256_add_epi64(x, y); }
INLINE four left(four x, int by) { return _mm256_slli_epi64(x, by); }
INLINE four right(four x, int by) { return _mm256_srli_epi64(x, by); }
INLINE four mul(four x, four y) { return _mm256_mul_epu32(x, y); } /* of the low halves */

/* A digest's steps, each held where it stands. */
INLINE uint64_t mix_here(uint64_t acc)
{
    acc = lane(0, acc);
    KEEP(acc);
    return acc;
}

INLINE lanes mix_lanes(lanes l) { return (lanes){ mix_here(l.a), mix_here(l.b), mix_here(l.c), mix_here(l.d) }; }

INLINE uint64_t fold_here(uint64_t h, uint64_t mixed, uint64_t mixed_next)
{
    h = fold(fold(h, mixed), mixed_next);
    KEEP(h);
    return h;
}

INLINE uint64_t avalanche_half(uint64_t h)
{
    h = (h ^ h >> 33) * P2;
    KEEP(h);
    return h;
}

INLINE uint64_t avalanche_rest(uint64_t h)
{
    h = (h ^ h >> 29) * P3;
    return h ^ h >> 32;
}

/* -- split -------------------------------------------------------------------------------------- */

/* Four words, times P2. */
INLINE void multiply(uint64_t *products, const int64_t *words)
{
    four x = load(words);
    four cross = add(mul(right(x, 32), low(P2)), mul(x, high(P2)));
    store(products, add(mul(x, low(P2)), left(cross, 32)));
}

INLINE uint64_t turn_lane(uint64_t acc, uint64_t product)
{
    acc = rotl(acc + product, 31) * P1;
    KEEP(acc);
    return acc;
}

INLINE lanes turn_lanes(lanes l, const uint64_t *products)
{
    return (lanes){ turn_lane(l.a, products[0]), turn_lane(l.b, products[1]), turn_lane(l.c, products[2]),
                    turn_lane(l.d, products[3]) };
}

/* The stripes whose products are given; between them the products of those at ahead, and the digest
 * of the block before, which ends with l and the rest. */
INLINE lanes split_block(lanes l, const uint64_t *products, uint64_t *products_ahead, const int64_t *ahead,
                         uint64_t num_bytes, const int64_t *rest, unsigned num_rest, uint64_t *digest)
{
    uint64_t h = sum_lanes(l);
    lanes mixed = mix_lanes(l);
    l = turn_lanes(l, products);
    multiply(products_ahead, ahead);
    h = fold_here(h, mixed.a, mixed.b);
    l = turn_lanes(l, products + 4);
    multiply(products_ahead + 4, ahead + 4);
    h = mix_rest(fold_here(h, mixed.c, mixed.d) + num_bytes, rest, num_rest);
    l = turn_lanes(l, products + 8);
    multiply(products_ahead + 8, ahead + 8);
    h = avalanche_half(h);
    l = turn_lanes(l, products + 12);
    multiply(products_ahead + 12, ahead + 12);
    *digest = avalanche_rest(h);
    return l;
}

/* The digest of c is written once more, to out[-1]. */
AVX2 static void hash_split(chain *c, uint64_t num_blocks, uint64_t *out)
{
    uint64_t products[2][SPREAD_WORDS], more[STRIPE_WORDS];
    const uint64_t size = c->block_size;
    for (int i = 0; i < SPREAD_WORDS; i += STRIPE_WORDS)
        multiply(products[0] + i, c->next + i);
    for (uint64_t i = 0; i < num_blocks; i++) {
        const int64_t *end = c->next + size, *ahead = i + 1 < num_blocks ? end : c->next;
        c->at = split_block(c->at, products[i % 2], products[(i + 1) % 2], ahead, c->num_bytes, c->next,
                            c->num_rest, out + i - 1);
        for (c->next += SPREAD_WORDS; c->next != end; c->next += STRIPE_WORDS) {
            multiply(more, c->next);
            c->at = turn_lanes(c->at, more);
        }
        c->num_bytes += 8 * size;
    }
    out[num_blocks - 1] = digest_of(c);
}

/* -- wide --------------------------------------------------------------------------------------- */

INLINE four value_if_odd(four x, uint64_t value)
{
    return _mm256_and_si256(_mm256_cmpgt_epi64(all(0), left(x, 63)), all(value));
}

/* word * P2.  What does not fit 32 bits shows in seen. */
INLINE four product(const int64_t *words, four *seen)
{
    four x = load(words);
    *seen = _mm256_or_si256(*seen, x);
    return add(mul(x, low(P2)), left(mul(x, high(P2)), 32));
}

/* rotl(x, 31) * P1 + then, as (x >> 33) * P1 + (bits 1..32 of x) * (P1 << 32) + (bit 0) * (P1 << 31): a
 * step shorter than the rotation. */
INLINE four turn(four x, four then)
{
    four top = right(x, 33);
    four cross = add(mul(right(x, 1), low(P1)), mul(top, high(P1)));
    four rest = add(mul(top, low(P1)), add(then, value_if_odd(x, P1 << 31)));
    KEEP4(rest);
    x = add(rest, left(cross, 32));
    KEEP4(x);
    return x;
}

/* The stripes at words, and between them the digest of an earlier block. */
INLINE four wide_block(four at, const int64_t *words, four *seen, lanes early, uint64_t num_bytes,
                       const int64_t *rest, unsigned num_rest, uint64_t *digest)
{
    uint64_t h = sum_lanes(early);
    four x = add(at, product(words, seen));
    KEEP4(x);
    lanes mixed = mix_lanes(early);
    x = turn(x, product(words + 4, seen));
    h = fold_here(h, mixed.a, mixed.b);
    x = turn(x, product(words + 8, seen));
    h = mix_rest(fold_here(h, mixed.c, mixed.d) + num_bytes, rest, num_rest);
    x = turn(x, product(words + 12, seen));
    h = avalanche_half(h);
    x = turn(x, all(0));
    *digest = avalanche_rest(h);
    return x;
}

/* Digests run two blocks behind: a lane's way from one unit to the other takes its time, too.  So the
 * lanes before the block that c ends are wanted; its digests are written once more, to out[-2] and
 * out[-1].  False, and c is where it was, if a token does not fit. */
AVX2 static bool go_wide(chain *c, lanes before, uint64_t num_blocks, uint64_t *out)
{
    lanes ends[2] = { before, c->at };
    const uint64_t size = c->block_size;
    const int64_t *next = c->next;
    uint64_t num_bytes = c->num_bytes - 8 * size;
    four seen = all(0), at = load(&c->at);
    for (uint64_t i = 0; i < num_blocks; i++) {
        const int64_t *end = next + size;
        at = wide_block(at, next, &seen, ends[i % 2], num_bytes, next - size, c->num_rest, out + i - 2);
        for (next += SPREAD_WORDS; next != end; next += STRIPE_WORDS)
            at = turn(add(at, product(next, &seen)), all(0));
        num_bytes += 8 * size;
        store(&ends[i % 2], at);
    }
    if (!_mm256_testz_si256(seen, all(0xffffffff00000000ull)))
        return false;
    *c = (chain){ ends[num_blocks % 2], num_bytes, next - size, size, c->num_rest };
    out[num_blocks - 2] = digest_of(c);
    *c = (chain){ ends[(num_blocks + 1) % 2], num_bytes + 8 * size, next, size, c->num_rest };
    out[num_blocks - 1] = digest_of(c);
    return true;
}

static bool hash_wide(chain *c, uint64_t num_blocks, uint64_t *out)
{
    chain now = *c;
    rs_hash_narrow(&now, 1, out);
    if (num_blocks > 1 && !go_wide(&now, c->at, num_blocks - 1, out + 1))
        return false;
    *c = now;
    return true;
}

bool rs_hash_fast(chain *c, uint64_t num_blocks, uint64_t *out)
{
    if (num_blocks == 0 || c->block_size < SPREAD_WORDS || !__builtin_cpu_supports("avx2") ||
        !__builtin_cpu_supports("bmi2"))
        return false;
    if (!__builtin_cpu_is("amd") || !hash_wide(c, num_blocks, out))
        hash_split(c, num_blocks, out);
    return true;
}

#else

bool rs_hash_fast(chain *c, uint64_t num_blocks, uint64_t *out)
{
    (void)c, (void)num_blocks, (void)out;
    return false;
}

#endif
