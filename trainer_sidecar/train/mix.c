/* The inner loop of the state digest (digest.py, where the formula and the same loop for numpy stand).
 *
 * Compiled into libmix.so by hatch_build.py where there is a compiler; without it numpy does the same at a fifth of its
 * speed. No symbol of the C library is used; glibc's loader chooses the loop for the processor.
 */
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define EACH_PROCESSOR
#endif

/* Adds the high words of `count` elements to sums[0], modulo 2^64, and the upper halves of their low ones to sums[1]:
 * 2^32 elements may be added before that overflows. `salt` is that of the first, and grows by `step`. The bytes lie
 * anywhere: a file of weights that is mapped into memory keeps no alignment. */
#define MIX(NAME, WORD)                                                                              \
    EACH_PROCESSOR static void NAME(const unsigned char *restrict bytes, size_t count,               \
                                    uint64_t salt, uint64_t step, uint64_t *restrict sums)           \
    {                                                                                                \
        uint64_t high = 0, low = 0;                                                                  \
        for (size_t i = 0; i < count; i++) {                                                         \
            WORD word;                                                                               \
            __builtin_memcpy(&word, bytes + i * sizeof(WORD), sizeof(WORD));                         \
            uint64_t x = (uint64_t)word * 0xD1B54A32D192ED03u;                                       \
            x ^= salt + (uint64_t)i * step;                                                          \
            x *= 0xBF58476D1CE4E5B9u;                                                                \
            x ^= x >> 32;                                                                            \
            x *= 0x94D049BB133111EBu;                                                                \
            high += x;                                                                               \
            x ^= x >> 31;                                                                            \
            x *= 0xA0761D6478BD642Fu;                                                                \
            low += x >> 32;                                                                          \
        }                                                                                            \
        sums[0] += high;                                                                             \
        sums[1] += low;                                                                              \
    }

MIX(mix_1, uint8_t)
MIX(mix_2, uint16_t)
MIX(mix_4, uint32_t)
MIX(mix_8, uint64_t)

/* `runs` runs of `run` elements of `size` bytes each, one behind the other in memory; `starts` are the global indices of
 * their first elements. Returns 0, or 1 for a size that is none of 1, 2, 4, 8. */
int mix_runs(const void *words, size_t size, const int64_t *starts, size_t runs, size_t run, uint64_t key, uint64_t step,
             uint64_t *sums)
{
    for (size_t i = 0; i < runs; i++) {
        uint64_t salt = (uint64_t)starts[i] * step + key;
        const unsigned char *at = (const unsigned char *)words + i * run * size;
        switch (size) {
        case 1: mix_1(at, run, salt, step, sums); break;
        case 2: mix_2(at, run, salt, step, sums); break;
        case 4: mix_4(at, run, salt, step, sums); break;
        case 8: mix_8(at, run, salt, step, sums); break;
        default: return 1;
        }
    }
    return 0;
}
