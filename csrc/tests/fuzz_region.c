/* fuzz_region.c - libFuzzer target over mutated regions (make -C csrc fuzz). */
#include "garbage.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t num_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t num_bytes)
{
    garbage_try(data, num_bytes);
    return 0;
}
