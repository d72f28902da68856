"""`register`: models of Hugging Face's transformers compute their attention with our kernels.

transformers asks twice. Once for each pass of a model it has `mask` say which keys a query sees; in
each layer it hands what that returned to `attend`. `mask` takes what the kernels can do: all keys,
or those up to the query's own position, of one run of tokens in each sequence, with padding before
and behind it. It reads where that run begins and ends from the 2D mask, which waits for the GPU
once; `attend` then runs sequences that begin and end alike together, without keys of padding.

Everything else is refused. What a padding token itself gets is of no use, and unspecified: no other
token sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from . import checks
from .autograd import attention
from .packages import version

NEEDED = (5, 4)  # the first whose mask functions are asked with q_length and q_offset


class Run(NamedTuple):
    """Keys of one sequence: from the first up to the end."""

    first: int
    end: int


@dataclass(frozen=True)
class Mask:
    """What `mask` tells `attend` of each sequence of a batch, by way of the model."""

    causal: bool  # aligned at the last query and the last key of a run
    len_q: int
    len_kv: int
    runs: tuple[Run, ...]

    @property
    def ndim(self) -> int:
        """Not 2: `generate` may have it made ahead, and transformers then asks for this."""
        return 4


def register(name: str = "hopwell") -> None:
    """Make attention by our kernels one that models of transformers can be told to use.

    `AutoModel.from_pretrained(..., attn_implementation=name, dtype=torch.bfloat16)`, or
    `model.set_attn_implementation(name)`. Grouped queries need no copies of k and v; padding is
    left out of the computation. Dropout, softcaps, sliding windows narrower than the keys are many,
    sequences packed in one row, and masks given in 4D raise NotImplementedError when the model
    runs.

    Args:
        name: of the implementation; an existing one is replaced. transformers takes a name with
            "flash" in it for FlashAttention's, and "hopwell" has none.

    Raises:
        ImportError: transformers is missing or older than 5.4.
    """
    checks.transformers_version(version("transformers"), NEEDED)
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)


# ---- once for each pass of a model ---------------------------------------------------------------


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | Mask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,  # what other implementations need to build their masks
) -> Mask | None:
    """Which keys the queries see; called by transformers.

    Args:
        batch_size, q_length, kv_length: of the attention to come.
        q_offset, kv_offset: positions of the first query and key in their sequence.
        mask_function: the rule, one of transformers' own or made up from them.
        attention_mask: (batch, len) bool, false where a token is padding; len may be less than
            the keys are many, as of a cache that is not full. Or what this function returned.
        local_size: size of the window or chunk, where the rule is a window's.
        allow_is_causal_skip, allow_is_bidirectional_skip: the rule has nothing that these do not
            say, and the model takes None as a mask.

    Returns:
        None, if the module's own `is_causal` says it all.

    Raises:
        NotImplementedError: another rule, or padding between tokens of a sequence.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    # A window that has room for every key is none.
    wide = local_size is not None and not kv_offset and kv_length <= local_size
    if mask_function is causal_mask_function:
        causal = True
    elif mask_function is bidirectional_mask_function:
        causal = False
    elif wide and allow_is_causal_skip != allow_is_bidirectional_skip:
        causal = allow_is_causal_skip
    elif local_size is not None:
        checks.model_mask(f"a window or chunks of {local_size} tokens are asked for")
    else:
        checks.model_mask(
            "the model asks for a mask of its own (sequences packed, a prefix, blocks)"
        )

    if isinstance(attention_mask, Mask):
        if attention_mask.causal != causal:
            checks.model_mask("a mask made for another rule, causal or not, is given back")
        return attention_mask
    first_kv = int(kv_offset)
    first_q = int(q_offset) - first_kv  # where the first query stands among the keys
    end_q = first_q + q_length
    if causal and not 0 <= first_q <= end_q <= kv_length:
        checks.model_mask(
            f"{q_length} queries from position {int(q_offset)} go beyond {kv_length} keys from "
            f"{first_kv}"
        )
    runs = [Run(0, kv_length)] * batch_size
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            checks.model_mask(f"attention_mask has shape {tuple(attention_mask.shape)}")
        missing = max(first_kv + kv_length - attention_mask.shape[1], 0)
        tokens = torch.nn.functional.pad(attention_mask, (0, missing))
        runs = _runs(tokens[:, first_kv : first_kv + kv_length].expand(batch_size, -1))
    if causal:  # then no token sees the padding behind it
        runs = [Run(run.first, end_q) for run in runs]
    skip = allow_is_causal_skip if causal else allow_is_bidirectional_skip
    plain = all(run == (0, kv_length) for run in runs)
    if skip and plain and (not causal or q_length in (1, kv_length)):
        return None
    return Mask(causal, q_length, kv_length, tuple(runs))


def _runs(tokens: torch.Tensor) -> list[Run]:
    """Where the tokens of each sequence begin and end: (batch, len) bool, one run in each row."""
    count = tokens.shape[1]
    ones = tokens.int()
    first, behind = ones.argmax(1), ones.flip(1).argmax(1)  # of the largest, the first
    runs = []
    for start, left, seen in torch.stack((first, behind, ones.sum(1)), 1).tolist():
        end = count - left
        if seen and seen != end - start:
            checks.model_mask(
                f"attention_mask has {end - start - seen} zeros between the ones of a sequence"
            )
        runs.append(Run(start, end) if seen else Run(count, count))
    return runs


# ---- in each layer -------------------------------------------------------------------------------


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer; called by its module.

    Args:
        module: whose `is_causal` counts where there is no mask and no argument of that name.
        query: (batch, heads, len_q, head_dim), fp16 or bf16.
        key, value: (batch, heads_kv, len_kv, head_dim).
        attention_mask: what `mask` returned.
        dropout, others: with nothing in them that the kernels have not; `checks.TRANSFORMERS` has
            the list. Others, as of modules for their own parts, are not looked at.
        sliding_window: at least len_kv.
        position_ids: (batch, len) positions; one after the other where there is no mask.

    Returns:
        ((batch, len_q, heads, head_dim), None): there are no weights to return.

    Raises:
        NotImplementedError: the kernels cannot do what is asked for.
        TypeError, ValueError: as `hopwell.attention`.
    """
    checks.neutral(checks.TRANSFORMERS, {"dropout": dropout, **others})
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    len_q, len_kv = q.shape[1], k.shape[1]
    checks.model_window(sliding_window, len_kv)
    if attention_mask is None:
        wanted = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = bool(wanted) and len_q > 1
        if causal and len_q != len_kv:
            checks.model_mask(f"is_causal, without a mask, for {len_q} queries and {len_kv} keys")
        if len_q == len_kv and position_ids is not None:
            _in_one_piece(position_ids)
        runs = None
    elif not isinstance(attention_mask, Mask):
        shape = tuple(getattr(attention_mask, "shape", ()))
        checks.model_mask(f"attention_mask is a {type(attention_mask).__name__} of shape {shape}")
    else:
        causal, runs = attention_mask.causal, attention_mask.runs
        expected = len(runs), attention_mask.len_q, attention_mask.len_kv
        if (q.shape[0], len_q, len_kv) != expected:
            checks.model_mask(
                f"q is {tuple(query.shape)} and k {tuple(key.shape)}, but the mask is for batch, "
                f"len_q and len_kv {expected}"
            )

    dense = partial(attention, scale=scaling, causal=causal, deterministic=deterministic)
    return (dense(q, k, v) if runs is None else _by_runs(dense, q, k, v, runs)), None


def _by_runs(
    dense: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    runs: tuple[Run, ...],
) -> torch.Tensor:
    """Sequences with one run together, neighbours in the batch.

    All their queries are in it: under a causal mask those before the run see nothing, and get 0.
    """
    groups = [(run, len(list(alike))) for run, alike in groupby(runs)]
    parts = (tensor.split([count for _, count in groups]) for tensor in (q, k, v))
    return torch.cat(
        [
            dense(q, k[:, run.first : run.end], v[:, run.first : run.end])
            for (run, _), q, k, v in zip(groups, *parts, strict=True)
        ]
    )


_seen: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _in_one_piece(position_ids: torch.Tensor) -> None:
    """Refuse sequences packed in one row, which transformers itself finds only where there is no
    cache; looked up once for all layers, for it waits for the GPU."""
    if position_ids.ndim != 2 or position_ids.shape[1] < 2 or position_ids in _seen:
        return
    if position_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # nothing can be read then, and the call that warmed this one has looked
    if (position_ids.diff(dim=1) != 1).any():
        checks.model_mask("position_ids do not follow one another: sequences packed in one row")
    _seen[position_ids] = True
