/* Names of blocks in C, as docs/prefix-hash.md specifies them; needs nothing but the C library.
 *
 *     cc -O2 -o prefix_hash examples/prefix_hash.c
 *     ./prefix_hash BLOCK_TOKENS PARENT_HEX TOKENS KEY_HEX...
 *
 * prints one name a line. PARENT_HEX is - at the start of a chain; TOKENS is a list with commas, - for none;
 * an empty extra key is given as -.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------- SHA-256 (FIPS 180-4) */

typedef struct {
    uint32_t state[8];
    uint64_t num_bytes;
    uint8_t block[64];
} sha256;

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotated(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void compress(sha256 *h) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)h->block[4 * i] << 24 | (uint32_t)h->block[4 * i + 1] << 16 |
               (uint32_t)h->block[4 * i + 2] << 8 | h->block[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] + (rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(s, h->state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t t1 = s[7] + (rotated(s[4], 6) ^ rotated(s[4], 11) ^ rotated(s[4], 25)) +
                      ((s[4] & s[5]) ^ (~s[4] & s[6])) + K[i] + w[i];
        uint32_t t2 = (rotated(s[0], 2) ^ rotated(s[0], 13) ^ rotated(s[0], 22)) +
                      ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) h->state[i] += s[i];
}

static void begin(sha256 *h) {
    static const uint32_t first[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(h->state, first, sizeof first);
    h->num_bytes = 0;
}

static void add(sha256 *h, const uint8_t *bytes, size_t length) {
    for (size_t i = 0; i < length; i++) {
        h->block[h->num_bytes++ % 64] = bytes[i];
        if (h->num_bytes % 64 == 0) compress(h);
    }
}

static void finish(sha256 *h, uint8_t digest[32]) {
    uint64_t num_bits = 8 * h->num_bytes;
    uint8_t length[8];
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(num_bits >> (56 - 8 * i));
    add(h, (const uint8_t *)"\x80", 1);
    while (h->num_bytes % 64 != 56) add(h, (const uint8_t *)"\0", 1);
    add(h, length, 8);
    for (int i = 0; i < 32; i++) digest[i] = (uint8_t)(h->state[i / 4] >> (24 - 8 * (i % 4)));
}

/* ----------------------------------------------------------------------------------------- prefix hash */

typedef struct {
    const uint8_t *bytes;
    uint32_t length;
} key;

static void add_u32(sha256 *h, uint32_t number) { /* big-endian */
    uint8_t bytes[4] = {number >> 24, number >> 16, number >> 8, number};
    add(h, bytes, 4);
}

/* Writes the name of a block of `block_tokens` tokens to `name`. `parent` is NULL at the start of a chain, and
 * may be `name` itself. */
static void prefix_hash(uint8_t name[32], const uint8_t *parent, const uint64_t *tokens, uint32_t block_tokens,
                        const key *keys, uint32_t num_keys) {
    sha256 h;
    begin(&h);
    add(&h, (const uint8_t *)"kvtier.prefix.1", 15);
    add_u32(&h, block_tokens);
    add(&h, (const uint8_t *)(parent ? "\x20" : "\0"), 1);
    if (parent) add(&h, parent, 32);
    for (uint32_t i = 0; i < block_tokens; i++) {
        uint8_t bytes[8]; /* little-endian */
        for (int j = 0; j < 8; j++) bytes[j] = (uint8_t)(tokens[i] >> (8 * j));
        add(&h, bytes, 8);
    }
    add_u32(&h, num_keys);
    for (uint32_t i = 0; i < num_keys; i++) {
        add_u32(&h, keys[i].length);
        add(&h, keys[i].bytes, keys[i].length);
    }
    finish(&h, name);
}

/* ---------------------------------------------------------------------------------------- command line */

static uint8_t *from_hex(const char *text, uint32_t *length) {
    *length = text[0] == '-' ? 0 : (uint32_t)strlen(text) / 2;
    uint8_t *bytes = malloc(*length + 1);
    for (uint32_t i = 0; i < *length; i++) sscanf(text + 2 * i, "%2hhx", &bytes[i]);
    return bytes;
}

int main(int argc, char **argv) {
    if (argc < 4) return fprintf(stderr, "usage: prefix_hash BLOCK_TOKENS PARENT_HEX TOKENS KEY_HEX...\n"), 2;
    uint32_t block_tokens = (uint32_t)strtoul(argv[1], NULL, 10), parent_length, num_keys = (uint32_t)argc - 4;
    uint8_t *parent = from_hex(argv[2], &parent_length), name[32];
    if (!block_tokens || (parent_length && parent_length != 32))
        return fprintf(stderr, "a block has at least one token, a parent 32 bytes\n"), 2;
    key *keys = calloc(num_keys + 1, sizeof *keys);
    for (uint32_t i = 0; i < num_keys; i++) keys[i].bytes = from_hex(argv[4 + i], &keys[i].length);
    uint64_t *tokens = calloc(block_tokens, sizeof *tokens);
    uint32_t num_tokens = 0;
    const uint8_t *before = parent_length ? parent : NULL;
    for (char *one = strtok(argv[3], ",-"); one; one = strtok(NULL, ",")) {
        tokens[num_tokens++] = strtoull(one, NULL, 10);
        if (num_tokens < block_tokens) continue;
        prefix_hash(name, before, tokens, block_tokens, keys, num_keys);
        for (int i = 0; i < 32; i++) printf("%02x", name[i]);
        printf("\n");
        before = name, num_tokens = 0;
    }
    return 0;
}
