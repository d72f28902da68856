"""PTX instructions to steps: the emitter, with which the handlers of instructions write."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .ptx import Address, Instruction, Kernel, Operand, Pair
from .steps import (
    BANK,
    BITS,
    CLASS_BANK,
    CLASS_LETTERS,
    LETTER,
    NARROW,
    SPECIAL,
    Accesses,
    Constant,
    Effect,
    Pure,
    literal,
)


class Unknown(Exception):
    """The emitter met a form it does not know; it becomes NotImplementedError when executed."""


@dataclass(frozen=True, slots=True)
class Handler:
    """What writes the steps of an instruction, from as many operands as it has parameters."""

    write: Callable[..., None]
    fewest: int
    most: int


def registry(handlers: dict[str, Handler]) -> Callable[..., Callable[[Callable[..., None]], None]]:
    """A decorator that enters a function `(emitter, *operands)` for the opcodes it is given."""

    def op(*heads: str) -> Callable[[Callable[..., None]], None]:
        def register(write: Callable[..., None]) -> None:
            _, *operands = inspect.signature(write).parameters.values()
            fixed = [p for p in operands if p.kind is p.POSITIONAL_OR_KEYWORD]
            most = len(fixed) if len(fixed) == len(operands) else 1 << 30
            handler = Handler(write, sum(p.default is p.empty for p in fixed), most)
            handlers.update(dict.fromkeys(heads, handler))

        return register

    return op


# A ufunc over sources in order: it can write its result in place.
_DIRECT = re.compile(r"(\w+)\(\{0\}(?:, \{1\}(?:, \{2\})?)?((?:, \w+=[\w']+)*)\)")
_PLACEHOLDER = re.compile(r"\{\w\*?:([^}]*)\}")


class Emitter:
    """Appends the steps of one block's instructions to `steps`; `fall` is the block behind it.

    A handler takes the dot parts of the opcode one by one. A part that it leaves is one it does not
    know, and with it the instruction.
    """

    def __init__(
        self,
        kernel: Kernel,
        handlers: dict[str, Handler],
        unread: Collection[str],
        steps: list[Pure | Effect],
        fall: int,
    ) -> None:
        self.kernel, self.handlers, self.steps = kernel, handlers, steps
        self.unread = unread  # registers that are named but once
        self.fall = fall if fall < len(kernel.blocks) else -1
        self.registers = kernel.registers
        self.head = ""
        self.parts: list[str] = []  # those not taken yet
        self.site = -1
        self.first = True  # of the block: only that instruction can find lanes missing
        self.guard: tuple[str, bool] | None = None

    def instruction(self, ins: Instruction) -> None:
        self.first, self.site = self.site < 0, ins.index
        self.head, *self.parts = ins.parts
        self.guard = (ins.predicate, ins.negated) if ins.predicate else None
        before = len(self.steps)
        try:
            handler = self.handlers[self.head]
            if not handler.fewest <= len(ins.operands) <= handler.most:
                raise Unknown
            handler.write(self, *ins.operands)
            if self.parts:
                raise Unknown
        except (Unknown, LookupError, TypeError, ValueError):  # the form does not fit
            del self.steps[before:]
            self.effect(f"unknown({ins.index})")

    # Parts of the opcode -------------------------------------------------------------------------

    def type(self) -> str:
        """Takes the last part."""
        return self.parts.pop()

    def next(self) -> str:
        """Takes the first part."""
        return self.parts.pop(0)

    def flag(self, name: str) -> bool:
        """Takes a part if it is there."""
        if name in self.parts:
            self.parts.remove(name)
            return True
        return False

    def one_of(self, *names: str) -> str:
        """Takes the one of several parts that is there, or none: ''."""
        return next((name for name in names if self.flag(name)), "")

    def need(self, *names: str) -> str:
        """Takes the one of several parts that has to be there."""
        found = self.one_of(*names)
        if not found:
            raise Unknown
        return found

    def ignore(self, names: Collection[str] = (), prefixes: tuple[str, ...] = ()) -> None:
        """Takes all parts that change nothing here."""
        self.parts = [
            p for p in self.parts if p not in names and not (prefixes and p.startswith(prefixes))
        ]

    # Steps ---------------------------------------------------------------------------------------

    def pure(
        self, code: str, type_: str, dst: Operand, srcs: Sequence[tuple[str, Operand]] = ()
    ) -> None:
        """Gives `dst` the value of `code` over the sources {0}, {1}, ...: (type, operand) each."""
        if dst == "_":
            return
        if not isinstance(dst, str) or dst not in self.registers:
            raise Unknown
        sources = tuple(self.source(t, v) for t, v in srcs)
        letter = self.destination(type_, dst)
        name, direct, options = code, False, ""
        if letter == LETTER.get(type_) and any(kind != "c" for kind, _ in sources):
            found = _DIRECT.fullmatch(code)
            if found and isinstance(getattr(np, found.group(1), None), np.ufunc):
                name, direct, options = found.group(1), True, found.group(2)
        self.steps.append(Pure(name, direct, letter, dst, sources, self.guard, self.site, options))

    def effect(
        self,
        *lines: str,
        writes: Iterable[str] = (),
        jump: bool = False,
        asynchronous: bool = False,
    ) -> None:
        """Lines of code; their placeholders say what they read, and write in front of ` <- `."""
        reads: list[str] = []
        written = list(writes)
        for line in lines:
            target, arrow, value = line.partition(" <- ")
            if arrow:
                written += _PLACEHOLDER.findall(target)
            for names in _PLACEHOLDER.findall(value if arrow else line):
                reads += names.split()
        self.steps.append(
            Effect(
                list(lines),
                tuple(reads),
                tuple(written),
                self.guard,
                self.site,
                jump,
                asynchronous,
            )
        )

    def access(
        self,
        name: str,
        where: Operand,
        arguments: str,
        bits: int,
        registers: Sequence[Operand],
        view: str | None = None,
        signed: bool = False,
    ) -> bool:
        """An access that may run as one with others; False if an operand is no plain register."""
        if not isinstance(where, Address) or where.coords or where.base not in self.registers:
            return False
        if any(r not in self.registers for r in registers):
            return False
        base, values = str(where.base), tuple(map(str, registers))
        if view is None:
            letters = {self.source(f"b{bits}", value)[0] for value in values}
        else:
            letters = {CLASS_LETTERS[self.registers[value]][signed] for value in values}
        (letter,) = letters
        if ":" in letter or len(set(values)) < len(values):
            return False
        reads, writes = ((base, *values), ()) if view is None else ((base,), values)
        self.steps.append(
            Accesses(
                [],
                reads,
                writes,
                self.guard,
                self.site,
                kind=(name, arguments, self.registers[base], letter, view),
                parts=[(reads, writes, self.site)],
                columns=([base], [where.offset], list(values)),
                name=name,
                arguments=arguments,
                letters=("u" if self.registers[base] == "b32" else "U", letter),
                view=view,
            )
        )
        return True

    def together(self, call: str) -> list[str]:
        """The line that waits for other lanes, by a call that says whether they are here."""
        return [f"if not {call}: return STALL"] if self.first else []

    # Operands ------------------------------------------------------------------------------------

    def destination(self, type_: str, register: str) -> str:
        """The letter as which a register takes a value of the type."""
        cls = self.registers[register]
        letter = LETTER.get(type_, "")
        if letter and BANK[letter] == CLASS_BANK.get(cls):
            return letter
        return CLASS_LETTERS[cls][1 if type_.startswith("s") else 0]

    def source(self, type_: str, value: Operand) -> tuple[str, object]:
        """(letter, register), ("c", Constant) or ("n", name) of an operand read as the type."""
        if isinstance(value, (int, float)):
            return ("c", Constant(LETTER.get(type_, "u"), self.immediate(type_, value)))
        if not isinstance(value, str):
            raise Unknown
        if value in self.registers:
            cls, letter = self.registers[value], LETTER.get(type_, "")
            if letter and BANK[letter] == CLASS_BANK.get(cls):
                return (letter, value)
            return (f"{CLASS_LETTERS[cls][0]}:{NARROW[type_]}", value)
        if special := SPECIAL.fullmatch(value):
            return ("n", special.group(1).replace(".", "_"))
        if value in self.kernel.shared:
            return ("n", f"shared_address('{value}')")
        if value in self.kernel.local:
            return ("c", Constant(LETTER[type_], self.kernel.local[value]))
        for param in self.kernel.params:
            if param.name == value:
                return ("n", f"param_address({param.offset})")
        if value == "WARP_SZ":
            return ("c", Constant("u", 32))
        raise Unknown

    @staticmethod
    def immediate(type_: str, value: int | float) -> int | float:
        """A literal as the type has it."""
        letter = LETTER.get(type_, "")
        if letter in ("f", "F", "e", "X"):
            if isinstance(value, int) or letter in ("e", "X"):
                raise Unknown
            return value
        if isinstance(value, float):  # a float's bits in an integer-typed move
            return int(np.float32(value).view(np.uint32))
        if letter == "p":
            return bool(value)
        bits = BITS[type_]
        low = value & ((1 << bits) - 1)
        signed = letter in ("j", "i", "I") or type_ == "s8"
        return low - (1 << bits) if signed and low >> (bits - 1) else low

    def text(self, type_: str, value: Operand) -> str:
        """An operand inside the line of an effect."""
        kind, found = self.source(type_, value)
        if isinstance(found, Constant):
            return literal(found.value)
        if kind == "n":
            return str(found)
        base, _, cast = kind.partition(":")
        return f"{{{base}:{found}}}" + (f".astype({cast})" if cast else "")

    def words(self, bits: int, values: Iterable[Operand]) -> str:
        """A tuple of operands of the same width."""
        return "".join(["(", *(f"{self.text(f'b{bits}', v)}, " for v in values), ")"])

    def condition(self, value: Operand, hole: str = "") -> tuple[str, Operand]:
        """What to write for a predicate that may be negated, in place of `hole`; its operand."""
        if isinstance(value, str) and value.startswith("!"):
            return f"~{hole}", value[1:]
        return hole, value

    def predicate(self, value: Operand) -> str:
        """A predicate, perhaps negated, inside the line of an effect."""
        mark, value = self.condition(value)
        return mark + self.text("pred", value)

    def address(self, operand: Operand) -> str:
        """The address between brackets."""
        if not isinstance(operand, Address) or operand.coords:
            raise Unknown
        base = operand.base
        if isinstance(base, int):
            return str(base + operand.offset)
        wide = self.registers.get(base) != "b32"
        text = self.text("u64" if wide else "u32", base)
        if operand.offset == 0:
            return text
        return f"{text} {'+' if operand.offset > 0 else '-'} {abs(operand.offset)}"

    def shared_address(self, operand: Operand, space: str) -> str:
        """The address of shared memory, its generic form brought to the shared window's."""
        if space == "generic":
            return f"(({self.address(operand)}) & 0xFFFFFFFF)"
        if space not in ("shared", "cluster"):
            raise Unknown
        return self.address(operand)

    def space(self) -> str:
        """Takes the first state space: shared (the CTA's), cluster, global, ... or generic."""
        found = next((part for part in self.parts if part in _SPACES), "")
        return _SPACES[found] if self.flag(found) else "generic"

    def halves(self, operand: Operand) -> tuple[Operand, ...]:
        """The two b64 registers of a b128 operand, low first."""
        if isinstance(operand, str) and self.registers.get(operand) == "b128":
            return f"{operand}.lo", f"{operand}.hi"
        if isinstance(operand, tuple) and len(operand) == 2:
            return operand
        raise Unknown

    @staticmethod
    def results(values: dict[str, str]) -> list[str]:
        """Lines that give registers ('letter:register') their values; `_` takes none."""
        return [
            f"{{{place}}} <- {value}" for place, value in values.items() if not place.endswith(":_")
        ]

    @staticmethod
    def pair(operand: Operand) -> tuple[str, str]:
        """The two destinations of `a|b`; the second is `_` where there is one."""
        if isinstance(operand, Pair):
            return operand.first, operand.second
        if not isinstance(operand, str):
            raise Unknown
        return operand, "_"


_SPACES = {
    "shared": "shared",
    "shared::cta": "shared",
    "shared::cluster": "cluster",
    "global": "global",
    "local": "local",
    "param": "param",
    "param::entry": "param",
}


def vector(operand: Operand) -> tuple[Operand, ...]:
    """The elements of `{a, b}`, or the one operand."""
    return operand if isinstance(operand, tuple) else (operand,)
