/* What torch's bernoulli_ draws on a CPU, from the state of a torch.Generator, several times as
 * fast: the Mersenne Twister (Matsumoto and Nishimura, 1998) in loops that a compiler vectorizes.
 *
 * A number is 53 bits of two words, the first of them high, and is drawn if it lies below
 * `below`, the probability times 2**53. The state is left as torch leaves it.
 */
#include <stddef.h>
#include <stdint.h>

enum { N = 624, M = 397 };

struct generator { /* the bytes of Generator.get_state(), as far as they concern us */
    uint64_t seed;
    int32_t left, seeded;
    uint64_t next, state[N];
};

static inline uint32_t mixed(uint32_t high, uint32_t low) {
    uint32_t word = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (word >> 1) ^ (-(low & 1u) & 0x9908b0dfu);
}

static void twist(uint32_t *state) {
    for (int i = 0; i < N - M; i++) state[i] = state[i + M] ^ mixed(state[i], state[i + 1]);
    for (int i = N - M; i < N - 1; i++)
        state[i] = state[i + M - N] ^ mixed(state[i], state[i + 1]);
    state[N - 1] = state[M - 1] ^ mixed(state[N - 1], state[0]);
}

static void temper(const uint32_t *restrict state, uint32_t *restrict words, int count) {
    for (int i = 0; i < count; i++) {
        uint32_t word = state[i];
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c5680u;
        word ^= (word << 15) & 0xefc60000u;
        words[i] = word ^ (word >> 18);
    }
}

/* `one` where a number is drawn and 0 elsewhere, `count` times. */
#define FILL(NAME, REAL)                                                                         \
    void NAME(struct generator *from, uint64_t below, REAL one, REAL *restrict out,              \
              size_t count) {                                                                    \
        uint32_t state[N], words[N + 1]; /* one more: a block may end between two words */       \
        for (int i = 0; i < N; i++) state[i] = (uint32_t)from->state[i];                         \
        int next = from->left == 1 ? N : (int)from->next, over = 0;                              \
        while (count) {                                                                          \
            if (next == N) twist(state), next = 0;                                               \
            size_t wanted = 2 * count - over;                                                    \
            int taken = wanted < (size_t)(N - next) ? (int)wanted : N - next;                    \
            temper(state + next, words + over, taken);                                           \
            next += taken;                                                                       \
            int pairs = (over + taken) / 2;                                                      \
            for (int i = 0; i < pairs; i++) {                                                    \
                uint64_t bits = (uint64_t)words[2 * i] << 32 | words[2 * i + 1];                 \
                out[i] = (bits & ((1ull << 53) - 1)) < below ? one : (REAL)0;                    \
            }                                                                                    \
            over = (over + taken) % 2;                                                           \
            if (over) words[0] = words[2 * pairs];                                               \
            out += pairs, count -= pairs;                                                        \
        }                                                                                        \
        for (int i = 0; i < N; i++) from->state[i] = state[i];                                   \
        from->left = N - next + 1, from->next = next;                                            \
    }

FILL(fill_float, float)
FILL(fill_double, double)
