/*
 * list.h - a circular list with a head. A member is in one such list at a time. The caller guards
 * it.
 */
#ifndef HIERLOCK_LIST_H
#define HIERLOCK_LIST_H

#include <stdbool.h>
#include <stddef.h>

/* A member, or the head, which comes between the last member and the first. If it points to itself,
   it is an empty list, or in no list. */
typedef struct hl__list {
  struct hl__list *next, *previous;
} hl__list;

static inline void hl__list_init(hl__list *list) { list->next = list->previous = list; }

static inline bool hl__list_empty(const hl__list *list) { return list->next == list; }

/* Inserts node before `at`; if `at` is the head, at the end. */
static inline void hl__list_add(hl__list *at, hl__list *node) {
  node->previous = at->previous;
  node->next = at;
  node->previous->next = node;
  at->previous = node;
}

static inline void hl__list_remove(hl__list *node) {
  node->previous->next = node->next;
  node->next->previous = node->previous;
  hl__list_init(node);
}

/* Moves all members of `from` to the end of `to`. */
static inline void hl__list_move(hl__list *to, hl__list *from) {
  if (hl__list_empty(from)) return;
  from->next->previous = to->previous;
  to->previous->next = from->next;
  from->previous->next = to;
  to->previous = from->previous;
  hl__list_init(from);
}

/* The structure of this type whose `field` is node. */
#define HL__LIST_ENTRY(node, type, field) ((type *)(void *)((char *)(node)-offsetof(type, field)))

#endif
