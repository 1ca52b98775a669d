/* snapshot.h - a private copy of an index, and its tree in walking order (snapshot.c, check.c).
 *
 * Assumes nothing about the content: a copy may hold garbage.  Every index is bounds-checked before
 * use, and every walk visits a slot at most once.
 */
#ifndef RS_SNAPSHOT_H
#define RS_SNAPSHOT_H

#include "core.h"

/* What hangs below the roots.  A slot is `reached` when it is PUBLISHED and so are all its parents
 * up to a root; parent loops and orphans are not reached.  Arrays are by FULL slot. */
typedef struct rs_forest {
    uint32_t num_reached;
    rs_slot *order;              /* reached slots, parents before children */
    uint32_t *depth;             /* blocks above; RS_NONE: not reached */
    uint8_t *root;               /* root id; reached slots only */
    rs_slot *above[RS_NUM_COMPONENTS];   /* side components: the parent W levels up, or RS_NONE */
    rs_slot *kids;               /* PUBLISHED slots grouped by parent */
    uint32_t *first_kid;         /* [FULL capacity + RS_NUM_ROOTS + 1]: where a parent's group starts */
} rs_forest;

struct rs_snapshot {
    rs_view v;                   /* of mem */
    void *mem;
    rs_forest forest;
    uint32_t *pins_below;        /* by FULL slot: pins at it or below; own count where not reached */
};

RS_HIDDEN int rs_forest_build(const rs_view *v, rs_forest *f);
RS_HIDDEN void rs_forest_free(rs_forest *f);
static inline bool rs_reached(const rs_forest *f, rs_slot s) { return f->depth[s] != RS_NONE; }
/* Add each reached slot's x to its parent's, leaves first: x becomes a sum over subtrees. */
RS_HIDDEN void rs_forest_sum(const rs_view *v, const rs_forest *f, uint32_t *x);
/* Count 1 for each block of the window that ends at s, once rs_forest_sum() has run over x. */
static inline void rs_window_mark(const rs_forest *f, uint32_t component, rs_slot s, uint32_t *x)
{
    rs_slot above = f->above[component][s];
    x[s]++;
    if (above != RS_NONE)
        x[above]--;
}
/* Children of parent (a slot, or capacity + root id) in f->kids. */
static inline uint32_t rs_num_kids(const rs_forest *f, uint32_t parent)
{
    return f->first_kid[parent + 1] - f->first_kid[parent];
}

#endif
