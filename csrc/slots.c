/* slots.c - pools: who owns a slot, which are free, and runs of consecutive slots.
 *
 * A run matters: the walk of a path whose slots are consecutive is sequential memory.  Free slots
 * are a bitmap with a summary (one bit per bitmap word that is not zero), searched from a cursor.
 *
 *      summary  1 0 1 ...           bit w: bitmap[w] has a free slot
 *      bitmap   0110 0000 1111 ...  bit s: slot s is FREE
 */
#include "core.h"

/* Runs looked at before settling for several short ones. */
#define MAX_RUNS 16

static void bitmap_set(rs_view *v, rs_pool_view *p, uint32_t word, uint64_t value)
{
    uint64_t old = rs_ld(&p->bitmap[word]);
    rs_set64(v, &p->bitmap[word], value);
    if ((old == 0) == (value == 0))
        return;
    rs_a64 *summary = &p->summary[word / 64];
    uint64_t bit = 1ull << (word % 64);
    rs_set64(v, summary, value ? rs_ld(summary) | bit : rs_ld(summary) & ~bit);
}

static void mark_free(rs_view *v, rs_pool_view *p, rs_slot s)
{
    bitmap_set(v, p, s / 64, rs_ld(&p->bitmap[s / 64]) | 1ull << (s % 64));
}

static uint32_t num_words(const rs_pool_view *p) { return (p->capacity + 63) / 64; }

/* First bitmap word >= word that is not zero, or num_words. */
static uint32_t next_word(const rs_pool_view *p, uint32_t word)
{
    uint32_t words = num_words(p);
    while (word < words) {
        uint64_t rest = rs_ld(&p->summary[word / 64]) >> (word % 64);
        if (rest)
            return word + (uint32_t)__builtin_ctzll(rest);
        word = (word / 64 + 1) * 64;
    }
    return words;
}

/* First free slot >= s, or capacity. */
static rs_slot next_free(const rs_pool_view *p, rs_slot s)
{
    if (s >= p->capacity)
        return p->capacity;
    uint64_t rest = rs_ld(&p->bitmap[s / 64]) >> (s % 64);
    if (rest)
        return s + (uint32_t)__builtin_ctzll(rest);
    uint32_t word = next_word(p, s / 64 + 1);
    if (word >= num_words(p))
        return p->capacity;
    uint64_t bits = rs_ld(&p->bitmap[word]);
    return bits ? word * 64 + (uint32_t)__builtin_ctzll(bits) : p->capacity;
}

static uint32_t run_length(const rs_pool_view *p, rs_slot s, uint32_t max)
{
    uint32_t n = 0;
    while (n < max && s + n < p->capacity) {
        uint32_t at = s + n, bit = at % 64;
        uint64_t used = ~(rs_ld(&p->bitmap[at / 64]) >> bit);
        uint32_t here = rs_min(used ? (uint32_t)__builtin_ctzll(used) : 64, 64 - bit);
        n += here;
        if (here < 64 - bit)
            break;
    }
    return rs_min(n, max);
}

typedef struct run { rs_slot first; uint32_t length; } run;

/* Up to MAX_RUNS free runs from the cursor on, wrapping once; stops at one of n slots. */
static uint32_t find_runs(const rs_pool_view *p, uint32_t n, run *runs)
{
    rs_slot cursor = rs_ld(&p->shm->cursor), s = cursor < p->capacity ? cursor : 0, stop = s;
    bool wrapped = false;
    uint32_t num = 0;
    while (num < MAX_RUNS) {
        s = next_free(p, s);
        if (s >= p->capacity) {
            if (wrapped)
                break;
            wrapped = true;
            s = 0;
            continue;
        }
        if (wrapped && s >= stop)
            break;
        /* Clipped at stop: slots from there on were found before the wrap. */
        runs[num] = (run){s, run_length(p, s, wrapped ? rs_min(n, stop - s) : n)};
        s += runs[num++].length;
        if (runs[num - 1].length >= n)
            break;
    }
    return num;
}

static void take_run(rs_view *v, rs_pool_view *p, rs_slot first, uint32_t n, int32_t *out)
{
    uint8_t gen = (uint8_t)rs_ld(&v->hdr->current_root);
    for (uint32_t i = 0; i < n; i++) {
        rs_slot s = first + i;
        rs_set8(v, &p->state[s], RS_SLOT_STAGED);
        rs_set16(v, &p->owner[s], (uint16_t)v->me);
        rs_set8(v, &p->gen[s], gen);
        out[i] = (int32_t)s;
    }
    for (rs_slot s = first; s < first + n;) {
        uint32_t bit = s % 64, here = rs_min(64 - bit, first + n - s);
        uint64_t mask = (here == 64 ? ~0ull : (1ull << here) - 1) << bit;
        bitmap_set(v, p, s / 64, rs_ld(&p->bitmap[s / 64]) & ~mask);
        s += here;
    }
    rs_set32(v, &p->shm->cursor, first + n);
}

uint32_t rs_stage_locked(rs_view *v, uint32_t component, uint32_t n, int32_t *out)
{
    rs_pool_view *p = &v->pool[component];
    run runs[MAX_RUNS];
    uint32_t got = 0, root = rs_bound(v, rs_ld(&v->hdr->current_root), RS_NUM_ROOTS);
    n = rs_min(n, RS_BATCH);
    while (got < n) {
        uint32_t num = find_runs(p, n - got, runs);
        if (num == 0)
            break;
        uint32_t first = runs[num - 1].length >= n - got ? num - 1 : 0;
        for (uint32_t i = first; i < num && got < n; i++) {
            uint32_t take = rs_min(runs[i].length, n - got);
            take_run(v, p, runs[i].first, take, out + got);
            got += take;
        }
    }
    if (got == 0)
        return 0;
    rs_add32(v, &p->shm->num_free, 0u - got);
    rs_add32(v, &p->shm->num_staged, got);
    rs_add64(v, &p->shm->allocated, got);
    rs_add32(v, &v->clients[v->me].num_staged[component], got);
    rs_add32(v, &v->hdr->root_refs[root], got);
    return got;
}

void rs_unstage_locked(rs_view *v, uint32_t owner, uint32_t component, const int32_t *slots, uint32_t n)
{
    rs_pool_view *p = &v->pool[component];
    for (uint32_t i = 0; i < n; i++) {
        rs_slot s = (rs_slot)slots[i];
        uint32_t root = rs_bound(v, rs_ld(&p->gen[s]), RS_NUM_ROOTS);
        rs_set8(v, &p->state[s], RS_SLOT_FREE);
        mark_free(v, p, s);
        rs_add32(v, &v->hdr->root_refs[root], -1);
    }
    rs_add32(v, &p->shm->num_free, n);
    rs_add32(v, &p->shm->num_staged, 0u - n);
    rs_add64(v, &p->shm->recycled, n);
    rs_add32(v, &v->clients[owner].num_staged[component], 0u - n);
}

void rs_published_locked(rs_view *v, uint32_t component, uint32_t n)
{
    rs_pool_view *p = &v->pool[component];
    uint32_t root = rs_bound(v, rs_ld(&v->hdr->current_root), RS_NUM_ROOTS);
    rs_add32(v, &p->shm->num_staged, 0u - n);
    rs_add32(v, &p->shm->num_published, n);
    rs_add64(v, &p->shm->inserted, n);
    rs_add32(v, &v->clients[v->me].num_staged[component], 0u - n);
    rs_add32(v, &v->hdr->root_refs[root], 0u - n);
    v->dirty = true;
}

void rs_slot_free_locked(rs_view *v, uint32_t component, rs_slot s)
{
    rs_pool_view *p = &v->pool[component];
    rs_set8(v, &p->state[s], RS_SLOT_FREE);
    mark_free(v, p, s);
    rs_add32(v, &p->shm->num_free, 1);
    rs_add32(v, &p->shm->num_published, -1);
}

bool rs_slots_are_mine(const rs_view *v, uint32_t component, const int32_t *slots, uint32_t n)
{
    const rs_a8 *state = v->pool[component].state;
    const rs_a16 *owner = v->pool[component].owner;
    uint32_t capacity = v->pool[component].capacity, me = v->me;
    for (uint32_t i = 0; i < n; i++) {
        rs_slot s = (rs_slot)slots[i];
        if (s >= capacity || rs_ld(&state[s]) != RS_SLOT_STAGED || rs_ld(&owner[s]) != me)
            return false;
    }
    return true;
}
