/* dsn.c - any text as a DSN: it is understood or refused in one line, which does not
   show the password; its parameters likewise. */
#include "fuzz.h"

#include "dsn.h"
#include "mysql_store.h"

#define SECRET "SSSSSSSS"

static void claim_inside(const hl_dsn *dsn, const char *part) {
  /* Words of the stores' own. */
  static const char *const own[] = {"port", "sslmode", "require", "flock"};
  if (!part) return;
  for (size_t i = 0; i < sizeof own / sizeof *own; i++)
    if (strcmp(part, own[i]) == 0) return;
  CLAIM(part >= dsn->text && part <= dsn->text + dsn->size);
  CLAIM(memchr(part, 0, (size_t)(dsn->text + dsn->size - part) + 1));
}

/* [scheme://]user:SECRET@..., with the secret in no other place. */
static bool has_password(const char *text) {
  const char *user = strstr(text, "://");
  user = user && strcspn(text, ":/?@%") == (size_t)(user - text) ? user + 3 : text;
  const char *colon = user + strcspn(user, ":/?@%");
  return strncmp(colon, ":" SECRET "@", strlen(SECRET) + 2) == 0 &&
         strstr(text, SECRET) == colon + 1 && !strstr(colon + 2, SECRET);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  char *text = malloc(size + 1);
  hl_dsn dsn;
  hl_error error;
  memcpy(text, data, size);
  text[size] = '\0';
  static const hl_store_ops *const stores[] = {
      &hl_store_mysql,  &hl_store_postgresql, &hl_store_file,      &hl_store_null,
      &hl_store_sqlite, &hl_store_redis,      &hl_store_memcached, &hl_store_quorum};
  const char *store = hl_dsn_store(text, &error);
  if (store && strncmp(store, "store+", 6) == 0) { /* another maker's reads the rest itself */
    free(text);
    return 0;
  }
  int status = HL_EDSN;
  memset(&dsn, 0, sizeof dsn);
  for (size_t i = 0; store && i < sizeof stores / sizeof *stores; i++)
    if (strcmp(stores[i]->scheme, store) == 0)
      status = hl_dsn_parse(text, stores[i]->parse, &dsn, &error);
  if (status == HL_OK) {
    const char *parts[] = {dsn.user, dsn.password, dsn.host, dsn.socket, dsn.database, dsn.path};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) claim_inside(&dsn, parts[i]);
    CLAIM(dsn.port <= 65535);
    CLAIM(dsn.param_count <= HL_DSN_PARAMS_MAX);
    for (unsigned i = 0; i < dsn.param_count; i++) {
      claim_inside(&dsn, dsn.params[i].name);
      claim_inside(&dsn, dsn.params[i].value);
      CLAIM(dsn.params[i].name && dsn.params[i].value);
      CLAIM(hl_dsn_param_get(&dsn, dsn.params[i].name));
    }
    CLAIM(store && strcmp(store, dsn.store) == 0);
    if (strcmp(store, "mysql") == 0) {
      hl_store_config config = {.dsn = &dsn};
      hl__mysql_store mysql = {.config = &config};
      status = hl__mysql_params(&mysql, &error);
      if (status) {
        claim_error(&error, HL_EDSN);
      } else {
        CLAIM(mysql.connect_timeout > 0);
        CLAIM(strlen(mysql.space) <= HL__MYSQL_NAME_MAX);
        CLAIM(!strpbrk(mysql.space, "`'\" ;\\"));
      }
    }
  } else if (status != HL_ENOMEM) {
    claim_error(&error, HL_EDSN);
  }
  if (status == HL_EDSN && has_password(text)) CLAIM(!strstr(error.message, SECRET));
  hl_dsn_dispose(&dsn);
  free(text);
  return 0;
}
