"""2**x on two units at once: the MUFU, and the FMA units in its place (FlashAttention-4).

An SM of sm_100 takes 16 ex2 a clock and 128 FMAs, packed in pairs in half the instructions. A
128 x 128 tile of scores at head_dim 128 costs as many clocks of MUFU as of tensor core, so a share
of every fragment is computed from

    x = n + f, n whole, 0 <= f < 1 (Cody and Waite);    2**x = 2**n * p(f)

in packed pairs: adding MAGIC, rounded down, leaves n + 127 in the low bits of the sum, and shifted
into the place of the exponent they are 2**n. p is a polynomial in Horner's form.

Of the cubic a pair takes 7 packed operations, 2 maxima and 2 shifts. The last of the 7 multiplies
by 2**n. To add n to the exponent of p(f) instead would save it, but turn NaN, whose bits are
0x7fffffff, into the largest finite number, and what lies below 2**-126 into something subnormal.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

GROUP = 16  # elements; of each group the last pairs are computed on the FMA units
MANTISSA_BITS = 23
BIAS = 127
LOWEST = float(-BIAS)  # gives exactly 0, so -inf does; so does, as in the MUFU, all below -126
MAGIC = 1.5 * 2.0**MANTISSA_BITS + BIAS  # the unit in the last place there is 1

# Degree: coefficients by rising power; the largest relative error. 16-bit P has 2**-9 (bf16) and
# 2**-12 (f16), the MUFU 2**-22. From benchmarks/exp2_coefficients.py.
COEFFICIENTS = {
    3: (1.0, 0.69511676, 0.227645, 0.07706704),  # 8.6e-5 = 2**-13.5
    4: (1.0, 0.69304484, 0.2412802, 0.052242473, 0.013426684),  # 3.0e-6 = 2**-18.4
    5: (1.0, 0.6931513, 0.24016444, 0.055799913, 0.009017031, 0.00186713),  # 1.5e-7 = 2**-22.7
}

DEGREE = 4  # the kernels': a cubic would do for P in bf16, not for the LSE, nor for P in fp16

Pair = tuple[Float32, Float32]


def mufu_exp2(x: Float32) -> Float32:
    """2**x on the special-function unit; results below 2**-126 are 0."""
    return cute.math.exp2(x, fastmath=True)


def fma_exp2(x: Pair, degree: int = DEGREE) -> Pair:
    """2**x of two numbers up to 127 on the FMA units; results below 2**-126 are 0, NaN stays."""
    low, high = (cute.arch.fmax(value, LOWEST, nan=True) for value in x)
    x = low, high
    shifted = cute.arch.add_packed_f32x2(x, (MAGIC, MAGIC), rnd="rm")
    whole = cute.arch.sub_packed_f32x2(shifted, (MAGIC, MAGIC))
    fraction = cute.arch.sub_packed_f32x2(x, whole)
    first, *rest = reversed(COEFFICIENTS[degree])
    power = (first, first)
    for c in rest:
        power = cute.arch.fma_packed_f32x2(power, fraction, (c, c))
    low, high = (s.bitcast(Int32) << MANTISSA_BITS for s in shifted)
    return cute.arch.mul_packed_f32x2(power, (low.bitcast(Float32), high.bitcast(Float32)))


@cute.jit
def exp2(
    fragment: cute.Tensor,
    fma_pairs: cutlass.Constexpr[int],
    degree: cutlass.Constexpr[int] = DEGREE,
) -> None:
    """2**x of a fragment of an even number of elements, in place.

    Args:
        fma_pairs: of each GROUP the last so many pairs go to the FMA units, 0 to GROUP // 2.
        degree: a key of COEFFICIENTS.
    """
    for i in cutlass.range_constexpr(0, cute.size(fragment), 2):
        if const_expr(i % GROUP < GROUP - 2 * fma_pairs):
            fragment[i] = mufu_exp2(fragment[i])
            fragment[i + 1] = mufu_exp2(fragment[i + 1])
        else:
            pair = (fragment[i], fragment[i + 1])
            fragment[i], fragment[i + 1] = fma_exp2(pair, degree)
