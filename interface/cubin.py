"""Registers and local memory of the kernels in a cubin, read from its ELF sections.

A cubin is a little-endian ELF64 file. Its `.nv.info` section is a list of attributes, each
{u8 format; u8 attribute; u16 size or value} and, for format 4, `size` bytes of payload; for the two
attributes read here the payload is {u32 symbol index, u32 value}. Found by comparing with
`ptxas -v`; the tests compare them again.

The code of a kernel is in `.text.NAME`, 16 bytes an instruction, whose lowest 12 bits say which
(sm_70 to sm_90; found by comparing with nvdisasm).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_REGISTERS, _STACK = 0x2F, 0x11  # attribute numbers in .nv.info
_SIZED = 4  # attribute format: a payload follows
_SYMTAB = 2  # section type
_INSTRUCTION_BYTES = 16
_OPCODE = 0xFFF
_LDL, _STL = 0x983, 0x387  # loads and stores of local memory
_WARPGROUP, _DEPBAR = 0x9C5, 1 << 47  # waits for products of a warpgroup; others only announce them


@dataclass(frozen=True)
class Usage:
    """What one kernel takes of an SM, per thread."""

    registers: int
    local_bytes: int  # stack frame: register spills live there, so 0 means no spill
    local_instructions: int  # that load or store local memory
    product_waits: int  # more than were asked for: ptxas has serialised the products


def usage(cubin: bytes) -> dict[str, Usage]:
    """Read each kernel's register and local-memory use.

    Args:
        cubin: the ELF image ptxas wrote.

    Returns:
        Usage by kernel name.

    Raises:
        ValueError: not a 64-bit ELF image.
    """
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"got {cubin[:5]!r} at the start; needs a 64-bit ELF image")
    table, entry_bytes, count, names_index = (
        *struct.unpack_from("<Q", cubin, 40),
        *struct.unpack_from("<HHH", cubin, 58),
    )
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_bytes) for i in range(count)
    ]

    def text(strings: int, offset: int) -> str:
        start = headers[strings][4] + offset
        return cubin[start : cubin.index(b"\0", start)].decode()

    symbols: list[str] = []
    info = b""
    local: dict[str, int] = {}
    waits: dict[str, int] = {}
    for name, kind, _, _, offset, size, link, _, _, stride in headers:
        if kind == _SYMTAB:
            starts = range(offset, offset + size, stride)
            symbols = [text(link, struct.unpack_from("<I", cubin, at)[0]) for at in starts]
            continue
        section, content = text(names_index, name), cubin[offset : offset + size]
        if section == ".nv.info":
            info = content
        elif section.startswith(".text."):
            kernel = section.removeprefix(".text.")
            codes = [
                struct.unpack_from("<Q", content, at)[0]
                for at in range(0, len(content), _INSTRUCTION_BYTES)
            ]
            local[kernel] = sum(code & _OPCODE in (_LDL, _STL) for code in codes)
            waits[kernel] = sum(
                code & _OPCODE == _WARPGROUP and code & _DEPBAR > 0 for code in codes
            )

    found: dict[int, dict[str, int]] = {_REGISTERS: {}, _STACK: {}}
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _SIZED:
            continue
        if attribute in found:
            symbol, value = struct.unpack_from("<II", info, at)
            found[attribute][symbols[symbol]] = value
        at += size
    return {
        kernel: Usage(registers, found[_STACK].get(kernel, 0), local[kernel], waits[kernel])
        for kernel, registers in found[_REGISTERS].items()
    }
