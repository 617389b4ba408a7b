"""What a compiled program sends between devices."""

import collections
import math
import re
from typing import Any

_COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\(")
_BYTES = {"f32": 4, "s32": 4, "bf16": 2, "s8": 1, "pred": 1}


def collectives(compiled: Any) -> tuple[collections.Counter[str], int]:
    """How many of each kind, and the bytes that one device receives, from the compiled program."""
    count, received = collections.Counter(), 0
    for line in compiled.as_text().splitlines():
        if match := _COLLECTIVE.search(line):
            count[match[2]] += 1
            arrays = [array for array in re.findall(r"(\w+)\[([\d,]*)\]", match[1]) if array[0] != "u32"]
            # The result of an asynchronous start holds the operands too (and contexts, u32).
            for dtype, shape in arrays[len(arrays) // 2 if match[3] else 0 :]:
                received += _BYTES[dtype] * math.prod(int(n) for n in shape.split(",") if n)
    return count, received
