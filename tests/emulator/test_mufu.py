"""2**x as an H200 gives it."""

import numpy as np

from hopwell.emulator import mufu


def test_ex2_is_within_two_steps_and_exact_at_powers_of_two() -> None:
    x = -np.arange(1 << 16, dtype=np.float32) / np.float32(1 << 12)
    y = mufu.ex2(x)
    exact = np.exp2(x.astype(np.float64))
    assert (np.abs(y - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    assert (y[:: 1 << 12] == exact[:: 1 << 12]).all()


def test_ex2_as_measured() -> None:
    """Bits of x and of ex2.approx.ftz.f32 on an H200, for x drawn from -20 to 0."""
    bits = np.array(
        [
            (0xC14BD3E7, 0x39195BD2),
            (0xC0ACA9DB, 0x3CC29611),
            (0xBF51C8D1, 0x3F110FF7),
            (0xBEA93E34, 0x3F4B944F),
            (0xC1821F8D, 0x3754FBA4),
            (0xC1920A78, 0x36568212),
            (0xC1421F9A, 0x3969803F),
            (0xC169705C, 0x382A1471),
            (0xC12DF5C2, 0x3A0BD3BF),
            (0xC1959C91, 0x361D6DA8),
            (0xC182895D, 0x374D7D93),
            (0xBD605683, 0x3F7676A5),
            (0xC1892F47, 0x36E706D1),
            (0xBF2BF549, 0x3F20B4FB),
            (0xC1697D60, 0x3829B4A5),
            (0xC060D6D5, 0x3DB361AD),
            (0xC18A1BCF, 0x36D540BD),
            (0xC12D4481, 0x3A1015BC),
            (0xC0BFD0CC, 0x3C808323),
            (0xC107428A, 0x3B3AEAC9),
            (0xBF10FF29, 0x3F2CE0A6),
            (0xC01F1525, 0x3E36D3AE),
            (0xC156998D, 0x38C056EF),
            (0xC14F19C4, 0x390515E3),
        ],
        np.uint32,
    )
    np.testing.assert_array_equal(
        mufu.ex2(bits[:, 0].copy().view(np.float32)).view(np.uint32), bits[:, 1]
    )


def test_ex2_of_special_values() -> None:
    x = np.array([np.inf, -np.inf, np.nan, -127, 128, 0], np.float32)
    np.testing.assert_array_equal(mufu.ex2(x), [np.inf, 0, np.nan, 0, np.inf, 1])
