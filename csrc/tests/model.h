/* model.h - a naive model of an index: plain arrays, every question answered by a full scan.
 *
 * The model does not predict which slots an allocation takes or which blocks an eviction chooses;
 * it takes those from the index and checks that they were allowed.  Everything else it predicts.
 */
#ifndef RS_TEST_MODEL_H
#define RS_TEST_MODEL_H

#include "../snapshot.h"
#include "harness.h"

enum { MODEL_SLOTS = 64, MODEL_CLIENTS = 4, MODEL_PINS = 64, MODEL_EVENTS = 512 };
enum { NO_SLOT = -1 };

typedef struct model_block {
    int state, owner, gen;
    int parent;                  /* slot, or -1 - root id; PUBLISHED only */
    uint64_t hash;
    int pins, side[3], side_pins[3], is_end[3];
} model_block;

typedef struct model_side { int state, owner, gen, block; } model_side;

typedef struct model_pin { int client; rs_pin pin; int slot; uint32_t mask; } model_pin;

typedef struct model {
    int capacity[3], window[3];
    int root;                    /* current root id */
    model_block full[MODEL_SLOTS];
    model_side side[3][MODEL_SLOTS];
    model_pin pins[MODEL_PINS];
    int num_pins;
} model;

/* What the index says. */
void model_load(model *m, const rs_view *v);
/* Fails unless both agree in every field but the pins' list. */
void model_compare(const model *expected, const model *actual);

int model_depth(const model *m, int slot);
/* The child of parent (slot or -1 - root) with this hash, or NO_SLOT. */
int model_child(const model *m, int parent, uint64_t hash);
/* Path of hashes from the current root: fills slots, returns the hit. */
int model_walk(const model *m, const uint64_t *hashes, int n, int *slots);
/* Largest prefix of the hit that every component of mask can serve. */
int model_joint(const model *m, uint32_t mask, const int *slots, int hit);
int model_cover(const model *m, int component, int block);
int model_count(const model *m, int component, int state);
/* Slots that eviction could free, given the pins. */
int model_evictable(const model *m, int component);
/* True when a block of the window that ends at block is pinned. */
bool model_window_pinned(const model *m, int component, int end);

void model_pin_add(model *m, int client, rs_pin pin, int slot, uint32_t mask);
void model_pin_drop(model *m, int index);
/* Free what old roots no longer need. */
void model_drain(model *m);
/* All that a client holds is given back: pins go by client, staged slots by its table slot. */
void model_forget_client(model *m, int client, int owner);
/* Take from `actual` which blocks and window ends are gone, check that they might go, and remove
 * them.  may_evict: mask of the components that may.  removed[k]: slots freed. */
void model_take_evictions(model *m, const model *actual, uint32_t may_evict, int removed[3]);

#endif
