/* test_hash.c - XXH64 vectors, and the streaming digest against the one-shot one. */
#include "harness.h"

#include <string.h>

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

TEST(hash_blocks_equals_one_shot)
{
    enum { TOKENS = 200, MAX_PREFIX = 9 };
    int64_t words[MAX_PREFIX + TOKENS];
    uint64_t out[TOKENS], state = test_seed;
    for (int i = 0; i < MAX_PREFIX + TOKENS; i++)
        words[i] = (int64_t)random_next(&state);
    for (uint32_t block = 1; block <= 40; block++)
        for (uint64_t prefix = 0; prefix <= MAX_PREFIX; prefix++) {
            const int64_t *tokens = words + prefix;
            CHECK_OK(rs_hash_blocks(tokens, TOKENS, block, words, prefix, out));
            for (uint32_t i = 0; i < TOKENS / block; i++)
                CHECK(out[i] == rs_xxh64(words, (prefix + (i + 1) * block) * 8, 0));
        }
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
