/*
 * offset.h - which bytes of a stripe file stand for what. Part of the format of
 * a directory.
 *
 *   bit 62   61    60 ... 57   56 ... 26   25 ... 0
 *       u    1     level       bucket      ticket      a place in a row's queue
 *
 *   bit 62   61    60 ... 37   36   35 ... 32   31 ... 1   0
 *       0    0     0           u    level       bucket     0    a row
 *
 * u: 1 of an update row. Programs of before there were any do not see their queues, as they
 * do not look there. Whoever waits in one may then be taken for one that was killed, and is not
 * woken, but looks again by himself (queue.c).
 *
 * Rows are two bytes apart, so that the kernel never joins the locks of two of
 * them and giving one back never means splitting one.
 */
#ifndef HIERLOCK_OFFSET_H
#define HIERLOCK_OFFSET_H

#include "file.h"

#include <fcntl.h>
#include <stdio.h>

#define HL__FILE_TICKET_BITS 26
#define HL__FILE_TICKETS (1u << HL__FILE_TICKET_BITS)
#define HL__FILE_QUEUES ((off_t)1 << 61)

static inline off_t hl__file_row_number(const hl__file_entry *entry) {
  return (off_t)(entry->level & ~HL_LEVEL_UPDATE) << 31 | (off_t)entry->bucket;
}

static inline off_t hl__file_row_flag(const hl__file_entry *entry, int bit) {
  return entry->level & HL_LEVEL_UPDATE ? (off_t)1 << bit : 0;
}

/* l_type is the caller's; l_pid must be 0 for F_OFD_. */
static inline struct flock hl__file_row_range(const hl__file_entry *entry) {
  return (struct flock){.l_whence = SEEK_SET,
                        .l_start = hl__file_row_flag(entry, 36) | hl__file_row_number(entry) << 1,
                        .l_len = 1};
}

/* `count` places of the row's queue, beginning with a ticket. */
static inline struct flock hl__file_queue_range(const hl__file_entry *entry, uint32_t ticket,
                                                uint32_t count) {
  return (struct flock){.l_type = F_WRLCK,
                        .l_whence = SEEK_SET,
                        .l_start = hl__file_row_flag(entry, 62) | HL__FILE_QUEUES |
                                   hl__file_row_number(entry) << HL__FILE_TICKET_BITS |
                                   (off_t)ticket,
                        .l_len = (off_t)count};
}

#endif
