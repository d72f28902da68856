"""Mutants that change nothing that may happen, by kernel: place -> (how many, why)."""

_ONE_TILE = "a CTA computes one Q tile: nobody waits for this stage to be free again"
_FRESH = "the first wait for a stage that was never filled: its parity always passes"
_TAIL = "the producer's last waits keep a CTA of a cluster alive for its peers; there are none"
_COVERED = "the wgmma.fence before it covers these registers: nothing touches them in between"
_TURNS = "the warpgroups' turns are for speed alone: every product waits for its own operands"

_FENCE = "dropped: wgmma.fence.sync.aligned in `@cute.jit`"
_TURN = (
    "dropped: bar.sync in `cute.arch.barrier(barrier_id=self.first + self.own, "
    "number_of_threads=self.threads)`"
)
_WAIT = "wait dropped: mbarrier.try_wait.parity.shared.b64 in "
_RELEASE = "mbarrier.arrive.shared.b64 in `pipeline_q.consumer_release_w_index(0)`"

HARMLESS: dict[str, dict[str, tuple[int, str]]] = {
    "forward-64": {_FENCE: (3, _COVERED), _TURN: (1, _TURNS)},
    "forward-128": {_FENCE: (1, _COVERED), _TURN: (1, _TURNS)},
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
}
