/* test_hash.c - XXH64 vectors, and the streaming digest against the one-shot one. */
#include "harness.h"

#include <string.h>
#include <sys/mman.h>

TEST(hash_known_vectors)
{
    static const char text[] = "Nobody inspects the spammish repetition";
    CHECK(rs_xxh64("", 0, 0) == 0xef46db3751d8e999ull);
    CHECK(rs_xxh64("abc", 3, 0) == 0x44bc2cf5ad770999ull);
    CHECK(rs_xxh64(text, sizeof(text) - 1, 0) == 0xfbcea83c8a378bf1ull);
}

TEST(hash_blocks_known_vectors)
{
    static const uint64_t expected[4] = {50805424035424587ull, 2598674594981696037ull, 748297365310093078ull,
                                         14144226175942821585ull};
    int64_t tokens[64];
    uint64_t out[4];
    for (int i = 0; i < 64; i++)
        tokens[i] = i;
    CHECK_OK(rs_hash_blocks(tokens, 64, 16, NULL, 0, out));
    CHECK_EQ(memcmp(out, expected, sizeof(out)), 0);
    const int64_t prefix[] = {'a', 0, 'b'};
    CHECK_OK(rs_hash_blocks(tokens, 64, 16, prefix, 3, out));
    CHECK(out[0] == 10833508028743192151ull);
}

enum { TOKENS = 200, MAX_PREFIX = 9 };

static void check_against_one_shot(const int64_t *words, uint64_t num_prefix, uint32_t block)
{
    uint64_t out[TOKENS];
    CHECK_OK(rs_hash_blocks(words + num_prefix, TOKENS, block, words, num_prefix, out));
    for (uint32_t i = 0; i < TOKENS / block; i++)
        CHECK(out[i] == rs_xxh64(words, (num_prefix + (i + 1) * block) * 8, 0));
}

/* Every block size and length of a prefix, with tokens of up to as many bits as mask has. */
static void check_all_against_one_shot(uint64_t mask)
{
    int64_t words[MAX_PREFIX + TOKENS];
    uint64_t state = test_seed;
    for (int i = 0; i < MAX_PREFIX + TOKENS; i++)
        words[i] = (int64_t)(random_next(&state) & mask);
    for (uint32_t block = 1; block <= 40; block++)
        for (uint64_t num_prefix = 0; num_prefix <= MAX_PREFIX; num_prefix++)
            check_against_one_shot(words, num_prefix, block);
}

TEST(hash_blocks_equals_one_shot) { check_all_against_one_shot(UINT64_MAX); }
TEST(hash_blocks_of_32_bit_tokens_equals_one_shot) { check_all_against_one_shot(UINT32_MAX); }

TEST(hash_blocks_with_one_long_token_equals_one_shot)
{
    int64_t words[MAX_PREFIX + TOKENS];
    for (int at = 0; at < MAX_PREFIX + TOKENS; at++)
        for (unsigned bit = 31; bit < 64; bit++) {
            for (int i = 0; i < MAX_PREFIX + TOKENS; i++)
                words[i] = i * 77;
            words[at] |= (int64_t)(1ull << bit);
            check_against_one_shot(words, bit % (MAX_PREFIX + 1), 16);
        }
}

/* The tokens end where memory ends: a read behind them faults. */
TEST(hash_blocks_reads_tokens_only)
{
    enum { PAGE = 4096, WORDS = PAGE / 8 };
    char *pages = mmap(NULL, 3 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    CHECK_EQ(mprotect(pages + PAGE, PAGE, PROT_READ | PROT_WRITE), 0);
    const int64_t *words = (const void *)(pages + PAGE), prefix[] = {1, 2, 3};
    uint64_t at_end[WORDS], at_begin[WORDS];
    for (uint32_t block = 1; block <= 40; block++)
        for (uint64_t num_tokens = 0; num_tokens <= WORDS; num_tokens++)
            for (uint64_t num_prefix = 0; num_prefix <= 3; num_prefix++) {
                CHECK_OK(rs_hash_blocks(words + WORDS - num_tokens, num_tokens, block, prefix, num_prefix, at_end));
                CHECK_OK(rs_hash_blocks(words, num_tokens, block, prefix, num_prefix, at_begin));
                CHECK_EQ(memcmp(at_end, at_begin, num_tokens / block * 8), 0);
            }
    munmap(pages, 3 * PAGE);
}

TEST(hash_blocks_arguments)
{
    int64_t tokens[16] = {0};
    uint64_t out[2] = {7, 7};
    CHECK_EQ(rs_hash_blocks(tokens, 16, 0, NULL, 0, out), RS_EINVAL);
    CHECK_OK(rs_hash_blocks(tokens, 15, 16, NULL, 0, out)); /* no full block */
    CHECK_OK(rs_hash_blocks(NULL, 0, 16, NULL, 0, out));
    CHECK_EQ(out[0], 7);
}

TEST(errors_have_names_and_texts)
{
    CHECK_EQ(strcmp(rs_error_name(RS_EBUSY), "RS_EBUSY"), 0);
    CHECK_EQ(strcmp(rs_error_name(-99), "RS_E?"), 0);
    for (int code = RS_EROOTS; code <= RS_OK; code++)
        CHECK(strncmp(rs_error_name(code), "RS_", 3) == 0 && strlen(rs_error_text(code)) > 1);
}
