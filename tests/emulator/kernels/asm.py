"""Inline PTX with typed operands, for instructions the DSL has no function for."""

from __future__ import annotations

from typing import Any

from cutlass import Float32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

_CONSTRAINT = {16: "h", 32: "r", 64: "l"}


def _constraint(dtype: Any) -> str:
    return "f" if dtype is Float32 else _CONSTRAINT[dtype.width]


@dsl_user_op
def asm(
    text: str, outs: tuple[Any, ...], *args: Any, loc: Any = None, ip: Any = None
) -> tuple[Any, ...]:
    """Emit `text`; operands are $0.. for `outs` (DSL number types), then one for each of `args`.

    Returns one value of its type for each of `outs`. Never moved, merged or removed.
    """
    constraints = [f"={_constraint(t)}" for t in outs] + [_constraint(a.dtype) for a in args]
    types = [t.mlir_type for t in outs]
    if len(types) > 1:
        result_type = llvm.StructType.get_literal(types)
    else:
        result_type = types[0] if types else None
    result = llvm.inline_asm(
        result_type,
        [a.ir_value(loc=loc, ip=ip) for a in args],
        text,
        ",".join(constraints),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if len(types) > 1:
        parts: list[ir.Value] = [
            llvm.extractvalue(t, result, [i], loc=loc, ip=ip) for i, t in enumerate(types)
        ]
    else:
        parts = [result] if types else []
    return tuple(t(p) for t, p in zip(outs, parts, strict=True))
