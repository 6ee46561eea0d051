/*
 * connect.c - from a DSN to a logged-in connection: parameters, option files, TLS. Knows no locks.
 * No message of it contains a password.
 */
#include "mysql_store.h"

#include <errmsg.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

#define CONNECT_TIMEOUT_MS 10000

/* ---------------------------------------------------------- parameters */

static const hl__dsn_word tls_words[] = {{"off", HL__TLS_OFF},
                                         {"preferred", HL__TLS_PREFERRED},
                                         {"required", HL__TLS_REQUIRED},
                                         {"verify-ca", HL__TLS_VERIFY_CA},
                                         {"verify-identity", HL__TLS_VERIFY_IDENTITY},
                                         /* as Go's driver says it */
                                         {"false", HL__TLS_OFF},
                                         {"skip-verify", HL__TLS_REQUIRED},
                                         {"true", HL__TLS_VERIFY_IDENTITY},
                                         {.word = NULL}};

#define AT(field) .offset = offsetof(hl__mysql_store, field)
static const hl__dsn_known params[] = {
    {"tls", HL__DSN_WORD, AT(tls), .words = tls_words},
    {"tls_ca", HL__DSN_TEXT, AT(tls_ca)},
    {"tls_cert", HL__DSN_TEXT, AT(tls_cert)},
    {"tls_key", HL__DSN_TEXT, AT(tls_key)},
    {"table", HL__DSN_TEXT, AT(space)},
    {"connect_timeout", HL__DSN_SECONDS, AT(connect_timeout), .most = HL__DSN_DAY},
    {"my_cnf_group", HL__DSN_TEXT, AT(my_cnf_group)},
    {"socket", .kind = HL__DSN_OTHER}, /* it is dsn->socket */
    /* Go's driver has these; they have no meaning here. */
    {"parseTime", .kind = HL__DSN_OTHER},
    {"multiStatements", .kind = HL__DSN_OTHER},
    {"loc", .kind = HL__DSN_OTHER},
    {"charset", .kind = HL__DSN_OTHER},
    {"collation", .kind = HL__DSN_OTHER},
    {"interpolateParams", .kind = HL__DSN_OTHER},
    {.name = NULL}};
#undef AT

static int table_check(const char *name, hl_error *error) {
  static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_$";
  size_t n = strlen(name);
  if (n >= 1 && n <= HL__MYSQL_NAME_MAX && strspn(name, allowed) == n) return HL_OK;
  return hl__error(error, HL_EDSN,
                   "the parameter table in the DSN must be a plain name of "
                   "1 to %d letters, digits, _ or $",
                   HL__MYSQL_NAME_MAX);
}

int hl__mysql_params(hl__mysql_store *store, hl_error *error) {
  const hl_dsn *dsn = store->config->dsn;
  store->tls = HL__TLS_PREFERRED;
  store->connect_timeout = CONNECT_TIMEOUT_MS;
  store->space = "hier_lock_buckets";
  int status = hl__dsn_store(dsn, params, store, error);
  if (status == HL_OK) status = table_check(store->space, error);
  if (status) return status;
  if (store->tls >= HL__TLS_VERIFY_CA && !store->tls_ca)
    return hl__error(error, HL_EDSN,
                     "tls=verify-ca and verify-identity need the parameter tls_ca in the DSN");
  if (!dsn->database && !store->my_cnf_group)
    return hl__error(error, HL_EDSN, "the DSN names no database");
  return HL_OK;
}

/* ----------------------------------------------------------------- TLS */

#ifdef HL_CONNECTOR_C
/* Connector/C encrypts only when it is told to. It checks the chain when there is a CA. On a
   server without TLS it silently goes on in plain text, unless the certificate is to be
   verified. Told to encrypt, it believes that it does: for caching_sha2_password it then sends
   the password itself. Hence greeting_check and tls_check. */
static void tls_options(const hl__mysql_store *store, MYSQL *mysql) {
  my_bool yes = 1;
  if (store->tls == HL__TLS_OFF) return;
  (void)mysql_optionsv(mysql, MYSQL_OPT_SSL_ENFORCE, &yes);
  if (store->tls == HL__TLS_VERIFY_IDENTITY)
    (void)mysql_optionsv(mysql, MYSQL_OPT_SSL_VERIFY_SERVER_CERT, &yes);
}

/* The server offers no TLS, and none is required. */
static void tls_give_up(MYSQL *mysql) {
  static const enum mysql_option files[] = {MYSQL_OPT_SSL_KEY, MYSQL_OPT_SSL_CERT, MYSQL_OPT_SSL_CA,
                                            MYSQL_OPT_SSL_CAPATH, MYSQL_OPT_SSL_CIPHER};
  my_bool no = 0;
  /* Each of these would switch it on again. */
  for (size_t i = 0; i < sizeof files / sizeof *files; i++)
    (void)mysql_optionsv(mysql, files[i], NULL);
  (void)mysql_optionsv(mysql, MYSQL_OPT_SSL_VERIFY_SERVER_CERT, &no);
  (void)mysql_optionsv(mysql, MYSQL_OPT_SSL_ENFORCE, &no);
}
#else
static void tls_options(const hl__mysql_store *store, MYSQL *mysql) {
  static const unsigned modes[] = {
      [HL__TLS_OFF] = SSL_MODE_DISABLED,
      [HL__TLS_PREFERRED] = SSL_MODE_PREFERRED,
      [HL__TLS_REQUIRED] = SSL_MODE_REQUIRED,
      [HL__TLS_VERIFY_CA] = SSL_MODE_VERIFY_CA,
      [HL__TLS_VERIFY_IDENTITY] = SSL_MODE_VERIFY_IDENTITY,
  };
  (void)mysql_options(mysql, MYSQL_OPT_SSL_MODE, &modes[store->tls]);
  /* For caching_sha2_password without TLS: Connector/C asks by itself. */
  bool yes = true;
  if (store->tls < HL__TLS_VERIFY_CA)
    (void)mysql_options(mysql, MYSQL_OPT_GET_SERVER_PUBLIC_KEY, &yes);
}
#endif

static int tls_error(hl_error *error) {
  return hl__error(error, HL_ECONNECTION, "the server offers no TLS, which the DSN requires");
}

static int tls_check(const hl__mysql_session *session, hl_error *error) {
  if (session->tls || session->store->tls <= HL__TLS_PREFERRED) return HL_OK;
  return tls_error(error);
}

/* ---------------------------------------------------------- connecting */

/* A cut network is noticed by the kernel, too, and not only by our clocks. */
static void keep_alive(int fd, int64_t hold_timeout) {
  int yes = 1;
  int seconds = (int)(hold_timeout / 3000);
  int probes = 3;
  unsigned milliseconds = hold_timeout < INT32_MAX ? (unsigned)hold_timeout : INT32_MAX;
  if (seconds < 1) seconds = 1;
  if (seconds > 3600) seconds = 3600;
  (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof milliseconds);
}

static int socket_of(MYSQL *mysql) {
#ifdef HL_CONNECTOR_C
  return (int)mysql_get_socket(mysql);
#else
  return (int)mysql->net.fd;
#endif
}

/* The session's socket is closed in each child that is born from now on. While
   connecting it may still be replaced: a host can have several addresses. */
static int socket_watch(hl__mysql_session *session, int fd) {
  if (session->fd == fd) return HL_OK;
  if (session->fd >= 0) hl__fork_unwatch(session->fd, session->ticket);
  session->ticket = hl__fork_watch(fd);
  session->fd = session->ticket ? fd : -1;
  return session->ticket ? HL_OK : HL_ENOMEM;
}

/* No child is born while a thread is inside of mysql_real_connect. The child would get a socket
   that no thread of it closes. The child would also get mutexes of the whole process, locked for
   ever: Connector/C holds one while it sets TLS up, OpenSSL has its own. But fork() must not wait
   for a server that hangs, so births are allowed while the library waits for the network. Oracle's
   library does not tell us when; there fork() waits for connect_timeout at most.

   A program that is started (posix_spawn, system) keeps each descriptor that is not
   close-on-exec, and no handler of ours runs. The libraries do not make their sockets
   close-on-exec. We do so the first time that Connector/C waits, a few microseconds after it has
   made the socket; with Oracle's only after logging in. */
#ifdef HL__BOUNDS_WAITS
/* The library does not ask us while a TLS handshake waits in a read. The read ends after this
   time, and then the library asks; ms. */
#define BLOCKED_MS 20

static _Thread_local hl__mysql_session *waiting;

/* 1: ready, or broken, which a read will tell. 0: not before `end`. */
static int wait_until(hl__mysql_session *session, int fd, short events, int64_t end) {
  struct pollfd p = {.fd = fd, .events = events};
  atomic_store(&session->in_hand, false);
  int n = hl__poll(session->store->config, &p, 1, end);
  atomic_store(&session->in_hand, true);
  if (n == 0) errno = ETIMEDOUT;
  return n > 0 ? 1 : n;
}

/* The socket must not block, or TLS would wait inside of OpenSSL. The library makes the socket
   blocking again once it is connected; so while we bound its waits the socket has time limits,
   too. */
static void limits_set(int fd, bool on) {
  struct timeval limit = {.tv_usec = on ? BLOCKED_MS * 1000 : 0};
  (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

typedef enum greeting { INCOMPLETE, WITH_TLS, WITHOUT_TLS, AN_ERROR, NONSENSE } greeting;

/* The server's first packet: size (3 bytes), number, protocol, version with its NUL, connection
   (4), challenge (8), filler, flags (2). Or an error: 0xFF, its number (2). With 0xFFFF an error
   would be a report of progress, at which Connector/C crashes here. */
static greeting greeting_read(const unsigned char *data, size_t size) {
  if (size < 5) return INCOMPLETE;
  size_t said = 4 + (data[0] | (size_t)data[1] << 8 | (size_t)data[2] << 16);
  if (data[4] == 0xFF && said >= 7) {
    if (size < 7) return INCOMPLETE;
    return (data[5] & data[6]) == 0xFF ? NONSENSE : AN_ERROR;
  }
  if (data[4] != 10) return NONSENSE;
  const unsigned char *end = memchr(data + 5, 0, size - 5);
  size_t flags = end ? (size_t)(end - data) + 1 + 4 + 8 + 1 : 0;
  if ((!end || flags + 2 > size) && said > size) return INCOMPLETE;
  if (!end || flags + 2 > said) return NONSENSE;
  return data[flags + 1] & (CLIENT_SSL >> 8) ? WITH_TLS : WITHOUT_TLS;
}

/* A server may ask for the password in clear text (mysql_clear_password, dialog), and the
   library gives it, on a plain line, too. We refuse that on a network connection without TLS. A
   user that names other plugins in an option file (restricted-auth) means it. */
static void clear_text_refuse(MYSQL *mysql) {
#ifdef CR_PLUGIN_NOT_ALLOWED
  const char *named = NULL;
  if (mysql_get_optionv(mysql, MARIADB_OPT_RESTRICTED_AUTH, &named) != 0 || !named)
    (void)mysql_optionsv(mysql, MARIADB_OPT_RESTRICTED_AUTH,
                         "mysql_native_password,caching_sha2_password,"
                         "sha256_password,client_ed25519,parsec,"
                         "auth_gssapi_client");
#else
  (void)mysql;
#endif
}

/* Waits for the greeting, and looks whether it offers TLS, before the library reads
   and answers it. 1: go on. */
static int greeting_check(hl__mysql_session *session, int fd) {
  unsigned char data[512];
  greeting found = INCOMPLETE;
  int domain = AF_UNSPEC;
  socklen_t size = sizeof domain;
  if (session->greeted) return 1;
  struct sockaddr_storage peer;
  socklen_t peer_size = sizeof peer;
  (void)getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size);
  if (domain == AF_UNIX) return 1;
  /* Reading would take the error away from the library. */
  if (getpeername(fd, (struct sockaddr *)&peer, &peer_size) != 0) return 1;
  while (found == INCOMPLETE) {
    int n = wait_until(session, fd, POLLIN, session->patience);
    if (n < 1) return n;
    ssize_t read = recv(fd, data, sizeof data, MSG_PEEK | MSG_DONTWAIT);
    if (read < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (read <= 0) return 1; /* the connection has ended: the library will see */
    found = greeting_read(data, (size_t)read);
    if (found == INCOMPLETE && (size_t)read == sizeof data) found = NONSENSE;
    if (found == NONSENSE)
      (void)hl__escape(session->stranger, sizeof session->stranger, (const char *)data,
                       (size_t)(read < 16 ? read : 16));
    if (found != INCOMPLETE) break;
    const struct timespec part = {.tv_nsec = 2000000};
    (void)nanosleep(&part, NULL);
    if (hl__left_ms(session->patience) == 0) return 0;
  }
  session->greeted = true;
  session->untrusted = found == WITHOUT_TLS && session->store->tls > HL__TLS_PREFERRED;
  if (found == NONSENSE || session->untrusted) return -1;
  if (session->store->tls == HL__TLS_OFF || found == WITHOUT_TLS) clear_text_refuse(session->mysql);
  if (session->store->tls == HL__TLS_PREFERRED && found == WITHOUT_TLS) tls_give_up(session->mysql);
  return 1;
}

/* The library's own limits are left out: they are for each wait, and for TLS the library takes
   seconds for milliseconds. */
static int wait_io(my_socket fd, my_bool is_read, int timeout) {
  hl__mysql_session *session = waiting;
  (void)timeout;
  limits_set(fd, true);
  return wait_until(session, fd, is_read ? POLLIN : POLLOUT, session->patience);
}

/* A session without bounds waits until the server ends its wait, or the keeper ends the
   connection. A write never waits in fact, and the caller may hold a mutex then. */
static int wait_plain(my_socket fd, my_bool is_read, int timeout) {
  struct pollfd p = {.fd = fd, .events = is_read ? POLLIN : POLLOUT};
  int n;
  (void)timeout;
  if (is_read && waiting) return wait_until(waiting, fd, POLLIN, HL_FOREVER);
  do n = poll(&p, 1, -1);
  while (n < 0 && errno == EINTR);
  return n;
}

static int wait_connecting(my_socket fd, my_bool is_read, int timeout)
    HL__REQUIRES_SHARED(hl__births) {
  /* Each time: when one address does not answer, the library tries the next, and its socket may
     get the same number. */
  (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
  if (socket_watch(waiting, fd)) return -1;
  hl__fork_allow();
  int n = wait_io(fd, is_read, timeout);
  if (n > 0) n = greeting_check(waiting, fd);
  hl__fork_forbid();
  return n;
}

static void wait_set(hl__mysql_session *session, int (*callback)(my_socket, my_bool, int)) {
  waiting = callback != wait_plain ? session : NULL;
  (void)mysql_optionsv(session->mysql, MARIADB_OPT_IO_WAIT, callback);
}

static void wait_io_set(hl__mysql_session *session, bool on) {
  wait_set(session, on ? wait_connecting : wait_plain);
  if (!on && session->fd >= 0) limits_set(session->fd, false);
}

void hl__mysql_waits_bound(hl__mysql_session *session, bool on) {
  wait_set(session, on ? wait_io : wait_plain);
  limits_set(session->fd, on);
}

void hl__mysql_statement_begin(hl__mysql_session *session) { waiting = session; }

void hl__mysql_statement_end(hl__mysql_session *session) {
  (void)session;
  waiting = NULL;
}
#else
/* This library does not ask us when it waits. At least exit() does not wait for the thread,
   which does nothing more afterwards. */
void hl__mysql_statement_begin(hl__mysql_session *session) {
  hl__server_wait_begin(session->store->config);
}

void hl__mysql_statement_end(hl__mysql_session *session) {
  hl__server_wait_end(session->store->config);
}

static void wait_io_set(hl__mysql_session *session, bool on) { (void)session, (void)on; }

void hl__mysql_waits_bound(hl__mysql_session *session, bool on) { (void)session, (void)on; }
#endif

static void options_set(hl__mysql_store *store, MYSQL *mysql, int64_t deadline) {
  int64_t left = hl__left_ms(deadline);
  unsigned seconds = (unsigned)((left + 999) / 1000);
  if (seconds < 1) seconds = 1;
  (void)mysql_options(mysql, MYSQL_OPT_CONNECT_TIMEOUT, &seconds);
  (void)mysql_options(mysql, MYSQL_SET_CHARSET_NAME, "utf8mb4");
  /* A server could otherwise ask for any file that the program may read. */
  const unsigned no = 0;
  (void)mysql_options(mysql, MYSQL_OPT_LOCAL_INFILE, &no);
  (void)mysql_options4(mysql, MYSQL_OPT_CONNECT_ATTR_ADD, "program_name",
                       store->config->application);
  if (store->my_cnf_group)
    (void)mysql_options(mysql, MYSQL_READ_DEFAULT_GROUP, store->my_cnf_group);
  const hl_dsn *dsn = store->config->dsn;
  if (!dsn->socket && dsn->host) {
    /* "localhost" is a host like any other, not a word for a socket. */
    unsigned tcp = MYSQL_PROTOCOL_TCP;
    (void)mysql_options(mysql, MYSQL_OPT_PROTOCOL, &tcp);
  }
  if (!dsn->socket) {
    (void)mysql_options(mysql, MYSQL_OPT_SSL_CA, store->tls_ca);
    (void)mysql_options(mysql, MYSQL_OPT_SSL_CERT, store->tls_cert);
    (void)mysql_options(mysql, MYSQL_OPT_SSL_KEY, store->tls_key);
    tls_options(store, mysql);
  }
}

/* Connects the session, whose options are set. */
static int log_in(hl__mysql_session *session, hl_error *error) {
  const hl__mysql_store *store = session->store;
  const hl_dsn *dsn = store->config->dsn;
  int status = HL_OK;
  const char *host = dsn->socket ? NULL : dsn->host;
  if (!host && !dsn->socket && !store->my_cnf_group) host = "127.0.0.1";

  session->tls = true; /* perhaps: see hl__sigpipe_begin */
  hl__sigpipe guard = hl__sigpipe_begin(session);
  hl__fork_forbid();
  wait_io_set(session, true);
  if (!mysql_real_connect(session->mysql, host, dsn->user, dsn->password, dsn->database,
                          dsn->socket ? 0 : dsn->port, dsn->socket, CLIENT_MULTI_STATEMENTS)) {
    status = hl__mysql_error(session, NULL, "connect", error);
    if (session->untrusted) status = tls_error(error);
    if (*session->stranger)
      status = hl__error(error, HL_ECONNECTION,
                         "what answers there does not greet as MySQL or "
                         "MariaDB does: it begins with \"%s\"",
                         session->stranger);
    /* The library has closed the socket: its number may be another file's. */
    if (session->fd >= 0) hl__fork_unwatch(session->fd, session->ticket);
    session->fd = -1;
  } else if (socket_watch(session, socket_of(session->mysql))) {
    status = hl__error_memory(error);
  } else {
    /* A program that this one starts would keep the connection, and so the locks of a process
       that has died: no atfork handler runs for it. */
    (void)fcntl(session->fd, F_SETFD, FD_CLOEXEC);
  }
  wait_io_set(session, false);
  hl__fork_allow();
  hl__sigpipe_end(guard, true); /* perhaps, in one of several attempts */
  return status;
}

/* *strange: what answers does not greet as a server does. */
static int connect_once(hl__mysql_store *store, int64_t patience, hl__mysql_session **result,
                        bool *strange, hl_error *error) {
  const hl_dsn *dsn = store->config->dsn;
  int status = HL_OK;
  *result = NULL;
  hl__mysql_session *session = calloc(1, sizeof *session);
  if (!session) return hl__error_memory(error);
  session->base.store = &store->base;
  session->store = store;
  session->fd = -1;
  session->patience = patience;
  atomic_init(&session->interrupted, false);
  atomic_init(&session->in_hand, false);
  session->mysql = mysql_init(NULL);
  if (!session->mysql) {
    status = hl__error_memory(error);
    goto out;
  }
  options_set(store, session->mysql, session->patience);

  status = log_in(session, error);
  if (status) goto out;
  session->tls = mysql_get_ssl_cipher(session->mysql) != NULL;
  session->dialect =
      strstr(mysql_get_server_info(session->mysql), "MariaDB") ? HL_MARIADB : HL_MYSQL;
  if (!dsn->socket) {
    keep_alive(session->fd, store->config->hold_timeout);
    status = tls_check(session, error);
  }
out:
  *strange = *session->stranger != '\0';
  if (status)
    hl__mysql_disconnect(session);
  else
    *result = session;
  return status;
}

/* MySQL's thread that executes a KILL closes the socket of the killed connection, while the thread
   of that connection may be about to write to it. The socket of the next client then has the same
   number, and the client reads another one's answer before its greeting. It has sent nothing yet,
   so it connects once more. */
int hl__mysql_connect(hl__mysql_store *store, int64_t deadline, hl__mysql_session **result,
                      hl_error *error) {
  bool strange = false;
  int64_t patience = hl__within_ms(store->connect_timeout, deadline);
  int status = connect_once(store, patience, result, &strange, error);
  if (strange && hl__left_ms(patience) > 0)
    status = connect_once(store, patience, result, &strange, error);
  return status;
}

void hl__mysql_disconnect(hl__mysql_session *session) {
  if (!session) return;
  if (session->fd >= 0) hl__fork_unwatch(session->fd, session->ticket);
  if (session->mysql) {
    hl__sigpipe guard = hl__sigpipe_begin(session);
    mysql_close(session->mysql);
    hl__sigpipe_end(guard, true); /* perhaps: the library does not say */
  }
  /* Without their connection, statements are only memory. */
  for (size_t i = 0; i < HL__SHAPES_MAX; i++)
    if (session->shapes[i].statement) (void)mysql_stmt_close(session->shapes[i].statement);
  free(session->tag);
  free(session);
}
