/* mirror.h - an index and the model that it is compared with. */
#ifndef RS_TEST_MIRROR_H
#define RS_TEST_MIRROR_H

#include "model.h"

typedef struct mirror {
    uint64_t rng;
    bool tiny_hashes, verbose;
    rs_config cfg;
    int fd;
    rs_client *client[MODEL_CLIENTS];    /* NULL: not attached */
    bool dead[MODEL_CLIENTS];            /* attached, killed, not reaped yet */
    bool dying[MODEL_CLIENTS];           /* dead and found so once: quarantined */
    rs_client *watcher;                  /* takes the snapshots; holds nothing */
    model m, actual;
    uint64_t live[RS_NUM_COMPONENTS];    /* stored - removed events */
    uint64_t cursor;
} mirror;

static inline uint32_t below(mirror *w, uint32_t n) { return random_below(&w->rng, n); }

void op_attach(mirror *w, int i);
/* Attach, detach, death, reaping and replacement of client i, as its state allows. */
void op_clients(mirror *w, int i);

#endif
