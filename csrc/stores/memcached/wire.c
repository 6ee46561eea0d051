/*
 * wire.c - sending, answers, errors: the text protocol of Memcached. Blocks only in poll(), with
 * an end.
 */
#include "memcached_store.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LINE_MAX_SIZE 2048
/* The largest item that we accept, whatever the server says. */
#define ITEM_MAX ((size_t)64 << 20)

/* ------------------------------------------------------------------ buffers */

static bool reserve(hl__memcached_buffer *buffer, size_t size) {
  if (buffer->failed) return false;
  if (buffer->capacity - buffer->used >= size) return true;
  size_t capacity = buffer->capacity ? buffer->capacity : 1024;
  while (capacity - buffer->used < size) capacity *= 2;
  char *data = realloc(buffer->data, capacity);
  buffer->failed = !data;
  if (!data) return false;
  buffer->data = data;
  buffer->capacity = capacity;
  return true;
}

void hl__memcached_add(hl__memcached_buffer *buffer, const void *data, size_t size) {
  if (!size || !reserve(buffer, size)) return;
  memcpy(buffer->data + buffer->used, data, size);
  buffer->used += size;
}

void hl__memcached_addf(hl__memcached_buffer *buffer, const char *format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  int size = vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (size < 0 || (size_t)size >= sizeof text)
    buffer->failed = true; /* no command is as long */
  else
    hl__memcached_add(buffer, text, (size_t)size);
}

void hl__memcached_put(hl__memcached_link *link, const char *how, const char *key, int64_t expiry,
                       const uint64_t *cas, const hl__memcached_buffer *value) {
  if (value->failed) link->out.failed = true;
  hl__memcached_addf(&link->out, "%s %s 0 %lld %zu", how, key, (long long)expiry, value->used);
  if (cas) hl__memcached_addf(&link->out, " %llu", (unsigned long long)*cas);
  hl__memcached_addf(&link->out, "\r\n");
  hl__memcached_add(&link->out, value->data, value->used);
  hl__memcached_add(&link->out, "\r\n", 2);
}

/* --------------------------------------------------------------- connections */

void hl__memcached_end(hl__memcached_link *link) {
  if (link->fd >= 0) {
    hl__fork_unwatch(link->fd, link->ticket);
    (void)close(link->fd);
  }
  link->fd = -1;
  link->ended = true;
}

void hl__memcached_link_free(hl__memcached_link *link) {
  hl__memcached_end(link);
  free(link->in.data);
  free(link->out.data);
}

int hl__memcached_broken(hl__memcached_link *link, hl_error *error) {
  int failure = errno;
  hl__memcached_end(link);
  errno = failure;
  return hl__error_errno(error, HL_ECONNECTION, "memcached at %s:%u", link->server->host,
                         link->server->port);
}

int hl__memcached_ended(hl__memcached_link *link, const char *why, hl_error *error) {
  hl__memcached_end(link);
  return hl__error(error, HL_ECONNECTION, "memcached at %s:%u: %s", link->server->host,
                   link->server->port, why);
}

int hl__memcached_await(const hl__memcached_session *session, int fd, short events,
                        int64_t deadline) {
  return hl__socket_await(session->store->config, fd, events,
                          session->interruptible ? &session->wakeup : NULL, deadline);
}

/* ------------------------------------------------------------------- sending */

int hl__memcached_flush(hl__memcached_link *link, hl_error *error) {
  hl__memcached_buffer *out = &link->out;
  if (out->failed) {
    hl__memcached_end(link);
    return hl__error_memory(error);
  }
  if (link->fd < 0) return hl__error(error, HL_ECONNECTION, "the connection has ended");
  while (link->out_sent < out->used) {
    ssize_t n = send(link->fd, out->data + link->out_sent, out->used - link->out_sent,
                     MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      link->out_sent += (size_t)n;
    } else if (errno == EAGAIN) {
      return HL_OK;
    } else if (errno != EINTR) {
      return hl__memcached_broken(link, error);
    }
  }
  out->used = link->out_sent = 0;
  return HL_OK;
}

/* ------------------------------------------------------------------- answers */

/* Reads the bytes that have come. *n: how many. HL_OK, HL_ECONNECTION, HL_ENOMEM. */
static int read_some(hl__memcached_link *link, size_t *n, hl_error *error) {
  hl__memcached_buffer *in = &link->in;
  *n = 0;
  if (link->in_read == in->used) link->in_read = in->used = 0;
  if (!reserve(in, 4096)) {
    hl__memcached_end(link);
    return hl__error_memory(error);
  }
  for (;;) {
    ssize_t got = recv(link->fd, in->data + in->used, in->capacity - in->used, MSG_DONTWAIT);
    if (got > 0) {
      in->used += (size_t)got;
      *n = (size_t)got;
      return HL_OK;
    }
    if (got == 0) return hl__memcached_ended(link, "the server has closed it", error);
    if (errno == EAGAIN) return HL_OK;
    if (errno != EINTR) return hl__memcached_broken(link, error);
  }
}

/* Until more has come. */
static int more(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                hl_error *error) {
  for (;;) {
    size_t n;
    int status = hl__memcached_flush(link, error);
    if (status == HL_OK) status = read_some(link, &n, error);
    if (status || n > 0) return status;
    short events = link->out.used > 0 ? POLLIN | POLLOUT : POLLIN;
    status = hl__memcached_await(session, link->fd, events, deadline);
    if (status == HL_TIMEOUT)
      return hl__error(error, HL_TIMEOUT, "memcached at %s:%u does not answer", link->server->host,
                       link->server->port);
    if (status == HL_CANCELLED) return hl__memcached_ended(link, "it was interrupted", error);
    if (status) return hl__memcached_broken(link, error);
  }
}

/* The next line, as it is. After HL_TIMEOUT nothing is lost. */
static int raw_line(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                    char **line, hl_error *error) {
  static char none[] = "";
  size_t searched = 0;
  *line = none;
  for (;;) {
    char *from = link->in.data + link->in_read;
    size_t size = link->in.used - link->in_read;
    char *end = size > searched ? memchr(from + searched, '\n', size - searched) : NULL;
    if (end) {
      if (end == from || end[-1] != '\r')
        return hl__memcached_ended(link, "the answer is none of Memcached's", error);
      end[-1] = '\0';
      *line = from;
      link->in_read += (size_t)(end + 1 - from);
      return HL_OK;
    }
    searched = size;
    if (size > LINE_MAX_SIZE)
      return hl__memcached_ended(link, "the answer is none of Memcached's", error);
    int status = more(session, link, deadline, error);
    if (status) return status;
  }
}

static bool begins(const char *text, const char *word) {
  return strncmp(text, word, strlen(word)) == 0;
}

/* Answers that no caller awaits come first. */
static int skip(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                hl_error *error) {
  while (link->outstanding > 0) {
    char *line;
    int status = raw_line(session, link, deadline, &line, error);
    if (status) return status;
    link->outstanding--;
    if (begins(line, "ERROR") || begins(line, "CLIENT_ERROR") || begins(line, "SERVER_ERROR")) {
      char said[128];
      (void)hl__escape(said, sizeof said, line, strlen(line));
      return hl__memcached_ended(link, said, error);
    }
  }
  return HL_OK;
}

int hl__memcached_line(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                       const char **line, hl_error *error) {
  char *found = NULL, said[256];
  *line = "";
  if (link->fd < 0) return hl__error(error, HL_ECONNECTION, "the connection has ended");
  int status = skip(session, link, deadline, error);
  if (status == HL_OK) status = raw_line(session, link, deadline, &found, error);
  if (status == HL_TIMEOUT) return hl__memcached_ended(link, "it does not answer", error);
  if (status) return status;
  *line = found;
  if (!begins(found, "ERROR") && !begins(found, "CLIENT_ERROR") && !begins(found, "SERVER_ERROR"))
    return HL_OK;
  (void)hl__escape(said, sizeof said, found, strlen(found));
  /* After those the server may take any bytes for a command. */
  if (!begins(found, "SERVER_ERROR")) hl__memcached_end(link);
  (void)hl__error(error, HL_ESTORE, "memcached at %s:%u says: %s%s", link->server->host,
                  link->server->port, said,
                  strstr(said, "too large") ? " (what is locked at once, or in one tree, does not "
                                              "fit into an item: memcached -I makes them larger)"
                                            : "");
  if (error) error->retryable = strstr(said, "out of memory") != NULL;
  return HL_ESTORE;
}

/* The bytes of an item, and what ends them. */
static int item_bytes(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                      hl__memcached_item *item, hl_error *error) {
  if (item->size > ITEM_MAX)
    return hl__memcached_ended(link, "the answer is none of Memcached's", error);
  while (link->in.used - link->in_read < item->size + 2) {
    int status = more(session, link, deadline, error);
    if (status == HL_TIMEOUT) return hl__memcached_ended(link, "it does not answer", error);
    if (status) return status;
  }
  const char *from = link->in.data + link->in_read;
  if (memcmp(from + item->size, "\r\n", 2) != 0)
    return hl__memcached_ended(link, "the answer is none of Memcached's", error);
  item->data = malloc(item->size + 1);
  if (!item->data) {
    hl__memcached_end(link);
    return hl__error_memory(error);
  }
  memcpy(item->data, from, item->size);
  item->data[item->size] = '\0';
  link->in_read += item->size + 2;
  item->found = true;
  return HL_OK;
}

static int item_end(hl__memcached_item *item, int status) {
  if (status == HL_OK) return HL_OK;
  free(item->data);
  *item = (hl__memcached_item){0};
  return status;
}

int hl__memcached_gets(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                       hl__memcached_item *item, hl_error *error) {
  const char *line;
  unsigned long long cas;
  *item = (hl__memcached_item){0};
  int status = hl__memcached_line(session, link, deadline, &line, error);
  if (status || strcmp(line, "END") == 0) return status;
  if (sscanf(line, "VALUE %*s %*u %zu %llu", &item->size, &cas) != 2)
    return hl__memcached_ended(link, "the answer is none of Memcached's", error);
  item->cas = cas;
  status = item_bytes(session, link, deadline, item, error);
  if (status == HL_OK) status = hl__memcached_line(session, link, deadline, &line, error);
  if (status == HL_OK && strcmp(line, "END") != 0)
    status = hl__memcached_ended(link, "the answer is none of Memcached's", error);
  return item_end(item, status);
}

int hl__memcached_meta(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                       hl__memcached_item *item, hl_error *error) {
  const char *line;
  long long left;
  *item = (hl__memcached_item){0};
  int status = hl__memcached_line(session, link, deadline, &line, error);
  if (status || begins(line, "EN")) return status;
  if (sscanf(line, "VA %zu t%lld", &item->size, &left) != 2)
    return hl__memcached_ended(link, "the answer is none of Memcached's", error);
  item->left = left;
  return item_end(item, item_bytes(session, link, deadline, item, error));
}

int hl__memcached_presence(hl__memcached_session *session, hl__memcached_link *link,
                           int64_t deadline, bool *present, hl_error *error) {
  const char *line;
  int status = hl__memcached_line(session, link, deadline, &line, error);
  if (status) return status;
  *present = !begins(line, "EN");
  if (!*present || begins(line, "HD") || begins(line, "OK")) return HL_OK;
  return hl__memcached_ended(link, "the answer is none of Memcached's", error);
}

int hl__memcached_settle(hl__memcached_session *session, int64_t deadline, hl_error *error) {
  for (unsigned i = 0; i < session->store->server_count; i++) {
    hl__memcached_link *link = &session->links[i];
    if (link->ended) return hl__error(error, HL_ECONNECTION, "the connection has ended");
    int status = skip(session, link, deadline, error);
    if (status) return status;
  }
  return HL_OK;
}

bool hl__memcached_stands(hl__memcached_session *session) {
  for (unsigned i = 0; i < session->store->server_count; i++) {
    hl__memcached_link *link = &session->links[i];
    size_t n = 0;
    if (link->ended) return false;
    if (link->fd < 0 || link->outstanding) continue;
    /* A server that speaks without being asked is closing. The rest of an answer that was not
       read to its end must not become the next one's. */
    if (link->in_read < link->in.used) return false;
    if (read_some(link, &n, NULL) != HL_OK || n > 0) return false;
  }
  return true;
}

int hl__memcached_sleep(const hl__memcached_session *session, int64_t until) {
  return hl__memcached_await(session, -1, 0, until);
}
