"""Instructions that are inlined into kernels. They are prefetch, fence, fused multiply-add, keys in records,
bits of numbers, touching of pages, and arrays by address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fleetrun.aliases import Callback
from trainers.kernels.compiled import Keys, Scalar, compiled


def _at(work: Callable[..., object]) -> Callable[..., object]:
    """Return the code of an instruction with the arguments (array, index, ...).

    It is `work(builder, place, ...)` with the address of array[index], and returns the result or nothing.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> object:
        array, index, *others = arguments
        view = context.make_array(signature.args[0])(context, builder, value=array)
        result = work(builder, builder.gep(view.data, [index]), *others)
        return context.get_dummy_value() if signature.return_type is types.void else result

    return build


def _prefetch(typingctx: object, array: types.Type, index: types.Type) -> object:

    def work(builder: Any, place: object) -> None:
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]  # numba's
        place = builder.bitcast(place, cgutils.voidptr_t)
        builder.call(function, [place, word(0), word(3), word(1)])  # for reading, into all caches, as data

    return types.void(array, index), _at(work)


def _fence(typingctx: object) -> object:

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> object:
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), build


_KEY = ir.IntType(64).as_pointer()


def _key_at(typingctx: object, array: types.Type, index: types.Type) -> object:
    return types.int64(array, index), _at(
        lambda builder, place: builder.load(builder.bitcast(place, _KEY), align=4)
    )


def _set_key(typingctx: object, array: types.Type, index: types.Type, key: object) -> object:
    return types.void(array, index, types.int64), _at(
        lambda builder, place, key: builder.store(key, builder.bitcast(place, _KEY), align=4)
    )


def _bits_of(typingctx: object, value: object) -> object:
    return types.uint32(types.float32), lambda _, builder, __, given: builder.bitcast(
        given[0], ir.IntType(32)
    )


def _float_of(typingctx: object, bits: object) -> object:
    return types.float32(types.uint32), lambda _, builder, __, given: builder.bitcast(
        given[0], ir.FloatType()
    )


def _touch(typingctx: object, array: types.Type, index: types.Type) -> object:
    zero = ir.IntType(64)(0)  # compilers drop simpler ways to write the current value
    return types.void(array, index), _at(
        lambda builder, place: builder.cmpxchg(place, zero, zero, "monotonic", "monotonic")
    )


def _fma(typingctx: object, first: object, second: object, third: object) -> object:
    single = types.float32
    return single(single, single, single), lambda _, builder, __, given: builder.fma(*given)


def _pointer(typingctx: object, address: object) -> object:
    return types.voidptr(types.int64), lambda _, builder, __, given: builder.inttoptr(
        given[0], cgutils.voidptr_t
    )


prefetch = cast(Callable[[object, object], None], intrinsic(_prefetch))
"""prefetch(array, index) requests the cache line of array[index]. It is a hint and never a fault."""

fence = cast(Callback, intrinsic(_fence))
"""Complete all reads and writes before the fence ahead of all later ones, also as seen by another thread."""

fma = cast(Callable[[object, object, object], Any], intrinsic(_fma))
"""fma(a, b, c) = a * b + c in float32, rounded once."""

key_at = cast(Callable[[object, object], Any], intrinsic(_key_at))
"""key_at(array, index) returns the int64 in the two float32 from array[index] on."""

set_key = cast(Callable[[object, object, object], None], intrinsic(_set_key))
"""set_key(array, index, key) writes this int64."""

bits_of = cast(Callable[[object], Any], intrinsic(_bits_of))
"""bits_of(value) returns the bits of a float32 as uint32."""

float_of = cast(Callable[[object], Any], intrinsic(_float_of))
"""float_of(bits) returns the float32 with these bits."""

touch = cast(Callable[[object, object], None], intrinsic(_touch))
"""touch(array, index) writes the current value of array[index], an int64, in one indivisible step."""


carray = cast(Callable[..., Any], numba.carray)  # type: ignore[attr-defined]
pointer = cast(Callable[[object], Any], intrinsic(_pointer))
"""pointer(address) is for `carray`. Arrays are passed by address, because kernels accept no lists of arrays.
"""

_PAGE = 4096 // 8  # words of the smallest page


@compiled
def touch_pages(words: Keys, start: Scalar, stop: Scalar) -> None:
    """Get memory for the words [start, stop) and keep their values, even if other threads change them
    meanwhile.
    """
    for place in range(start, stop, _PAGE):
        touch(words, place)
