/* layout.h - every struct that lives in an index file, and what must always hold of them.
 *
 *   offset 0        rs_header_shm     identity, lock, sequence, pools, roots, counters
 *   plan.journal    rs_jentry_shm[]   undo journal of the batch in progress
 *   plan.clients    rs_client_shm[]   client table
 *   plan.pins       rs_pin_shm[]      ledger: pins_per_client records for each client
 *   plan.events     rs_event_shm[]    ring of stored / removed / cleared
 *   plan.*          arrays            one entry per FULL slot, per bucket, per side slot
 *
 * There are no pointers and no stored offsets: rs_plan_region() computes every offset from
 * rs_config alone, and a handle keeps its own copy of config and plan, so that garbage written
 * into the region later cannot move an access out of the mapping.
 *
 * THE TREE.  A block hash names its whole prefix, and a block in the tree owns one FULL slot.  So
 * the node is the slot, and its fields live in arrays indexed by FULL slot:
 *
 *      ROOT_3 <--parent-- [17] hash h0, child 18 --> [18] hash h1, child 19 --> [19] h2
 *                                                     ^
 *                                                     '--parent-- [40] hash h2'   (a branch)
 *      bucket[B(h2)] -> 40 -> 19 -> NONE              (chain through next[])
 *
 * `parent` is what makes a block match.  Insert stores it last of the fields (release), unlink
 * stores NONE into it first.  A bucket depends on the hash alone, so that probes can be prefetched;
 * an entry matches on hash AND parent.
 *
 * STATE OF A SLOT (each transition under the lock, by the verb named)
 *      FREE --allocate--> STAGED --insert--> PUBLISHED --evict, reset, last unpin of an old root--> FREE
 *                         STAGED --recycle, redundant insert, reap--> FREE
 *
 * WHO WRITES.  "L": only the lock holder, through the journal (lock.c).  "L!": only the lock holder,
 * not journaled, with the reason.  "R": readers too, relaxed.
 * Not journaled, and why that is safe:
 *   hash, next, list links of a slot not yet linked   unreachable until journaled stores link it
 *   event ring entries                                unreadable until ev_head moves, after commit
 *   last_access                                       a hint; written by readers
 *   seq, lock_word                                    recovery only moves seq forward; owns the word
 *   per-client counters, recoveries, last_reap_ns     statistics and rate limits
 *   identity and config, incl. fingerprint's tail     written before READY; fingerprint: see region.c
 *
 * INVARIANTS (check.c proves each on a copy of the region; the numbers are used everywhere)
 *   I1   magic, layout version, ABI word, region size; epoch not zero
 *   I2   every PUBLISHED slot reaches a root through PUBLISHED parents; all of one path carry one gen
 *   I3   (hash, parent) is unique among PUBLISHED slots
 *   I4   FREE + STAGED + PUBLISHED = capacity per pool; the free bitmap has exactly the FREE slots
 *   I5   num_children is a recount; a child hint is NONE or a PUBLISHED child of this slot
 *   I6   the hash table finds every PUBLISHED slot and no other
 *   I7   pins and side_pins are recounts over the ledger (insert pins included); a block with
 *        side_pins has its side slot
 *   I8   a PUBLISHED side slot hangs on exactly one PUBLISHED block, with cover or side_pins > 0;
 *        cover is a recount over window ends
 *   I9   STAGED slots have an owner whose entry is not FREE; num_staged per client is a recount
 *   I10  the FULL lists hold exactly the unpinned PUBLISHED leaves; a side pool's lists exactly its ends
 *   I11  header counters (pools, list counts, roots) are recounts
 *   I12  not PUBLISHED => parent = NONE, child = NONE, no children, no pins, no side slot
 */
#ifndef RS_LAYOUT_H
#define RS_LAYOUT_H

#include "radixshm.h"

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>

#define RS_MAGIC 0x316d687378696472ull /* "rdixshm1" */
#define RS_STORE_MAGIC 0x3165726f74737872ull
/* Refuses a peer built for another word size, byte order or struct layout. */
#define RS_ABI_WORD (0x01020304u ^ ((uint32_t)sizeof(rs_config) << 8) ^ ((uint32_t)sizeof(void *) << 24))

#define RS_LINE 64u

/* A slot id of some pool, a bucket chain link, or one of the two special values below. */
typedef uint32_t rs_slot;
#define RS_NONE 0xffffffffu
/* Parent of a first-level block: one value per root id, so that a reset makes the old tree
 * unmatchable by changing current_root alone. */
#define RS_NUM_ROOTS 128u
#define RS_ROOT_BASE 0xffffff00u
#define RS_ROOT(g) (RS_ROOT_BASE + (g))
#define RS_IS_ROOT(s) ((s) >= RS_ROOT_BASE && (s) < RS_ROOT_BASE + RS_NUM_ROOTS)
#define RS_MAX_SLOTS 0x7fffff00u /* slot ids travel as int32 */

/* Offset into the index file; never mixed with an index. */
typedef struct rs_offset { uint64_t bytes; } rs_offset;

enum { RS_SLOT_FREE = 0, RS_SLOT_STAGED = 1, RS_SLOT_PUBLISHED = 2 };

/* Blocks (or steps of work) between two releases of the lock.  64: an insert batch holds the lock
 * for about 1 us, far below the cost of a futex sleep. */
#ifndef RS_BATCH /* tests make it small, to meet every seam between batches */
#define RS_BATCH 64u
#endif

typedef _Atomic uint8_t rs_a8;
typedef _Atomic uint16_t rs_a16;
typedef _Atomic uint32_t rs_a32;
typedef _Atomic uint64_t rs_a64;

/* One undo record: the old value of the `size` bytes at `where`.  Valid below journal_len. */
typedef struct rs_jentry_shm {
    rs_a64 where;                /* offset << 4 | size */
    rs_a64 old;
} rs_jentry_shm;

/* Doubly linked lists, one per level that the policy uses, old to young. */
typedef struct rs_lists_shm {
    rs_a32 head[RS_MAX_LEVELS], tail[RS_MAX_LEVELS], count[RS_MAX_LEVELS];      /* L */
} rs_lists_shm;

typedef struct rs_pool_shm {
    rs_a32 num_free, num_staged, num_published;  /* L; sum = capacity */
    rs_a32 num_pins;                             /* L; pins (FULL), side pins summed over blocks (side) */
    rs_a32 num_pinned;                           /* L; side pools: blocks with side_pins > 0 */
    rs_a32 cursor;                               /* L; bitmap word where the next search starts */
    rs_a32 ticks;                                /* L; evictions seen by the policy, for its ageing */
    rs_lists_shm lists;
    rs_a64 inserted, allocated, recycled;        /* L */
    rs_a64 evicted[RS_NUM_REASONS];              /* L */
} rs_pool_shm;

/* Per-client statistics: relaxed adds by that client's threads alone, folded into the header (with
 * the journal) when the client goes. */
enum {
    RS_C_QUERIES, RS_C_HIT_FULL, RS_C_HIT_SWA, RS_C_HIT_MAMBA, RS_C_MISS_FULL, RS_C_MISS_SWA,
    RS_C_MISS_MAMBA, RS_C_STALE_RELEASES, RS_C_LOCK_TIMEOUTS, RS_C_PIN_LIMITS, RS_C_WALK_RETRIES,
    RS_C_WALKS_LOCKED, RS_C_SHORT_FULL, RS_C_SHORT_SWA, RS_C_SHORT_MAMBA, RS_C_PINS_TAKEN,
    RS_C_PINS_RELEASED, RS_C_BUSY_FULL, RS_C_BUSY_SWA, RS_C_BUSY_MAMBA,
    RS_NUM_COUNTERS = 24         /* three cache lines */
};

/* One pin of a client.  Free records form a list through `link`. */
typedef struct rs_pin_shm {
    rs_a32 slot;                 /* L; deepest pinned block, RS_NONE: record is free */
    rs_a32 num_blocks;           /* L; depth of that block + 1: the window is min(W, num_blocks) long */
    rs_a32 mask;                 /* L; components pinned */
    rs_a32 link;                 /* L; next free record */
    rs_a64 nonce;                /* L; makes a handle single-use */
} rs_pin_shm;

/* What a walk reads of a block, by FULL slot: one cache line holds four, and a probe of the hash
 * table costs one miss and not three. */
typedef struct rs_node_shm {
    rs_a64 hash;                 /* L!; of the whole prefix */
    rs_a32 parent;               /* L; FULL slot, RS_ROOT(g), or RS_NONE: no block */
    rs_a32 next;                 /* L, L! while the slot is not linked; chain in the hash table */
} rs_node_shm;

/* A client.  Its two liveness bytes are lock ranges of the index file (lock.c), not memory.
 *     FREE --attach--> ACTIVE --detach or reap--> FREE
 *                      ACTIVE --reap of a dead `device` client--> DYING --deadline, reap--> FREE   */
typedef struct rs_client_shm {
    alignas(RS_LINE) rs_a32 state;       /* L */
    rs_a32 device;                       /* L; a device may write its slots after its death */
    rs_a64 incarnation;                  /* L; number of this attach, from the header */
    rs_a64 deadline_ns;                  /* L; CLOCK_MONOTONIC, DYING only */
    rs_a32 num_staged[RS_NUM_COMPONENTS];/* L */
    rs_a32 num_pins;                     /* L; records in use, insert_pin apart */
    rs_a32 free_pin;                     /* L; head of the free records */
    rs_a64 nonce;                        /* L; last one given out */
    rs_pin_shm insert_pin;               /* L; keeps an insert's path between its batches */
    /* For display; written before the entry turns ACTIVE. */
    rs_a32 pid;
    rs_a64 pid_namespace, attached_unix_ns;
    char label[RS_LABEL_BYTES];
    alignas(RS_LINE) rs_a64 counters[RS_NUM_COUNTERS];   /* R, own client only */
} rs_client_shm;

/* Ring entry.  `number` is position + 1, cleared first and stored last, so that a reader that
 * copied an entry can tell whether it was overwritten meanwhile. */
typedef struct rs_event_shm {
    rs_a64 number, hash, parent_hash;    /* L! */
    rs_a64 what;                         /* L!; kind | reason << 8 | component << 16 | has_parent << 24 | client << 32 */
    rs_a64 incarnation;                  /* L! */
} rs_event_shm;

typedef struct rs_header_shm {
    /* Identity: written while BUILDING, constant afterwards. */
    uint64_t magic;
    uint32_t layout_version, abi;
    uint64_t region_bytes;
    rs_config config;
    alignas(RS_LINE) rs_a32 state;       /* RS_STATE_*; stored last when the region is made */

    alignas(RS_LINE) rs_a32 lock_word;   /* 0, or WAITERS | client slot + 1 */

    /* What every reader loads; moved once per batch. */
    alignas(RS_LINE) rs_a64 seq;         /* odd while something is being unlinked */
    rs_a32 current_root;                 /* L */
    rs_a32 clock;                        /* L; counts batches that placed or freed something */

    alignas(RS_LINE) rs_a32 journal_len; /* entries valid; 0 = committed */
    rs_a32 draining;                     /* L; leaves of old roots are left in the lists */
    rs_a64 generation;                   /* L; resets so far */
    rs_a64 next_incarnation;             /* L */
    rs_a64 ev_next;                      /* L; events written, committed or not */
    rs_a64 ev_head;                      /* events readable; = ev_next after every commit */
    rs_a64 recoveries, last_reap_ns;     /* L! */
    rs_a64 reaped_clients, reaped_pins, reaped_slots;    /* L */

    alignas(RS_LINE) rs_pool_shm pool[RS_NUM_COMPONENTS];
    alignas(RS_LINE) rs_a32 root_refs[RS_NUM_ROOTS];     /* L; PUBLISHED first-level blocks + STAGED slots of all pools */
    alignas(RS_LINE) rs_a64 counters[RS_NUM_COUNTERS];   /* L; of clients that are gone */
} rs_header_shm;

/* Where each array lies.  Pure function of rs_config (region.c). */
typedef struct rs_plan {
    uint64_t region_bytes;
    uint32_t journal_capacity;   /* entries */
    uint32_t journal_worst;      /* entries that one unit of batched work may need */
    uint32_t bucket_bits;
    uint64_t event_capacity;     /* 0 or a power of two */
    rs_offset journal, clients, pins, events;
    rs_offset node, child, num_children, pin_count, last_access, bucket;
    struct { rs_offset slot, pins, cover, is_end; } side[RS_NUM_COMPONENTS];     /* by FULL slot */
    struct {
        rs_offset state, owner, gen, level, placed, list_prev, list_next, bitmap, summary;
        rs_offset block;         /* side pools: FULL slot or NONE, by side slot */
    } pool[RS_NUM_COMPONENTS];
} rs_plan;

static_assert(sizeof(rs_jentry_shm) == 16, "a journal entry is two words");
static_assert(sizeof(rs_node_shm) == 16, "four nodes a cache line");
static_assert(sizeof(rs_pin_shm) == 24, "ledger record");
static_assert(sizeof(rs_event_shm) == 40, "ring entry");
static_assert(sizeof(rs_client_shm) % RS_LINE == 0, "clients do not share lines");
static_assert(ATOMIC_LONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "shared words must be lock-free");
static_assert(ATOMIC_SHORT_LOCK_FREE == 2 && ATOMIC_CHAR_LOCK_FREE == 2, "shared words must be lock-free");
static_assert(offsetof(rs_header_shm, lock_word) % RS_LINE == 0, "the lock has its own line");

#endif
