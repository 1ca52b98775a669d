/* harness.h - what the C tests share: registration, checks, small regions, random numbers.
 *
 * A test is a function made with TEST(name); runner.c has the main().  A failed check prints where
 * and what, and ends the test process: each test runs in a fork of its own (or in the runner itself
 * with --no-fork, for debuggers).
 */
#ifndef RS_TEST_HARNESS_H
#define RS_TEST_HARNESS_H

#include "../core.h"

#include <stdio.h>

void test_add(const char *name, void (*run)(void));
#define TEST(name)                                                                                \
    static void name(void);                                                                       \
    __attribute__((constructor)) static void add_##name(void) { test_add(#name, name); }          \
    static void name(void)

_Noreturn void test_fail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
#define FAIL(...) test_fail(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(condition) ((condition) ? (void)0 : FAIL("%s", #condition))
#define CHECK_EQ(a, b) test_equal(__FILE__, __LINE__, #a, (long long)(a), #b, (long long)(b))
#define CHECK_OK(call) CHECK_EQ((call), RS_OK)
void test_equal(const char *file, int line, const char *a_text, long long a, const char *b_text, long long b);

/* -- randomness: one seed per run (RS_SEED), printed by the runner ---------------------------- */
extern uint64_t test_seed;
uint64_t random_next(uint64_t *state);
static inline uint32_t random_below(uint64_t *state, uint32_t n) { return (uint32_t)((random_next(state) >> 32) * n >> 32); }
/* Printed with a failure: what a run needs to repeat it. */
extern char test_note[128];
/* Number from the environment, for long runs. */
uint64_t test_setting(const char *name, uint64_t otherwise);

/* -- regions ----------------------------------------------------------------------------------- */
/* A config of small pools: 4 clients, 8 pins each, 64 events, no quarantine. */
rs_config small_config(uint32_t full_slots, uint32_t swa_slots, uint32_t window, uint32_t mamba_slots);
/* A READY index in an anonymous file. */
int make_region(const rs_config *cfg);
rs_client *attach(int fd);
/* What the death of a process does to a client: the liveness bytes go, the entry stays. */
void kill_client(rs_client *c);
/* rs_snapshot_check must find nothing. */
void check_region(rs_client *c);
void check_fd(int fd);

/* -- verbs with their usual outcome -------------------------------------------------------------- */
/* hashes[i] of path `id`: distinct for distinct (id, i). */
void make_path(uint64_t *hashes, uint32_t n, uint64_t id);
void stage(rs_client *c, uint32_t component, uint32_t n, int32_t *slots);
void publish(rs_client *c, const uint64_t *hashes, uint32_t n);
/* Publish what follows the first `start` blocks. */
void extend(rs_client *c, const uint64_t *hashes, uint32_t start, uint32_t n);
void publish_side(rs_client *c, uint32_t component, const uint64_t *hashes, uint32_t n, uint32_t m);
uint32_t full_hit(rs_client *c, const uint64_t *hashes, uint32_t n);
rs_pin pin_path(rs_client *c, const uint64_t *hashes, uint32_t n, uint32_t mask, uint32_t expected_hit);
void release(rs_client *c, rs_pin pin);
rs_stats stats_of(rs_client *c);

enum { MAX_BLOCKS = 4096 };      /* longest path in a test */

#endif
