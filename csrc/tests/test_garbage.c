/* test_garbage.c - regions overwritten at random: RS_REGIONS (2000) of them.  fuzz_region.c does the
 * same, guided by coverage. */
#include "garbage.h"

#include <signal.h>
#include <unistd.h>

enum { MAX_INPUT = 256, PATIENCE_S = 20 };

static void give_up(int signal)
{
    (void)signal;
    FAIL("a verb did not return within %d s", PATIENCE_S);
}

static void try_seed(uint64_t seed)
{
    uint8_t input[MAX_INPUT];
    uint64_t rng = seed;
    size_t num_bytes = 8 * (1 + random_below(&rng, MAX_INPUT / 8));
    if (seed % 2)
        num_bytes = 8; /* one wrong field goes further than many */
    for (size_t b = 0; b < num_bytes; b++)
        input[b] = (uint8_t)random_next(&rng);
    snprintf(test_note, sizeof(test_note), "(RS_REGION=%#llx run garbage_replay)", (unsigned long long)seed);
    alarm(PATIENCE_S);
    garbage_try(input, num_bytes);
    alarm(0);
}

TEST(garbage_never_crashes)
{
    uint64_t num_regions = test_setting("RS_REGIONS", 2000), state = test_seed;
    signal(SIGALRM, give_up);
    for (uint64_t i = 0; i < num_regions; i++)
        try_seed(random_next(&state));
}

/* One region by its seed, as a failure prints it. */
TEST(garbage_replay)
{
    uint64_t seed = test_setting("RS_REGION", 0);
    if (seed)
        try_seed(seed);
}
