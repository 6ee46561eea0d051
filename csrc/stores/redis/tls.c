/*
 * tls.c - rediss://. OpenSSL encrypts and decrypts in memory only; the socket is ours, as
 * without TLS. So nothing blocks, no signal is raised, and a child that is born with a
 * connection cannot send a byte on it by freeing it. hiredis' own TLS would do neither, and does
 * not check the name in a certificate.
 */
#include "redis_store.h"

#ifdef HL__REDIS_TLS

#include <errno.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

struct hl__redis_tls {
  SSL *ssl;
  BIO *in, *out;      /* of ssl: received bytes, bytes to be sent */
  char pending[4096]; /* taken from `out`, of which so much is sent */
  size_t size, sent;
};

/* Makes an error of OpenSSL's last message; empties the thread's queue. */
static int tls_error(const char *what, hl_error *error) {
  char text[200] = "no reason was given";
  unsigned long code = ERR_peek_last_error();
  if (code) ERR_error_string_n(code, text, sizeof text);
  ERR_clear_error();
  return hl__error(error, HL_ECONNECTION, "TLS: %s: %s", what, text);
}

/* ---------------------------------------------------------------- settings */

static int files_load(SSL_CTX *context, const hl__redis_store *store, hl_error *error) {
  ERR_clear_error();
  if (store->tls_ca ? SSL_CTX_load_verify_locations(context, store->tls_ca, NULL) != 1
                    : SSL_CTX_set_default_verify_paths(context) != 1)
    return tls_error("cannot read the certificates that are trusted (tls_ca)", error);
  if (store->tls_cert && SSL_CTX_use_certificate_chain_file(context, store->tls_cert) != 1)
    return tls_error("cannot read our certificate (tls_cert)", error);
  const char *key = store->tls_key ? store->tls_key : store->tls_cert;
  if (key && SSL_CTX_use_PrivateKey_file(context, key, SSL_FILETYPE_PEM) != 1)
    return tls_error("cannot read our key (tls_key)", error);
  return HL_OK;
}

int hl__redis_tls_open(hl__redis_store *store, hl_error *error) {
  if (store->tls == HL__REDIS_TLS_OFF) return HL_OK;
  SSL_CTX *context = SSL_CTX_new(TLS_client_method());
  if (!context) return hl__error_memory(error);
  int status = files_load(context, store, error);
  (void)SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  (void)SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_verify(
      context, store->tls == HL__REDIS_TLS_REQUIRED ? SSL_VERIFY_NONE : SSL_VERIFY_PEER, NULL);
  if (status) {
    SSL_CTX_free(context);
    if (error) error->retryable = false;
  } else {
    store->tls_context = context;
  }
  return status;
}

void hl__redis_tls_close(hl__redis_store *store) {
  SSL_CTX_free(store->tls_context);
  store->tls_context = NULL;
}

/* OpenSSL's memory for a thread would be freed after the thread's end, and by then exit() may be
   taking the library apart. */
void hl__redis_tls_init(void) { (void)OPENSSL_init_ssl(0, NULL); }

void hl__redis_tls_thread_end(void) { OPENSSL_thread_stop(); }

/* ------------------------------------------------------------- a connection */

void hl__redis_tls_end(hl__redis_session *session) {
  if (session->tls) SSL_free(session->tls->ssl); /* and both of its BIOs */
  free(session->tls);
  session->tls = NULL;
}

static hl__redis_tls *tls_new(hl__redis_store *store) {
  hl__redis_tls *self = calloc(1, sizeof *self);
  if (!self) return NULL;
  self->ssl = SSL_new(store->tls_context);
  self->in = BIO_new(BIO_s_mem());
  self->out = BIO_new(BIO_s_mem());
  if (self->ssl && self->in && self->out) {
    SSL_set_bio(self->ssl, self->in, self->out);
    return self;
  }
  SSL_free(self->ssl);
  (void)BIO_free(self->in);
  (void)BIO_free(self->out);
  free(self);
  return NULL;
}

/* Sets the name that the certificate must have: RFC 6125, by OpenSSL. */
static bool name_set(const hl__redis_session *session, SSL *ssl) {
  const hl__redis_store *store = session->store;
  const char *host = session->address.host;
  X509_VERIFY_PARAM *verified = SSL_get0_param(ssl);
  ASN1_OCTET_STRING *address = a2i_IPADDRESS(host);
  ASN1_OCTET_STRING_free(address);
  ERR_clear_error();
  bool named = address || SSL_set_tlsext_host_name(ssl, host) == 1;
  if (store->tls != HL__REDIS_TLS_VERIFY_IDENTITY) return named;
  return named && (address ? X509_VERIFY_PARAM_set1_ip_asc(verified, host)
                           : X509_VERIFY_PARAM_set1_host(verified, host, 0)) == 1;
}

/* Sends the encrypted bytes, without blocking. *done: all is sent. */
static int flush(const hl__redis_session *session, bool *done, hl_error *error) {
  hl__redis_tls *self = session->tls;
  *done = false;
  for (;;) {
    if (self->sent == self->size) {
      int n = BIO_read(self->out, self->pending, sizeof self->pending);
      self->size = n > 0 ? (size_t)n : 0;
      self->sent = 0;
      if (n <= 0) break;
    }
    ssize_t n = send(session->fd, self->pending + self->sent, self->size - self->sent,
                     MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return HL_OK;
    if (n < 0) return hl__error_errno(error, HL_ECONNECTION, "the connection has ended");
    self->sent += (size_t)n;
  }
  *done = true;
  return HL_OK;
}

/* Takes the received bytes, without blocking. False: the connection has ended. */
static bool receive(const hl__redis_session *session) {
  char bytes[16384];
  ssize_t n;
  do {
    n = recv(session->fd, bytes, sizeof bytes, MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
  return n > 0 && BIO_write(session->tls->in, bytes, (int)n) == n;
}

static int handshake_error(const SSL *ssl, hl_error *error) {
  long verified = SSL_get_verify_result(ssl);
  if (verified == X509_V_OK) return tls_error("the handshake has failed", error);
  ERR_clear_error();
  int status = hl__error(error, HL_ECONNECTION, "TLS: the server's certificate: %s",
                         X509_verify_cert_error_string(verified));
  if (error) error->retryable = false;
  return status;
}

int hl__redis_tls_start(hl__redis_session *session, int64_t deadline, hl_error *error) {
  hl__redis_store *store = session->store;
  if (store->tls == HL__REDIS_TLS_OFF) return HL_OK;
  session->tls = tls_new(store);
  if (!session->tls || !name_set(session, session->tls->ssl)) return hl__error_memory(error);
  SSL *ssl = session->tls->ssl;
  for (;;) {
    bool sent;
    ERR_clear_error();
    int done = SSL_connect(ssl);
    bool waits = done != 1 && SSL_get_error(ssl, done) == SSL_ERROR_WANT_READ;
    int status = waits || done == 1 ? HL_OK : handshake_error(ssl, error);
    hl_error unsent; /* of an alert, too, which tells the server why */
    int flushed = flush(session, &sent, status ? &unsent : error);
    if (status || flushed) return status ? status : flushed;
    if (done == 1) return HL_OK; /* the rest goes with the first command */
    status = hl__socket_await(store->config, session->fd, (short)(POLLIN | (sent ? 0 : POLLOUT)),
                              NULL, deadline);
    if (status) return hl__error(error, HL_ECONNECTION, "TLS: the handshake has no end in time");
    if (!receive(session))
      return hl__error(error, HL_ECONNECTION,
                       "TLS: the server has closed the connection; does it "
                       "speak TLS at that port?");
  }
}

int hl__redis_tls_write(hl__redis_session *session, bool *done, hl_error *error) {
  *done = false;
  while (session->out_sent < session->out_size) {
    size_t left = session->out_size - session->out_sent;
    ERR_clear_error();
    int n = SSL_write(session->tls->ssl, session->out + session->out_sent,
                      left > INT32_MAX ? INT32_MAX : (int)left);
    if (n <= 0) return tls_error("cannot write", error);
    session->out_sent += (size_t)n;
  }
  return flush(session, done, error);
}

bool hl__redis_tls_read(hl__redis_session *session) {
  SSL *ssl = session->tls->ssl;
  char plain[16384];
  bool open = receive(session), sent;
  for (;;) {
    ERR_clear_error();
    int n = SSL_read(ssl, plain, sizeof plain);
    if (n > 0) {
      if (redisReaderFeed(session->context->reader, plain, (size_t)n) != REDIS_OK) return false;
      continue;
    }
    if (SSL_get_error(ssl, n) != SSL_ERROR_WANT_READ) open = false;
    ERR_clear_error();
    break;
  }
  /* The bytes read may want an answer, of a key that changes. */
  return flush(session, &sent, NULL) == HL_OK && open;
}

#else

int hl__redis_tls_open(hl__redis_store *store, hl_error *error) {
  if (store->tls == HL__REDIS_TLS_OFF) return HL_OK;
  return hl__error(error, HL_EUNSUPPORTED,
                   "this build of hierlock has no TLS for Redis: build it where OpenSSL's headers "
                   "are (libssl-dev), or write redis://, on a network that is yours");
}

void hl__redis_tls_close(hl__redis_store *store) { (void)store; }

void hl__redis_tls_init(void) {}

void hl__redis_tls_thread_end(void) {}

void hl__redis_tls_end(hl__redis_session *session) { (void)session; }

int hl__redis_tls_start(hl__redis_session *session, int64_t deadline, hl_error *error) {
  (void)session, (void)deadline, (void)error;
  return HL_OK;
}

int hl__redis_tls_write(hl__redis_session *session, bool *done, hl_error *error) {
  (void)session, (void)done;
  return hl__error(error, HL_ECONNECTION, "there is no TLS");
}

bool hl__redis_tls_read(hl__redis_session *session) {
  (void)session;
  return false;
}

#endif
