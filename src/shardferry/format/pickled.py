"""Reads pickles as plain records, without ever calling or importing what they name.

A pickle is a program. Python's own interpreter of it calls whatever it names, reserves memory by an index that is in
the file, and hashes keys that can take ages. This one knows the few instructions that dataclasses, tuples, numbers
and text are made of; every global must be one of those expected, and calling it makes a record that keeps what it is
given. Dictionaries are lists of pairs. It takes time and memory in proportion to the file.

The instructions are those of Python's `pickletools`, protocols 2 to 5.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# What hostile instructions make Python raise here; none of it is this module's own error.
_FAILURES = (LookupError, TypeError, ValueError, AttributeError, struct.error)


class BadPickleError(ValueError):
    """The bytes are no pickle of what is expected."""


@dataclass(frozen=True, slots=True)
class Named:
    """A class, function or constant that a pickle names: `module.name`."""

    name: str


@dataclass(slots=True, eq=False)
class Record:
    """An object of a pickle.

    Attributes:
        name: `module.name` of what was called to make it; `"persistent"` for what is kept elsewhere.
        arguments: What that was called with.
        state: What was set on it afterwards: mostly `Pairs` of its attributes.
    """

    name: str
    arguments: tuple[Any, ...]
    state: Any = None

    def attribute(self, name: str) -> Any:  # noqa: ANN401 - a pickle holds anything
        """Return an attribute that was set; None if it was not."""
        pairs = self.state if isinstance(self.state, Pairs) else ()
        return next((value for key, value in pairs if type(key) is str and key == name), None)


class Pairs(list[tuple[Any, Any]]):
    """A dictionary as its pairs, in order."""


def read_pickle(data: bytes, allowed: Callable[[str], bool]) -> Any:  # noqa: ANN401 - a pickle holds anything
    """Return what a pickle describes: plain values, `Record`, `Named`, and `Pairs` for dictionaries.

    Args:
        data: The pickle.
        allowed: Whether a global, `module.name`, is expected.

    Raises:
        BadPickleError: If it is no pickle, or names anything else.
    """
    machine = _Machine(data, allowed)
    try:
        return machine.run()
    except _FAILURES as error:
        if isinstance(error, BadPickleError):
            raise
        message = f"is no pickle of what is expected: byte {machine.position} makes no sense ({error})"
        raise BadPickleError(message) from error


@dataclass
class _Machine:
    data: bytes
    allowed: Callable[[str], bool]
    position: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self) -> Any:  # noqa: ANN401 - as above
        while True:
            code = self.take(1)
            if code == b".":
                return self.stack.pop()
            step = _STEPS.get(code)
            if step is None:
                raise BadPickleError(
                    f"has an instruction {code!r} at byte {self.position - 1}, which no plain data needs"
                )
            step(self)

    def take(self, count: int) -> bytes:
        start = self.position
        self.position += count
        if self.position > len(self.data):
            raise BadPickleError(f"ends at byte {len(self.data)}, in the middle of an instruction")
        return self.data[start : self.position]

    def number(self, form: str) -> int:
        value: int = struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]
        return value

    def text(self, form: str) -> str:
        return self.take(self.number(form)).decode("utf-8", "surrogatepass")

    def line(self) -> str:
        stop = self.data.index(b"\n", self.position)
        line = self.data[self.position : stop]
        self.position = stop + 1
        return line.decode()

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop_tuple(self, count: int) -> tuple[Any, ...]:
        if count > len(self.stack):
            raise BadPickleError(f"takes {count} values at byte {self.position} where there are {len(self.stack)}")
        values = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return values

    def pop_marked(self) -> list[Any]:
        values, self.stack = self.stack, self.marks.pop()
        return values

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if not self.allowed(full):
            raise BadPickleError(f"names {full[:200]!r}, which has no place in it")
        self.push(Named(full))

    def call(self) -> None:
        function, arguments = self.pop_tuple(2)
        if not isinstance(function, Named) or type(arguments) is not tuple:
            raise BadPickleError(f"calls what is no function at byte {self.position}")
        self.push(Record(function.name, arguments))

    def build(self) -> None:
        (state,) = self.pop_tuple(1)
        target = self.stack[-1]
        if not isinstance(target, Record):
            raise BadPickleError(f"sets attributes of what has none at byte {self.position}")
        target.state = state

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise BadPickleError(f"appends to what is no list at byte {self.position}")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Record) and target.name == "collections.OrderedDict":
            target.state = target.state if isinstance(target.state, Pairs) else Pairs()
            target = target.state
        if not isinstance(target, Pairs):
            raise BadPickleError(f"sets items of what is no dictionary at byte {self.position}")
        target.extend(zip(values[::2], values[1::2], strict=True))


def _persistent(machine: _Machine) -> None:
    (key,) = machine.pop_tuple(1)
    machine.push(Record("persistent", key if type(key) is tuple else (key,)))


def _global_of_stack(machine: _Machine) -> None:
    module, name = machine.pop_tuple(2)
    if type(module) is not str or type(name) is not str:
        raise BadPickleError(f"names something by no text at byte {machine.position}")
    machine.name(module, name)


def _integer(machine: _Machine) -> None:
    machine.push(int.from_bytes(machine.take(machine.number("B")), "little", signed=True))


def _remember(machine: _Machine, index: int) -> None:
    machine.memo[index] = machine.stack[-1]


_STEPS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": lambda m: _ignore(m.take(1)),  # PROTO
    b"\x95": lambda m: _ignore(m.take(8)),  # FRAME
    b"(": _Machine.mark,
    b"0": lambda m: _ignore(m.pop_tuple(1)),  # POP
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),  # noqa: FBT003 - NEWTRUE
    b"\x89": lambda m: m.push(False),  # noqa: FBT003 - NEWFALSE
    b"K": lambda m: m.push(m.number("B")),  # BININT1
    b"M": lambda m: m.push(m.number("H")),  # BININT2
    b"J": lambda m: m.push(m.number("i")),  # BININT
    b"\x8a": _integer,  # LONG1
    b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),  # BINFLOAT
    b"\x8c": lambda m: m.push(m.text("B")),  # SHORT_BINUNICODE
    b"X": lambda m: m.push(m.text("I")),  # BINUNICODE
    b"\x8d": lambda m: m.push(m.text("Q")),  # BINUNICODE8
    b"C": lambda m: m.push(m.take(m.number("B"))),  # SHORT_BINBYTES
    b"B": lambda m: m.push(m.take(m.number("I"))),  # BINBYTES
    b")": lambda m: m.push(()),
    b"\x85": lambda m: m.push(m.pop_tuple(1)),  # TUPLE1
    b"\x86": lambda m: m.push(m.pop_tuple(2)),
    b"\x87": lambda m: m.push(m.pop_tuple(3)),
    b"t": lambda m: m.push(tuple(m.pop_marked())),
    b"]": lambda m: m.push([]),
    b"}": lambda m: m.push(Pairs()),
    b"a": lambda m: m.append(list(m.pop_tuple(1))),  # APPEND
    b"e": lambda m: m.append(m.pop_marked()),  # APPENDS
    b"s": lambda m: m.set_items(list(m.pop_tuple(2))),  # SETITEM
    b"u": lambda m: m.set_items(m.pop_marked()),  # SETITEMS
    b"\x94": lambda m: _remember(m, len(m.memo)),  # MEMOIZE
    b"q": lambda m: _remember(m, m.number("B")),  # BINPUT
    b"r": lambda m: _remember(m, m.number("I")),  # LONG_BINPUT
    b"h": lambda m: m.push(m.memo[m.number("B")]),  # BINGET
    b"j": lambda m: m.push(m.memo[m.number("I")]),  # LONG_BINGET
    b"c": lambda m: m.name(m.line(), m.line()),  # GLOBAL
    b"\x93": _global_of_stack,  # STACK_GLOBAL
    b"R": _Machine.call,  # REDUCE
    b"\x81": _Machine.call,  # NEWOBJ
    b"b": _Machine.build,
    b"Q": _persistent,  # BINPERSID
}


def _ignore(_: object) -> None:
    pass
