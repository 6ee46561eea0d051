/*
 * heap.h - a pairing heap (Fredman, Sedgewick, Sleator, Tarjan, 1986) of members that lie in
 * structures of the caller's, the least key first. A member is in one heap at a time. The caller
 * guards it.
 */
#ifndef HIERLOCK_HEAP_H
#define HIERLOCK_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct hl__heap {
  int64_t key; /* the caller's, before it adds the member */
  bool in;
  /* `back` is the parent of a first child, else the sibling before. */
  struct hl__heap *child, *sibling, *back;
} hl__heap;

/* Melds two roots. */
static inline hl__heap *hl__heap_meld(hl__heap *a, hl__heap *b) {
  if (b->key < a->key) {
    hl__heap *other = a;
    a = b;
    b = other;
  }
  b->back = a;
  b->sibling = a->child;
  if (a->child) a->child->back = b;
  a->child = b;
  return a;
}

/* Melds all these siblings into one heap: first in pairs, then the pairs. */
static inline hl__heap *hl__heap_gather(hl__heap *first) {
  hl__heap *pairs = NULL, *root = NULL;
  while (first) {
    hl__heap *a = first, *b = a->sibling;
    first = b ? b->sibling : NULL;
    a->sibling = a->back = NULL;
    if (b) {
      b->sibling = b->back = NULL;
      a = hl__heap_meld(a, b);
    }
    a->sibling = pairs;
    pairs = a;
  }
  while (pairs) {
    hl__heap *a = pairs;
    pairs = a->sibling;
    a->sibling = NULL;
    root = root ? hl__heap_meld(root, a) : a;
  }
  return root;
}

static inline void hl__heap_add(hl__heap **root, hl__heap *it) {
  it->in = true;
  it->child = it->sibling = it->back = NULL;
  *root = *root ? hl__heap_meld(*root, it) : it;
}

/* Does nothing where it is in no heap. */
static inline void hl__heap_remove(hl__heap **root, hl__heap *it) {
  if (!it->in) return;
  it->in = false;
  hl__heap *below = hl__heap_gather(it->child);
  if (it == *root) {
    *root = below;
    return;
  }
  if (it->back->child == it)
    it->back->child = it->sibling;
  else
    it->back->sibling = it->sibling;
  if (it->sibling) it->sibling->back = it->back;
  if (below) *root = hl__heap_meld(*root, below);
}

#endif
