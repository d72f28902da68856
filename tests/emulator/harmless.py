"""Mutants that change nothing that may happen, by kernel: place -> (how many, why)."""

_ONE_TILE = "a CTA computes one Q tile: nobody waits for this stage to be free again"
_FRESH = "the first wait for a stage that was never filled: its parity always passes"
_TAIL = "the producer's last waits keep a CTA of a cluster alive for its peers; there are none"
_COVERED = "the wgmma.fence before it covers these registers: nothing touches them in between"
_TURNS = "the warpgroups' turns are for speed alone: every product waits for its own operands"
_TWICE = "another barrier between the same accesses orders them already"
_NO_EARLIER = "one tile a CTA: no earlier store reads the buffer, and dV and dK have one each"
_LATER = (
    "Q is released after all products, and the producer waits for that before it loads dO again"
)
_NEVER = (
    "a second release, under a condition that never holds: it keeps other instructions in place"
)
_RING = (
    "every tile of Q has more K/V tiles than there are stages: before the next is posted, the "
    "producer waits for a stage that is released after the last was read"
)
_POSTED = (
    "two stages of Q: before its Q a tile is posted, once the last tile was read from the slot, by "
    "consumers that have released the Q before that"
)
_TOGETHER = "the commit of dK's store takes dV's along"
_NOT_AGAIN = (
    "nobody waits for these to be free: K and V come once, and five tiles of Q fill three stages"
)
_BOTH = (
    "the first stages were never filled; later ones of Q and dO are released once the products of "
    "both are over, and that of Q is waited for first"
)
_HANDED_OVER = (
    "the consumers waited for K before they handed over dS, which this warpgroup waits for"
)
_NEXT_COMMIT = "the next commit takes these products along, and one wait is for all of them"
_AT_END = "split by keys, products are over at the end of each tile; by columns, here"
_UNWRITTEN = "place_free: no thread wrote what is read next but dS, which has a fence of its own"
_NO_FENCE = (
    "PTX asks for tcgen05.fence where an mbarrier orders accesses of tensor memory; neither DSL "
    "nor FlashAttention-4 emits it, processors bear that, and the checker does not ask for it"
)
_WHOLE_WARP = (
    "only tensor memory is handed over: the warp does tcgen05.ld, .st and .wait as a whole"
)
_SAME_LANE = (
    "the lane that is elected, the first, is the one that wrote, or started the copy and waited"
)
_ALPHA_READ = (
    "S of this tile was issued behind the last product, which waited for correction_o, which comes "
    "after alpha was read; only after the last tile of a work does no such S come"
)
_S_BEHIND_O = (
    "alpha of this K/V tile comes from an S that was issued behind the product awaited, and a "
    "commit is for all products before it (not so with one tile of Q: see faults_sm100)"
)
_BOTH_Q = (
    "both tiles of Q are free once the same products are over: the wait for the first is enough"
)
_STAGES_LEFT = (
    "the wait for Q stands for all products of the last tile, and no tile here has more of K and V "
    "than there are stages (that with head_dim 128 does)"
)
_HIDDEN = "S of a K/V tile that the mask hides wholly from this tile of Q"
_NOTHING = (
    "P and dS of these queries are 0, there are none so far on: 0 times others, or added elsewhere"
)
_FIRST_TILE = (
    "the first tile of Q has more of K and V than there are stages: before the next is handed out, "
    "load has waited for products behind what this warp hands over later"
)
_AT_EXIT = "shared memory was read by then, and the end of a kernel waits for its writes"
_LAST_COMMIT = (
    "the tensor cores release the second tile of Q behind all else: the wait for that is enough as "
    "long as a thread's commits arrive in their order, which here they do and PTX does not promise"
)
_LAST_V = (
    "the tensor cores release the last of V behind all else: the wait for that is enough as long "
    "as a thread's commits arrive in their order, which here they do and PTX does not promise"
)
_PAST_END = "only scores of keys past the end differ: the mask replaces them"
_DRAINED = (
    "all that comes from the other CTA was waited for: by mma, by correction, by load at its end"
)
_UNUSED = (
    "a barrier that nobody uses, made as the other half of one or where a named barrier does the "
    "work; or that nobody waits for: a CTA computes one tile"
)
_NEXT_STORE = "the next commit takes this store along, and the wait behind that is for all"
_TAIL_BYTES = "the producer announces, at its end, a load that nobody makes"
_HIDDEN_O = (
    "O is multiplied only behind a K/V tile that the mask hides wholly from this tile of Q: it is 0"
)
_ONCE_FRESH = "waited for once, before anything arrives there: what this counts, nobody waits for"
_Q_FREED = "the wait for Q, just before, is for a product that came after LSE was read"
_DS_READ = "the dP awaited before was issued behind the products that read the dS before"
_UNWRITTEN_SINCE = (
    "nothing that a copy or a product reads was written to shared memory since the fence before it"
)
_LAST_BUFFER = "it keeps a buffer that nobody writes again: the CTA ends"
_TWO_WAITS = "two waits for the same copies, with none issued in between"
_AFTER_Q = "Q, waited for before, is free once the products that read this stage are over"
_OWN_CTA = "at the end: those who arrive are of its own CTA, which ends with the last of its warps"
_ALONE = "a CTA has an SM for itself: nobody else asks for tensor memory"

_BEFORE_DQ = (
    "it arrives before the last dQ, which the CTA waits for, too, as long as a thread's commits "
    "arrive in their order, which here they do and PTX does not promise"
)
_NOBODY = "one commit of S more than anyone waits for, behind the last product of dV"
_LAST_QT = "nothing is loaded over the last tile of Q, and dK's own commit comes behind the product"
_BOTH_HALVES = (
    "each CTA sends its half of dS, which is waited for next, behind a barrier of all that wrote "
    "the other half; S was loaded before that, and with the last tile no other comes"
)
_MUTUAL = (
    "each CTA sends the other as much, and mma waits for the halves of both: who announces which "
    "bytes is the same"
)
_USED = (
    "the mask has used every register by then, in ptxas's machine code, too, and processors wait "
    "for that, as this kernel relies on where it has no such wait"
)
_STORED = (
    "what was loaded is stored again, as dS, dV or dK, before anything is said to be free: data "
    "that depend on it, and processors wait for them"
)
_FIRST_HALF = "dS overwrites only what was loaded before the barrier of the first half"
_LANE_WAITS = (
    "missed: what one lane has waited for counts for its whole warp here, but on a GPU other lanes "
    "could write what a bulk reduction still reads"
)
_Q_FIRST = (
    "load waits for a stage of Q first, which is free once products behind dS of the tile that had "
    "these LSE and D are done"
)
_AWAITED = "one load for two products, and the first has waited for it"
_ROWS_FIRST = (
    "eight stages: before one comes round, load has waited for LSE and D of a tile whose dP was "
    "issued behind the products that read it"
)
_SECOND_S = "S of the second tile is issued before dP of the first, which is waited for first"
_NOT_ROUND = "five tiles of Q fill eight stages: nobody waits for these to be free"
_KEPT = "the cluster's barrier at the end keeps the CTA, too"
_ALL_AWAITED = (
    "tiles of Q are of odd numbers here: of the last dQ the second CTA has no part that it would "
    "tell the first of, and all else that arrives in a CTA is waited for in it"
)

_FENCE = "dropped: wgmma.fence.sync.aligned in `@cute.jit`"
_WAIT = "wait dropped: mbarrier.try_wait.parity.shared.b64 in "
_COMMIT_GROUP = "dropped: wgmma.commit_group.sync.aligned in "
_K_RELEASE = "mbarrier.arrive.shared.b64 in `k.release()`"
_RELEASE = "mbarrier.arrive.shared.b64 in `pipeline_q.consumer_release_w_index(0)`"
_WGMMA_WAIT = "wgmma.wait_group.sync.aligned in `warpgroup.wait_group(wg_wait)`"
_LAST_WAIT = "wgmma.wait_group.sync.aligned in `warpgroup.wait_group(0)`"
_INIT = "mbarrier.init.shared.b64 in `else pipeline.PipelineTmaAsync.create(`"
_BULK_WAIT = "cp.async.bulk.wait_group.read in `cute.arch.cp_async_bulk_wait_group(1, read=True)`"
_WAIT_STORE = (
    "cp.async.bulk.wait_group.read in "
    "`cute.arch.cp_async_bulk_wait_group(self.q_stage - 1 - stage, read=True)`"
)
_O_RELEASE = "mbarrier.arrive.shared.b64 in `pipeline_o_epi.consumer_release_w_index(stage)`"
_S_P_O_RELEASE = "mbarrier.arrive.shared.b64 in `pipeline_s_p_o.consumer_release_w_index(stage)`"
_Q_RELEASE = (
    "tcgen05.commit.cta_group::{}.mbarrier::arrive::one.shared::cluster.b64 in "
    "`pipeline_q.consumer_release_w_index(stage)`"
)
_Q_TAIL = "pipeline_q.producer_acquire_w_index_phase(self.q_stage - 1, q_producer_phase)"

_ARRIVE = "dropped: bar.warp.sync in "
_AFTER = "dropped: tcgen05.fence::after_thread_sync in `tmem.after_taking_over()`"
_BEFORE = "dropped: tcgen05.fence::before_thread_sync in `tmem.before_handing_over()`"
FORWARD_SM100 = {
    _ARRIVE + "`ring.of(t).commit(step)`": (4, _WHOLE_WARP),
    _ARRIVE + "`rings.correction_o.of(t).commit(done + step)`": (2, _WHOLE_WARP),
    _ARRIVE + "`load_tile.commit(number)`": (2, _SAME_LANE),
    _ARRIVE + "`rings.store_o.of(t).release(work)`": (2, _SAME_LANE),
    _AFTER: (10, _NO_FENCE),
    _BEFORE: (7, _NO_FENCE),
    _WAIT + "`rings.softmax_stats.of(t).acquire(step + work)`": (1, _ALPHA_READ),
    _WAIT + "`rings.mma_o.of(t).wait(done + step - 1)`": (2, _S_BEHIND_O),
    "dropped: cp.async.bulk.wait_group in `cute.arch.cp_async_bulk_wait_group(0)`": (1, _AT_EXIT),
    "one group more: cp.async.bulk.wait_group in `cute.arch.cp_async_bulk_wait_group(0)`": (
        1,
        _AT_EXIT,
    ),
}
_RELINQUISH = "dropped: tcgen05.relinquish_alloc_permit.{}.sync.aligned in "
_RELINQUISH += "`cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.tiles.pair)`"
FORWARD_SM100_64 = {
    **FORWARD_SM100,
    _RELINQUISH.format("cta_group::1"): (1, _ALONE),
    _WAIT + "`ring.acquire(work)`": (1, _BOTH_Q),
    _WAIT + "`ring.acquire(kv, self.tiles.v_bytes)`": (1, _STAGES_LEFT),
    _WAIT + "`ring.acquire(kv, self.tiles.k_bytes)`": (1, _STAGES_LEFT),
}

_COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 in"
_COMMIT_PAIR = (
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 in"
)
_WAIT_DQ = "cp.async.bulk.wait_group.read in `cute.arch.cp_async_bulk_wait_group(0, read={})`"


def _made(name: str, producer: str) -> str:
    """Where one of FlashAttention-4's pipelines of products is made."""
    consumer = "Async" if producer == "Umma" else "Umma"
    return f"`pipeline_{name} = cutlass.pipeline.Pipeline{producer}{consumer}.create(`"


def _unused(of: str, *counts: int) -> dict[str, tuple[int, str]]:
    """Of the barriers that a class makes: so many dropped, with a count too high and too low."""
    edits = "dropped", "count + 1", "count - 1"
    made = f"mbarrier.init.shared.b64 in `obj = {of}.create(*args, **kwargs)`"
    return {f"{e}: {made}": (n, _UNUSED) for e, n in zip(edits, counts, strict=True)}


def _begun_twice(*pipelines: tuple[str, str]) -> dict[str, tuple[int, str]]:
    """Each fences and synchronises for itself, and another one comes behind."""
    what = "fence.mbarrier_init.release.cluster", "bar.sync"
    return {
        f"dropped: {one} in {_made(*names)}": (1, _TWICE) for names in pipelines for one in what
    }


BACKWARD_SM100 = {
    _AFTER: (8, _NO_FENCE),
    _BEFORE: (7, _NO_FENCE),
    _ARRIVE + "`rings.reduce_dq.commit(number)`": (1, _WHOLE_WARP),
}
_P_COMMIT = _ARRIVE + "`rings.compute_p.commit(number)`"
BACKWARD_PAIR = {
    **BACKWARD_SM100,
    _RELINQUISH.format("cta_group::2"): (1, _ALONE),
    _ARRIVE + "`rings.load_rows.release(number)`": (2, _Q_FIRST),
    _WAIT + "`rings.load_rows.acquire(number)`": (1, _Q_FIRST),
    _WAIT + "`ring.drain(total * self.uses)`": (3, _KEPT),
}
HARMLESS: dict[str, dict[str, tuple[int, str]]] = {
    "forward-64": {
        _FENCE: (3, _COVERED),
        f"dropped: {_K_RELEASE}": (2, _NEVER),
        f"doubled: {_K_RELEASE}": (2, _NEVER),
        _WAIT + "`stage = load_q.acquire_and_advance()`": (1, _POSTED),
    },
    "forward-128": {
        _FENCE: (1, _COVERED),
        f"dropped: {_K_RELEASE}": (1, _NEVER),
        f"doubled: {_K_RELEASE}": (1, _NEVER),
        _WAIT + "`stage = load_tile.acquire_and_advance()`": (2, _RING),
        _WAIT + "`stage = load_q.acquire_and_advance()`": (1, _POSTED),
    },
    "backward-64": {
        _FENCE: (14, _COVERED),
        f"count + 1: {_INIT}": (4, _NOT_AGAIN),
        f"count - 1: {_INIT}": (2, _NOT_AGAIN),
        _WAIT + "`stage = load_k.acquire_and_advance()`": (1, _FRESH),
        _WAIT + "`stage = load_v.acquire_and_advance()`": (1, _FRESH),
        _WAIT + "`edge.producer_acquire(state)`": (3, _BOTH),
        _WAIT + "`edges.load_k.make_consumer().wait()`": (1, _HANDED_OVER),
        _COMMIT_GROUP
        + "`issue(share.mma_s, share.acc_S, share.tSrK.steps()[: len(Q)], Q, False)`": (
            2,
            _NEXT_COMMIT,
        ),
        _COMMIT_GROUP
        + "`issue(share.mma_dv, share.acc_dV, in_registers(as_operand_a(rP)), [dO[i]], "
        "True)`": (12, _NEXT_COMMIT),
        _COMMIT_GROUP
        + "`issue(share.mma_dk, share.acc_dK, in_registers(as_operand_a(rdS)), [Q[i]], "
        "True)`": (10, _NEXT_COMMIT),
        f"dropped: {_LAST_WAIT}": (1, _AT_END),
        f"one group more: {_LAST_WAIT}": (1, _AT_END),
        "dropped: fence.proxy.async.shared::cta in `cute.arch.fence_view_async_shared()`": (
            1,
            _UNWRITTEN,
        ),
    },
    "forward-sm100-64": FORWARD_SM100_64,
    "forward-sm100-queue": FORWARD_SM100_64,
    "forward-sm100-pair": {
        **FORWARD_SM100,
        _RELINQUISH.format("cta_group::2"): (1, _ALONE),
        _WAIT + "`rings.load_kv.drain(kv)`": (6, _LAST_COMMIT),
        _WAIT + "`rings.load_q.of(t).drain(work)`": (1, _LAST_COMMIT),
        _WAIT + "`ring.acquire(work)`": (1, _BOTH_Q),
        "dropped: barrier.cluster.wait in `cute.arch.cluster_wait()`": (1, _DRAINED),
    },
    "forward-sm100-128": {
        **FORWARD_SM100,
        _RELINQUISH.format("cta_group::1"): (1, _ALONE),
        _WAIT + "`ring.acquire(work)`": (1, _BOTH_Q),
        _ARRIVE + "`load_tile.release(number)`": (2, _FIRST_TILE),
    },
    "backward-sm100-64": {
        **BACKWARD_SM100,
        _P_COMMIT: (2, _WHOLE_WARP),
        _ARRIVE + "`cute.arch.sync_warp()`": (4, _LANE_WAITS),
        _RELINQUISH.format("cta_group::1"): (1, _ALONE),
        "count + 1: mbarrier.init.shared.b64 in `cute.arch.mbarrier_init(barriers + i, count)`": (
            6,
            _NOT_ROUND,
        ),
        "before the last product: tcgen05.commit.cta_group::1.mbarrier::arrive::one"
        ".shared::cluster.b64 in `rings.mma_s.commit(number, operands.leader)`": (1, _SECOND_S),
        _WAIT + "`rings.load_qdo.wait(use)`": (2, _AWAITED),
        "before the last product: tcgen05.commit.cta_group::1.mbarrier::arrive::one"
        ".shared::cluster.b64 in `rings.load_qdo.release(number * self.uses + self.use[product], "
        "operands.leader)`": (2, _ROWS_FIRST),
        _WAIT + "`ring.acquire(number, some_bytes)`": (2, _ROWS_FIRST),
    },
    "backward-sm100-128": {
        **BACKWARD_PAIR,
        _P_COMMIT: (2, _WHOLE_WARP),
        _ARRIVE + "`cute.arch.sync_warp()`": (8, _LANE_WAITS),
        "dropped: barrier.cluster.wait in `cute.arch.cluster_wait()`": (1, _ALL_AWAITED),
    },
    "backward-sm100-192": {
        **BACKWARD_PAIR,
        _ARRIVE + "`cute.arch.sync_warp()`": (6, _LANE_WAITS),
    },
    "fa4-forward": {
        _FENCE: (3, _COVERED),
        "dropped: bar.sync in `cute.arch.barrier(`": (1, _TURNS),
        "count + 1: mbarrier.init.shared.b64 in `obj = parent_cls.create(*args, **kwargs)`": (
            1,
            _ONE_TILE,
        ),
        f"dropped: {_RELEASE}": (1, _ONE_TILE),
        f"doubled: {_RELEASE}": (1, _ONE_TILE),
        _WAIT + "`pipeline_k.producer_acquire(kv_producer_state)`": (1, _FRESH),
        _WAIT + "`pipeline_q.producer_acquire_w_index_phase(0, q_producer_phase)`": (1, _FRESH),
        _WAIT + "`pipeline_v.producer_tail(kv_producer_state)`": (2, _TAIL),
    },
    "fa4-backward": {
        _FENCE: (3, _COVERED),
        _WAIT + "`pipeline_Q.producer_acquire(`": (1, _FRESH),
        _WAIT + "`pipeline_dO.producer_acquire(`": (1, _FRESH),
        _WAIT + "`pipeline_dO.producer_acquire(producer_state_dO_cur)`": (1, _FRESH),
        "dropped: wgmma.commit_group.sync.aligned in `warpgroup.commit_group()`": (1, _LATER),
        f"dropped: {_WGMMA_WAIT}": (1, _LATER),
        f"one group more: {_WGMMA_WAIT}": (1, _LATER),
        f"dropped: {_BULK_WAIT}": (2, _NO_EARLIER),
        f"one group more: {_BULK_WAIT}": (2, _NO_EARLIER),
        "dropped: bar.sync in `epi_barrier.arrive_and_wait()`": (2, _TWICE),
        "dropped: cp.async.bulk.commit_group in `cute.arch.cp_async_bulk_commit_group()`": (
            1,
            _TOGETHER,
        ),
    },
    "fa4-backward-sm100": {
        **_begun_twice(("S_P", "Umma"), ("dP", "Umma"), ("dKV", "Umma"), ("dQ", "Umma")),
        **_begun_twice(("dS", "Async"), ("P", "Async")),
        f"count + 1: mbarrier.init.shared.b64 in {_made('dP', 'Umma')}": (1, _ONCE_FRESH),
        f"count - 1: mbarrier.init.shared.b64 in {_made('dP', 'Umma')}": (1, _ONCE_FRESH),
        f"count + 1: mbarrier.init.shared.b64 in {_made('dKV', 'Umma')}": (2, _ONE_TILE),
        _WAIT + "`pipeline_Q.producer_acquire(`": (1, _FRESH),
        _WAIT + "`pipeline_dO.producer_acquire(`": (1, _FRESH),
        # The first, and in the loop.
        _WAIT + "`pipeline_LSE.producer_acquire(producer_state_Q_LSE)`": (
            2,
            f"{_FRESH}; {_Q_FREED}",
        ),
        _WAIT + "`pipeline_dPsum.producer_acquire(producer_state_dO_dPsum)`": (1, _FRESH),
        _WAIT + "`pipeline_S_P.sync_object_empty.wait(0, producer_phase_S)`": (1, _FRESH),
        _WAIT + "`pipeline_dP.sync_object_empty.wait(0, producer_phase_acc)`": (1, _FRESH),
        _WAIT + "`pipeline_dQ.sync_object_empty.wait(0, producer_phase_acc)`": (1, _FRESH),
        _WAIT + "`pipeline_dKV.sync_object_empty.wait(0, producer_phase_dKV)`": (1, _FRESH),
        _WAIT + "`pipeline_dKV.sync_object_empty.wait(1, producer_phase_dKV)`": (1, _FRESH),
        _WAIT + "`pipeline_Q.producer_tail(producer_state_Q_LSE.clone())`": (2, _TAIL),
        _WAIT + "`pipeline_LSE.producer_tail(producer_state_Q_LSE)`": (2, _TAIL),
        _WAIT + "`pipeline_dO.producer_tail(producer_state_dO_dPsum.clone())`": (1, _TAIL),
        _WAIT + "`pipeline_dPsum.producer_tail(producer_state_dO_dPsum)`": (1, _TAIL),
        _WAIT + "`pipeline_dS.producer_acquire(producer_state_dS)`": (1, _DS_READ),
        # Eight of the last products over queries, which number 64 there.
        "B on: tcgen05.mma.cta_group::1.kind::f16 in `@cute.jit`": (7, _NOTHING),
        "D on: tcgen05.mma.cta_group::1.kind::f16 in `@cute.jit`": (4, _NOTHING),
        f"dropped: {_COMMIT} `pipeline_P.consumer_release(consumer_state_P)`": (1, _ONE_TILE),
        f"doubled: {_COMMIT} `pipeline_P.consumer_release(consumer_state_P)`": (1, _ONE_TILE),
        f"before the last product: {_COMMIT} `pipeline_P.consumer_release(consumer_state_P)`": (
            1,
            _ONE_TILE,
        ),
        f"dropped: {_COMMIT} `pipeline_dS.consumer_release(consumer_state_dS)`": (1, _ONE_TILE),
        f"doubled: {_COMMIT} `pipeline_dS.consumer_release(consumer_state_dS)`": (1, _ONE_TILE),
        "dropped: mbarrier.arrive.shared.b64 in "
        "`pipeline_dKV.consumer_release(consumer_state_dKV)`": (2, _ONE_TILE),
        "doubled: mbarrier.arrive.shared.b64 in "
        "`pipeline_dKV.consumer_release(consumer_state_dKV)`": (2, _ONE_TILE),
        "dropped: tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned in "
        "`tmem.relinquish_alloc_permit()`": (1, _ALONE),
        # Of S, P (LSE was read before that of S), dQ; of dV and dK nobody waits for it.
        "dropped: bar.warp.sync in `cute.arch.sync_warp()`": (5, _WHOLE_WARP),
        "dropped: fence.proxy.async.shared::cta in `cute.arch.fence_view_async_shared()`": (
            3,
            _UNWRITTEN_SINCE,
        ),
        "dropped: bar.sync in `cute.arch.barrier(`": (1, _LAST_BUFFER),
        "dropped: bar.sync in `self.reduce_sync_barrier.arrive_and_wait()`": (1, _LAST_BUFFER),
        f"dropped: {_WAIT_DQ.format('read_flag')}": (1, _TWO_WAITS),
        f"one group more: {_WAIT_DQ.format('read_flag')}": (1, _TWO_WAITS),
        f"dropped: {_WAIT_DQ.format('True')}": (1, _TWO_WAITS),
        f"one group more: {_WAIT_DQ.format('True')}": (1, _TWO_WAITS),
    },
    "fa4-backward-pair": {
        **{
            f"{edit}: mbarrier.init.shared.b64 in "
            "`cute.arch.mbarrier_init(dS_cluster_empty_mbar_ptr, 1)`": (1, _UNUSED)
            for edit in ("dropped", "count + 1")
        },
        **{
            f"dropped: fence.mbarrier_init.release.cluster in {where}": (1, _TWICE)
            for where in (
                "`tmem = cutlass.utils.TmemAllocator(`",
                *(_made(name, "Umma") for name in ("S_P", "dP", "dKV", "dQ")),
                _made("dS", "Async"),
            )
        },
        f"count + 1: mbarrier.init.shared.b64 in {_made('dKV', 'Umma')}": (2, _ONE_TILE),
        # Of that which says that K is free.
        "count + 1: mbarrier.init.shared.b64 in `obj = parent_cls.create(*args, **kwargs)`": (
            1,
            _ONE_TILE,
        ),
        **{
            _WAIT + f"`pipeline_{wait}`": (1, _FRESH)
            for wait in (
                "Q.producer_acquire(",
                "LSE.producer_acquire(producer_state_Q_LSE)",
                "dO.producer_acquire(",
                "dPsum.producer_acquire(producer_state_dO_dPsum)",
                "Kt.producer_acquire(producer_state_Kt)",
                "S_P.sync_object_empty.wait(0, producer_phase_acc)",
                "dP.sync_object_empty.wait(0, producer_phase_acc)",
                "dKV.sync_object_empty.wait(0, producer_phase_dKV)",
                "dKV.sync_object_empty.wait(1, producer_phase_dKV)",
            )
        },
        _WAIT + "`pipeline_Q.producer_tail(producer_state_Q_LSE.clone())`": (1, _BEFORE_DQ),
        _WAIT + "`pipeline_Qt.producer_tail(producer_state_Qt)`": (1, _BEFORE_DQ),
        _WAIT + "`pipeline_dO.producer_tail(producer_state_dO_dPsum.clone())`": (1, _BEFORE_DQ),
        _WAIT + "`pipeline_LSE.producer_tail(producer_state_Q_LSE)`": (1, _OWN_CTA),
        _WAIT + "`pipeline_dPsum.producer_tail(producer_state_dO_dPsum)`": (1, _OWN_CTA),
        **{
            f"{edit}: {_COMMIT_PAIR} `pipeline_{what}`": (1, why)
            for edit in ("dropped", "doubled", "to CTA 0 alone", "to CTA 1 alone")
            for what, why in (
                ("S_P.sync_object_full.arrive(0, pipeline_S_P.producer_mask, cta_group)", _NOBODY),
                ("dS.consumer_release(consumer_state_dS)", _ONE_TILE),
                ("Kt.consumer_release(consumer_state_Kt)", _ONE_TILE),
            )
        },
        # Four of the last products over queries, of which the last tile has 64 of 128.
        "A on: tcgen05.mma.cta_group::2.kind::f16 in `@cute.jit`": (4, _NOTHING),
        "B on: tcgen05.mma.cta_group::2.kind::f16 in `@cute.jit`": (4, _NOTHING),
        f"before the last product: {_COMMIT_PAIR} "
        "`pipeline_Qt.consumer_release(consumer_state_Qt)`": (1, _LAST_QT),
        _WAIT + "`pipeline_dS.consumer_wait(consumer_state_dS)`": (1, _BOTH_HALVES),
        "dropped: tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned in "
        "`tmem.relinquish_alloc_permit()`": (1, _ALONE),
        "the other CTA: mapa.shared::cluster.u32 in "
        "`storage = smem.allocate(self.shared_storage)`": (1, _MUTUAL),
        # Of S in the first tile; of the second half of dP, of dV, of dK.
        "dropped: tcgen05.wait::ld.sync.aligned in `cute.arch.fence_view_async_tmem_load()`": (
            4,
            f"{_USED}; {_STORED}",
        ),
        "dropped: bar.sync in `self.compute_sync_barrier.arrive_and_wait()`": (1, _FIRST_HALF),
        # Of the last kernel.
        "dropped: bar.sync in "
        "`cute.arch.barrier(barrier_id=8, number_of_threads=num_reduce_threads)`": (1, _TWICE),
        "dropped: bar.sync in `cute.arch.barrier()  # make sure all smem stores are done`": (
            1,
            _TWICE,
        ),
        # Behind P, dV and dK, and of dQ in the last kernel, which lanes read.
        "dropped: fence.proxy.async.shared::cta in `cute.arch.fence_view_async_shared()`": (
            4,
            _UNWRITTEN_SINCE,
        ),
        # Of dV and dK nobody waits for it.
        "dropped: bar.warp.sync in `cute.arch.sync_warp()`": (3, _WHOLE_WARP),
        **{
            f"{edit} in `pipeline_dKV.consumer_release(consumer_state_dKV)`": (2, _ONE_TILE)
            for edit in (
                "the other CTA: mapa.shared::cluster.u32",
                "dropped: mbarrier.arrive.shared::cluster.b64",
                "doubled: mbarrier.arrive.shared::cluster.b64",
            )
        },
        "dropped: bar.sync in `cute.arch.barrier(`": (1, _LAST_BUFFER),
        "dropped: bar.sync in `self.reduce_sync_barrier.arrive_and_wait()`": (1, _LAST_BUFFER),
        **{
            f"{edit}: {_WAIT_DQ.format(read)}": (1, _TWO_WAITS)
            for edit in ("dropped", "one group more")
            for read in ("read_flag", "True")
        },
    },
    "fa4-forward-pair": {
        "dropped: fence.mbarrier_init.release.cluster in `tmem = cutlass.utils.TmemAllocator(`": (
            1,
            _TWICE,
        ),
        # Nobody says that O and the second half of P are free, nor that statistics are full.
        **_unused("parent_cls", 4, 4, 2),
        **_unused("PipelineAsyncOg", 2, 2, 2),
        _WAIT + "`pipeline_q.producer_acquire_w_index_phase(stage, phase)`": (1, _BOTH_Q),
        _WAIT + "`pipeline_kv.producer_acquire(producer_state, **extra_kwargs)`": (1, _AFTER_Q),
        # Of six stages.
        _WAIT + "`pipeline_kv.producer_tail(kv_producer_state)`": (5, _LAST_V),
        _WAIT + f"`{_Q_TAIL}`": (1, _LAST_V),
        **{
            f"{edit}: mbarrier.arrive.expect_tx.shared.b64 in `{_Q_TAIL}`": (1, _TAIL_BYTES)
            for edit in ("dropped", "bytes halved", "bytes doubled", "bytes not expected")
        },
        "columns on: tcgen05.ld.sync.aligned.32x32b.x32.b32 in "
        "`cute.copy(thr_tmem_load, tStS_t2r, tSrS_t2r)`": (1, _PAST_END),
        "dropped: bar.warp.sync in `cute.arch.sync_warp()`": (2, _WHOLE_WARP),
        "dropped: tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned in "
        "`tmem.relinquish_alloc_permit()`": (1, _ALONE),
        _WAIT + "`pipeline_sm_stats.producer_acquire_w_index_phase(stage, "
        "sm_stats_producer_phase)`": (1, _OWN_CTA),
        _WAIT + "`pipeline_o_epi.producer_acquire_w_index_phase(self.q_stage - 1, "
        "corr_epi_producer_phase)`": (1, _OWN_CTA),
    },
    "fa4-forward-sm100": {
        **_unused("parent_cls", 4, 5, 2),
        **_unused("PipelineAsyncOg", 2, 3, 2),
        "dropped: cp.async.bulk.commit_group in `cute.arch.cp_async_bulk_commit_group()`": (
            1,
            _NEXT_STORE,
        ),
        f"dropped: {_WAIT_STORE}": (1, _ONE_TILE),
        f"one group more: {_WAIT_STORE}": (1, _ONE_TILE),
        f"dropped: {_O_RELEASE}": (1, _ONE_TILE),
        f"doubled: {_O_RELEASE}": (1, _ONE_TILE),
        f"dropped: {_S_P_O_RELEASE}": (2, _ONE_TILE),
        f"doubled: {_S_P_O_RELEASE}": (2, _ONE_TILE),
        f"dropped: {_Q_RELEASE.format(1)}": (1, _ONE_TILE),
        f"doubled: {_Q_RELEASE.format(1)}": (1, _ONE_TILE),
        _WAIT + "`pipeline_kv.producer_acquire(producer_state, **extra_kwargs)`": (2, _FRESH),
        _WAIT + "`pipeline_q.producer_acquire_w_index_phase(stage, phase)`": (2, _FRESH),
        _WAIT + "`pipeline_o_epi.producer_acquire_w_index_phase(stage, corr_epi_producer_phase)`": (
            2,
            _FRESH,
        ),
        # The first and the last.
        _WAIT + "`pipeline_sm_stats.producer_acquire_w_index_phase(stage, "
        "sm_stats_producer_phase)`": (2, f"{_FRESH}; {_TAIL}"),
        _WAIT + "`pipeline_kv.producer_tail(kv_producer_state)`": (10, _TAIL),
        _WAIT + f"`{_Q_TAIL}`": (1, _TAIL),
        **{
            f"{edit}: mbarrier.arrive.expect_tx.shared.b64 in `{_Q_TAIL}`": (1, _TAIL_BYTES)
            for edit in ("dropped", "bytes halved", "bytes doubled", "bytes not expected")
        },
        _WAIT + "`pipeline_o_epi.producer_acquire_w_index_phase(self.q_stage - 1, "
        "corr_epi_producer_phase)`": (1, _TAIL),
        "adds or not: flipped: tcgen05.mma.cta_group::1.kind::f16 in `@cute.jit`": (3, _HIDDEN),
        "columns on: tcgen05.ld.sync.aligned.32x32b.x16.b32 in "
        "`cute.copy(thr_tmem_load, tOtO_t2r_i, tOrO_frg)`": (2, _HIDDEN_O),
        "dropped: bar.warp.sync in `cute.arch.sync_warp()`": (3, _WHOLE_WARP),
        "dropped: tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned in "
        "`tmem.relinquish_alloc_permit()`": (1, _ALONE),
    },
}
