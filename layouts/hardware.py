"""What an SM has and what its instructions take: the numbers that configurations are checked with.

Nothing here imports the compiler.
"""

WARP_THREADS = 32
WARPGROUP_WARPS = 4
QUAD_THREADS = 4  # lanes that share a row of an accumulator
WARPGROUP_THREADS = WARPGROUP_WARPS * WARP_THREADS

SMEM_BYTES = dict.fromkeys(("sm_90a", "sm_100a", "sm_103a"), 227 * 1024)  # of one CTA
SMS = 132  # of an H100 or H200; a GPU with fewer runs the same grid in more than one wave
SMS_BLACKWELL = 148  # of a B200
L2_BYTES = 32 * 2**20  # that K and V of a section of heads may fill, of the 50 MB there are
REGISTER_FILE = 65536  # 32-bit registers of an SM
REGISTERS_PER_THREAD = range(24, 257, 8)  # what setmaxnreg takes

NAMED_BARRIERS = range(1, 16)  # number 0 belongs to the barrier of the whole CTA
TRANSACTION_BYTES = 2**20 - 1  # that one mbarrier can expect

TMEM_COLUMNS = 512  # of 32 bits, in each of 128 lanes
UMMA_ROWS = 128  # of a tcgen05.mma by one CTA
UMMA_DEPTH = 16  # for 16-bit operands
WGMMA_ROWS = 64
WGMMA_DEPTH = 16  # for 16-bit operands
OCTET = 8  # columns of a row of an accumulator that a quad holds, two a lane
TMA_ALIGNMENT_BYTES = 16  # of base addresses and strides
SWIZZLE_BYTES = 1024  # the pattern of a swizzled buffer repeats at this alignment


def registers_at_entry(threads: int) -> int:
    """Registers that each thread of a CTA of `threads` starts with when it has the SM to itself.

    setmaxnreg moves registers between warpgroups but never gets more than these in all.
    """
    granule = REGISTERS_PER_THREAD.step
    return min(REGISTER_FILE // threads // granule * granule, REGISTERS_PER_THREAD[-1])
