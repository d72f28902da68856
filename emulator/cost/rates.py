"""Rates and latencies, a table a GPU, each number with its source.

`micro` as a source is `python -m hopwell.benchmarks.micro` on one H200; `assumed` says of a number
that nobody measured, and what it was taken from. Nothing of Blackwell was measured here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


class Known(float):
    """A number and where it is from."""

    source: str

    def __new__(cls, value: float, source: str = "") -> Known:
        made = super().__new__(cls, value)
        made.source = source
        return made


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. Rates are of an SM and a clock, latencies in clocks, unless they say otherwise."""

    name: str
    sms: int
    clock_mhz: Known  # of the SMs, under no limit of power
    busy_mhz: Known  # lost for each share of the time that the tensor cores are busy,
    busy_free: Known  # beyond this one: the limit of power
    schedulers: int = 4  # warp w of a CTA is on scheduler w % 4
    issue: Known  # warp-instructions of a scheduler
    fma_lanes: Known  # FP32 additions, multiplications, FMAs
    packed_fma_lanes: Known  # of those on pairs, each lane counted once
    alu_lanes: Known  # integers, logic, comparisons, maxima, selections
    convert_lanes: Known  # pairs of FP32 to 16 bits
    mufu_lanes: Known
    exchange_lanes: Known  # shuffles, and accesses to shared memory
    shared_bytes: Known  # of shared memory, also for operands of the tensor cores
    store_bytes: Known  # stored to global memory by warps, in pieces of 64 bytes
    tensor: Known  # share of the peak rate, which `wgmma_clocks` and `Plan.clocks` count in
    # Share of its rate that each unit keeps while the tensor cores run.
    beside_issue: Known
    beside_fma: Known
    beside_alu: Known
    beside_mufu: Known
    beside_exchange: Known
    # Clocks of the register file's ports, which warps share with products, of a clock of each unit.
    ports_fma: Known
    ports_alu: Known
    ports_mufu: Known
    beside_latency: Known  # clocks that a result comes later beside products
    max_inputs: Known  # of an instruction that takes the maximum
    tmem_bytes: Known  # of a warp: tcgen05.ld and st; 0 where there is no tensor memory
    l2_bytes: Known  # to an SM, when all read
    dram_bytes: Known  # GB/s of the GPU
    alu_latency: Known
    mufu_latency: Known
    exchange_latency: Known
    branch_latency: Known  # from its predicate to what is behind it
    jump_latency: Known  # of a branch that is taken
    global_latency: Known  # a load or an atomic of a lane
    mbarrier_latency: Known  # from the last arrival until a waiting warp's test succeeds
    test_latency: Known  # of such a test
    barrier_latency: Known  # the same of bar.sync
    tma_latency: Known  # from the copy's issue until its bytes are counted
    tma_issue: Known  # between two boxes
    mma_latency: Known  # from the last product's end until a waiting warp, or mbarrier, knows
    mma_start: Known  # from the issue of a product until the tensor cores begin
    mma_depth: Known  # products of a warpgroup, or a thread, that may be issued and not done
    tmem_latency: Known
    launch_us: Known  # between two kernels in one stream
    start: Known  # from the start of a CTA to its first instruction
    l2_add_bytes: Known  # added to global memory, when all SMs do
    peer_bytes: Known  # stored into the shared memory of another CTA of the cluster
    peer_latency: Known  # of such a store
    unseen: Known  # all clocks times this: what the model does not see
    l2_add_queue: Known  # bytes on their way, beyond which who adds has to wait

    def mhz(self, tensor: float) -> float:
        """The clock that the card keeps, with the tensor cores busy for that share of the time."""
        return self.clock_mhz - self.busy_mhz * max(0.0, tensor - self.busy_free)


_NVIDIA = "NVIDIA, CUDA programming guide, throughput of native arithmetic instructions"
_H200 = Gpu(
    name="H200",
    sms=132,
    clock_mhz=Known(1980, "nvidia-smi, highest SM clock"),
    busy_mhz=Known(749, "fitted: docs/cost.md"),
    busy_free=Known(0.192, "fitted: docs/cost.md"),
    issue=Known(1, "NVIDIA, Hopper architecture whitepaper"),
    fma_lanes=Known(128, _NVIDIA),
    packed_fma_lanes=Known(128, "no packed FMA on sm_90"),
    alu_lanes=Known(64, _NVIDIA),
    convert_lanes=Known(64, _NVIDIA),
    mufu_lanes=Known(16, _NVIDIA),
    exchange_lanes=Known(32, _NVIDIA),
    shared_bytes=Known(128, "NVIDIA, Hopper tuning guide"),
    store_bytes=Known(22, "micro: when all SMs store; 31 one alone, or half of them"),
    tensor=Known(1, "NVIDIA, Hopper architecture whitepaper: 4096 FLOP of 16-bit types"),
    beside_issue=Known(0.76, "micro: as beside_fma, which nothing but issue limits alone"),
    beside_fma=Known(0.76, "micro: two warps beside products of 128 columns, 1.52 clocks of 1.15"),
    beside_alu=Known(0.51, "micro"),
    beside_mufu=Known(0.77, "micro"),
    beside_exchange=Known(0.31, "micro: products read shared memory too"),
    ports_fma=Known(1.32, "micro: as beside_fma"),
    ports_alu=Known(1.89, "micro: the same of maxima, 3.87 clocks of 2.05"),
    ports_mufu=Known(0.71, "micro: what is left of 1.51 times the mix of a softmax alone"),
    beside_latency=Known(3, "micro: 3.2 to 3.6 a link of the softmax chains"),
    max_inputs=Known(2, "SASS"),
    tmem_bytes=Known(0, "none"),
    l2_bytes=Known(35.3, "micro"),
    dram_bytes=Known(4800, "NVIDIA, H200 data sheet"),
    alu_latency=Known(4.5, "micro: 4 of an FMA, 5 of an integer addition"),
    mufu_latency=Known(17, "micro"),
    exchange_latency=Known(24, "micro"),
    branch_latency=Known(10, "assumed: about two ALU latencies"),
    jump_latency=Known(26, "micro: in a loop of 20 KiB; 94 in one of 36"),
    global_latency=Known(344, "micro: an atomic; a load 263"),
    mbarrier_latency=Known(10, "micro: 52 with the instructions of both sides and the test"),
    test_latency=Known(37, "micro: 42 of a test and its branch, of a phase that is over"),
    barrier_latency=Known(20, "micro: 24 with the instructions of both sides"),
    tma_latency=Known(375, "micro: 849 of 16 KiB, all SMs at once, less their transfer"),
    tma_issue=Known(4, "assumed: never binds"),
    mma_latency=Known(48, "micro: 68 clocks more than the products, less mma_start"),
    mma_start=Known(20, "micro: issue of one product"),
    mma_depth=Known(7, "micro: 463 clocks of 64 left when 16 are issued"),
    tmem_latency=Known(0, "none"),
    launch_us=Known(0.53, "micro"),
    start=Known(700, "assumed; only the first tile of a CTA sees it"),
    l2_add_bytes=Known(11.4, "benchmarks/NOTES.md: 1,500 bytes a clock of the whole L2"),
    peer_bytes=Known(22.2, "micro: 32 KiB more take 1,478 clocks, 33 pairs at once; 21 one pair"),
    peer_latency=Known(332, "micro: what the first 32 KiB and their fence take besides"),
    unseen=Known(1.068, "fitted: docs/cost.md"),
    l2_add_queue=Known(16384, "fitted: docs/cost.md"),
)
_H100 = replace(
    _H200,
    name="H100",
    dram_bytes=Known(3350, "NVIDIA, H100 SXM data sheet"),
)
_B200 = replace(
    _H200,
    name="B200",
    sms=148,
    clock_mhz=Known(1856, "NVIDIA: 2.25 PFLOP/s dense of 148 SMs"),
    busy_mhz=Known(0, "assumed: no limit of power"),
    busy_free=Known(0, "assumed: no limit of power"),
    unseen=Known(1, "nothing to fit to"),
    packed_fma_lanes=Known(128, "SASS: ptxas leaves two clocks between two packed FMAs"),
    tensor=Known(1, "NVIDIA: 2.25 PFLOP/s dense, 8192 FLOP of 16-bit types"),
    beside_issue=Known(1, "assumed: products touch no registers"),
    beside_fma=Known(1, "assumed: as above"),
    beside_alu=Known(1, "assumed: as above"),
    beside_mufu=Known(1, "assumed: as above"),
    beside_exchange=Known(0.5, "assumed: in turn; the H200's writes keep 0.57, reads 0.29"),
    ports_fma=Known(0, "assumed: products touch no registers"),
    ports_alu=Known(0, "assumed: as above"),
    ports_mufu=Known(0, "assumed: as above"),
    beside_latency=Known(0, "assumed: as above"),
    max_inputs=Known(3, "SASS: ptxas makes one FMNMX3 of two maxima"),
    tmem_bytes=Known(128, "assumed: 4 bytes a lane and clock"),
    l2_bytes=Known(45, "assumed: the H200's and a quarter more"),
    l2_add_bytes=Known(16.2, "micro on the H200: bulk additions, all SMs; half of them 25 each"),
    dram_bytes=Known(8000, "NVIDIA, B200 data sheet"),
    mma_latency=Known(60, "assumed: about the H200's"),
    mma_start=Known(40, "assumed: about the H200's"),
    mma_depth=Known(64, "assumed: none"),
    tmem_latency=Known(30, "assumed: as shared memory"),
)
_B300 = replace(
    _B200,
    name="B300",
    mufu_lanes=Known(32, "NVIDIA, Blackwell Ultra: twice the exponentials"),
)
GPUS = {gpu.name: gpu for gpu in (_H100, _H200, _B200, _B300)}
DEFAULT = {"sm_90a": "H200", "sm_100a": "B200", "sm_103a": "B300"}  # by SM version
