/*
 * hmac.h - SHA-256, for names of files that Symfony Lock makes with it; and HMAC-SHA-256, for texts
 * that strangers pass on and hand back (`hierlock.rows`).
 */
#ifndef HL_HMAC_H
#define HL_HMAC_H

#include <stddef.h>
#include <stdint.h>

#define HL__HMAC_SIZE 32

/* The SHA-256 of `size` bytes (FIPS 180-4). Never fails; any thread. */
void hl__sha256(const void *data, size_t size, uint8_t digest[HL__HMAC_SIZE]);

/*
 * The HMAC-SHA-256 of a text (RFC 2104, FIPS 180-4). key, text: any bytes, sizes in bytes. Never
 * fails; any thread.
 */
void hl__hmac(const void *key, size_t key_size, const void *text, size_t text_size,
              uint8_t mac[HL__HMAC_SIZE]);

#endif
