/* The step of LAMB and MERIT in two passes over memory. fast_c.py compiles this file, once with REAL = float and once
 * with REAL = double, and calls it; fast.py says what happens between the passes.
 *
 * A weight of `count` elements is worked on row by row, each row `columns` long (the last may be shorter). Names and
 * lines are those of merit.py. Every product and sum is rounded by itself, as the readable step rounds it: fast_c.py
 * forbids the compiler to contract them. So MERIT's moments come out the same, to the bit, and its weights but for the
 * square root, whose last bit torch's own vectors may round otherwise.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* |x| of finite numbers, infinities and NaN orders as the bits of |x| read as a whole number does, NaN above all. So
 * maxima of bits keep a NaN, as torch's do, and need no ordered comparison of floating-point numbers. */
typedef BITS __attribute__((may_alias)) bits;
#define MAGNITUDE ((BITS)~((UNSIGNED)1 << (8 * sizeof(BITS) - 1)))

typedef struct {
    REAL beta1, rest1, beta2, rest2; /* β₁, 1 - β₁, β₂, 1 - β₂ */
    REAL scale1, scale2;             /* LAMB's bias correction: 1 / (1 - β₁ᵗ), 1 / (1 - β₂ᵗ); 1 for MERIT */
    REAL eps, decay;                 /* decay: λ where it is part of u, else 0 */
    REAL sign;                       /* -1 climbs */
    REAL largest;                    /* the largest finite number: a quotient goes no further */
} direction_of;

/* Line 3: u = m / (√v + ε) + λ w; 0 where the denominator is 0. */
static inline REAL direction(REAL w, REAL m, REAL v, direction_of how) {
    REAL below = SQRT(v * how.scale2) + how.eps;
    REAL u = below != 0 ? m * how.scale1 / below : 0;
    u = u > how.largest ? how.largest : u;
    u = u < -how.largest ? -how.largest : u;
    return u + how.decay * w;
}

/* Lines 1 to 3 of one row: moments in place, u into scratch. */
static void row_direction(long n, const REAL *w, const REAL *g, REAL *restrict m, REAL *restrict v,
                          REAL *restrict u, direction_of how) {
    for (long j = 0; j < n; j++) {
        REAL grad = g[j] * how.sign;
        m[j] = how.beta1 * m[j] + how.rest1 * grad;
        v[j] = how.beta2 * v[j] + how.rest2 * (grad * grad);
        u[j] = direction(w[j], m[j], v[j], how);
    }
}

static inline bits largest_in(long n, const bits *x) {
    bits most = 0;
    for (long j = 0; j < n; j++) {
        bits b = x[j] & MAGNITUDE;
        most = b > most ? b : most;
    }
    return most;
}

static inline void raise_to(long n, bits *restrict most, const bits *x) {
    for (long j = 0; j < n; j++) {
        bits b = x[j] & MAGNITUDE;
        most[j] = b > most[j] ? b : most[j];
    }
}

/* Both at once: the largest in a row, and the columns raised to it. */
static inline bits largest_and_raise(long n, bits *restrict most, const bits *x) {
    bits largest = 0;
    for (long j = 0; j < n; j++) {
        bits b = x[j] & MAGNITUDE;
        largest = b > largest ? b : largest;
        most[j] = b > most[j] ? b : most[j];
    }
    return largest;
}

/* The first pass with max-norms. whole: the largest |w| and the largest |u|. rows: those of each row, |w| first.
 * lines: 2 · threads lines of scratch; those of each column are left in the first and in number `threads`. NULL: not
 * wanted.
 * scratch: `columns` a thread. */
void measure_max(long count, long columns, int threads, const REAL *w, const REAL *g, REAL *m, REAL *v,
                 const direction_of *how, REAL *whole, REAL *rows, REAL *lines, REAL *scratch) {
    long n_rows = (count + columns - 1) / columns;
    bits *of_rows = (bits *)rows, *of_w = (bits *)lines, *of_u = of_w + threads * columns, *all = (bits *)whole;
    if (lines) memset(lines, 0, 2 * threads * columns * sizeof(REAL));
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long i = 0; i < n_rows; i++) {
        long at = i * columns, n = count - at < columns ? count - at : columns;
        REAL *u = scratch + THREAD * columns;
        row_direction(n, w + at, g + at, m + at, v + at, u, *how);
        const bits *of_here = (const bits *)(w + at), *of_step = (const bits *)u;
        if (lines) {
            of_rows[i] = largest_and_raise(n, of_w + THREAD * columns, of_here);
            of_rows[n_rows + i] = largest_and_raise(n, of_u + THREAD * columns, of_step);
        } else {
            of_rows[i] = largest_in(n, of_here);
            of_rows[n_rows + i] = largest_in(n, of_step);
        }
    }
    all[0] = largest_in(n_rows, of_rows), all[1] = largest_in(n_rows, of_rows + n_rows);
    for (int thread = 1; lines && thread < threads; thread++) {
        raise_to(columns, of_w, of_w + thread * columns);
        raise_to(columns, of_u, of_u + thread * columns);
    }
}

/* Lines 4 to 6: ratios of n norms, none below `least`; infinite where a norm is 0, if that guards. 0 / 0 is 0. */
void ratios(long n, const REAL *w, const REAL *u, int guards, REAL least, REAL largest, REAL *out) {
    for (long i = 0; i < n; i++) {
        REAL ratio = u[i] != 0 ? w[i] / u[i] : 0;
        ratio = ratio > largest ? largest : ratio;
        ratio = ratio < least || least != least ? least : ratio;
        out[i] = guards && (w[i] == 0 || u[i] == 0) ? (REAL)INFINITY : ratio;
    }
}

/* A sum in a fixed order that vectorizes: eight partial sums. */
static double squares(long n, const REAL *x) {
    double part[8] = {0};
    long j = 0;
    for (; j + 8 <= n; j += 8)
        for (int k = 0; k < 8; k++) part[k] += (double)x[j + k] * (double)x[j + k];
    for (; j < n; j++) part[j % 8] += (double)x[j] * (double)x[j];
    return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

/* The first pass with ℓ2 norms: whole takes the sums of squares of w and of u, in double. A row is summed by one thread
 * and rows (2 · number of rows) one after the other, so that the result does not depend on how many threads there are. */
void measure_l2(long count, long columns, int threads, const REAL *w, const REAL *g, REAL *m, REAL *v,
                const direction_of *how, double *whole, double *rows, REAL *scratch) {
    long n_rows = (count + columns - 1) / columns;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long i = 0; i < n_rows; i++) {
        long at = i * columns, n = count - at < columns ? count - at : columns;
        REAL *u = scratch + THREAD * columns;
        row_direction(n, w + at, g + at, m + at, v + at, u, *how);
        rows[i] = squares(n, w + at);
        rows[n_rows + i] = squares(n, u);
    }
    for (long i = 0; i < n_rows; i++) whole[0] += rows[i], whole[1] += rows[n_rows + i];
}

/* The second pass: s_ij = max(row_i, column_j) (line 7; an infinite factor stands for a guard, which makes s 1),
 * Δ = clip(s u) (line 8), w ← w - η (Δ + beside · w) (line 9; beside: λ where decay is no part of u).
 * row: one a row, or one for all where row_stride is 0. column: one a column, or NULL. */
void apply(long count, long columns, int threads, REAL *w, const REAL *m, const REAL *v, const direction_of *how,
           const REAL *row, long row_stride, const REAL *column, int clip, REAL lr, REAL beside) {
    long rows = (count + columns - 1) / columns;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long i = 0; i < rows; i++) {
        long at = i * columns, n = count - at < columns ? count - at : columns;
        REAL r = row[i * row_stride], limit = clip ? 1 : INFINITY;
        REAL *restrict here = w + at;
        const REAL *restrict mi = m + at, *restrict vi = v + at;
        const direction_of d = *how; /* by value: else every store might change it, and nothing vectorizes */
        if (column) {
            for (long j = 0; j < n; j++) {
                REAL c = column[j], s = c > r || c != c ? c : r; /* a NaN wins, as in torch.maximum */
                s = c > d.largest || r > d.largest ? 1 : s;
                REAL step = s * direction(here[j], mi[j], vi[j], d);
                step = step > limit ? limit : step;
                step = step < -limit ? -limit : step;
                here[j] = here[j] - lr * (step + beside * here[j]);
            }
        } else {
            REAL s = r > d.largest ? 1 : r;
            for (long j = 0; j < n; j++) {
                REAL step = s * direction(here[j], mi[j], vi[j], d);
                step = step > limit ? limit : step;
                step = step < -limit ? -limit : step;
                here[j] = here[j] - lr * (step + beside * here[j]);
            }
        }
    }
}

/* All of MERIT's step on a tensor that lies whole in one place: both passes and lines 4 to 7 between them, as fast.py's
 * merit_factors has them. One call, since on small tensors calls are what takes time.
 * by_row, by_column: whether these ratios enter line 7. room: 2 n_rows + 2 threads columns + threads columns numbers. */
void merit(long count, long columns, int threads, REAL *w, const REAL *g, REAL *m, REAL *v, const direction_of *how,
           int guards, int by_row, int by_column, int bound, int clip, REAL lr, REAL *room) {
    long n_rows = (count + columns - 1) / columns;
    REAL *rows = room, *lines = rows + 2 * n_rows, *scratch = lines + 2 * threads * columns, whole[2], b, none = 0;
    int two_dimensions = by_row || by_column;
    measure_max(count, columns, threads, w, g, m, v, how, whole, rows, two_dimensions ? lines : NULL, scratch);
    ratios(1, whole, whole + 1, guards, 0, how->largest, &b);
    REAL *row = bound || !two_dimensions ? &b : &none, *column = by_column ? lines : NULL;
    if (by_row) {
        ratios(n_rows, rows, rows + n_rows, guards, bound ? b : 0, how->largest, rows);
        row = rows;
    }
    if (by_column) ratios(columns, lines, lines + threads * columns, guards, 0, how->largest, lines);
    apply(count, columns, threads, w, m, v, how, row, by_row, column, clip, lr, 0);
}
