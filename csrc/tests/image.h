/* image.h - byte images of a region, and which of their bytes a killed batch may leave changed. */
#ifndef RS_TEST_IMAGE_H
#define RS_TEST_IMAGE_H

#include "../snapshot.h"
#include "harness.h"

typedef struct image {
    uint64_t num_bytes;
    uint8_t *bytes;
    rs_view v;                   /* of bytes */
} image;

image image_new(uint64_t num_bytes);
void image_free(image *im);
/* Copy a live region, journal entries above the length apart.  Fails on a corrupt header. */
void image_take(image *im, const uint8_t *region);
void image_copy(image *to, const image *from);
/* Do both hold the same, the spent part of the journal apart? */
bool image_equals_region(const image *im, const uint8_t *region);
/* Roll back what the image caught half-way, and prove the invariants. */
void image_recover_and_check(image *im, const char *when);
/* exempt[i] = 1: byte i is not journaled (the list in layout.h), judged by the state in `base`. */
void image_exempt(const image *base, uint8_t *exempt);
/* First byte that differs and is not exempt, or -1. */
int64_t image_difference(const image *a, const image *b, const uint8_t *exempt);
/* covered[i] = 1: a journal entry holds the old value of byte i. */
void image_covered(const image *im, uint8_t *covered);
/* Name of what lies at an offset, for messages. */
const char *image_field(const image *im, uint64_t offset);

/* test_journal.c: from here on each commit of this one region is compared with its journal. */
void journal_watch_begin(rs_client *c);
void journal_watch_end(void);
void journal_watch_report(void);

#endif
