"""Mutants that change nothing that may happen, by kernel: place -> (how many, why)."""

_ONE_TILE = "a CTA computes one Q tile: nobody waits for this stage to be free again"
_FRESH = "the first wait on a stage that was never filled: its parity always passes"
_TAIL = "the producer's last wait only keeps a CTA of a cluster alive for its peers; there is none"
_COVERED = "the wgmma.fence before it covers these registers: nothing touches them in between"
_TURNS = "the turns of the warpgroups are for speed: every product waits for its own operands"

HARMLESS: dict[str, dict[str, tuple[int, str]]] = {}
