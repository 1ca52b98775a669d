/* core.h - private types and the cross-file functions of the core, lowest layer first.
 *
 * A file may call only what stands above its own section:
 *   region -> fds -> lock (journal, liveness) -> slots -> events -> evict (lists, policy) -> tree -> side
 *   -> clients (table, ledger), attach -> index, allocate, insert (verbs), check
 *
 * Functions named *_locked require that the calling thread holds the index lock through v.
 */
#ifndef RS_CORE_H
#define RS_CORE_H

#include "layout.h"
#include "plant.h"

#include <pthread.h>
#include <stdbool.h>

#define RS_HIDDEN __attribute__((visibility("hidden")))

/* A private view of one mapped (or copied) index: pointers, capacities, and the state of the batch
 * that this process is running.  Everything that bounds an access is private. */
typedef struct rs_pool_view {
    uint32_t capacity;
    uint32_t window;                     /* side pools */
    rs_a8 *state, *gen, *level;
    rs_a16 *owner;
    rs_a32 *placed, *list_prev, *list_next;
    rs_a64 *bitmap, *summary;            /* bit set = FREE; summary bit = bitmap word not zero */
    rs_a32 *block;                       /* side pools */
    rs_pool_shm *shm;
} rs_pool_view;

typedef struct rs_side_view {            /* by FULL slot; NULL where the component does not exist */
    rs_a32 *slot, *pins, *cover;
    rs_a8 *is_end;
} rs_side_view;

typedef struct rs_view {
    uint8_t *base;
    rs_header_shm *hdr;
    rs_config config;
    rs_plan plan;
    rs_jentry_shm *journal;
    rs_client_shm *clients;
    rs_pin_shm *pins;
    rs_event_shm *events;
    rs_node_shm *node;
    rs_a32 *child, *num_children, *pin_count, *last_access, *bucket;
    rs_pool_view pool[RS_NUM_COMPONENTS];
    rs_side_view side[RS_NUM_COMPONENTS];
    uint32_t me;                         /* client slot that locked work is done for; RS_NONE: none */
    /* Batch in progress; touched by the lock holder only. */
    bool seq_open;                       /* seq is odd */
    bool dirty;                          /* something was placed or freed: the clock moves at commit */
    bool full;                           /* the journal has no room for another unit of work */
    bool corrupt;                        /* a bad index was met: the batch is rolled back */
    uint64_t ev_pos;                     /* next event position */
} rs_view;

/* A descriptor of an index file (fds.c).  -1: closed, or of the parent of this forked process. */
typedef struct rs_fd {
    int fd;
    struct rs_fd *next;
} rs_fd;

struct rs_client {
    rs_view v;
    uint64_t map_bytes;
    rs_fd file, life, lease;             /* own open each; file is the mapped one */
    uint64_t incarnation;
    int cancel_state;                    /* of the thread that holds the index lock */
    pthread_mutex_t insert_mutex;        /* one insert or recycle per handle at a time */
    uint64_t *marks[RS_NUM_COMPONENTS];  /* duplicate detection, all zero between calls */
    rs_a32 orphan_insert_pin;            /* BUSY left insert_pin behind: dropped by the next verb */
};

/* -- loads and plain stores of shared words ------------------------------------------------- */
#define rs_ld(p) atomic_load_explicit((p), memory_order_relaxed)
#define rs_ld_acq(p) atomic_load_explicit((p), memory_order_acquire)
#define rs_raw(p, x) atomic_store_explicit((p), (x), memory_order_relaxed) /* not journaled: layout.h */

/* A slot id read from shared memory, made safe to index with.  Garbage marks the view corrupt and
 * becomes slot 0: the access stays inside the mapping and the batch is rolled back. */
static inline rs_slot rs_bound(rs_view *v, rs_slot s, uint32_t capacity)
{
    if (s < capacity)
        return s;
    v->corrupt = true;
    return 0;
}

static inline bool rs_has(const rs_view *v, uint32_t component)
{
    return component < RS_NUM_COMPONENTS && v->pool[component].capacity != 0;
}

static inline uint32_t rs_min(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* -- region.c ------------------------------------------------------------------------------- */
RS_HIDDEN int rs_plan_region(const rs_config *cfg, rs_plan *out);
/* Point v into base[num_bytes], validating the header first (I1).  Requires num_bytes >= header. */
RS_HIDDEN int rs_view_init(rs_view *v, void *base, uint64_t num_bytes);
RS_HIDDEN int rs_map_readonly(int fd, rs_view *v, uint64_t *map_bytes);
RS_HIDDEN void rs_unmap(rs_view *v, uint64_t map_bytes);
RS_HIDDEN void rs_info_fill(const rs_view *v, rs_info *out);

/* -- fds.c ---------------------------------------------------------------------------------- */
/* Make a new open file description of the file open as `like`; 0 or -1 with errno.  f must stay where
 * it is until it is closed, which is a no-op when nothing is open. */
RS_HIDDEN int rs_fd_open(rs_fd *f, int like);
RS_HIDDEN void rs_fd_close(rs_fd *f);
static inline bool rs_forked(const rs_client *c) { return c->file.fd < 0; }

/* -- lock.c --------------------------------------------------------------------------------- */
#ifndef RS_LOCK_DEADLINE_NS /* fuzzing waits less */
#define RS_LOCK_DEADLINE_NS 200000000ull /* a stopped owner must not wedge the node */
#define RS_LOCK_SLICE_NS 10000000ull     /* sleep between two looks at the owner's life byte */
#endif
#define RS_LOCK_WAITERS 0x80000000u
enum { RS_BYTE_LEASE = 0, RS_BYTE_LIFE = 1 };

RS_HIDDEN uint64_t rs_now_ns(void);
/* Take (blocking = never) one liveness byte of client slot through fd; 0 or -1 with errno. */
RS_HIDDEN int rs_byte_take(int fd, uint32_t slot, int which);
RS_HIDDEN void rs_byte_drop(int fd, uint32_t slot, int which);
/* Whether a description other than fd's holds it, as of now: for display. */
RS_HIDDEN bool rs_byte_held(int fd, uint32_t slot, int which);
/* Take the index lock; runs recover() when the last owner died.  held_slot: a client slot whose
 * life byte the caller holds (its dead owner may be named by the word), or RS_NONE. */
RS_HIDDEN int rs_lock(rs_client *c, uint32_t held_slot);
RS_HIDDEN void rs_unlock(rs_client *c);
/* Finish the batch: clear the journal, close seq, publish events.  If v->corrupt, roll back
 * instead and return RS_ECORRUPT.  The lock stays held. */
RS_HIDDEN int rs_commit_locked(rs_view *v);
/* Undo what the journal holds.  The one home of owner death.  RS_ECORRUPT: journal is garbage. */
RS_HIDDEN int rs_recover_locked(rs_view *v);
RS_HIDDEN void rs_unlink_begin_locked(rs_view *v);
/* Entries left; batched work stops when fewer than plan.journal_worst are. */
RS_HIDDEN uint32_t rs_journal_room(const rs_view *v);

/* Record the old value, then store.  Program order (entry, length, data) is all that is needed:
 * whoever replays the journal took the lock after this process died.  false: no room, which marks the
 * batch for roll back; nothing may be stored then. */
static inline bool rs_log(rs_view *v, const volatile void *p, uint64_t size, uint64_t old)
{
    uint32_t n = rs_ld(&v->hdr->journal_len);
    if (n >= v->plan.journal_capacity) {
        v->corrupt = true;
        return false;
    }
    uint64_t offset = (uint64_t)((const volatile uint8_t *)p - v->base);
    rs_raw(&v->journal[n].where, offset << 4 | size);
    rs_raw(&v->journal[n].old, old);
    atomic_store_explicit(&v->hdr->journal_len, n + 1, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
    return true;
}

/* The same for many words at once: their entries, then one length, then (by the caller) all the data.
 * NULL: no room, which marks the batch for roll back; nothing may be stored then. */
static inline rs_jentry_shm *rs_log_begin(rs_view *v, uint32_t num_words)
{
    uint32_t n = rs_ld(&v->hdr->journal_len);
    if (n <= v->plan.journal_capacity && num_words <= v->plan.journal_capacity - n)
        return &v->journal[n];
    v->corrupt = true;
    return NULL;
}

static inline rs_jentry_shm *rs_log_word(rs_jentry_shm *e, const uint8_t *base, const volatile void *p, uint64_t size,
                                         uint64_t old)
{
    rs_raw(&e->where, (uint64_t)((const volatile uint8_t *)p - base) << 4 | size);
    rs_raw(&e->old, old);
    return e + 1;
}

static inline void rs_log_end(rs_view *v, const rs_jentry_shm *e)
{
    atomic_store_explicit(&v->hdr->journal_len, (uint32_t)(e - v->journal), memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
}

#define RS_DEFINE_SET(name, type, ctype)                                                          \
    static inline void name(rs_view *v, type *p, ctype x)                                         \
    {                                                                                             \
        ctype old = rs_ld(p);                                                                     \
        if (RS_PLANTED(LATE_ENTRY))                                                               \
            rs_raw(p, x);                                                                         \
        if (rs_log(v, p, sizeof(*p), old))                                                        \
            atomic_store_explicit(p, x, memory_order_release);                                    \
    }
RS_DEFINE_SET(rs_set8, rs_a8, uint8_t)
RS_DEFINE_SET(rs_set16, rs_a16, uint16_t)
RS_DEFINE_SET(rs_set32, rs_a32, uint32_t)
RS_DEFINE_SET(rs_set64, rs_a64, uint64_t)
#define rs_add32(v, p, d) rs_set32((v), (p), (uint32_t)(rs_ld(p) + (uint32_t)(d)))
#define rs_add64(v, p, d) rs_set64((v), (p), (uint64_t)(rs_ld(p) + (uint64_t)(d)))

/* -- slots.c: pools, bitmap, runs ------------------------------------------------------------ */
/* Stage up to n (<= RS_BATCH) free slots for v->me under the current root; consecutive where
 * possible.  Returns how many. */
RS_HIDDEN uint32_t rs_stage_locked(rs_view *v, uint32_t component, uint32_t n, int32_t *out);
/* STAGED -> FREE for up to RS_BATCH slots of client owner, and the counts that go with them. */
RS_HIDDEN void rs_unstage_locked(rs_view *v, uint32_t owner, uint32_t component, const int32_t *slots, uint32_t n);
/* Counts for n slots of v->me that went STAGED -> PUBLISHED under the current root (tree.c and
 * side.c set the states, slot by slot). */
RS_HIDDEN void rs_published_locked(rs_view *v, uint32_t component, uint32_t n);
/* PUBLISHED -> FREE of one slot. */
RS_HIDDEN void rs_slot_free_locked(rs_view *v, uint32_t component, rs_slot s);
/* Every slot is staged by v->me. */
RS_HIDDEN bool rs_slots_are_mine(const rs_view *v, uint32_t component, const int32_t *slots, uint32_t n);

/* -- events.c -------------------------------------------------------------------------------- */
RS_HIDDEN void rs_event_locked(rs_view *v, uint32_t kind, uint32_t reason, uint32_t component,
                               uint64_t hash, rs_slot parent);
/* STORED for a chain of n FULL blocks below parent. */
RS_HIDDEN void rs_events_stored_locked(rs_view *v, const uint64_t *hashes, uint32_t n, rs_slot parent);

/* -- evict.c: eviction lists and the policies over them (knows lists, not trees) -------------- */
RS_HIDDEN uint32_t rs_policy_levels(uint32_t policy);
/* Enter the lists.  young: stamped with the clock; used: it was hit (unpinned), not just published.
 * old: took its evicted child's place, with that child's level and stamp. */
RS_HIDDEN void rs_enter_young_locked(rs_view *v, uint32_t component, rs_slot s, bool used);
RS_HIDDEN void rs_enter_old_locked(rs_view *v, uint32_t component, rs_slot s, uint32_t level, uint32_t stamp);
RS_HIDDEN void rs_leave_locked(rs_view *v, uint32_t component, rs_slot s);
/* Move s (passed over, since it may not go now) behind all others. */
RS_HIDDEN void rs_pass_over_locked(rs_view *v, uint32_t component, rs_slot s);
/* Next victim, after giving touched entries at the old end their second chance; at most *steps
 * entries are looked at (*steps is lowered).  RS_NONE: no entry, no steps left, or v->full. */
RS_HIDDEN rs_slot rs_victim_locked(rs_view *v, uint32_t component, uint32_t *steps);

/* -- tree.c: match, link, unlink (takes no lock, knows no policy) ------------------------------ */
typedef struct rs_walk {
    const uint64_t *hashes;              /* in: what to walk */
    uint32_t num_hashes, mask;
    int32_t *slots;                      /* out: the path, full_hit slots */
    int32_t *swa_slots;                  /* out: num_swa slots; NULL without SWA in mask */
    uint32_t full_hit, common_hit, num_swa;
    int32_t mamba_slot;
    uint32_t root;                       /* root id walked */
    uint64_t seq;                        /* sequence that the walk saw */
} rs_walk;

/* Walk w->hashes from the current root.  Returns RS_OK, RS_EBUSY (the sequence moved: walk again)
 * or RS_ECORRUPT.  Takes no lock and writes nothing shared. */
RS_HIDDEN int rs_walk_path(const rs_view *v, rs_walk *w);
/* True when a walk is still exact: nothing unlinked, same root. */
RS_HIDDEN bool rs_walk_current(const rs_view *v, const rs_walk *w);
RS_HIDDEN uint32_t rs_bucket(const rs_view *v, uint64_t hash);
RS_HIDDEN rs_slot rs_lookup_locked(rs_view *v, uint64_t hash, rs_slot parent);
/* Link n (<= RS_BATCH) STAGED slots as a chain under parent (slot or root) and publish them.  Lists are
 * the caller's: parent has left them, and the last slot has not entered. */
RS_HIDDEN void rs_link_locked(rs_view *v, const int32_t *slots, const uint64_t *hashes, uint32_t n, rs_slot parent);
/* Unlink an unpinned leaf that is in no list and has no side slots, and free its slot.  Returns its parent. */
RS_HIDDEN rs_slot rs_unlink_locked(rs_view *v, rs_slot s, uint32_t reason);
/* True for an unpinned leaf: what the FULL lists hold (I10).  s is PUBLISHED. */
static inline bool rs_evictable(const rs_view *v, rs_slot s)
{
    return rs_ld(&v->num_children[s]) == 0 && rs_ld(&v->pin_count[s]) == 0;
}

/* -- side.c: SWA and MAMBA windows hanging on the tree ----------------------------------------- */
RS_HIDDEN void rs_side_insert_locked(rs_view *v, uint32_t component, const int32_t *path, uint32_t num_blocks,
                                     const int32_t *slots, uint32_t m, int32_t *unused, uint32_t *num_unused);
/* Drop the window that ends at block; frees side slots that nothing covers any more. */
RS_HIDDEN void rs_end_drop_locked(rs_view *v, uint32_t component, rs_slot block, uint32_t reason);
/* Pin (delta 1) or unpin (-1) the window of the block deepest. */
RS_HIDDEN void rs_side_pin_locked(rs_view *v, uint32_t component, rs_slot deepest, int delta);
/* Drop window ends until about n side slots went; returns slots freed.  steps as in rs_victim_locked. */
RS_HIDDEN uint32_t rs_side_evict_locked(rs_view *v, uint32_t component, uint32_t n, uint32_t reason, uint32_t *steps);

/* -- clients.c: client table, ledger, reaping --------------------------------------------------- */
/* Without a server, clients reap in allocate and attach: at most every second. */
#define RS_CLIENT_REAP_NS 1000000000ull
RS_HIDDEN void rs_count(rs_client *c, uint32_t counter, uint64_t n);
RS_HIDDEN bool rs_pin_room_locked(const rs_view *v);
RS_HIDDEN void rs_pin_take_locked(rs_view *v, rs_slot deepest, uint32_t num_blocks, uint32_t mask, rs_pin *out);
/* Drop the pin in record index of client (nothing if it holds none) and free the record. */
RS_HIDDEN void rs_pin_drop_locked(rs_view *v, uint32_t client, uint32_t index);
RS_HIDDEN rs_pin_shm *rs_pin_record(const rs_view *v, uint32_t client, uint32_t index);
/* Move client's insert pin to another block; RS_NONE drops it. */
RS_HIDDEN void rs_insert_pin_move_locked(rs_view *v, uint32_t client, rs_slot deepest, uint32_t num_blocks);
/* Give back all that entry `client` holds and free the entry, in batches.  held_slot as in rs_lock.
 * A device client with staged slots becomes (or stays) DYING until its deadline. */
RS_HIDDEN int rs_entry_clear(rs_client *c, uint32_t client, uint32_t held_slot, rs_reap_result *out);

/* -- index.c: the machinery that verbs share ----------------------------------------------------- */
/* Lock for a verb of c: checks fork and retirement, drops an orphaned insert pin. */
RS_HIDDEN int rs_verb_begin(rs_client *c);
/* Commit (or roll back) and unlock; returns rc, or RS_ECORRUPT. */
RS_HIDDEN int rs_verb_end(rs_client *c, int rc);
/* Evict up to n FULL blocks in this batch; stops early when steps or the journal run out. */
RS_HIDDEN uint32_t rs_full_evict_locked(rs_view *v, uint32_t n, uint32_t reason, uint32_t *steps);
/* One batch of a pending drain; true when nothing is left of old roots in the lists. */
RS_HIDDEN bool rs_drain_locked(rs_view *v);
/* RS_OK when every slot is staged by c and none is named twice.  Requires insert_mutex. */
RS_HIDDEN int rs_check_slots(rs_client *c, uint32_t component, const int32_t *slots, uint32_t n);
/* Run drain batches until nothing is left; RS_EBUSY leaves the rest to the next verb. */
RS_HIDDEN int rs_drain_all(rs_client *c);
/* Walk without the lock, a few times if need be.  RS_EBUSY: the sequence kept moving. */
RS_HIDDEN int rs_walk_optimistic(rs_client *c, rs_walk *w);

#endif
