/* test_journal.c - every word that a batch changes has a journal entry or is on layout.h's list.
 *
 * The linker sends each call of rs_commit_locked() through here first (--wrap), in all tests.  While
 * a region is watched, the bytes changed since its last commit are compared with the journal.
 */
#include "image.h"

#include <stdlib.h>
#include <string.h>

static struct {
    bool on;
    image base, now;
    uint8_t *exempt, *covered;
    uint64_t num_commits, num_words, longest;
} watch;

int __real_rs_commit_locked(rs_view *v);
int __wrap_rs_commit_locked(rs_view *v);

static void compare_with_journal(const rs_view *v)
{
    image_take(&watch.now, v->base);
    image_exempt(&watch.base, watch.exempt);
    image_covered(&watch.now, watch.covered);
    for (uint64_t i = 0; i < watch.now.num_bytes; i++) {
        if (i % 8 == 0 && memcmp(watch.base.bytes + i, watch.now.bytes + i, 8) == 0) {
            i += 7;
            continue;
        }
        if (watch.base.bytes[i] == watch.now.bytes[i] || watch.exempt[i])
            continue;
        watch.num_words++;
        if (!watch.covered[i])
            FAIL("%s changed without a journal entry", image_field(&watch.now, i));
    }
    uint64_t len = rs_ld(&v->hdr->journal_len);
    watch.longest = len > watch.longest ? len : watch.longest;
    CHECK(len + 8 <= v->plan.journal_capacity);
    watch.num_commits++;
}

int __wrap_rs_commit_locked(rs_view *v)
{
    if (watch.on && !v->corrupt)
        compare_with_journal(v);
    int rc = __real_rs_commit_locked(v);
    if (watch.on)
        image_take(&watch.base, v->base);
    return rc;
}

void journal_watch_begin(rs_client *c)
{
    uint64_t n = c->v.plan.region_bytes;
    watch.base = image_new(n);
    watch.now = image_new(n);
    watch.exempt = image_new(n).bytes;
    watch.covered = image_new(n).bytes;
    image_take(&watch.base, c->v.base);
    watch.on = true;
}

void journal_watch_end(void)
{
    watch.on = false;
    image_free(&watch.base);
    image_free(&watch.now);
    free(watch.exempt);
    free(watch.covered);
}

void journal_watch_report(void)
{
    printf("     %llu batches, %llu changed bytes all journaled, longest journal %llu entries\n",
           (unsigned long long)watch.num_commits, (unsigned long long)watch.num_words,
           (unsigned long long)watch.longest);
}

/* A store past the journal must be noticed, else this file proves nothing. */
TEST(journal_watch_notices_a_plain_store)
{
    rs_config cfg = small_config(16, 0, 0, 0);
    rs_client *c = attach(make_region(&cfg));
    int32_t slot;
    journal_watch_begin(c);
    stage(c, RS_FULL, 1, &slot);
    rs_raw(&c->v.num_children[3], 1);
    image_take(&watch.now, c->v.base);
    image_exempt(&watch.base, watch.exempt);
    CHECK(image_difference(&watch.base, &watch.now, watch.exempt) >= 0);
    rs_raw(&c->v.num_children[3], 0);
    stage(c, RS_FULL, 1, &slot);
    journal_watch_end();
    CHECK(watch.num_commits == 2);
}
