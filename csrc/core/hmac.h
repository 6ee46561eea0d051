/*
 * hmac.h - HMAC with SHA-256, for texts that travel through the hands of others
 * and come back
 * (`hierlock.rows`). No store and no lock uses it.
 */
#ifndef HL_HMAC_H
#define HL_HMAC_H

#include <stddef.h>
#include <stdint.h>

#define HL__HMAC_SIZE 32

/*
 * The HMAC-SHA-256 of a text (RFC 2104, FIPS 180-4). key, text: any bytes,
 * sizes in bytes. Cannot fail; any thread.
 */
void hl__hmac(const void *key, size_t key_size, const void *text,
              size_t text_size, uint8_t mac[HL__HMAC_SIZE]);

#endif
