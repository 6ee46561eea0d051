/*
 * mode.c - the names of modes.
 */
#include "mode.h"

#include <string.h>

static const char *const names[] = {
    [0] = "", [HL_SHARED] = "shared", [HL_EXCLUSIVE] = "exclusive", [HL_UPDATE] = "update"};

const char *hl_mode_name(hl_mode mode) {
  return (size_t)mode < sizeof names / sizeof *names ? names[mode] : "";
}

bool hl_mode_named(const char *name, hl_mode *mode) {
  if (!name || !mode) return false;
  for (size_t i = HL_SHARED; i < sizeof names / sizeof *names; i++) {
    if (strcmp(names[i], name) != 0) continue;
    *mode = (hl_mode)i;
    return true;
  }
  return false;
}
