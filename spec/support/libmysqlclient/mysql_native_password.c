/*
 * mysql_native_password.c - what MariaDB asks of a user with a password, as a
 * plugin of libmysqlclient. Up to 8.4 the library has it built in; 9 has it no
 * more, and cannot log in to most MariaDB servers. With this plugin, 9 stands in
 * for its elders in the specs.
 *
 * The server sends a nonce; the answer is
 * SHA1(password) XOR SHA1(nonce . SHA1(SHA1(password))), or nothing when there is
 * no password.
 */
#include <mysql.h>

#include <client_plugin.h>
#include <openssl/sha.h>
#include <string.h>

#define NONCE 20

static int authenticate(MYSQL_PLUGIN_VIO *vio, MYSQL *mysql) {
  unsigned char *packet, text[NONCE + SHA_DIGEST_LENGTH];
  unsigned char once[SHA_DIGEST_LENGTH], answer[SHA_DIGEST_LENGTH];
  if (vio->read_packet(vio, &packet) < NONCE) return CR_ERROR;
  size_t size = mysql->passwd ? strlen(mysql->passwd) : 0;
  if (size > 0) {
    SHA1((const unsigned char *)mysql->passwd, size, once);
    memcpy(text, packet, NONCE);
    SHA1(once, sizeof once, text + NONCE);
    SHA1(text, sizeof text, answer);
    for (size_t i = 0; i < sizeof answer; i++) answer[i] ^= once[i];
  }
  return vio->write_packet(vio, answer, size ? (int)sizeof answer : 0) ? CR_ERROR : CR_OK;
}

__attribute__((visibility("default"))) mysql_declare_client_plugin(AUTHENTICATION).name =
    "mysql_native_password",
                                       .author = "hierlock", .desc = "for the specs",
                                       .version = {1, 0, 0}, .license = "MIT",
                                       .authenticate_user = authenticate, mysql_end_client_plugin;
