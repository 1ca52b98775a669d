/* hash_avx2.c - digests of blocks whose tokens fit 32 bits, by the vector unit of an x86-64.
 *
 * A block of 16 tokens takes 46 multiplications, and a core does one of 64 bits a cycle.  The 32 of the
 * stripes are done here four at a time, from products of 32 bits; the 14 of a digest stay where they
 * are and run meanwhile.  A digest depends on the stripes before it and nothing depends on it, but it
 * takes as long as a block's stripes: left behind them, it fills the window in which a core looks for
 * work.  So its steps stand between the stripes of the next block, and KEEP() holds them there.
 */
#include "xxh64.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,bmi2")))
#define INLINE AVX2 static inline __attribute__((always_inline))
#define KEEP(x) __asm__ volatile("" : "+r"(x))
#define KEEP4(x) __asm__ volatile("" : "+x"(x))

enum { SPREAD = 4 };                 /* stripes that a digest is spread over */

typedef __m256i four;                /* of 64 bits, one for each lane */

INLINE four all(uint64_t x) { return _mm256_set1_epi64x((long long)x); }
INLINE four low(uint64_t x) { return all(x & 0xffffffff); }
INLINE four high(uint64_t x) { return all(x >> 32); }
INLINE four load(const void *p) { return _mm256_loadu_si256((const four *)p); }
INLINE four add(four x, four y) { return _mm256_add_epi64(x, y); }
INLINE four left(four x, int by) { return _mm256_slli_epi64(x, by); }
INLINE four right(four x, int by) { return _mm256_srli_epi64(x, by); }
INLINE four mul(four x, four y) { return _mm256_mul_epu32(x, y); } /* of the low halves */

INLINE four value_if_odd(four x, uint64_t value)
{
    return _mm256_and_si256(_mm256_cmpgt_epi64(all(0), left(x, 63)), all(value));
}

/* word * P2.  What does not fit 32 bits shows in seen. */
INLINE four times_p2(const int64_t *words, four *seen)
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
    return add(rest, left(cross, 32));
}

INLINE uint64_t mix_lane(uint64_t acc)
{
    acc = lane(0, acc);
    KEEP(acc);
    return acc;
}

INLINE uint64_t fold_here(uint64_t h, uint64_t mixed)
{
    h = fold(h, mixed);
    KEEP(h);
    return h;
}

/* The stripes at words, and between them the digest of what late is the end of. */
INLINE four block(four at, const int64_t *words, four *seen, lanes late, uint64_t num_bytes, const int64_t *rest,
                  unsigned num_rest, uint64_t *digest)
{
    uint64_t h = sum_lanes(late);
    four x = add(at, times_p2(words, seen));
    KEEP4(x);
    late = (lanes){ mix_lane(late.a), mix_lane(late.b), mix_lane(late.c), mix_lane(late.d) };
    x = turn(x, times_p2(words + 4, seen));
    KEEP4(x);
    h = fold_here(fold_here(h, late.a), late.b);
    x = turn(x, times_p2(words + 8, seen));
    KEEP4(x);
    h = fold_here(fold_here(h, late.c), late.d);
    h = mix_rest(h + num_bytes, rest, num_rest);
    x = turn(x, times_p2(words + 12, seen));
    KEEP4(x);
    h = (h ^ h >> 33) * P2;
    KEEP(h);
    x = turn(x, all(0));
    KEEP4(x);
    h = (h ^ h >> 29) * P3;
    *digest = h ^ h >> 32;
    return x;
}

/* Digests run two blocks behind: a lane's way from one unit to the other takes its time, too.  So the
 * end of the block before c is wanted, whose digest out[-2] is written once more. */
AVX2 static bool go_on(chain *c, lanes before, uint64_t num_blocks, uint64_t *out)
{
    lanes ends[2] = { before, c->at };
    const uint64_t size = c->block_size;
    const int64_t *next = c->next;
    uint64_t num_bytes = c->num_bytes - 8 * size;
    four seen = all(0), at = load(&c->at);
    for (uint64_t i = 0; i < num_blocks; i++) {
        const int64_t *end = next + size;
        at = block(at, next, &seen, ends[i % 2], num_bytes, next - size, c->num_rest, out + i - 2);
        for (next += SPREAD * STRIPE_WORDS; next != end; next += STRIPE_WORDS)
            at = turn(add(at, times_p2(next, &seen)), all(0));
        num_bytes += 8 * size;
        _mm256_storeu_si256((four *)&ends[i % 2], at);
    }
    if (!_mm256_testz_si256(seen, all(0xffffffff00000000ull)))
        return false;
    *c = (chain){ ends[num_blocks % 2], num_bytes, next - size, size, c->num_rest };
    out[num_blocks - 2] = digest_of(c);
    *c = (chain){ ends[(num_blocks + 1) % 2], num_bytes + 8 * size, next, size, c->num_rest };
    out[num_blocks - 1] = digest_of(c);
    return true;
}

bool rs_hash_wide(chain *c, uint64_t num_blocks, uint64_t *out)
{
    if (num_blocks < 2 || c->block_size < SPREAD * STRIPE_WORDS || !__builtin_cpu_supports("avx2") ||
        !__builtin_cpu_supports("bmi2"))
        return false;
    chain now = *c;
    rs_hash_narrow(&now, 1, out);
    if (!go_on(&now, c->at, num_blocks - 1, out + 1))
        return false;
    *c = now;
    return true;
}

#else

bool rs_hash_wide(chain *c, uint64_t num_blocks, uint64_t *out)
{
    (void)c, (void)num_blocks, (void)out;
    return false;
}

#endif
