"""PTX to the numbers that `native/machine.cpp` runs.

Only what Triton and nvcc write is understood; anything else is an error that names the instruction.
"""

import re
import struct
from dataclasses import dataclass, field

LANES = 32
_SPECIALS = (
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    "%laneid",
)
_SPACES = {"global": 0, "shared": 1, "shared::cta": 1, "param": 2, "local": 3}
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
_MODIFIERS = {"relaxed", "gpu", "ca", "cg", "cs", "nc", "volatile"}
_SHUFFLES = {"bfly": 0, "idx": 1, "up": 2, "down": 3}
_REDUCTIONS = {"add": 0, "max": 1, "min": 2}
_ATOMICS = {"relaxed": (0, 0), "release": (1, 0), "acquire": (0, 1), "acq_rel": (1, 1)}
"""Whether an atomic releases, and whether it acquires."""
_STATEMENT = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"\.(shared|local)\s+(?:\.align\s+(\d+)\s+)?\.\w(\d+)\s+([$\w]+)(?:\[(\d*)\])?"
)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.\w(\d+)[^,\n]*?(\w+_param_\d+)(?:\[(\d+)\])?"
)
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+))?")


class Unknown(ValueError):
    """PTX that is not understood."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of the machine: numbers by name, and the operands of per-lane operations."""

    lanes: dict[str, tuple[int, str]]
    specials: dict[str, int]


@dataclass(slots=True)
class Program:
    name: str = ""
    parameters: list[tuple[int, int]] = field(default_factory=list)
    parameter_bytes: int = 0
    threads: int = 0
    shared_bytes: int = 0  # static; dynamic shared memory follows
    local_bytes: int = 0  # of a lane
    words: int = 0
    constants: list[tuple[int, int, int]] = field(default_factory=list)
    specials: list[tuple[int, int]] = field(default_factory=list)
    code: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    operands: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


class Parser:
    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._program = Program()
        self._places: dict[tuple[str, bool], int] = {}
        self._wide: dict[str, bool] = {}
        self._symbols: dict[str, int] = {}
        self._labels: dict[str, int] = {}
        self._jumps: dict[int, str] = {}

    def parse(self, text: str, kernel: str = r"\w+") -> Program:
        """Parse the kernel whose name a pattern matches, by default the first."""
        program = self._program
        entry = re.search(rf"\.entry\s+({kernel})\s*\(", text)
        if entry is None:
            raise Unknown(f"no kernel {kernel}")
        program.name = _plain(entry[1])
        opening = text.index("{", entry.start())
        # Nothing but other kernels and debug information follows the kernel's last brace.
        body = text[opening + 1 : text.index("\n}", opening)]
        files = dict(re.findall(r'\.file\s+(\d+)\s+"(?:[^"]*/)?([^"]+)"', text))
        # Of the module, the variables of shared memory; of other kernels, nothing.
        outside = re.sub(r"\n\{.*?\n\}", "", text[: entry.start()], flags=re.DOTALL)
        self._head(text[entry.start() : opening])
        self._declare(f"{outside}\n{body}")
        program.lines.append("?")
        line, begun = 0, ""
        for raw in body.split("\n"):
            code, _, comment = raw.partition("//")
            code = code.strip()
            if code.startswith(".loc"):
                # Triton writes the place as a comment. Line 0 is what the compiler added.
                where = comment.split("[")[0].strip() or _place_of(code, files)
                if where:
                    program.lines.append(where)
                    line = len(program.lines) - 1
                continue
            *statements, begun = f"{begun} {code}".split(";")
            for statement in statements:
                self._statement(statement, line)
        # A label may be last.
        self._statement(begun, line)
        for at, label in self._jumps.items():
            if label not in self._labels:
                raise Unknown(f"{program.name}: the label {label} is nowhere")
            program.operands[at] = self._labels[label]
        branch, leave = (self._operations.specials[name] for name in ("bra", "ret"))
        for number, meeting in enumerate(meetings(self._after(branch, leave))):
            if program.code[number][0] == branch:
                program.operands[program.code[number][3] + 1] = meeting
        return program

    def _after(self, branch: int, leave: int) -> list[list[int]]:
        """Return the successors of each instruction; the end has the number after the last."""
        program = self._program
        successors = []
        for number, (operation, guard, _, operands, _) in enumerate(program.code):
            target = [program.operands[operands]] if operation == branch else []
            ends = [len(program.code)] if operation == leave else []
            falls = [number + 1] if guard >= 0 or operation not in (branch, leave) else []
            successors.append([*target, *ends, *falls])
        return successors

    def _head(self, head: str) -> None:
        program = self._program
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:,\s*(\d+),\s*(\d+))?", head)
        if threads is None or {threads[2], threads[3]} - {None, "1"}:
            raise Unknown(f"{program.name}: needs a number of threads along one axis")
        program.threads = int(threads[1])
        offset = 0
        for align, bits, name, count in _PARAMETER.findall(head):
            size = _BYTES[bits] * int(count or 1)
            offset = _aligned(offset, int(align or size))
            program.parameters.append((offset, size))
            self._symbols[name] = offset
            offset += size
        program.parameter_bytes = offset

    def _declare(self, text: str) -> None:
        """Give the variables of shared and local memory their places, dynamic ones the last."""
        program = self._program
        sizes = {"shared": 0, "local": 0}
        for space, align, bits, name, count in sorted(
            _VARIABLE.findall(text), key=lambda x: f"{x[3]}[]" in text
        ):
            begin = _aligned(sizes[space], int(align or _BYTES[bits]))
            self._symbols[name] = begin
            sizes[space] = begin + _BYTES[bits] * int(count or f"{name}[]" not in text)
        program.shared_bytes, program.local_bytes = sizes["shared"], sizes["local"]

    def _statement(self, statement: str, line: int) -> None:
        while label := re.match(r"[\s{}]*([$\w]+):", statement):
            self._labels[label[1]] = len(self._program.code)
            statement = statement[label.end() :]
        statement = statement.lstrip(" \t{}").rstrip()
        if not statement:
            return
        if statement.startswith("."):
            declared = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.+)", statement)
            if declared:
                for name in declared[2].split(","):
                    self._wide[name.strip().split("<")[0]] = declared[1].endswith("64")
            elif not (_VARIABLE.match(statement) or statement.startswith(".pragma")):
                raise Unknown(f"{self._program.name}: {statement}")
            return
        if (matched := _STATEMENT.fullmatch(statement)) is None:
            raise Unknown(f"{self._program.name}: {statement}")
        negated, guard, name, text = matched.groups()
        position = self._register(guard, "p") if guard else -1
        operation, operands = self._instruction(name, _operands(text), statement)
        begin = len(self._program.operands)
        if operation == self._operations.specials["bra"]:
            self._jumps[begin] = operands[0]
            operands = [0, 0]
        self._program.operands += operands
        self._program.code.append((operation, position, int(bool(negated)), begin, line))

    def _instruction(self, name: str, operands: list, statement: str) -> tuple[int, list]:
        special = self._operations.specials
        parts = name.split(".")
        match parts:
            case ["bra", *_]:
                return special["bra"], operands
            case ["ret"]:
                return special["ret"], []
            case ["ld" | "st", *_]:
                return special[parts[0]], self._access(parts, operands)
            case ["cp", "async", "commit_group"]:
                return special["cp.async.commit_group"], []
            case ["cp", "async", "wait_group"]:
                return special["cp.async.wait_group"], [int(operands[0])]
            case ["cp", "async", "wait_all"]:
                raise Unknown(f"{self._program.name}: {statement}")
            case ["cp", "async", *_]:
                source = self._value(operands[3], "r") if len(operands) > 3 else -1
                to, origin = self._address(operands[0]), self._address(operands[1])
                return special["cp.async"], [*to, *origin, int(operands[2], 0), source]
            case ["ldmatrix" | "stmatrix", *_]:
                words, address = operands if parts[0] == "ldmatrix" else reversed(operands)
                words = words if isinstance(words, list) else [words]
                places = [self._value(word, "r") for word in words]
                transposed = int("trans" in parts)
                return special[parts[0]], [
                    len(places),
                    transposed,
                    *self._address(address),
                    *places,
                ]
            case ["mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", x, y, "f32"] if x == y:
                places = [self._value(word, "r") for words in operands for word in words]
                return special["mma"], [int(x == "bf16"), *places]
            case ["wgmma", "mma_async", "sync", "aligned", shape, "f32", x, y] if x == y:
                return special["wgmma"], self._async_product(shape, x, operands)
            case ["wgmma", "fence" | "commit_group" as action, "sync", "aligned"]:
                return special[f"wgmma.{action}"], []
            case ["wgmma", "wait_group", "sync", "aligned"]:
                return special["wgmma.wait_group"], [int(operands[0])]
            case ["fence", "proxy", "async", *_]:
                return special["fence.proxy.async"], []
            case ["shfl", "sync", mode, "b32"]:
                to, origin, by, limit, _ = operands
                to, _, is_inside = to.partition("|")
                numbers = [self._value(x, "r") for x in (to, origin, by, limit)]
                inside = self._value(is_inside, "p") if is_inside else -1
                return special["shfl"], [*numbers[:2], _SHUFFLES[mode], *numbers[2:], inside]
            case ["redux", "sync", mode, "s32" | "b32"]:
                to, origin = (self._value(x, "r") for x in operands[:2])
                return special["redux"], [to, origin, _REDUCTIONS[mode]]
            case ["atom", "global", "gpu", semantics, "add", "u32" | "s32"] if (
                semantics in _ATOMICS
            ):
                to, address, by = operands
                places = [*self._address(address), self._value(to, "r"), self._value(by, "r")]
                return special["atom"], [*_ATOMICS[semantics], *places]
            case ["bar", "sync" | "arrive" as action]:
                places = [self._value(x, "r") for x in (*operands, "0")[:2]]
                return special["bar.sync"], [*places, int(action == "sync")]
            case ["cvta", *_, "u64"]:
                # Addresses are those of their space: without one, a load is an error.
                return self._of_lanes("mov.b64", operands, statement)
            case ["bar", "warp", "sync"]:
                return special["bar.warp.sync"], []
        return self._of_lanes(name, operands, statement)

    def _of_lanes(self, name: str, operands: list, statement: str) -> tuple[int, list[int]]:
        for operand, suffix in zip(operands, ("unpacked", "packed"), strict=False):
            if isinstance(operand, list):
                name += f".{suffix}{len(operand)}"
        flat = [
            x for operand in operands for x in (operand if isinstance(operand, list) else [operand])
        ]
        signature = self._operations.lanes.get(name, (0, ""))[1]
        if signature.endswith("r") and name.startswith("cvt") and self._is_wide(flat[-1], False):
            # The source of a conversion may be wider than its type.
            name += ".wide"
        if name not in self._operations.lanes:
            raise Unknown(f"{self._program.name}: unknown instruction {name}: {statement}")
        number, kinds = self._operations.lanes[name]
        if len(kinds) != len(flat):
            raise Unknown(f"{self._program.name}: {statement}")
        return number, [self._value(x, kind) for x, kind in zip(flat, kinds, strict=True)]

    def _access(self, parts: list[str], operands: list) -> list[int]:
        if unknown := set(parts[1:-1]) - {*_SPACES, "v2", "v4", *_MODIFIERS}:
            raise Unknown(f"{self._program.name}: {'.'.join(parts)}: {', '.join(unknown)}")
        space = next((_SPACES[part] for part in parts if part in _SPACES), None)
        if space is None:
            raise Unknown(f"{self._program.name}: {'.'.join(parts)} has no state space")
        address, values = operands if parts[0] == "st" else reversed(operands)
        values = values if isinstance(values, list) else [values]
        kind, size = parts[-1][0], _BYTES[parts[-1][1:]]
        registers = []
        for value in values:
            wide = self._is_wide(value, size == 8)
            registers += [self._value(value, "R" if wide else "r"), int(wide)]
        return [space, size, len(values), int(kind == "s"), *self._address(address), *registers]

    def _async_product(self, shape: str, dtype: str, operands: list) -> list[int]:
        columns = int(shape.removeprefix("m64n").removesuffix("k16"))
        to, left, right, adds, *flags = operands
        in_registers = isinstance(left, list)
        scales, across = flags[:2], [int(x) for x in flags[2:]]
        if scales != ["1", "1"]:
            raise Unknown(f"{self._program.name}: a negated product")
        across_a, across_b = (0, across[0]) if in_registers else across
        held = [self._value(x, "r") for x in left] if in_registers else [-1] * 4
        descriptor = -1 if in_registers else self._value(left, "R")
        return [
            *(columns, int(dtype == "bf16"), int(in_registers), across_a, across_b),
            *(descriptor, self._value(right, "R"), self._value(adds, "p"), *held),
            *(self._value(x, "r") for x in to),
        ]

    def _address(self, operand: str) -> list[int]:
        inside = operand.strip("[] ")
        base, _, offset = (x.strip() for x in inside.partition("+"))
        wide = self._is_wide(base, False)
        return [self._value(base, "R" if wide else "r"), int(wide), int(offset or "0", 0)]

    def _is_wide(self, operand: str, otherwise: bool) -> bool:
        if not operand.startswith("%"):
            return otherwise
        return self._wide.get(operand.rstrip("0123456789"), otherwise)

    def _value(self, operand: str, kind: str) -> int:
        """Return the place of an operand: a register, a special one, or a constant put into one."""
        wide = kind == "R"
        if operand == "_":
            return self._place(f"_{wide}", wide)
        if operand in _SPECIALS:
            key = (operand, False)
            if key not in self._places:
                self._program.specials.append(
                    (self._place(operand, False), _SPECIALS.index(operand))
                )
            return self._places[key]
        is_declared = operand in self._wide and operand not in self._symbols
        if operand.startswith("%") or is_declared:
            return self._register(operand, kind)
        return self._constant(operand, wide)

    def _register(self, name: str, kind: str) -> int:
        wide = self._wide.get(name, self._wide.get(name.rstrip("0123456789")))
        if wide is None or wide != (kind == "R"):
            raise Unknown(f"{self._program.name}: {name} is not a register of kind {kind}")
        return self._place(name, wide)

    def _place(self, name: str, wide: bool) -> int:
        key = (name, wide)
        if key not in self._places:
            words = self._program.words + (wide and self._program.words % 2)
            self._places[key] = words * LANES
            self._program.words = words + 1 + wide
        return self._places[key]

    def _constant(self, operand: str, wide: bool) -> int:
        key = (f"constant {operand}", wide)
        if key not in self._places:
            value = self._number(operand) & (2**64 - 1)
            self._program.constants.append((self._place(key[0], wide), int(wide), value))
        return self._places[key]

    def _number(self, operand: str) -> int:
        if operand in self._symbols:
            return self._symbols[operand]
        if operand.startswith(("0f", "0d")):
            return int(operand[2:], 16)
        try:
            return int(operand.rstrip("U"), 0)
        except ValueError:
            raise Unknown(f"{self._program.name}: {operand} is no number") from None


def _aligned(offset: int, size: int) -> int:
    return -(-offset // size) * size


def _plain(name: str) -> str:
    """The name of a kernel without namespaces, types and values, which C++ writes behind it."""
    mangled = name.removeprefix("_ZN").removeprefix("_Z")
    while mangled != name and (length := re.match(r"\d+", mangled)):
        end = length.end() + int(length[0])
        name, mangled = mangled[length.end() : end], mangled[end:]
        if not mangled[:1].isdigit():
            break
    return name


def _place_of(location: str, files: dict[str, str]) -> str:
    """A line of nvcc's; of an inlined function, with the line that calls it."""
    matched = _LOCATION.match(location)
    if matched is None or matched[2] == "0":
        return ""
    file, line, column, outer_file, outer_line = matched.groups()
    where = f"{files.get(file, file)}:{line}:{column}"
    return f"{where}, in {files.get(outer_file, '')}:{outer_line}" if outer_file else where


def _operands(text: str) -> list:
    operands: list = []
    for group, single in re.findall(r"\{([^}]*)\}|([^,{}]+)", text):
        if group:
            operands.append([x.strip() for x in group.split(",")])
        elif single.strip():
            operands.append(single.strip())
    return operands


def encode(value: float | int, size: int, floating: bool) -> bytes:
    if floating:
        return struct.pack("<d" if size == 8 else "<f", value)
    return (int(value) & (2 ** (8 * size) - 1)).to_bytes(size, "little")


# Where the lanes of a warp reconverge after a divergent branch.


def meetings(after: list[list[int]]) -> list[int]:
    """Return the immediate post-dominator of each instruction: the first one on every path."""
    end = len(after)
    before: list[list[int]] = [[] for _ in range(end + 1)]
    for number, targets in enumerate(after):
        for target in targets:
            before[target].append(number)
    order = _postorder(before, end)
    rank = {node: number for number, node in enumerate(order)}
    meeting = {end: end}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            reachable = [target for target in after[node] if target in meeting]
            common = reachable[0]
            for target in reachable[1:]:
                common = _common(common, target, rank, meeting)
            changed |= meeting.get(node) != common
            meeting[node] = common
    return [meeting.get(number, end) for number in range(end)]


def _common(a: int, b: int, rank: dict[int, int], meeting: dict[int, int]) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = meeting[a]
        while rank[b] < rank[a]:
            b = meeting[b]
    return a


def _postorder(before: list[list[int]], end: int) -> list[int]:
    """Return the instructions from which the end is reachable; the end is last."""
    order, stack, seen = [], [(end, iter(before[end]))], {end}
    while stack:
        node, remaining = stack[-1]
        target = next((x for x in remaining if x not in seen), None)
        if target is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(target)
            stack.append((target, iter(before[target])))
    return order
