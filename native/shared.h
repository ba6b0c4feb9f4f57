/* Reading and writing what daemon and clients share, without Python: slot headers, index, residence table.
 *
 * One process writes, others read at the same time. What makes a reader right is order, so every word that orders
 * others is loaded with acquire and stored with release: for x86 these are plain instructions, for aarch64 they are
 * what makes one-sided reads possible at all. The layouts are those of v1/shm.py and v1/residence.py.
 */
#ifndef KVTIER_SHARED_H
#define KVTIER_SHARED_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    HASH_BYTES = 32,
    HEADER_BYTES = 128,
    MAX_PROBES = 32,
    RESIDENCE_PROBES = 128,
    RESIDENCE_AHEAD = 12, /* names ahead, of which entries are fetched early: memory answers in parallel */
    EMPTY_TAG = 0,
    TOMBSTONE_TAG = 1,
};
static const uint64_t NAMESPACE_MIX = 0x9E3779B97F4A7C15ULL, GROUP_MIX = 0xC2B2AE3D27D4EB4FULL;
static const uint64_t CODE_MASK = 0xFF;

static inline uint64_t word_at(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint64_t load_acquire(const void *word) { return __atomic_load_n((const uint64_t *)word, __ATOMIC_ACQUIRE); }
static inline uint64_t load_relaxed(const void *word) { return __atomic_load_n((const uint64_t *)word, __ATOMIC_RELAXED); }

static inline uint64_t tag_of_name(const uint8_t *name, uint64_t namespace_id, uint64_t group) {
    uint64_t tag = word_at(name) ^ (namespace_id * NAMESPACE_MIX + group * GROUP_MIX);
    return tag > TOMBSTONE_TAG ? tag : tag + 2;
}

/* ------------------------------------------------------------------------------------------- slot headers */

/* What a fragment's header must say. */
typedef struct {
    const uint8_t *name;
    uint64_t identity; /* namespace and group */
    uint64_t length;
} wanted_fragment;

/* Return the generation under which a slot holds the wanted fragment, within `data_bytes`; 1, which is odd and so
 * none, where it does not. `offset` is where its bytes begin. */
static inline uint64_t generation_of(
    const uint8_t *header, const wanted_fragment *wanted, uint64_t data_bytes, uint64_t *offset) {
    const uint64_t generation = load_acquire(header);
    uint64_t words[9]; /* one load each: what is checked is what is used, whatever is written there meanwhile */
    for (int i = 0; i < 9; i++) words[i] = load_relaxed(header + 8 + 8 * i);
    *offset = words[1];
    const int is_right = !(generation & 1) && words[0] == wanted->identity && words[2] == wanted->length &&
                         words[3] == wanted->length && !memcmp(words + 5, wanted->name, HASH_BYTES) &&
                         wanted->length <= data_bytes && words[1] <= data_bytes - wanted->length;
    return is_right ? generation : 1;
}

/* Whether nothing that was read since `generation_of` returned can be of another fragment. */
static inline int is_still(const uint8_t *header, uint64_t generation) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return load_relaxed(header) == generation;
}

/* Begin to change a slot: odd before the first byte changes. */
static inline void begin_change(uint8_t *header) {
    uint64_t *word = (uint64_t *)(void *)header, generation = load_relaxed(word);
    if (!(generation & 1)) __atomic_store_n(word, generation + 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

/* End the change: even after the last byte did. */
static inline void end_change(uint8_t *header, uint64_t generation) {
    __atomic_store_n((uint64_t *)(void *)header, generation, __ATOMIC_RELEASE);
}

/* ---------------------------------------------------------------------------------------- residence table */

static inline uint64_t rotated(uint64_t word) { return word << 29 | word >> 35; }

static inline uint64_t check_of_name(const uint8_t *name, uint64_t namespace_id) {
    return word_at(name + 8) ^ rotated(word_at(name + 24)) * NAMESPACE_MIX ^ namespace_id * GROUP_MIX;
}

/* `check`: of the same name, whole. */
static inline uint64_t residence_tag(const uint8_t *name, uint64_t namespace_id, uint64_t check) {
    const uint64_t mixed = rotated(word_at(name + 16)) * GROUP_MIX ^ namespace_id * NAMESPACE_MIX;
    const uint64_t tag = word_at(name) ^ mixed ^ rotated(check) * NAMESPACE_MIX >> 32;
    return tag > TOMBSTONE_TAG ? tag : tag + 2;
}

/* Write the codes of the longest prefix of `names` that is in the table; return how many these are. */
static inline size_t find_codes(
    const uint64_t *words, uint64_t mask, const uint8_t *names, size_t count, uint64_t namespace_id, uint8_t *codes) {
    for (size_t i = 0; i < count; i++) {
        const uint8_t *name = names + i * HASH_BYTES;
        if (i + RESIDENCE_AHEAD < count) {
            const uint8_t *later = name + RESIDENCE_AHEAD * HASH_BYTES;
            const uint64_t home = residence_tag(later, namespace_id, check_of_name(later, namespace_id)) & mask;
            __builtin_prefetch(words + (home << 1));
        }
        const uint64_t whole = check_of_name(name, namespace_id), check = whole & ~CODE_MASK;
        const uint64_t tag = residence_tag(name, namespace_id, whole);
        codes[i] = 0;
        for (uint64_t step = 0; step < RESIDENCE_PROBES && !codes[i]; step++) {
            const uint64_t *entry = words + ((tag + step & mask) << 1), there = load_acquire(entry);
            if (there == EMPTY_TAG) break;
            if (there != tag) continue;
            const uint64_t value = load_relaxed(entry + 1);
            if ((value & ~CODE_MASK) == check) codes[i] = (uint8_t)value;
        }
        if (!codes[i]) return i;
    }
    return count;
}

/* What `set_codes` did. */
typedef struct {
    int64_t num_entries, num_tombstones; /* more than before */
    int64_t num_dropped;                 /* found no room */
} residence_change;

static inline void set_code(
    uint64_t *words, uint64_t mask, const uint8_t *name, uint64_t namespace_id, uint64_t code, residence_change *change) {
    const uint64_t whole = check_of_name(name, namespace_id), check = whole & ~CODE_MASK;
    const uint64_t tag = residence_tag(name, namespace_id, whole);
    uint64_t *room = NULL;
    for (uint64_t step = 0; step < RESIDENCE_PROBES; step++) {
        uint64_t *entry = words + ((tag + step & mask) << 1), there = *entry;
        if (there == tag && (entry[1] & ~CODE_MASK) == check) {
            if (code) {
                __atomic_store_n(entry + 1, check | code, __ATOMIC_RELAXED);
                return;
            }
            __atomic_store_n(entry, TOMBSTONE_TAG, __ATOMIC_RELAXED);
            change->num_entries--;
            change->num_tombstones++;
            if (words[(tag + step + 1 & mask) << 1] == EMPTY_TAG) /* behind a tombstone at the end no search goes on */
                for (uint64_t at = tag + step; words[(at & mask) << 1] == TOMBSTONE_TAG; at--) {
                    __atomic_store_n(words + ((at & mask) << 1), EMPTY_TAG, __ATOMIC_RELAXED);
                    change->num_tombstones--;
                }
            return;
        }
        if (there <= TOMBSTONE_TAG && !room) room = entry;
        if (there == EMPTY_TAG) break;
    }
    if (!code) return;
    if (!room) {
        change->num_dropped++;
        return;
    }
    change->num_tombstones -= *room == TOMBSTONE_TAG;
    change->num_entries++;
    __atomic_store_n(room + 1, check | code, __ATOMIC_RELAXED); /* before the tag: a reader that sees that sees this */
    __atomic_store_n(room, tag, __ATOMIC_RELEASE);
}

#endif
