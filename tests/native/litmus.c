/* Litmus tests of native/shared.h: one thread writes, others read, and see a whole old state or a whole new one.
 *
 * `make test-native` runs this under ThreadSanitizer, and built for this machine without it. Readers here load the data by
 * words, because a race that the generation makes harmless is still one to the sanitizer. Ends with status 1 and a line
 * when something torn was believed, or nothing at all.
 *
 *     slots    generation, header and data of a slot that is filled again and again
 *     table    tag and tier of names that take turns in the same entries
 */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../native/shared.h"

enum { NUM_READERS = 2, DATA_WORDS = 64, DATA_BYTES = 8 * DATA_WORDS, NUM_NAMES = 6, TABLE_MASK = 255 };

static int num_rounds = 100000;
static uint64_t data[DATA_WORDS], headers[HEADER_BYTES / 8], table[2 * (TABLE_MASK + 1)];
static uint8_t names[NUM_NAMES][HASH_BYTES];
static uint64_t is_over, num_torn, num_right;

/* Leave what was written alone for a while, that others may read it; now and then as long as they want. */
static void rest(int round) {
    for (int i = 0; i < 200; i++) (void)load_relaxed(data);
    if (round % 64 == 0) sched_yield();
}

static void store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }

static void *write_slots(void *unused) {
    (void)unused;
    for (uint64_t round = 1; round <= (uint64_t)num_rounds; round++) {
        const uint64_t name = round & 1; /* a recycled slot holds another block */
        begin_change((uint8_t *)headers);
        for (int i = 0; i < DATA_WORDS; i++) store(data + i, round);
        store(headers + 1, 1), store(headers + 2, 0), store(headers + 3, DATA_BYTES), store(headers + 4, DATA_BYTES);
        for (int i = 0; i < 4; i++) store(headers + 6 + i, word_at(names[name] + 8 * i));
        end_change((uint8_t *)headers, 2 * round);
        rest((int)round);
    }
    __atomic_store_n(&is_over, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void *read_slots(void *unused) {
    (void)unused;
    uint64_t right = 0, torn = 0;
    while (!load_acquire(&is_over)) {
        for (int name = 0; name < 2; name++) {
            const wanted_fragment wanted = {names[name], 1, DATA_BYTES};
            uint64_t offset, copy[DATA_WORDS];
            const uint64_t generation = generation_of((const uint8_t *)headers, &wanted, DATA_BYTES, &offset);
            if (generation & 1) continue;
            for (int i = 0; i < DATA_WORDS; i++) copy[i] = load_relaxed(data + i);
            if (!is_still((const uint8_t *)headers, generation)) continue;
            right++;
            for (int i = 0; i < DATA_WORDS; i++) torn += copy[i] != generation / 2;
            torn += (generation / 2 & 1) != (uint64_t)name;
        }
    }
    __atomic_fetch_add(&num_right, right, __ATOMIC_RELAXED);
    __atomic_fetch_add(&num_torn, torn, __ATOMIC_RELAXED);
    return NULL;
}

static void *write_table(void *unused) {
    residence_change change = {0, 0, 0};
    (void)unused;
    for (int round = 0; round < num_rounds; round++) {
        const int name = round % NUM_NAMES;
        const uint64_t code = round / NUM_NAMES % 3 ? (uint64_t)name + 1 : 0;
        set_code(table, TABLE_MASK, names[name], 1, code, &change);
        rest(round);
    }
    __atomic_store_n(&is_over, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void *read_table(void *unused) {
    uint64_t right = 0, torn = 0;
    (void)unused;
    while (!load_acquire(&is_over))
        for (int name = 0; name < NUM_NAMES; name++) {
            uint8_t code;
            if (!find_codes(table, TABLE_MASK, names[name], 1, 1, &code)) continue;
            right++;
            torn += code != name + 1;
        }
    __atomic_fetch_add(&num_right, right, __ATOMIC_RELAXED);
    __atomic_fetch_add(&num_torn, torn, __ATOMIC_RELAXED);
    return NULL;
}

static int run(const char *what, void *(*write)(void *), void *(*read)(void *)) {
    pthread_t threads[NUM_READERS + 1];
    is_over = num_torn = num_right = 0;
    for (int i = 0; i < NUM_READERS; i++)
        if (pthread_create(threads + i, NULL, read, NULL)) return 1;
    if (pthread_create(threads + NUM_READERS, NULL, write, NULL)) return 1;
    for (int i = 0; i <= NUM_READERS; i++) pthread_join(threads[i], NULL);
    printf("%s: %llu believed, %llu torn\n", what, (unsigned long long)num_right, (unsigned long long)num_torn);
    return num_torn || !num_right;
}

int main(int count, char **arguments) {
    if (count > 1) num_rounds = atoi(arguments[1]);
    headers[0] = 1;
    for (int name = 0; name < NUM_NAMES; name++) {
        memset(names[name], 0x40 + name, HASH_BYTES);
        memset(names[name], 0, sizeof(uint64_t));
        const uint64_t rest = residence_tag(names[name], 1, check_of_name(names[name], 1));
        const uint64_t first = rest ^ (uint64_t)(name / 2 + 2); /* two by two they begin at one entry */
        memcpy(names[name], &first, sizeof first);
    }
    return run("slots", write_slots, read_slots) | run("table", write_table, read_table);
}
