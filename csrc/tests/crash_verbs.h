/* crash_verbs.h - the verbs that the crash proofs step through, each with what it finds in the region. */
#ifndef RS_TEST_CRASH_VERBS_H
#define RS_TEST_CRASH_VERBS_H

#include "harness.h"

enum { WINDOW = 3, FULL = 24, SWA = 10, MAMBA = 4, LONG = 14 };

/* The child's world: everything a verb needs, made before the first step. */
typedef struct scene {
    int fd;
    rs_client *c;                /* whose verb is stepped; NULL for attach */
    rs_client *other;            /* alive, idle */
    uint64_t path[LONG], branch[LONG];
    int32_t slots[FULL];
    rs_pin pin;
} scene;

typedef struct verb {
    const char *name;
    void (*prepare)(scene *);
    void (*run)(scene *);
} verb;

extern const verb crash_verbs[];
extern const unsigned num_crash_verbs;

#endif
