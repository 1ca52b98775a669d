/* plant.h - bugs planted on purpose, one per build, to prove that the tests would catch them.
 *
 * `make -C csrc plants` builds the crash tests once per row with -DRS_PLANT=RS_PLANT_<name> and
 * demands that they fail.  In every other build RS_PLANTED() is the constant false.
 */
#ifndef RS_PLANT_H
#define RS_PLANT_H

enum {
    RS_PLANT_NONE,
    RS_PLANT_PLAIN_STORE,        /* unlink lowers num_children past the journal */
    RS_PLANT_LATE_ENTRY,         /* data is stored before its journal entry */
    RS_PLANT_MISSING_UNLINK,     /* an evicted block stays in its bucket's chain */
    RS_PLANT_EVEN_UNLINK,        /* readers are not told of an unlink */
    RS_PLANT_LATE_HASH,          /* a block matches before its hash is stored */
    RS_PLANT_EARLY_EVENTS,       /* events are readable before their batch is committed */
    RS_PLANT_FORWARD_ROLLBACK,   /* the journal is undone from first to last */
    RS_PLANT_CLEAR_FIRST,        /* recovery clears the journal before it has undone it */
    RS_PLANT_QUIET_ROLLBACK      /* a rollback does not move the sequence */
};

#ifndef RS_PLANT
#define RS_PLANT RS_PLANT_NONE
#endif
#define RS_PLANTED(name) (RS_PLANT == RS_PLANT_##name)

#endif
