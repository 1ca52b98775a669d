/* forest.c - the tree of a copied index as arrays in walking order.
 *
 * Sums over subtrees and over windows are then single passes: a window that ends at e and spans W
 * blocks is +1 at e and -1 at the block W levels above it, summed from the leaves up.
 */
#include "snapshot.h"

#include <stdlib.h>

static bool published(const rs_view *v, rs_slot s)
{
    return s < v->pool[RS_FULL].capacity && rs_ld(&v->pool[RS_FULL].state[s]) == RS_SLOT_PUBLISHED;
}

/* Group number of a PUBLISHED slot's parent, or RS_NONE when it names nothing that can be one. */
static uint32_t group_of(const rs_view *v, rs_slot s)
{
    rs_slot parent = rs_ld(&v->node[s].parent);
    if (RS_IS_ROOT(parent))
        return v->pool[RS_FULL].capacity + (parent - RS_ROOT_BASE);
    return published(v, parent) ? parent : RS_NONE;
}

/* Counting sort of the PUBLISHED slots by parent. */
static void group_kids(const rs_view *v, rs_forest *f)
{
    uint32_t capacity = v->pool[RS_FULL].capacity, num_groups = capacity + RS_NUM_ROOTS;
    for (rs_slot s = 0; s < capacity; s++) {
        uint32_t group = published(v, s) ? group_of(v, s) : RS_NONE;
        if (group != RS_NONE)
            f->first_kid[group]++;
    }
    uint32_t end = 0;
    for (uint32_t g = 0; g <= num_groups; g++) {
        end += f->first_kid[g];
        f->first_kid[g] = end;
    }
    for (rs_slot s = capacity; s-- > 0;) {
        uint32_t group = published(v, s) ? group_of(v, s) : RS_NONE;
        if (group != RS_NONE)
            f->kids[--f->first_kid[group]] = s;
    }
}

static uint32_t push_kids(const rs_forest *f, uint32_t parent, rs_slot *stack, uint32_t height)
{
    for (uint32_t i = f->first_kid[parent]; i < f->first_kid[parent + 1]; i++)
        stack[height++] = f->kids[i];
    return height;
}

/* A slot has one parent, so it is pushed once at most, and only from a root down. */
static void walk_root(const rs_view *v, rs_forest *f, uint32_t root, rs_slot *stack, rs_slot *path)
{
    uint32_t height = push_kids(f, v->pool[RS_FULL].capacity + root, stack, 0);
    while (height != 0) {
        rs_slot s = stack[--height], parent = rs_ld(&v->node[s].parent);
        uint32_t depth = RS_IS_ROOT(parent) ? 0 : f->depth[parent] + 1;
        path[depth] = s;
        f->depth[s] = depth;
        f->root[s] = (uint8_t)root;
        f->order[f->num_reached++] = s;
        for (int k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
            if (f->above[k])
                f->above[k][s] = depth >= v->pool[k].window ? path[depth - v->pool[k].window] : RS_NONE;
        height = push_kids(f, s, stack, height);
    }
}

static bool allocate_arrays(const rs_view *v, rs_forest *f)
{
    uint64_t n = v->pool[RS_FULL].capacity;
    f->order = malloc(n * sizeof(rs_slot));
    f->depth = malloc(n * sizeof(uint32_t));
    f->root = malloc(n);
    f->kids = malloc(n * sizeof(rs_slot));
    f->first_kid = calloc(n + RS_NUM_ROOTS + 1, sizeof(uint32_t));
    bool ok = f->order && f->depth && f->root && f->kids && f->first_kid;
    for (uint32_t k = RS_SWA; k < RS_NUM_COMPONENTS; k++) {
        if (!rs_has(v, k))
            continue;
        f->above[k] = malloc(n * sizeof(rs_slot));
        ok = ok && f->above[k];
    }
    return ok;
}

int rs_forest_build(const rs_view *v, rs_forest *f)
{
    uint64_t n = v->pool[RS_FULL].capacity;
    *f = (rs_forest){0};
    rs_slot *stack = malloc(n * sizeof(rs_slot)), *path = malloc(n * sizeof(rs_slot));
    bool ok = allocate_arrays(v, f) && stack && path;
    if (ok) {
        for (rs_slot s = 0; s < n; s++)
            f->depth[s] = RS_NONE;
        group_kids(v, f);
        for (uint32_t g = 0; g < RS_NUM_ROOTS; g++)
            walk_root(v, f, g, stack, path);
    } else {
        rs_forest_free(f);
    }
    free(stack);
    free(path);
    return ok ? RS_OK : RS_ENOMEM;
}

void rs_forest_free(rs_forest *f)
{
    free(f->order);
    free(f->depth);
    free(f->root);
    free(f->kids);
    free(f->first_kid);
    for (int k = 0; k < RS_NUM_COMPONENTS; k++)
        free(f->above[k]);
    *f = (rs_forest){0};
}

void rs_forest_sum(const rs_view *v, const rs_forest *f, uint32_t *x)
{
    for (uint32_t i = f->num_reached; i-- > 0;) {
        rs_slot s = f->order[i], parent = rs_ld(&v->node[s].parent);
        if (!RS_IS_ROOT(parent))
            x[parent] += x[s];
    }
}
