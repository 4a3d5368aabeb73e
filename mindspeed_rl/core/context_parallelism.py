"""The kinds of context parallelism, and the one of a run."""

from __future__ import annotations

from dataclasses import dataclass

#: Kinds of context parallelism, by Megatron's names.
CP_KINDS = ("all_gather", "p2p", "a2a", "a2a+p2p")
#: Algorithms of MindSpeed and their kinds. The adaptive ones choose blocks by an attention mask;
#: causal rows have none to choose by.
CP_ALGORITHMS = {
    "kvallgather_cp_algo": "all_gather",
    "megatron_cp_algo": "p2p",
    "ulysses_cp_algo": "a2a",
    "hybrid_cp_algo": "a2a+p2p",
    "adaptive_cp_algo": "p2p",
    "hybrid_adaptive_cp_algo": "a2a+p2p",
}


@dataclass(frozen=True, slots=True)
class ContextParallelism:
    """How the ranks that share a sequence attend to it together.

    Attributes:
        kind: One of ``CP_KINDS``: ``"all_gather"``: each gathers the keys and values
            of all; ``"p2p"``: these travel around a ring; ``"a2a"``: ranks exchange tokens for
            heads (Ulysses); ``"a2a+p2p"``: both.
        ulysses: Ranks that exchange tokens for heads; 1: none do.
        ring: Ranks around which keys travel; 1: they do not.
    """

    kind: str
    ulysses: int = 1
    ring: int = 1


#: The kind where no flag asks for another.
GATHERED = ContextParallelism("all_gather")
